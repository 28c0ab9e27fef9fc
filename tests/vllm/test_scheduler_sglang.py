"""The simulated scheduler of SGLang beside SGLang's own, step by step: with overlap and without, with the radix cache
(fcfs and lpm) and without, with mixed chunks and without.

Both get the same requests; drive_sglang.py says how SGLang's is run and what is told of each step. Run by
`make test-vllm`.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import serve

from servers.schedulers import Sequence, Step
from servers.schedulers.sglang import Sglang

pytestmark = pytest.mark.vllm

DRIVER = Path(__file__).parent / "drive_sglang.py"

Workload = dict[str, Any]
StepFacts = dict[str, Any]
Request = tuple[int, int, int, tuple[tuple[int, int], ...]]  # prompt, output, steps before it comes, segments


def drawn(seed: int) -> tuple[list[Request], int]:
    """Short and long, crowded and idle; the tokens of the longest."""
    draw = random.Random(seed)
    longest, most = draw.choice([(20, 200), (100, 100), (300, 40), (2000, 20), (400, 400)])
    gaps = draw.choice([[0], [0, 0, 0, 1], [0, 1, 2, 40]])
    comes = 0
    requests: list[Request] = []
    for _ in range(draw.choice([30, 60, 150])):
        comes += draw.choice(gaps)
        requests.append((draw.randint(1, longest), draw.randint(1, most), comes, ()))
    return requests, longest + most


def sharing(seed: int) -> tuple[list[Request], int]:
    """As `drawn`, and prompts are walks through a small tree of pieces; a reply may be a piece of later prompts."""
    draw = random.Random(1000 + seed)
    base, longest = drawn(seed)
    piece = draw.choice([8, 16, 40, 90])
    requests: list[Request] = []
    for prompt, output, comes, _ in base:
        keys = [(depth * 4 + draw.randint(0, draw.choice([0, 1, 3]))) for depth in range(draw.randint(0, 5))]
        shared = [(key, piece if draw.random() < 0.8 else draw.randint(1, piece)) for key in keys]
        own = draw.choice([0, prompt % 50, prompt])
        whole = max(1, sum(tokens for _, tokens in shared) + own)
        reply_key = draw.choice([None, *range(20, 40)])
        if reply_key is not None and own == 0 and shared:
            shared.append((reply_key, output))
        requests.append((whole, output, comes, tuple(shared)))
    return requests, longest + 5 * piece


def workload(name: str, seed: int, caching: bool, **given: Any) -> Workload:
    draw = random.Random(2000 + seed)
    requests, longest = sharing(seed) if caching else drawn(seed)
    return {
        "name": f"{name}, {seed}",
        "kv_tokens": 10 + int(longest * draw.choice([1.2, 2.5, 6, 40])),
        "max_running": draw.choice([4, 16, 128]),
        "chunk_tokens": draw.choice([32, 100, 512, 8192]),
        "max_prefill_tokens": draw.choice([200, 16384]),
        "overlap": True, "mixed": False, "lpm": False, "caching": caching, "ignore_eos": True,
        "requests": requests,
        **given,
    }  # fmt: skip


KINDS: dict[str, dict[str, Any]] = {
    "radix cache": {"caching": True},
    "radix cache, no overlap": {"caching": True, "overlap": False},
    "radix cache, lpm": {"caching": True, "lpm": True},
    "radix cache, mixed chunks": {"caching": True, "mixed": True},
    "replies of known length": {"caching": False},
    "replies of known length, no overlap": {"caching": False, "overlap": False},
    "replies of unknown length": {"caching": False, "ignore_eos": False},
    "replies of unknown length, mixed chunks": {"caching": False, "ignore_eos": False, "mixed": True},
}
SEEDS = range(2, 10)
WORKLOADS = {kind: [workload(kind, seed, **given) for seed in SEEDS] for kind, given in KINDS.items()}


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest) -> dict[str, list[StepFacts]]:
    """What SGLang's scheduler did with each workload."""
    if "vllm" not in request.config.option.markexpr:
        pytest.skip("needs SGLang's wheel; run `make test-vllm`")
    return serve.steps_of(DRIVER, list(itertools.chain.from_iterable(WORKLOADS.values())))


