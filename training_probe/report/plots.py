"""Which figures a sweep's results give, and what is in each. Imports matplotlib (through `figures`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from training_probe import paper
from training_probe.paper import PaperRow, TableName
from training_probe.report import figures, tables, timelines
from training_probe.report.figures import Panel
from training_probe.results import CellResult

MOST_BARS = 42  # in a row, so that the numbers on them can be read; more go into a panel below
MOST_LINES = 7  # of different colours
T = TypeVar("T")


def draw(directory: Path, results: Sequence[CellResult]) -> dict[str, str]:
    """Writes the figures (PNG and SVG); the SVGs' names with what they show. Raises OSError."""
    shown: dict[str, str] = {}
    placed: set[str] = set()
    for table in paper.TABLES:
        matched = tables.matched(table, results)
        placed |= {result.cell for ours in matched.values() for result in ours.values()}
        if matched:
            shown |= _beside_paper(directory, table, matched)
    return {
        **shown,
        **_speeds(directory, [result for result in results if result.cell not in placed]),
        **memory_figure(directory, results),
        **_scaling(directory, results),
        **_timelines(directory),
    }


def _beside_paper(directory: Path, table: TableName, matched: tables.Matched) -> dict[str, str]:
    machines = list(dict.fromkeys(machine for ours in matched.values() for machine in ours))
    platforms = [name for name in paper.PLATFORMS if any(name in line.printed for line in matched)]
    panels = []
    for model in dict.fromkeys(line.model for line in matched):
        lines = [line for line in matched if line.model == model]
        for title, part in _rows(model.upper(), lines, len(platforms) + len(machines)):
            values: dict[str, list[float | str | None]] = {
                f"{name}, {paper.GPUS} GPUs (paper)": [_printed(line.printed.get(name)) for line in part]
                for name in platforms
            }
            for machine in machines:
                values[str(machine)] = [_speed(matched[line].get(machine)) for line in part]
            names = [tables.row_name(line, [*matched[line].values()]) for line in part]
            panels.append(Panel(title, names, values))
    title = f"As Table {table} of {paper.SOURCE}: {paper.TITLES[table]} ({tables.ROW_SIZES})"
    stem = directory / f"throughput-table-{table}"
    figures.bars(panels, title, "tokens/s of a GPU", stem)
    return {f"{stem.name}.svg": title}


def _printed(row: PaperRow | None) -> float | str | None:
    """Tokens/s of a GPU."""
    return "OOM" if row is not None and row.oom else tables.printed_per_gpu(row)


def _speeds(directory: Path, results: Sequence[CellResult]) -> dict[str, str]:
    """Tokens/s of cells that the paper has no number for."""
    if not any(result.outcome == "ok" for result in results):
        return {}
    panels = [
        Panel(title, [*map(tables.short_name, part)], {"tokens/s": [_speed(result) for result in part]})
        for title, part in _parts(results, 1)
    ]
    on = tables.machine(results[0]).on
    platforms = ", ".join(dict.fromkeys(result.platform for result in results))
    title = f"Tokens/s of a {on}: {platforms} ({tables.SIZES})"
    figures.bars(panels, title, f"tokens/s of a {on}", directory / "throughput")
    return {"throughput.svg": title}


def _speed(result: CellResult | None) -> float | str | None:
    """Tokens/s of a GPU."""
    if result is None:
        return None
    return _end(result) or (tables.per_gpu(result) if result.valid else "invalid")


def _end(result: CellResult) -> str | None:
    """A word for how it ended, if it gave no number."""
    return {"ok": None, "oom": "OOM"}.get(result.outcome, result.outcome)


def memory_figure(directory: Path, results: Sequence[CellResult]) -> dict[str, str]:
    """Cells of which anything was measured or predicted."""
    known = [result for result in results if result.peak_memory_gb or result.predicted_memory_gb]
    panels = []
    for title, part in _parts(known, 3):
        sizes = {result.device_memory_gb for result in part}
        size = sizes.pop() if len(sizes) == 1 else None
        values: dict[str, list[float | str | None]] = {
            "predicted": [result.predicted_memory_gb for result in part],
            "allocated": [result.peak_memory_gb or _end(result) for result in part],
            "reserved": [result.peak_reserved_gb for result in part],
        }
        # a limit far above the bars would flatten them
        near = size is not None and size < 4 * max(
            max(result.peak_memory_gb or 0, result.predicted_memory_gb or 0) for result in part
        )
        panels.append(
            Panel(title, [*map(tables.short_name, part)], values, ("device", size) if near and size else None)
        )
    if not panels:
        return {}
    on = tables.machine(known[0]).on
    title = f"Peak memory, predicted and measured, of the {on} that had most ({tables.SIZES})"
    figures.bars(panels, title, "GiB", directory / "memory")
    return {"memory.svg": title}


def _parts(results: Iterable[CellResult], series: int) -> list[tuple[str, list[CellResult]]]:
    """The cells in panels: a model and a task each, in rows that are not too long."""
    groups: dict[str, list[CellResult]] = {}
    for result in results:
        groups.setdefault(f"{paper.model_name(result.model)}, {result.task}", []).append(result)
    return [row for title, part in groups.items() for row in _rows(title, part, series)]


def _rows(title: str, groups: Sequence[T], series: int) -> list[tuple[str, list[T]]]:
    """Groups of bars of so many series, in rows of about the same length that are not too long."""
    rows = -(-len(groups) * series // MOST_BARS)
    length = -(-len(groups) // rows) if rows else 1
    return [(title, [*groups[start : start + length]]) for start in range(0, len(groups), length)]


def _scaling(directory: Path, results: Sequence[CellResult]) -> dict[str, str]:
    points: dict[str, list[tuple[int, float, float | None]]] = {}
    for part in tables.scaled(results)[:MOST_LINES]:
        first = part[0]
        name = f"{paper.model_name(first.model)} {first.task} {first.engine} {first.method}, BS {first.batch_size}"
        points[f"{name}, {first.seq_len} tokens"] = [
            (result.gpus, result.tokens_per_s or 0.0, result.tokens_per_s_std) for result in part
        ]
    if not points:
        return {}
    title = f"Scaling, as Figure 4 of {paper.SOURCE}: {', '.join(dict.fromkeys(result.platform for result in results))}"
    on = "processes" if all(result.device == "cpu" for result in results) else "GPUs"
    figures.scaling(points, title, directory / "scaling", on=on)
    return {"scaling.svg": title}


def _timelines(directory: Path) -> dict[str, str]:
    """Memory over the first steps, of each cell that recorded it."""
    shown: dict[str, str] = {}
    for name, recorded in timelines.read(directory):
        stem = directory / f"timeline-{figures.file_stem(name)}"
        title = f"Memory of the first steps: {name}"
        figures.timeline(recorded, title, stem)
        shown[f"{stem.name}.svg"] = title
    return shown
