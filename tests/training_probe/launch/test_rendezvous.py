"""Nodes that meet without a cluster: who is let in, who is not, and what is left when one of them goes."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.gpus import Gpu, Inventory
from backends.process import free_port
from loadgen.cluster.link import NodeLost
from loadgen.cluster.ray_cluster import ClusterError
from loadgen.config import ConfigError
from loadgen.rundir import package_version
from tests.training_probe import stand_in
from training_probe import results
from training_probe.grid import Cell, GridError
from training_probe.launch import node, rendezvous
from training_probe.launch.channel import Channel, ChannelError
from training_probe.launch.node import Facts, Inspect, Node, Order, Poll, Reply, StartRanks, Status
from training_probe.launch.nodes import Nodes
from training_probe.launch.rendezvous import Goodbye, Hello, Meeting, MetNodes, follow, gathered, is_ours, is_plain
from training_probe.launch.runner import NodeRank, worker_command
from training_probe.sweep import run as sweeps
from training_probe.sweep.cell import Dependencies, Settings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nodes are Linux machines")

SECRET = "0123456789abcdef"
LONG_S = 30.0


def meeting(nodes: int = 2) -> Meeting:
    return Meeting(nodes=nodes, rank=0, address="127.0.0.1", port=free_port(), token=SECRET, asked="a sweep")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Lines:
    """What is printed. `until` waits for a line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()

    def say(self, line: str) -> None:
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()

    def until(self, part: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(part in line for line in self.lines), LONG_S), self.lines


def followers(pool: ThreadPoolExecutor, at: Meeting, says: Callable[[str], None] = lambda _: None) -> list[Future[int]]:
    return [pool.submit(follow, replace(at, rank=rank), says) for rank in range(1, at.nodes)]


def test_nodes_meet_and_part(pool: ThreadPoolExecutor) -> None:
    at, lines = meeting(3), Lines()
    following = followers(pool, at, lines.say)
    with gathered(at, lines.say) as fleet:
        assert fleet.nodes_per_cell == 3 and fleet.nodes.hosts == ["127.0.0.1"] * 3
        roots = {facts.root for facts in fleet.nodes.look()}
        assert len(roots) == 3 and all(Path(root).is_dir() for root in roots)
        fleet.check(("json",))
        with pytest.raises(ConfigError, match=r"node 127\.0\.0\.1 lacks no_such_module; install it there"):
            fleet.check(("no_such_module",))
    assert [future.result(LONG_S) for future in following] == [0, 0]
    assert not any(Path(root).exists() for root in roots)
    assert any("waits at 127.0.0.1" in line and "for nodes 1, 2" in line for line in lines.lines)
    assert not any(SECRET in line for line in lines.lines) and SECRET not in repr(at)


def test_a_refusal_is_told_to_all(pool: ThreadPoolExecutor) -> None:
    at = meeting()
    following = followers(pool, at)
    with pytest.raises(GridError, match="too few"), gathered(at, lambda _: None):
        raise GridError("too few.")
    with pytest.raises(ConfigError, match=r"node 0 ended: too few\."):
        following[0].result(LONG_S)


