"""A cgroup with a limit on memory, of version 2 or 1: the kernel's OOM killer, for tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited(limit_bytes: int) -> Iterator[Callable[[], None]]:
    """A cgroup of that memory, without swap, and what puts the calling process into it. Skips where none can be."""
    root, memory, swap = CGROUPS, "memory.max", {"memory.swap.max": 0}
    if "memory" not in _text(CGROUPS / "cgroup.subtree_control").split():
        root, memory, swap = CGROUPS / "memory", "memory.limit_in_bytes", {"memory.memsw.limit_in_bytes": limit_bytes}
    own = root / f"training-probe-test-{os.getpid()}"
    try:
        own.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup that limits memory can be made: {error.strerror}")
    try:
        (own / memory).write_text(str(limit_bytes))
        for name, most_bytes in swap.items():
            if (own / name).exists():
                (own / name).write_text(str(most_bytes))
        yield lambda: _append(own / "cgroup.procs")
    finally:
        own.rmdir()


def _append(processes: Path) -> None:
    processes.write_text(str(os.getpid()))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
