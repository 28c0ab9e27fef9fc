#!/usr/bin/env bash
# Installs the clients that people ask servers with, and routers, into .venv-clients in the repository root (0.9 GB, a
# minute, nothing to do when they are there), Dynamo's frontend and its mock engines into .venv-dynamo (0.5 GB), and nginx
# where there is none (Debian's is unpacked into build/nginx). PYTHON names the interpreter.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)

install() { # NAME LOCK WHAT PIP-ARGUMENTS...
    local venv=$root/.venv-$1 want
    want=$(sha256sum <"$here/$2")
    [ "$(cat "$venv/installed" 2>/dev/null)" = "$want" ] && return
    echo "installing $3 into .venv-$1 (a minute, once)"
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${@:4}" --requirement "$here/$2"
    echo "$want" >"$venv/installed"
}

(cd "$root" && PATH=$PATH:/usr/sbin .ci/unpack build/nginx nginx nginx nginx)
install clients requirements.txt "openai, huggingface_hub, text-generation, LiteLLM and two routers"
install dynamo dynamo.txt "Dynamo without what its planner needs" --no-deps
