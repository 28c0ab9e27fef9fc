"""How many tokens came with the first read, and when the pace of the others is known: known answers, and a property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.rundir import pace

STEP_US = 20_000


@pytest.mark.parametrize(
    ("tokens", "gaps", "first"),
    [
        (4, [STEP_US] * 3, 1),
        (6, [0, STEP_US, STEP_US, STEP_US, STEP_US], 2),  # two events in the first read
        (50, [STEP_US] * 48, 1),  # one of fifty has no event: within what is allowed
        (4, [STEP_US] * 2, None),  # a token without an event, and nobody knows which
        (3, [STEP_US] * 3, None),  # an event that is no token, and nobody knows which
        (4, [0, 0, 0], None),  # the whole reply in one read
        (6, [0, 0, STEP_US, 0, 0], None),  # in two
        (8, [30] * 7, None),  # replayed: no server is that fast
        (1, [], None),
        (None, [STEP_US] * 3, None),
    ],
)
def test_of_events_that_tell_nothing(tokens: int | None, gaps: list[int], first: int | None) -> None:
    assert pace.first_tokens(tokens, gaps) == first


def test_of_events_that_tell_what_they_carry() -> None:
    assert pace.first_tokens(20, [STEP_US] * 4, carried=(0, 16)) == 16
    assert pace.first_tokens(12, [STEP_US] * 3, carried=(0, 3, 1, 3, 2, 3, 3, 3)) == 3
    assert pace.first_tokens(12, [0, *[STEP_US] * 4], carried=(1, 3, 2, 3, 3, 3)) == 4
    assert pace.first_tokens(16, [STEP_US] * 3, carried=(0, 16)) is None  # three events too many


def test_of_reasoning_that_is_hidden() -> None:
    assert pace.first_tokens(20, [STEP_US] * 4, hidden=15) == 16
    assert pace.first_tokens(20, [STEP_US] * 4, hidden=11) is None
    assert pace.first_tokens(5, [STEP_US] * 4, hidden=3) == 1  # it was shown: there is an event for every token


@given(st.lists(st.integers(1, 9), min_size=2, max_size=40), st.integers(0, 5))
def test_the_tokens_after_the_first_read_are_those_of_the_later_events(carried: list[int], more_at_once: int) -> None:
    """Each event tells its tokens, and the first few come in one read: (last - first) / the others is the pace."""
    at_once = min(more_at_once, len(carried) - 2)
    gaps = [0] * at_once + [STEP_US] * (len(carried) - 1 - at_once)
    told = [part for place, tokens in enumerate(carried) for part in (place, tokens)]
    first = pace.first_tokens(sum(carried), gaps, told)
    in_pieces = at_once > 0 and at_once >= 0.4 * len(gaps) and len(carried) - at_once <= 2  # reads
    assert first == (None if in_pieces else sum(carried[: at_once + 1]))


def test_a_client_that_was_late_once_is_no_proxy() -> None:
    assert pace.first_tokens(32, [STEP_US] * 15 + [4 * STEP_US] + [0] * 15) == 1
    assert pace.first_tokens(32, [0, 4 * STEP_US] * 15 + [STEP_US]) is None
