"""From the results of a sweep to what is read: report.json, report.md, report.html, tables.csv, tables.tex and figures.

`build` and `document` are pure; the same results and manifest always give the same report. A failed or invalid cell
stands in it with its reason, never as a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import msgspec

from backends.untrusted import is_cut, read_json
from loadgen.document.content import Column, Table, Tone
from loadgen.document.files import ReportError
from loadgen.report.finding import Finding
from training_probe import paper
from training_probe.findings import Verdict, of_cells, sentence, verdict_of
from training_probe.grid import LETTERS, Method
from training_probe.report import charts, tables
from training_probe.report.document import TrainingReport
from training_probe.report.layout import known, titled
from training_probe.results import GIB, CellResult, Outcome

SCHEMA = "training_probe.report/1"
MANIFEST_FILE = "manifest.json"
LARGE_GB = 5.0  # cells of which the prediction is judged
MOST_EFFICIENT = 1.05  # tokens/s a GPU beside more of them, as a ratio: beyond it something else is seen
MARGIN = 1.15  # predicted to fit with this much to spare, and it ran out: the prediction was wrong
INVALID_CELLS = "An INVALID cell ran, but its losses were not finite or did not fall: its speed means nothing."

ManifestFields = Mapping[str, Any]  # of a manifest.json that anybody may have written


class ReportHead(msgspec.Struct, kw_only=True):
    """What the reports of sweeps and breakdowns begin with. From `run_id` to `machine`: as the manifest has it."""

    schema: str
    run_id: Any
    version: Any
    preset: Any
    started_unix_s: Any
    argv: Any
    machine: Any
    platform: str

    @staticmethod
    def fields_of(manifest: ManifestFields) -> dict[str, Any]:
        """The fields that are the manifest's."""
        own = ("run_id", "version", "preset", "started_unix_s", "argv", "machine")
        return {name: manifest.get(name) for name in own}


class StepCounts(msgspec.Struct):
    """Steps and runs that were measured."""

    warmup_steps: int
    steps: int
    runs: int


class Profiles(msgspec.Struct):
    """Each way that cells were measured; as_paper: all as the paper's were."""

    each: list[StepCounts]
    as_paper: bool


class CellCounts(msgspec.Struct):
    """planned: by the manifest, None without one; missing: of these, without a result."""

    all: int
    by_outcome: dict[str, int]
    invalid: int
    planned: int | None = None
    missing: int = 0


class PredictionErrors(msgspec.Struct):
    """How far predicted memory was from what was allocated, on cells large enough to judge it by, as ratios."""

    cells: int
    median_ratio: float | None
    worst_ratio: float | None
    worst_cell: str | None
    said_to_fit_but_ran_out: list[str]


class SweepReport(ReportHead, kw_only=True):
    """report.json of a sweep, schema `training_probe.report/1`. verdict: INVALID where a finding, or a cell's losses,
    say that numbers are no measurement."""

    schema: str = SCHEMA
    verdict: Verdict = "VALID"
    findings: list[Finding] = []
    profile: Profiles
    cells: CellCounts
    prediction: PredictionErrors
    results: list[CellResult]


def build(results: Sequence[CellResult], manifest: ManifestFields) -> SweepReport:
    outcomes = Counter(result.outcome for result in results)
    by_outcome = {outcome: outcomes[outcome] for outcome in get_args(Outcome) if outcomes[outcome]}
    doubts, invalid = of_cells(results), any(result.state == "invalid" for result in results)
    return SweepReport(
        verdict="INVALID" if invalid else verdict_of(doubts),
        findings=doubts,
        **ReportHead.fields_of(manifest),
        platform=platform_of(results, manifest),
        profile=_profiles(results, manifest),
        cells=CellCounts(
            len(results), by_outcome, sum(result.state == "invalid" for result in results), *planned(manifest, results)
        ),
        prediction=_prediction_errors(results),
        results=list(results),
    )


