"""A breakdown of a server that is started with its profiler: load until it decodes steadily, some steps profiled, the
trace read.

The client's own streams show when decode is steady: every request has its first token and none has its last. The same
number of steps is watched without the profiler first, so that the profiler's cost is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec

from backends.launch import Profiler
from backends.untrusted import printable
from loadgen import rundir, trace
from loadgen.breakdown import attribute, steps, tables
from loadgen.breakdown.tables import StepBreakdown
from loadgen.client.engine import START_MARGIN_NS, Client, build_client
from loadgen.client.exchange import Exchange
from loadgen.clock import now_ns
from loadgen.config import Config
from loadgen.event_loop import StopSignals
from loadgen.plan import ClientPlan
from loadgen.probe import ServerError
from loadgen.run import LoadRun, Say, stoppable
from loadgen.server.launch import TRACES, Launch, plan_launch
from loadgen.target import UNQUEUED_S, Target, TransportError, get
from loadgen.trace import TraceError, TraceSpan

LONG_REPLY_TOKENS = 1024  # enough for the first reply to outlast the last prompt and the profile
CACHE_RATIO, LEAST_REPLIES = 0.95, 4  # of the KV cache that replies may fill; of a reply to the steps that are profiled
POLL_S = 0.02
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 600.0  # it writes the trace
TRACE_WAIT_S = 300.0
MERGED_RATIO = 1.2  # of a stream's events to the trace's steps: beyond it they cannot be one token each
TRACE_FILE = "trace.json.gz"
_TRACE_NAME = re.compile(r"\.trace\.json(\.gz)?$")
_FIRST_RANK = re.compile(r"(rank|tp|dev|device)[_-]?0(?!\d)", re.IGNORECASE)


def load(config: Config) -> Config:
    """The same options as one closed loop whose replies outlast prompts and profile; it warms itself up. Raises
    ConfigError."""
    streams = tables.batch_of(config)
    reply = config.output_tokens
    if reply == Config.output_tokens:
        reply = LONG_REPLY_TOKENS
    return dataclasses.replace(
        config, concurrency=streams, requests=streams, warmup=0, output_tokens=reply, workers="1"
    )


def that_fit(config: Config, cache_tokens: int | None, wanted: int) -> Config:
    """Where no --output-tokens is given: replies that the KV cache holds to the end of all of them. LightLLM admits no
    request beyond that."""
    if cache_tokens is None or config.output_tokens != LONG_REPLY_TOKENS:
        return config
    load = config.load
    room = int(CACHE_RATIO * cache_tokens) // load.at_once - load.input_tokens.least
    reply = min(room, load.output_tokens.least)
    return dataclasses.replace(config, output_tokens=reply) if reply >= LEAST_REPLIES * wanted else config


class Watched(msgspec.Struct, frozen=True):
    """What the client saw of one server's decode: milliseconds a step, and tokens of context while it was profiled."""

    before_ms: float
    during_ms: float
    context_tokens: float


async def measure(
    config: Config, wanted: int, directory: Path, run_id: str, say: Say, stop: StopSignals
) -> StepBreakdown:
    """Starts the server, profiles `wanted` steps, and ends it; manifest, records and trace lie in `directory`. Raises
    the errors of its parts, each one sentence."""
    run = LoadRun(config, directory, run_id, say, stop)
    with stoppable(stop, "before the breakdown was done"):
        async with run.served(profiled=True) as served:
            server = served.managed
            assert server is not None and server.launch.adapter.profiler is not None
            run.config = that_fit(config, server.kv_cache_tokens, wanted)
            plan = await run.plan(served)
            run.write_manifest(plan, served)
            watched = await drive(plan, server.launch.adapter.profiler, wanted, directory, say)
            say("waiting for the trace")
            spans = await collect(directory / TRACES, directory / TRACE_FILE)
    decoded = await asyncio.to_thread(steps.find, spans)
    return _assembled(decoded, watched, server.launch, run.config, run.emulated)


