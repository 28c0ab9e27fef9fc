"""One run from options to records: look at the server, measure the client, write the manifest, send, collect."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import backends
from backends import catalog, gpus
from backends.protocol import Backend, Prompt, ProtocolError, ServerInfo
from loadgen import rundir
from loadgen.client.engine import Snapshot
from loadgen.client.exchange import Exchange
from loadgen.client.transport import UNQUEUED_S, Target, Transport, TransportError, get
from loadgen.client.workers import Progress, build_transport, execute, on_stop, run_here
from loadgen.config import Config, ConfigError
from loadgen.load.prompts import Text
from loadgen.monitor.sampler import Sampling, sampling
from loadgen.monitor.snapshots import Live, Watch, watching
from loadgen.plan import (
    OPEN_FILES_BESIDES,
    Plan,
    make_room,
    plan_run,
    planned_requests,
    streams_at_once,
    worker_count,
)
from loadgen.rundir import records
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.server import embedded
from loadgen.server.launch import plan_launch
from loadgen.server.managed import END_WAIT_S, Hosted, hosting, quoted
from loadgen.server.placement import chosen

CALIBRATION_EVENTS = 40_000  # about a second


class ServerError(Exception):
    """The server is not what was asked for. One sentence."""


class Stopped(Exception):
    """The user ended the run before there was anything to report. One sentence."""


def identify(backend: Backend, target: Target) -> tuple[ServerInfo, bool]:
    """What the server says of itself, and whether it is emulated. Raises TransportError or ServerError."""
    reasons = []
    emulated = False
    for path in backend.info_paths:
        status, headers, body = get(target, path)
        emulated = embedded.EMULATED_MARK in headers.get("server", "")
        if status == 401 or status == 403:
            raise ServerError(f"{target.url} refuses access (status {status}); name the key's variable: --api-key-env.")
        if status != 200:
            reasons.append(f"GET {path} answers {status}")
            continue
        try:
            return backend.read_info(path, body), emulated
        except ProtocolError as error:
            reasons.append(str(error))
    raise ServerError(f"{target.url} does not look like a {backend.name} server: {'; '.join(reasons)}.")


def embedded_model(config: Config) -> str:
    """The catalog's name of the model to emulate. Raises ConfigError for one that nobody knows."""
    name = config.model or "7b"
    spec = catalog.find(name)
    if spec is not None:
        return spec.name
    if "/" in name:
        return name
    known = ", ".join(spec.name for spec in catalog.MODELS)
    raise ConfigError(f"unknown model '{name}'; known are {known}, or any Hugging Face id (org/name).")


async def fit_text(plan: Plan) -> Plan:
    """Asks the server once how long it finds a text prompt, so that prompts come out exact as it counts them."""
    backend = backends.get(plan.backend)
    source = plan.prompts
    if source.dataset is not None or backend.prompt_kind != "text":
        return plan
    workload = source.build(backend, plan.job.seed + 1, 0)
    assert isinstance(workload, Text)
    client_transport = build_transport(plan, backend)
    await client_transport.open(1)
    try:
        for _ in range(2):
            seen = await _ask_once(plan, backend, client_transport, workload.prompt("warmup", 0))
            if seen is None or seen == source.input_tokens:
                break
            workload.fit_offset(seen)
    finally:
        await client_transport.close()
    return msgspec.structs.replace(plan, prompts=msgspec.structs.replace(source, offset=workload.offset))


async def _ask_once(plan: Plan, backend: Backend, transport: Transport, prompt: Prompt) -> int | None:
    done: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
    sampling = msgspec.structs.replace(plan.job.sampling, max_tokens=1)
    exchange = Exchange(0, "warmup", 0, prompt.n_tokens, 1, backend.decoder(sampling.stream), done.set_result)
    request = backend.encode(plan.job.model, prompt, sampling)
    transport.send(exchange, transport.prepare(request, f"{plan.job.run_id}-probe"))
    limit_s = min(UNQUEUED_S, plan.job.timeouts.first_byte_s)
    try:
        async with asyncio.timeout(limit_s):
            await done
    except TimeoutError:
        raise ServerError(f"no reply to a first request within {limit_s:g} s; is the server ready?") from None
    if exchange.outcome != "ok":
        raise ServerError(f"a first request failed ({exchange.outcome}): {exchange.error}")
    return exchange.prompt_tokens


