"""What a run has measured so far, once a second, in `snapshot.json`: by a process of its own that reads its directory.

`watching` starts `python -m loadgen.monitor.snapshots` and ends it. The process follows the records as they are written
(`requests.jsonl`, or the workers' parts) and the server's samples (`server.jsonl`), and adds them up; of the clients it
hears only their live counters, a line a second on its standard input. So the clients' hot path does nothing for it.
When standard input ends, as it does when the run is over or was killed, it writes a last snapshot. Nothing here fails a
run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from backends.untrusted import UNDECODABLE
from loadgen import child_env
from loadgen.monitor.tail import Tail
from loadgen.monitor.totals import Record, Totals
from loadgen.rundir import Family, Manifest, RunError, Sample, Snapshot, read_manifest, write_snapshot

PERIOD_S = 1.0
STOP_TIMEOUT_S = 10.0
ORPHANS_S = 6.0  # a little more than workers whose parent was killed wait for replies


class Live(msgspec.Struct):
    """What only the clients know: of all of them together."""

    planned: int | None
    in_flight: int
    clients: int = 1  # how many there are
    events: int = 0  # of requests that go on, too


@contextlib.asynccontextmanager
async def watching(metrics_port: int | None = None) -> AsyncIterator[Watch]:
    """Starts the process; ends it with the block, after its last snapshot. It serves them at the port, if there is one.
    Raises RunError when that is taken."""
    argv = [sys.executable, "-m", "loadgen.monitor.snapshots"]
    if metrics_port is not None:
        from loadgen.monitor.exporter import HOST, Exporter, serve

        serve(Exporter(Path()), HOST, metrics_port).server_close()
        argv.append(str(metrics_port))
    process: Process | None = None
    with contextlib.suppress(OSError):
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=PIPE,
            stdout=DEVNULL,
            stderr=DEVNULL,
            start_new_session=True,
            env=os.environ | child_env.environment(os.environ),
        )
    watch = Watch(process)
    try:
        yield watch
    finally:
        await watch.end()


class Watch:
    """The process as the run sees it."""

    def __init__(self, process: Process | None) -> None:
        self._process = process

    def begin(self, directory: Path) -> None:
        """The run's directory; its manifest is there."""
        self._write(str(directory.absolute()))

    def tell(self, live: Live) -> None:
        self._write(live)

    def _write(self, value: object) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(msgspec.json.encode(value) + b"\n")

    @property
    def trouble(self) -> str | None:
        """Once it has ended: that it did before it was let go, a sentence."""
        code = None if self._process is None else self._process.returncode
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
        """May be called again."""
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            return
        process.stdin.close()
        await child_env.ended(process, STOP_TIMEOUT_S)


# The process itself.


class _GpuSample(msgspec.Struct):
    index: int
    memory_used_bytes: int | None = None
    power_w: float | None = None
    utilization_ratio: float | None = None


class _ServerSample(msgspec.Struct):
    at_ns: int | None = None  # the header has none
    metrics: dict[str, float] = {}
    gpus: list[_GpuSample] = []


