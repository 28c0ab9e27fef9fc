"""Results of cells as tables: in the paper's layout beside its platforms where they are the paper's cells, and one of
all cells with what the paper has no column for. Pure.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backends.untrusted import escaped
from loadgen.document.content import Cell, Column, Number, Table, number
from training_probe import paper
from training_probe.grid import adapter_notes, beyond_letters
from training_probe.paper import PaperRow, TableName
from training_probe.report.layout import Remarks, exact, known, titled
from training_probe.results import SHARED, CellResult

OOM = "-"
SIZES = "x: GPUs, s: tokens a sequence, b: sequences a GPU"  # in `short_name`
ROW_SIZES = "s: tokens a sequence, b: sequences a GPU, here/in the paper where they differ"  # in `row_name`
UNSOUND = "the losses were not finite or did not fall, so what was timed is no training"


@dataclass(frozen=True, eq=False)
class PaperLine:
    """A row of one of the paper's tables: what each of its platforms reached."""

    table: TableName
    model: str
    label: str
    batch_label: str  # only in Table II, where it distinguishes rows
    printed: Mapping[str, PaperRow]  # by platform

    @property
    def leading(self) -> PaperRow:
        return self.printed[paper.LEADING]


class MachineColumns(NamedTuple):
    """A column group of ours."""

    platform: str
    gpus: int
    on: str  # GPU or process

    def __str__(self) -> str:
        plural = "" if self.gpus == 1 else "es" if self.on == "process" else "s"
        return f"{self.platform}, {self.gpus} {self.on}{plural}"


Matched = dict[PaperLine, dict[MachineColumns, CellResult]]

# What the points of a line of Figure 4 share.
ALIKE = ("platform", "batch_size", *(name for name in SHARED if name != "gpus"))


def scaled(results: Sequence[CellResult]) -> list[list[CellResult]]:
    """Cells that differ in nothing but how many GPUs they had, from the fewest; where there are at least two."""
    lines: dict[tuple[object, ...], list[CellResult]] = {}
    for result in results:
        if result.state == "ok" and result.tokens_per_s and not result.search:
            lines.setdefault(tuple(getattr(result, name) for name in ALIKE), []).append(result)
    return [sorted(line, key=lambda result: result.gpus) for line in lines.values() if len(line) > 1]


def build(results: Sequence[CellResult]) -> list[Table]:
    """The paper's tables that these results have cells of, with the rows that were tried here; then all cells."""
    by_table = {table: matched(table, results) for table in paper.TABLES}
    made = [_of_paper(table, lines) for table, lines in by_table.items() if lines]
    return [*made, all_cells(results)] if results else made


# The paper's layout.


def lines(table: TableName) -> list[PaperLine]:
    printed: dict[tuple[str, str, str], dict[str, PaperRow]] = {}
    for row in paper.rows():
        if row.table == table:
            key = (row.model, row.label, row.batch_label if table == "II" else "")
            printed.setdefault(key, {})[row.platform] = row
    return [PaperLine(table, *key, by_platform) for key, by_platform in printed.items()]


def matched(table: TableName, results: Iterable[CellResult]) -> Matched:
    """The rows of a table that were tried here, in its order, each with the result of every number of GPUs."""
    results = list(results)
    tried: Matched = {}
    for line in lines(table):
        ours: dict[MachineColumns, CellResult] = {}
        for result in results:
            if _is_of(line, result):
                ours.setdefault(machine(result), result)
        if ours:
            tried[line] = ours
    return tried


def machine(result: CellResult) -> MachineColumns:
    return MachineColumns(result.platform, result.gpus, "process" if result.device == "cpu" else "GPU")


def _is_of(line: PaperLine, result: CellResult) -> bool:
    """Whether the paper ran this cell, on other hardware."""
    row = line.leading
    searched = bool(result.search) or result.batch_size is None
    cell = (result.task, result.engine, result.method, result.seq_len, paper.model_name(result.model))
    sizes = result.grad_accum == result.tp == result.pp == result.cp == result.ep == 1
    plain = sizes and not result.compile and set(beyond_letters(result)) <= {"fp32-adapters"}  # the paper does not say
    return (
        cell == (row.task, row.engine, row.method, row.seq_len, row.model)
        and plain
        and result.attention != "math"
        and (searched if line.table == "IV" else not searched and result.batch_size == row.batch_size)
    )


