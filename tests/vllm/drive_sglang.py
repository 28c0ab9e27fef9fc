"""Runs SGLang's own scheduler on made-up requests, on a CPU and with nothing computed. Needs .venv-vllm.

    .venv-vllm/bin/python tests/vllm/drive_sglang.py <workloads.json >steps.jsonl

The loop (event_loop_overlap, event_loop_normal), what it calls of Scheduler, ScheduleBatch, PrefillAdder, RadixCache
and ChunkCache, and the pools are SGLang's; not run are its processes, its model and what is sent to clients. SGLang's
wheel is installed without what it needs of a GPU: modules that the scheduler names and never uses are empty here.

In: a list of sglang_workload.Workload. A request is added once `comes` steps have been scheduled, or earlier if nothing
else is left to do. Its tokens are made up so that two are equal exactly if key of the segment and offset in it are.

Out: for each step, in order, a line {"workload", "tokens", "free", "evictable", "waiting", "ratio", "cached",
"retracted", "emitted", "finished"}: "tokens" are [request, tokens] that the step computes, in order; "free" and
"evictable" tokens, and the rest, after it was scheduled.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections import deque
from typing import Any

NEVER_USED = (
    "IPython", "PIL", "flashinfer", "gguf", "sgl_kernel", "soundfile", "torchvision", "transformers",
    "sglang.jit_kernel", "sglang.srt.configs", "sglang.srt.disaggregation", "sglang.srt.distributed",
    "sglang.srt.layers", "sglang.srt.lora", "sglang.srt.model_loader", "sglang.srt.models", "sglang.srt.multimodal",
    "sglang.srt.speculative.eagle_info", "sglang.srt.utils.hf_transformers_patches",
)  # fmt: skip
LONGEST = 1 << 16


class _Named(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __or__(cls, _: object) -> Any:
        return cls

    __ror__ = __getitem__ = __or__


class Nothing(metaclass=_Named):
    """Any name of a module that is never used."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *given: Any, **_: object) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class Unused(types.ModuleType):
    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Nothing,), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        never = any(name == each or name.startswith(each + ".") for each in NEVER_USED)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if never else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Unused(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, Finder())

import torch  # noqa: E402
from sglang.srt import server_args as arguments  # noqa: E402
from sglang.srt.managers import schedule_batch, schedule_policy  # noqa: E402
from sglang.srt.managers import scheduler as schedulers  # noqa: E402
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.chunk_cache import ChunkCache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402


class Idle(Exception):
    """Nothing is left to do."""


class Result(types.SimpleNamespace):
    def __getattr__(self, name: str) -> None:
        return None


