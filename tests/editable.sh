#!/usr/bin/env bash
# Makes this checkout importable in an environment whose packages are there, with its commands and entry points as
# pyproject.toml has them now: seconds, nothing to do when it has not changed. editable.sh VENV
set -euo pipefail
venv=$1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
declared=$(sha256sum <"$root/pyproject.toml")

[ "$(cat "$venv/declared" 2>/dev/null)" != "$declared" ] || exit 0
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable "$root"
echo "$declared" >"$venv/declared"