def planned(manifest: ManifestFields, results: Sequence[object]) -> tuple[int | None, int]:
    """How many cells a manifest plans, None where it does not say, and how many of them have no result."""
    cells = manifest.get("cells")
    return (len(cells), max(0, len(cells) - len(results))) if isinstance(cells, list) else (None, 0)


def counted(count: int, of: int | None, what: str) -> str:
    """How many results there are, and how many are missing."""
    if of is None or count >= of:
        return f"{count} {what}{'' if count == 1 else 's'}"
    return f"{count} of {of} {what}{'' if of == 1 else 's'}, {of - count} missing"


def unread(path: Path) -> list[str]:
    """What is to be told of a file of results besides what was read from it: a last line that a kill cut."""
    cut = f"The last line of {path.name} is cut, because its writer was killed; what it held is missing."
    return [cut] if path.is_file() and is_cut(path) else []


def platform_of(results: Sequence[CellResult], manifest: ManifestFields) -> str:
    names = dict.fromkeys(result.platform for result in results)
    return ", ".join(names) or str(manifest.get("platform") or "this machine")


def _profiles(results: Sequence[CellResult], manifest: ManifestFields) -> Profiles:
    """How the measured cells were profiled; without any, what the manifest plans."""
    each = {(result.warmup_steps, result.steps, result.runs) for result in results if result.outcome == "ok"}
    planned = [manifest.get(name) for name in StepCounts.__struct_fields__]
    if not each and all(isinstance(number, int) for number in planned):
        each = {tuple(planned)}  # type: ignore[arg-type]
    as_paper = each <= {(paper.WARMUP_STEPS, paper.STEPS, paper.RUNS)}
    return Profiles([StepCounts(*numbers) for numbers in sorted(each)], as_paper)


