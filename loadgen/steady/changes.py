"""Whether a server changed its pace during a run: from one moment on (a worker lost), in its beginning (a slow start),
or little by little (a drift). Pure.

The pace is the time of a token of a stream. The run is cut into parts of equal length, no shorter than a life, and each
has one value: the time of the streams in it over their tokens, both as if a reply's tokens came evenly. How many are in
a batch, how long they are, and how many prompts begin in it, move it too; a server that is asked for more is not a
server that changed. So these are fitted beside what may have changed, by least squares. A change is told where it takes
away far more of the squares than chance does in a series whose neighbours are alike (the ratio of variances, with as
many values as an autoregression of order one leaves), and where it is large enough to matter. Thresholds were chosen by
experiment (docs/accuracy.md). Replies that a stall interrupted are left out: stalls are told by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.steady.window import Stamps, spread

MOST_PARTS, LEAST_PARTS = 60, 10
SURE = 45.0  # ratio of variances
ALIKE = 0.2  # of a batch or its contexts: too little to tell the effect
LEAST_SLOWER, LEAST_FASTER, LEAST_DRIFT = 0.1, 0.2, 0.03  # of the pace; a drift's over the whole run
MOST_PROMPTS = 2.0  # times the usual: the first wave of a closed loop would hide a slow start
ENOUGH = 50_000  # requests
LEAST_AFTER = 3  # parts: a last one that is slow is chance
MOST = 5.0  # in logarithms: more is no pace, but parts that nothing else tells apart
DRIFT_LASTS_MIN = 2.0  # minutes: in less, caches that fill and batches that grow pass for a drift
SLOW_START_RATIO = 1 / 3  # of a run: what lasts no longer is its start

Floats = NDArray[np.float64]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """ratio: how long a token took after it, in those of before; of a drift at the end, in those of the begin. at_s:
    when it was; None of a drift, which has per_minute, by what ratio a token took longer from minute to minute."""

    kind: Literal["level_shift", "slow_start", "drift"]
    ratio: float
    at_s: float | None = None
    per_minute: float | None = None


def find(seen: Stamps, stalls: Sequence[tuple[float, float]] = ()) -> Change | None:
    """stalls: when no stream got anything, seconds of the run."""
    if len(seen.sent_s) < 2 * LEAST_PARTS:
        return None
    seen = _thinned(seen)
    streamed = bool((seen.last_s > seen.first_s).any())
    from_s = seen.first_s if streamed else seen.sent_s
    edges_s = _edges_s(seen, from_s)
    if edges_s is None:
        return None
    whole = seen.last_s <= seen.sent_s[-1]  # in the drain the pace is another
    for begin_s, end_s in stalls:
        whole &= (from_s > end_s) | (seen.last_s < begin_s)
    lives_s = seen.last_s - from_s
    held_s = spread(from_s[whole], seen.last_s[whole], lives_s[whole], edges_s)
    tokens = spread(from_s[whole], seen.last_s[whole], np.maximum(seen.tokens - streamed, 1.0)[whole], edges_s)
    in_batch = spread(from_s, seen.last_s, lives_s, edges_s)
    made = spread(from_s, seen.last_s, seen.tokens, edges_s)
    known = (tokens > 0) & (held_s > 0) & (in_batch > 0) & (made > 0)
    if known.sum() < LEAST_PARTS:
        return None
    in_batch = in_batch[known]
    contexts = spread(from_s, seen.last_s, (seen.prompt_tokens + seen.tokens / 2) * lives_s, edges_s)[known] / in_batch
    prompts = np.histogram(seen.first_s, edges_s)[0][known] / made[known]
    usual = max(float(np.median(prompts)), 1e-9)
    columns = [np.ones(len(in_batch)), np.minimum(prompts / usual, MOST_PROMPTS)]
    for values in (in_batch, np.maximum(contexts, 1.0)):
        logs = np.log(values / values.mean())
        if np.ptp(logs) > ALIKE:
            columns += [logs, logs**2]
    return _change(np.log(held_s[known] / tokens[known]), columns, ((edges_s[:-1] + edges_s[1:]) / 2)[known])


def _thinned(seen: Stamps) -> Stamps:
    """Every so many-th request of a run that has more than enough: a pace is a ratio, and so are its batches."""
    every = max(1, -(-len(seen.sent_s) // ENOUGH))
    prompts = seen.prompt_tokens if isinstance(seen.prompt_tokens, float) else seen.prompt_tokens[::every]
    sent_s, first_s, last_s, done_s = (each[::every] for each in (seen.sent_s, seen.first_s, seen.last_s, seen.done_s))
    return Stamps(seen.rows[::every], sent_s, first_s, last_s, done_s, seen.tokens[::every], seen.slots, prompts)


def _edges_s(seen: Stamps, from_s: Floats) -> Floats | None:
    """Of the parts; None where a run is too short to have enough."""
    life_s = float(np.median(seen.last_s - from_s))
    begin_s, end_s = float(from_s.min()), float(seen.sent_s[-1]) - life_s
    parts = MOST_PARTS if life_s <= 0 else min(MOST_PARTS, int((end_s - begin_s) / life_s))
    return np.linspace(begin_s, end_s, parts + 1) if parts >= LEAST_PARTS else None


def _change(pace: Floats, others: list[Floats], middle_s: Floats) -> Change | None:
    n = len(pace)
    minutes = (middle_s - middle_s[0]) / 60
    null, _ = _fit(pace, others)
    rest, drift = _fit(pace, [*others, minutes])
    steps = [_fit(pace, [*others, (np.arange(n) >= at).astype(np.float64)]) for at in range(1, n - LEAST_AFTER + 1)]
    at = 1 + int(np.argmin([float((each**2).sum()) for each, _ in steps]))
    stepped, shift = steps[at - 1]
    lasts_min = float(minutes[-1])
    drifts = lasts_min >= DRIFT_LASTS_MIN and (rest**2).sum() < (stepped**2).sum()
    if drifts and _sure(null, rest) > SURE and abs(drift) * lasts_min > LEAST_DRIFT:
        return Change(kind="drift", ratio=float(np.exp(drift * lasts_min)), per_minute=float(np.expm1(drift)))
    least = LEAST_SLOWER if shift > 0 else LEAST_FASTER
    if _sure(null, stepped) > SURE and least < abs(np.expm1(min(shift, MOST))) < np.expm1(MOST):
        kind: Literal["level_shift", "slow_start"] = (
            "level_shift" if at > SLOW_START_RATIO * n or shift > 0 else "slow_start"
        )
        if kind == "slow_start":  # what else moves the pace is known from the rest alone
            factors, *_ = np.linalg.lstsq(np.column_stack(others)[at:], pace[at:], rcond=None)
            alone = -float(np.median((pace - np.column_stack(others) @ factors)[:at]))
            shift = alone if -MOST < alone < 0 else shift
        return Change(
            kind=kind,
            ratio=float(np.exp(shift)),
            at_s=float((middle_s[at - 1] + middle_s[at]) / 2),
        )
    return None


def _fit(values: Floats, columns: list[Floats]) -> tuple[Floats, float]:
    """What least squares leave, and the factor of the last column."""
    design = np.column_stack(columns)
    factors, *_ = np.linalg.lstsq(design, values, rcond=None)
    return values - design @ factors, float(factors[-1])


def _sure(without: Floats, rest: Floats) -> float:
    """The ratio of variances, for as many independent values as neighbours that are alike leave."""
    left = float((rest**2).sum())
    if left <= 0:
        return np.inf
    alike = min(0.95, max(0.0, float((rest[1:] * rest[:-1]).sum()) / left))
    freedom = max(1.0, (len(rest) - 4) * (1 - alike) / (1 + alike))
    return (float((without**2).sum()) / left - 1) * freedom
