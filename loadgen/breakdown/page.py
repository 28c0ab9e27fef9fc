"""The page of a decode step's breakdown, breakdown.html: its bars and both of its tables, as content of a page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from loadgen import rundir
from loadgen.breakdown.tables import IDLE, Row, StepBreakdown, facts, kind_rows, part_rows, title
from loadgen.document.content import Block, Cell, Chart, Code, Document, Items, ListItem, Number, Section, Series, Table

FILE = "breakdown.html"
COLOURS = 7  # that a page tells apart: the largest parts have them, and what is left is hatched
NAMED_RATIO = 0.9  # of what ran, that the rows must name before a reader may take them for the whole


def of(directory: Path, breakdown: StepBreakdown) -> Document:
    """The page of a breakdown, with the command that made it."""
    return page(breakdown, _argv(directory))


def _argv(directory: Path) -> list[str]:
    try:
        return rundir.read_manifest(directory).argv
    except rundir.RunError:
        return []


def page(breakdown: StepBreakdown, argv: Sequence[str] = ()) -> Document:
    """argv: the command that made it, where it is known."""
    unnamed = not breakdown.emulated and breakdown.attributed_ratio < NAMED_RATIO
    return Document(
        title=title(breakdown),
        verdict=_verdict(breakdown),
        tone="warning" if unnamed or breakdown.emulated else "plain",
        origin=_origin(breakdown),
        sections=[
            Section(
                id="bars",
                title="Where an average step goes",
                blocks=[_bars("X", breakdown.kinds, breakdown), _bars("XI", breakdown.parts, breakdown)],
                figures=["breakdown.png"],
            ),
            Section("kinds", "What kind of work (the paper's Table X)", [_table(kind_rows(breakdown), breakdown)]),
            Section(
                "parts", "Which part of the model (the paper's Table XI)", [_table(part_rows(breakdown), breakdown)]
            ),
            Section(id="facts", title="What was looked at", blocks=_facts(breakdown)),
            *([Section("kernels", "Kernels", [_kernels(breakdown)], detail=True)] if breakdown.kernels else []),
            *([Section("command", "The command", [Code(shlex.join(argv))], detail=True)] if argv else []),
        ],
        footer=f"breakdown.json has the same numbers; {breakdown.schema}, llm-dissect {rundir.package_version()}.",
    )


def _origin(breakdown: StepBreakdown) -> str:
    return "emulated" if breakdown.emulated else ""


def _verdict(breakdown: StepBreakdown) -> str:
    """The step and what most of it is."""
    kinds = sorted(breakdown.kinds.items(), key=lambda kind: -kind[1])[:3]
    largest = ", ".join(f"{name} {ms / breakdown.step_ms:.0%}" for name, ms in kinds if ms > 0)
    idle = breakdown.kinds.get(IDLE, 0.0) / breakdown.step_ms
    of_gpu = "" if any(name == IDLE for name, _ in kinds) else f", idle {idle:.0%}"
    return f"A decode step takes {breakdown.step_ms:.2f} ms: {largest}{of_gpu}."


def _bars(number: str, of: dict[str, float], breakdown: StepBreakdown) -> Chart:
    """The bars of one of the paper's two tables."""
    paper = breakdown.paper
    theirs = {} if paper is None else paper.kinds if number == "X" else paper.parts
    bars = {"modelled" if breakdown.emulated else "measured": of, **({"the paper": theirs} if theirs else {})}
    parts = [name for name in dict.fromkeys([*of, *theirs]) if any(bar.get(name, 0.0) > 0 for bar in bars.values())]
    by_size = sorted(parts, key=lambda name: -max(bar.get(name, 0.0) for bar in bars.values()))
    return Chart(
        title=f"Table {number} of an average step",
        x_label="",
        y_label="time of a step (ms)",
        series=[
            Series(
                name=name,
                x=list(range(len(bars))),
                y=[bar.get(name, 0.0) for bar in bars.values()],
                kind="bars",
                colour=by_size.index(name),
                dashed=by_size.index(name) >= COLOURS,
            )
            for name in parts
        ],
        origin=_origin(breakdown),
        categories=list(bars),
        stacked=True,
    )


def _table(rows: Sequence[Row], breakdown: StepBreakdown) -> Table:
    paper = breakdown.paper
    cells: list[list[Cell]] = []
    for row in rows:
        share = 100 * row.ms / breakdown.step_ms
        line: list[Cell] = [row.name, Number(f"{row.ms:.3f}", row.ms), Number(f"{share:.2f}", share)]
        if paper is not None and row.paper_ms is not None:
            share = 100 * row.paper_ms / paper.step_ms
            line += [Number(f"{row.paper_ms:.2f}", row.paper_ms), Number(f"{share:.2f}", share)]
        elif paper is not None:
            line += [Number("-"), Number("-")]
        cells.append(line)
    return Table(headers=["", "ms", "%", *(["paper, ms", "paper, %"] if paper else [])], rows=cells)


def _facts(breakdown: StepBreakdown) -> list[Block]:
    notes = [ListItem(head="Note", text=note) for note in breakdown.notes]
    return [Items([*(ListItem(head="", text=fact) for fact in facts(breakdown)), *notes])]


def _kernels(breakdown: StepBreakdown) -> Table:
    return Table(
        headers=["kernel", "counted as", "ms a step", "runs a step"],
        rows=[
            [kernel.name, kernel.kind, Number(f"{kernel.ms:.4f}", kernel.ms), Number(f"{kernel.count:g}", kernel.count)]
            for kernel in breakdown.kernels
        ],
        caption=f"{len(breakdown.kernels)} names of the trace",
        folded=True,
    )
