"""Requests that are counted together take the same steps as requests that are visited one by one."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import pytest

from backends.decoder import Window
from servers.schedulers import Rejected, Sequence, Step
from servers.schedulers.decoding import Decoding, Held
from servers.schedulers.groups import BLOCK_TOKENS, LayerGroups
from servers.schedulers.vllm import CachingVllmV1, VllmV1, WindowedVllmV1


class Nobody(Decoding):
    def join(self, joining: list[Sequence]) -> None:
        pass


class Visited(VllmV1):
    """Every request in every step, as vLLM does it."""

    def _counting(self, held: Held) -> Decoding:
        return Nobody(held, BLOCK_TOKENS)

    def _suffices(self, budget: int, missing: int) -> bool:
        return False


class VisitedWindowed(Visited, WindowedVllmV1):
    pass


class VisitedCaching(Visited, CachingVllmV1):
    pass


GROUPS = LayerGroups.of([(4, Window(tokens=100)), (1, None)], 2048, 2 * 300)
KINDS = ("plain", "windowed", "caching")
SEGMENTS = (16, 40, 90)  # tokens of a piece that prompts and replies share


def made(seed: int, kind: str, *, visited: bool) -> VllmV1:
    rng = random.Random(seed)
    settings = VllmV1.Settings(max_running=rng.choice([3, 20, 100]), budget_tokens=rng.choice([5, 100, 300]),
                               async_scheduling=rng.choice([False, True]),
                               long_prefill_token_threshold=rng.choice([0, 0, 4, 30]))  # fmt: skip
    kv_tokens = rng.choice([600, 1000, 5000])
    if kind == "windowed":
        return (VisitedWindowed if visited else WindowedVllmV1)(kv_tokens, settings, GROUPS)
    if kind == "caching":
        return (VisitedCaching if visited else CachingVllmV1)(kv_tokens, settings)
    return (Visited if visited else VllmV1)(kv_tokens, settings)


def drawn(rng: random.Random, index: int) -> Sequence:
    """Its prompt begins with pieces that others have too, and its reply may be one."""
    prompt, output = rng.randint(1, 200), rng.choice([1, rng.randint(2, 150), rng.randint(2, 300)])
    pieces: list[tuple[int, int]] = []
    while (left := prompt - sum(tokens for _, tokens in pieces)) > 0 and rng.random() < 0.6:
        pieces.append((rng.randint(0, 2), min(left, rng.choice(SEGMENTS))))
    if sum(tokens for _, tokens in pieces) == prompt and rng.random() < 0.8:
        pieces.append((rng.randint(3, 5), output))
    return Sequence(index, prompt, output, tuple(pieces))


def played(scheduler: VllmV1, seed: int) -> Iterator[object]:
    """What each of some hundred steps is, and what the server holds after it, while requests come, end and leave. Calls
    come in any order that an engine may choose."""
    rng = random.Random(seed)
    sequences: list[Sequence] = []
    under_way: deque[Step] = deque()
    for turn in range(500):
        for _ in range(rng.choice([0, 0, 0, 1, 1, 4]) if turn < 300 else 0):
            sequence = drawn(rng, len(sequences))
            sequences.append(sequence)
            try:
                scheduler.admit(sequence)
            except Rejected:
                continue
            scheduler.add(sequence)
        if sequences and rng.random() < 0.02:
            scheduler.cancel(rng.choice(sequences))
        while len(under_way) < scheduler.depth and (step := scheduler.schedule()) is not None:
            under_way.append(step)
            emitted = [each.index for each in step.emits]
            yield emitted, step.decode_rows, step.decode_context, step.prefill_work, step.chunks, step.turning
            yield step.lengths
            yield state(scheduler, sequences)
            if rng.random() < 0.1:
                break
        for _ in range(rng.choice([1, 1, 1, 2])):
            if under_way:
                scheduler.finish(under_way.popleft())
                yield state(scheduler, sequences)
    yield [(each.emitted, each.done, each.preemptions) for each in sequences]


def state(scheduler: VllmV1, sequences: list[Sequence]) -> object:
    """All that can be read of the server and of the requests that have not ended."""
    findable = scheduler.cache.findable if isinstance(scheduler, CachingVllmV1) else 0
    held = [
        (each.computed, each.sampled, each.emitted, each.blocks, each.preemptions, each.cached)
        for each in sequences
        if not each.done
    ]
    return scheduler.used_tokens, scheduler.preemptions, scheduler.running, scheduler.waiting, findable, held


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_steps_are_those_of_visiting_every_request(seed: int, kind: str) -> None:
    counted, visited = (played(made(seed, kind, visited=way), seed) for way in (False, True))
    steps = 0
    for mine, other in zip(counted, visited, strict=True):
        assert mine == other
        steps += 1
    assert steps > 700


@pytest.mark.processes
def test_the_loads_of_that_test_preempt_and_end_and_find() -> None:
    schedulers = [made(seed, "caching", visited=False) for seed in range(20)]
    ended = [list(played(scheduler, seed))[-1] for seed, scheduler in enumerate(schedulers)]
    assert sum(scheduler.preemptions > 0 for scheduler in schedulers) > 5
    assert sum(scheduler.cached_tokens for scheduler in schedulers) > 5_000
    assert all(isinstance(each, list) and sum(done for _, done, _ in each) > 5 for each in ended)


def test_state_is_caught_up_with_when_a_request_leaves() -> None:
    """A request that is cancelled while it is counted gives back every block that it holds."""
    scheduler = VllmV1(4096, VllmV1.Settings())
    sequence = Sequence(0, 30, 200)
    scheduler.add(sequence)
    for _ in range(60):
        step = scheduler.schedule()
        assert step is not None
        scheduler.finish(step)
    assert scheduler.used_tokens == 96  # the prompt, and 60 tokens less the one that is not in the cache yet: 89
    scheduler.cancel(sequence)
    assert (sequence.computed, sequence.sampled, sequence.emitted) == (89, 60, 60)
    assert scheduler.used_tokens == 0 and scheduler.schedule() is None
