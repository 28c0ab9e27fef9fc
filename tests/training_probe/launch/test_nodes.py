"""Runs on "nodes" that are node processes on this machine, reached through pipes instead of Ray."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.exit_codes import Stopped
from loadgen.cluster.link import NodeLost
from loadgen.cluster.ray_cluster import RayMachine
from tests.training_probe import stand_in
from tests.training_probe.stand_in import GIB
from training_probe.grid import Cell
from training_probe.launch import cluster, nodes
from training_probe.launch.cluster import Cluster, Placed, choose
from training_probe.launch.node import Inspect, Order, Reply
from training_probe.launch.nodes import Nodes
from training_probe.launch.runner import Launching, Limits, NodeRank, TrialOutcome, run_trial, torchrun
from training_probe.protocol import Trial

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are started on Linux only"),
]

LONG_S = 30.0


class Pipe:
    """A node process on this machine."""

    def __init__(self, host: str) -> None:
        self.host = host
        argv = [sys.executable, "-m", "training_probe.launch.node", host]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, order: Order, limit_s: float) -> Reply:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(msgspec.json.encode(order) + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise NodeLost("it is gone") from None
        if reply := self.process.stdout.readline():
            return msgspec.json.decode(reply, type=Reply)
        raise NodeLost("it is gone")


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pipe]]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pipes = [Pipe("127.0.0.1"), Pipe("127.0.0.2")]
    yield pipes
    for pipe in pipes:
        assert pipe.process.stdin is not None and pipe.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.process.stdin.close()
        assert pipe.process.wait(LONG_S) in (0, -9)
        pipe.process.stdout.close()


def run(directory: Path, pipes: list[Pipe], does: str, gpus: int, **options: Any) -> TrialOutcome:
    cell = Cell(model=does, gpus=gpus, seq_len=10, micro_batch=3, device="cpu")
    how = Launching(command=stand_in.command, place=Nodes(pipes))
    limits = Limits(timeout_s=options.pop("timeout_s", LONG_S))
    cancelled = options.pop("cancelled", threading.Event())
    trial = Trial(cell=cell, warmup_steps=2, steps=5)
    return run_trial(trial, directory / "run-1", how, limits, cancelled=cancelled, **options)


def alive(temporary: Path) -> list[int]:
    """Stand-ins that run in a directory which a node process made there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "stand_in.py" in text and f"{temporary}/training-" in text:
            found.append(int(path.parent.name))
    return found


def test_ranks_of_two_nodes_are_one_run(tmp_path: Path, two: list[Pipe]) -> None:
    seen: list[int] = []
    ended = run(tmp_path, two, "ok", 4, on_step=lambda step: seen.append(step.step))
    assert (ended.outcome, ended.reason) == ("ok", "")
    assert ended.measured.allocated_bytes == tuple((3 + rank) * GIB for rank in range(4))
    assert seen == list(range(7))
    assert ended.log == tmp_path / "run-1" / "log.txt"
    assert {path.name for path in (tmp_path / "run-1").iterdir()} == {
        "trial.json", "steps.jsonl", "log.txt", "log-node1.txt", *(f"{kind}{n}" for kind in ("pid",) for n in range(4)),
        *(f"rank{n}.json" for n in range(4)),
    }  # fmt: skip
    assert run(tmp_path, two, "ok", 2).outcome == "ok"  # again, on the same nodes


@pytest.mark.parametrize(
    ("does", "outcome", "reason"),
    [
        ("oom", "oom", "rank 1: OutOfMemoryError: CUDA out of memory."),
        ("crashes", "crashed", "rank 1: RuntimeError: some trouble"),
        ("unsupported", "unsupported", "bitsandbytes is not installed"),
        ("hangs", "timeout", "no new step in 2 s; 3 of 7 steps were done; Watchdog caught"),
        ("silent", "crashed", "it ended without an error and without a report of rank 0, 1"),
        ("port_taken", "ok", ""),
    ],
)
def test_outcomes(
    tmp_path: Path, two: list[Pipe], monkeypatch: pytest.MonkeyPatch, does: str, outcome: str, reason: str
) -> None:
    monkeypatch.setattr("training_probe.launch.runner.TEARDOWN_S", 1.0)
    ended = run(tmp_path, two, does, 2, timeout_s=2 if does == "hangs" else LONG_S)
    assert ended.outcome == outcome and ended.reason.startswith(reason)
    assert alive(tmp_path) == []


