#!/usr/bin/env bash
# HAProxy and lighttpd for benchmarks/wire.py: Debian's are unpacked into build/proxies where they are not on the path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .ci/unpack build/proxies "haproxy lighttpd" "haproxy and lighttpd" haproxy lighttpd
