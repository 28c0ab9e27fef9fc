"""Runs vLLM's own V1 scheduler on made-up requests, with an executor that computes nothing. Needs .venv-vllm.

    .venv-vllm/bin/python tests/vllm/drive_scheduler.py SCRATCH_DIR <workloads.json >steps.jsonl

Scheduler, configuration and the loop around them (EngineCore.step and step_with_batch_queue) are vLLM's; only the
executor is not. It gives one token to each request whose known tokens are all computed by the end of the step.

In: a list of workload.Workload. A request is added once `comes` steps have been scheduled, or earlier if nothing else
is left to do, and aborted once `leaves` have been, unless that is null. Its tokens are made up so that two are equal
exactly if key of the segment and offset in it are; the reply's, which the executor gives, likewise.

Out: for each step that has work, in the order in which steps end, a line {"workload", "tokens", "preempted",
"free_blocks", "running", "waiting", "queried", "cached", "findable", "emitted", "finished"}. "tokens" are [request,
tokens] that the step computes; a request is named by its index; counts are those after the step was scheduled:
"queried" and "cached" tokens by vLLM's own counters, "findable" the contents in its map of cached blocks. Preemptions
of a schedule that came out empty are told with the next step that has work.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tiny_model
import torch
from vllm import SamplingParams
from vllm.config import LoRAConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from workload import Workload

BLOCK_TOKENS = 16
MAX_MODEL_LEN = 4096


@dataclass
class Step:
    tokens: list[tuple[int, int]]
    preempted: list[int]
    free_blocks: int
    running: int
    waiting: int
    queried: int
    cached: int
    findable: int
    emitted: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)


def scheduler_for(workload: Workload, model: Path) -> tuple[Scheduler, int]:
    """The scheduler that vLLM would make, and how many steps it would have under way at once."""
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=workload["caching"],
        max_num_seqs=workload["max_running"],
        max_num_batched_tokens=workload["budget_tokens"],
        long_prefill_token_threshold=workload["most_tokens"],
        scheduling_policy="priority" if workload["by_priority"] else "fcfs",
    ).create_engine_config()
    # as on a GPU: for the CPU, vLLM turns asynchronous scheduling off and has another model runner
    config.scheduler_config.async_scheduling = workload["asynchronous"]
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    config.cache_config.num_gpu_blocks = workload["blocks"]
    if workload["max_loras"]:
        config.lora_config = LoRAConfig(max_loras=workload["max_loras"])
    layer = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.bfloat16)
    scheduler_class = config.scheduler_config.get_scheduler_cls()
    assert scheduler_class is (AsyncScheduler if workload["asynchronous"] else Scheduler)
    scheduler = scheduler_class(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(workload["blocks"], [], [KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=True,
    )
    return scheduler, config.max_concurrent_batches


class StubbedExecutor:
    """Knows what the scheduler has told it, as a worker does, and computes at once. `steps`: that had work."""

    def __init__(self, scheduler: Scheduler, replies: dict[str, list[int]]) -> None:
        self.steps: list[Step] = []
        self._replies = replies  # the tokens that each request will be given
        self._scheduler = scheduler
        self._prompts: dict[str, int] = {}
        self._preempted: list[int] = []
        self._output = EMPTY_MODEL_RUNNER_OUTPUT

    def execute_model(self, scheduled: SchedulerOutput, non_block: bool = True) -> Future[ModelRunnerOutput | None]:
        done: Future[ModelRunnerOutput | None] = Future()
        self._preempted += sorted(int(name) for name in scheduled.preempted_req_ids or ())
        if not scheduled.num_scheduled_tokens:
            done.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
            return done
        known = {}
        for new in scheduled.scheduled_new_reqs:
            self._prompts[new.req_id] = len(new.prompt_token_ids)
            known[new.req_id] = (new.num_computed_tokens, len(new.prefill_token_ids or new.prompt_token_ids))
        cached = scheduled.scheduled_cached_reqs
        for name, computed, outputs in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            known[name] = (computed, self._prompts[name] + outputs)
        names = list(scheduled.num_scheduled_tokens)
        sampled = []
        for name in names:
            computed = known[name][0] + scheduled.num_scheduled_tokens[name]
            sampled.append([self._replies[name][computed - self._prompts[name]]] if computed >= known[name][1] else [])
        self._output = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)
        tokens = [(int(name), count) for name, count in scheduled.num_scheduled_tokens.items()]
        manager = self._scheduler.kv_cache_manager
        looked_up = manager.make_prefix_cache_stats()
        self.steps.append(
            Step(
                tokens, self._preempted, manager.block_pool.get_num_free_blocks(),
                *self._scheduler.get_request_counts(), looked_up.queries, looked_up.hits,
                len(manager.block_pool.cached_block_hash_to_block),
            )
        )  # fmt: skip
        self._preempted = []
        done.set_result(None)
        return done

    def sample_tokens(self, grammar: object, non_block: bool = False) -> Future[ModelRunnerOutput] | ModelRunnerOutput:
        if not non_block:
            return self._output
        done: Future[ModelRunnerOutput] = Future()
        done.set_result(self._output)
        return done


class Core(EngineCore):
    """vLLM's engine loop without its processes, workers and memory profiling."""

    def __init__(self, scheduler: Scheduler, executor: StubbedExecutor, depth: int) -> None:
        self.scheduler = scheduler
        self.model_executor = executor
        self.batch_queue_size = depth
        self.batch_queue = deque(maxlen=depth) if depth > 1 else None
        self.step_fn = self.step if depth == 1 else self.step_with_batch_queue
        self.is_mm_encoder_only = self.is_pooling_model = self.check_for_draft_tokens = False
        self.aborts_queue = queue.Queue()

    def _should_throttle_prefills(self) -> bool:
        return False

    @contextlib.contextmanager
    def _no_log(self, *_: object) -> Iterator[None]:
        yield

    log_error_detail = capture_iteration_details = _no_log

    def _attach_iteration_details(self, *_: object) -> None:
        pass

    def _attach_weight_version(self, *_: object) -> None:
        pass