def _assembled(decoded: steps.Steps, watched: Watched, launch: Launch, config: Config, emulated: bool) -> StepBreakdown:
    names = dict.fromkeys(gpu.name for gpu in launch.inventory.gpus if gpu.index in launch.gpu_indices)
    version = f" {'.'.join(map(str, launch.settings.version))}" if launch.settings.version else ""
    return StepBreakdown(
        **_trace_fields(decoded, config.load.at_once, watched.before_ms, watched.during_ms),
        emulated=emulated,
        backend=f"{launch.backend.name}{version}",
        model=launch.model.name,
        hardware=f"{launch.settings.tp} x {', '.join(names)}" if names else "the CPU",
        prompt_tokens=config.load.input_tokens.least,
        context_tokens=watched.context_tokens,
        client_ms=watched.during_ms,
        client_before_ms=watched.before_ms,
        trace=TRACE_FILE,
    )


def again(directory: Path) -> StepBreakdown:
    """The breakdown that lies in a run's directory, its trace taken apart once more where it is there. Raises RunError
    or TraceError."""
    kept, path = tables.read(directory), directory / TRACE_FILE
    if kept.client_ms is None or not path.exists():  # it was modelled, or the trace was deleted
        return kept
    streams = rundir.read_manifest(directory).config.get("concurrency")
    in_flight = streams if isinstance(streams, int) else kept.batch
    fields = _trace_fields(steps.find(trace.read(path)), in_flight, kept.client_before_ms, kept.client_ms)
    return msgspec.structs.replace(kept, **fields)


def _trace_fields(decoded: steps.Steps, streams: int, before_ms: float | None, during_ms: float) -> dict[str, Any]:
    """The fields of a StepBreakdown that come from its trace. before_ms, during_ms: between two events of a stream at
    the client. The smaller counts, because some servers report the profiler as running before they start it."""
    event_ms = during_ms if before_ms is None else min(before_ms, during_ms)
    parts = attribute.dissect(decoded)
    notes = []
    if decoded.form == "cpu":
        notes.append("there is no GPU: activities are operators of the server's main thread, and idle is Python.")
    batch = decoded.steps[0].batch
    if batch is not None and batch != streams:
        notes.append(f"{streams} requests were in flight, and the server decoded {batch} of them in a step.")
    if parts.layers is None:
        notes.append("norms, attention and products do not come in a transformer's order: parts cannot be told.")
    if event_ms > MERGED_RATIO * parts.step_ms:
        notes.append(
            f"streams had an event only every {event_ms:.3f} ms: the server put several tokens into one, and "
            "the context was longer than is told."
        )
    fields: dict[str, Any] = {name: getattr(parts, name) for name in parts.__struct_fields__}
    return fields | {
        "batch": streams if batch is None else batch,
        "steps": len(decoded.steps),
        "steps_left_out": decoded.left_out,
        "delimited_by": decoded.delimited_by,
        "form": decoded.form,
        "notes": tuple(notes),
    }


# Driving.


async def drive(plan: ClientPlan, profiler: Profiler, wanted: int, directory: Path, say: Say) -> Watched:
    """Sends the plan's load, has `wanted` decode steps profiled, and cuts the load off. Raises ServerError or
    TransportError."""
    client = build_client(plan)
    try:
        await client.prepare()
        running = asyncio.ensure_future(client.run(now_ns() + START_MARGIN_NS, directory / "requests.jsonl"))
        try:
            streams = await _steady(client, running, plan)
            say(f"{len(streams)} requests are in decode")
            before_ms, _ = await _watch(client, running, streams, wanted, plan)
            await _command(plan.target, profiler.start, plan.backend, START_TIMEOUT_S)
            during_ms, context = await _watch(client, running, streams, wanted, plan)
            await _command(plan.target, profiler.stop, plan.backend, STOP_TIMEOUT_S)
        finally:
            client.stop(0.0)
            with contextlib.suppress(OSError):
                await running
    finally:
        await client.transport.close()
    return Watched(before_ms, during_ms, plan.job.load.input_tokens.least + context)


async def _steady(client: Client, running: asyncio.Future[Any], plan: ClientPlan) -> list[Exchange]:
    """All streams, once each has its first token and none its last. Raises ServerError."""
    wanted = plan.job.load.at_once
    began, limit_s = now_ns(), min(UNQUEUED_S, plan.job.timeouts.first_byte_s)
    while True:
        await asyncio.sleep(POLL_S)
        _check(client, running, f"the last of {wanted} requests had its first token")
        streams = list(client.in_flight)
        decoding = sum(bool(exchange.times) for exchange in streams)
        if decoding == wanted:
            return streams
        if now_ns() - began > limit_s * 1e9:
            raise ServerError(
                f"only {decoding} of {wanted} requests had a first token after {limit_s:g} s; "
                "lower --concurrency or --output-tokens to what the server's KV cache holds."
            )


