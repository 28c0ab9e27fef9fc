"""The decode steps in a server's trace, and what was done in each: the device's activities, or the host's operators
where there is no device.

A step is named by the annotation that vLLM puts around it (`execute_context_0(0)_generation_64(64)`): work belongs to
the step in which it was launched. It lasts from its first activity on the busiest stream to the next step's. Where
there are no annotations but whole steps are CUDA graphs, a step lasts from one graph's first kernel to the next one's.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from loadgen import trace
from loadgen.breakdown import kernels
from loadgen.breakdown.kernels import Kind
from loadgen.trace import TraceError, TraceSpan

# new and cached: requests in prefill and in decode, before 0.13
_ANNOTATION = re.compile(r"^execute_(?:\d+_)?context_(\d+)\(.*?_generation_(\d+)\(|^execute_new_(\d+)_cached_(\d+)")
_HEAVY: tuple[Kind, ...] = ("GEMM", "Attention", *kernels.COMMUNICATION)
_NORM_REACH = 8  # operators before and after rsqrt that a norm written out in PyTorch may take


class Activity(msgspec.Struct):
    """One piece of work. operator: of the host, that launched it; "" where that is not known."""

    name: str
    start_s: float
    end_s: float
    kind: Kind
    norm: bool
    operator: str = ""


class EngineStep(msgspec.Struct, frozen=True):
    """batch: requests that decoded in it; None: the trace does not say. order: its work on the busiest stream, one
    after the other. activities: all that ran between its beginning and its end."""

    start_s: float
    end_s: float
    batch: int | None
    order: tuple[Activity, ...]
    activities: tuple[Activity, ...]


class Steps(msgspec.Struct, frozen=True):
    """The steps to be looked at: all whole ones in decode with the commonest batch, but the first, which the profiler
    delays. left_out: the others. form: what the trace knows, graph (kernels only), eager (their operators as well), cpu
    (operators only)."""

    steps: tuple[EngineStep, ...]
    left_out: int
    delimited_by: str
    form: str


class _Mark(msgspec.Struct, frozen=True):
    """When the host began a step."""

    start_s: float
    prefills: int
    batch: int | None


def find(spans: Sequence[TraceSpan]) -> Steps:
    """The decode steps of a trace as `trace.read` gives it. Raises TraceError."""
    marks = step_marks(spans)
    devices = [span for span in spans if span.category in trace.DEVICE]
    if not any(span.category == "kernel" for span in devices):
        if not marks:
            raise TraceError("the trace holds neither kernels of a GPU nor steps of a server; was the server idle?")
        return _chosen(_host_steps(spans, marks), "execute annotations", "cpu")
    launches = {span.args.correlation: span for span in spans if span.category in trace.LAUNCH}
    by_graph = sum("GraphLaunch" in launches[span.args.correlation].name for span in devices
                   if span.args.correlation in launches)  # fmt: skip
    form = "graph" if by_graph > len(devices) / 2 else "eager"
    operators = _operators_of(spans, launches)
    activities = [_device_activity(span, operators.get(span.args.correlation, ())) for span in devices]
    stream = Counter(span.tid for span in devices).most_common(1)[0][0]
    main = [
        (launches[span.args.correlation].start_s if span.args.correlation in launches else None, each)
        for span, each in zip(devices, activities, strict=True)
        if span.tid == stream
    ]
    if marks:
        return _chosen(_device_steps(marks, main, activities), "execute annotations", form)
    graphs = sorted(span.start_s for span in launches.values() if "GraphLaunch" in span.name)
    if not graphs:
        raise TraceError(
            "the trace names no steps: no execute_ annotations and no CUDA graphs; serve with CUDA graphs on, or lower "
            "--concurrency to a batch that has one."
        )
    steps = _device_steps([_Mark(at, 0, None) for at in graphs], main, activities)
    if not any(step is not None and _layers(step.order) > 1 for step in steps):
        raise TraceError("the trace names no steps, and its CUDA graphs are only parts of one; use a server that does.")
    return _chosen(steps, "CUDA graph launches", form)


def step_marks(spans: Sequence[TraceSpan]) -> list[_Mark]:
    marks = []
    for span in spans:
        match = _ANNOTATION.match(span.name) if span.category == "user_annotation" else None
        if match is not None:
            context, generation, new, cached = match.groups()
            marks.append(_Mark(span.start_s, int(context or new or 0), int(generation or cached or 0)))
    return marks


def _layers(order: Iterable[Activity]) -> int:
    """How often attention comes with a matrix product between."""
    kinds = [each.kind for each in order if each.kind in ("Attention", "GEMM")]
    return sum(kind == "Attention" and before != "Attention" for before, kind in pairwise(["GEMM", *kinds]))


def _chosen(steps: list[EngineStep | None], delimited_by: str, form: str) -> Steps:
    whole = [step for step in steps[1:] if step is not None]
    if not whole:
        raise TraceError(f"the trace holds only {len(steps)} decode steps; ask for more with --steps.")
    batch = Counter(step.batch for step in whole).most_common(1)[0][0]
    kept = tuple(step for step in whole if step.batch == batch)
    return Steps(kept, len(steps) - len(kept), delimited_by, form)


# With a device.


def _operators_of(spans: Sequence[TraceSpan], launches: dict[int | str, TraceSpan]) -> dict[int | str, tuple[str, ...]]:
    """The operators in which each launch lies, outermost first, by its correlation."""
    threads: dict[int | str, list[TraceSpan]] = {}
    wanted = {id(span) for span in launches.values()}
    for span in spans:
        if span.category == "cpu_op" or id(span) in wanted:
            threads.setdefault(span.tid, []).append(span)
    operators: dict[int | str, tuple[str, ...]] = {}
    for thread in threads.values():
        parents = trace.parents(thread)
        for number, span in enumerate(thread):
            if span.category == "cpu_op" or "GraphLaunch" in span.name:
                continue
            chain = []
            at = parents[number]
            while at >= 0:
                chain.append(thread[at].name)
                at = parents[at]
            operators[span.args.correlation] = tuple(reversed([name for name in chain if not name.startswith("##")]))
    return operators


def _device_activity(span: TraceSpan, operators: tuple[str, ...]) -> Activity:
    kind = kernels.of_kernel(span.name) if span.category == "kernel" else None
    if kind is None:
        kind = "Element-Wise" if trace.kind_of_activity(span) == "element-wise" else "Other"
    decided = next(((name, each) for name in operators if (each := kernels.of_operator(name)) is not None), None)
    operator = decided[0] if decided else next((name for name in operators if name.startswith("aten::")), "")
    if span.category == "kernel" and kind not in kernels.COMMUNICATION:
        if decided is not None and not kernels.writes_cache(span.name):
            kind = decided[1]
        elif kind == "Unrecognised" and operator:
            kind = kernels.of_plain_operator(operator)
    norm = kernels.is_norm(span.name) or kind == "RMSNorm"
    return Activity(span.name, span.start_s, span.end_s, kind, norm, operator)


def _device_steps(
    marks: list[_Mark], main: list[tuple[float | None, Activity]], activities: list[Activity]
) -> list[EngineStep | None]:
    """One a mark, None for those with a prefill, without work, or cut off by the trace's end."""
    starts = [mark.start_s for mark in marks]
    orders: list[list[Activity]] = [[] for _ in marks]
    for launched_s, activity in main:
        number = bisect.bisect_right(starts, launched_s) - 1 if launched_s is not None else -1
        if number >= 0:
            orders[number].append(activity)
    for order in orders:
        _find_written_norms(order)
        _find_rotations(order)
    begins = [each.start_s for each in activities]  # ascending, as spans are
    longest_s = max(each.end_s - each.start_s for each in activities)
    steps: list[EngineStep | None] = []
    for mark, order, following in zip(marks, orders, orders[1:], strict=False):
        if mark.prefills or not order or not following:
            steps.append(None)
            continue
        start_s, end_s = order[0].start_s, following[0].start_s
        near = activities[bisect.bisect_left(begins, start_s - longest_s) : bisect.bisect_left(begins, end_s)]
        within = tuple(each for each in near if each.end_s > start_s)
        steps.append(EngineStep(start_s, end_s, mark.batch, tuple(order), within))
    return steps


