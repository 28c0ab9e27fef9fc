"""What a sweep measures and how, `manifest.json`: written before the first cell, and all that resuming it needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from backends.untrusted import read_json
from loadgen import models
from loadgen.rundir import Machine, RunError, this_machine
from training_probe import llama_shape
from training_probe.grid import PAPER_MAX_MICRO_BATCH, Cell, Model
from training_probe.protocol import Trial

MANIFEST_FILE = "manifest.json"
SCHEMA = "training_probe.manifest/1"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a sweep measures its cells.

    platform: this machine's name in tables; empty: named after its devices. models: by the cells' model names; what is
    not in it is looked up in the catalog. gpu_ids: NVML indices, of which a cell takes as many as it needs from the
    front. timeline: whether what the first steps hold is recorded as well, in a launch of its own. timeout_s: without a
    new step; limit_s: of a whole cell. max_micro_batch: where a search ends. no_skip: cells that are predicted not to
    fit are run as well. host_memory_bytes: limit of each process, for the CPU. on: the cluster whose nodes
    the cells run on, as `--on` names it; None: this machine. deepspeed: the user's own configuration of DeepSpeed, as
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
            return msgspec.structs.replace(model, name=named.name, config=dict(named.config))
        return model

    def trial(self, cell: Cell) -> Trial:
        """A run of the cell with these steps."""
        model = self.model(cell)
        return Trial(
            cell=cell, spec=model.spec, config=model.config, warmup_steps=self.warmup_steps, steps=self.steps,
            host_memory_bytes=self.host_memory_bytes,
            deepspeed=self.deepspeed if cell.engine == "deepspeed" else None,
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


def read(directory: Path) -> SweepManifest:
    """The manifest of a sweep's directory. Raises RunError."""
    path = directory / MANIFEST_FILE
    if not path.exists():
        raise RunError(f"{directory} holds no {MANIFEST_FILE}; name the directory of a sweep.")
    return read_json(path, SweepManifest, RunError, "is not a manifest of a sweep of this version", directory=directory)
