"""What lies in a directory of runs: each with its verdict and a few numbers, the newest first.

Only the files of results are read, never the records, and of them only what is shown. What cannot be read is left out.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from backends import foreign_files
from backends.untrusted import UNDECODABLE

MOST_BYTES = 1 << 24  # of a file of results


class ListedRun(NamedTuple):
    """One directory. kind: run, sweep, repeat, search, breakdown or training. valid: None where nothing says it.
    numbers: output tokens a second, ttft p50 and tpot p50 in ms, where they are known."""

    directory: Path
    written_unix_s: float
    kind: str
    what: str
    emulated: bool
    valid: bool | None
    numbers: tuple[float | None, float | None, float | None] = (None, None, None)


class _Judged(msgspec.Struct):
    valid: bool = True


class _Results(msgspec.Struct):
    """What the files of results have in common, and what each of them has besides."""

    backend: str = ""
    model: str = ""
    arrival: str = ""
    emulated: bool = False
    imported: str = ""
    verdict: _Judged | None = None
    throughput: dict[str, object] = {}
    metrics: dict[str, dict[str, object]] = {}
    runs: list[_Judged] = []


KINDS = {
    "sweep.json": "sweep", "repeat.json": "repeat", "search.json": "search", "breakdown.json": "breakdown",
    "results.jsonl": "training", "report.json": "run", "manifest.json": "run",
}  # fmt: skip


def runs(directory: Path) -> list[ListedRun]:
    """Those directly in a directory, the newest first. Raises OSError."""
    found = [listed for path in directory.iterdir() if path.is_dir() and (listed := _listed(path)) is not None]
    return sorted(found, key=lambda each: each.written_unix_s, reverse=True)


def _listed(directory: Path) -> ListedRun | None:
    name = next((name for name in KINDS if (directory / name).is_file()), None)
    if name is None:
        return None
    results = _Results()
    if name.endswith(".json"):
        with contextlib.suppress(OSError, *UNDECODABLE):
            data = foreign_files.read_bytes(directory / name, directory, MOST_BYTES)
            results = msgspec.json.decode(data, type=_Results)
    valid = results.verdict.valid if results.verdict is not None else None
    if results.imported:
        valid = None  # not judged
    if results.runs:
        valid = all(run.valid for run in results.runs)
    numbers = (
        _number(results.throughput.get("output_tokens_per_s")),
        _number(results.metrics.get("ttft_ms", {}).get("p50")),
        _number(results.metrics.get("tpot_ms", {}).get("p50")),
    )
    if KINDS[name] == "repeat":
        means = (results.metrics.get(each, {}).get("mean") for each in ("output_tokens_per_s", "ttft_p50", "tpot_p50"))
        numbers = (_number(next(means)), _number(next(means)), _number(next(means)))
    what = " ".join(filter(None, (results.backend, results.model, results.arrival)))
    return ListedRun(directory, (directory / name).stat().st_mtime, KINDS[name], what, results.emulated, valid, numbers)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
