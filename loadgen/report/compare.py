"""How run B differs from run A: differences and ratios with 95 % confidence intervals. Pure but for reading.

Where a side is a directory of repeats, the intervals are between runs (`contrast`). Of one run on each side they are
within the runs, by percentile bootstrap over requests: each resample draws as many requests as the run had, with
replacement, and the interval holds the middle 95 % of the differences (or ratios) of `RESAMPLES` pairs of resamples.
Gaps (itl) are drawn with the requests that they belong to, since gaps of one request are alike. For means and gaps, a
run of more than `MAX_UNITS` requests is drawn in that many units of neighbours, which costs no accuracy to speak of. A
resample's throughput follows from Little's law, L = X W: with the number of requests in flight taken as it was, the
rate is in proportion to what the drawn requests gave, over the sum of their latencies. Two things move a rate besides:
how the last requests happen to end (half of the latencies' standard deviation, on the whole time; not in a burst, all
of which is an end), and drawn arrivals (gaps of a coefficient of variation c: c / sqrt(n)).
Requests that waited in one queue are alike, and a bootstrap does not see that. So no interval is narrower than Welch's
over `PARTS` parts of each run, by when requests were sent (batch means). Such an interval says how far
the choice of requests within these two runs can move the number. It must never pass for the noise between one run and
the next, and the output says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.untrusted import escaped
from loadgen import rundir
from loadgen.report import build as reports
from loadgen.report import findings, metrics, repeats
from loadgen.report.contrast import CONFIDENCE, Bounds, Contrast, contrast, of_runs, widened
from loadgen.report.limits import Check, Limit, Measure, judge
from loadgen.report.metrics import CONVENTIONS, GOODPUT, METRICS
from loadgen.report.pages import intervals, parts
from loadgen.report.pages.intervals import LATENCY, PARTS
from loadgen.report.repeats import RunVerdict
from loadgen.report.schema import Report
from loadgen.report.text import EMULATED, aligned, number
from loadgen.rundir import Manifest
from loadgen.rundir.records import Table

SCHEMA = "loadgen.compare/1"
SEED = 20231107  # fixed: the same two runs always give the same intervals
RESAMPLES = 2000
QUANTILES = {"p50": 500, "p90": 900, "p95": 950, "p99": 990}
GRID = 51  # candidate values at which a resample's share of gaps is counted
GRID_REACH = 5.0  # of the standard error that the quantile would have if every request had one single gap
MAX_UNITS = 4096  # of neighbouring requests, drawn together: the standard error is known to 1 / sqrt(2 * 4096) = 1 %
BLOCK = 1_000_000  # weights held at once

NOTES = (
    "An interval covers the chance in which requests were measured, not the noise from run to run, which is often "
    "larger: repeat both runs before believing a small difference (loadgen run --repeat 5).",
    "The bootstrap takes requests as independent. Requests of one burst wait in one queue and are not, so the interval "
    "of a burst may be too narrow or too wide. Nor are the turns of a session. No interval is narrower than that over "
    "ten parts of each run.",
    "Throughput is one number a run: its interval takes the number of requests in flight as it was (Little's law), and "
    "is wide for a burst.",
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


# What a limit may be on: all of the latencies but for the client's own lag, and throughput.
LIMITED: dict[str, Measure] = {
    **{
        f"{name.removesuffix('_ms')}_{statistic}": Measure(lower_is_better=True, unit="ms")
        for name in METRICS
        if name != "send_lag_ms"
        for statistic in repeats.STATISTICS
    },
    **{name: Measure(lower_is_better=False) for name in (*repeats.THROUGHPUT, GOODPUT)},
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
    the intervals are; else they are of `resamples` within one run on each side."""

    schema: str = SCHEMA
    a: Side
    b: Side
    metrics: dict[str, dict[str, Contrast]]
    failure_ratio: Contrast
    throughput: dict[str, Contrast]
    configuration: dict[str, list[Any]]
    between_runs: bool = False
    resamples: int = RESAMPLES
    confidence: float = CONFIDENCE
    notes: tuple[str, ...] = NOTES


