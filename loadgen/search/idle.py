"""Whether a server is idle between two runs: by its own metrics, and where it has none by how long a probe takes.

Rule. Idle is a server whose metrics say twice in a row that no request runs, waits or is paused. Without metrics it is
one that answers two probes in a row, each a prompt of the load with a reply of one token, about as fast as at the
start: within PROBE_RATIO times the slowest of the first FIRST_PROBES, and PROBE_SPARE_MS. After LIMIT_S the next run
begins all the same, and the sweep says so. It must never send or read anything while a run is measured.
"""

from __future__ import annotations

import asyncio
import time
from typing import Literal, Protocol

import msgspec

import backends
from backends.protocol import Backend, Prompt
from loadgen.client.engine import build_transport
from loadgen.client.exchange import Exchange
from loadgen.monitor.messages import MetricsSource
from loadgen.monitor.prometheus import Metrics, Unreadable
from loadgen.plan import ClientPlan
from loadgen.report.sweeps import IdleWait
from loadgen.run import LoadRun, Served

LIMIT_S = 60.0
POLL_S, READ_LIMIT_S = 0.2, 5.0
IN_A_ROW = 2
PROBE_RATIO, PROBE_SPARE_MS, FIRST_PROBES = 1.5, 5.0, 3
PROBE_SEED = 1 << 40  # added to the sweep's: no run of it draws such prompts
By = Literal["metrics", "probe", "nothing"]
BUSY = ("running", "waiting", "paused")


class IdleProbe(Protocol):
    """A way to see whether a server is idle."""

    @property
    def by(self) -> By: ...

    async def busy(self) -> str:
        """What it still has to do, or why that is not seen, as a clause; empty: nothing."""
        ...


async def idle(look: IdleProbe, limit_s: float = LIMIT_S) -> IdleWait:
    """Waits until the server is idle, or `limit_s` have passed. Raises TransportError."""
    began_s, quiet = time.monotonic(), 0
    while look.by != "nothing":
        detail = await look.busy()
        quiet = 0 if detail else quiet + 1
        waited_s = round(time.monotonic() - began_s, 3)
        if quiet == IN_A_ROW or waited_s > limit_s:
            return IdleWait(by=look.by, idle=quiet == IN_A_ROW, waited_s=waited_s, detail=detail)
        await asyncio.sleep(POLL_S)
    return IdleWait(by="nothing", idle=False, waited_s=0.0, detail=await look.busy())


async def looking_at(run: LoadRun, served: Served) -> IdleProbe:
    """How to look at this server, which is idle now or as busy as others keep it. Raises as `LoadRun.plan` does."""
    if run.config.server_metrics and run.backend.server_metrics and not run.backend.stale_gauges:
        metrics = _ByMetrics(MetricsSource.of(served.target, run.backend, run.config.replicas))
        if await metrics.shown():
            return metrics
    plan = await run.plan(served)
    if plan.prompts.dataset is not None and not plan.job.warmup:
        return _Blind()
    probes = _ByProbe(plan)
    await probes.measure()
    return probes


class _ByMetrics:
    by: By = "metrics"

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    async def shown(self) -> bool:
        """Whether the server's metrics have any of BUSY."""
        try:
            return bool(await self._read())
        except Unreadable:
            return False

    async def busy(self) -> str:
        try:
            values = await self._read()
        except Unreadable as error:
            return str(error)
        return ", ".join(f"{value:g} {name}" for name, value in values.items() if value > 0)

    async def _read(self) -> dict[str, float]:
        metrics = Metrics(self._source, READ_LIMIT_S)
        try:
            values = await metrics.read()
        finally:
            await metrics.close()
        return {name: values[name] for name in BUSY if name in values}


class _ByProbe:
    by: By = "probe"

    def __init__(self, plan: ClientPlan) -> None:
        self._plan = plan
        self._backend: Backend = backends.get(plan.backend)
        load = msgspec.structs.replace(plan.job.load, seed=plan.job.load.seed + PROBE_SEED)
        self._prompts = plan.prompts.build(self._backend, load, plan.job.warmup)
        self._sent = 0
        self._limit_ms = 0.0

    async def measure(self) -> None:
        """Sets what a probe of an idle server may take, by how long the first ones take."""
        took_ms = [await self._probe() for _ in range(FIRST_PROBES)]
        self._limit_ms = max((each for each in took_ms if each is not None), default=0.0) * PROBE_RATIO + PROBE_SPARE_MS

    async def busy(self) -> str:
        took_ms = await self._probe()
        if took_ms is None:
            return "a probe failed"
        return "" if took_ms <= self._limit_ms else f"a probe took {took_ms:.0f} ms, over {self._limit_ms:.0f} ms"

    def _prompt(self) -> Prompt:
        """One that the server has not met, where prompts are drawn."""
        self._sent += 1
        spare = self._sent if self._plan.prompts.dataset is None else self._sent % self._plan.job.warmup
        return self._prompts.prompt("warmup", spare)

    async def _probe(self) -> float | None:
        """Milliseconds of one request with a reply of one token; None where it failed."""
        plan, prompt = self._plan, self._prompt()
        done: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
        sampling = msgspec.structs.replace(plan.job.sampling, max_tokens=0 if self._backend.pooled else 1)
        decoder = self._backend.decoder(sampling.stream)
        exchange = Exchange(self._sent, "warmup", 0, prompt.n_tokens, sampling.max_tokens, decoder, done.set_result)
        request = plan.job.request(self._backend, prompt, sampling)
        transport = build_transport(plan, self._backend)
        await transport.open(1)
        try:
            transport.send(exchange, transport.prepare(request, f"{plan.job.run_id}-idle{self._sent}"))
            async with asyncio.timeout(LIMIT_S):
                await done
        except TimeoutError:
            return None
        finally:
            await transport.close()
        return (exchange.done_ns - exchange.sent_ns) / 1e6 if exchange.outcome == "ok" else None


class _Blind:
    by: By = "nothing"

    async def busy(self) -> str:
        return "no metrics, and the dataset keeps no prompt for a probe"
