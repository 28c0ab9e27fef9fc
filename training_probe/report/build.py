"""From the results of a sweep to what is read: report.json, report.md, tables.csv, tables.tex and figures.

`build` and `page` are pure; the same results and manifest always give the same report. A failed or invalid cell stands
in it with its reason, never as a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from backends.untrusted import read_json
from loadgen.report.text import markdown_text
from training_probe import paper
from training_probe.grid import LETTERS, Method
from training_probe.report import tables
from training_probe.report.page import Page, ReportError
from training_probe.results import CellResult, Outcome

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
    all: int
    by_outcome: dict[str, int]
    invalid: int


class PredictionErrors(msgspec.Struct):
    """How far predicted memory was from what was allocated, on cells large enough to judge it by, as ratios."""

    cells: int
    median_ratio: float | None
    worst_ratio: float | None
    worst_cell: str | None
    said_to_fit_but_ran_out: list[str]


class SweepReport(ReportHead, kw_only=True):
    """report.json of a sweep, schema `training_probe.report/1`."""

    schema: str = SCHEMA
    profile: Profiles
    cells: CellCounts
    prediction: PredictionErrors
    results: list[CellResult]


def build(results: Sequence[CellResult], manifest: ManifestFields) -> SweepReport:
    outcomes = Counter(result.outcome for result in results)
    by_outcome = {outcome: outcomes[outcome] for outcome in get_args(Outcome) if outcomes[outcome]}
    return SweepReport(
        **ReportHead.fields_of(manifest),
        platform=platform_of(results, manifest),
        profile=_profiles(results, manifest),
        cells=CellCounts(len(results), by_outcome, sum(result.state == "invalid" for result in results)),
        prediction=_prediction_errors(results),
        results=list(results),
    )


def platform_of(results: Sequence[CellResult], manifest: ManifestFields) -> str:
    names = dict.fromkeys(result.platform for result in results)
    return ", ".join(names) or str(manifest.get("platform") or "this machine")


def _profiles(results: Sequence[CellResult], manifest: ManifestFields) -> Profiles:
    """Of the cells that were measured; without any, of what the manifest plans."""
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


def summary(report: SweepReport, results: Sequence[CellResult]) -> Iterator[str]:
    """What was measured and how, a sentence or two each; plain text that is not escaped."""
    cells, errors = report.cells, report.prediction
    invalid = f" ({cells.invalid} of them INVALID)" if cells.invalid else ""
    counts = [f"{count} {name}{invalid if name == 'ok' else ''}" for name, count in cells.by_outcome.items()]
    yield f"{cells.all} cells" + (f": {', '.join(counts)}." if counts else ".")
    if cells.invalid:
        yield INVALID_CELLS
    yield from _profile_lines(report.profile)
    if errors.median_ratio is not None and errors.worst_ratio is not None:
        yield (
            f"Predicted memory: off by {100 * errors.median_ratio:.1f} % (median) and "
            f"{100 * errors.worst_ratio:+.1f} % at worst ({errors.worst_cell}) of what was allocated, "
            f"over {errors.cells} cells of at least {LARGE_GB:g} GiB."
        )
    if errors.said_to_fit_but_ran_out:
        yield f"Predicted to fit, but ran out of memory: {', '.join(errors.said_to_fit_but_ran_out)}."
    yield from _scaling_lines(results)
    yield from _engine_lines(results)


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


def page(results: Sequence[CellResult], manifest: ManifestFields) -> Page:
    """The report of a sweep, as `sweep` and `report` show and write it."""
    report, after = build(results, manifest), []
    used = {letter for result in results for letter in result.method.split("+")} & set(LETTERS)
    if used:
        after += ["## Letters of the methods", ""]
        after += [*(f"- {letter}: {markdown_text(means)}" for letter, means in LETTERS.items() if letter in used), ""]
    failed = [result for result in results if result.state != "ok"]
    if failed:
        after += ["## Cells without a valid number", "", "| cell | outcome | reason | log |", "|---|---|---|---|"]
    for result in failed:
        reason = result.reason or (tables.UNSOUND if result.state == "invalid" else "")
        row = (result.cell, result.state, reason, result.log)
        after.append(f"| {' | '.join(markdown_text(part) for part in row)} |")

    def draw(directory: Path) -> dict[str, str]:
        from training_probe.report import plots  # matplotlib costs 0.7 s and 70 MB

        return plots.draw(directory, results)

    return Page(
        report=report,
        run_id=report.run_id,
        version=report.version,
        title=f"Training on {report.platform}" + (f", {report.preset}" if report.preset else ""),
        facts=[*summary(report, results)],
        tables=tables.build(results),
        draw=draw,
        figures="Figures",
        after=[*after, ""],
        files={"tables.csv": tables.csv_text(results)},
    )


def read_manifest(directory: Path) -> dict[str, Any]:
    """What the sweep wrote of itself; empty where it wrote nothing. Raises ReportError."""
    path = directory / MANIFEST_FILE
    if not path.exists():
        return {}
    advice = "; without that file the report can be made"
    return read_json(path, dict[str, Any], ReportError, "is not a sweep's manifest", advice)
