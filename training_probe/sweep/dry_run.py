"""What a sweep would do, without doing it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from backends import process
from training_probe.grid import Cell, impossible
from training_probe.launch import runner
from training_probe.protocol import Trial
from training_probe.results import GIB
from training_probe.sweep.dependencies import Surroundings, sized
from training_probe.sweep.manifests import Settings
from training_probe.worker.ds_config import deepspeed_config

PORT = 29500  # torchrun's own; a real run takes one that is free


def dry_run(cells: Sequence[Cell], settings: Settings, directory: Path, around: Surroundings | None = None) -> str:
    """For each cell: the command line of its first run, DeepSpeed's configuration, the predicted memory; or why it
    would not be run. Nothing is started, nothing written."""
    around = around or Surroundings()
    return "\n\n".join("\n".join(_dry_lines(cell, settings, directory, around)) for cell in cells) + "\n"


def _dry_lines(cell: Cell, settings: Settings, directory: Path, around: Surroundings) -> Iterator[str]:
    yield f"# {cell.name}"
    spec = settings.model(cell).spec
    why = impossible(cell, spec)
    if why is not None:
        yield f"unsupported: {why}"
        return
    whole = sized(cell)
    start = runner.start_of(
        Trial(cell=whole, spec=spec),
        directory / "trials" / cell.name / "run-1",
        python=settings.python,
        gpu_ids=settings.gpu_ids if cell.device == "cuda" else (),
        port=PORT,
        command=around.command,
    )
    yield shlex.join(process.command_line(start))
    if cell.micro_batch is None:
        yield f"micro batch: searched, up to {settings.max_micro_batch}; what follows is for 1"
    if cell.engine == "deepspeed":
        yield json.dumps(deepspeed_config(whole), indent=2)
    prediction = around.predict(cell, settings)
    if prediction is not None:
        terms = ", ".join(f"{name} {size / GIB:.2f}" for name, size in prediction.terms_bytes.items())
        yield f"predicted memory: {prediction.peak_bytes / GIB:.2f} GiB ({terms})"
