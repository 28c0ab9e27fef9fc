"""What a sweep shows while it goes on: a line kept up to date on a terminal, a quiet line for every cell that is over,
and the snapshot file for whoever exports it."""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

from loadgen.rundir import Family, MetricSample, Snapshot, write_snapshot
from training_probe.grid import Cell
from training_probe.protocol import Step
from training_probe.results import GIB, CellResult, Outcome

EVERY_S = 1.0
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
LATEST_STEPS = 10  # the live speed is their mean

Utilization = Callable[[Cell, float], tuple[float | None, float | None]]


class CellProgress:
    """One cell that runs, as its Progress shows it. predicted_gb: the memory that it is predicted to need, GiB."""

    def __init__(self, progress: Progress, cell: Cell, predicted_gb: float | None) -> None:
        self.cell, self.running, self.predicted_gb = cell, cell, predicted_gb
        self.begun = time.monotonic()
        self.share, self.latest = 0.0, deque[Step](maxlen=LATEST_STEPS)
        self._what, self._progress = "", progress

    def trial(self, cell: Cell, what: str, share: float) -> None:
        """A run of it is started: the cell with its micro batch, what the run is, the share of the cell done before."""
        with self._progress.lock:
            self.running, self._what, self.share = cell, what, share
            self.latest.clear()
            self._progress.show(self, what)

    def step(self, step: Step, done: int, of: int, share: float) -> None:
        """Rank 0 has finished a step of the present run, `done` of `of` by now; `share` of the cell is done."""
        with self._progress.lock:
            self.latest.append(step)
            self.share = share
            if time.monotonic() - self._progress.shown_at >= EVERY_S:
                speed = self.speed()
                text = f"{self._what} step {done}/{of}" + (f", {speed:,.0f} tokens/s" if speed else "")
                self._progress.show(self, text)

    def over(self, result: CellResult) -> None:
        """It has its result."""
        self._progress.over(result, self)

    def speed(self) -> float | None:
        """Tokens/s of the latest steps."""
        seconds = sum(step.step_s for step in self.latest)
        return self.running.tokens_per_step * len(self.latest) / seconds if seconds > 0 else None

    def left_s(self, cell_s: float) -> float:
        """Until its end, where a cell takes `cell_s`."""
        elapsed_s = time.monotonic() - self.begun
        return elapsed_s * (1 / self.share - 1) if self.share > 0 else max(0.0, cell_s - elapsed_s)


class Progress:
    """One sweep's; of the cells that run, which may be several, on different nodes. `labels`: what it is, for its
    snapshot. `utilization`: MFU and HFU of a cell at a speed, tokens/s. `done`: results there are already."""

    def __init__(
        self,
        directory: Path,
        run_id: str,
        labels: dict[str, str],
        planned: int,
        done: Sequence[CellResult],
        say: Callable[[str], None],
        utilization: Utilization,
    ) -> None:
        self._directory, self._run_id, self._labels, self._planned = directory, run_id, labels, planned
        self._results = list(done)
        self._say, self._utilization = say, utilization
        self._live = sys.stderr.isatty()
        self._walls_s: list[float] = []  # of the cells that were run, now
        self._running: list[CellProgress] = []
        self._to_run = 0
        self.lock = threading.RLock()
        self.shown_at = time.monotonic()

    def begin(self, cell: Cell, predicted_gb: float | None, to_run: int) -> CellProgress:
        """A cell is to be run; `to_run` more are after it."""
        with self.lock:
            self._to_run = to_run
            begun = CellProgress(self, cell, predicted_gb)
            self._running.append(begun)
            if not self._live:  # a log shows that something has begun
                number = len(self._results) + len(self._running)
                _write_live(f"cell {number} of {self._planned}  {cell.name}: starting\n")
            begun.trial(cell, "starting", 0.0)
            return begun

    def over(self, result: CellResult, was: CellProgress | None = None) -> None:
        """A cell has its result; one that was not run counts no time."""
        with self.lock:
            if was is not None:
                self._walls_s.append(time.monotonic() - was.begun)
                self._running.remove(was)
            self._results.append(result)
            self._clear()
            self._say(f"cell {len(self._results)} of {self._planned}  {finished(result)}")
            self._write("running")

    def end(self, state: Literal["finished", "stopped"]) -> None:
        with self.lock:
            self._running.clear()
            self._clear()
            self._write(state)

    def left_s(self) -> float | None:
        """Until the end, if cells take as long as those that were run; None while there is nothing to go by."""
        now = time.monotonic()
        known = self._walls_s or [(now - cell.begun) / cell.share for cell in self._running if cell.share > 0]
        if not known:
            return None
        cell_s = statistics.fmean(known)
        present_s = max((cell.left_s(cell_s) for cell in self._running), default=0.0)
        return present_s + cell_s * self._to_run / max(1, len(self._running))

    def show(self, cell: CellProgress, doing: str) -> None:
        """What one of the cells that run does now."""
        self.shown_at = time.monotonic()
        if self._live:
            left_s = self.left_s()
            left = "" if left_s is None else f", {duration(left_s)} left"
            others = f" (and {len(self._running) - 1} more)" if len(self._running) > 1 else ""
            number = len(self._results) + 1
            _write_live(f"\r\x1b[2Kcell {number} of {self._planned}  {cell.cell.name}{others}: {doing}{left}")
        self._write("running")

    def _clear(self) -> None:
        if self._live:
            _write_live("\r\x1b[2K")

    def _write(self, state: Literal["running", "finished", "stopped"]) -> None:
        snapshot = Snapshot(
            run_id=self._run_id,
            program="training_probe",
            state=state,
            labels=self._labels,
            families=self._families(),
        )
        with contextlib.suppress(OSError):  # a full disk: hours of measuring do not end for want of a gauge
            write_snapshot(self._directory, snapshot)

    def _families(self) -> list[Family]:
        samples: dict[str, list[MetricSample]] = {name: [] for name, _ in _GAUGES}
        for result in self._results:
            _add(samples, _values(result), result, result.cell)
        for cell in self._running:
            _add(samples, self._present(cell), cell.cell, cell.cell.name)
        outcomes = Counter(result.outcome for result in self._results)
        return [
            *(Family(_PREFIX + name, "gauge", what, samples[name]) for name, what in _GAUGES),
            Family(_PREFIX + "cells", "gauge", "Cells that are over, by outcome.",
                   [MetricSample(outcomes[outcome], {"outcome": outcome}) for outcome in OUTCOMES]),
            Family(_PREFIX + "cells_planned", "gauge", "Cells of the sweep.", [MetricSample(self._planned)]),
        ]  # fmt: skip

    def _present(self, cell: CellProgress) -> dict[str, float | None]:
        speed, last = cell.speed(), cell.latest[-1] if cell.latest else None
        return {
            "step_seconds": last.step_s if last else None,
            "tokens_per_second": speed,
            "loss": last.loss if last else None,
            "mfu_ratio": self._utilization(cell.running, speed)[0] if speed else None,
            "predicted_memory_bytes": _bytes(cell.predicted_gb),
        }


