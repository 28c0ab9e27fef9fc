"""The runs of a sweep together: `sweep.json` (schema `loadgen.sweep/1`).

`sweep.json` holds what was planned, which is written before anything starts and never changes, what happened between
the runs, and the results, which are made of the run directories alone and can be made again. `pages/sweep.py`
shows them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from backends import foreign_files
from backends.foreign_files import is_inside
from backends.untrusted import UNDECODABLE, escaped, reason, without_secrets
from loadgen import rundir
from loadgen.document import files
from loadgen.document.files import ReportError
from loadgen.report import build, repeats
from loadgen.report.metrics import ITEMS, Distribution, price_per_million
from loadgen.report.repeats import Repeat, RunVerdict
from loadgen.report.schema import Report
from loadgen.report.text import QUICK_ACKS
from loadgen.rundir.records import RecordsError

SCHEMA, FILE = "loadgen.sweep/1", "sweep.json"
RUN_NAME = re.compile(r"[a-z][a-zA-Z0-9_.=+-]{0,160}")  # of a directory in the sweep's
INTERACTIVITY = "interactivity_tokens_per_s"
BY_TOKENS = ("output_tokens_per_s", "total_tokens_per_s")
PER_GPU = "_per_gpu"
PRICE = "price_per_million_output_tokens"
PERCENTILES = ("p50", "p90", "p99")
LATENCIES = {"ttft": "Time to first token", "tpot": "Time per output token", "e2el": "End-to-end latency"}

State = Literal["finished", "unfinished", "waiting"]


class PlannedRun(msgspec.Struct, frozen=True):
    """One run of a point. directory: in the sweep's. value: of the option that varies, as it would be typed."""

    directory: str
    value: str
    seed: int


class SweepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What was planned. varies: the option; unit: of its values, empty where it has none. order: the runs as they were
    to follow each other, shuffled by `seed`. options: of the sweep, by their names."""

    varies: str
    unit: str
    values: list[str]
    repeat: int
    seed: int
    order: list[PlannedRun]
    options: dict[str, Any]


class IdleWait(msgspec.Struct, frozen=True, kw_only=True):
    """How the server was before a run: whether it was idle after `waited_s` seconds, by its own metrics or by how long
    it took for a probe. detail: what it still had to do, or why nothing could tell."""

    by: Literal["metrics", "probe", "nothing"]
    idle: bool
    waited_s: float
    detail: str = ""


class SweepHead(msgspec.Struct, kw_only=True):
    """What sweep.json holds but for its results. starts: how often the sweep was begun or resumed; a server that
    loadgen starts is another one each time. waits: before each run, by its directory."""

    schema: str = SCHEMA
    version: str
    started_unix_s: float
    argv: list[str]
    plan: SweepPlan
    starts: int = 0
    waits: dict[str, IdleWait] = {}


class SweptRun(RunVerdict, frozen=True, kw_only=True):
    """One run, in the order of the plan. Of one that waits, run_id is empty and valid is false."""

    value: str
    seed: int
    state: State


class SweptPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One value, over its finished runs. metrics: as repeat.json has them, with interactivity (1 / tpot p50, tokens/s
    that one user sees) and, where the number of GPUs is known, throughput a GPU. No run finished: no metrics.
    fell_behind: in a run of it the server did."""

    value: str
    runs: list[str]
    valid: bool
    requests_ok: int
    requests_failed: int
    metrics: dict[str, Repeat]
    fell_behind: bool = False


class Swept(SweepHead, kw_only=True):
    """sweep.json. gpus: how many share the model; None on a CPU, or where nothing says. complete: every run finished.
    steady: whether throughput and latencies are those of the runs' steady windows, which all finished runs have but
    those whose server fell behind: their throughput is that of the whole run.
    pareto: by throughput, the values of the points that no other one beats in both throughput and interactivity."""

    backend: str
    model: str
    emulated: bool
    gpus: int | None
    complete: bool
    runs: list[SweptRun]
    points: list[SweptPoint]
    pareto: dict[str, list[str]]
    steady: bool = False


