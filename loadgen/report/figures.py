"""The latency CDF: one panel a metric, one line a run, exact steps; and the bars of a breakdown. Only this, timeline.py
and, in servers/predict, paper_figures.py and published_figure.py import matplotlib: import them when a figure is wanted
(0.7 s, 70 MB), not before.

It must never smooth, extrapolate or hide that a run is emulated.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from loadgen import rundir
from loadgen.report.metrics import Distribution
from loadgen.report.pages.series import cdf

warnings.filterwarnings(
    "ignore", "Glyph .* missing", UserWarning
)  # of a model's name: a box, and nothing to do about it
PANELS = {
    "e2el_ms": "End-to-end latency",
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token",
}
# Okabe and Ito's palette, told apart with every common colour blindness; dashes tell the lines apart without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
GAP = " \N{NO-BREAK SPACE}"  # two spaces; SVG would draw neighbouring ones as one
INK, GRID = "#222222", "#D9D9D9"
SECONDS_FROM_MS = 2000.0  # axes that reach this far are in seconds
ZOOM_RATIO = 0.8  # when all values lie in the top fifth of the axis it does not begin at 0

STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # the layout is made for the first; none is wider
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, in the reader's font
    "svg.hashsalt": "loadgen",  # the same run gives the same bytes
}


@dataclass(frozen=True)
class Curves:
    """One run's line in every panel: the ascending values of each metric in `PANELS`. invalid: the run's verdict.
    lost: of the requests that are in no curve."""

    label: str
    emulated: bool
    samples: Mapping[str, Distribution]
    invalid: bool = False
    lost: str = ""

    @property
    def title(self) -> str:
        marks = (" (emulated)" if self.emulated else "") + (" (INVALID)" if self.invalid else "")
        return self.label + marks + self.lost


def draw(runs: Sequence[Curves], title: str, paths: Sequence[Path]) -> None:
    """Writes one figure to every path; the suffix (.png, .svg) says how."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = _figure(title, runs)
        axes = figure.subplots(1, len(PANELS), sharey=True)
        for axis, (metric, name) in zip(axes, PANELS.items(), strict=True):
            _panel(axis, metric, name, runs)
        axes[0].set_ylabel("Cumulative fraction of requests")
        if len(runs) > 1:
            legend_below(figure, axes[0], 2)
        save(figure, paths)


def save(figure: Figure, paths: Sequence[Path]) -> None:
    """Writes the figure to every path, laid out once: a layout takes as long as the drawing."""
    for path in paths:
        write(figure, path)
        figure.set_layout_engine("none")


def write(figure: Figure, path: Path, dpi: int = 160) -> None:
    """Writes the figure to a path, whose suffix says how, at once or not at all. Raises OSError."""
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with rundir.replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=dpi, metadata=metadata)


def titled(width: float, height: float, title: str, colour: str = INK) -> Figure:
    """An empty figure, in inches, below its title, which has as many lines as it needs and is never mathematics."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    text = figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=colour)
    text.set_parse_math(False)
    taken_ratio = text.get_window_extent().width / (0.95 * figure.bbox.width)
    if taken_ratio > 1:
        text.set_text(textwrap.fill(title, max(1, int(len(title) / taken_ratio))))
    return figure


def legend_below(figure: Figure, axis: Axes, columns: int) -> None:
    """The names of an axis's lines or bars below the figure, in `columns` columns or as many as there is room for."""
    handles, labels = axis.get_legend_handles_labels()
    for tried in range(min(columns, len(labels)), 0, -1):
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=tried)
        for text in legend.get_texts():
            text.set_parse_math(False)
        if tried == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def marked(title: str, emulated: int, invalid: int, runs: int) -> tuple[str, str]:
    """The title of a figure of so many runs, with what a reader must know first of those of them that are emulated or
    invalid; and its colour."""
    if emulated:
        which = "EMULATED" if emulated == runs else "PARTLY EMULATED"
        title = f"{which} (modelled hardware, no real server){GAP}{title}"
    if invalid:
        title = f"{'INVALID' if invalid == runs else 'PARTLY INVALID'}{GAP}{title}"
    return title, "#B00020" if emulated or invalid else INK


def _figure(title: str, runs: Sequence[Curves]) -> Figure:
    emulated, invalid = sum(run.emulated for run in runs), sum(run.invalid for run in runs)
    height = 3.9 if len(runs) == 1 else 4.0 + 0.2 * math.ceil(len(runs) / 2)  # a line of the legend names two
    return titled(10.5, height, *marked(title, emulated, invalid, len(runs)))


