"""How run B differs from run A: differences and ratios with bootstrap 95 % confidence intervals. Pure but for reading.

Percentile bootstrap over requests: each resample draws as many requests as the run had, with replacement, and the
interval holds the middle 95 % of the differences (or ratios) of `RESAMPLES` pairs of resamples. Gaps (itl) are drawn
with the requests that they belong to, since gaps of one request are alike. For means and gaps, a run of more than
`MAX_UNITS` requests is drawn in that many units of neighbours, which costs no accuracy to speak of. An interval says
how far the choice of requests within these two runs can move the number. It must never pass for the noise between one
run and the next, and the output says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.untrusted import escaped
from loadgen import rundir
from loadgen.report import metrics
from loadgen.report.metrics import CONVENTIONS, METRICS
from loadgen.report.text import EMULATED, number
from loadgen.rundir import Manifest, records
from loadgen.rundir.records import Table

SCHEMA = "loadgen.compare/1"
SEED = 20231107  # fixed: the same two runs always give the same intervals
RESAMPLES = 2000
CONFIDENCE = 0.95
QUANTILES = {"p50": 500, "p99": 990}
GRID = 51  # candidate values at which a resample's share of gaps is counted
GRID_REACH = 5.0  # of the standard error that the quantile would have if every request had one single gap
MAX_UNITS = 4096  # of neighbouring requests, drawn together: the standard error is known to 1 / sqrt(2 * 4096) = 1 %
BLOCK = 1_000_000  # weights held at once
SAME = "no difference shown"

NOTES = (
    "An interval covers the chance in which requests were measured, not the noise from run to run, which is often "
    "larger: repeat both runs before believing a small difference.",
    "The bootstrap takes requests as independent. Requests of one burst wait in one queue and are not, so the interval "
    "of a burst may be too narrow or too wide. Nor are the turns of a session.",
    "Throughput is one number a run: two runs give no interval for its difference.",
)

Array = NDArray[np.float64]
Bounds = tuple[float, float]
_RULES = CONVENTIONS["loadgen"]


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Which run; requests: those that were measured."""

    run_id: str
    backend: str
    model: str
    emulated: bool
    requests: int
    ok: int


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """Both values, their difference (B - A) and ratio (B / A); from resamples of both the intervals of the two, and
    what the difference's shows. None where it is not defined."""

    a: float | None
    b: float | None
    difference: float | None
    difference_ci: Bounds | None
    ratio: float | None
    ratio_ci: Bounds | None
    shows: str | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """metrics: by name and statistic. configuration: what was set differently, [A, B] by name."""

    schema: str = SCHEMA
    a: Side
    b: Side
    metrics: dict[str, dict[str, Contrast]]
    failure_ratio: Contrast
    throughput: dict[str, Contrast]
    configuration: dict[str, list[Any]]
    resamples: int = RESAMPLES
    confidence: float = CONFIDENCE
    notes: tuple[str, ...] = NOTES


def compare(a: Path, b: Path) -> Comparison:
    """Reads two run directories and compares them. Raises RunError or RecordsError."""
    manifest_a, manifest_b = rundir.read_manifest(a), rundir.read_manifest(b)
    return build(manifest_a, records.read(a)[0], manifest_b, records.read(b)[0])


