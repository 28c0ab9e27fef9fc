"""What is drawn of each request beside its lengths: by its number alone, in the shares that were asked for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load.choices import Cancels

REQUESTS = 20_000


def test_the_asked_share_of_requests_is_given_up_at_any_token_but_the_last() -> None:
    cancels = Cancels(0.05, seed=1)
    tokens = [token for number in range(REQUESTS) if (token := cancels.token(number, 101)) is not None]
    assert abs(len(tokens) / REQUESTS - 0.05) < 4 * np.sqrt(0.05 * 0.95 / REQUESTS)
    assert min(tokens) == 1 and max(tokens) == 100
    assert abs(np.mean(tokens) - 50.5) < 4 * 29 / np.sqrt(len(tokens))


@given(numbers=st.lists(st.integers(0, 3 * 4096), min_size=1, max_size=30), seed=st.integers(0, 9))
def test_a_request_is_given_up_at_the_same_token_whoever_asks_and_in_whatever_order(
    numbers: list[int], seed: int
) -> None:
    asked = Cancels(0.5, seed)
    assert [asked.token(number, 50) for number in numbers] == [Cancels(0.5, seed).token(n, 50) for n in numbers]


def test_a_reply_of_one_token_is_never_given_up() -> None:
    assert all(Cancels(0.99, 0).token(number, 1) is None for number in range(100))
