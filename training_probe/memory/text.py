"""Predicted memory for a reader: one line of summary and a table of cells, with every term on request, or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from backends.decoder import ModelSpec
from loadgen.document import terminal
from loadgen.document.content import Column, Table
from loadgen.document.terminal import WIDEST
from training_probe import memory
from training_probe.grid import NAIVE, PAPER_SEQ_LEN, Cell, Method, adapter_notes
from training_probe.memory import Prediction, process
from training_probe.memory.layers import uncounted
from training_probe.memory.rank import Moment, Term
from training_probe.own_deepspeed import DEFAULT_SIZES, ZeroSizes
from training_probe.refusals import impossible
from training_probe.results import GIB

SCHEMA = "training_probe.memory/1"
# What CUDA has of each card, GiB: of H100 and H200 as measured here, of the others as torch's messages have it.
CARDS = {
    "RTX 4090": 23.5, "RTX 5090": 31.3, "A100-40": 39.4, "L40S": 44.3, "A100-80": 79.1, "RTX PRO 6000": 94.5,
    "H200": 139.8, "B200": 178.3,
}  # fmt: skip
MOST_SEARCHED = 64
ROLLOUT = (
    "an engine of rollouts is assumed on each GPU, awake while the policy trains, with bf16 weights of the whole model "
    "and the KV cache of a micro batch; --rollout-gb names its share, 0 where it sleeps or runs elsewhere."
)

CellVerdict = Literal[process.Verdict, "predicted", "unsupported", "not predicted"]
VERDICTS: tuple[CellVerdict, ...] = ("fits", "tight", "does not fit", "predicted", "unsupported", "not predicted")


class Described(NamedTuple):
    """What a cell's model name stands for. spec: None where it is not known. unknown: why its memory is not, a clause.
    unbuilt: why the engines cannot build it of numbers alone."""

    spec: ModelSpec | None
    unknown: str = ""
    unbuilt: str = ""


class Capacity(NamedTuple):
    """What there is to compare with: memory of each GPU, as NVML or its maker names it, and of the node; None where it
    is not known."""

    gpu_bytes: int | None = None
    node_bytes: int | None = None


class PredictedCell(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of one cell, on the rank that has most. verdict: of its GPU; `predicted` where there is none to
    compare with. reason: why, a sentence or a clause. searched: whether its micro batch is where a search would begin.
    host_bytes: of a node that holds all ranks, 0 without offload. smallest_card: of CARDS, on which it is neither tight
    nor too large."""

    cell: str
    verdict: CellVerdict
    reason: str = ""
    searched: bool = False
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    host_bytes: int | None = None
    host_verdict: process.Verdict | None = None
    host_reason: str = ""
    smallest_card: str | None = None
    peak: str = ""
    moments: tuple[Moment, ...] = ()
    beyond: tuple[Term, ...] = ()
    host: tuple[Term, ...] = ()


