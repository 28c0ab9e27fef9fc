#!/usr/bin/env bash
# Installs the load generators that `make bench` compares with, each into a venv of its own: vLLM's comes with the CPU
# build that the real-vLLM test uses (.venv-vllm), the others go to .venv-peers. About 6 GB and 5 minutes, nothing to do
# when they are there. A tool that cannot be installed is left out, and the benchmark's table says so.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

install() { # NAME PIP-ARGUMENTS...
    local venv=$root/.venv-peers/$1 want="${*:2}"
    [ "$(cat "$venv/installed" 2>/dev/null)" = "$want" ] && return
    echo "installing $1 into .venv-peers (once)"
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv" && "$venv/bin/pip" install --quiet "${@:2}" && echo "$want" > "$venv/installed" ||
        echo "peers.sh: $1 could not be installed, see pip's message above" >&2
}

cd "$root" || exit 1
bash tests/vllm/install.sh
install sglang --no-deps sglang==0.5.23 # the Rust client is one extension module; the rest needs a GPU stack
install aiperf aiperf==0.13.0
install guidellm --constraint tests/vllm/constraints-torch.txt torch guidellm==0.8.1
install sglang-router sglang-router==0.3.2 # no client: benchmarks/wire.py measures through it
