"""Processes that run our own code: their environment, in which they import this very copy of the code, everything else
as its user does, and nothing that happens to lie in the working directory; and their end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment `ours` of the parent.

    PYTHONSAFEPATH, because `python -m` looks into the working directory first: a `json.py` there would be imported for
    the standard library's. site-packages is searched anyway, and would hide the standard library from the front.
    """
    root = Path(__file__).resolve().parents[1]
    paths = [] if root.name in ("site-packages", "dist-packages") else [str(root)]
    paths += [path for path in ours.get("PYTHONPATH", "").split(os.pathsep) if path and path not in paths]
    return {"PYTHONSAFEPATH": "1", **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


def load_numpy() -> None:
    """Imports it without the threads of its linear algebra, which nothing here uses and which take as long to start as
    all the rest of it. The environment of what is started, such as a server, stays its user's."""
    with _set(_BLAS_THREADS, os.environ.get(_BLAS_THREADS, "1")):
        import numpy  # noqa: F401


@contextlib.contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    """The environment has it within the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """Processes that multiprocessing spawns within the block begin like that, too; it gives them the parent's path
    once they are up. Signals that stop a run wait until they `leave_stopping_to_parent`: a Ctrl-C goes to all of a
    group, and one that is still importing would end with a traceback."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with _set("PYTHONSAFEPATH", "1"), _set(_BLAS_THREADS, os.environ.get(_BLAS_THREADS, "1")):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def die_with_parent() -> None:
    """From now on the kernel kills this process, which multiprocessing started, as soon as its parent is gone; where
    no kernel does that, and for a parent that has gone before, the process must look itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        os._exit(1)


def leave_stopping_to_parent() -> None:
    """This process, which was started within `spawning`, ignores the signals that stop a run; its parent gets them too,
    and says what is to be done."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


async def ended(process: Process, timeout_s: float) -> None:
    """Waits for a process that was told to end, and kills one that does not."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await process.wait()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
