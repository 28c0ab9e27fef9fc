"""The charts of a document as figures. Import it when a figure is wanted: matplotlib takes 0.7 s and 70 MB.

It must never smooth, join points across one that has no value, or hide where numbers come from. Text is escaped, and
never read as mathematics.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from backends.untrusted import escaped
from loadgen import rundir
from loadgen.document.content import Chart, Document, Numbers, Series, number

warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # of a model's name: a box, and nothing helps
# Okabe and Ito's palette, told apart with every common colour blindness; dashes tell lines apart without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
GAP = " \N{NO-BREAK SPACE}"  # two spaces; SVG would draw neighbouring ones as one
INK, FADED, GRID, RED = "#222222", "#888888", "#D9D9D9", "#B00020"
SHADES = {"plain": ("#7F9FBF", 0.12), "good": ("#009E73", 0.2), "warning": ("#E69F00", 0.2), "bad": ("#D55E00", 0.25)}
WIDTH = 10.4  # inches: of 830 pixels, as wide as a README, letters of 8 points have 9
DPI = 150
MOST_COLUMNS, LEGEND_COLUMNS = 3, 6
MOST_STACKED = 6  # charts one above the other; more are in two columns
MOST_NAMES = 14  # points, and groups of bars, that have room for their values beside them
MOST_LETTERS = 110  # of the categories below a chart that stand level
FEWEST_BARS = 8  # that fill a chart; fewer are not wider
LOG_FROM = 30.0  # times the smallest value: an axis that may be logarithmic is, where its values reach this far
ZOOM_RATIO = 0.8  # where all values lie in the top fifth of the axis it does not begin at 0
NAMED_RATIO = 0.04  # of the axis: a shorter part of a bar, or stretch of the axis, has no room for its text

STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # the layout is made for the first; none is wider
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": FADED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, in the reader's font
    "svg.hashsalt": "loadgen",  # the same document gives the same bytes
}


def write(document: Document, directory: Path) -> None:
    """Draws each section that names figures and has charts, into these files. Raises OSError."""
    for section in document.sections:
        if section.figures and section.charts:
            title = f"{document.title}: {section.title}"
            draw(section.charts, title, [directory / name for name in section.figures], document.origin, document.stamp)


def draw(charts: Sequence[Chart], title: str, paths: Sequence[Path], origin: str = "", stamp: str = "") -> None:
    """Draws the charts that hold something as one figure into every path, whose suffix says how. origin, stamp: as a
    document has them. Raises OSError."""
    charts = [chart for chart in charts if any(_known(each.y) or each.labels for each in chart.series)] or charts
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        columns = _columns(charts)
        rows = -(-len(charts) // columns)
        figure = _titled(0.9 + sum(_height(charts[row * columns]) for row in range(rows)), title, origin, stamp)
        together = len(charts) > 1 and columns == 1 and bool(charts[0].sync)
        axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False, sharex=together).flat)
        for axis in axes[len(charts) :]:
            axis.remove()
        for place, (axis, chart) in enumerate(zip(axes, charts, strict=False)):
            _panel(axis, chart)
            _marks(axis, chart)
            _shades(axis, chart, named=not together or place == 0)
            if together and place < len(charts) - 1:
                axis.set_xlabel("")
        notes = " ".join(dict.fromkeys(chart.note for chart in charts if chart.note))
        _below(figure, axes[: len(charts)], textwrap.fill(escaped(notes), 150))
        for path in paths:
            with rundir.replacing(path) as file:
                metadata = {"Date": None} if path.suffix == ".svg" else None
                figure.savefig(file, format=path.suffix[1:], dpi=DPI, metadata=metadata)
            figure.set_layout_engine("none")  # a layout takes as long as the drawing


def _columns(charts: Sequence[Chart]) -> int:
    """Bars, and charts over one axis of time, are as wide as the figure."""
    wide = any(chart.sync or (chart.categories and chart.series and _is_bars(chart)) for chart in charts)
    if wide and not _is_small(charts):
        return 1 if len(charts) <= MOST_STACKED else 2
    return 2 if len(charts) == 4 else min(len(charts), MOST_COLUMNS)


def _is_small(charts: Sequence[Chart]) -> bool:
    """Whether each has so few categories that several fit beside each other, or has no common time."""
    return all(not chart.sync and len(chart.categories) <= 4 for chart in charts) and not any(
        chart.stacked for chart in charts
    )


def _is_bars(chart: Chart) -> bool:
    return any(series.kind == "bars" for series in chart.series)


def _height(chart: Chart) -> float:
    """Of a chart, in inches."""
    if chart.stacked and chart.categories:
        return 1.0 + 0.45 * len(chart.categories)
    return 1.6 if chart.sync and not chart.log_now else 3.3


def _titled(height: float, title: str, origin: str, stamp: str) -> Figure:
    """An empty figure below its title, which begins with what a reader must know first."""
    known = [stamp, f"{origin.upper()} (emulated hardware, no real server)" if origin else ""]
    title = GAP.join([*filter(None, known), escaped(title)])
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    text = figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=RED if any(known) else INK)
    taken_ratio = text.get_window_extent().width / (0.95 * figure.bbox.width)
    if taken_ratio > 1:
        text.set_text(textwrap.fill(title, max(1, int(len(title) / taken_ratio))))
    return figure


def _panel(axis: Axes, chart: Chart) -> None:
    axis.set_title(escaped(chart.title))
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    bars = [series for series in chart.series if series.kind == "bars"]
    lying = chart.stacked and bool(bars)
    if lying:
        _stack(axis, chart, bars)
    else:
        for place, series in enumerate(bars):
            _bars(axis, series, place - (len(bars) - 1) / 2, len(bars), len(chart.categories))
    for series in chart.series:
        if series.kind != "bars":
            _curve(axis, series)
    if not any(_known(series.y) for series in chart.series):
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", color=FADED)
    (axis.set_ylabel if lying else axis.set_xlabel)(escaped(chart.x_label))
    (axis.set_xlabel if lying else axis.set_ylabel)(escaped(chart.y_label))
    _scales(axis, chart, lying=lying)


def _known(values: Numbers) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _array(values: Numbers) -> NDArray[np.float64]:
    """None is a gap."""
    return np.array([math.nan if value is None else value for value in values], np.float64)


def _curve(axis: Axes, series: Series) -> None:
    x, y, colour = _array(series.x), _array(series.y), COLOURS[series.colour % len(COLOURS)]
    label = escaped(series.group or series.name)
    if series.kind == "points":
        axis.plot(x, y, "o", color=colour, markersize=4 if len(x) <= 200 else 2, label=label,
                  fillstyle="none" if series.dashed else "full")  # fmt: skip
    else:
        dashes = DASHES[1 if series.dashed else 0] if series.dashed else DASHES[series.colour % len(DASHES)]
        drawstyle: Literal["steps-post", "default"] = "steps-post" if series.kind == "step" else "default"
        marker = "o" if series.kind == "line" and len(x) <= 100 and not series.dashed else ""
        axis.plot(x, y, color=colour, linestyle=dashes, drawstyle=drawstyle, linewidth=1.4, marker=marker,
                  markersize=3.5, label=label)  # fmt: skip
    if series.low is not None and series.high is not None:
        low, high = _array(series.low), _array(series.high)
        if series.kind == "points":
            _whiskers(axis, x, y, low, high, colour)
        else:
            step: Literal["post"] | None = "post" if series.kind == "step" else None
            axis.fill_between(x, low, high, step=step, color=colour, alpha=0.18, linewidth=0)
    if series.names is not None and len(x) <= MOST_NAMES:
        for at, value, name in zip(x, y, series.names, strict=True):
            axis.annotate(escaped(name)[:24], (at, value), (3, 4), textcoords="offset points", fontsize=8)


def _whiskers(axis: Axes, x: Any, y: Any, low: Any, high: Any, colour: str) -> None:
    shown = np.isfinite(y) & np.isfinite(low) & np.isfinite(high)
    x, y, low, high = (each[shown] for each in (x, y, low, high))
    reach = np.maximum(0, np.array([y - low, high - y]))
    axis.errorbar(x, y, yerr=reach, fmt="none", ecolor=colour, elinewidth=1.2, capsize=2)


def _bars(axis: Axes, series: Series, offset: float, count: int, groups: int) -> None:
    """The bars of one series, each with its number on it. offset: of its bar in a group, in bars."""
    width = 0.84 * min(1.0, groups * count / FEWEST_BARS) / count
    x, y, colour = _array(series.x) + offset * width, _array(series.y), COLOURS[series.colour % len(COLOURS)]
    axis.bar(x, np.nan_to_num(y), 0.9 * width, color=colour, label=escaped(series.group or series.name),
             hatch="//" if series.dashed else None)  # fmt: skip
    if series.low is not None and series.high is not None:
        _whiskers(axis, x, y, _array(series.low), _array(series.high), INK)
    for place, (at, value) in enumerate(zip(x, y, strict=True)):
        word = number(float(value)) if math.isfinite(value) else series.labels[place] if series.labels else ""
        turned = 90 if count * groups > MOST_NAMES or not math.isfinite(value) else 0
        axis.annotate(escaped(word), (at, value if math.isfinite(value) else 0.0), (0, 3), rotation=turned,
                      textcoords="offset points", ha="center", va="bottom", fontsize=7)  # fmt: skip


def _stack(axis: Axes, chart: Chart, bars: Sequence[Series]) -> None:
    """Bars that lie, each in parts; what is long enough says its value."""
    count = len(chart.categories)
    values = np.zeros((len(bars), count))
    for row, series in enumerate(bars):
        for x, y in zip(series.x, series.y, strict=True):
            values[row, round(x or 0)] = y if y is not None and math.isfinite(y) else 0.0
    left, least = np.zeros(count), NAMED_RATIO * float(values.sum(axis=0).max(initial=0.0))
    for series, own in zip(bars, values, strict=True):
        pale = series.colour >= len(COLOURS)
        colour = _lighter(COLOURS[series.colour % len(COLOURS)]) if pale else COLOURS[series.colour]
        drawn = axis.barh(
            range(count), own, 0.72, left=left, label=escaped(series.name), color=colour, edgecolor="white",
            hatch="//" if series.dashed else None,
        )  # fmt: skip
        texts = [f"{value:.3g}" if value >= least and value else "" for value in own]
        axis.bar_label(drawn, texts, label_type="center", color="black" if pale else "white", fontsize=8)
        left += own
    axis.set_yticks(range(count), [escaped(name) for name in chart.categories], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, float(left.max(initial=0.0)) or 1.0)


def _lighter(colour: str) -> tuple[float, float, float]:
    red, green, blue = to_rgb(colour)
    return 0.45 * red + 0.55, 0.45 * green + 0.55, 0.45 * blue + 0.55


def _marks(axis: Axes, chart: Chart) -> None:
    """Lines across; the names of those that stand are one above the other."""
    left, right = axis.get_xlim()
    write = partial(axis.text, color=FADED, fontsize=8, va="bottom")
    for place, mark in enumerate(chart.marks):
        draw_line = axis.axhline if mark.axis == "y" else axis.axvline
        draw_line(mark.value, color=FADED, linewidth=1, linestyle=(0, (5, 2)))
        if mark.axis == "y":
            write(1.0, mark.value, f"{escaped(mark.label)} ", transform=axis.get_yaxis_transform(), ha="right")
        else:
            side = "right" if mark.value > (left + right) / 2 else "left"
            above, across = 0.02 + 0.08 * (place % 8), axis.get_xaxis_transform()
            write(mark.value, above, f" {escaped(mark.label)} ", transform=across, ha=side)


def _shades(axis: Axes, chart: Chart, *, named: bool) -> None:
    """Stretches of the x axis; what is bad is in the legend, the others have their names where they are long enough."""
    left, right = axis.get_xlim()
    for shade in chart.shades:
        colour, alpha = SHADES[shade.tone]
        bad = shade.tone == "bad"
        label = escaped(shade.label) if bad else None
        axis.axvspan(shade.start, shade.end, color=colour, alpha=alpha, zorder=-1, linewidth=0, label=label)
        if named and not bad and shade.end - shade.start >= NAMED_RATIO * (right - left):
            up = axis.get_xaxis_transform()
            axis.text(shade.start, 0.98, f" {escaped(shade.label)}", transform=up, va="top", fontsize=7, color=FADED)


def _scales(axis: Axes, chart: Chart, *, lying: bool) -> None:
    if chart.categories and not lying:
        names = [escaped(name) for name in chart.categories]
        level = len(names) * max(map(len, names)) <= MOST_LETTERS / (3 if len(names) < 4 else 1)
        axis.set_xticks(range(len(names)), names, fontsize=8, rotation=0 if level else 30,
                        ha="center" if level else "right", rotation_mode="anchor")  # fmt: skip
        axis.set_xlim(-0.6, len(names) - 0.4)
    elif not lying:
        xs = [value for series in chart.series for value in _known(series.x)]
        xs += [mark.value for mark in chart.marks if mark.axis == "x"]
        xs += [end for shade in chart.shades for end in (shade.start, shade.end)]
        _scale(axis, "x", xs, logarithmic=_is_log(chart, "x", xs), from_zero=chart.quantile or chart.from_zero)
    ys = [value for series in chart.series for each in (series.y, series.low or (), series.high or ())
          for value in _known(each)]  # fmt: skip
    ys += [mark.value for mark in chart.marks if mark.axis == "y"]
    if ys and _is_bars(chart):
        ys.append(1.1 * max(ys))  # room for their values
    if chart.quantile:
        axis.set_ylim(0, 1.02)
    elif not lying:
        _scale(axis, "y", ys, logarithmic=_is_log(chart, "y", ys), from_zero=chart.from_zero)


def _is_log(chart: Chart, name: Literal["x", "y"], values: Sequence[float]) -> bool:
    """Whether this axis is logarithmic: as the chart begins, or where its values reach far."""
    if not values or min(values) <= 0:
        return False
    far = name in chart.log and not chart.quantile and max(values) >= LOG_FROM * min(values)
    return name in chart.log_now or far


def _scale(axis: Axes, name: Literal["x", "y"], values: Sequence[float], *, logarithmic: bool, from_zero: bool) -> None:
    """From 0 unless all values lie far from it."""
    ticks = axis.xaxis if name == "x" else axis.yaxis
    limits = axis.set_xlim if name == "x" else axis.set_ylim
    if logarithmic:
        (axis.set_xscale if name == "x" else axis.set_yscale)("log")
        ticks.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 100 * min(values) else (1,)))
        ticks.set_minor_formatter(NullFormatter())
    elif values:
        low, high = min(values), max(values)
        zoomed = low > ZOOM_RATIO * high or low < 0 or not from_zero
        margin = 0.06 * (high - low if zoomed else high) or 0.01 * abs(high) or 1.0
        limits(low - margin if zoomed else 0.0, high + margin)
    ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"))


def _below(figure: Figure, axes: Sequence[Axes], notes: str) -> None:
    """What stands below the charts: their notes, and the names of lines or bars where all charts have the same; else
    each chart has its names above it."""
    named = [(axis, _handles(axis)) for axis in axes]
    fullest = max((names for _, names in named), key=len)
    if len(fullest) < 2 or not all(names.keys() <= fullest.keys() for _, names in named):
        for axis, names in named:
            if len(names) > 1:
                axis.legend(names.values(), names.keys(), loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8,
                            ncols=len(names) if len(names) < 5 else 3, borderaxespad=0.1)  # fmt: skip
        figure.supxlabel(notes, x=0.01, ha="left", fontsize=7, color=FADED)
        return
    for tried in range(min(LEGEND_COLUMNS, len(fullest)), 0, -1):
        legend = figure.legend(fullest.values(), fullest.keys(), loc="outside lower center", ncols=tried, title=notes,
                               title_fontsize=7)  # fmt: skip
        legend.get_title().set_color(FADED)
        if tried == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _handles(axis: Axes) -> Mapping[str, Artist]:
    """By name the first thing drawn in it."""
    found: dict[str, Artist] = {}
    for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
        found.setdefault(label, handle)
    return found
