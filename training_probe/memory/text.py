"""Predicted memory as text: cells in a table, one cell with all its arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from backends.decoder import ModelSpec
from training_probe import memory
from training_probe.grid import Cell, impossible
from training_probe.memory import Prediction
from training_probe.memory.layers import uncounted
from training_probe.memory.rank import Term
from training_probe.results import GIB

CARDS_GB = (24, 32, 40, 48, 80, 96, 141, 192)  # the sizes that are sold; an H200's 141 GB are 140 GiB
MOST_SEARCHED = 64
VERDICTS = ("fit", "certain not to fit", "predicted", "unsupported", "not predicted")


class Described(NamedTuple):
    """What a cell's model name stands for. spec: None where it is not known. unknown: why its memory is not, a clause.
    unbuilt: why the engines cannot build it of numbers alone."""

    spec: ModelSpec | None
    unknown: str = ""
    unbuilt: str = ""


class Unpredicted(NamedTuple):
    """Why a cell has no prediction."""

    verdict: str
    reason: str


def plan(cells: Sequence[Cell], known: Mapping[str, Described], device_bytes: int | None) -> str:
    """A line a cell: its predicted peak, whether it fits; below it the terms of the peak. At the end how many fit."""
    lines = [_heading(device_bytes), ""]
    verdicts: Counter[str] = Counter()
    for cell in cells:
        verdict, *more = _planned(cell, known[cell.model], device_bytes)
        verdicts[verdict] += 1
        lines += [*more, ""]
    counts = ", ".join(f"{verdicts[name]} {name}" for name in VERDICTS if verdicts[name])
    return "\n".join([*lines, f"{len(cells)} cell{'' if len(cells) == 1 else 's'}: {counts}.", ""])


def explained(cell: Cell, known: Mapping[str, Described], device_bytes: int | None) -> str:
    """Every moment of a step with its terms and formulas, what the host holds, and the cards that it fits on."""
    cell, note = _sized(cell, known[cell.model], device_bytes)
    lines = [f"{cell.name}{note}: PREDICTED, nothing was run. Peaks are of the rank that has most."]
    prediction = _prediction(cell, known[cell.model])
    if isinstance(prediction, Unpredicted):
        return "\n".join([*lines, f"{prediction.verdict}: {prediction.reason}", ""])
    for moment in prediction.moments:
        mark = "  <- peak" if moment is prediction.peak else ""
        lines += ["", f"{moment.name}: {moment.bytes / GIB:.2f} GiB allocated{mark}"]
        lines += _terms(moment.terms)
    if prediction.host:
        lines += ["", f"Host memory of a node that holds all ranks: {prediction.host_bytes / GIB:.2f} GiB"]
        lines += _terms(prediction.host)
    lines += ["", *_cards(prediction, device_bytes), ""]
    return "\n".join(lines)


def _heading(device_bytes: int | None) -> str:
    where = "no GPU here to compare with (--gpu-memory-gb)"
    if device_bytes is not None:
        where = f"GPUs of {device_bytes / GIB:.1f} GiB"
    return f"PREDICTED memory that torch allocates on the rank that has most; {where}. Nothing was run."


def _planned(cell: Cell, model: Described, device_bytes: int | None) -> Iterator[str]:
    """The verdict, one of VERDICTS; then the lines."""
    cell, note = _sized(cell, model, device_bytes)
    prediction = _prediction(cell, model)
    if isinstance(prediction, Unpredicted):
        yield prediction.verdict
        yield f"{cell.name}{note}: {prediction.verdict}: {prediction.reason}"
        return
    fit = None if device_bytes is None else memory.fits(prediction, device_bytes)
    yield "predicted" if fit is None else "fit" if fit.ok else "certain not to fit"
    verdict = "" if fit is None else ", fits" if fit.ok else f", SKIPPED: {fit.reason}"
    yield f"{cell.name}{note}: {prediction.peak_bytes / GIB:.2f} GiB ({prediction.peak.name}){verdict}"
    yield from _terms(prediction.peak.terms)
    if prediction.host:
        yield f"  host memory, all ranks of a node: {prediction.host_bytes / GIB:.2f} GiB"


def _sized(cell: Cell, model: Described, device_bytes: int | None) -> tuple[Cell, str]:
    """With a micro batch; for one that is searched, where the search would begin."""
    if cell.micro_batch is not None:
        return cell, ""
    start = 1
    if (
        model.spec is not None
        and device_bytes is not None
        and not model.unknown
        and impossible(cell, model.spec) is None
    ):
        one = msgspec.structs.replace(cell, micro_batch=1)
        start = memory.largest_micro_batch(one, model.spec, device_bytes, MOST_SEARCHED)
    return msgspec.structs.replace(cell, micro_batch=start), f" (max is searched from {start})"


def _prediction(cell: Cell, model: Described) -> Prediction | Unpredicted:
    why = impossible(cell, model.spec, model.unbuilt)
    if why is not None:
        return Unpredicted("unsupported", why)
    if model.spec is None or model.unknown:
        return Unpredicted("not predicted", model.unknown or "its config.json describes no decoder that is known here")
    why = uncounted(cell, model.spec)
    return memory.predict(cell, model.spec) if why is None else Unpredicted("not predicted", why)


def _terms(terms: Sequence[Term]) -> Iterator[str]:
    for term in terms:
        if term.bytes:
            yield f"  {term.bytes / GIB:9.2f}  {term.name:<28} {term.formula}"


def _cards(prediction: Prediction, device_bytes: int | None) -> Iterator[str]:
    host = f"; the host needs {prediction.host_bytes / GIB:.0f} GiB of memory for it" if prediction.host else ""
    if device_bytes is not None:
        fit = memory.fits(prediction, device_bytes)
        yield ("It fits: " if fit.ok else "It does not fit: ") + fit.reason.removesuffix(".") + host + "."
        return
    fitting = [size for size in CARDS_GB if memory.fits(prediction, size * 10**9).ok]
    if fitting:
        yield f"It fits, the allocator's fragments left out, on GPUs of {fitting[0]} GB or more{host}."
    else:
        yield f"It fits on no GPU of up to {CARDS_GB[-1]} GB; shard it over more GPUs, recompute (R) or offload (O)."