def test_another_token_is_refused_and_node_0_waits_on(pool: ThreadPoolExecutor) -> None:
    at, lines = meeting(), Lines()

    def come() -> int:
        lines.until("node 0 waits")
        with pytest.raises(ConfigError, match="LLM_DISSECT_TOKEN must be the same"):
            follow(replace(at, rank=1, token="f" * 16), lambda _: None)
        with socket.create_connection((at.address, at.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(100))
            lines.until("refused a connection from 127.0.0.1")
        return follow(replace(at, rank=1), lambda _: None)

    following = pool.submit(come)
    with gathered(at, lines.say) as fleet:
        assert fleet.nodes_per_cell == 2
    assert following.result(LONG_S) == 0


def greeted(at: Meeting, hello: Hello) -> tuple[Channel, rendezvous.Welcome | Goodbye | Order]:
    channel = Channel(rendezvous.connected(at, lambda _: None), SECRET, listens=False)
    channel.send(msgspec.msgpack.encode(hello))
    return channel, rendezvous._FOR_FOLLOWERS.decode(channel.receive(LONG_S))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"version": "0.0.0\x1b[31m"}, r"node 127\.0\.0\.1 has llm-dissect 0\.0\.0\\x1b\[31m and node 0 "),
        ({"asked": "another"}, r"node 127\.0\.0\.1 was started with other options than node 0"),
        ({"rank": 7}, r"node 127\.0\.0\.1 came with --node-rank 7, which another one has"),
        ({"rank": 0}, r"node 127\.0\.0\.1 came with --node-rank 0"),
    ],
)
def test_a_node_that_was_started_wrongly_is_named(
    pool: ThreadPoolExecutor, wrong: dict[str, Any], sentence: str
) -> None:
    at = meeting()
    hello = msgspec.structs.replace(Hello(rank=1, version=package_version(), asked=at.asked), **wrong)
    coming = pool.submit(greeted, at, hello)
    with pytest.raises(ConfigError, match=sentence) as raised, gathered(at, lambda _: None):
        pass
    assert coming.result(LONG_S)[1] == Goodbye(refused=str(raised.value))


def test_one_rank_is_one_node_unless_the_first_is_gone(pool: ThreadPoolExecutor) -> None:
    at, lines = meeting(3), Lines()
    hello = Hello(rank=1, version=package_version(), asked=at.asked)

    def come() -> None:
        greeted(at, hello)[0].close()
        lines.until("node 1 is")
        first, _ = greeted(at, hello)
        second, answer = greeted(at, hello)
        assert isinstance(answer, Goodbye)
        first.close()
        second.close()

    coming = pool.submit(come)
    with pytest.raises(ConfigError, match="--node-rank 1, which another one has"), gathered(at, lines.say):
        pass
    coming.result(LONG_S)
    assert lines.lines[1:] == ["node 1 is 127.0.0.1"] * 2


