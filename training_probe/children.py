"""What the processes that training_probe starts have in common: their environment, torchrun, and the signals that end
them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path


def torchrun(*, python: str, processes: int, port: int, module: str, directory: Path) -> tuple[str, ...]:
    """The command line of `processes` ranks of `python -m MODULE DIRECTORY` on this machine."""
    return (
        python, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr", "127.0.0.1",
        "--master-port", str(port), "-m", module, str(directory),
    )  # fmt: skip


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    """What makes the children import this very training_probe, and torch as we would.

    Servers get no PYTHONPATH, being perhaps another Python; the children are our own. The working directory must not
    come before it (PYTHONSAFEPATH), because there may be another copy in it. site-packages is searched anyway, and
    would hide the standard library from the front.
    """
    root = Path(__file__).resolve().parents[1]
    paths = [] if root.name in ("site-packages", "dist-packages") else [str(root)]
    paths += [path for path in ours.get("PYTHONPATH", "").split(os.pathsep) if path and path not in paths]
    return {"PYTHONSAFEPATH": "1", **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


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
