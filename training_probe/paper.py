"""What arXiv 2311.03687 printed of training (Tables II, III, IV and IX, `data/paper_tables.csv`), and the presets that
run the same cells here, and those that it traced. Pure but for that file.

Numbers stand as printed. Where one is a misprint or odd, `note` has why, and `read_as` the number to reckon with.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec

from backends import catalog
from training_probe.grid import PAPER_SEQ_LEN, Cell, Device, Engine, Method, Task, cell

SOURCE = "arXiv 2311.03687"
DATA = Path(__file__).parent / "data"
GPUS = 8  # of each platform of the paper
WARMUP_STEPS, STEPS, RUNS = 30, 100, 3  # of each of its cells
LEADING = "A800"  # the platform that this machine is set beside
PLATFORMS = (LEADING, "RTX4090", "RTX3090 w/ NVLink", "RTX3090 w/o NVLink")
STD_NOTE = (
    "The paper's spread stands in brackets as printed; its unit is not stated, and it is too small to be the standard "
    "deviation of tokens/s over three runs."
)

TableName = Literal["II", "III", "IV", "IX"]
TABLES: tuple[TableName, ...] = get_args(TableName)
TITLES: dict[TableName, str] = {
    "II": "Megatron and DeepSpeed",
    "III": "Pre-training, one sequence a GPU",
    "IV": "Pre-training, the largest batch that fits",
    "IX": "Fine-tuning",
}
# Table II names engines. Its Megatron cannot but shard the optimizer: 49.1 GB are 6 + 12 / 8 bytes a parameter.
_ENGINES: dict[str, tuple[Engine, str]] = {"Megatron": ("megatron", "Z1"), "DeepSpeed": ("deepspeed", "Naive")}
_GLOBAL = " global"  # after a batch size that is of all GPUs together


class PaperRow(msgspec.Struct, frozen=True, kw_only=True):
    """One printed cell. batch_size: sequences a GPU, None where none fits; batch_label: as printed. tokens_per_s: of
    all GPUs together, None where memory ran out. memory_gb: GiB, as the paper's "GB" are."""

    table: TableName
    task: Task
    model: str
    platform: str
    engine: Engine
    method: str  # canonical: str(Method)
    label: str  # the paper's own
    batch_size: int | None
    batch_label: str
    seq_len: int = PAPER_SEQ_LEN
    tokens_per_s: float | None
    std: float | None
    memory_gb: float | None
    read_as: float | None  # tokens/s, where the printed number is a misprint
    note: str

    @property
    def oom(self) -> bool:
        """Printed as "-"."""
        return self.tokens_per_s is None

    @property
    def likely_tokens_per_s(self) -> float | None:
        return self.tokens_per_s if self.read_as is None else self.read_as


@functools.cache
def rows() -> tuple[PaperRow, ...]:
    """Every printed cell, in the paper's order: table, model, method, platform."""
    with (DATA / "paper_tables.csv").open(encoding="utf-8", newline="") as file:
        return tuple(map(_row, csv.DictReader(line for line in file if not line.startswith("#"))))


def _row(printed: Mapping[str, str]) -> PaperRow:
    engine, method = _ENGINES.get(printed["method"], ("deepspeed", printed["method"]))
    batch = printed["batch_size"]
    sequences = int(batch.removesuffix(_GLOBAL)) // (GPUS if batch.endswith(_GLOBAL) else 1) if batch else None
    numbers = {name: _number(printed[name]) for name in ("tokens_per_s", "std", "memory_gb", "read_as")}
    return msgspec.convert(
        {
            **numbers,
            **{name: printed[name] for name in ("table", "model", "platform", "note")},
            "task": "finetune" if printed["table"] == "IX" else "pretrain",
            "engine": engine,
            "method": str(Method.parse(method)),
            "label": printed["method"],
            "batch_size": sequences,
            "batch_label": batch,
        },
        PaperRow,
    )


def _number(text: str) -> float | None:
    return float(text) if text else None


def model_name(model: str) -> str:
    """The paper's short name of a model (`7b`) however it was named; the last part of any other model's name."""
    spec = catalog.find(model)
    return spec.aliases[0] if spec and spec.aliases else model.rstrip("/").rpartition("/")[2]