def _of_paper(table: TableName, tried: Matched) -> Table:
    platforms = [name for name in paper.PLATFORMS if any(name in line.printed for line in tried)]
    machines = sorted({each for ours in tried.values() for each in ours}, key=lambda each: (each.platform, each.gpus))
    with_batch = table in ("II", "IV")
    remarks = Remarks()
    rows = []
    for line, ours in tried.items():
        row: list[Cell] = [line.model.upper(), line.label]
        for platform in platforms:
            row += _printed(line.printed[platform], with_batch, remarks)
        for each in machines:
            row += _measured(ours.get(each), each, line.leading, with_batch, remarks)
        rows.append(tuple(row))
    columns = [Column("Model", left=True), Column("Method", left=True)]
    for name in platforms:
        heads = [*(["BS"] if with_batch else []), "Tokens/s (std)", "M"]
        columns += [Column(head, name, optional=name != paper.LEADING) for head in heads]
    for each in machines:
        columns += [Column(head, str(each)) for head in _heads(each, with_batch)]
    title = f"As Table {table} of {paper.SOURCE}: {paper.TITLES[table]}"
    caption = _caption(table, machines)
    return titled(f"table-{table}", title, tuple(columns), tuple(rows), caption, tuple(remarks.numbers))


def _heads(each: MachineColumns, with_batch: bool) -> list[str]:
    share = [] if each.gpus == paper.GPUS else [f"per {each.on}"]
    batch = ["BS"] if with_batch else []
    return [*batch, "Tokens/s (std)", *share, f"/ {paper.LEADING}", "M alloc.", "M res."]


def _printed(row: PaperRow, with_batch: bool, remarks: Remarks) -> list[Cell]:
    batch: list[Cell] = [row.batch_label] if with_batch else []
    if row.tokens_per_s is None or row.memory_gb is None:
        return [*batch, OOM + remarks.mark(row.note), OOM]
    spread = "" if row.std is None else f" ({row.std:g})"
    speed_text = f"{row.tokens_per_s:,.10g}{spread}{remarks.mark(row.note)}"
    return [*batch, Number(speed_text, row.tokens_per_s), Number(f"{row.memory_gb:g}", row.memory_gb)]


def _measured(
    result: CellResult | None, on: MachineColumns, beside: PaperRow, with_batch: bool, remarks: Remarks
) -> list[Cell]:
    """Blank where the cell was not tried."""
    if result is None:
        return [""] * len(_heads(on, with_batch))
    share = [] if on.gpus == paper.GPUS else [known(per_gpu(result))]
    batch = [_batch(result, remarks)] if with_batch else []
    ratio = ratio_to(result, beside)
    memory = [known(result.peak_memory_gb), known(result.peak_reserved_gb)]
    return [*batch, speed(result, remarks, oom=OOM), *share, known(ratio), *memory]


def _batch(result: CellResult, remarks: Remarks) -> Cell:
    limited = "the search ended here (--max-micro-batch); more may fit" if result.search_was_limited else ""
    return "" if result.batch_size is None else Number(f"{result.batch_size}{remarks.mark(limited)}", result.batch_size)


def ratio_to(result: CellResult, row: PaperRow) -> float | None:
    """Tokens/s per GPU here over the paper's; None where either has none."""
    ours, theirs = per_gpu(result), printed_per_gpu(row)
    return ours / theirs if ours and theirs else None


def per_gpu(result: CellResult) -> float | None:
    """Tokens/s; None where there is no valid number."""
    if result.state != "ok" or result.tokens_per_s is None:
        return None
    return result.tokens_per_s / result.gpus


def printed_per_gpu(row: PaperRow | None) -> float | None:
    """The paper's tokens/s."""
    return None if row is None or row.likely_tokens_per_s is None else row.likely_tokens_per_s / paper.GPUS


def short_name(result: CellResult) -> str:
    """A cell among others of its model and task: method and sizes, and the engine where it is not the usual one."""
    used = engine(result)
    batch = "" if result.batch_size is None else f" b{result.batch_size}"
    shown = "" if used == "deepspeed" else f"{used} "
    return f"{shown}{result.method} {result.gpus}x s{result.seq_len}{batch}"


