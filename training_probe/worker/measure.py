"""How a trial is measured: warm-up steps, then timed ones, on one fixed batch; time, memory, energy. What is read
meanwhile must not hold the device up.

On a GPU phases are bounded by events in its stream and read two steps later; the loss travels to pinned memory on its
own. Only the first and the last timed step are bounded by a synchronisation. Throughput comes from those two, phases
from the events.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from training_probe.conditions import Watch
from training_probe.protocol import CHECKPOINT, STEPS_FILE, RankReport, Step, Trial
from training_probe.worker import checkpoint
from training_probe.worker.batches import Inputs

LAG_STEPS = 2  # steps in flight before one is read
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Stepper(Protocol):
    """One engine with its model. `last`: of the micro batches whose gradients are accumulated."""

    optimizer: str  # what it is called
    parameters: tuple[int, int]  # of the whole model; those that train
    pipelined: bool  # forward and backward passes interleave: only `forward_backward` is called

    def forward(self, inputs: Inputs, last: bool) -> Tensor:
        """The mean loss of a micro batch."""

    def backward(self, loss: Tensor, last: bool) -> None: ...

    def forward_backward(self, micro_batches: list[Inputs]) -> Tensor:
        """Both passes of all micro batches; their mean loss."""

    def step(self) -> None:
        """Clips, updates, and lets go of the gradients."""


class _GpuClock:
    """Marks in the stream. `seconds(a, b)` only once b is over."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, a: Any, b: Any) -> float:
        return float(a.elapsed_time(b)) / 1000

    def synchronise(self) -> None:
        torch.cuda.synchronize()


class _CpuClock:
    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, a: Any, b: Any) -> float:
        return float(b - a)

    def synchronise(self) -> None:
        pass


def clock_of(device: torch.device) -> Any:
    return _GpuClock() if device.type == "cuda" else _CpuClock()


class Run:
    """The steps of one rank."""

    def __init__(self, trial: Trial, stepper: Stepper, micro_batches: list[Inputs], device: torch.device) -> None:
        self._trial, self._stepper, self._micro_batches = trial, stepper, micro_batches
        self.clock: Any = clock_of(device)
        total = trial.warmup_steps + trial.steps
        pinned = device.type == "cuda"
        self._losses = torch.full((total,), float("nan"), dtype=torch.float32, pin_memory=pinned)
        self._pending: deque[tuple[int, list[Any]]] = deque()
        self._device = device

    def step(self, number: int) -> None:
        """One optimizer step, issued and not waited for."""
        marks = [self.clock.mark()]
        if self._stepper.pipelined:
            loss = self._stepper.forward_backward(self._micro_batches)
            marks.append(self.clock.mark())
        else:
            loss = self._forward_backward(marks)
        self._stepper.step()
        self._losses[number : number + 1].copy_(loss.float().reshape(1), non_blocking=True)
        marks.append(self.clock.mark())
        self._pending.append((number, marks))

    def _forward_backward(self, marks: list[Any]) -> Tensor:
        """The mean loss; marks what each pass of each micro batch takes."""
        losses: list[Tensor] = []
        for left in reversed(range(len(self._micro_batches))):
            loss = self._stepper.forward(self._micro_batches[-1 - left], left == 0)
            marks.append(self.clock.mark())
            self._stepper.backward(loss, left == 0)
            marks.append(self.clock.mark())
            losses.append(loss.detach())
            del loss
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]

    def drain(self, keep: int, written: Callable[[Step], None] | None) -> None:
        """Reads the steps that are over, all but the newest `keep`."""
        while len(self._pending) > keep:
            number, marks = self._pending.popleft()
            if self._device.type == "cuda":
                marks[-1].synchronize()
            if written is not None:
                written(self._read(number, marks))

    def _read(self, number: int, marks: list[Any]) -> Step:
        seconds = self.clock.seconds
        spans = [seconds(a, b) for a, b in pairwise(marks)]
        phases = None if self._stepper.pipelined else (sum(spans[:-1:2]), sum(spans[1:-1:2]))
        return Step(
            step=number,
            phase="warmup" if number < self._trial.warmup_steps else "timed",
            step_s=seconds(marks[0], marks[-1]),
            forward_s=phases and phases[0],
            backward_s=phases and phases[1],
            optimizer_s=spans[-1],
            loss=float(self._losses[number]),
        )

    def losses(self) -> list[float]:
        return [float(loss) for loss in self._losses]


