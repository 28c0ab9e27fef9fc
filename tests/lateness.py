"""How late this machine wakes a process that sleeps: what a test that bounds a time must allow for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

STEP_S = 0.002
# Findings that a machine which is busy with other work may cause; every other one is the client's or the server's.
OF_A_BUSY_MACHINE = {"SEND_LAG", "LOOP_LAG", "RECEIVE_LAG", "CLIENT_CPU"}


class Lateness:
    """Milliseconds by which each of many short sleeps was too long, from those of the machine and nobody else."""

    def __init__(self) -> None:
        self._late_ms: list[float] = []
        self._over = threading.Event()

    def watch(self) -> None:
        while not self._over.is_set():
            begun = time.monotonic()
            time.sleep(STEP_S)
            self._late_ms.append((time.monotonic() - begun - STEP_S) * 1000)

    def end(self) -> None:
        self._over.set()

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
    """A verdict of invalid is the machine's fault only as far as sleeping processes were as late as the client."""
    invalid = {each["code"] for each in report["verdict"]["findings"] if each["severity"] == "invalid"}
    assert invalid <= OF_A_BUSY_MACHINE, report["verdict"]
    if invalid:
        assert report["client"]["loop_lag_p99_ms"] <= 3 * lateness.worst_ms, (report["client"], lateness.worst_ms)
