"""From what the ranks of a run report to the numbers of a result. Pure.

A run of one launch gives a Measured; the runs of a cell together give the fields of its CellResult.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import msgspec

from training_probe.grid import Cell
from training_probe.protocol import RankReport, Step
from training_probe.results import GIB

LEAST_LOSSES = 4


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run. tokens_per_s: all ranks together, None if it is not known of all of them. Peaks are bytes by rank, of
    the ranks that told; device_memory_bytes: the smallest. timed: the timed steps of rank 0."""

    tokens_per_s: float | None = None
    steps: int = 0
    timed: tuple[Step, ...] = ()
    allocated_bytes: tuple[int, ...] = ()
    reserved_bytes: tuple[int, ...] = ()
    device_memory_bytes: int | None = None
    energy_j_per_token: float | None = None
    losses: tuple[float | None, ...] = ()
    parameters: int | None = None
    trainable_parameters: int | None = None
    optimizer: str = ""
    versions: dict[str, str] = {}
    device_name: str = ""


def measured(cell: Cell, reports: Mapping[int, RankReport], steps: Sequence[Step]) -> Measured:
    """What the reports that there are hold; speed and energy only when every rank tells them."""
    ranks = [reports[rank] for rank in sorted(reports)]
    whole = len(ranks) == cell.gpus
    count = ranks[0].steps if ranks else 0
    tokens = cell.tokens_per_step * count
    seconds = [report.seconds for report in ranks if report.seconds]
    energies = [report.energy_j for report in ranks if report.energy_j is not None]
    memories = [report.device_memory_bytes for report in ranks if report.device_memory_bytes is not None]
    first = next((report for report in ranks if report.losses), ranks[0] if ranks else RankReport(rank=0, outcome="ok"))
    return Measured(
        tokens_per_s=tokens / max(seconds) if whole and tokens and len(seconds) == len(ranks) else None,
        steps=count,
        timed=tuple(step for step in steps if step.phase == "timed"),
        allocated_bytes=tuple(r.peak_allocated_bytes for r in ranks if r.peak_allocated_bytes is not None),
        reserved_bytes=tuple(r.peak_reserved_bytes for r in ranks if r.peak_reserved_bytes is not None),
        device_memory_bytes=min(memories, default=None),
        energy_j_per_token=sum(energies) / tokens if whole and tokens and len(energies) == len(ranks) else None,
        losses=tuple(first.losses),
        parameters=first.parameters,
        trainable_parameters=first.trainable_parameters,
        optimizer=first.optimizer,
        versions=first.versions,
        device_name=first.device_name,
    )


def fields(runs: Sequence[Measured]) -> dict[str, Any]:
    """The fields of CellResult that follow from these runs; means over runs are of those that know the value."""
    if not runs:
        return {}
    speeds = [run.tokens_per_s for run in runs if run.tokens_per_s is not None]
    timed = [step for run in runs for step in run.timed]
    allocated, reserved = _by_rank(run.allocated_bytes for run in runs), _by_rank(run.reserved_bytes for run in runs)
    first, memory = runs[0], runs[0].device_memory_bytes
    return {
        "valid": all(loss_doubt(run.losses) is None for run in runs),
        "tokens_per_s": _mean(speeds),
        "tokens_per_s_std": _std(speeds),
        "tokens_per_s_runs": speeds,
        "runs": len(speeds),
        "steps": first.steps,
        "step_ms": _mean([step.step_s * 1e3 for step in timed]),
        "step_ms_std": _std([step.step_s * 1e3 for step in timed]),
        **{
            f"{phase}_ms": _mean([spent * 1e3 for step in timed if (spent := getattr(step, f"{phase}_s")) is not None])
            for phase in ("forward", "backward", "optimizer")
        },
        "peak_memory_gb": max(allocated, default=None),
        "peak_reserved_gb": max(reserved, default=None),
        "peak_memory_gb_by_rank": allocated,
        "peak_reserved_gb_by_rank": reserved,
        "device_memory_gb": None if memory is None else memory / GIB,
        "energy_j_per_token": _mean([run.energy_j_per_token for run in runs if run.energy_j_per_token is not None]),
        "loss_first": first.losses[0] if first.losses else None,
        "loss_last": first.losses[-1] if first.losses else None,
        "parameters": first.parameters,
        "trainable_parameters": first.trainable_parameters,
        "optimizer": first.optimizer,
        "versions": first.versions,
        "device_name": first.device_name,
    }


def loss_doubt(losses: Sequence[float | None]) -> str | None:
    """Why these losses do not show that the model was trained, a clause; None when the last quarter of them is lower
    than the first on average."""
    if len(losses) < LEAST_LOSSES:
        return f"{len(losses)} losses are too few to see whether they fall"
    finite = [loss for loss in losses if loss is not None and isfinite(loss)]
    if len(finite) < len(losses):
        return f"{len(losses) - len(finite)} of {len(losses)} losses are not finite"
    quarter = len(finite) // 4
    before, after = statistics.fmean(finite[:quarter]), statistics.fmean(finite[-quarter:])
    return None if after < before else f"the loss did not fall: from {before:.4f} to {after:.4f}"


def _by_rank(runs: Iterable[Sequence[int]]) -> list[float]:
    """The highest of each rank over the runs, GiB; of those runs that know most ranks."""
    known = [list(run) for run in runs]
    ranks = max(map(len, known))
    return [max(peaks) / GIB for peaks in zip(*(run for run in known if len(run) == ranks), strict=True)]


def _mean(values: Sequence[float]) -> float | None:
    return _of(statistics.fmean, values, 1)


def _std(values: Sequence[float]) -> float | None:
    """Of a sample."""
    return _of(statistics.stdev, values, 2)


def _of(what: Callable[[Sequence[float]], float], values: Sequence[float], least: int) -> float | None:
    return what(values) if len(values) >= least else None
