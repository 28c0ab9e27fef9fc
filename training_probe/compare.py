"""Two measurements of one kind side by side, and as a gate: sweeps cell by cell, micro-benchmarks point by point,
breakdowns cell by cell.

What the intervals of a gate cover: of a sweep's speed the noise between its runs (`report.compare`); where cells have
one run, the noise between its steps; of a micro-benchmark that between the samples of a point, whose median has the
standard error 1.2533 s / sqrt(n) with s = (p90 - p10) / 2.563, as of a normal distribution. Memory and breakdowns are
one number each and are compared as they are. The warnings say which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backends.untrusted import escaped
from loadgen.report.contrast import NORMAL_975, Bounds, Contrast, as_it_is, contrast, of_runs
from loadgen.report.limits import Check, Limit, Measure, judge, parse
from loadgen.report.text import number
from training_probe.breakdown import run as traces
from training_probe.breakdown.attribution import PASSES
from training_probe.breakdown.run import Breakdown
from training_probe.micro import run as micros
from training_probe.points import Collective, Copy, Gemm, Measured, Point, size_text
from training_probe.report import compare as sweeps
from training_probe.report.layout import Column, Table, text
from training_probe.results import BREAKDOWN_FILE, CellResult, ResultsError
from training_probe.results import read as read_results

EXAMPLES = "'tokens_per_s<-3%' or 'peak_memory_gb>+0.5GiB'"
SPEEDS = {"tokens_per_s": Measure(lower_is_better=False), "mfu_ratio": Measure(lower_is_better=False)}
MEMORY = {name: Measure(lower_is_better=True, unit="GiB") for name in ("peak_memory_gb", "peak_reserved_gb")}
MS = Measure(lower_is_better=True, unit="ms")
RATES = {Gemm: "flops_per_s", Copy: "bytes_per_s", Collective: "bytes_per_s"}

ONE_RUN = "cells with one run on both sides have the noise between steps alone in their intervals; sweep with --runs 3."
WITHIN = "the intervals hold the noise between the samples of one measurement, not that from one start to the next."
POINT = (
    "a breakdown is measured once: its numbers are compared as they are, without an interval; allow for their noise."
)


@dataclass
class Compared:
    """text: the comparison as it is printed. measures: what limits may be on. changes: by cell or point, by measure.
    ended: what did not end well, as checks of a gate."""

    text: str
    measures: dict[str, Measure]
    changes: dict[str, dict[str, Contrast]] = field(default_factory=dict)
    ended: list[Check] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def judged(self, texts: Sequence[str]) -> list[Check]:
        """How everything ended, and what came of each limit for each cell or point. Raises ConfigError."""
        limits: list[Limit] = parse(texts, self.measures, EXAMPLES)
        checks = [judge(limit, of[limit.metric], name) for name, of in self.changes.items() for limit in limits]
        if not self.changes:
            checks.append(Check("limit", "limits", "unknown", "Nothing ended well in both A and B."))
        return [*self.ended, *checks]


def compare(a: Path, b: Path, width: int) -> Compared:
    """Reads two directories, or two files of a sweep's results. Raises ResultsError or MicroError."""
    kinds = [_kind(path) for path in (a, b)]
    if kinds[0] is not kinds[1]:
        raise ResultsError(f"{a} and {b} hold different measurements; name two sweeps, two breakdowns or two micros.")
    return kinds[0](a, b, width)


def _kind(path: Path) -> Callable[[Path, Path, int], Compared]:
    if (path / micros.RESULTS_FILE).is_file():
        return _micros
    return _breakdowns if (path / BREAKDOWN_FILE).is_file() else _sweeps


# Sweeps.


def _sweeps(a: Path, b: Path, width: int) -> Compared:
    results_a, results_b = read_results(a), read_results(b)
    made = Compared(sweeps.render(results_a, results_b, str(a), str(b), width), {**SPEEDS, **MEMORY})
    states = [{result.cell: (result.state, result.reason) for result in each} for each in (results_a, results_b)]
    made.ended = _ended(*states)
    in_b = {result.cell: result for result in results_b}
    for result in results_a:
        other = in_b.get(result.cell)
        if other is not None and result.state == other.state == "ok":
            speed = _speed(result, other)
            made.changes[result.cell] = {
                "tokens_per_s": speed,
                "mfu_ratio": _in_proportion(speed, result.mfu_ratio, other.mfu_ratio),
                "peak_memory_gb": as_it_is(result.peak_memory_gb, other.peak_memory_gb),
                "peak_reserved_gb": as_it_is(result.peak_reserved_gb, other.peak_reserved_gb),
            }
            if max(len(result.tokens_per_s_runs), len(other.tokens_per_s_runs)) < 2:
                made.warnings = [ONE_RUN]
    return made


