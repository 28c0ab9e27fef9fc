"""The points of curves, for figures and pages alike: which of many are kept, and what a run gives over time. Pure.

It must never hide an extreme: of very many points some are left out, the smallest and the largest never.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from loadgen.report import metrics
from loadgen.report.metrics import Convention, Distribution
from loadgen.rundir.records import RequestTable

MAX_STEPS = 2000  # of a CDF: a figure 600 pixels high cannot show more
MOST_BINS = 120  # of a rate
MOST_BUCKETS = 700  # of points: as many as a panel has columns of pixels, each with its lowest and its highest point
MOST_OTHERS = 4000  # points beside the extremes of their bucket

Values = NDArray[np.float64]


def cdf(sample: Distribution, steps: int = MAX_STEPS) -> tuple[Values, Values]:
    """Corners of the step function: x (m,) in milliseconds, ascending, and the share of values <= x (m,), from 0 to 1.

    With more than `steps` values only every k-th corner is kept, always with the smallest and the largest; what is
    drawn is then within 1 / `steps` of the exact share.
    """
    values, unit_ms = sample
    n = len(values)
    if n == 0:
        return np.empty(0), np.empty(0)
    rank = np.unique(np.concatenate((np.arange(0, n, max(1, math.ceil(n / steps))), [n - 1])))
    x = values[rank].astype(np.float64) * unit_ms
    share = sample.at_most(values[rank]) / n
    return np.concatenate((x[:1], x)), np.concatenate(([0.0], share))


def thinned(x: Values, y: Values, most: int = MOST_OTHERS) -> NDArray[np.int64]:
    """Which of the points (n,) to draw, ascending: of `MOST_BUCKETS` equal parts of x the lowest and the highest, the
    very first and last, and evenly up to `most` of the others; all where there are no more than `most`."""
    if len(x) <= most:
        return np.arange(len(x))
    span = float(x.max() - x.min()) or 1.0
    bucket = np.minimum((x - x.min()) / span * MOST_BUCKETS, MOST_BUCKETS - 1).astype(np.int16)  # sorted by the radix
    upwards = np.argsort(y, kind="stable")
    extremes = [order[np.unique(bucket[order], return_index=True)[1]] for order in (upwards, upwards[::-1])]
    others = np.arange(0, len(x), -(-len(x) // most))
    return np.unique(np.concatenate((*extremes, others, [len(x) - 1])))


def end_s(measured: RequestTable) -> float:
    """How long a time axis is that holds the run."""
    return max(float(max(measured.done_ns.max(initial=0), measured.scheduled_ns.max(initial=0))) / 1e9, 1e-3)


def in_flight(measured: RequestTable) -> tuple[Values, NDArray[np.int64]]:
    """When the number of requests in flight changed, in seconds, ascending, and what it was from then on."""
    sent = measured.sent_ns != -1
    ended = sent & (measured.done_ns != -1)
    return metrics.under_way(measured.sent_ns[sent], measured.done_ns[ended])


def rates(at_ns: NDArray[np.int64], end_s: float, bins: int = MOST_BINS) -> tuple[Values, Values]:
    """Edges of at most `bins` equal bins (m + 1,), in seconds, and how many a second fell into each (m,). A bin is 1, 2
    or 5 times a power of ten long; the last ends with the run."""
    decade = 10.0 ** np.floor(np.log10(end_s / bins))
    width_s = next(step * decade for step in (1, 2, 5, 10, 20) if step * decade * bins >= end_s)
    edges = np.append(np.arange(0, end_s, width_s), end_s)
    edges = np.delete(edges, -2) if len(edges) > 2 and edges[-1] - edges[-2] < width_s / 2 else edges
    counts = np.histogram(np.clip(at_ns / 1e9, 0, end_s), edges)[0]
    return edges, counts / np.diff(edges)


def flows(measured: RequestTable) -> Mapping[str, NDArray[np.int64]]:
    """When requests were due and when they finished, in ns, by what a curve of their rate is called."""
    due = "due" if (measured.turn > 0).any() else "offered"  # when a later turn is due hangs on replies
    follows = (measured.turn > 1) & (measured.sent_ns == -1)  # after a turn that failed: never really due
    finished_ns = measured.done_ns[measured.ok]
    if len(measured) and not measured.scheduled_ns.any():  # endless for an instant: the other would be flat beside it
        return {f"finished (all {len(measured)} were offered at 0 s)": finished_ns}
    return {due: measured.scheduled_ns[~follows], "finished": finished_ns}


def ttft(measured: RequestTable, rules: Convention) -> tuple[NDArray[np.int64], Values]:
    """The requests that ended ok and have a ttft: their rows in order of when they were due (n,), and it in ms (n,)."""
    ttft_ms = metrics.column(measured, "ttft_ms", rules)
    rows = np.flatnonzero(measured.ok & ~np.isnan(ttft_ms))
    rows = rows[np.argsort(measured.scheduled_ns[rows], kind="stable")]
    return rows, ttft_ms[rows]