@dataclass(frozen=True)
class _Runs:
    """One side as it was read. table: of the first run."""

    directories: list[Path]
    reports: list[Report]
    manifest: Manifest
    table: Table

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
        made = build(of_a.manifest, of_a.table, of_b.manifest, of_b.table, _shared_slos(of_a, of_b))
        return msgspec.structs.replace(made, a=of_a.side(), b=of_b.side())
    return _between(of_a, of_b)


def _read(directory: Path) -> _Runs:
    directories = repeats.directories(directory)
    manifest = rundir.read_manifest(directories[0])
    report, table = reports.from_directory(directories[0])
    others = [reports.from_directory(path)[0] for path in directories[1:]]
    return _Runs(directories, [report, *others], manifest, table)


def _shared_slos(a: _Runs, b: _Runs) -> Mapping[str, float]:
    """The limits of goodput that all runs were started with; none where they differ."""
    goodputs = [report.goodput for report in (*a.reports, *b.reports)]
    slos = [{} if goodput is None else goodput.slos_ms for goodput in goodputs]
    return slos[0] if all(each == slos[0] for each in slos) else {}


def _between(a: _Runs, b: _Runs) -> Comparison:
    """One value a run, and intervals between runs."""
    goodput = bool(_shared_slos(a, b))
    values_a, values_b = ([repeats.values(report) for report in side.reports] for side in (a, b))

    def over(name: str) -> Contrast:
        return _of_known([run[name] for run in values_a], [run[name] for run in values_b])

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
        throughput={name: over(name) for name in (*repeats.THROUGHPUT, *([GOODPUT] if goodput else []))},
        configuration=differing(a.manifest, b.manifest),
        between_runs=True,
        resamples=0,
        notes=(*_acks(a.manifest, b.manifest), *REPEATED_NOTES, *([ONE_SIDED_NOTE] if lone else [])),
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


def judged(comparison: Comparison, limits: Sequence[Limit]) -> list[Check]:
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
    for limit in limits:
        checked = judge(limit, found.get(limit.metric, contrast(None, None)))
        if limit.metric == GOODPUT and GOODPUT not in found:
            why = "the runs have no --goodput, or not the same; give both the same limits."
            checked = msgspec.structs.replace(checked, detail=f"{checked.detail} For goodput {why}")
        checks.append(checked)
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
    table_a: Table,
    manifest_b: Manifest,
    table_b: Table,
    slos: Mapping[str, float] | None = None,
) -> Comparison:
    """Of one run on each side. slos: the limits of goodput, in ms, where both have the same."""
    rng = np.random.default_rng(SEED)
    measured_a, measured_b = table_a.measured(), table_b.measured()
    drawn_a = bootstrap_draws(measured_a, rng, slos, manifest_a.arrival)
    drawn_b = bootstrap_draws(measured_b, rng, slos, manifest_b.arrival)
    parts_a, parts_b = (_by_part(measured, slos or {}) for measured in (measured_a, measured_b))
    rows: dict[str, dict[str, Contrast]] = {}
    for name in METRICS:
        summary_a, summary_b = (
            metrics.summary(metrics.sample(measured, name, _RULES), _RULES.percentile)
            for measured in (measured_a, measured_b)
        )
        rows[name] = {
            statistic: widened(
                _contrast(
                    getattr(summary_a, statistic),
                    getattr(summary_b, statistic),
                    (drawn_a[name, statistic], drawn_b[name, statistic]),
                ),
                parts_a.get((name, statistic), ()),
                parts_b.get((name, statistic), ()),
            )
            for statistic in repeats.STATISTICS
        }
    rates_a, rates_b = (_rates(measured, slos or {}) for measured in (measured_a, measured_b))
    return Comparison(
        a=_side(manifest_a, measured_a),
        b=_side(manifest_b, measured_b),
        metrics=rows,
        failure_ratio=_failures(measured_a, measured_b, rng),
        throughput={
            name: widened(
                _contrast(rate, rates_b[name], (drawn_a["rate", name], drawn_b["rate", name])),
                _sized(parts_a.get(("rate", name), ()), rate),
                _sized(parts_b.get(("rate", name), ()), rates_b[name]),
            )
            for name, rate in rates_a.items()
        },
        configuration=differing(manifest_a, manifest_b),
        notes=(*_acks(manifest_a, manifest_b), *NOTES, *_few(min(int(measured_a.ok.sum()), int(measured_b.ok.sum())))),
    )