def measure(
    trial: Trial,
    stepper: Stepper,
    micro_batches: list[Inputs],
    device: torch.device,
    directory: Path,
    base_bytes: int,
) -> RankReport:
    """Runs the protocol; rank 0 writes the steps as they end. base_bytes: resident before the engine was built."""
    rank = dist.get_rank()
    run = Run(trial, stepper, micro_batches, device)
    memory, energy = Memory(device, base_bytes), Energy(device)
    watch = Watch(nvml_handle(device))
    total = trial.warmup_steps + trial.steps
    synchronise = run.clock.synchronise
    started = 0.0
    with _step_log(directory / STEPS_FILE if rank == 0 else None) as written:
        for number in range(total):
            if number == trial.warmup_steps:
                run.drain(0, written)
                synchronise()
                watch.start()
                dist.barrier()
                synchronise()
                energy.start()
                started = time.perf_counter()
            run.step(number)
            run.drain(LAG_STEPS, written)
        synchronise()
        seconds = time.perf_counter() - started
        joules = energy.stop()
        conditions = watch.stop()
        run.drain(0, written)
    peak_allocated, peak_reserved = memory.peaks()
    saved = None
    if trial.checkpoint_io and isinstance(stepper, checkpoint.Saves):
        saved = checkpoint.measure(stepper, directory / CHECKPOINT, synchronise)
    return RankReport(
        rank=rank,
        outcome="ok",
        seconds=seconds,
        steps=trial.steps,
        peak_allocated_bytes=peak_allocated,
        peak_reserved_bytes=peak_reserved,
        device_memory_bytes=memory.total_bytes,
        energy_j=joules,
        losses=run.losses(),
        parameters=stepper.parameters[0],
        trainable_parameters=stepper.parameters[1],
        optimizer=stepper.optimizer,
        conditions=conditions,
        checkpoint=saved,
    )


@contextlib.contextmanager
def _step_log(path: Path | None) -> Iterator[Callable[[Step], None] | None]:
    """What writes a step as a line, unbuffered; None without a path."""
    if path is None:
        yield None
        return
    with path.open("wb", buffering=0) as file:

        def write(step: Step) -> None:
            file.write(msgspec.json.encode(step) + b"\n")

        yield write


# What a process uses besides time: its device, memory of that, energy of its GPU.


def own_device(kind: str) -> torch.device:
    """This rank's GPU; or the CPU, of which each rank has its share (training_probe.launch.runner)."""
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def nccl_version(device: torch.device) -> dict[str, str]:
    """By its name, where torch has it on this device."""
    if device.type != "cuda" or not torch.cuda.nccl.is_available([torch.empty(1, device=device)]):
        return {}
    return {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))}


class Memory:
    """Peaks from now on: of torch's allocator on a GPU; on the CPU, which has no such counters, of the process's
    resident memory, and of what that has grown by since `base_bytes`."""

    def __init__(self, device: torch.device, base_bytes: int = 0) -> None:
        self._cuda, self._base = device.type == "cuda", base_bytes
        if self._cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.total_bytes: int | None = torch.cuda.get_device_properties(device).total_memory
            return
        self.total_bytes = None
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")  # VmHWM begins anew

    def peaks(self) -> tuple[int | None, int | None]:
        """Bytes allocated and reserved."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        resident = resident_bytes("VmHWM")
        return (None, None) if resident is None else (max(0, resident - self._base), resident)


def resident_bytes(field: str = "VmRSS") -> int | None:
    """This process's resident memory, or its peak (VmHWM); None where there is no /proc."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":")), None)


def nvml_handle(device: torch.device) -> Any:
    """NVML's of this GPU; None on the CPU, and where there is no NVML."""
    if device.type != "cuda":
        return None
    with contextlib.suppress(Exception):  # then what it counts is not known
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    return None


class Energy:
    """Joules of this rank's GPU by NVML's counter, which moves every few tens of milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._handle = nvml_handle(device)
        self._start_mj: int | None = None

    def start(self) -> None:
        self._start_mj = self._now_mj()

    def stop(self) -> float | None:
        end_mj = self._now_mj()
        return None if end_mj is None or self._start_mj is None else (end_mj - self._start_mj) / 1000

    def _now_mj(self) -> int | None:
        if self._handle is None:
            return None
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        return None
