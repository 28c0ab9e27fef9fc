"""A few steps under torch's profiler, after as many without it: where the time of a step goes, and what the
profiler costs.

The trace is recorded here and interpreted in `training_probe.breakdown.attribution`.
"""

from __future__ import annotations

import contextlib
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from training_probe.conditions import Watch, worst
from training_probe.protocol import PHASE, PROFILE_FILE, TRACE_FILE, Profile, RankReport, Trial, write_atomically
from training_probe.worker.batches import Inputs
from training_probe.worker.measure import Stepper, clock_of, nvml_handle


def record(
    trial: Trial, stepper: Stepper, micro_batches: list[Inputs], device: torch.device, directory: Path
) -> RankReport:
    """Warms up, times `steps` steps bare, then traces as many. Only rank 0 is traced; the others just train."""

    clock, watch = clock_of(device), Watch(nvml_handle(device))
    synchronise = clock.synchronise
    marks: list[Any] = []

    def timed(steps: int) -> float:
        marks.clear()
        synchronise()
        dist.barrier()
        synchronise()
        begun = time.perf_counter()
        marks.append(clock.mark())
        for _ in range(steps):
            _step(stepper, micro_batches)
            marks.append(clock.mark())
        synchronise()
        return (time.perf_counter() - begun) / steps

    rank = dist.get_rank()
    timed(max(1, trial.warmup_steps))
    watch.start()
    bare_step_s = timed(trial.steps)
    spans = [watch.stop()]
    bare_steps_s = [clock.seconds(a, b) for a, b in pairwise(marks)]
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    # the profiler's own start costs its first step, which is thrown away
    tracing = profile(activities=kinds, schedule=schedule(wait=0, warmup=1, active=1, repeat=1), acc_events=True)
    with tracing if rank == 0 else contextlib.nullcontext():
        timed(1)
        if rank == 0:
            tracing.step()
        watch.start()
        traced_step_s = timed(trial.steps)
        spans.append(watch.stop())
    if rank == 0:
        tracing.export_chrome_trace(str(directory / TRACE_FILE))
        write_atomically(
            directory / PROFILE_FILE,
            Profile(steps=trial.steps, bare_step_s=bare_step_s, traced_step_s=traced_step_s, bare_steps_s=bare_steps_s),
        )
    return RankReport(
        rank=rank,
        outcome="ok",
        seconds=bare_step_s * trial.steps,
        steps=trial.steps,
        optimizer=stepper.optimizer,
        parameters=stepper.parameters[0],
        trainable_parameters=stepper.parameters[1],
        conditions=worst(spans),
    )


def _step(stepper: Stepper, micro_batches: list[Inputs]) -> None:
    for left in reversed(range(len(micro_batches))):
        with record_function(PHASE + "forward"):
            loss = stepper.forward(micro_batches[-1 - left], left == 0)
        with record_function(PHASE + "backward"):
            stepper.backward(loss, left == 0)
        del loss
    with record_function(PHASE + "optimizer"):
        stepper.step()
