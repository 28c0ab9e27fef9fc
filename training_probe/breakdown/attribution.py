"""From a trace to where the time of a training step goes. Pure: a trace in, seconds out.

Every kernel is tied to the call that launched it, and that to the ranges around it on its thread. In the forward pass
the innermost named part is the module. In the backward pass an autograd node belongs to the part whose operator made
it, known by the sequence number; a named part met inside it is recomputation. What has no part is shown as having
none. What a kernel does (GEMM, attention, ...) is known by its operator, by its own name only where there is none.

Without a device the time is that of the process's main thread, each instant that of the innermost range; between
operators it is `host`: Python and the profiler itself.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

import msgspec

from loadgen.trace import (
    DEVICE,
    LAUNCH,
    Interval,
    Kind,
    TraceError,
    TraceSpan,
    kind_of_activity,
    kind_of_kernel,
    kind_of_operator,
    minus,
    parents,
    seconds_within,
    union,
)
from training_probe.protocol import PART, PHASE, Pass

NO_PART, ACCUMULATION, ENGINE = "", "Gradients", "Engine"
_OF_ENGINE = "FSDP::"  # FSDP2 names its own ranges
_NODE = "autograd::engine::evaluate_function: "
PASSES: tuple[Pass, ...] = get_args(Pass)
_BY_RANGE = {PHASE + each: each for each in PASSES}
FUSED_ATTENTION = "FlashAttention"  # one kernel for Bmm0, Softmax and Bmm1


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a step of one kind of work in one part of one pass, summed over its kernels. part: of the model;
    Gradients: what accumulates, buckets or casts them; Engine: what is launched within a pass outside the model and
    autograd, or by FSDP2; empty: none is known. recomputed: work of the forward pass done again."""

    phase: Pass
    part: str
    kind: Kind
    recomputed: bool = False
    seconds: float


class PassTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A pass on the clock, seconds a step: from its first kernel to the next pass's first. overall_s is the sum of
    compute_s (any kernel but communication), of communication and of transfers between host and device that nothing
    hides, and of idle_s. communication_s, memcpy_s: all of it, hidden or not."""

    phase: Pass
    overall_s: float
    compute_s: float
    exposed_communication_s: float
    exposed_memcpy_s: float
    idle_s: float
    communication_s: float
    memcpy_s: float


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a step goes, the mean over `steps`. by_name_ratio: share of the device's time whose kind was
    known by the kernel's name alone. windows: of PASSES, in their order."""

    device: Literal["cuda", "cpu"]
    steps: int
    step_s: float
    windows: list[PassTimes]
    shares: list[Share]
    by_name_ratio: float = 0.0

    def __post_init__(self) -> None:
        if tuple(window.phase for window in self.windows) != PASSES:
            raise ValueError(f"windows must be {', '.join(PASSES)}")

    def seconds(self, **wanted: object) -> float:
        """The sum of the shares whose fields have these values."""
        return sum(
            share.seconds
            for share in self.shares
            if all(getattr(share, field) == value for field, value in wanted.items())
        )

    @property
    def explained_ratio(self) -> float:
        """Share of the time of all kernels (on the CPU: of the step) that has a part, or is the optimizer's,
        communication or a transfer."""
        explained = sum(
            share.seconds
            for share in self.shares
            if share.part or share.phase == "optimizer" or share.kind in ("communication", "memcpy")
        )
        return explained / (sum(share.seconds for share in self.shares) or 1.0)


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranges around an instant say. backward: whether a part that is met here is recomputed."""

    part: str = NO_PART
    kind: Kind | None = None
    recomputed: bool = False
    backward: bool = False


class _Work(msgspec.Struct, frozen=True):
    """A piece of work. window: the number of the pass that launched it."""

    window: int
    place: _Place
    kind: Kind
    start_s: float
    end_s: float


def attribute(spans: Sequence[TraceSpan]) -> Attribution:
    """Where the time of a traced step goes. spans: of rank 0, as `trace.read` gives them. Raises TraceError."""
    passes = [span for span in spans if span.name in _BY_RANGE and span.category == "user_annotation"]
    steps = sum(span.name == PHASE + "optimizer" for span in passes)
    if not steps:
        raise TraceError("the trace holds no training step of this program.")
    threads: dict[int | str, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        if span.category not in DEVICE:
            threads[span.tid].append(span)
    main = passes[0].tid
    made = _parts_of_nodes(threads[main])
    places = {tid: _places(thread, made) for tid, thread in threads.items()}
    starts = [span.start_s for span in passes]
    activities = [span for span in spans if span.category in DEVICE]
    if not activities:
        works = list(_on_host(threads[main], places[main], starts, passes[-1].end_s))
        begins = starts
        by_name_s = 0.0
    else:
        launches = {
            span.args.correlation: (span.start_s, place)
            for tid, thread in threads.items()
            for span, place in zip(thread, places[tid], strict=True)
            if span.category in LAUNCH
        }
        works, by_name_s = _on_device(activities, launches, starts)
        begins = _begins(works, starts)
    ends = [*begins[1:], max([*(work.end_s for work in works), begins[-1]])]
    return Attribution(
        device="cuda" if activities else "cpu",
        steps=steps,
        step_s=(ends[-1] - begins[0]) / steps,
        windows=_windows(works, passes, list(zip(begins, ends, strict=True)), steps),
        shares=_shares(works, passes, steps),
        by_name_ratio=by_name_s / (sum(work.end_s - work.start_s for work in works) or 1.0),
    )


def _parts_of_nodes(thread: Sequence[TraceSpan]) -> dict[int | str, str]:
    """The part that made each node of autograd, by the node's sequence number: several operators of the forward pass
    may carry a number, of which the last one makes the node."""
    made: dict[int | str, str] = {}
    for span, place in zip(thread, _places(thread, {}), strict=True):
        if span.args.sequence != -1 and not span.args.fwd_thread:
            made[span.args.sequence] = place.part
    return made


def _places(thread: Sequence[TraceSpan], made: dict[int | str, str]) -> list[_Place]:
    """For each span of a thread what it and the ranges around it say."""
    places: list[_Place] = []
    for span, parent in zip(thread, parents(thread), strict=True):
        around = places[parent] if parent >= 0 else _Place()
        places.append(_place(span, around, made))
    return places


def _place(span: TraceSpan, around: _Place, made: dict[int | str, str]) -> _Place:
    name = span.name
    if name.startswith(PHASE):
        return _Place(part=ENGINE, backward=name == PHASE + "backward")
    if name.startswith(PART):
        return _Place(part=name.removeprefix(PART), recomputed=around.backward, backward=around.backward)
    if name.startswith(_OF_ENGINE):
        return _Place(part=ENGINE, backward=around.backward)
    if name.startswith(_NODE):  # on a GPU in a thread of its own, which has no pass around it
        part = ACCUMULATION if name.endswith("AccumulateGrad") else made.get(span.args.sequence, NO_PART)
        return _Place(part=part, backward=True)
    kind = kind_of_operator(name)
    if kind is None:
        return around
    part = FUSED_ATTENTION if kind == "attention" and around.part == "Attention, rest" else around.part
    return _Place(part=part, kind=kind, recomputed=around.recomputed, backward=around.backward)


def _on_device(
    activities: Iterable[TraceSpan], launches: dict[int | str, tuple[float, _Place]], starts: Sequence[float]
) -> tuple[list[_Work], float]:
    """What the device did for the passes, and the seconds of it whose kind only the kernel's name shows."""
    works, by_name_s = [], 0.0
    for span in activities:
        launched_s, place = launches.get(span.args.correlation, (span.start_s, _Place()))
        window = bisect.bisect_right(starts, launched_s) - 1
        if window < 0:  # before the first step
            continue
        kind = kind_of_activity(span) or place.kind
        if kind is None:
            kind = "element-wise" if span.args.correlation in launches else kind_of_kernel(span.name)
            by_name_s += 0.0 if span.args.correlation in launches else span.seconds
        works.append(_Work(window, place, kind, span.start_s, span.end_s))
    return works, by_name_s


