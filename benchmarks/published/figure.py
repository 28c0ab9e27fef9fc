"""Predicted over measured of every published row, one panel a metric, one colour a source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from benchmarks.published import METRICS, NAMES, Result, sources
from loadgen.report.figures import COLOURS, GRID, INK, STYLE, legend_below, titled

MARKERS = ("o", "s", "^", "D", "v", "P")


def draw(results: Sequence[Result], directory: Path) -> None:
    """Writes published.png and published.svg."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        heading = "EMULATED (modelled hardware) beside what others measured and published"
        figure = titled(10.5, 4.4, heading, "#B00020")
        panels = [metric for metric in METRICS if metric != "output_tokens_per_s"]
        axes = figure.subplots(1, len(panels))
        for axis, metric in zip(axes, panels, strict=True):
            _panel(axis, metric, results)
        legend_below(figure, axes[0], 2)
        for suffix in ("png", "svg"):
            metadata = {"Date": None} if suffix == "svg" else None
            figure.savefig(directory / f"published.{suffix}", dpi=130, metadata=metadata)


def _panel(axis: Axes, metric: str, results: Sequence[Result]) -> None:
    ends = []
    for index, source in enumerate(sources()):
        of_source = [each for each in results if each.source == source.name and not math.isnan(each.error(metric))]
        x = [getattr(each.measured, metric) for each in of_source]
        y = [getattr(each.predicted, metric) for each in of_source]
        axis.scatter(x, y, s=14, color=COLOURS[index], marker=MARKERS[index], alpha=0.75, label=source.title)
        ends += x + y
    low, high = min(ends) / 1.3, max(ends) * 1.3
    axis.plot([low, high], [low, high], color=INK, linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=NAMES[metric])
    axis.set_xlabel("Measured, ms")
    axis.set_ylabel("Predicted, ms")
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
