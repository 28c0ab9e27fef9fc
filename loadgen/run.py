"""One run from options to records, step by step: the server, the plan, the client's ceiling, the manifest, the load.

`loadgen breakdown` takes the same steps but for the load, which it drives itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

import backends
from backends import exit_codes, gpus
from backends.exit_codes import FailedError, Stopped
from backends.launch import LaunchError
from backends.protocol import Account, Backend, HttpRequest, ServerInfo
from backends.untrusted import masked
from loadgen import rundir, warmup
from loadgen.calibration import calibrate
from loadgen.client.engine import LiveCounters, Progress, Send
from loadgen.client.limits import check_workers, make_room, named_workers, sized
from loadgen.client.workers import sender
from loadgen.config import Config, ConfigError, from_environment, keys_of_url
from loadgen.event_loop import StopSignals, run_loop
from loadgen.load.load import Load
from loadgen.load.prompts import tokenizer_count
from loadgen.monitor.messages import Expected, Live, MetricsSource
from loadgen.monitor.sidecar import Monitor, sidecar
from loadgen.plan import ClientPlan, plan_run, read_dataset, unkept, unlisted
from loadgen.probe import ServerError, account, check_replicas, first_request, identify, timetable
from loadgen.progress import ProgressLine
from loadgen.rundir import Ceiling, Manifest, WireFacts, records
from loadgen.rundir.emulation import Emulation
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.server import embedded
from loadgen.server.placement import chosen
from loadgen.steady.live import Falling, words
from loadgen.target import Target, TransportError
from loadgen.terminal import say, say_error
from loadgen.wire import ObservedWire, measure

if TYPE_CHECKING:  # most runs start no server and use no cluster: what these stand on is imported where it is used
    from loadgen.cluster.fleet import Fleet
    from loadgen.server.launch import Launch
    from loadgen.server.managed import ManagedServer

BEFORE = "before the load began"
Say = Callable[[str], None]  # a line for the person who watches


@dataclass(frozen=True)
class Served:
    """The server that is measured. managed: where loadgen started it. emulation: of modelled hardware. fleet: the
    machines that send to it, where they are those of a cluster."""

    target: Target
    managed: ManagedServer | None = None
    emulation: Emulation | None = None
    fleet: Fleet | None = None

    def gpu_indices(self, config: Config) -> tuple[int, ...]:
        """The GPUs that the server uses: those it was given; of one that --url names and that runs here, those of
        --gpus, else all of this machine. Raises ConfigError."""
        if self.managed is not None:
            return self.managed.launch.gpu_indices
        if not config.url_is_local or config.gpus == "none":
            return ()
        inventory = gpus.read()
        if config.gpus is None:
            return tuple(gpu.index for gpu in inventory.gpus)
        return chosen(config, inventory)


@dataclass
class LoadRun:
    """One run in `directory`, which exists. Every step raises the errors of its parts, each one sentence."""

    config: Config
    directory: Path
    run_id: str
    say: Say
    stop: StopSignals = field(default_factory=StopSignals)  # whose signals end the run in good order
    measures_wire: bool = True

    def __post_init__(self) -> None:
        self.backend = backends.get(self.config.kind)
        self.target = target_of(self.config)
        self.info = ServerInfo(None)
        self.account = Account()
        self.emulated = False
        self._launch: Launch | None = None
        self._processes = 1  # that send
        self._stopped_overloaded = False

    def check(self) -> None:
        """Refuses what cannot be measured before anything is started or written: options, dataset, tokenizer, GPUs,
        and what this machine can hold. Raises ConfigError, WorkloadError, LaunchError or TransportError."""
        config = self.config
        if config.where in ("docker", "process"):
            from loadgen.server.launch import plan_launch

            self._launch = plan_launch(config, self.directory, self.run_id)
            plan = plan_run(
                config, self.backend, Target(""), ServerInfo(self._launch.model.name), self.run_id, self._launch.model
            )
        elif config.where == "embedded":
            embedded.dialect(self.backend.name)
            if config.gpu is not None:
                embedded.check(config)
            info = ServerInfo(embedded.model_name(config), max_total_tokens=embedded.model_len(config))
            plan = plan_run(config, self.backend, Target(""), info, self.run_id)
        else:
            plan = plan_run(config, self.backend, Target(""), ServerInfo(config.model or "unknown"), self.run_id)
            if config.url_is_local and config.gpus not in (None, "none"):
                chosen(config, gpus.read())
        if plan.prompts.tokenizer is not None:
            tokenizer_count(plan.prompts.tokenizer)
        if config.on is not None:
            from loadgen.cluster.ray_cluster import check_installed

            check_installed()
            return  # what the machines can hold, they say themselves
        if (named := named_workers(config, plan)) is not None:
            check_workers(named)
        make_room(plan, named)

    async def measure(self) -> None:
        """All of it: starts the server where there is none, sends the load, and leaves the records."""
        with stoppable(self.stop):
            async with contextlib.AsyncExitStack() as stack:
                monitor = await stack.enter_async_context(self.sidecar())
                served = await stack.enter_async_context(self.served())
                await self.measure_on(served, monitor)

    def sidecar(self) -> contextlib.AbstractAsyncContextManager[Monitor]:
        """The process that watches this run from beside."""
        return sidecar(self.config.metrics_port, self.config.server_metrics)

    async def measure_one(self, served: Served, when: str = BEFORE, watch: Progress | None = None) -> None:
        """One of several on a server that is there, in its own directory, which goes again where it stays empty. A
        signal ends it in good order."""
        with rundir.measuring(self.directory, private=self.config.dataset is not None), stoppable(self.stop, when):
            async with self.sidecar() as monitor:
                await self.measure_on(served, monitor, watch)

    async def measure_on(self, served: Served, monitor: Monitor, watch: Progress | None = None) -> None:
        """Sends the load to a server that is there, and leaves the records. watch: is given the clients' snapshots."""
        plan = await self.plan(served)
        if served.fleet is not None:
            served.fleet.processes(self.config, plan)
            await served.fleet.agree(plan)
        ceiling = await self.ceiling(plan, served.fleet)
        wire = ObservedWire()
        if self.config.warmup and self.measures_wire and served.fleet is None:
            wire = await measure(plan, self.say)
        self._decide_processes(plan, served, ceiling, wire.pace_ms)
        if self.config.warmup_load:
            await warmup.play(plan, self._sender(served), self.say)
        self.write_manifest(plan, served, ceiling, wire.facts)
        if self.emulated:
            await asyncio.to_thread(timetable, served.target)  # its counts begin here
        await self._send(plan, served, monitor, watch)
        if self._stopped_overloaded:
            self._amend(stopped_overloaded=True)
        if self.emulated and (found := await asyncio.to_thread(timetable, served.target)) is not None:
            self._amend(timetable=found)
        if served.managed is not None:
            await self._inspect(served.managed)

    @contextlib.asynccontextmanager
    async def served(self, *, profiled: bool = False) -> AsyncIterator[Served]:
        """The server: the one that --url names, or one that is started and ends with the block. An error of the block
        gives way to the reason why a started server died."""
        if self.config.on is not None:
            from loadgen.cluster import machines

            async with machines.fleet(self.config, self.target) as fleet:
                names = ", ".join(node.member.name for node in fleet.nodes)
                self.say(f"{len(fleet.nodes)} machines send the load: {names}")
                for note in fleet.facts().notes:
                    self.say(f"note: {note}")
                yield Served(self.target, fleet=fleet)
        elif self.config.url is not None:
            yield Served(self.target)
        elif self.config.where == "embedded":
            async with self._embedded() as serving:
                yield Served(self._at(serving.url), emulation=serving.emulation)
        else:
            from loadgen.server import managed

            async with self._managed(profiled) as server:
                try:
                    yield Served(self._at(server.url), server)
                except (ServerError, TransportError):
                    ended = await server.ended(managed.END_WAIT_S)
                    if ended is None:
                        raise
                    raise ended from None

    def _at(self, url: str) -> Target:
        return msgspec.structs.replace(self.target, url=url)

    @contextlib.asynccontextmanager
    async def _embedded(self) -> AsyncIterator[embedded.Serving]:
        config = self.config
        dialect = embedded.dialect(self.backend.name)
        options = embedded.options(config, dialect, embedded.model_place(config))
        times = "fixed timing" if config.gpu is None else f"times as modelled for {config.gpu}"
        async with embedded.serving(*options) as serving:
            self.say(f"the embedded server runs: an emulated {dialect} server, {times}, no GPU")
            for note in serving.emulation.notes if serving.emulation is not None else ():
                self.say(f"note: {note}")
            yield serving

    @contextlib.asynccontextmanager
    async def _managed(self, profiled: bool) -> AsyncIterator[ManagedServer]:
        from loadgen.server.launch import plan_launch
        from loadgen.server.managed import managed

        launch = self._launch
        if launch is None:
            launch = await asyncio.to_thread(
                lambda: plan_launch(self.config, self.directory, self.run_id, profiled=profiled)
            )
        for note in launch.notes:
            self.say(f"note: {note}")
        self.say(f"starting {launch.title}{', with its profiler' if profiled else ''}")
        async with managed(launch, self.config.ready_timeout, self.say) as server:
            self.say(f"{self.backend.name} is ready after {server.ready_s:.0f} s")
            yield server

    async def plan(self, served: Served) -> ClientPlan:
        """Asks the server what it is, and plans the load for it: the machine has room for that many streams, and text
        prompts are exact as the server counts them."""
        named = self.config.model is not None
        self.info, self.emulated, doubt = await asyncio.to_thread(identify, self.backend, served.target, named=named)
        if doubt:
            self.say(
                f"note: the server does not say what it is ({doubt}); it is measured as --backend {self.backend.name} "
                "and --model say."
            )
        await asyncio.to_thread(check_replicas, served.target, self.config.replicas)
        if not self.emulated:
            self.account = await asyncio.to_thread(account, self.backend, served.target)
        info, model = self.info, None
        if served.managed is not None:
            launch = served.managed.launch
            model = launch.model
            if info.max_total_tokens is None:  # it does not say, but was started so
                info = msgspec.structs.replace(info, max_total_tokens=launch.settings.max_model_len)
        plan = plan_run(self.config, self.backend, served.target, info, self.run_id, model)
        if served.fleet is None:
            make_room(plan, named_workers(self.config, plan))
        if plan.job.load.left_out:
            source = "dataset" if plan.job.load.trace is None else "trace"
            self.say(f"note: of the {source} these are not sent: {plan.job.load.left_out}.")
        for note in plan.job.load.notes:
            self.say(f"note: of the trace: {note}.")
        for note in unkept(plan.job.load, self.backend, info):
            self.say(f"note: {note}.")
        if served.managed is None and (note := unlisted(plan.job.model, info)):
            self.say(f"note: {note}.")
        plan, notes = await first_request(plan, doubt)
        for note in notes:
            self.say(f"note: {note}.")
        return plan

    async def wire(self) -> WireFacts | None:
        """What the wire to the server that --url names adds, without a load. Raises the errors of `plan`."""
        return (await measure(await self.plan(Served(self.target)), self.say)).facts

    async def ceiling(self, plan: ClientPlan, fleet: Fleet | None = None) -> Ceiling | None:
        """The client's own ceiling for this load, unless --no-calibrate; of several machines the slowest's."""
        if not self.config.calibrate:
            return None
        ceiling = await calibrate(plan) if fleet is None else await fleet.ceiling(plan)
        if ceiling is not None:
            whose = "this client's" if fleet is None else "the slowest machine's"
            age_s = time.time() - (ceiling.measured_unix_s or time.time())
            before = f", measured {age_s / 60:.0f} min ago" if age_s >= 60 else ""
            self.say(
                f"{whose} ceiling: {ceiling.events_per_s_per_core:,.0f} events/s on one core "
                f"({ceiling.cpu_us_per_event:.1f} us each{before})"
            )
        return ceiling

    def write_manifest(
        self, plan: ClientPlan, served: Served, ceiling: Ceiling | None = None, wire: WireFacts | None = None
    ) -> None:
        """Writes what is measured on what, before anything is sent."""
        manifest = Manifest(
            run_id=plan.job.run_id,
            version=plan.job.version,
            started_unix_s=time.time(),
            argv=["loadgen", *sys.argv[1:]],
            config=self.config.as_dict(),
            backend=plan.backend,
            model=plan.job.model,
            url=plan.target.url,
            emulated=self.emulated,
            server_version=self.info.version or self.account.version,
            kv_cache_tokens=self.account.kv_cache_tokens,
            server_settings=dict(self.account.settings),
            requests_planned=plan.job.load.planned,
            client_processes=self._processes,
            arrival=plan.job.load.when,
            left_out=plan.job.load.left_out,
            phases=tuple(plan.job.load.phases()),
            max_total_tokens=self.info.max_total_tokens,
            machine=rundir.this_machine(),
            dataset_prompts=len(read_dataset(self.config, self.backend)) if self.config.repeat_dataset else None,
            ceiling=ceiling,
            wire=wire,
            hands_over=plan.job.hands_over,
            launch=served.managed.facts if served.managed is not None else None,
            emulation=served.emulation,
            cluster=served.fleet.facts() if served.fleet is not None else None,
        )
        rundir.write_manifest(self.directory, manifest)

    def _decide_processes(
        self, plan: ClientPlan, served: Served, ceiling: Ceiling | None, pace_ms: float | None
    ) -> None:
        """How many client processes send, of all machines together."""
        named = named_workers(self.config, plan)
        if served.fleet is not None:
            self._processes = served.fleet.processes(self.config, plan)
        elif named is not None:
            self._processes = named
        else:
            here = served.managed is not None or self.config.where == "embedded" or self.config.url_is_local
            self._processes, note = sized(plan, ceiling, pace_ms, server_is_here=here)
            if note:
                self.say(note)

    def _sender(self, served: Served) -> Send:
        return sender(self._processes) if served.fleet is None else served.fleet.play

    async def _send(self, plan: ClientPlan, served: Served, monitor: Monitor, watch: Progress | None) -> None:
        """Sends the load and leaves the records, watched from beside."""
        if self.config.server_metrics:
            source = MetricsSource.of(served.target, self.backend, self.config.replicas)
            gpu_indices = await asyncio.to_thread(served.gpu_indices, self.config)
            monitor.begin(self.directory, self.run_id, source, gpu_indices, expected(plan.job.load))
        else:
            monitor.begin(self.directory, self.run_id, expected=expected(plan.job.load))
        send, watched = self._sender(served), self._watched(monitor, served, plan.job.load, watch)
        try:
            await send(plan, self.directory, watched, monitor.sample, self.stop)
            if self._processes > 1 or served.fleet is not None:
                self._join()
        except rundir.WriteError as error:
            raise rundir.RunError(_not_kept(self.directory, error)) from None
        finally:
            self.stop.on_signal()
            # The run is over now, and whatever is written next stands below no live view. What the report needs is
            # imported while the sidecar takes its last sample.
            await asyncio.gather(monitor.end(), asyncio.to_thread(import_module, "loadgen.report.build"))
        if monitor.trouble:
            self.say(f"note: {monitor.trouble}")

    def _watched(self, monitor: Monitor, served: Served, load: Load, watch: Progress | None) -> Progress:
        """Shows a person how the run goes, and tells the sidecar what only the clients know."""
        line, remote = ProgressLine(), served.fleet is not None
        falling = Falling("" if load.in_sessions else load.when)

        def watched(clients: list[LiveCounters]) -> None:
            if watch is not None:
                watch(clients)
            if clients:  # else no worker has reported anything yet
                drawn = monitor.draws
                live = together(clients, remote)
                live.falling_per_s = falling.look(live.elapsed_s, live.done + live.in_flight, live.done)
                line(clients, drawn, live.falling_per_s)
                live.stopping, live.drawn = self.stop.number is not None, drawn
                monitor.progress(live)
                ends = self.config.stop_when_overloaded and not self._stopped_overloaded and self.stop.number is None
                if ends and live.falling_per_s is not None:
                    self._stopped_overloaded = True
                    self.say(f"{words(live.falling_per_s)}; the run ends (--stop-when-overloaded)")
                    self.stop.end()

        return watched

    def _join(self) -> None:
        """Joins the workers' records. Where that cannot be written the parts stay, and a report is made of them."""
        try:
            records.merge(self.directory)
        except OSError as error:
            self.say(f"note: the workers' records in {self.directory} were not joined: {error.strerror or error}.")

    def _amend(self, **facts: object) -> None:
        """Adds what is known only now to the manifest as it is: machines of a cluster have added to it, too."""
        manifest = rundir.read_manifest(self.directory)
        rundir.write_manifest(self.directory, msgspec.structs.replace(manifest, **facts))

    async def _inspect(self, server: ManagedServer) -> None:
        """How the server took the load: its death goes into the manifest. One that failed requests gets time to die."""
        from loadgen.server import managed

        failed = await asyncio.to_thread(_any_failed, self.directory)
        ended = await server.ended(managed.END_WAIT_S if failed else 0.0)
        if ended is not None:
            if ended.log:
                self.say(managed.quoted(ended.log))
            self.say(str(ended))
            self._amend(launch=msgspec.structs.replace(server.facts, ended=str(ended)))
        elif failed and (trouble := await server.trouble()):
            self.say(trouble)


