"""Samples the server's `/metrics` and the GPUs once a second into `server.jsonl` (see `server_view`).

The first sample is written when sampling begins, further ones on an absolute schedule, one whenever it is wanted, and
one at the end. Neither a server nor a GPU library that hangs delays anything for longer than a sample may take. A file
that cannot be written any more ends early, which its reader sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from backends import gpus
from backends.gpus import GpuSample
from loadgen.clock import now_ns
from loadgen.event_loop import in_thread
from loadgen.monitor.messages import Begin
from loadgen.monitor.prometheus import Absent, Metrics, Unreadable
from loadgen.monitor.server_view import FILE, SamplesHeader, ServerSample

LIMIT_RATIO = 0.8  # of a period: how long the server and the GPUs have, so that a sample is over before the next
GPU_START_LIMIT_S = 8.0  # NVML starts a driver that slept, GPU by GPU


class Sampler:
    """Writes the samples of one run, and gives each to `show`."""

    def __init__(self, begin: Begin, show: Callable[[ServerSample], None]) -> None:
        self._begin, self._show = begin, show
        self._limit_s = LIMIT_RATIO * begin.period_s
        self._metrics: Metrics | None = None
        self._replicas = begin.source.replicas if begin.source is not None else ()
        self._gpus: GpuReader | None = None
        self._file: IO[bytes] | None = None  # open while there is something to write
        self._lock = asyncio.Lock()  # one sample at a time
        self._schedule: asyncio.Task[None] | None = None

    async def begin(self) -> str | None:
        """Looks at the server and the GPUs, and writes header and first sample. Why there will be none; a clause."""
        try:
            header = await self._look()
            file = (Path(self._begin.directory) / FILE).open("xb", buffering=0)  # a killed process loses no sample
            file.write(msgspec.json.encode(header) + b"\n")
        except OSError as error:
            return f"{FILE} cannot be written: {error.strerror or error}"
        except Exception as error:  # the other parts of the sidecar go on, whatever it is
            return f"the sampling process failed: {type(error).__name__}"
        if self._metrics is None and self._gpus is None:
            file.close()
            return None
        self._file = file
        began_ns = now_ns()
        await self.take()
        self._schedule = asyncio.create_task(self._keep_schedule(began_ns))
        return None

    async def take(self) -> None:
        """A sample, now."""
        async with self._lock:
            if self._file is None:
                return
            try:
                sample = await self._sample()
                self._file.write(msgspec.json.encode(sample) + b"\n")
                self._show(sample)
            except Exception:  # a full disk, mostly; after half a line there is nothing to add
                self._file.close()
                self._file = None

    async def end(self) -> None:
        """Takes the last sample."""
        async with self._lock:
            if self._schedule is not None:
                self._schedule.cancel()
        await self.take()

    async def _look(self) -> SamplesHeader:
        """Opens what can be sampled; the header says what cannot."""
        source, problems = self._begin.source, []
        metrics = None
        if source is not None and source.series:
            metrics = Metrics(source, self._limit_s)
            try:
                await metrics.read()
            except Absent as error:
                problems.append(str(error))
                await metrics.close()
                metrics = None
            except Unreadable:  # it may come to itself; every sample says how it went
                pass
        cards = None
        if self._begin.gpus:
            try:
                cards = await GpuReader.open(self._begin.gpus, self._limit_s)
            except Absent as error:
                problems.insert(0, str(error))
        self._metrics, self._gpus = metrics, cards
        return SamplesHeader(
            run_id=self._begin.run_id,
            series=list(source.series) if source is not None and metrics is not None else [],
            gpus=cards.names if cards is not None else [],
            replicas=list(self._replicas) or msgspec.UNSET,
            error="; ".join(problems) or None,
        )

    async def _keep_schedule(self, began_ns: int) -> None:
        period_ns, number = round(self._begin.period_s * 1e9), 1
        while self._file is not None:
            await asyncio.sleep((began_ns + number * period_ns - now_ns()) / 1e9)
            await self.take()
            number = max(number, (now_ns() - began_ns) // period_ns) + 1  # a late sample moves none, it skips some

    async def _sample(self) -> ServerSample:
        sample = ServerSample(at_ns=now_ns(), took_ms=0.0)
        errors: list[str] = []

        async def read(attribute: str, reading: Coroutine[Any, Any, object]) -> None:
            try:
                setattr(sample, attribute, await reading)
            except Unreadable as error:
                errors.append(str(error))

        parts = {"metrics": self._metrics, "gpus": self._gpus}
        await asyncio.gather(*(read(name, part.read()) for name, part in parts.items() if part is not None))
        if self._metrics is not None and self._replicas and sample.metrics:
            sample.replicas = self._metrics.each
            errors += [self._metrics.trouble] if self._metrics.trouble else []
        sample.error = "; ".join(errors) or None
        sample.took_ms = round((now_ns() - sample.at_ns) / 1e6, 3)
        return sample


class GpuReader:
    """Some GPUs of this machine. NVML may hang, so each look at them has a thread that nobody need wait for."""

    def __init__(self, probe: gpus.GpuProbe, names: list[str], limit_s: float) -> None:
        self._probe, self.names, self._limit_s = probe, names, limit_s
        self._reading: asyncio.Future[list[GpuSample]] | None = None

    @classmethod
    async def open(cls, indices: Sequence[int], limit_s: float) -> GpuReader:
        """Those NVML indices; limit_s: for each reading. Raises Absent when one is not there."""

        def look() -> tuple[gpus.Inventory, gpus.GpuProbe]:
            return gpus.read(), gpus.GpuProbe(indices)

        try:
            async with asyncio.timeout(GPU_START_LIMIT_S):
                inventory, probe = await in_thread(look)
        except TimeoutError:
            raise Absent(f"the GPUs cannot be sampled: NVML gave no answer within {GPU_START_LIMIT_S:g} s") from None
        names = {gpu.index: gpu.name for gpu in inventory.gpus}
        missing = [index for index in indices if index not in names]
        if missing:
            why = inventory.problem or f"there is no GPU {missing[0]} here"
            raise Absent(f"the GPUs cannot be sampled: {why}")
        return cls(probe, [names[index] for index in indices], limit_s)

    async def read(self) -> list[GpuSample]:
        """What each uses now. Raises Unreadable, also as long as an earlier reading hangs."""
        if self._reading is None or self._reading.done():
            self._reading = in_thread(self._probe.sample)
            await asyncio.wait({self._reading}, timeout=self._limit_s)
        if not self._reading.done():
            raise Unreadable(f"the GPUs were not read within {self._limit_s:g} s")
        return self._reading.result()
