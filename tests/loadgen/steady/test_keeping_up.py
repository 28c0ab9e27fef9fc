"""Whether a server kept up: queues of known capacity, two real servers, and flows of which nothing can be told."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from loadgen.steady.keeping_up import Flow, KeepingUp, judge
from tests.loadgen.steady import queues

RUNS = 40


DATA = Path(__file__).parents[2] / "data/steady_h200"


def words(rho: float, law: str, n: int) -> Counter[str]:
    return Counter(judge(flow).word for flow in queues.flows(rho, law, n, RUNS))


def own_arrivals(flow: Flow) -> KeepingUp:
    """Judged as a trace, whose law nobody knows."""
    return judge(flow._replace(rate_per_s=None, mean_tokens=None))


@pytest.mark.parametrize("law", queues.LAWS)
@pytest.mark.parametrize(("rho", "n"), [(0.5, 300), (0.8, 300), (0.8, 3000), (0.9, 3000)])
def test_a_server_that_keeps_up_is_not_said_to_fall_behind(law: str, rho: float, n: int) -> None:
    assert words(rho, law, n)["fell_behind"] == 0


@pytest.mark.parametrize("law", queues.LAWS)
@pytest.mark.parametrize(("rho", "n"), [(1.5, 300), (2.5, 300), (1.2, 3000), (2.5, 3000)])
def test_a_server_that_is_offered_more_than_it_serves_falls_behind(law: str, rho: float, n: int) -> None:
    assert words(rho, law, n)["fell_behind"] == RUNS


@pytest.mark.parametrize(("rho", "n"), [(1.2, 300), (1.5, 3000)])
def test_the_rates_are_those_of_the_queue(rho: float, n: int) -> None:
    seen = [judge(flow) for flow in queues.flows(rho, "uniform", n, RUNS)]
    behind = [each for each in seen if each.word == "fell_behind"]
    assert len(behind) >= 0.9 * RUNS
    served = [each.served_per_s for each in behind if each.served_per_s is not None]
    assert np.mean(served) == pytest.approx(1.0, abs=0.03)
    covered = [each.served_ci[0] <= 1 <= each.served_ci[1] for each in behind if each.served_ci is not None]
    assert np.mean(covered) >= 0.85
    for each in behind:
        assert each.offered_per_s is not None and each.served_per_s is not None and each.growth_per_s is not None
        assert each.growth_per_s == pytest.approx(each.offered_per_s - each.served_per_s)


def test_a_real_server_that_took_all_into_its_batch() -> None:
    """Its requests lived as long at the end as in the beginning; what grew was the queue for their first token. A
    closed loop of 512 requests gave 33.3 requests/s."""
    kept = json.loads((DATA / "poisson-54-40.json").read_text())
    sent, first, done = (np.asarray(kept[name]) / 1000 for name in ("sent_ms", "first_ms", "done_ms"))
    tokens = np.asarray(kept["output_tokens"], np.float64)
    for flow in (Flow(sent, first, done, tokens, 54.0, 200.0), Flow(sent, first, done)):
        seen = judge(flow)
        assert seen.word == "fell_behind"
        assert seen.offered_per_s == pytest.approx(55.2, rel=0.05)
        assert seen.served_per_s == pytest.approx(33.3, rel=0.1)


def test_without_a_law_the_arrivals_themselves_are_asked() -> None:
    assert {own_arrivals(flow).word for flow in queues.flows(1.5, "uniform", 3000, RUNS)} == {"fell_behind"}
    assert {own_arrivals(flow).word for flow in queues.flows(0.8, "uniform", 3000, RUNS)} == {"kept_up"}


def test_a_ramp_says_at_what_rate_the_server_fell_behind() -> None:
    """From half of what the server serves to twice as much."""
    rng = np.random.default_rng(7)
    arrived_s = np.sqrt(np.cumsum(rng.exponential(1.0, 3000))[None, :] * 2000 + 500**2) - 500  # rate (t + 500) / 1000
    begin_s, end_s = queues.slots(arrived_s, queues.lengths("uniform", (1, 3000), rng), 8)
    seen = judge(Flow(arrived_s[0], begin_s[0], end_s[0]))
    assert seen.word == "fell_behind"
    assert seen.served_per_s == pytest.approx(1, rel=0.05)
    assert seen.from_s == pytest.approx(500, rel=0.3)  # when as many arrive as the server serves


def test_a_wave_that_the_server_worked_off_is_no_falling_behind() -> None:
    """Three times as much as the server serves for a while, then half of it until all is answered."""
    arrived_s = np.concatenate((np.arange(0, 100, 2.0), 100 + np.arange(0, 100, 1 / 3), 200 + np.arange(0, 900, 2.0)))
    begin_s, end_s = queues.slots(arrived_s[None, :], np.ones((1, len(arrived_s))), 8)
    assert judge(Flow(arrived_s, begin_s[0], end_s[0])).word == "kept_up"


def test_half_the_capacity_lost_in_the_middle() -> None:
    rng = np.random.default_rng(3)
    arrived_s = queues.arrivals(0.7, (1, 2000), rng)
    work = np.where(np.arange(2000) < 1000, 1.0, 2.0)[None, :]
    begin_s, end_s = queues.slots(arrived_s, work, 8)
    seen = judge(Flow(arrived_s[0], begin_s[0], end_s[0], rate_per_s=0.7))
    assert seen.word == "fell_behind"
    assert seen.from_s == pytest.approx(1000 / 0.7, rel=0.15)
    assert seen.served_per_s == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    ("flow", "why"),
    [
        (Flow(*(np.arange(19.0) + late for late in (0, 1, 2))), "fewer than 20 requests were answered"),
        (Flow(*(np.zeros(0),) * 3), "fewer than 20 requests were answered"),
        (Flow(np.arange(50.0), np.full(50, np.inf), np.full(50, np.inf)), "fewer than 20 requests were answered"),
        (Flow(*(np.full(50, late) for late in (0.0, 1.0, 2.0))), "all requests arrived at once"),
        (
            Flow(np.arange(50) / 1e9, *(0.1 * np.arange(1, 51) + late for late in (0, 1))),
            "all requests arrived at once",
        ),
        (
            Flow(*(np.arange(40.0) / 8 + late for late in (0, 0.1, 10))),
            "arrivals ended before the replies to the first of them did",
        ),
    ],
)
def test_what_cannot_be_told_is_said(flow: Flow, why: str) -> None:
    assert judge(flow) == KeepingUp(word="unknown", why=why)
    assert judge(flow, "sessions").why == why.replace("requests", "sessions")


def test_a_run_is_judged_up_to_where_it_was_killed() -> None:
    (flow,) = queues.flows(1.5, "uniform", 3000, 1)
    killed_s = float(flow.arrived_s[1500])
    sent = int(np.searchsorted(flow.arrived_s, killed_s))
    left = flow._replace(
        arrived_s=flow.arrived_s[:sent],
        first_s=np.where(flow.first_s < killed_s, flow.first_s, np.inf)[:sent],
        done_s=np.where(flow.done_s < killed_s, flow.done_s, np.inf)[:sent],
        tokens=None,
    )
    seen = judge(left)
    assert seen.word == "fell_behind"
    assert seen.served_per_s == pytest.approx(1.0, rel=0.05)


def test_order_of_replies_and_the_unit_of_time_change_nothing() -> None:
    (flow,) = queues.flows(1.2, "lognormal", 300, 1)
    times = flow._replace(
        arrived_s=flow.arrived_s * 1e-3, first_s=flow.first_s * 1e-3, done_s=flow.done_s * 1e-3, rate_per_s=1200.0
    )
    assert judge(times).word == judge(flow).word