def read_sweep(directory: Path) -> SweepHead:
    """What was planned and has happened. Raises RunError."""
    path = directory / FILE
    try:
        sweep = msgspec.json.decode(foreign_files.read_bytes(path), type=SweepHead)
    except FileNotFoundError:
        raise rundir.RunError(f"{directory} holds no {FILE}; begin a sweep there with --out {directory}.") from None
    except OSError as error:
        raise rundir.RunError(f"cannot read {path}: {error.strerror or error}; name a sweep's directory.") from None
    except UNDECODABLE as error:
        raise rundir.RunError(f"{path} is not a sweep of this version: {reason(error)}.") from None
    for run in sweep.plan.order:
        if not RUN_NAME.fullmatch(run.directory):
            raise rundir.RunError(f"{path} is not a sweep of this version: '{escaped(run.directory)}' is no run of it.")
    return sweep


class _Listed(msgspec.Struct, frozen=True):
    directory: str
    state: str


class _Results(msgspec.Struct, frozen=True):
    runs: list[_Listed] = []


def reported(directory: Path) -> set[str]:
    """The runs that sweep.json has as finished: their own reports were written before it."""
    try:
        results = msgspec.json.decode(foreign_files.read_bytes(directory / FILE), type=_Results)
    except (OSError, *UNDECODABLE):
        return set()
    return {run.directory for run in results.runs if run.state == "finished"}


def write(directory: Path, swept: Swept) -> None:
    """Writes sweep.json, without secrets. Raises ReportError."""
    files.save(directory, {FILE: files.json_text(without_secrets(swept))})


def state_of(run: Path) -> tuple[State, Report | None]:
    """How far a run came, from its records. It finished where every client recorded its end and the server lived."""
    if not is_inside(run, run.parent):
        return "unfinished", None
    if not run.is_dir() or not any(run.iterdir()):
        return "waiting", None
    try:
        report = build.from_directory(run)[0]
    except (rundir.RunError, RecordsError, ReportError):
        return "unfinished", None
    died = report.launch is not None and isinstance(report.launch.ended, str)
    return "finished" if repeats.verdict(run, report).finished and not died else "unfinished", report


def read(directory: Path) -> Swept:
    """The sweep with the results of its runs as they are now. Raises RunError."""
    sweep = read_sweep(directory)
    return of_runs(sweep, {run.directory: state_of(directory / run.directory) for run in sweep.plan.order})


def of_runs(sweep: SweepHead, runs: Mapping[str, tuple[State, Report | None]]) -> Swept:
    """The results, of every run of the plan by its directory."""
    reports = {name: report for name, (state, report) in runs.items() if report is not None and state == "finished"}
    any_report = next(iter(reports.values()), None) or next((each for _, each in runs.values() if each), None)
    gpus = _shared(list(reports.values()), "gpus")
    compared = [report for report in reports.values() if not _fell_behind(report)]
    windows = [None if report.steady is None else report.steady.window for report in compared]
    steady = bool(windows) and None not in windows
    of_run = partial(_values, gpus=gpus, steady=steady)
    points = [_point(sweep, value, reports, of_run) for value in sweep.plan.values]
    kept = {name: getattr(sweep, name) for name in SweepHead.__struct_fields__}
    return Swept(
        **kept,
        backend=any_report.backend if any_report else "",
        model=any_report.model if any_report else "",
        emulated=any(report.emulated for report in reports.values()),
        gpus=gpus,
        steady=steady,
        complete=len(reports) == len(sweep.plan.order),
        runs=[_run(planned, *runs[planned.directory]) for planned in sweep.plan.order],
        points=points,
        pareto={name: front(points, name) for name in BY_TOKENS},
    )


