"""Whatever lies in a directory of runs, `promtool check metrics` takes the exporter's page."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from loadgen.monitor.exporter import Exporter
from loadgen.rundir import Histogram, MetricFamily, MetricSample
from tests.loadgen.monitor.test_exporter import HOSTILE, HOSTILE_FAMILIES, put
from tests.observability.programs import program

pytestmark = pytest.mark.prometheus

EVIL = "\x1b[31m\u202e\x00\r\ufeff" + HOSTILE
ODD_FAMILIES = [
    MetricFamily("llm_dissect_odd", "gauge", EVIL, [MetricSample(float("1e308"), {"a": EVIL})]),
    MetricFamily("llm_dissect_negative", "counter", "", [MetricSample(-1.0)]),
    MetricFamily("llm_dissect_empty", "histogram", EVIL, histograms=[Histogram([], [0], 0.0)]),
    MetricFamily(
        "llm_dissect_wide", "histogram", "W.", histograms=[Histogram([-1.0, 1e300], [1, 2, 3], -5.0, {"a": EVIL})]
    ),
]


def checked(runs: Path) -> str:
    """What promtool says of the page; 3 is for names that it would choose otherwise."""
    page, _ = Exporter(runs).page()
    done = subprocess.run(
        [program("promtool"), "check", "metrics"], input=page, capture_output=True, timeout=60, check=False
    )
    assert done.returncode in (0, 3), done.stderr.decode()
    return page.decode()


def test_hostile_snapshots(tmp_path: Path) -> None:
    put(tmp_path, "good")
    for number, family in enumerate([*HOSTILE_FAMILIES.values(), *ODD_FAMILIES]):
        put(tmp_path, f"r{number}", families=[family], labels={"model": EVIL})
    page = checked(tmp_path)
    assert 'run_id="good"' in page and "llm_dissect_exporter_broken_snapshots" in page


def test_broken_files(tmp_path: Path) -> None:
    put(tmp_path, "good")
    for number, data in enumerate((b"", b"\x00" * 999, b"{}", b"[" * 9999, b'{"run_id": 1e999}', b"\xff\xfe")):
        (tmp_path / f"b{number}").mkdir()
        (tmp_path / f"b{number}" / "snapshot.json").write_bytes(data)
    assert 'run_id="good"' in checked(tmp_path)
