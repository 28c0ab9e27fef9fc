"""Memory that others published of training (`data/published_memory.csv`), and the closest cells of today. Pure but for
that file.

The preset `published` has these cells; what no method of today expresses has none, and a reason.
"""

from __future__ import annotations

import csv
import functools
from typing import Any, Literal

import msgspec

from training_probe.grid import Cell, Device, Engine, Task, cell
from training_probe.paper import DATA

PRESET = "published"
UNITS = {"GB": 10**9, "GiB": 1 << 30}
YES = "yes"  # in the column `compile`


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One printed number. engine, method: of the closest cell, empty where none is close. counts: what of the allocator
    is meant. options: of the cell, as the file has them. same: how well the cell expresses it; differs: what is
    otherwise, or why there is no cell, a clause."""

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
    published: float
    unit: Literal["GB", "GiB"]
    counts: Literal["allocated", "reserved", "unknown"]
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
            self.method, model=self.model, task=self.task, engine=self.engine, gpus=self.gpus, seq_len=self.seq_len,
            micro_batch=self.micro_batch, grad_accum=self.grad_accum, compile=self.compile == YES, device=device,
            **self._options(),
        )  # fmt: skip

    def _options(self) -> dict[str, Any]:
        """By the names of the cell's fields, and of their types."""
        words = dict(word.split("=") for word in self.options.split())
        given = {name: value.split(",") if name == "lora_targets" else value for name, value in words.items()}
        typed = msgspec.convert({"model": self.model, **given}, Cell, strict=False)
        return {name: getattr(typed, name) for name in given}


@functools.cache
def rows() -> tuple[Published, ...]:
    """In the order of the file."""
    with (DATA / "published_memory.csv").open(encoding="utf-8", newline="") as file:
        printed = csv.DictReader(line for line in file if not line.startswith("#"))
        return tuple(msgspec.convert(row, Published, strict=False) for row in printed)


def cells(device: Device) -> list[Cell]:
    """The closest cells, each once."""
    closest = (row.cell(device) for row in rows())
    return list(dict.fromkeys(one for one in closest if one is not None))