def _on_host(
    thread: Sequence[TraceSpan], places: Sequence[_Place], starts: Sequence[float], end_s: float
) -> Iterator[_Work]:
    """What the thread did: every instant belongs to the innermost span."""
    for start_s, stop_s, number in innermost_parts(thread):
        window = bisect.bisect_right(starts, start_s) - 1
        if window < 0 or start_s >= end_s:
            continue
        place, name = places[number], thread[number].name
        operator = "::" in name and not name.startswith("autograd::")
        yield _Work(window, place, place.kind or ("element-wise" if operator else "host"), start_s, stop_s)


def innermost_parts(thread: Sequence[TraceSpan]) -> Iterator[tuple[float, float, int]]:
    """The stretches of a thread's time (start, end, number of the innermost span), where there is one."""
    stack: list[int] = []
    at = 0.0
    for number, until in enumerate([*(span.start_s for span in thread), math.inf]):
        while stack and thread[stack[-1]].end_s <= until:
            inner = stack.pop()
            if thread[inner].end_s > at:
                yield at, thread[inner].end_s, inner
                at = thread[inner].end_s
        if stack and until > at:
            yield at, until, stack[-1]
        at = until
        stack.append(number)


def _begins(works: Iterable[_Work], starts: Sequence[float]) -> list[float]:
    """When each pass begins on the device: with its first computation, else with whatever it launches first."""
    first: dict[tuple[int, bool], float] = {}
    for work in works:
        key = (work.window, work.kind in ("communication", "memcpy"))
        first[key] = min(first.get(key, work.start_s), work.start_s)
    begins: list[float] = []
    for window, start_s in enumerate(starts):
        begin_s = first.get((window, False), first.get((window, True), start_s))
        begins.append(max(begin_s, begins[-1]) if begins else begin_s)
    return begins


def _windows(
    works: Sequence[_Work], passes: Sequence[TraceSpan], bounds: Sequence[Interval], steps: int
) -> list[PassTimes]:
    by_kind: dict[str, list[Interval]] = {"communication": [], "memcpy": [], "compute": []}
    for work in works:
        if work.kind != "host":
            by_kind[work.kind if work.kind in by_kind else "compute"].append((work.start_s, work.end_s))
    compute, communication, memcpy = (union(by_kind[name]) for name in ("compute", "communication", "memcpy"))
    exposed = minus(communication, compute)
    exposed_memcpy = minus(memcpy, union([*compute, *communication]))
    windows = []
    for phase in PASSES:
        own = [bound for bound, of in zip(bounds, passes, strict=True) if of.name == PHASE + phase]

        def seconds(intervals: Sequence[Interval], own: Sequence[Interval] = own) -> float:
            return sum(seconds_within(intervals, *bound) for bound in own) / steps

        overall_s = sum(end - start for start, end in own) / steps
        busy = (seconds(compute), seconds(exposed), seconds(exposed_memcpy))
        windows.append(
            PassTimes(
                phase=phase, overall_s=overall_s, compute_s=busy[0], exposed_communication_s=busy[1],
                exposed_memcpy_s=busy[2], idle_s=max(0.0, overall_s - sum(busy)),
                communication_s=seconds(communication), memcpy_s=seconds(memcpy),
            )
        )  # fmt: skip
    return windows


def _shares(works: Iterable[_Work], passes: Sequence[TraceSpan], steps: int) -> list[Share]:
    sums: dict[tuple[Pass, str, Kind, bool], float] = defaultdict(float)
    for work in works:
        phase = _BY_RANGE[passes[work.window].name]
        place = work.place
        part = NO_PART if phase == "optimizer" else place.part
        sums[phase, part, work.kind, place.recomputed] += work.end_s - work.start_s
    return [
        Share(phase=phase, part=part, kind=kind, recomputed=recomputed, seconds=seconds / steps)
        for (phase, part, kind, recomputed), seconds in sorted(sums.items())
    ]
