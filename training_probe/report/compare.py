"""How sweep B differs from sweep A, cell by cell: the same cells on other software, another day or another machine.

Cells are the same when their names are, number of GPUs included. The ratio of two speeds has a 95 % interval by Welch's
t over the runs of each cell, on logarithms: log m has the variance s^2 / (n m^2), so the ratio B / A lies within
exp(+-t sqrt(a + b)) of what was measured, t with (a + b)^2 / (a^2 / (n_A - 1) + b^2 / (n_B - 1)) degrees of freedom
(Welch 1947). It covers the noise between runs of one sweep and nothing else, and the output says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, variance

from backends.untrusted import escaped
from loadgen.report.text import number
from training_probe.report.layout import Column, Table, text
from training_probe.results import CellResult
from training_probe.results import read as read_results

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

COLUMNS = (
    Column("cell", left=True),
    *(Column(name, "tokens/s") for name in ("A", "B", "B / A")),
    Column("95 % CI", "tokens/s", left=True),
    Column("shows", left=True),
    *(Column(name, "allocated GiB") for name in ("A", "B", "B - A")),
    *(Column(name, "reserved GiB", optional=True) for name in ("A", "B", "B - A")),
)


def compare(a: Path, b: Path, width: int) -> str:
    """Reads two sweeps' directories, or files of results, and compares them. Raises ResultsError."""
    return render(read_results(a), read_results(b), str(a), str(b), width)


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


def render(a: Sequence[CellResult], b: Sequence[CellResult], name_a: str, name_b: str, width: int) -> str:
    """The comparison for a terminal of `width` columns: plain text, nothing in it that a terminal obeys."""
    in_a, in_b = ({result.cell: result for result in each} for each in (a, b))
    both = [(result, in_b[name]) for name, result in in_a.items() if name in in_b]
    table = Table("compare", "Cells in both", COLUMNS, tuple(row(*pair) for pair in both))
    lines = [_sweep("A", name_a, a), _sweep("B", name_b, b), *_versions(a, b)]
    lines = [*map(escaped, lines), "", text(table, width)]
    changed = [(of_a, of_b) for of_a, of_b in both if of_a.state != of_b.state]
    if changed:
        lines += ["Ended differently:"]
    lines += [escaped(f"  {of_a.cell}: {_with_reason(of_a)} | {_with_reason(of_b)}") for of_a, of_b in changed]
    for side, own, others in (("A", in_a, in_b), ("B", in_b, in_a)):
        if only := [name for name in own if name not in others]:
            lines += ["", f"Only in {side}:", *(escaped(f"  {name}") for name in only)]
    return "\n".join([*lines, "", *NOTES]) + "\n"


def _sweep(side: str, name: str, results: Sequence[CellResult]) -> str:
    platforms = dict.fromkeys(result.platform for result in results if result.platform)
    profiles = dict.fromkeys(
        f"{result.warmup_steps} + {result.steps} steps x {result.runs}" for result in results if result.outcome == "ok"
    )
    measured = "; ".join([*platforms, *profiles])
    return f"{side}: {name}, {len(results)} cells" + (f"; {measured}" if measured else "")


def _versions(a: Sequence[CellResult], b: Sequence[CellResult]) -> Iterator[str]:
    """Of packages, those that one side alone has; nothing where both have the same."""
    of_a, of_b = (
        list(dict.fromkeys(f"{name} {version}" for result in each for name, version in result.versions.items()))
        for each in (a, b)
    )
    if of_a != of_b:
        for side, own, others in (("A", of_a, of_b), ("B", of_b, of_a)):
            yield f"   only {side}: {', '.join(each for each in own if each not in others) or 'nothing'}"


def _with_reason(result: CellResult) -> str:
    return result.state + (f" ({result.reason})" if result.reason else "")


def row(a: CellResult, b: CellResult) -> tuple[str, ...]:
    """A cell of both sweeps, under COLUMNS."""
    moved = f" (BS {a.batch_size} -> {b.batch_size})" if a.batch_size != b.batch_size else ""
    speeds = (number(each.tokens_per_s) if each.state == "ok" else each.state for each in (a, b))
    ratio, interval = speed_ratio(a, b) if a.state == b.state == "ok" else (None, None)
    shown = (
        "" if ratio is None else f"{ratio:.3f}",
        f"[{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "",
        _shows(interval) if interval else "",
    )
    memory = (
        number(size)
        for of_a, of_b in ((a.peak_memory_gb, b.peak_memory_gb), (a.peak_reserved_gb, b.peak_reserved_gb))
        for size in (of_a, of_b, None if of_a is None or of_b is None else of_b - of_a)
    )
    return (a.cell + moved, *speeds, *shown, *memory)
