"""How run B differs from run A: differences and ratios with bootstrap 95 % confidence intervals. Pure but for reading.

Percentile bootstrap over requests: each resample draws as many requests as the run had, with replacement, and the
interval holds the middle 95 % of the differences (or ratios) of `RESAMPLES` pairs of resamples. Gaps (itl) are drawn
with the requests that they belong to, since gaps of one request are alike. An interval says how far the choice of
requests within these two runs can move the number. It must never pass for the noise between one run and the next,
and the output says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen import metrics, records, runs
from loadgen.metrics import CONVENTIONS, METRICS
from loadgen.records import Table
from loadgen.report import EMULATED, number, printable
from loadgen.runs import Manifest

SCHEMA = "loadgen.compare/1"
SEED = 20231107  # fixed: the same two runs always give the same intervals
RESAMPLES = 2000
CONFIDENCE = 0.95
QUANTILES = {"p50": 500, "p99": 990}
GRID = 51  # candidate values at which a resample's share of gaps is counted
GRID_REACH = 5.0  # of the standard error that the quantile would have if every request had one single gap
BLOCK = 4_000_000  # weights held at once
SAME = "no difference shown"

NOTES = (
    "An interval covers the chance in which requests were measured, not the noise from run to run, which is often "
    "larger: repeat both runs before believing a small difference.",
    "The bootstrap takes requests as independent. Requests of one burst wait in one queue and are not, so the interval "
    "of a burst may be too narrow or too wide.",
    "Throughput is one number a run: two runs give no interval for its difference.",
)

Array = NDArray[np.float64]
_RULES = CONVENTIONS["loadgen"]


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Reads two run directories and compares them. Raises RunError or RecordsError."""
    manifest_a, manifest_b = runs.read_manifest(a), runs.read_manifest(b)
    return build(manifest_a, records.read(a)[0], manifest_b, records.read(b)[0])


def build(manifest_a: Manifest, table_a: Table, manifest_b: Manifest, table_b: Table) -> dict[str, Any]:
    """The comparison as a plain dict (schema `loadgen.compare/1`); differences are B - A, ratios B / A."""
    rng = np.random.default_rng(SEED)
    measured_a, measured_b = table_a.measured(), table_b.measured()
    ok_a, ok_b = measured_a.select(measured_a.ok), measured_b.select(measured_b.ok)
    drawn_a, drawn_b = _bootstrap(ok_a, rng), _bootstrap(ok_b, rng)
    rows: dict[str, dict[str, Any]] = {}
    for name in METRICS:
        shown_a, shown_b = (metrics.summary(metrics.sample(ok, name, _RULES), "linear") for ok in (ok_a, ok_b))
        rows[name] = {
            statistic: _contrast(
                shown_a[statistic], shown_b[statistic], (drawn_a[name, statistic], drawn_b[name, statistic])
            )
            for statistic in ("mean", *QUANTILES)
        }
    return {
        "schema": SCHEMA,
        "a": _identity(manifest_a, measured_a),
        "b": _identity(manifest_b, measured_b),
        "metrics": rows,
        "failure_ratio": _failures(measured_a, measured_b, rng),
        "throughput": _throughput(measured_a, measured_b),
        "configuration": differing(manifest_a, manifest_b),
        "resamples": RESAMPLES,
        "confidence": CONFIDENCE,
        "notes": list(NOTES),
    }


def _identity(manifest: Manifest, measured: Table) -> dict[str, Any]:
    return {
        "run_id": manifest.run_id,
        "backend": manifest.backend,
        "model": manifest.model,
        "emulated": manifest.emulated,
        "requests": len(measured),
        "ok": int(measured.ok.sum()),
    }


# Resampling. (metric, statistic) -> (RESAMPLES,) values in milliseconds, NaN where a resample does not define it.