def presets() -> dict[str, Callable[[int, Device], list[Cell]]]:
    """The cells of each preset, by its name: functions of the device and of how many there are to use, 0 where nobody
    chose how many processes to use on the CPU."""
    return {
        "paper-table2": functools.partial(_of_table, "II"),
        "paper-table3": functools.partial(_of_table, "III"),
        "paper-table4": functools.partial(_of_table, "IV"),
        "paper-table9": functools.partial(_of_table, "IX"),
        **{f"paper-{name}": functools.partial(_traced, cells) for name, cells in _TRACED.items()},
        "paper-fig4": _figure4,
        "laptop": _laptop,
    }


def _of_table(table: TableName, gpus: int, device: Device) -> list[Cell]:
    """The table's rows in its order, on all GPUs here; where the paper searched the batch size, it is searched."""
    return list(dict.fromkeys(
        cell(
            row.method, model=row.model, task=row.task, engine=row.engine, gpus=max(1, gpus), seq_len=row.seq_len,
            micro_batch=None if table == "IV" else row.batch_size, device=device,
        )
        for row in rows() if row.table == table
    ))  # fmt: skip


# What Tables V to VIII and XIII to XVI trace: (model, method, batch size). XIV and XVI are printed as ZeRO-2 and ZeRO-3
# at BS 32, which fits no A800 without recomputation, and their copies to the host are those of offloading.
_OFFLOADED = tuple((model, method, 32) for method in ("R+Z2+O", "R+Z3+O") for model in ("7b", "13b"))
_TRACED: dict[str, tuple[tuple[str, str, int], ...]] = {
    "table5": (("7b", "Naive", 2),),
    "table7": (("7b", "R", 32),),
    "table8": (("7b", "Naive", 2), ("7b", "F", 2)),
    "table13": (("7b", "Naive", 2), ("7b", "R", 32)),
    "table14": _OFFLOADED,
    "table15": (("7b", "Naive", 2), ("7b", "F", 2), ("7b", "R", 32), ("7b", "F+R", 32)),
    "table16": _OFFLOADED,
    "fig5": (("7b", "Naive", 2), ("7b", "R", 32)),
}


def _traced(cells: tuple[tuple[str, str, int], ...], gpus: int, device: Device) -> list[Cell]:
    return [
        cell(method, model=model, gpus=max(1, gpus), micro_batch=batch, device=device) for model, method, batch in cells
    ]


def _figure4(gpus: int, device: Device) -> list[Cell]:
    """Quantized pre-training of 7b over GPUs: 1, 2, 4 and so on, and all of them."""
    counts = {1 << power for power in range(max(1, gpus).bit_length())} | {max(1, gpus)}
    return [cell("Q", model="7b", gpus=count, micro_batch=2, device=device) for count in sorted(counts)]


_LAPTOP: tuple[tuple[Task, Engine, str, int, int], ...] = (  # with processes, tokens a sequence
    ("pretrain", "deepspeed", "Naive", 1, 128),
    ("pretrain", "deepspeed", "Z2", 2, 128),
    ("pretrain", "deepspeed", "Z3", 2, 128),
    ("pretrain", "deepspeed", "Z2+O", 1, 64),
    ("pretrain", "deepspeed", "F+R+Z3", 2, 64),
    ("pretrain", "deepspeed", "Q", 1, 64),
    ("finetune", "deepspeed", "L", 1, 128),
    ("finetune", "deepspeed", "QL", 1, 64),
    ("finetune", "deepspeed", "PT+Z2", 1, 64),
    ("finetune", "deepspeed", "L+Z3", 2, 64),
    ("pretrain", "fsdp2", "F+Z2", 1, 128),
    ("pretrain", "fsdp2", "F+R+Z3", 2, 128),
    ("pretrain", "ddp", "Naive", 2, 128),
    ("pretrain", "ddp", "F", 1, 128),
)


def _laptop(gpus: int, device: Device) -> list[Cell]:
    """A tiny model through three engines, some in two processes: two need no second processor, but they do need a
    second GPU."""
    most = min(2, gpus) if gpus else 2 if device == "cpu" else 1
    return list(dict.fromkeys(
        cell(
            method, model="tiny", task=task, engine=engine, gpus=min(processes, most), seq_len=seq_len, device=device
        )
        for task, engine, method, processes, seq_len in _LAPTOP
    ))  # fmt: skip
