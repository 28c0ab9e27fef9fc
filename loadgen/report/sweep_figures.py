"""The figures of a sweep: latency against throughput, interactivity against throughput a GPU, the CDFs of all points.
Imports matplotlib, as figures.py does.

It must never smooth, join points across one that has no value, or hide that a run is emulated or invalid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from backends.untrusted import escaped
from loadgen.report import figures
from loadgen.report.build import ReportError
from loadgen.report.figures import COLOURS, DASHES, GRID, SECONDS_FROM_MS, STYLE, legend_below, marked, titled
from loadgen.report.metrics import Distribution
from loadgen.report.sweeps import (
    BY_TOKENS,
    INTERACTIVITY,
    LATENCIES,
    PER_GPU,
    PERCENTILES,
    Swept,
    by_throughput,
    mean,
    stretches,
    varied,
)

MOST_NAMES = 14  # points that have room for their values beside them
LOG_FROM = 30.0  # times the smallest latency: an axis that reaches this far is logarithmic


def draw(directory: Path, swept: Swept, samples: Mapping[str, Mapping[str, Distribution]]) -> None:
    """Writes latency.png, pareto.png and cdf.png, where a point has a finished run. samples: as `sweeps.samples` gives
    them. Raises ReportError."""
    if not any(point.runs for point in swept.points):
        return
    try:
        with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
            figures.write(_latency(swept), directory / "latency.png")
            figures.write(_pareto(swept), directory / "pareto.png")
        _cdf(directory / "cdf.png", swept, samples)
    except OSError as error:
        raise ReportError(f"cannot write the figures to {directory}: {error.strerror or error}.") from None


def _figure(swept: Swept, what: str, width: float, height: float) -> Figure:
    """An empty figure below its title, which says what a reader must know first."""
    drawn = [run for run in swept.runs if run.state == "finished"]
    invalid = sum(not run.valid for run in drawn)
    title = escaped(f"{swept.backend} {swept.model}, {what}")
    return titled(width, height, *marked(title, len(drawn) if swept.emulated else 0, invalid, len(drawn)))


def _latency(swept: Swept) -> Figure:
    figure = _figure(swept, f"latency against throughput, by {varied(swept)}", 11.0, 4.4)
    axes: list[Axes] = list(figure.subplots(1, len(LATENCIES)))
    throughput = by_throughput(swept)
    for axis, (latency, name) in zip(axes, LATENCIES.items(), strict=True):
        _latency_panel(axis, swept, throughput, latency)
        axis.set_title(name)
        axis.set_xlabel("output tokens/s" if throughput == BY_TOKENS[0] else "requests/s")
    legend_below(figure, axes[0], len(PERCENTILES))
    return figure


def _latency_panel(axis: Axes, swept: Swept, throughput: str, latency: str) -> None:
    """A line for each percentile, through the points in the order of the list; a faint dot is a run of several."""
    every = [mean(point, f"{latency}_{each}") for point in swept.points for each in PERCENTILES]
    known = [value for value in every if value is not None]
    high, low = max(known, default=1.0), min(known, default=1.0)
    unit, divisor = ("s", 1000.0) if high >= SECONDS_FROM_MS else ("ms", 1.0)
    logarithmic = 0 < low * LOG_FROM < high
    for number, percentile in enumerate(PERCENTILES):
        colour = COLOURS[number]
        label: str | None = percentile
        for stretch in stretches(swept, throughput, f"{latency}_{percentile}"):
            x = [at for _, at, _ in stretch]
            y = [value / divisor for _, _, value in stretch]
            axis.plot(
                x, y, marker="o", markersize=4, linewidth=1.6, color=colour, linestyle=DASHES[number], label=label
            )
            label = None
        for point in swept.points:
            if len(point.runs) > 1:
                runs = zip(point.metrics[throughput].runs, point.metrics[f"{latency}_{percentile}"].runs, strict=True)
                for at, value in runs:
                    if at is not None and value is not None:
                        axis.plot([at], [value / divisor], ".", color=colour, alpha=0.35, markersize=5)
    _name_points(axis, swept, throughput, f"{latency}_{PERCENTILES[-1]}", divisor)
    axis.set_ylabel(f"{unit}, logarithmic" if logarithmic else unit)
    axis.set_xlim(0, _beyond(axis.dataLim.x1))
    if logarithmic:
        axis.set_yscale("log")
        axis.margins(y=0.1)
    else:
        axis.set_ylim(0, _beyond(axis.dataLim.y1))
    _grid(axis)


def _name_points(axis: Axes, swept: Swept, x: str, y: str, divisor: float = 1.0) -> None:
    """The value of each point beside it, where there are few."""
    placed = [each for stretch in stretches(swept, x, y) for each in stretch]
    if len(placed) > MOST_NAMES:
        return
    for point, at, value in placed:
        text = axis.annotate(
            escaped(point.value)[:24], (at, value / divisor), xytext=(3, 4), textcoords="offset points", fontsize=8
        )
        text.set_parse_math(False)


def _pareto(swept: Swept) -> Figure:
    """Interactivity against throughput; the line joins the points that no other one beats."""
    of = "a GPU" if swept.gpus is not None else "of the server"
    figure = _figure(swept, f"interactivity against throughput {of}, by {varied(swept)}", 10.0, 4.6)
    for axis, name in zip(figure.subplots(1, len(BY_TOKENS)), BY_TOKENS, strict=True):
        throughput = name if swept.gpus is None else name + PER_GPU
        _pareto_panel(axis, swept, throughput, swept.pareto[name])
        what = "Output tokens" if name.startswith("output") else "Prompt and output tokens"
        axis.set_title(what)
        axis.set_xlabel("tokens/s a user (1 / tpot p50)")
        axis.set_ylabel(f"tokens/s {'a GPU' if swept.gpus is not None else 'of the whole server'}")
        if axis is figure.axes[0]:
            legend_below(figure, axis, 2)
    return figure


def _pareto_panel(axis: Axes, swept: Swept, throughput: str, front: list[str]) -> None:
    placed = [each for stretch in stretches(swept, INTERACTIVITY, throughput) for each in stretch]
    best = sorted((x, y) for point, x, y in placed if point.value in front)
    rest = [(point.valid, x, y) for point, x, y in placed if point.value not in front]
    axis.plot(
        [x for x, _ in best], [y for _, y in best], marker="o", markersize=5, linewidth=1.6, color=COLOURS[0],
        label="no other point is better in both (Pareto)",
    )  # fmt: skip
    for valid, mark, label in (
        (True, "x", "another point is better in both"),
        (False, "o", "INVALID, not to be quoted"),
    ):
        x, y = ([each[at] for each in rest if each[0] is valid] for at in (1, 2))
        if valid or x:
            axis.plot(x, y, mark, color=COLOURS[1], fillstyle="full" if valid else "none", label=label)
    _name_points(axis, swept, INTERACTIVITY, throughput)
    axis.set_xlim(0, _beyond(axis.dataLim.x1))
    axis.set_ylim(0, _beyond(axis.dataLim.y1))
    _grid(axis)


def _beyond(largest: float) -> float:
    """Where an axis from 0 ends: no point lies on the edge, and names of points have room."""
    return 1.12 * largest if 0 < largest < math.inf else 1.0


def _grid(axis: Axes) -> None:
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)


def _cdf(path: Path, swept: Swept, samples: Mapping[str, Mapping[str, Distribution]]) -> None:
    """A line for each point, over all its finished runs."""
    curves = [
        figures.Curves(
            escaped(f"{swept.plan.varies} {point.value}"),
            swept.emulated,
            samples[point.value],
            not point.valid,
            f"; {point.requests_failed} failed and are in no curve" if point.requests_failed else "",
        )
        for point in swept.points
        if point.value in samples
    ]
    title = escaped(f"{swept.backend} {swept.model}, latency by {varied(swept)}")
    figures.draw(curves, title, [path])
