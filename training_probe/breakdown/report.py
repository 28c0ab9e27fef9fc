"""From traced cells to what is read: report.json, report.md, report.html, tables.tex and the
figure of parts.

A cell that failed stands in it with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from loadgen.report.finding import Finding
from training_probe import paper
from training_probe.breakdown import charts, tables
from training_probe.breakdown.run import Breakdown
from training_probe.findings import Traced, Verdict, of_breakdowns, sentence, verdict_of
from training_probe.report.build import (
    ManifestFields,
    ReportHead,
    counted,
    doubtful,
    planned,
    shown,
    surroundings,
    tone_of,
)
from training_probe.report.document import TrainingReport

SCHEMA = "training_probe.breakdown_report/1"
NOTHING = "No cell was traced to its end."


class TracedCounts(msgspec.Struct):
    """planned: by the manifest, None without one; missing: of these, without a result."""

    all: int
    by_outcome: dict[str, int]
    planned: int | None = None
    missing: int = 0


class BreakdownReport(ReportHead, kw_only=True):
    """report.json of a breakdown, schema `training_probe.breakdown_report/1`. explained_ratio: by the cell's name."""

    schema: str = SCHEMA
    verdict: Verdict = "VALID"
    findings: Sequence[Finding] = ()
    cells: TracedCounts
    explained_ratio: dict[str, float]
    results: list[Breakdown]


def build(breakdowns: Sequence[Breakdown], manifest: ManifestFields) -> BreakdownReport:
    findings = findings_of(breakdowns)
    return BreakdownReport(
        verdict=verdict_of(findings),
        findings=findings,
        **ReportHead.fields_of(manifest),
        platform=str(manifest.get("platform") or ""),
        cells=TracedCounts(
            len(breakdowns), dict(Counter(each.outcome for each in breakdowns)), *planned(manifest, breakdowns)
        ),
        explained_ratio={
            each.cell.name: each.attribution.explained_ratio for each in breakdowns if each.attribution is not None
        },
        results=list(breakdowns),
    )


def findings_of(breakdowns: Sequence[Breakdown]) -> list[Finding]:
    ok = [each for each in breakdowns if each.outcome == "ok"]
    return of_breakdowns(
        {
            each.cell.name: Traced(each.bare_step_s, each.traced_step_s, each.attribution.steps, each.bare_step_std_s)
            for each in ok
            if each.bare_step_s and each.traced_step_s and each.attribution is not None
        },
        {each.cell.name: each.conditions for each in ok if each.conditions is not None},
    )


def _failed(breakdowns: Sequence[Breakdown]) -> list[str]:
    return [f"{each.cell.name}: {each.outcome}: {each.reason}" for each in breakdowns if each.outcome != "ok"]


def document(breakdowns: Sequence[Breakdown], manifest: ManifestFields, notes: Sequence[str] = ()) -> TrainingReport:
    """The report of a breakdown, as `breakdown` and `report` write it. notes: findings on the files themselves."""
    report, made = build(breakdowns, manifest), tables.build(breakdowns)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in report.cells.by_outcome.items())
    return TrainingReport(
        report=report,
        run_id=report.run_id,
        version=report.version,
        argv=report.argv,
        title=f"Where a training step goes on {report.platform or 'this machine'}",
        verdict=counted(report.cells.all, report.cells.planned, "traced cell")
        + (f": {counts}." if counts else ".")
        + ("" if made else f" {NOTHING}")
        + doubtful(report.verdict),
        tone=tone_of(report.cells.by_outcome, report.findings, report.verdict),
        invalid=report.verdict == "INVALID",
        findings=[*notes, *map(sentence, report.findings), *_failed(breakdowns)],
        measured={
            "GPUs": report.platform,
            "models": ", ".join(dict.fromkeys(paper.model_name(each.cell.model) for each in breakdowns)),
            "cells": ", ".join(each.cell.name for each in breakdowns),
            "preset": shown(report.preset),
            **surroundings(manifest),
        },
        traces={each.cell.name: each.trace for each in breakdowns if each.trace},
        tables=made,
        charts=lambda _: charts.build(breakdowns),
    )
