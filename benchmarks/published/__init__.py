"""What others measured and published, predicted: every row of the CSVs in `data`, misses included.

A row is a run: its server, its load and the means that its source printed. `data/sources.json` holds, by
source, what is assumed where the source is silent. An assumption is of all rows of its source, never of one, and each
source has alternatives that say what another assumption gives. Nothing here is fitted to a row.
"""

from __future__ import annotations

import csv
import functools
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from benchmarks.published.runs import Conditions, Means, Row, Server, play
from servers.simulator.build import EmulationError
from servers.simulator.hardware import HardwareError

DATA = Path(__file__).parent / "data"
EMULATED = "EMULATED (modelled hardware and servers; beside it what others measured)"
METRICS = Means._fields
NAMES = dict(zip(METRICS, ("ttft", "tpot", "e2e", "throughput"), strict=True))
TARGETS = {"ttft_ms": 0.20, "tpot_ms": 0.10, "e2e_ms": 0.10, "output_tokens_per_s": 0.10}  # of the median error


Named = TypeVar("Named", bound=msgspec.Struct)


class Alternative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another assumption for all rows of a source; what it does not name stays."""

    why: str
    conditions: dict[str, Any] = {}
    servers: dict[str, Any] = {}


class Source(Conditions, frozen=True, kw_only=True):
    """One publication, and the conditions of its runs. `assumptions`: of all its rows, where it is silent or where the
    model is."""

    name: str
    title: str
    file: str
    servers: Server
    assumptions: tuple[str, ...]
    alternatives: tuple[Alternative, ...] = ()

    def conditions(self) -> Conditions:
        return Conditions(**{name: getattr(self, name) for name in Conditions.__struct_fields__})

    def under(self, alternative: Alternative) -> tuple[Server, Conditions]:
        """Server and conditions with what the alternative names in place of its own."""
        return _with(self.servers, alternative.servers), _with(self.conditions(), alternative.conditions)

    def facts(self) -> dict[str, str]:
        """Of its CSV's head: `source` (URL), `licence`, `commit`, `read` (when) and `what`."""
        lines = (DATA / self.file).read_text(encoding="utf-8").splitlines()
        head = (line.removeprefix("# ").partition(": ") for line in lines if line.startswith("# "))
        return {key: value for key, _, value in head}

    def rows(self) -> list[Row]:
        lines = (DATA / self.file).read_text(encoding="utf-8").splitlines()
        table = csv.DictReader(line for line in lines if not line.startswith("#"))
        return [
            msgspec.convert({key: value or None for key, value in each.items() if value or key == "quantization"},
                            Row, strict=False)
            for each in table
        ]  # fmt: skip


def _with(assumed: Named, named: Mapping[str, Any]) -> Named:
    """Raises msgspec.ValidationError for a name or a value that `assumed` cannot have."""
    return msgspec.convert(msgspec.to_builtins(assumed) | dict(named), type(assumed))


@dataclass(frozen=True)
class Result:
    """A row and what is predicted for it; `reason`: why nothing is."""

    source: str
    row: Row
    predicted: Means
    measured: Means
    reason: str = ""

    def error(self, metric: str) -> float:
        """Predicted over measured, less 1; NaN where one of them is not there."""
        return float(getattr(self.predicted, metric) / getattr(self.measured, metric) - 1)


@dataclass(frozen=True)
class Errors:
    """Of one metric of one source. median, worst: of the magnitudes; bias: median with its sign."""

    rows: int
    median: float
    bias: float
    worst: float
    worst_run: str


@functools.cache
def sources() -> tuple[Source, ...]:
    return msgspec.json.decode((DATA / "sources.json").read_bytes(), type=tuple[Source, ...])


def measured(row: Row, conditions: Conditions) -> Means:
    """As published. Sources of closed loops print ttft and tpot alone: their e2e is ttft and tpot of the mean reply's
    other tokens."""
    e2e_ms = row.e2e_ms
    if e2e_ms is None and row.ttft_ms is not None and row.tpot_ms is not None:
        e2e_ms = row.ttft_ms + row.tpot_ms * (conditions.mean_tokens(row.output_tokens) - 1)
    values = (row.ttft_ms, row.tpot_ms, e2e_ms, row.output_tokens_per_s)
    return Means(*(math.nan if value is None else value for value in values))


def predict_source(
    source: Source, seed: int, alternative: Alternative | None = None, rows: Iterable[Row] | None = None
) -> list[Result]:
    """Of every row of it, or of `rows`."""
    server, conditions = (source.servers, source.conditions()) if alternative is None else source.under(alternative)
    results = []
    for row in source.rows() if rows is None else rows:
        reason = ""
        try:
            predicted = play(row, server, conditions, seed)
        except (EmulationError, HardwareError) as error:
            predicted, reason = Means(*[math.nan] * len(METRICS)), str(error)
        results.append(Result(source.name, row, predicted, measured(row, conditions), reason))
    return results


def errors(results: Iterable[Result]) -> dict[str, Errors]:
    """By metric, of those that its source printed."""
    found = {}
    for metric in METRICS:
        signed = [(each.error(metric), each.row.run) for each in results if not math.isnan(each.error(metric))]
        if signed:
            worst, run = max(signed, key=lambda pair: abs(pair[0]))
            values = np.array([value for value, _ in signed])
            found[metric] = Errors(len(signed), float(np.median(np.abs(values))), float(np.median(values)), worst, run)
    return found


