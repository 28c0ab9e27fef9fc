"""Two measurements of one kind side by side, and as a gate: sweeps cell by cell, micro-benchmarks point by point,
breakdowns cell by cell.

What the intervals of a gate cover: of a sweep's speed the noise between its runs (`of_runs`); where cells have
one run, the noise between its steps; of a micro-benchmark that between the samples of a point, whose median has the
standard error 1.2533 s / sqrt(n) with s = (p90 - p10) / 2.563, as of a normal distribution. Memory and breakdowns are
one number each and are compared as they are. The warnings say which.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.document.content import Chart, Column, Document, Section, Table, Text, number
from loadgen.report import gate, limits
from loadgen.report.contrast import (
    BETTER,
    NO_INTERVAL,
    SAME,
    WORSE,
    Contrast,
    as_it_is,
    contrast,
    direction,
    of_runs,
)
from loadgen.report.finding import Finding
from loadgen.report.limits import Check, Measure
from loadgen.report.pages import differences
from loadgen.report.pages.differences import Difference
from loadgen.rundir import package_version
from loadgen.steady.blocks import NORMAL_975
from training_probe import findings
from training_probe.breakdown import report as traced_report
from training_probe.breakdown import run as traces
from training_probe.breakdown.attribution import PASSES
from training_probe.breakdown.run import Breakdown
from training_probe.micro import run as micros
from training_probe.points import Collective, Copy, Gemm, Measured, label_of
from training_probe.report.document import command
from training_probe.report.layout import MOST_ROWS, titled
from training_probe.results import BREAKDOWN_FILE, CellResult, ResultsError
from training_probe.results import read as read_results

EXAMPLES = "'tokens_per_s<-3%' or 'peak_memory_gb>+0.5GiB'"
SPEEDS = {"tokens_per_s": Measure(lower_is_better=False), "mfu_ratio": Measure(lower_is_better=False)}
MEMORY = {name: Measure(lower_is_better=True, unit="GiB") for name in ("peak_memory_gb", "peak_reserved_gb")}
MS = Measure(lower_is_better=True, unit="ms")
RATES = {Gemm: "flops_per_s", Copy: "bytes_per_s", Collective: "bytes_per_s"}
# Of measures, where people read them; limits have their names.
LABELS = {
    "tokens_per_s": "tokens/s",
    "mfu_ratio": "MFU",
    "peak_memory_gb": "allocated (GiB)",
    "peak_reserved_gb": "reserved (GiB)",
    "median_ms": "median (ms)",
    "flops_per_s": "FLOP/s",
    "bytes_per_s": "bytes/s",
    "step_ms": "step (ms)",
    **{f"{phase}_ms": f"{phase} (ms)" for phase in PASSES},
    "communication_ms": "exposed communication (ms)",
    "memcpy_ms": "exposed memcpy (ms)",
    "idle_ms": "idle (ms)",
}

COLUMNS = (
    Column("cell", left=True),
    *(Column(name, "tokens/s") for name in ("A", "B", "B / A")),
    Column("95 % CI", "tokens/s", left=True),
    Column("shows", left=True),
    *(Column(name, "allocated GiB") for name in ("A", "B", "B - A")),
    *(Column(name, "reserved GiB", optional=True) for name in ("A", "B", "B - A")),
)

NOTE = (
    "95 % CI: Welch's t over the runs of each cell (on logarithms). It covers the noise between the runs of a sweep, "
    "not that between two days or two starts of a machine."
)
ONE_RUN = "cells with one run on both sides have the noise between steps alone in their intervals; sweep with --runs 3."
WITHIN = "the intervals hold the noise between the samples of one measurement, not that from one start to the next."
POINT = (
    "a breakdown is measured once: its numbers are compared as they are, without an interval; allow for their noise."
)


@dataclass
class Compared:
    """kind: what is compared. sides: a line or two of each. measures: what limits may be on, what counts most first.
    changes: by cell or point, by measure. ended: what did not end well, as checks of a gate. doubts: why A or B is
    INVALID as its report says, so that no gate passes, whatever the numbers are. table: all of it, where rows of
    differences are not enough. lists: further lines, by their heading."""

    kind: str
    sides: list[str]
    measures: dict[str, Measure]
    changes: dict[str, dict[str, Contrast]] = field(default_factory=dict)
    ended: list[Check] = field(default_factory=list)
    doubts: list[Check] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    table: Table | None = None
    lists: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def judged(self, texts: Sequence[str]) -> list[Check]:
        """How everything ended, and what came of each limit for each cell or point. Raises ConfigError."""
        allowed = limits.parse(texts, self.measures, EXAMPLES)
        return [*self.doubts, *self.ended, *limits.judged(allowed, self.changes)]

    def page(self, checks: Sequence[Check], argv: Sequence[str]) -> Document:
        """The comparison as a document. checks: what came of the limits. argv: words of the command."""
        ended_badly = bool(self.doubts) or any(check.state == "beyond" for check in [*self.ended, *checks])
        warnings = () if checks else (f"{warning[:1].upper()}{warning[1:]}" for warning in self.warnings)
        invalid = [f"{doubt.name} is INVALID: {doubt.detail}" for doubt in self.doubts]
        long = self._differences()
        both = [long] if self.table is None else [self.table]
        sections = [
            *([self.gate(checks)] if checks else []),
            Section("sides", "A and B", [*map(Text, [*invalid, *self.sides, *warnings])]),
            Section("both", "In both", both if self.changes or self.table else []),
            Section("percent", "B over A, less 1", [*self._charts()]),
            Section("differences", "Differences", [long] if self.table and self.changes else [], detail=True),
            *(Section(head.lower().replace(" ", "-"), head, [*map(Text, lines)]) for head, lines in self.lists.items()),
            Section("command", "The command", [command(argv)], detail=True),
        ]
        in_doubt = dict.fromkeys(f"{doubt.name} is INVALID." for doubt in self.doubts)
        verdict = f"Gate: {gate.headline(checks)}." if checks else self._conclusion()
        return Document(
            title=f"{self.kind}: B beside A",
            verdict=" ".join([verdict, *in_doubt]),
            tone="bad" if ended_badly else "plain",
            sections=[section for section in sections if section.blocks],
            footer=f"llm-dissect {package_version()}.",
        )

    def gate(self, checks: Sequence[Check]) -> Section:
        return gate.section(checks, self.warnings, self._conclusion())

    def _conclusion(self) -> str:
        """By what counts most of each cell or point."""
        name, measure = next(iter(self.measures.items()))
        known = [of[name] for of in self.changes.values() if of[name].ratio is not None]
        counts = Counter(direction(each, measure.lower_is_better) for each in known)
        shown = (BETTER, WORSE, SAME, NO_INTERVAL)
        listed = ", ".join(f"{counts[what]} {what.removeprefix('B is ')}" for what in shown if counts[what])
        return f"{LABELS[name]} of {len(known)} in both: {listed}." if listed else "Nothing ended well in both A and B."

    def _rows(self, measure: str) -> list[Difference]:
        lower = self.measures[measure].lower_is_better
        return [Difference(name, of[measure], lower) for name, of in self.changes.items()]

    def _charts(self) -> Iterator[Chart]:
        """Of each measure that is known."""
        for measure in self.measures:
            rows = [row for row in self._rows(measure) if row.change.ratio is not None]
            yield from differences.charts(LABELS[measure], rows) if rows else ()

    def _differences(self) -> Table:
        by_measure = {measure: self._rows(measure) for measure in self.measures}
        rows = [
            row._replace(name=f"{row.name}, {LABELS[measure]}")
            for of_cell in zip(*by_measure.values(), strict=True)
            for measure, row in zip(by_measure, of_cell, strict=True)
            if row.change.a is not None or row.change.b is not None
        ]
        return differences.table(rows, folded=len(rows) > MOST_ROWS)


def compare(a: Path, b: Path) -> Compared:
    """Reads two directories, or two files of a sweep's results. Raises ResultsError or MicroError."""
    kinds = [_kind(path) for path in (a, b)]
    if kinds[0] is not kinds[1]:
        raise ResultsError(f"{a} and {b} hold different measurements; name two sweeps, two breakdowns or two micros.")
    return kinds[0](a, b)


