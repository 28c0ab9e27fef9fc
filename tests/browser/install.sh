#!/usr/bin/env bash
# Makes sure that there are Chromium and its driver (Debian's packages, as root or with sudo, where they are not on the
# path) and axe-core 4.12.1, which is fetched by pip in a package that carries it, into build/axe. pip would also want
# that package's own browser, so nothing is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=build/axe
carrier=axe-playwright-python==0.1.8
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi

if ! { command -v chromium && command -v chromedriver; } >/dev/null; then
    if ! command -v apt-get >/dev/null; then
        echo "install.sh: put chromium and chromedriver on the path; this is no Debian." >&2
        exit 1
    fi
    echo "installing Chromium and its driver (chromium, chromium-driver)"
    "${as_root[@]}" apt-get -qq update
    DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get -qq install --yes --no-install-recommends \
        chromium chromium-driver fonts-dejavu-core >/dev/null
fi
if [ "$(cat $here/carrier 2>/dev/null)" = "$carrier" ]; then
    exit 0
fi
echo "unpacking axe-core ($carrier) into $here"
rm -rf $here.part $here
.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $here.part "$carrier"
.venv/bin/python -m zipfile --extract $here.part/*.whl $here.part
mv $here.part/axe_playwright_python/axe.min.js $here.part/axe.min.js
echo "$carrier" >$here.part/carrier
mv $here.part $here
