"""The page of Section VI of arXiv 2311.03687, paper.html: what the paper states beside what is predicted, and its
Figures 6 to 10 as predicted."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

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
    cell,
)
from loadgen.report.metrics import Distribution
from loadgen.report.pages import series
from loadgen.report.pages.parts import cdf_rule, rounded
from servers.predict import paper_layout
from servers.predict.paper import DoesNotFit, PaperSummary, Result, RunNumbers, stated, verdict

ORIGIN = "predicted"
STEPS = 250  # of each curve: a page has ten dozen of them
COLUMNS = ("KV cache, tokens", "output tokens/s", "p50, s", "p60, s", "p100, s", "refused", "preemptions", "note")


def page(summary: PaperSummary, results: Mapping[str, Result], argv: Sequence[str]) -> Document:
    """argv: the command that made it."""
    paper = summary.paper
    tried = [fact for fact in summary.facts if not fact.fitted]
    met = sum(fact.met for fact in tried)
    return Document(
        title=f"{paper.source}, predicted",
        verdict=f"{met} of {len(tried)} statements of the paper are met, {len(tried) - met} are missed.",
        tone="good" if met == len(tried) else "warning",
        origin=ORIGIN,
        sections=[
            Section("statements", "What the paper states", _statements(summary)),
            Section("throughput", "As Figure 6: throughput", _throughput(summary, results), files(6)),
            *(
                Section(
                    f"figure{each.number}",
                    f"As Figure {each.number}: {each.title}",
                    latencies(each, results),
                    files(each.number),
                )
                for each in paper_layout.figures(paper)
            ),
            Section("runs", "Every run", [_runs({paper.name(r): of for r, of in summary.runs.items()})]),
            Section("variants", "Under other assumptions", [_runs(_variants(summary))]),
            Section(
                "assumptions", "What is assumed", [Items([ListItem("", each) for each in summary.paper.assumptions])]
            ),
            Section("command", "The command", [Code(shlex.join(argv))]),
        ],
        footer=f"paper.json has the same numbers; llm-dissect {rundir.package_version()}.",
    )


def files(number: int) -> list[str]:
    """Where a figure of the paper is drawn."""
    return [f"figure{number}.png", f"figure{number}.svg"]


def _statements(summary: PaperSummary) -> list[Block]:
    rows = [[verdict(fact), *stated(fact)] for fact in summary.facts]
    table = Table(["", "place", "the paper", "predicted", "counts as met"], rows, numeric=False)
    return [Text("What counts as met is our choice; the model was fitted to a statement that is marked so."), table]


def _throughput(summary: PaperSummary, results: Mapping[str, Result]) -> list[Block]:
    """A chart for each model; a run that does not fit has no bar."""
    paper = summary.paper
    platforms = [each.name for each in paper.platforms.values()]
    charts: list[Block] = []
    for model in paper.models:
        bars = []
        for colour, (server, about) in enumerate(paper.servers.items()):
            runs = [results[f"{platform}/{model}/{server}"] for platform in paper.platforms]
            values = [None if run.reason else run.measure("throughput") for run in runs]
            bars.append(Series(about.name, list(range(len(runs))), values, kind="bars", colour=colour))
        charts.append(
            Chart(
                title=f"Llama2-{model.upper()}",
                x_label="",
                y_label="throughput (output tokens/s)",
                series=bars,
                origin=ORIGIN,
                categories=platforms,
                note="A run without a bar does not fit the GPUs' memory.",
            )
        )
    return charts


def latencies(figure: paper_layout.Figure, results: Mapping[str, Result]) -> list[Block]:
    """A chart for each panel of the figure."""
    charts: list[Block] = []
    for panel in figure.panels:
        curves = []
        for colour, (label, run) in enumerate(panel.runs.items()):
            x_ms, share = series.cdf(Distribution(results[run].latencies_s, 1000.0), STEPS)
            if len(x_ms):
                curves.append(Series(label, rounded(x_ms / 1000), rounded(share), kind="step", colour=colour))
        unfit = [label for label, run in panel.runs.items() if results[run].reason]
        notes = [f"Does not fit: {', '.join(unfit)}."] if unfit else []
        if any(len(results[run].latencies_s) > STEPS for run in panel.runs.values()):
            notes.append(cdf_rule(STEPS))
        charts.append(
            Chart(
                title=panel.title,
                x_label="latency (s)",
                y_label="share of requests",
                series=curves,
                origin=ORIGIN,
                quantile=True,
                log=("x",),
                note=" ".join(notes),
            )
        )
    return charts


def _variants(summary: PaperSummary) -> dict[str, RunNumbers | DoesNotFit]:
    return {f"{summary.paper.name(each.variant.run)}: {each.variant.why}": each.changed for each in summary.variants}


def _runs(runs: Mapping[str, RunNumbers | DoesNotFit]) -> Table:
    rows: list[list[Cell]] = []
    for name, of in runs.items():
        if isinstance(of, DoesNotFit):
            rows.append([name, *[Number("-")] * (len(COLUMNS) - 1), of.reason])
        else:
            values = (of.kv_tokens, of.throughput, of.p50_s, of.p60_s, of.p100_s, of.refused, of.preemptions)
            rows.append([name, *map(cell, values), ""])
    return Table(["platform, model, server", *COLUMNS], rows)
