"""The search's statistics in worlds whose answer is known; worlds.py has 200 searches a world."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadgen.search.highest import (
    EndReason,
    Goal,
    NextProbe,
    Prior,
    Probe,
    ProbeTimes,
    conclude,
    dispersion,
    fit,
    highest,
    highest_load,
    judge,
    next_probe,
)
from loadgen.steady.blocks import wilson
from tests.loadgen.search import worlds

GOAL = Goal(attain=0.95)


def probe(load: float, counted: int, met: int, **more: object) -> Probe:
    fields = {"verdict": "unsure", "dispersion": 1.0, "requests": counted, "seconds": 10.0, "life_s": 1.0} | more
    return Probe(load=load, counted=counted, met=met, **fields)  # type: ignore[arg-type]


def seen(at_s: np.ndarray, life_s: np.ndarray | float, late: np.ndarray, elapsed_s: float | None = None) -> ProbeTimes:
    until_s = float(at_s[-1]) if elapsed_s is None else elapsed_s
    done_s = np.where(at_s + life_s <= until_s, at_s + life_s, np.inf)
    return ProbeTimes(sent_s=at_s, done_s=done_s, late=late, elapsed_s=until_s)


def test_known_queues() -> None:
    """M/D/1 and M/D/c: the formula is what a long simulation gives, and one slot is served at its own pace."""
    for slots, limit_s, load in ((1, 9.0, 0.77), (4, 2.0, 3.3), (8, 0.5, 6.0)):
        _, waited_s = worlds.wait_s(load, slots, 1_000_000, np.random.default_rng(1))
        share = worlds.waits_within(load, slots, limit_s)
        assert float((waited_s[20_000:] <= limit_s).mean()) == pytest.approx(share, abs=0.004)
    at_s, waited_s = worlds.wait_s(0.9, 1, 500, np.random.default_rng(2))
    free_s = 0.0
    for at, waited in zip(at_s.tolist(), waited_s.tolist(), strict=True):
        assert waited == pytest.approx(max(0.0, free_s - at), abs=1e-9)
        free_s = max(free_s, at) + 1


@pytest.mark.processes
@pytest.mark.parametrize("name", ["md1", "slots"])
def test_the_true_knee_is_in_the_interval(name: str) -> None:
    world = worlds.WORLDS[name]()
    found = [worlds.searched(world, seed) for seed in range(12)]
    held = sum(each["low"] <= world.truth <= each["high"] for each in found)
    assert held >= 9  # of 12 at 93 %: fewer by chance once in a thousand
    assert np.median([abs(each["value"] / world.truth - 1) for each in found]) < 0.03
    assert all(each["ended"] == "sure" for each in found)


def test_a_search_follows_from_its_probes_alone() -> None:
    world = worlds.WORLDS["slots"]()
    guess, rng = Prior(load=world.truth * 1.2), np.random.default_rng(3)
    first, probes, ended = highest(worlds.probing(world, GOAL, rng, []), GOAL, guess)
    assert next_probe(GOAL, guess, probes) == ended
    assert highest_load(GOAL, guess, probes, ended) == first
    for number, made in enumerate(probes):
        order = next_probe(GOAL, guess, probes[:number])
        assert isinstance(order, NextProbe) and order.load == made.load


def test_a_probe_is_sure_soon_where_the_answer_is_plain() -> None:
    at_s = np.arange(1, 2001) / 10
    assert judge(GOAL, seen(at_s, 0.5, np.full(2000, 0.2))) is not None
    clear = judge(GOAL, seen(at_s[:400], 0.5, np.random.default_rng(0).random(400) * 2))
    assert clear is not None and clear.verdict == "missed"
    assert judge(GOAL, seen(at_s[:60], 0.5, np.full(60, 0.2))) is None


@pytest.mark.processes
def test_a_verdict_is_rarely_wrong_however_often_one_looks() -> None:
    wrong = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        late = np.where(rng.random(3000) < 0.95, 0.5, 1.5)  # exactly what is wanted: any verdict is wrong
        at_s = np.cumsum(rng.exponential(0.1, 3000))
        looked = (judge(GOAL, seen(at_s[:n], 0.2, late[:n])) for n in (int(100 * 1.2**k) for k in range(19)))
        wrong += any(made is not None for made in looked)
    assert wrong <= 20  # 5 % of 200 are 10


def test_a_server_that_falls_behind_is_recognised_and_measured() -> None:
    rng = np.random.default_rng(5)
    at_s, waited_s = worlds.wait_s(6.0, 4, 3000, rng)  # 4 slots end 4 a second
    for count in range(100, 3000, 100):
        made = judge(GOAL, seen(at_s[:count], waited_s[:count] + 1, np.full(count, 0.1)))
        if made is not None:
            break
    assert made is not None and made.verdict == "falls_behind" and made.requests < 1000
    assert made.ended_per_s == pytest.approx(4.0, rel=0.1)


def test_a_server_that_fills_up_and_holds_does_not_fall_behind() -> None:
    for seed in range(20):
        at_s, waited_s = worlds.wait_s(3.4, 4, 4000, np.random.default_rng(seed))
        life_s = 20 + waited_s  # many under way, all of them in time
        made = conclude(GOAL, seen(at_s, life_s, np.full(4000, 0.1)), 3.4)
        assert made.verdict != "falls_behind" and made.ended_per_s is None


def test_requests_that_are_over_early_do_not_count_alone() -> None:
    """Short replies are over first; until the long ones before them are, nothing is said of either."""
    at_s = np.arange(1, 1001) / 100
    life_s = np.where(np.arange(1000) % 2 == 0, 0.01, 100.0)
    made = conclude(GOAL, seen(at_s, life_s, np.full(1000, 0.1)), 100.0)
    assert made.counted <= 1 and made.verdict == "unsure"


def test_dispersion_of_independent_and_of_clustered_misses() -> None:
    rng = np.random.default_rng(6)
    assert dispersion(rng.random(20_000), 0.95) < 1.5
    clustered = np.repeat(rng.random(1000), 20)  # of 20 requests each: counts scatter 20 times as much
    assert dispersion(clustered, 0.95) == pytest.approx(20, rel=0.3)


def test_wilson_is_the_textbook_interval() -> None:
    assert wilson(0.9, 100, 1.959964) == pytest.approx((0.8256343, 0.9447708), abs=1e-6)


def test_probes_of_a_known_curve_give_its_crossing() -> None:
    slope, knee = 20.0, 7.0
    logit = [math.log(19) - slope * math.log(load / knee) for load in (6.2, 6.6, 7.0, 7.4, 7.8)]
    probes = [
        probe(load, 100_000, round(100_000 / (1 + math.exp(-each))))
        for load, each in zip((6.2, 6.6, 7.0, 7.4, 7.8), logit, strict=True)
    ]
    posterior = fit(GOAL, Prior(load=5.0), probes)
    assert math.exp(posterior.quantile(0.5)) == pytest.approx(knee, rel=0.005)
    assert posterior.slope == pytest.approx(slope, rel=0.05)
    found = highest_load(GOAL, Prior(load=5.0), probes)
    assert found.attained == pytest.approx(0.95, abs=0.002)


def test_falling_behind_bounds_the_answer() -> None:
    probes = [probe(8.0, 4000, 4000), probe(14.0, 0, 0, verdict="falls_behind", ended_per_s=10.0, requests=4000)]
    found = highest_load(GOAL, Prior(load=8.0), probes)
    assert found.value is not None and 8.0 <= found.value <= 10.0 and found.high < 10.8


def test_a_probe_that_was_ended_as_the_server_fell_behind_bounds_the_answer() -> None:
    """160 requests, all within their limits so far, of which more came than went."""
    rng = np.random.default_rng(1)
    sent_s = np.cumsum(rng.exponential(1 / 15, 160))
    done_s = np.maximum.accumulate(np.maximum(np.arange(160) / 10, sent_s + 0.1))
    seen = ProbeTimes(
        sent_s=sent_s, done_s=np.where(done_s < 11, done_s, np.inf), late=np.full(160, 0.2), elapsed_s=11.0
    )
    assert conclude(GOAL, seen, 15.0).verdict != "falls_behind"
    behind = conclude(GOAL, seen, 15.0, 10.0)
    assert behind.verdict == "falls_behind"
    found = highest_load(GOAL, Prior(load=12.0), [behind])
    assert found.value is not None and found.value < 11 and found.high < 14


def test_none_where_requests_that_are_alone_miss() -> None:
    probes = [probe(0.05, 40, 3, verdict="missed")]
    ended = next_probe(GOAL, Prior(load=1.0), probes)
    assert isinstance(ended, EndReason) and ended.code == "none"
    assert highest_load(GOAL, Prior(load=1.0), probes, ended).value is None


def test_the_budget_ends_a_search() -> None:
    goal = Goal(attain=0.95, budget_s=30.0)
    order = next_probe(goal, Prior(load=1.0), [probe(1.0, 50, 50)])
    assert isinstance(order, NextProbe) and order.seconds <= 19.0
    ended = next_probe(goal, Prior(load=1.0), [probe(1.0, 50, 50), probe(1.0, 50, 50), probe(1.0, 50, 50)])
    assert isinstance(ended, EndReason) and ended.code == "budget"


def test_least_requests_that_make_an_attainment_sure() -> None:
    least = Goal(attain=0.99).least_requests
    z = 1.959964
    assert wilson(1.0, least, z)[0] >= 0.99 > wilson(1.0, least - 2, z)[0]


def test_a_start_far_too_high_shows_nothing_and_is_left() -> None:
    """Above 100 a probe is over before anything of it counts, as where all requests pile up; 60 is the answer."""
    rng = np.random.default_rng(4)

    def probing(order: NextProbe) -> Probe:
        blind = order.load > 100
        counted = 0 if blind else order.requests
        share = 1 / (1 + math.exp(-GOAL.logit + 16 * math.log(order.load / 60)))
        return Probe(
            load=order.load, verdict="unsure", counted=counted, met=int(rng.binomial(counted, share)), dispersion=1.0,
            requests=order.requests, seconds=8.0, life_s=2.5 if blind else 0.1,
        )  # fmt: skip

    found, probes, ended = highest(probing, GOAL, Prior(load=140.0))
    assert ended.code == "sure" and found.value == pytest.approx(60, rel=0.05)
    assert sum(probe.counted == 0 for probe in probes) <= 3
