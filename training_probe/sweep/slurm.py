"""What stands in for a sweep where Slurm hands out the nodes: an sbatch script for each cell, which starts torchrun on
each of its nodes, run after run. Nothing is started or written here."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from training_probe.grid import Cell
from training_probe.launch.runner import (
    PORTABLE_PYTHON,
    THREADS,
    Launching,
    NodeRank,
    files_of,
    job_of,
    worker_command,
)
from training_probe.protocol import LOG_FILE
from training_probe.refusals import impossible
from training_probe.sweep.cell import Settings

PORTS = "20000 + SLURM_JOB_ID % 20000"  # jobs that share a node have ports of their own
# What the shell of each task fills in.
NODE_RANK, MASTER, PORT = '"$SLURM_NODEID"', '"$head"', '"$port"'


def scripts(cells: Sequence[Cell], settings: Settings, directory: Path) -> str:
    """One after another; a cell that makes no sense is a comment."""
    return "\n".join("\n".join(_script(cell, settings, directory)) + "\n" for cell in cells)


def _script(cell: Cell, settings: Settings, directory: Path) -> Iterator[str]:
    model, nodes = settings.model(cell), settings.nodes_per_cell
    why = impossible(cell, model.decoder, model.unknown)
    if why is not None:
        yield f"# {cell.name}\n# unsupported: {why}"
        return
    yield "#!/bin/bash"
    yield f"#SBATCH --job-name={shlex.quote(cell.name)}"
    yield f"#SBATCH --nodes={nodes}"
    yield "#SBATCH --ntasks-per-node=1"
    if cell.device == "cuda":
        yield f"#SBATCH --gpus-per-node={cell.gpus // nodes}"
    yield "#SBATCH --exclusive"
    if settings.limit_s is not None:
        yield f"#SBATCH --time={math.ceil(settings.limit_s / 60)}"  # minutes
    yield "set -euo pipefail"
    yield f"port=$(({PORTS}))"
    yield 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed --quiet 1p)'  # head would end the pipe early
    # Each process has its share of the physical cores, as a sweep on this machine gives it.
    yield "cores=$(lscpu --parse=core,socket | grep --invert-match '^#' | sort --unique | wc --lines)"
    share = f"cores > {cell.gpus // nodes} ? cores / {cell.gpus // nodes} : 1"
    yield f'export head port {THREADS}="${{{THREADS}:-$(({share}))}}"'
    for number in range(settings.runs):
        yield from _run(cell, settings, number, (directory / "trials" / cell.name / f"run-{number + 1}").absolute())


def _run(cell: Cell, settings: Settings, number: int, run_directory: Path) -> Iterator[str]:
    """One run. Its directory is one that all nodes see."""
    trial, nodes = replace(settings.trial(cell), seed=number), settings.nodes_per_cell
    yield from files_of(trial, run_directory)
    node = NodeRank(rank=NODE_RANK, nodes=nodes, master=MASTER)
    argv = worker_command(
        python=PORTABLE_PYTHON, processes=cell.gpus // nodes, port=0, directory=run_directory, node=node
    )
    port = argv.index("--master-port") + 1
    argv = (*argv[:port], PORT, *argv[port + 1 :])
    env = job_of(trial, run_directory, Launching()).env
    words = ["exec", "env", *(f"{name}={value}" for name, value in env.items())] if env else ["exec"]
    line = " ".join(word if word in (NODE_RANK, MASTER, PORT) else shlex.quote(word) for word in (*words, *argv))
    log = shlex.quote(str(run_directory / LOG_FILE))
    yield f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(line)} > {log} 2>&1"