class Recorder:
    """Follows one run's directory."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._whole = directory / "requests.jsonl"
        self._totals = Totals()
        self._tails: dict[Path, Tail] = {}
        self._server_tail = Tail(directory / "server.jsonl")
        self._server = _ServerSample()
        self._decode = msgspec.json.Decoder(Record).decode
        self.live: Live | None = None

    def write(self, over: bool = False) -> None:
        """Brings the snapshot up to date. over: nobody writes any more."""
        clients = 1 if self.live is None else self.live.clients
        if over and self._whole not in self._tails and len(self._tails) < clients:
            # A part came and was joined with the others between two looks: from the beginning, which is not long ago.
            self._totals, self._tails = Totals(), {}
        self._follow_records()
        self._follow_server()
        state: Literal["running", "finished", "stopped"] = "running"
        if over:
            ended = self._totals.clients
            state = "finished" if set(ended) == {"complete"} and len(ended) >= clients else "stopped"
        families = [*self._totals.families(), *self._live_families(over), *self._server_families()]
        snapshot = Snapshot(
            run_id=self._manifest.run_id, program="loadgen", state=state, labels=labels(self._manifest),
            families=families,
        )  # fmt: skip
        write_snapshot(self._directory, snapshot)

    def orphans(self) -> bool:
        """Whether workers go on writing whose parent was killed: it would have joined their parts."""
        self._follow_records()
        return not self._whole.exists() and len(self._totals.clients) < len(self._tails)

    def _follow_records(self) -> None:
        parts = sorted(self._directory.glob("requests.[0-9]*.jsonl"))
        if not any(path != self._whole for path in self._tails) and self._whole.exists():
            parts = [self._whole]
        for path in parts:
            self._tails.setdefault(path, Tail(path))
        for tail in self._tails.values():
            for line in tail.lines():
                with contextlib.suppress(*UNDECODABLE):
                    self._totals.add(self._decode(line))

    def _follow_server(self) -> None:
        for line in self._server_tail.lines():
            with contextlib.suppress(*UNDECODABLE):
                sample = msgspec.json.decode(line, type=_ServerSample)
                if sample.at_ns is not None and (sample.metrics or sample.gpus):
                    self._server = sample

    def _live_families(self, over: bool) -> Iterator[Family]:
        planned = self._manifest.requests_planned
        if planned is None and self.live is not None:
            planned = self.live.planned
        if planned is not None:
            yield Family("bench_requests_planned", "gauge", "Measured requests of the whole run.", [Sample(planned)])
        in_flight = 0 if over or self.live is None else self.live.in_flight
        yield Family("bench_requests_in_flight", "gauge", "Requests sent and not over.", [Sample(in_flight)])
        events = 0 if self.live is None else self.live.events
        yield Family("bench_events_received", "counter", "Events that carried output, as they come.", [Sample(events)])

    def _server_families(self) -> Iterator[Family]:
        for name, family, kind, said in _SERVER:
            if name in self._server.metrics:
                yield Family(family, kind, said, [Sample(self._server.metrics[name])])
        for attribute, family, said in _GPU:
            values = {each.index: getattr(each, attribute) for each in self._server.gpus}
            samples = [Sample(value, {"gpu": str(index)}) for index, value in values.items() if value is not None]
            if samples:
                yield Family(family, "gauge", said, samples)


_SERVER: tuple[tuple[str, str, Literal["gauge", "counter"], str], ...] = (
    ("running", "bench_server_requests_running", "gauge", "Requests in the server's batch, as it says."),
    ("waiting", "bench_server_requests_waiting", "gauge", "Requests in the server's queue, as it says."),
    ("kv_cache_usage_ratio", "bench_server_kv_cache_usage_ratio", "gauge", "Part of the KV cache in use."),
    ("preemptions", "bench_server_preemptions", "counter", "Sequences that the server put off for want of memory."),
)
_GPU = (
    ("memory_used_bytes", "bench_gpu_memory_used_bytes", "Memory in use on a GPU of the server."),
    ("power_w", "bench_gpu_power_watts", "Power that a GPU of the server draws."),
    ("utilization_ratio", "bench_gpu_utilization_ratio", "Part of the time in which any kernel ran on it."),
)


def labels(manifest: Manifest) -> dict[str, str]:
    """What `bench_run_info` says of a serving run."""
    return {
        "backend": manifest.backend,
        "model": manifest.model,
        "arrival": manifest.arrival,
        "emulated": str(manifest.emulated).lower(),
        "version": manifest.version,
    }


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run; its end closes our standard input
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _lower_priority()
    pending, open_ = b"", True
    recorder: Recorder | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        due = time.monotonic()
        while open_:
            if selector.select(max(0.0, due - time.monotonic())):
                read = os.read(sys.stdin.fileno(), 1 << 16)
                open_, pending = bool(read), pending + read
                *lines, pending = pending.split(b"\n")
                for line in lines:
                    if recorder is None:
                        recorder = _begun(line)
                    else:
                        recorder.live = msgspec.json.decode(line, type=Live)
            if open_ and time.monotonic() < due:
                continue
            due = max(due + PERIOD_S, time.monotonic())
            if recorder is not None:
                while not open_ and recorder.orphans() and time.monotonic() < due + ORPHANS_S:
                    time.sleep(0.1)
                with contextlib.suppress(OSError):  # a full disk: the next one may have room
                    recorder.write(over=not open_)


def _begun(line: bytes) -> Recorder:
    directory = Path(msgspec.json.decode(line, type=str))
    if len(sys.argv) > 1:
        from loadgen.monitor.exporter import in_background

        with contextlib.suppress(RunError):  # somebody took the port meanwhile: the snapshots are written all the same
            in_background(directory, int(sys.argv[1]))
    return Recorder(directory, read_manifest(directory))


def _lower_priority() -> None:
    """The clients' cores come first."""
    with contextlib.suppress(OSError):
        os.nice(10)


if __name__ == "__main__":
    main()
