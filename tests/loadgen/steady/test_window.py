"""The steady window: closed loops whose long-run truth is known, and runs that have none."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.steady import window
from loadgen.steady.window import Span, Stamps


def closed_loop(slots: int, requests: int, seed: int = 1) -> Stamps:
    """Each slot sends its next request when the last has ended. A step takes 4 ms and 0.16 ms a reply, 16 ms more for
    each prompt that begins in it, of which there are at most eight."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(64, 449, requests)
    times = np.zeros((3, requests))  # sent, first token, done
    left, at_s, following = dict.fromkeys(range(slots), 0), 0.0, slots
    waiting, running = list(range(slots)), []
    while waiting or running:
        begun, waiting = waiting[:8], waiting[8:]
        running += begun
        at_s += 0.004 + 0.00016 * len(running) + 0.016 * len(begun)
        times[1, begun] = at_s
        for each in running:
            left[each] = left.get(each, 0) + 1
        over = [each for each in running if left[each] >= tokens[each]]
        running = [each for each in running if left[each] < tokens[each]]
        times[2, over] = at_s
        for _ in over:
            if following < requests:
                times[0, following] = at_s
                waiting.append(following)
                following += 1
    sent_s, first_s, done_s = times
    return Stamps(np.arange(requests), sent_s, first_s, done_s, done_s, tokens.astype(np.float64), slots)


def test_a_closed_loop_of_ten_requests_a_slot_has_the_numbers_of_a_long_one() -> None:
    long, short = closed_loop(16, 1600, seed=2), closed_loop(16, 160)
    truth = Span(float(long.sent_s[400]), float(long.sent_s[-1]))
    (true_rate,) = window.spread(long.first_s, long.last_s, long.tokens, np.asarray([truth.from_s, truth.to_s]))
    span, why = window.find(short)
    assert span is not None and not why
    found = window.spread_rate(short.first_s, short.last_s, short.tokens, span)
    assert found.value == pytest.approx(true_rate / (truth.to_s - truth.from_s), rel=0.03)
    whole = float(short.tokens.sum() / short.done_s.max())
    assert whole < 0.97 * found.value  # its drain is in it
    waits_s = short.first_s - short.sent_s
    p99 = window.of_sent(waits_s, short.sent_s, span, lambda values: float(np.percentile(values, 99)))
    assert p99 is not None and p99.value < 0.6 * np.percentile(waits_s, 99)  # the first sixteen prompts are not


@pytest.mark.parametrize("requests", [16, 32, 48])
def test_a_short_closed_loop_has_none_and_says_how_many_would_do(requests: int) -> None:
    span, why = window.find(closed_loop(16, requests))
    assert span is None
    assert why.startswith("fewer than 40 requests" if requests < 40 else "the run is too short: about ")


def test_all_at_once_has_none() -> None:
    at_s = np.zeros(100)
    assert window.find(Stamps(np.arange(100), at_s, at_s + 1, at_s + 2, at_s + 2, at_s + 9)) == (
        None, "all requests were sent at once",
    )  # fmt: skip


def test_a_slow_start_is_left_out() -> None:
    """Even arrivals; for the first 200 s a first token takes 3 s, then 0.1 s."""
    sent_s = np.arange(1000.0)
    first_s = sent_s + np.where(sent_s < 200, 3.0, 0.1)
    span, _ = window.find(Stamps(np.arange(1000), sent_s, first_s, first_s + 1, first_s + 1, np.full(1000, 10.0)))
    assert span is not None and 195 <= span.from_s <= 300 and span.to_s == 999


def test_what_is_spread_is_all_there() -> None:
    rng = np.random.default_rng(4)
    begin_s, weights = rng.uniform(0, 50, 200), rng.uniform(1, 9, 200)
    end_s = begin_s + rng.exponential(5, 200)
    found = window.spread(begin_s, end_s, weights, np.linspace(0, end_s.max(), 31))
    assert found.sum() == pytest.approx(weights.sum())
    (half,) = window.spread(np.zeros(1), np.full(1, 10.0), np.ones(1), np.asarray([0.0, 5.0]))
    assert half == pytest.approx(0.5)


def test_intervals_hold_the_truth_of_noise() -> None:
    """Draws 200 samples of independent values."""
    span, sent_s, held = Span(0.0, 1000.0), np.linspace(0, 1000, 500), 0
    for seed in range(200):
        values = np.random.default_rng(seed).exponential(1.0, 500)
        found = window.of_sent(values, sent_s, span, lambda each: float(each.mean()))
        assert found is not None and found.low is not None and found.high is not None
        held += found.low <= 1.0 <= found.high
    assert 0.9 * 200 <= held <= 0.99 * 200