class Driven(Scheduler):
    """SGLang's scheduler without what makes it."""

    def __init__(self, workload: dict[str, Any]) -> None:
        self.server_args = args = arguments.ServerArgs.__new__(arguments.ServerArgs)
        for name, default in vars(arguments.ServerArgs).items():
            if not name.startswith("_") and isinstance(default, (int, float, str, type(None))):
                setattr(args, name, default)
        args.attention_backend = "torch_native"
        args.page_size = 1
        args.pp_max_micro_batch_size = workload["max_running"]
        args.prefill_max_requests = None
        arguments.set_global_server_args_for_scheduler(args)
        self.workload = workload
        self.steps: list[dict[str, Any]] = []
        self.reqs: dict[str, Req] = {}
        self.coming = deque(enumerate(workload["requests"]))
        self.retracted: list[int] = []
        self.told = 0
        kv, device = workload["kv_tokens"], "cpu"
        self.page_size = self.pp_size = self.tp_size = self.dp_size = 1
        self.req_to_token_pool = ReqToTokenPool(workload["max_running"] + 8, 8192, device, False)
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(kv, torch.float32, device, None, False)
        pools = CacheInitParams(
            disable=not workload["caching"], req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator, page_size=1,
        )  # fmt: skip
        self.tree_cache = RadixCache(pools) if workload["caching"] else ChunkCache(pools)
        self.model_config = Result(
            is_encoder_decoder=False, is_matryoshka=False, vocab_size=1 << 60, is_hybrid_swa=False
        )
        self.spec_algorithm = Result(is_none=lambda: True)
        self.enable_overlap = workload["overlap"]
        self.max_prefill_tokens = workload["max_prefill_tokens"]
        self.max_running_requests = workload["max_running"]
        self.chunked_prefill_size = workload["chunk_tokens"]
        self.chunked_req = None
        self.is_mixed_chunk = workload["mixed"]
        self.truncation_align_size = None
        self.waiting_queue: list[Req] = []
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        self.last_batch = self.cur_batch = None
        self.forward_ct = self.max_prefill_bs = self.num_retracted_reqs = self.num_generated_tokens = 0
        self.forward_ct_decode = self.priority_scheduling_preemption_threshold = 0
        self.schedule_policy = "lpm" if workload["lpm"] else "fcfs"
        self.schedule_low_priority_values_first = False
        self.grammar_manager = Result(has_waiting_grammars=lambda: False)
        self.disaggregation_mode = schedulers.DisaggregationMode.NULL
        self.is_generation = True
        self.device = device
        Scheduler.init_schedule_policy(self)

    def __getattr__(self, name: str) -> Any:
        """What is off by default, and what only tells."""
        if name in ("dllm_config", "recv_skipper", "prefill_delayer"):
            return None
        if name.startswith(("enable_", "require_", "is_")) or name == "_engine_paused":
            return False
        raise AttributeError(name)

    # what the loop calls that has to do with others
    def recv_requests(self) -> list[Any]:
        busy = self.waiting_queue or self.chunked_req or self.last_batch or not self.running_batch.is_empty()
        while self.coming and (self.coming[0][1][2] <= len(self.steps) or not busy):
            busy = True
            index, (prompt, output, _, segments) = self.coming.popleft()
            tokens = [key * LONGEST + offset for key, size in segments for offset in range(size)]
            rest = prompt + output - len(tokens)
            tokens += [(index + 1_000_000) * LONGEST + offset for offset in range(rest)]
            sampling = SamplingParams(max_new_tokens=output, ignore_eos=workload_ignores(self.workload), temperature=0)
            sampling.normalize(None)
            req = Req(str(index), "", tokens[:prompt], sampling, vocab_size=1 << 60, stream=True)
            req.reply = tokens[prompt:]
            req.sampling_params.stop_strs = []
            self.reqs[req.rid] = req
            self.waiting_queue.append(req)
        if not busy:
            raise Idle
        return []

    def process_input_requests(self, _: object) -> None:
        pass

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        self.retracted.append(int(req.rid))
        self.waiting_queue.append(req)

    def _get_num_pending_tokens(self, **_: object) -> int:
        return 0

    def run_batch(self, batch: ScheduleBatch) -> Result:
        self.forward_ct += 1
        extend = batch.forward_mode.is_extend()
        sizes = batch.extend_lens if extend else [1] * batch.batch_size()
        tree = self.tree_cache
        self.steps.append({
            "workload": self.workload["name"],
            "tokens": [[int(req.rid), size] for req, size in zip(batch.reqs, sizes, strict=True)],
            "free": self.token_to_kv_pool_allocator.available_size(),
            "evictable": tree.evictable_size() if self.workload["caching"] else 0,
            "waiting": len(self.waiting_queue), "ratio": round(self.new_token_ratio, 9),
            "cached": sum(req.cached_tokens for req in self.reqs.values()),
            "retracted": self.retracted, "emitted": [], "finished": [],
        })  # fmt: skip
        self.retracted = []
        batch.output_ids = torch.zeros(batch.batch_size(), dtype=torch.int64)
        return Result(can_run_cuda_graph=False)

    def process_batch_result(self, batch: ScheduleBatch, result: Result) -> None:
        before = {req.rid: len(req.output_ids) for req in batch.reqs}
        result.next_token_ids = Next([req.reply[min(len(req.output_ids), len(req.reply) - 1)] for req in batch.reqs])
        if batch.forward_mode.is_decode():
            self.process_batch_result_decode(batch, result)
        else:
            self.process_batch_result_prefill(batch, result)
        step = self.steps[self.told]
        self.told += 1
        grown = [req for req in batch.reqs if len(req.output_ids) > before[req.rid]]
        step["emitted"] = [int(req.rid) for req in grown]
        step["finished"] = [int(req.rid) for req in grown if req.finished()]

    def on_idle(self) -> None:
        self.new_token_ratio = self.init_new_token_ratio

    def _tells(self, *_: object, **__: object) -> None:
        pass

    stream_output = report_decode_stats = report_prefill_stats = maybe_collect_routed_experts = _tells
    maybe_collect_customized_info = _maybe_update_reasoning_tokens = _mamba_prefix_cache_update = _tells
    _abort_on_waiting_timeout = _abort_on_running_timeout = launch_batch_sample_if_needed = _tells
    self_check_during_busy = update_spec_metrics = _tells

    def maybe_prepare_mlp_sync_batch(self, batch: Any, need_sync: Any = None) -> Any:
        return batch

    _maybe_prepare_ngram_embedding = maybe_prepare_mlp_sync_batch


class Next(list[int]):
    def tolist(self) -> list[int]:
        return list(self)


def workload_ignores(workload: dict[str, Any]) -> bool:
    return bool(workload["ignore_eos"])


class SamplingNothing:
    penalizer_orchestrator = Result(is_required=False)

    def filter_batch(self, *_: object) -> None:
        pass

    merge_batch = filter_batch

    @classmethod
    def from_schedule_batch(cls, *_: object) -> SamplingNothing:
        return cls()


def main() -> None:
    schedule_batch.SamplingBatchInfo = SamplingNothing
    for parallel in ("is_nsa_prefill_cp_in_seq_split", "is_prefill_context_parallel_enabled"):
        setattr(schedule_policy, parallel, lambda: False)
    out = sys.stdout
    for workload in json.load(sys.stdin):
        driven = Driven(workload)
        with contextlib.suppress(Idle):
            (driven.event_loop_overlap if workload["overlap"] else driven.event_loop_normal)()
        for step in driven.steps:
            print(json.dumps(step), file=out)


if __name__ == "__main__":
    main()
