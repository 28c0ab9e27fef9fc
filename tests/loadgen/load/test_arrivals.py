"""Arrival laws: exact where they are exact, and by their distribution where they are random."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load.load import Arrival, parse_streams
from loadgen.load.load import draw_arrivals as draw
from loadgen.load.load import parse_arrival as parse
from loadgen.rundir import Phase


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


@pytest.mark.parametrize("text", ["ramp:1:100:30", "ramp:100:0:30", "steps:10@10,0@5,50@10", "steps:20@30"])
def test_a_changing_rate_is_a_poisson_process_of_that_rate(text: str) -> None:
    """By the time-change theorem: where the summed rate stands at each arrival, gaps are exponential of mean 1."""
    arrival = parse(text)
    due_s = draw(arrival, None, None, 11) / 1e9
    assert (np.diff(due_s) >= 0).all() and due_s[0] >= 0 and due_s[-1] < (arrival.lasts_s or 0)
    starts = np.cumsum([0.0, *(each.seconds for each in arrival.stretches)])
    stood = np.zeros(len(due_s))
    for stretch, start in zip(arrival.stretches, starts, strict=False):
        into = np.clip(due_s - start, 0, stretch.seconds)
        stood += into * (stretch.first + (stretch.last - stretch.first) * into / stretch.seconds / 2)
    gaps = np.sort(np.diff(stood, prepend=0))
    empirical = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.abs(empirical - (1 - np.exp(-gaps))).max() < 1.95 / math.sqrt(len(gaps))
    assert abs(len(due_s) - sum(each.requests for each in arrival.stretches)) < 5 * math.sqrt(len(due_s))
    assert draw(arrival, 9, None, 11).tolist() == draw(arrival, None, None, 11)[:9].tolist()
    assert (draw(arrival, None, 7.5, 11) < 7.5e9).all()
    assert str(parse(str(arrival))) == str(arrival)


def test_phases_cover_the_law() -> None:
    assert [(each.name, each.start_s, each.end_s) for each in parse("steps:8@10,16@5").phases()] == [
        ("8 requests/s", 0, 10),
        ("16 requests/s", 10, 15),
    ]
    ramp = parse("ramp:0:10:50").phases()
    assert [each.start_s for each in ramp] == [0, 10, 20, 30, 40] and ramp[-1].end_s == 50
    assert ramp[1].name == "2 to 4 requests/s"
    assert parse("poisson:4").phases() == [] == parse_streams(8).phases()
    assert parse_streams("1:11:10").phases()[-1] == Phase("11 in flight", 10, None)


@given(st.integers(1, 200), st.integers(1, 200), st.floats(0.1, 1000))
def test_streams_begin_and_end_along_a_straight_line(first: int, last: int, seconds: float) -> None:
    streams = parse_streams(f"{first}:{last}:{seconds:.3f}")
    counts = [streams.at(seconds * part / 40) for part in range(60)]
    assert counts[0] == first and counts[-1] == last and streams.most == max(first, last)
    assert counts == sorted(counts, reverse=first > last)
    starts = [streams.start_s(stream) for stream in range(max(first, last))]
    assert starts == sorted(starts) and starts[0] == 0
    for stream in range(first, last):
        assert streams.at(starts[stream] * 0.999) <= stream < streams.at(starts[stream] * 1.001)


@pytest.mark.parametrize(
    "text",
    [
        "ramp:1:2",
        "ramp:1:2:0",
        "ramp:0:0:5",
        "ramp:1:2:3:4",
        "steps:",
        "steps:5",
        "steps:5@",
        "steps:0@9",
        "steps:5@1,",
    ],
)
def test_changing_rates_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match=r"^arrival '"):
        parse(text)


@pytest.mark.parametrize("text", ["0:5:5", "1:2", "1:2:0", "a", "1:2:-3", "-4"])
def test_streams_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--concurrency '"):
        parse_streams(text)