def _few(requests: int) -> Iterator[str]:
    """A note on percentiles that need more. requests: those that ended ok, of the side that has fewer."""
    if short := findings.too_few(requests, QUANTILES):
        yield (
            f"{requests} requests are too few for {', '.join(short)}: even the slowest may be below the true value, "
            f"and no interval shows that. {', '.join(short)} take {', '.join(map(str, short.values()))}."
        )


def _side(manifest: Manifest, measured: Table) -> Side:
    return Side(
        run_id=manifest.run_id,
        backend=manifest.backend,
        model=manifest.model,
        emulated=manifest.emulated,
        requests=len(measured),
        ok=int(measured.ok.sum()),
    )


# Resampling. (metric, statistic) -> (RESAMPLES,) values in milliseconds, NaN where a resample does not define it; of
# ("rate", name) values a second.


def bootstrap_draws(
    measured: Table, rng: np.random.Generator, slos: Mapping[str, float] | None = None, arrival: str = ""
) -> dict[tuple[str, str], Array]:
    ok = measured.ok
    columns = {name: metrics.column(measured, name, _RULES)[ok] for name in METRICS if name != "itl_ms"}
    drawn: dict[tuple[str, str], Array] = {}
    for name, column in columns.items():
        values = np.sort(column[~np.isnan(column)])
        for quantile, thousandths in QUANTILES.items():
            drawn[name, quantile] = quantile_resamples(values, thousandths, rng)
    grids = {quantile: _grid(measured, thousandths) for quantile, thousandths in QUANTILES.items()}
    work = intervals.work(measured, slos or {})
    tables = [_means(measured, columns), _units(np.column_stack(list(work.values()))), *(c for _, c in grids.values())]
    means, worked, *shares = weighted_sums(tables, rng)
    with np.errstate(invalid="ignore", divide="ignore"):
        for at, name in enumerate((*columns, "itl_ms")):
            drawn[name, "mean"] = means[:, 2 * at] / means[:, 2 * at + 1]
        moved = 1 + intervals.rate_noise(measured, arrival) * rng.standard_normal(RESAMPLES)
        for at, (name, rate) in enumerate(_rates(measured, slos or {}).items()):
            done, latency = work[name].sum(), work[LATENCY].sum()
            as_measured = np.nan if rate is None else rate * latency / done
            drawn["rate", name] = as_measured * worked[:, at] / worked[:, -1] * moved
    for (quantile, (edges_us, _)), counts in zip(grids.items(), shares, strict=True):
        drawn["itl_ms", quantile] = _invert(edges_us, counts, means[:, -1] * (QUANTILES[quantile] / 1000)) / 1000
    return drawn


def quantile_resamples(values: Array, thousandths: int, rng: np.random.Generator) -> Array:
    """The percentile of `RESAMPLES` resamples of ascending `values` (n,), drawn exactly and without resampling.

    The k-th smallest of n uniform draws is Beta(k, n - k + 1), and given it the next one splits the rest by
    Beta(1, n - k): two draws give the two order statistics that the percentile interpolates (David and Nagaraja, Order
    Statistics, 2.2).
    """
    n = len(values)
    if n == 0:
        return np.full(RESAMPLES, np.nan)
    below, rest = divmod((n - 1) * thousandths, 1000)
    low = rng.beta(below + 1, n - below, RESAMPLES)
    high = low + (1 - low) * rng.beta(1, n - below - 1, RESAMPLES) if below + 1 < n else low
    at_low, at_high = (np.minimum((u * n).astype(np.int64), n - 1) for u in (low, high))
    return values[at_low] + (values[at_high] - values[at_low]) * (rest / 1000)


def _means(measured: Table, columns: Mapping[str, Array]) -> Array:
    """Each unit's sum and count for every metric (units, 2 m), itl last: a mean is a ratio of weighted sums."""
    parts: list[NDArray[Any]] = []
    for column in columns.values():
        defined = ~np.isnan(column)
        parts += [np.where(defined, column, 0.0), defined]
    ok = measured.ok
    gaps = np.diff(measured.itl_offsets)[ok]
    elapsed_us = (
        measured.last_token_ns[ok] // 1000 - measured.first_token_ns[ok] // 1000
    )  # what a request's gaps add up to
    return _units(np.column_stack([*parts, np.where(gaps > 0, elapsed_us / 1000, 0.0), gaps]).astype(np.float64))


