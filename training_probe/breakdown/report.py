"""From traced cells to what is read: report.json, report.md, tables.tex and the figure of parts.

A cell that failed stands in it with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from urllib.parse import quote

import msgspec

from backends.untrusted import escaped
from loadgen.report.text import markdown_text
from training_probe import paper
from training_probe.breakdown import tables
from training_probe.breakdown.run import Breakdown
from training_probe.report import layout
from training_probe.report.build import ManifestFields, ReportHead
from training_probe.report.page import Page

SCHEMA = "training_probe.breakdown_report/1"
NOTHING = "No cell was traced to its end."


class TracedCounts(msgspec.Struct):
    all: int
    by_outcome: dict[str, int]


class BreakdownReport(ReportHead, kw_only=True):
    """report.json of a breakdown, schema `training_probe.breakdown_report/1`. explained_ratio: by the cell's name."""

    schema: str = SCHEMA
    cells: TracedCounts
    explained_ratio: dict[str, float]
    results: list[Breakdown]


def build(breakdowns: Sequence[Breakdown], manifest: ManifestFields) -> BreakdownReport:
    return BreakdownReport(
        **ReportHead.fields_of(manifest),
        platform=str(manifest.get("platform") or ""),
        cells=TracedCounts(len(breakdowns), dict(Counter(each.outcome for each in breakdowns))),
        explained_ratio={
            each.cell.name: each.attribution.explained_ratio for each in breakdowns if each.attribution is not None
        },
        results=list(breakdowns),
    )


def text(breakdowns: Sequence[Breakdown], width: int) -> str:
    """The tables for a terminal of `width` columns."""
    failed = [fill(escaped(line), width) + "\n" for line in _failed(breakdowns)]
    shown = [layout.text(table, width) for table in tables.build(breakdowns)] or [f"{NOTHING}\n"]
    return "\n".join([*shown, *failed])


def _failed(breakdowns: Sequence[Breakdown]) -> list[str]:
    return [f"{each.cell.name}: {each.outcome}: {each.reason}" for each in breakdowns if each.outcome != "ok"]


def page(breakdowns: Sequence[Breakdown], manifest: ManifestFields) -> Page:
    """The report of a breakdown, as `breakdown` and `report` write it."""
    report, made = build(breakdowns, manifest), tables.build(breakdowns)
    return Page(
        report=report,
        run_id=report.run_id,
        version=report.version,
        title=f"Where a training step goes on {report.platform or 'this machine'}",
        facts=_failed(breakdowns),
        links=[
            f"- {markdown_text(each.cell.name)}: [trace]({quote(each.trace)}), which <https://ui.perfetto.dev> opens"
            for each in breakdowns
            if each.trace
        ],
        tables=made,
        draw=lambda directory: _draw(directory, breakdowns) if made else {},
        figures="Figure",
        after=() if made else [f"{NOTHING}\n"],
    )


def _draw(directory: Path, breakdowns: Sequence[Breakdown]) -> dict[str, str]:
    """Figure 5: shares of a decoder layer's parts; the SVG's name and what it shows. Raises OSError."""
    from loadgen.report.figures import stacked  # matplotlib costs 0.7 s and 70 MB: after the numbers are safe
    from training_probe.report import figures

    bars: dict[str, dict[str, float]] = {}
    traced = [each for each in breakdowns if each.attribution is not None]
    for phase in ("forward", "backward"):
        for each in traced:
            own = {part: tables.part_seconds(each, phase, part) for part in tables.LAYER}
            theirs = {part: tables.printed(each).get((phase, part, "ms"), 0.0) for part in own}
            beside = f"{tables.PAPER}, BS {each.cell.micro_batch}"
            for name, parts in ((tables.title(each), own), (beside, theirs)):
                whole = sum(parts.values())
                if whole:
                    bars[escaped(f"{phase}: {name}")] = {part: 100 * value / whole for part, value in parts.items()}
    title = f"Parts of the decoder layers, as Figure 5 of {paper.SOURCE} (without what is recomputed)"
    paths = [directory / f"parts{suffix}" for suffix in figures.SUFFIXES]
    stacked(bars, title, "% of the layers' time in that pass", paths, number=".0f")
    return {"parts.svg": title}
