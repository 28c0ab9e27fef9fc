"""Figures: tokens/s by method, memory predicted beside memory used, Figure 4's scaling, memory over the first steps,
and lines over sizes. Only this module imports matplotlib here: import it when a figure is wanted, not before.

Text that came from elsewhere is shown as it is, never read as mathematics.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from backends.untrusted import escaped
from loadgen.report.figures import COLOURS, DASHES, GRID, INK, STYLE, legend_below, titled, write
from loadgen.report.text import number
from training_probe.findings import Verdict
from training_probe.points import size_text
from training_probe.protocol import Timeline
from training_probe.report.timelines import Array, extremes
from training_probe.results import GIB

SUFFIXES = (".svg", ".png")
FADED = "#888888"
INVALID_INK = "#b00020"
WIDTH = 10.4  # inches: of 830 pixels, as wide as a README, letters of 8 points have 9
DPI = 125
FEWEST_BARS = 8  # that fill a panel; fewer are not wider
MOST_LEVEL = 20  # bars of a panel whose numbers stand level
MOST_LETTERS = 110  # of the names below a panel that stand level
LEGEND_COLUMNS = 6
ZOOM_RATIO = 0.6  # lines that lie above this part of an axis all along have one that does not begin at 0
MOST_SAMPLES = 1500  # stretches of a timeline, more than a figure has pixels for


@dataclass(frozen=True)
class Panel:
    """Groups of bars: values[series][group]; None: nothing there, a word instead of a number: it stands there. Panels
    of one title have the same axis."""

    title: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float | str | None]]
    limit: tuple[str, float] | None = None  # a line across, with its name


def bars(panels: Sequence[Panel], title: str, unit: str, stem: Path) -> None:
    """One panel below the other, all with the same series in the same colours; axes are linear and begin at 0. Each bar
    has its number on it."""
    series = list(dict.fromkeys(name for panel in panels for name in panel.values))
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        most = max(len(panel.groups) for panel in panels)
        figure = titled(WIDTH, 1.0 + 3.1 * len(panels), escaped(title))
        width = 0.84 * min(1.0, most * len(series) / FEWEST_BARS) / len(series)
        tops = {panel.title: max(_top(each) for each in panels if each.title == panel.title) for panel in panels}
        for axis, panel in zip(figure.subplots(len(panels), 1, squeeze=False).flat, panels, strict=True):
            _bars(axis, panel, series, width)
            axis.set_ylim(0, tops[panel.title])
            axis.set_xlim(-0.6, most - 0.4)  # bars of all panels are equally wide
            axis.set_ylabel(unit)
        _legend(figure, figure.axes[0])
        save(figure, stem)


def _bars(axis: Axes, panel: Panel, series: Sequence[str], width: float) -> None:
    upright = len(series) * len(panel.groups) > MOST_LEVEL
    for row, name in enumerate(series):
        values = panel.values.get(name, ())
        at = np.arange(len(panel.groups)) + (row - (len(series) - 1) / 2) * width
        heights = [value if isinstance(value, int | float) else 0.0 for value in values] or [0.0] * len(at)
        colour = COLOURS[row % len(COLOURS)]
        axis.bar(at, heights, 0.9 * width, color=colour, label=escaped(name))
        for place, value in zip(at, values, strict=False):
            if isinstance(value, str):
                _word(axis, float(place), 0.0, value, colour, upright=True)
            elif value is not None:
                _word(axis, float(place), value, number(value), INK, upright=upright)
    if panel.limit is not None:
        name, value = panel.limit
        _line_across(axis, value, name)
    _dress(axis, panel)


def _top(panel: Panel) -> float:
    """Where its axis ends: there is room for the numbers on the bars, and for the name of the limit."""
    numbers = [value for values in panel.values.values() for value in values if isinstance(value, int | float)]
    return max(1.22 * max(numbers, default=0.0), 1.1 * panel.limit[1] if panel.limit else 0.0) or 1.0


def _dress(axis: Axes, panel: Panel) -> None:
    axis.set_title(escaped(panel.title)).set_parse_math(False)
    names = [escaped(group) for group in panel.groups]
    longest = max(map(len, names), default=0)
    axis.set_xticks(np.arange(len(names)), names, fontsize=8)
    for label in axis.get_xticklabels():
        label.set_parse_math(False)
        if len(names) * longest > MOST_LETTERS:
            label.set(rotation=30, ha="right", rotation_mode="anchor")
    axis.yaxis.set_major_formatter(_tick)
    axis.tick_params(axis="x", length=0)
    axis.grid(axis="y", color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)


def _line_across(axis: Axes, height: float, name: str) -> None:
    axis.axhline(height, color=FADED, linewidth=1, linestyle=(0, (5, 2)))
    text = axis.text(1.0, height, f"{escaped(name)} ", transform=axis.get_yaxis_transform(), ha="right", va="bottom")
    text.set(parse_math=False, color=FADED, fontsize=8)


def _tick(value: float, _: object) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}"


def _word(axis: Axes, place: float, height: float, word: str, colour: str, *, upright: bool) -> None:
    """On a bar, or in place of one."""
    text = axis.annotate(
        escaped(word), (place, height), (0, 2), textcoords="offset points", rotation=90 if upright else 0, ha="center",
        va="bottom",
    )  # fmt: skip
    text.set(parse_math=False, color=colour, fontsize=7)
    text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8})  # over a line across


def scaling(
    lines: Mapping[str, Sequence[tuple[int, float, float | None]]], title: str, stem: Path, *, on: str = "GPUs"
) -> None:
    """Figure 4: tokens/s over GPUs beside the ideal, and the share of the ideal that was reached.

    lines: by name, (GPUs, tokens/s, standard deviation) from the fewest GPUs, which the ideal goes by.
    """
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = titled(WIDTH, 4.1, escaped(title))
        speed, share = figure.subplots(1, 2)
        for row, (name, points) in enumerate(lines.items()):
            colour = COLOURS[row % len(COLOURS)]
            gpus = np.array([point[0] for point in points], dtype=np.float64)
            reached = np.array([point[1] for point in points])
            spread = np.array([point[2] or 0.0 for point in points])
            ideal = reached[0] / gpus[0] * gpus
            speed.errorbar(
                gpus, reached, yerr=spread, marker="o", markersize=5, capsize=3, color=colour, label=escaped(name)
            )
            speed.plot(
                gpus, ideal, linestyle=(0, (4, 2)), color=colour, linewidth=1, label="ideal" if not row else None
            )
            efficiency = 100 * reached / ideal
            share.plot(gpus, efficiency, marker="o", markersize=5, color=colour)
            for place, percent in zip(gpus[1:], efficiency[1:], strict=True):
                share.annotate(f"{percent:.0f} %", (place, percent), (0, -16), textcoords="offset points", ha="center")
        counts = sorted({point[0] for points in lines.values() for point in points})
        for axis, name in ((speed, "Tokens/s, all together"), (share, "Scaling efficiency, %")):
            axis.set_xticks(counts)
            axis.set_xlim(counts[0] - 0.05 * counts[-1], 1.05 * counts[-1])
            axis.set_xlabel(on)
            axis.set_ylabel(name)
            axis.grid(color=GRID, linewidth=0.6)
            axis.set_axisbelow(True)
            axis.set_ylim(0, 1.1 * axis.get_ylim()[1] if axis is speed else max(112.0, 1.1 * axis.get_ylim()[1]))
        share.axhline(100, color=FADED, linewidth=1, linestyle=(0, (4, 2)))
        speed.yaxis.set_major_formatter(_tick)
        _legend(figure, speed)
        save(figure, stem)


@dataclass(frozen=True)
class Lines:
    """Lines over sizes: lines[name] = (x, y) in the order of x. sizes: x are bytes, on a logarithmic axis, and so is y;
    limits: lines across, with their names."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    sizes: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)


