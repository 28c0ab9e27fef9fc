"""95 % intervals of what one run measured, by blocks of its busy periods. Pure.

Requests that were under way together are alike, so a run holds about as many independent moments as lives fit into it,
not as many as it has requests. It is cut by time into up to ten blocks, each long enough to hang little on the one
before it: two lives of a closed loop, whose requests are always the same many, and three where they arrive by
themselves, since a queue remembers longer; of sessions also most of one's time. Where more blocks fit, they are longer
too, but for closed loops. Where too few fit, there is no interval: a burst is one moment.

Of a mean, Student's t over the blocks' means. Of a percentile, the same over the shares of the blocks' values that lie
at or under it, turned back into values (Woodruff 1952): none where that reaches beyond the largest value, or where less
than a few independent values, or moments, lie beyond the percentile. How often these hold: docs/accuracy.md.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

MOST = 10
LIVES_CLOSED, LEAST_CLOSED = 2.0, 3  # lives a block, and blocks
LIVES, LEAST = 3.0, 4
SESSIONS, LEAST_SESSIONS = 0.75, 3  # sessions a block: who is in a conversation now was so a while ago
GROWS, GROWS_SESSIONS = 0.75, 0.5  # blocks more for one that fits more: in a longer run they are longer too
MOMENTS_BEYOND = 1.5  # of arrivals, independent moments beyond a percentile, at the least
BEYOND = 5.0  # independent values beyond a percentile, at the least
FLOOR = 0.5  # of the variance that independent values would have: blocks that are alike by chance
# Student's t, 97.5 %, of 1 to 30 degrees of freedom; beyond, the normal distribution's is at most 4 % too small.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL_975 = 1.96

Floats = NDArray[np.float64]
Bounds = tuple[float, float]


def t_975(freedom: float) -> float:
    """Between whole degrees of freedom on a straight line, so the interval is too wide rather than too narrow."""
    return NORMAL_975 if freedom > len(T_975) else float(np.interp(freedom, range(1, len(T_975) + 1), T_975))


def count(lasts_s: float, life_s: float, *, closed: bool, session_s: float = 0.0) -> int:
    """Into how many blocks that time is cut; 0 where there are too few. life_s: of the usual request; session_s: of the
    usual session, where requests are turns of some."""
    found = moments(lasts_s, life_s, closed=closed, session_s=session_s)
    least, grows = (LEAST_CLOSED, 1.0) if closed else (LEAST, GROWS)
    if SESSIONS * session_s > life_s * LIVES:
        least, grows = LEAST_SESSIONS, GROWS_SESSIONS
    return int(min(MOST, least + grows * (found - least))) if lasts_s > 0 and found >= least else 0


def moments(lasts_s: float, life_s: float, *, closed: bool, session_s: float = 0.0) -> float:
    """How many independent ones that time holds."""
    each_s = max(life_s * (LIVES_CLOSED if closed else LIVES), SESSIONS * session_s)
    return lasts_s / each_s if each_s > 0 else math.inf


def tail_moments(lasts_s: float, life_s: float, *, closed: bool, session_s: float = 0.0) -> float:
    """The same where they decide on tails. A closed loop is as busy throughout: there requests do."""
    return math.inf if closed else moments(lasts_s, life_s, closed=closed, session_s=session_s)


def reaches(share: float, tail: float) -> bool:
    """Whether so many moments are enough for an interval of the percentile `share`, whatever was measured in them: a
    tail is a few busy ones, and those of a run that had none by chance pass for all."""
    return tail * min(share, 1 - share) >= MOMENTS_BEYOND


def mean_reach(blocks: Floats) -> float | None:
    """Half of the interval of the mean of which each block (b,) shows one; None of too few."""
    if len(blocks) < LEAST_CLOSED:
        return None
    return t_975(len(blocks) - 1) * float(blocks.std(ddof=1)) / math.sqrt(len(blocks))


def shares(share: float, counts: Floats, within: Floats) -> Bounds | None:
    """Between which shares of all values the percentile `share` lies. counts and within: of each block (b,) its values,
    and those of them that are at or under the percentile."""
    b, n = len(counts), float(counts.sum())
    if b < LEAST_CLOSED or n < 1:
        return None
    apart = (within - within.sum() / n * counts) * (b / n)
    variance, independent = float(apart.var(ddof=1)) / b, share * (1 - share) / n
    moments = share * (1 - share) / max(variance, independent)  # as many independent values say as much
    widest = t_975(b - 1) * math.sqrt(max(variance, independent))
    if widest > min(share, 1 - share) - 1 / n or moments * min(share, 1 - share) < BEYOND:
        return None
    reach = max(t_975(b - 1) * math.sqrt(variance), NORMAL_975 * math.sqrt(FLOOR * independent))
    return share - reach, share + reach


def of_percentile(ascending: Floats, share: float, counts: Floats, within: Floats) -> Bounds | None:
    """The same as values, of which there are (n,)."""
    between = shares(share, counts, within)
    if between is None:
        return None
    low, high = np.quantile(ascending, between)
    return float(low), float(high)


def wilson(share: float, count: float, z: float) -> tuple[float, float]:
    """The interval of a share that was seen in `count` trials (Wilson, 1927); z: normal quantile of its level."""
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return centre - half, centre + half
