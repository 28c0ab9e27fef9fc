"""Length laws: by their distribution, within their bounds, and the same for every worker."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from scipy import stats

from loadgen.load.lengths import Lengths, WorkloadError, parse, residual

N = 20_000
REJECTED_ONE_IN_1000 = 1.95 / math.sqrt(N)  # of Kolmogorov's statistic


def distance(text: str, cdf: object) -> float:
    """Kolmogorov-Smirnov: the largest difference between drawn lengths and a law, each length k standing for the
    interval up to k + 1/2."""
    drawn = np.sort(Lengths(parse(text), 3, "input").first(N))
    values, counts = np.unique(drawn, return_counts=True)
    return float(np.abs(np.cumsum(counts) / N - cdf(values + 0.5)).max())  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "cdf"),
    [
        ("uniform:10:2000", lambda x: (x - 9.5) / 1991),
        ("normal:2000:300", stats.norm(2000, 300).cdf),
        ("normal:500:400:1:900", stats.truncnorm(-499.5 / 400, 400.5 / 400, 500, 400).cdf),
        ("normal:100:50:250:900", stats.truncnorm(149.5 / 50, 800.5 / 50, 100, 50).cdf),
        ("lognormal:800:0.7", lambda x: stats.lognorm(0.7, scale=800).cdf(x)),
        (
            "lognormal:800:1.2:100:4000",
            lambda x: (
                (stats.lognorm(1.2, scale=800).cdf(x) - stats.lognorm(1.2, scale=800).cdf(99.5))
                / (stats.lognorm(1.2, scale=800).cdf(4000.5) - stats.lognorm(1.2, scale=800).cdf(99.5))
            ),
        ),
    ],
)
def test_drawn_lengths_follow_their_law(text: str, cdf: object) -> None:
    assert distance(text, cdf) < REJECTED_ONE_IN_1000


def test_another_law_is_told_apart() -> None:
    """What the test above can see: a median 3 % off."""
    assert distance("lognormal:824:0.7", stats.lognorm(0.7, scale=800).cdf) > REJECTED_ONE_IN_1000


laws = st.one_of(
    st.builds("uniform:{0[0]}:{0[1]}".format, st.tuples(st.integers(1, 500), st.integers(500, 900))),
    st.builds("normal:{}:{}:5:900".format, st.integers(1, 900), st.integers(0, 900)),
    st.builds("lognormal:{}:{}:5:900".format, st.integers(5, 900), st.floats(0.01, 3).map("{:.3f}".format)),
)


@given(laws, st.integers(0, 99), st.integers(0, 9000))
@settings(deadline=None, max_examples=50)
def test_lengths_hang_on_seed_and_number_only(text: str, seed: int, number: int) -> None:
    try:
        law = parse(text)
    except WorkloadError:  # its bounds may be beyond all of it
        reject()
    lengths = Lengths(law, seed, "output")
    one = lengths.at(number)
    assert lengths.at(0) == Lengths(law, seed, "output").first(1)[0]
    assert one == lengths.at(number) == lengths.first(number + 1)[number]
    assert law.most is not None and law.least <= one <= law.most
    assert lengths.most(number + 1) == lengths.first(number + 1).max()
    assert str(law) == text


def test_prompts_and_replies_are_drawn_apart() -> None:
    law = parse("uniform:1:100000")
    assert Lengths(law, 1, "input").at(0) != Lengths(law, 1, "output").at(0)
    assert Lengths(law, 1, "input").at(0) != Lengths(law, 2, "input").at(0)


def test_a_deviation_of_zero_is_a_fixed_length() -> None:
    assert set(Lengths(parse("normal:70:0"), 0, "input").first(50).tolist()) == {70}
    assert set(Lengths(parse("lognormal:70:0:1:90"), 0, "input").first(50).tolist()) == {70}


def test_pairs_of_a_file_stay_pairs(tmp_path: Path) -> None:
    path = tmp_path / "pairs"
    path.write_text("10 1\n20,2\n\n 30\t3\n")
    law = parse(f"file:{path}")
    prompts, replies = (Lengths(law, 5, stream).first(300).tolist() for stream in ("input", "output"))  # type: ignore[arg-type]
    assert set(zip(prompts, replies, strict=True)) == {(10, 1), (20, 2), (30, 3)}
    assert Lengths(law, 5, "input").most(None) == 30


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("10 1\n10\n", "line 2 is not a pair"),
        ("10 1\n0 4\n", "line 2 is not a pair"),
        ("a b", "line 1 is not a pair"),
        ("1 2 3", "line 1 is not a pair"),
        ("5 9999999999", "line 1 is not a pair"),
        ("\n\n", "holds no lengths"),
        (b"\xff\xfd", "not text"),
        (b"\xff\xfea", "it begins as UTF-16"),
        (None, "cannot read the lengths"),
    ],
)
def test_bad_files(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    path = tmp_path / "pairs"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(WorkloadError, match=message):
        Lengths(parse(f"file:{path}"), 0, "input")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("words", "is not understood; use a number, uniform:MIN:MAX"),
        ("uniform:1", "is not understood"),
        ("uniform:1:2:3", "is not understood"),
        ("normal:5:1:2", "is not understood"),
        ("zipf:1:2", "is not understood"),
        ("file:", "is not understood"),
        ("\x1b[31m", r"'\\x1b\[31m' is not understood"),
        ("uniform:9:3", "has a minimum above its maximum"),
        ("lognormal:9:1:30:10", "has a minimum above its maximum"),
        ("uniform:0:3", "has 0 as a number of tokens"),
        ("uniform:1.5:3", "has 1.5 as a number of tokens"),
        ("uniform:1:9999999999", "as a number of tokens"),
        ("normal:100:-5", "no negative standard deviation"),
        ("normal:0:5", "needs a mean above zero"),
        ("lognormal:100:-1", "no negative sigma"),
        ("normal:100:1:5000:6000", "bounds too far from its middle"),
        ("normal:500:0:1:400", "bounds too far from its middle"),
    ],
)
def test_laws_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        parse(text)


@pytest.mark.parametrize("slots", [1, 2, 8, 55, 64, 89, 256])
def test_what_is_left_of_equal_replies_lies_evenly(slots: int) -> None:
    left = np.sort(residual([1000] * slots))
    evenly = 1000 * (np.arange(slots) + 0.5) / slots
    assert left.min() >= 1 and left.max() <= 1000 and abs(left - evenly).max() <= 1 + 1500 / slots


def test_what_is_left_of_replies_is_half_of_the_one_that_is_met() -> None:
    """Renewal theory: E[L^2] / 2 E[L] in the mean, and as many end soon as in any other time: 1 / E[L] of the slots."""
    tokens = Lengths(parse("uniform:64:448"), 5, "output").first(4096)
    left = np.array(residual(tokens.tolist()))
    assert left.mean() == pytest.approx((tokens.astype(float) ** 2).mean() / 2 / tokens.mean(), rel=0.02)
    assert np.mean(left <= 32) == pytest.approx(32 / tokens.mean(), rel=0.1)
