"""Intervals within a run: order statistics by hand, and how often they hold what they are meant to hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from loadgen.report import metrics
from loadgen.report.contrast import Bounds
from loadgen.report.metrics import CONVENTIONS
from loadgen.report.pages import intervals
from loadgen.rundir.records import Table, table
from tests.loadgen.tables import request

OURS = CONVENTIONS["loadgen"]


def drawn(latencies_ms: list[float], every_ms: float = 10.0) -> Table:
    """Requests of those ttft, evenly sent."""
    return table(
        request(at, scheduled=every_ms * at, sent=every_ms * at, first=every_ms * at + ttft)
        for at, ttft in enumerate(latencies_ms)
    )


def of_metric(measured: Table, name: str) -> dict[str, Bounds | None]:
    whole = metrics.summary(metrics.sample(measured, name, OURS), OURS.percentile)
    return intervals.of_metric(measured, name, OURS, whole)


def test_ranks_by_hand() -> None:
    assert intervals.ranks(6, 500) == (0, 5)  # all six on one side: 2 / 64 = 3.1 %
    assert intervals.ranks(5, 500) is intervals.ranks(0, 500) is None  # 2 / 32 is over 5 %
    assert intervals.ranks(368, 990) is not None and intervals.ranks(367, 990) is None  # 0.99 ** 368 = 2.48 %


@given(st.integers(1, 5000), st.sampled_from([10, 500, 900, 990]))
def test_ranks_are_those_of_the_binomial_distribution(n: int, thousandths: int) -> None:
    share, found = thousandths / 1000, intervals.ranks(n, thousandths)
    if found is None:
        assert min(share, 1 - share) < 1 - 0.025 ** (1 / n)
        return
    low, high = found
    assert binom.cdf(low, n, share) <= 0.025 + 1e-9 and binom.sf(high, n, share) <= 0.025 + 1e-9
    assert binom.cdf(low + 1, n, share) > 0.025 - 1e-9 and binom.cdf(high - 1, n, share) < 0.975 + 1e-9


def test_of_a_million_requests_it_is_quick_and_near_the_normal_distribution() -> None:
    low, high = intervals.ranks(1_000_000, 500) or (0, 0)
    assert (high - low) / 2 == pytest.approx(1.96 * 500, rel=0.01)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of independent latencies from an exponential distribution; the union with batch means makes them wider."""
    truths = {"mean": 100.0, "p50": 100 * math.log(2), "p99": 100 * math.log(100)}
    random, held = np.random.default_rng(0), dict.fromkeys(truths, 0)
    for _ in range(60):
        found = of_metric(drawn(random.exponential(100, 500).tolist()), "ttft_ms")
        for statistic, truth in truths.items():
            low, high = found[statistic] or (math.inf, math.inf)
            held[statistic] += low <= truth <= high
    assert min(held.values()) >= 56


def test_latencies_that_drift_have_wide_intervals() -> None:
    """The binomial interval alone would be blind to them."""
    rising = np.linspace(10, 1000, 400).tolist()
    mixed = np.random.default_rng(0).permutation(rising).tolist()
    wide, narrow = (of_metric(drawn(values), "ttft_ms")["p50"] for values in (rising, mixed))
    assert wide is not None and narrow is not None and wide[1] - wide[0] > 2 * (narrow[1] - narrow[0])


def test_few_requests_have_no_interval() -> None:
    found = of_metric(drawn([100.0] * 20), "ttft_ms")
    assert found["p99"] is None and found["p50"] == found["mean"] == (100.0, 100.0)
    assert set(of_metric(drawn([]), "itl_ms").values()) == {None}
    assert intervals.of_rates(drawn([1.0] * 20), {"requests_per_s": 3.0}, {}, "burst") == {"requests_per_s": None}


def test_the_interval_of_a_rate_holds_the_rate() -> None:
    """A closed loop of one: 100 requests of 100 and 300 ms in turn are five a second."""
    rows, at = [], 0.0
    for number in range(100):
        took = 100.0 if number % 2 else 300.0
        rows.append(request(number, scheduled=at, sent=at, first=at + took, gaps=(), done=at + took))
        at += took
    low, high = intervals.of_rates(table(rows), {"requests_per_s": 5.0}, {}, "concurrency:1")["requests_per_s"] or (
        0,
        0,
    )
    assert 4.5 < low < 5 < high < 5.5
