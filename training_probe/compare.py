"""Two measurements of one kind side by side, and as a gate: sweeps cell by cell, micro-benchmarks point by point,
breakdowns cell by cell.

What the intervals of a gate cover: of a sweep's speed the noise between its runs (`report.compare`); where cells have
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

from loadgen.document import content
from loadgen.document.content import Column, Table, number
from loadgen.report.contrast import SAME, Contrast, as_it_is, contrast, of_runs
from loadgen.report.finding import Finding
from loadgen.report.limits import Check, Limit, Measure, judge, parse
from loadgen.rundir import package_version
from loadgen.steady.blocks import NORMAL_975, Bounds
from training_probe import findings
from training_probe.breakdown import report as traced_report
from training_probe.breakdown import run as traces
from training_probe.breakdown.attribution import PASSES
from training_probe.breakdown.run import Breakdown
from training_probe.micro import run as micros
from training_probe.points import Collective, Copy, Gemm, Measured, label_of
from training_probe.report import compare as sweeps
from training_probe.report.compare import Comparison
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

BETTER, WORSE, UNKNOWN = "better", "worse", "without an interval"  # of B, beside SAME
MOST_OF_CHART = 24  # ratios; more go into the next one

ONE_RUN = "cells with one run on both sides have the noise between steps alone in their intervals; sweep with --runs 3."
WITHIN = "the intervals hold the noise between the samples of one measurement, not that from one start to the next."
POINT = (
    "a breakdown is measured once: its numbers are compared as they are, without an interval; allow for their noise."
)


@dataclass
class Compared:
    """kind: what is compared. as_text: as it is printed. measures: what limits may be on, what counts most first.
    changes: by cell or point, by measure. ended: what did not end well, as checks of a gate. doubts: why A or B is
    INVALID as its report says, so that no gate passes, whatever the numbers are."""

    kind: str
    as_text: Comparison
    measures: dict[str, Measure]
    changes: dict[str, dict[str, Contrast]] = field(default_factory=dict)
    ended: list[Check] = field(default_factory=list)
    doubts: list[Check] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def judged(self, texts: Sequence[str]) -> list[Check]:
        """How everything ended, and what came of each limit for each cell or point. Raises ConfigError."""
        limits: list[Limit] = parse(texts, self.measures, EXAMPLES)
        checks = [judge(limit, of[limit.metric], name) for name, of in self.changes.items() for limit in limits]
        if not self.changes:
            checks.append(Check("limit", "limits", "unknown", "Nothing ended well in both A and B."))
        return [*self.doubts, *self.ended, *checks]

    @property
    def invalid(self) -> list[str]:
        """What a reader of the numbers must know first, a sentence each."""
        return [f"{doubt.name} is INVALID: {doubt.detail}" for doubt in self.doubts]

    def page(self, checks: Sequence[Check], argv: Sequence[str]) -> content.Document:
        """The comparison as a page. checks: what came of the limits. argv: words of the command."""
        ended_badly = bool(self.doubts) or any(check.state == "beyond" for check in [*self.ended, *checks])
        warnings = (f"{warning[:1].upper()}{warning[1:]}" for warning in self.warnings)
        sides = [*self.invalid, *self.as_text.sides, *self.as_text.notes, *warnings]
        sections = [
            content.Section(id="sides", title="A and B", blocks=_texts(sides)),
            content.Section(id="limits", title="Limits", blocks=[_checks(checks)] if checks else []),
            content.Section("both", self.as_text.table.caption, [self.as_text.table]),
            content.Section(id="ratios", title="B over A", blocks=[*self._charts()]),
            content.Section("differences", "Differences", [*self._differences()], detail=True),
            *(
                content.Section(id=heading.lower().replace(" ", "-"), title=heading, blocks=_texts(lines))
                for heading, lines in self.as_text.lists.items()
            ),
            content.Section("command", "The command", [command(argv)], detail=True),
        ]
        return content.Document(
            title=f"{self.kind}: B beside A",
            verdict=" ".join([self._verdict(), *(f"{doubt.name} is INVALID." for doubt in self._sides_in_doubt())]),
            tone="bad" if ended_badly else "plain",
            sections=[section for section in sections if section.blocks],
            footer=f"llm-dissect {package_version()}.",
        )

    def _sides_in_doubt(self) -> list[Check]:
        return list({doubt.name: doubt for doubt in self.doubts}.values())

    def _verdict(self) -> str:
        """By what counts most of each cell or point."""
        name, measure = next(iter(self.measures.items()))
        counts = Counter(_shown(of[name], measure) for of in self.changes.values() if of[name].ratio is not None)
        listed = ", ".join(f"{counts[shown]} {shown}" for shown in (BETTER, WORSE, SAME, UNKNOWN) if counts[shown])
        return (
            f"{LABELS[name]} of {counts.total()} in both: {listed}."
            if listed
            else "Nothing ended well in both A and B."
        )

    def _charts(self) -> Iterator[content.Chart]:
        """B / A with its interval, of each measure that is known."""
        for measure in self.measures:
            known = {name: of[measure] for name, of in self.changes.items() if of[measure].ratio is not None}
            for start in range(0, len(known), MOST_OF_CHART):
                part = dict([*known.items()][start : start + MOST_OF_CHART])
                more = f" ({start // MOST_OF_CHART + 1})" if len(known) > MOST_OF_CHART else ""
                ends = [of.ratio_ci or (None, None) for of in part.values()]
                ratios = content.Series(
                    name="B / A", x=[*range(len(part))], y=[of.ratio for of in part.values()], kind="points",
                    low=[low for low, _ in ends], high=[high for _, high in ends],
                )  # fmt: skip
                yield content.Chart(
                    title=f"{LABELS[measure]}{more}", x_label="", y_label="B / A", series=[ratios], categories=[*part],
                    marks=[content.Mark(axis="y", value=1.0, label="no difference")], from_zero=False,
                    note="Whiskers: 95 % interval, where there is one.",
                )  # fmt: skip

    def _differences(self) -> Iterator[content.Table]:
        rows = [
            _row(f"{name}, {LABELS[measure]}", of[measure])
            for name, of in self.changes.items()
            for measure in self.measures
            if of[measure].a is not None or of[measure].b is not None
        ]
        headers = ("what", "A", "B", "B - A", "95 % interval", "B / A", "95 % interval")
        folded = len(rows) > MOST_ROWS
        caption = f"{len(rows)} rows" if folded else ""
        if rows:
            yield content.Table(headers=headers, rows=rows, folded=folded, caption=caption)


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


def _shown(of: Contrast, measure: Measure) -> str:
    """Whether B is better than A by more than the interval explains; a number compared as it is has none."""
    if of.ratio_ci is None or of.ratio is None or of.ratio_ci[0] == of.ratio_ci[1]:
        return UNKNOWN
    low, high = of.ratio_ci
    if low <= 1 <= high:
        return SAME
    return BETTER if (of.ratio < 1) == measure.lower_is_better else WORSE


def _cell(value: float | None) -> content.Number:
    return content.Number(text=number(value), value=value)


def _row(name: str, of: Contrast) -> list[content.Cell]:
    values = (_cell(of.a), _cell(of.b), _cell(of.difference), _ends(of.difference_ci, number))
    return [name, *values, _cell(of.ratio), _ends(of.ratio_ci, "{:.3f}".format)]


def _ends(interval: Bounds | None, text_of: Callable[[float], str]) -> str:
    return "" if interval is None or interval[0] == interval[1] else f"[{', '.join(map(text_of, interval))}]"


def _texts(lines: Sequence[str]) -> list[content.Text]:
    return [content.Text(text=line) for line in lines]


def _checks(checks: Sequence[Check]) -> content.Items:
    tones: dict[str, content.Tone] = {"ok": "good", "beyond": "bad", "unknown": "warning"}
    items = [content.Listed(head=check.name, text=check.detail, tone=tones[check.state]) for check in checks]
    return content.Items(items=items)


# Sweeps.


def _sweeps(a: Path, b: Path) -> Compared:
    results_a, results_b = read_results(a), read_results(b)
    as_text = sweeps.sweeps(results_a, results_b, str(a), str(b))
    made = Compared("Training", as_text, {**SPEEDS, **MEMORY})
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
    return made


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
    as_text = Comparison(sides=sides, table=_table("Points in both", changes, ["median_ms"]))
    doubts = _doubts(*(findings.of_points([*of.values()]) for of in (in_a, in_b)))
    return Compared("Micro-benchmarks", as_text, measures, changes, _ended(*states), doubts, [WITHIN])


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
    as_text = Comparison(sides=sides, table=_table("Cells in both", changes, TIMES))
    doubts = _doubts(*(traced_report.findings_of([*of.values()]) for of in (in_a, in_b)))
    return Compared("Breakdowns", as_text, dict.fromkeys(TIMES, MS), changes, _ended(*states), doubts, [POINT])


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


# As text.


def _side(side: str, path: Path, count: int, what: str) -> str:
    return f"{side}: {path}, {count} {what}"


def _table(title: str, changes: Mapping[str, Mapping[str, Contrast]], shown: Sequence[str]) -> Table:
    rows = tuple(
        (
            name if measure == shown[0] else "", LABELS[measure], number(of[measure].a), number(of[measure].b),
            "" if of[measure].ratio is None else f"{of[measure].ratio:.3f}", _between(of[measure].ratio_ci),
        )
        for name, of in changes.items()
        for measure in shown
    )  # fmt: skip
    columns = (
        Column("", left=True), Column("of it", left=True), Column("A"), Column("B"), Column("B / A"),
        Column("95 % CI", left=True),
    )  # fmt: skip
    return titled("compare", title, columns, rows)


def _between(interval: Bounds | None) -> str:
    return f"[{interval[0]:.3f}, {interval[1]:.3f}]" if interval and interval[0] < interval[1] else ""
