"""What a process takes of a GPU and of its host beyond what torch has allocated, and whether that fits. Pure.

Fragments: the caching allocator keeps what tensors gave back, and gives it to others only where it is of their size. So
it holds most of what each kind of tensor had at its own largest moment, though these moments are not one. That is the
first part of `fragments`; the second is of ZeRO 3, whose copies have another size in each reduction. Their shares are
fitted to the 75 cells of results:h200/training; `benchmarks/training_memory.py` fits them again and has the errors.
An allocator that meets the end of the memory gives back what it keeps and tries again: a cell whose fragments do not
fit may run all the same, and slower. That is what "tight" means.

Context, kernels and NCCL's buffers were measured on an H100 (torch 2.11, CUDA 13.0, NCCL 2.28 without multicast).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from backends.decoder import ModelSpec
from training_probe.grid import Cell
from training_probe.memory.rank import Moment, Term
from training_probe.results import GIB

Verdict = Literal["fits", "tight", "does not fit"]
MIB = 1 << 20
BF16_BYTES = 2

# --- What is set or measured, and may need a new look with a new version ---
KEPT_APART = 0.785  # of what each kind of tensor has at its own largest moment beyond the peak
RESIZED = 3.14  # times what ZeRO 3 allocates anew in each reduction
RESIZED_TERMS = ("reduction copy", "returning gradient", "norm", "newest gradient")
# By how much more than predicted a process may have reserved and still be said to fit. Sweeps that the shares were not
# fitted to, and 12 cells of other models and engines, had up to 7 % more; 1 of 87 had 20 % more (Z3+O).
RESERVED_MARGIN = 0.10
CONTEXT_BYTES = 620 * MIB  # a CUDA context
KERNELS_BYTES = 150 * MIB  # the modules of kernels that a step has loaded
# NCCL for one rank, two, and more. The last is an assumption: a rank then has two neighbours instead of one.
NCCL_BYTES = (566 * MIB, 950 * MIB, 1330 * MIB)
# Of the memory that NVML or the maker names, what CUDA does not have: 0.4 % (H200 by NVML) to 1.5 % (RTX 4090).
DRIVER_RATIO = 0.01
# A process with torch, its libraries and CUDA has so much host memory. Measured: 1.8 GiB alone, 3.3 with two ranks.
HOST_PROCESS_BYTES = 1740 * MIB
# What the host needs besides: the system, its page cache, the pinned buffers of the batches.
HOST_MARGIN = 0.10
# ---


class Fit(NamedTuple):
    """reason: one sentence with the arithmetic."""

    verdict: Verdict
    reason: str

    @property
    def ok(self) -> bool:
        """False only where the cell is certain to run out of memory."""
        return self.verdict != "does not fit"


def fragments(cell: Cell, moments: Sequence[Moment]) -> Term:
    """What the allocator has reserved beyond the peak of what is allocated."""
    apart, resized = apart_and_resized(cell, moments)
    text = f"{KEPT_APART} x {apart:,} B that tensors have at other moments"
    if resized:
        text += f" + {RESIZED} x {resized:,} B of reductions"
    return Term("fragments", round(KEPT_APART * apart + RESIZED * resized), text)


def apart_and_resized(cell: Cell, moments: Sequence[Moment]) -> tuple[int, int]:
    """Bytes that each kind of tensor has at its own largest moment, all together, beyond the peak; and what ZeRO 3
    allocates anew in each reduction."""
    largest: dict[str, int] = {}
    for moment in moments:
        here: defaultdict[str, int] = defaultdict(int)
        for term in moment.terms:
            here[term.name] += term.bytes
        largest |= {name: max(size, largest.get(name, 0)) for name, size in here.items()}
    apart = sum(largest.values()) - max(moment.bytes for moment in moments)
    if cell.engine != "deepspeed" or cell.letters.zero != 3:
        return apart, 0
    return apart, sum(largest.get(name, 0) for name in RESIZED_TERMS)


def outside(cell: Cell) -> tuple[Term, ...]:
    """What a rank takes of its GPU outside torch's allocator."""
    ranks = f"{cell.gpus} rank{'' if cell.gpus == 1 else 's'}"
    return (
        Term("CUDA context", CONTEXT_BYTES, "measured on an H100"),
        Term("kernels", KERNELS_BYTES, "modules that a step loads, measured on an H100"),
        Term("NCCL buffers", NCCL_BYTES[min(cell.gpus, len(NCCL_BYTES)) - 1], ranks),
    )


def rollouts(cell: Cell, spec: ModelSpec) -> Iterator[Term]:
    """What generates grpo's sequences on the same GPU: an assumption, unless its size is named."""
    if cell.task != "grpo":
        return
    if cell.rollout_gb is not None:
        yield Term("rollout engine", round(cell.rollout_gb * GIB), "as --rollout-gb has it")
        return
    weights, tokens = BF16_BYTES * spec.parameters, cell.sequences * cell.seq_len
    keys = tokens * sum(kind.count * kind.attention.kv_values for kind in spec.kinds) * BF16_BYTES
    text = f"{BF16_BYTES} B x {spec.parameters:,} weights + KV cache of {tokens:,} tokens, both assumed (--rollout-gb)"
    yield Term("rollout engine", weights + keys, text)


def usable_bytes(device_memory_bytes: int) -> int:
    """What CUDA gives to processes of a device's memory as NVML or the maker names it."""
    return round(device_memory_bytes * (1 - DRIVER_RATIO))


def judged(least_bytes: float, most_bytes: float, there_bytes: float) -> Verdict:
    """least: what it is certain to need; most: what it will hardly exceed."""
    if least_bytes > there_bytes:
        return "does not fit"
    return "fits" if most_bytes <= there_bytes else "tight"


def host_terms(cell: Cell, offloaded: tuple[Term, ...]) -> tuple[Term, ...]:
    """Terms of the node's processes, all ranks on one node: what is offloaded, and what each process has anyway."""
    text = f"{cell.gpus} x {HOST_PROCESS_BYTES / GIB:.1f} GiB: Python, torch, CUDA"
    return (*offloaded, Term("processes", cell.gpus * HOST_PROCESS_BYTES, text))


def host_judged(host_bytes: int, node_memory_bytes: int) -> Fit:
    """Whether a node's memory holds what its processes need."""
    verdict = judged(host_bytes, host_bytes * (1 + HOST_MARGIN), node_memory_bytes)
    verb = {"fits": "of", "tight": "which is nearly all of", "does not fit": "which is more than"}[verdict]
    return Fit(verdict, f"the host needs {host_bytes / GIB:.1f} GiB, {verb} its {node_memory_bytes / GIB:.1f} GiB.")
