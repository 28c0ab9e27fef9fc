"""How run B differs from run A: differences and ratios with 95 % confidence intervals. Pure but for reading.

Where a side is a directory of repeats, the intervals are between runs (`contrast`). Of one run on each side they are
within the runs: each value has an interval by blocks of its run (`pages/intervals.py`), and that of a difference or a
ratio follows from the two (`of_estimates`); of a share of failures, Wilson's. Such an interval says how far the choice
of moments within these two runs can move the number. It must never pass for the noise between one run and the next,
and the output says so. Where all runs of both sides have a steady window, their numbers are those of the window
(`loadgen/steady/window.py`), and the output says that too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen import rundir
from loadgen.document.content import number
from loadgen.report import build as reports
from loadgen.report import findings, limits, metrics, repeats, slices
from loadgen.report.contrast import (
    BETTER,
    NO_INTERVAL,
    SAME,
    WORSE,
    Contrast,
    contrast,
    direction,
    of_estimates,
    of_runs,
)
from loadgen.report.limits import Check, Limit, Measure
from loadgen.report.metrics import CONVENTIONS, GOODPUT, ITEMS, METRICS, PERCENTILES
from loadgen.report.pages import intervals, parts
from loadgen.report.repeats import RunVerdict
from loadgen.report.schema import Report
from loadgen.rundir import Manifest
from loadgen.rundir.records import RequestTable
from loadgen.steady import flows
from loadgen.steady.blocks import NORMAL_975, Bounds, wilson
from loadgen.steady.window import Estimate, TimeSpan, rate

NOTES = (
    "An interval covers the chance in which moments were measured, not the noise from run to run, which is often "
    "larger: repeat both runs before believing a small difference (loadgen run --repeat 5).",
)
STEADY_NOTE = (
    "The numbers are of each run's steady state, which all of these runs have: start and drain are left out. Reports "
    "show whole runs beside it."
)
REPEATED_NOTES = (
    "95 % CI: Welch's t over one value a run. It covers the noise between runs of one server, not that between two "
    "days or two starts of a machine.",
)
ONE_SIDED_NOTE = "One side has a single run: the spread of the other side's runs serves for both."
OTHER_ACKS = (
    "Only one of A and B was measured with --quick-acks: what the wire adds for ordinary clients is in the other alone."
)
WITHIN_RUN = (
    "the intervals are within one run on each side and do not hold the noise from run to run; compare directories of "
    "loadgen run --repeat."
)

Array = NDArray[np.float64]
_RULES = CONVENTIONS["loadgen"]
_OF_SENT = ("ttft", "send_lag")  # metrics that are known before a reply ends


# What a limit may be on: all of the latencies but for the client's own lag, and throughput.
MAIN = (
    "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p50", "itl_p99", "e2el_p50", "e2el_p99", "requests_per_s",
    "output_tokens_per_s", ITEMS,
)  # fmt: skip
LIMITED: dict[str, Measure] = {
    **{
        f"{name.removesuffix('_ms')}_{statistic}": Measure(lower_is_better=True, unit="ms")
        for name in METRICS
        if name != "send_lag_ms"
        for statistic in repeats.STATISTICS
    },
    **{name: Measure(lower_is_better=False) for name in (*repeats.THROUGHPUT, ITEMS, GOODPUT)},
}


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs. run_id: of the first. requests: those that were measured, of all runs. runs: each run's verdict;
    empty where it is not known."""

    run_id: str
    backend: str
    model: str
    emulated: bool
    requests: int
    ok: int
    runs: list[RunVerdict] = []


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """metrics: by name and statistic. configuration: what was set differently, [A, B] by name. between_runs: whether
    the intervals are; else they are within one run on each side. steady: whether the numbers are those of each run's
    steady window, and not of whole runs."""

    a: Side
    b: Side
    metrics: dict[str, dict[str, Contrast]]
    failure_ratio: Contrast
    throughput: dict[str, Contrast]
    configuration: dict[str, list[Any]]
    between_runs: bool = False
    steady: bool = False
    notes: tuple[str, ...] = NOTES


@dataclass(frozen=True)
class _Runs:
    """One side as it was read. table: of the first run. windows: the values of each run's steady window, where it has
    one."""

    directories: list[Path]
    reports: list[Report]
    manifest: Manifest
    table: RequestTable
    windows: list[_Values | None]

    def side(self) -> Side:
        first = self.reports[0]
        return Side(
            run_id=first.run_id,
            backend=first.backend,
            model=first.model,
            emulated=any(report.emulated for report in self.reports),
            requests=sum(report.requests.ok + report.requests.failed for report in self.reports),
            ok=sum(report.requests.ok for report in self.reports),
            runs=repeats.verdicts(self.directories, self.reports),
        )


