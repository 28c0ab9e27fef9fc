"""Whole runs over each wire that `loadgen serve --wire` offers: what is untrue is named, and nothing else is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from servers.serve.between import KINDS
from tests.faults import wires
from tests.servers.reader import running

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can acknowledge at once"),
]
BACKENDS = ("openai", "tgi")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", wires.EXPECTED)
def test_each_wire_is_told(tmp_path: Path, kind: str, backend: str) -> None:
    told = wires.EXPECTED[kind]
    with running(tmp_path, backend, ttft_ms=10, itl_ms=5, wire=told.wire) as server:
        report = wires.report(server.server.url, backend, tmp_path / "run")
    invalid = {code for code, severity in wires.severities(report).items() if severity == "invalid"}
    assert invalid & wires.OF_WIRES == ({told.finding} if told.finding else set()), report["verdict"]
    assert report.get("ttft_of_delivery", False) == bool(told.finding)
    assert (report["metrics"]["tpot_ms"]["n"] > 0) == (report["metrics"]["itl_ms"]["n"] > 0) == told.paced
    assert (report["goodput"]["request_goodput"] is not None) == told.paced


@pytest.mark.parametrize("kind", [kind for kind, told in wires.EXPECTED.items() if told.finding])
def test_quick_acks_end_what_waits_for_them_alone(tmp_path: Path, kind: str) -> None:
    told = wires.EXPECTED[kind]
    with running(tmp_path, "openai", ttft_ms=10, itl_ms=5, wire=told.wire) as server:
        report = wires.report(server.server.url, "openai", tmp_path / "run", "--quick-acks")
    assert (wires.severities(report).get(told.finding) != "invalid") == told.quick


def test_all_that_the_server_offers_are_tested() -> None:
    assert set(wires.EXPECTED) == set(KINDS)
