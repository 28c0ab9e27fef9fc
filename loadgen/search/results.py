"""search.json: the options of a search, its probes, and what they show; with its text and its figure.

The file is written after every probe, so it is also from where a search that was killed goes on.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import msgspec

from backends.untrusted import read_json
from loadgen import rundir
from loadgen.document.content import number
from loadgen.report.text import QUICK_ACKS
from loadgen.rundir import RunError
from loadgen.search import objective
from loadgen.search.highest import EndReason, Goal, HighestLoad, Prior, Probe, highest_load
from loadgen.steady.blocks import NORMAL_975, wilson

SCHEMA, FILE = "loadgen.search/1", "search.json"
AxisName = Literal["rate", "concurrency"]
ProbeKind = Literal["alone", "saturation", "probe"]
UNITS = {"rate": "requests/s", "concurrency": "requests in flight"}
# Findings: where one of them is `invalid`, the client was the limit.
CLIENT_LIMITS = ("LOOP_LAG", "CLIENT_CPU", "SEND_LAG", "DROPPED")
ABOVE_RATIO = 0.98  # of the answer: a probe at this load or more is taken to be above it
FULL_KV_RATIO = 0.98


class Range(msgspec.Struct, frozen=True):
    """An estimate and its interval of 95 %; None where there is no answer, or no probe bounds it on that side."""

    value: float | None
    low: float | None
    high: float | None


class ProbeRun(msgspec.Struct, frozen=True, kw_only=True):
    """One probe. kind: `alone`, of a request at a time; `saturation`, of a closed loop, which says where to begin; and
    `probe`, at a load. missed: share of the requests that missed each limit. unknown: limited metrics that no reply
    lets know."""

    number: int
    directory: str
    kind: ProbeKind
    probe: Probe
    attained_ratio: float | None
    missed: dict[str, float] = {}
    kv_cache_usage_max_ratio: float | None = None
    preemptions: int | None = None
    findings: list[str] = []
    unknown: list[str] = []

    @property
    def by_client(self) -> bool:
        """Whether the client was the limit."""
        return any(code in CLIENT_LIMITS for code in self.findings)


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is sought. config: the options of the run that differ from their defaults."""

    slo_ms: dict[str, float]
    attain: float
    axis: AxisName
    budget_s: float
    config: dict[str, Any]

    @property
    def goal(self) -> Goal:
        return Goal(attain=self.attain, budget_s=self.budget_s, whole=self.axis == "concurrency")


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """search.json. rate_per_s, or concurrency: the highest load that meets the objective. attained_ratio: the share of
    requests that meet it there. started_from: where the first load came from, in words."""

    schema: str = SCHEMA
    version: str
    backend: str = ""
    model: str = ""
    emulated: bool = False
    options: SearchOptions = msgspec.field(name="asked")
    rate_per_s: Range | None = None
    concurrency: Range | None = None
    attained_ratio: float | None = None
    attained_interval: tuple[float, float] | None = None
    lower_bound: bool = False
    limited_by: str | None = None
    ended_because: str = "it goes on"
    ended: str = "running"
    guess: Prior | None = None
    started_from: str = ""
    probes: list[ProbeRun] = []

    def lasting(self, budget_s: float) -> SearchResult:
        """With another budget for all probes."""
        return msgspec.structs.replace(self, options=msgspec.structs.replace(self.options, budget_s=budget_s))

    @property
    def loads(self) -> list[Probe]:
        """What the statistics see."""
        return [run.probe for run in self.of("probe")]

    def of(self, kind: ProbeKind) -> list[ProbeRun]:
        return [run for run in self.probes if run.kind == kind]

    @property
    def spent_s(self) -> float:
        return sum(run.probe.seconds for run in self.probes)

    @property
    def range(self) -> Range:
        return self.rate_per_s or self.concurrency or Range(None, None, None)