def compare(a: Path, b: Path) -> Comparison:
    """Reads two run directories, or directories of repeats, and compares them. Raises RunError, RecordsError or
    ReportError."""
    of_a, of_b = _read(a), _read(b)
    if len(of_a.reports) == len(of_b.reports) == 1:
        slos, windows = _shared_slos(of_a, of_b), (of_a.windows[0], of_b.windows[0])
        if windows[0] is not None and windows[1] is not None:
            made = _within(of_a.manifest, windows[0], of_b.manifest, windows[1], steady=True)
        else:
            made = build(of_a.manifest, of_a.table, of_b.manifest, of_b.table, slos)
        return msgspec.structs.replace(made, a=of_a.side(), b=of_b.side())
    return _between(of_a, of_b)


def _read(directory: Path) -> _Runs:
    directories = repeats.directories(directory)
    manifest = rundir.read_manifest(directories[0])
    report, table = reports.from_directory(directories[0])
    found, windows = [report], [_window(report, table)]
    for path in directories[1:]:
        other, of_other = reports.from_directory(path)
        found.append(other)
        windows.append(_window(other, of_other))
    return _Runs(directories, found, manifest, table, windows)


def _shared_slos(a: _Runs, b: _Runs) -> Mapping[str, float]:
    """The limits of goodput that all runs were started with; none where they differ."""
    goodputs = [report.goodput for report in (*a.reports, *b.reports)]
    slos = [{} if goodput is None else goodput.slos_ms for goodput in goodputs]
    return slos[0] if all(each == slos[0] for each in slos) else {}


def _between(a: _Runs, b: _Runs) -> Comparison:
    """One value a run, and intervals between runs."""
    goodput = bool(_shared_slos(a, b))
    values_a, values_b = ([repeats.values(report) for report in side.reports] for side in (a, b))
    windows_a, windows_b = ([each for each in side.windows if each is not None] for side in (a, b))
    steady = len(windows_a) == len(a.reports) and len(windows_b) == len(b.reports)
    if steady:
        values_a, values_b = ([each.flat() for each in windows] for windows in (windows_a, windows_b))

    def over(name: str) -> Contrast:
        return _of_known([run.get(name) for run in values_a], [run.get(name) for run in values_b])

    items = any(ITEMS in run for run in (*values_a, *values_b))
    rates = (*repeats.THROUGHPUT, *([ITEMS] if items else []))
    failed_a, failed_b = ([_failed_ratio(report) for report in side.reports] for side in (a, b))
    lone = min(len(a.reports), len(b.reports)) == 1
    return Comparison(
        a=a.side(),
        b=b.side(),
        metrics={
            name: {statistic: over(f"{name.removesuffix('_ms')}_{statistic}") for statistic in repeats.STATISTICS}
            for name in METRICS
        },
        failure_ratio=_of_known(failed_a, failed_b),
        throughput={name: over(name) for name in (*rates, *([GOODPUT] if goodput else []))},
        configuration=parts.differing([a.manifest, b.manifest]),
        between_runs=True,
        steady=steady,
        notes=(
            *([STEADY_NOTE] if steady else []),
            *_acks(a.manifest, b.manifest),
            *REPEATED_NOTES,
            *([ONE_SIDED_NOTE] if lone else []),
        ),
    )


def _of_known(a: Sequence[float | None], b: Sequence[float | None]) -> Contrast:
    """Nothing where a run does not define it."""
    known_a, known_b = ([value for value in runs if value is not None] for runs in (a, b))
    if len(known_a) < len(a) or len(known_b) < len(b):
        return contrast(None, None)
    return of_runs(known_a, known_b)


def _failed_ratio(report: Report) -> float | None:
    requests = report.requests.ok + report.requests.failed
    return report.requests.failed / requests if requests else None


def changes(comparison: Comparison) -> dict[str, Contrast]:
    """By the names that limits have."""
    latencies = {
        f"{name.removesuffix('_ms')}_{statistic}": row
        for name, rows in comparison.metrics.items()
        for statistic, row in rows.items()
    }
    return {**latencies, **comparison.throughput}


def conclusion(comparison: Comparison) -> tuple[str, str]:
    """What a reader wants to know first: what is shown to differ of the main metrics, as a sentence; and which way: as
    WORSE, BETTER, SAME, NO_INTERVAL or INVALID."""
    sides = (("A", comparison.a), ("B", comparison.b))
    if invalid := [letter for letter, side in sides if not all(run.valid for run in side.runs)]:
        return f"INVALID: a run of {' and '.join(invalid)} cannot be trusted; do not quote these numbers.", "INVALID"
    found = {name: change for name, change in changes(comparison).items() if name in MAIN}
    if not any(change.difference_ci for change in found.values()):
        return "There are too few requests to tell whether A and B differ.", NO_INTERVAL
    clauses = []
    for what in (WORSE, BETTER):
        names = [
            name
            for name in MAIN
            if name in found and direction(found[name], lower_is_better=LIMITED[name].lower_is_better) == what
        ]
        if names:
            clauses.append(f"{what}: {', '.join(_in_words(name, found[name]) for name in names)}")
    if not clauses:
        return "No difference is shown in any of the main metrics.", SAME
    return f"{'. '.join(clauses)}.", WORSE if clauses[0].startswith(WORSE) else BETTER


