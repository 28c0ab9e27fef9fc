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

from backends.untrusted import escaped
from loadgen.report import metrics, sessions
from loadgen.report.figures import COLOURS, DASHES, GRID, SECONDS_FROM_MS, STYLE, marked, titled, write
from loadgen.report.metrics import CONVENTIONS
from loadgen.report.pages import series
from loadgen.report.pages.series import Values
from loadgen.report.schema import Report
from loadgen.report.slices import Prompts
from loadgen.rundir.records import Table

QUEUE = {"running": "running", "waiting": "waiting", "paused": "paused"}
KV_CACHE = "kv_cache_usage_ratio"
NAMED_RATIO = 0.04  # of the run: a shorter phase has no room for its name
PHASE_NAMES_RATIO = 0.15  # of a panel's height: what the names of phases take above the first one
LEAST_KV_PERCENT = 1.0  # an axis of an unused cache ends here
STALL, PHASES = "#D55E00", ("#EEF3F7", "#FFFFFF")

Sampled = Sequence[tuple[float, Mapping[str, float]]]  # second of the run, neutral name -> value


def draw(report: Report, measured: Table, sampled: Sampled, title: str, path: Path) -> None:
    """Writes the run over time, in seconds since t = 0. title: printable."""
    end_s = series.end_s(measured)
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
            if labels:  # above the panel, where no curve is
                raised = PHASE_NAMES_RATIO if axis is axes[0] and report.phases else 0.0
                axis.legend(handles, labels, loc="lower right", bbox_to_anchor=(1.0, 1.0 + raised), ncols=len(labels),
                            fontsize=8, borderaxespad=0.1)  # fmt: skip
        axes[-1].set_xlabel("seconds since the load began")
        write(figure, path)


def draw_prompts(report: Report, prompts: Prompts, title: str, path: Path) -> None:
    """Writes ttft against prompt length, a dot a request; of very many, the extremes and some of the others."""
    _, tokens, ttft_ms = prompts
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = titled(7.0, 4.2, *marked(title, report.emulated, not report.verdict.valid, 1))
        axis = figure.subplots()
        kept = series.thinned(tokens.astype(np.float64), ttft_ms)
        unit, divisor = _unit(ttft_ms)
        axis.plot(tokens[kept], ttft_ms[kept] / divisor, ".", color=COLOURS[0], markersize=3)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("prompt tokens")
        axis.set_ylabel(f"time to first token, {unit}")
        axis.grid(color=GRID, linewidth=0.6)
        axis.set_axisbelow(True)
        write(figure, path)


def _rates(axis: Axes, measured: Table, end_s: float) -> None:
    for number, (label, at_ns) in enumerate(series.flows(measured).items()):
        edges, per_s = series.rates(at_ns, end_s)
        axis.stairs(per_s, edges, label=label, color=COLOURS[number], linestyle=DASHES[number], linewidth=1.4)
    axis.set_ylabel("requests/s")


def _in_flight(axis: Axes, measured: Table) -> None:
    lines = {"requests in flight": series.in_flight(measured)}
    if (measured.turn > 0).any():
        lines["sessions open"] = metrics.under_way(*sessions.opened(measured))
        lines["sessions thinking"] = metrics.under_way(*sessions.thinking(measured))
    for number, (label, (at_s, count)) in enumerate(lines.items()):
        kept = series.thinned(at_s, count.astype(np.float64))
        axis.step(at_s[kept], count[kept], where="post", color=COLOURS[number], linestyle=DASHES[number],
                  linewidth=1.2, label=label if len(lines) > 1 else None)  # fmt: skip
    axis.set_ylabel("in flight" if len(lines) == 1 else "in flight,\nsessions")


def _ttft(axis: Axes, report: Report, measured: Table) -> None:
    rows, ttft_ms = series.ttft(measured, CONVENTIONS[report.convention])
    due_s = measured.scheduled_ns[rows] / 1e9
    kept = series.thinned(due_s, ttft_ms)
    unit, divisor = _unit(ttft_ms)
    axis.plot(due_s[kept], ttft_ms[kept] / divisor, ".", color=COLOURS[0], markersize=3, clip_on=False)
    axis.set_ylabel(f"ttft, {unit}\n(at due time)")
    if not len(rows):
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
        axis.set_ylim(top=max(LEAST_KV_PERCENT, axis.get_ylim()[1]))
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
