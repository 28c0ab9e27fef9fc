"""The simulated schedulers of vLLM and SGLang beside Dynamo's mock engines of both: somebody else's model of them.

Both get the same requests, and the same law says how long a step takes: Dynamo's own. So the times of first and last
tokens agree where, and only where, the steps consist of the same requests with the same tokens. Dynamo's engines put no
step together while one is computed; so do ours here. Its SGLang gives a slot that a reply has left out at once, as
0.5.23 does. Where they differ, tests/vllm says what vLLM and SGLang 0.5.11 do.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from servers.schedulers import Sequence, Step
from servers.schedulers.sglang import Sglang
from servers.schedulers.vllm import CachingVllmV1, VllmV1

pytestmark = pytest.mark.clients

DRIVER = Path(__file__).parent / "drive_dynamo.py"
PYTHON = Path(__file__).parents[2] / ".venv-dynamo" / "bin" / "python"
BLOCK_TOKENS = 16
AMPLE_TOKENS = 160_000
SAME_MS = 0.01  # Dynamo's clock has whole nanoseconds
KINDS = ("burst", "Poisson", "closed loop", "shared prefixes", "small KV cache", "small KV cache, shared prefixes")
ROOMY, SMALL = KINDS[:4], KINDS[4:]
SEEDS = range(12)

Load = dict[str, Any]


class Fate(NamedTuple):
    """What one request did; drive_dynamo.py says what each number is."""

    sent_ms: float
    first_ms: float
    last_ms: float
    output: int
    cached: int
    admissions: int

    def is_like(self, other: Fate) -> bool:
        times = zip(self[:3], other[:3], strict=True)
        return self[3:] == other[3:] and all(abs(one - two) < SAME_MS for one, two in times)


def drawn(kind: str, seed: int, engine: str, **settings: Any) -> Load:
    """Short and long, crowded and idle; `settings` of SGLang's engine alone."""
    draw = random.Random(f"{kind} {seed}")
    longest, most = draw.choice([60, 300, 900]), draw.choice([10, 60, 200])
    caching, small = "shared" in kind, "small" in kind
    timed = kind == "Poisson" or (kind not in ("burst", "closed loop") and draw.random() < 0.4)
    gap_ms, prefixes = draw.choice([10, 40]), draw.choice([3, 8])
    requests: list[tuple[float, int, int, list[int]]] = []
    ms = 0.0
    for number in range(draw.choice([30, 60, 120])):
        prompt = draw.randint(1, longest)
        prefix = draw.randrange(prefixes)
        count = -(-prompt // BLOCK_TOKENS)
        shared = min(count, 2 + prefix) if caching else 0
        blocks = [100 * prefix + place for place in range(shared)]
        blocks += [1000 * (number + 1) + place for place in range(shared, count)]
        requests.append((ms if timed else 0.0, prompt, draw.randint(1, most), blocks))
        ms = round(ms + 0.001 + draw.expovariate(1 / gap_ms), 3)
    kv_tokens = -(-int((longest + most) * draw.choice([2.5, 4])) // BLOCK_TOKENS) * BLOCK_TOKENS
    kv_tokens = kv_tokens if small else AMPLE_TOKENS
    slots, budget = draw.choice([4, 16, 64]), draw.choice([128, 512, 2048])
    block = BLOCK_TOKENS if engine == "vllm" else 1
    return {
        "name": f"{kind}, {seed}, {engine}", "caching": caching, "kv_tokens": kv_tokens,
        "concurrency": None if timed else len(requests) if kind == "burst" else draw.choice([3, 8, 40]),
        "requests": requests,
        "engine": {
            "backend": engine, "block_size": block, "num_gpu_blocks": kv_tokens // block, "max_num_seqs": slots,
            "max_num_batched_tokens": budget, "enable_prefix_caching": caching, "timing_model": {"type": "polynomial"},
            "sglang": {"chunked_prefill_size": budget, "max_prefill_tokens": 16384, **settings},
        },
    }  # fmt: skip


# A prompt in chunks takes its turn with others again in Dynamo's lpm, and it sorts also while no slot is free.
LPM = [
    drawn("shared prefixes", 100 + seed, "sglang", schedule_policy="lpm", chunked_prefill_size=AMPLE_TOKENS)
    for seed in SEEDS
]
LOADS = {
    (kind, engine): [drawn(kind, seed, engine) for seed in SEEDS] for kind in KINDS for engine in ("vllm", "sglang")
}
LOADS["lpm", "sglang"] = LPM
LOADS["a slot", "sglang"] = [
    {**LPM[0], "name": "a slot", "concurrency": 3, "requests": [(0.0, 16, output, [output]) for output in (3, 6, 2)],
     "engine": {**drawn("burst", 0, "sglang")["engine"], "max_num_seqs": 2}},
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> dict[str, list[Fate]]:
    """What became of each request of each load in Dynamo."""
    loads = [load for loads in LOADS.values() for load in loads]
    done = subprocess.run([PYTHON, DRIVER], input=json.dumps(loads), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told = map(json.loads, done.stdout.splitlines())
    return {each["name"]: [Fate(*fate) for fate in each["requests"]] for each in told}


def step_ms(load: Load, step: Step, prompts: dict[int, int]) -> float:
    """Dynamo's law of a step: prompts, then one token for each that runs. Its vLLM engine takes replies that are
    computed again after preemption for free. prompts: of each request, by its tokens that are computed now."""
    vllm = load["engine"]["backend"] == "vllm"
    chunks = step.chunks
    if vllm:
        chunks = [(c, min(q, prompts[c + q] - c)) for c, q in chunks if c < prompts[c + q]]
    ms = 0.0
    if count := len(chunks):
        cached = sum(c for c, _ in chunks)
        tokens = count * (sum(c + q for c, q in chunks) // count - cached // count)
        ms += 4.209989e-07 * tokens**2 + 1.518344e-02 * tokens + 16.50142
    rows = [sequence.prompt + sequence.emitted for sequence in step.emits if sequence.emitted]
    if rows and (vllm or not step.chunks):
        share = min(1.0, sum(rows) / load["kv_tokens"])
        ms += max(1.0, -25.74 * share**2 + 54.01 * share + 5.74)
    return ms


def scheduler_for(load: Load, newer: bool) -> VllmV1 | Sglang:
    engine = load["engine"]
    if engine["backend"] == "vllm":
        settings = VllmV1.Settings(
            max_running=engine["max_num_seqs"], budget_tokens=engine["max_num_batched_tokens"], async_scheduling=False
        )
        # one block more: vLLM keeps the null block, which Dynamo does not count
        return (CachingVllmV1 if load["caching"] else VllmV1)(load["kv_tokens"] + BLOCK_TOKENS, settings)
    given = engine["sglang"]
    return Sglang(
        load["kv_tokens"],
        Sglang.Settings(
            chunked_prefill_size=given["chunked_prefill_size"], max_running_requests=engine["max_num_seqs"],
            context_length=1 << 20, overlap_schedule=False, ignore_eos=False,
            lpm=given.get("schedule_policy") == "lpm", newer=newer,
        ),
        load["caching"],
    )  # fmt: skip


def ours(load: Load, newer: bool = False) -> list[Fate]:
    scheduler = scheduler_for(load, newer)
    coming = deque(enumerate(load["requests"]))
    present: dict[int, Sequence] = {}
    times_ms: dict[int, list[float]] = {}
    fates: dict[int, Fate] = {}
    now_ms, concurrency = 0.0, load["concurrency"]
    while coming or present:
        while coming and (coming[0][1][0] <= now_ms if concurrency is None else len(present) < concurrency):
            number, (ms, prompt, output, blocks) = coming.popleft()
            sizes = [min(BLOCK_TOKENS, prompt - at) for at in range(0, prompt, BLOCK_TOKENS)]
            present[number] = Sequence(number, prompt, output, tuple(zip(blocks, sizes, strict=True)))
            times_ms[number] = [now_ms if concurrency else ms]
            scheduler.admit(present[number])
            scheduler.add(present[number])
        step = scheduler.schedule()
        if step is None:
            now_ms = coming[0][1][0]
            continue
        now_ms += step_ms(load, step, {each.computed: each.prompt for each in present.values()})
        emits = list(step.emits)
        scheduler.finish(step)
        for sequence in emits:
            times = times_ms[sequence.index]
            times.append(now_ms)
            if sequence.done:
                del present[sequence.index]
                admissions = 1 + sequence.preemptions
                fates[sequence.index] = Fate(*times[:2], now_ms, len(times) - 1, sequence.cached, admissions)
    return [fates[number] for number in sorted(fates)]


class Compared:
    """What became of the requests of several loads, ours and Dynamo's."""

    def __init__(self, loads: Iterable[Load], theirs: dict[str, list[Fate]], newer: bool = False) -> None:
        self.pairs = [(load, ours(load, newer), theirs[load["name"]]) for load in loads]
        self.both = [pair for _, mine, other in self.pairs for pair in zip(mine, other, strict=True)]
        self.alike = sum(one.is_like(two) for one, two in self.both)
        self.again = [sum(fate.admissions - 1 for fate in fates) for fates in zip(*self.both, strict=True)]
        self.cached = [sum(fate.cached for fate in fates) for fates in zip(*self.both, strict=True)]
        self.ends = [max(f.last_ms for f in mine) / max(f.last_ms for f in other) for _, mine, other in self.pairs]
        for load, mine, other in self.pairs:
            for fates in (mine, other):
                assert [fate.output for fate in fates] == [output for _, _, output, _ in load["requests"]]
                assert self._most_at_once(fates) <= load["engine"]["max_num_seqs"]

    @staticmethod
    def _most_at_once(fates: list[Fate]) -> int:
        """Between their first and last tokens; those that were thrown out in between are not counted."""
        turns = [(ms, turn) for f in fates if f.admissions == 1 for ms, turn in ((f.first_ms, 1), (f.last_ms, -1))]
        running = most = 0
        for _, turn in sorted(turns):
            running += turn
            most = max(most, running)
        return most

    def __str__(self) -> str:
        ends = f"{min(self.ends):.3f} to {max(self.ends):.3f}, median {statistics.median(self.ends):.3f}"
        return (
            f"{len(self.pairs)} loads, {self.alike} of {len(self.both)} requests alike, cached {self.cached}, "
            f"let in again {self.again}, ends {ends}"
        )


def compared(kind: str, engine: str, theirs: dict[str, list[Fate]], newer: bool = False) -> Compared:
    found = Compared(LOADS[kind, engine], theirs, newer)
    print(f"\n{kind}, {engine}{' 0.5.23' if newer else ''}: {found}")
    return found


@pytest.mark.parametrize("kind", ROOMY)
def test_vllm_takes_the_same_steps(kind: str, theirs: dict[str, list[Fate]]) -> None:
    found = compared(kind, "vllm", theirs)
    assert found.alike == len(found.both)
    assert (found.cached[0] > 0) == ("shared" in kind)


@pytest.mark.parametrize("kind", SMALL)
def test_vllm_preempts_the_same_requests(kind: str, theirs: dict[str, list[Fate]]) -> None:
    found = compared(kind, "vllm", theirs)
    assert found.again[0] > 50
    for mine, other in found.both:
        assert mine[3:] == other[3:]
        # less than any step: what a reply that is computed again costs is not quite Dynamo's
        assert abs(mine.first_ms - other.first_ms) < 2 and abs(mine.last_ms - other.last_ms) < 2


@pytest.mark.parametrize("kind", [*ROOMY, "lpm"])
def test_sglang_takes_the_same_steps(kind: str, theirs: dict[str, list[Fate]]) -> None:
    found = compared(kind, "sglang", theirs, newer=True)
    assert found.alike == len(found.both)
    older = compared(kind, "sglang", theirs)
    assert older.cached == found.cached
    assert all(0.9 < end < 1.1 for end in older.ends)


def test_older_sglang_takes_the_same_steps_where_nobody_waits_for_a_slot(theirs: dict[str, list[Fate]]) -> None:
    loads = [load for kind in (*ROOMY, "lpm") for load in LOADS[kind, "sglang"]]
    free = [load for load in loads if (load["concurrency"] or 1000) < load["engine"]["max_num_seqs"]]
    found = Compared(free, theirs)
    assert len(free) > 5 and found.alike == len(found.both)


def test_older_sglang_fills_a_slot_one_step_later(theirs: dict[str, list[Fate]]) -> None:
    """Two slots, three requests. Its own classes decide, in tests/vllm/test_scheduler_sglang.py."""
    (load,) = LOADS["a slot", "sglang"]
    mine, other = ours(load), theirs[load["name"]]
    assert mine[0].is_like(other[0])
    assert mine[2].first_ms - other[2].first_ms == pytest.approx(5.75, abs=0.01)  # a token for the one that runs
    assert mine[1].last_ms == pytest.approx(other[1].last_ms, abs=SAME_MS)


@pytest.mark.parametrize("kind", SMALL)
def test_sglang_ends_as_soon_where_memory_runs_out(kind: str, theirs: dict[str, list[Fate]]) -> None:
    """Step by step they differ; docs/lab/predicted_models.md says in what."""
    found = compared(kind, "sglang", theirs, newer=True)
    assert found.again[0] > 0 and found.again[1] > 0
    assert found.cached[0] == pytest.approx(found.cached[1], rel=0.05)
    assert all(0.95 < end < 1.05 for end in found.ends)
    assert all(0.9 < end < 1.1 for end in compared(kind, "sglang", theirs).ends)