def _in_words(name: str, change: Contrast) -> str:
    """As `tpot p50 +20.1 % (17.0 to 23.2)`."""
    shown = name.replace("_per_s", "/s").replace("_", " ")
    if change.ratio is None:
        return f"{shown} {number(change.difference)}"
    low, high = (100 * (bound - 1) for bound in change.ratio_ci or (change.ratio, change.ratio))
    return f"{shown} {100 * (change.ratio - 1):+.1f} %" + (f" ({low:+.1f} to {high:+.1f})" if low < high else "")


def judged(comparison: Comparison, allowed: Sequence[Limit]) -> list[Check]:
    """The verdict of each run, since a gate must not pass on what cannot be trusted, and what came of each limit."""
    found = changes(comparison)
    checks = [
        Check(
            "run",
            f"{side}: {run.directory} is VALID",
            "ok" if run.valid else "unknown",
            "The run is VALID." if run.valid else f"The run is INVALID. {' '.join(run.reasons)}",
        )
        for side, runs in (("A", comparison.a.runs), ("B", comparison.b.runs))
        for run in runs
    ]
    for check in limits.judged(allowed, {"": found}):
        if check.name.startswith(GOODPUT) and GOODPUT not in found:
            why = "the runs have no --goodput, or not the same; give both the same limits."
            check = msgspec.structs.replace(check, detail=f"{check.detail} For goodput {why}")
        checks.append(check)
    return checks


def warnings(comparison: Comparison) -> list[str]:
    """What a gate must say of its intervals, and of what it compares."""
    acks = [note for note in comparison.notes if note == OTHER_ACKS]
    return acks if comparison.between_runs else [*acks, WITHIN_RUN]


def _acks(a: Manifest, b: Manifest) -> Iterator[str]:
    if bool(a.config.get("quick_acks")) != bool(b.config.get("quick_acks")):
        yield OTHER_ACKS


def build(
    manifest_a: Manifest,
    table_a: RequestTable,
    manifest_b: Manifest,
    table_b: RequestTable,
    slos: Mapping[str, float] | None = None,
) -> Comparison:
    """Of one run on each side, as wholes. slos: the limits of goodput, in ms, where both have the same."""
    a, b = (_whole(run, each, slos or {}) for run, each in ((manifest_a, table_a), (manifest_b, table_b)))
    return _within(manifest_a, a, manifest_b, b)


def _within(manifest_a: Manifest, a: _Values, manifest_b: Manifest, b: _Values, *, steady: bool = False) -> Comparison:
    few = min(int(each.measured.ok.sum()) for each in (a, b))
    return Comparison(
        a=_side(manifest_a, a.measured),
        b=_side(manifest_b, b.measured),
        metrics={
            name: {statistic: of_estimates(of, b.metrics[name][statistic]) for statistic, of in rows.items()}
            for name, rows in a.metrics.items()
        },
        failure_ratio=_failures(a.measured, b.measured),
        throughput={name: of_estimates(rate, b.rates[name]) for name, rate in a.rates.items() if name in b.rates},
        configuration=parts.differing([manifest_a, manifest_b]),
        steady=steady,
        notes=(
            *([STEADY_NOTE] if steady else []),
            *_acks(manifest_a, manifest_b),
            *NOTES,
            *_too_short(a, b),
            *_few(few),
        ),
    )


class _Values(NamedTuple):
    """What a run measured, and the intervals of that. measured: all of it. blocks: into how many the run, or its
    window, was cut for these."""

    measured: RequestTable
    blocks: int
    metrics: dict[str, dict[str, Estimate | None]]
    rates: dict[str, Estimate | None]

    def flat(self) -> dict[str, float | None]:
        """By the names that limits have."""
        found = {
            f"{name.removesuffix('_ms')}_{statistic}": value
            for name, rows in self.metrics.items()
            for statistic, value in rows.items()
        }
        return {name: None if each is None else each.value for name, each in {**found, **self.rates}.items()}


