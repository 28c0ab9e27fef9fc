"""A training script of one's own, and a DeepSpeed configuration of one's own, as their users start them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.training_probe import own_script
from tests.training_probe.engines import tiny
from training_probe import grid, own_deepspeed, results
from training_probe.grid import Cell
from training_probe.protocol import Trial, Unsupported
from training_probe.results import CellResult

pytestmark = [
    tiny.needs_engines,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are started on Linux only"),
]

COMMAND = str(Path(sys.executable).with_name("training_probe"))
STEPS = 6
SIZES = ("--device", "cpu", "--seq-len", "16", "--micro-batch", "2", "--grad-accum", "2", "--gpus", "2")
QUICK = ("--warmup-steps", "2", "--steps", str(STEPS - 2), "--runs", "1")


def swept(directory: Path, *options: str, **env: str) -> list[CellResult]:
    command = (COMMAND, "sweep", *SIZES, *QUICK, *options, "--out", str(directory / "out"))
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, cwd=directory)
    assert ended.returncode in tiny.MEASURED, ended.stderr[-3000:]
    return results.read(directory / "out")


def expected_losses(torch: Any, cell: Cell) -> list[float]:
    """The losses of rank 0 of the same model, trained here on the batches of both ranks."""
    from training_probe.worker import batches

    model = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(5))
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    of_ranks = [batches.batch(Trial(cell=cell), rank, torch.device("cpu"), 64) for rank in range(2)]
    ids = [inputs["input_ids"] for of_rank in of_ranks for inputs in of_rank]
    found = []
    for _ in range(STEPS):
        losses = [
            torch.nn.functional.cross_entropy(model(each[:, :-1]).flatten(0, 1), each[:, 1:].flatten()) for each in ids
        ]
        torch.stack(losses).mean().backward()
        sgd.step()
        sgd.zero_grad()
        found.append(float(torch.stack(losses[:2]).mean()))
    return found


def test_a_script_trains_in_two_processes_and_is_measured_like_an_engine(tmp_path: Path) -> None:
    """And one that builds nothing that could be trained is a row with its reason."""
    torch = pytest.importorskip("torch")
    result, other = swept(tmp_path, "--engine", "bigrams", "half_built", **own_script.install(tmp_path))
    assert result.outcome == "ok" and result.valid, result.reason
    assert (result.engine, result.model, result.optimizer) == ("bigrams", "own", "plain SGD")
    assert result.parameters == result.trainable_parameters == 64 * 16 + 16 * 64 + 64
    assert result.tokens_per_s and result.forward_ms and result.backward_ms and result.optimizer_ms
    assert len(result.peak_memory_gb_by_rank) == 2 and result.predicted_memory_gb is None
    trained = tmp_path / "out" / "trials" / result.cell / "run-1" / "trial.json"
    expected = expected_losses(torch, msgspec.json.decode(trained.read_bytes(), type=Trial).cell)
    assert (result.loss_first, result.loss_last) == pytest.approx((expected[0], expected[-1]), rel=1e-5)
    assert other.outcome == "unsupported"
    assert "built (object) lacks parameters, optimizer, vocab_size, forward, backward, step" in other.reason


@pytest.mark.parametrize(
    ("name", "why"), [("nothing", "cannot be loaded from bigrams:nothing"), ("imports", "a_package_that_nobody_has")]
)
def test_a_script_that_cannot_be_loaded_says_so(
    alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    from training_probe.worker import engines

    own_script.install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises((Unsupported, ImportError), match=why):
        engines.build(Trial(cell=grid.cell("Naive", model="own", engine=name, device="cpu")), alone.device("cpu"))


def test_a_deepspeed_configuration_of_ones_own_is_trained_with(alone: Any) -> None:
    """Where it only divides work otherwise, the loss is the same."""
    from training_probe.worker import batches, engines

    device, buckets, losses = alone.device("cpu"), [], []
    own = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}, "train_micro_batch_size_per_gpu": "auto"}
    for config in (None, own):
        asked = tiny.trial(tiny.cell("deepspeed", "Z2"), deepspeed=config)
        stepper: Any = engines.build(asked, device)
        (batch,) = batches.batch(asked, 0, device, tiny.SPEC.vocab_size)
        for _ in range(STEPS):
            loss = stepper.forward(batch, True)
            stepper.backward(loss, True)
            stepper.step()
        losses.append(float(loss))
        buckets.append(stepper.engine.zero_reduce_bucket_size())
    assert buckets[1] == 1000 != buckets[0]
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)


def test_the_fields_of_zero_are_those_that_deepspeed_knows() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = set(DeepSpeedZeroConfig.model_fields)
    known |= {str(field.alias) for field in DeepSpeedZeroConfig.model_fields.values() if field.alias}
    assert known >= own_deepspeed.OF_ZERO
