"""How sweep B differs from sweep A, cell by cell: the same cells on other software, another day or another machine.

Cells are the same when their names are, number of GPUs included. The ratio of two speeds has a 95 % interval by Welch's
t over the runs of each cell, on logarithms: log m has the variance s^2 / (n m^2), so the ratio B / A lies within
exp(+-t sqrt(a + b)) of what was measured, t with (a + b)^2 / (a^2 / (n_A - 1) + b^2 / (n_B - 1)) degrees of freedom
(Welch 1947). It covers the noise between runs of one sweep and nothing else, and the output says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Generic, TypeVar

import msgspec

from backends.untrusted import escaped
from loadgen.report.text import number
from training_probe.report.layout import Column, Table, text
from training_probe.results import CellResult
from training_probe.results import read as read_results

SCHEMA = "training_probe.compare/1"
SAME = "no difference shown"
# Student's t, 97.5 %, of 1 to 30 degrees of freedom; beyond, the normal distribution's is at most 4 % too small.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL_975 = 1.96
NOTES = (
    "95 % CI: Welch's t over the runs of each cell (on logarithms). It covers the noise between the runs of a sweep, "
    "not that between two days or two starts of a machine.",
    "A cell with one run, or without a valid number on both sides, has no interval.",
)


T = TypeVar("T")


class Sides(msgspec.Struct, Generic[T], frozen=True):
    """A value of each sweep."""

    a: T
    b: T


class SidesAndDifference(msgspec.Struct, frozen=True):
    """difference: B - A, None where either is not known."""

    a: float | None
    b: float | None
    difference: float | None


class ComparedSweep(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    cells: int
    platforms: list[str]
    profiles: list[str]
    versions: list[str]


class ComparedCell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell of both sweeps. ratio: B / A of tokens/s, ratio_ci: its 95 % interval, shows: what that shows; None where
    they are not known."""

    cell: str
    state: Sides[str]
    batch_size: Sides[int | None]
    tokens_per_s: Sides[float | None]
    ratio: float | None
    ratio_ci: list[float] | None
    shows: str | None
    allocated_gb: SidesAndDifference
    reserved_gb: SidesAndDifference


class ChangedCell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that ended in different states (a, b)."""

    cell: str
    a: str
    b: str
    reason_a: str
    reason_b: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Schema `training_probe.compare/1`."""

    schema: str = SCHEMA
    a: ComparedSweep
    b: ComparedSweep
    cells: list[ComparedCell]
    changed: list[ChangedCell]
    only_in_a: list[str]
    only_in_b: list[str]
    notes: list[str] = msgspec.field(default_factory=lambda: list(NOTES))


def compare(a: Path, b: Path) -> Comparison:
    """Reads two sweeps' directories, or files of results, and compares them. Raises ResultsError."""
    return build(read_results(a), read_results(b), str(a), str(b))


def build(a: Sequence[CellResult], b: Sequence[CellResult], name_a: str, name_b: str) -> Comparison:
    in_a, in_b = ({result.cell: result for result in each} for each in (a, b))
    both = [(result, in_b[name]) for name, result in in_a.items() if name in in_b]
    return Comparison(
        a=_sweep(name_a, a),
        b=_sweep(name_b, b),
        cells=[_cell(of_a, of_b) for of_a, of_b in both],
        changed=[_change(of_a, of_b) for of_a, of_b in both if _state(of_a) != _state(of_b)],
        only_in_a=[name for name in in_a if name not in in_b],
        only_in_b=[name for name in in_b if name not in in_a],
    )


def _sweep(name: str, results: Sequence[CellResult]) -> ComparedSweep:
    def each(values: list[str]) -> list[str]:
        return [value for value in dict.fromkeys(values) if value]

    return ComparedSweep(
        name=name,
        cells=len(results),
        platforms=each([result.platform for result in results]),
        profiles=each([_profile(result) for result in results if result.outcome == "ok"]),
        versions=each([f"{package} {version}" for result in results for package, version in result.versions.items()]),
    )


def _profile(result: CellResult) -> str:
    return f"{result.warmup_steps} + {result.steps} steps x {result.runs}"


def _state(result: CellResult) -> str:
    return "invalid" if result.outcome == "ok" and not result.valid else result.outcome


def _cell(a: CellResult, b: CellResult) -> ComparedCell:
    ratio, interval = speed_ratio(a, b) if _state(a) == _state(b) == "ok" else (None, None)
    return ComparedCell(
        cell=a.cell,
        state=Sides(_state(a), _state(b)),
        batch_size=Sides(a.batch_size, b.batch_size),
        tokens_per_s=Sides(a.tokens_per_s, b.tokens_per_s),
        ratio=ratio,
        ratio_ci=interval,
        shows=None if interval is None else _shows(interval),
        allocated_gb=_difference(a.peak_memory_gb, b.peak_memory_gb),
        reserved_gb=_difference(a.peak_reserved_gb, b.peak_reserved_gb),
    )


