"""The largest micro batch that fits, found by trying powers of two: up until one fails, or down until one fits."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from training_probe.results import Attempt

SEARCH_WARMUP_STEPS, SEARCH_STEPS = 2, 3


class Found(msgspec.Struct, frozen=True):
    """micro_batch: the largest that fitted, None if none did; then the last attempt says why."""

    micro_batch: int | None
    attempts: list[Attempt]


def largest(attempt: Callable[[int], Attempt], *, start: int, at_most: int) -> Found:
    """Searches the powers of two up to `at_most`, beginning with the one at or below `start`.

    One that fails in another way than for want of memory ends the search: more of it, or less, would tell nothing new.
    """
    size = floor_power_of_two(min(start, at_most))
    attempts = [attempt(size)]
    if attempts[0].outcome == "ok":
        while attempts[-1].outcome == "ok" and size * 2 <= at_most:
            size *= 2
            attempts.append(attempt(size))
    else:
        while attempts[-1].outcome == "oom" and size > 1:
            size //= 2
            attempts.append(attempt(size))
    return Found(max((tried.micro_batch for tried in attempts if tried.outcome == "ok"), default=None), attempts)


def floor_power_of_two(number: int) -> int:
    """The largest power of two that is not above it, and at least 1."""
    return 1 << max(number, 1).bit_length() - 1
