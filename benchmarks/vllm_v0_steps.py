"""vllm@v0 beside the Scheduler of vLLM 0.10.0: the same loads step by step, with the steps and preemptions that differ.

    python3 -m venv .venv-v0
    .venv-v0/bin/pip install vllm==0.10.0 msgspec
    .venv-v0/bin/python benchmarks/vllm_v0_steps.py  # a minute, without a GPU

A step's requests, whether they are prompts, and how many tokens of each are computed must be alike, in the same order.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vllm.config import CacheConfig, SchedulerConfig
from vllm.core.scheduler import Scheduler
from vllm.inputs import token_inputs
from vllm.sampling_params import SamplingParams
from vllm.sequence import Logprob, SequenceGroup, SequenceStatus
from vllm.sequence import Sequence as TheirSequence

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from servers.schedulers import Sequence
from servers.schedulers.groups import BLOCK_TOKENS
from servers.schedulers.vllm import VllmV0

Steps = list[list[tuple[int, bool, int]]]  # (request, whether it is a prompt, tokens)


class Load(NamedTuple):
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    blocks: int
    requests: list[tuple[int, int, int]]  # (step before which it comes, prompt, output)


def main() -> None:
    draw = random.Random(1)
    loads = [load(draw, late) for late in [False, True] * 30]
    steps = preemptions = different = 0
    for each in loads:
        (ours, our_preemptions), (theirs, their_preemptions) = play_ours(each), play_theirs(each)
        steps, preemptions = steps + len(theirs), preemptions + their_preemptions
        different += sum(one != other for one, other in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs))
        different += our_preemptions != their_preemptions
    print(f"{len(loads)} loads, {steps:,} steps, {preemptions} preemptions; {different} differ")


def load(draw: random.Random, late: bool) -> Load:
    longest = draw.choice([160, 400, 2048])
    blocks = draw.choice([longest // 16 + 8, longest // 16 * 3, longest // 16 * 10])
    at, requests = 0, []
    for _ in range(draw.choice([20, 200])):
        at += draw.choice([0, 0, 1, 3, 20]) if late else 0
        prompt = draw.randint(1, longest - 2)
        output = draw.randint(1, min(longest - prompt, 100))
        if -(-(prompt + output) // BLOCK_TOKENS) < blocks - blocks // 100:
            requests.append((at, prompt, output))
    return Load(longest, draw.choice([2, 8, 64]), longest * draw.choice([1, 2, 4]), blocks, requests)


def arrivals(load: Load) -> Iterator[list[tuple[int, int, int]]]:
    """(request, prompt, output) that come before each step, for good."""
    waiting = [(at, (index, prompt, output)) for index, (at, prompt, output) in enumerate(load.requests)]
    step = 0
    while True:
        yield [request for at, request in waiting if at == step]
        step += 1


def play_ours(load: Load) -> tuple[Steps, int]:
    settings = VllmV0.Settings(
        max_model_len=load.max_model_len,
        max_num_seqs=load.max_num_seqs,
        max_num_batched_tokens=load.max_num_batched_tokens,
    )
    scheduler, steps, ended = VllmV0(load.blocks * BLOCK_TOKENS, settings), [], 0
    for new in arrivals(load):
        for index, prompt, output in new:
            scheduler.add(Sequence(index, prompt, output))
        if ended == len(load.requests):
            return steps, scheduler.preemptions
        step = scheduler.schedule()
        steps.append([])
        if step is not None:
            prompts = bool(step.prefill_rows)
            steps[-1] = [(s.index, prompts, s.prompt + s.sampled - 1 if prompts else 1) for s in step.emits]
            scheduler.finish(step)
            ended += sum(sequence.done for sequence in step.emits)
    raise AssertionError


def play_theirs(load: Load) -> tuple[Steps, int]:
    limits = SchedulerConfig(
        runner_type="generate",
        max_num_batched_tokens=load.max_num_batched_tokens,
        max_num_seqs=load.max_num_seqs,
        max_model_len=load.max_model_len,
        enable_chunked_prefill=False,
    )
    cache = CacheConfig(block_size=BLOCK_TOKENS, gpu_memory_utilization=0.9, swap_space=0, cache_dtype="auto")
    cache.num_gpu_blocks, cache.num_cpu_blocks = load.blocks, 0
    scheduler, steps, preemptions, ended = Scheduler(limits, cache, None), [], 0, 0
    sequences: dict[int, tuple[TheirSequence, int]] = {}
    for new in arrivals(load):
        for index, prompt, output in new:
            sequence = TheirSequence(index, token_inputs(list(range(prompt))), BLOCK_TOKENS)
            sequences[index] = sequence, output
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            scheduler.add_seq_group(SequenceGroup(str(index), [sequence], arrival_time=index, sampling_params=params))
        if ended == len(load.requests):
            return steps, preemptions
        steps.append([])
        if not scheduler.has_unfinished_seqs():
            continue
        rows, scheduled, _ = scheduler.schedule()
        assert not scheduled.ignored_seq_groups
        preemptions += scheduled.preempted
        for each, row in zip(scheduled.scheduled_seq_groups, rows, strict=True):
            index = int(each.seq_group.request_id)
            steps[-1].append((index, bool(row.is_prompt), each.token_chunk_size))
            sequence, output = sequences[index]
            sequence.data.update_num_computed_tokens(each.token_chunk_size)
            sequence.append_token_id(7, {7: Logprob(0.0)})
            if sequence.get_output_len() == output:
                sequence.status = SequenceStatus.FINISHED_LENGTH_CAPPED
                scheduler.free_seq(sequence)
                ended += 1
        scheduler.free_finished_seq_groups()
    raise AssertionError


if __name__ == "__main__":
    main()
