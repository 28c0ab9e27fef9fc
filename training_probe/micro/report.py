"""From the points of a micro-benchmark to what is read: report.json, report.md, report.html, tables.tex and
figures.

`build` and `document` are pure. A point without a number stands in them with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import msgspec

from loadgen.report.finding import Finding
from loadgen.rundir import Machine
from training_probe.findings import Verdict, of_points, sentence, verdict_of
from training_probe.micro import charts, tables
from training_probe.micro.presets import TITLES
from training_probe.micro.run import MicroManifest
from training_probe.points import About, Dtype, Gemm, Kind, Measured, PointOutcome
from training_probe.report.build import counted, doubtful, surroundings, tone_of
from training_probe.report.document import TrainingReport

SCHEMA = "training_probe.micro/1"
NAMES = {"gemm": "Matrix products", "memcpy": "Memory copies", "collectives": "Collectives"}


class PeakFlops(msgspec.Struct):
    """FLOP/s by dtype."""

    data_sheet: dict[Dtype, float]
    measured: dict[Dtype, float]


class PointCounts(msgspec.Struct):
    planned: int
    all: int
    by_outcome: dict[str, int]


class MicroReport(msgspec.Struct, kw_only=True):
    """report.json of a micro-benchmark, schema `training_probe.micro/1`. results: all points, with what follows from
    their times."""

    schema: str = SCHEMA
    run_id: str
    version: str
    started_unix_s: float
    kind: Kind
    preset: str | None
    device: str
    device_name: str
    ranks: int
    p2p: str
    argv: list[str]
    machine: Machine
    versions: dict[str, str]
    l2_bytes: int | None
    peak_flops_per_s: PeakFlops
    points: PointCounts
    verdict: Verdict = "VALID"
    findings: list[Finding] = []
    results: list[dict[str, Any]]


def build(results: Sequence[Measured], manifest: MicroManifest, about: About | None) -> MicroReport:
    outcomes = Counter(result.outcome for result in results)
    by_outcome = {outcome: outcomes[outcome] for outcome in get_args(PointOutcome) if outcomes[outcome]}
    known = tables.peaks(results, manifest.device_name)
    own = set(MicroReport.__struct_fields__) & set(MicroManifest.__struct_fields__) - {"schema", "argv"}
    findings = of_points(results)
    return MicroReport(
        verdict="INVALID" if outcomes["wrong"] else verdict_of(findings),
        findings=findings,
        **{name: getattr(manifest, name) for name in own},
        argv=list(manifest.argv),
        versions=about.versions if about else {},
        l2_bytes=about.l2_bytes if about else None,
        peak_flops_per_s=PeakFlops(known.catalog, known.measured),
        points=PointCounts(len(manifest.task.points), len(results), by_outcome),
        results=[_derived(result, known) for result in results],
    )


def _derived(result: Measured, known: tables.Peaks) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(result)
    if isinstance(result.point, Gemm):
        speed = result.flops_per_s
        row["flops_per_s"] = speed
        row["data_sheet_peak_ratio"] = tables.share(speed, known.catalog.get(result.point.dtype))
        row["measured_peak_ratio"] = tables.share(speed, known.measured.get(result.point.dtype))
    else:
        row["bytes_per_s"] = result.bytes_per_s
        row["bus_bytes_per_s"] = result.bus_bytes_per_s
    return row


def _platform(report: MicroReport) -> str:
    if report.kind != "collectives":
        return report.device_name
    if report.device == "cpu":
        return f"{report.ranks} processes on the CPU (gloo)"
    return f"{report.ranks} x {report.device_name}"


def verdict(report: MicroReport) -> str:
    points = report.points
    counts = ", ".join(f"{count} {name}" for name, count in points.by_outcome.items())
    listed = f": {counts}." if counts else "."
    return counted(points.all, points.planned, "point") + listed + doubtful(report.verdict)


def facts(report: MicroReport) -> Iterator[str]:
    """What was measured and how, a sentence or two each; plain text that is not escaped."""
    for dtype, speed in report.peak_flops_per_s.measured.items():
        sheet = report.peak_flops_per_s.data_sheet.get(dtype)
        beside = f", {100 * speed / sheet:.1f} % of the data sheet's {sheet / 1e12:.1f}" if sheet else ""
        yield f"Measured peak, {dtype}: {speed / 1e12:.4g} TFLOP/s{beside}."
    if report.p2p:
        yield f"P2P: {report.p2p}."
    yield "Times are medians over samples; 10 % and 90 % are percentiles; a sample is the mean of many launches."
    if report.versions:
        yield "Versions: " + ", ".join(f"{name} {version}" for name, version in report.versions.items()) + "."


def document(
    results: Sequence[Measured], manifest: MicroManifest, about: About | None, notes: Sequence[str] = ()
) -> TrainingReport:
    """The report of a micro-benchmark, as `micro` and `report` show and write it. notes: findings on the files
    themselves."""
    report = build(results, manifest, about)
    missing = report.points.planned - report.points.all
    stopped = [f"{missing} of {report.points.planned} points were not reached: it was stopped."] if missing > 0 else []
    preset = f", as {TITLES[report.preset]}" if report.preset in TITLES else ""

    return TrainingReport(
        report=report,
        run_id=report.run_id,
        version=report.version,
        argv=report.argv,
        title=f"{NAMES[report.kind]} on {_platform(report)}{preset}",
        verdict=verdict(report),
        tone=tone_of(report.points.by_outcome, [*stopped, *report.findings], report.verdict),
        invalid=report.verdict == "INVALID",
        findings=[*notes, *stopped, *map(sentence, report.findings)],
        facts=[*facts(report)],
        measured={
            "benchmark": NAMES[report.kind],
            "device": _platform(report),
            "preset": report.preset or "",
            "L2 cache": f"{report.l2_bytes / (1 << 20):.4g} MiB" if report.l2_bytes else "",
            "nodes": ", ".join(manifest.nodes),
            **surroundings(msgspec.to_builtins(manifest)),
        },
        tables=tables.build(results, report.device_name),
        charts=lambda _: charts.build(results, report.device_name),
    )
