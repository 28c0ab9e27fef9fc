"""Traces whose every microsecond is known, and what is read from them."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import trace
from loadgen.trace import TraceError, TraceSpan, minus, seconds_within, union
from training_probe.breakdown.attribution import FUSED_ATTENTION, Attribution, attribute, innermost_parts

MAIN, AUTOGRAD, STREAM, COMMUNICATION_STREAM = 100, 200, 7, 20
US = 1e-6
NODE = "autograd::engine::evaluate_function: "


class Recorder:
    """Writes a trace as torch.profiler does: times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._correlation = 0

    def span(self, name: str, start: float, end: float, category: str = "cpu_op", tid: int = MAIN, **args: Any) -> None:
        self.events.append({
            "ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": 4e12 + start, "dur": end - start,
            "args": {"External id": len(self.events), **args},
        })  # fmt: skip

    def range(self, name: str, start: float, end: float, tid: int = MAIN) -> None:
        self.span(name, start, end, "user_annotation", tid)

    def operator(self, name: str, start: float, end: float, sequence: int, tid: int = MAIN) -> None:
        self.span(name, start, end, "cpu_op", tid, **{"Sequence number": sequence, "Fwd thread id": 0})

    def node(self, name: str, start: float, end: float, sequence: int, tid: int = AUTOGRAD) -> None:
        self.span(NODE + name, start, end, "cpu_op", tid, **{"Sequence number": sequence, "Fwd thread id": 1})

    def kernel(
        self, at: float, name: str, start: float, end: float, *, tid: int = MAIN, category: str = "kernel",
        stream: int = STREAM,
    ) -> None:  # fmt: skip
        """Launched at `at` by thread `tid`, run from start to end."""
        self._correlation += 1
        self.span("cudaLaunchKernel", at, at + 0.5, "cuda_runtime", tid, correlation=self._correlation)
        self.span(name, start, end, category, stream, correlation=self._correlation, stream=stream)

    def write(self, path: Path) -> Path:
        others = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
            {"ph": "s", "id": 3, "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": MAIN, "ts": 4e12},
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler",
             "ts": 4e12, "dur": 9e6, "args": {"Op count": 0}},
        ]  # fmt: skip
        path.write_bytes(gzip.compress(json.dumps({"schemaVersion": 1, "traceEvents": others + self.events}).encode()))
        return path


def gpu_step(record: Recorder, at: float) -> None:
    """One step of 100 us: 40 forward, 40 backward, 20 optimizer on the host; the device runs 10 us behind."""
    record.range("phase:forward", at, at + 40)
    record.range("part:Model, rest", at + 1, at + 39)
    record.range("part:QKV", at + 2, at + 10)
    record.operator("aten::linear", at + 3, at + 9, sequence=11)
    record.operator("aten::t", at + 3.1, at + 3.5, sequence=11)
    record.operator("aten::mm", at + 4, at + 8, sequence=12)
    record.kernel(at + 5, "nvjet_tst_128x256", at + 10, at + 30)  # GEMM by its operator
    record.range("part:Attention, rest", at + 12, at + 30)
    record.operator("aten::_flash_attention_forward", at + 13, at + 20, sequence=13)
    record.kernel(at + 14, "flash_fwd_kernel", at + 30, at + 36)
    record.operator("aten::mul", at + 21, at + 25, sequence=14)
    record.kernel(at + 22, "gemm_looking_name_of_an_elementwise_kernel", at + 36, at + 40)

    record.range("phase:backward", at + 40, at + 80)
    record.node("MulBackward0", at + 41, at + 45, 14, AUTOGRAD)
    record.kernel(at + 42, "elementwise_kernel", at + 50, at + 54, tid=AUTOGRAD)
    record.node("FlashBackward", at + 46, at + 56, 13, AUTOGRAD)
    record.range("part:QKV", at + 47, at + 50, AUTOGRAD)  # recomputed inside the node
    record.operator("aten::mm", at + 47.5, at + 49.5, sequence=900, tid=AUTOGRAD)
    record.kernel(at + 48, "nvjet", at + 54, at + 60, tid=AUTOGRAD)
    record.operator("aten::_flash_attention_backward", at + 51, at + 55, sequence=-1, tid=AUTOGRAD)
    record.kernel(at + 52, "flash_bwd_kernel", at + 60, at + 66, tid=AUTOGRAD)
    record.node("MmBackward0", at + 57, at + 63, 12, AUTOGRAD)
    record.operator("aten::mm", at + 58, at + 62, sequence=-1, tid=AUTOGRAD)
    record.kernel(at + 59, "nvjet", at + 66, at + 76, tid=AUTOGRAD)
    record.node("torch::autograd::AccumulateGrad", at + 64, at + 70, -1, AUTOGRAD)
    record.operator("nccl:all_reduce", at + 65, at + 69, sequence=-1, tid=AUTOGRAD)
    record.kernel(at + 66, "ncclDevKernel_AllReduce_Sum_bf16", at + 70, at + 84, tid=AUTOGRAD,
                  stream=COMMUNICATION_STREAM)  # fmt: skip
    record.kernel(at + 72, "stray", at + 84, at + 86, tid=AUTOGRAD)  # in no node

    record.range("phase:optimizer", at + 80, at + 100)
    record.operator("aten::_fused_adamw_", at + 82, at + 90, sequence=-1)
    record.kernel(at + 83, "multi_tensor_apply_kernel", at + 90, at + 102)
    record.kernel(at + 92, "Memcpy HtoD (Pinned -> Device)", at + 98, at + 105, category="gpu_memcpy", stream=9)
    record.kernel(at + 93, "Memcpy DtoD (Device -> Device)", at + 105, at + 106, category="gpu_memcpy")


