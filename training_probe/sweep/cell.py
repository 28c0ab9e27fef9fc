"""What a sweep measures and how, `manifest.json`, written before the first cell and all that resuming it needs. And
one cell: what is known of it before it runs, the search of its micro batch where it has none, its independent runs,
its result.

Processes, GPUs and predictions are given to a sweep as its Dependencies, so that each can be another in a test.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict

import msgspec
from msgspec.structs import replace

from backends import gpus
from backends.decoder import ModelSpec
from backends.untrusted import read_json
from loadgen import models
from loadgen.rundir import Machine, RunError, machine_memory_bytes, this_machine
from training_probe import flops, llama_shape, memory, own_deepspeed
from training_probe.grid import PAPER_MAX_MICRO_BATCH, Cell, Model
from training_probe.launch import runner
from training_probe.launch.cluster import NodePool
from training_probe.launch.runner import HERE, Launching, Limits, Place, TrialOutcome
from training_probe.memory import Prediction
from training_probe.memory.layers import uncounted
from training_probe.memory.process import Fit, host_judged
from training_probe.own_deepspeed import ZeroSizes
from training_probe.protocol import CHECKPOINT, TIMELINE_STEPS, Step, Trial
from training_probe.refusals import impossible
from training_probe.results import GIB, Attempt, CellResult, Outcome, RunResult, loss_doubt, of_cell
from training_probe.sweep.progress import CellProgress

MANIFEST_FILE = "manifest.json"
SCHEMA = "training_probe.manifest/1"
SEARCH_WARMUP_STEPS, SEARCH_STEPS = 2, 3
APART = 8  # a search ends where the largest that fits and the smallest that does not are this share of the former apart


# What a sweep measures and how.


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a sweep measures its cells.

    platform: this machine's name in tables; empty: named after its devices. models: by the cells' model names; what is
    not in it is looked up in the catalog. gpu_ids: NVML indices, of which a cell takes as many as it needs from the
    front. checkpoint_io: whether the first run of a cell saves and loads a checkpoint as well. timeline: whether what
    the first steps hold is recorded as well, in a launch of its own. timeout_s: without a new step; limit_s: of a whole
    cell. max_micro_batch: where a search ends. no_skip: cells that are predicted not to fit are run as well.
    host_memory_bytes: limit of each process, for the CPU. on: the cluster whose nodes the cells run on, as `--on` names
    it; None: this machine. deepspeed: the user's own configuration of DeepSpeed, as
    its file held it.
    """

    platform: str = ""
    preset: str | None = None
    models: dict[str, Model] = {}
    gpu_ids: tuple[int, ...] = ()
    warmup_steps: int = 30
    steps: int = 100
    runs: int = 3
    timeline: bool = False
    checkpoint_io: bool = False
    timeout_s: float = 600.0
    limit_s: float | None = None
    max_micro_batch: int = PAPER_MAX_MICRO_BATCH
    no_skip: bool = False
    host_memory_bytes: int | None = None
    deepspeed: dict[str, Any] | None = None
    on: str | None = None
    nodes_per_cell: int = 1
    argv: tuple[str, ...] = ()
    python: str = sys.executable

    def model(self, cell: Cell) -> Model:
        if cell.own:  # what its script builds is not known
            return Model()
        model = self.models.get(cell.model) or Model(spec=llama_shape.known(cell.model))
        if model.config is None and model.directory is not None:  # a manifest of an earlier version has no config
            named = models.find(model.directory)
            return replace(model, name=named.name, config=dict(named.config))
        return model

    def trial(self, cell: Cell) -> Trial:
        """A run of the cell with these steps."""
        model = self.model(cell)
        return Trial(
            cell=cell, spec=model.spec, config=model.config, warmup_steps=self.warmup_steps, steps=self.steps,
            host_memory_bytes=self.host_memory_bytes,
            deepspeed=self.deepspeed if cell.engine == "deepspeed" else None,
            rows=() if (drawn := cell.drawn) is None else drawn.replicas,
        )  # fmt: skip


class SweepManifest(Settings, frozen=True, kw_only=True):
    """The settings of a sweep, with its platform named, and what they were applied to. device_names,
    device_memory_bytes: of the chosen GPUs, in the order of gpu_ids; None: not known. environment: what of it decides
    how processes run."""

    schema: str = SCHEMA
    run_id: str
    started_unix_s: float
    version: str
    device_names: list[str] = []
    device_memory_bytes: list[int | None] = []
    driver: str | None = None
    cells: list[Cell]
    environment: dict[str, str] = {}
    machine: Machine = msgspec.field(default_factory=this_machine)


