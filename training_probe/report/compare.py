"""How sweep B differs from sweep A, cell by cell: the same cells on other software, another day or another machine.

Cells are the same when their names are, number of GPUs included. The ratio of two speeds has a 95 % interval by Welch's
t over the runs of each cell, on logarithms (`loadgen.report.contrast`). It covers the noise between runs of one sweep
and nothing else, and the output says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from loadgen.document.content import Column, Table, number
from loadgen.report.contrast import SAME, ratio_interval
from training_probe.report.layout import titled
from training_probe.results import CellResult

NOTES = (
    "95 % CI: Welch's t over the runs of each cell (on logarithms). It covers the noise between the runs of a sweep, "
    "not that between two days or two starts of a machine.",
)
ONE_RUN = "A cell with one run, or without a valid number on both sides, has no interval here."

COLUMNS = (
    Column("cell", left=True),
    *(Column(name, "tokens/s") for name in ("A", "B", "B / A")),
    Column("95 % CI", "tokens/s", left=True),
    Column("shows", left=True),
    *(Column(name, "allocated GiB") for name in ("A", "B", "B - A")),
    *(Column(name, "reserved GiB", optional=True) for name in ("A", "B", "B - A")),
)


def speed_ratio(a: CellResult, b: CellResult) -> tuple[float | None, list[float] | None]:
    """B / A of tokens/s and its 95 % interval; None where a mean, or a spread, is not known."""
    if not a.tokens_per_s or not b.tokens_per_s:
        return None, None
    ratio = b.tokens_per_s / a.tokens_per_s
    runs_a, runs_b = a.tokens_per_s_runs, b.tokens_per_s_runs
    if min(len(runs_a), len(runs_b)) < 2:
        return ratio, None
    interval = ratio_interval(runs_a, runs_b)
    return ratio, None if interval is None else list(interval)


def _shows(interval: Sequence[float]) -> str:
    if interval[0] <= 1 <= interval[1]:
        return SAME
    return "B is faster" if interval[0] > 1 else "B is slower"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two measurements side by side, as text. sides: a line or two of each; lists: further lines, by their heading.
    Plain text that is not escaped."""

    sides: Sequence[str]
    table: Table
    lists: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: Sequence[str] = ()


def sweeps(a: Sequence[CellResult], b: Sequence[CellResult], name_a: str, name_b: str) -> Comparison:
    in_a, in_b = ({result.cell: result for result in each} for each in (a, b))
    both = [(result, in_b[name]) for name, result in in_a.items() if name in in_b]
    changed = [(of_a, of_b) for of_a, of_b in both if of_a.state != of_b.state]
    lists = {
        "Ended differently": [f"{of_a.cell}: {_with_reason(of_a)} | {_with_reason(of_b)}" for of_a, of_b in changed],
        "Only in A": [name for name in in_a if name not in in_b],
        "Only in B": [name for name in in_b if name not in in_a],
    }
    return Comparison(
        sides=[_sweep("A", name_a, a), _sweep("B", name_b, b), *_versions(a, b)],
        table=titled("compare", "Cells in both", COLUMNS, tuple(row(*pair) for pair in both), below=(ONE_RUN,)),
        lists={heading: lines for heading, lines in lists.items() if lines},
        notes=NOTES,
    )


def _sweep(side: str, name: str, results: Sequence[CellResult]) -> str:
    platforms = dict.fromkeys(result.platform for result in results if result.platform)
    profiles = dict.fromkeys(
        f"{result.warmup_steps} + {result.steps} steps x {result.runs}" for result in results if result.outcome == "ok"
    )
    measured = "; ".join([*platforms, *profiles])
    return f"{side}: {name}, {len(results)} cells" + (f"; {measured}" if measured else "")


def _versions(a: Sequence[CellResult], b: Sequence[CellResult]) -> Iterator[str]:
    """Versions of packages that one side alone has; nothing where both have the same."""
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
