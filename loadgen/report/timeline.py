"""The run over time: offered and finished rate, requests in flight, open sessions, ttft, and the server's queue and KV
cache where they were sampled; and ttft against prompt length. Imports matplotlib, as figures.py does.

It must never hide an extreme, that a run is emulated, or that it is invalid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from backends.untrusted import escaped
from loadgen.report import metrics, sessions
from loadgen.report.figures import COLOURS, DASHES, GRID, SECONDS_FROM_MS, STYLE, marked, titled
from loadgen.report.metrics import CONVENTIONS
from loadgen.report.schema import Report
from loadgen.rundir.records import Table

MOST_BINS = 120  # of a rate
MOST_BUCKETS = 700  # of points: as many as a panel has columns of pixels, each with its lowest and its highest point
MOST_OTHERS = 4000  # points beside the extremes of their bucket
QUEUE = {"running": "running", "waiting": "waiting", "paused": "paused"}
KV_CACHE = "kv_cache_usage_ratio"
NAMED_RATIO = 0.04  # of the run: a shorter phase has no room for its name
STALL, PHASES = "#D55E00", ("#EEF3F7", "#FFFFFF")

Values = NDArray[np.float64]
Sampled = Sequence[tuple[float, Mapping[str, float]]]  # second of the run, neutral name -> value


def draw(report: Report, measured: Table, sampled: Sampled, title: str, path: Path) -> None:
    """Writes the run over time, in seconds since t = 0. title: printable."""
    end_s = max(float(max(measured.done_ns.max(initial=0), measured.scheduled_ns.max(initial=0))) / 1e9, 1e-3)
    inside = [(at_s, values) for at_s, values in sampled if 0 <= at_s <= end_s]
    panels = 3 + any(set(QUEUE) & set(values) for _, values in inside) + any(KV_CACHE in values for _, values in inside)
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = titled(10.5, 0.9 + 1.5 * panels, *marked(title, report.emulated, not report.verdict.valid, 1))
        axes: list[Axes] = list(figure.subplots(panels, 1, sharex=True))
        for axis in axes:
            axis.grid(color=GRID, linewidth=0.6)
            axis.set_axisbelow(True)
        _rates(axes[0], measured, end_s)
        _in_flight(axes[1], measured)
        _ttft(axes[2], report, measured)
        _server(axes[3:], inside)
        axes[0].set_xlim(0, end_s)
        _shade(axes, report)
        for axis in axes:
            axis.set_ylim(bottom=0)
            handles, labels = axis.get_legend_handles_labels()
            if labels:
                axis.legend(handles, labels, loc="best", ncols=len(labels), fontsize=8, frameon=True)
        axes[-1].set_xlabel("seconds since the load began")
        figure.savefig(path, dpi=160)


def draw_prompts(report: Report, tokens: NDArray[np.int64], ttft_ms: Values, title: str, path: Path) -> None:
    """Writes ttft against prompt length, a dot a request (n,); of very many, the extremes and some of the others."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = titled(7.0, 4.2, *marked(title, report.emulated, not report.verdict.valid, 1))
        axis = figure.subplots()
        kept = thinned(tokens.astype(np.float64), ttft_ms)
        unit, divisor = _unit(ttft_ms)
        axis.plot(tokens[kept], ttft_ms[kept] / divisor, ".", color=COLOURS[0], markersize=3)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("prompt tokens")
        axis.set_ylabel(f"time to first token, {unit}")
        axis.grid(color=GRID, linewidth=0.6)
        axis.set_axisbelow(True)
        figure.savefig(path, dpi=160)


