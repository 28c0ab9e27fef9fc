"""Did the server keep up with requests that arrive whether or not others have ended? Pure: stamps in, verdict out.

Only the order of arrivals and of completions is looked at. The i-th completion minus the i-th arrival is how long a
request would have stayed had they left in order; times the rate of arrivals it is the backlog that arrival i meets. It
is exact for all arrivals that as many completions answer, so a run that was killed is judged up to there, and neither
the start, in which a server fills up, nor the drain after the last arrival moves it.

Two things must be seen before a server is said to fall behind, since each alone also happens by chance in a server that
keeps up: 1. the backlog has grown beyond what a busy but stable queue holds; 2. the server answered fewer requests a
second than the load has in the long run. For that rate the law's own is taken where there is one (Poisson arrivals
scatter, their law does not), and likewise replies count by their tokens in mean replies. With n arrivals and v the sum
of the squared coefficients of variation of gaps and lengths, a queue at its limit wanders by about sqrt(v n), and one
at 0.9 of it holds about 5 v: hence the thresholds, chosen by the experiment that docs/accuracy.md shows.

So are looked at first the queue, requests that wait for their first token, and then all that are in flight. A server
that takes every request into its batch has no queue and needs many lives to fill the batch: what is in flight must
therefore go on growing, over several lives.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

LEAST = 20  # requests: of fewer nothing is said
STABLE = 6.0  # times v: backlog beyond which a queue at 0.9 of its limit hardly ever is
STABLE_ALONE = 15.0  # times v: likewise, where no law says the long-run rate
WANDERING, WANDERING_SHORT = 2.0, 0.9  # times sqrt(v n): what a queue at its limit wanders by; at the least
SHORTFALL = 0.055  # of the arrivals: what a server at 1.1 of its limit clearly leaves undone in a short run
GROWN = 0.4  # times sqrt(v n): growth, at the least
NEAR = 1.2  # times sqrt(v n): growth that may be chance
FILLS_LIVES = 8  # the time of arrivals in lives, for a growing batch to be a growing backlog
COVERS_LIVES = 2  # likewise, for a load to have met a server that was full of it
SURE = 4.0  # standard errors by which lives must differ
MOST_VARIATION = 10.0  # of the gaps, squared: traces have hours without requests
UNMET = "arrivals ended before the replies to the first of them did"
UNSETTLED = "arrivals ended before the server's batch had settled"
T_9 = 2.262  # Student's t, 97.5 %, of ten batches

Floats = NDArray[np.float64]
Word = Literal["kept_up", "near_limit", "fell_behind", "unknown"]


class Flow(NamedTuple):
    """Requests in the order in which they arrived, seconds of the run, (n,) each. first_s and done_s: of first tokens
    and of ends; infinite while a request is under way. tokens: of each reply, to weigh it; None where nothing
    is known of any. rate_per_s and mean_tokens: of the laws that they were drawn by, None where there is none."""

    arrived_s: Floats
    first_s: Floats
    done_s: Floats
    tokens: Floats | None = None
    rate_per_s: float | None = None
    mean_tokens: float | None = None


class KeepingUp(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen. why: of `unknown`, one clause. from_s, to_s: the arrivals looked at, or, where the server fell
    behind, from when it did. offered, served: requests that arrived and that were answered a second, and the 95 %
    interval of the latter; growth: their difference. backlog: by how many requests it grew."""

    word: Word
    why: str = ""
    from_s: float | None = None
    to_s: float | None = None
    offered_per_s: float | None = None
    served_per_s: float | None = None
    served_ci: tuple[float, float] | None = None
    growth_per_s: float | None = None
    backlog: float | None = None


