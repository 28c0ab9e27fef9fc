"""Sweeps on several nodes as they are asked for; what they measure is tested where it is done."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from backends.process import free_port
from training_probe import cli
from training_probe.grid import Cell
from training_probe.protocol import Trial, write_atomically
from training_probe.sweep import cell as sweep_cell
from training_probe.sweep.cell import SweepManifest

MAIN = "import sys; from training_probe.cli import main; main()"
LONG_S = 60.0
MEETS = ("--nnodes", "2", "--rdzv-endpoint", "gpu0:29400")


@pytest.mark.skipif(sys.platform != "linux", reason="nodes are Linux machines")
@pytest.mark.parametrize("command", [("sweep", "--method", "F"), ("micro", "collectives")])
def test_what_the_nodes_cannot_do_ends_all_of_them(command: tuple[str, ...], tmp_path: Path) -> None:
    where = ("--device", "cpu", "--gpus", "64", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    env = {**os.environ, "LLM_DISSECT_TOKEN": "0123456789abcdef"}
    core = {min(os.sched_getaffinity(0))}
    both = [
        subprocess.Popen(
            (sys.executable, "-c", MAIN, *command, *where, "--node-rank", rank), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path, preexec_fn=lambda: os.sched_setaffinity(0, core),
        )
        for rank in ("1", "0")
    ]  # fmt: skip
    try:
        said = [node.communicate(timeout=LONG_S) for node in both]
    finally:
        for node in both:
            node.kill()
    for (out, err), prefix in zip(said, ("training_probe: node 0 ended: ", "training_probe: "), strict=True):
        assert out == ""
        assert err.splitlines()[-1] == (
            f"{prefix}--gpus 64 is 32 processes on each of 2 nodes; node 0 (127.0.0.1) cannot give them: its 1 core "
            "can take 4. Name fewer."
        )
    assert [node.returncode for node in both] == [2, 2] and not any(tmp_path.iterdir())


def test_a_dry_run_is_one_script_for_all_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["sweep", "--method", "F+Z3", "Z2", "--engine", "fsdp2", "--gpus", "16", *MEETS, "--dry-run"]
    assert cli.invoke([*argv, "--out", str(tmp_path / "a sweep")]) == 0
    script = capsys.readouterr().out
    assert script.startswith("# on each of 2 nodes at the same time: NODE_RANK=<0 to 1> bash THIS_SCRIPT\n\n# 7b_")
    assert script.count("# for a machine with its 8 GPUs;") == 2
    commands = [line for line in script.splitlines() if "torch.distributed.run" in line]
    for line, name in zip(commands, ("F+Z3", "Z2"), strict=True):
        assert '--node-rank "${NODE_RANK:?}"' in line
        words = shlex.split(line)
        run = tmp_path / "a sweep" / "trials" / f"7b_pretrain_fsdp2_{name}_16x_s350_b1" / "run-1"
        assert words == [
            "python", "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "${NODE_RANK:?}",
            "--nproc-per-node", "8", "--master-addr", "gpu0", "--master-port", "29400",
            "-m", "training_probe.worker", str(run),
        ]  # fmt: skip
    assert not (tmp_path / "a sweep").exists()
    if sys.platform == "linux":
        made = [line for line in script.splitlines() if line.startswith(("mkdir", "printf"))]
        subprocess.run(["bash", "-euc", "\n".join(made)], check=True)
        written = msgspec.json.decode((run / "trial.json").read_bytes(), type=Trial)
        assert (written.cell.gpus, written.cell.method) == (16, "Z2")


def test_a_sweep_goes_on_with_as_many_nodes_as_it_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def resumed(nodes: int, *options: str) -> str:
        cells = [Cell(model="tiny", gpus=2, seq_len=10, micro_batch=1, device="cpu")]
        manifest = SweepManifest(run_id="1", started_unix_s=0.0, version="1", cells=cells, nodes_per_cell=nodes)
        write_atomically(tmp_path / sweep_cell.MANIFEST_FILE, manifest)
        assert cli.invoke(["sweep", "--resume", str(tmp_path), *options]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert resumed(2).endswith(
        "this sweep was on 2 nodes; name --nnodes 2, --node-rank and --rdzv-endpoint beside --resume, on each of them."
    )
    assert resumed(1, *MEETS, "--node-rank", "0").endswith("this sweep was on one node; leave --nnodes out.")
    assert "this sweep was on 3 nodes; name --nnodes 3" in resumed(3, *MEETS, "--node-rank", "0")
    assert "leave all other options out" in resumed(2, *MEETS, "--node-rank", "0", "--method", "F")
