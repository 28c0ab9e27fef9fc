"""Memory that others published of training (`data/memory.csv`) and the closest cells of today: what is predicted of
them, and what a sweep here measured, beside. What no method of today expresses has no cell, and a reason.
"""

from __future__ import annotations

import csv
import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from benchmarks.published import DATA
from loadgen.document import terminal
from loadgen.document.content import Column, Table
from training_probe import own_deepspeed
from training_probe.grid import Cell, Device, Engine, Task, cell
from training_probe.memory import Prediction
from training_probe.memory.text import Described, prediction_of
from training_probe.options import described_models
from training_probe.results import GIB, CellResult

SCHEMA = "training_probe.published_memory/1"
UNITS = {"GB": 10**9, "GiB": 1 << 30}
YES = "yes"  # in the column `compile`


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One printed number. engine, method: of the closest cell, empty where none is close. counts: what of the allocator
    is meant, or the whole process. options: of the cell, as the file has them. zero: sizes in its DeepSpeed's
    file. same: how well the cell expresses it; differs: what is otherwise, or why there is no cell, a clause."""

    source: str
    row: str
    model: str
    task: Task
    engine: Engine | Literal[""]
    method: str
    gpus: int
    seq_len: int
    micro_batch: int
    grad_accum: int
    compile: Literal["", "yes"]
    options: str
    zero: str
    published: float
    unit: Literal["GB", "GiB"]
    counts: Literal["allocated", "reserved", "process", "unknown"]
    same: Literal["exact", "close", "no"]
    differs: str

    @property
    def bytes(self) -> float:
        return self.published * UNITS[self.unit]

    def cell(self, device: Device = "cuda") -> Cell | None:
        """The closest one; None where none is close."""
        if not self.method:
            return None
        return cell(
            self.method, model=self._model(), task=self.task, engine=self.engine, gpus=self.gpus, seq_len=self.seq_len,
            micro_batch=self.micro_batch, grad_accum=self.grad_accum, compile=self.compile == YES, device=device,
            **self._options(),
        )  # fmt: skip

    def sizes(self, cell: Cell) -> own_deepspeed.ZeroSizes:
        """Of the column `zero`."""
        given = {name: float(value) for name, value in (word.split("=") for word in self.zero.split())}
        own = {"zero_optimization": given}
        if field := own_deepspeed.uncounted(cell, own):
            raise ValueError(f"{self.row}: no memory is predicted with {field}")
        return own_deepspeed.sizes(cell, own)

    def _model(self) -> str:
        """By name, or where `data/models` has its config.json."""
        return str(DATA / self.model) if self.model.startswith("models/") else self.model

    def _options(self) -> dict[str, Any]:
        """By the names of the cell's fields, and of their types."""
        words = dict(word.split("=") for word in self.options.split())
        given = {name: value.split(",") if name == "lora_targets" else value for name, value in words.items()}
        typed = msgspec.convert({"model": self.model, **given}, Cell, strict=False)
        return {name: getattr(typed, name) for name in given}


@functools.cache
def rows() -> tuple[Published, ...]:
    """In the order of the file."""
    with (DATA / "memory.csv").open(encoding="utf-8", newline="") as file:
        printed = csv.DictReader(line for line in file if not line.startswith("#"))
        return tuple(msgspec.convert(row, Published, strict=False) for row in printed)


def cells(device: Device) -> list[Cell]:
    """The closest cells, each once."""
    closest = (row.cell(device) for row in rows())
    return list(dict.fromkeys(one for one in closest if one is not None))


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


def beside(measured: Sequence[CellResult] = ()) -> list[Beside]:
    """Every row, with what is predicted and, of a sweep of its cell, measured."""
    known, of_cell = described_models(cells("cuda")), {result.cell: result for result in measured}
    return [_beside(row, known, of_cell) for row in rows()]


def text(lines: Sequence[Beside]) -> str:
    """A line of summary, and a row each."""
    offs = [abs(line.off_by) for line in lines if line.off_by is not None]
    none = sum(line.same == "no" for line in lines)
    summary = f"PREDICTED, nothing was run. {len(lines)} published numbers, {none} of them of methods that no cell has"
    if offs:
        within = sum(off <= 0.1 for off in offs)
        summary += f"; off by {statistics.median(offs):.0%} in the median, {within} of {len(offs)} within 10 %"
    heads = ["source", "what", "counts", "published GiB", "predicted", "measured", "off by", "same", "what differs"]
    columns = [Column(head, left=at in (0, 1, 2, 7, 8)) for at, head in enumerate(heads)]
    table = Table(columns, [list(_shown(line)) for line in lines])
    return "\n".join([f"{summary}.", "", *terminal.table(table, terminal.WIDEST)])


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
    prediction = None if cell is None else prediction_of(cell, known[cell.model], row.sizes(cell))
    predicted = measured = None
    if isinstance(prediction, Prediction):
        of_counts = {"reserved": prediction.reserved_bytes, "process": prediction.process_bytes}
        predicted = of_counts.get(row.counts, prediction.peak_bytes) / GIB
    if cell is not None and (result := of_cell.get(cell.name)) is not None:
        measured = result.peak_reserved_gb if row.counts == "reserved" else result.peak_memory_gb
    published = row.bytes / GIB
    return Beside(
        source=row.source, row=row.row, counts=row.counts, published_gib=published, predicted_gib=predicted,
        measured_gib=measured, off_by=None if predicted is None else predicted / published - 1,
        cell=None if cell is None else cell.name, same=row.same, differs=row.differs,
    )  # fmt: skip