def _ended(a: Mapping[str, tuple[str, str]], b: Mapping[str, tuple[str, str]]) -> list[Check]:
    """Of what ended ok in A, whether B has it too: state and reason by name."""
    checks = []
    for name, (state, reason) in a.items():
        state_b, reason_b = b.get(name, ("missing", "B does not have it"))
        if "invalid" in (state, state_b) or "wrong" in (state, state_b):
            checks.append(Check("run", name, "unknown", f"It is {state} in A and {state_b} in B: {reason or reason_b}"))
        elif state == "ok":
            how = {"ok": "ok", "missing": "unknown"}.get(state_b, "beyond")
            message = "It ended ok in A and B." if state_b == "ok" else f"It is ok in A and {state_b} in B: {reason_b}"
            checks.append(Check("run", name, how, message))  # type: ignore[arg-type]
    return checks


def _speed(a: CellResult, b: CellResult) -> Contrast:
    if a.tokens_per_s_runs and b.tokens_per_s_runs:
        between = of_runs(a.tokens_per_s_runs, b.tokens_per_s_runs)
        if between.ratio_ci is not None:
            return between
    errors = [
        each.step_ms_std / each.step_ms / math.sqrt(each.steps * max(1, each.runs))
        for each in (a, b)
        if each.step_ms and each.step_ms_std is not None and each.steps
    ]
    return _with_errors(a.tokens_per_s, b.tokens_per_s, errors)


def _with_errors(a: float | None, b: float | None, errors: Sequence[float]) -> Contrast:
    """errors: the standard error of both, as a ratio to the value; without both there is no interval."""
    if not a or not b or len(errors) < 2:
        return contrast(a, b)
    reach = NORMAL_975 * math.hypot(*errors)
    ratio_ci = (b / a * math.exp(-reach), b / a * math.exp(reach))
    return contrast(a, b, (a * (ratio_ci[0] - 1), a * (ratio_ci[1] - 1)), ratio_ci)


def _in_proportion(to: Contrast, a: float | None, b: float | None) -> Contrast:
    """Of values that are the same multiple of others in all runs of a side: the interval of their ratio follows."""
    plain = contrast(a, b)
    if a is None or b is None or to.ratio is None or to.ratio_ci is None or not plain.ratio:
        return plain
    low, high = (end * plain.ratio / to.ratio for end in to.ratio_ci)
    return contrast(a, b, (a * (low - 1), a * (high - 1)), (low, high))


# Micro-benchmarks.


def _micros(a: Path, b: Path, width: int) -> Compared:
    in_a, in_b = ({result.point: result for result in micros.read_results(path)} for path in (a, b))
    rates = dict.fromkeys(RATES[type(point)] for point in (*in_a, *in_b))
    measures = {"median_ms": MS, **{name: Measure(lower_is_better=False) for name in rates}}
    both = {_name(point): (of_a, in_b[point]) for point, of_a in in_a.items() if point in in_b}
    changes = {
        name: {"median_ms": _median(*pair), **{rate: _rate(rate, *pair) for rate in rates}}
        for name, pair in both.items()
        if pair[0].outcome == pair[1].outcome == "ok"
    }
    states = [{_name(point): (each.outcome, each.reason) for point, each in of.items()} for of in (in_a, in_b)]
    heads = [_head("A", a, len(in_a), "points"), _head("B", b, len(in_b), "points")]
    return Compared(
        _page(heads, "Points in both", changes, ["median_ms"], width), measures, changes, _ended(*states), [WITHIN]
    )


