"""Memory over the first steps of a trial: what the allocator reports to torch's profiler, on a GPU and on the CPU.

It is recorded here and interpreted in `training_probe.memory.blocks`.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from training_probe.memory.blocks import PhaseStart, allocations, blocks, categorised
from training_probe.protocol import TIMELINE_FILE, TIMELINE_STEPS, RankReport, Trial, write_atomically
from training_probe.worker.batches import Inputs
from training_probe.worker.measure import Stepper


def record(
    trial: Trial, stepper: Stepper, micro_batches: list[Inputs], device: torch.device, directory: Path
) -> RankReport:
    """Trains `TIMELINE_STEPS` steps under the profiler; rank 0 writes the timeline. Nothing of it is timed."""
    spans: list[PhaseStart] = []

    def begin(phase: str) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        spans.append(PhaseStart(time.time_ns(), phase))

    built_bytes = torch.cuda.memory_allocated() if device.type == "cuda" else _tensors_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(TIMELINE_STEPS):
            if stepper.pipelined:
                begin("forward")
                stepper.forward_backward(micro_batches)
            else:
                for left in reversed(range(len(micro_batches))):
                    begin("forward")
                    loss = stepper.forward(micro_batches[-1 - left], left == 0)
                    begin("backward")
                    stepper.backward(loss, left == 0)
                    del loss
            begin("optimizer")
            stepper.step()
        begin("end")
    rank = dist.get_rank()
    if rank == 0:
        events = allocations(profiler.profiler.kineto_results.experimental_event_tree(), device.type)
        timeline = categorised(blocks(events), spans, built_bytes)
        write_atomically(directory / TIMELINE_FILE, timeline)
    return RankReport(rank=rank, outcome="ok", steps=TIMELINE_STEPS, optimizer=stepper.optimizer)


def _tensors_bytes() -> int:
    """Bytes of all tensors there are, each storage once: the CPU's allocator does not count."""
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
