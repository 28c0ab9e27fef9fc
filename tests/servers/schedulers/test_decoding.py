"""Requests that are counted together take the same steps as requests that are visited one by one."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import pytest

from backends.decoder import Window
from servers.schedulers import Rejected, Sequence, Step
from servers.schedulers.groups import Groups
from servers.schedulers.vllm import VllmV1, WindowedVllmV1


class Visited(VllmV1):
    """Every request in every step, as vLLM does it."""

    def _blocks_suffice(self, budget: int) -> bool:
        return False

    def _count_on(self) -> None:
        self._others = []


class VisitedWindowed(Visited, WindowedVllmV1):
    pass


GROUPS = Groups.of([(4, Window(tokens=100)), (1, None)], 2048, 2 * 300)


def made(seed: int, *, windowed: bool, visited: bool) -> VllmV1:
    rng = random.Random(seed)
    settings = VllmV1.Settings(max_running=rng.choice([3, 20, 100]), budget_tokens=rng.choice([5, 100, 300]))
    kv_tokens, depth = rng.choice([600, 1000, 5000]), rng.choice([1, 2])
    if windowed:
        return (VisitedWindowed if visited else WindowedVllmV1)(kv_tokens, settings, GROUPS, depth)
    return (Visited if visited else VllmV1)(kv_tokens, settings, depth)


def played(scheduler: VllmV1, seed: int) -> Iterator[object]:
    """What each of some hundred steps is, and what the server holds after it, while requests come, end and leave."""
    rng = random.Random(seed)
    sequences: list[Sequence] = []
    under_way: deque[Step] = deque()
    for turn in range(600):
        for _ in range(rng.choice([0, 0, 0, 1, 1, 4]) if turn < 400 else 0):
            sequence = Sequence(
                len(sequences), rng.randint(1, 200), rng.choice([1, rng.randint(2, 150), rng.randint(2, 300)])
            )
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
            yield emitted, step.decode_rows, step.decode_context, step.prefill_work, step.chunks
        if under_way:
            scheduler.finish(under_way.popleft())
        yield scheduler.used_tokens, scheduler.preemptions, scheduler.running, scheduler.waiting
    yield [(each.emitted, each.done, each.preemptions) for each in sequences]


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_steps_are_those_of_visiting_every_request(seed: int, windowed: bool) -> None:
    counted, visited = (list(played(made(seed, windowed=windowed, visited=way), seed)) for way in (False, True))
    assert counted == visited
    assert len(counted) > 700


def test_the_loads_of_that_test_preempt_and_end() -> None:
    schedulers = [made(seed, windowed=False, visited=False) for seed in range(40)]
    ended = [list(played(scheduler, seed))[-1] for seed, scheduler in enumerate(schedulers)]
    assert sum(scheduler.preemptions > 0 for scheduler in schedulers) > 8
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
