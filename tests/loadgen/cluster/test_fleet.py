"""The driver and real node processes on this machine, without Ray: agreement, loads, losses, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.client.engine import LiveCounters
from loadgen.cluster import digests, lost_requests, machines, messages, records_home
from loadgen.cluster.fleet import Fleet
from loadgen.cluster.link import NodeLost
from loadgen.cluster.machines import choose
from loadgen.cluster.messages import Drawn, Hello
from loadgen.cluster.ray_cluster import Agent, ClusterError, RayMachine
from loadgen.cluster.records_home import Written
from loadgen.config import Config, ConfigError
from loadgen.event_loop import run_loop
from loadgen.plan import ClientPlan
from loadgen.rundir import records
from loadgen.target import TransportError
from tests.loadgen.client.test_engine import plan
from tests.loadgen.scripted import STREAM_HEAD, Script, scripted, tokens


class Local:
    """An agent's node process on this machine; `Member` of link.py. lie: what it makes of the answers."""

    host = "127.0.0.1"

    def __init__(self, name: str, lie: Callable[[messages.Answer], messages.Answer] = lambda answer: answer) -> None:
        self.name, self.agent, self._lie = name, Agent(), lie

    async def send(self, message: bytes) -> None:
        await self.agent.send(message)

    async def receive(self) -> list[bytes]:
        said, end = await self.agent.receive()
        if end is not None:
            raise NodeLost(end)
        return [messages.encode(self._lie(messages.answer_of(each))) for each in said]

    async def again(self) -> None:
        pass

    async def written(self, directory: str) -> list[Written]:
        return await self.agent.written(directory)

    async def read(self, directory: str, name: str, offset: int) -> bytes:
        return await self.agent.read(directory, name, offset)

    async def remove(self, directory: str) -> None:
        await self.agent.remove(directory)


def script(number: int) -> Script:
    return [STREAM_HEAD, *(part for token in tokens(3)[1:] for part in (0.05, token))]


def on_nodes(
    act: Callable[[Fleet, ClientPlan], Awaitable[Any]],
    members: list[Local],
    config: Config | None = None,
    **options: Any,
) -> None:
    """Does it with a fleet of these members that has begun, and a plan for a scripted server."""

    async def story() -> None:
        async with scripted(script) as world:
            the_plan = plan(world.url, **options)
            for member in members:
                await member.agent.begin("127.0.0.1")
            try:
                async with Fleet(members, "here", "SPREAD", ()).begun(the_plan.target) as fleet:
                    fleet.processes(config or Config(on="ray", url="http://h:1"), the_plan)
                    await act(fleet, the_plan)
            finally:
                for member in members:
                    assert member.agent.process is not None
                    if member.agent.process.returncode is None:
                        member.agent.process.kill()
                    await member.agent.process.wait()

    run_loop(story())


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the node processes keep their records."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.mark.processes
def test_two_nodes_play_one_load_twice(tmp_path: Path) -> None:
    """The second load of one fleet is as whole as the first, and no records stay on the machines."""

    async def act(fleet: Fleet, the_plan: ClientPlan) -> None:
        for name in ("a", "b"):
            out = tmp_path / name
            out.mkdir()
            seen: list[list[LiveCounters]] = []
            await fleet.play(the_plan, out, seen.append)
            records.merge(out)
            table, facts = records.read(out)
            assert table.measured().id.tolist() == list(range(40)) and table.ok.all()
            assert len(facts) == 4 and sum(each.done for each in seen[-1]) == 40
            assert records.read_header(out).t0_monotonic_ns == fleet.facts().t0_ns
            cluster = fleet.facts()
            assert [node.first_process for node in cluster.nodes] == [0, 2] and not cluster.lost
            assert all(abs(node.clock_offset_ns or 0) < 200_000 for node in cluster.nodes)
            assert cluster.start_spread_ms is not None and cluster.records_bytes > 0
        assert not list((tmp_path / "tmp").glob("llm-dissect-*/*"))

    config = Config(on="ray", url="http://h:1", workers="2")
    on_nodes(act, [Local("a"), Local("b")], config, requests=40, arrival="constant:100")


@pytest.mark.processes
def test_a_node_that_dies_loses_what_it_had_not_finished(tmp_path: Path) -> None:
    members = [Local("a"), Local("b")]

    def kill_b(snapshots: list[Any]) -> None:
        process = members[1].agent.process
        assert process is not None
        if sum(each.done for each in snapshots) > 20 and process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)

    async def act(fleet: Fleet, the_plan: ClientPlan) -> None:
        await fleet.play(the_plan, tmp_path, kill_b)
        (lost,) = fleet.facts().lost
        assert lost.name == "b" and "killed by signal 9" in lost.lost and not lost.left_there
        table = records.read(tmp_path)[0].measured()
        assert table.id.tolist() == list(range(80))
        mine = table.ok[table.id % 2 == 0]
        assert mine.all() and len(mine) == 40
        of_b = table.select(table.id % 2 == 1)
        assert 5 < of_b.ok.sum() < 40  # what it had finished came home
        assert all("was lost" in text for text in of_b.errors.values()) and len(of_b.errors) == 40 - of_b.ok.sum()

    on_nodes(act, members, requests=80, arrival="constant:20")


