#!/usr/bin/env bash
# A Prometheus with its promtool: Debian's is unpacked into build/prometheus where there is none on the path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec .ci/unpack build/prometheus "prometheus promtool" "prometheus and promtool (https://prometheus.io/download)" prometheus
