"""The page of a comparison: what differs, with 95 % intervals, both sides' distributions, the gate's checks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen import rundir
from loadgen.document import files
from loadgen.document.content import (
    Block,
    Cell,
    Chart,
    Code,
    Document,
    Section,
    Table,
    Text,
    Tone,
)
from loadgen.report import compare, gate, repeats
from loadgen.report.compare import LIMITED, MAIN, Comparison, Side
from loadgen.report.contrast import BETTER, WORSE, Contrast
from loadgen.report.limits import Check
from loadgen.report.metrics import GOODPUT, Distribution
from loadgen.report.pages import differences, parts, several
from loadgen.report.pages import run as run_page
from loadgen.report.pages.charts import LATENCIES
from loadgen.report.pages.differences import Difference

TONES: dict[str, Tone] = {"INVALID": "bad", WORSE: "warning", BETTER: "good"}
LOAD = (
    "arrival", "config.input_tokens", "config.output_tokens", "config.thinking_tokens", "config.ignore_eos",
    "config.prefix", "config.sessions", "config.turns", "config.think_time", "config.first_tokens", "config.subagents",
    "config.context_tokens", "config.dataset", "config.trace", "config.trace_speed",
)  # fmt: skip
ONE_BY_ONE = "Each interval is of one metric alone: of twenty metrics that do not differ, one may be shown to differ."


@dataclass(frozen=True)
class ComparisonDetails:
    """What the page shows beside the comparison. samples: the latencies of each side, and origins: of both, by "A" and
    "B". hrefs: of the page of each run, by its directory. checks: the gate's, none where no limit was given."""

    samples: Mapping[str, Mapping[str, Distribution]]
    origins: Mapping[str, str]
    hrefs: Mapping[str, str]
    checks: Sequence[Check] = ()
    argv: Sequence[str] = ()


def write(file: Path, comparison: Comparison, checks: Sequence[Check], argv: Sequence[str]) -> None:
    """Reads the runs once more for their distributions. Raises ReportError, RunError or RecordsError."""
    sides = {letter: [Path(run.directory) for run in side.runs] for letter, side in _sides(comparison)}
    compared = ComparisonDetails(
        samples={letter: repeats.pooled(paths) for letter, paths in sides.items()},
        origins={letter: several.origin(paths) for letter, paths in sides.items()},
        hrefs={str(path): several.href(path, file.absolute().parent) for paths in sides.values() for path in paths},
        checks=checks,
        argv=argv,
    )
    files.write(file, page(comparison, compared))


def of(comparison: Comparison, checks: Sequence[Check] = ()) -> Document:
    """The comparison without distributions, as text shows it."""
    origins = {letter: "emulated" if side.emulated else "" for letter, side in _sides(comparison)}
    return page(comparison, ComparisonDetails({"A": {}, "B": {}}, origins, {}, checks))


def gate_section(comparison: Comparison, checks: Sequence[Check]) -> Section:
    return gate.section(checks, compare.warnings(comparison), compare.conclusion(comparison)[0])


def page(comparison: Comparison, compared: ComparisonDetails) -> Document:
    origin = parts.shared_origin(compared.origins.values())
    verdict, tone = _verdict(comparison, compared.checks)
    curves = {f"{letter}: {_name(side)}": compared.samples[letter] for letter, side in _sides(comparison)}
    origins = {f"{letter}: {_name(side)}": compared.origins[letter] for letter, side in _sides(comparison)}
    gated = [gate_section(comparison, compared.checks)] if compared.checks else []
    runs = [run for _, side in _sides(comparison) for run in side.runs]
    return Document(
        title=f"B: {_name(comparison.b)}, against A: {_name(comparison.a)}",
        verdict=verdict,
        tone=tone,
        origin=origin,
        sections=[
            *gated,
            Section(
                "sides",
                "A and B",
                [
                    _runs(comparison, compared),
                    *(
                        Text(f"{letter}: {side.ok} ok of {side.requests} requests.")
                        for letter, side in _sides(comparison)
                    ),
                    *_loads(comparison),
                    *several.findings(runs, counted=True),
                ],
            ),
            Section("percent", "What differs, in percent", [*_percent(comparison, origin)]),
            Section("absolute", "What differs, in milliseconds", [*_absolute(comparison, origin)]),
            Section("numbers", "Every metric", [_numbers(comparison)]),
            Section("cdf", "CDF of A and of B", several.cdfs(curves, origins)),
            Section("configuration", "Configured differently", [_configuration(comparison)]),
            Section("notes", "What the intervals hold", [*map(Text, comparison.notes), Text(ONE_BY_ONE)]),
            Section("command", "The command", [Code(shlex.join(compared.argv))], detail=True),
        ],
        footer=f"llm-dissect {rundir.package_version()}.",
    )


