"""Two nodes that are two commands on this machine, with real engines: the same command, the same losses as on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from backends.process import free_port
from tests.training_probe.engines import tiny
from training_probe import results
from training_probe.protocol import RankReport
from training_probe.sweep import cell as sweep_cell

pytestmark = [
    tiny.needs_engines,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are started on Linux only"),
]

MAIN = "import sys; from training_probe.cli import main; main()"
LIMIT_S = 300
TOKEN = "a token of the tests alone"
CELL = "tiny_pretrain_fsdp2_Z3_2x_s64_b2"
SWEEP = (
    "sweep", "--device", "cpu", "--model", "tiny", "--engine", "fsdp2", "--method", "Z3", "--seq-len", "64",
    "--micro-batch", "2", "--warmup-steps", "1", "--steps", "7", "--runs", "1",
)  # fmt: skip


def started(directory: Path, *options: str) -> subprocess.Popen[str]:
    """One thread a process, as of two processes on two cores: of more, sums are added up in another order."""
    argv = (sys.executable, "-c", MAIN, *options)
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=directory,
        env={**os.environ, "LLM_DISSECT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def on_two_nodes(directory: Path, *options: str) -> tuple[str, str]:
    """What node 0 prints, and what node 1 says."""
    directory.mkdir()
    where = (*options, "--out", "out", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    both = [started(directory, *where, "--node-rank", str(rank)) for rank in (1, 0)]
    try:
        (printed, said), (nothing, follower) = (node.communicate(timeout=LIMIT_S) for node in reversed(both))
    finally:
        for node in both:
            node.kill()
    assert both[1].returncode in tiny.MEASURED, said[-3000:]
    assert (both[0].returncode, nothing) == (0, ""), follower[-3000:]
    return printed, follower


def losses(directory: Path, rank: int) -> list[float]:
    report = msgspec.json.decode(
        (directory / "trials" / CELL / "run-1" / f"rank{rank}.json").read_bytes(), type=RankReport
    )
    assert report.outcome == "ok", report.reason
    return [loss for loss in report.losses if loss is not None]


def test_two_nodes_train_what_two_processes_of_one_train(tmp_path: Path) -> None:
    printed, follower = on_two_nodes(tmp_path / "two", *SWEEP)
    (result,) = results.read(tmp_path / "two" / "out")
    assert (result.cell, result.outcome, result.nodes) == (CELL, "ok", ["127.0.0.1"] * 2), result.reason
    assert [row["cell"] for row in json.loads(printed.splitlines()[-1])["results"]] == [CELL]
    assert "as node 1 of 2" in follower and follower.splitlines()[-1] == "node 0 is done"
    manifest = sweep_cell.read_manifest(tmp_path / "two" / "out")
    assert (manifest.nodes_per_cell, manifest.on) == (2, None)
    written = [path for path in (tmp_path / "two").rglob("*") if path.is_file()]
    assert {path.name for path in written} >= {"log.txt", "log-node1.txt", "rank1.json"}
    assert not any(TOKEN.encode() in path.read_bytes() for path in written)

    one = started(tmp_path, *SWEEP, "--gpus", "2", "--out", "one")
    said = one.communicate(timeout=LIMIT_S)[1]
    assert one.returncode in tiny.MEASURED, said[-3000:]
    for rank in (0, 1):
        together, alone = losses(tmp_path / "two" / "out", rank), losses(tmp_path / "one", rank)
        assert len(alone) == 8 and together == pytest.approx(alone, abs=1e-6)


def test_collectives_between_two_nodes(tmp_path: Path) -> None:
    options = ("micro", "collectives", "--device", "cpu", "--op", "allreduce", "--sizes", "4K", "--samples", "5")
    printed, _ = on_two_nodes(tmp_path / "two", *options)
    (row,) = json.loads(printed.splitlines()[-1])["results"]
    assert row["outcome"] == "ok" and row["point"]["ranks"] == 2 and row["median_s"] > 0
    manifest = json.loads((tmp_path / "two" / "out" / "manifest.json").read_bytes())
    assert (manifest["ranks"], manifest["nodes"]) == (2, ["127.0.0.1"] * 2)


def test_the_script_of_a_dry_run_trains_on_each_of_its_nodes(tmp_path: Path) -> None:
    """The same script twice, as on two machines, of which each has files of its own."""
    endpoint = f"127.0.0.1:{free_port()}"
    dry = started(tmp_path, *SWEEP, "--nnodes", "2", "--rdzv-endpoint", endpoint, "--dry-run", "--out", "out")
    script, said = dry.communicate(timeout=LIMIT_S)
    assert dry.returncode == 0, said
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    nodes = []
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
        env = {**os.environ, "PATH": path, "NODE_RANK": rank, "GLOO_SOCKET_IFNAME": "lo"}
        nodes.append(subprocess.Popen(["bash", "-c", script], cwd=tmp_path / rank, env=env))
    try:
        assert [node.wait(LIMIT_S) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    for rank in (0, 1):
        found = losses(tmp_path / str(rank) / "out", rank)
        assert len(found) == 8 and found[0] > found[-1]
