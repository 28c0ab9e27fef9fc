"""Clocks of other machines: an echo on this one, and clocks whose truth is drawn."""

from __future__ import annotations

import socket

from hypothesis import given
from hypothesis import strategies as st

from loadgen.clock import now_ns
from loadgen.cluster.clocks import ClockSample, Echo, Pinger, RemoteClock


def test_this_machines_own_clock_has_no_offset() -> None:
    echo = Echo("127.0.0.1")
    pinger = Pinger("127.0.0.1", echo.port, echo.key)
    try:
        before_ns = now_ns()
        look = pinger.look()
        assert look is not None
        assert abs(look.offset_ns) <= look.bound_ns  # the truth is 0
        assert before_ns < look.at_ns < now_ns()
    finally:
        pinger.close()
        echo.close()


def test_an_echo_answers_nobody_without_its_key() -> None:
    echo = Echo("127.0.0.1")
    stranger = Pinger("127.0.0.1", echo.port, bytes(16))
    try:
        assert stranger.look(2) is None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as noise:
            noise.sendto(b"short", ("127.0.0.1", echo.port))
        friend = Pinger("127.0.0.1", echo.port, echo.key)
        assert friend.look(3) is not None  # it goes on after noise
        friend.close()
    finally:
        stranger.close()
        echo.close()


def test_a_machine_that_is_gone_has_no_look() -> None:
    echo = Echo("127.0.0.1")
    echo.close()
    pinger = Pinger("127.0.0.1", echo.port, echo.key)
    assert pinger.look() is None
    pinger.close()


@given(
    offset_ns=st.integers(-(10**15), 10**15),
    drift_ppm=st.floats(-200, 200),
    late_ns=st.lists(st.tuples(st.integers(0, 400_000), st.integers(0, 400_000)), min_size=4, max_size=20),
)
def test_a_drifting_clock_is_found_within_its_bound_and_noise(
    offset_ns: int, drift_ppm: float, late_ns: list[tuple[int, int]]
) -> None:
    """Looks every 10 s whose ways there and back differ: each is off by at most its bound."""
    clock = RemoteClock()
    for number, (there_ns, back_ns) in enumerate(late_ns):
        at_ns = number * 10 * 10**9
        truth_ns = offset_ns + round(drift_ppm * 1e-6 * at_ns)
        clock.add(ClockSample(at_ns, truth_ns + (there_ns - back_ns) // 2, 20_000 + (there_ns + back_ns) // 2))
    middle_ns = (len(late_ns) - 1) * 5 * 10**9
    truth_ns = offset_ns + round(drift_ppm * 1e-6 * middle_ns)
    assert abs(clock.offset_ns(middle_ns) - truth_ns) <= 450_000
    assert clock.bound_ns is not None and clock.bound_ns >= 20_000


def test_looks_without_noise_give_the_line_itself() -> None:
    looks = [ClockSample(at, 7_000 + at // 20_000, 30_000) for at in range(0, 60 * 10**9, 10**10)]
    clock = RemoteClock(looks)
    assert abs(clock.drift_ppm - 50) < 0.01
    assert abs(clock.offset_ns(120 * 10**9) - (7_000 + 6_000_000)) < 10
    assert clock.bound_ns is not None and abs(clock.bound_ns - 30_000) < 10


def test_before_there_are_looks_far_apart_the_best_one_counts() -> None:
    clock = RemoteClock([ClockSample(0, 900, 500), ClockSample(10**9, 1000, 40)])
    assert (clock.offset_ns(5 * 10**9), clock.bound_ns, clock.drift_ppm) == (1000, 40, 0.0)
    clock.add(None)
    assert clock.bound_ns == 40
