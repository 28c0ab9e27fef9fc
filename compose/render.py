"""Draws a dashboard as a picture, without Grafana: its own panels and queries, asked of a Prometheus.

    python compose/render.py serving --run 20260101-000000-abcdef --seconds 300 --out serving.png

Lines, heat maps, numbers and bars are drawn where the dashboard has them; tables are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.dates as dates
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

BOARDS = Path(__file__).parent / "grafana" / "dashboards"
COLUMNS, COLUMN_IN, LINE_IN, DPI = 24, 0.72, 0.36, 80
RATE_INTERVAL_S = 8  # what Grafana makes of a scrape every 2 s
POINTS = 150
MOST_BARS = 12


@dataclass(frozen=True)
class Source:
    """A Prometheus and what stands for Grafana's variables. Times are unix seconds."""

    url: str
    run: str
    start: float
    end: float

    def series(self, expr: str) -> list[tuple[dict[str, str], np.ndarray[Any, Any]]]:
        """Each series with its times and values, shape (2, n)."""
        expr = expr.replace("$__rate_interval", f"{RATE_INTERVAL_S}s").replace("$run_id", self.run)
        expr = expr.replace("$__range", f"{round(self.end - self.start)}s")
        step = max(1, round((self.end - self.start) / POINTS))
        words = urllib.parse.urlencode({"query": expr, "start": self.start, "end": self.end, "step": step})
        with urllib.request.urlopen(f"{self.url}/api/v1/query_range?{words}", timeout=30) as reply:
            found = json.loads(reply.read())["data"]["result"]
        return [(each["metric"], np.array(each["values"], dtype=float).T) for each in found]


def shown(value: float, unit: str) -> str:
    """A value in Grafana's units, as text."""
    if not math.isfinite(value):
        return "-"
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "bytes":
        return f"{value / 2**30:.3g} GiB"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def legend(text: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), text).replace(
        labels.get("run_id", "\0"), ""
    )


def draw_lines(axes: Axes, panel: Any, unit: str, source: Source) -> None:
    """A dashed line is of the right axis. What is zero throughout is left out."""
    rights = {each["matcher"]["options"]: each["properties"] for each in panel["fieldConfig"]["overrides"]}
    lines: list[Line2D] = []
    right = None
    for target in panel["targets"]:
        ours, style = axes, "-"
        if target["refId"] in rights:
            ours, style = (right := axes.twinx()), "--"
            right_unit = next(each["value"] for each in rights[target["refId"]] if each["id"] == "unit")
        for labels, (times, values) in source.series(target["expr"]):
            if np.nan_to_num(values).any():
                when = [datetime.fromtimestamp(t) for t in times]
                lines += ours.plot(
                    when, values, style, color=f"C{len(lines) % 10}", linewidth=1,  # type: ignore[arg-type]
                    label=legend(target["legendFormat"], labels) or "run",
                )  # fmt: skip
    dress(axes, unit, source)
    if right is not None:
        dress(right, right_unit, source)
    if lines:
        axes.legend(handles=lines, fontsize=6, loc="lower left", framealpha=0.7)
    else:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color="#888888")


def draw_heat(axes: Axes, panel: Any, unit: str, source: Source) -> None:
    found = {float(labels["le"]): values for labels, values in source.series(panel["targets"][0]["expr"])}
    bounds = sorted(bound for bound in found if math.isfinite(bound))
    times = sorted({t for _, values in found.items() for t in values[0]})
    grid = np.zeros((len(bounds), len(times)))
    for row, bound in enumerate(bounds):
        grid[row, np.searchsorted(times, found[bound][0])] = found[bound][1]
    counts = np.diff(grid, axis=0, prepend=0)
    used = np.flatnonzero((counts > 1e-6).any(axis=1))
    if used.size:
        low, high = max(0, used[0] - 1), used[-1] + 2
        image = np.ma.masked_less(counts[low:high], 1e-6)
        when = dates.date2num([datetime.fromtimestamp(t) for t in times])  # type: ignore[no-untyped-call]
        axes.pcolormesh(when, bounds[low:high], image, shading="nearest", cmap="turbo")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    dress(axes, "s", source)
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_number(axes: Axes, panel: Any, unit: str, source: Source) -> None:
    by_name = panel["options"].get("textMode") == "name"
    texts = []
    for target in panel["targets"]:
        for labels, (times, values) in source.series(target["expr"]):
            if source.end - times[-1] < 15:
                texts.append(legend(target["legendFormat"], labels) if by_name else shown(values[-1], unit))
    none = panel["fieldConfig"]["defaults"].get("noValue", "-")
    axes.text(0.5, 0.5, "\n".join(texts[:2]) or none, ha="center", va="center", fontsize=17, color="#1f4e79")
    axes.set_axis_off()