@pytest.fixture
def gpu(tmp_path: Path) -> Attribution:
    record = Recorder()
    record.kernel(-20, "ncclDevKernel_AllReduce", -15, -10)  # a barrier before the first step
    for step in range(2):
        gpu_step(record, 200.0 * step)
    return attribute(trace.read(record.write(tmp_path / "trace.json.gz")))


def us(seconds: float) -> float:
    return round(seconds / US, 3)


def test_every_kernel_is_counted_where_it_belongs(gpu: Attribution) -> None:
    found = {(share.phase, share.part, share.kind, share.recomputed): us(share.seconds) for share in gpu.shares}
    assert found == {
        ("forward", "QKV", "GEMM", False): 20,
        ("forward", FUSED_ATTENTION, "attention", False): 6,
        ("forward", "Attention, rest", "element-wise", False): 4,
        ("backward", "Attention, rest", "element-wise", False): 4,
        ("backward", "QKV", "GEMM", True): 6,
        ("backward", FUSED_ATTENTION, "attention", False): 6,
        ("backward", "QKV", "GEMM", False): 10,
        ("backward", "Gradients", "communication", False): 14,
        ("backward", "", "element-wise", False): 2,
        ("optimizer", "", "element-wise", False): 13,
        ("optimizer", "", "memcpy", False): 7,
    }
    assert (gpu.device, gpu.steps) == ("cuda", 2)


def test_the_clock_is_divided_without_a_rest(gpu: Attribution) -> None:
    forward, backward, optimizer = gpu.windows
    assert [us(each.overall_s) for each in gpu.windows] == [40, 40, (120 + 16) / 2]
    assert (us(forward.compute_s), us(forward.idle_s)) == (30, 10)
    # backward: 26 us of nodes and 2 of the stray; the all-reduce is alone from 76 to 84
    assert us(backward.compute_s) == 28
    assert us(backward.exposed_communication_s) == 8
    assert us(backward.communication_s) == 14
    assert us(backward.idle_s) == 4
    assert (us(optimizer.compute_s), us(optimizer.exposed_memcpy_s), us(optimizer.memcpy_s)) == (13, 3, 7)
    for window in gpu.windows:
        parts = window.compute_s + window.exposed_communication_s + window.exposed_memcpy_s + window.idle_s
        assert parts == pytest.approx(window.overall_s)
    assert sum(window.overall_s for window in gpu.windows) == pytest.approx(gpu.step_s)


def test_what_has_no_part_is_shown_and_not_spread(gpu: Attribution) -> None:
    assert us(gpu.seconds(phase="backward", part="")) == 2
    whole = sum(share.seconds for share in gpu.shares)
    assert gpu.explained_ratio == pytest.approx(1 - 2 * US / whole)
    assert gpu.by_name_ratio == 0