class _Seen(NamedTuple):
    """What became of the arrivals from `first` to before `last`: when each step (a first token, or a completion) came,
    ascending, and how long each of all arrivals would have waited for it, had they gone in order."""

    flow: Flow
    steps_s: Floats
    stay_s: Floats
    order: NDArray[np.int64]  # the requests in the order of their steps
    first: int
    last: int
    around: int  # arrivals that are averaged

    def mean(self, at: int) -> float:
        """How long the arrivals around one waited."""
        first = min(max(at - self.around // 2, 0), self.last - self.around)
        return float(self.stay_s[first : first + self.around].mean())

    @property
    def ends(self) -> tuple[int, int]:
        """The arrivals between which growth is seen."""
        return self.first + self.around // 2, self.last - 1 - self.around // 2

    @property
    def n(self) -> int:
        return self.last - self.first

    @property
    def per_s(self) -> float:
        arrived_s = self.flow.arrived_s
        return (self.n - 1) / max(float(arrived_s[self.last - 1] - arrived_s[self.first]), 1e-9)

    @property
    def backlog(self) -> float:
        """By how many requests it grew."""
        first, last = self.ends
        return self.per_s * (self.mean(last) - self.mean(first))


def judge(flow: Flow, unit: str = "requests") -> KeepingUp:
    """flow: at least the requests that were answered, however they ended. unit: what they are, for the words."""
    answered = int(np.isfinite(flow.done_s).sum())
    if answered < LEAST:
        return KeepingUp(word="unknown", why=f"fewer than {LEAST} {unit} were answered")
    lasted_s = float(flow.arrived_s[answered - 1] - flow.arrived_s[0])
    if lasted_s <= 0 or flow.first_s.min() >= flow.arrived_s[answered - 1]:  # a burst, whatever its law is called
        return KeepingUp(word="unknown", why=f"all {unit} arrived at once")
    queue, replies = _seen(flow, flow.first_s, lasted_s), _seen(flow, flow.done_s, lasted_s)
    if _is_behind(queue, queued=True):
        return _with_rates(queue, "fell_behind")
    lives = lasted_s / max(1e-9, _early_s(flow, flow.done_s, lasted_s))
    if _is_behind(replies, queued=False):
        word, why = _filling(replies, lives)
    elif lives < COVERS_LIVES:
        word, why = "unknown", UNMET
    else:
        wanders = NEAR * math.sqrt(_variation(flow) * replies.n)
        word, why = ("near_limit" if max(queue.backlog, replies.backlog) > wanders else "kept_up"), ""
        if word == "near_limit" and queue.backlog <= wanders and lives < FILLS_LIVES:
            word, why = "unknown", UNSETTLED
    return KeepingUp(word=word, why=why) if word == "unknown" else _with_rates(replies, word)


def _early_s(flow: Flow, step_s: Floats, lasted_s: float) -> float:
    """How long the earliest arrivals took to a step."""
    early = max(8, int(np.searchsorted(flow.arrived_s, flow.arrived_s[0] + lasted_s / 8)))
    return float(np.quantile((step_s - flow.arrived_s)[:early], 0.9, method="lower"))


def _seen(flow: Flow, step_s: Floats, lasted_s: float) -> _Seen:
    """Without the arrivals of the time that the earliest took, in which an empty server fills."""
    order = np.argsort(step_s, kind="stable")
    last = int(np.isfinite(step_s).sum())
    steps_s = step_s[order[:last]]
    filled = int(np.searchsorted(flow.arrived_s[:last], flow.arrived_s[0] + _early_s(flow, step_s, lasted_s)))
    first = max(min(8, last // 4), last // 30, min(filled, last // 4))
    around = min(max(5, (last - first) // 20), last - first)
    return _Seen(flow, steps_s, steps_s - flow.arrived_s[:last], order, first, last, around)


def _is_behind(seen: _Seen, *, queued: bool) -> bool:
    variation = _variation(seen.flow)
    wanders = math.sqrt(variation * seen.n)
    beyond_chance = min(WANDERING * wanders, SHORTFALL * seen.n)
    if seen.flow.rate_per_s is None:
        return seen.backlog > max(STABLE_ALONE * variation, beyond_chance)
    if seen.backlog <= max(STABLE * variation, GROWN * wanders):
        return False
    return _undone(seen, queued) > max(WANDERING_SHORT * wanders, beyond_chance)


def _variation(flow: Flow) -> float:
    """The sum of the squared coefficients of variation of gaps and lengths."""
    gaps_s = np.diff(flow.arrived_s)
    arrivals = min(MOST_VARIATION, float(gaps_s.var() / gaps_s.mean() ** 2))
    tokens = flow.tokens
    lengths = 0.0 if tokens is None else min(2.0, float(tokens.var() / max(tokens.mean(), 1e-9) ** 2))
    return max(arrivals, 0.05) + lengths


def _undone(seen: _Seen, queued: bool) -> float:
    """By how many requests what was answered is short of what the law has in that time. queued: requests leave in
    order; where they do not, short replies leave first, and their tokens are too few."""
    flow = seen.flow
    first, last = seen.ends
    seconds = float(flow.arrived_s[last] - flow.arrived_s[first]) + seen.mean(last) - seen.mean(first)
    served: float = last - first
    if flow.mean_tokens and flow.tokens is not None:
        by_tokens = float(flow.tokens[seen.order[first + 1 : last + 1]].sum()) / flow.mean_tokens
        served = by_tokens if queued else max(served, by_tokens)
    assert flow.rate_per_s is not None
    return flow.rate_per_s * seconds - served


def _filling(seen: _Seen, lives: float) -> tuple[Word, str]:
    """Whether a batch that grew is one that fills, or a backlog. lives: how many the arrivals lasted."""
    lives_s = seen.flow.done_s - seen.flow.arrived_s
    quarter = max(1, seen.n // 4)
    early, late = (
        part[np.isfinite(part)]
        for part in (lives_s[seen.first : seen.first + quarter], lives_s[seen.last - quarter : seen.last])
    )
    growth_s = float(late.mean() - early.mean()) if len(early) and len(late) else 0.0
    error_s = math.sqrt(early.var() / max(1, len(early)) + late.var() / max(1, len(late)))
    backlog = seen.backlog
    doubled = backlog > seen.n  # fewer than half of the arrivals were answered meanwhile: no batch fills like that
    if growth_s <= SURE * error_s or (lives < FILLS_LIVES and not doubled):
        return "unknown", UNSETTLED
    grew_late = seen.per_s * (seen.mean(seen.ends[1]) - seen.mean(seen.first + seen.n // 2))
    if grew_late < backlog / 4 and backlog > 2 * math.sqrt(_variation(seen.flow) * seen.n) and not doubled:
        return "near_limit", ""
    return "fell_behind", ""


def _with_rates(seen: _Seen, word: Word) -> KeepingUp:
    """The verdict with its rates: of a server that fell behind, from when it did."""
    arrived_s, (first, last) = seen.flow.arrived_s, seen.ends
    onset, begin = _onset(seen) if word == "fell_behind" else (first, first)
    offered_s = float(arrived_s[last] - arrived_s[begin])
    stayed_s = seen.mean(last) - seen.mean(begin)
    if offered_s <= 0 or offered_s + stayed_s <= 0:
        return KeepingUp(word=word)
    offered, served = (last - begin) / offered_s, (last - begin) / (offered_s + stayed_s)
    return KeepingUp(
        word=word,
        from_s=float(arrived_s[onset]),
        to_s=float(arrived_s[seen.last - 1]),
        offered_per_s=offered,
        served_per_s=served,
        served_ci=_interval(seen.steps_s[begin : last + 1], served),
        growth_per_s=offered - served,
        backlog=(offered - served) * offered_s,
    )


def _onset(seen: _Seen) -> tuple[int, int]:
    """The arrivals from which on the backlog was never again as small as a stable one may be, nor a tenth of what it
    came to: there the server surely does what it can."""
    walked = np.concatenate(([0.0], np.cumsum(seen.stay_s[seen.first : seen.last])))
    smooth = (walked[seen.around :] - walked[: -seen.around]) / seen.around
    first, last = seen.ends
    low, high = seen.mean(first), seen.mean(last)
    grown_s = (high - low) / 10
    stable_s = min(grown_s, STABLE * _variation(seen.flow) / seen.per_s)
    onset, begin = (
        first + (int(small[-1]) if len(small := np.flatnonzero(smooth <= low + little_s)) else 0)
        for little_s in (stable_s, grown_s)
    )
    latest = max(first, last - LEAST)
    return min(onset, latest), min(begin, latest)


def _interval(steps_s: Floats, served: float) -> tuple[float, float] | None:
    """The interval of the rate of completions, by the durations of ten batches of them."""
    edges = np.linspace(0, len(steps_s) - 1, 11).astype(np.int64)
    seconds = np.diff(steps_s[edges]) / np.maximum(np.diff(edges), 1)
    if len(steps_s) < LEAST or seconds.mean() <= 0:
        return None
    reach = T_9 * float(seconds.std(ddof=1)) / math.sqrt(10) / float(seconds.mean())
    return served * (1 - min(reach, 1.0)), served * (1 + reach)