def _panel(axis: Axes, metric: str, name: str, runs: Sequence[Curves]) -> None:
    drawn = [(number, run, *cdf(run.samples[metric])) for number, run in enumerate(runs)]
    ends: list[Any] = [(x[0], x[-1]) for _, _, x, _ in drawn if len(x)]
    axis.set_title(name)
    axis.set_ylim(0, 1.02)
    axis.set_yticks(np.linspace(0, 1, 6))
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    if not ends:
        axis.text(0.5, 0.5, "no values", transform=axis.transAxes, ha="center", color="#888888")
        axis.set_xlabel("ms")
        return
    low, high = min(first for first, _ in ends), max(last for _, last in ends)
    unit, divisor = ("s", 1000.0) if high >= SECONDS_FROM_MS else ("ms", 1.0)
    zoomed = low > ZOOM_RATIO * high
    margin = 0.04 * (high - low if zoomed else high) or 0.01 * high or 1.0
    left, right = (low - margin if zoomed else 0.0) / divisor, (high + margin) / divisor
    for number, run, x, share in drawn:
        axis.step(
            np.concatenate((x / divisor, [right] if len(x) else [])),
            np.concatenate((share, [1.0] if len(x) else [])),
            where="post",
            label=run.title,
            color=COLOURS[number % len(COLOURS)],
            linestyle=DASHES[number % len(DASHES)],
            linewidth=1.8,
        )
    axis.set_xlim(left, right)
    axis.set_xlabel(f"{unit} (axis begins at {left:.4g})" if zoomed else unit)
    if len(runs) == 1:
        _mark_percentiles(axis, runs[0].samples[metric], divisor, unit)


def _mark_percentiles(axis: Axes, sample: Distribution, divisor: float, unit: str) -> None:
    """Dots at p50 and p99, and their values in the corner that the curve leaves free."""
    lines = []
    for percent in (50, 99):
        value = float(np.percentile(sample.values, percent)) * sample.unit_ms / divisor
        axis.plot([value], [percent / 100], "o", markersize=4.5, color=COLOURS[0])
        lines.append(f"p{percent}{GAP}{value:.0f} {unit}" if value >= 100 else f"p{percent}{GAP}{value:#.3g} {unit}")
    left, right = axis.get_xlim()
    slow = float(np.median(sample.values)) * sample.unit_ms / divisor > (left + right) / 2
    axis.text(
        0.04 if slow else 0.96,
        0.95 if slow else 0.06,
        "\n".join(lines),
        transform=axis.transAxes,
        ha="left" if slow else "right",
        va="top" if slow else "bottom",
        linespacing=1.5,
    )


HATCHED_FROM = 2  # round of the palette: the second is lighter, the third has lines as well
NAMED_RATIO = 0.04  # of the longest bar: what is shorter has no room for its number


def stacked(
    bars: Mapping[str, Mapping[str, float]], title: str, unit: str, paths: Sequence[Path], *, number: str = ".3g"
) -> None:
    """Writes a figure of horizontal bars, one below the other: values by part, by the bar's name, which is printable.
    Parts of one name have one colour; what is long enough says its value, in the format `number`."""
    all_parts = dict.fromkeys(part for bar in bars.values() for part in bar)
    parts = [part for part in all_parts if any(bar.get(part, 0.0) > 0 for bar in bars.values())]
    at, left = np.arange(len(bars)), np.zeros(len(bars))
    least = NAMED_RATIO * max(sum(bar.values()) for bar in bars.values())
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = titled(11.0, 1.6 + 0.45 * len(bars) + 0.2 * math.ceil(len(parts) / 6), title)
        axis = figure.subplots()
        for place, part in enumerate(parts):
            again = place // len(COLOURS)
            colour = COLOURS[place % len(COLOURS)]
            values = np.array([bar.get(part, 0.0) for bar in bars.values()])
            drawn = axis.barh(
                at, values, 0.72, left=left, label=part, color=_lighter(colour) if again else colour, edgecolor="white",
                hatch="//" if again >= HATCHED_FROM else None,
            )  # fmt: skip
            texts = [f"{value:{number}}" if value >= least else "" for value in values]
            axis.bar_label(drawn, texts, label_type="center", color="black" if again else "white", fontsize=8)
            left += values
        axis.set_yticks(at, list(bars), fontsize=8)
        for label in axis.get_yticklabels():
            label.set_parse_math(False)
        axis.invert_yaxis()
        axis.set_xlim(0, float(left.max(initial=0.0)) or 1.0)
        axis.set_xlabel(unit)
        legend_below(figure, axis, 6)
        save(figure, paths)


def _lighter(colour: str) -> tuple[float, float, float]:
    red, green, blue = to_rgb(colour)
    return 0.45 * red + 0.55, 0.45 * green + 0.55, 0.45 * blue + 0.55
