"""How long prompts and replies are, how many turns a session has, how long people think: laws, drawn by seed and number
before the clock starts. Pure.

A length depends on nothing but (seed, stream, number), so any worker can draw any request, and a shorter run is the
beginning of a longer one. Between bounds the normal and the lognormal law are drawn again, not cut off: no length
gathers at a bound.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NoReturn

import msgspec

from backends.exit_codes import UserError
from backends.foreign_files import read_named
from backends.untrusted import escaped, printable

if TYPE_CHECKING:  # numpy is loaded to draw: options are read without it
    import numpy as np
    from numpy.typing import NDArray

MOST_TOKENS = (1 << 31) - 1  # servers count a request's tokens in 32 bits
BLOCK = 4096  # lengths that are drawn at once
GOLDEN = (math.sqrt(5) - 1) / 2  # whose multiples lie evenly between whole numbers
FAR = 8.0  # standard deviations from the middle, where nothing of a law is left

Stream = Literal["input", "output", "turns", "think", "first", "batch", "thinking", "sequence"]
_STREAMS = {
    "input": 0x1E91, "output": 0x1E92, "turns": 0x1E94, "think": 0x1E95, "first": 0x1E99, "batch": 0x1E98,
    "thinking": 0x1E9A, "sequence": 0x1E9C,
    "file": 0x1E93,  # a file's pairs stay pairs: both draw the same line
}  # fmt: skip
_FORMS = "a number, uniform:MIN:MAX, normal:MEAN:SD[:MIN:MAX] or lognormal:MEDIAN:SIGMA[:MIN:MAX]"


class Quantity(msgspec.Struct, frozen=True):
    """What a law draws, in whole parts of its unit: at least `least` of them."""

    name: str
    unit: str
    parts: int = 1
    least: int = 1
    has_files: bool = False


LENGTH = Quantity("length", "tokens", has_files=True)
TURNS = Quantity("number of turns", "turns")
THINK_TIME = Quantity("think time", "seconds", parts=1000, least=0)
BATCH = Quantity("batch size", "texts")


class WorkloadError(UserError, ValueError):
    """A load that cannot be sent: a law that makes no sense, a file or a tokenizer that cannot be used. One sentence,
    the line of a file numbered."""


class Law(msgspec.Struct, frozen=True, kw_only=True):
    """kind: fixed or uniform draw whole numbers from `least` to `most`; normal has mean and standard deviation `a` and
    `b`, lognormal the median `a` and the standard deviation `b` of the logarithm, rounded to whole tokens; file
    draws lines of `path`. most: None where the law has no upper bound. text: as it was typed."""

    kind: str
    text: str
    least: int = 1
    most: int | None = None
    a: float = 0.0
    b: float = 0.0
    path: str | None = None

    def __str__(self) -> str:
        return self.text


def fixed(tokens: int) -> Law:
    """Every length the same."""
    return Law(kind="fixed", text=str(tokens), least=tokens, most=tokens)


def parse(text: str | int | float, quantity: Quantity = LENGTH) -> Law:
    """A law from its text, as an option has it; its numbers are in parts of the quantity's unit. Raises
    WorkloadError."""
    text = f"{text:.12g}" if isinstance(text, float) else str(text)
    kind, *words = text.split(":")
    if kind == "file" and any(words) and quantity.has_files:
        return Law(kind="file", text=text, path=text.removeprefix("file:"))
    numbers = [_number(word, text, quantity) for word in (words if words else [kind])]
    if not words:
        least = _parts(numbers[0], text, quantity)
        return Law(kind="fixed", text=text, least=least, most=least)
    bounds = [_parts(number, text, quantity) for number in (numbers if kind == "uniform" else numbers[2:])]
    if kind == "uniform" and len(numbers) == 2:
        law = Law(kind="uniform", text=text, least=bounds[0], most=bounds[1])
    elif kind in ("normal", "lognormal") and len(numbers) in (2, 4):
        least, most = bounds or (quantity.least, None)
        width = numbers[1] * (quantity.parts if kind == "normal" else 1)
        law = Law(kind=kind, text=text, least=least, most=most, a=numbers[0] * quantity.parts, b=width)
        if not (0 < law.a <= MOST_TOKENS and 0 <= law.b <= MOST_TOKENS):
            middle, spread = ("mean", "standard deviation") if kind == "normal" else ("median", "sigma")
            raise WorkloadError(
                f"the {quantity.name} '{escaped(text)}' needs a {middle} above zero and no negative {spread}."
            )
    else:
        _not_understood(text, quantity)
    if law.most is not None and law.least > law.most:
        raise WorkloadError(f"the {quantity.name} '{escaped(text)}' has a minimum above its maximum; swap them.")
    if kind in ("normal", "lognormal") and not _within_reach(law):
        raise WorkloadError(f"the {quantity.name} '{escaped(text)}' has its bounds too far from its middle; move them.")
    return law


def _number(word: str, text: str, quantity: Quantity) -> float:
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,2})?", word):
        _not_understood(text, quantity)
    return float(word)


def _parts(number: float, text: str, quantity: Quantity) -> int:
    parts, most = number * quantity.parts, MOST_TOKENS // quantity.parts
    whole = quantity.parts > 1 or number.is_integer()
    if not (whole and quantity.least <= number <= most):
        what = "whole number" if quantity.parts == 1 else "number"
        raise WorkloadError(
            f"the {quantity.name} '{escaped(text)}' has {number:g} as a number of {quantity.unit}; it must be a {what} "
            f"from {quantity.least} to {most}."
        )
    return round(parts)


def _not_understood(text: str, quantity: Quantity) -> NoReturn:
    forms = _FORMS.replace(" or ", ", ") + " or file:PATH" if quantity.has_files else _FORMS
    raise WorkloadError(f"the {quantity.name} '{escaped(text)}' is not understood; use {forms}.")


class Lengths:
    """What a law gives for each request of a run, or for each session. Raises WorkloadError where its file cannot be
    used."""

    def __init__(self, law: Law, seed: int, stream: Stream) -> None:
        self.law = law
        self._seed = seed
        self._stream = _STREAMS["file" if law.kind == "file" else stream]
        self._values = () if law.path is None else _column(law.path, stream)
        self._block = -1
        self._drawn: list[int] = []

    def at(self, number: int) -> int:
        """Tokens of request `number`."""
        if self.law.kind == "fixed":
            return self.law.least
        block, within = divmod(number, BLOCK)
        if block != self._block:
            self._drawn, self._block = self._draw(block).tolist(), block
        return self._drawn[within]

    def first(self, requests: int) -> NDArray[np.int64]:
        """Tokens of the first `requests` requests; shape (requests,)."""
        import numpy as np

        if self.law.kind == "fixed":
            return np.full(requests, self.law.least)
        blocks = [self._draw(block) for block in range(-(-requests // BLOCK))]
        return np.concatenate([np.empty(0, np.int64), *blocks])[:requests]

    def most(self, requests: int | None) -> int | None:
        """The longest of the first `requests`, or of all that the law can give; None where it has no bound."""
        if requests is not None:
            return int(self.first(requests).max(initial=0))
        return max(self._values) if self._values else self.law.most

    def least(self, requests: int | None) -> int:
        """The shortest of the first `requests`, or of all that the law can give."""
        if requests is not None:
            return int(self.first(requests).min(initial=MOST_TOKENS))
        return min(self._values) if self._values else self.law.least

    def _draw(self, block: int) -> NDArray[np.int64]:
        import numpy as np

        rng = np.random.default_rng((self._seed, self._stream, block))
        law = self.law
        if law.kind == "uniform":
            assert law.most is not None
            return rng.integers(law.least, law.most, BLOCK, endpoint=True)
        if law.kind == "file":
            return np.asarray(self._values, np.int64)[rng.integers(0, len(self._values), BLOCK)]
        return _between(law, rng.random(BLOCK))


def residual(tokens: Sequence[int]) -> list[int]:
    """What is left of the replies that a closed loop is amid at some moment of its steady state, of replies of so many
    tokens: a long one is met more often, and anywhere. Where each slot begins with one of these, replies end from the
    first on as evenly as later."""
    ends, slots = list(itertools.accumulate(tokens)), len(tokens)
    left = []
    for slot in range(slots):
        at = (slot + (slot * GOLDEN + 0.5) % 1) * ends[-1] / slots  # in the replies, put one after the other
        left.append(max(1, math.ceil(ends[bisect.bisect_right(ends, at)] - at)))
    return left


def _within_reach(law: Law) -> bool:
    return _deviations(law, law.least) < FAR and _deviations(law, law.most or MOST_TOKENS) > -FAR


def _deviations(law: Law, tokens: float) -> float:
    """Where a length stands in a normal or lognormal law, in standard deviations from the middle."""
    if law.b == 0:
        return 0.0 if tokens == law.a else math.copysign(math.inf, tokens - law.a)
    if law.kind == "lognormal" and tokens <= 0:
        return -math.inf
    return math.log(tokens / law.a) / law.b if law.kind == "lognormal" else (tokens - law.a) / law.b


def _below(deviations: float) -> float:
    """The share of a standard normal law below so many deviations."""
    return math.erfc(-deviations / math.sqrt(2)) / 2


def _between(law: Law, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Normal and lognormal lengths from uniform numbers, by the inverse of the law's distribution between its bounds
    (half a token beyond them, since lengths are rounded)."""
    from statistics import NormalDist  # a hundredth of a second to load

    import numpy as np

    most = law.most or MOST_TOKENS
    if law.b == 0:
        return np.full(len(uniform), round(law.a))
    below, above = _deviations(law, law.least - 0.5), _deviations(law, most + 0.5)
    mirror = -1 if below > 0 else 1  # the upper tail's mirror image has more digits
    low, high = sorted((_below(mirror * below), _below(mirror * above)))
    # 0 and 1 are infinitely far out, and have no inverse
    shares = np.clip(low + uniform * (high - low), sys.float_info.min, 1 - sys.float_info.epsilon / 2)
    deviations = mirror * np.array([*map(NormalDist().inv_cdf, shares.tolist())])
    drawn = law.a * np.exp(law.b * deviations) if law.kind == "lognormal" else law.a + law.b * deviations
    lengths: NDArray[np.int64] = np.clip(np.rint(drawn), law.least, most).astype(np.int64)
    return lengths


