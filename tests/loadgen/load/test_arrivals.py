"""Arrival laws: exact where they are exact, and by their distribution where they are random."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load.arrivals import Arrival, draw, parse


def test_burst_is_all_at_zero() -> None:
    assert draw(parse("burst"), 1000, None, 0).tolist() == [0] * 1000


def test_constant_is_exact() -> None:
    assert draw(parse("constant:8"), 5, None, 0).tolist() == [0, 125_000_000, 250_000_000, 375_000_000, 500_000_000]


@pytest.mark.parametrize("text", ["constant:50", "poisson:50", "gamma:50:2.5"])
def test_duration_bounds_the_schedule(text: str) -> None:
    due = draw(parse(text), None, 300.0, 3)
    assert due.max() < 300e9
    assert abs(len(due) - 15_000) < 6 * 2.5 * math.sqrt(15_000)
    assert draw(parse(text), 7, 300.0, 3).tolist() == due[:7].tolist()


def test_poisson_gaps_are_exponential() -> None:
    """Kolmogorov-Smirnov against 1 - exp(-x): 1.95 / sqrt(n) is its 0.1 % point."""
    gaps = np.sort(np.diff(draw(parse("poisson:200"), 20_000, None, 7), prepend=0)) / 1e9 * 200
    empirical = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.abs(empirical - (1 - np.exp(-gaps))).max() < 1.95 / math.sqrt(len(gaps))


def test_gamma_has_its_variation() -> None:
    gaps = np.diff(draw(parse("gamma:100:2"), 50_000, None, 7)) / 1e9
    assert gaps.mean() == pytest.approx(0.01, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.05)


@given(
    st.sampled_from(["constant", "poisson", "gamma"]),
    st.floats(0.1, 5000),
    st.floats(0.2, 3),
    st.integers(0, 9000),
    st.integers(1, 500),
    st.integers(0, 5),
)
def test_schedules_ascend_repeat_and_extend(kind: str, rate: float, cv: float, n: int, more: int, seed: int) -> None:
    arrival = Arrival(kind, rate, cv)  # type: ignore[arg-type]
    due = draw(arrival, n + more, None, seed)
    assert len(due) == n + more
    assert (np.diff(due) >= 0).all() and due[0] >= 0
    assert draw(arrival, n, None, seed).tolist() == due[:n].tolist()


def test_seeds_differ() -> None:
    assert draw(parse("poisson:5"), 9, None, 1).tolist() != draw(parse("poisson:5"), 9, None, 2).tolist()


@pytest.mark.parametrize("text", ["burst", "constant:8", "poisson:0.5", "gamma:3:1.5"])
def test_text_round_trip(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "posson:5", "poisson", "poisson:", "poisson:-1", "poisson:0", "poisson:nan", "gamma:3", "gamma:3:0",
             "burst:3", "constant:1e400", "poisson:5:2"],
)  # fmt: skip
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="arrival"):
        parse(text)
