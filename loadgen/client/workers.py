"""The clients of a run: one in this process, or one a shard in processes of their own.

A worker process says when it is ready, is told the common t = 0, and writes its own part of the records; the parts are
joined line for line at the end, so the result is exact. A worker whose parent is gone stops by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import backends
from backends.protocol import Backend
from loadgen import child_env
from loadgen.client.engine import Client, Snapshot
from loadgen.client.limits import make_room
from loadgen.client.transport import FastTransport, Transport
from loadgen.clock import now_ns
from loadgen.load import arrivals
from loadgen.load.job import Plan
from loadgen.load.prompts import WorkloadError
from loadgen.rundir import records
from loadgen.target import TransportError

DRAIN_S = 5.0  # how long a stopped run waits for replies
START_MARGIN_NS = 20_000_000  # from the last worker's "ready" to t = 0

DONE, DIED = "done", "the process died"  # what is last heard of a worker that served to its end, and of a killed one

Progress = Callable[[list[Snapshot]], None]
Warm = Callable[[], Awaitable[None]]  # what to do once clients and server are warm


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a run in good order: Ctrl-C, `kill`, and a terminal that is gone, unless `nohup` says that
    the run is to outlive it."""
    hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def on_stop(act: Callable[[], object]) -> None:
    """From now on the signals that end a run do this, in the running loop."""
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, act)


def build_client(plan: Plan) -> Client:
    backend = backends.get(plan.backend)
    job = plan.job
    due = np.empty(0, np.int64)
    if job.concurrency is None:
        due = arrivals.draw(plan.arrival, job.requests, job.duration_s, job.seed)
    workload = plan.prompts.build(backend, job.seed, job.warmup)
    return Client(job, backend, workload, build_transport(plan, backend), due)


def build_transport(plan: Plan, backend: Backend) -> Transport:
    arguments: Any = (plan.target, backend.error_message, plan.job.timeouts)
    if plan.transport == "aiohttp":
        from loadgen.client.transport_aiohttp import AiohttpTransport

        return AiohttpTransport(*arguments, fresh=plan.fresh)
    return FastTransport(*arguments, fresh=plan.fresh, kernel_timestamps=plan.kernel_timestamps)


async def execute(plan: Plan, workers: int, directory: Path, progress: Progress, warm: Warm | None = None) -> None:
    """Sends the plan's load and leaves `requests.jsonl` in `directory`. warm: awaited between warm-up and t = 0. From
    then on signals are the clients', which drain; what they do before is the caller's."""
    if workers == 1:
        await run_here(plan, directory, progress, warm)
    else:
        await _run_in_workers(plan, workers, directory, progress, warm)


async def run_here(
    plan: Plan, directory: Path, progress: Progress, warm: Warm | None = None, stoppable: bool = True
) -> None:
    client = build_client(plan)
    loop = asyncio.get_running_loop()
    try:
        await client.prepare()
        if warm is not None:
            await warm()
        if stoppable:
            on_stop(lambda: client.stop(DRAIN_S))
        ticker = loop.create_task(_every_second(lambda: progress([client.snapshot()])))
        try:
            await client.run(now_ns() + START_MARGIN_NS, directory / "requests.jsonl")
        finally:
            ticker.cancel()
            progress([client.snapshot()])
    finally:
        await client.transport.close()


async def _every_second(act: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(1.0)
        act()


async def _run_in_workers(plan: Plan, workers: int, directory: Path, progress: Progress, warm: Warm | None) -> None:
    context = multiprocessing.get_context("spawn")
    with child_env.spawning():
        shards = [_Shard(context, plan.share(shard, workers), directory) for shard in range(workers)]
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for shard in shards:
            shard.stop()

    try:
        for shard in shards:
            await shard.ready()
        if warm is not None:
            await warm()
        on_stop(stop)
        t0_ns = now_ns() + START_MARGIN_NS
        for shard in shards:
            shard.start(t0_ns)
        ticker = loop.create_task(_every_second(lambda: progress([s.snapshot for s in shards if s.snapshot])))
        failures = [said for shard in shards if (said := await shard.over())]
        ticker.cancel()
        progress([s.snapshot for s in shards if s.snapshot])
    finally:
        for shard in shards:
            shard.end()
    if failures:
        raise TransportError(f"a worker process failed: {failures[0]}; {directory} keeps what was written.")
    records.merge(directory)


def _tell(pipe: Pipe, message: object) -> None:
    """To the other side of the pipe, if there still is one."""
    with contextlib.suppress(OSError):
        pipe.send(message)


class _Shard:
    """A worker process and what it last said."""

    def __init__(self, context: Any, plan: Plan, directory: Path) -> None:
        self.pipe, theirs = context.Pipe()
        self.snapshot: Snapshot | None = None
        self.started = False
        path = directory / f"requests.{plan.job.shard}.jsonl"
        self.process = context.Process(target=_work, args=(theirs, msgspec.msgpack.encode(plan), str(path)))
        self.process.start()
        theirs.close()
        self._said: asyncio.Queue[str] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(self.pipe.fileno(), self._listen)

    def _listen(self) -> None:
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self.pipe.fileno())
            self._said.put_nowait(DIED)
            return
        if isinstance(message, Snapshot):
            self.snapshot = message
        else:
            self._said.put_nowait(message)

    async def ready(self) -> None:
        said = await self._said.get()
        if said != "ready":
            raise TransportError(f"a worker process could not begin: {said}")

    def start(self, t0_ns: int) -> None:
        self.started = True
        _tell(self.pipe, t0_ns)

    def stop(self) -> None:
        _tell(self.pipe, "stop")

    async def over(self) -> str:
        """Waits until it is done, or has died: what it wrote counts, and the report says that it was killed. Returns
        why it had to give up, such as a full disk; empty where it had not."""
        said = await self._said.get()
        return "" if said in (DONE, DIED) else said

    def end(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            asyncio.get_running_loop().remove_reader(self.pipe.fileno())
        self.pipe.close()  # a worker whose parent is gone stops by itself
        if self.started:
            self.process.join(2 * DRAIN_S)
        self.process.kill()
        self.process.join()


def _work(pipe: Pipe, encoded: bytes, path: str) -> None:
    """A worker process: ready, t = 0, snapshots every second, done."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group: the parent gets them too, and tells us
    try:
        run_loop(_work_loop(pipe, msgspec.msgpack.decode(encoded, type=Plan), Path(path)))
    except (TransportError, WorkloadError, OSError) as error:
        _tell(pipe, getattr(error, "strerror", None) or str(error))


async def _work_loop(pipe: Pipe, plan: Plan, path: Path) -> None:
    make_room(plan, plan.job.shards)
    client = build_client(plan)
    loop = asyncio.get_running_loop()
    t0: asyncio.Future[int | None] = loop.create_future()

    def listen() -> None:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            loop.remove_reader(pipe.fileno())
            message = "stop"
        if message == "stop":
            client.stop(DRAIN_S)
            if not t0.done():
                t0.set_result(None)  # the parent is gone before it began
        else:
            t0.set_result(message)

    await client.prepare()
    loop.add_reader(pipe.fileno(), listen)
    _tell(pipe, "ready")
    start = await t0
    if start is None:
        return
    ticker = loop.create_task(_every_second(lambda: _tell(pipe, client.snapshot())))
    await client.run(start, path)
    ticker.cancel()
    _tell(pipe, client.snapshot())
    _tell(pipe, DONE)
    await client.transport.close()


def run_loop(main: Any) -> Any:
    """Runs a coroutine on uvloop where there is one."""
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
