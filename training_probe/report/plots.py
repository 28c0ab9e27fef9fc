"""Which figures a sweep's results give, and what is in each. Imports matplotlib (through `figures`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from backends.untrusted import UNDECODABLE
from training_probe import paper
from training_probe.paper import TableName
from training_probe.protocol import TIMELINE_FILE, Timeline
from training_probe.report import figures, tables
from training_probe.report.figures import Panel
from training_probe.results import CellResult

MOST_GROUPS = 24  # of bars in a row; more go into a panel below
MOST_LINES = 7  # of different colours


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
        **_memory(directory, results),
        **_scaling(directory, results),
        **_timelines(directory),
    }


def _beside_paper(directory: Path, table: TableName, matched: tables.Matched) -> dict[str, str]:
    machines = list(dict.fromkeys(machine for ours in matched.values() for machine in ours))
    panels = []
    for model in dict.fromkeys(line.model for line in matched):
        lines = {line: ours for line, ours in matched.items() if line.model == model}
        values: dict[str, list[float | str | None]] = {}
        for platform in dict.fromkeys(name for line in lines for name in line.printed):
            printed = (line.printed[platform] for line in lines)
            values[platform] = ["OOM" if row.oom else row.likely_tokens_per_s for row in printed]
        for machine in machines:
            values[str(machine)] = [_speed(ours.get(machine)) for ours in lines.values()]
        names = [f"{line.label}{f' BS {line.batch_label}' if table == 'II' else ''}" for line in lines]
        panels.append(Panel(model.upper(), names, values))
    title = f"As Table {table} of {paper.SOURCE}: {paper.TITLES[table]} (all GPUs together, {paper.GPUS} in the paper)"
    stem = directory / f"throughput-table-{table}"
    figures.bars(panels, title, "Tokens/s", stem, log=True)
    return {f"{stem.name}.svg": title}


def _speeds(directory: Path, results: Sequence[CellResult]) -> dict[str, str]:
    """Tokens/s of cells that the paper has no number for."""
    if not any(result.outcome == "ok" for result in results):
        return {}
    panels = [
        Panel(title, [_short(result) for result in part], {"tokens/s": [_speed(result) for result in part]})
        for title, part in _parts(results)
    ]
    title = (
        f"Tokens/s, all GPUs or processes of a cell together: {', '.join(dict.fromkeys(r.platform for r in results))}"
    )
    figures.bars(panels, title, "Tokens/s", directory / "throughput")
    return {"throughput.svg": title}


def _speed(result: CellResult | None) -> float | str | None:
    if result is None:
        return None
    return _end(result) or (result.tokens_per_s if result.valid else "invalid")


def _end(result: CellResult) -> str | None:
    """A word for how it ended, if it gave no number."""
    return {"ok": None, "oom": "OOM"}.get(result.outcome, result.outcome)


def _memory(directory: Path, results: Sequence[CellResult]) -> dict[str, str]:
    """Cells of which anything was measured or predicted."""
    known = [result for result in results if result.peak_memory_gb or result.predicted_memory_gb]
    panels = []
    for title, part in _parts(known):
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
            Panel(title, [_short(result) for result in part], values, ("device", size) if near and size else None)
        )
    if not panels:
        return {}
    title = "Peak memory, predicted and measured, of the GPU or process that had most"
    figures.bars(panels, title, "GiB", directory / "memory")
    return {"memory.svg": title}


def _parts(results: Iterable[CellResult]) -> list[tuple[str, list[CellResult]]]:
    """The cells in panels: a model and a task each, in rows that are not too long."""
    groups: dict[str, list[CellResult]] = {}
    for result in results:
        groups.setdefault(f"{paper.model_name(result.model)}, {result.task}", []).append(result)
    return [
        (f"{title}{' (more)' if start else ''}", part[start : start + MOST_GROUPS])
        for title, part in groups.items()
        for start in range(0, len(part), MOST_GROUPS)
    ]


def _short(result: CellResult) -> str:
    batch = f" BS {result.batch_size}" if result.batch_size not in (None, 1) else ""
    return f"{result.engine} {result.method} {result.gpus}x{batch}"


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
    """Memory over the first steps, of each cell that recorded it. A file that was cut by a kill gives none."""
    shown: dict[str, str] = {}
    for path in sorted(directory.glob(f"trials/*/*/{TIMELINE_FILE}")):
        name = path.parent.parent.name  # trials/<cell>/timeline/
        try:
            recorded = msgspec.json.decode(path.read_bytes(), type=Timeline)
        except UNDECODABLE:
            continue
        if not recorded.time_s or any(len(each) != len(recorded.time_s) for each in recorded.bytes):
            continue
        stem = directory / f"timeline-{figures.file_stem(name)}"
        title = f"Memory of the first steps: {name}"
        figures.timeline(recorded, title, stem)
        shown[f"{stem.name}.svg"] = title
    return shown
