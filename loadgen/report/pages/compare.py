"""The page of a comparison: what differs, with 95 % intervals, both sides' distributions, the gate's checks."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from backends import exit_codes
from loadgen import rundir
from loadgen.document.content import (
    Block,
    Cell,
    Chart,
    Code,
    Document,
    Mark,
    Section,
    Series,
    Table,
    Text,
    Tone,
    cell,
)
from loadgen.report import compare, gate, repeats
from loadgen.report.compare import BETTER, MAIN, NO_INTERVAL, WORSE, Comparison, Side, direction
from loadgen.report.contrast import SAME
from loadgen.report.limits import Check
from loadgen.report.metrics import GOODPUT, Distribution
from loadgen.report.pages import parts, several
from loadgen.report.pages import run as run_page
from loadgen.report.pages.charts import LATENCIES
from loadgen.steady.blocks import Bounds

TONES: dict[str, Tone] = {"INVALID": "bad", WORSE: "warning", BETTER: "good"}
GATE_TONES: dict[int, Tone] = {
    exit_codes.OK: "good", exit_codes.BEYOND_LIMIT: "bad", exit_codes.INVALID: "warning",
}  # fmt: skip
LOAD = (
    "arrival", "config.input_tokens", "config.output_tokens", "config.ignore_eos", "config.prefix", "config.sessions",
    "config.turns", "config.think_time", "config.dataset", "config.trace", "config.trace_speed",
)  # fmt: skip
ONE_BY_ONE = "Each interval is of one metric alone: of twenty metrics that do not differ, one may be shown to differ."


@dataclass(frozen=True)
class Compared:
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
    compared = Compared(
        samples={letter: repeats.pooled(paths) for letter, paths in sides.items()},
        origins={letter: several.origin(paths) for letter, paths in sides.items()},
        hrefs={str(path): several.href(path, file.absolute().parent) for paths in sides.values() for path in paths},
        checks=checks,
        argv=argv,
    )
    several.write(file, page(comparison, compared))


def of(comparison: Comparison) -> Document:
    """The comparison alone, without distributions and gate, as text shows it."""
    origins = {letter: "emulated" if side.emulated else "" for letter, side in _sides(comparison)}
    return page(comparison, Compared({"A": {}, "B": {}}, origins, {}))


def page(comparison: Comparison, compared: Compared) -> Document:
    origin = parts.shared_origin(compared.origins.values())
    verdict, tone = _verdict(comparison, compared.checks)
    curves = {f"{letter}: {_name(side)}": compared.samples[letter] for letter, side in _sides(comparison)}
    origins = {f"{letter}: {_name(side)}": compared.origins[letter] for letter, side in _sides(comparison)}
    gated = [Section("gate", "The gate", _gate(comparison, compared.checks))] if compared.checks else []
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
            Section("percent", "What differs, in percent", [_percent(comparison, origin)]),
            Section("absolute", "What differs, in milliseconds", _absolute(comparison, origin)),
            Section("numbers", "Every metric", [_numbers(comparison)]),
            Section("cdf", "CDF of A and of B", several.cdfs(curves, origins)),
            Section("configuration", "Configured differently", [_configuration(comparison)]),
            Section("notes", "What the intervals hold", [*map(Text, comparison.notes), Text(ONE_BY_ONE)]),
            Section("command", "The command", [Code(shlex.join(compared.argv))], detail=True),
        ],
        footer=f"{comparison.schema}, llm-dissect {rundir.package_version()}.",
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
        return f"Gate: {gate.headline(checks)}.", GATE_TONES[gate.exit_code(checks)]
    sentence, which = compare.conclusion(comparison)
    return sentence, TONES.get(which, "plain")


def _gate(comparison: Comparison, checks: Sequence[Check]) -> list[Block]:
    rows: list[list[Cell]] = [[check.name, check.state, check.detail] for check in checks]
    warned = [Text(warning, "warning") for warning in compare.warnings(comparison)]
    return [Table(["check", "", "what was seen"], rows, numeric=False), *warned]


def _runs(comparison: Comparison, compared: Compared) -> Table:
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


class _Spot(NamedTuple):
    """A difference in a chart. shows: what its interval shows of B."""

    name: str
    value: float
    interval: Bounds | None
    shows: str


def _percent(comparison: Comparison, origin: str) -> Chart:
    changes = compare.changes(comparison)
    spots = []
    for name in (*MAIN, GOODPUT):
        if name in changes and (ratio := changes[name].ratio) is not None:
            low, high = changes[name].ratio_ci or (None, None)
            interval = None if low is None or high is None else (_in_percent(low), _in_percent(high))
            spots.append(_Spot(name, _in_percent(ratio), interval, direction(name, changes[name])))
    return Chart(
        title="B over A, less 1",
        x_label="",
        y_label="difference (%)",
        series=_whiskers(spots),
        origin=origin,
        marks=[Mark("y", 0.0, "no difference")],
        categories=[several.plain(spot.name) for spot in spots],
        from_zero=False,
        note="Whiskers are 95 % intervals. More is worse of a latency, and better of a throughput.",
    )


def _in_percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def _absolute(comparison: Comparison, origin: str) -> list[Block]:
    """A chart for each latency, since they are of different sizes."""
    charts: list[Block] = []
    for metric, title in LATENCIES.items():
        spots = [
            _Spot(
                statistic,
                change.difference,
                change.difference_ci,
                direction(f"{metric.removesuffix('_ms')}_{statistic}", change),
            )
            for statistic, change in comparison.metrics[metric].items()
            if change.difference is not None
        ]
        charts.append(
            Chart(
                title=f"{title}: B - A",
                x_label="",
                y_label="difference (ms)",
                series=_whiskers(spots),
                origin=origin,
                marks=[Mark("y", 0.0, "no difference")],
                categories=[spot.name for spot in spots],
                from_zero=False,
            )
        )
    return charts


def _whiskers(spots: Sequence[_Spot]) -> list[Series]:
    """A point with its interval for each metric, in a colour for what the interval shows."""
    series = []
    for colour, what in enumerate((SAME, WORSE, BETTER, NO_INTERVAL)):
        mine = [(place, spot) for place, spot in enumerate(spots) if spot.shows == what]
        bounds = [spot.interval or (None, None) for _, spot in mine]
        values = [spot.value for _, spot in mine]
        low, high = [low for low, _ in bounds], [high for _, high in bounds]
        names = [several.plain(spot.name) for _, spot in mine]
        x = [place for place, _ in mine]
        if mine:
            series.append(Series(what, x, values, kind="points", low=low, high=high, labels=names, colour=colour))
    return series


def _numbers(comparison: Comparison) -> Table:
    rows: list[list[Cell]] = []
    named = {several.label(name): change for name, change in compare.changes(comparison).items()}
    for name, change in {**named, "failed, ratio": comparison.failure_ratio}.items():
        if change.difference is not None or name.startswith("failed"):
            low, high = change.difference_ci or (None, None)
            ratio_low, ratio_high = change.ratio_ci or (None, None)
            values = (change.a, change.b, change.difference, low, high, change.ratio, ratio_low, ratio_high)
            rows.append([name, *map(cell, values), change.shows or "-"])
    return Table(["metric", "A", "B", "B - A", "95 % from", "to", "B / A", "95 % from", "to", "shows"], rows)


def _configuration(comparison: Comparison) -> Block:
    if not comparison.configuration:
        return Text("Nothing that the manifests hold differs.")
    rows = [[name, run_page.option(a), run_page.option(b)] for name, (a, b) in comparison.configuration.items()]
    return Table(["", "A", "B"], rows, numeric=False)
