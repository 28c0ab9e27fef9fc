"""Figures 6 to 10 of arXiv 2311.03687 as predicted. Every one says that it is emulated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadgen.report.figures import COLOURS, DASHES, GRID, STYLE, legend_below, titled
from servers.predict import paper_layout
from servers.predict.paper import Paper, Result


def draw(paper: Paper, results: Mapping[str, Result], directory: Path) -> None:
    """Writes figure6 to figure10, as .png and .svg."""
    _throughput(paper, results, directory)
    for figure in paper_layout.figures(paper):
        _latencies(figure, results, directory)


def _throughput(paper: Paper, results: Mapping[str, Result], directory: Path) -> None:
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = _figure(3.9, 6, "throughput")
        axes = figure.subplots(1, len(paper.models))
        for axis, model in zip(axes, paper.models, strict=True):
            for row, server in enumerate(paper.servers):
                for place, platform in enumerate(paper.platforms):
                    at = place + (row - 1) * 0.27
                    result = results[f"{platform}/{model}/{server}"]
                    if result.reason:
                        axis.text(at, 0, " does not fit", rotation=90, ha="center", va="bottom", fontsize=7)
                        continue
                    label = paper.servers[server].name if place == 0 else None
                    axis.bar(at, result.measure("throughput"), 0.25, color=COLOURS[row], label=label)
            axis.set_title(f"Llama2-{model.upper()}")
            names = [each.name.replace(" ", "\n", 1) for each in paper.platforms.values()]
            axis.set_xticks(np.arange(len(names)), names, fontsize=7)
            axis.grid(axis="y", color=GRID, linewidth=0.6)
            axis.set_axisbelow(True)
        axes[0].set_ylabel("Output tokens/s (predicted)")
        legend_below(figure, axes[0], 3)
        _save(figure, 6, directory)


def _latencies(of: paper_layout.Figure, results: Mapping[str, Result], directory: Path) -> None:
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        rows = -(-len(of.panels) // 3)
        figure = _figure(1.2 + 2.7 * rows, of.number, of.title)
        axes = figure.subplots(rows, 3, squeeze=False).flat
        for axis, panel in zip(axes, of.panels, strict=False):
            axis.set_title(panel.title)
            for row, (label, run) in enumerate(panel.runs.items()):
                _line(axis, results[run], row, label)
            axis.set_ylim(0, 1.02)
            axis.set_xlim(left=0)
            axis.grid(color=GRID, linewidth=0.6)
            axis.set_axisbelow(True)
            axis.set_xlabel("Latency, s (predicted)")
        for axis in list(axes)[len(of.panels) :]:
            axis.set_axis_off()
        legend_below(figure, max(figure.axes, key=lambda axis: len(axis.get_legend_handles_labels()[1])), 4)
        _save(figure, of.number, directory)


def _line(axis: Axes, result: Result, row: int, label: str) -> None:
    latencies_s = result.latencies_s
    if result.reason:
        axis.text(0.5, 0.1 + 0.1 * row, f"{label}: does not fit", transform=axis.transAxes, ha="center", fontsize=8)
        return
    share = np.arange(len(latencies_s) + 1) / len(latencies_s)
    corners = np.concatenate((latencies_s[:1], latencies_s))
    axis.step(corners, share, where="post", label=label, color=COLOURS[row], linestyle=DASHES[row], linewidth=1.6)


def _figure(height: float, number: int, title: str) -> Figure:
    heading = f"EMULATED (modelled hardware, no real server)   as Fig. {number} of arXiv 2311.03687: {title}"
    return titled(10.5, height, heading, "#B00020")


def _save(figure: Figure, number: int, directory: Path) -> None:
    for suffix in ("png", "svg"):
        metadata = {"Date": None} if suffix == "svg" else None
        figure.savefig(directory / f"figure{number}.{suffix}", dpi=130, metadata=metadata)