# Without one.


def _host_steps(spans: Sequence[TraceSpan], marks: list[_Mark]) -> list[EngineStep | None]:
    thread = next(span.tid for span in spans if _ANNOTATION.match(span.name))
    activities = _host_activities([span for span in spans if span.tid == thread and span.category == "cpu_op"])
    steps: list[EngineStep | None] = []
    for mark, following in pairwise(marks):
        order = tuple(each for each in activities if mark.start_s <= each.start_s < following.start_s)
        step = (
            EngineStep(mark.start_s, following.start_s, mark.batch, order, order)
            if order and not mark.prefills
            else None
        )
        steps.append(step)
    return steps


def _host_activities(operators: list[TraceSpan]) -> list[Activity]:
    """Operators that do not lie in one another: the outermost, or their parts where only those are known."""
    parents = trace.parents(operators)
    kinds = [kernels.of_operator(span.name) for span in operators]
    open_up = {number for number, span in enumerate(operators) if kernels.TRANSPARENT.match(span.name)}
    for number, kind in enumerate(kinds):
        if kind in _HEAVY:  # whatever holds it and is not known itself is opened up
            at = parents[number]
            while at >= 0 and kinds[at] is None:
                open_up.add(at)
                at = parents[at]
    activities: list[Activity] = []
    covered_s = float("-inf")
    for number, span in enumerate(operators):
        if number in open_up or span.start_s < covered_s:
            continue
        covered_s = span.end_s
        kind = kinds[number] or kernels.of_plain_operator(span.name)
        activities.append(Activity(span.name, span.start_s, span.end_s, kind, kind == "RMSNorm", span.name))
    _find_written_norms(activities)
    return activities


def _find_rotations(order: list[Activity]) -> None:
    """RoPE in a kernel of torch.compile whose name does not hold all of it: between the product that makes queries and
    their attention nothing else multiplies element by element."""
    since: list[Activity] = []
    for each in order:
        if each.kind == "GEMM":
            since = []
        elif each.kind == "Attention":
            for other in since:
                if other.kind == "Element-Wise" and kernels.is_fused(other.name) and "mul" in other.name.split("_"):
                    other.kind = "RoPE"
            since = []
        else:
            since.append(each)


def _find_written_norms(order: list[Activity]) -> None:
    """A norm written out in PyTorch is the operators from `pow` over `rsqrt` to the product with the weights."""
    for number, each in enumerate(order):
        if each.operator != "aten::rsqrt":
            continue
        before = range(number, max(-1, number - _NORM_REACH), -1)
        first = next((at for at in before if order[at].operator == "aten::pow"), number)
        products = [at for at in range(number, min(len(order), number + _NORM_REACH))
                    if order[at].operator == "aten::mul"]  # fmt: skip
        last = products[1] if len(products) > 1 else number
        for at in range(first, last + 1):
            if order[at].kind in ("Element-Wise", "Unrecognised"):
                order[at].kind, order[at].norm = "RMSNorm", True