def _difference(a: float | None, b: float | None) -> SidesAndDifference:
    return SidesAndDifference(a, b, None if a is None or b is None else b - a)


def _change(a: CellResult, b: CellResult) -> ChangedCell:
    return ChangedCell(cell=a.cell, a=_state(a), b=_state(b), reason_a=a.reason, reason_b=b.reason)


def speed_ratio(a: CellResult, b: CellResult) -> tuple[float | None, list[float] | None]:
    """B / A of tokens/s and its 95 % interval; None where a mean, or a spread, is not known."""
    if not a.tokens_per_s or not b.tokens_per_s:
        return None, None
    ratio = b.tokens_per_s / a.tokens_per_s
    runs_a, runs_b = a.tokens_per_s_runs, b.tokens_per_s_runs
    if min(len(runs_a), len(runs_b)) < 2 or min(*runs_a, *runs_b) <= 0:
        return ratio, None
    parts = [(variance(runs) / (len(runs) * fmean(runs) ** 2), len(runs) - 1) for runs in (runs_a, runs_b)]
    total = sum(part for part, _ in parts)
    if total == 0:
        return ratio, [ratio, ratio]
    freedom = total**2 / sum(part**2 / free for part, free in parts)
    reach = _t(freedom) * math.sqrt(total)
    return ratio, [ratio * math.exp(-reach), ratio * math.exp(reach)]


def _t(freedom: float) -> float:
    """Rounded down to whole degrees of freedom, so the interval is too wide rather than too narrow."""
    whole = max(1, math.floor(freedom + 1e-9))  # n - 1 may come out a rounding error short
    return T_975[whole - 1] if whole <= len(T_975) else NORMAL_975


def _shows(interval: Sequence[float]) -> str:
    if interval[0] <= 1 <= interval[1]:
        return SAME
    return "B is faster" if interval[0] > 1 else "B is slower"


# As text.


def render(comparison: Comparison, width: int) -> str:
    """The comparison for a terminal of `width` columns: plain text, nothing in it that a terminal obeys."""
    lines = []
    for side, sweep in (("A", comparison.a), ("B", comparison.b)):
        measured = "; ".join([*sweep.platforms, *sweep.profiles])
        lines.append(f"{side}: {sweep.name}, {sweep.cells} cells" + (f"; {measured}" if measured else ""))
    versions_a, versions_b = comparison.a.versions, comparison.b.versions
    if versions_a != versions_b:
        for side, own, others in (("A", versions_a, versions_b), ("B", versions_b, versions_a)):
            lines.append(f"   only {side}: {', '.join(each for each in own if each not in others) or 'nothing'}")
    lines = [*map(escaped, lines), "", text(_table(comparison), width)]
    if comparison.changed:
        lines += ["Ended differently:"]
    lines += [
        escaped(f"  {row.cell}: {_with_reason(row.a, row.reason_a)} | {_with_reason(row.b, row.reason_b)}")
        for row in comparison.changed
    ]
    for side, only in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        if only:
            lines += ["", f"Only in {side}:", *(escaped(f"  {name}") for name in only)]
    return "\n".join([*lines, "", *comparison.notes]) + "\n"


def _with_reason(state: str, reason: str) -> str:
    return f"{state} ({reason})" if reason else state


def _table(comparison: Comparison) -> Table:
    columns = (
        Column("cell", left=True),
        *(Column(name, "tokens/s") for name in ("A", "B", "B / A")),
        Column("95 % CI", "tokens/s", left=True),
        Column("shows", left=True),
        *(Column(name, "allocated GiB") for name in ("A", "B", "B - A")),
        *(Column(name, "reserved GiB", optional=True) for name in ("A", "B", "B - A")),
    )
    rows = tuple(_row(row) for row in comparison.cells)
    return Table("compare", "Cells in both", columns, rows)


def _row(row: ComparedCell) -> tuple[str, ...]:
    batch, state, speed = row.batch_size, row.state, row.tokens_per_s
    moved = f" (BS {batch.a} -> {batch.b})" if batch.a != batch.b else ""
    speeds = (number(value) if ended == "ok" else ended for value, ended in ((speed.a, state.a), (speed.b, state.b)))
    interval = f"[{row.ratio_ci[0]:.3f}, {row.ratio_ci[1]:.3f}]" if row.ratio_ci else ""
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    memory = (
        number(value) for size in (row.allocated_gb, row.reserved_gb) for value in (size.a, size.b, size.difference)
    )
    return (row.cell + moved, *speeds, ratio, interval, row.shows or "", *memory)