def _whole(manifest: Manifest, table: RequestTable, slos: Mapping[str, float]) -> _Values:
    measured, full = table.measured(), slices.full_slots(flows.kept(table, manifest), manifest)
    in_blocks = intervals.parts(measured, manifest.arrival)
    tail = intervals.tail_moments(measured, manifest.arrival)
    rows = {name: _row(measured, in_blocks, name, tail) for name in METRICS}
    rates = _rates(measured, slos, full)
    of_rates = intervals.of_rates(measured, in_blocks, rates, slos, manifest.arrival)
    known = {name: _estimate(rates[name], of_rates[name], len(in_blocks)) for name in rates}
    return _Values(measured, len(in_blocks), rows, known)


def _row(measured: RequestTable, in_blocks: list[RequestTable], name: str, tail: float) -> dict[str, Estimate | None]:
    summary = metrics.summary(metrics.sample(measured, name, _RULES), _RULES.percentile)
    bounds = intervals.of_metric(measured, in_blocks, name, _RULES, repeats.STATISTICS, tail)
    return {each: _estimate(getattr(summary, each), bounds[each], len(in_blocks)) for each in repeats.STATISTICS}


def _window(report: Report, table: RequestTable) -> _Values | None:
    """Of the run's steady window: ttft and what is known when a request is sent of those that were sent in it, the rest
    of those whose replies end in it."""
    window = None if report.steady is None else report.steady.window
    if window is None:
        return None
    measured = table.measured()
    sent_s = measured.sent_ns / 1e9
    inside = measured.ok & (sent_s >= window.from_s) & (sent_s <= window.to_s)
    sent, replied = measured.select(inside), measured.select(inside & (sent_s <= window.replies_to_s))
    of_sent, of_replied = (intervals.parts(each, report.arrival) for each in (sent, replied))
    tails = [intervals.tail_moments(each, report.arrival) for each in (sent, replied)]
    rows = {
        name: _row(sent, of_sent, name, tails[0])
        if name.startswith(_OF_SENT)
        else _row(replied, of_replied, name, tails[1])
        for name in METRICS
    }
    rates: dict[str, Estimate | None] = {**window.throughput}
    if report.goodput is not None:
        span = TimeSpan(window.from_s, window.to_s, len(of_sent))
        good = metrics.good(measured, report.goodput.slos_ms, _RULES)
        rates[GOODPUT] = rate(measured.done_ns[measured.ok & good] / 1e9, span)
    return _Values(measured, len(of_sent), rows, rates)


def _estimate(value: float | None, bounds: Bounds | None, blocks: int) -> Estimate | None:
    if value is None or bounds is None:
        return None if value is None else Estimate(value)
    return Estimate(value, *bounds, blocks)


def _too_short(a: _Values, b: _Values) -> Iterator[str]:
    short = [name for name, side in (("A", a), ("B", b)) if not side.blocks]
    if short:
        yield (
            f"{' and '.join(short)} held too few independent moments for intervals within a run: requests that were "
            "under way together are alike, and a burst is one moment. Let the run last for a dozen lives of a request, "
            "or repeat it."
        )


def _few(requests: int) -> Iterator[str]:
    """A note on percentiles that need more. requests: those that ended ok, of the side that has fewer."""
    if short := findings.too_few(
        requests, {each: PERCENTILES[each] for each in repeats.STATISTICS if each in PERCENTILES}
    ):
        yield (
            f"{requests} requests are too few for {', '.join(short)}: even the slowest may be below the true value, "
            f"and no interval shows that. {', '.join(short)} take {', '.join(map(str, short.values()))}."
        )


def _side(manifest: Manifest, measured: RequestTable) -> Side:
    return Side(
        run_id=manifest.run_id,
        backend=manifest.backend,
        model=manifest.model,
        emulated=manifest.emulated,
        requests=len(measured),
        ok=int(measured.ok.sum()),
    )


def _failures(a: RequestTable, b: RequestTable) -> Contrast:
    """Share of measured requests that did not end ok."""
    if len(a) == 0 or len(b) == 0:
        return contrast(None, None)
    failed_a, failed_b = (float(1 - table.ok.mean()) for table in (a, b))
    bounds_a, bounds_b = wilson(failed_a, len(a), NORMAL_975), wilson(failed_b, len(b), NORMAL_975)
    return of_estimates(Estimate(failed_a, *bounds_a), Estimate(failed_b, *bounds_b))


def _rates(measured: RequestTable, slos: Mapping[str, float], full: slices.FullSlots | None) -> dict[str, float | None]:
    """Requests and tokens a second; requests within the limits too, where there are any."""
    seconds = metrics.duration_s(measured, _RULES) if full is None else full.seconds
    counts = metrics.counts(measured)
    if slos:
        counts[GOODPUT] = metrics.good_count(measured, slos, _RULES)
    known = {name: None if seconds is None or n is None else n / seconds for name, n in counts.items()}
    return known if full is None else {**known, **full.rates}
