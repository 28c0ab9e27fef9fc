#!/usr/bin/env bash
# HAProxy and lighttpd for benchmarks/wire.py: Debian's are unpacked into build/proxies, with the
# libraries that Debian alone has for them, where they are not on the path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .ci/unpack build/proxies "haproxy lighttpd" "haproxy and lighttpd" haproxy lighttpd \
    liblua5.3-0 libopentracing-c-wrapper0 libopentracing1
