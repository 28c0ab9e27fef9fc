"""Several runs of one server, in DIR/1, DIR/2, ...: the mean of each metric over the runs, and its 95 % interval
between runs (Student's t over one value a run: its mean, its percentile, its throughput).

`repeat.json` (schema `loadgen.repeat/1`) holds them. It is made of the runs alone, and can be made again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import msgspec
import numpy as np

from backends.foreign_files import is_inside
from loadgen import rundir
from loadgen.document import files
from loadgen.report import build
from loadgen.report.contrast import CONFIDENCE, mean_interval
from loadgen.report.metrics import CONVENTIONS, GOODPUT, ITEMS, METRICS, Distribution, sample
from loadgen.report.schema import Report
from loadgen.report.text import QUICK_ACKS
from loadgen.steady.blocks import Bounds

SCHEMA, FILE = "loadgen.repeat/1", "repeat.json"
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
LESSER = tuple(name.removesuffix("ms") for name in METRICS if "schedule" in name or "lag" in name)  # in the JSON alone
UNFINISHED = ("INTERRUPTED", "KILLED")
ENDED_EARLY = (*UNFINISHED, "STOPPED_OVERLOADED")
THROUGHPUT = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
POOLED = ("ttft_ms", "tpot_ms", "e2el_ms")  # a value a request
NOTE = "An interval is that of the mean of such runs, one value a run (Student's t): the noise between runs is in it."
INVALID_NOTE = "Runs that are INVALID count as the others do; do not quote these numbers."
UNFINISHED_NOTE = "A run that did not come to its end is in none of these numbers."
NONE_FINISHED_NOTE = "No run came to its end; these numbers are of the requests that ended before."
_NUMBER = re.compile(r"[0-9]{1,9}")  # of a run, as its directory is called
ONE_NOTE = "One run has no noise between runs, so there are no intervals."


class RunVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One run. directory: as it was named. finished: whether it came to its end. reasons: its findings that are
    `invalid`; warnings: those that are warnings."""

    directory: str
    run_id: str
    valid: bool
    finished: bool
    reasons: list[str]
    warnings: list[str] = []


class Repeat(msgspec.Struct, frozen=True, kw_only=True):
    """One metric over the runs. runs: a value each; None where it is not defined, and then the others are too, but for
    std and the interval that need two runs. std divides by n - 1."""

    runs: list[float | None]
    mean: float | None
    std: float | None
    ci: Bounds | None


class Repeated(msgspec.Struct, frozen=True, kw_only=True):
    """repeat.json. planned: how many runs were asked for. metrics: by name, as `compare --fail-if` names them, over
    the runs that finished (all where none did); latencies in milliseconds."""

    schema: str = SCHEMA
    version: str
    backend: str
    model: str
    emulated: bool
    quick_acks: bool = False
    planned: int
    runs: list[RunVerdict]
    confidence: float = CONFIDENCE
    metrics: dict[str, Repeat]


def directories(directory: Path) -> list[Path]:
    """A run directory itself, or the runs in a directory of repeats, by number; none that lies elsewhere."""
    if not (directory / "manifest.json").exists() and directory.is_dir():
        numbered = (path for path in directory.iterdir() if _NUMBER.fullmatch(path.name) and is_inside(path, directory))
        begun = (path for path in numbered if (path / "manifest.json").exists() and any(path.glob("requests*")))
        runs = sorted(begun, key=lambda path: int(path.name))
        if runs:
            return runs
    return [directory]


def is_repeated(directory: Path) -> bool:
    return directories(directory) != [directory]


def values(report: Report, *, steady: bool = False) -> dict[str, float | None]:
    """Each metric of a run by its name, such as ttft_p99 (ms) and output_tokens_per_s; None where it is not defined.
    steady: throughput and the latencies that `POOLED` names are of the run's steady window, which it has."""
    latencies = {
        f"{name.removesuffix('_ms')}_{statistic}": getattr(report.metrics[name], statistic)
        for name in METRICS
        for statistic in STATISTICS
    }
    names = THROUGHPUT if report.items is None else (*THROUGHPUT, ITEMS)
    rates = {name: getattr(report.throughput, name) for name in names}
    whole = {**latencies, **rates, GOODPUT: None if report.goodput is None else report.goodput.request_goodput}
    window = report.steady.window if steady and report.steady is not None else None
    if window is None:
        return whole
    found = {name: of.value for name, of in window.throughput.items()}
    for name, row in window.metrics.items():
        found |= {f"{name.removesuffix('_ms')}_{statistic}": of.value for statistic, of in row.items()}
    return {**whole, **found}


