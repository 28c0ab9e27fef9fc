"""Training scripts of one's own: found by name, and of nothing that is not known of them is anything said."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.training_probe import own_script
from training_probe import cli, grid, trials
from training_probe.memory import predict
from training_probe.options import TINY
from training_probe.sweep.cell import Dependencies, Model, Settings, SweepManifest, utilization

OPTIONS = ["sweep", "--dry-run", "--device", "cpu", "--engine"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_script.install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()


def test_an_unknown_name_is_refused_with_those_that_are_known(
    installed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.invoke([*OPTIONS, "bigram"]) == 2
    said = capsys.readouterr().err
    assert "unknown engine 'bigram'; known are deepspeed, megatron, fsdp2, ddp; of your own: bigrams, " in said
    assert said.count("\n") == 1


def test_without_any_the_group_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke([*OPTIONS, "mine"]) == 2
    assert "no package here has an entry point of llm_dissect.trials" in capsys.readouterr().err


def test_its_cell_needs_no_method_and_no_known_model(installed: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke([*OPTIONS, "bigrams", "--gpus", "2"]) == 0
    shown = capsys.readouterr().out
    assert "# own_pretrain_bigrams_Naive_2x_s350_b1" in shown and "--nproc-per-node 2" in shown
    assert cli.invoke([*OPTIONS, "bigrams", "--model", "my own model"]) == 0
    assert cli.invoke([*OPTIONS, "bigrams", "ddp"]) == 2
    assert "name --method" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"), [("memory", "what bigrams keeps in memory is not known"), ("breakdown", "no named parts")]
)
def test_what_is_not_known_of_it_is_not_predicted(
    installed: None, command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = ["--device", "cpu"] if command == "breakdown" else []
    assert cli.invoke([command, "--engine", "bigrams", "--method", "Naive", *device]) == 2
    assert says in capsys.readouterr().err


def test_a_known_model_makes_no_prediction_for_a_script(installed: None) -> None:
    settings = Settings(models={"tiny": Model(spec=TINY)}, gpu_ids=(0,))
    cells = [grid.cell("Naive", model="tiny", engine=engine) for engine in ("bigrams", "ddp")]
    manifest = SweepManifest(
        run_id="", started_unix_s=0, version="", cells=cells, device_names=["NVIDIA H100"], models=settings.models
    )
    own, built_in = cells
    assert Dependencies().predict(own, settings) is None and utilization(own, manifest, 1.0) == (None, None)
    assert Dependencies().predict(built_in, settings) == predict(built_in, TINY.decoder)
    assert utilization(built_in, manifest, 1.0)[0]


def test_what_an_object_lacks_is_named() -> None:
    assert trials.lacking(object()) == ["parameters", "optimizer", "vocab_size", "forward", "backward", "step"]
