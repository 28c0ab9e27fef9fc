"""The benchmark of traces measures a trace and a load of fixed lengths that ask for the same, in small."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import trace_overhead  # noqa: E402


def test_the_fixed_load_has_the_means_of_the_trace(tmp_path: Path) -> None:
    fixed, trace = trace_overhead.shapes(tmp_path / "trace.jsonl", 200)
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert fixed.requests == trace.requests == len(lines) == 200
    assert fixed.input_tokens == round(sum(line["input_length"] for line in lines) / 200)
    assert trace.tokens == sum(line["output_length"] for line in lines)
    assert abs(fixed.tokens - trace.tokens) <= 100  # the mean is rounded
    assert fixed.trace is None and fixed.rate_per_s == trace.rate_per_s


@pytest.mark.processes
@pytest.mark.skipif(
    not sys.platform.startswith("linux")
    or not shutil.which("taskset")
    or not shutil.which("gcc")
    or len(os.sched_getaffinity(0)) < 2
    or not (trace_overhead.ROOT / ".venv/bin/loadgen").exists(),
    reason="needs Linux with two cores, taskset, gcc and loadgen in .venv",
)
def test_a_small_round(tmp_path: Path) -> None:
    out = tmp_path / "trace.md"
    command = [sys.executable, str(BENCHMARKS / "trace_overhead.py"), "--rounds", "1", "--requests", "20"]
    done = subprocess.run([*command, "--start-requests", "50", "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.with_suffix(".json").read_text())
    (pair,), (start,) = found["rounds"], found["starts"]
    for row in pair.values():
        assert row["cpu_us"] > 0 and row["own_send_lag_max_ms"] >= row["own_send_lag_p99_ms"] >= 0
    assert start["lines"] == 50 and start["start_s"] > 0 and start["rss_life_mb"] >= start["rss_before_mb"] > 0
    assert "| send lag p99 ms |" in out.read_text() and "trace of 50 lines" in out.read_text()
