"""A DeepSpeed configuration of one's own: what it adds arrives, what makes another cell of the cell is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from training_probe import cli, own_deepspeed
from training_probe.grid import GridError, cell
from training_probe.llama_shape import known
from training_probe.memory import predict
from training_probe.options import TINY
from training_probe.own_deepspeed import DEFAULT_SIZES, merged, sizes, uncounted
from training_probe.protocol import deepspeed_config
from training_probe.report import tables
from training_probe.results import of_cell
from training_probe.sweep.cell import Dependencies, Model, Settings

Z2 = cell("Z2", model="tiny", gpus=2, micro_batch=4, grad_accum=3)
NAIVE = cell("Naive", model="tiny", device="cpu")


def test_what_the_file_adds_is_merged_over_what_the_cell_gives() -> None:
    own = {
        "zero_optimization": {"reduce_bucket_size": 1_000_000, "overlap_comm": False},
        "wall_clock_breakdown": True,
        "fp16": {"enabled": False},
    }
    expected = deepspeed_config(Z2)
    expected["zero_optimization"] |= {"reduce_bucket_size": 1_000_000, "overlap_comm": False}
    assert merged(Z2, own) == {**expected, "wall_clock_breakdown": True}
    assert merged(Z2, None) == merged(Z2, {}) == deepspeed_config(Z2)


def test_auto_and_what_the_cell_says_itself_change_nothing() -> None:
    own = {
        "train_micro_batch_size_per_gpu": "auto", "train_batch_size": 24, "gradient_accumulation_steps": 3,
        "gradient_clipping": 1, "bf16": {"enabled": "auto"}, "fp16": {"enabled": False},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "none"}},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "weight_decay": 0.1}},
    }  # fmt: skip
    assert merged(Z2, own) == deepspeed_config(Z2)
    assert merged(Z2, {"zero_optimization": {"offload_optimizer": None}}) == deepspeed_config(Z2)


@pytest.mark.parametrize(
    ("asked", "own", "names"),
    [
        (Z2, {"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu 8, and the cell .* has 4"),
        (Z2, {"gradient_accumulation_steps": 1}, "gradient_accumulation_steps 1, .* has 3"),
        (Z2, {"train_batch_size": 25}, "train_batch_size 25, .* has 24"),
        (Z2, {"zero_optimization": {"stage": 3}}, "zero_optimization.stage 3, .* has 2"),
        (Z2, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, 'device "cpu", .* "none"'),
        (Z2, {"fp16": {"enabled": True}}, "fp16.enabled true, .* has false"),
        (Z2, {"bf16": {"enabled": False}}, "bf16.enabled false, .* has true"),
        (NAIVE, {"bf16": {"enabled": True}}, "bf16.enabled true, .* has false"),
        (Z2, {"optimizer": {"type": "Lamb"}}, 'optimizer.type "Lamb", .* has "AdamW"'),
        (NAIVE, {"optimizer": {"params": {"lr": 1}}}, "optimizer.params.lr 1, "),
        (Z2, {"optimizer": {"params": {"eps": 1e-6}}}, "optimizer.params.eps 1e-6, .* has none"),
        (Z2, {"scheduler": {"type": "WarmupLR"}}, 'scheduler.type "WarmupLR", .* has none'),
        (Z2, {"gradient_clipping": 0.5}, "gradient_clipping 0.5, .* has 1.0"),
        (cell("Z2", model="tiny", micro_batch=None), {"train_micro_batch_size_per_gpu": 8}, "searches it"),
        (cell("O+Z3", model="tiny"), {"zero_optimization": {"offload_param": {"device": "nvme"}}}, 'has "cpu"'),
    ],
)  # fmt: skip
def test_what_contradicts_the_cell_is_named(asked: Any, own: dict[str, Any], names: str) -> None:
    with pytest.raises(GridError, match=names) as refused:
        own_deepspeed.check([asked], own)
    assert asked.name in str(refused.value)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"sequence_parallel_size": 2}, "sequence_parallel_size, which this probe does not carry out; leave it out"),
        ({"activation_checkpointing": {}}, "does not carry out; leave it out; name a method with R"),
        ({"zero_optimisation": {}}, "zero_optimisation, which DeepSpeed does not know; did you mean zero_optimization"),
        ({"zero_optimization": {"reduce_bucket": 1}}, "zero_optimization.reduce_bucket, .* mean .*reduce_bucket_size"),
        ({"\x1b[2J": 1}, "which DeepSpeed does not know; leave it out"),
    ],
)  # fmt: skip
def test_fields_that_would_do_nothing_are_refused(own: dict[str, Any], says: str) -> None:
    with pytest.raises(GridError, match=says):
        own_deepspeed.check([Z2], own)
    assert own_deepspeed.check([Z2], {"pipeline": None, "sequence_parallel_size": "auto", "wandb": {}}) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{", "is no JSON"), ("[1]", "holds no object"), (None, "cannot be read"), ("{}", None),
        ('{"zero_optimization": {"stage": 3}}', "stage 3"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_before_anything_is_started(
    tmp_path: Path, text: str | None, names: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.json"
    if text is not None:
        path.write_text(text)
    options = ["sweep", "--dry-run", "--model", "tiny", "--device", "cpu", "--method", "Z2", "--deepspeed", str(path)]
    assert cli.invoke(options) == (0 if names is None else 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and (names is None or names in said)


def test_it_is_for_cells_of_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.json"
    path.write_text('{"wall_clock_breakdown": true}')
    options = ["sweep", "--dry-run", "--model", "tiny", "--device", "cpu", "--deepspeed", str(path), "--engine"]
    assert cli.invoke([*options, "ddp", "--method", "Naive"]) == 2
    assert "no cell has it" in capsys.readouterr().err
    assert cli.invoke([*options, "deepspeed", "fsdp2", "--method", "Z2"]) == 0
    shown = capsys.readouterr()
    assert "--deepspeed changes nothing for the cells of fsdp2" in shown.err
    assert shown.out.count('"wall_clock_breakdown": true') == 1
    assert shown.out.count('"deepspeed":{"wall_clock_breakdown":true}') == 1  # in the trial


def test_memory_is_not_predicted_with_what_was_not_counted() -> None:
    heavy, light = {"zero_optimization": {"overlap_comm": False}}, {"wall_clock_breakdown": True}
    assert uncounted(Z2, heavy) == "zero_optimization.overlap_comm"
    assert uncounted(Z2, light) is uncounted(Z2, None) is None
    models = {"tiny": Model(spec=TINY)}
    assert Dependencies().predict(Z2, Settings(models=models, deepspeed=heavy)) is None
    assert Dependencies().predict(Z2, Settings(models=models, deepspeed=light)) == predict(Z2, TINY.decoder)


def test_the_sizes_that_were_counted_are_predicted_with() -> None:
    """LongLoRA's file has larger buckets than DeepSpeed by itself: two of ZeRO 2's, in bf16."""
    own = {"zero_optimization": {"reduce_bucket_size": 1e9, "allgather_bucket_size": 1e9, "sub_group_size": "auto"}}
    assert uncounted(Z2, own) is None and sizes(Z2, None) == DEFAULT_SIZES
    assert sizes(Z2, own) == DEFAULT_SIZES._replace(reduce_bucket=1_000_000_000)
    settings = Settings(models={"tiny": Model(spec=TINY)}, deepspeed=own)
    larger, usual = Dependencies().predict(Z2, settings), predict(Z2, TINY.decoder)
    assert larger is not None and larger.terms_bytes["buckets"] == 2 * usual.terms_bytes["buckets"] == 4_000_000_000


@pytest.mark.parametrize("size", [0, -1, True, "many"])
def test_a_size_that_is_none_is_not_counted(size: object) -> None:
    own = {"zero_optimization": {"reduce_bucket_size": size}}
    assert uncounted(Z2, own) == "zero_optimization.reduce_bucket_size" and sizes(Z2, own) == DEFAULT_SIZES


def test_zero_3_steps_by_sub_groups_and_gathers_up_to_a_limit() -> None:
    asked, shape = cell("F+R+Z3", model="7b", gpus=2), known("7b")
    assert shape is not None
    less = DEFAULT_SIZES._replace(sub_group=100_000_000, max_live=300_000_000)
    fewer, usual = predict(asked, shape.decoder, less), predict(asked, shape.decoder)
    found = [
        [
            next(term.bytes for moment in each.moments for term in moment.terms if term.name == name)
            for each in (fewer, usual)
        ]
        for name in ("optimizer temporaries", "gathered parameters")
    ]
    assert found[0][1] - found[0][0] == 6 * 900_000_000 and found[1][1] - found[1][0] == 2 * 700_000_000


def test_a_head_larger_than_the_limit_is_gathered_all_the_same() -> None:
    asked, shape = cell("F+R+Z3", model="llama-3.1-405b", gpus=8), known("llama-3.1-405b")
    assert shape is not None
    loss = next(moment for moment in predict(asked, shape.decoder).moments if moment.name == "loss")
    gathered = next(term.bytes for term in loss.terms if term.name == "gathered parameters")
    assert gathered == 2 * 128_256 * 16_384


def test_the_manifest_keeps_it() -> None:
    settings = Settings(deepspeed={"a": [1]}, models={"tiny": Model(spec=TINY)})
    assert settings.trial(Z2).deepspeed == {"a": [1]}
    assert settings.trial(cell("Z2", engine="fsdp2", model="tiny")).deepspeed is None
    assert json.loads(json.dumps(settings.deepspeed)) == {"a": [1]}


def test_the_row_says_so() -> None:
    """Beside the engine, and what the file held."""
    result = of_cell(Z2, platform="x", outcome="ok", deepspeed={"zero_optimization": {"reduce_bucket_size": 5}})
    assert tables.engine(result) == "deepspeed ga3 own configuration"
    assert tables.engine(of_cell(Z2, platform="x", outcome="ok")) == "deepspeed ga3"
    assert msgspec.to_builtins(result)["deepspeed"] == {"zero_optimization": {"reduce_bucket_size": 5}}
