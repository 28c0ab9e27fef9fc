#!/usr/bin/env bash
# Unpacks Debian's HAProxy and lighttpd into build/proxies, where they are not on the path: nothing is installed, so no
# service starts. Only apt's lists, where they are empty, need root or sudo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
here=build/proxies
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi

if { command -v haproxy && command -v lighttpd; } >/dev/null || [ -x $here/usr/sbin/lighttpd ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "proxies.sh: put haproxy and lighttpd on the path; this is no Debian." >&2
    exit 1
fi
echo "unpacking HAProxy and lighttpd (Debian's packages) into $here"
if [ -z "$(apt-cache --quiet=2 madison haproxy 2>/dev/null)" ]; then
    "${as_root[@]}" apt-get -qq update
fi
rm -rf $here.part
mkdir -p $here.part
(cd $here.part && apt-get -qq -o APT::Sandbox::User="$(id -un)" download haproxy lighttpd)
for package in $here.part/*.deb; do
    dpkg-deb --extract "$package" $here.part
    rm "$package"
done
rm -rf $here
mv $here.part $here
