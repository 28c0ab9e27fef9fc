"""The page of a sweep, sweep.html: its points against each other, every one of which leads to the page of its run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.document.content import Cell, Chart, Code, Document, Items, ListItem, Number, Section, Series, Table, cell
from loadgen.report import sweeps
from loadgen.report.metrics import ITEMS, Distribution
from loadgen.report.pages import several
from loadgen.report.sweeps import (
    BY_TOKENS,
    INTERACTIVITY,
    LATENCIES,
    PER_GPU,
    PERCENTILES,
    Swept,
    SweptPoint,
    by_throughput,
    mean,
    stretches,
    varied,
)

FILE, TEXT = "sweep.html", "sweep.md"
WHAT = {"output_tokens_per_s": "Output tokens", "total_tokens_per_s": "Prompt and output tokens"}


UNITS = {BY_TOKENS[0]: "output tokens/s", "requests_per_s": "requests/s", ITEMS: "items/s"}


@dataclass(frozen=True)
class _Spot:
    """A point of the sweep in a chart."""

    point: SweptPoint
    x: float
    y: float


def of(directory: Path, swept: Swept) -> Document:
    """The page of a sweep and its runs. Raises ReportError, RunError or RecordsError."""
    runs = [run.directory for run in swept.runs]
    hrefs = {run: several.href(directory / run, directory) for run in runs}
    origin = several.origin(directory / run for run in runs)
    return page(swept, sweeps.samples(directory, swept), hrefs, origin)


def page(
    swept: Swept, samples: Mapping[str, Mapping[str, Distribution]], hrefs: Mapping[str, str], origin: str
) -> Document:
    """samples: the latencies of each point by its value. hrefs: of the page of each run, by its directory."""
    begun = [run for run in swept.runs if run.state != "waiting"]
    values = {point.value: f"{swept.plan.varies} {point.value}" for point in swept.points}
    remarks = Items([ListItem("", remark) for remark in sweeps.remarks(swept)])
    curves = {values[value]: of for value, of in samples.items()}
    items = sweeps.of_items(swept)
    return Document(
        title=f"{f'{swept.backend} {swept.model}'.strip() or 'A sweep'} by {varied(swept)}",
        verdict=several.verdict(begun, len(swept.runs)),
        tone=several.tone(begun, len(swept.runs)),
        stamp=several.stamp(begun),
        origin=origin,
        sections=[
            Section("findings", "Findings", [*several.findings(begun), remarks]),
            Section("points", "Every point", [_points(swept, hrefs)]),
            *(
                Section(name, title, charts, [f"{name}.png"] if curves and charts else [])
                for name, title, charts in (
                    (
                        "pareto",
                        "Interactivity against throughput",
                        [] if items else [_pareto(swept, each, hrefs, origin) for each in BY_TOKENS],
                    ),
                    (
                        "latency",
                        "Latency against throughput",
                        [_latency(swept, each, hrefs, origin) for each in (["e2el"] if items else LATENCIES)],
                    ),
                    ("cdf", "CDF of every point", several.cdfs(curves, dict.fromkeys(curves, origin))),
                )
            ),
            Section("runs", "Every run, in its order", [_runs(swept, hrefs)], detail=True),
            Section("swept", "What was swept", [_planned(swept)], detail=True),
            Section("command", "The command", [Code(shlex.join(swept.argv))], detail=True),
        ],
        footer=f"sweep.json has the same numbers; {swept.schema}, llm-dissect {swept.version}.",
    )


def _planned(swept: Swept) -> Table:
    plan = swept.plan
    return several.facts(
        [
            ("server", f"{swept.backend} {swept.model}".strip() or "none answered yet"),
            ("GPUs", "unknown, or none" if swept.gpus is None else str(swept.gpus)),
            (plan.varies, f"{', '.join(plan.values)} {plan.unit}".rstrip()),
            ("runs", f"{len(swept.runs)}, {plan.repeat} of each point, in an order shuffled with seed {plan.seed}"),
            ("starts of the server", str(swept.starts)),
        ]
    )


def _pareto(swept: Swept, name: str, hrefs: Mapping[str, str], origin: str) -> Chart:
    throughput = name if swept.gpus is None else name + PER_GPU
    spots = [_Spot(*each) for stretch in stretches(swept, INTERACTIVITY, throughput) for each in stretch]
    front = swept.pareto[name]
    best = sorted((each for each in spots if each.point.value in front), key=lambda each: each.x)
    rest = [each for each in spots if each.point.value not in front]
    valid, invalid = ([each for each in rest if each.point.valid is well] for well in (True, False))
    per = "a GPU" if swept.gpus is not None else "of the whole server"
    no_better = "no other point is better in both (Pareto)"
    return Chart(
        title=f"{WHAT[name]}, {per}",
        x_label="interactivity of a user, 1 / tpot p50 (tokens/s)",
        y_label=f"throughput {per} (tokens/s)",
        series=[
            Series(no_better, [each.x for each in best], [each.y for each in best], group=no_better),
            *_dots(no_better, swept, best, (INTERACTIVITY, throughput), hrefs, 0),
            *_dots("another point is better in both", swept, valid, (INTERACTIVITY, throughput), hrefs, 4),
            *_dots("INVALID, not to be quoted", swept, invalid, (INTERACTIVITY, throughput), hrefs, 1),
        ],
        origin=origin,
        note=_note(swept),
    )


def _note(swept: Swept) -> str:
    if swept.plan.repeat == 1:
        return "A point leads to the page of its run."
    return (
        "A full point is the mean over runs, with its 95 % interval between runs, cut at 0. A ring is one run and "
        "leads to its page."
    )


def _latency(swept: Swept, latency: str, hrefs: Mapping[str, str], origin: str) -> Chart:
    """A line for each percentile, through the points in the order of the list."""
    throughput = by_throughput(swept)
    series: list[Series] = []
    for colour, percentile in enumerate(PERCENTILES):
        metric = f"{latency}_{percentile}"
        paths = [[_Spot(*each) for each in stretch] for stretch in stretches(swept, throughput, metric)]
        spots = [each for path in paths for each in path]
        valid, invalid = ([each for each in spots if each.point.valid is well] for well in (True, False))
        series += _lines(percentile, paths, colour)
        named = percentile == PERCENTILES[-1]
        series += _dots(percentile, swept, valid, (throughput, metric), hrefs, colour, named)
        series += _dots(f"{percentile}, INVALID", swept, invalid, (throughput, metric), hrefs, colour, named)
    return Chart(
        title=LATENCIES[latency],
        x_label=f"throughput ({UNITS[throughput]})",
        y_label=f"{latency} (ms)",
        series=series,
        origin=origin,
        log=("y",),
        note=f"Lines join the points in the order of the list. {_note(swept)}",
    )


def _lines(name: str, paths: Sequence[Sequence[_Spot]], colour: int) -> Iterator[Series]:
    """The way through the points. A curve of a chart has x ascending, so a way that turns back is several curves."""
    for path in paths:
        for part in _ascending(path):
            yield Series(name, [each.x for each in part], [each.y for each in part], group=name, colour=colour)


def _ascending(path: Sequence[_Spot]) -> Iterator[list[_Spot]]:
    """The pieces of a way between its turns in x, each from left to right; neighbours share the turn."""
    piece: list[_Spot] = []
    for spot in path:
        if len(piece) > 1 and (spot.x - piece[-1].x) * (piece[-1].x - piece[0].x) < 0:
            yield sorted(piece, key=lambda each: each.x)
            piece = piece[-1:]
        piece.append(spot)
    if len(piece) > 1:
        yield sorted(piece, key=lambda each: each.x)


def _dots(
    name: str,
    swept: Swept,
    spots: Sequence[_Spot],
    metrics: tuple[str, str],
    hrefs: Mapping[str, str],
    colour: int,
    named: bool = True,
) -> Iterator[Series]:
    """The points, each with the 95 % interval between its runs where it has several, and these runs as points too.
    metrics: of x and y. named: their loads stand beside them."""
    if not spots:
        return
    ordered = sorted(spots, key=lambda each: each.x)
    bounds = [each.point.metrics[metrics[1]].ci or (None, None) for each in ordered]
    several_runs = any(low is not None for low, _ in bounds)
    yield Series(
        name, [each.x for each in ordered], [each.y for each in ordered], kind="points",
        low=[None if low is None else max(low, 0.0) for low, _ in bounds] if several_runs else None,
        high=[high for _, high in bounds] if several_runs else None,
        labels=[f"{swept.plan.varies} {each.point.value}{'' if each.point.valid else ', INVALID'}" for each in ordered],
        names=[each.point.value for each in ordered] if named else None,
        hrefs=[_page_of(each.point, hrefs) for each in ordered], group=name, colour=colour,
        dashed=not all(each.point.valid for each in ordered),
    )  # fmt: skip
    if several_runs:
        runs = sorted(_single(ordered, metrics), key=lambda each: each[0])
        yield Series(
            f"{name}, one run", [x for x, _, _ in runs], [y for _, y, _ in runs], kind="points",
            labels=[run for _, _, run in runs], hrefs=[hrefs.get(run, "") for _, _, run in runs], group=name,
            colour=colour, dashed=True,
        )  # fmt: skip


def _single(spots: Sequence[_Spot], metrics: tuple[str, str]) -> Iterator[tuple[float, float, str]]:
    """x, y and directory of every run of the points."""
    for spot in spots:
        x, y = (spot.point.metrics[name].runs for name in metrics)
        for at, value, run in zip(x, y, spot.point.runs, strict=True):
            if at is not None and value is not None:
                yield at, value, run


def _page_of(point: SweptPoint, hrefs: Mapping[str, str]) -> str:
    """Where a point leads: to its run's page or, with several runs, to the table of all runs."""
    return hrefs.get(point.runs[0], "") if len(point.runs) == 1 else "#runs" if point.runs else ""


