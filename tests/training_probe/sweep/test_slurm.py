"""Scripts for Slurm, run with a Slurm that is none: it starts the task of each node in turn, here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from training_probe import cli
from training_probe.grid import Cell
from training_probe.sweep.cell import Settings
from training_probe.sweep.slurm import scripts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Slurm's scripts are bash's")

SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=1
for SLURM_NODEID in 0 1; do SLURM_NODEID=$SLURM_NODEID "$@"; done
"""
SCONTROL = '#!/bin/bash\n[ "$*" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"\n'
PYTHON = '#!/bin/bash\nprintf "%s\\n" "$@" "one queue: $CUDA_DEVICE_MAX_CONNECTIONS"; echo\n'


def cell(**fields: Any) -> Cell:
    return Cell(**{"model": "tiny", "gpus": 4, "seq_len": 10, "micro_batch": 3, **fields})


def script(directory: Path, *cells: Cell, **fields: Any) -> str:
    return scripts(cells, Settings(**{"nodes_per_cell": 2, "runs": 2, **fields}), directory)


def run(text: str, tmp_path: Path) -> None:
    for name, program in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(text)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "20007", "SLURM_JOB_NODELIST": "node[7-8]"}
    done = subprocess.run(["bash", str(tmp_path / "job.sh")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_each_node_of_each_run_starts_torchrun(tmp_path: Path) -> None:
    directory = tmp_path / "it's a $(touch owned) directory"
    run(script(directory, cell(engine="megatron", tp=2)), tmp_path)
    assert not (tmp_path / "owned").exists() and not Path("owned").exists()
    for number in (0, 1):
        place = directory / "trials" / cell(engine="megatron", tp=2).name / f"run-{number + 1}"
        trial = json.loads((place / "trial.json").read_text())
        assert (trial["seed"], trial["cell"]["micro_batch"], trial["steps"]) == (number, 3, 100)
        tasks = [task.splitlines() for task in (place / "log.txt").read_text().strip().split("\n\n")]
        assert tasks == [
            ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "2",
             "--master-addr", "node7", "--master-port", "20007", "-m", "training_probe.worker", str(place),
             "one queue: 1"]
            for rank in (0, 1)
        ]  # fmt: skip


def test_what_is_asked_of_slurm(tmp_path: Path) -> None:
    lines = script(tmp_path, cell(), limit_s=61).splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")] == [
        f"job-name={cell().name}", "nodes=2", "ntasks-per-node=1", "gpus-per-node=2", "exclusive", "time=2",
    ]  # fmt: skip
    on_cpus = script(tmp_path, cell(device="cpu"), nodes_per_cell=1)
    assert "--gpus-per-node" not in on_cpus and "--time" not in on_cpus and "--nnodes" not in on_cpus


def test_a_cell_that_makes_no_sense_is_a_comment(tmp_path: Path) -> None:
    assert script(tmp_path, cell(method="Z3", engine="ddp")).startswith(
        f"# {cell(method='Z3', engine='ddp').name}\n# unsupported: "
    )


def test_the_command_prints_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.invoke(["sweep", "--on", "slurm", "--gpus", "8", "--nodes-per-cell", "2", "--method", "Z2", "Z3"]) == 0
    assert capsys.readouterr().out.count("#SBATCH --gpus-per-node=4\n") == 2
    assert list(tmp_path.iterdir()) == []
