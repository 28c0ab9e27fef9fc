"""How much memory a cell takes, before it runs: `predict` names every term, with the numbers of its formula. Pure.

`peak_bytes` is what torch's caching allocator calls allocated (`torch.cuda.max_memory_allocated`), on the rank that has
most: the largest of the moments of a step (`Moment`). `engines` holds what each engine allocates, read off its source;
docs/predictions.md ("Predicted memory of training") derives the formulas. A process takes more: `process` has what, and
decides what fits.
"""

from __future__ import annotations

import msgspec

from backends.decoder import ModelSpec
from training_probe.grid import Cell
from training_probe.memory import engines, process
from training_probe.memory.process import Fit, Verdict
from training_probe.memory.rank import Moment, Term
from training_probe.own_deepspeed import DEFAULT_SIZES, ZeroSizes
from training_probe.results import GIB


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """moments: of a step, in its order, on the rank with the highest peak. fragments: what the allocator reserves
    beyond the peak. outside: what the rank takes of its GPU outside the allocator. host: the memory of the node's
    processes, all ranks on one node, where something is offloaded; without offload nothing."""

    moments: tuple[Moment, ...]
    fragments: Term = Term("fragments", 0, "")
    outside: tuple[Term, ...] = ()
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
    def reserved_bytes(self) -> int:
        """What the allocator holds of the device, fragments included."""
        return self.peak_bytes + self.fragments.bytes

    @property
    def outside_bytes(self) -> int:
        return sum(term.bytes for term in self.outside)

    @property
    def process_bytes(self) -> int:
        """All that the rank takes of its GPU, as nvidia-smi would show it."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def host_bytes(self) -> int:
        return sum(term.bytes for term in self.host)


def predict(cell: Cell, spec: ModelSpec, zero: ZeroSizes = DEFAULT_SIZES) -> Prediction:
    """The cell's memory; zero: what DeepSpeed was told. Its micro batch must be a number (ValueError):
    `largest_micro_batch` finds one."""
    if cell.micro_batch is None:
        raise ValueError("the micro batch of this cell is still to be searched")
    moments, offloaded = engines.moments(cell, spec, cell.sequences, zero)
    return Prediction(
        moments=moments, fragments=process.fragments(cell, moments),
        outside=(*process.outside(cell), *process.rollouts(cell, spec)),
        host=process.host_terms(cell, offloaded) if offloaded else (),
    )  # fmt: skip


def verdict(prediction: Prediction, usable_bytes: int) -> Verdict:
    """Whether the rank's process fits in what CUDA has of its device."""
    least = prediction.peak_bytes + prediction.outside_bytes
    most = round(prediction.reserved_bytes * (1 + process.RESERVED_MARGIN)) + prediction.outside_bytes
    return process.judged(least, most, usable_bytes)


def fits(prediction: Prediction, device_memory_bytes: int) -> Fit:
    """Whether the rank's process fits on a device of this memory, as NVML or the maker names it. It does not where what
    is allocated leaves no room for context and NCCL, it does where 10 % more than what is predicted to be reserved
    leaves some; between them it is tight: the allocator may have to give fragments back, or run out because of them."""
    usable = process.usable_bytes(device_memory_bytes)
    decided = verdict(prediction, usable)
    peak = prediction.peak
    largest = sorted(peak.terms, key=lambda term: term.bytes, reverse=True)[:4]
    rest = peak.bytes - sum(term.bytes for term in largest)
    parts = " + ".join(f"{term.bytes / GIB:.1f} {term.name}" for term in largest if term.bytes)
    allocated = f"{peak.bytes / GIB:.1f} GiB allocated ({peak.name}: {parts} + {rest / GIB:.1f} others)"
    beside = f"{prediction.outside_bytes / GIB:.1f} context and NCCL"
    there = f"the {usable / GIB:.1f} GiB that CUDA has of {device_memory_bytes / GIB:.1f}"
    if decided == "does not fit":
        return Fit(decided, f"{allocated} and {beside} are more than {there}.")
    fragments = f"{prediction.fragments.bytes / GIB:.1f} fragments"
    total = f"{allocated}, {fragments} and {beside} are {prediction.process_bytes / GIB:.1f} of {there}"
    if decided == "fits":
        return Fit(decided, f"{total}.")
    return Fit(decided, f"{total}; whether the fragments fit is not certain (expandable_segments:True makes fewer).")


def largest_micro_batch(
    cell: Cell, spec: ModelSpec, device_memory_bytes: int, at_most: int, zero: ZeroSizes = DEFAULT_SIZES
) -> int:
    """The largest power of two of sequences, `at_most` at most, that is not certain to run out; 1 where even one is."""
    batch = 1
    while 2 * batch <= at_most:
        larger = msgspec.structs.replace(cell, micro_batch=2 * batch)
        if not fits(predict(larger, spec, zero), device_memory_bytes).ok:
            break
        batch *= 2
    return batch
