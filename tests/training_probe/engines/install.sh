#!/usr/bin/env bash
# Installs the real training engines for the CPU into .venv-train in the repository root: 2.5 GB, 1 to 2 minutes, nothing
# to do when they are already there. PYTHON names the interpreter (3.11 is what the pins were resolved for).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
venv=$root/.venv-train
deepspeed=0.19.8
pins=("$here/requirements.txt" "$here/constraints-torch.txt")
want=$(echo "deepspeed==$deepspeed" | cat "${pins[@]}" - | sha256sum | cut -d' ' -f1)

if [ "$(cat "$venv/installed" 2>/dev/null)" = "$want" ]; then
    exec "$root/tests/editable.sh" "$venv"
fi
echo "installing the training engines for the CPU into .venv-train (a few minutes, once)"
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
pip() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"
}
if ! pip --requirement "${pins[1]}"; then
    echo "install.sh: pip finds no CPU build of torch; point PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL at PyTorch's CPU wheels and run it again." >&2
    exit 1
fi
pip --requirement "${pins[0]}"
# DeepSpeed has no wheel; its setup.py asks the torch that is there. No kernels are compiled: the CPU needs none of them.
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip --no-build-isolation --no-binary deepspeed "deepspeed==$deepspeed"
"$venv/bin/python" -c "import torch; assert torch.version.cuda is None, 'torch is not the CPU build'"
echo "$want" > "$venv/installed"
"$root/tests/editable.sh" "$venv"