def _kind(path: Path) -> Callable[[Path, Path], Compared]:
    if (path / micros.RESULTS_FILE).is_file():
        return _micros
    return _breakdowns if (path / BREAKDOWN_FILE).is_file() else _sweeps


# Sweeps.


def _sweeps(a: Path, b: Path) -> Compared:
    results_a, results_b = read_results(a), read_results(b)
    made = Compared("Training", [], {**SPEEDS, **MEMORY})
    states = [{result.cell: (result.state, result.reason) for result in each} for each in (results_a, results_b)]
    made.ended = _ended(*states)
    made.doubts = _doubts(findings.of_cells(results_a), findings.of_cells(results_b))
    in_b = {result.cell: result for result in results_b}
    for result in results_a:
        other = in_b.get(result.cell)
        if other is not None and result.state == other.state == "ok":
            speed = speed_contrast(result, other)
            made.changes[result.cell] = {
                "tokens_per_s": speed,
                "mfu_ratio": in_proportion(speed, result.mfu_ratio, other.mfu_ratio),
                "peak_memory_gb": as_it_is(result.peak_memory_gb, other.peak_memory_gb),
                "peak_reserved_gb": as_it_is(result.peak_reserved_gb, other.peak_reserved_gb),
            }
            if max(len(result.tokens_per_s_runs), len(other.tokens_per_s_runs)) < 2:
                made.warnings = [ONE_RUN]
    both = [(result, in_b[result.cell]) for result in results_a if result.cell in in_b]
    changed = [f"{of_a.cell}: {_how(of_a)} | {_how(of_b)}" for of_a, of_b in both if of_a.state != of_b.state]
    only = [[name for name in own if name not in others] for own, others in (states, states[::-1])]
    lists = {"Ended differently": changed, "Only in A": only[0], "Only in B": only[1]}
    made.lists = {heading: lines for heading, lines in lists.items() if lines}
    made.sides = [_sweep("A", a, results_a), _sweep("B", b, results_b), *_versions(results_a, results_b), NOTE]
    rows = [row(*pair, made.changes.get(pair[0].cell, {})) for pair in both]
    made.table = titled("compare", "Cells in both", COLUMNS, rows)
    return made