def _run(planned: PlannedRun, state: State, report: Report | None) -> SweptRun:
    if report is None:
        found = RunVerdict(directory=planned.directory, run_id="", valid=False, finished=False, reasons=[])
    else:
        found = repeats.verdict(Path(planned.directory), report)
    facts = msgspec.structs.asdict(found) | {"finished": state == "finished"}
    return SweptRun(**facts, value=planned.value, seed=planned.seed, state=state)


def _point(
    sweep: SweepHead, value: str, reports: Mapping[str, Report], values: Callable[[Report], dict[str, float | None]]
) -> SweptPoint:
    runs = sorted((each for each in sweep.plan.order if each.value == value), key=lambda each: each.seed)
    mine = {each.directory: reports[each.directory] for each in runs if each.directory in reports}
    by_run = [values(report) for report in mine.values()]
    return SweptPoint(
        value=value,
        runs=list(mine),
        valid=all(report.verdict.valid for report in mine.values()),
        requests_ok=sum(report.requests.ok for report in mine.values()),
        requests_failed=sum(report.requests.failed for report in mine.values()),
        fell_behind=any(_fell_behind(report) for report in mine.values()),
        metrics={name: repeats.over_runs([each[name] for each in by_run]) for name in (by_run[0] if by_run else ())},
    )


def _fell_behind(report: Report) -> bool:
    seen = report.steady.keeping_up if report.steady is not None else None
    return seen is not None and seen.word == "fell_behind"


def _values(report: Report, gpus: int | None, steady: bool) -> dict[str, float | None]:
    """A run's metrics by name, interactivity, and throughput a GPU where their number is known."""
    values = repeats.values(report, steady=steady)
    values[INTERACTIVITY] = 1000 / tpot_ms if (tpot_ms := values["tpot_p50"]) else None
    if gpus is not None:
        for name in BY_TOKENS:
            whole = values[name]
            values[name + PER_GPU] = None if whole is None else whole / gpus
        if report.economics is not None and (price := report.economics.gpu_hour_price) is not None:
            values[PRICE] = price_per_million(price, gpus, values[BY_TOKENS[0]])
    return values


def _shared(reports: Sequence[Report], fact: str) -> Any:
    """What the economics of all runs agree on; None where they do not."""
    values = {None if report.economics is None else getattr(report.economics, fact) for report in reports}
    return values.pop() if len(values) == 1 else None


def mean(point: SweptPoint, name: str) -> float | None:
    """A metric's mean over the point's runs."""
    return point.metrics[name].mean if name in point.metrics else None


def stretches(swept: Swept, x: str, y: str) -> list[list[tuple[SweptPoint, float, float]]]:
    """Neighbouring points of the list that have both metrics, with their means: a line joins these alone."""
    placed = [(point, mean(point, x), mean(point, y)) for point in swept.points]
    groups = itertools.groupby(placed, key=lambda each: each[1] is not None and each[2] is not None)
    return [
        [(point, at, value) for point, at, value in group if at is not None and value is not None]
        for known, group in groups
        if known
    ]


def of_items(swept: Swept) -> bool:
    """Whether its replies are no texts, and have neither tokens nor a stream."""
    return any(ITEMS in point.metrics for point in swept.points)


def by_throughput(swept: Swept) -> str:
    """The metric that latency is drawn against: output tokens/s where every point has it, or items/s."""
    if of_items(swept):
        return ITEMS
    by_tokens = all(mean(point, BY_TOKENS[0]) is not None for point in swept.points if point.runs)
    return BY_TOKENS[0] if by_tokens else "requests_per_s"


def varied(swept: Swept) -> str:
    return f"{swept.plan.varies} ({swept.plan.unit})" if swept.plan.unit else swept.plan.varies


def front(points: Sequence[SweptPoint], throughput: str) -> list[str]:
    """The points that no other one beats: as good or better in both, and better in one. In the order of the list. Left
    out is what is INVALID, and a load that the server fell behind: its latencies tell how long the run was."""
    kept = (point for point in points if point.valid and not point.fell_behind)
    known = [(point.value, mean(point, throughput), mean(point, INTERACTIVITY)) for point in kept]
    placed = [(value, a, b) for value, a, b in known if a is not None and b is not None]
    return [value for value, a, b in placed if not any((c, d) != (a, b) and c >= a and d >= b for _, c, d in placed)]


