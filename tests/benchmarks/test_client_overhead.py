"""The benchmark's own instruments: the watcher against a program that knows its cost, the errors on made-up stamps."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import client_overhead  # noqa: E402
from side_by_side import report, watch  # noqa: E402
from side_by_side.clients import Reported, Shape  # noqa: E402

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
needs_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not shutil.which("taskset"), reason="watches through /proc, pins by taskset"
)

# Burns CPU in a grandchild of its own session and says how much: the parent's share is noise beside it.
BURN = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ballast = bytearray(b"x") * 60_000_000
        while time.process_time() < 0.4: pass
        print(time.process_time(), flush=True)
        os._exit(0)
    os.wait()
    os._exit(0)
os.wait()
"""


@needs_linux
def test_the_watcher_counts_what_a_grandchild_burns(tmp_path: Path) -> None:
    log = tmp_path / "log"
    core = min(os.sched_getaffinity(0))
    watched = watch.watch([sys.executable, "-c", BURN], core, log, {}, timeout_s=60)
    burnt_ns = float(log.read_text()) * 1e9
    assert watched.exit_code == 0
    assert watched.life_cpu_ns >= burnt_ns
    assert watched.cpu_between_ns(watched.started_ns, int(watched.at_ns[-1])) == pytest.approx(burnt_ns, rel=0.3)
    assert watched.peak_rss_bytes() > 60_000_000
    assert watched.peak_rss_bytes(0, watched.started_ns) == 0


@needs_linux
def test_the_watcher_ends_a_program_that_does_not(tmp_path: Path) -> None:
    watched = watch.watch(["sleep", "600"], min(os.sched_getaffinity(0)), tmp_path / "log", {}, timeout_s=0.2)
    assert watched.exit_code == -9


def truth(n: int) -> client_overhead.Truth:
    """Requests received 1 ms apart, first event after 200 ms, then every 20 ms, three events each."""
    received_ns = np.arange(n) * 1_000_000 + 5_000_000_000
    events = [start + np.array([200, 220, 240]) * 1_000_000 for start in received_ns.tolist()]
    return client_overhead.Truth([f"r-{row}" for row in range(n)], received_ns, events)


def test_errors_are_what_was_put_in() -> None:
    """Sent 2 ms before it was received, every arrival 0.5 ms late: in an order of its own, joined by id."""
    real = truth(100)
    order = np.random.default_rng(0).permutation(100).tolist()
    sent_ns = real.received_ns[order] - 2_000_000
    arrivals_ns = [real.events[row] + 500_000 for row in order]
    reported = Reported(
        ttft_ms=np.array([each[0] for each in arrivals_ns] - sent_ns) / 1e6,
        gaps_ms=None,
        duration_s=1.0,
        ids=[f"r-{row}" for row in order],
        sent_ns=sent_ns,
        arrivals_ns=arrivals_ns,
    )
    found = client_overhead.errors_ms(real, reported)
    assert found["ttft_error_p50_ms"] == pytest.approx(2.5)
    assert found["ttft_error_p99_ms"] == pytest.approx(2.5)
    assert found["lag_p50_ms"] == found["lag_p99_ms"] == found["first_late_p99_ms"] == pytest.approx(0.5)


def test_without_ids_distributions_are_compared() -> None:
    found = client_overhead.errors_ms(truth(10), Reported(np.full(10, 230.0), None, 1.0))
    assert found == {"ttft_error_p50_ms": pytest.approx(30.0), "ttft_error_p99_ms": pytest.approx(30.0)}


def test_lost_events_are_no_result() -> None:
    real = truth(2)
    reported = Reported(np.full(2, 200.0), None, 1.0, ids=real.ids, arrivals_ns=[each[:2] for each in real.events])
    with pytest.raises(client_overhead.Failed, match="another number of events"):
        client_overhead.errors_ms(real, reported)


def test_pacing_finds_the_one_late_request() -> None:
    real = truth(101)
    real.received_ns[50] += 30_000_000  # 1000 requests/s is the grid
    shape = Shape(requests=101, output_tokens=3, ttft_ms=200, gap_ms=20, rate_per_s=1000)
    found = client_overhead.pacing_ms(real, Reported(np.full(101, 200.0), None, 1.0), shape)
    assert found["deviation_p50_ms"] == 0.0
    assert 0 < found["deviation_p99_ms"] <= 30.0


@needs_linux
@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("gcc") or CORES < 2, reason="needs gcc and two cores")
def test_quick_benchmark_measures_us_and_the_floor(tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    command = [sys.executable, str(BENCHMARKS / "client_overhead.py"), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = out.read_text().splitlines()
    rows = [line for line in lines if line.startswith(("| **loadgen**", "| C epoll"))]
    assert len(rows) == 4 and not any("not measured" in row for row in rows), rows
    raw = json.loads(out.with_suffix(".json").read_text())
    assert set(raw["rounds"]["quick"][0]) == {"floor", "loadgen"} and raw["rounds"]["quick"][0]["floor"]["cpu_us"] > 0


def test_the_readme_gets_the_clients_of_others_and_ours(tmp_path: Path) -> None:
    """And keeps all that stands around its table."""
    names = [field.name for field in dataclasses.fields(report.Row)]
    row = report.Row(**dict.fromkeys(names, 2.0))
    readme = tmp_path / "README.md"
    readme.write_text("before\n\n| client | CPU a token, us | old |\n|---|---:|---:|\n| x | 1 | 2 |\n\nafter\n")
    rounds = [{"floor": row, "loadgen": row, "loadgen-kernel": row, "aiperf": "not | installed"}]
    report.write_readme(readme, rounds)
    text = readme.read_text()
    assert text.startswith("before\n\n| client | CPU a token, us |") and text.endswith("|\n\nafter\n")
    assert "| **loadgen** | 2.0 | 2.0 | 2.0 | 1.00 | 2.0 |" in text and "kernel" not in text and "| x |" not in text
    assert "not measured: not / installed" in text
    report.write_readme(readme, rounds)
    assert readme.read_text() == text
    readme.write_text("nothing")
    with pytest.raises(ValueError, match="has no table of clients"):
        report.write_readme(readme, rounds)
