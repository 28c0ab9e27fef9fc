"""Reasons to distrust what was measured of training: of cells, of the points of micro-benchmarks, of breakdowns. Pure:
what the results hold in, findings out, as loadgen.report.findings has them for serving.

Every threshold is a constant with its reason. `invalid` means that the numbers are no measurement (exit code 4),
`warning` that a reader must know it to read them. A finding never changes a number. Results of versions that did not
keep what a finding needs give none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from backends.gpus import SLOWDOWNS
from loadgen.report.finding import THERMAL_RATIO, Finding, Severity, throttled, worst_first
from loadgen.steady.blocks import NORMAL_975, t_975
from training_probe.conditions import Conditions, all_reasons
from training_probe.points import Copy, Gemm, Measured, Point, label_of, spread_of
from training_probe.results import CellResult

Verdict = Literal["VALID", "INVALID"]
Band = Literal["", "unsteady", "unsure", "no value"]  # of NOISY; empty: it is no finding
BANDS: tuple[Band, ...] = get_args(Band)  # the worst last

# A number that is known to no better than a twentieth of it hides the differences between methods that people look for.
# Values whose standard deviation is half of it say that two runs may well differ by a factor: then their mean is no
# property of the machine, however many they are. Beyond a quarter something else slows some of them: in the quiet tries
# that results:scripts/noise_told.jsonl has, on a virtual machine, they varied by 24 % at most.
NOISY_RATIO, UNSTEADY_RATIO, NO_VALUE_RATIO = 0.05, 0.25, 0.5
# The tenth and the ninetieth percentile of fewer values lie beyond the last but one: then a single slow step, which a
# garbage collection or a neighbour makes, moves them. Such a spread is a warning, and never makes a sweep INVALID.
FEWEST_VALUES = 11
# The command and torchrun take under a hundredth of two cores while they wait; one busy process takes a hundredth of a
# hundred cores, which no rank misses, and a quarter or more of two, which it does.
LOADED_RATIO = 0.05
STEAL_RATIO = 0.01  # a core that is taken away stops its rank, and the others wait for that
# The kernel counts CPU time in ticks of 10 ms, of cores and of processes each on its own. Up to three of them are
# rounding: 5 % of a cell of 0.3 s on two cores; of several spans as many times more as the root of their number.
ROUNDED_CORE_S = 0.03
# Ranks that lack a quarter of the cores take a third longer at best, and far longer where they wait for each other: a
# cell of one rank that lacked 32 % of two cores took 4 times as long as its fastest steps. A process on each core
# beside a rank on each takes a half. Where a core or more was idle on average, no rank lacked one: the ranks of GPUs
# need few cores of a large machine, and others may have the rest.
TAKEN_RATIO, IDLE_CORES = 0.25, 1.0
# Of two sizes the larger is never the faster one by so much, but for noise: the warning's ratio, where it is at least
# four times as large; at twice the size another algorithm may be the faster one, but not by a factor of two.
SIZES_APART: dict[Severity, tuple[int, float]] = {"invalid": (2, 2.0), "warning": (4, 1.25)}
# A profiler costs time. A step that is faster with it, by more than steps may vary, shows that neither time is the
# step's; where it costs half a step or more, passes and idle times are more the profiler's than the step's.
PROFILED_SLOWER_RATIO = 1.5
TENSOR_CORE_SIDE = 16  # of the smallest type
NAMED = 3

NOISY_ADVICE = "End what else runs on the machine, or measure longer: --runs, --steps, --samples."
SLOWED_ADVICE = "End what else runs on the machine, and measure again."
LOADED_ADVICE = "End the other processes, or measure on a machine of its own."
NON_MONOTONE_ADVICE = "Measure these sizes again on a quiet machine; do not quote the slower ones."
COST_ADVICE = "Trace more --steps on a quiet machine; quote the step without the profiler, and parts as shares."


class Variation(NamedTuple):
    """The spread of the values behind a reported number. ratio: their standard deviation to the number, None where it
    is not known. error_ratio: the number's standard error, to it. few: they are fewer than FEWEST_VALUES steps or
    samples."""

    ratio: float | None
    error_ratio: float
    few: bool = False

    @property
    def within_ratio(self) -> float:
        """Half of the number's 95 % interval, as `compare` has it of single runs. Of two or three values, as of runs,
        it is narrower than Student's, which two runs 1 % apart would make 6 % wide: the finding would strike always."""
        return NORMAL_975 * self.error_ratio

    @property
    def band(self) -> Band:
        varies = 0.0 if self.ratio is None or self.few else self.ratio
        if varies > NO_VALUE_RATIO:
            return "no value"
        if self.within_ratio > NOISY_RATIO:
            return "unsure"
        return "unsteady" if varies > UNSTEADY_RATIO else ""