def verdict(directory: Path, report: Report) -> RunVerdict:
    findings = report.verdict.findings
    reasons, warnings = (
        [f"{each.code}: {each.message}" for each in findings if each.severity == severity]
        for severity in ("invalid", "warning")
    )
    return RunVerdict(
        directory=str(directory), run_id=report.run_id, valid=report.verdict.valid,
        finished=not any(each.code in UNFINISHED for each in findings), reasons=reasons, warnings=warnings,
    )  # fmt: skip


def verdicts(paths: Sequence[Path], reports: Sequence[Report]) -> list[RunVerdict]:
    """Reads several runs; a run that is there again under another name is not valid: it says nothing of the noise."""
    first: dict[str, RunVerdict] = {}
    checked = []
    for path, report in zip(paths, reports, strict=True):
        run = verdict(path, report)
        if (same := first.setdefault(run.run_id, run)) is not run:
            why = f"CONTRADICTION: this is run {run.run_id} again, which is {same.directory}, too."
            run = msgspec.structs.replace(run, valid=False, reasons=[*run.reasons, why])
        checked.append(run)
    return checked


def read(directory: Path) -> Repeated:
    """Of the runs in a directory of repeats, from their records. Raises RunError, ReportError or RecordsError."""
    paths = directories(directory)
    planned = rundir.read_manifest(paths[0]).config.get("repeat")
    reports = [build.from_directory(path)[0] for path in paths]
    return of_reports(paths, reports, planned if isinstance(planned, int) else len(paths))


def pooled(paths: Sequence[Path]) -> dict[str, Distribution]:
    """The values of each metric of `POOLED` over all of the runs, ascending. Raises as `from_directory` does."""
    parts: dict[str, list[Distribution]] = {name: [] for name in POOLED}
    for path in paths:
        report, table = build.from_directory(path)
        measured = table.measured()
        for name in POOLED:
            parts[name].append(sample(measured, name, CONVENTIONS[report.convention]))
    return {
        name: Distribution(np.sort(np.concatenate([each.values for each in of_runs])), of_runs[0].unit_ms)
        for name, of_runs in parts.items()
        if of_runs
    }


def of_reports(paths: Sequence[Path], reports: Sequence[Report], planned: int) -> Repeated:
    """At least one report."""
    runs = verdicts(paths, reports)
    finished = [report for run, report in zip(runs, reports, strict=True) if run.finished]
    by_run = [values(report) for report in finished or reports]
    return Repeated(
        version=reports[0].version,
        backend=reports[0].backend,
        model=reports[0].model,
        emulated=any(report.emulated for report in reports),
        quick_acks=any(report.quick_acks for report in reports),
        planned=planned,
        runs=runs,
        metrics={name: over_runs([each[name] for each in by_run]) for name in by_run[0]},
    )


def over_runs(runs: list[float | None]) -> Repeat:
    known = [value for value in runs if value is not None]
    if len(known) < len(runs):
        return Repeat(runs=runs, mean=None, std=None, ci=None)
    std = stdev(known) if len(known) > 1 else None
    return Repeat(runs=runs, mean=fmean(known), std=std, ci=mean_interval(known))


def write(directory: Path, repeated: Repeated) -> None:
    """Writes repeat.json. Raises ReportError."""
    files.save(directory, {FILE: files.json_text(repeated)})


def notes(repeated: Repeated) -> list[str]:
    """What the numbers hold."""
    finished = [run.finished for run in repeated.runs]
    lines = [NOTE if len(finished) > 1 else ONE_NOTE]
    if not all(finished):
        lines.append(UNFINISHED_NOTE if any(finished) else NONE_FINISHED_NOTE)
    if not all(run.valid for run in repeated.runs):
        lines.append(INVALID_NOTE)
    if repeated.quick_acks:
        lines.append(QUICK_ACKS)
    return lines