def _sweep(side: str, name: Path, results: Sequence[CellResult]) -> str:
    platforms = dict.fromkeys(result.platform for result in results if result.platform)
    profiles = dict.fromkeys(
        f"{result.warmup_steps} + {result.steps} steps x {result.runs}" for result in results if result.outcome == "ok"
    )
    measured = "; ".join([*platforms, *profiles])
    return f"{side}: {name}, {len(results)} cells" + (f"; {measured}" if measured else "")


def _versions(a: Sequence[CellResult], b: Sequence[CellResult]) -> Iterator[str]:
    """Versions of packages that one side alone has; nothing where both have the same."""
    of_a, of_b = (
        list(dict.fromkeys(f"{name} {version}" for result in each for name, version in result.versions.items()))
        for each in (a, b)
    )
    if of_a != of_b:
        for side, own, others in (("A", of_a, of_b), ("B", of_b, of_a)):
            yield f"   only {side}: {', '.join(each for each in own if each not in others) or 'nothing'}"


def _how(result: CellResult) -> str:
    return result.state + (f" ({result.reason})" if result.reason else "")


def row(a: CellResult, b: CellResult, changes: Mapping[str, Contrast]) -> tuple[str, ...]:
    """A cell of both sweeps, under COLUMNS."""
    moved = f" (BS {a.batch_size} -> {b.batch_size})" if a.batch_size != b.batch_size else ""
    speeds = (number(each.tokens_per_s) if each.state == "ok" else each.state for each in (a, b))
    speed = changes.get("tokens_per_s", contrast(None, None))
    shown = (
        "" if speed.ratio is None else f"{speed.ratio:.3f}",
        "" if speed.ratio_ci is None else f"[{speed.ratio_ci[0]:.3f}, {speed.ratio_ci[1]:.3f}]",
        "" if speed.ratio_ci is None else direction(speed, lower_is_better=False),
    )
    memory = (as_it_is(getattr(a, name), getattr(b, name)) for name in MEMORY)
    return (a.cell + moved, *speeds, *shown, *(number(value) for of in memory for value in (of.a, of.b, of.difference)))


def _ended(a: Mapping[str, tuple[str, str]], b: Mapping[str, tuple[str, str]]) -> list[Check]:
    """Whether B has what ended ok in A: state and reason by name."""
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


def _doubts(a: Sequence[Finding], b: Sequence[Finding]) -> list[Check]:
    """Findings that make one of the two INVALID, each as a run that cannot be judged."""
    return [
        Check("run", side, "unknown", findings.sentence(finding))
        for side, found in (("A", a), ("B", b))
        for finding in found
        if finding.severity == "invalid"
    ]


