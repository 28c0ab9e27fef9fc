#!/usr/bin/env bash
# Makes sure that a Docker engine answers: starts dockerd, and installs it first (Debian, as root or with sudo) when it
# is not there. Nothing to do when one answers already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
log=build/dockerd.log
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi

answers() {
    .venv/bin/python -c 'import sys; from backends.docker import problem; sys.exit(problem() or 0)' 2>/dev/null
}

if answers; then
    exit 0
fi
if ! command -v dockerd >/dev/null; then
    echo "installing Docker (docker.io)"
    "${as_root[@]}" apt-get -qq update
    DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get -qq install --yes --no-install-recommends docker.io iptables >/dev/null
fi
for _ in 1 2 3 4 5 6; do # the package may have started it
    if answers; then exit 0; fi
    sleep 0.5
done
mkdir -p build
"${as_root[@]}" setsid dockerd >"$log" 2>&1 </dev/null &
for _ in $(seq 120); do
    if answers; then exit 0; fi
    sleep 0.5
done
echo "engine.sh: the Docker engine does not answer; the end of its log ($log):" >&2
tail -n 20 "$log" >&2
.venv/bin/python -c 'from backends.docker import problem; print(problem())' >&2
exit 1