def _name(point: Point) -> str:
    if isinstance(point, Gemm):
        return f"{point.dtype} {point.m} x {point.n} x {point.k}{f', {point.curve}' if point.curve else ''}" + (
            ", peak" if point.peak else ""
        )
    if isinstance(point, Copy):
        return f"{point.label}, {size_text(point.size_bytes)}"
    p2p = {True: ", P2P on", False: ", P2P off", None: ""}[point.p2p]
    return f"{point.name}, {size_text(point.size_bytes)}, {point.ranks} ranks{p2p}"


def _median(a: Measured, b: Measured) -> Contrast:
    of_a, of_b = (None if each.median_s is None else 1e3 * each.median_s for each in (a, b))
    errors = [
        1.2533 * (each.p90_s - each.p10_s) / 2.563 / math.sqrt(each.samples) / each.median_s
        for each in (a, b)
        if each.median_s and each.p10_s is not None and each.p90_s is not None and each.samples
    ]
    return _with_errors(of_a, of_b, errors)


def _rate(name: str, a: Measured, b: Measured) -> Contrast:
    """As much over the time: the ends of the interval are those of the time, the other way round."""
    times, rate_a, rate_b = _median(a, b), getattr(a, name), getattr(b, name)
    if times.ratio_ci is None or rate_a is None or rate_b is None:
        return contrast(rate_a, rate_b)
    low, high = 1 / times.ratio_ci[1], 1 / times.ratio_ci[0]
    return contrast(rate_a, rate_b, (rate_a * (low - 1), rate_a * (high - 1)), (low, high))


# Breakdowns.


def _breakdowns(a: Path, b: Path, width: int) -> Compared:
    in_a, in_b = ({each.cell.name: each for each in traces.read(path)} for path in (a, b))
    times_a, times_b = ({name: _times_ms(each) for name, each in of.items()} for of in (in_a, in_b))
    changes = {
        name: {measure: as_it_is(times_a[name].get(measure), times_b[name].get(measure)) for measure in TIMES}
        for name, each in in_a.items()
        if name in in_b and each.outcome == in_b[name].outcome == "ok"
    }
    states = [{name: (each.outcome, each.reason) for name, each in of.items()} for of in (in_a, in_b)]
    heads = [_head("A", a, len(in_a), "cells"), _head("B", b, len(in_b), "cells")]
    page = _page(heads, "Cells in both", changes, TIMES, width)
    return Compared(page, dict.fromkeys(TIMES, MS), changes, _ended(*states), [POINT])


TIMES = ("step_ms", *(f"{phase}_ms" for phase in PASSES), "communication_ms", "memcpy_ms", "idle_ms")


def _times_ms(of: Breakdown) -> dict[str, float]:
    """Milliseconds a step by the names of TIMES. step: without the profiler, where that is known. communication,
    memcpy: what no computation hides."""
    attribution = of.attribution
    if attribution is None:
        return {}
    windows = attribution.windows
    seconds = {
        "step_ms": attribution.step_s if of.bare_step_s is None else of.bare_step_s,
        **{f"{window.phase}_ms": window.overall_s for window in windows},
        "communication_ms": sum(window.exposed_communication_s for window in windows),
        "memcpy_ms": sum(window.exposed_memcpy_s for window in windows),
        "idle_ms": sum(window.idle_s for window in windows),
    }
    return {name: 1e3 * value for name, value in seconds.items()}


# As text, plain, with nothing in it that a terminal obeys.


def _head(side: str, path: Path, count: int, what: str) -> str:
    return escaped(f"{side}: {path}, {count} {what}")


def _page(
    heads: Sequence[str], title: str, changes: Mapping[str, Mapping[str, Contrast]], shown: Sequence[str], width: int
) -> str:
    rows = tuple(
        (
            escaped(name) if measure == shown[0] else "", measure, number(of[measure].a), number(of[measure].b),
            "" if of[measure].ratio is None else f"{of[measure].ratio:.3f}", _between(of[measure].ratio_ci),
        )
        for name, of in changes.items()
        for measure in shown
    )  # fmt: skip
    columns = (
        Column("", left=True), Column("of it", left=True), Column("A"), Column("B"), Column("B / A"),
        Column("95 % CI", left=True),
    )  # fmt: skip
    return "\n".join([*heads, "", text(Table("compare", title, columns, rows), width)])


def _between(interval: Bounds | None) -> str:
    return f"[{interval[0]:.3f}, {interval[1]:.3f}]" if interval and interval[0] < interval[1] else ""
