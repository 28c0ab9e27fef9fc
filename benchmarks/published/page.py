"""The page of what others published, published.html: predicted over measured, errors by source, every row."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

from benchmarks.published import METRICS, NAMES, TARGETS, Errors, Predicted, Result, Source, errors, sources
from loadgen import rundir
from loadgen.document.content import (
    Block,
    Cell,
    Chart,
    Code,
    Document,
    Items,
    ListItem,
    Number,
    Section,
    Series,
    Table,
    Text,
    number,
)

ORIGIN = "predicted"
FILES = ("published.png", "published.svg")
UNITS = {metric: "ms" if metric.endswith("_ms") else "output tokens/s" for metric in METRICS}
BEYOND_RATIO = 1.3  # how far the diagonal reaches past the outermost points


def page(predicted: Predicted, argv: Sequence[str]) -> Document:
    """argv: the command that made it."""
    by_source = [(source, errors(predicted.results[source.name])) for source in sources()]
    met, judged = _met(by_source)
    return Document(
        title="Published measurements, predicted",
        verdict=f"{met} of {judged} median errors are within their targets, over {_count(predicted)} published runs.",
        tone="good" if met == judged else "warning",
        origin=ORIGIN,
        sections=[
            Section(id="errors", title="Errors by source", blocks=_errors(predicted, by_source)),
            Section("scatter", "Predicted over measured", _scatters(list(predicted.all())), FILES),
            Section(id="alternatives", title="Under other assumptions", blocks=[_alternatives(predicted)]),
            Section(id="assumptions", title="What is assumed", blocks=_assumptions()),
            Section(id="rows", title="Every row", blocks=[_every_row(list(predicted.all()))]),
            Section(id="command", title="The command", blocks=[Code(shlex.join(argv))]),
        ],
        footer=f"published.json and published.csv have the same numbers; llm-dissect {rundir.package_version()}.",
    )


def _met(by_source: Sequence[tuple[Source, dict[str, Errors]]]) -> tuple[int, int]:
    """How many medians are within their targets, and how many there are."""
    within = [each.median <= TARGETS[metric] for _, of in by_source for metric, each in of.items()]
    return sum(within), len(within)


def _count(predicted: Predicted) -> int:
    return sum(len(results) for results in predicted.results.values())


def _errors(predicted: Predicted, by_source: Sequence[tuple[Source, dict[str, Errors]]]) -> list[Block]:
    rows: list[list[Cell]] = []
    for source, of in by_source:
        for metric, each in of.items():
            verdict = "met" if each.median <= TARGETS[metric] else "missed"
            rows.append(
                [source.title, NAMES[metric], Number(str(each.rows), each.rows), _percent(each.median),
                 _percent(each.bias, signed=True), _percent(each.worst, signed=True), each.worst_run,
                 _percent(TARGETS[metric]), verdict]
            )  # fmt: skip
    headers = ["source", "metric", "rows", "median off", "median with sign", "worst", "worst run", "target", "verdict"]
    left_out = [
        ListItem(head=f"{each.source}, {each.row.run}: not predicted", text=each.reason, tone="warning")
        for each in predicted.all()
        if each.reason
    ]
    meaning = "Off: predicted over measured, less 1. The median off is of magnitudes; the worst is the largest one."
    return [Table(headers=headers, rows=rows), Text(meaning), *([Items(left_out)] if left_out else [])]


def _percent(ratio: float, *, signed: bool = False) -> Number:
    if math.isnan(ratio):
        return Number("-")
    return Number(f"{ratio:+.1%}" if signed else f"{ratio:.1%}", ratio)


def _scatters(results: Sequence[Result]) -> list[Block]:
    """A chart for each metric: a colour for each source, the diagonal where the two are the same."""
    return [_scatter(metric, results) for metric in METRICS]


def _scatter(metric: str, results: Sequence[Result]) -> Chart:
    series, ends = [], []
    for place, source in enumerate(sources()):
        mine = [each for each in results if each.source == source.name and not math.isnan(each.error(metric))]
        mine.sort(key=lambda each: float(getattr(each.measured, metric)))
        x = [float(getattr(each.measured, metric)) for each in mine]
        y = [float(getattr(each.predicted, metric)) for each in mine]
        labels = [f"{each.row.run}, off by {each.error(metric):+.1%}" for each in mine]
        if mine:
            series.append(Series(source.title, x, y, kind="points", labels=labels, colour=place))
        ends += x + y
    if ends:
        reach = [min(ends) / BEYOND_RATIO, max(ends) * BEYOND_RATIO]
        series.append(Series("predicted as measured", reach, reach, colour=len(sources()), dashed=True))
    return Chart(
        title=NAMES[metric],
        x_label=f"measured ({UNITS[metric]})",
        y_label=f"predicted ({UNITS[metric]})",
        series=series,
        origin=ORIGIN,
        log=("x", "y"),
        log_now=("x", "y"),
    )


def _alternatives(predicted: Predicted) -> Table:
    rows: list[list[Cell]] = []
    for source in sources():
        for why, results in [("as assumed", predicted.results[source.name]), *predicted.alternatives[source.name]]:
            by_metric = errors(results)
            medians = [_percent(by_metric[metric].median) if metric in by_metric else Number("-") for metric in METRICS]
            rows.append([f"{source.name}: {why}", *medians])
    return Table(headers=["source and assumption", *NAMES.values()], rows=rows, caption="Median errors")


def _assumptions() -> list[Block]:
    items = []
    for source in sources():
        facts = source.facts()
        where = f"{facts['what']}. {facts['source']}, {facts['commit']}, read {facts['read']}. "
        items.append(ListItem(head=source.title, text=f"{where}Licence: {facts['licence']}."))
        items += [ListItem(head="", text=assumption) for assumption in source.assumptions]
    return [Items(items)]


def _every_row(results: Sequence[Result]) -> Table:
    headers = [f"{name} {what}" for name in NAMES.values() for what in ("predicted", "measured", "off")]
    rows: list[list[Cell]] = [[f"{each.source}: {each.row.run}", *_row(each)] for each in results]
    return Table(headers=["run", *headers], rows=rows, caption=f"{len(rows)} rows", folded=True)


def _row(each: Result) -> Iterator[Cell]:
    for metric in METRICS:
        for value in (float(getattr(each.predicted, metric)), float(getattr(each.measured, metric))):
            yield Number("-") if math.isnan(value) else Number(number(value), value)
        yield _percent(each.error(metric), signed=True)