@dataclass(frozen=True)
class NextRun:
    """One of several runs on one server. over: called in a thread when it was measured. watch: is given the clients'
    snapshots."""

    run: LoadRun
    over: Callable[[], object]
    watch: Progress | None = None


async def measure_each(
    whole: LoadRun, runs: Callable[[Served], AsyncGenerator[NextRun, None]], when: str = BEFORE
) -> None:
    """One run after another on one start of the server of `whole`; `runs` is asked for the next one when the one before
    is over. A signal ends the run that it meets in good order, and no other begins. Raises as `LoadRun.measure` does;
    the runs before are kept."""
    with stoppable(whole.stop, when):
        async with whole.served() as served, contextlib.aclosing(runs(served)) as following:
            while whole.stop.number is None:
                with stoppable(whole.stop, when):
                    if (one := await anext(following, None)) is None:
                        return
                    await one.run.measure_one(served, when, one.watch)
                    await asyncio.to_thread(one.over)


def target_of(config: Config) -> Target:
    """Where --url points, with the key, the headers and the certificates of the options. Raises ConfigError."""
    token = None if config.api_key_env is None else from_environment(config.api_key_env, "--api-key-env")
    headers = tuple(
        (name, value if variable is None else from_environment(variable, "--header"))
        for name, value, variable in config.headers
    )
    ca = None if config.ca is None else str(config.ca.absolute())  # worker processes may run elsewhere
    secrets = (*(os.environ[variable] for variable in config.secret_variables), *keys_of_url(config.url or ""))
    target = Target(config.url or "", token, headers, ca, config.insecure, secrets)
    try:
        if ca is not None:
            target.tls_context()
    except OSError as error:  # also of SSL
        reason = "it holds no certificates in PEM format" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"cannot use --ca {config.ca}: {reason}.") from None
    return target


