"""Intervals by blocks: independent values, values whose neighbours are alike, and too few of either."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.steady import blocks


def covered(values: np.ndarray[tuple[int, int], np.dtype[np.float64]], share: float, truth: float) -> float:
    """How often the interval of a percentile of runs (runs, n) in ten blocks holds the truth."""
    held = []
    for each in values:
        reached = np.quantile(each, share)
        parts = each.reshape(10, -1)
        within = (parts <= reached).sum(axis=1).astype(np.float64)
        found = blocks.of_percentile(np.sort(each), share, np.full(10, float(parts.shape[1])), within)
        assert found is not None
        held.append(found[0] <= truth <= found[1])
    return float(np.mean(held))


@pytest.mark.parametrize(("share", "truth"), [(0.5, np.log(2)), (0.95, np.log(20))])
def test_percentiles_of_independent_values(share: float, truth: float) -> None:
    values = np.random.default_rng(1).exponential(1.0, (300, 2000))
    assert 0.91 <= covered(values, share, truth) <= 0.99


def test_percentiles_of_values_that_come_in_moments() -> None:
    """Twenty neighbours are one value, so 2000 of them are 100: as if independent, intervals would hold a third."""
    values = np.repeat(np.random.default_rng(2).exponential(1.0, (300, 200)), 20, axis=1)
    assert 0.9 <= covered(values, 0.5, np.log(2)) <= 0.99


def test_too_few_have_no_interval() -> None:
    counts = np.full(10, 30.0)
    ascending = np.arange(300.0)
    assert blocks.of_percentile(ascending, 0.99, counts, counts * 0.99) is None  # three lie beyond
    at_once = np.array([30.0] * 5 + [0.0] * 5)  # one half of the run was fast, the other slow: two moments
    assert blocks.of_percentile(ascending, 0.5, counts, at_once) is None
    assert blocks.of_percentile(ascending, 0.5, counts, np.full(10, 15.0)) is not None
    assert blocks.mean_reach(np.array([1.0, 2.0])) is None


def test_a_run_is_cut_by_lives() -> None:
    assert blocks.count(100, 1, closed=False) == blocks.count(100, 1, closed=True) == 10
    assert blocks.count(15, 1, closed=False) == 4 and blocks.count(15, 1, closed=True) == 7
    assert blocks.count(9, 1, closed=False) == 0 and blocks.count(0, 1, closed=True) == 0


def test_of_sessions_a_block_holds_most_of_one() -> None:
    """Requests of half a second in sessions of eight: by requests alone 60 s hold as many blocks as are made, and by
    sessions ten, of which a longer run makes fewer and longer ones."""
    assert blocks.count(60, 0.5, closed=False) == blocks.MOST
    assert blocks.count(60, 0.5, closed=False, session_s=8) == 6
    assert blocks.count(18, 0.5, closed=False, session_s=8) == 3
    assert blocks.count(17, 0.5, closed=False, session_s=8) == 0
    assert blocks.count(20, 2.0, closed=True, session_s=1) == blocks.count(20, 2.0, closed=True)
