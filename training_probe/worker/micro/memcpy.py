"""Copies between host and device as PyTorch makes them, through more memory than the cache holds.

Page-locked and device-to-device copies are work in the stream, and timed there. A copy of pageable memory keeps the
host busy, so the host's clock counts, from the call to its end: PyTorch waits there for the copy's last part.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from training_probe.points import Copy, Measured, Task
from training_probe.worker.micro.timing import (
    SERVER_CACHE_BYTES,
    Launch,
    attempted,
    cache_bytes,
    in_turns,
    lacking,
    rotation,
    timed,
)


def measure(task: Task, device: torch.device) -> Iterator[Measured]:
    for point in task.points:
        if isinstance(point, Copy):
            yield attempted(point, partial(_measured, point, task, device))


def _measured(point: Copy, task: Task, device: torch.device) -> Measured:
    return timed(point, launch_of(point, device), task, in_stream=point.pinned or point.route == "d2d")


def launch_of(point: Copy, device: torch.device) -> Launch:
    """What copies once, from and to other memory each time. Raises OutOfMemoryError."""
    source, target = (device if side == "d" else torch.device("cpu") for side in point.route.split("2"))
    cache = cache_bytes(device) if source == target else max(cache_bytes(device), SERVER_CACHE_BYTES)
    count = rotation(2 * point.size_bytes, cache)
    if why := lacking((source, target).count(torch.device("cpu")) * count * point.size_bytes):
        raise torch.OutOfMemoryError(why)
    sources, targets = (_pool(point, place, count) for place in (source, target))

    def copy(a: Tensor, b: Tensor) -> None:
        b.copy_(a, non_blocking=point.pinned)

    return in_turns(partial(copy, sources[at], targets[at]) for at in range(count))


def _pool(point: Copy, place: torch.device, count: int) -> Tensor:
    """(count, bytes), every page touched."""
    pinned = point.pinned and place.type == "cpu"
    return torch.empty((count, point.size_bytes), dtype=torch.uint8, device=place, pin_memory=pinned).fill_(1)
