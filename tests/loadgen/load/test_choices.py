"""What is drawn of each request beside its lengths: by its number alone, in the shares that were asked for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load.choices import Cancels, parse_adapters, parse_priorities

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


def test_adapters_are_drawn_in_proportion_to_their_shares() -> None:
    drawn = parse_adapters("a:0.5,hub/b:v2:0.3,base:0.2").drawn(3)
    counts = Counter(drawn.at(number) for number in range(REQUESTS))
    for name, share in (("a", 0.5), ("hub/b:v2", 0.3), ("", 0.2)):
        assert abs(counts[name] / REQUESTS - share) < 4 * np.sqrt(share * (1 - share) / REQUESTS)
    assert counts.total() == REQUESTS and len(counts) == 3


def test_zipf_gives_the_k_th_adapter_in_proportion_to_a_power_of_k() -> None:
    adapters = parse_adapters("zipf=1:4")
    assert adapters.by_server and adapters.weights == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    counts = Counter(adapters.drawn(0).at(number) for number in range(REQUESTS))
    assert counts["lora-1"] / counts["lora-4"] == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize(
    "text",
    ["", "a", "a:", ":1", "a:0", "a:-1", "a:1,a:1", "a:1,,b:1", "zipf=1", "zipf=1:0", "zipf=x:2", "a:1e9", "a:nan"],
)
def test_what_is_no_choice_of_adapters_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="--adapters"):
        parse_adapters(text)


def test_priorities_are_drawn_in_proportion_to_their_shares_and_apart_from_adapters() -> None:
    drawn, adapters = parse_priorities("0:0.5,-3:0.3,10:0.2").drawn(3), parse_adapters("a:0.5,b:0.3,c:0.2").drawn(3)
    counts = Counter(drawn.at(number) for number in range(REQUESTS))
    for priority, share in ((0, 0.5), (-3, 0.3), (10, 0.2)):
        assert abs(counts[priority] / REQUESTS - share) < 4 * np.sqrt(share * (1 - share) / REQUESTS)
    both = sum(drawn.at(number) == 0 and adapters.at(number) == "a" for number in range(REQUESTS))
    assert abs(both / REQUESTS - 0.25) < 0.02


@pytest.mark.parametrize(
    "text", ["", "1", "a:1", "1:0", "1:1,1:1", "1.5:1", ",".join(f"{each}:1" for each in range(21))]
)
def test_what_is_no_choice_of_priorities_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="--priority"):
        parse_priorities(text)