class Traced(NamedTuple):
    """A breakdown's step, the mean of `steps` with the profiler and of as many without. bare_std_s: over the latter."""

    bare_s: float
    traced_s: float
    steps: int
    bare_std_s: float | None = None

    @property
    def spread(self) -> Variation | None:
        if self.bare_std_s is None or not self.steps:
            return None
        ratio = self.bare_std_s / self.bare_s
        return Variation(ratio, ratio / math.sqrt(self.steps), self.steps < FEWEST_VALUES)

    @property
    def chance_ratio(self) -> float:
        """How far two means of so many steps may be apart by chance, at 97.5 %, but at most NO_VALUE_RATIO: means
        further apart are no step's time, by chance or not. Traced steps are taken to vary as bare ones do."""
        if self.bare_std_s is None or self.steps < 2:
            return 0.0
        chance = t_975(self.steps - 1) * math.sqrt(2 / self.steps) * self.bare_std_s / self.bare_s
        return min(chance, NO_VALUE_RATIO)


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    return "INVALID" if any(finding.severity == "invalid" for finding in findings) else "VALID"


def sentence(finding: Finding) -> str:
    """As a report has it."""
    return f"{finding.code} ({finding.severity}): {finding.message} {finding.advice}"


def of_cells(results: Sequence[CellResult]) -> list[Finding]:
    ok = [result for result in results if result.outcome == "ok"]
    spreads = {result.cell: spread for result in ok if (spread := cell_spread(result)) is not None}
    seen = {result.cell: result.conditions for result in ok if result.conditions is not None}
    return worst_first([*_noisy(spreads, "cells"), *_conditions(seen, "cells")])


def of_points(results: Sequence[Measured]) -> list[Finding]:
    """Load is judged over all points together: one lasts a few ticks of the kernel's clock."""
    ok = [result for result in results if result.outcome == "ok" and result.median_s]
    spreads = {label_of(each.point): spread for each in ok if (spread := point_spread(each)) is not None}
    spans = [each.conditions for each in ok if each.conditions is not None]
    whole = _mean(spans)
    rounded_core_s = ROUNDED_CORE_S * math.sqrt(len(spans))  # each has its own
    together = _conditions({"all points": whole}, "", rounded_core_s) if whole else ()
    return worst_first([*_noisy(spreads, "points"), *together, *_non_monotone(ok)])


def of_breakdowns(traced: Mapping[str, Traced], seen: Mapping[str, Conditions]) -> list[Finding]:
    """By the cell's name."""
    costs = {name: each.traced_s / each.bare_s for name, each in traced.items()}
    faster = {name: 1 / cost for name, cost in costs.items() if 1 - cost > max(NOISY_RATIO, traced[name].chance_ratio)}
    slower = {name: cost for name, cost in costs.items() if cost > PROFILED_SLOWER_RATIO}
    of_profiler: list[Finding] = []
    if faster:
        message = f"A step was faster under the profiler than without: {_named(faster, _times)}: both are noise."
        of_profiler.append(Finding(code="PROFILER_COST", severity="invalid", message=message, advice=COST_ADVICE))
    if slower:
        message = f"The profiler makes a step much longer: {_named(slower, _times)}."
        of_profiler.append(Finding(code="PROFILER_COST", severity="warning", message=message, advice=COST_ADVICE))
    spreads = {name: spread for name, each in traced.items() if (spread := each.spread) is not None}
    return worst_first([*of_profiler, *_noisy(spreads, "cells"), *_conditions(seen, "cells")])


# What spread is.


