"""A config of torchtitan's under the probe: its own loop on the CPU, and the directory of a sweep of one cell."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from loadgen.monitor.exporter import Exporter
from loadgen.rundir import Snapshot
from tests.support.waiting import free_ports
from tests.training_probe.engines import own_titan, tiny
from training_probe import cli, results
from training_probe.grid import Cell

pytestmark = tiny.needs_engines
needs_torchtitan = pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs torchtitan (make test-train)")
CONFIG = "tests.training_probe.engines.own_titan"
RANKS, WARMUP = 2, 2
TEXTS = 8  # five batches: the third step finds one of two
ROOT = Path(__file__).parents[3]


def started(ranks: int, *argv: str, directory: Path) -> subprocess.CompletedProcess[str]:
    torchrun = ("torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_ports(1)[0]}", "-m", CONFIG)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(
        (sys.executable, "-m", *torchrun, *argv, "--", "--module", CONFIG, "--config", "tiny"), cwd=directory,
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@needs_torchtitan
def test_a_config_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_titan.write_data(tmp_path)
    done = started(RANKS, "probed", directory=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "training_probe report probed" in done.stderr
    sequences = own_titan.SEQUENCES * own_titan.ACCUMULATED * RANKS
    probed, steps = tmp_path / "probed", own_titan.STEPS
    (result,) = results.read(probed)
    assert (result.engine, result.outcome, result.valid, result.gpus) == ("torchtitan", "ok", True, RANKS)
    assert (result.model, result.method) == ("llama3-debugmodel", "F+R+Z3")
    assert (result.seq_len, result.batch_size, result.grad_accum) == (own_titan.LENGTH, own_titan.SEQUENCES, 2)
    assert (result.steps, result.warmup_steps, result.runs) == (steps - WARMUP, WARMUP, 1)
    assert result.step_ms and result.tokens_per_s and result.data_wait_ms and result.first_step_ms
    # A step and the wait for its data are what the speed counts; neither checkpoints nor the sleep after the last step.
    counted_s = result.steps * (result.step_ms + result.data_wait_ms) / 1e3
    took_s = sequences * own_titan.LENGTH * result.steps / result.tokens_per_s
    assert counted_s <= 1.001 * took_s and took_s < counted_s + 1
    assert result.loss_first and result.loss_last and result.loss_last < result.loss_first
    saved = [each for each in (tmp_path / "outputs" / "checkpoint" / f"step-{steps}").rglob("*") if each.is_file()]
    assert result.checkpoint_bytes == sum(each.stat().st_size for each in saved) and result.checkpoint_save_s
    assert len(result.peak_memory_gb_by_rank) == RANKS and result.versions["torchtitan"]
    assert result.parameters == result.trainable_parameters == own_titan.PARAMETERS
    snapshot = msgspec.json.decode((probed / "snapshot.json").read_bytes(), type=Snapshot)
    values = {each.name: each.samples[0].value for each in snapshot.families if each.samples}
    assert snapshot.state == "finished" and values["llm_dissect_training_steps"] == steps
    assert values["llm_dissect_training_tokens"] == steps * sequences * own_titan.LENGTH
    assert b"llm_dissect_training_tokens_per_second" in Exporter(probed).page()[0]
    assert cli.invoke(["report", str(probed)]) in tiny.MEASURED
    assert cli.invoke(["compare", str(probed), str(probed)]) == 0
    assert "1 no difference shown" in capsys.readouterr().out


@needs_torchtitan
def test_data_that_ends_ends_the_measurement(tmp_path: Path) -> None:
    """The step that was not whole counts in nothing."""
    own_titan.write_data(tmp_path, texts=TEXTS)
    done = started(1, "probed", "--warmup-steps=1", directory=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = results.read(tmp_path / "probed")
    assert (result.steps, result.warmup_steps, result.grad_accum) == (1, 1, own_titan.ACCUMULATED)
    took_s = own_titan.SEQUENCES * own_titan.ACCUMULATED * own_titan.LENGTH / (result.tokens_per_s or 1)
    assert result.step_ms and took_s == pytest.approx(result.step_ms / 1e3, rel=0.25)


def test_mfu_is_of_torchtitans_own_flops() -> None:
    from training_probe.torchtitan import _Titan

    titan = object.__new__(_Titan)
    titan._trainer = SimpleNamespace(metrics_processor=SimpleNamespace(num_flops_per_token=4e10))
    cell = Cell(model="llama3-8B", engine="torchtitan", method="F", gpus=2, attention="flash")
    ratio = 4e10 * 1e4 / (2 * 989.4e12)
    assert titan.utilization(cell, 1e4, "NVIDIA H200") == (pytest.approx(ratio), pytest.approx(ratio))
    recomputed = msgspec.structs.replace(cell, method="F+R")
    assert titan.utilization(recomputed, 1e4, "NVIDIA H200") == (pytest.approx(ratio), None)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["probed"], "torchtitan's own options are missing; add -- --module NAME --config NAME."),
        (["probed", "--warmup-steps", "-1", "--", "--module", "x"], "--warmup-steps is -1; it must be at least 0."),
        (["--", "--module", "x"], "DIRECTORY"),
        pytest.param(
            ["probed", "--", "--module", "x"], "torchtitan is started by torchrun", marks=needs_torchtitan
        ),
        pytest.param(
            ["probed", "--", "--module", "x"], "torchtitan is not installed; pip install 'torchtitan>=0.3'.",
            marks=pytest.mark.skipif(find_spec("torchtitan") is not None, reason="torchtitan is installed"),
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(
    argv: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from training_probe import torchtitan

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    assert torchtitan.main(argv) == 2
    said = capsys.readouterr().err
    assert sentence in said and len(said.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
