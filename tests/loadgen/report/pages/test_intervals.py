"""Intervals within a run: order statistics by hand, and how often they hold what they are meant to hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadgen.report.contrast import Bounds
from loadgen.report.metrics import CONVENTIONS
from loadgen.report.pages import intervals
from loadgen.rundir.records import RequestTable, table
from tests.loadgen.tables import request

OURS = CONVENTIONS["loadgen"]


def drawn(latencies_ms: list[float], every_ms: float = 10.0) -> RequestTable:
    """Requests of those ttft, evenly sent."""
    return table(
        request(at, scheduled=every_ms * at, sent=every_ms * at, first=every_ms * at + ttft)
        for at, ttft in enumerate(latencies_ms)
    )


def of_metric(measured: RequestTable, name: str) -> dict[str, Bounds | None]:
    return intervals.of_metric(measured, intervals.parts(measured, "poisson:100"), name, OURS)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of independent latencies from an exponential distribution."""
    truths = {"mean": 100.0, "p50": 100 * math.log(2), "p99": 100 * math.log(100)}
    random, held, known = np.random.default_rng(0), dict.fromkeys(truths, 0), dict.fromkeys(truths, 0)
    for _ in range(60):
        found = of_metric(drawn(random.exponential(100, 1500).tolist()), "ttft_ms")
        for statistic, truth in truths.items():
            if (bounds := found[statistic]) is not None:
                known[statistic] += 1
                held[statistic] += bounds[0] <= truth <= bounds[1]
    assert min(known.values()) >= 30 and known["mean"] == 60
    assert all(held[statistic] >= 0.85 * known[statistic] for statistic in truths)


def test_latencies_that_drift_have_wide_intervals() -> None:
    """As if requests were independent, they would be as narrow."""
    rising = (np.random.default_rng(1).exponential(100, 400) + np.linspace(0, 60, 400)).tolist()
    mixed = np.random.default_rng(0).permutation(rising).tolist()
    wide, narrow = (of_metric(drawn(values), "ttft_ms")["p50"] for values in (rising, mixed))
    assert wide is not None and narrow is not None and wide[1] - wide[0] > 1.5 * (narrow[1] - narrow[0])


def test_gaps_have_intervals_too() -> None:
    found = of_metric(drawn(np.random.default_rng(1).exponential(100, 300).tolist()), "itl_ms")
    assert found["mean"] == pytest.approx((20, 20)) and found["p50"] == pytest.approx((20, 20))


def test_few_requests_and_bursts_have_no_interval() -> None:
    assert set(of_metric(drawn([100.0] * 12), "ttft_ms").values()) == {None}
    assert set(of_metric(drawn([]), "itl_ms").values()) == {None}
    burst = drawn(np.random.default_rng(0).exponential(100, 1000).tolist(), every_ms=0)
    assert intervals.parts(burst, "burst") == [] and set(of_metric(burst, "ttft_ms").values()) == {None}
    assert intervals.of_rates(burst, [], {"requests_per_s": 3.0}, {}, "burst") == {"requests_per_s": None}


def test_the_interval_of_a_rate_holds_the_rate() -> None:
    """A closed loop of one: 100 requests of 100 and 300 ms in turn are five a second."""
    rows, at = [], 0.0
    for number in range(100):
        took = 100.0 if number % 2 else 300.0
        rows.append(request(number, scheduled=at, sent=at, first=at + took, gaps=(), done=at + took))
        at += took
    loop = table(rows)
    in_blocks = intervals.parts(loop, "concurrency:1")
    low, high = intervals.of_rates(loop, in_blocks, {"requests_per_s": 5.0}, {}, "concurrency:1")["requests_per_s"] or (
        0,
        0,
    )
    assert 4.5 < low < 5 < high < 5.5