async def _watch(
    client: Client, running: asyncio.Future[Any], streams: list[Exchange], wanted: int, plan: ClientPlan
) -> tuple[float, float]:
    """Waits until every stream has had `wanted` steps, from its next event on, ahead of which it may have waited for
    the others' prompts: milliseconds between two events on average, and how many tokens each reply had on average
    meanwhile. Raises ServerError."""
    first = [len(exchange.times) for exchange in streams]
    began = now_ns()
    while True:
        await asyncio.sleep(POLL_S)
        _check(client, running, f"{wanted} steps were over")
        last = [len(exchange.times) for exchange in streams]
        if min(end - begin for begin, end in zip(first, last, strict=True)) > wanted:
            break
        if now_ns() - began > plan.job.timeouts.idle_s * 1e9:
            raise ServerError(
                f"a request had no {wanted} tokens in {plan.job.timeouts.idle_s:g} s; lower --concurrency or "
                "--output-tokens to what the server's KV cache holds."
            )
    spans_ms = [
        (exchange.times[end - 1] - exchange.times[begin]) / (end - 1 - begin) / 1e6
        for exchange, begin, end in zip(streams, first, last, strict=True)
    ]
    tokens = sum((begin + end) / 2 for begin, end in zip(first, last, strict=True)) / len(streams)
    return sum(spans_ms) / len(spans_ms), tokens


def _check(client: Client, running: asyncio.Future[Any], before: str) -> None:
    """Raises ServerError when a request is over before its time."""
    if running.done() and running.exception() is not None:
        raise running.exception() or AssertionError
    if client.failed:
        raise ServerError(f"{client.failed} requests failed before {before}; requests.jsonl says how.")
    if client.done:
        raise ServerError(
            f"a reply ended before {before}; lower --concurrency or --output-tokens ({client.job.sampling.max_tokens} "
            "here) to what the server's KV cache holds to the end of all replies, or raise --output-tokens if the "
            "replies were too short."
        )


async def _command(target: Target, command: tuple[str, str], name: str, timeout_s: float) -> None:
    """Raises ServerError when the server does not do it."""
    method, path = command
    began = now_ns()
    try:
        status, _, body = await asyncio.to_thread(get, target, path, timeout_s, method)
    except TransportError:
        waited_s = (now_ns() - began) / 1e9
        raise ServerError(
            f"{name} gave no answer to {method} {path} in {waited_s:.1f} s; its server.log may say why."
        ) from None
    if status in (404, 405):
        raise ServerError(f"this {name} has no {path}; it needs a version whose profiler a client can start.")
    if status != 200:
        reason = printable(body.decode(errors="replace"), 200) or "no reason"
        raise ServerError(f"{name} answers {method} {path} with status {status}: {reason}.")


# The trace.


async def collect(traces: Path, kept: Path, timeout_s: float = TRACE_WAIT_S) -> list[TraceSpan]:
    """The spans of the first GPU's trace, once it is whole; a gzipped copy lies at `kept`. Raises ServerError."""
    sizes: dict[Path, int] = {}
    problem = "there is none"
    began = now_ns()
    while True:
        seen = {path: path.stat().st_size for path in traces.glob("*") if _TRACE_NAME.search(path.name)}
        if seen and seen == sizes:  # the files have stopped growing
            chosen = max(seen, key=lambda path: (bool(_FIRST_RANK.search(path.name)), seen[path]))
            try:
                spans = await asyncio.to_thread(trace.read, chosen)
            except TraceError as error:
                problem = str(error).rstrip(".")
            else:
                await asyncio.to_thread(_keep, chosen, kept)
                return spans
        if now_ns() - began > timeout_s * 1e9:
            raise ServerError(f"the server left no whole trace in {traces} within {timeout_s:g} s: {problem}.")
        sizes = seen
        await asyncio.sleep(0.5)


def _keep(chosen: Path, kept: Path) -> None:
    if chosen.name.endswith(".gz"):
        shutil.copyfile(chosen, kept)
    else:
        with chosen.open("rb") as source, gzip.open(kept, "wb") as target:
            shutil.copyfileobj(source, target)


def dry_run(config: Config, directory: Path, run_id: str) -> str:
    """What would be started, as text; nothing is."""
    return plan_launch(config, directory, run_id, profiled=True).text()