def _by_part(measured: Table, slos: Mapping[str, float]) -> dict[tuple[str, str], list[float]]:
    """Each statistic in `PARTS` parts of the requests that ended ok, by when they were sent, by the keys of
    `bootstrap_draws`; a rate's in proportion to it. Left out where a part does not define it or is too small."""
    found: dict[tuple[str, str], list[float]] = {}
    for part in intervals.parts(measured):
        for name in METRICS:
            summary = metrics.summary(metrics.sample(part, name, _RULES), _RULES.percentile)
            for statistic in repeats.STATISTICS:
                if (value := getattr(summary, statistic)) is not None:
                    found.setdefault((name, statistic), []).append(value)
        work = intervals.work(part, slos)
        for name in work:
            found.setdefault(("rate", name), []).append(float(work[name].sum() / work[LATENCY].sum()))
    return {key: values for key, values in found.items() if len(values) == PARTS}


def _sized(parts: Sequence[float], rate: float | None) -> list[float]:
    """Parts in proportion to a rate, as parts of its size; none where there is no rate."""
    mean = fmean(parts) if parts else 0.0
    return [part * rate / mean for part in parts] if rate is not None and mean > 0 else []


def _units(each: Array) -> Array:
    """The rows of the n ok requests, added up by unit."""
    return np.add.reduceat(each, _unit_starts(len(each)), axis=0) if len(each) else each


def _unit_starts(n: int) -> NDArray[np.int64]:
    """Where each unit of the n ok requests begins."""
    units = min(n, MAX_UNITS)
    return np.arange(units) * n // units


def _grid(measured: Table, thousandths: int) -> tuple[Array, Array]:
    """Values around a percentile of the pooled gaps, ascending (k,), in microseconds, and each unit's gaps <= them.

    The counts are (units, k). A resample's percentile is where its weighted counts reach the share that is wanted.
    """
    n = int(measured.ok.sum())
    pooled = metrics.sample(measured, "itl_ms", _RULES).values
    if len(pooled) == 0:
        return np.empty(0), np.empty((min(n, MAX_UNITS), 0))
    share = thousandths / 1000
    reach = GRID_REACH * math.sqrt(share * (1 - share) / n)
    levels = np.clip(np.linspace(share - reach, share + reach, GRID), 0, 1)
    edges = np.unique(pooled[np.round(levels * (len(pooled) - 1)).astype(np.int64)])
    starts, before = _unit_starts(n), 0
    cells = np.zeros(len(starts) * (len(edges) + 1), np.int64)
    for part in measured.blocks():
        ok = part.ok
        unit = np.searchsorted(starts, before + np.cumsum(ok) - 1, side="right") - 1  # of each row that is ok
        gaps = np.diff(part.itl_offsets)
        cell = np.repeat(unit, gaps) * (len(edges) + 1) + np.searchsorted(edges, part.itl_us, side="left")
        cells += np.bincount(cell[np.repeat(ok, gaps)], minlength=len(cells))
        before += int(ok.sum())
    counts = np.cumsum(cells.reshape(len(starts), -1), axis=1)[:, :-1]
    return edges.astype(np.float64), counts.astype(np.float64)


def _invert(edges: Array, counts: Array, wanted: Array) -> Array:
    """Where each resample's counts (r, k) reach `wanted` (r,): the smallest edge with enough gaps at or below it."""
    if len(edges) == 0:
        return np.full(len(wanted), np.nan)
    reached: Array = edges[np.minimum((counts < wanted[:, None]).sum(axis=1), len(edges) - 1)]
    return reached


