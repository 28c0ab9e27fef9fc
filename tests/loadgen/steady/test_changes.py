"""Changes of a server's pace: a server of batches that changes at a known moment by a known factor, or does not."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.steady import changes
from loadgen.steady.window import Stamps
from tests.loadgen.steady import queues
from tests.loadgen.steady.queues import Floats, Step

RUNS, LASTS_S = 6, 150.0


def seen(load: float, change: Step | None = None, runs: int = RUNS) -> list[Stamps]:
    """Two minutes of a closed loop, or of arrivals at a share of the server's capacity."""
    rng, noise = np.random.default_rng(round(100 * load)), np.random.default_rng(5)

    def step(now_s: Floats, takes_s: Floats) -> Floats:
        changed_s = takes_s if change is None else change(now_s, takes_s)
        scattered: Floats = changed_s * np.exp(0.03 * noise.standard_normal(len(now_s)))
        return scattered

    if load >= 1:
        tokens = queues.drawn_tokens((runs, round(LASTS_S * 8)), rng)
        return queues.batches(tokens, round(load), None, step).stamps()
    tokens = queues.drawn_tokens((runs, round(LASTS_S * load * 13)), rng)
    arrived_s = queues.arrivals(load * 13, tokens.shape, rng)
    return queues.batches(tokens, 128, arrived_s, step).stamps()


@pytest.mark.parametrize("load", [16, 0.45, 0.8])
def test_a_server_that_does_not_change_is_not_said_to(load: float) -> None:
    assert [changes.find(each) for each in seen(load, runs=15)] == [None] * 15


@pytest.mark.parametrize("load", [16, 0.45])
def test_half_the_pace_from_the_middle_on(load: float) -> None:
    found = [changes.find(each) for each in seen(load, lambda now_s, s: s * np.where(now_s >= 60, 2.0, 1.0))]
    for each in found:
        assert each is not None and each.kind == "level_shift" and each.at_s is not None
        assert each.at_s == pytest.approx(60, abs=6) and each.ratio == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize("load", [16, 0.45])
def test_ten_seconds_at_a_third_of_the_pace(load: float) -> None:
    found = [changes.find(each) for each in seen(load, lambda now_s, s: s * np.where(now_s < 10, 3.0, 1.0))]
    named = [each for each in found if each is not None and each.kind == "slow_start"]
    assert len(named) >= RUNS - 1
    assert np.median([each.at_s or 0.0 for each in named]) == pytest.approx(10, abs=6)
    assert np.median([each.ratio for each in named]) == pytest.approx(1 / 3, abs=0.12)


def test_a_drift_is_no_level_shift() -> None:
    found = [changes.find(each) for each in seen(16, lambda now_s, s: s * (1 + 0.05 * now_s / 60))]
    for each in found:
        assert each is not None and each.kind == "drift" and each.at_s is None
        assert each.per_minute == pytest.approx(0.05, rel=0.2)


def test_a_pause_is_a_stall_and_no_change() -> None:
    def pauses(now_s: Floats, takes_s: Floats) -> Floats:
        return takes_s + 8 * ((now_s < 50) & (now_s + takes_s >= 50))

    assert [changes.find(each, [(50.0, 58.0)]) for each in seen(16, pauses)] == [None] * RUNS


def test_contexts_that_grow_are_the_loads_doing() -> None:
    """Prompts four times as long at the end as in the beginning, whose tokens take up to twice as long."""
    (run,) = seen(16, runs=1)
    grown = 500 * (1 + 3 * run.sent_s / run.sent_s[-1])
    lives_s = (run.last_s - run.first_s) * (1 + run.sent_s / run.sent_s[-1])
    longer = run._replace(prompt_tokens=grown, last_s=run.first_s + lives_s)
    assert changes.find(longer._replace(prompt_tokens=0.0)) is not None
    assert changes.find(longer) is None


def test_of_short_runs_nothing_is_said() -> None:
    (run,) = seen(16, runs=1)
    few = Stamps(run.rows[:19], *(each[:19] for each in run[1:6]), slots=16)
    assert changes.find(few) is None
    at_s = np.zeros(100)
    assert changes.find(Stamps(np.arange(100), at_s, at_s, at_s, at_s, at_s)) is None


def test_parts_in_which_nothing_happens() -> None:
    """Few short lives far apart: of some parts nothing is known, and no number made of the others is none."""
    rng = np.random.default_rng(3)
    with np.errstate(all="raise"):
        for _ in range(300):
            n = int(rng.integers(20, 60))
            sent_s = np.cumsum(rng.exponential(0.025, n))
            first_s = sent_s + 0.02 + rng.uniform(0, 0.001, n)
            last_s = first_s + 0.015 + rng.uniform(0, 0.0005, n)
            assert changes.find(Stamps(np.arange(n), sent_s, first_s, last_s, last_s, np.full(n, 4.0))) is None