def _bootstrap(ok: Table, rng: np.random.Generator) -> dict[tuple[str, str], Array]:
    columns = {name: metrics.column(ok, name, _RULES) for name in METRICS if name != "itl_ms"}
    drawn: dict[tuple[str, str], Array] = {}
    for name, column in columns.items():
        values = np.sort(column[~np.isnan(column)])
        for quantile, thousandths in QUANTILES.items():
            drawn[name, quantile] = quantile_resamples(values, thousandths, rng)
    pooled = {quantile: _grid(ok, thousandths) for quantile, thousandths in QUANTILES.items()}
    sums = _weighted_sums(np.hstack([*_means(ok, columns), *(counts for _, counts in pooled.values())]), rng)
    with np.errstate(invalid="ignore", divide="ignore"):
        for at, name in enumerate((*columns, "itl_ms")):
            drawn[name, "mean"] = sums[:, 2 * at] / sums[:, 2 * at + 1]
    at = 2 * len(columns) + 2
    gaps = sums[:, at - 1]
    for quantile, (edges, _) in pooled.items():
        shares = sums[:, at : at + len(edges)]
        drawn["itl_ms", quantile] = _invert(edges, shares, gaps * QUANTILES[quantile] / 1000) / 1000
        at += len(edges)
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


def _means(ok: Table, columns: Mapping[str, Array]) -> Iterator[Array]:
    """For every metric each request's sum and count (n, 2): a resample's mean is the ratio of their weighted sums."""
    for column in columns.values():
        defined = ~np.isnan(column)
        yield np.column_stack((np.where(defined, column, 0.0), defined))
    gaps = np.diff(ok.itl_offsets)
    since_first_ms = np.where(gaps > 0, (ok.last_token_ns // 1000 - ok.first_token_ns // 1000) / 1e3, 0.0)
    yield np.column_stack((since_first_ms, gaps))  # gaps add up to last - first, whole microseconds


def _grid(ok: Table, thousandths: int) -> tuple[Array, Array]:
    """Values around a percentile of the pooled gaps, ascending (k,), in microseconds, and each request's gaps <= them.

    The counts are (n, k). A resample's percentile is where its weighted counts reach the share that is asked.
    """
    n, share = max(1, len(ok)), thousandths / 1000
    reach = GRID_REACH * math.sqrt(share * (1 - share) / n)
    pooled = np.sort(ok.itl_us)
    if len(pooled) == 0:
        return np.empty(0), np.empty((len(ok), 0))
    levels = np.clip(np.linspace(share - reach, share + reach, GRID), 0, 1)
    edges = np.unique(pooled[np.round(levels * (len(pooled) - 1)).astype(np.int64)])
    counts = np.zeros((len(ok), len(edges)))
    for first in range(0, len(ok), 4096):  # in blocks of requests: the gaps are many
        last = min(first + 4096, len(ok))
        gaps = ok.itl_us[ok.itl_offsets[first] : ok.itl_offsets[last]]
        owner = np.repeat(np.arange(last - first), np.diff(ok.itl_offsets[first : last + 1]))
        cell = owner * (len(edges) + 1) + np.searchsorted(edges, gaps, side="left")
        by_cell = np.bincount(cell, minlength=(last - first) * (len(edges) + 1)).reshape(last - first, -1)
        counts[first:last] = np.cumsum(by_cell, axis=1)[:, :-1]
    return edges.astype(np.float64), counts


def _invert(edges: Array, counts: Array, wanted: Array) -> Array:
    """Where each resample's counts (r, k) reach `wanted` (r,): the smallest edge with enough gaps at or below it."""
    if len(edges) == 0:
        return np.full(len(wanted), np.nan)
    reached: Array = edges[np.minimum((counts < wanted[:, None]).sum(axis=1), len(edges) - 1)]
    return reached


def _weighted_sums(per_request: Array, rng: np.random.Generator) -> Array:
    """Column sums (RESAMPLES, k) of resamples of the rows of `per_request` (n, k)."""
    n = len(per_request)
    if n == 0:
        return np.zeros((RESAMPLES, per_request.shape[1]))
    out = []
    for first in range(0, RESAMPLES, block := max(1, min(RESAMPLES, BLOCK // n))):
        size = min(block, RESAMPLES - first)
        picked = rng.integers(0, n, (size, n)) + np.arange(size)[:, None] * n
        weights = np.bincount(picked.ravel(), minlength=size * n).reshape(size, n)
        out.append(weights.astype(np.float64) @ per_request)
    return np.concatenate(out)


# Contrasts.


def _contrast(a: float | None, b: float | None, drawn: tuple[Array, Array] | None = None) -> dict[str, Any]:
    """One line: both values, difference, ratio and, from resamples of both, their intervals and what they show."""
    known = a is not None and b is not None
    difference_ci = ratio_ci = None
    if known and drawn is not None:
        with np.errstate(invalid="ignore", divide="ignore"):
            difference_ci, ratio_ci = _interval(drawn[1] - drawn[0]), _interval(drawn[1] / drawn[0])
    return {
        "a": a,
        "b": b,
        "difference": b - a if a is not None and b is not None else None,
        "difference_ci": difference_ci,
        "ratio": b / a if a and b is not None else None,
        "ratio_ci": ratio_ci,
        "shows": _shows(difference_ci) if difference_ci is not None else None,
    }


def _interval(drawn: Array) -> list[float] | None:
    """The middle 95 % of the resamples; None when one of them is undefined."""
    if not np.isfinite(drawn).all():
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return [float(low), float(high)]


def _shows(interval: list[float]) -> str:
    if interval[0] <= 0 <= interval[1]:
        return SAME
    return "B is higher" if interval[0] > 0 else "B is lower"


def _failures(a: Table, b: Table, rng: np.random.Generator) -> dict[str, Any]:
    """Share of measured requests that did not end ok; a resample's failures are binomial."""
    if len(a) == 0 or len(b) == 0:
        return _contrast(None, None)
    failed_a, failed_b = (float(1 - table.ok.mean()) for table in (a, b))
    drawn_a, drawn_b = (
        rng.binomial(len(table), ratio, RESAMPLES) / len(table) for table, ratio in ((a, failed_a), (b, failed_b))
    )
    return _contrast(failed_a, failed_b, (drawn_a, drawn_b))


def _throughput(a: Table, b: Table) -> dict[str, dict[str, Any]]:
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
    told = ("version", "backend", "model", "url", "emulated", "server_version", "arrival", "requests_planned")
    flat_a, flat_b = (
        {
            **{f"config.{key}": value for key, value in manifest.config.items() if key != "out"},
            **{key: getattr(manifest, key) for key in told},
            **{f"machine.{key}": getattr(manifest.machine, key) for key in manifest.machine.__struct_fields__},
        }
        for manifest in (a, b)
    )
    return {
        key: [flat_a.get(key), flat_b.get(key)]
        for key in sorted(flat_a.keys() | flat_b.keys())
        if flat_a.get(key) != flat_b.get(key)
    }


def render(comparison: dict[str, Any]) -> str:
    """The comparison for a terminal: plain text, nothing in it that a terminal obeys."""
    lines = []
    for side in "ab":
        run = comparison[side]
        lines.append(
            printable(f"{side.upper()}: {run['run_id']}, {run['backend']} {run['model']}")
            + f", {run['ok']} ok of {run['requests']} requests"
            + (f"\n   {EMULATED}" if run["emulated"] else "")
        )
    lines += ["", f"{'':<26}{'A':>10}{'B':>10}{'B - A':>10}   {'95 % CI':<20}{'B / A':>7}   {'95 % CI':<16}"]
    for name, row in comparison["metrics"].items():
        lines += [
            _line(f"{name.removesuffix('_ms')} {statistic}, ms", contrast)
            for statistic, contrast in row.items()
            if contrast["difference"] is not None
        ]
    lines.append(_line("failed, ratio", comparison["failure_ratio"]))
    lines += [_line(name.replace("_per_s", "/s"), row) for name, row in comparison["throughput"].items()]
    if comparison["configuration"]:
        lines += ["", "Configured differently (A | B):"]
    lines += [printable(f"  {name}: {a} | {b}") for name, (a, b) in comparison["configuration"].items()]
    return "\n".join([*lines, "", *comparison["notes"]]) + "\n"


def _line(label: str, row: Mapping[str, Any]) -> str:
    def interval(values: list[float] | None) -> str:
        return f"[{number(values[0])}, {number(values[1])}]" if values else "-"

    cells = f"{label:<26}{number(row['a']):>10}{number(row['b']):>10}{number(row['difference']):>10}"
    cells += f"   {interval(row['difference_ci']):<20}{number(row['ratio']):>7}"
    return f"{cells}   {interval(row['ratio_ci']):<16}{row['shows'] or ''}".rstrip()