def draw_bars(axes: Axes, panel: Any, unit: str, source: Source) -> None:
    bars = [
        (legend(target["legendFormat"], labels), values[1][-1])
        for target in panel["targets"] for labels, values in source.series(target["expr"])
    ][:MOST_BARS]  # fmt: skip
    axes.barh([name for name, _ in bars], [value for _, value in bars], color="C0")
    axes.invert_yaxis()
    axes.tick_params(labelsize=6)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))


def dress(axes: Axes, unit: str, source: Source) -> None:
    axes.set_xlim(datetime.fromtimestamp(source.start), datetime.fromtimestamp(source.end))  # type: ignore[arg-type]
    axes.xaxis.set_major_formatter(dates.DateFormatter("%H:%M:%S"))  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))
    axes.tick_params(labelsize=6, which="both")
    axes.grid(alpha=0.25, linewidth=0.5)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)


DRAW: dict[str, Callable[[Axes, Any, str, Source], None]] = {
    "timeseries": draw_lines, "heatmap": draw_heat, "stat": draw_number, "bargauge": draw_bars,
}  # fmt: skip


def render(board: Any, source: Source, out: Path) -> None:
    """The dashboard in its own grid."""
    panels = [panel for panel in board["panels"] if panel["type"] in DRAW or panel["type"] == "row"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(COLUMNS * COLUMN_IN, height * LINE_IN + 0.5), dpi=DPI)
    whole = height + 0.5 / LINE_IN
    title = f"{board['title']}: {source.run}   (by compose/render.py, from Prometheus)"
    figure.text(0.01, 1 - 0.35 / LINE_IN / whole, title, fontsize=11, weight="bold")
    for panel in panels:
        at = panel["gridPos"]
        left, top = at["x"] / COLUMNS, 1 - (at["y"] + 0.5 / LINE_IN) / whole
        if panel["type"] == "row":
            figure.text(left + 0.005, top - 0.75 / whole, panel["title"], fontsize=10, color="#555555")
            continue
        width, tall = at["w"] / COLUMNS, at["h"] / whole
        axes = figure.add_axes((left + 0.04, top - tall + 0.8 / whole, width - 0.07, tall - 2 / whole))
        axes.set_title(panel["title"], fontsize=8, loc="left")
        DRAW[panel["type"]](axes, panel, panel.get("fieldConfig", {}).get("defaults", {}).get("unit", ""), source)
    figure.savefig(out, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws a dashboard as a picture, asking Prometheus.")
    parser.add_argument("board", choices=sorted(path.stem for path in BOARDS.glob("*.json")))
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="address of Prometheus")
    parser.add_argument("--run", default=".*", help="run id, or a regular expression of several (default: all)")
    parser.add_argument("--seconds", type=float, default=900, help="how far back")
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    asked = parser.parse_args()
    end = time.time()
    source = Source(asked.prometheus.rstrip("/"), asked.run, end - asked.seconds, end)
    try:
        render(json.loads((BOARDS / f"{asked.board}.json").read_text()), source, asked.out)
    except OSError as error:
        parser.exit(2, f"error: {error}; is Prometheus at {asked.prometheus}, and can {asked.out} be written?\n")


if __name__ == "__main__":
    main()