async def calibrate(plan: Plan) -> rundir.Ceiling | None:
    """Runs the plan's shape, cut to about a second, against the embedded server, and reads off the client's cost."""
    dialect = embedded.DIALECTS.get(plan.backend)
    if dialect is None:
        return None
    streams = min(max(streams_at_once(plan), 16), 512)
    tokens = min(plan.prompts.output_tokens, max(4, CALIBRATION_EVENTS // streams))
    itl_ms = max(1.0, streams * 1000 / CALIBRATION_EVENTS)
    requests = min(max(streams, CALIBRATION_EVENTS // tokens), 8 * streams)
    with embedded.scratch() as scratch:
        directory, stamps = Path(scratch) / "run", Path(scratch) / "stamps.npz"
        directory.mkdir()
        options = ("--dialect", dialect, "--stamps", str(stamps), "--ttft-ms", "30", "--itl-ms", f"{itl_ms:g}")
        length = plan.prompts.input_tokens + tokens + OPEN_FILES_BESIDES
        async with embedded.serving(*options, "--max-model-len", str(length)) as served:
            small = msgspec.structs.replace(
                plan.job, model="llama-2-7b", requests=requests, duration_s=None, concurrency=streams, warmup=0
            )
            prompts = msgspec.structs.replace(
                plan.prompts, output_tokens=tokens, dataset=None, tokenizer=None, vocab_size=None, offset=0
            )
            small_plan = msgspec.structs.replace(plan, job=small, target=Target(served.url), prompts=prompts)
            await run_here(small_plan, directory, lambda snapshots: None, stoppable=False)
        return await asyncio.to_thread(embedded.ceiling, directory, stamps, requests, tokens)


def api_key(config: Config) -> str | None:
    """The key that --api-key-env names. Raises ConfigError."""
    if config.api_key_env is None:
        return None
    token = os.environ.get(config.api_key_env)
    if not token:
        raise ConfigError(f"the environment variable {config.api_key_env} named by --api-key-env is not set.")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{config.api_key_env} holds a line break or another character that no header can carry.")
    return token


async def run(config: Config, directory: Path, run_id: str, progress: Progress, say: Callable[[str], None]) -> None:
    """The whole run; the directory exists. Raises the errors of its parts, each one sentence."""
    backend = backends.get(config.kind)
    token = api_key(config)
    with stoppable():
        async with contextlib.AsyncExitStack() as stack:
            snapshots = await stack.enter_async_context(watching(config.metrics_port))
            watch = await stack.enter_async_context(sampling()) if config.server_metrics else None
            url, hosted, emulation = await _server(config, backend, directory, run_id, say, stack)
            target = Target(url, token)
            try:
                said = await _measure(
                    config, backend, target, hosted, emulation, watch, snapshots, directory, run_id, progress, say
                )
            except (ServerError, TransportError):
                ended = await hosted.ended(END_WAIT_S) if hosted else None
                if ended is None:
                    raise
                raise ended from None
            if hosted is not None:
                await _look_after(hosted, directory, said, say)


async def _measure(
    config: Config, backend: Backend, target: Target, hosted: Hosted | None,
    emulation: dict[str, Any] | None, watch: Sampling | None, snapshots: Watch, directory: Path, run_id: str,
    progress: Progress, say: Callable[[str], None],
) -> rundir.Manifest:  # fmt: skip
    """Looks at the server, sends the load, and leaves the records; the manifest as it was written."""
    info, emulated = await asyncio.to_thread(identify, backend, target)
    plan = plan_run(config, backend, target, info, run_id, hosted.launch.model if hosted else None)
    workers = worker_count(config, plan)
    make_room(plan, workers)
    plan = await fit_text(plan)
    measured = await calibrate(plan) if config.calibrate else None
    if measured is not None:
        say(
            f"this client's ceiling: {measured.events_per_s_per_core:,.0f} events/s on one core "
            f"({measured.cpu_us_per_event:.1f} us each)"
        )
    said = manifest(config, plan, info, emulated, measured, hosted.facts if hosted else None, emulation)
    rundir.write_manifest(directory, said)
    if watch is not None:
        cards = await asyncio.to_thread(_local_gpus, config, hosted)
        await watch.begin(target.url, target.token, backend.server_metrics, run_id, directory, cards)
    snapshots.begin(directory)
    await execute(plan, workers, directory, _told(progress, snapshots), watch.sample if watch is not None else None)
    if watch is not None:
        await watch.end()
    await snapshots.end()  # a server that loadgen started may take long to end: the run is over now
    if snapshots.trouble:
        say(f"note: {snapshots.trouble}")
    return said


def _told(progress: Progress, snapshots: Watch) -> Progress:
    """Tells the snapshots what only the clients know, too."""

    def both(clients: list[Snapshot]) -> None:
        progress(clients)
        if clients:  # else no worker has said anything yet
            plans = [client.planned for client in clients]
            planned = None if None in plans else sum(plan or 0 for plan in plans)
            in_flight, events = (sum(getattr(client, key) for client in clients) for key in ("in_flight", "events"))
            snapshots.tell(Live(planned, in_flight, len(clients), events))

    return both


async def _look_after(hosted: Hosted, directory: Path, said: rundir.Manifest, say: Callable[[str], None]) -> None:
    """How the server took the load: that it died goes into the manifest. One that failed requests gets time to die."""
    failed = await asyncio.to_thread(_any_failed, directory)
    ended = await hosted.ended(END_WAIT_S if failed else 0.0)
    if ended is not None:
        if ended.log:
            say(quoted(ended.log))
        say(str(ended))
        launch = {**hosted.facts, "ended": str(ended)}
        rundir.write_manifest(directory, msgspec.structs.replace(said, launch=launch))
    elif failed and (trouble := await hosted.trouble()):
        say(trouble)


def _any_failed(directory: Path) -> bool:
    """Whether a request failed otherwise than by being cancelled with the run."""
    table, _ = records.read(directory)
    ours = [OUTCOMES.index(outcome) for outcome in ("ok", "cancelled", "dropped")]
    return not bool(np.isin(table.outcome, ours).all())


async def _server(
    config: Config, backend: Backend, directory: Path, run_id: str, say: Callable[[str], None],
    stack: contextlib.AsyncExitStack,
) -> tuple[str, Hosted | None, dict[str, Any] | None]:  # fmt: skip
    """The address to measure: the one that was given, or of a server that is started and ends with `stack`. With it the
    server, or what was modelled."""
    if config.url is not None:
        return config.url, None, None
    if config.where == "embedded":
        dialect = embedded.DIALECTS.get(backend.name)
        if dialect is None:
            raise ConfigError(f"the embedded server does not speak '{backend.name}'; give --url.")
        model = embedded_model(config)
        options = embedded.options(config, dialect, model)
        times = "fixed timing" if config.gpu is None else f"times as modelled for {config.gpu}"
        say(f"starting the embedded server: an emulated {dialect} server, {times}, no GPU")
        served = await stack.enter_async_context(embedded.serving(*options))
        for note in (served.emulation or {}).get("notes", ()):
            say(f"note: {note}")
        return served.url, None, served.emulation
    launch = await asyncio.to_thread(plan_launch, config, directory, run_id)
    for note in launch.notes:
        say(f"note: {note}")
    say(f"starting {launch.title}")
    hosted = await stack.enter_async_context(hosting(launch, config.ready_timeout, say))
    say(f"{backend.name} is ready after {hosted.facts['ready_s']:.0f} s")
    return hosted.url, hosted, None


def _local_gpus(config: Config, hosted: Hosted | None) -> tuple[int, ...]:
    """Indices of the GPUs that the server uses: those it was given; of one that runs here those that --gpus names, else
    all of this machine. Raises ConfigError."""
    if hosted is not None:
        return hosted.launch.gpu_indices
    if not config.url_is_local or config.gpus == "none":
        return ()
    inventory = gpus.read()
    if config.gpus is None:
        return tuple(gpu.index for gpu in inventory.gpus)
    return chosen(config, inventory)


@contextlib.contextmanager
def stoppable(when: str = "before the load began") -> Iterator[None]:
    """Ctrl-C and its like end what goes on, and what was started is taken back; during the load of a run they are the
    clients' own. Raises Stopped, which says `when` that was."""
    task = asyncio.current_task()
    assert task is not None
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    on_stop(stop)
    try:
        yield
    except asyncio.CancelledError:
        if stopped:
            raise Stopped(f"stopped {when}; nothing was measured.") from None
        raise


def manifest(
    config: Config,
    plan: Plan,
    info: ServerInfo,
    emulated: bool,
    measured: rundir.Ceiling | None,
    launch: dict[str, Any] | None,
    emulation: dict[str, Any] | None,
) -> rundir.Manifest:
    return rundir.Manifest(
        run_id=plan.job.run_id,
        version=plan.job.version,
        started_unix_s=time.time(),
        argv=["loadgen", *sys.argv[1:]],
        config=config.as_dict(),
        backend=plan.backend,
        model=plan.job.model,
        url=plan.target.url,
        emulated=emulated,
        server_version=info.version,
        requests_planned=planned_requests(plan),
        arrival=config.arrival_text,
        max_total_tokens=info.max_total_tokens,
        machine=rundir.this_machine(),
        ceiling=measured,
        launch=launch,
        emulation=emulation,
    )


def dry_run(config: Config, directory: Path, run_id: str) -> str:
    """What a run would start and send first, as text; nothing is started and no file written. Raises as `run` does."""
    launch = plan_launch(config, directory, run_id)
    backend = launch.backend
    target = Target(f"http://127.0.0.1:{launch.start.port}")
    plan = plan_run(config, backend, target, ServerInfo(launch.settings.served_name), run_id, launch.model)
    prompt = plan.prompts.build(backend, plan.job.seed, 0).prompt("measured", 0)
    request = backend.encode(plan.job.model, prompt, plan.job.sampling)
    parts = [f"# {launch.title}", *(f"# note: {note}" for note in launch.notes), launch.command_line()]
    for path, content in launch.files.items():
        if isinstance(content, bytes):
            parts += ["", f"# the file {path.relative_to(directory.absolute())}", content.decode().rstrip()]
    headers = "\n".join(f"{name}: {value}" for name, value in request.headers)
    parts += ["", "# the first of its requests", f"{request.method} {request.path}", headers, "", request.body.decode()]
    return "\n".join(parts)
