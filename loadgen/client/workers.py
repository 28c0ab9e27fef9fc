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
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from loadgen import child_env
from loadgen.client.engine import (
    DRAIN_S,
    START_MARGIN_NS,
    LiveCounters,
    Progress,
    Send,
    Warm,
    WarmUp,
    build_client,
    check_warm_up,
    run_here,
)
from loadgen.client.limits import make_room
from loadgen.clock import now_ns
from loadgen.event_loop import StopSignals, every_second, run_loop
from loadgen.load.lengths import WorkloadError
from loadgen.plan import ClientPlan
from loadgen.rundir import WriteError
from loadgen.target import TransportError


class Done(NamedTuple):
    """The last message of a worker. problem: why it failed; empty: it did not. writing: its records can be kept no
    more."""

    problem: str = ""
    writing: bool = False


DIED = "the process died"  # in place of the last message of a worker that was killed


def sender(workers: int) -> Send:
    """Sends from this process, or from several."""
    if workers == 1:
        return run_here

    def send(
        plan: ClientPlan, directory: Path, progress: Progress, warm: Warm | None = None, stop: StopSignals | None = None
    ) -> Awaitable[None]:
        return run_in_workers(plan, workers, directory, progress, warm, stop)

    return send


async def run_in_workers(
    plan: ClientPlan,
    workers: int,
    directory: Path,
    progress: Progress,
    warm: Warm | None = None,
    stop: StopSignals | None = None,
) -> None:
    """Sends the plan's load from `workers` processes and leaves their parts of the records in `directory`; otherwise as
    `run_here`. Raises TransportError, and WriteError."""
    with Workers(plan, range(workers), workers, directory) as clients:
        if warm is not None and plan.job.hands_over:
            await warm()  # the first time takes long, and slots must not wait for it
        check_warm_up(await clients.ready())
        if warm is not None:
            await warm()
        if stop is not None:
            stop.on_signal(clients.stop, hurry=clients.stop)
        clients.start(now_ns() + START_MARGIN_NS)
        ticker = asyncio.get_running_loop().create_task(every_second(lambda: progress(clients.snapshots)))
        end = await clients.over()
        ticker.cancel()
        progress(clients.snapshots)
    if end.writing:
        raise WriteError(end.problem)
    if end.problem:
        raise TransportError(f"a worker process failed: {end.problem}; {directory} keeps what was written.")


class Workers:
    """Client processes that play `numbers` of the `shards` shares of a load; the caller says when. They end with the
    block."""

    def __init__(self, plan: ClientPlan, numbers: range, shards: int, directory: Path) -> None:
        """Starts them. Their records will be in `directory`, one file for each share."""
        context = multiprocessing.get_context("spawn")
        with child_env.spawning():
            self._shards = [_Shard(context, plan.share(number, shards), directory) for number in numbers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for shard in self._shards:
            shard.end()

    async def ready(self) -> list[WarmUp]:
        """What became of each one's warm-up, once all are ready to begin. Raises TransportError."""
        return [await shard.ready() for shard in self._shards]

    def start(self, t0_ns: int) -> None:
        """They send from monotonic `t0_ns` on."""
        for shard in self._shards:
            shard.start(t0_ns)

    def stop(self) -> None:
        """They send nothing more and drain; the second time they do not."""
        for shard in self._shards:
            shard.stop()

    @property
    def snapshots(self) -> list[LiveCounters]:
        """The latest of each."""
        return [shard.snapshot for shard in self._shards if shard.snapshot]

    async def over(self) -> Done:
        """Waits for the end of all. The problem of the first that failed; where one cannot write, that. A killed one is
        none: its records say so."""
        ends = await asyncio.gather(*(shard.over(self.stop) for shard in self._shards))
        failed = [end for end in ends if end.problem and end.problem != DIED]
        return next((end for end in failed if end.writing), failed[0] if failed else Done())


def _send(pipe: Pipe, message: object) -> None:
    """To the other side of the pipe, if there still is one."""
    with contextlib.suppress(OSError):
        pipe.send(message)


class _Shard:
    """A worker process as its parent sees it. `snapshot`: its latest."""

    def __init__(self, context: Any, plan: ClientPlan, directory: Path) -> None:
        self.pipe, theirs = context.Pipe()
        self.snapshot: LiveCounters | None = None
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
        if isinstance(message, LiveCounters):
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
    child_env.leave_stopping_to_parent()
    try:
        run_loop(_work_loop(pipe, msgspec.msgpack.decode(encoded, type=ClientPlan), Path(path)))
    except WriteError as error:
        _send(pipe, Done(str(error), writing=True))
    except (TransportError, WorkloadError, OSError) as error:
        _send(pipe, Done(getattr(error, "strerror", None) or str(error)))


async def _work_loop(pipe: Pipe, plan: ClientPlan, path: Path) -> None:
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
