"""`sweep` on several machines: its cells on the nodes of a Ray cluster, on nodes that were all started with the same
command, or as scripts for Slurm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from backends.gpus import Inventory
from loadgen.config import ray_address
from loadgen.terminal import say
from training_probe import own_deepspeed
from training_probe.grid import Cell, Device, GridError, Model
from training_probe.launch import cluster, rendezvous
from training_probe.launch.cluster import NodePool
from training_probe.launch.node import installed
from training_probe.launch.rendezvous import Meeting
from training_probe.options import (
    Grid,
    Measuring,
    OnCluster,
    check_built,
    check_divisible,
    check_large,
    check_possible,
    known_models,
    needed,
    text_alone,
)
from training_probe.sweep import run as sweeps
from training_probe.sweep import slurm
from training_probe.sweep.cell import Dependencies, Settings, read_manifest

FLAG = "--nodes-per-cell"
RESUMED = "a sweep that goes on"  # what is asked for stands in its manifest


def sweep(
    grid: Grid, measuring: Measuring, where: OnCluster, argv: Sequence[str], directory: Path, begin: Callable[[], None]
) -> int:
    """Measures into a new directory; the exit code. begin: called before the first cell. Raises ConfigError,
    ClusterError and what a sweep here does."""
    assert where.on is not None
    with cluster.joined(ray_address(where.on), where.nodes_per_cell, FLAG) as joined:
        return _measured(joined, grid, measuring, where, argv, directory, begin)


def sweep_on_nodes(
    grid: Grid, measuring: Measuring, where: OnCluster, argv: Sequence[str], directory: Path, begin: Callable[[], None]
) -> int:
    """The same on nodes that meet, of which this one is node 0."""
    with rendezvous.gathered(_meeting(grid, measuring, where), say) as fleet:
        return _measured(fleet, grid, measuring, where, argv, directory, begin)


def resume_on_nodes(where: OnCluster, directory: Path) -> int:
    """Goes on with a sweep on nodes that meet. Raises RunError, ConfigError, ClusterError and what a sweep does."""
    manifest = read_manifest(directory)
    sweeps.check_nodes(manifest, where.nnodes)
    with rendezvous.gathered(where.meeting(RESUMED), say) as fleet:
        fleet.check_cells(manifest.cells)
        fleet.check(tuple(needed(manifest.cells)))
        return sweeps.resume(directory, say, Dependencies(cluster=fleet, inventory=Inventory))


def follow(grid: Grid, measuring: Measuring, where: OnCluster, resumed: bool) -> int:
    """On the other nodes. resumed: whether they meet for a sweep that goes on; the exit code. Raises GridError,
    ConfigError and ClusterError."""
    return rendezvous.follow(where.meeting(RESUMED) if resumed else _meeting(grid, measuring, where), say)


def dry_run(grid: Grid, measuring: Measuring, where: OnCluster, argv: Sequence[str], directory: Path) -> str:
    """A script for each of the nodes. Raises GridError and ConfigError."""
    device: Device = grid.device or "cuda"
    if device == "cuda" and not grid.gpus:
        raise GridError(
            "a script for GPUs that are not here must be told how many; name --gpus, of all nodes together."
        )
    cells = _shared(grid, device, 0, where.nnodes)
    known = known_models(cells)
    check_possible(cells, known)
    settings = _settings(grid, measuring, where, cells, known, argv)
    return sweeps.dry_run(cells, settings, directory, rendezvous=where.endpoint)


def _meeting(grid: Grid, measuring: Measuring, where: OnCluster) -> Meeting:
    """With all that can be refused before the nodes have met: what models and files hold, only node 0 needs to know.
    Raises GridError and ConfigError."""
    cells = _shared(grid, grid.device or "cuda", where.nnodes, where.nnodes)
    if where.node_rank:
        replace(measuring, deepspeed=None).settings(grid.preset, {}, (), (), where)
    else:
        settings = measuring.settings(grid.preset, known_models(cells), (), (), where)
        own_deepspeed.check(cells, settings.deepspeed)
    return where.meeting((grid, measuring))


def _settings(
    grid: Grid,
    measuring: Measuring,
    where: OnCluster,
    cells: Sequence[Cell],
    known: dict[str, Model],
    argv: Sequence[str],
) -> Settings:
    """Raises GridError, also for a DeepSpeed configuration that contradicts a cell."""
    settings = measuring.settings(_laptop(grid).preset, known, (), argv, where)
    for clause in own_deepspeed.check(cells, settings.deepspeed):
        say(f"{clause}.")
    for sentence in text_alone(cells):
        say(sentence)
    return settings


def _shared(grid: Grid, device: Device, here: int, nodes: int) -> list[Cell]:
    """Cells that nodes share. Raises GridError."""
    if _laptop(grid).preset == "laptop":
        raise GridError("--preset laptop has cells of one process, which nodes cannot share; name --method.")
    return _cells(grid, device, here, nodes)


def _measured(
    there: NodePool,
    grid: Grid,
    measuring: Measuring,
    where: OnCluster,
    argv: Sequence[str],
    directory: Path,
    begin: Callable[[], None],
) -> int:
    device: Device = grid.device or ("cuda" if there.gpus() else "cpu")
    cells = _cells(grid, device, there.gpus() if device == "cuda" else 0, there.nodes_per_cell)
    known = known_models(cells)
    settings = _settings(grid, measuring, where, cells, known, argv)
    check_possible(cells, known)
    if grid.device is None:
        check_large(cells, known)
    there.check_cells(cells)
    there.check(tuple(needed(cells)))
    if installed("transformers"):  # who drives a Ray cluster need not have it
        check_built(known)
    begin()
    return sweeps.sweep(cells, settings, directory, say, Dependencies(cluster=there, inventory=Inventory))


def scripts(grid: Grid, measuring: Measuring, where: OnCluster, argv: Sequence[str], directory: Path) -> str:
    """An sbatch script for each cell. Raises GridError and ConfigError."""
    device: Device = grid.device or "cuda"
    if device == "cuda" and not grid.gpus:
        raise GridError("--on slurm writes scripts for GPUs that are not here; name how many with --gpus.")
    cells = _cells(grid, device, 0, where.nodes_per_cell)
    if any(cell.micro_batch is None for cell in cells):
        raise GridError("--on slurm cannot search a micro batch; name numbers with --micro-batch.")
    known = known_models(cells)
    check_possible(cells, known)
    settings = _settings(grid, measuring, where, cells, known, argv)
    return slurm.scripts(cells, settings, directory)


def _laptop(grid: Grid) -> Grid:
    """The laptop preset, where nothing else is named."""
    return replace(grid, preset="laptop") if grid == Grid(device=grid.device, gpus=grid.gpus) else grid


def _cells(grid: Grid, device: Device, here: int, nodes: int) -> list[Cell]:
    """Without --gpus, all GPUs that a cell may have; on the CPU a process on each of its nodes. Raises GridError."""
    grid = _laptop(grid)
    if not grid.gpus and nodes > 1:
        grid = replace(grid, gpus=(here or nodes,))
    cells = grid.cells(device, here)
    for cell in cells:
        check_divisible(cell.gpus, nodes)
    return cells
