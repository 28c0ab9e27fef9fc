"""How long a checkpoint takes: saved and loaded once, after the timed steps, by the engine's own means.

It holds what trains and the optimizer's state. Its files are on the disk itself before the clock stops, and leave the
page cache before they are read again. Whoever started the process removes them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch.distributed as dist

from training_probe.protocol import CheckpointTimes


@runtime_checkable
class Saves(Protocol):
    """A Stepper that has a checkpoint."""

    def save(self, directory: Path) -> None: ...
    def load(self, directory: Path) -> None: ...


def measure(stepper: Saves, directory: Path, synchronise: Callable[[], None]) -> CheckpointTimes:
    """On every rank, of all of them together."""

    def timed(act: Callable[[], None]) -> float:
        synchronise()
        dist.barrier()
        began = time.perf_counter()
        act()
        synchronise()
        dist.barrier()
        return time.perf_counter() - began

    def save() -> None:
        stepper.save(directory)
        dist.barrier()
        if dist.get_rank() == 0:
            _for_each_file(directory, os.fsync)

    save_s = timed(save)
    if dist.get_rank() == 0:
        _for_each_file(directory, lambda file: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED))
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return CheckpointTimes(bytes=size, save_s=save_s, load_s=timed(lambda: stepper.load(directory)))


def _for_each_file(directory: Path, act: Callable[[int], None]) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                act(file.fileno())
