"""95 % intervals of what one run measured: how far the choice of its moments can move a number. Pure.

Of means and percentiles by blocks of the run (`loadgen/steady/blocks.py`): by when requests were sent, each block long
enough to hang little on the one before it. A run that holds too few blocks has no intervals, and so has a burst.

Of a rate, by Little's law, L = X W: with the number of requests in flight taken as it was, it is in proportion to what
the requests gave, over the sum of their latencies. That proportion is taken over the blocks; two things move a rate
besides (`rate_noise`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.report import metrics
from loadgen.report.metrics import CONVENTIONS, GOODPUT, PERCENTILES, RATES, Convention, Counted, Distribution
from loadgen.rundir.records import RequestTable
from loadgen.steady import blocks, flows
from loadgen.steady.blocks import NORMAL_975, Bounds

STATISTICS = ("mean", "p50", "p99")
LEAST_IN_BLOCK = 5  # requests that ended ok, in the mean
LATENCY = "latency"  # of what each request gave, the last column
MEANING = (
    "95 % intervals within one run, by up to ten blocks of it: each holds two lives of a closed loop's requests, or "
    "three where they arrive by themselves, since requests that were under way together are alike. Of a mean: "
    "Student's t over the blocks; of a percentile: the values between which it lies by the blocks' shares under it; of "
    "rates: over the same blocks, with the requests in flight taken as they were. They do not hold the noise from one "
    "run to the next: for that, repeat the run (loadgen run --repeat 5). A dash: too few independent moments to tell, "
    "as in every burst."
)

OWN_RULES = CONVENTIONS["loadgen"]
Values = NDArray[np.float64]


def parts(measured: RequestTable, arrival: str) -> list[RequestTable]:
    """The blocks of a run: the requests of each that ended ok, by when they were sent; none where it holds too few."""
    ok = measured.ok & (measured.sent_ns != -1)
    if not ok.any():
        return []
    sent_s = measured.sent_ns / 1e9
    begin_s, end_s = float(sent_s[ok].min()), float(sent_s[ok].max())
    count = min(int(_counted(blocks.count, measured, arrival)), int(ok.sum()) // LEAST_IN_BLOCK)
    if count < blocks.LEAST_CLOSED:
        return []
    block = np.searchsorted(np.linspace(begin_s, end_s, count + 1)[1:-1], sent_s, side="right")
    found = [measured.select(ok & (block == number)) for number in range(count)]
    return found if min(map(len, found)) > 1 else []


def tail_moments(measured: RequestTable, arrival: str) -> float:
    """As `blocks` counts them, of a run whose requests came so."""
    return _counted(blocks.tail_moments, measured, arrival)


def _counted(count: Callable[..., float], measured: RequestTable, arrival: str) -> float:
    ok = measured.ok & (measured.sent_ns != -1)
    if not ok.any():
        return 0.0
    sent_ns = measured.sent_ns[ok]
    life_s = float(np.median(measured.done_ns[ok] - sent_ns)) / 1e9
    lasts_s = float(sent_ns.max() - sent_ns.min()) / 1e9
    return count(lasts_s, life_s, closed=flows.slots(arrival) is not None, session_s=flows.session_s(measured))


def of_metric(
    measured: RequestTable,
    in_blocks: Sequence[RequestTable],
    name: str,
    rules: Convention,
    statistics: Sequence[str] = STATISTICS,
    tail: float = math.inf,
) -> dict[str, Bounds | None]:
    """By statistic, in milliseconds. in_blocks: the parts of `measured`. tail: its `tail_moments`."""
    samples = [metrics.sample(part, name, rules) for part in in_blocks]
    if not samples or not all(len(values) for values, _ in samples):
        return dict.fromkeys(statistics)
    whole = metrics.sample(measured, name, rules)
    summary = metrics.summary(whole, rules.percentile)
    means = np.array([metrics.summary(each, rules.percentile).mean for each in samples])
    counts = np.array([float(len(values)) for values, _ in samples])
    reach = blocks.mean_reach(means)
    found: dict[str, Bounds | None] = {}
    for statistic in statistics:
        value = getattr(summary, statistic)
        if statistic == "mean":
            found[statistic] = None if reach is None else (max(0.0, value - reach), value + reach)
            continue
        within = np.array([_within(each, value) for each in samples])
        share = PERCENTILES[statistic] / 1000
        between = blocks.shares(share, counts, within) if blocks.reaches(share, tail) else None
        found[statistic] = None if between is None else (_at(whole, between[0]), _at(whole, between[1]))
    return found


def _within(sample: Distribution, value_ms: float) -> float:
    """How many of its values are at or under this one."""
    values, unit_ms = sample
    limit = value_ms / unit_ms * (1 + 1e-12)
    if isinstance(values, Counted):
        return float(values.at_most(np.array([limit]))[0])
    return float(np.searchsorted(values, limit, side="right"))


def _at(sample: Distribution, share: float) -> float:
    values, unit_ms = sample
    return float(values[round(share * (len(values) - 1))]) * unit_ms


def of_rates(
    measured: RequestTable,
    in_blocks: Sequence[RequestTable],
    values: Mapping[str, float | None],
    slos: Mapping[str, float],
    arrival: str,
) -> dict[str, Bounds | None]:
    """Of rates, by the names of `work`. values: as they were measured. in_blocks: the parts of `measured`."""
    proportions: dict[str, list[float]] = {}
    for part in in_blocks:
        gave = work(part, slos)
        for name in gave:
            proportions.setdefault(name, []).append(float(gave[name].sum() / gave[LATENCY].sum()))
    besides = NORMAL_975 * rate_noise(measured, arrival)
    bounds: dict[str, Bounds | None] = {}
    for name, value in values.items():
        each = np.array(proportions.get(name, ()))
        reach = blocks.mean_reach(each)
        if value is None or reach is None or not each.mean():
            bounds[name] = None
            continue
        reach = value * math.hypot(reach / float(each.mean()), besides)
        bounds[name] = (max(0.0, value - reach), value + reach)
    return bounds


def work(measured: RequestTable, slos: Mapping[str, float]) -> dict[str, Values]:
    """What each ok request gave to each rate (n,), and last its latency in ms. slos: limits of goodput."""
    ok = measured.ok
    prompt, output = (np.maximum(tokens[ok], 0) for tokens in (measured.prompt_tokens, measured.output_tokens))
    gave: dict[str, NDArray[Any]] = {
        "requests_per_s": np.ones(len(output)), "output_tokens_per_s": output, "total_tokens_per_s": prompt + output,
    }  # fmt: skip
    if (items := metrics.items(measured)) is not None:
        gave[metrics.ITEMS] = items[ok]
    if slos:
        gave[GOODPUT] = metrics.good(measured, slos, OWN_RULES)[ok]
    gave[LATENCY] = metrics.between_ms(measured, "sent_ns", "done_ns")[ok]
    return {name: values.astype(np.float64) for name, values in gave.items()}


def rate_noise(measured: RequestTable, arrival: str) -> float:
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
