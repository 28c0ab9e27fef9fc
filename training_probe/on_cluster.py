"""`sweep --on`: its cells on the nodes of a Ray cluster, or as scripts for Slurm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from backends.gpus import Inventory
from loadgen.config import ray_address
from loadgen.terminal import say
from training_probe.grid import Cell, Device, GridError
from training_probe.launch import cluster
from training_probe.launch.cluster import Cluster
from training_probe.options import (
    Grid,
    Measuring,
    OnCluster,
    check_divisible,
    check_large,
    known_models,
    needed,
)
from training_probe.sweep import run as sweeps
from training_probe.sweep import slurm
from training_probe.sweep.cell import Surroundings

FLAG = "--nodes-per-cell"


def sweep(
    grid: Grid, measuring: Measuring, where: OnCluster, argv: Sequence[str], directory: Path, begin: Callable[[], None]
) -> int:
    """Measures into a new directory; the exit code. begin: called before the first cell. Raises ConfigError,
    ClusterError and what a sweep here does."""
    assert where.on is not None
    with cluster.joined(ray_address(where.on), where.nodes_per_cell, FLAG) as joined:
        device: Device = grid.device or ("cuda" if joined.gpus() else "cpu")
        here = joined.gpus() if device == "cuda" else 0
        cells = _cells(grid, device, here, where.nodes_per_cell)
        known = known_models(cells)
        settings = measuring.settings(_laptop(grid).preset, known, (), argv, where)
        if grid.device is None:
            check_large(cells, known)
        _check_nodes(cells, joined)
        joined.check(tuple(needed(cells)))
        begin()
        return sweeps.sweep(cells, settings, directory, say, Surroundings(cluster=joined, inventory=Inventory))


def scripts(grid: Grid, measuring: Measuring, where: OnCluster, argv: Sequence[str], directory: Path) -> str:
    """An sbatch script for each cell. Raises GridError and ConfigError."""
    device: Device = grid.device or "cuda"
    if device == "cuda" and not grid.gpus:
        raise GridError("--on slurm writes scripts for GPUs that are not here; name how many with --gpus.")
    cells = _cells(grid, device, 0, where.nodes_per_cell)
    if any(cell.micro_batch is None for cell in cells):
        raise GridError("--on slurm cannot search a micro batch; name numbers with --micro-batch.")
    known = known_models(cells)
    return slurm.scripts(cells, measuring.settings(_laptop(grid).preset, known, (), argv, where), directory)


def _laptop(grid: Grid) -> Grid:
    """The laptop preset, where nothing else is named."""
    return replace(grid, preset="laptop") if grid == Grid(device=grid.device, gpus=grid.gpus) else grid


def _cells(grid: Grid, device: Device, here: int, nodes: int) -> list[Cell]:
    """Without --gpus, all GPUs that a cell may have; on the CPU a process on each of its nodes. Raises GridError."""
    grid = _laptop(grid)
    if not grid.gpus and nodes > 1:
        grid = replace(grid, gpus=(here or nodes,))
    cells = grid.cells(device, here)
    check_divisible(cells, nodes)
    return cells


def _check_nodes(cells: Sequence[Cell], joined: Cluster) -> None:
    """That the cluster has the GPUs that each cell needs. Raises GridError."""
    nodes = joined.nodes_per_cell
    for cell in cells:
        each = cluster.gpus_each(cell, nodes)
        if cluster.choose(joined.machines, nodes, each) is None:
            such = "no node" if nodes == 1 else f"no {nodes} nodes"
            raise GridError(
                f"{such} of the cluster can give {each} GPU{'' if each == 1 else 's'} to a cell; name fewer --gpus"
                " (--device cpu needs none)."
            )
