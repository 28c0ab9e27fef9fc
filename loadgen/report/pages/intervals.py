"""95 % intervals of what one run measured: how far the choice of requests within it can move a number. Pure.

Of a percentile of a metric with one value a request: the order statistics between which it lies by the binomial
distribution, exact whatever the values' distribution (David and Nagaraja, Order Statistics, 7.1); none where a run has
too few requests to bound it on both sides. Of a mean: Student's t. Both take requests as independent. Requests that
waited in one queue are not, so no interval is narrower than Student's t over `PARTS` parts of the run by when requests
were sent (batch means), which alone gives those of gaps (itl): gaps of one request are alike.

Of a rate, by Little's law, L = X W: with the number of requests in flight taken as it was, it is in proportion to what
the requests gave, over the sum of their latencies. That proportion is taken over the parts; two things move a rate
besides (`rate_noise`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.report import metrics
from loadgen.report.contrast import CONFIDENCE, NORMAL_975, Bounds, t_975
from loadgen.report.metrics import CONVENTIONS, GOODPUT, PERCENTILES, RATES, Convention, Distribution, Summary
from loadgen.rundir.records import Table

PARTS, LEAST_IN_PART = 10, 5  # of a run, and requests that ended ok in each
STATISTICS = ("mean", "p50", "p99")
REACH = 10  # standard deviations of the binomial distribution that are looked at
LATENCY = "latency"  # of what each request gave, the last column
MEANING = (
    "95 % intervals within one run: of p50 and p99 between order statistics, by the binomial distribution; of a mean "
    "Student's t; none narrower than Student's t over ten parts of the run by when requests were sent (batch means), "
    "which alone gives those of itl; of rates over the same parts, with the requests in flight taken as they were. "
    "They take the run as steady: of a burst or a ramp they may be too wide or too narrow; and they do not hold the "
    "noise from one run to the next: for that, repeat the run (loadgen run --repeat 5). A dash: too few requests to "
    "tell."
)

OWN_RULES = CONVENTIONS["loadgen"]
Values = NDArray[np.float64]


def ranks(n: int, thousandths: int) -> tuple[int, int] | None:
    """Which of n ascending values, from 0, hold a percentile between them; None where n is too small."""
    share = thousandths / 1000
    reach = math.ceil(REACH * (math.sqrt(n * share * (1 - share)) + 1))
    first, last = max(0, math.floor(n * share) - reach), min(n, math.ceil(n * share) + reach)
    counts = np.arange(first, last + 1)  # of the values below the percentile; others have no chance to speak of
    log_first = math.lgamma(n + 1) - math.lgamma(first + 1) - math.lgamma(n - first + 1)
    log_first += first * math.log(share) + (n - first) * math.log(1 - share)
    growth = np.log((n - counts[:-1]) / (counts[:-1] + 1) * (share / (1 - share)))
    at_most = np.cumsum(np.exp(log_first + np.concatenate(([0.0], np.cumsum(growth)))))
    tail = (1 - CONFIDENCE) / 2
    low = first + int(np.searchsorted(at_most, tail, side="right")) - 1
    high = first + int(np.searchsorted(at_most, 1 - tail, side="left"))
    return (low, high) if low >= 0 and high < n else None


def of_metric(measured: Table, name: str, rules: Convention, whole: Summary) -> dict[str, Bounds | None]:
    """By `STATISTICS`, in milliseconds. whole: of the metric in `measured`."""
    by_part = [metrics.summary(metrics.sample(part, name, rules), rules.percentile) for part in parts(measured)]
    sample = None if name == "itl_ms" else metrics.sample(measured, name, rules)  # gaps of a request hang together
    bounds: dict[str, Bounds | None] = {}
    for statistic in STATISTICS:
        value = getattr(whole, statistic)
        own = None if sample is None else _own(sample, whole, statistic)
        batches = [each for summary in by_part if (each := getattr(summary, statistic)) is not None]
        reach = _reach(np.array(batches)) if len(batches) == PARTS else None
        bounds[statistic] = _widened(own, value, reach, alone=sample is None)
    return bounds


def _own(sample: Distribution, whole: Summary, statistic: str) -> Bounds | None:
    """As if its values were independent."""
    values, unit_ms = sample
    if statistic == "mean":
        if whole.mean is None or whole.std is None:
            return None
        reach = t_975(whole.n - 1) * whole.std / math.sqrt(whole.n)
        return whole.mean - reach, whole.mean + reach
    between = ranks(len(values), PERCENTILES[statistic])
    return None if between is None else (float(values[between[0]]) * unit_ms, float(values[between[1]]) * unit_ms)


def _reach(values: Values) -> float:
    return t_975(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))


def _widened(own: Bounds | None, value: float | None, reach: float | None, *, alone: bool) -> Bounds | None:
    if value is None or reach is None:
        return own
    if own is None:
        return (value - reach, value + reach) if alone else None
    return min(own[0], value - reach), max(own[1], value + reach)


def parts(measured: Table) -> list[Table]:
    """`PARTS` parts of the requests that ended ok, by when they were sent; none where they would be too small."""
    ok = np.flatnonzero(measured.ok)
    if len(ok) < PARTS * LEAST_IN_PART:
        return []
    order = ok[np.argsort(measured.sent_ns[ok], kind="stable")]
    part_of = np.full(len(measured), -1)
    part_of[order] = np.arange(len(order)) * PARTS // len(order)
    return [measured.select(part_of == number) for number in range(PARTS)]


def of_rates(
    measured: Table, values: Mapping[str, float | None], slos: Mapping[str, float], arrival: str
) -> dict[str, Bounds | None]:
    """Intervals of rates, by the names of `work`. values: as they were measured."""
    proportions: dict[str, list[float]] = {}
    for part in parts(measured):
        gave = work(part, slos)
        for name in gave:
            proportions.setdefault(name, []).append(float(gave[name].sum() / gave[LATENCY].sum()))
    besides = NORMAL_975 * rate_noise(measured, arrival)
    bounds: dict[str, Bounds | None] = {}
    for name, value in values.items():
        each = np.array(proportions.get(name, ()))
        if value is None or not len(each) or not each.mean():
            bounds[name] = None
            continue
        reach = value * math.hypot(_reach(each) / float(each.mean()), besides)
        bounds[name] = (max(0.0, value - reach), value + reach)
    return bounds


def work(measured: Table, slos: Mapping[str, float]) -> dict[str, Values]:
    """What each ok request gave to each rate (n,), and last its latency in ms. slos: limits of goodput."""
    ok = measured.ok
    prompt, output = (np.maximum(tokens[ok], 0) for tokens in (measured.prompt_tokens, measured.output_tokens))
    gave: dict[str, NDArray[Any]] = {
        "requests_per_s": np.ones(len(output)), "output_tokens_per_s": output, "total_tokens_per_s": prompt + output,
    }  # fmt: skip
    if slos:
        gave[GOODPUT] = metrics.good(measured, slos, OWN_RULES)[ok]
    gave[LATENCY] = metrics.between_ms(measured, "sent_ns", "done_ns")[ok]
    return {name: values.astype(np.float64) for name, values in gave.items()}


def rate_noise(measured: Table, arrival: str) -> float:
    """Standard deviation of a rate, as a ratio to it, by the run's end and by arrivals that were drawn."""
    seconds, latency_ms = metrics.duration_s(measured, OWN_RULES), work(measured, {})[LATENCY]
    if seconds is None or len(latency_ms) < 2:
        return 0.0
    sent_ns, due_ns = measured.sent_ns[measured.ok], np.sort(measured.scheduled_ns)
    is_burst = (sent_ns.max() - sent_ns.min()) / 1e6 < latency_ms.mean()
    by_end = 0.0 if is_burst else float(latency_ms.std(ddof=1)) / 2000 / seconds
    gaps = np.diff(due_ns) if arrival.partition(":")[0] in RATES else np.empty(0)
    by_arrivals = float(gaps.std() / gaps.mean()) / math.sqrt(len(gaps)) if len(gaps) and gaps.any() else 0.0
    return math.hypot(by_end, by_arrivals)