def test_a_kernel_without_its_launch_is_told_by_its_name_and_has_no_part(tmp_path: Path) -> None:
    record = Recorder()
    gpu_step(record, 0)
    record.span("sm90_xmma_gemm_bf16", 45, 47, "kernel", STREAM, correlation=999, stream=STREAM)
    found = attribute(trace.read(record.write(tmp_path / "t.json.gz")))
    assert us(found.seconds(part="", kind="GEMM")) == 2
    assert found.by_name_ratio == pytest.approx(2 * US / sum(share.seconds for share in found.shares))


def test_on_a_cpu_every_instant_belongs_to_the_innermost_range(tmp_path: Path) -> None:
    record = Recorder()
    record.range("phase:forward", 0, 40)
    record.range("part:MLP", 5, 35)
    record.operator("aten::linear", 10, 30, sequence=1)
    record.operator("aten::mm", 12, 28, sequence=2)
    record.range("phase:backward", 40, 80)
    record.node("MmBackward0", 42, 70, 2, MAIN)
    record.operator("aten::mm", 50, 69, -1, MAIN)
    record.range("phase:optimizer", 80, 100)
    record.operator("aten::_fused_adamw_", 81, 99, -1)
    found = attribute(trace.read(record.write(tmp_path / "t.json.gz")))
    shares = {(share.phase, share.part, share.kind): us(share.seconds) for share in found.shares}
    assert shares == {
        ("forward", "Engine", "host"): 10,
        ("forward", "MLP", "host"): 10,
        ("forward", "MLP", "element-wise"): 4,  # of aten::linear, what is not its product
        ("forward", "MLP", "GEMM"): 16,
        ("backward", "Engine", "host"): 12,
        ("backward", "MLP", "host"): 9,
        ("backward", "MLP", "GEMM"): 19,
        ("optimizer", "", "host"): 2,
        ("optimizer", "", "element-wise"): 18,
    }
    assert us(found.step_s) == 100
    assert [us(window.idle_s) for window in found.windows] == [20, 21, 2]


def test_a_file_that_is_no_trace_is_said_to_be_none(tmp_path: Path) -> None:
    for content in (b"", b"{}", b"\x1f\x8b broken", b'{"traceEvents": [{"ph": 3}]}'):
        path = tmp_path / "t.json.gz"
        path.write_bytes(content)
        with pytest.raises(TraceError, match="not a trace"):
            trace.read(path)
    path.write_bytes(b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": "soon", "dur": 1}]}')
    with pytest.raises(TraceError, match="not a trace"):
        trace.read(path)
    path.write_bytes(b'{"traceEvents": []}')
    with pytest.raises(TraceError, match="no training step"):
        attribute(trace.read(path))
    with pytest.raises(TraceError, match="cannot read"):
        trace.read(tmp_path / "absent")


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda pair: (pair[0], pair[0] + pair[1])))


@given(intervals, intervals)
def test_intervals_are_sets_of_instants(ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> None:
    def instants(spans: Any) -> set[int]:
        return {at for start, end in spans for at in range(int(start), int(end))}

    joined, taken = union(ours), union(theirs)
    assert instants(joined) == instants(ours)
    assert all(a[1] < b[0] for a, b in pairwise(joined))
    left = minus(joined, taken)
    assert instants(left) == instants(ours) - instants(theirs)
    assert seconds_within(left, 5, 20) == len(instants(left) & set(range(5, 20)))


@given(intervals)
def test_the_stretches_of_a_thread_are_its_time_once(ours: list[tuple[int, int]]) -> None:
    """Also of spans that cross each other, as no thread's should."""
    ordered = sorted(ours, key=lambda pair: (pair[0], -pair[1]))
    stretches = list(innermost_parts([TraceSpan("", "cpu_op", MAIN, start, end) for start, end in ordered]))
    assert all(start < end for start, end, _ in stretches)
    assert all(a[1] <= b[0] for a, b in pairwise(stretches))
    assert union((start, end) for start, end, _ in stretches) == union(ordered)
    for start, end, number in stretches:
        assert ordered[number][0] <= start and end <= ordered[number][1]
