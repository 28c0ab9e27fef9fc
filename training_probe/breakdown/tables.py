"""Breakdowns as tables: passes (Tables V and VII), parts of the model (VI), attention (VIII), kinds of kernels (XIII),
transfers and communication (XIV to XVI), each with the paper's column where it printed one. Pure.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from loadgen.document.content import Cell, Column, Table
from training_probe import paper
from training_probe.breakdown.attribution import (
    ACCUMULATION,
    ENGINE,
    FUSED_ATTENTION,
    NO_PART,
    PASSES,
    Attribution,
    PassTimes,
)
from training_probe.breakdown.run import Breakdown
from training_probe.grid import PAPER_SEQ_LEN
from training_probe.protocol import Part
from training_probe.report.layout import exact, known, titled

PAPER = f"paper, {paper.GPUS} x {paper.LEADING}"
ATTENTION: tuple[str, ...] = (
    "QKV", "RoPE", "Bmm0", "Softmax", "Bmm1", FUSED_ATTENTION, "Attention, rest", "Output",
)  # fmt: skip
LAYER: tuple[str, ...] = (*ATTENTION, "MLP", "RMSNorm", "Residual")
PARTS: tuple[str, ...] = (
    "Embedding", *LAYER, "Linear", "Loss", "Model, rest", ACCUMULATION, ENGINE, NO_PART,
)  # fmt: skip
assert set(get_args(Part)) < set(PARTS)
COMPUTE = ("GEMM", "attention", "element-wise")
UNKNOWN = "(no part known)"

Printed = Mapping[tuple[str, str, str], float]  # by pass, what of it, and measure


@functools.cache
def printed_cells() -> dict[tuple[str, str, int], dict[tuple[str, str, str], float]]:
    by_cell: dict[tuple[str, str, int], dict[tuple[str, str, str], float]] = {}
    with (paper.DATA / "paper_breakdowns.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            key = (row["model"], row["method"], int(row["batch_size"]))
            by_cell.setdefault(key, {})[row["phase"], row["of"], row["measure"]] = float(row["value"])
    return by_cell


def printed(of: Breakdown) -> Printed:
    """What the paper printed of such a cell, whatever its number of GPUs; empty for any other."""
    cell = of.cell
    if cell.engine != "deepspeed" or cell.seq_len != PAPER_SEQ_LEN or cell.grad_accum != 1:
        return {}
    return printed_cells().get((paper.model_name(cell.model), cell.method, cell.micro_batch or 0), {})


def build(breakdowns: Sequence[Breakdown]) -> list[Table]:
    """The tables of the cells that were traced; none without any."""
    traced = [each for each in breakdowns if each.attribution is not None]
    if not traced:
        return []
    tables = [_passes(traced), *(_parts(each) for each in traced), _kinds(traced), _attention(traced)]
    return [table.without_empty() for table in [*tables, _transfers(traced)]]


def title(of: Breakdown) -> str:
    """A cell's title: what the paper's have in common is left out."""
    cell = of.cell
    model = paper.model_name(cell.model)
    named = f"{model} {cell.engine} {cell.method}, {cell.gpus} x {of.platform}, BS {cell.micro_batch}"
    more = (
        (cell.grad_accum != 1, f"{cell.grad_accum} micro batches"),
        (cell.seq_len != PAPER_SEQ_LEN, f"{cell.seq_len} tokens"),
        (cell.attention == "math", "math"),
        (cell.task == "finetune" and not cell.letters.adapter, "fine-tuning"),
    )
    return ", ".join([named, *(text for differs, text in more if differs)])


def _ms(seconds: float | None) -> Cell:
    return known(None if seconds is None else 1000 * seconds)


def _percent(part: float, whole: float) -> Cell:
    return exact(f"{100 * part / whole:.1f}", 100 * part / whole) if whole else ""


def _known(value: float | None) -> Cell:
    return "" if value is None else exact(f"{value:g}", value)


def _of(each: Breakdown) -> Attribution:
    assert each.attribution is not None
    return each.attribution


def _passes(breakdowns: Sequence[Breakdown]) -> Table:
    rows = []
    for each in breakdowns:
        known, attribution = printed(each), _of(each)
        for window in attribution.windows:
            phase = window.phase
            rows.append((
                title(each), phase, _ms(window.overall_s), _percent(window.overall_s, attribution.step_s),
                _ms(window.compute_s), _ms(window.exposed_communication_s), _ms(window.exposed_memcpy_s),
                _ms(window.idle_s),
                *(_known(known.get((phase, "", name))) for name in ("overall_ms", "percent", "compute_ms")),
            ))  # fmt: skip
    columns = [Column("Cell", left=True), Column("Pass", left=True), Column("overall", "ms"), Column("% of step")]
    columns += [Column(name, "ms of it") for name in ("compute", "communication", "memcpy", "idle")]
    columns += [Column(name, PAPER) for name in ("ms", "%", "compute, ms")]
    caption = (
        "A pass goes from its first kernel to the next pass's first; communication and memcpy (between host and "
        "device): what no computation hides. On a CPU: the process's main thread, idle is where no operator runs.",
        *(_caption(each) for each in breakdowns),
    )
    return titled("passes", "Passes of a step, as Tables V and VII", tuple(columns), tuple(rows), caption)


def _caption(each: Breakdown) -> str:
    attribution = _of(each)
    explained = f"{100 * attribution.explained_ratio:.1f} % of "
    explained += "its kernels' time" if attribution.device == "cuda" else "its time"
    if attribution.by_name_ratio:
        explained += f", the kind of {100 * attribution.by_name_ratio:.2g} % told by kernels' names alone,"
    return (
        f"{title(each)}: a step takes {_ms(each.bare_step_s)} ms, under the profiler {_ms(each.traced_step_s)} ms "
        f"({attribution.steps} {'step' if attribution.steps == 1 else 'steps'}), {explained} explained."
    )


def part_seconds(of: Breakdown, phase: str, part: str, *, recomputed: bool = False) -> float:
    """Seconds a step that a part computes in a pass; on a CPU with the Python between its operators."""
    return sum(
        share.seconds
        for share in _of(of).shares
        if (share.phase, share.part, share.recomputed) == (phase, part, recomputed)
        and share.kind not in ("communication", "memcpy")
    )


def _parts(of: Breakdown) -> Table:
    attribution, known = _of(of), printed(of)
    windows: dict[str, PassTimes] = {window.phase: window for window in attribution.windows}
    rows = []
    for part in PARTS:
        cells: list[Cell] = []
        for phase in ("forward", "backward"):
            seconds = part_seconds(of, phase, part)
            cells += [_ms(seconds or None), _percent(seconds, windows[phase].overall_s) if seconds else ""]
        recomputed = part_seconds(of, "backward", part, recomputed=True)
        theirs = [
            _known(known.get((phase, part, measure)) if part else None)  # without one: of the whole pass
            for phase in ("forward", "backward") for measure in ("ms", "percent")
        ]  # fmt: skip
        rows.append((part or UNKNOWN, *cells, _ms(recomputed or None), *theirs))
    for name in ("communication", "memcpy", "idle"):
        cells = []
        for phase in ("forward", "backward"):
            window = windows[phase]
            seconds = window.idle_s if name == "idle" else getattr(window, f"exposed_{name}_s")
            shown = seconds and not (name == "idle" and attribution.device == "cpu")  # it is in the parts there
            cells += [_ms(seconds), _percent(seconds, window.overall_s)] if shown else ["", ""]
        theirs = [_known(known.get(("backward", name, measure))) for measure in ("ms", "percent")]
        rows.append((f"{name}, not hidden" if name != "idle" else name, *cells, "", "", "", *theirs))
    columns = [Column("Part", left=True)]
    columns += [Column(head, phase) for phase in ("forward", "backward") for head in ("ms", "%")]
    columns += [Column("again, ms", "backward")]
    columns += [Column(head, f"{PAPER}, {phase}") for phase in ("forward", "backward") for head in ("ms", "%")]
    caption: tuple[str, ...] = (
        "Sums over the layers; %: of the pass. Again: work of the forward pass that is recomputed. "
        f"{FUSED_ATTENTION} is Bmm0, Softmax and Bmm1 in one kernel; {ACCUMULATION}: accumulated, cast, put into "
        f"buckets; {ENGINE}: what is launched in a pass outside the model and autograd's nodes, or by FSDP2.",
    )
    if attribution.device == "cpu":
        caption = (*caption, "On a CPU a part's time has the Python between its operators in it.")
    rows = [row for row in rows if any(row[1:])]
    key = f"parts-{of.cell.name}"
    return titled(key, f"Parts of the model, as Table VI: {title(of)}", tuple(columns), tuple(rows), caption)


def _kinds(breakdowns: Sequence[Breakdown]) -> Table:
    rows = []
    for each in breakdowns:
        known, attribution = printed(each), _of(each)
        for window in attribution.windows:
            of_kind = {
                kind: attribution.seconds(phase=window.phase, kind=kind)
                for kind in (*COMPUTE, "communication", "memcpy", "host")
            }
            shown = (_percent(seconds, window.overall_s) if seconds else "" for seconds in of_kind.values())
            rows.append((title(each), window.phase, *shown, _known(known.get((window.phase, "GEMM", "percent")))))
    columns = [Column("Cell", left=True), Column("Pass", left=True)]
    columns += [Column(kind, "% of the pass") for kind in (*COMPUTE, "communication", "memcpy", "host")]
    columns += [Column("GEMM, %", PAPER)]
    caption = (
        "Sums of kernels, which may run at the same time: communication and memcpy whether hidden or not. "
        "Element-wise: all other computation, reductions and copies within the device among it.",
    )
    return titled("kinds", "Kinds of kernels, as Table XIII", tuple(columns), tuple(rows), caption)


def _attention(breakdowns: Sequence[Breakdown]) -> Table:
    rows = []
    for each in breakdowns:
        if not each.layers:
            continue
        known = printed(each)
        a_layer = [
            sum(part_seconds(each, phase, part) for part in ATTENTION) / each.layers
            for phase in ("forward", "backward")
        ]
        theirs = (_known(known.get((phase, "attention of a layer", "ms"))) for phase in ("forward", "backward"))
        rows.append((title(each), *map(_ms, a_layer), *theirs))
    columns = [Column("Cell", left=True), *(Column(head, "ms a layer") for head in ("forward", "backward"))]
    columns += [Column(head, f"{PAPER}, ms") for head in ("forward", "backward")]
    caption = (f"All of an attention module ({', '.join(ATTENTION)}), without what is recomputed.",)
    return titled("attention", "Attention, as Table VIII", tuple(columns), tuple(rows), caption)


def _transfers(breakdowns: Sequence[Breakdown]) -> Table:
    rows = [tuple(_transfer_row(each)) for each in breakdowns]
    columns = [Column("Cell", left=True)]
    for name in ("memcpy", "communication"):
        columns += [Column(head, name) for head in ("ms a step", "% of step", "not hidden, ms")]
        columns += [Column(head, f"{name}, {PAPER}") for head in ("s", "%")]
    caption = ("Kernels of communication, and copies between host and device, over a whole step of rank 0.",)
    heading = "Memory copies and communication, as Tables XIV to XVI"
    return titled("transfers", heading, tuple(columns), tuple(rows), caption)


def _transfer_row(each: Breakdown) -> Iterator[Cell]:
    attribution, known = _of(each), printed(each)
    yield title(each)
    for name in ("memcpy", "communication"):
        seconds = sum(attribution.seconds(phase=phase, kind=name) for phase in PASSES)
        exposed = sum(getattr(window, f"exposed_{name}_s") for window in attribution.windows)
        yield from ("", "", "") if not seconds else (_ms(seconds), _percent(seconds, attribution.step_s), _ms(exposed))
        yield from (_known(known.get(("", name, measure))) for measure in ("s", "percent"))
