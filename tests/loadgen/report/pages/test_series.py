"""Points of curves: what is left out of many is never an extreme, and nothing of a rate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.report.metrics import Distribution
from loadgen.report.pages import series
from loadgen.rundir.records import table
from tests.loadgen.tables import failure, request


def test_the_cdf_is_the_exact_step_function() -> None:
    x, share = series.cdf(Distribution(np.array([1.0, 2.0, 2.0, 5.0]), 1.0))
    # where the line jumps, and how high it is from there on
    heights = {at: max(share[x == at]) for at in x.tolist()}
    assert heights == {1.0: 0.25, 2.0: 0.75, 5.0: 1.0}
    assert share[0] == 0.0


def test_a_thinned_cdf_stays_within_a_pixel() -> None:
    values = np.sort(np.random.default_rng(0).integers(0, 2**31, 300_000).astype(np.uint32))
    x, share = series.cdf(Distribution(values, 1.0))
    assert len(x) <= series.MAX_STEPS + 3
    assert (x[0], x[-1], share[-1]) == (values[0], values[-1], 1.0)
    probes = np.random.default_rng(1).choice(values, 2000)
    exact = np.searchsorted(values, probes, side="right") / len(values)
    drawn = share[np.searchsorted(x, probes, side="right") - 1]
    assert np.abs(exact - drawn).max() <= 1.01 / series.MAX_STEPS


def test_requests_in_flight_by_hand() -> None:
    rows = [request(0, sent=0, first=50, gaps=(50,)), request(1, sent=40, first=60, gaps=(140,)), failure(2, sent=None)]
    at_s, count = series.in_flight(table(rows))
    assert at_s.tolist() == [0.0, 0.04, 0.1, 0.2] and count.tolist() == [1, 2, 1, 0]


@given(st.lists(st.floats(0, 1000), max_size=50), st.floats(0.001, 1000))
def test_rates_hold_every_request(at_s: list[float], end_s: float) -> None:
    inside = np.array([round(1e9 * at) for at in at_s if at <= end_s], np.int64)
    edges, per_s = series.rates(inside, end_s)
    assert edges[0] == 0 and edges[-1] == end_s and (np.diff(edges) > 0).all()
    assert len(per_s) <= series.MOST_BINS + 1
    assert float((per_s * np.diff(edges)).sum()) == pytest.approx(len(inside))


def test_a_rate_is_a_rate() -> None:
    edges, per_s = series.rates(np.arange(5, 12_000, 10) * 1_000_000, 12.0)
    assert np.diff(edges) == pytest.approx(0.1) and per_s == pytest.approx(100.0)


@given(st.integers(0, 2**32 - 1), st.integers(4001, 30_000))
def test_few_points_keep_every_extreme(seed: int, n: int) -> None:
    random = np.random.default_rng(seed)
    x, y = np.sort(random.exponential(1.0, n)), random.lognormal(0, 2, n)
    kept = series.thinned(x, y)
    assert len(kept) <= 2 * series.MOST_BUCKETS + series.MOST_OTHERS + 1
    assert (np.diff(kept) > 0).all() and kept[-1] == n - 1
    assert y[kept].max() == y.max() and y[kept].min() == y.min()
    assert series.thinned(x[:100], y[:100]).tolist() == list(range(100))
    assert len(series.thinned(np.zeros(n), y)) <= series.MOST_OTHERS + 3  # a burst: all due at once
