"""Memory over time, in worlds whose every block is known: when it was taken, when given back, in which phase."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from training_probe.memory.blocks import (
    CATEGORIES,
    MAX_POINTS,
    Block,
    PhaseStart,
    allocations,
    blocks,
    categorised,
    category,
    thinned,
)

S = 1_000_000_000
# Two steps, a phase a second from second 10 on.
PHASES = ["forward", "backward", "optimizer", "forward", "backward", "optimizer", "end"]
SPANS = [PhaseStart((10 + place) * S, phase) for place, phase in enumerate(PHASES)]


def at(second: float) -> int:
    return int(second * S)


def test_a_block_is_what_it_was_taken_for_and_how_long_it_stayed() -> None:
    lives: dict[tuple[float, float | None], str] = {
        (9.5, None): "model and engine",
        (9.5, 10.5): "model and engine",
        (10.2, 10.8): "temporary",
        (10.2, 11.5): "activations",
        (10.2, None): "activations",
        (11.2, 11.8): "temporary",
        (11.2, 12.5): "gradients",
        (12.2, 12.8): "temporary",
        (12.2, None): "optimizer states",
        (12.2, 13.5): "optimizer states",
        (13.0, 14.0): "activations",  # from the first moment of one phase to that of the next
        (14.2, 17.0): "gradients",
        (15.2, 16.2): "optimizer states",
        (16.2, None): "temporary",  # after the last step
    }
    for (start, end), expected in lives.items():
        block = Block(at(start), None if end is None else at(end), 1)
        assert category(block, SPANS) == expected, (start, end)
    assert category(Block(-1, at(11), 1), SPANS) == "model and engine"


def test_takes_and_returns_become_blocks() -> None:
    events = [
        (at(9), 100, 5), (at(10), 200, 7),
        (at(11), 100, -5), (at(11.5), 100, 3),  # the address is taken again
        (at(12), 300, -4),  # was there before the recording
        (at(13), 200, -7),
    ]  # fmt: skip
    assert sorted(blocks(events), key=lambda block: (block.start_ns, block.size)) == [
        Block(-1, at(12), 4), Block(at(9), at(11), 5), Block(at(10), at(13), 7), Block(at(11.5), None, 3),
    ]  # fmt: skip


def event(name: str, time_ns: int = 0, size: int = 0, device: str = "cpu", children: list[Any] | None = None) -> Any:
    fields = SimpleNamespace(ptr=7, alloc_size=size, device=device)
    return SimpleNamespace(
        tag=SimpleNamespace(name=name), start_time_ns=time_ns, extra_fields=fields, children=children or []
    )


def test_allocations_are_found_wherever_they_hang() -> None:
    tree = [
        event("TorchOp", children=[event("Allocation", 3, -8), event("TorchOp", children=[event("Allocation", 2, 8)])]),
        event("Allocation", 1, 5, device="cuda:0"),
        event("Allocation", 4, 1),
    ]
    assert allocations(tree, "cpu") == [(2, 7, 8), (3, 7, -8), (4, 7, 1)]
    assert allocations(tree, "cuda") == [(1, 7, 5)]


def test_a_step_as_it_is_in_the_book() -> None:
    """16 B of weights; 8 of activations that the backward pass turns into 4 of gradients; 2 of states that stay."""
    found = [
        Block(at(10.1), at(11.9), 8),
        Block(at(10.2), at(10.3), 1),
        Block(at(11.5), at(13), 4),
        Block(at(12.5), None, 2),
    ]
    line = categorised(found, SPANS, built_bytes=16)
    assert line.categories == list(CATEGORIES)
    assert line.time_s == [0, *(round(t, 9) for t in (0.1, 0.2, 0.3, 1.5, 1.9, 2.5, 3.0))]
    assert dict(zip(line.categories, line.bytes, strict=True)) == {
        "model and engine": [16] * 8,
        "activations": [0, 8, 8, 8, 8, 0, 0, 0],
        "temporary": [0, 0, 1, 0, 0, 0, 0, 0],
        "gradients": [0, 0, 0, 0, 4, 4, 4, 0],
        "optimizer states": [0, 0, 0, 0, 0, 0, 2, 2],
    }
    assert line.steps_s == [0, 3]


def test_accumulated_micro_batches_are_one_step() -> None:
    phases = ["forward", "backward", "forward", "backward", "optimizer", "forward", "backward", "optimizer", "end"]
    line = categorised([], [PhaseStart(place * S, phase) for place, phase in enumerate(phases)], 0)
    assert line.steps_s == [0, 5]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], int]:
    """Allocations (time, address, bytes) of distinct times, and what was there before, of which some is given back."""
    lives = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 1000)), max_size=40))
    before = draw(st.lists(st.integers(1, 1000), max_size=5))
    order = draw(st.permutations(range(2 * len(lives) + len(before))))
    times = [at(9.9) + place * 6 * S // max(1, len(order)) for place in order]
    events = []
    for address, (ends, size) in enumerate(lives):
        taken, given_back = sorted(times[2 * address : 2 * address + 2])
        events.append((taken, address, size))
        if ends:
            events.append((given_back, address, -size))
    events += [
        (time, 10_000 + n, -size) for n, (time, size) in enumerate(zip(times[2 * len(lives) :], before, strict=True))
    ]
    return sorted(events), sum(before)


@given(worlds(), st.integers(0, 10**6))
def test_categories_add_up_to_what_the_allocator_held(world: tuple[list[tuple[int, int, int]], int], more: int) -> None:
    events, before = world
    line = categorised(blocks(events), SPANS, before + more)
    assert line.time_s == sorted(line.time_s) and line.time_s[0] == 0
    total, replayed = before + more, [before + more]
    for _, _, size in events:
        total += size
        replayed.append(total)
    assert [sum(levels) for levels in zip(*line.bytes, strict=True)] == replayed
    assert all(level >= 0 for levels in line.bytes for level in levels)


@given(st.integers(1, 3 * MAX_POINTS), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_thinned_line_keeps_its_ends_and_its_peak(length: int, seed: int) -> None:
    chance = random.Random(seed)
    levels = [[chance.randrange(1000), chance.randrange(1000)] for _ in range(length)]
    kept = thinned(levels)
    assert kept == sorted(set(kept)) and len(kept) <= MAX_POINTS + 1
    assert kept[0] == 0 and kept[-1] == length - 1
    assert max(sum(levels[place]) for place in kept) == max(map(sum, levels))
    if length <= MAX_POINTS // 2:
        assert len(kept) == length
