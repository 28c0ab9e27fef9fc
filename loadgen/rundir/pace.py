"""The pace of a reply: how many output tokens came with the first read, and whether the others' pace can be known.

A socket read gets one stamp, so the tokens that came in the same read as the first one are no part of the pace:

    tpot = (last_token - first_token) / (output_tokens - first_tokens)

This is the one definition. On a clean wire the first read brings one token, and it is the usual one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

# What the events tell and what the server counts may part by so much; tpot is wrong by as much at the worst.
AGREE_RATIO = 0.02
# Of the gaps of a reply that are 0, and of its reads those that brought several events. Where both are so many, reads
# say when something between let go of the tokens, not when they were made: a proxy that sends them by two has half of
# its gaps 0, less one. A client that was late once or twice has many more reads of one event.
BENT_RATIO, SEVERAL_RATIO = 0.4, 0.5
FASTEST_US = (
    100  # a gap in the mean: no server makes tokens for one reader faster, so the reply was there before it was sent
)


def agree(tokens: int, counted: int) -> bool:
    """Whether a server's count of tokens and that of its events are about the same."""
    return abs(tokens - counted) <= AGREE_RATIO * tokens


def is_bent(itl_us: Sequence[int]) -> bool:
    """Whether a reply's gaps are not its server's."""
    gaps, zeros = len(itl_us), itl_us.count(0)
    if gaps == 0 or sum(itl_us) < FASTEST_US * gaps:
        return True
    if zeros < BENT_RATIO * gaps:
        return False
    several = sum(after == 0 and before != 0 for before, after in itertools.pairwise((1, *itl_us)))
    return several >= SEVERAL_RATIO * (1 + gaps - zeros)


def first_tokens(
    output_tokens: int | None, itl_us: Sequence[int], carried: Sequence[int] = (), hidden: int = 0
) -> int | None:
    """How many of the output tokens had come with the first read; None where that, or the pace of the others, cannot be
    known. carried: the place of each event that did not carry one token, and how many it carried, in turns. hidden:
    tokens that were made before the first event."""
    gaps = len(itl_us)
    if output_tokens is None or is_bent(itl_us):
        return None
    counted, first = gaps + 1, 1 + sum(1 for _ in itertools.takewhile(lambda gap: gap == 0, itl_us))
    events = first
    for place, tokens in zip(carried[::2], carried[1::2], strict=True):
        counted += tokens - 1
        first += tokens - 1 if place < events else 0
    if carried and not agree(output_tokens, counted) and agree(output_tokens, gaps + 1):
        counted, first = gaps + 1, events  # what the events told was not so
    if not agree(output_tokens, counted):
        if not agree(output_tokens - hidden, counted):
            return None
        first += hidden
    return first if first < output_tokens else None
