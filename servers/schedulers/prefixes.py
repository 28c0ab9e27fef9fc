"""What requests have in common: prompt and reply of a request as chains of pieces that can be compared without tokens.

A position is known by (chain, offset): `chain` stands for the key of its piece and for all pieces before it with their
lengths, `offset` for where in the piece it is. Two requests begin with the same tokens up to a position exactly if that
position is the same in both. A chain is a hash of some 61 bits: among a million of them two are equal by accident in
one run of four million.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from servers.schedulers import Sequence

Position = tuple[int, int]

_unshared: Callable[[], int] = itertools.count().__next__


def chains(sequence: Sequence) -> Iterator[tuple[int, int]]:
    """(chain, tokens) of each piece of the prompt and the reply. What `segments` leave of both is a piece that nobody
    shares; its key is new with every call. Raises ValueError where the segments are longer than both."""
    chain = before = 0
    left = sequence.prompt + sequence.output
    for key, tokens in sequence.segments:
        if tokens > 0:
            chain = _chain(chain, before, key)
            before = tokens
            left -= tokens
            yield chain, tokens
    if left < 0:
        raise ValueError(
            f"the segments hold {-left} tokens more than the prompt and the reply, which have {sequence.prompt} and "
            f"{sequence.output}"
        )
    if left > 0:
        yield hash((chain, before, _unshared())), left


def _chain(chain: int, before: int, key: int) -> int:
    # in halves, since Python's hash of one number gives -1 and -2 the same, and those 2^61 - 1 apart
    return hash((chain, before, key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF))
