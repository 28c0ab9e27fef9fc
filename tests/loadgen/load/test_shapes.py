"""What requests ask for and share: groups of prompts that begin alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.config import Config, ConfigError
from loadgen.load.lengths import Lengths, WorkloadError, fixed, parse
from loadgen.load.prompts import RandomText, TokenIds, hashed
from loadgen.load.shapes import DrawnShapes, Prefix, parse_prefix
from tests.loadgen.load.loads import load


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 9), st.integers(0, 2))
@settings(deadline=None, max_examples=30)
def test_shared_tokens_are_what_an_earlier_prompt_began_with(groups: int, tokens: int, seed: int, zipf: int) -> None:
    described = load(prefix=f"{groups}:{tokens}:zipf={zipf}", input_tokens=tokens + 20, output_tokens=1, seed=seed)
    source = TokenIds(described, 1 << 31)
    prompts = [source.prompt("measured", number).token_ids or [] for number in range(60)]
    for number, prompt in enumerate(prompts):
        assert len(prompt) == tokens + 20
        shared = max((common(prompt, other) for other in prompts[:number]), default=0)
        assert source.own(number).shared_tokens == shared
    assert common(source.prompt("warmup", 0).token_ids or [], prompts[0]) == 0


def common(one: list[int], other: list[int]) -> int:
    """Tokens that both begin with."""
    return next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))


def test_shapes_do_not_hang_on_the_order_in_which_they_are_asked() -> None:
    described = load(prefix="9:16:zipf=1", input_tokens="uniform:20:90", seed=4)
    ahead, backward = described.shapes(), described.shapes()
    numbers = range(0, 9000, 7)
    assert [ahead.shape(n) for n in numbers] == [backward.shape(n) for n in reversed(numbers)][::-1]


def test_groups_are_as_frequent_as_zipf_says() -> None:
    shapes = load(prefix="50:16:zipf=1.1", seed=2).shapes()
    groups = np.bincount([shapes.shape(number).segments[0][0] for number in range(20_000)], minlength=50)
    expected = np.arange(1, 51) ** -1.1
    expected *= 20_000 / expected.sum()
    chi_square = float(((groups - expected) ** 2 / expected).sum())
    assert chi_square < 85.4  # the 0.1 % point of 49 degrees of freedom


def test_text_prompts_share_words() -> None:
    source = RandomText(load(prefix="1:30", input_tokens=50, output_tokens=1))
    first, second = ((source.prompt("measured", number).text or "").split() for number in range(2))
    assert len(first) == len(second) == 50
    assert first[:30] == second[:30] and first[30:] != second[30:]


def test_hashed_tokens_are_even_and_begin_alike() -> None:
    drawn = hashed(1, [(0, 7, 100_000)], 1000, 1100)
    counts = np.bincount(drawn - 1000, minlength=100)
    assert ((counts - 1000) ** 2 / 1000).sum() < 148.2  # chi-square, 99 degrees of freedom, 0.1 %
    assert hashed(1, [(0, 7, 10), (0, 8, 5)], 1000, 1100).tolist()[:10] == drawn.tolist()[:10]
    for other in ([(0, 8, 50)], [(1, 7, 50)], [(0, 7 + (1 << 40), 50)]):
        assert hashed(1, other, 0, 1 << 30).tolist() != hashed(1, [(0, 7, 50)], 0, 1 << 30).tolist()
    assert (
        abs(np.corrcoef(hashed(1, [(0, 1, 10_000)], 0, 1 << 30), hashed(1, [(0, 2, 10_000)], 0, 1 << 30))[0, 1]) < 0.04
    )


@pytest.mark.parametrize("text", ["5", "0:5", "5:0", "5:5:zipf=", "5:5:6", "a:b", "9999999:5", "5:5:zipf=101"])
def test_prefixes_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--prefix '"):
        parse_prefix(text)
    with pytest.raises(ConfigError):
        Config(prefix=text)


def test_a_prefix_longer_than_a_prompt() -> None:
    with pytest.raises(WorkloadError, match="--prefix 2:64 is no shorter than the 64 tokens of request 0; lengthen"):
        DrawnShapes(fixed(64), fixed(1), Prefix(2, 64), 0).shape(0)
    with pytest.raises(ConfigError, match="--prefix 2:64 is no shorter than the shortest prompt, of 64 tokens; leng"):
        Config(prefix="2:64", input_tokens=64)


def test_the_shortest_prompt_that_is_drawn_must_be_longer_than_the_prefix() -> None:
    """Those that are drawn, the warm-up's too, and not those that the law could have given besides."""
    law, requests = "lognormal:500:1", {"requests": 300, "warmup": 0}
    shortest = int(Lengths(parse(law), 3, "input").first(300).min())
    shapes = load(seed=3, input_tokens=law, prefix=f"2:{shortest - 1}", **requests).shapes()
    assert min(shapes.shape(number).prompt_tokens for number in range(300)) == shortest > 2
    with pytest.raises(ConfigError, match=f"no shorter than the shortest prompt, of {shortest} tokens"):
        load(seed=3, input_tokens=law, prefix=f"2:{shortest}", **requests)
    with pytest.raises(ConfigError, match="no shorter than the shortest prompt, of "):
        load(seed=3, input_tokens=law, prefix=f"2:{shortest - 1}", requests=300, warmup=100_000)
    with pytest.raises(ConfigError, match="no shorter than the shortest prompt, of 40 tokens"):
        load(input_tokens="lognormal:500:1:40:4000", prefix="2:40", concurrency=2, duration=5.0)


def test_a_warm_up_longer_than_its_trace_begins_again(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("Timestamp,Request tokens,Response tokens\n0,30,20\n1,40,20\n")
    source = TokenIds(load(trace=tmp_path / "t.csv"), 1000)
    warmup = [source.prompt("warmup", number).token_ids or [] for number in range(5)]
    assert [len(prompt) for prompt in warmup] == [30, 40, 30, 40, 30]
    assert common(warmup[0], warmup[2]) < 5
