"""What the processes that training_probe starts have in common: torchrun, their environment, and the signals that end
them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import loadgen.children

THREADS = "OMP_NUM_THREADS"


def torchrun(*, python: str, processes: int, port: int, module: str, directory: Path) -> tuple[str, ...]:
    """The command line of `processes` ranks of `python -m MODULE DIRECTORY` on this machine."""
    return (
        python, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr", "127.0.0.1",
        "--master-port", str(port), "-m", module, str(directory),
    )  # fmt: skip


def environment(ours: Mapping[str, str], ranks: int) -> dict[str, str]:
    """What to add to the environment `ours` of the parent for each of `ranks` processes on this machine: our own
    code's path, and, where the user has not set it, its share of the cores. torchrun would make that one core of all:
    an optimizer that is offloaded to the CPU would then compute on one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = {} if ours.get(THREADS) else {THREADS: str(max(1, cores // ranks))}
    return loadgen.children.environment(ours) | threads


@contextlib.contextmanager
def stopped_by_signals(cancelled: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM end the present run in good order; more of them do not hurry it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: cancelled.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
