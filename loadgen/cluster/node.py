"""The process on each machine that plays a part of the load: `python -m loadgen.cluster.node HOST`.

It starts client processes as a run on one machine does, and does what the driver says: reach the server, draw, arm,
start, stop. Messages come on standard input and leave on standard output, each behind its length. Where that input ends
or says nothing for SILENCE_S, the driver is gone: the process ends, its clients with it, and the records stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import struct
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from backends.exit_codes import UserError
from loadgen import rundir
from loadgen.calibration import calibrate
from loadgen.client.limits import check_workers, make_room
from loadgen.client.workers import Workers
from loadgen.clock import now_ns
from loadgen.cluster import digests, messages, records_home
from loadgen.cluster.clocks import Echo
from loadgen.cluster.messages import (
    Arm,
    Armed,
    Beat,
    Calibrate,
    Calibrated,
    Draw,
    Drawn,
    Failed,
    Finished,
    Hello,
    Reach,
    Reached,
    Start,
    Stop,
)
from loadgen.event_loop import every_second, run_loop
from loadgen.target import TransportError, get

LENGTH = struct.Struct("!I")
REACH_S = 5.0
GONE = 1  # exit code


class NodeProcess:
    """What the driver's orders do. `say`: sends an answer."""

    def __init__(self, say: Callable[[messages.Answer], None]) -> None:
        self._say = say
        self._draw: Draw | None = None
        self._directory = ""
        self._clients: Workers | None = None
        self.heard_ns = now_ns()

    async def act(self, order: messages.Order) -> None:
        """Carries out one order that takes its time; others are done at once in `take`."""
        acts: dict[type, Callable[[Any], Awaitable[None]]] = {
            Reach: self._reach, Calibrate: self._calibrate, Draw: self._drawn, Arm: self._arm,
        }  # fmt: skip
        try:
            await acts[type(order)](order)
        except UserError as error:
            self._say(Failed(str(error)))
        except OSError as error:
            self._say(Failed(f"{error.filename or 'a file'}: {error.strerror or error}"))

    def take(self, order: messages.Order) -> asyncio.Task[None] | None:
        """Takes an order; the task that carries it out, where it takes time."""
        self.heard_ns = now_ns()
        loop = asyncio.get_running_loop()
        if isinstance(order, Start):
            return loop.create_task(self._play(order.t0_ns))
        if isinstance(order, Stop):
            if self._clients is not None:
                self._clients.stop()
            return None
        return None if isinstance(order, messages.Alive) else loop.create_task(self.act(order))

    async def _reach(self, order: Reach) -> None:
        try:
            await asyncio.to_thread(get, order.target, "/", REACH_S)  # whatever it answers
            self._say(Reached())
        except TransportError as error:
            self._say(Reached(str(error)))

    async def _calibrate(self, order: Calibrate) -> None:
        self._say(Calibrated(await calibrate(order.plan)))

    async def _drawn(self, order: Draw) -> None:
        self._end()
        check_workers(order.processes)
        make_room(order.plan, order.shards)
        drawn = await asyncio.to_thread(digests.of_plan, order.plan)
        self._draw = order
        self._directory = str(records_home.place(order.name))
        self._say(Drawn(drawn, self._directory))

    async def _arm(self, _: Arm) -> None:
        draw = self._draw
        assert draw is not None
        numbers = range(draw.first, draw.first + draw.processes)
        self._clients = Workers(draw.plan, numbers, draw.shards, Path(self._directory))
        self._say(Armed(await self._clients.ready()))

    async def _play(self, t0_ns: int) -> None:
        clients = self._clients
        assert clients is not None
        clients.start(t0_ns)
        ticker = asyncio.get_running_loop().create_task(every_second(lambda: self._say(Beat(clients.snapshots))))
        end = await clients.over()
        ticker.cancel()
        self._say(Beat(clients.snapshots))
        self._end()
        self._say(Finished(end.problem, end.writing))

    def _end(self) -> None:
        if self._clients is not None:
            self._clients.__exit__()
            self._clients = None


async def _serve(host: str, answers: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    def say(answer: messages.Answer) -> None:
        data = messages.encode(answer)
        with contextlib.suppress(BrokenPipeError):
            os.write(answers, LENGTH.pack(len(data)) + data)

    node, echo = NodeProcess(say), Echo(host)

    def look() -> None:
        if now_ns() - node.heard_ns > messages.SILENCE_S * 1e9:
            os._exit(GONE)  # its clients die with it

    ticker = loop.create_task(every_second(look))
    say(Hello(platform.node(), len(rundir.usable_cpus()), rundir.package_version(), echo.port, echo.key))
    tasks = set()
    while True:
        try:
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            task = node.take(messages.order_of(await reader.readexactly(size)))
        except asyncio.IncompleteReadError:
            ticker.cancel()
            os._exit(GONE)
        if task is not None:
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            task.add_done_callback(_check)


def _check(task: asyncio.Task[None]) -> None:
    """A defect ends the process with its traceback on standard error, which the driver quotes."""
    if not task.cancelled() and (error := task.exception()) is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(GONE)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever prints something must not write between messages
    run_loop(_serve(sys.argv[1], answers))


if __name__ == "__main__":
    main()
