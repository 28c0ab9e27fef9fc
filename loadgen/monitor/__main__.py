"""The monitoring sidecar's process (see `sidecar`): reads messages from its standard input, and runs the parts.

The parts do not disturb each other: the server is sampled in this thread, within time limits; each reading of the GPUs
has a thread that may hang; snapshots, and the page that shows them, are written in others. At the end of the run there
is a last sample and then a last snapshot; when standard input ends before, the run was killed, and there is a last
snapshot only, which waits for no server. The exit code is 0 when that is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec

from backends.untrusted import UNDECODABLE
from loadgen.monitor.messages import Begin, Begun, End, Live, Order, Prepare, Reply, SampleTaken, TakeSample
from loadgen.monitor.sampler import Sampler
from loadgen.monitor.snapshots import Snapshots


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _work() -> bool:
    """Until standard input ends. Whether the snapshots are up to date."""
    sampler: Sampler | None = None
    snapshots: Snapshots | None = None
    ordered = False  # whether the end was; else the run was killed, and a shell may have written below the view
    stdin = await _standard_input()
    while (line := await stdin.readline()).endswith(b"\n"):
        try:
            order = msgspec.json.decode(line, type=Order)
        except UNDECODABLE:
            _send(Begun("the sampling process was given orders that it cannot read"))
            continue
        match order:
            case Prepare():
                _prepare(order)
            case Begin():
                snapshots = Snapshots(Path(order.directory), order.metrics_port, order.view)
                if order.samples:
                    sampler = Sampler(order, snapshots.keep)
                    _send(Begun(await sampler.begin()))
            case Live():
                if snapshots is not None:
                    snapshots.take(order)
            case TakeSample():
                if sampler is not None:
                    await sampler.take()
                _send(SampleTaken(order.number))
            case End():
                ordered = True
                if sampler is not None:
                    await sampler.end()
    return snapshots is None or snapshots.end(erase=ordered)


def _prepare(order: Prepare) -> None:
    """Whoever started us is busy with something else until the run begins."""
    if order.sample:
        import httpcore  # noqa: F401  httpx itself would import it, and this of anyio, at its first request
        import httpx  # noqa: F401
        import prometheus_client.parser  # noqa: F401
        from anyio import connect_tcp, fail_after  # noqa: F401
    if order.draw:
        import loadgen.monitor.view  # noqa: F401


def _send(reply: Reply) -> None:
    with contextlib.suppress(OSError):  # nobody may be left to read it
        os.write(sys.stdout.fileno(), msgspec.json.encode(reply) + b"\n")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run; its end closes our standard input
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    up_to_date = asyncio.new_event_loop().run_until_complete(_work())
    os._exit(0 if up_to_date else 1)  # waits for no thread that hangs in a library


if __name__ == "__main__":
    main()
