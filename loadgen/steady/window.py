"""Which part of a run is its steady state, chosen by a rule that looks at precision and never at the value. Pure.

The window begins after two lives of the requests that met an empty server (the first of each slot of a closed loop, or
the first eighth of the arrivals; the life of nine in ten of them), since the first wave of a closed loop leaves a
second one behind it; of sessions not before the usual one has ended, since until then fewer go on; and not before the
point from which the mean of the token rate, or that of the waits for a first token, is known best (MSER, White 1997:
the least variance of the mean over what is left). Slots that a warm-up handed over are full from the first measured
request on. It ends when the last request was sent, or about when the last session began, where the drain begins. There
is no window where this leaves less than a third of the time, or less than two lives, or few requests.

Rates count the requests that ended in the window, and the tokens that came in it: those of a reply as if they came
evenly from its first to its last, but where the end of the window cuts it, since in the drain they come faster.
Latencies are those of the requests that were sent in it; of whole replies, of those that were sent a life before its
end, since the rest ends in the drain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.steady import blocks
from loadgen.steady.blocks import Bounds

BINS = 50  # in which the token rate and the waits are looked at
FILL_LIVES = 2.0  # until a second wave of requests has mixed
LEAST_LIVES, LEAST_RATIO, LEAST_REQUESTS = 2.0, 1 / 3, 40
MOST_REACH_RATIO = 0.15  # of a value, that its interval may lie from it
MOST_DROPPED_RATIO = 0.5  # of what MSER looks at: a later part is too short to be steadier by more than luck

Floats = NDArray[np.float64]


class Stamps(NamedTuple):
    """Requests that ended ok, in the order in which they were sent, seconds of the run, (n,) each. rows: of the
    table. tokens: of each reply. slots: of a closed loop; None where requests arrive by themselves. prompt_tokens:
    of each request, 0 where nobody knows. session_s: how long the usual session lasts; 0 where there are none.
    filled_s: when the first slot was taken over from a warm-up that had filled all of them; None: the load met an
    empty server. mean_tokens: of the law that replies were drawn by; None where there is none."""

    rows: NDArray[np.int64]
    sent_s: Floats
    first_s: Floats
    last_s: Floats
    done_s: Floats
    tokens: Floats
    slots: int | None = None
    prompt_tokens: Floats | float = 0.0
    session_s: float = 0.0
    filled_s: float | None = None
    mean_tokens: float | None = None


class Estimate(msgspec.Struct, frozen=True):
    """A value and its 95 % interval, by so many blocks (0: by none); None where too little was measured."""

    value: float
    low: float | None = None
    high: float | None = None
    blocks: int = 0

    @property
    def bounds(self) -> Bounds | None:
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def is_vague(self) -> bool:
        reach = 0.0 if self.low is None or self.high is None else max(self.high - self.value, self.value - self.low)
        return reach > MOST_REACH_RATIO * self.value


class TimeSpan(msgspec.Struct, frozen=True):
    """From when to when, seconds of the run. blocks: into how many it is cut for its intervals; 0: it has none.
    tail_moments: as `blocks` counts them."""

    from_s: float
    to_s: float
    blocks: int = blocks.MOST
    tail_moments: float = math.inf

    def edges_s(self) -> Floats:
        """Of its blocks."""
        return np.linspace(self.from_s, self.to_s, max(1, self.blocks) + 1)


def find(seen: Stamps, not_before_s: float = 0.0) -> tuple[TimeSpan | None, str]:
    """The window, or why there is none, one clause."""
    n = len(seen.sent_s)
    if n < LEAST_REQUESTS:
        return None, f"fewer than {LEAST_REQUESTS} requests ended ok"
    begin_s, end_s = float(seen.sent_s[0]) if seen.filled_s is None else seen.filled_s, float(seen.sent_s[-1])
    if end_s <= begin_s or seen.first_s.min() >= end_s:
        return None, "all requests were sent at once"
    sends_s, session_s = end_s - begin_s, seen.session_s
    end_s -= session_s  # about when the last of them began
    lives_s = seen.done_s - seen.sent_s
    life_s, fills_s = float(np.median(lives_s)), 0.0
    if seen.filled_s is None:
        alone = seen.slots or max(8, int(np.searchsorted(seen.sent_s, begin_s + (end_s - begin_s) / 8)))
        fills_s = max(FILL_LIVES * float(np.quantile(lives_s[:alone], 0.9)), session_s)
    lasts_s = max(fills_s / (1 - LEAST_RATIO), fills_s + LEAST_LIVES * life_s)
    if lasts_s > end_s - begin_s:
        requests = math.ceil(n * (lasts_s + session_s) / sends_s / 10) * 10
        return None, f"the run is too short: about {requests:,} requests would do"
    start_s = max(not_before_s, begin_s + fills_s, steadied_s(seen, begin_s, end_s))
    sent = int(np.count_nonzero((seen.sent_s >= start_s) & (seen.sent_s <= end_s)))
    if end_s - start_s < max(LEAST_LIVES * life_s, LEAST_RATIO * (end_s - begin_s)) or sent < LEAST_REQUESTS:
        return None, "it was still changing, or too few requests were sent after its start"
    return _cut(seen, start_s, end_s, life_s), ""


def _cut(seen: Stamps, from_s: float, to_s: float, life_s: float) -> TimeSpan:
    count, tail = (
        each(to_s - from_s, life_s, closed=seen.slots is not None, session_s=seen.session_s)
        for each in (blocks.count, blocks.tail_moments)
    )
    return TimeSpan(from_s, to_s, int(count), tail)


def of_whole_replies(seen: Stamps, span: TimeSpan) -> TimeSpan:
    """The part of the window whose requests have their replies in it, by the life of nine in ten."""
    lives_s = (seen.done_s - seen.sent_s)[seen.sent_s >= span.from_s]
    to_s = max(span.from_s, span.to_s - float(np.quantile(lives_s, 0.9)))
    return _cut(seen, span.from_s, to_s, float(np.median(lives_s)))


def steadied_s(seen: Stamps, begin_s: float, end_s: float) -> float:
    """From when on the means of the token rate and of the waits are known best."""
    edges_s = np.linspace(begin_s, end_s, BINS + 1)
    by_rate = float(edges_s[_mser(spread(seen.first_s, seen.last_s, seen.tokens, edges_s))])
    waits_s, group = seen.first_s - seen.sent_s, max(1, len(seen.sent_s) // BINS)
    whole = len(waits_s) // group * group
    by_wait = float(seen.sent_s[group * _mser(waits_s[:whole].reshape(-1, group).mean(axis=1))])
    return max(by_rate, by_wait)


def _mser(values: Floats) -> int:
    """From which value on the mean of the rest has the least standard error."""
    left = np.arange(len(values), 0, -1)
    values = values - values.mean()
    sums, squares = np.cumsum(values[::-1])[::-1], np.cumsum(values[::-1] ** 2)[::-1]
    errors = (squares - sums**2 / left) / left**2
    return int(np.argmin(errors[: max(1, int(MOST_DROPPED_RATIO * len(values)))]))


def spread(begin_s: Floats, end_s: Floats, weights: Floats, edges_s: Floats) -> Floats:
    """How much of the weights (n,), each spread evenly from its begin to its end, lies between neighbouring edges
    (k + 1,): (k,)."""
    lengths_s = np.maximum(end_s - begin_s, 1e-9)
    rates = weights / lengths_s

    def until(at_s: Floats) -> Floats:
        order = np.argsort(at_s, kind="stable")  # quick, as requests are about in order
        sums = np.concatenate(([0.0], np.cumsum(rates[order])))
        moments = np.concatenate(([0.0], np.cumsum((rates * at_s)[order])))
        reached = np.searchsorted(at_s[order], edges_s, side="right")
        area: Floats = sums[reached] * edges_s - moments[reached]
        return area

    between = np.diff(until(begin_s) - until(begin_s + lengths_s))
    rounded = 1e-14 * float(rates.sum()) * float(np.abs(edges_s).max()) + 1e-12 * float(weights.sum())
    return np.where(between > rounded, between, 0.0)  # sums that nearly cancel leave something where nothing lies


def rate(at_s: Floats, span: TimeSpan) -> Estimate:
    """How many of the instants (n,) fall into a second of the window."""
    edges_s = span.edges_s()
    per_s: Floats = np.histogram(at_s, edges_s)[0] / np.diff(edges_s)
    return _estimate(float(per_s.mean()), per_s)


def law_rate(seen: Stamps, last_s: Floats, tokens: Floats, span: TimeSpan) -> Estimate:
    """The same of requests of a closed loop, as the law of their lengths has them. last_s and tokens: of the replies,
    cut at the end of the window.

    How many end in a short window hangs on the lengths that were drawn, and far more on them than on the server. What
    it gives in tokens does not, and so that is counted in replies of the mean length, as far as the time of a request
    goes with its tokens: none of it where the server gave a reply at once."""
    ended = rate(seen.done_s, span)
    if seen.slots is None or seen.session_s or not seen.mean_tokens:
        return ended
    edges_s = span.edges_s()
    sent = (seen.sent_s >= span.from_s) & (seen.sent_s <= span.to_s)
    by_tokens = float((seen.last_s - seen.first_s)[sent].sum() / max(1e-9, (seen.done_s - seen.sent_s)[sent].sum()))
    counted = np.histogram(seen.done_s, edges_s)[0]
    in_replies = spread(seen.first_s, last_s, tokens, edges_s) / seen.mean_tokens
    per_s = (counted + by_tokens * (in_replies - counted)) / np.diff(edges_s)
    return _estimate(float(per_s.mean()), per_s)


def spread_rate(
    begin_s: Floats, end_s: Floats, weights: Floats, span: TimeSpan, at_begin: Floats | None = None
) -> Estimate:
    """How much of the weights (n,), each spread evenly from its begin to its end, falls into a second of the window;
    together with others (n,) that fall at the begins."""
    edges_s = span.edges_s()
    within = spread(begin_s, end_s, weights, edges_s)
    if at_begin is not None:
        within += np.histogram(begin_s, edges_s, weights=at_begin)[0]
    per_s = within / np.diff(edges_s)
    return _estimate(float(per_s.mean()), per_s)


def of_sent(
    values: Floats, sent_s: Floats, span: TimeSpan, statistics: Mapping[str, float | None]
) -> dict[str, Estimate]:
    """Of values (n,) of requests that were sent in the window, NaN where one has none; empty without any. statistics:
    of percentiles their shares, of the mean None."""
    known = ~np.isnan(values) & (sent_s >= span.from_s) & (sent_s <= span.to_s)
    inside = values[known]
    if not len(inside):
        return {}
    ascending, cut = np.sort(inside), max(1, span.blocks)
    block = np.searchsorted(span.edges_s()[1:-1], sent_s[known], side="right")
    counts = np.bincount(block, minlength=cut).astype(np.float64)
    found = {}
    for name, share in statistics.items():
        value = float(inside.mean() if share is None else _quantile(ascending, share))
        if not span.blocks or counts.min() < 2:
            found[name] = Estimate(value)
        elif share is None:
            found[name] = _estimate(value, np.bincount(block, weights=inside, minlength=cut) / counts)
        else:
            within = np.bincount(block[inside <= value], minlength=cut).astype(np.float64)
            between = blocks.shares(share, counts, within) if blocks.reaches(share, span.tail_moments) else None
            found[name] = Estimate(value)
            if between is not None:
                low, high = (_quantile(ascending, each) for each in between)
                found[name] = Estimate(value, low, high, span.blocks)
    return found


def bounded(found: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Of a closed loop, without the intervals that reach too far to tell where the value is."""
    return {name: Estimate(each.value) if each.is_vague else each for name, each in found.items()}


def _quantile(ascending: Floats, share: float) -> float:
    at = share * (len(ascending) - 1)
    low = math.floor(at)
    return float(ascending[low] + (at - low) * (ascending[math.ceil(at)] - ascending[low]))


def _estimate(value: float, each: Floats) -> Estimate:
    """each: of the blocks."""
    reach = blocks.mean_reach(each)
    return Estimate(value) if reach is None else Estimate(value, max(0.0, value - reach), value + reach, len(each))
