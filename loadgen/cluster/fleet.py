"""A load from several machines: what the driver does with the node processes, from the first word to the last record.

All draw the whole load and must agree on it; each plays its share, from one t = 0 that every node converts to its own
clock. A node that is lost ends nothing for the others: what it had not finished becomes `node_lost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from loadgen import rundir
from loadgen.client.engine import LiveCounters, Progress, Warm, check_warm_up
from loadgen.clock import now_ns
from loadgen.cluster import lost_requests, messages, records_home
from loadgen.cluster.clocks import AGAIN_PINGS, PINGS, Pinger, RemoteClock
from loadgen.cluster.link import Member, NodeLost
from loadgen.cluster.messages import (
    ALIVE_S,
    Alive,
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
)
from loadgen.config import Config
from loadgen.event_loop import StopSignals, every_second
from loadgen.plan import ClientPlan
from loadgen.rundir import Ceiling, WriteError, processes_for
from loadgen.rundir.cluster_facts import ClusterFacts, NodeFacts
from loadgen.target import Target, TransportError

LOOK_AGAIN_S = 10.0
LOOKS_AT_ONCE = 4  # more of them in one process wait for each other, and their round trips lengthen
ALONE_MOST = 8  # machines that measure their ceiling one after the other
LEAST_AHEAD_S, TRIPS_AHEAD = 0.05, 20  # how far ahead t = 0 is named: so many times the slowest word to a node
MOST_AHEAD_S = 2.0  # a machine that takes longer begins late, and the report says by how much
HOME_AT_ONCE = 4
T = TypeVar("T")


@dataclass
class FleetNode:
    """One machine while the fleet is there. lost: why, once it is."""

    member: Member
    facts: NodeFacts
    clock: RemoteClock = field(default_factory=RemoteClock)
    answers: asyncio.Queue[messages.Answer | NodeLost] = field(default_factory=asyncio.Queue)
    snapshots: list[LiveCounters] = field(default_factory=list)
    lost: str = ""
    pinger: Pinger | None = None
    hello: Hello | None = None
    start_offset_ns: int = 0

    async def say(self, order: messages.Order) -> None:
        """Nothing where it is lost; `answer` tells."""
        with contextlib.suppress(NodeLost):
            await self.member.send(messages.encode(order))

    async def answer(self, kind: type[T]) -> T:
        """Its next answer. Raises NodeLost, and TransportError for an order that failed there."""
        message = await self.answers.get()
        if isinstance(message, NodeLost):
            self.answers.put_nowait(message)
            raise message
        if isinstance(message, Failed):
            raise TransportError(f"{self.member.name}: {message.problem}")
        assert isinstance(message, kind)
        return message

    async def keep_alive(self) -> None:
        """Tells it that the driver is there, until it is lost. One that is cut off must not keep others waiting."""
        while not self.lost:
            await asyncio.sleep(ALIVE_S)
            await self.say(Alive())

    async def listen(self) -> None:
        """Takes in what it says until it is lost."""
        try:
            while True:
                for message in await self.member.receive():
                    answer = messages.answer_of(message)
                    if isinstance(answer, Beat):
                        self.snapshots = answer.snapshots
                    else:
                        self.answers.put_nowait(answer)
        except NodeLost as error:
            self.lost = str(error)
            self.answers.put_nowait(error)


class Fleet:
    """The node processes of one command. It plays one load after another."""

    def __init__(self, members: Sequence[Member], address: str, strategy: str, notes: Sequence[str]) -> None:
        self.nodes = [FleetNode(member, NodeFacts(name=member.name)) for member in members]
        self._facts = ClusterFacts(address=address, strategy=strategy, notes=tuple(notes), nodes=[])
        self._plays = itertools.count(1)
        self._looks = asyncio.Semaphore(LOOKS_AT_ONCE)
        self._stopping: list[asyncio.Task[None]] = []  # a task that nobody holds may be collected
        self._agreed: ClientPlan | None = None  # which the nodes have drawn, and not played yet

    @contextlib.asynccontextmanager
    async def begun(self, target: Target) -> AsyncIterator[Fleet]:
        """Within the block every node is known to be up, to run this version and to reach the server. Raises
        TransportError."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(node.listen()) for node in self.nodes]
        tasks += [loop.create_task(node.keep_alive()) for node in self.nodes]
        try:
            await self._all(self._hello)
            await self._all(lambda node: self._reach(node, target))
            await self._look(PINGS)
            yield self
        finally:
            for task in tasks:
                task.cancel()
            for node in self.nodes:
                if node.pinger is not None:
                    node.pinger.close()

    async def _all(self, act: Callable[[FleetNode], Awaitable[T]]) -> list[T]:
        """Does it with every node at once. Raises TransportError, also for a node that is lost: no load has begun."""
        return list(await asyncio.gather(*(self._sure(act, node) for node in self.nodes)))

    async def _sure(self, act: Callable[[FleetNode], Awaitable[T]], node: FleetNode) -> T:
        try:
            return await act(node)
        except NodeLost as error:
            raise TransportError(f"{node.member.name} was lost before the load began: {error}.") from None

    async def _hello(self, node: FleetNode) -> None:
        hello = node.hello = await node.answer(Hello)
        if hello.version != rundir.package_version():
            raise TransportError(
                f"{node.member.name} has llm-dissect {hello.version} and this machine {rundir.package_version()}; "
                "install the same version on both."
            )
        node.facts.hostname, node.facts.cpus = hello.hostname, hello.cpus
        node.pinger = Pinger(node.member.host, hello.echo_port, hello.echo_key)

    async def _reach(self, node: FleetNode, target: Target) -> None:
        await node.say(Reach(target))
        reached = await node.answer(Reached)
        if reached.problem:
            raise TransportError(
                f"{node.member.name} does not reach the server: {reached.problem} Name an address with --url that "
                "every machine of the cluster reaches."
            )

    # Clocks.

    async def _look(self, pings: int) -> None:
        """Looks at the clocks of all nodes that are there."""

        async def one(node: FleetNode) -> None:
            if node.pinger is not None and not node.lost:
                async with self._looks:
                    node.clock.add(await asyncio.to_thread(node.pinger.look, pings))

        await asyncio.gather(*map(one, self.nodes))

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            await self._look(AGAIN_PINGS)

    # Before the load.

    def processes(self, config: Config, plan: ClientPlan) -> int:
        """Client processes of all machines together; decides how many each has. No more than a closed loop has streams:
        then some machines have none."""
        load, first = plan.job.load, 0
        share = load.events_per_s(None, streamed=plan.job.sampling.stream) / len(self.nodes)
        for node in self.nodes:
            many = min(node.facts.cpus, processes_for(share, None))
            node.facts.first_process = first
            wanted = max(1, many) if config.workers == "auto" else int(config.workers)
            node.facts.client_processes = wanted if load.streams is None else min(wanted, load.streams.most - first)
            first += node.facts.client_processes
        return first

    async def ceiling(self, plan: ClientPlan) -> Ceiling | None:
        """The ceiling of each machine by itself, then of all at once; the lowest of the latter. Raises
        TransportError."""

        async def one(node: FleetNode) -> Ceiling | None:
            await node.say(Calibrate(plan))
            return (await node.answer(Calibrated)).ceiling

        for node in self.nodes[:ALONE_MOST] if len(self.nodes) > 1 else ():
            alone = await self._sure(one, node)
            node.facts.alone_events_per_s = None if alone is None else alone.events_per_s_per_core
        together = await self._all(one)
        for node, ceiling in zip(self.nodes, together, strict=True):
            node.facts.together_events_per_s = None if ceiling is None else ceiling.events_per_s_per_core
        return min(filter(None, together), key=lambda each: each.events_per_s_per_core, default=None)

    def facts(self) -> ClusterFacts:
        """What the manifest says."""
        return msgspec.structs.replace(self._facts, nodes=[node.facts for node in self.nodes])

    # The load.

    async def play(
        self,
        plan: ClientPlan,
        directory: Path,
        progress: Progress,
        warm: Warm | None = None,
        stop: StopSignals | None = None,
    ) -> None:
        """Sends the plan's load from all machines and leaves their records in `directory`; as `run_here` otherwise.
        `processes` has been asked before. Raises TransportError, and WriteError."""
        if self._agreed is not plan:
            await self.agree(plan)
        self._agreed = None
        check_warm_up([one for ones in await self._all(self._arm) for one in ones])
        if warm is not None:
            await warm()
        await self._look(PINGS)
        loop = asyncio.get_running_loop()
        if stop is not None:
            stop.on_signal(self._stop_soon, hurry=self._stop_soon)
        looking = loop.create_task(self._look_again())
        ticker = loop.create_task(every_second(lambda: progress(self._snapshots)))
        try:
            await self._start(directory)
            ends = await asyncio.gather(*map(self._over, self.nodes))
        finally:
            ticker.cancel()
            looking.cancel()
        await self._look(PINGS)
        progress(self._snapshots)
        await self._bring_home(plan, directory)
        for node, end in zip(self.nodes, ends, strict=True):
            if end.writing:
                raise WriteError(f"{node.member.name}: {end.problem}")
            if end.problem and not node.lost:
                raise TransportError(
                    f"a worker process on {node.member.name} failed: {end.problem}; {directory} keeps what was written."
                )

    @property
    def _snapshots(self) -> list[LiveCounters]:
        return [snapshot for node in self.nodes for snapshot in node.snapshots]

    async def agree(self, plan: ClientPlan) -> None:
        """Every node draws the load. Raises TransportError where one drew another, or cannot draw or hold it."""
        play = next(self._plays)
        shards = sum(node.facts.client_processes for node in self.nodes)

        async def one(node: FleetNode) -> Drawn:
            node.snapshots, facts = [], node.facts
            name = f"{plan.job.run_id}-{play}-{self.nodes.index(node)}"  # nodes may share a machine
            await node.say(Draw(plan, facts.first_process, facts.client_processes, shards, name))
            return await node.answer(Drawn)

        drawn = await self._all(one)
        for node, other in zip(self.nodes, drawn, strict=True):
            node.facts.directory = other.directory
            if what := other.digests.differing(drawn[0].digests):
                raise TransportError(
                    f"{node.member.name} and {self.nodes[0].member.name} have not the same {what}; install the same "
                    "version on both, and put the same files of --dataset, --trace and --tokenizer there."
                )
        self._agreed = plan

    async def _arm(self, node: FleetNode) -> list[Any]:
        await node.say(Arm())
        return (await node.answer(Armed)).warm_ups

    async def _start(self, directory: Path) -> None:
        """Names t = 0, and writes down what `collect` needs."""
        began_ns = now_ns()
        await asyncio.gather(*(node.say(Alive()) for node in self.nodes))
        ahead_s = min(max(LEAST_AHEAD_S, TRIPS_AHEAD * (now_ns() - began_ns) / 1e9), MOST_AHEAD_S)
        t0_ns = now_ns() + round(ahead_s * 1e9)
        self._facts.t0_ns = t0_ns
        for node in self.nodes:
            node.start_offset_ns = node.clock.offset_ns(t0_ns)
            node.facts.clock_offset_ns = node.start_offset_ns
            node.facts.clock_bound_ms = None if node.clock.bound_ns is None else node.clock.bound_ns / 1e6
            node.facts.start_lag_ms, node.facts.left_there = None, False
        _keep(directory, self.facts())
        await asyncio.gather(*(node.say(Start(t0_ns + node.start_offset_ns)) for node in self.nodes))

    def _stop_soon(self) -> None:
        self._stopping.append(asyncio.get_running_loop().create_task(self._stop()))

    async def _stop(self) -> None:
        await asyncio.gather(*(node.say(messages.Stop()) for node in self.nodes if not node.lost))

    async def _over(self, node: FleetNode) -> Finished:
        """A node that fails, as on a full disk, stops the others."""
        try:
            end = await node.answer(Finished)
        except NodeLost:
            return Finished()
        except TransportError as error:
            end = Finished(str(error))
        if end.problem:
            await self._stop()
        return end

    # After the load.

    async def _bring_home(self, plan: ClientPlan, directory: Path) -> None:
        """Copies the records of all machines into the run directory, and writes down what is missing."""
        at_once = asyncio.Semaphore(HOME_AT_ONCE)
        self._facts.records_bytes = 0

        async def one(node: FleetNode) -> None:
            async with at_once:
                await self._home(node, directory)

        await asyncio.gather(*map(one, self.nodes))
        assert self._facts.t0_ns is not None
        shards = sum(node.facts.client_processes for node in self.nodes)
        for number, node in enumerate(self.nodes):
            node.facts.lost = node.lost
            node.facts.clock_bound_ms = None if node.clock.bound_ns is None else node.clock.bound_ns / 1e6
            node.facts.clock_drift_ppm = node.clock.drift_ppm
            if node.lost:
                facts = node.facts
                path = directory / f"requests.{shards + number}.jsonl"
                shares = range(facts.first_process, facts.first_process + facts.client_processes)
                await asyncio.to_thread(
                    lost_requests.write, path, plan, shards, shares, node.snapshots, self._facts.t0_ns
                )
        lags = [node.facts.start_lag_ms for node in self.nodes if node.facts.start_lag_ms is not None]
        self._facts.start_spread_ms = max(lags) - min(lags) if len(lags) > 1 else None
        _keep(directory, self.facts())

    async def _home(self, node: FleetNode, directory: Path) -> None:
        """The records of one machine. Of one that is lost, if it can be reached again."""
        member, there = node.member, node.facts.directory
        files = []
        try:
            if node.lost:
                await member.again()
            files = await member.written(there)
            for file in files:
                came = directory / f"{file.name}.home"
                await records_home.bring(file, lambda name, offset: member.read(there, name, offset), came)
                self._facts.records_bytes += file.size_bytes
            await member.remove(there)
        except (NodeLost, records_home.HomeError) as error:
            node.facts.left_there = True
            node.lost = node.lost or f"its records did not come home: {error}"
        except OSError as error:
            raise WriteError(error.strerror or str(error)) from None
        lags = []
        for file in files:
            came = directory / f"{file.name}.home"
            if came.exists():
                shift = self._shift(node)
                lags.append(
                    await asyncio.to_thread(
                        records_home.settle, came, directory / file.name, self._facts.t0_ns or 0, shift
                    )
                )
        left = [lag for lag in lags if lag is not None]
        if left:
            residual_ns = node.start_offset_ns - node.clock.offset_ns(self._facts.t0_ns or 0)
            node.facts.start_lag_ms = (min(left) + (0 if shift else residual_ns)) / 1e6

    def _shift(self, node: FleetNode) -> Callable[[int], int] | None:
        """What to add to a node's stamps, by the clock as all looks show it; None where that is next to nothing."""
        t0_ns, clock = self._facts.t0_ns or 0, node.clock
        ends = [look.at_ns for look in clock.looks] or [t0_ns]
        if all(abs(node.start_offset_ns - clock.offset_ns(at)) <= records_home.MOVED_NS for at in (t0_ns, ends[-1])):
            return None
        return lambda since_ns: node.start_offset_ns - clock.offset_ns(t0_ns + since_ns)


def _keep(directory: Path, facts: ClusterFacts) -> None:
    """Into the run's manifest, where there is one: a warm-up with the load has none."""
    with contextlib.suppress(rundir.RunError):
        manifest = rundir.read_manifest(directory)
        rundir.write_manifest(directory, msgspec.structs.replace(manifest, cluster=facts))
