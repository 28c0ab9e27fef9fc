#!/usr/bin/env bash
# Makes sure that there is a Prometheus with its promtool. Where none is on the path, Debian's package is unpacked into
# build/prometheus: nothing is installed, so no service starts. Only apt's lists, where they are empty, need root or sudo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=build/prometheus
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi

if { command -v prometheus && command -v promtool; } >/dev/null || [ -x $here/usr/bin/promtool ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "prometheus.sh: put prometheus and promtool on the path (https://prometheus.io/download); this is no Debian." >&2
    exit 1
fi
echo "unpacking Prometheus (Debian's package) into $here"
if [ -z "$(apt-cache --quiet=2 madison prometheus 2>/dev/null)" ]; then
    "${as_root[@]}" apt-get -qq update
fi
rm -rf $here.part
mkdir -p $here.part
(cd $here.part && apt-get -qq -o APT::Sandbox::User="$(id -un)" download prometheus)
dpkg-deb --extract $here.part/prometheus_*.deb $here.part
rm -rf $here $here.part/prometheus_*.deb
mv $here.part $here
