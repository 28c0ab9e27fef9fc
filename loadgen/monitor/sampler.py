"""Samples the server's `/metrics` and the GPUs once a second while a run lasts, in a process of its own.

`sampling` starts `python -m loadgen.monitor.sampler` and ends it. The process reads one line of JSON from its standard
input, `Orders`, and writes `server.jsonl` (see `server_view`): a sample at once, after which it prints `ready` (or one
sentence that says why it cannot begin), then one each period on an absolute schedule, one for each further line, after
which it prints `taken`, and a last one when its standard input ends, as it does when its parent dies. The bearer token
comes through the first line only: it is never in an argument or a file. Nothing here fails a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from backends import gpus
from loadgen import child_env
from loadgen.clock import now_ns
from loadgen.monitor.prometheus import Absent, Metrics, Unreadable
from loadgen.monitor.server_view import FILE, Header, Sample

PERIOD_S = 1.0
ANSWER_RATIO = 0.8  # of a period: how long the server has to answer, so that a sample is over before the next
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
ASKED_TIMEOUT_S = 2 * ANSWER_RATIO * PERIOD_S + 0.2  # for a sample that has begun and the one that is asked for


class Orders(msgspec.Struct, kw_only=True):
    """What to sample and where to write it. `url`: of the metrics themselves. `series`: neutral name -> the server's
    (`Backend.server_metrics`). `gpus`: NVML indices, None: do not look at GPUs."""

    url: str
    token: str | None = None
    series: dict[str, str]
    run_id: str
    path: str
    period_s: float = PERIOD_S
    gpus: list[int] | None = None

    def __repr__(self) -> str:
        return f"Orders({self.url!r})"


@contextlib.asynccontextmanager
async def sampling() -> AsyncIterator[Sampling]:
    """Starts the process, which has half a second of imports to do before its orders; ends it with the block."""
    process: Process | None = None
    problem = None
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "loadgen.monitor.sampler",
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,
            env=os.environ | child_env.environment(os.environ),
        )
    except OSError as error:
        problem = f"the sampling process was not started: {error.strerror or error}"
    watch = Sampling(process, problem)
    try:
        yield watch
    finally:
        await watch.end()


class Sampling:
    """The process as its parent sees it. What cannot be sampled is written into the header of `server.jsonl`."""

    def __init__(self, process: Process | None, problem: str | None) -> None:
        self._process = process
        self._problem = problem

    async def begin(
        self,
        url: str,
        token: str | None,
        series: Mapping[str, str],
        run_id: str,
        directory: Path,
        gpus: Sequence[int] | None,
        period_s: float = PERIOD_S,
    ) -> None:
        """Samples into `directory` from now on; the first sample is there when this returns.

        url: the server's, as for requests. Without series and GPUs there is nothing to do, and no file.
        """
        if not series and not gpus:
            await self.end()
            return
        orders = Orders(
            url=url.rstrip("/").removesuffix("/v1") + "/metrics",
            token=token,
            series=dict(series),
            run_id=run_id,
            path=str(directory / FILE),
            period_s=period_s,
            gpus=list(gpus) if gpus else None,
        )
        problem = self._problem or await self._order(orders)
        if problem is not None:
            await self.end()
            header = Header(run_id=run_id, series=list(series), gpus=[], error=problem)
            with contextlib.suppress(OSError), (directory / FILE).open("xb") as file:  # what it did write stays
                file.write(msgspec.json.encode(header) + b"\n")

    async def _order(self, orders: Orders) -> str | None:
        """Why the process does not sample; None when it does."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        said = ""
        try:
            process.stdin.write(msgspec.json.encode(orders) + b"\n")
            async with asyncio.timeout(START_TIMEOUT_S):
                said = (await process.stdout.readline()).decode(errors="replace").strip()
        except TimeoutError:
            await child_env.ended(process, 0.0)
            said = f"the sampling process was not ready within {START_TIMEOUT_S:g} s"
        except ConnectionError:
            pass  # it ended before it read its orders
        if said == "ready":
            return None
        await self.end()
        return said or f"the sampling process ended with exit code {process.returncode} before it was ready"

    async def sample(self) -> None:
        """A sample more, now, so that what the server and the GPUs had counted by then is known: between warm-up and
        load, once, since an answer that comes too late would be taken for the next."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None or process.stdin.is_closing():
            return
        with contextlib.suppress(ConnectionError, TimeoutError):
            process.stdin.write(b"\n")
            async with asyncio.timeout(ASKED_TIMEOUT_S):
                await process.stdout.readline()

    async def end(self) -> None:
        """Lets it take its last sample, and waits for that. May be called again."""
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        await child_env.ended(process, STOP_TIMEOUT_S)


# The process itself.


class Sampler:
    """What can be sampled of what was ordered; `problems` says what cannot."""

    def __init__(self, orders: Orders) -> None:
        self.problems: list[str] = []
        self.metrics = (
            Metrics(orders.url, orders.token, orders.series, ANSWER_RATIO * orders.period_s) if orders.series else None
        )
        self.gpus: gpus.Probe | None = None
        self.gpu_names: list[str] = []
        if orders.gpus:
            self._open_gpus(orders.gpus)

    def _open_gpus(self, indices: Sequence[int]) -> None:
        inventory = gpus.read()
        names = {gpu.index: gpu.name for gpu in inventory.gpus}
        missing = [index for index in indices if index not in names]
        if missing:
            why = inventory.problem or f"there is no GPU {missing[0]} here"
            self.problems.append(f"the GPUs cannot be sampled: {why}")
        else:
            self.gpus = gpus.Probe(indices)
            self.gpu_names = [names[index] for index in indices]

    async def look(self) -> None:
        """Connects, and finds out whether the server has metrics at all."""
        if self.metrics is not None:
            try:
                await self.metrics.read()
            except Absent as error:
                self.problems.append(str(error))
                await self.metrics.close()
                self.metrics = None
            except Unreadable:  # it may come to itself; every sample says how it went
                pass

    @property
    def blind(self) -> bool:
        return self.metrics is None and self.gpus is None

    async def sample(self) -> Sample:
        at_ns = now_ns()
        sample = Sample(at_ns=at_ns, took_ms=0.0)
        if self.gpus is not None:
            sample.gpus = self.gpus.sample()
        if self.metrics is not None:
            try:
                sample.metrics = await self.metrics.read()
            except Unreadable as error:
                sample.error = str(error)
        sample.took_ms = round((now_ns() - at_ns) / 1e6, 3)
        return sample

    async def close(self) -> None:
        if self.metrics is not None:
            await self.metrics.close()
        if self.gpus is not None:
            self.gpus.close()


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _work() -> None:
    import httpx  # noqa: F401  now: whoever started us is busy with something else until the orders come
    import prometheus_client.parser  # noqa: F401

    stdin = await _standard_input()
    line = await stdin.readline()
    if not line.endswith(b"\n"):  # whoever started us is gone
        return
    try:
        orders = msgspec.json.decode(line, type=Orders)
    except msgspec.DecodeError:
        _say("the sampling process was given orders that it cannot read")
        return
    sampler = Sampler(orders)
    try:
        await sampler.look()
        with Path(orders.path).open("xb", buffering=0) as file:
            await _write(orders, sampler, file, stdin)
    except OSError as error:  # after `ready` nobody hears it: the file ends early, which its reader sees
        _say(f"{FILE} cannot be written: {error.strerror or error}")
    finally:
        await sampler.close()


async def _write(orders: Orders, sampler: Sampler, file: IO[bytes], stdin: asyncio.StreamReader) -> None:
    """Header, first sample, `ready`; then a sample each period and each line of standard input, and one at its end."""

    def write(value: msgspec.Struct) -> None:
        file.write(msgspec.json.encode(value) + b"\n")  # not buffered: a killed process loses no sample

    header = Header(
        run_id=orders.run_id,
        series=list(orders.series) if sampler.metrics is not None else [],
        gpus=sampler.gpu_names,
        error="; ".join(sampler.problems) or None,
    )
    write(header)
    if sampler.blind:
        _say("ready")
        while await stdin.readline():
            _say("taken")
        return
    first = await sampler.sample()
    write(first)
    _say("ready")
    began_ns, period_ns, number = first.at_ns, round(orders.period_s * 1e9), 1
    asked = asyncio.ensure_future(stdin.readline())
    over = False
    while not over:
        await asyncio.wait({asked}, timeout=(began_ns + number * period_ns - now_ns()) / 1e9)
        between = asked.done()
        write(await sampler.sample())
        if not between:
            number += 1
        elif asked.result():
            _say("taken")
            asked = asyncio.ensure_future(stdin.readline())
        else:
            over = True
        number = max(number, (now_ns() - began_ns) // period_ns + 1)  # a late sample moves none, it skips some


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody may be left to hear it
        os.write(sys.stdout.fileno(), text.encode() + b"\n")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run; its end closes our standard input
    asyncio.run(_work())


if __name__ == "__main__":
    main()