class PredictedCells(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    gpu_memory_bytes: int | None
    node_memory_bytes: int | None
    cells: tuple[PredictedCell, ...]
    schema: str = SCHEMA


def predict_cells(cells: Sequence[Cell], known: Mapping[str, Described], capacity: Capacity) -> PredictedCells:
    """What is predicted of each cell."""
    own = tuple(_predicted_cell(cell, known[cell.model], capacity) for cell in cells)
    return PredictedCells(gpu_memory_bytes=capacity.gpu_bytes, node_memory_bytes=capacity.node_bytes, cells=own)


def text(predicted: PredictedCells, *, verbose: bool = False) -> str:
    """The summary, the table, and on request the arithmetic of every cell."""
    lines = [_summary(predicted), "", *_table(predicted)]
    if len(predicted.cells) == 1 or verbose:
        for each in predicted.cells:
            lines += ["", *_arithmetic(each, verbose)]
    return "\n".join([*lines, ""])


def all_fit(predicted: PredictedCells) -> bool:
    """Whether every cell fits, tightly or not, in its GPUs and its node."""
    return all(each.verdict in ("fits", "tight") and each.host_verdict != "does not fit" for each in predicted.cells)


def hints(cells: Sequence[Cell], known: Mapping[str, Described]) -> Iterator[str]:
    """What one cell without FlashAttention and recomputation would save by them, what LoRA trains in, and whose the
    length is."""
    if len(cells) == 1 and (saved := _saved(cells[0], known[cells[0].model])):
        yield f"of its memory {saved}."
    yield from adapter_notes(cells)
    if any(cell.task == "grpo" and cell.rollout_gb is None for cell in cells):
        yield ROLLOUT
    if any(cell.seq_len == PAPER_SEQ_LEN for cell in cells):
        yield f"sequences of {PAPER_SEQ_LEN} tokens are the paper's; --seq-len names others."


def _saved(cell: Cell, model: Described) -> str:
    """A clause; empty where the cell has one of the two already, or where neither saves anything."""
    letters = cell.letters
    if letters.flash or letters.recompute != "none" or cell.checkpoint:
        return ""
    sized = _sized(cell, model, None)
    before = prediction_of(sized, model)
    clauses = []
    for added, name in (("F", "FlashAttention"), ("R", "recomputation"), ("F+R", "both")):
        method = str(Method.parse(added if sized.method == NAIVE else f"{sized.method}+{added}"))
        kernel = "flash" if "F" in added else sized.attention
        after = prediction_of(msgspec.structs.replace(sized, method=method, attention=kernel), model)
        if isinstance(before, Prediction) and isinstance(after, Prediction):
            saved = before.peak_bytes - after.peak_bytes
            if saved > 0.01 * before.peak_bytes:
                clauses.append(f"{name} ({added}) would save {saved / GIB:.1f} GiB")
    return ", ".join(clauses)


def prediction_of(
    cell: Cell, model: Described, zero: ZeroSizes = DEFAULT_SIZES
) -> Prediction | tuple[CellVerdict, str]:
    """The prediction; or why there is none, with the verdict that this is. Its micro batch is a number."""
    why = impossible(cell, model.spec, model.unbuilt)
    if why is not None:
        return "unsupported", why
    if model.spec is None or model.unknown:
        return "not predicted", model.unknown or "its config.json describes no decoder that is known here"
    why = uncounted(cell, model.spec)
    return memory.predict(cell, model.spec, zero) if why is None else ("not predicted", why)


def _predicted_cell(asked: Cell, model: Described, capacity: Capacity) -> PredictedCell:
    cell = _sized(asked, model, capacity.gpu_bytes)
    searched = asked.micro_batch is None
    prediction = prediction_of(cell, model)
    if not isinstance(prediction, Prediction):
        verdict, reason = prediction
        return PredictedCell(cell=cell.name, verdict=verdict, reason=reason, searched=searched)
    verdict, reason = "predicted", ""
    if capacity.gpu_bytes is not None:
        verdict, reason = memory.fits(prediction, capacity.gpu_bytes)
    host_verdict: process.Verdict | None = None
    host_reason = ""
    if prediction.host and capacity.node_bytes is not None:
        host_verdict, host_reason = process.host_judged(prediction.host_bytes, capacity.node_bytes)
    return PredictedCell(
        cell=cell.name, verdict=verdict, reason=reason, searched=searched, allocated_bytes=prediction.peak_bytes,
        reserved_bytes=prediction.reserved_bytes, process_bytes=prediction.process_bytes,
        host_bytes=prediction.host_bytes, host_verdict=host_verdict, host_reason=host_reason,
        smallest_card=_smallest_card(prediction), peak=prediction.peak.name, moments=prediction.moments,
        beyond=(prediction.fragments, *prediction.outside), host=prediction.host,
    )  # fmt: skip


def _sized(cell: Cell, model: Described, device_bytes: int | None) -> Cell:
    """With a micro batch; for one that is searched, where the search would begin."""
    if cell.micro_batch is not None:
        return cell
    one = msgspec.structs.replace(cell, micro_batch=1)
    if device_bytes is None or model.spec is None or not isinstance(prediction_of(one, model), Prediction):
        return one
    start = memory.largest_micro_batch(one, model.spec, device_bytes, MOST_SEARCHED)
    return msgspec.structs.replace(cell, micro_batch=start)


def _smallest_card(prediction: Prediction) -> str | None:
    for name, gib in CARDS.items():
        if memory.verdict(prediction, round(gib * GIB)) == "fits":
            return name
    return None


def _summary(predicted: PredictedCells) -> str:
    count = f"{len(predicted.cells)} cell{'' if len(predicted.cells) == 1 else 's'}"
    verdicts = Counter(each.verdict for each in predicted.cells)
    counts = ", ".join(f"{verdicts[name]} {_plural(name, verdicts[name])}" for name in VERDICTS if verdicts[name])
    if predicted.gpu_memory_bytes is None:
        where = f"{count}, no GPU here to compare with (--gpu-memory-gb): {counts}"
    else:
        where = f"{count} on GPUs of {predicted.gpu_memory_bytes / GIB:.1f} GiB: {counts}"
    hosts = Counter(each.host_verdict for each in predicted.cells if each.host_verdict)
    if hosts and predicted.node_memory_bytes is not None:
        of_hosts = ", ".join(f"{count} {_plural(name, count)}" for name, count in hosts.items())
        where += f"; offload in nodes of {predicted.node_memory_bytes / GIB:.1f} GiB: {of_hosts}"
    return f"PREDICTED, nothing was run. {where}."


def _plural(verdict: str, count: int) -> str:
    return {"fits": "fit", "does not fit": "do not fit"}.get(verdict, verdict) if count != 1 else verdict


def _table(predicted: PredictedCells) -> list[str]:
    """GiB; a column of hosts only where something is offloaded."""
    hosts = any(each.host_bytes for each in predicted.cells)
    judged = predicted.gpu_memory_bytes is not None
    heads = ["cell, GiB of the rank that has most", "allocated", "reserved", "process"]
    heads += ["host"] * hosts + ["verdict" if judged else "smallest card that it fits"]
    rows = []
    for each in predicted.cells:
        sizes: list[int | None] = [each.allocated_bytes, each.reserved_bytes, each.process_bytes]
        sizes += [each.host_bytes] * hosts
        note = " (max is searched from here)" if each.searched else ""
        rows.append([each.cell + note, *map(_gib, sizes), _last(each, judged)])
    columns = [Column(head, left=head in (heads[0], heads[-1])) for head in heads]
    return [*terminal.table(Table(columns, rows), WIDEST)][:-1]


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}" if size else ""


