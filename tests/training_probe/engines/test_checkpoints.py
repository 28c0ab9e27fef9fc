"""A checkpoint brings back what was saved, of every engine that has one, and its times stand in the results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import free_ports
from tests.training_probe.engines import tiny
from training_probe import results
from training_probe.launch.runner import INTERPRETED

pytestmark = tiny.needs_engines

SAVED_AND_LOADED = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from tests.training_probe.engines import tiny
from training_probe.worker import batches, checkpoint, engines, model

dist.init_process_group("gloo")
cell = tiny.cell(sys.argv[1], sys.argv[2], 1)
trial, device = tiny.trial(cell), torch.device("cpu")
with model.attention_kernel(cell):
    stepper = engines.build(trial, device)
    (inputs, *_) = batches.batch(trial, 0, device, model.vocab_size(trial))

    def step():
        loss = stepper.forward(inputs, True)
        stepper.backward(loss, True)
        stepper.step()
        return float(loss.detach())

    step()
    assert isinstance(stepper, checkpoint.Saves)
    times = checkpoint.measure(stepper, Path(sys.argv[3]), lambda: None)
    assert times.bytes > 0 and times.save_s > 0 and times.load_s > 0
    after = [step() for _ in range(3)]
    stepper.load(Path(sys.argv[3]))
    assert [step() for _ in range(3)] == after, after
    assert len(set(after)) == 3
"""


@pytest.mark.parametrize(
    ("engine", "method"), [("ddp", "Naive"), ("ddp", "QL"), ("fsdp2", "Z3"), ("deepspeed", "Z2"), ("deepspeed", "L+Z3")]
)
def test_training_goes_on_from_what_was_saved(engine: str, method: str, tmp_path: Path) -> None:
    env = {
        **os.environ,
        INTERPRETED: "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    env |= {"MASTER_PORT": str(free_ports(1)[0]), "OMP_NUM_THREADS": "1"}
    argv = (sys.executable, "-c", SAVED_AND_LOADED, engine, method, str(tmp_path / "saved"))
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_times_stand_in_the_results_and_the_files_are_gone(tmp_path: Path) -> None:
    argv = (
        sys.executable, "-m", "training_probe", "sweep", "--device", "cpu", "--model", "tiny", "--engine", "fsdp2",
        "--method", "Z3", "--gpus", "2", "--micro-batch", "1", "--seq-len", "32", "--warmup-steps", "2",
        "--steps", "4", "--runs", "2", "--checkpoint-io", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in tiny.MEASURED, done.stderr[-3000:]
    (result,) = results.read(tmp_path / "out")
    weights, moments = 4, 8  # bytes a parameter, in fp32
    assert result.trainable_parameters and result.checkpoint_bytes and result.checkpoint_save_s
    assert result.checkpoint_bytes == pytest.approx((weights + moments) * result.trainable_parameters, rel=0.05)
    assert result.checkpoint_load_s and result.first_step_ms and result.first_step_ms > 0
    assert not list((tmp_path / "out").rglob("checkpoint"))
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Checkpoint, GB/s" in text and "first step" in text
