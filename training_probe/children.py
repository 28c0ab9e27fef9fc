"""What the processes that training_probe starts have in common: torchrun, and the signals that end them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path


def torchrun(*, python: str, processes: int, port: int, module: str, directory: Path) -> tuple[str, ...]:
    """The command line of `processes` ranks of `python -m MODULE DIRECTORY` on this machine."""
    return (
        python, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr", "127.0.0.1",
        "--master-port", str(port), "-m", module, str(directory),
    )  # fmt: skip


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