def row_name(line: PaperLine, ours: Sequence[CellResult]) -> str:
    """A row of the paper's table: its method and sizes; where the batch here is another, it is HERE/PAPER'S."""
    here = ",".join(dict.fromkeys(str(each.batch_size) for each in ours if each.batch_size is not None)) or OOM
    theirs = str(line.leading.batch_size or OOM)
    return f"{line.label} s{line.leading.seq_len} b{here if here == theirs else f'{here}/{theirs}'}"


def speed(result: CellResult, remarks: Remarks, oom: str) -> Cell:
    """Tokens/s with its deviation, or the word for what happened instead, with its remark."""
    if result.outcome == "oom":
        return oom if oom == OOM else oom + remarks.mark(result.reason)
    if result.outcome != "ok":
        return result.outcome + remarks.mark(result.reason)
    spread = "" if result.tokens_per_s_std is None else f" ({number(result.tokens_per_s_std)})"
    mark = "" if result.valid else " INVALID" + remarks.mark(result.reason or UNSOUND)
    return exact(f"{number(result.tokens_per_s)}{spread}{mark}", result.tokens_per_s)


def _caption(table: TableName, machines: Sequence[MachineColumns]) -> tuple[str, ...]:
    sentences = [
        "Tokens/s of all GPUs together; M: peak memory of the GPU that had most, GiB (here allocated, reserved)."
    ]
    if table in ("II", "IV"):
        searched = ", here the largest that fitted, to an eighth" if table == "IV" else ""
        sentences.append(f"BS: sequences a GPU{searched}.")
    sentences += [f'"{OOM}": out of memory.', *([] if table == "II" else [paper.STD_NOTE])]
    other = [each for each in machines if each.gpus != paper.GPUS]
    if other:
        here = " and ".join(f"{each.gpus} ({each.platform})" for each in other)
        sentences.append(
            f"The paper's platforms have {paper.GPUS} GPUs, this machine {here}: compare tokens/s per GPU, as "
            f'"/ {paper.LEADING}" does.'
        )
    else:
        sentences.append(f'"/ {paper.LEADING}": tokens/s here over those of {paper.LEADING}, {paper.GPUS} GPUs both.')
    return tuple(sentences)


# All cells.

_MS, _GIB = "ms", "GiB"


def all_cells(results: Sequence[CellResult]) -> Table:
    """Every cell, with the times of a step and predicted memory, which the paper's tables have no column for."""
    remarks = Remarks()
    names = ("Model", "Task", "Engine", "Method")
    columns = [Column(name, left=True) for name in names]
    columns += [Column(name) for name in ("GPUs", "BS", "Seq")]
    columns += [Column("padding", "% of positions", optional=True), Column("Tokens/s (std)")]
    columns += [Column(name, "% of peak", optional=True) for name in ("MFU", "HFU")]
    columns += [Column("step", _MS)]
    columns += [Column(name, "ms in its phases", optional=True) for name in ("forward", "backward", "optimizer")]
    columns += [Column(name, _GIB) for name in ("predicted", "allocated", "reserved")]
    columns += [Column("J/token", "Energy", optional=True), Column("first step", _MS, optional=True)]
    columns += [Column("data wait", _MS, optional=True)]
    columns += [Column(name, "Checkpoint, GB/s", optional=True) for name in ("save", "load")]
    rows = []
    for result in results:
        shares = (None if ratio is None else 100 * ratio for ratio in (result.mfu_ratio, result.hfu_ratio))
        rows.append((
            paper.model_name(result.model), result.task, engine(result), result.method,
            Number(str(result.gpus), result.gpus), _batch(result, remarks), Number(str(result.seq_len), result.seq_len),
            known(None if result.padding_ratio is None else 100 * result.padding_ratio),
            speed(result, remarks, oom="OOM"), *map(known, shares),
            known(result.step_ms), known(result.forward_ms), known(result.backward_ms), known(result.optimizer_ms),
            known(result.predicted_memory_gb), known(result.peak_memory_gb), known(result.peak_reserved_gb),
            known(result.energy_j_per_token), known(result.first_step_ms), known(result.data_wait_ms),
            *(known(_gb_per_s(result.checkpoint_bytes, each))
              for each in (result.checkpoint_save_s, result.checkpoint_load_s)),
        ))  # fmt: skip
    caption = [
        "Tokens/s of all GPUs together (standard deviation over the runs); BS: sequences a GPU takes at once; times: "
        "means of a step; memory: of the GPU that had most, predicted to be allocated."
    ]
    if any(result.device == "cpu" for result in results):
        caption.append("On the CPU a process stands for a GPU, and memory is the process's own.")
    if any(result.checkpoint_bytes for result in results):
        caption.append("Checkpoint: what trains with the optimizer's state, to the disk itself and back.")
    if any(result.lengths for result in results):
        caption.append("Tokens/s and MFU count no padding; HFU counts what is computed of it.")
    if any(result.task == "dpo" for result in results):
        caption.append("BS of dpo counts pairs; tokens are those of both sequences, and MFU has the reference's pass.")
    caption += adapter_notes(results)
    table = titled("cells", "All cells", tuple(columns), tuple(rows), tuple(caption), tuple(remarks.numbers))
    return table.without_empty()


