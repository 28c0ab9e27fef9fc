"""Real proxies in front of the embedded server, by default and mended: benchmarks/wire.py sees what each does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import wire

from loadgen import cli
from tests.servers.reader import running

REQUESTS = 24
TRIED = [part for part in wire.PARTS if part.program in ("haproxy", "lighttpd")]


@pytest.mark.processes
@pytest.mark.parametrize("part", TRIED, ids=lambda part: part.name)
def test_a_proxy_that_bends_times_is_named_and_a_mended_one_is_not(part: wire.Part, tmp_path: Path) -> None:
    if wire.program_of(part) is None:
        pytest.skip(f"{part.program} is not installed; benchmarks/proxies.sh unpacks it")
    times: dict[str, Any] = {"ttft_ms": wire.TTFT_MS, "itl_ms": wire.ITL_MS}
    with running(tmp_path, "openai", **times) as server, wire.behind(part, server.port, tmp_path) as port:
        assert cli.invoke(wire.command(port, tmp_path / "run", REQUESTS, "--concurrency", "8")) in (0, 4)
    report: Any = json.loads((tmp_path / "run/report.json").read_text())
    codes = {finding["code"] for finding in report["verdict"]["findings"]}
    ttft_ms, tpot_ms = (report["metrics"][name]["p50"] for name in ("ttft_ms", "tpot_ms"))
    if part.more:
        assert not codes & {"BUFFERED", "DELAYED_ACK"}
        assert ttft_ms < (wire.TTFT_MS + wire.TOKENS * wire.ITL_MS) / 2 and tpot_ms == pytest.approx(
            wire.ITL_MS, rel=0.1
        )
    else:
        assert "BUFFERED" in codes and not report["verdict"]["valid"] and tpot_ms is None