def thinned(x: Values, y: Values) -> NDArray[np.int64]:
    """Which of the points (n,) to draw, ascending: of `MOST_BUCKETS` equal parts of x the lowest and the highest, the
    very first and last, and evenly some of the others; all where they are few."""
    if len(x) <= MOST_OTHERS:
        return np.arange(len(x))
    span = float(x.max() - x.min()) or 1.0
    bucket = np.minimum((x - x.min()) / span * MOST_BUCKETS, MOST_BUCKETS - 1).astype(np.int64)
    order = np.lexsort((y, bucket))
    last = np.flatnonzero(np.append(np.diff(bucket[order]) > 0, True))
    first = np.concatenate(([0], last[:-1] + 1))
    others = np.arange(0, len(x), -(-len(x) // MOST_OTHERS))
    return np.unique(np.concatenate((order[first], order[last], others, [len(x) - 1])))


def in_flight(measured: Table) -> tuple[Values, NDArray[np.int64]]:
    """When the number of requests in flight changed, in seconds, ascending, and what it was from then on."""
    sent = measured.sent_ns != -1
    ended = sent & (measured.done_ns != -1)
    return metrics.under_way(measured.sent_ns[sent], measured.done_ns[ended])


def rates(at_ns: NDArray[np.int64], end_s: float) -> tuple[Values, Values]:
    """Edges of at most `MOST_BINS` equal bins (m + 1,), in seconds, and how many a second fell into each (m,). A bin is
    1, 2 or 5 times a power of ten long; the last ends with the run."""
    decade = 10.0 ** np.floor(np.log10(end_s / MOST_BINS))
    width_s = next(step * decade for step in (1, 2, 5, 10, 20) if step * decade * MOST_BINS >= end_s)
    edges = np.append(np.arange(0, end_s, width_s), end_s)
    edges = np.delete(edges, -2) if len(edges) > 2 and edges[-1] - edges[-2] < width_s / 2 else edges
    counts = np.histogram(np.clip(at_ns / 1e9, 0, end_s), edges)[0]
    return edges, counts / np.diff(edges)


def _rates(axis: Axes, measured: Table, end_s: float) -> None:
    due = "due" if (measured.turn > 0).any() else "offered"  # when a later turn is due hangs on replies
    follows = (measured.turn > 1) & (measured.sent_ns == -1)  # after a turn that failed: never really due
    lines = {due: measured.scheduled_ns[~follows], "finished": measured.done_ns[measured.ok]}
    if len(measured) and not measured.scheduled_ns.any():
        del lines[due]  # endless for an instant: beside it the rate of what finished would be flat
        lines[f"finished (all {len(measured)} were offered at 0 s)"] = lines.pop("finished")
    for number, (label, at_ns) in enumerate(lines.items()):
        edges, per_s = rates(at_ns, end_s)
        axis.stairs(per_s, edges, label=label, color=COLOURS[number], linestyle=DASHES[number], linewidth=1.4)
    axis.set_ylabel("requests/s")


def _in_flight(axis: Axes, measured: Table) -> None:
    lines = {"requests in flight": in_flight(measured)}
    if (measured.turn > 0).any():
        lines["sessions open"] = metrics.under_way(*sessions.opened(measured))
        lines["sessions thinking"] = metrics.under_way(*sessions.thinking(measured))
    for number, (label, (at_s, count)) in enumerate(lines.items()):
        kept = thinned(at_s, count.astype(np.float64))
        axis.step(at_s[kept], count[kept], where="post", color=COLOURS[number], linestyle=DASHES[number],
                  linewidth=1.2, label=label if len(lines) > 1 else None)  # fmt: skip
    axis.set_ylabel("in flight" if len(lines) == 1 else "in flight,\nsessions")


def _ttft(axis: Axes, report: Report, measured: Table) -> None:
    ttft_ms = metrics.column(measured, "ttft_ms", CONVENTIONS[report.convention])
    known = measured.ok & ~np.isnan(ttft_ms)
    due_s, ttft_ms = measured.scheduled_ns[known] / 1e9, ttft_ms[known]
    kept = thinned(due_s, ttft_ms)
    unit, divisor = _unit(ttft_ms)
    axis.plot(due_s[kept], ttft_ms[kept] / divisor, ".", color=COLOURS[0], markersize=3, clip_on=False)
    axis.set_ylabel(f"ttft, {unit}\n(at due time)")
    if not known.any():
        axis.text(0.5, 0.5, "no values", transform=axis.transAxes, ha="center", color="#888888")


def _server(axes: Sequence[Axes], inside: Sampled) -> None:
    """The panels of what was sampled: the queue and the KV cache, each only where the server showed it."""
    remaining = iter(axes)
    queue = {label: points for name, label in QUEUE.items() if (points := _points(inside, name))}
    if queue:
        axis = next(remaining)
        for number, (label, points) in enumerate(queue.items()):
            at_s, counts = zip(*points, strict=True)
            axis.plot(at_s, counts, label=label, color=COLOURS[number], linestyle=DASHES[number], marker=".",
                      markersize=3, linewidth=1.2)  # fmt: skip
        axis.set_ylabel("server's\nrequests")
    used = _points(inside, KV_CACHE)
    if used:
        axis = next(remaining)
        axis.plot([at_s for at_s, _ in used], [100 * ratio for _, ratio in used], ".-", color=COLOURS[0], markersize=3)
        axis.set_ylabel("KV cache, %")


def _points(inside: Sampled, name: str) -> list[tuple[float, float]]:
    return [(at_s, values[name]) for at_s, values in inside if name in values]


def _shade(axes: Sequence[Axes], report: Report) -> None:
    """Phases behind everything, named above the first panel where they are long enough, and stalls."""
    for number, phase in enumerate(report.phases):
        for axis in axes:
            axis.axvspan(phase.start_s, phase.end_s, color=PHASES[number % len(PHASES)], zorder=-2, linewidth=0)
        if phase.end_s - phase.start_s < NAMED_RATIO * axes[0].get_xlim()[1]:
            continue
        name = axes[0].text(phase.start_s, 1.0, escaped(phase.name), transform=axes[0].get_xaxis_transform(),
                            va="bottom", fontsize=8)  # fmt: skip
        name.set_parse_math(False)
    for number, stall in enumerate(report.stalls):
        for axis in axes:
            label = "server stalled" if number == 0 and axis is axes[1] else None
            axis.axvspan(stall.start_s, stall.end_s, color=STALL, alpha=0.25, zorder=-1, linewidth=0, label=label)


def _unit(values_ms: Values) -> tuple[str, float]:
    return ("s", 1000.0) if values_ms.max(initial=0.0) >= SECONDS_FROM_MS else ("ms", 1.0)
