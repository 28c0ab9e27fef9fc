"""`loadgen search`: the highest load that meets an objective, on a live server. One start of the server, many probes.

Every probe is an ordinary run in DIR/1, DIR/2, ... A process beside (watch.py) reads its records and says when it has
shown enough; the run then stops as it does at Ctrl-C. The first probe sends one request at a time. Where the hardware
is known the search starts at the modelled highest load, else at a part of what a short closed loop gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends import gpus
from backends.untrusted import without_secrets
from loadgen import child_env, rundir, terminal
from loadgen.client.engine import LiveCounters, Progress
from loadgen.config import OWNERS_WORD, Config, ConfigError, check_owners_word, flag
from loadgen.document.content import number
from loadgen.document.files import ReportError
from loadgen.load.load import Load
from loadgen.report import build
from loadgen.run import LoadRun, NextRun, Served, measure_each
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.series import put_aside
from loadgen.search import results
from loadgen.search.highest import EndReason, NextProbe, Prior, Probe, ProbeTimes, conclude, highest_load, next_probe
from loadgen.search.objective import lateness
from loadgen.search.results import UNITS, AxisName, ProbeKind, ProbeRun, SearchOptions, SearchResult
from loadgen.search.watch import Enough, WatchOrder, seen_of, times_of, worst
from loadgen.steady.keeping_up import KeepingUp

ALONE_REQUESTS = 4
SATURATION_STREAMS, SATURATION_RATIO = 64, 0.6  # what part of a closed loop's throughput is tried first
SATURATION_LIVES, SATURATION_S = 4.0, 15.0
MODELLED_SPREAD, SATURATION_SPREAD = 0.1, 0.4  # of the guesses, as logarithms
CONCURRENCY = Prior(load=16, spread=1.0)
MODEL_TIMEOUT_S = 60.0
OVERHEAD_S, GRACE_S = 2.0, 1.0  # what a probe takes beside its load; how long its last replies may take for nothing
LEAST_SENT_S, SHORT_S = 2.0, 8.0  # of sending; of a whole probe, where the budget is short
BETWEEN = "between two probes"
OWN = ("requests", "duration", "arrival", "concurrency", "workload", "goodput", "repeat")  # the search decides on them


def search_options(
    config: Config, limits_ms: Mapping[str, float], attain: float, budget_minutes: float, axis: AxisName
) -> SearchOptions:
    """The options of a new search, of those that were typed. Raises ConfigError for what makes no search."""
    whole_s = budget_s(budget_minutes)
    if attain == 1:
        raise ConfigError(
            "--attain is 1, which no number of requests can show; ask for 0.999, which takes "
            f"{_least(0.999)} requests that all meet the objective, or 0.99, which takes {_least(0.99)}."
        )
    if not 0.5 <= attain < 1:
        raise ConfigError(f"--attain is {attain:g}; it must be at least 0.5 and below 1, as in 0.99.")
    given = [name for name in OWN if getattr(config, name) != getattr(Config, name)]
    if given:
        raise ConfigError(f"{flag(given[0])} is for run: search decides what load it sends; leave it out.")
    for name, has in (("trace", config.trace is not None), ("sessions", config.load.sessions is not None)):
        if has:
            raise ConfigError(f"search sends single requests, and --{name} does not; leave it out.")
    if config.dataset is not None and not config.repeat_dataset:
        raise ConfigError("search sends as many requests as it needs; add --repeat-dataset, or leave --dataset out.")
    if config.dry_run:
        raise ConfigError("--dry-run starts nothing, so there is nothing to search; leave it out.")
    if config.pooled and (unknown := [name for name in limits_ms if name != "e2el"]):
        raise ConfigError(
            f"--slo limits {unknown[0]}, and replies of --backend {config.backend} are not streamed; limit e2el."
        )
    if "tpot" in limits_ms and config.load.output_tokens.most == 1:
        raise ConfigError("--slo limits tpot_ms and replies of one token have none; leave it out.")
    plain = config.as_dict()
    kept = {name: plain[name] for name in config.given(plain) if name != "out"}
    return SearchOptions(slo_ms=dict(limits_ms), attain=attain, axis=axis, budget_s=whole_s, config=kept)


def budget_s(minutes: float) -> float:
    """Raises ConfigError."""
    if not 0 < minutes < math.inf:
        raise ConfigError(f"--budget-minutes is {minutes:g}; it must be above 0.")
    return 60 * minutes


def _least(attain: float) -> int:
    return SearchOptions(slo_ms={}, attain=attain, axis="rate", budget_s=1.0, config={}).goal.least_requests


def run_config(options: SearchOptions) -> Config:
    """The options of a search that goes on. Raises ConfigError."""
    try:
        return msgspec.convert(options.config, Config, strict=False, dec_hook=lambda kind, value: kind(value))
    except msgspec.ValidationError as error:
        raise ConfigError(f"search.json holds options that this version does not know: {error}.") from None


@dataclass
class Search:
    """One search in `whole.directory`, which exists. `result`: what its probes have shown so far."""

    whole: LoadRun
    result: SearchResult
    _watcher: Watcher = field(init=False)

    def __post_init__(self) -> None:
        self._watcher = Watcher(self.whole)

    @classmethod
    def checked(cls, config: Config, directory: Path, result: SearchResult) -> Search:
        """Raises as `LoadRun.check` does."""
        whole = LoadRun(config, directory, rundir.new_run_id(), terminal.note)
        whole.check()
        return cls(whole, result)

    async def measure(self) -> None:
        """Probes until the answer is sure or the time is over. search.json is right after every probe. Raises as
        `measure_each` does."""
        self._keep(None)
        await measure_each(self.whole, self._probes, BETWEEN)

    async def _probes(self, _: Served) -> AsyncGenerator[NextRun, None]:
        async with self._watcher:
            while not isinstance(step := await self._next(), EndReason):
                yield self._probe(step)
            self._keep(step)

    def stopped(self) -> None:
        """Keeps the answer of a search that a signal or a failure has ended."""
        if self.result.ended == "running":
            self._keep(EndReason(code="stopped", reason="it was stopped"))

    def _keep(self, ended: EndReason | None) -> None:
        self.result = results.with_answer(self.result, ended)
        results.write(self.whole.directory, self.result)

    # What is tried next.

    async def _next(self) -> PlannedProbe | EndReason:
        result = self.result
        if not result.probes:
            return PlannedProbe(
                "alone", 1.0, {"concurrency": 1, "requests": ALONE_REQUESTS}, result.options.budget_s / 4
            )
        alone = result.probes[0].probe
        if unknown := result.probes[0].unknown:
            why = "the findings of the first probe say why (loadgen report), and what ends it"
            return EndReason(code="unknown", reason=f"{' and '.join(unknown)} cannot be known here; {why}")
        if alone.met == 0:
            return EndReason(code="none", reason="a request misses it even where it is alone")
        if result.guess is None:
            step = await self._guess(alone)
            if step is not None:
                return step
        guess = self.result.guess
        assert guess is not None
        left_s = result.options.budget_s - result.spent_s
        goal = replace(result.options.goal, budget_s=left_s + sum(probe.seconds for probe in result.loads))
        order = next_probe(goal, guess, result.loads)
        if isinstance(order, EndReason):
            return order
        seconds = min(max(order.seconds, SHORT_S), left_s) - OVERHEAD_S - min(alone.life_s, order.seconds / 4)
        if seconds < max(LEAST_SENT_S, 8 * alone.life_s, result.options.budget_s / 20):
            return EndReason(code="budget", reason="the time is over")
        self._say(order, seconds)
        if result.options.axis == "concurrency":
            load: dict[str, Any] = {"concurrency": int(order.load)}
        else:
            load = {"arrival": f"poisson:{order.load:.6g}"}
        return PlannedProbe("probe", order.load, {**load, "duration": seconds}, seconds, order.requests)

    async def _guess(self, alone: Probe) -> PlannedProbe | None:
        """Where to start: known now, or after a closed loop, which is then returned."""
        result = self.result
        if result.options.axis == "concurrency":
            self.result = msgspec.structs.replace(result, guess=CONCURRENCY, started_from="16 requests in flight")
            return None
        rate = await modelled_rate(result.options, self.whole)
        if rate is not None:
            source = f"the modelled {number(rate)} requests/s"
            guess = Prior(load=rate, spread=MODELLED_SPREAD)
            self.result = msgspec.structs.replace(result, guess=guess, started_from=source)
            return None
        saturated = [run.probe for run in result.of("saturation")]
        if saturated:
            rate = saturated[0].load
            source = f"{SATURATION_RATIO:g} of the {number(rate)} requests/s that a closed loop got"
            guess = Prior(load=max(1e-3, SATURATION_RATIO * rate), spread=SATURATION_SPREAD)
            self.result = msgspec.structs.replace(result, guess=guess, started_from=source)
            return None
        seconds = min(max(SATURATION_LIVES * alone.life_s, 3.0), SATURATION_S, result.options.budget_s / 6)
        return PlannedProbe("saturation", 0.0, {"concurrency": SATURATION_STREAMS, "duration": seconds}, seconds)

    def _say(self, order: NextProbe, seconds: float) -> None:
        result = self.result
        between = ""
        if result.guess is not None and result.loads:
            so_far = highest_load(result.options.goal, result.guess, result.loads)
            high = "?" if math.isinf(so_far.high) else number(so_far.high)
            between = f"; so far between {number(so_far.low)} and {high}"
        left_min = max(0.0, result.options.budget_s - result.spent_s) / 60
        self.whole.say(
            f"probe {len(result.probes) + 1}: {number(order.load)} {UNITS[result.options.axis]}, "
            f"at most {seconds:.0f} s{between}; {left_min:.1f} min left"
        )

    # One probe.

    def _probe(self, step: PlannedProbe) -> NextRun:
        whole, number_ = self.whole, len(self.result.probes) + 1
        directory = rundir.within(whole.directory, str(number_))
        put_aside(directory)
        limits = tuple(f"{name}:{limit:g}" for name, limit in self.result.options.slo_ms.items())
        config = replace(
            whole.config, seed=whole.config.seed + number_, out=directory, goodput=limits, calibrate=False,
            stop_when_overloaded=step.kind == "probe" and self.result.options.axis == "rate", **step.options,
        )  # fmt: skip
        one = LoadRun(config, directory, rundir.new_run_id(), _quiet, whole.stop, measures_wire=step.kind == "alone")
        watch = WatchOrder(
            directory=str(directory.absolute()), load=config.load, limits_ms=self.result.options.slo_ms,
            attain=self.result.options.attain, requests=step.requests,
        )  # fmt: skip
        if step.kind == "probe":
            self._watcher.begin(watch)
        return NextRun(one, partial(self._over, one, step, time.monotonic()), self._watched(step))

    def _over(self, one: LoadRun, step: PlannedProbe, began_s: float) -> None:
        """Keeps what a probe has shown."""
        self._watcher.over()
        run = self._probe_run(one.directory, step, one.config.load)
        probe = msgspec.structs.replace(run.probe, seconds=time.monotonic() - began_s)
        if self.whole.stop.number is not None and probe.counted == 0:
            return
        self._describe(one)
        run = msgspec.structs.replace(run, number=len(self.result.probes) + 1, probe=probe)
        self.result = msgspec.structs.replace(self.result, probes=[*self.result.probes, run])
        self._keep(None)

    def _describe(self, one: LoadRun) -> None:
        manifest = rundir.read_manifest(one.directory)
        self.result = msgspec.structs.replace(
            self.result, backend=manifest.backend, model=manifest.model, emulated=manifest.emulated
        )

    def _watched(self, step: PlannedProbe) -> Progress:
        """Ends the probe where its time is over and replies are still awaited: they belong to a queue that grows."""
        stop, ended = self.whole.stop, False

        def watched(clients: list[LiveCounters]) -> None:
            nonlocal ended
            elapsed_s = max((client.elapsed_s for client in clients), default=0.0)
            if not ended and elapsed_s > step.seconds + GRACE_S and any(client.in_flight for client in clients):
                ended = True
                stop.end()

        return watched

    def _probe_run(self, directory: Path, step: PlannedProbe, load: Load) -> ProbeRun:
        """What a probe showed, with its report."""
        report, table = build.from_directory(directory)
        with contextlib.suppress(ReportError):  # `loadgen report` makes it again
            build.write(directory, report, table)
        measured = table.measured()
        slo_ms = self.result.options.slo_ms
        late = lateness(slo_ms, times_of(measured))
        over = measured.done_ns[measured.done_ns >= 0]
        stopped_ns = int(measured.scheduled_ns.max(initial=0))
        seen = seen_of(measured, load, slo_ms, stopped_ns)
        behind_per_s = None
        if rundir.read_manifest(directory).stopped_overloaded:
            behind_per_s = served_per_s(report.steady.keeping_up if report.steady is not None else None, seen)
        probe = conclude(self.result.options.goal, seen, step.load, behind_per_s)
        if step.kind != "probe":  # none of a steady state: all count
            met = int((worst(late) <= 1).sum())
            per_s = len(over) / max(1e-9, float(over.max(initial=0)) / 1e9)
            probe = msgspec.structs.replace(
                probe,
                load=per_s if step.kind == "saturation" else 1.0,
                counted=len(measured),
                met=met,
                verdict="unsure",
            )
        judged = (measured.outcome != OUTCOMES.index("cancelled")) & ~measured.abandoned
        server = report.server
        return ProbeRun(
            number=0,
            directory=directory.name,
            kind=step.kind,
            probe=probe,
            attained_ratio=probe.share,
            missed={name: float((each[judged] > 1).mean()) if judged.any() else 0.0 for name, each in late.items()},
            kv_cache_usage_max_ratio=server.kv_cache_usage_max_ratio if server is not None else None,
            preemptions=server.preemptions if server is not None else None,
            findings=[each.code for each in report.verdict.findings if each.severity == "invalid"],
            unknown=_unknown(late, measured.ok, report.ttft_of_delivery),
        )


def served_per_s(found: KeepingUp | None, seen: ProbeTimes) -> float:
    """The rate at which a probe ended requests that was stopped as its server fell behind: as its report says, else
    over the later half of its time."""
    if found is not None and found.served_per_s is not None:
        return found.served_per_s
    half_s = seen.elapsed_s / 2
    return float(((seen.done_s > half_s) & (seen.done_s <= seen.elapsed_s)).sum()) / max(half_s, 1e-9)


@dataclass(frozen=True)
class PlannedProbe:
    """One run to be made: `options` of its load; sent for so many seconds at the most, or so many counted requests."""

    kind: ProbeKind
    load: float
    options: dict[str, Any]
    seconds: float
    requests: int = 0


def _unknown(late: Mapping[str, NDArray[np.float64]], ok: NDArray[np.bool_], delivery: bool) -> list[str]:
    """The limited metrics that no reply of a probe lets know, by how late each request (n,) was."""
    never = [name for name, each in late.items() if ok.any() and bool(np.isinf(each[ok]).all())]
    return [*never, *(["ttft"] if delivery and "ttft" in late and "ttft" not in never else [])]


def _quiet(text: str) -> None:
    """Each probe says what the first said."""


async def modelled_rate(options: SearchOptions, whole: LoadRun) -> float | None:
    """The highest rate that the model of the server's hardware keeps, in a process of its own; None where the hardware
    is not known, or no model of it."""
    config = whole.config
    if config.gpu is None:
        known = config.model is not None and (config.where != "url" or config.url_is_local)
        if config.where == "embedded" or not known:
            return None
        cards = (await asyncio.to_thread(gpus.read)).gpus
        if not cards or config.gpus == "none":
            return None
        shared = {name: options.config[name] for name in _MODELLED if name in options.config}
        modelled = {**shared, "gpu": cards[0].name, "gpus": str(len(cards))}
    else:
        modelled = {name: value for name, value in options.config.items() if name not in _NOT_MODELLED}
    query = msgspec.json.encode({"config": modelled, "limits_ms": options.slo_ms, "attain": options.attain})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "servers.plan.knee", stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
        env=_environment(), start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(MODEL_TIMEOUT_S):
            reply, _ = await process.communicate(query)
    except TimeoutError:
        return None
    finally:
        await child_env.ended(process, 0.0)
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(reply, type=_Modelled).rate_per_s
    return None


_MODELLED = (
    "backend", "model", "tp", "dtype", "quantization", "kv_cache_dtype", "max_model_len", "max_running",
    "max_batched_tokens", "memory_ratio", "prefix_caching", "input_tokens", "output_tokens", "prefix", "seed",
)  # fmt: skip
_NOT_MODELLED = ("url", "launch", "server_metrics", "metrics_port", "out")


class _Modelled(msgspec.Struct):
    rate_per_s: float | None


def _environment() -> dict[str, str]:
    return {**os.environ, **child_env.environment(os.environ)}


class Watcher:
    """The process beside, and what is done when it says that a probe has shown enough."""

    def __init__(self, whole: LoadRun) -> None:
        self._whole = whole
        self._process: Process | None = None
        self._watched = ""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Watcher:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loadgen.search.watch", stdin=PIPE, stdout=PIPE, env=_environment(),
            start_new_session=True,
        )  # fmt: skip
        self._task = asyncio.get_running_loop().create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None and self._process.stdin is not None and self._task is not None
        self._process.stdin.close()
        await child_env.ended(self._process, 5.0)
        self._task.cancel()

    def begin(self, watch: WatchOrder) -> None:
        """Its word ends the run in that directory."""
        assert self._process is not None and self._process.stdin is not None
        self._watched = watch.directory
        self._process.stdin.write(msgspec.json.encode(watch) + b"\n")

    def over(self) -> None:
        """What it says from now on is of a run that is over."""
        self._watched = ""

    async def _listen(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            with contextlib.suppress(msgspec.DecodeError):
                if msgspec.json.decode(line, type=Enough).directory == self._watched:
                    self._watched = ""
                    self._whole.stop.end()


def resumed(directory: Path, config: Config, own: dict[str, object]) -> tuple[SearchResult, Config]:
    """A search that goes on, and its options; those that are given again must be the same. own: search's own, None
    where one is not given. Raises RunError or ConfigError."""
    result = results.read(directory)
    options, kept = result.options, run_config(result.options)
    before = {"--slo": options.slo_ms, "--attain": options.attain, "--axis": options.axis}
    again = {f"--{name}": value for name, value in own.items() if value is not None}
    plain, plain_before = config.as_dict(), kept.as_dict()
    for name in config.given(plain):
        if name not in ("out", *OWN):
            before[flag(name)], again[flag(name)] = plain_before[name], plain[name]
    for option, value in again.items():
        if without_secrets(value) != before[option]:
            raise ConfigError(f"--resume goes on with the options of {directory}; leave {option} out.")
    typed = config.given(OWNERS_WORD)
    check_owners_word(directory, kept, typed, flag)
    owners = {name: getattr(config, name) for name in typed}
    return msgspec.structs.replace(result, ended="running", ended_because="it goes on"), replace(
        kept, out=directory, **owners
    )


def plain_config(config: Config) -> Config:
    """As a plain Config: a probe's manifest holds the options of a run."""
    return Config(**{each.name: getattr(config, each.name) for each in dataclasses.fields(Config)})