def run_to_end(measuring: Coroutine[object, object, None], began: Callable[[], bool] = lambda: False) -> int | None:
    """Measures; the exit code where it failed, or was stopped before there was anything to report. began: whether some
    of it is there to report."""
    try:
        run_loop(measuring)
    except FailedError as error:
        return backend_failed(error)
    except Stopped as error:
        if not began():
            say_error("loadgen", error)
        return error.exit_code
    return None


@contextlib.contextmanager
def stoppable(stop: StopSignals, when: str = BEFORE) -> Iterator[None]:
    """A signal ends the block, and what was started is taken back; during the load of a run the signals are the
    clients' own. Raises Stopped, which says `when` that was."""
    task = asyncio.current_task()
    assert task is not None
    stop.on_signal(task.cancel)
    try:
        yield
    except asyncio.CancelledError:
        if stop.number is not None:
            raise Stopped(f"stopped {when}; nothing was measured.", stop.exit_code) from None
        raise


def dry_run(config: Config, directory: Path, run_id: str) -> str:
    """What a run would start and send first, as text; nothing is started or sent and no file written. Raises as
    `LoadRun` does."""
    if config.url is not None:
        return _first_request_to(config, run_id)
    from loadgen.server.launch import plan_launch

    launch = plan_launch(config, directory, run_id)
    backend = launch.backend
    target = Target(f"http://127.0.0.1:{launch.start.port}")
    plan = plan_run(config, backend, target, ServerInfo(launch.settings.served_name), run_id, launch.model)
    request = _first_request(plan, backend)
    parts = [launch.text()]
    for path, content in launch.files.items():
        if isinstance(content, bytes):
            parts += ["", f"# the file {path.relative_to(directory.absolute())}", content.decode().rstrip()]
    headers = "\n".join(f"{name}: {value}" for name, value in request.headers)
    parts += ["", "# the first of its requests", f"{request.method} {request.path}", headers, "", request.body.decode()]
    return "\n".join(parts)


