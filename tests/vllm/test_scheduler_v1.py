"""The simulated V1 scheduler beside vLLM's own, step by step: synchronous and asynchronous, without and with caching.

Both get the same requests; drive_scheduler.py says how vLLM's is run and what is told of each step. Run by
`make test-vllm`, well under a minute.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import serve
from workload import Request, Workload

from servers.schedulers import Sequence, Step
from servers.schedulers.vllm import BLOCK_TOKENS, CachingVllmV1, VllmV1

pytestmark = pytest.mark.vllm

DRIVER = Path(__file__).parent / "drive_scheduler.py"


StepFacts = dict[str, Any]  # of one step; drive_scheduler.py says what


def workload(
    blocks: int, max_running: int, budget_tokens: int, requests: list[Request], most_tokens: int = 0
) -> Workload:
    return Workload(
        name="", asynchronous=False, caching=False, blocks=blocks, max_running=max_running,
        budget_tokens=budget_tokens, most_tokens=most_tokens, max_loras=0, by_priority=False, requests=requests,
    )  # fmt: skip


def burst(blocks: int) -> Workload:
    return workload(blocks, 1024, 8192, [Request(512, 64)] * 200)


def mixed(blocks: int) -> Workload:
    """Prompts longer than what is left of a step's budget, so that they are computed in chunks."""
    draw = random.Random(4)
    requests = [Request(draw.randint(1, 2000), draw.randint(1, 300), 10 * (index // 4)) for index in range(150)]
    return workload(blocks, 64, 2048, requests)


def drawn(seed: int) -> Workload:
    """Short and long, crowded and idle, with KV for little more than one request or for plenty, some aborted."""
    draw = random.Random(seed)
    longest, most = draw.choice([(20, 200), (100, 100), (300, 40), (2000, 20)])
    gaps = draw.choice([[0], [0, 0, 0, 1], [0, 1, 2, 40]])
    aborted_ratio = draw.choice([0, 0, 0.1, 0.4])
    comes = 0
    requests: list[Request] = []
    for _ in range(40):
        comes += draw.choice(gaps)
        leaves = comes + draw.randint(0, 100) if draw.random() < aborted_ratio else None
        requests.append(Request(draw.randint(1, longest), draw.randint(1, most), comes, leaves))
    max_running = draw.choice([4, 16, 128])
    budget_tokens = max_running + longest // draw.choice([1, 4, 30])
    return workload(scarce(draw, requests), max_running, budget_tokens, requests)


def capped(of: Workload) -> Workload:
    """The same where one prompt takes at most 37 tokens of a step that has others."""
    return {**of, "most_tokens": 37}


def adapted(of: Workload, seed: int) -> Workload:
    """The same for up to six adapters, of which one to three may run together, and for the model itself."""
    draw = random.Random(2000 + seed)
    requests = [request._replace(adapter=draw.choice([0, 1, 1, 2, 3, 4, 5, 6])) for request in of["requests"]]
    return {**of, "requests": requests, "max_loras": draw.choice([1, 2, 3])}


def ranked(of: Workload, seed: int) -> Workload:
    """The same by priority, of one to six classes."""
    draw = random.Random(3000 + seed)
    classes = draw.choice([[0], [0, 1], [5, -3, 0, 0], [0, 1, 2, 3, 4, 5]])
    requests = [request._replace(priority=draw.choice(classes)) for request in of["requests"]]
    return {**of, "requests": requests, "by_priority": True}


def scarce(draw: random.Random, requests: list[Request]) -> int:
    """Blocks for one to six of the longest requests, and the null block."""
    longest = max(-(-(request.prompt + request.output) // BLOCK_TOKENS) for request in requests)
    return 1 + int(longest * draw.choice([1, 1.5, 2.5, 6]))


def prefixed(blocks: int) -> Workload:
    """Four prefixes, of whole blocks or not, before prompts of their own; one prompt in ten is nothing but a prefix."""
    draw = random.Random(7)
    requests: list[Request] = []
    for index in range(200):
        key = draw.choice([0, 0, 0, 1, 1, 2, 3])
        shared = (256, 300, 512, 1000)[key]
        own = draw.choice([0, *[draw.randint(1, 400)] * 9])
        requests.append(Request(shared + own, draw.randint(1, 80), 2 * (index // 3), None, ((key, shared),)))
    return workload(blocks, 64, 2048, requests)


def sessions(blocks: int) -> Workload:
    """Turns that begin with all that was said before, the replies too; sometimes the last reply is not through yet, and
    a quarter of the sessions share their first words."""
    draw = random.Random(8)
    requests: list[Request] = []
    key = itertools.count(1)
    for session in range(30):
        said = [(0, 200)] if session % 4 == 0 else []
        comes = 3 * session
        for _ in range(6):
            said.append((next(key), draw.randint(5, 150)))
            output, reply = draw.randint(1, 90), next(key)
            leaves = comes + draw.randint(0, 60) if draw.random() < 0.1 else None
            prompt = sum(tokens for _, tokens in said)
            requests.append(Request(prompt, output, comes, leaves, (*said, (reply, output))))
            said.append((reply, draw.choice([output, output, max(1, output - 7)])))
            comes += draw.randint(output, 2 * output + 40)
    requests.sort(key=lambda request: request.comes)
    return workload(blocks, 32, 1024, requests)


def sharing(seed: int) -> Workload:
    """As `drawn`, and prompts are walks through a small tree of pieces; a reply may be a piece of later prompts."""
    draw = random.Random(1000 + seed)
    base = drawn(seed)
    piece = draw.choice([8, 16, 40, 90])
    requests: list[Request] = []
    for request in base["requests"]:
        keys = [(depth * 4 + draw.randint(0, draw.choice([0, 1, 3]))) for depth in range(draw.randint(0, 5))]
        shared = [(key, piece if draw.random() < 0.8 else draw.randint(1, piece)) for key in keys]
        prompt = sum(tokens for _, tokens in shared) + draw.choice([0, request.prompt % 50, request.prompt])
        reply_key = draw.choice([None, *range(20)])
        if reply_key is not None and prompt == sum(tokens for _, tokens in shared) > 0:
            shared.append((reply_key, request.output))
        requests.append(request._replace(prompt=max(1, prompt), segments=tuple(shared)))
    return workload(scarce(draw, requests), base["max_running"], base["budget_tokens"], requests)


SHAPES = {
    "burst, ample KV": [burst(200 * 36 + 1)],
    "burst, KV for 60": [burst(60 * 36 + 1)],
    "mixed, ample KV": [mixed(64 * 144 + 1)],
    "mixed, KV for 20": [mixed(20 * 72 + 1)],
    "20 drawn ones": [drawn(seed) for seed in range(20)],
    "20 drawn ones, prompts capped": [capped(drawn(seed)) for seed in range(20)],
    "30 drawn ones, adapters": [adapted(drawn(seed), seed) for seed in range(30)],
    "60 drawn ones, by priority": [ranked(drawn(seed), seed) for seed in range(60)],
    "20 drawn ones, prompts capped, by priority": [ranked(capped(drawn(seed)), seed) for seed in range(20)],
    "20 drawn ones, adapters, by priority": [ranked(adapted(drawn(seed), seed), seed) for seed in range(20)],
}
# these with prefix caching
CACHED_SHAPES = {
    "burst, KV for 60, cache": [burst(60 * 36 + 1)],
    "mixed, KV for 20, cache": [mixed(20 * 72 + 1)],
    "prefixes, ample KV": [prefixed(200 * 100)],
    "prefixes, KV for 6": [prefixed(6 * 90 + 1)],
    "sessions, ample KV": [sessions(180 * 100)],
    "sessions, KV for 4": [sessions(4 * 90 + 1)],
    "60 drawn ones that share": [sharing(seed) for seed in range(60)],
    "30 drawn ones that share, adapters": [adapted(sharing(seed), seed) for seed in range(30)],
    "60 drawn ones that share, by priority": [ranked(sharing(seed), seed) for seed in range(60)],
    "20 drawn ones that share, prompts capped": [capped(sharing(seed)) for seed in range(20)],
}
KV_OF_SESSIONS = ("ample KV", "KV for 4")
SHAPES_OF_BOTH = SHAPES | CACHED_SHAPES


def with_scheduling(asynchronous: bool, shape: str) -> list[Workload]:
    kind = "async" if asynchronous else "sync"
    return [
        Workload(
            {
                **workload,
                "name": f"{shape}, {kind}, {number}",
                "asynchronous": asynchronous,
                "caching": shape in CACHED_SHAPES,
            }
        )
        for number, workload in enumerate(SHAPES_OF_BOTH[shape])
    ]


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[StepFacts]]:
    """What vLLM's scheduler did with each workload."""
    if "vllm" not in request.config.option.markexpr:
        pytest.skip("needs a real vLLM; run `make test-vllm`")
    workloads = [each for kind in (False, True) for shape in SHAPES_OF_BOTH for each in with_scheduling(kind, shape)]
    steps = serve.steps_of(DRIVER, workloads, str(tmp_path_factory.mktemp("model")))
    for step in itertools.chain.from_iterable(steps.values()):
        step["tokens"] = dict(step["tokens"])
    return steps


def ours(workload: Workload) -> list[StepFacts]:
    """What VllmV1 does with it, called in the order in which the simulated engine calls it."""
    scheduler = (CachingVllmV1 if workload["caching"] else VllmV1)(
        workload["blocks"] * BLOCK_TOKENS,
        VllmV1.Settings(
            max_running=workload["max_running"],
            budget_tokens=workload["budget_tokens"],
            async_scheduling=workload["asynchronous"],
            long_prefill_token_threshold=workload["most_tokens"],
            max_loras=workload["max_loras"],
            by_priority=1 if workload["by_priority"] else 0,
        ),
    )
    taken_over: dict[int, int] = {}  # tokens, by requests that have been let in
    if isinstance(scheduler, CachingVllmV1):
        note_taken_over(scheduler, taken_over)
    coming = deque(enumerate(workload["requests"]))
    present: dict[int, Sequence] = {}
    leaving: dict[int, int] = {}
    under_way: deque[tuple[Step, StepFacts]] = deque()
    steps: list[StepFacts] = []
    scheduled = 0
    preempted: list[int] = []
    while coming or present or under_way:
        while len(under_way) < scheduler.depth:
            while coming and (coming[0][1][2] <= scheduled or not (present or under_way)):
                index, (prompt, output, _, leaves, segments, adapter, priority) = coming.popleft()
                present[index] = Sequence(index, prompt, output, segments, str(adapter or ""), priority)
                scheduler.admit(present[index])
                scheduler.add(present[index])
                if leaves is not None:
                    leaving[index] = leaves
            for index in [index for index, leaves in leaving.items() if leaves <= scheduled]:
                del leaving[index]
                if index in present:
                    scheduler.cancel(present.pop(index))
            before = [(sequence, sequence.computed, sequence.preemptions) for sequence in present.values()]
            queried, cached = scheduler.queried_tokens, scheduler.cached_tokens
            step = scheduler.schedule()
            preempted += sorted(s.index for s, _, preemptions in before if s.preemptions > preemptions)
            if step is None:
                break
            scheduled += 1
            tokens = {
                s.index: s.computed - computed - taken_over.pop(s.index, 0)
                for s, computed, _ in before
                if s.computed > computed
            }
            assert step.decode_rows + step.prefill_rows == len(tokens)
            assert step.decode_rows + step.prefill_tokens == sum(tokens.values())
            about: StepFacts = {
                "tokens": tokens,
                "preempted": preempted,
                "free_blocks": workload["blocks"] - 1 - scheduler.used_tokens // BLOCK_TOKENS,
                "running": scheduler.running,
                "waiting": scheduler.waiting,
                "queried": scheduler.queried_tokens - queried,
                "cached": scheduler.cached_tokens - cached,
                "findable": scheduler.cache.findable if isinstance(scheduler, CachingVllmV1) else 0,
            }
            under_way.append((step, about))
            preempted = []
        if not under_way:
            continue  # those that were there are gone, and others come
        step, about = under_way.popleft()
        emits = [sequence for sequence in step.emits if not sequence.done]
        scheduler.finish(step)
        about["emitted"] = [sequence.index for sequence in emits]
        about["finished"] = [sequence.index for sequence in emits if sequence.done]
        for index in about["finished"]:
            del present[index]
        steps.append(about)
    assert scheduler.used_tokens == 0
    assert scheduler.preemptions == preemptions(steps) + len(preempted)
    return steps


def note_taken_over(scheduler: CachingVllmV1, taken_over: dict[int, int]) -> None:
    cache = scheduler.cache
    hold = cache.hold

    def noted(sequence: Sequence, found: int) -> None:
        taken_over[sequence.index] = found * BLOCK_TOKENS
        hold(sequence, found)

    cache.hold = noted  # type: ignore[method-assign]


def preemptions(steps: list[StepFacts]) -> int:
    return sum(len(step["preempted"]) for step in steps)


def token_steps(steps: list[StepFacts]) -> tuple[dict[int, int], dict[int, int]]:
    """In which step each request got its first token, and its last."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for index in step["emitted"]:
            first.setdefault(index, number)
            last[index] = number
    return first, last


def first_difference(mine: list[StepFacts], other: list[StepFacts]) -> str:
    for number, (one, two) in enumerate(itertools.zip_longest(mine, other)):
        if one != two:
            return f"step {number}, ours: {one}, vLLM's: {two}"
    return ""


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("shape", SHAPES_OF_BOTH)
def test_no_step_differs(shape: str, asynchronous: bool, theirs: dict[str, list[StepFacts]]) -> None:
    counts: Counter[str] = Counter()
    differences = []
    for workload in with_scheduling(asynchronous, shape):
        mine, other = ours(workload), theirs[workload["name"]]
        mine_first, mine_last = token_steps(mine)
        other_first, other_last = token_steps(other)
        requests = range(len(workload["requests"]))
        counts["steps"] += len(other)
        counts["steps that differ"] += sum(one != two for one, two in itertools.zip_longest(mine, other))
        counts["requests"] += len(requests)
        counts["first tokens that differ"] += sum(mine_first.get(i) != other_first.get(i) for i in requests)
        counts["last tokens that differ"] += sum(mine_last.get(i) != other_last.get(i) for i in requests)
        counts["preemptions, ours"] += preemptions(mine)
        counts["preemptions, vLLM's"] += preemptions(other)
        counts["cached tokens, ours"] += sum(step["cached"] for step in mine)
        counts["cached tokens, vLLM's"] += sum(step["cached"] for step in other)
        counts["aborted"] += len(requests) - sum(len(step["finished"]) for step in other)
        if mine != other:
            differences.append(f"{workload['name']}: {first_difference(mine, other)}")
    print(f"\n{shape}, {'async' if asynchronous else 'sync'}:", ", ".join(f"{n} {what}" for what, n in counts.items()))
    assert differences == []


def test_the_workloads_are_hard_enough(theirs: dict[str, list[StepFacts]]) -> None:
    steps = [step for workload in theirs.values() for step in workload]
    chunks = sum(index not in step["emitted"] for step in steps for index in step["tokens"])
    assert sum(len(step["finished"]) for step in steps) > 2000
    assert preemptions(steps) > 300
    assert chunks > 3000
    # some lost their blocks while their last token was on the way, and so ended in the queue
    pairs = itertools.chain.from_iterable(itertools.pairwise(workload) for workload in theirs.values())
    assert any(set(before["finished"]) & set(step["preempted"]) for before, step in pairs)


def test_the_workloads_with_caching_are_hard_enough(theirs: dict[str, list[StepFacts]]) -> None:
    cached = {
        workload["name"]: theirs[workload["name"]]
        for shape in CACHED_SHAPES
        for asynchronous in (False, True)
        for workload in with_scheduling(asynchronous, shape)
    }
    steps = [step for workload in cached.values() for step in workload]
    pairs = list(itertools.chain.from_iterable(itertools.pairwise(workload) for workload in cached.values()))
    assert preemptions(steps) > 1000
    assert sum(step["cached"] for step in steps) > 500_000
    assert sum(after["findable"] < before["findable"] for before, after in pairs) > 3000  # contents were lost
    # with KV for few, sessions lost what they would have found
    found = {shape: sum(step["cached"] for step in cached[f"sessions, {shape}, sync, 0"]) for shape in KV_OF_SESSIONS}
    assert 0 < 2 * found["KV for 4"] < found["ample KV"]