def weighted_sums(tables: Sequence[Array], rng: np.random.Generator) -> list[Array]:
    """Column sums (RESAMPLES, k) of resamples of the rows of each of `tables` (n, k), the same rows in all of them."""
    n = len(tables[0])
    sums = [np.zeros((RESAMPLES, table.shape[1])) for table in tables]
    block = max(1, BLOCK // max(1, n))
    for first in range(0, RESAMPLES if n else 0, block):
        last = min(first + block, RESAMPLES)
        picked = rng.integers(0, n, (last - first, n))
        weights = np.stack([np.bincount(row, minlength=n) for row in picked]).astype(np.float64)
        for table, total in zip(tables, sums, strict=True):
            total[first:last] = weights @ table
    return sums


# Contrasts.


def _contrast(a: float | None, b: float | None, drawn: tuple[Array, Array] | None = None) -> Contrast:
    """drawn: resamples of both."""
    difference_ci = ratio_ci = None
    if a is not None and b is not None and drawn is not None:
        with np.errstate(invalid="ignore", divide="ignore"):
            difference_ci, ratio_ci = percentile_interval(drawn[1] - drawn[0]), percentile_interval(drawn[1] / drawn[0])
    return contrast(a, b, difference_ci, ratio_ci)


def percentile_interval(drawn: Array) -> Bounds | None:
    """The middle 95 % of the resamples; None when one of them is undefined."""
    if not np.isfinite(drawn).all():
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return float(low), float(high)


def _failures(a: Table, b: Table, rng: np.random.Generator) -> Contrast:
    """Share of measured requests that did not end ok; a resample's failures are binomial."""
    if len(a) == 0 or len(b) == 0:
        return _contrast(None, None)
    failed_a, failed_b = (float(1 - table.ok.mean()) for table in (a, b))
    drawn_a, drawn_b = (
        rng.binomial(len(table), ratio, RESAMPLES) / len(table) for table, ratio in ((a, failed_a), (b, failed_b))
    )
    return _contrast(failed_a, failed_b, (drawn_a, drawn_b))


def _rates(measured: Table, slos: Mapping[str, float]) -> dict[str, float | None]:
    """Requests and tokens a second; requests within the limits too, where there are any."""
    ok, seconds = measured.ok, metrics.duration_s(measured, _RULES)
    prompt, output = metrics.total(measured.prompt_tokens[ok]), metrics.total(measured.output_tokens[ok])
    counts = {
        "requests_per_s": int(ok.sum()),
        "output_tokens_per_s": output,
        "total_tokens_per_s": None if prompt is None or output is None else prompt + output,
        **({GOODPUT: metrics.good_count(measured, slos, _RULES)} if slos else {}),
    }
    return {name: None if seconds is None or n is None else n / seconds for name, n in counts.items()}


def differing(a: Manifest, b: Manifest) -> dict[str, list[Any]]:
    """What was set differently, name -> [A, B]."""
    of_a, of_b = parts.settings(a), parts.settings(b)
    return {
        key: [of_a.get(key), of_b.get(key)]
        for key in sorted(of_a.keys() | of_b.keys())
        if of_a.get(key) != of_b.get(key)
    }


def render(comparison: Comparison) -> str:
    """The comparison for a terminal: plain text, nothing in it that a terminal obeys."""
    lines = []
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        name = f"{len(side.runs)} runs" if len(side.runs) > 1 else side.run_id
        lines.append(
            escaped(f"{letter}: {name}, {side.backend} {side.model}")
            + f", {side.ok} ok of {side.requests} requests"
            + (f"\n   {EMULATED}" if side.emulated else "")
        )
        lines += [escaped(f"   {line}") for line in repeats.verdict_lines([run for run in side.runs if not run.valid])]
    shown = {
        name if name in comparison.throughput else f"{name}, ms": change
        for name, change in changes(comparison).items()
        if change.difference is not None
    }
    shown["failed, ratio"] = comparison.failure_ratio
    rows = [("", ["A", "B", "B - A", "95 % CI", "B / A", "95 % CI"]), *((name, _cells(shown[name])) for name in shown)]
    words = ["", *(change.shows or "" for change in shown.values())]
    lines += ["", *(f"{line}   {each}".rstrip() for line, each in zip(aligned(rows, 10, 31), words, strict=True))]
    if comparison.configuration:
        lines += ["", "Configured differently (A | B):"]
    lines += [escaped(f"  {name}: {a} | {b}") for name, (a, b) in comparison.configuration.items()]
    return "\n".join([*lines, "", *comparison.notes]) + "\n"


def _cells(change: Contrast) -> list[str]:
    def between(interval: Bounds | None) -> str:
        return f"[{number(interval[0])}, {number(interval[1])}]" if interval else "-"

    differ = [number(change.a), number(change.b), number(change.difference), between(change.difference_ci)]
    return [*differ, number(change.ratio), between(change.ratio_ci)]