def _column(path: str, stream: Stream) -> tuple[int, ...]:
    """What the stream takes of each line: a sequence is a prompt and its reply, or one number. Raises
    WorkloadError."""
    prompts, replies = _read(path, stream == "sequence")
    if stream == "sequence":
        return tuple(map(sum, zip(prompts, replies, strict=True)))
    return replies if stream == "output" else prompts


@functools.lru_cache(maxsize=2)
def _read(path: str, or_one: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt and reply lengths of a file: two whole numbers a line, parted by a blank, a comma or a tab. or_one: or
    one, with a reply of 0."""
    try:
        lines = read_named(path).decode().splitlines()
    except OSError as error:
        raise WorkloadError(
            f"cannot read the lengths in {printable(path)}: {error.strerror}; name another file."
        ) from None
    except UnicodeDecodeError:
        raise WorkloadError(f"the lengths in {printable(path)} are not text; give one pair a line.") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        values = [int(word) for word in words if word.isascii() and word.isdecimal() and len(word) < 11]
        counted = len(words) == len(values) and len(words) in ((1, 2) if or_one else (2,))
        if not counted or not all(1 <= value <= MOST_TOKENS for value in values):
            what = "a length or a pair of lengths" if or_one else "a pair of lengths; give prompt and reply tokens"
            raise WorkloadError(f"{printable(path)} line {number} is not {what}, such as 512 128.")
        pairs.append((values[0], values[1] if len(values) > 1 else 0))
    if not pairs:
        raise WorkloadError(f"{printable(path)} holds no lengths; give one pair a line, such as 512 128.")
    prompts, replies = zip(*pairs, strict=True)
    return prompts, replies
