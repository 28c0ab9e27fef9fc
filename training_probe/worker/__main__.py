"""One rank of one run: builds the engine, measures, writes how it went into `rank<N>.json`, and leaves at once.

Its exit code is 0, 77 for out of memory, 78 for what cannot be run here, 1 for all else; what counts is the report.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec

from training_probe.grid import Cell
from training_probe.protocol import (
    OOM_EXIT,
    OUT_OF_MEMORY,
    TRIAL_FILE,
    RankReport,
    Trial,
    Unsupported,
    write_atomically,
)

EXIT_UNSUPPORTED, EXIT_CRASHED = 78, 1
REASON_CHARACTERS = 500


def main(directory: Path) -> int:
    trial = msgspec.json.decode((directory / TRIAL_FILE).read_bytes(), type=Trial)
    rank = int(os.environ.get("RANK", "0"))
    if trial.host_memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (trial.host_memory_bytes, trial.host_memory_bytes))
    try:
        report, code = _run(trial, rank, directory), 0
    except Exception as error:
        traceback.print_exc()
        report, code = _failed(rank, error)
    write_atomically(directory / f"rank{rank}.json", report)
    return code


def _failed(rank: int, error: Exception) -> tuple[RankReport, int]:
    reason = " ".join(str(error).split())
    if not isinstance(error, Unsupported):
        reason = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    outcome: Literal["oom", "unsupported", "crashed"]
    if OUT_OF_MEMORY.search(reason):
        outcome, code = "oom", OOM_EXIT
    elif isinstance(error, Unsupported | ImportError):
        outcome, code = "unsupported", EXIT_UNSUPPORTED
    else:
        outcome, code = "crashed", EXIT_CRASHED
    report = RankReport(rank=rank, outcome=outcome, reason=reason[:REASON_CHARACTERS])
    _add_memory(report)
    return report, code


def _add_memory(report: RankReport) -> None:
    """How much the GPU had, and how much of it was taken before the run failed."""
    torch: Any = sys.modules.get("torch")
    with contextlib.suppress(Exception):  # a driver that is in trouble reports nothing more
        if torch is not None and torch.cuda.is_initialized():
            report.peak_allocated_bytes = torch.cuda.max_memory_allocated()
            report.peak_reserved_bytes = torch.cuda.max_memory_reserved()
            report.device_memory_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            report.device_name = torch.cuda.get_device_name()


def _run(trial: Trial, rank: int, directory: Path) -> RankReport:
    import torch

    from training_probe.worker import batches, engines, measure, model
    from training_probe.worker.measure import nccl_version, own_device, resident_bytes

    cell = trial.cell
    device = own_device(cell.device)
    base_bytes = resident_bytes() or 0
    _join(cell, device)
    with model.attention_kernel(cell):
        stepper = engines.build(trial, device)
        vocab_size = stepper.vocab_size if isinstance(stepper, engines.Own) else model.vocab_size(trial)
        replica = rank // (cell.tp * cell.cp) % cell.data_parallel
        micro_batches = batches.batch(trial, replica, device, vocab_size)
        if trial.timeline:
            from training_probe.worker.timeline import record

            report = record(trial, stepper, micro_batches, device, directory)
        elif trial.profile:
            from training_probe.worker.profiled import record as record_trace

            report = record_trace(trial, stepper, micro_batches, device, directory)
        else:
            report = measure.measure(trial, stepper, micro_batches, device, directory, base_bytes)
    report.versions = {**_versions(cell), **nccl_version(device)}
    report.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return report


def _join(cell: Cell, device: Any) -> None:
    """Joins the process group. What FSDP2 keeps on the host it also clips there, over all ranks: NCCL cannot."""
    import torch.distributed as dist

    if device.type == "cpu":
        dist.init_process_group("gloo")
    elif cell.engine == "fsdp2" and cell.letters.offload:
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("nccl", device_id=device)


def _versions(cell: Cell) -> dict[str, str]:
    """Versions of the packages that were used, and where fp8 products are none of the device's."""
    names = {"torch": "torch", "transformers": "transformers", "deepspeed": "deepspeed", "peft": "peft",
             "bitsandbytes": "bitsandbytes", "torchao": "torchao", "liger_kernel": "liger-kernel",
             "megatron.core": "megatron-core"}  # fmt: skip
    versions = {
        name: str(getattr(sys.modules[module], "__version__", None) or version(name))
        for module, name in names.items()
        if module in sys.modules
    }
    if cell.fp8 and cell.device == "cpu":
        versions["torchao"] += " (fp8 emulated)"
    return versions


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # tearing engines down may hang or abort after all has been written
