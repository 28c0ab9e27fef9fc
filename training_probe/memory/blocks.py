"""Memory over the first steps, block by block: from what an allocator took and gave back to a figure's lines. Pure.

A block belongs to a category by when it is taken and when it is given back, which holds for every engine:

- "model and engine": there before the first step;
- "optimizer states": taken in an optimizer phase and still there when that phase is over;
- "gradients": taken in a backward pass and kept beyond it;
- "activations": taken in a forward pass and kept beyond it;
- "temporary": given back in the phase it was taken in.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple

from training_probe.protocol import Timeline

CATEGORIES = ("model and engine", "optimizer states", "gradients", "activations", "temporary")
MAX_POINTS = 4000  # of a figure; peaks are kept
_KEPT = {"forward": "activations", "backward": "gradients", "optimizer": "optimizer states"}


class Block(NamedTuple):
    """One allocation. end_ns: None for one that outlives the recording."""

    start_ns: int
    end_ns: int | None
    size: int


class PhaseStart(NamedTuple):
    """One phase, from `start_ns` to the next one's start."""

    start_ns: int
    phase: str


def allocations(tree: Iterable[Any], device_type: str) -> list[tuple[int, int, int]]:
    """(time ns, address, bytes) of what was taken (positive) and given back (negative), in the order of time. tree: the
    event tree of torch's profiler."""
    changes: list[tuple[int, int, int]] = []
    waiting = list(tree)
    while waiting:
        node = waiting.pop()
        waiting += node.children
        if node.tag.name == "Allocation":
            fields = node.extra_fields
            if str(fields.device).startswith(device_type):
                changes.append((node.start_time_ns, fields.ptr, fields.alloc_size))
    return sorted(changes)


def blocks(events: Iterable[tuple[int, int, int]]) -> list[Block]:
    """Allocations with what ended them. What is given back without having been taken was there before: it starts at
    -1."""
    open_at: dict[int, tuple[int, int]] = {}
    ended: list[Block] = []
    for time_ns, address, size in events:
        if size > 0:
            open_at[address] = (time_ns, size)
        else:
            start_ns, taken = open_at.pop(address, (-1, -size))
            ended.append(Block(start_ns, time_ns, taken))
    return ended + [Block(start_ns, None, size) for start_ns, size in open_at.values()]


def category(block: Block, spans: list[PhaseStart]) -> str:
    """See the head of this file."""
    starts = [span.start_ns for span in spans]
    if block.start_ns < starts[0]:
        return CATEGORIES[0]
    place = bisect_right(starts, block.start_ns) - 1
    ended = len(spans) if block.end_ns is None else bisect_right(starts, block.end_ns) - 1
    return "temporary" if ended == place else _KEPT.get(spans[place].phase, "temporary")


def categorised(all_blocks: list[Block], spans: list[PhaseStart], built_bytes: int) -> Timeline:
    """Bytes of every category over time."""
    origin = spans[0].start_ns
    changes: list[tuple[int, int, int]] = []
    index = {name: place for place, name in enumerate(CATEGORIES)}
    for block in all_blocks:
        place = index[category(block, spans)]
        if block.start_ns >= 0:
            changes.append((block.start_ns, place, block.size))
        if block.end_ns is not None:
            changes.append((block.end_ns, place, -block.size))
    changes.sort()
    level = [0] * len(CATEGORIES)
    level[0] = built_bytes
    times, levels = [0.0], [list(level)]
    for time_ns, place, size in changes:
        level[place] = max(0, level[place] + size)
        times.append(max(0.0, (time_ns - origin) / 1e9))
        levels.append(list(level))
    kept = thinned(levels)
    starts = [span.start_ns for before, span in zip([PhaseStart(0, "optimizer"), *spans], spans, strict=False)
              if span.phase == "forward" and before.phase == "optimizer"]  # fmt: skip
    return Timeline(
        categories=list(CATEGORIES),
        time_s=[times[at] for at in kept],
        bytes=[[levels[at][place] for at in kept] for place in range(len(CATEGORIES))],
        steps_s=[(start - origin) / 1e9 for start in starts],
    )


def thinned(levels: list[list[int]]) -> list[int]:
    """Which points a figure needs: of every stretch its first point and its highest."""
    stride = math.ceil(2 * len(levels) / MAX_POINTS)
    kept: set[int] = set()
    for start in range(0, len(levels), stride):
        stretch = range(start, min(start + stride, len(levels)))
        kept |= {start, max(stretch, key=lambda at: sum(levels[at]))}
    return sorted(kept | {len(levels) - 1})
