"""One load shared among client processes, where one core is too few.

A worker process reports when it is ready, gets the common t = 0, and writes its own part of the records; the parts are
joined line for line at the end, so the result is exact. A worker whose parent is gone stops by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import msgspec

from loadgen import child_env
from loadgen.client.engine import DRAIN_S, START_MARGIN_NS, Progress, Snapshot, Warm, build_client
from loadgen.client.limits import make_room
from loadgen.clock import now_ns
from loadgen.event_loop import every_second, on_stop, run_loop
from loadgen.load.prompts import WorkloadError
from loadgen.plan import Plan
from loadgen.rundir import records
from loadgen.target import TransportError

READY, DONE = "ready", "done"  # messages of a worker; any other is why it failed
DIED = "the process died"  # in place of the last message of a worker that was killed


async def run_in_workers(
    plan: Plan, workers: int, directory: Path, progress: Progress, warm: Warm | None = None
) -> None:
    """Sends the plan's load from `workers` processes and leaves `requests.jsonl` in `directory`, as `run_here` does
    from this one. Raises TransportError."""
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
        ticker = loop.create_task(every_second(lambda: progress([s.snapshot for s in shards if s.snapshot])))
        failures = [failure for shard in shards if (failure := await shard.over())]
        ticker.cancel()
        progress([s.snapshot for s in shards if s.snapshot])
    finally:
        for shard in shards:
            shard.end()
    if failures:
        raise TransportError(f"a worker process failed: {failures[0]}; {directory} keeps what was written.")
    records.merge(directory)


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
        self._messages: asyncio.Queue[str] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(self.pipe.fileno(), self._receive)

    def _receive(self) -> None:
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self.pipe.fileno())
            self._messages.put_nowait(DIED)
            return
        if isinstance(message, Snapshot):
            self.snapshot = message
        else:
            self._messages.put_nowait(message)

    async def ready(self) -> None:
        message = await self._messages.get()
        if message != READY:
            raise TransportError(f"a worker process could not begin: {message}")

    def start(self, t0_ns: int) -> None:
        self.started = True
        _send(self.pipe, t0_ns)

    def stop(self) -> None:
        _send(self.pipe, "stop")

    async def over(self) -> str:
        """Waits until it is done, or has died: what it wrote counts, and the report says that it was killed. Returns
        why it had to give up, such as a full disk; empty where it had not."""
        message = await self._messages.get()
        return "" if message in (DONE, DIED) else message

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
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group: the parent gets them too, and passes them on
    try:
        run_loop(_work_loop(pipe, msgspec.msgpack.decode(encoded, type=Plan), Path(path)))
    except (TransportError, WorkloadError, OSError) as error:
        _send(pipe, getattr(error, "strerror", None) or str(error))


async def _work_loop(pipe: Pipe, plan: Plan, path: Path) -> None:
    make_room(plan, plan.job.shards)
    client = build_client(plan)
    loop = asyncio.get_running_loop()
    t0: asyncio.Future[int | None] = loop.create_future()

    def receive() -> None:
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
    loop.add_reader(pipe.fileno(), receive)
    _send(pipe, READY)
    start = await t0
    if start is None:
        return
    ticker = loop.create_task(every_second(lambda: _send(pipe, client.snapshot())))
    await client.run(start, path)
    ticker.cancel()
    _send(pipe, client.snapshot())
    _send(pipe, DONE)
    await client.transport.close()
