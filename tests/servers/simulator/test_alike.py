"""Steps that are computed in one loop give the tokens that they give one by one, to the last bit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from servers.schedulers import Rejected, Sequence, Step
from servers.schedulers.vllm import CachingVllmV1, VllmV1
from servers.simulator.build import emulate
from servers.simulator.engine import Engine, FrontEnd
from servers.simulator.options import Hardware

TICK_S = 2**-10  # seconds that are exact as floats: what comes on one, comes with a step that ends there
FRONTS = (
    FrontEnd(),
    FrontEnd(request_us=505, token_us=36, output_us=14, latency_us=1290, prompt_token_us=0.45, handover_us=190),
    FrontEnd(request_us=505, token_us=300, output_us=140, latency_us=1290, handover_us=190, behind_us=400),
    FrontEnd(request_us=TICK_S * 1e6, token_us=TICK_S * 1e6, latency_us=TICK_S * 1e6),
)
DECODES = 1000  # tokens that a reply has at the most

Tokens = dict[int, list[float]]
Deliver = Callable[[list[Sequence], float, float], None]
Steady = Callable[[list[Sequence], float], Callable[[float], None]]


class Load:
    """Requests, which clients leave early, and a server; drawn by `seed`."""

    def __init__(self, seed: int) -> None:
        rng = self._rng = random.Random(seed)
        self.caching = rng.random() < 0.6
        self.kv_tokens = rng.choice([2000, 4000, 100_000])
        self.settings = VllmV1.Settings(
            max_running=rng.choice([3, 64]),
            budget_tokens=rng.choice([10, 64, 8192]),
            async_scheduling=rng.random() < 0.7,
        )
        self.front = rng.choice(FRONTS)
        self.takes_ticks = rng.choice([(8, 4, 1), (1, 1, 4), (3, 2, 0), (1.37, 0.83, 0.3)])  # prefills, others, launch
        self.prepare_s = rng.choice([0.0, TICK_S])
        self.requests = sorted((self._moment(3000), *self._shape()) for _ in range(40))
        self.leaves = sorted((self._moment(5000), number) for number in range(40) if rng.random() < 0.25)

    def _moment(self, ticks: int) -> float:
        return self._rng.choice([self._rng.randrange(ticks), self._rng.uniform(0, ticks)]) * TICK_S

    def _shape(self) -> tuple[int, int, tuple[tuple[int, int], ...]]:
        rng = self._rng
        prompt, output = rng.randint(1, 300), rng.choice([1, 2, rng.randint(3, 60), rng.randint(60, DECODES)])
        shared = rng.choice([0, rng.randint(0, prompt), prompt])
        segments = ((rng.randint(0, 2), shared),)
        return prompt, output, (*segments, (rng.randint(3, 4), output)) if shared == prompt else segments

    def engine(self, deliver: Deliver, **steady: Steady) -> Engine:
        scheduler = (CachingVllmV1 if self.caching else VllmV1)(self.kv_tokens, self.settings)
        prefills, others, launch = self.takes_ticks

        def step_s(step: Step, begin_s: float) -> float:
            ticks = prefills if step.prefill_rows else others
            return ticks * TICK_S * (1 + step.decode_context // 4096) + (begin_s % TICK_S) / 7

        return Engine(scheduler, (step_s, lambda _: (launch * TICK_S, self.prepare_s)), deliver, self.front, **steady)


def played(load: Load, *, alike: bool, slices: bool = False) -> tuple[Tokens, list[object], int]:
    """When the tokens of each request come; what the server holds as each comes or leaves; and how many steps were
    computed together. slices: time goes on in many small pieces."""
    tokens: Tokens = {}
    together = 0

    def deliver(emits: list[Sequence], first_s: float, gap_s: float) -> None:
        for place, sequence in enumerate(emits):
            tokens.setdefault(sequence.index, []).append(first_s + place * gap_s)

    def deliver_steady(emits: list[Sequence], gap_s: float) -> Callable[[float], None]:
        def put(first_s: float) -> None:
            nonlocal together
            together += 1
            deliver(emits, first_s, gap_s)

        return put

    engine = load.engine(deliver, deliver_steady=deliver_steady) if alike else load.engine(deliver)
    sequences = [Sequence(index, *request[1:]) for index, request in enumerate(load.requests)]
    events = [(at_s, 0, index) for index, (at_s, *_) in enumerate(load.requests)]
    events += [(at_s, 1, index) for at_s, index in load.leaves]
    held: list[object] = []
    now_s = 0.0
    for at_s, leaves, index in sorted(events):
        for _ in range(7 if slices else 0):
            now_s += (at_s - now_s) / 3
            engine.advance(now_s)
        now_s = at_s
        engine.advance(at_s)
        sequence = sequences[index]
        if leaves and not sequence.done:
            engine.cancel(sequence)
        elif not leaves:
            try:
                engine.submit(sequence, at_s)
            except Rejected as refused:
                held.append(refused.status)
        held.append(state(engine, sequences))
    while slices and engine.next_s() < math.inf:
        engine.advance(engine.next_s())
    engine.advance(math.inf)
    return tokens, [*held, state(engine, sequences)], together


def state(engine: Engine, sequences: list[Sequence]) -> object:
    """All that can be read of the server and its requests."""
    scheduler = engine.scheduler
    assert isinstance(scheduler, VllmV1)
    return (
        scheduler.used_tokens, scheduler.running, scheduler.waiting, scheduler.preemptions, scheduler.cached_tokens,
        scheduler.cache.findable if isinstance(scheduler, CachingVllmV1) else 0, engine.next_s(), engine.now_s,
        [(each.emitted, each.sampled, each.computed, each.blocks, each.cached, each.done) for each in sequences],
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_steps_together_give_what_they_give_one_by_one(seed: int) -> None:
    one_by_one, together = played(Load(seed), alike=False), played(Load(seed), alike=True)
    assert together[:2] == one_by_one[:2]
    assert one_by_one[2] == 0
    assert played(Load(seed), alike=True, slices=True)[:2] == one_by_one[:2]


def test_these_loads_have_such_steps_and_preempt_and_find() -> None:
    """Of some thousand steps of a load most are computed together where requests fit."""
    loads = [Load(seed) for seed in range(60)]
    runs = [played(load, alike=True) for load in loads]
    assert sum(together > 500 for _, _, together in runs) > 30
    assert sum(held[-1][3] > 0 for _, held, _ in runs if isinstance(held[-1], tuple)) > 10
    assert sum(held[-1][4] > 0 for _, held, _ in runs if isinstance(held[-1], tuple)) > 20


@pytest.mark.parametrize("model", ["7b", "gemma-3-27b"])
def test_steps_whose_cost_hangs_on_each_length_are_not_computed_together(model: str) -> None:
    """A model with windows: its scheduler with a prefix cache counts no windows, and would say that steps are alike."""
    hardware = Hardware(gpu="h200", scheduler="vllm@v1", prefix_caching="on", dtype="bfloat16")
    emulated = emulate(hardware.setup("vllm", model, 4096))
    steps: list[int] = []
    alike: list[int] = []
    engine = emulated.engine(
        lambda emits, _, gap_s: steps.append(len(emits)), lambda emits, gap_s: lambda _: alike.append(len(emits))
    )
    engine.submit(Sequence(0, 1500, 200), 0.0)
    engine.advance(math.inf)
    assert sum(steps) + sum(alike) == 200
    assert sum(alike) == (198 if model == "7b" else 0)
