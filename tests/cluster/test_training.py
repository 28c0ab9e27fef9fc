"""Sweeps on a real Ray cluster: which node runs which cell, and what is left when a node or the driver goes. Stand-in
processes but for one test, which trains."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Nodes

pytestmark = pytest.mark.cluster

TIMEOUT_S = 120
GONE_S = 30.0  # Ray needs a moment to see that a driver is dead
PROBE = str(Path(sys.executable).with_name("training_probe"))


def driver(nodes: Nodes, directory: Path, *cells: str, per_cell: int = 1, timeout_s: float = 30) -> list[str]:
    """A sweep of MODEL:PROCESSES, started on the head; without cells it goes on with the one that is there."""
    module = [sys.executable, "-m", "tests.cluster.training"]
    return nodes.command(0, *module, nodes.address, str(directory), str(per_cell), str(timeout_s), *cells)


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)


def swept(nodes: Nodes, directory: Path, *cells: str, **options: Any) -> list[dict[str, Any]]:
    done = run(driver(nodes, directory, *cells, **options))
    assert done.returncode == 0, done.stderr
    return rows(directory)


def rows(directory: Path) -> list[dict[str, Any]]:
    path = directory / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def eventually(true: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def stand_ins(nodes: Nodes) -> list[tuple[int, int]]:
    """Node and pid of the stand-in processes that live."""
    found = []
    for index in range(len(nodes.ips)):
        for pid in nodes.pids(index):
            with contextlib.suppress(OSError):
                if b"stand_in.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append((index, pid))
    return found


@contextlib.contextmanager
def started(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def has_steps(directory: Path, does: str) -> bool:
    return any(path.read_bytes() for path in directory.glob(f"trials/{does}_*/run-1/steps.jsonl"))


def test_cells_run_at_once_but_never_two_on_a_node(nodes: Nodes, tmp_path: Path) -> None:
    found = swept(nodes, tmp_path / "out", "hangs:1", "hangs:2", "hangs:3", "ok:2", "oom:1", "segv:2", timeout_s=6)
    outcomes = {(row["model"], row["gpus"]): row["outcome"] for row in found}
    assert outcomes == {
        ("hangs", 1): "timeout", ("hangs", 2): "timeout", ("hangs", 3): "timeout",
        ("ok", 2): "ok", ("oom", 1): "oom", ("segv", 2): "crashed",
    }  # fmt: skip
    hung = [row for row in found if row["model"] == "hangs"]
    assert {host for row in hung for host in row["nodes"]} == set(nodes.ips)
    assert max(row["started_unix_s"] for row in hung) < min(row["started_unix_s"] + row["wall_s"] for row in hung)
    for ip in nodes.ips:
        there = sorted((row["started_unix_s"], row["wall_s"]) for row in found if row["nodes"] == [ip])
        for (begun_s, wall_s), (next_s, _) in itertools.pairwise(there):
            assert begun_s + wall_s <= next_s


@pytest.mark.always
def test_two_nodes_share_a_cell(nodes: Nodes, tmp_path: Path) -> None:
    ok, oom = swept(nodes, tmp_path / "out", "ok:4", "oom:2", per_cell=2)
    assert (ok["outcome"], ok["nodes"], ok["peak_memory_gb_by_rank"]) == ("ok", nodes.ips[:2], [1, 2, 3, 4])
    assert (oom["outcome"], oom["reason"][:7]) == ("oom", "rank 1:")  # of the second node
    left = {path.name for path in (tmp_path / "out" / ok["log"]).parent.iterdir()}
    assert {"trial.json", "steps.jsonl", "log.txt", "log-node1.txt", *(f"rank{n}.json" for n in range(4))} <= left
    assert stand_ins(nodes) == []


def test_a_lost_node_ends_its_cell_and_no_other(nodes: Nodes, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started(driver(nodes, out, "crawls:2", "ok:2", per_cell=2)) as process:
        eventually(lambda: has_steps(out, "crawls"))
        nodes.kill_raylet(1)
        try:
            told, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, told
            lost, ok = rows(out)
            assert (lost["outcome"], lost["nodes"]) == ("crashed", nodes.ips[:2])
            assert lost["reason"].startswith(f"node {nodes.ips[1]} was lost: ")
            assert (ok["outcome"], ok["nodes"]) == ("ok", [nodes.ips[0], nodes.ips[2]])
            eventually(lambda: not stand_ins(nodes), GONE_S)
        finally:
            nodes.restart(1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_driver_that_ends_leaves_nothing_running_and_a_killed_one_is_resumed(
    nodes: Nodes, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    with started(driver(nodes, out, "ok:2", "hangs:2", per_cell=2, timeout_s=5)) as process:
        eventually(lambda: has_steps(out, "hangs"))
        assert {index for index, _ in stand_ins(nodes)} == {0, 1}
        process.send_signal(number)
        code = process.wait(TIMEOUT_S)
        assert code == (-signal.SIGKILL if number == signal.SIGKILL else 143)
    eventually(lambda: not stand_ins(nodes), GONE_S)
    assert [row["model"] for row in rows(out)] == ["ok"]
    if number == signal.SIGTERM:
        return
    before = (out / "results.jsonl").read_text()
    done = run(driver(nodes, out, per_cell=2))
    assert done.returncode == 0 and "1 of 2 cells are done" in done.stdout
    assert (out / "results.jsonl").read_text().startswith(before)
    assert [(row["model"], row["outcome"]) for row in rows(out)] == [("ok", "ok"), ("hangs", "timeout")]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["sweep", "--on", "ray:{address}", "--nodes-per-cell", "4"], 2, "--nodes-per-cell is 4 and the cluster has 3"),
        (["sweep", "--on", "ray:{host}:1"], 3, "there is no Ray cluster at"),
        (["sweep", "--on", "ray:{address}", "--device", "cuda", "--gpus", "2", "--method", "F"], 2,
         "no node of the cluster can give 2 GPUs to a cell"),
        (["micro", "collectives", "--on", "ray:{address}", "--nodes", "2", "--gpus", "3"], 2,
         "2 nodes of the cluster cannot share 3 ranks"),
    ],
)  # fmt: skip
def test_refusals(nodes: Nodes, tmp_path: Path, argv: list[str], code: int, message: str) -> None:
    named = [word.format(address=nodes.address, host=nodes.ips[0]) for word in argv]
    done = run(nodes.command(0, PROBE, *named, "--out", str(tmp_path / "out")))
    assert done.returncode == code and message in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
    reason="torch and transformers are not installed beside Ray",
)
def test_a_model_is_trained_over_two_nodes(nodes: Nodes, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cell = ["--model", "tiny", "--engine", "ddp", "--method", "Naive", "--seq-len", "64"]
    cell += ["--warmup-steps", "1", "--steps", "3", "--runs", "1"]
    where = ["--on", f"ray:{nodes.address}", "--nodes-per-cell", "2", "--out", str(out)]
    done = run(nodes.command(0, PROBE, "sweep", *where, *cell))
    assert done.returncode == 0, done.stderr
    (row,) = rows(out)
    assert (row["outcome"], row["valid"], row["gpus"], row["nodes"]) == ("ok", True, 2, nodes.ips[:2])