def cell_spread(result: CellResult) -> Variation | None:
    """The worse of that between runs and that of steps. Single steps vary as their percentiles do, since one slow step
    does not make a mean of many useless; but it counts in the mean, and so in the mean's error."""
    known, runs = [], len(result.tokens_per_s_runs) or result.runs  # older versions kept none of them
    if result.tokens_per_s and result.tokens_per_s_std is not None and runs > 1:
        ratio = result.tokens_per_s_std / result.tokens_per_s
        known.append(Variation(ratio, ratio / math.sqrt(runs)))
    if (error := result.step_error_ratio) is not None:
        of_steps = spread_of(result.step_ms_p10, result.step_ms_p90, result.step_ms)
        known.append(Variation(of_steps, error, few=result.runs * result.steps < FEWEST_VALUES))
    return max(known, key=lambda spread: (BANDS.index(spread.band), spread.error_ratio), default=None)


def point_spread(result: Measured) -> Variation | None:
    if (ratio := result.spread_ratio) is None or (error := result.error_ratio) is None:
        return None
    return Variation(ratio, error, few=result.samples < FEWEST_VALUES)


def _mean(spans: Sequence[Conditions]) -> Conditions | None:
    """Joins spans that follow each other: shares of all their time."""
    seconds = sum(span.seconds for span in spans)
    if not seconds:
        return None

    def share(name: str) -> float | None:
        known = [(span.seconds, value) for span in spans if (value := getattr(span, name)) is not None]
        return sum(of * value for of, value in known) / seconds if known else None

    names = ("others_ratio", "idle_ratio", "steal_ratio", "thermal_ratio", "power_ratio")
    shares = {name: share(name) for name in names}
    return Conditions(seconds=seconds, cores=spans[0].cores, clock_reasons=all_reasons(spans), **shares)


# The findings.


def _noisy(spreads: Mapping[str, Variation], what: str) -> Iterator[Finding]:
    bands: tuple[tuple[Band, Severity, str, str], ...] = (
        ("no value", "invalid", _varying(NO_VALUE_RATIO), "so they have no value that could be quoted"),
        ("unsure", "warning", f"are not known to {_percent(NOISY_RATIO)}", "so smaller differences mean nothing"),
        ("unsteady", "warning", _varying(UNSTEADY_RATIO), "so something else slowed some of their steps or samples"),
    )
    for band, severity, are, means in bands:
        of = {name: spread for name, spread in spreads.items() if spread.band == band}
        if not of:
            continue
        if band == "unsure":
            named = _named({name: spread.within_ratio for name, spread in of.items()}, _within) + "; 95 % intervals"
        else:
            named = _named({name: spread.ratio or 0.0 for name, spread in of.items()}, _percent)
        message = f"{len(of)} of {len(spreads)} {what} {are} ({named}), {means}."
        advice = NOISY_ADVICE if band == "unsure" else SLOWED_ADVICE
        yield Finding(code="NOISY", severity=severity, message=message, advice=advice)


def _varying(ratio: float) -> str:
    return f"have a standard deviation over {_percent(ratio)} of their value"


def _conditions(seen: Mapping[str, Conditions], what: str, rounded_core_s: float = ROUNDED_CORE_S) -> Iterator[Finding]:
    """what: of which `seen` are some; empty: it is of all of them together. rounded_core_s: so much of the cores' time
    is rounding."""

    def beyond_rounding(values: Mapping[str, float]) -> dict[str, float]:
        return {
            name: ratio for name, ratio in values.items()
            if ratio * seen[name].cores * seen[name].seconds > rounded_core_s
        }  # fmt: skip

    lacking = beyond_rounding({name: taken for name, each in seen.items() if (taken := _lacking(each)) is not None})

    def loaded(most: float, field: str) -> list[str]:
        values = _beyond(most, field, {name: each for name, each in seen.items() if name not in lacking})
        return _ranked(beyond_rounding(values), _percent)

    heat = _ranked(_beyond(THERMAL_RATIO, "thermal_ratio", seen), _percent)
    slowing = {name: [why for why in each.clock_reasons if why in SLOWDOWNS] for name, each in seen.items()}
    slowed = [f"{name} {', '.join(reasons)}" for name, reasons in slowing.items() if reasons]
    others, stolen = loaded(LOADED_RATIO, "others_ratio"), loaded(STEAL_RATIO, "steal_ratio")
    rows: tuple[tuple[str, Severity, str, list[str], str], ...] = (
        ("LOADED", "invalid", "The ranks lacked cores that others took", _ranked(lacking, _percent), LOADED_ADVICE),
        ("LOADED", "warning", "Other processes took part of the cores' time", others, LOADED_ADVICE),
        ("LOADED", "warning", "The hypervisor took part of the cores' time", stolen, LOADED_ADVICE),
    )

    def where(affected: Sequence[str]) -> str:
        return f" in {len(affected)} of {len(seen)} {what}" if what else ""

    for code, severity, took, affected, advice in rows:
        if affected:
            message = f"{took}{where(affected)}: {_listed(affected)}."
            yield Finding(code=code, severity=severity, message=message, advice=advice)
    for affected, counted in ((heat, True), (slowed, False)):
        if affected:
            yield throttled(where(affected), _listed(affected), counted=counted)


