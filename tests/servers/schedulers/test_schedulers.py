"""The schedulers: what must hold for any load, and answers known from the servers themselves."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.schedulers import Rejected, Scheduler, Sequence, Step
from servers.schedulers.lightllm import LightLLM2310, LightLLMNow
from servers.schedulers.sglang import Sglang
from servers.schedulers.tgi import Tgi1, Tgi3
from servers.schedulers.vllm import Vllm02, VllmV0, VllmV1

Make = Callable[[int], Scheduler]


def made(scheduler: Any, kv_tokens: int, **settings: float) -> Any:
    return scheduler(kv_tokens, scheduler.Settings(**settings))


# limits so small that small loads meet them
SCHEDULERS: dict[str, Make] = {
    "vllm@v1": lambda kv: made(VllmV1, kv, max_running=6, budget_tokens=48),
    "vllm@v1, one step at a time": lambda kv: made(VllmV1, kv, max_running=6, budget_tokens=48, async_scheduling=False),
    "vllm@v1, prompts capped": lambda kv: made(
        VllmV1, kv, max_running=6, budget_tokens=48, long_prefill_token_threshold=9
    ),
    "vllm@v0": lambda kv: made(VllmV0, kv, max_model_len=160, max_num_seqs=6, max_num_batched_tokens=160),
    "vllm@0.2": lambda kv: made(
        Vllm02, kv, max_model_len=160, max_num_seqs=6, max_num_batched_tokens=160, max_paddings=40
    ),
    "tgi@1": lambda kv: made(Tgi1, kv, max_batch_prefill_tokens=96, max_waiting_tokens=4, max_concurrent_requests=12),
    "tgi@3": lambda kv: made(Tgi3, kv, max_batch_prefill_tokens=40, max_concurrent_requests=12),
    "tgi@3, few tokens a step": lambda kv: made(Tgi3, kv, max_batch_prefill_tokens=2),
    "tgi@3, paged": lambda kv: made(
        Tgi3, kv, max_batch_prefill_tokens=96, chunking=False, block_tokens=16, max_waiting_tokens=4, max_batch_size=5
    ),
    "sglang": lambda kv: made(Sglang, kv, chunked_prefill_size=48, max_running_requests=6),
    "sglang, outputs unknown, mixed": lambda kv: made(
        Sglang, kv, chunked_prefill_size=48, max_running_requests=6, ignore_eos=False, mixed_chunk=True
    ),
    "sglang, one step at a time": lambda kv: made(Sglang, kv, chunked_prefill_size=48, overlap_schedule=False),
    "newer sglang": lambda kv: made(Sglang, kv, chunked_prefill_size=48, max_running_requests=6, newer=True),
    "newer sglang, outputs unknown, mixed": lambda kv: made(
        Sglang, kv, chunked_prefill_size=48, max_running_requests=6, ignore_eos=False, mixed_chunk=True, newer=True
    ),
    "lightllm@2310": lambda kv: made(LightLLM2310, kv, batch_max_tokens=96, running_max_req_size=6, max_wait_tokens=3),
    "lightllm@now": lambda kv: made(LightLLMNow, kv, batch_max_tokens=64, running_max_req_size=6),
    "lightllm@now, outputs unknown": lambda kv: made(
        LightLLMNow, kv, batch_max_tokens=64, ignores_eos=False, router_token_ratio=2.0
    ),
    "lightllm@now, not aggressive": lambda kv: made(
        LightLLMNow, kv, batch_max_tokens=64, chunked_prefill_size=16, aggressive=False, router_max_wait_tokens=3
    ),
}


class Request(NamedTuple):
    """One of a load: `gap` steps after the one before; `leaves` steps after it came its client goes, if not None."""

    prompt: int
    output: int
    gap: int
    leaves: int | None
    segments: tuple[tuple[int, int], ...] = ()


class Run:
    """A load through a scheduler, as the engine would drive it, in steps for time."""

    def __init__(self, scheduler: Scheduler, load: list[Request]) -> None:
        self.scheduler = scheduler
        self.admitted: list[Sequence] = []
        self.cancelled: set[Sequence] = set()
        self.tokens: dict[Sequence, int] = {}
        self.trace: list[tuple[tuple[int, ...], int, int, int, float]] = []
        under_way: deque[Step] = deque()
        coming = deque(zip(accumulate(request.gap for request in load), range(len(load)), load, strict=True))
        leaving: dict[int, list[Sequence]] = {}
        now = 0
        while coming or leaving or under_way:
            assert now < 20_000, "somebody starves"
            while coming and coming[0][0] <= now:
                _, index, request = coming.popleft()
                sequence = Sequence(index, request.prompt, request.output, request.segments)
                try:
                    scheduler.admit(sequence)
                except Rejected:
                    continue
                self.admitted.append(sequence)
                self.tokens[sequence] = 0
                if request.leaves == 0:  # gone before the front end is through
                    scheduler.cancel(sequence)
                    self.cancelled.add(sequence)
                elif request.leaves is not None:
                    leaving.setdefault(now + request.leaves, []).append(sequence)
                scheduler.add(sequence)
            for sequence in leaving.pop(now, []):
                if not sequence.done:
                    self.cancelled.add(sequence)
                    sequence.done = sequence.index % 2 == 0  # the engine may have said so itself
                scheduler.cancel(sequence)
            self._check()
            self._fill(under_way)
            if under_way:
                step = under_way.popleft()
                scheduler.finish(step)
                for sequence in step.emits:
                    self.tokens[sequence] += 1
                self._check()
                self._fill(under_way)
            now += 1
        self._fill(under_way)
        assert not under_way

    def _fill(self, under_way: deque[Step]) -> None:
        while len(under_way) < self.scheduler.depth:
            step = self.scheduler.schedule()
            self._check()
            if step is None:
                return
            assert step.decode_rows or step.prefill_rows
            assert len(set(step.emits)) == len(step.emits) <= step.decode_rows + step.prefill_rows
            emits = tuple(sequence.index for sequence in step.emits)
            self.trace.append((emits, step.decode_rows, step.decode_context, step.prefill_tokens, step.prefill_work))
            under_way.append(step)

    def _check(self) -> None:
        assert 0 <= self.scheduler.used_tokens <= self.scheduler.kv_tokens


outputs = st.integers(1, 60) | st.integers(60, 120)  # LightLLM takes no mean output to be under 64
loads = st.lists(
    st.builds(Request, st.integers(1, 90), outputs, st.integers(0, 6), st.none() | st.integers(0, 80)), max_size=30
)


@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=60, deadline=None)
@given(load=loads, kv_tokens=st.integers(120, 900))
def test_all_get_their_tokens_and_leave_nothing_behind(name: str, load: list[Request], kv_tokens: int) -> None:
    run = Run(SCHEDULERS[name](kv_tokens), load)
    for sequence in run.admitted:
        assert run.tokens[sequence] == sequence.output or sequence in run.cancelled
        assert run.tokens[sequence] <= sequence.output
        assert sequence.done
    scheduler = run.scheduler
    assert (scheduler.used_tokens, scheduler.waiting, scheduler.running) == (0, 0, 0)
    assert scheduler.preemptions == sum(sequence.preemptions for sequence in run.admitted)
    assert Run(SCHEDULERS[name](kv_tokens), load).trace == run.trace


@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=15, deadline=None)
@given(load=loads)
def test_with_memory_for_all_each_token_is_computed_once(name: str, load: list[Request]) -> None:
    run = Run(SCHEDULERS[name](40_000), [request._replace(leaves=None) for request in load])
    assert run.scheduler.preemptions == 0
    # the last token of a reply is given, not computed
    wanted = sum(sequence.prompt + sequence.output - 1 for sequence in run.admitted)
    computed = sum(decode_rows + prefill_tokens for _, decode_rows, _, prefill_tokens, _ in run.trace)
    if name == "vllm@0.2":  # computes paddings too
        assert computed >= wanted
    elif name.startswith(
        ("lightllm@now", "sglang")
    ):  # and a token that nobody gets, unless that step was not under way yet
        assert wanted <= computed <= wanted + len(run.admitted)
    else:
        assert computed == wanted


def finish_all(scheduler: Scheduler, steps: int) -> list[Step]:
    """So many steps, each finished before the next."""
    done: list[Step] = []
    for _ in range(steps):
        step = scheduler.schedule()
        if step is None:
            break
        scheduler.finish(step)
        done.append(step)
    return done


def enter(scheduler: Scheduler, *requests: tuple[int, int]) -> list[Sequence]:
    sequences = [Sequence(index, prompt, output) for index, (prompt, output) in enumerate(requests)]
    for sequence in sequences:
        scheduler.admit(sequence)
        scheduler.add(sequence)
    return sequences


def rows(step: Step | None) -> tuple[int, int]:
    return (step.prefill_rows, step.decode_rows) if step else (0, 0)


# TGI: its own tests of the queue (router/src/queue.rs, backends/v3/src/queue.rs), in blocks for their tokens


def tgi1(blocks: int) -> Tgi1:
    return made(Tgi1, 16 * blocks, max_batch_prefill_tokens=16 * blocks)


def test_tgi_an_empty_queue_gives_no_batch() -> None:
    assert tgi1(1).schedule() is None
    assert made(Tgi3, 16).schedule() is None


def test_tgi_takes_all_that_fit_and_not_fewer_than_it_waits_for() -> None:
    scheduler = made(Tgi1, 2048, waiting_served_ratio=1.0)
    enter(scheduler, (1, 16), (1, 16))
    assert rows(scheduler.schedule()) == (2, 0)
    scheduler.finish(Step())
    enter(scheduler, (1, 16))
    assert rows(scheduler.schedule()) == (0, 2)  # one waits, two run: two would have to wait
    assert (scheduler.waiting, scheduler.running) == (1, 2)
    enter(scheduler, (1, 16))
    assert rows(scheduler.schedule()) == (2, 0)


def test_tgi_a_batch_is_as_large_as_its_budget_and_the_rest_keep_their_turn() -> None:
    scheduler = tgi1(2)  # a prompt of one block and an output of one
    sequences = enter(scheduler, (16, 16), (16, 16), (16, 16))
    assert finish_all(scheduler, 1)[0].emits == sequences[:1]
    assert scheduler.waiting == 2
    larger = tgi1(4)
    enter(larger, (16, 16), (16, 16), (16, 16))
    assert rows(larger.schedule()) == (2, 0)
    assert larger.waiting == 1


def test_tgi3_max_batch_size() -> None:
    scheduler = made(Tgi3, 17, max_batch_size=1)
    enter(scheduler, (1, 1), (1, 1))
    assert rows(scheduler.schedule()) == (1, 0)
    assert scheduler.waiting == 1


def test_tgi_a_request_whose_client_left_the_queue_gives_no_batch() -> None:
    for scheduler in (tgi1(4), made(Tgi3, 64)):
        scheduler.cancel(enter(scheduler, (1, 1))[0])
        assert scheduler.schedule() is None
        assert (scheduler.waiting, scheduler.running, scheduler.used_tokens) == (0, 0, 0)


# TGI: what its defaults do to a burst


@pytest.mark.parametrize("scheduler", [made(Tgi1, 200_000), made(Tgi3, 200_000)])
def test_tgi_refuses_requests_129_to_1000_of_a_burst(scheduler: Scheduler) -> None:
    statuses: list[int] = []
    for index in range(1000):
        try:
            scheduler.admit(Sequence(index, 512, 64))
            statuses.append(200)
        except Rejected as error:
            statuses.append(error.status)
            assert str(error) == "Model is overloaded"
    assert statuses == [200] * 128 + [429] * 872


def test_tgi_a_permit_comes_free_with_the_reply_or_the_client() -> None:
    scheduler = made(Tgi1, 1000, max_concurrent_requests=2)
    first, _ = enter(scheduler, (10, 1), (10, 1))
    with pytest.raises(Rejected):
        scheduler.admit(Sequence(2, 10, 1))
    scheduler.cancel(first)
    scheduler.cancel(first)
    enter(scheduler, (10, 1))
    with pytest.raises(Rejected):
        scheduler.admit(Sequence(3, 10, 1))
    finish_all(scheduler, 1)
    enter(scheduler, (10, 1), (10, 1))


def test_tgi1_lets_8_prompts_of_512_tokens_in_every_20_steps() -> None:
    scheduler = made(Tgi1, 200_000)
    enter(scheduler, *[(512, 200)] * 100)
    steps = finish_all(scheduler, 100)
    prefills = [index for index, step in enumerate(steps) if step.prefill_rows]
    assert {steps[index].prefill_rows for index in prefills} == {8}
    # a prefill counts as the first of the 20, the next comes after 19 steps of decoding
    assert prefills == [0, 20, 40, 60, 80]
    assert [steps[index].decode_rows for index in (19, 21, 41)] == [8, 16, 24]


def test_tgi1_reserves_room_for_the_whole_reply() -> None:
    scheduler = made(Tgi1, 1008)
    enter(scheduler, (100, 400), (100, 400), (100, 400))
    finish_all(scheduler, 1)
    assert scheduler.used_tokens == 512  # 499 tokens, in blocks; two would want twice 112 + 400
    assert (scheduler.running, scheduler.waiting) == (1, 2)


def test_tgi3_fills_every_second_step_with_prompts_in_chunks() -> None:
    scheduler = made(Tgi3, 100_000)
    enter(scheduler, *[(512, 100)] * 40)
    steps = finish_all(scheduler, 5)
    assert [(step.prefill_tokens, step.prefill_rows, step.decode_rows) for step in steps] == [
        (8 * 512, 8, 0),
        (4096 - 8, 8, 8),  # seven prompts and 504 tokens of the eighth
        (8, 1, 15),  # the rest of it
        (4096 - 16, 8, 16),
        (16, 1, 23),
    ]
    assert [len(step.emits) for step in steps] == [8, 15, 16, 23, 24]


def test_tgi3_without_chunking_waits_for_three_tenths_of_those_running() -> None:
    scheduler = made(Tgi3, 100_000, chunking=False, block_tokens=16)
    enter(scheduler, *[(512, 100)] * 8)
    finish_all(scheduler, 1)
    enter(scheduler, (512, 100))
    assert rows(finish_all(scheduler, 1)[0]) == (0, 8)  # one is fewer than floor(8 * 0.3) = 2
    enter(scheduler, (512, 100))
    assert rows(finish_all(scheduler, 1)[0]) == (2, 0)
    assert rows(finish_all(scheduler, 1)[0]) == (0, 10)


BATCHES = json.loads(Path(__file__).with_name("tgi_batches.json").read_text())["runs"]


@pytest.mark.parametrize("run", BATCHES, ids=lambda run: f"{run['requests']} of {run['input_tokens']}")
def test_tgi3_makes_the_batches_of_a_real_router(run: dict[str, Any]) -> None:
    """A burst of which one request came first."""
    scheduler = made(
        Tgi3, 100_000_000, chunking=False, max_concurrent_requests=2000,
        max_batch_prefill_tokens=run["max_batch_prefill_tokens"], max_waiting_tokens=run["max_waiting_tokens"],
    )  # fmt: skip
    shape = run["input_tokens"], run["output_tokens"]
    enter(scheduler, shape)
    steps = finish_all(scheduler, 1)
    enter(scheduler, *[shape] * (run["requests"] - 1))
    steps += finish_all(scheduler, 10_000)
    prefills = [number for number, step in enumerate(steps) if step.prefill_rows]
    since = [None, *(after - before - 1 for before, after in pairwise(prefills))]
    assert [[steps[number].prefill_rows, gap] for number, gap in zip(prefills, since, strict=True)] == run["batches"]


@pytest.mark.parametrize(
    ("asked", "limit", "given"), [(1024, 2048, 1024), (1025, 4096, 2048), (2048, 4096, 2048), (1500, 2048, 1024)]
)
def test_tgi3_gives_long_replies_in_whole_pieces_that_fit(asked: int, limit: int, given: int) -> None:
    """As a real router 3.3.6 did."""
    scheduler = made(Tgi3, 10_000, max_total_tokens=limit)
    (sequence,) = enter(scheduler, (100, asked))
    steps = finish_all(scheduler, 5000)
    prefills = [100 + at for at in range(0, given, 1024)]  # what there is so far queues again
    assert [step.prefill_tokens for step in steps if step.prefill_rows] == prefills
    assert sequence.emitted == sequence.output == len(steps) == given
    assert scheduler.used_tokens == 0


# LightLLM and vLLM 0.2


@pytest.mark.parametrize("newer", [False, True])
def test_sglang_gives_a_slot_out_when_a_step_of_decoding_has_begun_and_0_5_23_at_once(newer: bool) -> None:
    scheduler = made(Sglang, 10_000, max_running_requests=2, overlap_schedule=False, newer=newer)
    enter(scheduler, (16, 3), (16, 6), (16, 2))
    steps = finish_all(scheduler, 20)
    late = [] if newer else [(0, 1)]
    rest = [(0, 2), (0, 1), (0, 1)] if newer else [(0, 2), (0, 1)]
    assert [rows(step) for step in steps] == [(2, 0), (0, 2), (0, 2), *late, (1, 0), *rest]


@pytest.mark.parametrize("newer", [False, True])
def test_sglang_decodes_once_more_for_nothing_and_0_5_23_does_not(newer: bool) -> None:
    scheduler = made(Sglang, 10_000, newer=newer)
    enter(scheduler, (16, 3))
    steps = [scheduler.schedule(), scheduler.schedule()]
    scheduler.finish(steps[0])
    steps.append(scheduler.schedule())
    scheduler.finish(steps[1])
    last = scheduler.schedule()
    assert [rows(step) for step in steps] == [(1, 0), (0, 1), (0, 1)]
    assert rows(last) == ((0, 0) if newer else (0, 1))


def test_lightllm2310_lets_in_what_its_estimate_says_will_fit() -> None:
    # two of 100 + 50 hold at most 300 at once; it wants to stay below
    for kv_tokens, together in ((300, 1), (301, 2)):
        scheduler = made(LightLLM2310, kv_tokens)
        enter(scheduler, (100, 50), (100, 50))
        finish_all(scheduler, 1)
        assert scheduler.running == together
    # one that is nearly through leaves before the other has grown
    scheduler = made(LightLLM2310, 260)
    enter(scheduler, (100, 50))
    finish_all(scheduler, 46)
    enter(scheduler, (90, 50))
    finish_all(scheduler, 1)
    assert scheduler.running == 2


def test_lightllm2310_decodes_ten_times_between_prefills() -> None:
    scheduler = made(LightLLM2310, 20_000)
    enter(scheduler, *[(512, 100)] * 30)
    steps = finish_all(scheduler, 34)
    assert [index for index, step in enumerate(steps) if step.prefill_rows] == [0, 11, 22, 33]
    assert {step.prefill_rows for step in steps} == {0, 6}  # 3333 tokens: a sixth of the cache


def test_lightllm_prefills_in_groups_as_a_real_burst_showed() -> None:
    # H200, 1.2.0, --batch_max_tokens 8192 --running_max_req_size 1000, 200,675 tokens: groups of 16 and 15 by turns,
    # 338 to 340 requests at a time, decoding only when all that are in are prefilled
    scheduler = made(LightLLMNow, 200_675, batch_max_tokens=8192, running_max_req_size=1000)
    run = Run(scheduler, [Request(512, 64, 0, None) for _ in range(1000)])
    waves = [[step[3] // 512 for step in steps] for decodes, steps in groupby(run.trace, lambda step: step[1] > 0)][::2]
    assert [sum(groups) for groups in waves] == [338, 1, 338, 1, 322]  # the real one had 340, 339 and 322 at a time
    for groups in (waves[0], waves[2], waves[4]):
        assert groups[3:-1] == ([15, 16] * 20 if groups[3] == 15 else [16, 15] * 20)[: len(groups) - 4]
    assert scheduler.preemptions == 0


def test_lightllm_decodes_once_more_for_nothing_and_frees_two_steps_later() -> None:
    scheduler = made(LightLLMNow, 10_000)
    enter(scheduler, (100, 2), (100, 9))
    under_way = [scheduler.schedule(), scheduler.schedule()]
    seen: list[tuple[int, int, int]] = []
    for _ in range(4):
        step = under_way.pop(0)
        assert step is not None
        scheduler.finish(step)
        seen.append((step.decode_rows, len(step.emits), scheduler.used_tokens))
        under_way.append(scheduler.schedule())
    assert [(decodes, emits) for decodes, emits, _ in seen] == [(0, 2), (2, 2), (2, 1), (1, 1)]
    assert [used for _, _, used in seen] == [202, 204, 205, 104]


def test_vllm_a_capped_prompt_takes_its_share_of_a_step_that_has_others() -> None:
    scheduler = made(VllmV1, 4096, async_scheduling=False, long_prefill_token_threshold=40)
    steps = []
    scheduler.add(Sequence(0, 100, 2))
    scheduler.add(Sequence(1, 30, 1))
    while (step := scheduler.schedule()) is not None:
        steps.append(step.chunks)
        scheduler.finish(step)
    assert steps == [[(0, 40), (0, 30)], [(40, 60)], []]  # alone, it takes what is left of its prompt; then it decodes


def test_vllm_v0_computes_whole_prompts_first_and_by_themselves() -> None:
    scheduler = made(VllmV0, 100_000)
    enter(scheduler, *[(512, 3)] * 7, (1024, 3))
    steps = finish_all(scheduler, 3)
    assert [step.prefill_tokens for step in steps] == [4096 - 512, 1024, 0]  # together they would be 4608 tokens
    assert [step.decode_rows for step in steps] == [0, 0, 8]


def test_vllm02_a_prompt_step_is_padded_and_limited() -> None:
    scheduler = made(Vllm02, 100_000)
    enter(scheduler, *[(512, 10)] * 20)
    step = finish_all(scheduler, 1)[0]
    assert (step.prefill_rows, step.prefill_tokens) == (8, 4096)
    paddings = made(Vllm02, 100_000)
    enter(paddings, (300, 5), (100, 5), (100, 5), (400, 5))
    # 200 of padding; then 400, too many
    assert [step.prefill_tokens for step in finish_all(paddings, 3)] == [600, 100, 400]


def test_vllm02_keeps_a_hundredth_of_its_blocks_from_prompts() -> None:
    scheduler = made(Vllm02, 16 * 200)
    enter(scheduler, (16 * 100, 5), (16 * 99, 5), (16, 5))
    finish_all(scheduler, 2)
    assert (scheduler.running, scheduler.waiting) == (1, 2)  # two blocks are left untouched: 98 would have done


@pytest.mark.parametrize(
    ("scheduler", "status"),
    [
        (made(VllmV1, 1024), 400),
        (made(VllmV0, 1024), 400),
        (made(Vllm02, 1024), 400),
        (made(Tgi1, 1024), 422),
        (made(Tgi3, 1024), 422),
        (made(LightLLM2310, 1024), 500),
        (made(LightLLMNow, 1024), 400),
    ],
)
def test_what_memory_can_never_hold_is_refused_at_the_door(scheduler: Scheduler, status: int) -> None:
    with pytest.raises(Rejected) as refusal:
        scheduler.admit(Sequence(0, 700, 400))
    assert refusal.value.status == status
    enter(scheduler, (300, 100))
    finish_all(scheduler, 200)
    assert scheduler.used_tokens == 0
