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
from training_probe.grid import NAIVE, PAPER_SEQ_LEN, Cell, Method, adapter_notes, impossible
from training_probe.memory import Prediction, process
from training_probe.memory.layers import uncounted
from training_probe.memory.rank import Moment, Term
from training_probe.results import GIB

SCHEMA = "training_probe.memory/1"
# What CUDA has of each card, GiB: of H100 and H200 as measured here, of the others as torch's messages have it.
CARDS = {
    "RTX 4090": 23.5, "RTX 5090": 31.3, "A100-40": 39.4, "L40S": 44.3, "A100-80": 79.1, "RTX PRO 6000": 94.5,
    "H200": 139.8, "B200": 178.3,
}  # fmt: skip
MOST_SEARCHED = 64

Answered = Literal[process.Verdict, "predicted", "unsupported", "not predicted"]
VERDICTS: tuple[Answered, ...] = ("fits", "tight", "does not fit", "predicted", "unsupported", "not predicted")


class Described(NamedTuple):
    """What a cell's model name stands for. spec: None where it is not known. unknown: why its memory is not, a clause.
    unbuilt: why the engines cannot build it of numbers alone."""

    spec: ModelSpec | None
    unknown: str = ""
    unbuilt: str = ""


class There(NamedTuple):
    """What there is to compare with: memory of each GPU, as NVML or its maker names it, and of the node; None where it
    is not known."""

    gpu_bytes: int | None = None
    node_bytes: int | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of one cell, on the rank that has most. verdict: of its GPU; `predicted` where there is none to
    compare with. reason: why, a sentence or a clause. searched: whether its micro batch is where a search would begin.
    host_bytes: of a node that holds all ranks, 0 without offload. smallest_card: of CARDS, on which it is neither tight
    nor too large."""

    cell: str
    verdict: Answered
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


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    gpu_memory_bytes: int | None
    node_memory_bytes: int | None
    cells: tuple[Answer, ...]
    schema: str = SCHEMA


def answers(cells: Sequence[Cell], known: Mapping[str, Described], there: There) -> Answers:
    """What is predicted of each cell."""
    own = tuple(_answer(cell, known[cell.model], there) for cell in cells)
    return Answers(gpu_memory_bytes=there.gpu_bytes, node_memory_bytes=there.node_bytes, cells=own)


def text(given: Answers, *, verbose: bool = False) -> str:
    """The summary, the table, and on request the arithmetic of every cell."""
    lines = [_summary(given), "", *_table(given)]
    if len(given.cells) == 1 or verbose:
        for answer in given.cells:
            lines += ["", *_arithmetic(answer, verbose)]
    return "\n".join([*lines, ""])


def all_fit(given: Answers) -> bool:
    """Whether every cell fits, tightly or not, in its GPUs and its node."""
    return all(answer.verdict in ("fits", "tight") and answer.host_verdict != "does not fit" for answer in given.cells)


def hints(cells: Sequence[Cell], known: Mapping[str, Described]) -> Iterator[str]:
    """What one cell without FlashAttention and recomputation would save by them, what LoRA trains in, and whose the
    length is."""
    if len(cells) == 1 and (saved := _saved(cells[0], known[cells[0].model])):
        yield f"of its memory {saved}."
    yield from adapter_notes(cells)
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


def as_json(given: Answers) -> str:
    return msgspec.json.format(msgspec.json.encode(given), indent=2).decode() + "\n"


def prediction_of(cell: Cell, model: Described) -> Prediction | tuple[Answered, str]:
    """The prediction; or why there is none, with the verdict that this is. Its micro batch is a number."""
    why = impossible(cell, model.spec, model.unbuilt)
    if why is not None:
        return "unsupported", why
    if model.spec is None or model.unknown:
        return "not predicted", model.unknown or "its config.json describes no decoder that is known here"
    why = uncounted(cell, model.spec)
    return memory.predict(cell, model.spec) if why is None else ("not predicted", why)


def _answer(asked: Cell, model: Described, there: There) -> Answer:
    cell = _sized(asked, model, there.gpu_bytes)
    searched = asked.micro_batch is None
    prediction = prediction_of(cell, model)
    if not isinstance(prediction, Prediction):
        verdict, reason = prediction
        return Answer(cell=cell.name, verdict=verdict, reason=reason, searched=searched)
    verdict, reason = "predicted", ""
    if there.gpu_bytes is not None:
        verdict, reason = memory.fits(prediction, there.gpu_bytes)
    host_verdict: process.Verdict | None = None
    host_reason = ""
    if prediction.host and there.node_bytes is not None:
        host_verdict, host_reason = process.host_judged(prediction.host_bytes, there.node_bytes)
    return Answer(
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


def _summary(given: Answers) -> str:
    count = f"{len(given.cells)} cell{'' if len(given.cells) == 1 else 's'}"
    verdicts = Counter(answer.verdict for answer in given.cells)
    counts = ", ".join(f"{verdicts[name]} {_plural(name, verdicts[name])}" for name in VERDICTS if verdicts[name])
    if given.gpu_memory_bytes is None:
        where = f"{count}, no GPU here to compare with (--gpu-memory-gb): {counts}"
    else:
        where = f"{count} on GPUs of {given.gpu_memory_bytes / GIB:.1f} GiB: {counts}"
    hosts = Counter(answer.host_verdict for answer in given.cells if answer.host_verdict)
    if hosts and given.node_memory_bytes is not None:
        of_hosts = ", ".join(f"{count} {_plural(name, count)}" for name, count in hosts.items())
        where += f"; offload in nodes of {given.node_memory_bytes / GIB:.1f} GiB: {of_hosts}"
    return f"PREDICTED, nothing was run. {where}."


def _plural(verdict: str, count: int) -> str:
    return {"fits": "fit", "does not fit": "do not fit"}.get(verdict, verdict) if count != 1 else verdict


def _table(given: Answers) -> list[str]:
    """GiB; a column of hosts only where something is offloaded."""
    hosts = any(answer.host_bytes for answer in given.cells)
    judged = given.gpu_memory_bytes is not None
    heads = ["cell, GiB of the rank that has most", "allocated", "reserved", "process"]
    heads += ["host"] * hosts + ["verdict" if judged else "smallest card that it fits"]
    rows = []
    for answer in given.cells:
        sizes: list[int | None] = [answer.allocated_bytes, answer.reserved_bytes, answer.process_bytes]
        sizes += [answer.host_bytes] * hosts
        note = " (max is searched from here)" if answer.searched else ""
        rows.append([answer.cell + note, *map(_gib, sizes), _last(answer, judged)])
    columns = [Column(head, left=head in (heads[0], heads[-1])) for head in heads]
    return [*terminal.table(Table(columns, rows), WIDEST)][:-1]


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}" if size else ""


def _last(answer: Answer, judged: bool) -> str:
    if answer.verdict in ("unsupported", "not predicted"):
        return f"{answer.verdict}: {answer.reason}"
    shown = answer.verdict if judged else answer.smallest_card or "none that is known here"
    return shown + (f"; host: {answer.host_verdict}" if answer.host_verdict else "")


def _arithmetic(answer: Answer, verbose: bool) -> Iterator[str]:
    """Why, in a sentence; and each moment with its terms."""
    reasons = " ".join(part for part in (answer.reason, answer.host_reason) if part)
    if reasons or verbose:
        yield f"{answer.cell}: {reasons}" if reasons else answer.cell
    if not verbose:
        if answer.moments:
            yield "--verbose has every term."
        return
    peak = next((moment for moment in answer.moments if moment.name == answer.peak), None)
    for moment in answer.moments:
        mark = "  <- peak" if moment is peak else ""
        yield from _section(f"{moment.name}: {moment.bytes / GIB:.2f} GiB allocated{mark}", moment.terms)
    if answer.process_bytes is not None and answer.allocated_bytes is not None:
        beyond = answer.process_bytes - answer.allocated_bytes
        yield from _section(f"beyond what is allocated: {beyond / GIB:.2f} GiB", answer.beyond)
    if answer.host_bytes:
        yield from _section(
            f"host memory of a node that holds all ranks: {answer.host_bytes / GIB:.2f} GiB", answer.host
        )


def _section(title: str, terms: Sequence[Term]) -> Iterator[str]:
    yield ""
    yield title
    for term in terms:
        if term.bytes:
            yield f"  {term.bytes / GIB:9.2f}  {term.name:<28} {term.formula}"
