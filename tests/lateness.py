"""How late this machine is for whoever sleeps and then has a little to do: what a test of times must allow for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.rundir import records

SLEEP_S, WORK_S = 0.004, 0.0005
# Findings that a machine which is busy with other work may cause; every other one is the client's or the server's.
OF_A_BUSY_MACHINE = {"SEND_LAG", "LOOP_LAG", "RECEIVE_LAG", "CLIENT_CPU"}


class Lateness:
    """By how many milliseconds short sleeps with a little work behind each took too long: what the machine did to them,
    and nobody else. Of the whole block, or of the time in which a run had requests under way; `stall_ms` is always the
    worst of the whole block, since a stall that strikes the run may miss the control just then."""

    def __init__(self) -> None:
        self._at_ns: list[int] = []
        self._late_ms: list[float] = []
        self._over = threading.Event()
        self.stall_ms = 0.0

    def watch(self) -> None:
        while not self._over.is_set():
            begun_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
            time.sleep(SLEEP_S)
            while time.thread_time_ns() - cpu_ns < WORK_S * 1e9:
                pass
            now_ns = time.monotonic_ns()
            self._at_ns.append(now_ns)
            late_ms = (now_ns - begun_ns) / 1e6 - 1000 * (SLEEP_S + WORK_S)
            self._late_ms.append(late_ms)
            self.stall_ms = max(self.stall_ms, late_ms)

    def end(self) -> None:
        self._over.set()

    def during(self, run: Path) -> Lateness:
        """That of the time between t = 0 of a run on this machine and its last reply."""
        t0_ns = records.read_header(run).t0_monotonic_ns
        end_ns = t0_ns + int(records.read(run)[0].done_ns.max())
        part = Lateness()
        part._late_ms = [ms for at, ms in zip(self._at_ns, self._late_ms, strict=True) if t0_ns <= at <= end_ns]
        part.stall_ms = self.stall_ms
        return part

    @property
    def mean_ms(self) -> float:
        return float(np.mean(self._late_ms))

    @property
    def worst_ms(self) -> float:
        return max(self._late_ms)

    def percentile_ms(self, q: float) -> float:
        return float(np.percentile(self._late_ms, q))


@contextlib.contextmanager
def measured_lateness() -> Iterator[Lateness]:
    """Measures during the block, in a thread of the test: the test itself must only wait meanwhile."""
    lateness = Lateness()
    thread = threading.Thread(target=lateness.watch, daemon=True)
    thread.start()
    try:
        yield lateness
    finally:
        lateness.end()
        thread.join()


def assert_valid_unless_the_machine_was_late(report: dict[str, Any], lateness: Lateness) -> None:
    """A verdict of invalid is the machine's fault only as far as the machine was as late as the client. In 13 runs on a
    machine with five jobs for its two cores, the client's lag was at most 1.03 times the worst stall of its block."""
    invalid = {each["code"] for each in report["verdict"]["findings"] if each["severity"] == "invalid"}
    assert invalid <= OF_A_BUSY_MACHINE, report["verdict"]
    if invalid:
        assert report["client"]["loop_lag_p99_ms"] <= 2 * lateness.stall_ms, (report["client"], lateness.stall_ms)