def lines(panels: Sequence[Lines], title: str, stem: Path, *, columns: int = 2) -> None:
    """Panels in rows, all with the same names in the same colours."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = titled(WIDTH, 1.0 + (2.6 if rows > 2 else 3.5) * rows, escaped(title))
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis in axes[len(panels) :]:
            axis.remove()
        for axis, panel in zip(axes, panels, strict=False):
            _lines(axis, panel, names)
        fullest = max(zip(axes, panels, strict=False), key=lambda each: len(each[1].lines))
        _legend(figure, fullest[0])
        save(figure, stem)


def _lines(axis: Axes, panel: Lines, names: Sequence[str]) -> None:
    for name, points in panel.lines.items():
        row = names.index(name)
        axis.plot(
            [x for x, _ in points], [y for _, y in points], marker="o", markersize=3.5, linewidth=1.4,
            linestyle=DASHES[row % len(DASHES)], color=COLOURS[row % len(COLOURS)], label=escaped(name),
        )  # fmt: skip
    axis.set_title(escaped(panel.title)).set_parse_math(False)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    places = sorted({x for points in panel.lines.values() for x, _ in points})
    if panel.sizes:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        shown = places[:: -(-len(places) // 6)]
        axis.set_xticks(shown, [size_text(int(x)) for x in shown])
        ticks = log_ticks(y for points in panel.lines.values() for _, y in points)
        axis.set_yticks(ticks)
        axis.set_ylim(0.9 * ticks[0], 1.1 * ticks[-1])
        axis.minorticks_off()
    else:
        heights = [y for points in panel.lines.values() for _, y in points]
        least, top = min(heights), max(*heights, *panel.limits.values(), 0.0)
        axis.set_ylim(0.9 * least if least > ZOOM_RATIO * top else 0, 1.06 * top)
        axis.xaxis.set_major_formatter(_tick)
    axis.yaxis.set_major_formatter(_tick)
    for name, value in panel.limits.items():
        _line_across(axis, value, name)


def log_ticks(values: Iterable[float]) -> list[float]:
    """Places on a logarithmic axis, from below the least value to above the largest: powers of ten, and where those
    would be few also twice and five times each. values: above 0, at least one."""
    shown = list(values)
    least, top = min(shown), max(shown)
    steps = (1, 2, 5) if top < 100 * least else (1,)
    powers = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(top)) + 2)
    ticks = [step * 10.0**power for power in powers for step in steps]
    return ticks[bisect.bisect_right(ticks, least) - 1 : bisect.bisect_left(ticks, top) + 1]


def timeline(of: Timeline, title: str, stem: Path) -> None:
    """Memory of rank 0 over its first steps, stacked by what it is for, in the order of the categories; steps are
    marked where they begin.

    Above over time, below over allocations and releases, where what is short in time can be seen too.
    """
    gib = np.array(of.bytes, dtype=np.float64).reshape(len(of.categories), -1) / GIB  # (categories, samples)
    time_s = np.array(of.time_s, dtype=np.float64)
    event = np.arange(len(time_s), dtype=np.float64)
    seen = extremes(gib.sum(axis=0), MOST_SAMPLES)
    begins_s = np.maximum(0, np.array(of.steps_s, dtype=np.float64) - time_s[0])
    over = (
        (time_s - time_s[0], begins_s, "time, s"),
        (event, np.interp(begins_s, time_s - time_s[0], event), "allocations and releases"),
    )
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = titled(WIDTH, 6.2, escaped(title))
        axes = figure.subplots(2, 1)
        for axis, (x, begins, unit) in zip(axes, over, strict=True):
            _stack(axis, x[seen], gib[:, seen], of.categories)
            _mark_steps(axis, begins)
            axis.set_xlabel(unit)
        _legend(figure, axes[0])
        save(figure, stem)


def _stack(axis: Axes, x: Array, gib: Array, names: Sequence[str]) -> None:
    under = np.zeros(len(x))
    for row, (name, own) in enumerate(zip(names, gib, strict=True)):
        colour = COLOURS[row % len(COLOURS)]
        axis.fill_between(
            x, under, under + own, step="post", color=colour, linewidth=0, label=escaped(name), rasterized=True
        )
        under = under + own
    peak = float(under.max(initial=0.0))
    axis.set_ylim(0, 1.25 * peak or 1.0)
    axis.set_xlim(0, float(x[-1]) or 1.0)
    axis.set_ylabel("GiB allocated")
    _line_across(axis, peak, f"peak {peak:.3g} GiB")


def _mark_steps(axis: Axes, begins: Array) -> None:
    for step, place in enumerate(begins, 1):
        axis.axvline(float(place), color="#222222", linewidth=0.8, linestyle=(0, (1.5, 1.5)))
        axis.annotate(
            f"step {step}", (float(place), 1.0), (3, -3), xycoords=axis.get_xaxis_transform(),
            textcoords="offset points", va="top", fontsize=8,
        )  # fmt: skip


def _legend(figure: Figure, axis: Axes) -> None:
    if len(axis.get_legend_handles_labels()[1]) > 1:
        legend_below(figure, axis, LEGEND_COLUMNS)


@contextlib.contextmanager
def of(verdict: Verdict) -> Iterator[None]:
    """Figures that are drawn within say what the report says, in red: they leave it without its pages."""
    token = _VERDICT.set(verdict)
    try:
        yield
    finally:
        _VERDICT.reset(token)


_VERDICT: ContextVar[Verdict] = ContextVar("verdict", default="VALID")


def save(figure: Figure, stem: Path) -> None:
    if _VERDICT.get() == "INVALID":
        figure.text(0.99, 0.005, "INVALID: no measurement", ha="right", va="bottom", fontsize=11, color=INVALID_INK)
    for suffix in SUFFIXES:
        write(figure, stem.with_name(stem.name + suffix), DPI)


def file_stem(name: str) -> str:
    """A name that came from elsewhere as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", name).strip("._") or "cell"
