"""One run of one cell: its processes are started, watched through the files that they write, and ended.

Whatever they do, out of memory, a crash, a hang, nothing of it reaches the sweep, and nothing of them outlives it: they
hang on the supervisor of backends/process.py. `run_trial` blocks until all of them are gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from backends import process
from backends.launch import LaunchError, Running, Start
from backends.untrusted import UNDECODABLE
from loadgen.monitor.tail import Tail
from training_probe.launch import aggregate, build_locks, torchrun
from training_probe.launch.outcome import Evidence, judge, oom_kills
from training_probe.protocol import LOG_FILE, STEPS_FILE, TRIAL_FILE, RankReport, Step, Trial, write_atomically
from training_probe.results import Outcome

POLL_S = 0.1
STOP_S = 5.0  # a rank that hangs in NCCL heeds no SIGTERM
TEARDOWN_S = 15.0  # from the last report to the end of the processes: whatever hangs then has been measured already
LOG_LINES = 4000
ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"
_STEP = msgspec.json.Decoder(Step)
_REPORT = msgspec.json.Decoder(RankReport)


class StoppedError(Exception):
    """The run was cancelled; its processes are gone and nothing is known of it."""


class RunnerError(Exception):
    """No process can be started here. One sentence."""


class Command(Protocol):
    """The command line that starts the processes of a run."""

    def __call__(self, *, python: str, processes: int, port: int, directory: Path) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """How a run ended, and what of it was measured, also when it failed. wall_s: from its start to its last process's
    end."""

    outcome: Outcome
    reason: str
    measured: aggregate.Measured
    wall_s: float
    log: Path


def worker_command(*, python: str, processes: int, port: int, directory: Path) -> tuple[str, ...]:
    """The real one."""
    module = "training_probe.worker"
    return torchrun.command(python=python, processes=processes, port=port, module=module, directory=directory)


def start_of(
    trial: Trial, directory: Path, *, python: str, gpu_ids: Sequence[int], port: int, command: Command = worker_command
) -> Start:
    """What is to be started for a run in `directory`: one process a GPU of the cell, on the first of `gpu_ids`."""
    directory = directory.absolute()
    cell, env = trial.cell, torchrun.environment(os.environ, trial.cell.gpus)
    if cell.engine == "megatron" and cell.tp * cell.cp > 1 and ONE_QUEUE not in os.environ:
        env[ONE_QUEUE] = "1"  # its backward pass relies on it: an all-reduce runs ahead of the weights' gradients
    return Start(
        run_id=directory.name,
        backend="training_probe",
        argv=command(python=python, processes=trial.cell.gpus, port=port, directory=directory),
        env=env,
        port=port,
        log=directory / LOG_FILE,
        gpu_ids=tuple(str(index) for index in gpu_ids[: trial.cell.gpus]),
        stop_s=STOP_S,
    )


def run_trial(
    trial: Trial,
    directory: Path,
    *,
    python: str = sys.executable,
    gpu_ids: Sequence[int] = (),
    timeout_s: float,
    limit_s: float | None = None,
    on_step: Callable[[Step], None] = lambda _: None,
    cancelled: threading.Event,
    command: Command = worker_command,
) -> TrialOutcome:
    """Runs a trial in `directory`, which is emptied before, and says what became of it.

    timeout_s: how long it may go without a new step, its start included. limit_s: how long all of it may take. gpu_ids:
    NVML indices; none: no process sees a GPU. on_step is called in this thread for every step. Raises StoppedError,
    RunnerError.
    """
    if sys.platform != "linux":
        raise RunnerError("training runs are started on Linux only; use a Linux machine.")
    if trial.cell.device == "cuda":  # on the CPU nothing is compiled
        build_locks.remove_forsaken()
    for last_try in (False, True):
        if cancelled.is_set():
            raise StoppedError
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_atomically(directory / TRIAL_FILE, trial)
        begun, kills = time.monotonic(), oom_kills()
        start = start_of(trial, directory, python=python, gpu_ids=gpu_ids, port=process.free_port(), command=command)
        try:
            running = process.start(start, lambda _: None, cancelled)
        except LaunchError as error:
            if cancelled.is_set():
                raise StoppedError from None
            raise RunnerError(f"no training process can be started: {error}") from None
        with contextlib.closing(Tail(directory / STEPS_FILE)) as tail:
            watch = _Watch(trial, directory, running, tail, on_step)
            try:
                given_up = watch.until_over(timeout_s, limit_s, cancelled)
            finally:
                running.stop()
            found = watch.evidence(given_up, oom_killed=_risen(kills, oom_kills()))
        if last_try or not found.port_was_taken:
            break
    outcome, reason = judge(trial, found)
    return TrialOutcome(
        outcome=outcome,
        reason=reason,
        measured=aggregate.measured(trial.cell, found.reports, watch.steps),
        wall_s=time.monotonic() - begun,
        log=start.log,
    )


def _risen(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


class _Watch:
    """A run in progress, seen through its files."""

    def __init__(
        self, trial: Trial, directory: Path, running: Running, tail: Tail, on_step: Callable[[Step], None]
    ) -> None:
        self.steps: list[Step] = []
        self._trial, self._directory, self._running, self._tail = trial, directory, running, tail
        self._on_step = on_step

    def until_over(self, timeout_s: float, limit_s: float | None, cancelled: threading.Event) -> str | None:
        """Waits until it ends or has said all that there is; else why it is given up, a clause. Raises StoppedError."""
        begun = moved = time.monotonic()
        reported: float | None = None
        while self._running.poll() is None:
            now = time.monotonic()
            if self._new_steps():
                moved = now
            if reported is None and self._all_said():
                reported = now
            if reported is not None and now - reported > TEARDOWN_S:
                return None
            if reported is None and now - moved > timeout_s:
                return f"no new step in {timeout_s:g} s"
            if reported is None and limit_s is not None and now - begun > limit_s:
                return f"beyond its limit of {limit_s:.0f} s"
            if cancelled.wait(POLL_S):
                raise StoppedError
        self._new_steps()
        return None

    def evidence(self, given_up: str | None, oom_killed: bool) -> Evidence:
        """All that there is to know, after the end."""
        self._new_steps()
        reports, unreadable = self._reports()
        exit = self._running.poll()
        return Evidence(
            reports=reports,
            unreadable=unreadable,
            exit_code=0 if exit is None else exit.code,
            given_up=given_up,
            log=self._running.log_tail(LOG_LINES),
            oom_killed=oom_killed,
            steps_done=len(self.steps),
        )

    def _all_said(self) -> bool:
        """Whether every rank has reported, or one a failure: the others will not get any further then."""
        reports, unreadable = self._reports()
        return len(reports) + len(unreadable) == self._trial.cell.gpus or any(
            report.outcome != "ok" for report in reports.values()
        )

    def _reports(self) -> tuple[dict[int, RankReport], dict[int, str]]:
        reports: dict[int, RankReport] = {}
        unreadable: dict[int, str] = {}
        for rank in range(self._trial.cell.gpus):
            with contextlib.suppress(FileNotFoundError):
                try:
                    reports[rank] = _REPORT.decode((self._directory / f"rank{rank}.json").read_bytes())
                except UNDECODABLE as error:
                    unreadable[rank] = str(error)
        return reports, unreadable

    def _new_steps(self) -> bool:
        """Takes in what was appended since; whether there was any. A line that is no step tells of nothing."""
        before = len(self.steps)
        for line in self._tail.lines():
            with contextlib.suppress(*UNDECODABLE):
                self.steps.append(_STEP.decode(line))
        for step in self.steps[before:]:
            self._on_step(step)
        return len(self.steps) > before
