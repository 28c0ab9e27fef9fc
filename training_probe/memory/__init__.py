"""How much memory a cell takes, before it runs: `predict` names every term, with the numbers of its formula. Pure.

The prediction is what torch's caching allocator calls allocated (`torch.cuda.max_memory_allocated`), on the rank that
has most: the largest of the moments of a step (`Moment`). Reserved memory is more, by fragments. `engines` holds what
each engine allocates, read off its source; docs/predictions.md ("Predicted memory of training") derives the formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from backends.decoder import ModelSpec
from training_probe.grid import Cell
from training_probe.memory import engines
from training_probe.memory.rank import CUDA_CONTEXT_BYTES, Moment, Term
from training_probe.results import GIB


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """moments: of a step, in its order, on the rank with the highest peak. host: the memory of the node's
    processes for what is offloaded, all ranks on one node; without offload nothing."""

    moments: tuple[Moment, ...]
    host: tuple[Term, ...] = ()

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak of the allocated bytes."""
        return self.peak.bytes

    @property
    def terms_bytes(self) -> dict[str, int]:
        """The terms of the peak by name; they add up to it."""
        return {term.name: term.bytes for term in self.peak.terms}

    @property
    def host_bytes(self) -> int:
        return sum(term.bytes for term in self.host)


class Fit(NamedTuple):
    """ok: False only where the cell is certain to run out of memory. reason: one sentence with the arithmetic."""

    ok: bool
    reason: str


def predict(cell: Cell, spec: ModelSpec) -> Prediction:
    """The cell's memory. Its micro batch must be a number (ValueError): `largest_micro_batch` finds one."""
    if cell.micro_batch is None:
        raise ValueError("the micro batch of this cell is still to be searched")
    moments, host = engines.moments(cell, spec, cell.micro_batch)
    return Prediction(moments=moments, host=host)


def fits(prediction: Prediction, device_memory_bytes: int) -> Fit:
    """Whether the predicted peak is within what a process can allocate of the device: its memory less the CUDA context.
    Fragments of the allocator are left out, so what does not fit here fits nowhere, if the prediction is right."""
    usable = device_memory_bytes - CUDA_CONTEXT_BYTES
    peak = prediction.peak
    largest = sorted(peak.terms, key=lambda term: term.bytes, reverse=True)[:4]
    rest = peak.bytes - sum(term.bytes for term in largest)
    parts = " + ".join(f"{term.bytes / GIB:.1f} {term.name}" for term in largest if term.bytes)
    ok = peak.bytes <= usable
    verb = "of" if ok else "which is more than"
    return Fit(
        ok,
        f"predicted peak of {peak.bytes / GIB:.1f} GiB ({peak.name}: {parts} + {rest / GIB:.1f} others), {verb} the "
        f"{usable / GIB:.1f} GiB that {device_memory_bytes / GIB:.1f} GiB leave beside a CUDA context.",
    )


def largest_micro_batch(cell: Cell, spec: ModelSpec, device_memory_bytes: int, at_most: int) -> int:
    """The largest power of two of sequences, `at_most` at most, that is predicted to fit; 1 where not even one is."""
    batch = 1
    while 2 * batch <= at_most:
        larger = msgspec.structs.replace(cell, micro_batch=2 * batch)
        if not fits(predict(larger, spec), device_memory_bytes).ok:
            break
        batch *= 2
    return batch