@pytest.mark.processes
@pytest.mark.parametrize("field", ["code", "schedule", "prompts"])
def test_nothing_is_sent_where_nodes_differ(field: str, tmp_path: Path) -> None:
    def lie(answer: messages.Answer) -> messages.Answer:
        if not isinstance(answer, Drawn):
            return answer
        return msgspec.structs.replace(answer, digests=msgspec.structs.replace(answer.digests, **{field: "other"}))

    async def act(fleet: Fleet, the_plan: ClientPlan) -> None:
        with pytest.raises(TransportError, match=f"b and a have not the same .*{field}"):
            await fleet.play(the_plan, tmp_path, lambda snapshots: None)

    on_nodes(act, [Local("a"), Local("b", lie)], requests=4)


@pytest.mark.processes
def test_versions_that_differ_are_refused() -> None:
    def lie(answer: messages.Answer) -> messages.Answer:
        return msgspec.structs.replace(answer, version="0.0.1") if isinstance(answer, Hello) else answer

    async def act(fleet: Fleet, the_plan: ClientPlan) -> None:
        raise AssertionError("it began")

    with pytest.raises(TransportError, match=r"^b has llm-dissect 0.0.1 and this machine .*; install the same version"):
        on_nodes(act, [Local("a"), Local("b", lie)], requests=4)


@pytest.mark.processes
def test_a_node_without_a_driver_ends(tmp_path: Path) -> None:
    async def story() -> int | None:
        agent = Agent()
        await agent.begin("127.0.0.1")
        assert agent.process is not None and agent.process.stdin is not None
        agent.process.stdin.close()
        return await asyncio.wait_for(agent.process.wait(), 20)

    assert run_loop(story()) == 1


def test_digests_are_of_what_is_drawn() -> None:
    def seeded(seed: int, **options: Any) -> ClientPlan:
        the_plan = plan("http://h:1", **options)
        load = msgspec.structs.replace(the_plan.job.load, seed=seed)
        return msgspec.structs.replace(the_plan, job=msgspec.structs.replace(the_plan.job, load=load))

    same = [digests.of_plan(seeded(1)) for _ in range(2)]
    assert same[0] == same[1] and same[0].differing(same[1]) is None
    other = digests.of_plan(seeded(2))
    assert same[0].differing(other) == "prompts" and other.code == same[0].code
    later = digests.of_plan(seeded(1, arrival="poisson:5"))
    assert same[0].differing(later) == "schedule"


def test_requests_of_a_lost_machine_are_those_of_its_share(tmp_path: Path) -> None:
    the_plan = plan("http://h:1", requests=20, arrival="constant:10")
    lost_requests.write(tmp_path / "requests.6.jsonl", the_plan, 6, range(2, 4), [], 5)
    lines = [json.loads(line) for line in (tmp_path / "requests.6.jsonl").read_text().splitlines()]
    rows = {line["id"]: line for line in lines[1:]}
    assert sorted(rows) == [number for number in range(20) if number % 6 in (2, 3)]
    due_ns = the_plan.job.load.due_ns()
    for number, row in rows.items():
        assert (row["outcome"], row["scheduled_ns"]) == ("node_lost", int(due_ns[number]))
        assert "sent_ns" not in row or row["sent_ns"] is None


# Which machines.


def machine(number: int, cpus: float = 8.0) -> RayMachine:
    return RayMachine(f"id{number}", f"10.0.0.{number}", cpus, 0.0)


THREE = [machine(1), machine(2), machine(3)]


def test_the_servers_machine_is_left_out_unless_it_is_asked_for() -> None:
    chosen = choose(THREE, {"10.0.0.2"}, None)
    assert [each.host for each in chosen.machines] == ["10.0.0.1", "10.0.0.3"]
    assert chosen.strategy == "STRICT_SPREAD" and chosen.notes == ["10.0.0.2 runs the server and sends nothing"]
    assert [each.host for each in choose(THREE, {"10.0.0.2"}, 2).machines] == ["10.0.0.1", "10.0.0.3"]
    asked = choose(THREE, {"10.0.0.2"}, 3)
    assert len(asked.machines) == 3 and asked.notes == ["10.0.0.2 runs the server and sends too"]


def test_too_few_machines_are_shared_with_a_note() -> None:
    chosen = choose(THREE, set(), 5)
    assert chosen.strategy == "SPREAD" and len(chosen.machines) == 5
    assert sorted(each.host for each in chosen.machines)[:2] == ["10.0.0.1", "10.0.0.1"]
    assert "--nodes is 5 and the cluster has 3 machines" in chosen.notes[0]


def test_machines_without_a_core_are_left_out() -> None:
    chosen = choose([machine(1, cpus=0.0), machine(2)], set(), None)
    assert [each.host for each in chosen.machines] == ["10.0.0.2"] and "10.0.0.1 has no core" in chosen.notes[0]
    with pytest.raises(ClusterError, match="no machine of the Ray cluster has a core"):
        choose([machine(1, cpus=0.0)], set(), None)


def test_a_cluster_that_is_only_the_servers_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="--nodes 1"):
        choose([machine(1)], {"10.0.0.1"}, None)
    assert len(choose([machine(1)], {"10.0.0.1"}, 1).machines) == 1


def test_a_server_on_this_machine_is_on_the_drivers_machine() -> None:
    hosts = machines.hosts_of(plan("http://localhost:1").target, THREE)
    assert "10.0.0.1" in hosts and "10.0.0.2" not in hosts


def test_place_is_for_this_user_alone() -> None:
    directory = records_home.place("x")
    assert directory.stat().st_mode & 0o777 == 0o700 == directory.parent.stat().st_mode & 0o777
