"""Predicted memory beside what others published, and beside what a sweep here measured. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from training_probe.grid import Cell
from training_probe.memory import Prediction
from training_probe.memory.text import Described, aligned, prediction_of
from training_probe.published import Published, rows
from training_probe.results import GIB, CellResult

SCHEMA = "training_probe.published_memory/1"


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """One published number, all in GiB. predicted: of what it counts (allocated, where that is not known); None without
    a cell. measured: of a sweep's cell, likewise. off_by: predicted over published, less 1."""

    source: str
    row: str
    counts: str
    published_gib: float
    predicted_gib: float | None = None
    measured_gib: float | None = None
    off_by: float | None = None
    cell: str | None = None
    same: str
    differs: str


def beside(cells: Iterable[Cell], known: Mapping[str, Described], measured: Sequence[CellResult]) -> list[Beside]:
    """The rows of the chosen cells; where all are chosen, also those that have none."""
    chosen, of_cell = set(cells), {result.cell: result for result in measured}
    everything = chosen >= {row.cell() for row in rows()} - {None}
    return [
        _beside(row, known, of_cell)
        for row in rows()
        if (cell := row.cell()) in chosen or (cell is None and everything)
    ]


def text(lines: Sequence[Beside]) -> str:
    """A line of summary, and a row each."""
    offs = [abs(line.off_by) for line in lines if line.off_by is not None]
    none = sum(line.same == "no" for line in lines)
    summary = f"PREDICTED, nothing was run. {len(lines)} published numbers, {none} of them of methods that no cell has"
    if offs:
        within = sum(off <= 0.1 for off in offs)
        summary += f"; off by {statistics.median(offs):.0%} in the median, {within} of {len(offs)} within 10 %"
    table = [["source", "what", "counts", "published GiB", "predicted", "measured", "off by", "same", "what differs"]]
    table += [list(_shown(line)) for line in lines]
    return "\n".join([f"{summary}.", "", *aligned(table, left=(0, 1, 2, 7, 8)), ""])


def as_json(lines: Sequence[Beside]) -> str:
    return msgspec.json.format(msgspec.json.encode({"schema": SCHEMA, "rows": lines}), indent=2).decode() + "\n"


def _shown(line: Beside) -> Iterator[str]:
    yield from (line.source, line.row, line.counts)
    for size in (line.published_gib, line.predicted_gib, line.measured_gib):
        yield "-" if size is None else f"{size:.1f}"
    yield "-" if line.off_by is None else f"{line.off_by:+.0%}"
    yield from (line.same, line.differs)


def _beside(row: Published, known: Mapping[str, Described], of_cell: Mapping[str, CellResult]) -> Beside:
    cell = row.cell()
    prediction = None if cell is None else prediction_of(cell, known[cell.model])
    predicted = measured = None
    if isinstance(prediction, Prediction):
        predicted = (prediction.reserved_bytes if row.counts == "reserved" else prediction.peak_bytes) / GIB
    if cell is not None and (result := of_cell.get(cell.name)) is not None:
        measured = result.peak_reserved_gb if row.counts == "reserved" else result.peak_memory_gb
    published = row.bytes / GIB
    return Beside(
        source=row.source, row=row.row, counts=row.counts, published_gib=published, predicted_gib=predicted,
        measured_gib=measured, off_by=None if predicted is None else predicted / published - 1,
        cell=None if cell is None else cell.name, same=row.same, differs=row.differs,
    )  # fmt: skip
