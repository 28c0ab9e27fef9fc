"""Sequences of different lengths in micro batches: padded to the longest of each, or packed into rows of one length.
Pure.

Lengths are drawn by the laws that loads have (loadgen.load.lengths), with one seed: every run of a cell, on every
machine, has the same ones, and differs from the others in the ids of its tokens alone. A sequence is cut at the cell's
`seq_len`, as trainers cut theirs. Packing is best-fit decreasing over all sequences that are drawn, at least 1000 of
them; whole sequences go into rows, of which a cell takes as many as it needs, in an order of the same seed.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from loadgen.load.lengths import Lengths, parse

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SEED = 0
LEAST_POOL = 1000  # sequences that are packed together at least, as in TRL
LEAST_TOKENS = 2  # of a sequence: a token is predicted from those before it
MOST_ROWS = 1 << 20  # of a step

Row = tuple[int, ...]  # lengths of the sequences in it
MicroBatch = tuple[Row, ...]


class Extent(NamedTuple):
    """passes: positions that pass through the model for each token of the data. attended: how many positions each of
    them attends to, the full square of a sequence counted."""

    passes: float
    attended: float


@dataclass(frozen=True)
class StepBatch:
    """The sequences of a step. replicas: of each its micro batches. packed_to: tokens of a row; None where each row is
    one sequence, padded to the longest of its micro batch."""

    replicas: tuple[tuple[MicroBatch, ...], ...]
    packed_to: int | None

    def _micro_batches(self) -> Iterator[MicroBatch]:
        return (batch for replica in self.replicas for batch in replica)

    def _width(self, batch: MicroBatch) -> int:
        return self.packed_to or max(row[0] for row in batch)

    @property
    def tokens(self) -> int:
        """Without padding."""
        return sum(sum(row) for batch in self._micro_batches() for row in batch)

    @property
    def positions(self) -> int:
        """With padding."""
        return sum(len(batch) * self._width(batch) for batch in self._micro_batches())

    @property
    def longest(self) -> int:
        """Positions of the longest row, padding included."""
        return max(map(self._width, self._micro_batches()))

    def needed(self, virtual: int) -> Extent:
        """What the sequences need, each with so many virtual tokens before it."""
        lengths = [length + virtual for batch in self._micro_batches() for row in batch for length in row]
        return Extent(sum(lengths) / self.tokens, sum(length**2 for length in lengths) / sum(lengths))

    def computed(self, virtual: int, *, by_sequence: bool) -> Extent:
        """What is computed of them. by_sequence: whether attention of a packed row leaves out pairs of tokens of
        different sequences."""
        positions = squares = 0
        for batch in self._micro_batches():
            width = self._width(batch) + virtual
            for row in batch:
                positions += width
                parts = [*row, width - sum(row)] if self.packed_to and by_sequence else [width]
                squares += sum(part**2 for part in parts)
        return Extent(positions / self.tokens, squares / positions)


@functools.lru_cache(maxsize=64)
def draw(text: str, seq_len: int, packing: bool, replicas: int, micro_batches: int, rows: int) -> StepBatch:
    """The sequences of a step: replicas, micro batches of each, rows of each. Raises WorkloadError."""
    lengths, count = Lengths(parse(text), SEED, "sequence"), replicas * micro_batches * rows
    if packing:
        filled = _shuffled(packed(_pool(lengths, seq_len, count), seq_len))[:count]
    else:
        filled = [(length,) for length in _cut(lengths.first(count), seq_len).tolist()]
    batches = [tuple(filled[start : start + rows]) for start in range(0, count, rows)]
    each = [tuple(batches[start : start + micro_batches]) for start in range(0, len(batches), micro_batches)]
    return StepBatch(tuple(each), seq_len if packing else None)


def packed(lengths: Iterable[int], size: int) -> list[Row]:
    """Rows of at most `size` tokens: the longest sequence first, each into the fullest row that has room for it."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for length in sorted(lengths, reverse=True):
        at = bisect.bisect_left(rooms, (length, 0))
        if at < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row = size, len(rows)
            rows.append([])
        rows[row].append(length)
        if room > length:
            bisect.insort(rooms, (room - length, row))
    return [tuple(row) for row in rows]


def _pool(lengths: Lengths, seq_len: int, rows: int) -> list[int]:
    """So many of the first sequences that they fill the rows."""
    count = max(LEAST_POOL, rows)
    while (drawn := _cut(lengths.first(count), seq_len)).sum() < rows * seq_len:
        count *= 2
    whole: list[int] = drawn.tolist()
    return whole


def _cut(lengths: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    import numpy as np

    return np.clip(lengths, min(LEAST_TOKENS, seq_len), seq_len)


def _shuffled(rows: Sequence[Row]) -> list[Row]:
    import numpy as np

    return [rows[at] for at in np.random.default_rng(SEED).permutation(len(rows))]
