#!/usr/bin/env bash
# Installs llm-dissect with Ray into .venv-cluster in the repository root: 0.8 GB, a minute, nothing to do when it is already
# there. PYTHON names the interpreter. The tools that make network and time namespaces are installed too where apt can do
# that (Debian's iproute2, util-linux and iptables).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$root/.venv-cluster
pins=("$root/requirements-dev.txt" "$here/requirements.txt")
want=$(cat "${pins[@]}" | sha256sum | cut -d' ' -f1)

has_tools() { command -v ip >/dev/null && command -v unshare >/dev/null && command -v nsenter >/dev/null; }
# iptables: where Docker has run, a bridge needs a rule of its own.
if ! { has_tools && command -v iptables >/dev/null; } && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "installing iproute2, util-linux and iptables"
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends iproute2 util-linux iptables >/dev/null
fi
if ! has_tools; then
    echo "install.sh: the cluster needs ip, unshare and nsenter, which are not all on this machine; install them (Debian: iproute2 and util-linux)." >&2
    exit 1
fi
if [ "$(cat "$venv/installed" 2>/dev/null)" != "$want" ]; then
    echo "installing Ray into .venv-cluster (a minute, once)"
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes "${pins[@]/#/--requirement=}"
    echo "$want" >"$venv/installed"
fi
"$root/tests/editable.sh" "$venv"
