"""Servers' traces whose truth is known: made kernel by kernel, with what each takes and what it counts as.

A decode step is what a Llama does: rows of (kernel, operator, microseconds, kind, part), one after the other on one
stream with a gap of GAP_US after each, and idle for IDLE_US at its end.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from loadgen.breakdown.tables import AFTER, ATTENTION, BEFORE, BETWEEN, FFN, IDLE

GAP_US, IDLE_US = 1, 100
LAUNCH_AHEAD_US, LAUNCH_US = 40, 0.5


class Work(NamedTuple):
    kernel: str
    operator: str
    us: int
    kind: str
    part: str


NORM = ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", "_C::fused_add_rms_norm", 5, "RMSNorm")
REDUCE = ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "vllm::all_reduce", 10)
ATTEND = "vllm::unified_attention_with_output"


def layer(tp: int) -> list[Work]:
    reduce = [REDUCE] * (tp > 1)
    flash = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>"
    rotary, silu = "void vllm::rotary_embedding_kernel<c10::BFloat16, true>", "void vllm::act_and_mul_kernel<...>"
    cache = ("void vllm::reshape_and_cache_flash_kernel<...>", "vllm::unified_kv_cache_update")
    return [
        Work(*NORM, ATTENTION),
        Work("nvjet_tst_128x8_64x12_4x1_v_bz_TNT", "aten::mm", 40, "GEMM", ATTENTION),
        Work(rotary, "_C::rotary_embedding", 4, "RoPE", ATTENTION),
        Work(*cache, 3, "Element-Wise", ATTENTION),
        Work(flash, ATTEND, 30, "Attention", ATTENTION),
        Work("void cutlass::device_kernel<flash::FlashAttnFwdCombine<...>>", ATTEND, 2, "Attention", ATTENTION),
        Work("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "aten::mm", 20, "GEMM", ATTENTION),
        *(Work(*each, "AllReduce", ATTENTION) for each in reduce),
        Work(*NORM, FFN),
        Work("nvjet_tst_192x8_64x8_4x1_v_bz_TNT", "aten::mm", 60, "GEMM", FFN),
        Work(silu, "_C::silu_and_mul", 6, "Element-Wise", FFN),
        Work("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "aten::mm", 30, "GEMM", FFN),
        *(Work(*each, "AllReduce", FFN) for each in reduce),
    ]


def decode(layers: int, tp: int = 1) -> list[Work]:
    gather = [Work("ncclDevKernel_AllGather_RING_LL(...)", "vllm::all_gather", 8, "AllGather", AFTER)] * (tp > 1)
    lookup = "void at::native::(anonymous namespace)::indexSelectLargeIndex<...>"
    argmax = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>"
    return [
        Work("Memcpy HtoD (Pinned -> Device)", "aten::copy_", 2, "Other", BEFORE),
        Work(lookup, "aten::embedding", 3, "Element-Wise", BEFORE),
        *(work for _ in range(layers) for work in layer(tp)),
        Work(*NORM, AFTER),
        Work("nvjet_tst_256x8_64x6_2x1_v_bz_TNT", "aten::mm", 50, "GEMM", AFTER),
        *gather,
        Work(argmax, "aten::argmax", 4, "Other", AFTER),
    ]


class Truth(NamedTuple):
    """Milliseconds of one step."""

    step_ms: float
    kinds: dict[str, float]
    parts: dict[str, float]


def truth(works: list[Work]) -> Truth:
    """A gap counts with the part that it follows; the last, with the idle time, is between steps."""
    kinds: dict[str, float] = defaultdict(float)
    parts: dict[str, float] = defaultdict(float)
    for work in works:
        kinds[work.kind] += work.us / 1000
        parts[work.part] += (work.us + GAP_US) / 1000
    parts[works[-1].part] -= GAP_US / 1000
    parts[BETWEEN] = (GAP_US + IDLE_US) / 1000
    kinds[IDLE] = (len(works) * GAP_US + IDLE_US) / 1000
    return Truth(sum(parts.values()), dict(kinds), dict(parts))


def event(name: str, category: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "tid": tid, "args": args}


def with_device(
    works: list[Work], steps: int, *, graph: bool, annotation: str | None = "execute_context_0(0)_generation_8(8)"
) -> list[dict[str, Any]]:
    """Each step with what the host did for it: a graph's one launch (all but the first two and the last kernel), or one
    launch in an operator for each kernel."""
    events = []
    at = 1_000_000
    number = 0
    for _ in range(steps):
        host = at - LAUNCH_AHEAD_US
        if annotation is not None:
            events.append(event(annotation, "user_annotation", host - 1, LAUNCH_AHEAD_US))
        number += 1
        graph_number = number
        if graph:
            events.append(event("cudaGraphLaunch", "cuda_runtime", host + 1.5, 0.5, correlation=graph_number))
        for index, work in enumerate(works):
            category = "gpu_memcpy" if work.kernel.startswith("Memcpy") else "kernel"
            if graph and 2 <= index < len(works) - 1:
                mine = graph_number
            else:
                number += 1
                mine = number
                launch_at = host + index * LAUNCH_US
                if not graph:
                    events.append(event(work.operator, "cpu_op", launch_at, LAUNCH_US))
                events.append(event("cudaLaunchKernel", "cuda_runtime", launch_at, LAUNCH_US / 2, correlation=mine))
            events.append(event(work.kernel, category, at, work.us, tid=7, correlation=mine))
            at += work.us + GAP_US
        at += IDLE_US
    return events


def on_host(works: list[Work], steps: int) -> list[dict[str, Any]]:
    """The same without a device: operators in the server's own ranges, their parts within them."""
    events = []
    at = 1_000_000
    for _ in range(steps):
        length = sum(work.us + GAP_US for work in works)
        events.append(event("execute_context_0(0)_generation_8(8)", "user_annotation", at, length + 1))
        events.append(event("gpu_model_runner: forward", "user_annotation", at, length))
        for work in works:
            events.append(event(work.operator, "cpu_op", at, work.us))
            if work.us > 3:
                events.append(event("aten::empty", "cpu_op", at + 1, 1))
            at += work.us + GAP_US
        at += IDLE_US
    return events


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    text = json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
