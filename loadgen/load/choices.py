"""What a client decides of each request beside its lengths: at which token it gives the reply up, which adapter of the
model it asks for, and with which priority. Pure.

As lengths are, it is drawn by the seed and the request's number alone.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from backends.untrusted import escaped

if TYPE_CHECKING:  # numpy is loaded to draw: options are read without it
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
BLOCK = 4096  # requests that are drawn at once
_CANCELS, _ADAPTERS, _PRIORITIES = 0x1E96, 0x1E97, 0x1E9A  # among the streams of `lengths`
MOST_ADAPTERS, MOST_ZIPF = 10_000, 100.0
MOST_PRIORITIES = 20
BASE = "base"  # in --adapters: the model without one


class _Drawn:
    """Numbers evenly from 0 to 1, `columns` of them for each request."""

    def __init__(self, seed: int, stream: int, columns: int) -> None:
        self._seed, self._stream, self._columns = seed, stream, columns
        self._block = -1
        self._rows: NDArray[np.float64]

    def at(self, number: int) -> list[float]:
        import numpy as np

        block, within = divmod(number, BLOCK)
        if block != self._block:
            self._rows = np.random.default_rng((self._seed, self._stream, block)).random((BLOCK, self._columns))
            self._block = block
        row: list[float] = self._rows[within].tolist()
        return row


class Cancels:
    """Which requests the client gives up, and when."""

    def __init__(self, ratio: float, seed: int) -> None:
        self._ratio = ratio
        self._drawn = _Drawn(seed, _CANCELS, 2)

    def token(self, number: int, output_tokens: int) -> int | None:
        """The token after which it gives that reply of so many up, any but the last; None: it reads it to its end."""
        chosen, place = self._drawn.at(number)
        return 1 + int(place * (output_tokens - 1)) if chosen < self._ratio and output_tokens > 1 else None


class Adapters(msgspec.Struct, frozen=True):
    """The adapters that requests ask for, in proportion to their weights; BASE: for none. by_server: the names stand
    for the first ones that the server lists, as many as there are."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    by_server: bool = False

    @property
    def own(self) -> tuple[str, ...]:
        """Those that a server must have."""
        return tuple(name for name in self.names if name != BASE)

    def drawn(self, seed: int) -> WeightedChoice[str]:
        """By a request's number, or a session's; empty for the model itself."""
        return WeightedChoice(["" if name == BASE else name for name in self.names], self.weights, seed, _ADAPTERS)


class Priorities(msgspec.Struct, frozen=True):
    """The priorities that requests ask for, in proportion to their weights."""

    values: tuple[int, ...]
    weights: tuple[float, ...]

    def drawn(self, seed: int) -> WeightedChoice[int]:
        return WeightedChoice(self.values, self.weights, seed, _PRIORITIES)


class WeightedChoice(Generic[T]):
    """One of `values` for each request, or session, in proportion to their weights."""

    def __init__(self, values: Sequence[T], weights: Sequence[float], seed: int, stream: int) -> None:
        self._values = values
        self._below = list(itertools.accumulate(weights))
        self._drawn = _Drawn(seed, stream, 1)

    def at(self, number: int) -> T:
        (place,) = self._drawn.at(number)
        return self._values[min(bisect.bisect_right(self._below, place * self._below[-1]), len(self._values) - 1)]


def parse_adapters(text: str) -> Adapters:
    """'NAME:SHARE,NAME:SHARE,...' or 'zipf=A:N'. Raises ValueError with one sentence."""
    if found := re.fullmatch(r"zipf=(\d+(?:\.\d*)?|\.\d+):(\d{1,6})", text):
        power, count = float(found[1]), int(found[2])
        if power <= MOST_ZIPF and 1 <= count <= MOST_ADAPTERS:
            ranks = range(1, count + 1)
            return Adapters(tuple(f"lora-{rank}" for rank in ranks), tuple(rank**-power for rank in ranks), True)
        raise ValueError(f"--adapters '{text}' needs 1 to {MOST_ADAPTERS} adapters, and A of at most {MOST_ZIPF:g}.")
    shares = None if text.startswith("zipf=") else _shares(text)
    if shares is None:
        raise ValueError(
            f"--adapters '{escaped(text)}' is not understood; use NAME:SHARE,NAME:SHARE,... with shares above 0 "
            f"({BASE}: the model itself), or zipf=A:N."
        )
    names, weights = zip(*shares, strict=True)
    if len(set(names)) < len(names) or len(names) > MOST_ADAPTERS:
        raise ValueError(f"--adapters names an adapter twice, or over {MOST_ADAPTERS}; name each once.")
    return Adapters(names, weights)


def parse_priorities(text: str) -> Priorities:
    """'PRIORITY:SHARE,PRIORITY:SHARE,...'. Raises ValueError with one sentence."""
    shares = _shares(text)
    if shares is None or not all(re.fullmatch(r"-?\d{1,9}", name) for name, _ in shares):
        raise ValueError(
            f"--priority '{escaped(text)}' is not understood; use PRIORITY:SHARE,PRIORITY:SHARE,..., whole numbers "
            "with shares above 0, as in 0:0.8,10:0.2."
        )
    values, weights = tuple(int(name) for name, _ in shares), tuple(share for _, share in shares)
    if len(set(values)) < len(values) or len(values) > MOST_PRIORITIES:
        raise ValueError(f"--priority names a priority twice, or over {MOST_PRIORITIES}; name each once.")
    return Priorities(values, weights)


def _shares(text: str) -> list[tuple[str, float]] | None:
    """Names with their shares; None for what is no such list."""
    shares = []
    for part in text.split(","):
        name, _, share = part.strip().rpartition(":")
        if not name or not re.fullmatch(r"\d{1,9}(\.\d{1,9})?|\.\d{1,9}", share) or not float(share):
            return None
        shares.append((name, float(share)))
    return shares