def _add(
    samples: dict[str, list[MetricSample]], values: dict[str, float | None], of: Cell | CellResult, cell_name: str
) -> None:
    """A sample of each gauge that is known of the cell."""
    batch = of.micro_batch if isinstance(of, Cell) else of.batch_size
    labels = {
        "cell": cell_name, "engine": of.engine, "method": of.method, "model": of.model, "gpus": str(of.gpus),
        "seq_len": str(of.seq_len), "micro_batch": str(batch or "max"),
    }  # fmt: skip
    for name, value in values.items():
        if value is not None:
            samples[name].append(MetricSample(value, labels))


_PREFIX = "bench_training_"
_GAUGES = (
    ("step_seconds", "Time of an optimizer step: the last one, or the mean of a cell that is over."),
    ("tokens_per_second", "Tokens trained on in a second, all GPUs together."),
    ("loss", "Loss of the last step."),
    ("mfu_ratio", "Model FLOPs done, as a part of the device's peak."),
    ("peak_memory_bytes", "Highest memory allocated on any rank."),
    ("predicted_memory_bytes", "Memory that was predicted to be allocated."),
)


def _bytes(gib: float | None) -> float | None:
    return None if gib is None else gib * GIB


def _values(result: CellResult) -> dict[str, float | None]:
    return {
        "step_seconds": None if result.step_ms is None else result.step_ms / 1e3,
        "tokens_per_second": result.tokens_per_s,
        "loss": result.loss_last,
        "mfu_ratio": result.mfu_ratio,
        "peak_memory_bytes": _bytes(result.peak_memory_gb),
        "predicted_memory_bytes": _bytes(result.predicted_memory_gb),
    }


def finished(result: CellResult) -> str:
    """A cell that is over, in one line."""
    parts: list[str] = [result.outcome]
    if result.tokens_per_s is not None:
        std = "" if result.tokens_per_s_std is None else f" ± {result.tokens_per_s_std:,.0f}"
        parts.append(f"{result.tokens_per_s:,.0f}{std} tokens/s")
    if result.peak_memory_gb is not None:
        predicted = "" if result.predicted_memory_gb is None else f" (predicted {size(result.predicted_memory_gb)})"
        parts.append(f"peak {size(result.peak_memory_gb)}{predicted}")
    if result.search and result.outcome == "ok":
        limit = ", where the search ended" if result.search_was_limited else ""
        parts.append(f"micro batch {result.batch_size}{limit}")
    if result.wall_s >= 1:
        parts.append(duration(result.wall_s))
    return f"{result.cell}: {', '.join(parts)}" + (f" ({result.reason})" if result.reason else "")


def size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib * 1024:.0f} MiB"


def duration(seconds: float) -> str:
    """In the unit that a person would use: 42 s, 3 min, 2 h 10 min."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _write_live(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody looks any more, and the sweep goes on
        sys.stderr.write(text)
        sys.stderr.flush()
