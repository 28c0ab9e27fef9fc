"""Traces of torch.profiler, in Chrome's format that Perfetto opens as well: what was launched where, and ran when.

A trace holds what threads of the host did (operators, ranges that were named, calls of the CUDA runtime), nested in
time, and what the device did, which a correlation number ties to the call that launched it. Times are seconds from the
trace's first event.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from backends import foreign_files
from backends.exit_codes import UserError
from backends.untrusted import UNDECODABLE, reason

Kind = Literal["GEMM", "attention", "element-wise", "communication", "memcpy", "host"]

MOST_BYTES = 4 << 30  # of a trace that is unpacked; one of some steps is far smaller

DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCH = frozenset({"cuda_runtime", "cuda_driver"})
HOST = frozenset({"cpu_op", "user_annotation"}) | LAUNCH

GEMM_OPS = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_int_mm", "_scaled_mm", "_grouped_mm", "addbmm")
) | {"mkldnn::_linear_pointwise"}  # fmt: skip
_ATTENTION_OP = re.compile(r"^aten::_(flash|efficient|cudnn|fused_sdp|scaled_dot_product_(flash|efficient|cudnn))")
_COMMUNICATION_OP = re.compile(r"^(c10d|nccl|gloo|_c10d_functional)::?|^record_param_comms")
_COMMUNICATION_KERNEL = re.compile(r"^nccl|AllReduce|all_reduce|cross_device_reduce", re.IGNORECASE)
_ATTENTION_KERNEL = re.compile(r"flash|fmha|paged_attention|unified_attention", re.IGNORECASE)
_GEMM_KERNEL = re.compile(r"gemm|nvjet|cutlass|xmma|gemv|splitkreduce|s\d+16\d+", re.IGNORECASE)


class TraceError(UserError):
    """A file that is no trace. One sentence."""


class Args(msgspec.Struct, frozen=True):
    """What an event carries. correlation: ties a launch to what it launched. sequence: the autograd node that an
    operator made, or that is evaluated; -1: none. fwd_thread: nonzero when it is evaluated."""

    correlation: int | str = -1
    sequence: int | str = msgspec.field(name="Sequence number", default=-1)
    fwd_thread: int | str = msgspec.field(name="Fwd thread id", default=0)
    stream: int | str = -1


class _Event(msgspec.Struct, frozen=True):
    ph: str
    name: str = ""
    cat: str = ""
    tid: int | str = 0
    ts: float | str = 0.0
    dur: float | str = 0.0
    args: Args = Args()


class _File(msgspec.Struct, frozen=True):
    events: list[_Event] = msgspec.field(name="traceEvents")


class TraceSpan(msgspec.Struct, frozen=True):
    """One event with a beginning and an end. tid: of the host's thread, or the device's stream."""

    name: str
    category: str
    tid: int | str
    start_s: float
    end_s: float
    args: Args = Args()

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def read(path: Path) -> list[TraceSpan]:
    """All spans of a trace file (JSON, or that gzipped), by their start. Raises TraceError."""
    try:
        file = msgspec.json.decode(_unpacked(path), type=_File)
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror or error}.") from None
    except (*UNDECODABLE, EOFError, zlib.error) as error:
        raise TraceError(f"{path} is not a trace of torch.profiler: {reason(error)}.") from None
    kept = [event for event in file.events if event.ph == "X" and event.cat in DEVICE | HOST]
    try:
        times_us = [(float(event.ts), float(event.dur)) for event in kept]
        if wrong := next(
            (pair for pair in times_us if not (abs(pair[0]) < math.inf and 0 <= pair[1] < math.inf)), None
        ):
            raise ValueError(f"an event begins at {wrong[0]:g} us and takes {wrong[1]:g} us")
    except ValueError as error:
        raise TraceError(f"{path} is not a trace of torch.profiler: {error}.") from None
    base_us = min((start_us for start_us, _ in times_us), default=0.0)
    spans = []
    for event, (start_us, lasted_us) in zip(kept, times_us, strict=True):
        start_us -= base_us
        end_us = start_us + lasted_us  # summed here, so that spans that touch do not overlap by a rounding
        spans.append(TraceSpan(event.name, event.cat, event.tid, start_us / 1e6, end_us / 1e6, event.args))
    return sorted(spans, key=lambda span: (span.start_s, -span.end_s))


def _unpacked(path: Path) -> bytes:
    """Raises TraceError for a file that holds more than a trace does, before it takes all memory."""
    with foreign_files.opened(path) as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        with gzip.open(file) if packed else file as unpacked:
            data = unpacked.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        unpacked_size = " when it is unpacked" if packed else ""
        raise TraceError(f"{path} holds over {MOST_BYTES >> 30} GiB{unpacked_size}; trace fewer steps.")
    return data


def kind_of_operator(name: str) -> Kind | None:
    """What an operator of the host is, where its name alone decides that; its parts may still be something else."""
    if name in GEMM_OPS:
        return "GEMM"
    if _COMMUNICATION_OP.match(name):
        return "communication"
    return "attention" if _ATTENTION_OP.match(name) else None


def kind_of_activity(span: TraceSpan) -> Kind | None:
    """What a device's activity is, where the activity itself decides that: transfers between host and device, and
    NCCL's kernels, which are launched by no operator of their own. Copies within the device are element-wise."""
    if span.category == "kernel":
        return "communication" if _COMMUNICATION_KERNEL.search(span.name) else None
    within = span.category == "gpu_memset" or "DtoD" in span.name or "Device -> Device" in span.name
    return "element-wise" if within else "memcpy"


def kind_of_kernel(name: str) -> Kind:
    """What a kernel is by its name alone: for those whose operator is not known."""
    if _COMMUNICATION_KERNEL.search(name):
        return "communication"
    if _ATTENTION_KERNEL.search(name):
        return "attention"
    return "GEMM" if _GEMM_KERNEL.search(name) else "element-wise"


def parents(spans: Sequence[TraceSpan]) -> list[int]:
    """For spans of one thread, by their start: the index of the span that each lies in, -1 for none."""
    enclosing: list[int] = []
    stack: list[int] = []
    for number, span in enumerate(spans):
        while stack and spans[stack[-1]].end_s <= span.start_s:
            stack.pop()
        enclosing.append(stack[-1] if stack else -1)
        stack.append(number)
    return enclosing


Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants as intervals that do not touch, ascending."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def minus(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """What of `intervals` is not in `taken`; both as `union` gives them."""
    left: list[Interval] = []
    at = 0
    for start, end in intervals:
        while at < len(taken) and taken[at][1] <= start:
            at += 1
        look = at
        while look < len(taken) and taken[look][0] < end:
            if taken[look][0] > start:
                left.append((start, taken[look][0]))
            start = max(start, taken[look][1])
            look += 1
        if start < end:
            left.append((start, end))
    return left


def seconds_within(intervals: Sequence[Interval], start_s: float, end_s: float) -> float:
    """How much of them lies between two instants."""
    return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in intervals)