def samples(directory: Path, swept: Swept) -> dict[str, dict[str, Distribution]]:
    """By the value of each point that has a finished run, over all of them. Raises as `repeats.pooled` does."""
    return {
        point.value: repeats.pooled([directory / run for run in point.runs]) for point in swept.points if point.runs
    }


_OF_ITEMS = (
    ("requests/s", "requests_per_s"), ("items/s", ITEMS), ("prompt tokens/s", BY_TOKENS[1]),
    *((f"e2el {each}", f"e2el_{each}") for each in PERCENTILES),
)  # fmt: skip
_COLUMNS = (
    ("requests/s", "requests_per_s"), ("output tokens/s", "output_tokens_per_s"),
    *((f"{latency} {each}", f"{latency}_{each}") for latency in LATENCIES for each in PERCENTILES),
    ("tokens/s a user", INTERACTIVITY),
)  # fmt: skip


def columns(swept: Swept) -> list[tuple[str, str]]:
    """What a table of points has beside them: the heading and the metric of each column."""
    if of_items(swept):
        return list(_OF_ITEMS)
    per_gpu = [("output tokens/s a GPU", "output_tokens_per_s" + PER_GPU)] if swept.gpus is not None else []
    price = [("price of 1M output tokens", PRICE)] if any(PRICE in point.metrics for point in swept.points) else []
    return [*_COLUMNS, *per_gpu, *price]


def title(swept: Swept) -> str:
    finished = sum(run.state == "finished" for run in swept.runs)
    what = f"{swept.backend} {swept.model}".strip() or "a server that answered nothing yet"
    return escaped(f"{what} by {swept.plan.varies}: {finished} of {len(swept.runs)} runs finished")


def remarks(swept: Swept) -> list[str]:
    """What a reader must know beside the table, a sentence each."""
    plan = swept.plan
    share = (
        f"The model is on {swept.gpus} GPU{'s' if swept.gpus > 1 else ''}."
        if swept.gpus is not None
        else "How many GPUs served is not known, or none did: throughput is the whole server's."
    )
    lines = [
        f"Latencies are in milliseconds{'' if of_items(swept) else '; tokens/s a user is 1 / tpot p50'}. {share}",
        f"The order of the runs was shuffled with seed {plan.seed}: {', '.join(run.directory for run in plan.order)}.",
    ]
    if swept.steady and any(point.fell_behind for point in swept.points):
        lines.append(
            "Throughput, ttft, tpot and e2el are of each run's steady state, without start and drain. Where the server "
            "fell behind there is none: throughput is that of the whole run, its limit."
        )
    elif swept.steady:
        lines.append(
            "Throughput, ttft, tpot and e2el are of each run's steady state, which all of them have: without start and "
            "drain."
        )
    elif any(run.state == "finished" for run in swept.runs):
        lines.append("Numbers are of whole runs, with start and drain: not every run has a steady state.")
    if plan.repeat > 1:
        lines.append("Each number is the mean over a point's finished runs; sweep.json has their 95 % intervals.")
    if plan.options.get("quick_acks"):
        lines.append(QUICK_ACKS)
    unknown = [point.value for point in swept.points if point.runs and mean(point, "tpot_p50") is None]
    if unknown and not of_items(swept):
        lines.append(
            f"tpot, and tokens/s a user, cannot be known at {', '.join(unknown)}: see the findings of the runs."
        )
    if swept.starts > 1:
        lines.append(
            f"The sweep was resumed: its runs are of {swept.starts} starts, and a server that loadgen starts is "
            "another one each time."
        )
    busy = [f"{name} ({wait.detail or wait.by})" for name, wait in swept.waits.items() if not wait.idle]
    if busy:
        lines.append(f"The server was not seen idle before {', '.join(busy)}.")
    return lines
