"""What a sweep shows while it goes on: the live view on a terminal, a quiet line for every cell that is over, and the
snapshot file for whoever exports it."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from rich.text import Text

from loadgen import terminal
from loadgen.live_view import MAX_LINES, MAX_SPARK, Picture, bar, row
from loadgen.rundir import MetricFamily, MetricSample, Snapshot, write_snapshot
from loadgen.rundir.series import MeasurementSeries, duration
from training_probe.grid import Cell
from training_probe.protocol import Step
from training_probe.results import GIB, CellResult, Outcome

EVERY_S = 1.0
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
LATEST_STEPS = 10  # the live speed is their mean

Utilization = Callable[[Cell, float], tuple[float | None, float | None]]


@dataclass(frozen=True, kw_only=True)
class SweepFrame:
    """What one picture shows. others: how many other cells run. doing: of this cell. tokens_per_s: None before its
    first step; one value a second in the history, the newest last. over: cells, by outcome. at_s: when all this was so,
    by the monotonic clock."""

    place: str
    cell: str
    others: int
    doing: str
    done_ratio: float
    elapsed_s: float
    left_s: float | None
    tokens_per_s: float | None
    tokens_history: Sequence[float | None]
    predicted_gb: float | None
    over: Mapping[str, int]
    at_s: float


def lines(frame: SweepFrame, width: int, height: int = MAX_LINES) -> list[Text]:
    """The picture for a terminal of `width` columns; the first `height` lines of it."""
    others = f" (and {frame.others} more)" if frame.others else ""
    title = Text(f"{frame.place}  {frame.cell}{others}", style="bold")
    title.truncate(width, overflow="ellipsis")
    speed = [] if frame.tokens_per_s is None else [f"{frame.tokens_per_s:,.0f}"]
    age_s = time.monotonic() - frame.at_s
    left_s = None if frame.left_s is None else max(0.0, frame.left_s - age_s)
    memory = [] if frame.predicted_gb is None else [f"{size(frame.predicted_gb)} predicted"]
    return [
        title,
        bar(frame.done_ratio, frame.elapsed_s + age_s, left_s, width),
        *row("now", [frame.doing], width),
        *row("tokens/s", speed, width, frame.tokens_history),
        *row("memory", memory, width),
        *row("over", [f"{count} {outcome}" for outcome, count in frame.over.items()], width),
    ][:height]


class CellProgress:
    """One cell that runs, as its Progress shows it. predicted_gb: the memory that it is predicted to need, GiB."""

    def __init__(self, progress: Progress, cell: Cell, predicted_gb: float | None) -> None:
        self.cell, self.running, self.predicted_gb = cell, cell, predicted_gb
        self.latest = deque[Step](maxlen=LATEST_STEPS)
        self.doing = self._what = "starting"
        self._progress = progress

    def trial(self, cell: Cell, what: str, share: float) -> None:
        """A run of it is started: the cell with its micro batch, what the run is, the share of the cell done before."""
        with self._progress.lock:
            self.running, self.doing, self._what = cell, what, what
            self.latest.clear()
            self._progress.show(self, share)

    def step(self, step: Step, done: int, of: int, share: float) -> None:
        """Rank 0 has finished a step of the present run, `done` of `of` by now; `share` of the cell is done."""
        with self._progress.lock:
            self.latest.append(step)
            self._progress.trained(self)
            self.doing = f"{self._what} step {done}/{of}"
            self._progress.show(self, share, at_least_after_s=EVERY_S)

    def over(self, result: CellResult) -> None:
        """It has its result."""
        self._progress.over(result, self)

    def speed(self) -> float | None:
        """Tokens/s of the latest steps."""
        seconds = sum(step.step_s for step in self.latest)
        return self.running.tokens_per_step * len(self.latest) / seconds if seconds > 0 else None


class Progress:
    """One sweep's; of the cells that run, which may be several, on different nodes. `labels`: what it is, for its
    snapshot. `series`: its cells by name. `utilization`: MFU and HFU of a cell at a speed, tokens/s. `done`: results
    there are already."""

    def __init__(
        self,
        directory: Path,
        run_id: str,
        labels: dict[str, str],
        series: MeasurementSeries,
        done: Sequence[CellResult],
        say: Callable[[str], None],
        utilization: Utilization,
    ) -> None:
        self._directory, self._run_id, self._labels, self._series = directory, run_id, labels, series
        self._results = list(done)
        self._say, self._utilization = say, utilization
        self._picture = Picture(sys.stderr.fileno(), EVERY_S) if terminal.draws(sys.stderr) else None
        self._speeds: deque[float | None] = deque(maxlen=MAX_SPARK)
        self._running: list[CellProgress] = []
        self._trained: dict[str, tuple[dict[str, str], int, int]] = {}  # by cell: labels, steps, tokens
        self.lock = threading.RLock()
        self._began_s = self._shown_s = time.monotonic()

    def begin(self, cell: Cell, predicted_gb: float | None) -> CellProgress:
        """A cell is to be run."""
        with self.lock:
            begun = CellProgress(self, cell, predicted_gb)
            self._running.append(begun)
            self._series.begin(cell.name)
            if self._picture is None:  # a log shows that something has begun
                terminal.say(f"{self._series.place(cell.name)}  {cell.name}: starting")
            self.show(begun, 0.0)
            return begun

    def over(self, result: CellResult, was: CellProgress | None = None) -> None:
        """A cell has its result; one that was not run counts no time."""
        with self.lock:
            if was is not None:
                self._running.remove(was)
            self._results.append(result)
            self._series.end(result.cell)
            self.say(f"{self._series.place(result.cell)}  {finished(result)}")
            self._write("running")

    def trained(self, cell: CellProgress) -> None:
        """One more step of a cell, of whatever run of it."""
        labels, steps, tokens = self._trained.get(cell.cell.name, (_labels(cell.cell, cell.cell.name), 0, 0))
        self._trained[cell.cell.name] = labels, steps + 1, tokens + cell.running.tokens_per_step

    def say(self, text: str) -> None:
        """A line that stays on the screen."""
        with self.lock:
            if self._picture is not None:
                self._picture.clear()
            self._say(text)

    def end(self, state: Literal["finished", "stopped"]) -> None:
        with self.lock:
            self._running.clear()
            if self._picture is not None:
                self._picture.end(erase=True)
            self._write(state)

    def show(self, cell: CellProgress, share: float, at_least_after_s: float = 0.0) -> None:
        """What one of the cells that run does now, and the share of it that is done."""
        self._series.progress(cell.cell.name, share)
        if self._picture is not None:
            self._picture.show(partial(lines, self.frame(cell)))
        if time.monotonic() - self._shown_s >= at_least_after_s:
            self._shown_s = time.monotonic()
            self._speeds.append(cell.speed())
            self._write("running")

    def frame(self, cell: CellProgress) -> SweepFrame:
        """The picture as it is now."""
        outcomes = Counter[str](result.outcome for result in self._results)
        return SweepFrame(
            place=self._series.place(cell.cell.name), cell=cell.cell.name, others=len(self._running) - 1,
            doing=cell.doing, done_ratio=self._series.done_ratio, elapsed_s=time.monotonic() - self._began_s,
            left_s=self._series.left_s, tokens_per_s=cell.speed(), tokens_history=tuple(self._speeds),
            predicted_gb=cell.predicted_gb, over=dict(outcomes), at_s=time.monotonic(),
        )  # fmt: skip

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

    def _families(self) -> list[MetricFamily]:
        samples: dict[str, list[MetricSample]] = {name: [] for name, _ in _GAUGES}
        for result in self._results:
            _add(samples, _values(result), result, result.cell)
        for cell in self._running:
            _add(samples, self._present(cell), cell.cell, cell.cell.name)
        outcomes = Counter(result.outcome for result in self._results)
        trained = self._trained.values()
        return [
            MetricFamily(_PREFIX + "steps", "counter", "Optimizer steps, warm-up and searches included.",
                   [MetricSample(steps, labels) for labels, steps, _ in trained]),
            MetricFamily(_PREFIX + "tokens", "counter", "Tokens that these steps trained on, all GPUs together.",
                   [MetricSample(tokens, labels) for labels, _, tokens in trained]),
            MetricFamily(_PREFIX + "throttled_ratio", "gauge", "Part of a cell in which a GPU's clocks were held back.",
                   [*_throttled(self._results)]),
            *(MetricFamily(_PREFIX + name, "gauge", what, samples[name]) for name, what in _GAUGES),
            MetricFamily(_PREFIX + "cells", "gauge", "Cells that are over, by outcome.",
                   [MetricSample(outcomes[outcome], {"outcome": outcome}) for outcome in OUTCOMES]),
            MetricFamily(_PREFIX + "cells_planned", "gauge", "Cells of the sweep.", [MetricSample(len(self._series))]),
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
    labels = {**_labels(of, cell_name), "micro_batch": str(batch or "max")}
    for name, value in values.items():
        if value is not None:
            samples[name].append(MetricSample(value, labels))


def _labels(of: Cell | CellResult, cell_name: str) -> dict[str, str]:
    return {
        "cell": cell_name, "engine": of.engine, "method": of.method, "model": of.model, "gpus": str(of.gpus),
        "seq_len": str(of.seq_len),
    }  # fmt: skip


def _throttled(results: Sequence[CellResult]) -> Iterator[MetricSample]:
    """How throttled cells that are over were, by what held their GPUs' clocks back."""
    for result in results:
        if (met := result.conditions) is not None:
            for reason, ratio in (("heat", met.thermal_ratio), ("power", met.power_ratio)):
                if ratio is not None:
                    yield MetricSample(ratio, {**_labels(result, result.cell), "reason": reason})


_PREFIX = "llm_dissect_training_"
_GAUGES = (
    ("step_seconds", "Time of an optimizer step: the last one, or the mean of a cell that is over."),
    ("tokens_per_second", "Tokens trained on in a second, all GPUs together."),
    ("loss", "Loss of the last step."),
    ("mfu_ratio", "Model FLOPs done, as a part of the device's peak."),
    ("peak_memory_bytes", "Highest memory allocated on any rank."),
    ("predicted_memory_bytes", "Memory that was predicted to be allocated."),
    ("energy_joules_per_token", "Energy of the GPUs for a token, once a cell is over."),
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
        "energy_joules_per_token": result.energy_j_per_token,
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