def _last(each: PredictedCell, judged: bool) -> str:
    if each.verdict in ("unsupported", "not predicted"):
        return f"{each.verdict}: {each.reason}"
    shown = each.verdict if judged else each.smallest_card or "none that is known here"
    return shown + (f"; host: {each.host_verdict}" if each.host_verdict else "")


def _arithmetic(each: PredictedCell, verbose: bool) -> Iterator[str]:
    """Why, in a sentence; and each moment with its terms."""
    reasons = " ".join(part for part in (each.reason, each.host_reason) if part)
    if reasons or verbose:
        yield f"{each.cell}: {reasons}" if reasons else each.cell
    if not verbose:
        if each.moments:
            yield "--verbose has every term."
        return
    peak = next((moment for moment in each.moments if moment.name == each.peak), None)
    for moment in each.moments:
        mark = "  <- peak" if moment is peak else ""
        yield from _section(f"{moment.name}: {moment.bytes / GIB:.2f} GiB allocated{mark}", moment.terms)
    if each.process_bytes is not None and each.allocated_bytes is not None:
        beyond = each.process_bytes - each.allocated_bytes
        yield from _section(f"beyond what is allocated: {beyond / GIB:.2f} GiB", each.beyond)
    if each.host_bytes:
        yield from _section(f"host memory of a node that holds all ranks: {each.host_bytes / GIB:.2f} GiB", each.host)


def _section(title: str, terms: Sequence[Term]) -> Iterator[str]:
    columns = [Column("GiB"), Column("term", left=True), Column("formula", left=True)]
    rows = [[f"{term.bytes / GIB:.2f}", term.name, term.formula] for term in terms if term.bytes]
    yield from ("", title, *terminal.rows(Table(columns, rows)))
