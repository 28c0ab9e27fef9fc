"""What pages of several runs have in common: the way to the page of each run, verdicts, distributions, origin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from loadgen import rundir
from loadgen.document.content import Block, Cell, Items, Link, ListItem, Table, Tone
from loadgen.report import text
from loadgen.report.metrics import Distribution
from loadgen.report.pages import parts
from loadgen.report.pages import run as run_page
from loadgen.report.pages.charts import LATENCIES
from loadgen.report.pages.parts import Curve
from loadgen.report.repeats import POOLED, RunVerdict


def href(run: Path, page: Path) -> str:
    """From a page in the directory `page` to that of a run, as a relative path; empty where the run has none."""
    return parts.href(run / run_page.FILE, page)


def linked(text: str, href: str) -> Cell:
    return Link(text, href) if href else text


def plain(name: str) -> str:
    """A metric as a reader names it: `ttft p99`, `requests/s`."""
    return name.replace("_per_s", "/s").replace("_", " ")


def label(name: str) -> str:
    """With its unit: `ttft p99, ms`."""
    return plain(name) + ("" if name.endswith("_per_s") else ", ms")


def origin(runs: Iterable[Path]) -> str:
    """Where numbers made of all these runs come from; a run without a manifest says nothing."""
    origins = []
    for run in runs:
        try:
            origins.append(text.origin(rundir.read_manifest(run)))
        except rundir.RunError:
            continue
    return parts.shared_origin(origins)


def tone(runs: Sequence[RunVerdict], planned: int) -> Tone:
    """Bad where a run is INVALID, a warning where fewer than were planned came to their end."""
    finished = [run for run in runs if run.finished]
    if not all(run.valid for run in finished):
        return "bad"
    return "good" if len(finished) == planned else "warning"


def stamp(runs: Sequence[RunVerdict]) -> str:
    """What figures made of these runs say first."""
    valid = [run.valid for run in runs if run.finished]
    return "" if all(valid) else "PARTLY INVALID" if any(valid) else "INVALID"


def verdict(runs: Sequence[RunVerdict], planned: int) -> str:
    """One line over all of them."""
    finished = [run for run in runs if run.finished]
    invalid = sum(not run.valid for run in finished)
    of = f"{len(finished)} of {planned} runs finished"
    if len(finished) == planned:
        of = f"all {planned} runs finished" if planned > 1 else "the run finished"
    if not finished:
        return f"{of}; there is nothing to quote."
    if invalid:
        return f"INVALID: {of}, and {invalid} of them cannot be trusted; do not quote these numbers."
    return f"VALID: {of}, and each of them can be trusted."


def findings(runs: Sequence[RunVerdict], *, counted: bool = False) -> list[Block]:
    """What is wrong with the runs, one item a finding, what makes a run INVALID first; nothing where nothing is.
    counted: numbers hold also runs that did not finish."""
    unfinished = [run.directory for run in runs if not run.finished]
    head = "not finished" if counted else "not finished, in no number"
    items = [ListItem(head, ", ".join(unfinished), tone="warning")] if unfinished else []
    severities: tuple[tuple[str, Tone], ...] = (("INVALID", "bad"), ("warning", "warning"))
    for severity, tone in severities:
        by_code: dict[str, dict[str, str]] = {}
        for run in runs:
            for finding in run.reasons if severity == "INVALID" else run.warnings:
                code, _, message = finding.partition(": ")
                by_code.setdefault(code, {})[run.directory] = message
        items += [_finding(f"{severity} {code}", of, len(runs), tone) for code, of in by_code.items()]
    return [Items(items)] if items else []


def _finding(head: str, messages: Mapping[str, str], runs: int, tone: Tone) -> ListItem:
    """messages: of the runs that have the finding, by their directories. One of them stands for all."""
    first, message = next(iter(messages.items()))
    if runs == 1:
        return ListItem(head, message, tone=tone)
    where = first if len(messages) == 1 else f"{len(messages)} of {runs} runs, such as {first}"
    return ListItem(head, f"in {where}: {message}", tone=tone)


def state(run: RunVerdict) -> str:
    return ("VALID" if run.valid else "INVALID") if run.finished else "not finished"


def codes(run: RunVerdict) -> str:
    """The findings of a run by their codes alone."""
    return ", ".join(finding.partition(":")[0] for finding in (*run.reasons, *run.warnings)) or "-"


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    """What was measured, a row a fact."""
    return Table(["", "value"], rows, numeric=False)


def cdfs(samples: Mapping[str, Mapping[str, Distribution]], origins: Mapping[str, str]) -> list[Block]:
    """A chart for each latency, with a curve for each name of `samples`. origins: by that name."""
    charts: list[Block] = []
    for metric in POOLED:
        curves = [
            Curve(label, of[metric], place, origins.get(label, ""))
            for place, (label, of) in enumerate(samples.items())
            if metric in of and len(of[metric].values)
        ]
        if curves:
            charts.append(parts.cdf(LATENCIES[metric], curves, f"{metric.removesuffix('_ms')} (ms)"))
    return charts