def speed_contrast(a: CellResult, b: CellResult) -> Contrast:
    if a.tokens_per_s_runs and b.tokens_per_s_runs:
        between = of_runs(a.tokens_per_s_runs, b.tokens_per_s_runs)
        if between.ratio_ci is not None:
            return between
    errors = [error for each in (a, b) if (error := each.step_error_ratio) is not None]
    return _with_errors(a.tokens_per_s, b.tokens_per_s, errors)


def _with_errors(a: float | None, b: float | None, errors: Sequence[float]) -> Contrast:
    """errors: the standard error of both, as a ratio to the value; without both there is no interval."""
    if not a or not b or len(errors) < 2:
        return contrast(a, b)
    reach = NORMAL_975 * math.hypot(*errors)
    ratio_ci = (b / a * math.exp(-reach), b / a * math.exp(reach))
    return contrast(a, b, (a * (ratio_ci[0] - 1), a * (ratio_ci[1] - 1)), ratio_ci)


def in_proportion(to: Contrast, a: float | None, b: float | None) -> Contrast:
    """Contrasts values that are the same multiple of others in all runs of a side: the interval of their ratio
    follows."""
    plain = contrast(a, b)
    if a is None or b is None or to.ratio is None or to.ratio_ci is None or not plain.ratio:
        return plain
    low, high = (end * plain.ratio / to.ratio for end in to.ratio_ci)
    return contrast(a, b, (a * (low - 1), a * (high - 1)), (low, high))


# Micro-benchmarks.


def _micros(a: Path, b: Path) -> Compared:
    in_a, in_b = ({result.point: result for result in micros.read_results(path)} for path in (a, b))
    rates = dict.fromkeys(RATES[type(point)] for point in (*in_a, *in_b))
    measures = {"median_ms": MS, **{name: Measure(lower_is_better=False) for name in rates}}
    both = {label_of(point): (of_a, in_b[point]) for point, of_a in in_a.items() if point in in_b}
    changes = {
        name: {"median_ms": median_contrast(*pair), **{rate: _rate(rate, *pair) for rate in rates}}
        for name, pair in both.items()
        if pair[0].outcome == pair[1].outcome == "ok"
    }
    states = [{label_of(point): (each.outcome, each.reason) for point, each in of.items()} for of in (in_a, in_b)]
    sides = [_side("A", a, len(in_a), "points"), _side("B", b, len(in_b), "points")]
    doubts = _doubts(*(findings.of_points([*of.values()]) for of in (in_a, in_b)))
    return Compared("Micro-benchmarks", sides, measures, changes, _ended(*states), doubts, [WITHIN])


def median_contrast(a: Measured, b: Measured) -> Contrast:
    of_a, of_b = (None if each.median_s is None else 1e3 * each.median_s for each in (a, b))
    errors = [error for each in (a, b) if (error := each.error_ratio) is not None]
    return _with_errors(of_a, of_b, errors)


def _rate(name: str, a: Measured, b: Measured) -> Contrast:
    """As much over the time: the ends of the interval are those of the time, the other way round."""
    times, rate_a, rate_b = median_contrast(a, b), getattr(a, name), getattr(b, name)
    if times.ratio_ci is None or rate_a is None or rate_b is None:
        return contrast(rate_a, rate_b)
    low, high = 1 / times.ratio_ci[1], 1 / times.ratio_ci[0]
    return contrast(rate_a, rate_b, (rate_a * (low - 1), rate_a * (high - 1)), (low, high))


# Breakdowns.


def _breakdowns(a: Path, b: Path) -> Compared:
    in_a, in_b = ({each.cell.name: each for each in traces.read(path)} for path in (a, b))
    times_a, times_b = ({name: _times_ms(each) for name, each in of.items()} for of in (in_a, in_b))
    changes = {
        name: {measure: as_it_is(times_a[name].get(measure), times_b[name].get(measure)) for measure in TIMES}
        for name, each in in_a.items()
        if name in in_b and each.outcome == in_b[name].outcome == "ok"
    }
    states = [{name: (each.outcome, each.reason) for name, each in of.items()} for of in (in_a, in_b)]
    sides = [_side("A", a, len(in_a), "cells"), _side("B", b, len(in_b), "cells")]
    doubts = _doubts(*(traced_report.findings_of([*of.values()]) for of in (in_a, in_b)))
    return Compared("Breakdowns", sides, dict.fromkeys(TIMES, MS), changes, _ended(*states), doubts, [POINT])


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


def _side(side: str, path: Path, count: int, what: str) -> str:
    return f"{side}: {path}, {count} {what}"