def build(manifest_a: Manifest, table_a: Table, manifest_b: Manifest, table_b: Table) -> Comparison:
    rng = np.random.default_rng(SEED)
    measured_a, measured_b = table_a.measured(), table_b.measured()
    drawn_a, drawn_b = _bootstrap(measured_a, rng), _bootstrap(measured_b, rng)
    rows: dict[str, dict[str, Contrast]] = {}
    for name in METRICS:
        summary_a, summary_b = (
            metrics.summary(metrics.sample(measured, name, _RULES), _RULES.percentile)
            for measured in (measured_a, measured_b)
        )
        rows[name] = {
            statistic: _contrast(
                getattr(summary_a, statistic),
                getattr(summary_b, statistic),
                (drawn_a[name, statistic], drawn_b[name, statistic]),
            )
            for statistic in ("mean", *QUANTILES)
        }
    return Comparison(
        a=_side(manifest_a, measured_a),
        b=_side(manifest_b, measured_b),
        metrics=rows,
        failure_ratio=_failures(measured_a, measured_b, rng),
        throughput=_throughput(measured_a, measured_b),
        configuration=differing(manifest_a, manifest_b),
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


# Resampling. (metric, statistic) -> (RESAMPLES,) values in milliseconds, NaN where a resample does not define it.


def _bootstrap(measured: Table, rng: np.random.Generator) -> dict[tuple[str, str], Array]:
    ok = measured.ok
    columns = {name: metrics.column(measured, name, _RULES)[ok] for name in METRICS if name != "itl_ms"}
    drawn: dict[tuple[str, str], Array] = {}
    for name, column in columns.items():
        values = np.sort(column[~np.isnan(column)])
        for quantile, thousandths in QUANTILES.items():
            drawn[name, quantile] = quantile_resamples(values, thousandths, rng)
    grids = {quantile: _grid(measured, thousandths) for quantile, thousandths in QUANTILES.items()}
    means, *shares = _weighted_sums([_means(measured, columns), *(counts for _, counts in grids.values())], rng)
    with np.errstate(invalid="ignore", divide="ignore"):
        for at, name in enumerate((*columns, "itl_ms")):
            drawn[name, "mean"] = means[:, 2 * at] / means[:, 2 * at + 1]
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
    each = np.column_stack([*parts, np.where(gaps > 0, elapsed_us / 1000, 0.0), gaps]).astype(np.float64)
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
    del pooled
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


def _weighted_sums(tables: Sequence[Array], rng: np.random.Generator) -> list[Array]:
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
    known = a is not None and b is not None
    difference_ci = ratio_ci = None
    if known and drawn is not None:
        with np.errstate(invalid="ignore", divide="ignore"):
            difference_ci, ratio_ci = _interval(drawn[1] - drawn[0]), _interval(drawn[1] / drawn[0])
    return Contrast(
        a=a,
        b=b,
        difference=b - a if a is not None and b is not None else None,
        difference_ci=difference_ci,
        ratio=b / a if a and b is not None else None,
        ratio_ci=ratio_ci,
        shows=_shows(difference_ci) if difference_ci is not None else None,
    )


def _interval(drawn: Array) -> Bounds | None:
    """The middle 95 % of the resamples; None when one of them is undefined."""
    if not np.isfinite(drawn).all():
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return float(low), float(high)


def _shows(interval: Bounds) -> str:
    if interval[0] <= 0 <= interval[1]:
        return SAME
    return "B is higher" if interval[0] > 0 else "B is lower"


def _failures(a: Table, b: Table, rng: np.random.Generator) -> Contrast:
    """Share of measured requests that did not end ok; a resample's failures are binomial."""
    if len(a) == 0 or len(b) == 0:
        return _contrast(None, None)
    failed_a, failed_b = (float(1 - table.ok.mean()) for table in (a, b))
    drawn_a, drawn_b = (
        rng.binomial(len(table), ratio, RESAMPLES) / len(table) for table, ratio in ((a, failed_a), (b, failed_b))
    )
    return _contrast(failed_a, failed_b, (drawn_a, drawn_b))


def _throughput(a: Table, b: Table) -> dict[str, Contrast]:
    """Requests and output tokens a second: one number a run, so without an interval."""
    rates_a, rates_b = _rates(a), _rates(b)
    return {name: _contrast(rates_a[name], rates_b[name]) for name in rates_a}


def _rates(measured: Table) -> dict[str, float | None]:
    ok, seconds = measured.ok, metrics.duration_s(measured, _RULES)
    counts = {
        "requests_per_s": int(ok.sum()),
        "output_tokens_per_s": metrics.total(measured.output_tokens[ok]),
    }
    return {name: None if seconds is None or n is None else n / seconds for name, n in counts.items()}


def differing(a: Manifest, b: Manifest) -> dict[str, list[Any]]:
    """What was set differently, name -> [A, B]: the configuration (but for `out`), the server and the machine."""
    fields = ("version", "backend", "model", "url", "emulated", "server_version", "arrival", "requests_planned")
    flat_a, flat_b = (
        {
            **{f"config.{key}": value for key, value in manifest.config.items() if key != "out"},
            **{key: getattr(manifest, key) for key in fields},
            **{f"machine.{key}": getattr(manifest.machine, key) for key in manifest.machine.__struct_fields__},
        }
        for manifest in (a, b)
    )
    return {
        key: [flat_a.get(key), flat_b.get(key)]
        for key in sorted(flat_a.keys() | flat_b.keys())
        if flat_a.get(key) != flat_b.get(key)
    }


def render(comparison: Comparison) -> str:
    """The comparison for a terminal: plain text, nothing in it that a terminal obeys."""
    lines = []
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        lines.append(
            escaped(f"{letter}: {side.run_id}, {side.backend} {side.model}")
            + f", {side.ok} ok of {side.requests} requests"
            + (f"\n   {EMULATED}" if side.emulated else "")
        )
    lines += ["", f"{'':<26}{'A':>10}{'B':>10}{'B - A':>10}   {'95 % CI':<20}{'B / A':>7}   {'95 % CI':<16}"]
    for name, row in comparison.metrics.items():
        lines += [
            _line(f"{name.removesuffix('_ms')} {statistic}, ms", contrast)
            for statistic, contrast in row.items()
            if contrast.difference is not None
        ]
    lines.append(_line("failed, ratio", comparison.failure_ratio))
    lines += [_line(name.replace("_per_s", "/s"), contrast) for name, contrast in comparison.throughput.items()]
    if comparison.configuration:
        lines += ["", "Configured differently (A | B):"]
    lines += [escaped(f"  {name}: {a} | {b}") for name, (a, b) in comparison.configuration.items()]
    return "\n".join([*lines, "", *comparison.notes]) + "\n"


def _line(label: str, contrast: Contrast) -> str:
    def between(interval: Bounds | None) -> str:
        return f"[{number(interval[0])}, {number(interval[1])}]" if interval else "-"

    cells = f"{label:<26}{number(contrast.a):>10}{number(contrast.b):>10}{number(contrast.difference):>10}"
    cells += f"   {between(contrast.difference_ci):<20}{number(contrast.ratio):>7}"
    return f"{cells}   {between(contrast.ratio_ci):<16}{contrast.shows or ''}".rstrip()