def _points(swept: Swept, hrefs: Mapping[str, str]) -> Table:
    columns = sweeps.columns(swept)
    rows: list[list[Cell]] = []
    for point in swept.points:
        state = "-" if not point.runs else "VALID" if point.valid else "INVALID"
        codes = dict.fromkeys(each for run in swept.runs if run.value == point.value for each in _codes(run))
        numbers = [cell(mean(point, name)) for _, name in columns]
        requests = [Number(str(count), count) for count in (point.requests_ok, point.requests_failed)]
        runs = Number(f"{len(point.runs)} of {swept.plan.repeat}", len(point.runs))
        name = several.linked(point.value, _page_of(point, hrefs))
        rows.append([name, state, runs, *requests, *numbers, ", ".join(codes) or "-"])
    headers = [varied(swept), "verdict", "runs", "requests ok", "failed", *(name for name, _ in columns), "findings"]
    return Table(headers, rows)


def _codes(run: sweeps.SweptRun) -> list[str]:
    return [finding.partition(":")[0] for finding in (*run.reasons, *run.warnings)] if run.finished else []


def _runs(swept: Swept, hrefs: Mapping[str, str]) -> Table:
    rows: list[list[Cell]] = []
    for run in swept.runs:
        wait = swept.waits.get(run.directory)
        before = "-" if wait is None else f"idle after {wait.waited_s:.1f} s" if wait.idle else wait.detail or "busy"
        state = several.state(run) if run.state == "finished" else run.state
        seed = Number(str(run.seed), run.seed)
        name = several.linked(run.directory, hrefs.get(run.directory, ""))
        rows.append([name, run.value, seed, state, several.codes(run), before])
    headers = ["run", varied(swept), "seed", "verdict", "findings", "the server before it"]
    return Table(headers, rows, numeric=False)