def test_nodes_that_wait_for_a_dead_rank_are_ended(
    tmp_path: Path, two: list[Pipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "OTHERS_S", 1.0)
    begun = time.monotonic()
    ended = run(tmp_path, two, "second_node_dies", 2)
    assert ended.outcome == "crashed" and ended.reason.startswith(
        "rank 1 was killed by SIGABRT; 2 of 7 steps were done"
    )
    assert time.monotonic() - begun < LONG_S
    assert alive(tmp_path) == []


def test_a_lost_node_is_named(tmp_path: Path, two: list[Pipe]) -> None:
    ended = run(tmp_path, two, "hangs", 2, on_step=lambda step: two[1].process.kill())
    assert ended.outcome == "crashed"
    assert ended.reason.startswith("node 127.0.0.2 was lost: it is gone")
    while alive(tmp_path):
        time.sleep(0.05)
    assert run(tmp_path, two, "ok", 2).reason.startswith("node 127.0.0.2 was lost: it is gone")


def test_a_stop_ends_all(tmp_path: Path, two: list[Pipe]) -> None:
    cancelled = threading.Event()
    training: list[int] = []

    def stop(_: object) -> None:
        training.extend(alive(tmp_path))
        cancelled.set()

    with pytest.raises(Stopped):
        run(tmp_path, two, "hangs", 2, on_step=stop, cancelled=cancelled)
    assert training and alive(tmp_path) == []


def test_what_is_missing_is_told(two: list[Pipe]) -> None:
    for facts in Nodes(two).look(("json", "no_such_module", "no.such.package")):
        assert facts.lacking == ("no_such_module", "no.such.package")
    assert isinstance(two[0].ask(Inspect(), LONG_S), msgspec.Struct)


def test_torchrun_meets_at_the_first_node() -> None:
    node = NodeRank(rank=1, nodes=2, master="10.0.0.1")
    argv = torchrun(python="py", processes=4, port=7, module="m", directory=Path("/d"), node=node)
    assert argv[3:] == (
        "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "4", "--master-addr", "10.0.0.1", "--master-port", "7",
        "-m", "m", "/d",
    )  # fmt: skip


# Which cell goes where.


def machine(name: str, gpus: int = 0) -> RayMachine:
    return RayMachine(name, name, 4, gpus)


def test_cells_get_the_smallest_nodes_that_suffice() -> None:
    free = [machine("a", 8), machine("b", 2), machine("c", 4)]
    assert choose(free, 1, 2) == [free[1]]
    assert choose(free, 2, 3) == [free[2], free[0]]
    assert choose(free, 1, 0) == [free[1]]
    assert choose(free, 1, 9) is None and choose(free, 4, 0) is None
    assert choose([machine("x"), machine("y")], 1, 0) == [machine("x")]


class Fake:
    """Nodes that are there in name only. A cell takes `cell_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, machines: list[RayMachine]) -> None:
        self.machines, self.running, self.most = machines, set[str](), 0
        self.done: list[tuple[str, object]] = []
        self.lost: dict[str, set[str]] = {}
        monkeypatch.setattr(cluster.ray_cluster, "machines", lambda: self.machines)
        monkeypatch.setattr(cluster, "ray_nodes_placed", self.placed)
        self.lock = threading.Lock()

    def placed(self, chosen: list[RayMachine], each: int) -> Any:
        fake = self

        class There:
            hosts = [machine.host for machine in chosen]  # noqa: RUF012
            lost = set[str]()  # noqa: RUF012

            def __enter__(self) -> There:
                with fake.lock:
                    assert fake.running.isdisjoint(self.hosts)
                    fake.running.update(self.hosts)
                    fake.most = max(fake.most, len(fake.running))
                return self

            def __exit__(self, *_: object) -> None:
                with fake.lock:
                    fake.running.difference_update(self.hosts)

            def look(self) -> list[object]:
                return []

        return There()

    def run(self, cell: Cell, placed: Placed | str) -> None:
        time.sleep(0.05)
        self.done.append((cell.model, placed if isinstance(placed, str) else placed.nodes.hosts))
        if cell.model.startswith("loses") and isinstance(placed, Placed):
            placed.nodes.lost.update(placed.nodes.hosts)
        if cell.model == "fails":
            raise RuntimeError("a defect")


def cells(*names: str) -> list[Cell]:
    return [Cell(model=name, gpus=1, seq_len=10, micro_batch=1, device="cpu") for name in names]


def test_a_node_has_one_cell_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, [machine("a"), machine("b"), machine("c")])
    names = [f"cell{number}" for number in range(9)]
    Cluster(fake.machines).each(cells(*names), fake.run, threading.Event())
    assert sorted(name for name, _ in fake.done) == names and fake.most == 3


def test_cells_go_on_without_lost_nodes_until_too_few_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, [machine("a"), machine("b"), machine("c")])
    Cluster(fake.machines, 2).each(cells("first", "loses", "last"), fake.run, threading.Event())
    assert fake.done[:2] == [("first", ["a", "b"]), ("loses", ["a", "b"])]
    assert fake.done[2] == ("last", "the cluster has no 2 nodes left that can run it")


def test_a_defect_or_a_stop_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, cancelled = Fake(monkeypatch, [machine("a")]), threading.Event()
    with pytest.raises(RuntimeError, match="a defect"):
        Cluster(fake.machines).each(cells("fails", "never"), fake.run, cancelled)
    assert [name for name, _ in fake.done] == ["fails"] and cancelled.is_set()
    with pytest.raises(Stopped):
        Cluster(fake.machines).each(cells("never"), fake.run, cancelled)
    assert len(fake.done) == 1


@pytest.mark.parametrize(
    ("version", "lacking", "message"),
    [("0.0.0", (), "node a has llm-dissect 0.0.0 and this machine"), (None, ("torch",), "node a lacks torch; install")],
)
def test_a_node_that_cannot_run_cells_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str | None, lacking: tuple[str, ...], message: str
) -> None:
    from loadgen.config import ConfigError
    from loadgen.rundir import package_version

    fake = Fake(monkeypatch, [machine("a")])

    class Facts:
        def __init__(self) -> None:
            self.version, self.lacking = version or package_version(), lacking

    there = fake.placed(fake.machines, 0)
    monkeypatch.setattr(type(there), "look", lambda self, packages: [Facts()])
    monkeypatch.setattr(cluster, "ray_nodes_placed", lambda chosen, each: there)
    with pytest.raises(ConfigError, match=message):
        Cluster(fake.machines).check(("torch",))
