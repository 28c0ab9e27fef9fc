"""What both sides of a trial know, the program that starts it and its processes: the files that pass between them, and
what every engine trains with. Without torch: `--dry-run` prints what a trial would be given.

The sweep writes `trial.json` (Trial) and starts the processes; each writes `rank<N>.json` (RankReport) by an atomic
rename when it ends, whichever way, and rank 0 appends one line to `steps.jsonl` (Step) after every step: a process that
dies loses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from loadgen.rundir import replace
from training_probe.conditions import Conditions
from training_probe.grid import Cell, Method
from training_probe.llama_shape import LlamaShape
from training_probe.packing import MicroBatch

TRIAL_FILE, STEPS_FILE, LOG_FILE = "trial.json", "steps.jsonl", "log.txt"
TIMELINE_FILE = "timeline.json"
CHECKPOINT = "checkpoint"  # the directory of what is saved and loaded once
TIMELINE_STEPS = 4  # as in the lecture's figure
TRACE_FILE, PROFILE_FILE = "trace.json.gz", "profile.json"
PHASE, PART = "phase:", "part:"  # what ranges in a trace begin with

OOM_EXIT = 77  # a rank that has reported that it ran out of memory ends with this
CANNOT_GO_ON = "cannot go on: "  # what a process of a micro-benchmark writes before its reason when it stops
# What torch, CUDA, Triton, NCCL and the C library say, in an exception or in the log.
OUT_OF_MEMORY = re.compile(
    r"\b(?i:cuda|hip)\b.{0,40}out of memory|(?i:nccl).*out of memory|Failed to CUDA (?:calloc|malloc|host alloc)"
    r"|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|MemoryError\b|std::bad_alloc|Cannot allocate memory"
)

Phase = Literal["warmup", "timed"]
Pass = Literal["forward", "backward", "optimizer"]
Part = Literal[
    "Embedding", "QKV", "RoPE", "Bmm0", "Softmax", "Bmm1", "Attention, rest", "Output", "MLP", "RMSNorm", "Residual",
    "Linear", "Loss", "Model, rest",
]  # fmt: skip


class Unsupported(Exception):
    """The cell cannot be run with what is installed here; a clause that says why."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one cell. spec: the model's shape where the engines build it of numbers alone; config: what its
    config.json holds, used instead of the shape where it is given. timeline: whether allocations of the first steps are
    recorded, which costs time, so such a run is not timed. profile: whether as many steps again are traced.
    host_memory_bytes: limit of each process's own memory, for the CPU. deepspeed: the user's own configuration, merged
    over what the cell gives. checkpoint_io: whether a checkpoint is saved and loaded after the timed steps. rows:
    lengths of the sequences in each row, of each micro batch of each replica, where the cell draws lengths."""

    cell: Cell
    spec: LlamaShape | None = None
    config: dict[str, Any] | None = None
    warmup_steps: int = 30
    steps: int = 100
    seed: int = 0
    timeline: bool = False
    profile: bool = False
    host_memory_bytes: int | None = None
    deepspeed: dict[str, Any] | None = None
    checkpoint_io: bool = False
    rows: tuple[tuple[MicroBatch, ...], ...] = ()


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step of rank 0. forward and backward: sums over the micro batches that are accumulated, None where
    a pipeline interleaves them. loss: the mean over the micro batches."""

    step: int
    phase: Phase
    step_s: float
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    loss: float | None = None


class CheckpointTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of all ranks together, and the bytes of the files."""

    bytes: int
    save_s: float
    load_s: float


class RankReport(msgspec.Struct, kw_only=True):
    """How one process fared. Peaks are the allocator's on a GPU, on the CPU the process's own resident memory (its
    peak, and what was allocated beyond what it had before the model was built).

    seconds: of all timed steps, between synchronised clocks. energy_j: of this rank's GPU in that time.
    """

    rank: int
    outcome: Literal["ok", "oom", "unsupported", "crashed"]
    reason: str = ""
    seconds: float | None = None
    steps: int = 0
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_memory_bytes: int | None = None
    energy_j: float | None = None
    losses: Sequence[float | None] = ()  # None: not finite, for which JSON has no number
    parameters: int | None = None  # of the whole model
    trainable_parameters: int | None = None
    optimizer: str = ""
    versions: dict[str, str] = {}
    device_name: str = ""
    conditions: Conditions | None = None  # of the timed steps
    checkpoint: CheckpointTimes | None = None


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 measured around its trace, in `profile.json`: seconds of a step, by the process's clock, without the
    profiler and with it. bare_steps_s: each of the former, between marks in the device's stream."""

    steps: int
    bare_step_s: float
    traced_step_s: float
    bare_steps_s: list[float] = []


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Memory over the first steps of rank 0, in `timeline.json`. time_s: ascending; bytes[c][i]: of categories[c] at
    time_s[i] (blocks.CATEGORIES: what stays longest comes first); steps_s: when each step began."""

    categories: list[str]
    time_s: list[float]
    bytes: list[list[int]]
    steps_s: list[float]


def write_atomically(path: Path, value: object, indent: int = -1) -> None:
    """All of it or nothing, whenever the process dies. indent: of lines, in spaces; -1: one line. Raises OSError."""
    replace(path, msgspec.json.format(msgspec.json.encode(value), indent=indent) + b"\n")


# What every engine trains with.

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
DPO_BETA = 0.1
# Muon gives a matrix an update of norm 1, which needs a larger rate than AdamW's; 0.02 and 0.95 are its author's.
MUON_TIMES, MUON_MOMENTUM = 20, 0.95
KAHAN_CHUNK = 1 << 24  # elements that are updated in fp32 at once


def learning_rate(method: Method) -> float:
    """Large enough that the loss of a fixed batch falls within a few steps: what is trained is thrown away. Few
    parameters need large steps; a prompt of a few vectors the largest."""
    return {None: 1e-4, "L": 1e-3, "QL": 1e-3, "PT": 3e-2}[method.adapter]


def deepspeed_config(cell: Cell) -> dict[str, Any]:
    """What `deepspeed.initialize` gets; every option that is not named here is DeepSpeed's own default, so that what is
    measured is what its users get.

    With ZeRO: bf16 weights and gradients, fp32 master weights and Adam moments. Without: a plain bf16 model and Adam
    moments in bf16, the paper's Naive. On the CPU the optimizer is torch's, given by the trial, because DeepSpeed's own
    is compiled at its first use (about a minute); 8-bit AdamW is given as well, because DeepSpeed has none.
    """
    method = cell.letters
    cuda = cell.device == "cuda"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": cell.micro_batch,
        "gradient_accumulation_steps": cell.grad_accum,
        "gradient_clipping": CLIP_NORM,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": {"stage": method.zero},
        "zero_allow_untested_optimizer": True,
    }
    adam = {"lr": learning_rate(method), "betas": list(BETAS), "weight_decay": WEIGHT_DECAY}
    if cell.optim == "muon":
        config["optimizer"] = {"type": "Muon", "params": adam | _muon(cell)}
        if method.zero:
            config["gradient_clipping"] = 0.0  # or ZeRO clips the update that Muon makes of the gradient
        if method.zero == 3:
            config["zero_optimization"]["reduce_scatter"] = False  # which DeepSpeed demands
    elif cuda and not cell.eight_bit:
        config["optimizer"] = {"type": "AdamW", "params": adam}
    if method.zero:
        config["bf16"] = {"enabled": True}
        config["zero_optimization"] |= {"overlap_comm": True, "contiguous_gradients": True}
    if method.offload:
        there = {"device": "cpu", "pin_memory": cuda}
        config["zero_optimization"]["offload_optimizer"] = there
        if method.offloads_parameters:
            config["zero_optimization"]["offload_param"] = there
        if not cuda:
            config["zero_force_ds_cpu_optimizer"] = False
    return config


def _muon(cell: Cell) -> dict[str, Any]:
    rate = learning_rate(cell.letters)
    own = {"muon_lr": MUON_TIMES * rate, "adam_lr": rate, "momentum": MUON_MOMENTUM}
    return own | ({"torch_adam": True} if cell.device == "cpu" else {})