def _lacking(span: Conditions) -> float | None:
    """The share of the cores that was taken from the ranks; None: they had enough, or it is not known."""
    if span.idle_ratio is None or span.idle_ratio * span.cores >= IDLE_CORES:
        return None
    taken = (span.others_ratio or 0.0) + (span.steal_ratio or 0.0)
    return taken if taken > TAKEN_RATIO else None


def _beyond(most: float, field: str, seen: Mapping[str, Conditions]) -> dict[str, float]:
    values = {name: value for name, each in seen.items() if (value := getattr(each, field)) is not None}
    return {name: value for name, value in values.items() if value > most}


def _non_monotone(results: Sequence[Measured]) -> Iterator[Finding]:
    alike: dict[tuple[object, ...], list[Measured]] = {}
    for each in results:
        alike.setdefault(_alike(each.point), []).append(each)
    slower: dict[Severity, dict[str, float]] = {"invalid": {}, "warning": {}}
    for points in alike.values():
        for each in points:
            for severity, (apart, most) in SIZES_APART.items():
                ratio = _times_longer(each, points, apart)
                if ratio > most:
                    slower[severity][label_of(each.point)] = ratio
                    break
    for severity, ratios in slower.items():
        if ratios:
            message = f"{len(ratios)} of {len(results)} points took longer than larger ones: {_named(ratios, _times)}."
            yield Finding(code="NON_MONOTONE", severity=severity, message=message, advice=NON_MONOTONE_ADVICE)


def _times_longer(point: Measured, points: Sequence[Measured], apart: float) -> float:
    """How many times as long it took as the fastest of those that are at least so many times as large; 0 without any.
    A larger product has no side that is smaller."""
    assert point.median_s is not None
    work, sides = _work(point.point), _sides(point.point)
    larger = [
        each.median_s
        for each in points
        if each.median_s
        and _work(each.point) >= apart * work
        and all(theirs >= ours for ours, theirs in zip(sides, _sides(each.point), strict=True))
    ]
    return point.median_s / min(larger) if larger else 0.0


def _alike(point: Point) -> tuple[object, ...]:
    """What points have in common that differ in size alone. Of products with sides that are no multiple of what tensor
    cores take, other kernels compute."""
    if isinstance(point, Gemm):
        return point.dtype, point.n % TENSOR_CORE_SIDE == point.k % TENSOR_CORE_SIDE == 0
    if isinstance(point, Copy):
        return point.route, point.pinned
    return point.name, point.ranks, point.p2p


def _work(point: Point) -> int:
    return point.flops if isinstance(point, Gemm) else point.size_bytes


def _sides(point: Point) -> tuple[int, ...]:
    return (point.m, point.n, point.k) if isinstance(point, Gemm) else ()


def _named(values: Mapping[str, float], text: Callable[[float], str]) -> str:
    """The largest of them, with their values."""
    return _listed(_ranked(values, text))


def _ranked(values: Mapping[str, float], text: Callable[[float], str]) -> list[str]:
    """All of them with their values, the largest first."""
    return [f"{name} {text(values[name])}" for name in sorted(values, key=values.__getitem__, reverse=True)]


def _listed(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return "; ".join(texts[:NAMED]) + more  # names have commas


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def _within(ratio: float) -> str:
    return f"+-{_percent(ratio)}"


def _times(ratio: float) -> str:
    return f"{ratio:.2g} times"