def scheduler_for(workload: Workload) -> Sglang:
    return Sglang(
        workload["kv_tokens"],
        Sglang.Settings(
            chunked_prefill_size=workload["chunk_tokens"],
            max_prefill_tokens=workload["max_prefill_tokens"],
            max_running_requests=workload["max_running"],
            context_length=1 << 20,
            overlap_schedule=workload["overlap"],
            mixed_chunk=workload["mixed"],
            lpm=workload["lpm"],
            ignore_eos=workload["ignore_eos"],
        ),
        workload["caching"],
    )


def ours(workload: Workload) -> list[StepFacts]:
    """What Sglang does with it, called in the order in which the simulated engine calls it."""
    scheduler = scheduler_for(workload)
    coming = deque(enumerate(workload["requests"]))
    present: dict[int, Sequence] = {}
    under_way: deque[tuple[Step, StepFacts]] = deque()
    steps: list[StepFacts] = []
    scheduled = 0
    while coming or present or under_way:
        idle = not (present or under_way) and coming and coming[0][1][2] > scheduled > 0
        if idle and not workload["overlap"]:
            assert scheduler.schedule() is None  # the loop turns once before others come
        while len(under_way) < scheduler.depth:
            while coming and (coming[0][1][2] <= scheduled or not (present or under_way)):
                index, (prompt, output, _, segments) = coming.popleft()
                present[index] = Sequence(index, prompt, output, segments)
                scheduler.add(present[index])
            before = {sequence.index: sequence.preemptions for sequence in present.values()}
            step = scheduler.schedule()
            if step is None:
                break
            scheduled += 1
            about: StepFacts = {
                "rows": step.decode_rows, "prompts": step.prefill_tokens, "used": scheduler.used_tokens,
                "free": workload["kv_tokens"] - scheduler.used_tokens - scheduler.tree.idle_tokens,
                "waiting": scheduler.waiting, "ratio": round(scheduler.ratio, 9),
                "retracted": sum(s.preemptions > before.get(s.index, 0) for s in present.values()),
            }  # fmt: skip
            under_way.append((step, about))
        if not under_way:
            continue
        step, about = under_way.popleft()
        emits = list(step.emits)
        scheduler.finish(step)
        about["emitted"] = [sequence.index for sequence in emits]
        about["finished"] = [sequence.index for sequence in emits if sequence.done]
        for index in about["finished"]:
            del present[index]
        steps.append(about)
    assert scheduler.used_tokens == 0
    return steps


def comparable(steps: list[StepFacts], workload: Workload) -> list[StepFacts]:
    """SGLang's steps in the terms of `ours`. A row is a token of a request that has had one before it."""
    seen: set[int] = set()
    told: list[StepFacts] = []
    for step in steps:
        tokens = dict(step["tokens"])
        again = set(step["retracted"])
        seen -= again
        rows = sum(index in seen for index in tokens)
        prompts = sum(size for index, size in tokens.items() if index not in seen)
        seen |= set(step["emitted"]) & set(tokens)
        free = step["free"]
        told.append({
            "rows": rows, "prompts": prompts, "used": workload["kv_tokens"] - free - step["evictable"], "free": free,
            "waiting": step["waiting"], "ratio": step["ratio"], "retracted": len(step["retracted"]),
            "emitted": step["emitted"], "finished": step["finished"],
        })  # fmt: skip
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_differs(kind: str, theirs: dict[str, list[StepFacts]]) -> None:
    counts: Counter[str] = Counter()
    differences = []
    for workload in WORKLOADS[kind]:
        mine, other = ours(workload), comparable(theirs[workload["name"]], workload)
        counts["steps"] += len(other)
        counts["retracted"] += sum(step["retracted"] for step in other)
        for number, (one, two) in enumerate(itertools.zip_longest(mine, other)):
            if one != two:
                counts["steps that differ"] += 1
                if counts["steps that differ"] < 5:
                    differences.append(f"{workload['name']}, step {number}, ours: {one}, SGLang's: {two}")
    print(f"\n{kind}:", ", ".join(f"{number} {what}" for what, number in counts.items()))
    assert differences == []
