"""One cell that is run: the search of its micro batch where it has none, its independent runs, its result."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from training_probe.grid import Cell
from training_probe.launch import aggregate, runner
from training_probe.launch.gpu_idle import MemoryReturn
from training_probe.launch.runner import TrialOutcome
from training_probe.protocol import TIMELINE_STEPS, Step, Trial
from training_probe.results import GIB, Attempt, CellResult, Outcome, of_cell
from training_probe.sweep.dependencies import Surroundings, device_memory_bytes, utilization
from training_probe.sweep.manifests import Manifest
from training_probe.sweep.progress import Progress
from training_probe.sweep.search import SEARCH_STEPS, SEARCH_WARMUP_STEPS, largest


class _Failed(Exception):
    """The cell ends with this outcome."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome: Outcome = outcome
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Context:
    """The sweep that a cell belongs to."""

    directory: Path
    manifest: Manifest
    around: Surroundings
    progress: Progress
    memory: MemoryReturn
    cancelled: threading.Event


class CellRun:
    """One cell that is run: its search, its runs, its result."""

    def __init__(self, sweep: Context, cell: Cell) -> None:
        self._sweep, self._cell, self._settings = sweep, cell, sweep.manifest
        self._begun, self._started_unix_s = time.monotonic(), time.time()
        self._directory = sweep.directory / "trials" / cell.name
        self._attempts: list[Attempt] = []
        self._measured: list[aggregate.Measured] = []
        self._notes: list[str] = []
        self._log = ""

    def result(self) -> CellResult:
        """Raises StoppedError: then there is none."""
        cell, failed = self._cell, _Failed("ok", "")
        try:
            if cell.micro_batch is None:
                cell = msgspec.structs.replace(cell, micro_batch=self._search())
            while (failed := self._measure(cell)).outcome == "oom" and self._attempts and (cell.micro_batch or 1) > 1:
                assert cell.micro_batch is not None
                self._attempts.append(Attempt(micro_batch=cell.micro_batch, outcome="oom"))
                cell = msgspec.structs.replace(cell, micro_batch=cell.micro_batch // 2)
            if failed.outcome == "ok" and self._settings.timeline:
                self._record(cell)
        except _Failed as given_up:
            failed = given_up
        return self._result(cell, failed)

    def _result(self, cell: Cell, failed: _Failed) -> CellResult:
        fields = aggregate.fields(self._measured)
        if fields.get("device_memory_gb") is None and (there := device_memory_bytes(cell, self._settings)):
            fields["device_memory_gb"] = there / GIB  # no rank lived to tell
        speed = fields.get("tokens_per_s")
        mfu, hfu = utilization(cell, self._settings, speed) if speed else (None, None)
        doubts = {doubt for run in self._measured if (doubt := aggregate.loss_doubt(run.losses))}
        said = [failed.reason] if failed.outcome != "ok" else sorted(doubts)
        return of_cell(
            self._cell,
            platform=self._sweep.manifest.platform,
            outcome=failed.outcome,
            reason="; ".join([*said, *self._notes]),
            **self._sweep.around.predicted_fields(cell, self._settings),
            **{
                "steps": self._settings.steps, "warmup_steps": self._settings.warmup_steps, **fields,
                "valid": failed.outcome == "ok" and fields.get("valid", False),
                "batch_size": cell.micro_batch, "mfu_ratio": mfu, "hfu_ratio": hfu, "search": self._attempts,
                "started_unix_s": self._started_unix_s, "wall_s": time.monotonic() - self._begun, "log": self._log,
            },
        )  # fmt: skip

    def _measure(self, cell: Cell) -> _Failed:
        """All runs with one micro batch, up to the first that fails; how that ended. Keeps what was measured."""
        self._measured = []
        for number in range(1, self._settings.runs + 1):
            trial = self._trial(cell, self._settings.warmup_steps, self._settings.steps, seed=number - 1)
            done = (number - 1) / self._settings.runs
            ended = self._run(trial, f"run-{number}", f"run {number}/{self._settings.runs}", done)
            if ended.outcome == "ok" or not self._measured:
                self._measured.append(ended.measured)  # of a failed first one: its peaks
            if ended.outcome != "ok":
                return _Failed(ended.outcome, ended.reason)
        return _Failed("ok", "")

    def _record(self, cell: Cell) -> None:
        """What the first steps hold, recorded beside the measurement; that it failed is a note."""
        trial = msgspec.structs.replace(self._trial(cell, 0, TIMELINE_STEPS, seed=0), timeline=True)
        log = self._log
        ended = self._run(trial, "timeline", "memory timeline", 1.0)
        self._log = log
        if ended.outcome != "ok":
            self._notes.append(f"no memory timeline ({ended.outcome}: {ended.reason})")

    def _search(self) -> int:
        """The largest micro batch that fits. Raises _Failed when none does."""
        last = TrialOutcome(outcome="ok", reason="", measured=aggregate.Measured(), wall_s=0.0, log=Path())

        def attempt(micro_batch: int) -> Attempt:
            nonlocal last
            cell = msgspec.structs.replace(self._cell, micro_batch=micro_batch)
            trial = self._trial(cell, SEARCH_WARMUP_STEPS, SEARCH_STEPS, seed=0)
            last = self._run(trial, f"search-{micro_batch}", f"search, micro batch {micro_batch}", 0.0)
            peak = max(last.measured.allocated_bytes, default=None)
            self._attempts.append(tried := Attempt(micro_batch=micro_batch, outcome=last.outcome,
                                                   peak_allocated_bytes=peak))  # fmt: skip
            return tried

        at_most = self._settings.max_micro_batch
        memory_bytes = device_memory_bytes(self._cell, self._sweep.manifest)
        start = self._sweep.around.first_micro_batch(self._cell, self._settings, memory_bytes)
        found = largest(attempt, start=start, at_most=at_most)
        if found.micro_batch is None:
            self._measured = [last.measured]
            raise _Failed(last.outcome, f"with micro batch {found.attempts[-1].micro_batch}: {last.reason}")
        return found.micro_batch

    def _trial(self, cell: Cell, warmup_steps: int, steps: int, seed: int) -> Trial:
        model = self._settings.model(cell)
        return Trial(
            cell=cell, spec=model.spec, model_dir=model.directory, warmup_steps=warmup_steps, steps=steps, seed=seed,
            host_memory_bytes=self._settings.host_memory_bytes,
        )  # fmt: skip

    def _run(self, trial: Trial, name: str, what: str, done: float) -> TrialOutcome:
        """One launch. `done`: the share of the cell that is done before it. Raises StoppedError."""
        progress, settings, of = self._sweep.progress, self._settings, trial.warmup_steps + trial.steps
        progress.trial(trial.cell, what, done)
        share = 1 / settings.runs if name.startswith("run-") else 0.0
        steps_done = 0

        def on_step(step: Step) -> None:
            nonlocal steps_done
            steps_done += 1
            progress.step(step, steps_done, of, done + share * steps_done / of)

        limit_s = None
        if settings.limit_s is not None:
            limit_s = settings.limit_s - (time.monotonic() - self._begun)
            if limit_s <= 0:
                raise _Failed("timeout", f"the cell is beyond its limit of {settings.limit_s:g} s before {what}")
        note = self._sweep.memory.wait(self._sweep.cancelled)
        if note is not None and note not in self._notes:
            self._notes.append(note)
        directory = self._directory / name
        ended = runner.run_trial(
            trial,
            directory,
            python=settings.python,
            gpu_ids=settings.gpu_ids if trial.cell.device == "cuda" else (),
            timeout_s=settings.timeout_s,
            limit_s=limit_s,
            on_step=on_step,
            cancelled=self._sweep.cancelled,
            command=self._sweep.around.command,
        )
        self._log = str(ended.log.relative_to(self._sweep.directory.absolute()))
        return ended
