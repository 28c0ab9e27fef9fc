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
from typing import Any

from backends.untrusted import escaped
from loadgen.report.text import number
from training_probe import results
from training_probe.report.layout import Column, Table, text
from training_probe.results import CellResult

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


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Reads two sweeps' directories, or files of results, and compares them. Raises ResultsError."""
    return build(results.read(a), results.read(b), str(a), str(b))


def build(a: Sequence[CellResult], b: Sequence[CellResult], name_a: str, name_b: str) -> dict[str, Any]:
    """The comparison as a plain dict (schema `training_probe.compare/1`); differences are B - A, ratios B / A."""
    in_a, in_b = ({result.cell: result for result in each} for each in (a, b))
    both = [(result, in_b[name]) for name, result in in_a.items() if name in in_b]
    return {
        "schema": SCHEMA,
        "a": _identity(name_a, a),
        "b": _identity(name_b, b),
        "cells": [_cell(of_a, of_b) for of_a, of_b in both],
        "changed": [_change(of_a, of_b) for of_a, of_b in both if _state(of_a) != _state(of_b)],
        "only_in_a": [name for name in in_a if name not in in_b],
        "only_in_b": [name for name in in_b if name not in in_a],
        "notes": list(NOTES),
    }


def _identity(name: str, found: Sequence[CellResult]) -> dict[str, Any]:
    def each(values: list[str]) -> list[str]:
        return [value for value in dict.fromkeys(values) if value]

    return {
        "name": name,
        "cells": len(found),
        "platforms": each([result.platform for result in found]),
        "profiles": each([_profile(result) for result in found if result.outcome == "ok"]),
        "versions": each([f"{package} {version}" for result in found for package, version in result.versions.items()]),
    }


def _profile(result: CellResult) -> str:
    return f"{result.warmup_steps} + {result.steps} steps x {result.runs}"


def _state(result: CellResult) -> str:
    return "invalid" if result.outcome == "ok" and not result.valid else result.outcome


def _cell(a: CellResult, b: CellResult) -> dict[str, Any]:
    sides = {"a": a, "b": b}
    ratio, interval = speed_ratio(a, b) if _state(a) == _state(b) == "ok" else (None, None)
    return {
        "cell": a.cell,
        "state": {side: _state(result) for side, result in sides.items()},
        "batch_size": {side: result.batch_size for side, result in sides.items()},
        "tokens_per_s": {side: result.tokens_per_s for side, result in sides.items()},
        "ratio": ratio,
        "ratio_ci": interval,
        "shows": None if interval is None else _shows(interval),
        "allocated_gb": _pair(a.peak_memory_gb, b.peak_memory_gb),
        "reserved_gb": _pair(a.peak_reserved_gb, b.peak_reserved_gb),
    }


def _pair(a: float | None, b: float | None) -> dict[str, float | None]:
    return {"a": a, "b": b, "difference": None if a is None or b is None else b - a}


def _change(a: CellResult, b: CellResult) -> dict[str, str]:
    return {"cell": a.cell, "a": _state(a), "b": _state(b), "reason_a": a.reason, "reason_b": b.reason}


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


def render(comparison: dict[str, Any], width: int) -> str:
    """The comparison for a terminal of `width` columns: plain text, nothing in it that a terminal obeys."""
    lines = []
    for side in "ab":
        sweep = comparison[side]
        said = "; ".join([*sweep["platforms"], *sweep["profiles"]])
        lines.append(f"{side.upper()}: {sweep['name']}, {sweep['cells']} cells" + (f"; {said}" if said else ""))
    versions = [comparison[side]["versions"] for side in "ab"]
    if versions[0] != versions[1]:
        for side, own, others in (("A", *versions), ("B", *versions[::-1])):
            lines.append(f"   only {side}: {', '.join(each for each in own if each not in others) or 'nothing'}")
    lines = [*map(escaped, lines), "", text(_table(comparison), width)]
    if comparison["changed"]:
        lines += ["Ended differently:"]
    lines += [escaped(f"  {row['cell']}: {_said(row, 'a')} | {_said(row, 'b')}") for row in comparison["changed"]]
    for side in "ab":
        if only := comparison[f"only_in_{side}"]:
            lines += ["", f"Only in {side.upper()}:", *(escaped(f"  {name}") for name in only)]
    return "\n".join([*lines, "", *comparison["notes"]]) + "\n"


def _said(row: dict[str, str], side: str) -> str:
    reason = row[f"reason_{side}"]
    return f"{row[side]} ({reason})" if reason else row[side]


def _table(comparison: dict[str, Any]) -> Table:
    columns = (
        Column("cell", left=True),
        *(Column(name, "tokens/s") for name in ("A", "B", "B / A")),
        Column("95 % CI", "tokens/s", left=True),
        Column("shows", left=True),
        *(Column(name, "allocated GiB") for name in ("A", "B", "B - A")),
        *(Column(name, "reserved GiB", optional=True) for name in ("A", "B", "B - A")),
    )
    rows = tuple(_row(row) for row in comparison["cells"])
    return Table("compare", "Cells in both", columns, rows)


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    batch = row["batch_size"]
    moved = f" (BS {batch['a']} -> {batch['b']})" if batch["a"] != batch["b"] else ""
    speeds = (
        number(row["tokens_per_s"][side]) if row["state"][side] == "ok" else row["state"][side] for side in ("a", "b")
    )
    interval = f"[{row['ratio_ci'][0]:.3f}, {row['ratio_ci'][1]:.3f}]" if row["ratio_ci"] else ""
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
    memory = (number(row[name][side]) for name in ("allocated_gb", "reserved_gb") for side in ("a", "b", "difference"))
    return (row["cell"] + moved, *speeds, ratio, interval, row["shows"] or "", *memory)
