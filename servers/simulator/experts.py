"""How the tokens of a step spread over a mixture's experts: which share of them chooses each, and how many of the
experts a step reaches, whose weights it reads.

Each token chooses `active` different experts. Where routing is uneven, popularity follows Zipf's law, so steep that the
busiest expert has `imbalance` times the mean load.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

HALVINGS = 60  # of an interval, until no float lies within


def chances(popularity: Sequence[float], active: float) -> tuple[float, ...]:
    """That a token chooses each of these experts; the sum is `active`. An expert is chosen with 1 - exp(-c popularity),
    as if by the first of many draws that give `active` different ones, on average."""
    experts = len(popularity)
    if min(popularity) == max(popularity) or active >= experts:
        return (min(1.0, active / experts),) * experts

    def chosen(steepness: float) -> list[float]:
        return [-math.expm1(-steepness * each) for each in popularity]

    most = 1.0
    while sum(chosen(most)) < active:
        most *= 2
    return tuple(chosen(_where(lambda steepness: sum(chosen(steepness)) >= active, most)))


@functools.cache
def uneven(experts: int, active: int, imbalance: float) -> tuple[float, ...]:
    """The same for a mixture whose busiest expert has `imbalance` times the mean load, from 1 (even) to
    `most_imbalance`, where all tokens choose the same."""
    if imbalance == 1:
        return chances([1.0] * experts, active)
    if imbalance >= most_imbalance(experts, active):
        return (1.0,) * active + (0.0,) * (experts - active)

    def ranked(exponent: float) -> tuple[float, ...]:
        return chances([(rank + 1) ** -exponent for rank in range(experts)], active)

    wanted = imbalance * active / experts
    return ranked(_where(lambda exponent: ranked(exponent)[0] >= wanted, 16.0))


def most_imbalance(experts: int, active: int) -> float:
    """Where every token chooses the same expert first."""
    return experts / active


def reached(chances: Sequence[float], tokens: float) -> float:
    """How many of the experts so many tokens choose, on average."""
    if chances[0] == chances[-1]:
        return float(len(chances) * (1 - (1 - chances[0]) ** tokens))
    return float(sum([1 - (1 - each) ** tokens for each in chances]))


def tiles(chances: Sequence[float], tokens: float, rows: float) -> float:
    """How many tiles of so many rows the experts' tokens fill, on average."""
    return float(sum([(1 - (1 - each) ** tokens) * math.ceil(tokens * each / rows) for each in chances]))


def _where(holds: Callable[[float], bool], most: float) -> float:
    """The least number up to `most` from which on it holds."""
    low, high = 0.0, most
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