def with_answer(result: SearchResult, ended: EndReason | None) -> SearchResult:
    """With what its probes say, and why it ended; None: it goes on, or was stopped."""
    none = ended is not None and ended.code in ("none", "unknown")
    estimate = HighestLoad(value=None, low=0.0, high=math.inf, attained=None, attained_low=None, attained_high=None)
    if result.guess is not None and result.loads and not none:
        estimate = highest_load(result.options.goal, result.guess, result.loads, ended)
    sought = Range(estimate.value, _finite(estimate.low) or None, _finite(estimate.high))
    interval = None
    if estimate.attained_low is not None and estimate.attained_high is not None:
        interval = (estimate.attained_low, estimate.attained_high)
    return msgspec.structs.replace(
        result,
        rate_per_s=sought if result.options.axis == "rate" else None,
        concurrency=sought if result.options.axis == "concurrency" else None,
        attained_ratio=estimate.attained,
        attained_interval=interval,
        lower_bound=_is_lower_bound(result, estimate.value),
        limited_by=_limited_by(result, estimate.value, none),
        ended=result.ended if ended is None else ended.code,
        ended_because=result.ended_because if ended is None else ended.reason,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _is_lower_bound(result: SearchResult, value: float | None) -> bool:
    """Whether the client, and not the server, was the limit just above the answer."""
    above = _above(result, value)
    return above is not None and above.by_client


def _above(result: SearchResult, value: float | None) -> ProbeRun | None:
    """The lowest probe that missed what is wanted; where none did, the closed loop if that did, else the highest."""

    def missed(run: ProbeRun) -> bool:
        return run.probe.ended_per_s is not None or (run.probe.share or 0.0) < result.options.attain

    probes = sorted(result.of("probe"), key=lambda run: run.probe.load)
    by_load = list(filter(missed, probes)) or list(filter(missed, result.of("saturation")))
    at_least = (run for run in by_load if value is None or run.probe.load >= ABOVE_RATIO * value)
    return next(at_least, by_load[-1]) if by_load else max(probes, key=lambda run: run.probe.load, default=None)


def _limited_by(result: SearchResult, value: float | None, none: bool) -> str | None:
    """What was in the way of more: client, preemptions, KV cache, a metric, or the throughput where requests pile up
    before they miss a limit."""
    run = result.probes[0] if none and len(result.probes) == 1 else _above(result, value)
    if run is None:
        return None
    if run.by_client:
        return "client"
    if run.preemptions and run.preemptions > (1 - result.options.attain) * run.probe.requests:
        return "preemptions"
    if (run.kv_cache_usage_max_ratio or 0.0) >= FULL_KV_RATIO:
        return "kv"
    worst = max(run.missed, key=lambda name: run.missed[name], default=None)
    if worst is None or run.missed[worst] == 0:
        return "throughput" if run.probe.ended_per_s is not None else None
    return worst


def write(directory: Path, result: SearchResult) -> None:
    """Replaces search.json. Raises RunError."""
    rundir.write_json(directory / FILE, result)


def read(directory: Path) -> SearchResult:
    """Raises RunError."""
    path = directory / FILE
    if not path.exists():
        raise RunError(f"{directory} holds no {FILE}; name the --out of a search with --resume.")
    result = read_json(path, SearchResult, RunError, "is no search of this version", directory=directory)
    if result.schema != SCHEMA:
        raise RunError(f"{path} has schema '{result.schema}', and this version reads {SCHEMA}.")
    return result


def sentence(result: SearchResult) -> str:
    """The answer in one sentence."""
    unit, share = UNITS[result.options.axis], f"{100 * result.options.attain:g} %"
    wanted = f"{share} of the requests within {objective.text(result.options.slo_ms)}"
    value, low, high = result.range.value, result.range.low, result.range.high
    if value is None:
        if result.ended == "none":
            return f"No load meets the objective ({wanted}): {result.ended_because}."
        if result.ended == "unknown":
            return f"Nobody can tell which load meets the objective ({wanted}): {result.ended_because}."
        return f"There is no answer yet ({wanted}): {result.ended_because}."
    lower = "At least " if result.lower_bound else ""
    if high is None:
        bounds = f"above {number(low or 0.0)}"
    else:
        bounds = f"between {number(low)} and {number(high)}" if low else f"at most {number(high)}"
    text = f"{lower}{number(value)} {unit}, {bounds} with 95 % confidence: {wanted}."
    return f"{text} The client was the limit, so the server may take more." if result.lower_bound else text


def met_percent(probe: Probe) -> tuple[float, float] | None:
    """The interval of 95 % of the share of requests that meet the objective; None where none counts."""
    if probe.share is None:
        return None
    low, high = wilson(probe.share, max(1.0, probe.counted / probe.dispersion), NORMAL_975)
    return 100 * max(0.0, low), 100 * min(1.0, high)


def verdict(run: ProbeRun) -> str:
    return run.probe.verdict.replace("_", " ") if run.kind == "probe" else run.kind


def end(result: SearchResult) -> str:
    """Why it ended and where it began, if it did; and what of its measurements is unusual."""
    began = f" Began at {result.started_from}." if result.started_from else ""
    acks = f" {QUICK_ACKS}" if result.options.config.get("quick_acks") else ""
    return f"Ended because {result.ended_because}.{began}{acks}"