def test_nodes_that_do_not_come_are_named(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    at = meeting(4)
    following = pool.submit(follow, replace(at, rank=2), lambda _: None)
    monkeypatch.setattr(rendezvous, "JOIN_S", 1.0)
    sentence = r"nodes 1, 3 did not come to 127\.0\.0\.1:\d+ within 1 s; start"
    with pytest.raises(ClusterError, match=sentence), gathered(at, lambda _: None):
        pass
    with pytest.raises(ConfigError, match="node 0 ended: nodes 1, 3 did not come"):
        following.result(LONG_S)
    monkeypatch.setattr(rendezvous, "JOIN_S", 0.0)
    with pytest.raises(ClusterError, match=r"node 0 does not answer at .* start the same command there"):
        follow(replace(meeting(), rank=1), lambda _: None)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = replace(meeting(), port=other.getsockname()[1])
        sentence = r"node 0 cannot listen on .* \(Address already in use\)"
        with pytest.raises(ConfigError, match=sentence), gathered(at, lambda _: None):
            pass


# What is said between nodes that met.


class Pair:
    """A link of node 0, and whoever answers it."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            calling = pool.submit(
                lambda: Channel(socket.create_connection(listener.getsockname()), SECRET, listens=False)
            )
            listening = Channel(listener.accept()[0], SECRET, listens=True)
        self.link, self.there = rendezvous._Remote(listening), calling.result(LONG_S)
        self._pool = pool

    def ask(self, order: Order, answer: bytes) -> Reply:
        def reply() -> None:
            self.there.receive(LONG_S)
            self.there.send(answer)

        replying = self._pool.submit(reply)
        try:
            return self.link.ask(order, LONG_S)
        finally:
            replying.result(LONG_S)


@pytest.mark.parametrize(
    "answer",
    [
        Status(files={"../trial.json": b""}),
        Status(grown={"..": b""}),
        Status(files={"/etc/passwd": b""}),
        Facts(version="1", python="", root="", port=1, inventory=Inventory()),
        Goodbye(),
        {"a": 1},
    ],
)
def test_an_answer_that_is_none_is_a_lost_node(pool: ThreadPoolExecutor, answer: object) -> None:
    with pytest.raises(NodeLost, match="its answer"):
        Pair(pool).ask(Poll(), msgspec.msgpack.encode(answer))


def test_told_bytes_are_the_same_here(pool: ThreadPoolExecutor) -> None:
    told = Status(grown={"steps.jsonl": bytes(range(256))}, code=3)
    assert Pair(pool).ask(Poll(), msgspec.msgpack.encode(told)) == told
    with pytest.raises(NodeLost, match="its answer is none to what it was asked"):
        Pair(pool).ask(Inspect(), msgspec.msgpack.encode(told))


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=100))
def test_any_answer_is_an_answer_or_a_lost_node(data: bytes) -> None:
    with ThreadPoolExecutor(2) as pool:
        try:
            reply = Pair(pool).ask(Poll(), data)
        except NodeLost:
            return
        assert isinstance(reply, Status) and all(map(is_plain, (*reply.grown, *reply.files)))


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=100).filter(lambda data: data != msgspec.msgpack.encode(Goodbye())))
def test_orders_that_are_none_end_a_follower(data: bytes) -> None:
    at = meeting()
    with ThreadPoolExecutor(1) as pool, socket.create_server((at.address, at.port)) as listener:
        following = pool.submit(follow, replace(at, rank=1), lambda _: None)
        channel = Channel(listener.accept()[0], SECRET, listens=True)
        channel.receive(LONG_S)
        channel.send(msgspec.msgpack.encode(rendezvous.Welcome()))
        channel.send(data)
        with pytest.raises(ClusterError, match=r"node 0 at .* was lost"):
            following.result(LONG_S)


def test_a_follower_starts_its_own_workers_and_nothing_else(tmp_path: Path) -> None:
    here, at = Node("127.0.0.1", tmp_path), replace(meeting(), rank=1)

    def order(python: str = sys.executable, rank: int = 1, master: str = "10.0.0.1", **more: Any) -> StartRanks:
        argv = worker_command(
            python=python, processes=2, port=7, directory=tmp_path / more.get("name", "run-1"),
            node=NodeRank(rank=rank, nodes=2, master=master),
        )  # fmt: skip
        return StartRanks(**{
            "name": "run-1", "files": {"trial.json": b""}, "argv": argv, "env": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            "ranks": 2, "gpu_ids": (), "port": 0, **more,
        })  # fmt: skip

    good = order()
    assert is_ours(good, here, at)
    micro = tuple(word.replace("training_probe.worker", "training_probe.worker.micro") for word in good.argv)
    assert is_ours(order(argv=micro), here, at)
    for bad in (
        order(python="/bin/sh"), order(rank=0), order(master="$(reboot)"), order(name=".."), order(name="../run-1"),
        order(files={"../../.bashrc": b""}), order(env={"LD_PRELOAD": "a.so"}), order(env={"PYTHONPATH": "/tmp"}),
        order(argv=("sh", "-c", "true")), order(argv=()), order(argv=(*good.argv, "more")), order(ranks=3),
        order(argv=tuple(word.replace("training_probe.worker", "http.server") for word in good.argv)),
        order(argv=tuple(word.replace("7", "7x") if word == "7" else word for word in good.argv)),
    ):  # fmt: skip
        assert not is_ours(bad, here, at), bad


def test_what_is_refused_starts_nothing(pool: ThreadPoolExecutor) -> None:
    at = meeting()
    following = followers(pool, at)
    with gathered(at, lambda _: None) as fleet:
        begin = StartRanks(name="run-1", files={}, argv=("touch", "x"), env={}, ranks=1, gpu_ids=(), port=0)
        told = fleet.nodes.links[1].ask(begin, LONG_S)
        assert isinstance(told, Status) and told.problem is not None and "nothing but the workers" in told.problem
    assert following[0].result(LONG_S) == 0


# What nodes have.


class Said:
    """A node that only says what it has."""

    def __init__(self, host: str, gpus: int, cores: int) -> None:
        self.host = host
        found = tuple(
            Gpu(index=index, uuid=f"{host}-{index}", name="G", memory_bytes=1, used_bytes=0) for index in range(gpus)
        )
        self._facts = Facts(
            version=package_version(), python="", root="", port=1, inventory=Inventory(gpus=found),
            gpu_ids=tuple(range(gpus)), cores=cores,
        )  # fmt: skip

    def ask(self, order: Order, limit_s: float) -> Reply:
        return self._facts


def test_more_ranks_than_a_node_can_take_are_refused() -> None:
    fleet = MetNodes(Nodes([Said("a", 8, 4), Said("b", 4, 1)]))
    assert fleet.gpus() == 8 and len(fleet.devices()) == 12
    assert [gpu.uuid for gpu in fleet.gpus_of(4)] == ["a-0", "a-1", "b-0", "b-1"]
    fleet.check_cells([cell("7b", 8, "cuda"), cell("tiny", 8, "cpu")])
    with pytest.raises(GridError, match=r"--gpus 16 is 8 GPUs on each of 2 nodes; node 1 \(b\) cannot .* it has 4"):
        fleet.check_cells([cell("7b", 8, "cuda"), cell("7b", 16, "cuda")])
    with pytest.raises(GridError, match=r"10 is 5 processes .* node 1 \(b\) cannot give them: its 1 core can take 4"):
        fleet.check_cells([cell("tiny", 10, "cpu")])
    with pytest.raises(GridError, match=r"node 0 \(c\) cannot give them: it has none that can be used"):
        MetNodes(Nodes([Said("c", 0, 1)])).check_ranks(1, on_cpu=False)


def cell(does: str, gpus: int = 2, device: Any = "cpu") -> Cell:
    return Cell(model=does, gpus=gpus, seq_len=10, micro_batch=3, device=device)


# Sweeps, of stand-ins for the workers.


@pytest.fixture
def starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "is_ours", lambda *_: True)


def swept(at: Meeting, directory: Path, *names: str, says: Callable[[str], None] = lambda _: None) -> int:
    """A sweep on nodes that meet, or the rest of one."""
    with gathered(at, says) as fleet:
        around = Dependencies(command=stand_in.command, cluster=fleet, inventory=Inventory, node_bytes=lambda: None)
        if directory.exists():
            return sweeps.resume(directory, says, around)
        how = Settings(warmup_steps=2, steps=5, runs=1, nodes_per_cell=at.nodes)
        return sweeps.sweep([cell(name) for name in names], how, directory, says, around)


@pytest.mark.processes
@pytest.mark.usefixtures("starts_anything")
def test_a_sweep_on_two_nodes_is_one_sweep(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    at = meeting()
    following = followers(pool, at)
    assert swept(at, tmp_path / "sweep", "ok", "oom", "crashes") == 0
    assert following[0].result(LONG_S) == 0
    good, oom, crashed = results.read(tmp_path / "sweep")
    assert (good.outcome, good.nodes, len(good.peak_memory_gb_by_rank)) == ("ok", ["127.0.0.1"] * 2, 2)
    assert oom.outcome == "oom" and "rank 1" in oom.reason
    assert crashed.outcome == "crashed" and crashed.reason == "rank 1: RuntimeError: some trouble"


@pytest.mark.processes
@pytest.mark.usefixtures("starts_anything")
def test_a_lost_node_ends_the_sweep_which_goes_on_when_it_is_back(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    at, lines, directory = meeting(), Lines(), tmp_path / "sweep"

    def come_and_go() -> None:
        channel = rendezvous.join(replace(at, rank=1), lambda _: None)
        with node.here("127.0.0.1") as here, pytest.raises(ChannelError):
            threading.Timer(2.0, channel.abort).start()
            rendezvous.obey(channel, here, at)
        channel.close()

    going = pool.submit(come_and_go)
    assert swept(at, directory, "waits", "ok", says=lines.say) == 3
    going.result(LONG_S)
    (lost,) = results.read(directory)
    assert lost.outcome == "crashed" and lost.reason.startswith("node 127.0.0.1 was lost: ")
    assert "--resume goes on once all nodes are there" in lines.lines[-1]

    again = meeting()
    following = followers(pool, again)
    assert swept(again, directory, says=lines.say) == 0
    assert following[0].result(LONG_S) == 0
    assert [result.outcome for result in results.read(directory)] == ["crashed", "ok"]