def _first_request_to(config: Config, run_id: str) -> str:
    """The first request to the server at --url as its bytes would be, secrets masked."""
    from loadgen.client.connection import FastTransport

    backend, target = backends.get(config.kind), target_of(config)
    plan = plan_run(config, backend, target, ServerInfo(config.model or "THE-MODEL-THAT-IT-LISTS"), run_id)
    request, request_id = _first_request(plan, backend), f"{run_id}-0"
    if config.session_header is not None:
        request = msgspec.structs.replace(request, headers=(*request.headers, (config.session_header, request_id)))
    transport = FastTransport(target, backend.error_message, plan.job.timeouts)
    sent = transport.prepare(request, request_id).decode("utf-8", "replace").replace("\r\n", "\n")
    place = f"{target.host}, port {target.port}{', over TLS' if target.tls else ''}"
    return masked(f"# the first request, to {place}; nothing was sent\n\n{sent}")


def _first_request(plan: ClientPlan, backend: Backend) -> HttpRequest:
    prompt = plan.prompts.build(backend, plan.job.load, 0).prompt("measured", 0)
    return plan.job.request(backend, prompt, plan.job.sampling)


def backend_failed(error: FailedError) -> int:
    """Says why, after the end of the server's log where there is one; the exit code."""
    if isinstance(error, LaunchError) and error.log:
        from loadgen.server.managed import quoted

        say(quoted(error.log))
    say_error("loadgen", error)
    return exit_codes.FAILED


