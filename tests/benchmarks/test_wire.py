"""Real proxies in front of the embedded server, by default and mended: benchmarks/wire.py sees what each does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import wire

TRIED = [part for part in wire.PARTS if part.program in ("haproxy", "lighttpd")]


@pytest.mark.processes
@pytest.mark.parametrize("part", TRIED, ids=lambda part: part.name)
def test_a_proxy_that_bends_times_is_named_and_a_mended_one_is_not(part: wire.Part, tmp_path: Path) -> None:
    if wire.program_of(part) is None:
        pytest.skip(f"{part.program} is not installed; benchmarks/proxies.sh unpacks it")
    with wire.served(part, tmp_path) as port:
        report: Any = wire.measured(port, tmp_path / "run", "--concurrency", "8")
    codes = {finding["code"] for finding in report["verdict"]["findings"]}
    ttft_ms, tpot_ms = (report["metrics"][name]["p50"] for name in ("ttft_ms", "tpot_ms"))
    if part.more:
        assert not codes & {"BUFFERED", "DELAYED_ACK"}
        assert ttft_ms < (wire.TTFT_MS + wire.TOKENS * wire.ITL_MS) / 2 and tpot_ms == pytest.approx(
            wire.ITL_MS, rel=0.1
        )
    else:
        assert "BUFFERED" in codes and not report["verdict"]["valid"] and tpot_ms is None