def _sides(comparison: Comparison) -> tuple[tuple[str, Side], tuple[str, Side]]:
    return ("A", comparison.a), ("B", comparison.b)


def _name(side: Side) -> str:
    """As its directory was named; of repeats, that of all of them."""
    if not side.runs:
        return side.run_id
    first = Path(side.runs[0].directory)
    return f"{first.parent} ({len(side.runs)} runs)" if len(side.runs) > 1 else str(first)


def _verdict(comparison: Comparison, checks: Sequence[Check]) -> tuple[str, Tone]:
    """The gate's where there is one; INVALID where a run cannot be trusted; else what is shown to differ."""
    if checks:
        return f"Gate: {gate.headline(checks)}.", gate.TONES[gate.exit_code(checks)]
    sentence, which = compare.conclusion(comparison)
    return sentence, TONES.get(which, "plain")


def _runs(comparison: Comparison, compared: ComparisonDetails) -> Table:
    rows: list[list[Cell]] = [
        [
            several.linked(f"{letter}: {run.directory}", compared.hrefs.get(run.directory, "")), several.state(run),
            several.codes(run), f"{side.backend} {side.model}",
        ]
        for letter, side in _sides(comparison)
        for run in side.runs
    ]  # fmt: skip
    return Table(["run", "verdict", "findings", "server"], rows, numeric=False)


def _loads(comparison: Comparison) -> list[Block]:
    """A warning where the two sides were sent different loads."""
    names = [name.removeprefix("config.").replace("_", " ") for name in LOAD if name in comparison.configuration]
    differ = f"A and B were sent different loads ({', '.join(names)}): what differs may come from these."
    return [Text(differ, "warning")] if names else []


def _percent(comparison: Comparison, origin: str) -> Iterator[Chart]:
    known = compare.changes(comparison)
    rows = [_difference(name, known[name]) for name in (*MAIN, GOODPUT) if name in known]
    return differences.charts("B over A, less 1", rows, origin)


def _difference(name: str, change: Contrast, shown: str = "") -> Difference:
    return Difference(shown or several.plain(name), change, LIMITED[name].lower_is_better)


def _absolute(comparison: Comparison, origin: str) -> Iterator[Chart]:
    """A chart for each latency, since they are of different sizes."""
    for metric, title in LATENCIES.items():
        rows = [
            _difference(f"{metric.removesuffix('_ms')}_{statistic}", change, statistic)
            for statistic, change in comparison.metrics[metric].items()
        ]
        yield from differences.charts(f"{title}: B - A", rows, origin, unit="ms")


def _numbers(comparison: Comparison) -> Table:
    named = {several.label(name): change for name, change in compare.changes(comparison).items()}
    return differences.table(
        [
            Difference(name, change, lower_is_better=True)
            for name, change in {**named, "failed, ratio": comparison.failure_ratio}.items()
            if change.difference is not None or name.startswith("failed")
        ]
    )


def _configuration(comparison: Comparison) -> Block:
    if not comparison.configuration:
        return Text("Nothing that the manifests hold differs.")
    return run_page.differing(comparison.configuration, ["A", "B"])
