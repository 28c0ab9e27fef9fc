"""The page of a search, search.html: the answer, the probes on both sides of it, and how its interval narrowed."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.text import Text as Styled

from backends.untrusted import escaped
from loadgen import rundir, summary
from loadgen.document.content import (
    Cell,
    Chart,
    Code,
    Document,
    Mark,
    Number,
    Section,
    Series,
    Shade,
    Table,
    Text,
    Tone,
    cell,
    made_by,
    number,
)
from loadgen.report.pages import several
from loadgen.report.repeats import ENDED_EARLY
from loadgen.search import objective, results
from loadgen.search.highest import highest_load
from loadgen.search.results import UNITS, ProbeRun, SearchResult

FILE = "search.html"
VERDICTS = ("met", "missed", "falls_behind", "unsure")


def of(directory: Path, result: SearchResult) -> Document:
    """The page of a search and its probes."""
    runs = [run.directory for run in result.probes]
    hrefs = {run: several.href(directory / run, directory) for run in runs}
    return page(result, hrefs, several.origin(directory / run for run in runs), _argv(directory, runs))


def _argv(directory: Path, runs: Sequence[str]) -> list[str]:
    """The arguments of the process that made the first probe."""
    try:
        return rundir.read_manifest(directory / runs[0]).argv if runs else []
    except rundir.RunError:
        return []


def page(result: SearchResult, hrefs: Mapping[str, str], origin: str, argv: Sequence[str]) -> Document:
    """hrefs: of the page of each probe's run, by its directory. argv: the command, where it is known."""
    return Document(
        title=f"Highest {UNITS[result.options.axis]} of {result.backend} {result.model}".rstrip(),
        verdict=results.sentence(result),
        tone=_tone(result),
        origin=origin,
        sections=[
            Section("answer", "The answer", [_answer(result), Text(results.end(result))]),
            Section("probes", "Every probe", [probe_table(result, hrefs)]),
            Section(
                "charts",
                "How it was found",
                [_by_load(result, hrefs, origin), _steps(result, hrefs, origin)] if result.loads else [],
                ["search.png"],
            ),
            Section("options", "What was sought", [_options(result)]),
            *([Section("command", "The command", [Code(shlex.join(argv))], detail=True)] if argv else []),
        ],
        footer=f"search.json has the same numbers; {result.schema}, llm-dissect {result.version}.",
    )


def screen(result: SearchResult, columns: int) -> list[Styled]:
    """The answer first, for a terminal."""
    warning = [Styled(made_by("emulated"), style="bold yellow")] if result.emulated else []
    what = Styled(escaped(f"{result.backend} {result.model}"))
    answer = Styled(escaped(results.sentence(result)), style="bold")
    head = [line for text in (answer, *warning, what) for line in summary.wrapped(text, columns)]
    limits = [f"What limited next: {result.limited_by}."] if result.limited_by else []
    return summary.of_table(head, probe_table(result, {}), [*limits, results.end(result)], columns)


def _tone(result: SearchResult) -> Tone:
    if result.range.value is None:
        return "bad"
    return "good" if result.ended == "sure" and not result.lower_bound else "warning"


def _answer(result: SearchResult) -> Table:
    sought, unit = result.range, UNITS[result.options.axis]
    low, high = result.attained_interval or (None, None)
    rows: list[list[Cell]] = [
        [f"highest load, {unit}", cell(sought.value), cell(sought.low), cell(sought.high)],
        ["share of the requests that meet the objective there", *map(cell, (result.attained_ratio, low, high))],
    ]
    return Table(["", "estimate", "95 % from", "to"], rows)


def _options(result: SearchResult) -> Table:
    options = result.options
    limited = [("what limited next", result.limited_by)] if result.limited_by else []
    return several.facts(
        [
            ("objective", f"{100 * options.attain:g} % of the requests within {objective.text(options.slo_ms)}"),
            ("what is raised", UNITS[options.axis]),
            ("time for probes", f"{result.spent_s / 60:.1f} of {options.budget_s / 60:g} minutes"),
            *limited,
            *((name.replace("_", " "), str(value)) for name, value in options.config.items()),
        ]
    )


def probe_table(result: SearchResult, hrefs: Mapping[str, str]) -> Table:
    rows = [_row(run, hrefs.get(run.directory, "")) for run in result.probes]
    headers = [
        "probe", f"load, {UNITS[result.options.axis]}", "verdict", "met, %", "95 % from", "to", "counted", "sent", "s",
        "missed most", "findings",
    ]  # fmt: skip
    return Table(headers, rows)


