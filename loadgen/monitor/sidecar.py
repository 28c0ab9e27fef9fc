"""The monitoring sidecar as its run sees it: a process beside the client that samples the server and the GPUs, writes
snapshots, and serves them to Prometheus.

`sidecar` starts `python -m loadgen.monitor` and ends it. The messages are in `loadgen.monitor.messages`; the end of the
process's standard input is its end, also when the run is killed. Nothing here fails a run: what cannot be sampled is
written into the header of `server.jsonl`, and what became of the snapshots is `Monitor.trouble`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from backends.untrusted import UNDECODABLE
from loadgen import child_env
from loadgen.monitor.messages import (
    Begin,
    Begun,
    End,
    Expected,
    Live,
    MetricsSource,
    Order,
    Prepare,
    Reply,
    SampleTaken,
    TakeSample,
    View,
)
from loadgen.monitor.server_view import FILE, SamplesHeader
from loadgen.terminal import draws, in_foreground, say

START_TIMEOUT_S = 10.0
SAMPLE_TIMEOUT_S = 2.0  # for a sample that has begun and the one that is wanted
STOP_TIMEOUT_S = 12.0


@contextlib.asynccontextmanager
async def sidecar(metrics_port: int | None = None, sample_server: bool = False) -> AsyncIterator[Monitor]:
    """Starts the process; ends it with the block. metrics_port: where it will serve the run's metrics. sample_server:
    whether there may be a server to sample, for which it then gets ready. Raises RunError when the port is taken."""
    if metrics_port is not None:
        from loadgen.monitor.exporter import HOST, Exporter, serve

        serve(Exporter(Path()), HOST, metrics_port).server_close()
    terminal = os.dup(sys.stderr.fileno()) if draws(sys.stderr) else None
    monitor = Monitor(metrics_port, terminal)
    await monitor.start()
    if sample_server or terminal is not None:
        monitor.send(Prepare(sample=sample_server, draw=terminal is not None))
    try:
        yield monitor
    finally:
        await monitor.end()
        if terminal is not None:
            os.close(terminal)


class Monitor:
    """The sidecar's process, as its run handles it. terminal: the file descriptor of one to draw the live view on."""

    def __init__(self, metrics_port: int | None, terminal: int | None = None) -> None:
        self._metrics_port, self._terminal = metrics_port, terminal
        self._view: View | None = None  # what is drawn, from `begin` on
        self.process: Process | None = None
        self._start_problem: str | None = None
        self._unready: Begin | None = None  # what was begun, until its first sample is there
        self._sampling = False
        self._samples_wanted = 0

    async def start(self) -> None:
        argv = [sys.executable, "-m", "loadgen.monitor"]
        env = os.environ | child_env.environment(os.environ)
        try:
            self.process = await asyncio.create_subprocess_exec(
                *argv, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True, env=env,
                pass_fds=() if self._terminal is None else (self._terminal,),
            )  # fmt: skip
        except OSError as error:
            self._start_problem = f"the sampling process was not started: {error.strerror or error}"

    def begin(
        self,
        directory: Path,
        run_id: str,
        source: MetricsSource | None = None,
        gpus: Sequence[int] = (),
        expected: Expected | None = None,
    ) -> None:
        """Watches a run directory from now on; its manifest is there. Waits for nothing: `sample` does. Without series
        and GPUs there is nothing to sample, and no `server.jsonl`. expected: draws the view, where there is a terminal
        for it."""
        if self._terminal is not None and expected is not None:
            self._view = View(fd=self._terminal, expected=expected)
        begin = Begin(
            directory=str(directory.absolute()),
            run_id=run_id,
            source=source,
            gpus=list(gpus),
            metrics_port=self._metrics_port,
            view=self._view,
        )
        self.send(begin)
        self._unready = begin if begin.samples else None

    async def _ready(self, begin: Begin) -> None:
        """Waits for the first sample, or leaves a header that says why there will be none."""
        problem = self._start_problem or await self._sampling_problem()
        self._sampling = problem is None
        if problem is not None:
            if self.process is not None and self.process.returncode is not None:  # of a GPU library that crashed
                await self.start()
                self.send(msgspec.structs.replace(begin, source=None, gpus=[]))
            series = list(begin.source.series) if begin.source else []
            header = SamplesHeader(run_id=begin.run_id, series=series, gpus=[], error=problem)
            path = Path(begin.directory) / FILE
            with contextlib.suppress(OSError), path.open("xb") as file:  # what it did write stays
                file.write(msgspec.json.encode(header) + b"\n")

    async def _sampling_problem(self) -> str | None:
        """Why the process does not sample; None when it does."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await self._reply()
        except TimeoutError:  # it may still write snapshots
            return f"the sampling process was not ready within {START_TIMEOUT_S:g} s"
        if isinstance(reply, Begun):
            return reply.problem
        await self.end()
        code = None if self.process is None else self.process.returncode
        return f"the sampling process ended with exit code {code} before it was ready"

    @property
    def draws(self) -> bool:
        """Whether somebody sees the view now."""
        alive = self.process is not None and self.process.returncode is None
        return self._view is not None and alive and in_foreground(self._view.fd)

    def progress(self, live: Live) -> None:
        self.send(live)

    async def sample(self) -> None:
        """Has a sample taken now, after the first one: between warm-up and load, it separates what the server and the
        GPUs counted before the load from what they counted during it."""
        if self._unready is not None:
            begin, self._unready = self._unready, None
            await self._ready(begin)
        if not self._sampling:
            return
        self._samples_wanted += 1
        taken = SampleTaken(self._samples_wanted)
        self.send(TakeSample(taken.number))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SAMPLE_TIMEOUT_S):
                while await self._reply() not in (taken, None):
                    pass  # the reply to an earlier order, after its time-out

    @property
    def trouble(self) -> str | None:
        """After `end`: why snapshot.json may be missing or old, as one sentence; None where the process ended well."""
        code = None if self.process is None else self.process.returncode
        if code == 0:
            return None
        how = (
            "was not started"
            if code is None
            else f"died of signal {-code}"
            if code < 0
            else f"failed (exit code {code})"
        )
        return f"snapshot.json is missing or not up to date, because the process that writes it {how}."

    async def end(self) -> None:
        """Has the process take its last sample and write its last snapshot, and waits for its end. May be repeated."""
        process = self.process
        if process is None or process.stdin is None or process.returncode is not None:
            return
        self.send(End())
        process.stdin.close()
        await child_env.ended(process, STOP_TIMEOUT_S)
        if self._view is not None and process.returncode != 0:  # it may have been killed within an escape sequence
            say("\x1b[0m")

    def send(self, order: Order) -> None:
        if self.process is not None and self.process.stdin is not None and not self.process.stdin.is_closing():
            self.process.stdin.write(msgspec.json.encode(order) + b"\n")

    async def _reply(self) -> Reply | None:
        """The next reply; None when there will be none. A line that a library printed is passed over."""
        assert self.process is not None and self.process.stdout is not None
        with contextlib.suppress(ConnectionError):
            while line := await self.process.stdout.readline():
                with contextlib.suppress(*UNDECODABLE):
                    reply: Reply = msgspec.json.decode(line, type=Reply)
                    return reply
        return None
