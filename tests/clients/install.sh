#!/usr/bin/env bash
# Installs the clients that people ask servers with, and routers, into .venv-clients in the repository root (0.9 GB, a minute, nothing to do
# when they are there), and nginx where there is none (Debian's is unpacked into build/nginx). PYTHON names the interpreter.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$root/.venv-clients
want=$(sha256sum <"$here/requirements.txt")

(cd "$root" && PATH=$PATH:/usr/sbin .ci/unpack build/nginx nginx nginx nginx)
if [ "$(cat "$venv/installed" 2>/dev/null)" != "$want" ]; then
    echo "installing openai, huggingface_hub, text-generation, LiteLLM and two routers into .venv-clients (a minute, once)"
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --requirement "$here/requirements.txt"
    echo "$want" >"$venv/installed"
fi