def made_up(key: int, tokens: int) -> list[int]:
    """No two of them are equal, and none is equal to one of another key."""
    return [key * MAX_MODEL_LEN + offset for offset in range(tokens)]


def has_work(core: Core) -> bool:
    return bool(core.scheduler.has_requests() or core.batch_queue)


def run(workload: Workload, model: Path) -> list[Step]:
    scheduler, depth = scheduler_for(workload, model)
    replies: dict[str, list[int]] = {}
    executor = StubbedExecutor(scheduler, replies)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    init_none_hash(sha256)
    update_from_output = scheduler.update_from_output
    ended = 0

    def recorded(scheduled: SchedulerOutput, output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        nonlocal ended
        told = update_from_output(scheduled, output)
        if scheduled.num_scheduled_tokens:
            step = executor.steps[ended]
            ended += 1
            for each in (each for client in told.values() for each in client.outputs):
                step.emitted.append(int(each.request_id))
                if each.finish_reason is not None:
                    step.finished.append(int(each.request_id))
        return told

    scheduler.update_from_output = recorded
    core = Core(scheduler, executor, depth)
    coming = deque(enumerate(workload["requests"]))
    leaving: list[tuple[int, str]] = []
    while True:
        while coming and (coming[0][1][2] <= len(executor.steps) or not has_work(core)):
            index, (prompt, output, _, leaves, segments, number, priority) = coming.popleft()
            sampling = SamplingParams(max_tokens=output, ignore_eos=True)
            tokens = [token for key, length in segments for token in made_up(key, length)]
            tokens += made_up(-2 - index, prompt + output - len(tokens))
            replies[str(index)] = tokens[prompt:]
            adapter = LoRARequest(f"adapter-{number}", number, "nowhere") if number else None
            scheduler.add_request(
                Request(
                    str(index),
                    tokens[:prompt],
                    sampling,
                    None,
                    lora_request=adapter,
                    block_hasher=hasher,
                    priority=priority,
                    arrival_time=float(index),
                )
            )
            if leaves is not None:
                leaving.append((leaves, str(index)))
        gone = [index for leaves, index in leaving if leaves <= len(executor.steps)]
        if gone:
            scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
            leaving = [(leaves, index) for leaves, index in leaving if index not in gone]
        if not has_work(core):
            break
        core.step_fn()
    assert ended == len(executor.steps)
    return executor.steps


def main() -> None:
    logging.disable(logging.WARNING)
    steps_out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is not ours
    model = Path(sys.argv[1])
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps({**tiny_model.CONFIG, "max_position_embeddings": MAX_MODEL_LEN}))
    for workload in json.load(sys.stdin):
        for step in run(workload, model):
            print(json.dumps({"workload": workload["name"], **asdict(step)}), file=steps_out)
    steps_out.close()


if __name__ == "__main__":
    main()