@dataclass(frozen=True)
class Predicted:
    """Every source under its assumptions, and under each of its alternatives."""

    results: dict[str, list[Result]]
    alternatives: dict[str, list[tuple[str, list[Result]]]]

    def all(self) -> Iterator[Result]:
        for results in self.results.values():
            yield from results


def predict_all(seed: int, report_progress: Callable[[str], None] = lambda _: None) -> Predicted:
    """report_progress: gets a line when a source is through."""
    results, alternatives = {}, {}
    for source in sources():
        results[source.name] = predict_source(source, seed)
        alternatives[source.name] = [(each.why, predict_source(source, seed, each)) for each in source.alternatives]
        report_progress(f"{source.name}: {len(results[source.name])} rows")
    return Predicted(results, alternatives)


def table_csv(results: Iterable[Result]) -> str:
    """One line a row: predicted, measured and the error of each metric; empty where there is none."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        ["source", "run", "emulated", *(f"{kind}_{m}" for m in METRICS for kind in ("predicted", "measured", "off"))]
    )
    for each in results:
        cells = []
        for metric in METRICS:
            cells += [_cell(getattr(each.predicted, metric), 2), _cell(getattr(each.measured, metric), 2)]
            cells.append(_cell(each.error(metric), 4))
        writer.writerow([each.source, each.row.run, each.reason or "yes", *cells])
    return file.getvalue()


def _cell(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def summary_table(predicted: Predicted) -> list[str]:
    """Markdown: by source and metric the median and the worst error, beside the target."""
    lines = [
        "| source | rows | | median off | with its sign | worst | of | target for the median |",
        "|---|---:|---|---:|---:|---:|---|---|",
    ]
    for source in sources():
        results = predicted.results[source.name]
        for metric, found in errors(results).items():
            target = TARGETS[metric]
            verdict = "met" if found.median <= target else "**missed**"
            lines.append(
                f"| {source.title} | {found.rows} | {NAMES[metric]} | {found.median:.1%} | {found.bias:+.1%} | "
                f"{found.worst:+.1%} | {found.worst_run} | {target:.0%}: {verdict} |"
            )
        reasons = [f"{each.row.run}: {each.reason}" for each in results if each.reason]
        lines += [f"| {source.title} | {len(reasons)} | not expressed | | | | {text} | |" for text in reasons[:1]]
    return lines


def alternatives_table(predicted: Predicted) -> list[str]:
    """Markdown: median errors by source and assumption."""
    lines = ["| source | assumption | ttft | tpot | e2e | throughput |", "|---|---|---:|---:|---:|---:|"]
    for source in sources():
        cases = [("as assumed", predicted.results[source.name]), *predicted.alternatives[source.name]]
        for why, results in cases:
            found = errors(results)
            cells = (f"{found[metric].median:.1%}" if metric in found else "" for metric in METRICS)
            lines.append(f"| {source.name} | {why} | " + " | ".join(cells) + " |")
    return lines


def markdown(predicted: Predicted) -> str:
    """The tables, as `published.md` holds them."""
    lines = [
        f"# Published measurements, predicted: {EMULATED}", "",
        "Off: predicted over measured, less 1. Medians and worst errors are of magnitudes.", "",
        *summary_table(predicted), "", "## Under other assumptions: median errors", "",
        *alternatives_table(predicted), "", "## What is assumed", "",
    ]  # fmt: skip
    for source in sources():
        facts = source.facts()
        lines += [
            f"**{source.title}**: {facts['what']}. Source: <{facts['source']}>, {facts['commit']}, read "
            f"{facts['read']}. Licence: {facts['licence']}.", "",
            *(f"- {assumption}" for assumption in source.assumptions), "",
        ]  # fmt: skip
    lines += ["## Every row (emulated beside measured)", "", *_rows_table(predicted.all())]
    return "\n".join(lines) + "\n"


def _rows_table(results: Iterable[Result]) -> Iterator[str]:
    yield "| source | run | " + " | ".join(f"{name} predicted | measured | off" for name in NAMES.values()) + " |"
    yield "|---|---|" + "---:|" * 3 * len(METRICS)
    for each in results:
        cells = []
        for metric in METRICS:
            pair = getattr(each.predicted, metric), getattr(each.measured, metric)
            none = math.isnan(pair[1])
            cells += ["", "", ""] if none else [*(f"{value:,.1f}" for value in pair), f"{each.error(metric):+.1%}"]
        yield f"| {each.source} | {each.row.run} | " + " | ".join(cells) + " |"


def as_json(predicted: Predicted, seed: int) -> bytes:
    """Errors by source, for programs."""
    return msgspec.json.encode(
        {
            "emulated": True,
            "seed": seed,
            "sources": {
                source.name: {
                    **source.facts(),
                    "rows": len(predicted.results[source.name]),
                    "not_expressed": {
                        each.row.run: each.reason for each in predicted.results[source.name] if each.reason
                    },
                    "assumptions": source.assumptions,
                    "errors": {
                        NAMES[metric]: msgspec.to_builtins(found) | {"target": TARGETS[metric]}
                        for metric, found in errors(predicted.results[source.name]).items()
                    },
                    "alternatives": {
                        why: {NAMES[metric]: found.median for metric, found in errors(results).items()}
                        for why, results in predicted.alternatives[source.name]
                    },
                }
                for source in sources()
            },
        }
    )
