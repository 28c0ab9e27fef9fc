"""One load shared among client processes, where one core is too few.

A worker process reports when it is ready, gets the common t = 0, and writes its own part of the records; the parts are
joined line for line at the end, so the result is exact. A worker dies with its parent, at once and without its last
line, so that the report says that the run was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadgen import child_env
from loadgen.client.engine import (
    DRAIN_S,
    START_MARGIN_NS,
    Progress,
    Snapshot,
    Warm,
    WarmUp,
    build_client,
    check_warm_up,
    run_here,
)
from loadgen.client.limits import make_room
from loadgen.clock import now_ns
from loadgen.event_loop import Stop, every_second, run_loop
from loadgen.load.lengths import WorkloadError
from loadgen.plan import Plan
from loadgen.rundir import WriteError
from loadgen.target import TransportError


class Done(NamedTuple):
    """The last message of a worker. problem: why it failed; empty: it did not. writing: its records can be kept no
    more."""

    problem: str = ""
    writing: bool = False


DIED = "the process died"  # in place of the last message of a worker that was killed


async def send(
    plan: Plan, workers: int, directory: Path, progress: Progress, warm: Warm | None = None, stop: Stop | None = None
) -> None:
    """Sends the plan's load from this process, or from several, and leaves the records, or their parts, in `directory`;
    otherwise as `run_here`. Raises TransportError, and WriteError."""
    if workers == 1:
        await run_here(plan, directory, progress, warm, stop)
    else:
        await run_in_workers(plan, workers, directory, progress, warm, stop)


async def run_in_workers(
    plan: Plan, workers: int, directory: Path, progress: Progress, warm: Warm | None = None, stop: Stop | None = None
) -> None:
    """Sends the plan's load from `workers` processes and leaves their parts of the records in `directory`; otherwise as
    `run_here`. Raises TransportError, and WriteError."""
    context = multiprocessing.get_context("spawn")
    with child_env.spawning():
        shards = [_Shard(context, plan.share(shard, workers), directory) for shard in range(workers)]
    loop = asyncio.get_running_loop()

    def stop_all() -> None:
        for shard in shards:
            shard.stop()

    try:
        check_warm_up([await shard.ready() for shard in shards])
        if warm is not None:
            await warm()
        if stop is not None:
            stop.on_signal(stop_all, hurry=stop_all)
        t0_ns = now_ns() + START_MARGIN_NS
        for shard in shards:
            shard.start(t0_ns)
        ticker = loop.create_task(every_second(lambda: progress([s.snapshot for s in shards if s.snapshot])))
        ends = await asyncio.gather(*(shard.over(stop_all) for shard in shards))
        ticker.cancel()
        progress([s.snapshot for s in shards if s.snapshot])
    finally:
        for shard in shards:
            shard.end()
    for end in ends:
        if end.writing:
            raise WriteError(end.problem)
        if end.problem and end.problem != DIED:
            raise TransportError(f"a worker process failed: {end.problem}; {directory} keeps what was written.")


def _send(pipe: Pipe, message: object) -> None:
    """To the other side of the pipe, if there still is one."""
    with contextlib.suppress(OSError):
        pipe.send(message)


class _Shard:
    """A worker process as its parent sees it. `snapshot`: its latest."""

    def __init__(self, context: Any, plan: Plan, directory: Path) -> None:
        self.pipe, theirs = context.Pipe()
        self.snapshot: Snapshot | None = None
        self.started = False
        path = directory / f"requests.{plan.job.shard}.jsonl"
        self.process = context.Process(target=_work, args=(theirs, msgspec.msgpack.encode(plan), str(path)))
        self.process.start()
        theirs.close()
        self._messages: asyncio.Queue[WarmUp | Done] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(self.pipe.fileno(), self._receive)

    def _receive(self) -> None:
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self.pipe.fileno())
            self._messages.put_nowait(Done(DIED))
            return
        if isinstance(message, Snapshot):
            self.snapshot = message
        else:
            self._messages.put_nowait(message)

    async def ready(self) -> WarmUp:
        message = await self._messages.get()
        if isinstance(message, Done):
            raise TransportError(f"a worker process could not begin: {message.problem}")
        return message

    def start(self, t0_ns: int) -> None:
        self.started = True
        _send(self.pipe, t0_ns)

    def stop(self) -> None:
        _send(self.pipe, "stop")

    async def over(self, stop_all: Callable[[], None]) -> Done:
        """Waits until it is done, or has died: what it wrote counts, and the report says that it was killed. Where it
        failed, as on a full disk, it does `stop_all`."""
        message = await self._messages.get()
        assert isinstance(message, Done)
        if message.problem and message.problem != DIED:
            stop_all()
        return message

    def end(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            asyncio.get_running_loop().remove_reader(self.pipe.fileno())
        self.pipe.close()
        if self.started:
            self.process.join(2 * DRAIN_S)
        self.process.kill()
        self.process.join()


def _work(pipe: Pipe, encoded: bytes, path: str) -> None:
    """A worker process: ready, t = 0, snapshots every second, done."""
    child_env.die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group: the parent gets them too, and passes them on
    try:
        run_loop(_work_loop(pipe, msgspec.msgpack.decode(encoded, type=Plan), Path(path)))
    except WriteError as error:
        _send(pipe, Done(str(error), writing=True))
    except (TransportError, WorkloadError, OSError) as error:
        _send(pipe, Done(getattr(error, "strerror", None) or str(error)))


async def _work_loop(pipe: Pipe, plan: Plan, path: Path) -> None:
    make_room(plan, plan.job.shards)
    client = build_client(plan)
    loop = asyncio.get_running_loop()
    t0_ns: asyncio.Future[int] = loop.create_future()

    def receive() -> None:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone, and nothing here may look as if the run had ended well
        if message == "stop":
            client.stop(DRAIN_S)
        else:
            t0_ns.set_result(message)

    def beat() -> None:
        client.check_file()
        _send(pipe, client.snapshot())

    loop.add_reader(pipe.fileno(), receive)
    _send(pipe, await client.prepare())
    start_ns = await t0_ns
    ticker = loop.create_task(every_second(beat))
    await client.run(start_ns, path)
    ticker.cancel()
    _send(pipe, client.snapshot())
    _send(pipe, Done())
    await client.transport.close()