def expected(load: Load) -> Expected:
    """What the live view is to know of a load."""
    due_ns = load.due_ns()
    plain = load.trace is None and load.output_tokens.kind == "fixed"
    return Expected(
        duration_s=load.duration_s,
        last_due_s=float(due_ns[-1]) / 1e9 if len(due_ns) else None,
        reply_tokens=load.output_tokens.least if plain else None,
    )


def together(clients: Sequence[LiveCounters], remote: bool = False) -> Live:
    """The snapshots of all client processes, at least one, as one. remote: their records are on other machines."""
    plans = [client.planned for client in clients]

    def total(name: str) -> int:
        return sum(getattr(client, name) for client in clients)

    return Live(
        planned=None if None in plans else sum(plan or 0 for plan in plans),
        in_flight=total("in_flight"),
        events=total("events"),
        events_in_flight=total("events_in_flight"),
        done=total("done"),
        failed=total("failed"),
        elapsed_s=max(client.elapsed_s for client in clients),
        cpu_ratio=max(client.cpu_ratio for client in clients),
        loop_lag_ms=max(client.loop_lag_ms for client in clients),
        latest_ttft_ms=[ttft for client in clients for ttft in client.ttft_ms] if remote else [],
    )


def _not_kept(directory: Path, error: rundir.WriteError) -> str:
    """The sentence of a run whose records can no longer be kept."""
    try:
        kept = len(records.read(directory)[0].measured())
    except records.RecordsError:
        kept = 0
    if not kept:
        return f"the load was stopped: {directory} cannot be written: {error}; it holds no request of this run."
    return (
        f"the load was stopped: {directory} cannot be written: {error}; it holds {kept} finished requests, which "
        f"`loadgen report {directory}` shows."
    )


def _any_failed(directory: Path) -> bool:
    """Whether a request failed otherwise than by being cancelled, with the run or as it was to be."""
    table, _ = records.read(directory)
    ours = [OUTCOMES.index(outcome) for outcome in ("ok", "abandoned", "cancelled", "dropped")]
    return not bool(np.isin(table.outcome, ours).all())
