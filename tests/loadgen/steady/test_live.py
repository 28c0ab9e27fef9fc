"""Falling behind while it happens: queues of known capacity, looked at once a second."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.steady.keeping_up import Flow
from loadgen.steady.live import Falling, words
from tests.loadgen.steady import queues


def first(flow: Flow, arrival: str = "poisson:1", per_s: float = 10.0) -> tuple[float, float] | None:
    """When it is said first, and the growth: of a server that serves so many requests a second."""
    arrived_s, ended_s, falling = flow.arrived_s / per_s, np.sort(flow.done_s / per_s), Falling(arrival)
    for at_s in np.arange(1.0, arrived_s[-1]):
        sent, ended = (int(np.searchsorted(each, at_s)) for each in (arrived_s, ended_s))
        if (growth := falling.look(float(at_s), sent, ended)) is not None:
            return float(at_s), growth
    return None


@pytest.mark.parametrize("rho", [0.5, 0.9])
def test_a_server_that_keeps_up_is_left_alone(rho: float) -> None:
    assert [first(flow) for law in queues.LAWS for flow in queues.flows(rho, law, 2000, 10)] == [None] * 30


def test_a_server_that_falls_behind_is_told_early_and_by_how_much() -> None:
    found = [first(flow) for law in queues.LAWS for flow in queues.flows(2.5, law, 2000, 10)]
    told = [each for each in found if each is not None]
    assert len(told) == 30 and np.median([at_s for at_s, _ in told]) < 20
    assert np.median([growth for _, growth in told]) == pytest.approx(15, rel=0.2)


def test_loads_without_arrivals_of_their_own_are_not_judged() -> None:
    (flow,) = queues.flows(2.5, "fixed", 2000, 1)
    for arrival in ("burst", "concurrency:8", ""):
        assert first(flow, arrival) is None


def test_a_load_that_grows_is_no_falling_behind() -> None:
    """A ramp from 1 to 20 requests/s at a server that takes 2 s for each."""
    arrived_s = (np.sqrt(1 + 2 * 0.19 * np.arange(1000)) - 1) / 0.19
    assert first(Flow(arrived_s, arrived_s, arrived_s + 2), "ramp:1:20:100", per_s=1) is None


def test_the_words() -> None:
    assert words(38.2) == "falling behind: 38 requests/s more arrive than leave"
    assert words(0.45) == "falling behind: 0.5 requests/s more arrive than leave"
