"""Events that came right after each other though a token takes far longer, as groups, and whether the groups came on
somebody's clock. Pure.

A proxy that lets go of what it has on a timer hides what a token takes: its reads come one period apart, whatever they
bring. A server that is late sends what it has made meanwhile after a longer pause, and one that guesses tokens brings
more of them now and then by chance. On a clock the pause before a group is the same for one event and for two, and how
many come is as even as the steps that made them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from loadgen.rundir.records import RequestTable

# A server that sends a token a step has under one such gap in a thousand (vLLM on an H200), and few make 700 tokens a
# second for one reader; of one whose HTTP process is late (LightLLM 1.2 at 6000 tokens/s) half the gaps are tens of
# microseconds, and itl is then no token's time.
SHORT_US, SHORT_RATIO = 1500, 0.15  # shorter than this, and than this share of the mean gap
# Of the events, those that came behind another in its group: fewer move no percentile that is printed by much. Of the
# groups that come one period after the one before, likewise: those of a late server come after two.
BEHIND_RATIO, SEVERAL_RATIO = 0.03, 0.03
# Of the pauses between groups, those within a tenth of a whole number of periods; a fifth are by chance.
TICK_RATIO, ON_TICK_RATIO = 0.1, 0.9
LONGER_RATIO = 0.1  # of the pauses, those of two periods or more: pauses of any length keep to no clock by chance
# Windows of so many groups that their events, drawn one by one, would vary by this, or of a whole reply. On a clock the
# events of two windows differ by one at most; between so many neighbours, numbers that are drawn differ by less than
# this part of what they should in one run of a hundred.
WINDOW_VARIANCE, LEAST_WINDOWS, EVEN_RATIO = 1.8, 18, 0.35


_CLOCKS: WeakKeyDictionary[RequestTable, float | None] = WeakKeyDictionary()


class Groups(NamedTuple):
    """The groups of all replies but the first and the last of each, which begin and end anywhere: how long after the
    one before each began (n,), how many events it has (n,), and of which reply it is (n,)."""

    pause_us: NDArray[np.int64]
    events: NDArray[np.int64]
    row: NDArray[np.int64]


def short_us(table: RequestTable) -> float:
    """A gap below it is within a group."""
    return min(SHORT_US, SHORT_RATIO * float(table.itl_us.mean())) if len(table.itl_us) else 0.0


def clock_us(table: RequestTable) -> float | None:
    """The period of the clock on which the replies' groups came; None where they did not. It is found once a table."""
    if table not in _CLOCKS:
        _CLOCKS[table] = _clock_us(table)
    return _CLOCKS[table]


def _clock_us(table: RequestTable) -> float | None:
    limit_us, gaps = short_us(table), len(table.itl_us)
    behind = sum(int(np.count_nonzero(part.itl_us < limit_us)) for part in table.blocks())
    if not gaps or behind / gaps < BEHIND_RATIO:
        return None
    parts = list(_found(table, limit_us))
    found = Groups(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    if not len(found.events):
        return None
    period_us = float(np.median(found.pause_us))
    ticks = found.pause_us / period_us
    whole = np.rint(ticks)
    once, on_tick = whole == 1, (np.abs(ticks - whole) <= TICK_RATIO) & (whole >= 1)
    if on_tick.mean() < ON_TICK_RATIO or np.mean(found.events[once] > 1) < SEVERAL_RATIO:
        return None
    longer = on_tick[~once]
    keeps_to_it = len(longer) >= max(LEAST_WINDOWS, LONGER_RATIO * len(once)) and longer.mean() >= ON_TICK_RATIO
    return period_us if keeps_to_it or _are_even(found) else None


def _found(table: RequestTable, limit_us: float) -> Iterator[Groups]:
    before = 0
    for part in table.blocks():
        gaps = len(part.itl_us)
        rows = np.repeat(np.arange(len(part)), np.diff(part.itl_offsets))
        at_us = np.cumsum(part.itl_us, dtype=np.int64)
        begins = np.flatnonzero((part.itl_us >= limit_us) & part.ok[rows]) if gaps else np.empty(0, np.int64)
        inner = np.flatnonzero(rows[begins[1:]] == rows[begins[:-1]])  # a group with one behind it
        inner = inner[1:][inner[1:] - inner[:-1] == 1] if len(inner) else inner  # and one before it
        began, ended = begins[inner], begins[inner + 1]
        yield Groups(at_us[began] - at_us[begins[inner - 1]], ended - began, rows[began] + before)
        before += len(part)


def _are_even(found: Groups) -> bool:
    """Whether neighbouring windows of groups have as many events, more than they would by chance."""
    replies = np.split(found.events, np.flatnonzero(np.diff(found.row)) + 1)
    variance, usual = float(found.events.var()), int(np.median([len(events) for events in replies]))
    if not variance:
        return False
    width = max(2, min(math.ceil(WINDOW_VARIANCE / variance), usual))
    windows = [events[: len(events) // width * width].reshape(-1, width).sum(axis=1) for events in replies]
    apart = np.diff(np.concatenate(windows))
    return len(apart) >= LEAST_WINDOWS and float(np.mean(np.square(apart))) / 2 < EVEN_RATIO * width * variance