def _gb_per_s(size_bytes: int | None, seconds: float | None) -> float | None:
    return size_bytes / seconds / 1e9 if size_bytes and seconds else None


def engine(result: CellResult) -> str:
    """The engine, and what of its settings is not the usual."""
    sizes = (("tp", result.tp), ("pp", result.pp), ("cp", result.cp), ("ep", result.ep), ("ga", result.grad_accum))
    settings = [f"{name}{size}" for name, size in sizes if size > 1]
    settings += ["math"] if result.attention == "math" else []
    settings += ["compile"] if result.compile else []
    settings += ["own configuration"] if result.deepspeed else []
    return " ".join([result.engine, *settings, *beyond_letters(result)])


# One number a field, for other programs.

CSV_FIELDS = (
    "table", "platform", "gpus", "device", "model", "task", "engine", "method", "label", "attention", "batch_size",
    "seq_len", "grad_accum", "tp", "pp", "cp", "ep", "compile", "outcome", "valid", "tokens_per_s", "tokens_per_s_std",
    "tokens_per_s_per_gpu", "ratio_per_gpu", "runs", "mfu_ratio", "hfu_ratio", "step_ms", "forward_ms", "backward_ms",
    "optimizer_ms", "predicted_memory_gb", "peak_memory_gb", "peak_reserved_gb", "energy_j_per_token", "note",
    "lengths", "packing", "padding_ratio", "first_step_ms", "checkpoint_bytes", "checkpoint_save_s",
    "checkpoint_load_s", "data_wait_ms",
)  # fmt: skip


def csv_text(results: Sequence[CellResult]) -> str:
    """A line a cell: of each of the paper's tables its platforms and ours, then ours that are in none (table blank).
    ratio_per_gpu: tokens/s per GPU over the paper's A800."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _field(value) for name, value in row.items()} for row in _csv_rows(results))
    return out.getvalue()


def _csv_rows(results: Sequence[CellResult]) -> Iterator[dict[str, object]]:
    placed: set[str] = set()
    for table in paper.TABLES:
        for line, ours in matched(table, results).items():
            for row in line.printed.values():
                yield _csv_printed(row)
            for result in ours.values():
                placed.add(result.cell)
                ratio = ratio_to(result, line.leading)
                yield {"table": table, "label": line.label, "ratio_per_gpu": ratio, **_csv_measured(result)}
    yield from (_csv_measured(result) for result in results if result.cell not in placed)


def _csv_printed(row: PaperRow) -> dict[str, object]:
    same = ("table", "platform", "model", "task", "engine", "method", "label", "batch_size", "seq_len", "note")
    return {
        **{name: getattr(row, name) for name in same},
        "gpus": paper.GPUS,
        "device": "cuda",
        "outcome": "oom" if row.oom else "ok",
        "tokens_per_s": row.tokens_per_s,
        "tokens_per_s_std": row.std,
        "tokens_per_s_per_gpu": printed_per_gpu(row),
        "peak_memory_gb": row.memory_gb,
    }


def _csv_measured(result: CellResult) -> dict[str, object]:
    elsewhere = ("table", "label", "tokens_per_s_per_gpu", "ratio_per_gpu", "note", "model")
    return {
        **{name: getattr(result, name) for name in CSV_FIELDS if name not in elsewhere},
        "model": paper.model_name(result.model),
        "tokens_per_s_per_gpu": per_gpu(result),
        "note": result.reason,
    }


def _field(value: object) -> object:
    """Text of one line that a spreadsheet does not take for a formula."""
    if not isinstance(value, str):
        return value
    shown = escaped(value)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown
