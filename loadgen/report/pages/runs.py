"""The page of several runs over each other: each has a colour in all charts, and is switched by its name."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from loadgen.document.content import (
    Block,
    Cell,
    Code,
    Document,
    Items,
    Link,
    ListItem,
    Section,
    Table,
    Text,
    Tone,
    cell,
)
from loadgen.report import text
from loadgen.report.pages import charts, intervals, parts, run
from loadgen.report.pages.charts import Shown


def page(runs: Sequence[Shown], hrefs: Sequence[str]) -> Document:
    """hrefs: where the page of each run is, as a relative path; "" where it has none."""
    prompts = charts.by_prompt(runs)
    invalid = [each.name for each in runs if not each.report.verdict.valid]
    tones = {run.tone(each.report) for each in runs}
    worst: Tone = next((tone for tone in ("bad", "warning") if tone in tones), "good")
    sections = [
        Section("verdict", "Verdicts", [_verdicts(runs)]),
        Section("numbers", "Numbers", [run.rates(runs), run.latency_intervals(runs), Text(intervals.MEANING)]),
        Section("latency", "Latency distributions", charts.latencies(runs)),
        Section("time", "Over time", run.over_time(runs)),
        *([] if prompts is None else [Section("prompts", "Prompt length", [prompts])]),
        Section("setup", "What was measured on what", list(_setup(runs, hrefs))),
        Section("repeat", "The commands", list(_commands(runs))),
    ]
    return Document(
        title=f"{len(runs)} runs",
        verdict=f"INVALID: {', '.join(invalid)}; do not quote these numbers" if invalid else "VALID, all of them",
        sections=sections,
        tone=worst,
        stamp="" if not invalid else "INVALID" if len(invalid) == len(runs) else "PARTLY INVALID",
        origin=parts.shared_origin(each.origin for each in runs),
        footer=f"Each curve is one run; loadgen compare tells whether two differ. {runs[0].report.convention_differs}",
    )


def _verdicts(runs: Sequence[Shown]) -> Items:
    return Items(
        items=[
            ListItem(
                head=f"{each.name}: {text.verdict_line(each.report)}",
                text=" ".join(f.message for f in each.report.verdict.findings if f.severity != "info"),
                tone=run.tone(each.report),
            )
            for each in runs
        ]
    )


def _setup(runs: Sequence[Shown], hrefs: Sequence[str]) -> Iterator[Block]:
    rows: list[list[Cell]] = [
        [
            Link(each.name, href) if href else each.name,
            each.report.model,
            f"{each.report.backend} {each.report.server_version or '(version unknown)'}",
            each.report.arrival,
            cell(each.report.requests.ok),
            cell(each.report.requests.failed),
            each.origin or "measured",
        ]
        for each, href in zip(runs, hrefs, strict=True)
    ]
    headers = ["run", "model", "server", "load", "requests ok", "failed", "origin"]
    yield Table(headers=headers, rows=rows, numeric=False)
    if differing := parts.differing([each.manifest for each in runs]):
        yield run.differing(differing, [each.name for each in runs], "What was set differently")


def _commands(runs: Sequence[Shown]) -> Iterator[Block]:
    for each in runs:
        yield Text(each.name)
        yield Code(shlex.join(each.manifest.argv))