def _row(run: ProbeRun, href: str) -> list[Cell]:
    probe, share = run.probe, run.probe.share
    low, high = results.met_percent(probe) or (None, None)
    missed = {name: each for name, each in run.missed.items() if each > 0}
    worst = max(missed, key=lambda name: missed[name], default=None)
    return [
        several.linked(run.directory, href),
        cell(probe.load),
        results.verdict(run),
        cell(None if share is None else 100 * share),
        cell(low),
        cell(high),
        Number(str(probe.counted), probe.counted),
        Number(str(probe.requests), probe.requests),
        Number(f"{probe.seconds:.1f}", probe.seconds),
        f"{worst} {100 * missed[worst]:.1f} %" if worst is not None else "-",
        ", ".join(code for code in run.findings if code not in ENDED_EARLY) or "-",  # the search itself ends probes
    ]


def _shade(result: SearchResult, most: float) -> list[Shade]:
    """Where the answer lies; up to the highest load that was probed where nothing bounds it above."""
    if result.range.value is None:
        return []
    return [Shade(result.range.low or 0.0, result.range.high or most, "95 % interval of the answer")]


class ProbeMark(NamedTuple):
    """A probe in a chart."""

    run: ProbeRun
    x: float
    y: float | None
    interval: tuple[float, float] | None = None


def _by_load(result: SearchResult, hrefs: Mapping[str, str], origin: str) -> Chart:
    places = []
    for run in sorted(result.of("probe"), key=lambda run: run.probe.load):
        share = run.probe.share
        percent = None if share is None else 100 * share
        places.append(ProbeMark(run, run.probe.load, percent, results.met_percent(run.probe)))
    value = result.range.value
    return Chart(
        title="Requests that meet the objective",
        x_label=f"load ({UNITS[result.options.axis]})",
        y_label="requests that meet it (%)",
        series=list(_by_verdict(places, hrefs)),
        origin=origin,
        shades=_shade(result, places[-1].x),
        marks=[
            Mark("y", 100 * result.options.attain, "wanted"),
            *([Mark("x", value, f"the answer, {number(value)}")] if value is not None else []),
        ],
        from_zero=False,
        note="Whiskers are 95 % intervals. A dot is a probe and leads to the page of its run.",
    )


def _by_verdict(places: Sequence[ProbeMark], hrefs: Mapping[str, str]) -> Iterator[Series]:
    """A series for each verdict that a probe has; a verdict has its colour whether or not others are there."""
    for colour, name in enumerate(VERDICTS):
        mine = [place for place in places if place.run.probe.verdict == name]
        if mine:
            yield _dots(name, colour, mine, hrefs)


def _dots(name: str, colour: int, places: Sequence[ProbeMark], hrefs: Mapping[str, str]) -> Series:
    """The probes of one verdict."""
    intervals = [place.interval or (None, None) for place in places]
    shares = [place.run.probe.share for place in places]
    shown = ["nothing counted" if share is None else f"{100 * share:.2f} % met" for share in shares]
    whiskers = any(place.interval for place in places)
    return Series(
        name.replace("_", " "),
        [place.x for place in places],
        [place.y for place in places],
        kind="points",
        low=[low for low, _ in intervals] if whiskers else None,
        high=[high for _, high in intervals] if whiskers else None,
        labels=[f"probe {place.run.number}, {text}" for place, text in zip(places, shown, strict=True)],
        hrefs=[hrefs.get(place.run.directory, "") for place in places],
        colour=colour,
    )


def _steps(result: SearchResult, hrefs: Mapping[str, str], origin: str) -> Chart:
    """The loads one after another, and the answer by all probes up to each of them."""
    runs = result.of("probe")
    places = [ProbeMark(run, step, run.probe.load) for step, run in enumerate(runs)]
    return Chart(
        title="One probe after another",
        x_label="probe",
        y_label=f"load ({UNITS[result.options.axis]})",
        series=[*_bracket(result), *_by_verdict(places, hrefs)],
        origin=origin,
        categories=[str(run.number) for run in runs],
        from_zero=False,
        note="The band is the answer's 95 % interval by all probes up to there; an end that no probe bounds is the "
        "lowest or the highest load that was probed.",
    )


def _bracket(result: SearchResult) -> list[Series]:
    """The answer after each probe, with its interval; nothing of a search whose first load is not known."""
    if result.guess is None:
        return []
    loads = [probe.load for probe in result.loads]
    x, y, low, high = [], [], [], []
    for step in range(len(loads)):
        so_far = highest_load(result.options.goal, result.guess, result.loads[: step + 1])
        if so_far.value is not None:
            x.append(step)
            y.append(so_far.value)
            low.append(so_far.low or min(*loads, so_far.value))
            high.append(so_far.high if math.isfinite(so_far.high) else max(*loads, so_far.value))
    return [Series("the answer so far", x, y, kind="step", low=low, high=high, colour=len(VERDICTS))] if x else []