def _prediction_errors(results: Sequence[CellResult]) -> PredictionErrors:
    off = {
        result.cell: predicted / peak - 1
        for result in results
        if result.outcome == "ok"
        and (predicted := result.predicted_memory_gb) is not None
        and (peak := result.peak_memory_gb) is not None
        and peak >= LARGE_GB
    }
    ranked = sorted(off, key=lambda name: abs(off[name]))
    ran_out = [
        result.cell for result in results
        if result.outcome == "oom" and result.predicted_memory_gb and result.device_memory_gb
        and result.predicted_memory_gb * MARGIN < result.device_memory_gb
    ]  # fmt: skip
    return PredictionErrors(
        cells=len(off),
        median_ratio=abs(off[ranked[len(ranked) // 2]]) if ranked else None,
        worst_ratio=off[ranked[-1]] if ranked else None,
        worst_cell=ranked[-1] if ranked else None,
        said_to_fit_but_ran_out=ran_out,
    )


# As text.


def verdict(report: SweepReport) -> str:
    cells = report.cells
    invalid = f" ({cells.invalid} of them INVALID)" if cells.invalid else ""
    counts = [f"{count} {name}{invalid if name == 'ok' else ''}" for name, count in cells.by_outcome.items()]
    listed = f": {', '.join(counts)}." if counts else "."
    return counted(cells.all, cells.planned, "cell") + listed + doubtful(report.verdict)


def doubtful(verdict: Verdict) -> str:
    """What a line on a measurement ends with."""
    return "" if verdict == "VALID" else " INVALID: numbers of it are no measurement."


def tone_of(outcomes: Iterable[str], findings: Sequence[object] = (), verdict: Verdict = "VALID") -> Tone:
    """How good a measurement with cells or points of these outcomes is. Out of memory is a result."""
    ended = set(outcomes)
    if verdict == "INVALID" or ended & {"crashed", "timeout", "invalid", "wrong"}:
        return "bad"
    return "warning" if findings else "good" if "ok" in ended else "plain"


def ran_nothing(outcomes: Iterable[str]) -> bool:
    """Whether no cell or point of these outcomes was as much as started."""
    return set(outcomes) <= {"unsupported", "skipped"}


def findings(report: SweepReport) -> Iterator[str]:
    """What to keep in mind of the numbers."""
    yield from map(sentence, report.findings)
    if report.cells.missing:
        cells = report.cells
        yield f"{cells.missing} of {cells.planned} cells were not reached; `--resume` goes on with them."
    if ran_nothing(report.cells.by_outcome):
        yield "No cell was run."
    if report.cells.invalid:
        yield INVALID_CELLS
    if report.prediction.said_to_fit_but_ran_out:
        yield f"Predicted to fit, but ran out of memory: {', '.join(report.prediction.said_to_fit_but_ran_out)}."
    yield from _scaling_lines(report.results)


def facts(report: SweepReport) -> Iterator[str]:
    """How it was measured, and how well memory was predicted."""
    errors = report.prediction
    yield from _profile_lines(report.profile)
    if errors.median_ratio is not None and errors.worst_ratio is not None:
        yield (
            f"Predicted memory: off by {100 * errors.median_ratio:.1f} % (median) and "
            f"{100 * errors.worst_ratio:+.1f} % at worst ({errors.worst_cell}) of what was allocated, "
            f"over {errors.cells} cells of at least {LARGE_GB:g} GiB."
        )
    yield from _engine_lines(report.results)


def _scaling_lines(results: Sequence[CellResult]) -> Iterator[str]:
    """Without ZeRO, which shares work out, each GPU has the same work however many there are."""
    for first, *others in tables.scaled([result for result in results if not Method.parse(result.method).zero]):
        for result in others:
            efficiency = (result.tokens_per_s or 0.0) / result.gpus / ((first.tokens_per_s or 0.0) / first.gpus)
            if efficiency > MOST_EFFICIENT:
                yield (
                    f"{result.cell} has {100 * efficiency:.0f} % of the tokens/s a GPU of {first.cell}: something held "
                    "the latter back, such as the host that launches its kernels; run it again."
                )


def _profile_lines(profiles: Profiles) -> Iterator[str]:
    shown = [
        f"{each.warmup_steps} warm-up and {each.steps} timed steps in {each.runs} {'run' if each.runs == 1 else 'runs'}"
        for each in profiles.each
    ]
    if shown and profiles.as_paper:
        yield f"Each cell: {shown[0]}, as in the paper."
    elif shown:
        yield (
            f"Other steps than the paper's {paper.WARMUP_STEPS} warm-up and {paper.STEPS} timed ones in {paper.RUNS} "
            f"runs: {'; '.join(shown)}. A short profile shows more noise, and may time what "
            "a longer warm-up would settle."
        )


def _engine_lines(results: Sequence[CellResult]) -> Iterator[str]:
    """Optimizers with their precision, and versions, as the cells reported them."""
    optimizers: dict[str, dict[str, dict[str, None]]] = {}
    versions: dict[str, dict[str, None]] = {}
    for result in results:
        if result.optimizer:
            optimizers.setdefault(result.optimizer, {}).setdefault(result.engine, {})[result.method] = None
        for name, version in result.versions.items():
            versions.setdefault(name, {})[version] = None
    for optimizer, engines in optimizers.items():
        cells = "; ".join(f"{engine} {', '.join(methods)}" for engine, methods in engines.items())
        yield f"Optimizer: {optimizer}" + (f" ({cells})." if len(optimizers) > 1 else ".")
    if versions:
        yield "Versions: " + ", ".join(f"{name} {' and '.join(each)}" for name, each in versions.items()) + "."


def measured(results: Sequence[CellResult], manifest: ManifestFields) -> dict[str, str]:
    """What was measured, and on what, by name; empty where it is not known."""
    models = {paper.model_name(each.model): each.parameters for each in results}
    sizes = (f"{name}{f' ({count / 1e9:.3g} billion parameters)' if count else ''}" for name, count in models.items())
    memories = [each.device_memory_gb for each in results if each.device_memory_gb]
    return {
        "models": ", ".join(sizes),
        "GPUs" if any(each.device == "cuda" for each in results) else "platform": platform_of(results, manifest)
        + (f", {min(memories):.4g} GiB each" if memories else ""),
        "GPUs of a cell": _each(each.gpus for each in results),
        "tokens a sequence": _each(each.seq_len for each in results),
        "sequences a GPU at once": _each(each.batch_size for each in results if each.batch_size is not None),
        "preset": shown(manifest.get("preset")),
        **surroundings(manifest),
    }


def surroundings(manifest: ManifestFields) -> dict[str, str]:
    """Where and when something ran, as its manifest has it."""
    machine, environment = manifest.get("machine"), manifest.get("environment")
    started = manifest.get("started_unix_s")
    at = datetime.fromtimestamp(started, UTC) if isinstance(started, int | float) and 0 < started < 1e11 else None
    about = machine if isinstance(machine, Mapping) else {}
    cpus = about.get("cpu_count")
    return {
        "machine": ", ".join(
            [*(shown(about.get(name)) for name in ("hostname", "platform") if about.get(name)), f"{shown(cpus)} CPUs"]
        ) if cpus else "",
        "driver": shown(manifest.get("driver")),
        "Python": shown(about.get("python")),
        "environment": " ".join(f"{name}={value}" for name, value in environment.items())
        if isinstance(environment, Mapping) else "",
        "started": f"{at:%Y-%m-%d %H:%M:%S} UTC" if at else "",
    }  # fmt: skip


def shown(value: object) -> str:
    return "" if value is None else str(value)


def _each(values: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(values))))


def document(results: Sequence[CellResult], manifest: ManifestFields, notes: Sequence[str] = ()) -> TrainingReport:
    """The report of a sweep, as `sweep` and `report` show and write it. notes: findings on the files themselves."""
    report = build(results, manifest)
    in_mind = [*notes, *findings(report)]

    return TrainingReport(
        report=report,
        run_id=report.run_id,
        version=report.version,
        argv=report.argv,
        title=f"Training on {report.platform}" + (f", {report.preset}" if report.preset else ""),
        verdict=verdict(report),
        tone=tone_of((each.state for each in results), in_mind, report.verdict),
        invalid=report.verdict == "INVALID",
        findings=in_mind,
        facts=[*facts(report)],
        measured=measured(results, manifest),
        tables=tables.build(results),
        charts=lambda directory: charts.build(results, directory),
        after=[table for table in (_failed(results), _searched(results), _letters(results)) if table.rows],
        files={"tables.csv": tables.csv_text(results)},
    )


def _letters(results: Sequence[CellResult]) -> Table:
    used = {letter for result in results for letter in result.method.split("+")}
    rows = tuple((letter, means) for letter, means in LETTERS.items() if letter in used)
    columns = (Column("letter", left=True), Column("meaning", left=True))
    return titled("letters", "Letters of the methods", columns, rows)


def _searched(results: Sequence[CellResult]) -> Table:
    """Every try of the searches for the largest micro batch."""
    rows = tuple(
        (each.cell, known(attempt.micro_batch), attempt.outcome, known(_gib(attempt.peak_allocated_bytes)))
        for each in results for attempt in each.search
    )  # fmt: skip
    columns = (Column("cell", left=True), Column("sequences a GPU"), Column("outcome"), Column("allocated, GiB"))
    return titled("searched", "Searches for the largest batch", columns, rows)


def _gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / GIB


def _failed(results: Sequence[CellResult]) -> Table:
    rows = tuple(
        (each.cell, each.state, each.reason or (tables.UNSOUND if each.state == "invalid" else ""), each.log)
        for each in results if each.state != "ok"
    )  # fmt: skip
    columns = tuple(Column(head, left=True) for head in ("cell", "outcome", "reason", "log"))
    return titled("failed", "Cells without a valid number", columns, rows)


def read_manifest(directory: Path) -> dict[str, Any]:
    """What the sweep wrote of itself; empty where it wrote nothing. Raises ReportError."""
    path = directory / MANIFEST_FILE
    if not path.exists():
        return {}
    advice = "; without that file the report can be made"
    return read_json(path, dict[str, Any], ReportError, "is not a sweep's manifest", advice, directory)
