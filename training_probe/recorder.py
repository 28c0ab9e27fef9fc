"""Measures the training of another program's trainer, from within: what it hears of steps, tokens and checkpoints
becomes a directory of one cell. training_probe.callback and training_probe.torchtitan tell it.

Steps are timed by the host's clock; the device is waited for before the first timed step and after the last one alone.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from loadgen import rundir, terminal
from loadgen.rundir.series import MeasurementSeries
from training_probe import results
from training_probe.conditions import Watch
from training_probe.grid import Cell
from training_probe.protocol import RankReport, Step, write_atomically
from training_probe.results import CellResult
from training_probe.sweep.cell import MANIFEST_FILE, SweepManifest
from training_probe.sweep.progress import Progress, finished
from training_probe.worker.measure import Energy, Memory, clock_of, nvml_handle

WARMUP_STEPS = 2


class Subject(Protocol):
    """What trains. `steps` that it means to do, `sharers` ranks that take the same sequences."""

    packages: tuple[str, ...]
    device: torch.device
    rank: int
    ranks: int
    sharers: int
    optimizer: str

    @property
    def steps(self) -> int: ...

    def cell(self) -> Cell:
        """Called after the first step, when sizes are known."""

    def parameters(self) -> Iterable[tuple[int, bool]]:
        """The size of each, and whether it is trained; none where a rank does not hold all."""

    def losses(self) -> Sequence[float]:
        """Those that were logged."""

    def utilization(self, cell: Cell, tokens_per_s: float, device_name: str) -> tuple[float | None, float | None]:
        """MFU and HFU."""


class Recorder:
    """directory: new, or empty. warmup_steps: that are not timed. metrics_port: of 127.0.0.1, for Prometheus, while the
    training lasts."""

    def __init__(
        self, directory: str | Path, warmup_steps: int = WARMUP_STEPS, metrics_port: int | None = None
    ) -> None:
        self.directory, self._warmup, self._metrics_port = Path(directory), warmup_steps, metrics_port
        self._steps: list[Step] = []
        self._waits_s: list[float] = []  # for data, of each step
        self._idle_since_s = 0.0
        self._positions = 0  # of the timed steps
        self._tokens: Any = 0  # likewise; what a mask counts stays on the device
        self._left_out_s = 0.0
        self._seconds: float | None = None  # of the timed steps
        self._peaks: tuple[int | None, int | None] = (None, None)  # bytes allocated and reserved
        self._saved: tuple[int, float] | None = None  # bytes, seconds
        self._progress: Progress | None = None
        self._subject: Subject | None = None
        self.in_step = False

    @property
    def subject(self) -> Subject:
        assert self._subject is not None, "begin() comes first"
        return self._subject

    @property
    def begun(self) -> bool:
        return self._subject is not None

    def begin(self, subject: Subject) -> None:
        self._subject, device = subject, subject.device
        self._begun_unix_s = time.time()
        self._clock, self._energy = clock_of(device), Energy(device)
        self._memory, self._watch = Memory(device), Watch(nvml_handle(device))
        if subject.rank == 0:
            rundir.create(self.directory)
            if self._metrics_port is not None:
                from loadgen.monitor.exporter import in_background

                in_background(self.directory, self._metrics_port)
        self._begin_timing()

    def begin_step(self) -> None:
        self._waits_s.append(time.perf_counter() - self._idle_since_s)
        self.in_step, self._step_since_s, self._waited_s = True, time.perf_counter(), 0.0
        self._before = self._positions, self._tokens

    def waited(self, seconds: float) -> None:
        """For data, within the step."""
        self._waits_s[-1] += seconds
        self._waited_s += seconds

    def given(self, positions: int, tokens: Any) -> None:
        """A micro batch; tokens: those of its positions that are no padding."""
        self._positions += positions
        self._tokens = self._tokens + tokens

    def end_step(self) -> None:
        number, now_s = len(self._steps), time.perf_counter()
        phase = "warmup" if number < self._warmup else "timed"
        took_s = now_s - self._step_since_s - self._waited_s
        step = Step(step=number, phase=phase, step_s=took_s)  # type: ignore[arg-type]
        self._steps.append(step)
        self.in_step, self._idle_since_s = False, now_s
        if self.subject.rank == 0:
            self._show(step)
        self._begin_timing()

    def drop_step(self) -> None:
        """There was no data for all of it."""
        self._waits_s.pop()
        self._positions, self._tokens = self._before
        self.in_step, self._idle_since_s = False, self._step_since_s
        self.leave_out()

    def _begin_timing(self) -> None:
        """Once the warm-up is over; the wait for the first timed step's data counts as that of the others."""
        if len(self._steps) == self._warmup:
            self._clock.synchronise()
            self._watch.start()
            self._energy.start()
            self._positions, self._tokens, self._left_out_s = 0, 0, 0.0
            self._timed_since_s = time.perf_counter()
        self.resume()

    def resume(self) -> None:
        """What was done since the last event is no wait for data."""
        self._idle_since_s = time.perf_counter()

    def settle(self) -> None:
        """Waits for the device, so that what comes next does not."""
        self._clock.synchronise()
        self.resume()

    def keep_peaks(self) -> None:
        """Before the trainer resets the allocator's."""
        pairs = zip(self._peaks, self._memory.peaks(), strict=True)
        allocated, reserved = (max((each for each in pair if each is not None), default=None) for pair in pairs)
        self._peaks = allocated, reserved

    def leave_out(self) -> float:
        """The time since the last event is none of training's."""
        now_s = time.perf_counter()
        took_s, self._idle_since_s = now_s - self._idle_since_s, now_s
        self._left_out_s += took_s
        return took_s

    def saved(self, checkpoint: Path) -> None:
        """It was written since the last event."""
        took_s = self.leave_out()
        self._saved = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()), took_s

    def stop(self) -> None:
        """The last step is over."""
        self._clock.synchronise()
        if len(self._steps) > self._warmup:
            self._seconds = time.perf_counter() - self._timed_since_s - self._left_out_s
        self._report = self._own_report()

    def end(self) -> None:
        """Writes the result, on rank 0, of all ranks."""
        subject, own = self.subject, (self._report, int(self._tokens), self._positions)
        gathered: list[Any] = [own]
        if subject.ranks > 1:
            gathered = [None] * subject.ranks
            dist.all_gather_object(gathered, own)
        if subject.rank == 0:
            result = self._result(*zip(*gathered, strict=True))
            results.append(self.directory, result)
            if self._progress is not None:
                self._progress.over(result)
                self._progress.end("finished")
            terminal.say(f"{finished(result)}; training_probe report {self.directory}")

    def _show(self, step: Step) -> None:
        """The snapshot for the exporter; sizes are known since the first step."""
        most = self.subject.steps
        if self._progress is None:
            cell = self.subject.cell()
            manifest = SweepManifest(
                run_id=rundir.new_run_id(), started_unix_s=self._begun_unix_s, version=rundir.package_version(),
                platform=self._device_name, cells=[cell], warmup_steps=self._warmup, runs=1,
                steps=max(0, most - self._warmup),
            )  # fmt: skip
            write_atomically(self.directory / MANIFEST_FILE, manifest, indent=2)
            terminal.OUTPUT.quiet = True  # the trainer draws its own progress
            labels, series = {"platform": self._device_name}, MeasurementSeries("cell", [cell.name])
            self._progress = Progress(
                self.directory, manifest.run_id, labels, series, [], lambda line: None, self._utilization
            )
            self._shown = self._progress.begin(cell, None)
        done = step.step + 1
        self._shown.step(step, done, most, min(1.0, done / max(1, most)))

    @property
    def _device_name(self) -> str:
        device = self.subject.device
        return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "CPU"

    def _utilization(self, cell: Cell, tokens_per_s: float) -> tuple[float | None, float | None]:
        return self.subject.utilization(cell, tokens_per_s, self._device_name)

    def _own_report(self) -> RankReport:
        self.keep_peaks()
        allocated, reserved = self._peaks
        sizes = list(self.subject.parameters())
        return RankReport(
            rank=self.subject.rank, outcome="ok", seconds=self._seconds,
            steps=max(0, len(self._steps) - self._warmup),
            peak_allocated_bytes=allocated, peak_reserved_bytes=reserved, device_memory_bytes=self._memory.total_bytes,
            energy_j=self._energy.stop() if self._seconds else None, conditions=self._watch.stop(),
            losses=self.subject.losses(), parameters=sum(size for size, _ in sizes) or None,
            trainable_parameters=sum(size for size, own in sizes if own) or None,
            optimizer=self.subject.optimizer, device_name=self._device_name,
            versions={name: version(name) for name in self.subject.packages if name in sys.modules},
        )  # fmt: skip

    def _result(self, reports: Sequence[RankReport], tokens: Sequence[int], positions: Sequence[int]) -> CellResult:
        cell, took_s = self.subject.cell(), [report.seconds for report in reports if report.seconds]
        result = results.of_cell(
            cell, platform=self._device_name, outcome="ok" if took_s else "skipped",
            reason="" if took_s else f"no step came after the {self._warmup} of the warm-up",
            started_unix_s=self._begun_unix_s, wall_s=time.time() - self._begun_unix_s,
            steps=reports[0].steps, warmup_steps=self._warmup,
        )  # fmt: skip
        if not took_s:
            return result
        run = results.run_result(cell, {report.rank: report for report in reports}, self._steps)
        joules = [report.energy_j for report in reports if report.energy_j is not None]
        trained, given = sum(tokens) / self.subject.sharers, sum(positions) / self.subject.sharers
        per_token = sum(joules) / trained if trained and len(joules) == len(reports) else None
        speed = trained / max(took_s)
        result.add_runs([msgspec.structs.replace(run, tokens_per_s=speed, energy_j_per_token=per_token)])
        result.valid = all(isfinite(loss) for loss in reports[0].losses if loss is not None)
        result.mfu_ratio, result.hfu_ratio = self._utilization(cell, speed)
        result.data_wait_ms = 1e3 * sum(self._waits_s[self._warmup :]) / reports[0].steps
        if trained < given:
            result.padding_ratio = 1 - trained / given
        if self._saved is not None:
            result.checkpoint_bytes, result.checkpoint_save_s = self._saved
        return result


def model_name(words: str) -> str:
    """It as a name of a cell."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", words)