def one_name_each(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, each once. Raises RunError where two have one name, which is what results go by."""
    named: dict[str, Cell] = {}
    for cell in cells:
        if named.setdefault(cell.name, cell) != cell:
            raise RunError(f"two different cells are called {cell.name}; measure them in sweeps of their own.")
    return list(named.values())


def read_manifest(directory: Path) -> SweepManifest:
    """The manifest of a sweep's directory. Raises RunError."""
    path = directory / MANIFEST_FILE
    if not path.exists():
        raise RunError(f"{directory} holds no {MANIFEST_FILE}; name the directory of a sweep.")
    return read_json(path, SweepManifest, RunError, "is not a manifest of a sweep of this version", directory=directory)


# Before it runs.


class Predictor(Protocol):
    """Predicts memory as training_probe.memory does."""

    def predict(self, cell: Cell, spec: ModelSpec, zero: ZeroSizes, /) -> Prediction: ...
    def fits(self, prediction: Prediction, device_memory_bytes: int, /) -> Fit: ...
    def largest_micro_batch(
        self, cell: Cell, spec: ModelSpec, device_memory_bytes: int, at_most: int, zero: ZeroSizes, /
    ) -> int: ...


class GpuMemory(Protocol):
    """The memory of the GPUs that runs use, as runner.MemoryReturn knows it."""

    def wait(self, cancelled: threading.Event, /) -> str | None: ...


class Predicted(TypedDict, total=False):
    """The fields of CellResult that have what was predicted."""

    predicted_memory_gb: float
    predicted_terms_gb: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """What is given to a sweep: how processes are started, which GPUs there are, what will fit. node_bytes: memory
    of this machine, for what is offloaded. place: where the processes of a cell run; cluster: whose nodes it gets;
    None: cells run here, one after another."""

    command: runner.Command = runner.worker_command
    inventory: Callable[[], gpus.Inventory] = gpus.read
    probe: Callable[[Sequence[int]], gpus.GpuProbe] = gpus.GpuProbe
    predictor: Predictor = memory
    node_bytes: Callable[[], int | None] = machine_memory_bytes
    place: Place = HERE
    cluster: NodePool | None = None

    def predict(self, cell: Cell, settings: Settings) -> Prediction | None:
        """The prediction for a cell, `sized`; None where nothing is known, and on the CPU, which is not predicted."""
        spec = None if cell.device == "cpu" else counted(cell, settings)
        if spec is None or unpredicted(cell, settings):
            return None
        return self.predictor.predict(sized(cell), spec, own_deepspeed.sizes(cell, settings.deepspeed))

    def predicted_fields(self, cell: Cell, settings: Settings) -> Predicted:
        """Empty where nothing is predicted."""
        prediction = self.predict(cell, settings)
        if prediction is None:
            return {}
        return {
            "predicted_memory_gb": prediction.peak_bytes / GIB,
            "predicted_terms_gb": {name: size / GIB for name, size in prediction.terms_bytes.items()},
        }

    def launching(self, cell: Cell, settings: Settings) -> Launching:
        """How the cell's processes are started."""
        gpu_ids = settings.gpu_ids if cell.device == "cuda" else ()
        return Launching(python=settings.python, gpu_ids=gpu_ids, command=self.command, place=self.place)

    def refusal(self, cell: Cell, settings: Settings, memory_bytes: int | None) -> tuple[Outcome, str] | None:
        """Why a cell is not to be run on devices of this memory, and the outcome that this is; None when it is."""
        model = settings.model(cell)
        why = impossible(cell, model.decoder, model.unknown)
        if why is None and cell.device == "cuda" and cell.gpus > len(settings.gpu_ids):
            why = f"it needs {cell.gpus} GPUs, and the sweep has {len(settings.gpu_ids) or 'none'}"
        if why is not None:
            return "unsupported", why
        prediction = self.predict(cell, settings)
        if settings.no_skip or prediction is None or memory_bytes is None:
            return None
        fits = [self.predictor.fits(prediction, memory_bytes)]
        if prediction.host and self.place is HERE and (node_bytes := self.node_bytes()) is not None:
            fits.append(host_judged(prediction.host_bytes, node_bytes))
        return next((("skipped", fit.reason) for fit in fits if not fit.ok), None)

    def first_micro_batch(self, cell: Cell, settings: Settings, memory_bytes: int | None) -> int:
        """Where a search begins: the largest power of two that is predicted to fit; 1 without a prediction."""
        spec = counted(cell, settings)
        if spec is None or memory_bytes is None or unpredicted(cell, settings):
            return 1
        most, zero = settings.max_micro_batch, own_deepspeed.sizes(cell, settings.deepspeed)
        return floor_power_of_two(self.predictor.largest_micro_batch(sized(cell), spec, memory_bytes, most, zero))


def counted(cell: Cell, settings: Settings) -> ModelSpec | None:
    """The cell's model where its parameters and what they keep were counted."""
    spec = settings.model(cell).decoder
    return None if spec is None or uncounted(cell, spec) is not None else spec


def unpredicted(cell: Cell, settings: Settings) -> str | None:
    """Why memory that could be predicted is not, a clause."""
    field = own_deepspeed.uncounted(cell, settings.deepspeed)
    if field is None or cell.device == "cpu":
        return None
    return f"no memory is predicted with the {field} of --deepspeed"


def sized(cell: Cell) -> Cell:
    """The cell, with micro batch 1 where it is still to be searched."""
    return cell if cell.micro_batch is not None else replace(cell, micro_batch=1)


def device_memory_bytes(cell: Cell, manifest: SweepManifest) -> int | None:
    """The smallest memory of the GPUs that a cell would run on; None where it is not known, as on a CPU."""
    if cell.device != "cuda":
        return None
    known = [memory for memory in manifest.device_memory_bytes[: cell.gpus] if memory is not None]
    return min(known, default=None)


def utilization(cell: Cell, manifest: SweepManifest, tokens_per_s: float) -> tuple[float | None, float | None]:
    """MFU and HFU of a cell at a speed on the devices of a sweep; None where they cannot be known."""
    spec, names = counted(cell, manifest), manifest.device_names
    if spec is None or not names:
        return None, None
    return flops.utilization(cell, spec, tokens_per_s, names[0])


# While it runs.


class _Failed(Exception):
    """The cell ends with this outcome."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome: Outcome = outcome
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Context:
    """The sweep that a cell belongs to, as the cell sees it. nodes: the hosts that it runs on, on a cluster."""

    directory: Path
    manifest: SweepManifest
    around: Dependencies
    progress: CellProgress
    memory: GpuMemory
    cancelled: threading.Event
    nodes: Sequence[str] = ()


class CellRun:
    """One cell that is run: its search, its runs, its result."""

    def __init__(self, sweep: Context, cell: Cell) -> None:
        self._sweep, self._cell, self._settings = sweep, cell, sweep.manifest
        self._begun, self._started_unix_s = time.monotonic(), time.time()
        self._directory = sweep.directory / "trials" / cell.name
        self._attempts: list[Attempt] = []
        self._measured: list[RunResult] = []
        self._notes = [note] if (note := unpredicted(cell, sweep.manifest)) else []
        self._log = ""

    def result(self) -> CellResult:
        """Raises Stopped: then there is none."""
        cell, failed = self._cell, _Failed("ok", "")
        try:
            if cell.micro_batch is None:
                cell = replace(cell, micro_batch=self._search())
            while (failed := self._measure(cell)).outcome == "oom" and self._attempts and (cell.micro_batch or 1) > 1:
                assert cell.micro_batch is not None
                self._attempts.append(Attempt(micro_batch=cell.micro_batch, outcome="oom"))
                cell = replace(cell, micro_batch=next_smaller(self._attempts, cell.micro_batch))
            if failed.outcome == "ok" and self._settings.timeline:
                self._record(cell)
        except _Failed as given_up:
            failed = given_up
        return self._result(cell, failed)

    def _result(self, cell: Cell, failed: _Failed) -> CellResult:
        settings, ok = self._settings, failed.outcome == "ok"
        doubts = {doubt for run in self._measured if (doubt := loss_doubt(run.report.losses))}
        result = of_cell(
            self._cell, platform=settings.platform, outcome=failed.outcome,
            reason="; ".join([*(sorted(doubts) if ok else [failed.reason]), *self._notes]),
            steps=settings.steps, warmup_steps=settings.warmup_steps, batch_size=cell.micro_batch,
            search=self._attempts, started_unix_s=self._started_unix_s, wall_s=time.monotonic() - self._begun,
            log=self._log, nodes=list(self._sweep.nodes), padding_ratio=cell.padding_ratio,
            deepspeed=settings.trial(cell).deepspeed,
            **self._sweep.around.predicted_fields(cell, settings),
        )  # fmt: skip
        result.add_runs(self._measured)
        result.valid = ok and result.valid
        if result.device_memory_gb is None and (size_bytes := device_memory_bytes(cell, settings)):
            result.device_memory_gb = size_bytes / GIB  # no rank lived to report it
        if result.tokens_per_s:
            result.mfu_ratio, result.hfu_ratio = utilization(cell, settings, result.tokens_per_s)
        return result

    def _measure(self, cell: Cell) -> _Failed:
        """All runs with one micro batch, up to the first that fails; how that ended. Keeps what was measured."""
        self._measured = []
        for number in range(1, self._settings.runs + 1):
            once = self._settings.checkpoint_io and number == 1
            trial = replace(self._settings.trial(cell), seed=number - 1, checkpoint_io=once)
            done = (number - 1) / self._settings.runs
            ended = self._run(trial, f"run-{number}", f"run {number}/{self._settings.runs}", done)
            if ended.outcome == "ok" or not self._measured:
                self._measured.append(ended.measured)  # of a failed first one: its peaks
            if ended.outcome != "ok":
                return _Failed(ended.outcome, ended.reason)
        return _Failed("ok", "")

    def _record(self, cell: Cell) -> None:
        """What the first steps hold, recorded beside the measurement; that it failed is a note."""
        trial = replace(self._settings.trial(cell), warmup_steps=0, steps=TIMELINE_STEPS, timeline=True)
        log = self._log
        ended = self._run(trial, "timeline", "memory timeline", 1.0)
        self._log = log
        if ended.outcome != "ok":
            self._notes.append(f"no memory timeline ({ended.outcome}: {ended.reason})")

    def _search(self) -> int:
        """The largest micro batch that fits. Raises _Failed when none does."""
        last = TrialOutcome(outcome="ok", reason="", measured=RunResult(), log=Path())

        def attempt(micro_batch: int) -> Attempt:
            nonlocal last
            cell = replace(self._cell, micro_batch=micro_batch)
            trial = replace(self._settings.trial(cell), warmup_steps=SEARCH_WARMUP_STEPS, steps=SEARCH_STEPS)
            last = self._run(trial, f"search-{micro_batch}", f"search, micro batch {micro_batch}", 0.0)
            peak = max(last.measured.allocated_bytes, default=None)
            made = Attempt(micro_batch=micro_batch, outcome=last.outcome, peak_allocated_bytes=peak)
            self._attempts.append(made)
            return made

        memory_bytes = device_memory_bytes(self._cell, self._settings)
        start = self._sweep.around.first_micro_batch(self._cell, self._settings, memory_bytes)
        attempts = largest(attempt, start=start, at_most=self._settings.max_micro_batch)
        fitting = [made.micro_batch for made in attempts if made.outcome == "ok"]
        if not fitting:
            self._measured = [last.measured]
            raise _Failed(last.outcome, f"with micro batch {attempts[-1].micro_batch}: {last.reason}")
        return max(fitting)

    def _run(self, trial: Trial, name: str, what: str, done: float) -> TrialOutcome:
        """One launch. One that had ended before the sweep was stopped is not made again, but on a cluster, where the
        nodes may be others now. `done`: the share of the cell that is done before it. Raises Stopped."""
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
        directory = self._directory / name
        ended = None if self._sweep.nodes else runner.ended_before(trial, directory)
        if ended is None:
            note = self._sweep.memory.wait(self._sweep.cancelled)
            if note is not None and note not in self._notes:
                self._notes.append(note)
            how = self._sweep.around.launching(trial.cell, settings)
            limits = Limits(timeout_s=settings.timeout_s, limit_s=limit_s)
            try:
                ended = runner.run_trial(
                    trial, directory, how, limits, on_step=on_step, cancelled=self._sweep.cancelled
                )
            finally:
                shutil.rmtree(directory / CHECKPOINT, ignore_errors=True)
        self._log = str(ended.log.relative_to(self._sweep.directory.absolute()))
        return ended


# The search.


def largest(attempt: Callable[[int], Attempt], *, start: int, at_most: int) -> list[Attempt]:
    """Tries the powers of two up to `at_most`, beginning with the one at or below `start`: up until one fails, or down
    until one fits; then between the two, until they are an eighth apart. All attempts.

    One that fails in another way than for want of memory ends the search: more of it, or less, would show nothing new.
    """
    size = floor_power_of_two(min(start, at_most))
    attempts = [attempt(size)]
    if attempts[0].outcome == "ok":
        while attempts[-1].outcome == "ok" and size < at_most:
            size = min(size * 2, at_most)
            attempts.append(attempt(size))
    else:
        while attempts[-1].outcome == "oom" and size > 1:
            size //= 2
            attempts.append(attempt(size))
    while attempts[-1].outcome in ("ok", "oom"):
        fits = max((made.micro_batch for made in attempts if made.outcome == "ok"), default=0)
        fails = min((made.micro_batch for made in attempts if made.outcome == "oom"), default=0)
        if not fits or fails - fits <= max(1, fits // APART):
            break
        attempts.append(attempt((fits + fails) // 2))
    return attempts


def next_smaller(attempts: Sequence[Attempt], micro_batch: int) -> int:
    """What to try where this one ran out of memory after all: the next smaller one that fitted, or half of it."""
    fitting = [made.micro_batch for made in attempts if made.outcome == "ok" and made.micro_batch < micro_batch]
    return max(fitting, default=micro_batch // 2)


def floor_power_of_two(number: int) -> int:
    """The largest power of two that is not above it, and at least 1."""
    return 1 << max(number, 1).bit_length() - 1
