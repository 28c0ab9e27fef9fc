"""The steady window: closed loops whose long-run truth is known, and runs that have none."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.load.lengths import residual
from loadgen.steady import window
from loadgen.steady.window import Stamps, TimeSpan
from tests.loadgen.steady import queues
from tests.loadgen.steady.queues import Batches


def closed_loop(slots: int, requests: int, seed: int = 1) -> tuple[Batches, Stamps]:
    rng = np.random.default_rng(seed)
    loop = queues.batches(queues.drawn_tokens((1, requests), rng), slots)
    return loop, loop.stamps()[0]


def test_a_closed_loop_of_ten_requests_a_slot_has_the_numbers_of_a_long_one() -> None:
    (_, long), (loop, short) = closed_loop(16, 1600, seed=2), closed_loop(16, 160)
    edges_s = np.asarray([long.sent_s[400], long.sent_s[-1]])
    (true_tokens,) = window.spread(long.first_s, long.last_s, long.tokens, edges_s)
    span, why = window.find(short)
    assert span is not None and not why
    last_s, tokens = loop.cut(0, short, span.to_s)
    found = window.spread_rate(short.first_s, last_s, tokens, span)
    assert found.value == pytest.approx(true_tokens / float(np.diff(edges_s)[0]), rel=0.03)
    whole = float(short.tokens.sum() / short.done_s.max())
    assert whole < 0.97 * found.value  # its drain is in it
    waits_s = short.first_s - short.sent_s
    p99 = window.of_sent(waits_s, short.sent_s, span, {"p99": 0.99})["p99"]
    assert p99.value < 0.6 * np.percentile(waits_s, 99)  # the first sixteen prompts are not


def test_slots_that_are_handed_over_are_full_at_once() -> None:
    """A loop of 64 with two requests a slot, beside one of a hundred, on eight seeds: without the hand-over it has far
    too little throughput and the first 64 prompts in its ttft; with it neither."""
    (_, long), slots = closed_loop(64, 6400, seed=3), 64
    edges_s = np.asarray([long.sent_s[1600], long.sent_s[-1]])
    true_per_s = float(window.spread(long.first_s, long.last_s, long.tokens, edges_s)[0] / np.diff(edges_s)[0])
    true_p99_s = float(np.quantile((long.first_s - long.sent_s)[1600:], 0.99))
    tokens = queues.drawn_tokens((8, slots * 3), np.random.default_rng(4))
    burst = queues.batches(tokens[:, slots:], slots)
    per_s = burst.tokens.sum(axis=1) / burst.done_s.max(axis=1)
    assert per_s.mean() < 0.92 * true_per_s
    assert np.quantile(burst.first_s - burst.sent_s, 0.99) > 5 * true_p99_s
    tokens[:, :slots] = [residual(row) for row in tokens[:, :slots].tolist()]
    handed = queues.batches(tokens, slots, warms_up=slots)
    found = []
    for run, seen in enumerate(handed.stamps()):
        span = TimeSpan(float(handed.sent_s[run, slots]), float(seen.sent_s[-1]), 0)
        last_s, counts = handed.cut(run, seen, span.to_s)
        found.append(window.spread_rate(seen.first_s, last_s, counts, span).value)
    assert np.mean(found) == pytest.approx(true_per_s, rel=0.05)
    waits_s = (handed.first_s - handed.sent_s)[:, slots:]
    assert np.quantile(waits_s, 0.99) == pytest.approx(true_p99_s, rel=0.3)


def test_full_slots_need_no_two_lives_to_fill() -> None:
    loop, seen = closed_loop(16, 16 * 6)  # too short by itself, as below
    assert window.find(seen)[0] is None
    handed_s = float(loop.sent_s[0, 16])
    span, _ = window.find(seen._replace(filled_s=handed_s))
    assert span is not None and handed_s <= span.from_s and span.to_s == seen.sent_s[-1]


def test_the_windows_of_closed_loops_hold_the_truth() -> None:
    """60 loops of twenty requests a slot: means are those of a long run, and intervals hold it as often as they say."""
    rng = np.random.default_rng(6)
    loops = queues.batches(queues.drawn_tokens((60, 640), rng), 32)
    (long,) = queues.batches(queues.drawn_tokens((1, 6400), rng), 32).stamps()
    middle = (long.sent_s > long.sent_s[1600]) & (long.sent_s < long.sent_s[-1])
    truth_s = float(np.mean((long.done_s - long.sent_s)[middle]))
    found: list[window.Estimate] = []
    for seen in loops.stamps():
        span, _ = window.find(seen)
        if span is not None:
            replies = window.of_whole_replies(seen, span)
            found += window.of_sent(seen.done_s - seen.sent_s, seen.sent_s, replies, {"mean": None}).values()
    known = [each for each in found if each.low is not None and each.high is not None]
    assert len(known) > 40
    assert np.mean([each.value for each in known]) == pytest.approx(truth_s, rel=0.02)
    assert np.mean([(each.low or 0) <= truth_s <= (each.high or 0) for each in known]) >= 0.85


def test_requests_of_a_short_window_hang_on_the_server_and_not_on_the_lengths_that_were_drawn() -> None:
    """Loops of eight with ten requests a slot: what ends scatters by 6 %, and as the law has it by 0.5 %."""
    loops = queues.batches(queues.drawn_tokens((60, 80), np.random.default_rng(9)), 8)
    (long,) = queues.batches(queues.drawn_tokens((1, 8000), np.random.default_rng(10)), 8).stamps()
    middle = (long.done_s > long.sent_s[400]) & (long.done_s < long.sent_s[-1])
    true_per_s = float(middle.sum() / (long.sent_s[-1] - long.sent_s[400]))
    ended, found = [], []
    for run, seen in enumerate(loops.stamps()):
        span, _ = window.find(seen)
        if span is None:
            continue
        last_s, tokens = loops.cut(run, seen, span.to_s)
        found.append(window.law_rate(seen, last_s, tokens, span).value / true_per_s - 1)
        ended.append(window.law_rate(seen._replace(mean_tokens=None), last_s, tokens, span).value / true_per_s - 1)
    assert len(found) > 50 and np.std(ended) > 0.04 and np.std(found) < 0.01
    assert abs(np.mean(found)) < 0.006 and np.abs(found).max() < 0.03


def test_lengths_say_nothing_of_requests_whose_time_is_their_prompts() -> None:
    """Replies that come at once, however long: what ends is what counts."""
    sent_s, tokens = np.arange(100.0), np.random.default_rng(11).uniform(1, 99, 100)
    ends_s = sent_s + 1
    seen = Stamps(np.arange(100), sent_s, ends_s, ends_s, ends_s, tokens, 1, mean_tokens=50.0)
    assert window.law_rate(seen, ends_s, tokens, TimeSpan(20.5, 80.5)).value == pytest.approx(1.0)


@pytest.mark.parametrize("requests", [16, 32, 48])
def test_a_short_closed_loop_has_none_and_says_how_many_would_do(requests: int) -> None:
    span, why = window.find(closed_loop(16, requests)[1])
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
    span, sent_s, held = TimeSpan(0.0, 1000.0), np.linspace(0, 1000, 500), 0
    for seed in range(200):
        values = np.random.default_rng(seed).exponential(1.0, 500)
        found = window.of_sent(values, sent_s, span, {"mean": None})["mean"]
        assert found.low is not None and found.high is not None
        held += found.low <= 1.0 <= found.high
    assert 0.9 * 200 <= held <= 0.99 * 200


def test_the_window_of_sessions_begins_and_ends_with_all_turns_under_way() -> None:
    """A session of four turns each second, a turn each 10 s: until 30 s there are too few turns, and after the last
    session has begun too few again."""
    begins_s = np.arange(200.0)
    sent_s = np.sort((begins_s[:, None] + 10 * np.arange(4)).ravel())
    first_s, tokens = sent_s + 0.1, np.full(len(sent_s), 10.0)
    seen = Stamps(np.arange(len(sent_s)), sent_s, first_s, first_s + 1, first_s + 1, tokens, session_s=31.0)
    span, _ = window.find(seen)
    assert span is not None and 31 <= span.from_s < 120 and span.to_s == pytest.approx(229 - 31)
    assert window.rate(seen.done_s, span).value == pytest.approx(4, rel=0.03)
    short = seen._replace(session_s=150.0)
    assert window.find(short) == (None, "the run is too short: about 1,320 requests would do")
