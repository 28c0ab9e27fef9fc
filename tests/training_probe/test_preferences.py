"""Preference tuning: what a pair is, what the reference takes of memory and of FLOPs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from training_probe import cli, llama_shape
from training_probe.flops import flops_per_token, weights
from training_probe.grid import Cell, cell
from training_probe.memory import Prediction, predict
from training_probe.refusals import impossible

SPEC = llama_shape.known("7b")
assert SPEC is not None
MODEL = SPEC.decoder
GIB = 1 << 30


def asked(method: str = "F", task: str = "dpo", **more: Any) -> Cell:
    return cell(method, **{"model": "7b", "task": task, "engine": "ddp", "seq_len": 1024, **more})


def loss_terms(prediction: Prediction) -> dict[str, int]:
    (moment,) = (each for each in prediction.moments if each.name == "loss")
    return {term.name: term.bytes for term in moment.terms}


def test_a_pair_is_two_sequences() -> None:
    assert asked(micro_batch=3, grad_accum=2, gpus=4).tokens_per_step == 2 * 3 * 2 * 4 * 1024
    assert asked(micro_batch=3, task="grpo").tokens_per_step == 3 * 1024
    assert asked(micro_batch=3).name == "7b_dpo_ddp_F_1x_s1024_b3"


@pytest.mark.parametrize(
    ("engine", "method", "gpus", "share"),
    [
        ("ddp", "F", 4, 1), ("deepspeed", "F", 4, 1), ("deepspeed", "F+Z2", 4, 1), ("deepspeed", "F+Z2+O", 4, 1),
        ("deepspeed", "F+Z3", 4, 4), ("fsdp2", "F+Z2", 4, 4), ("fsdp2", "F+Z3", 8, 8),
    ],
)  # fmt: skip
def test_the_reference_is_a_frozen_copy_that_zero_3_and_fsdp2_divide(
    engine: str, method: str, gpus: int, share: int
) -> None:
    """Beside it, memory is that of training on twice the sequences."""
    paired = predict(asked(method, engine=engine, gpus=gpus, micro_batch=2), MODEL)
    plain = predict(asked(method, "pretrain", engine=engine, gpus=gpus, micro_batch=4), MODEL)
    own = 2 * -(-MODEL.parameters // share)
    for with_reference, without in zip(paired.moments, plain.moments, strict=True):
        assert with_reference.name == without.name and with_reference.bytes == without.bytes + own
    assert loss_terms(paired)["reference"] == own


@pytest.mark.parametrize(("engine", "method"), [("ddp", "L+F"), ("deepspeed", "QL+F"), ("fsdp2", "L+F+Z3")])
def test_an_adapted_policy_is_its_own_reference(engine: str, method: str) -> None:
    paired = predict(asked(method, engine=engine, micro_batch=2), MODEL)
    assert paired == predict(asked(method, "finetune", engine=engine, micro_batch=4), MODEL)


@pytest.mark.parametrize("method", ["F", "L+F"])
def test_the_reference_adds_a_forward_pass_without_adapters(method: str) -> None:
    paired, plain = (flops_per_token(asked(method, task), MODEL) for task in ("dpo", "finetune"))
    lora = weights(MODEL, asked(method)).adapter
    assert paired.reference == plain.forward - 2.0 * lora
    assert paired.model == plain.model + paired.reference


def test_grpo_has_a_rollout_engine_beside_the_policy() -> None:
    """7B: 12.55 GiB of weights, and half a MiB of keys and values for a token."""
    assumed = predict(asked("L+F", "grpo", micro_batch=4), MODEL)
    tuned = predict(asked("L+F", "finetune", micro_batch=4), MODEL)
    assert assumed.moments == tuned.moments
    assert assumed.outside_bytes - tuned.outside_bytes == 2 * MODEL.parameters + 4 * 1024 * (GIB >> 11)
    named = predict(asked("L+F", "grpo", micro_batch=4, rollout_gb=30.0), MODEL)
    assert named.outside_bytes - tuned.outside_bytes == 30 * GIB
    assert "reference" in loss_terms(predict(asked("F", "grpo"), MODEL))


@pytest.mark.parametrize(
    ("method", "more", "said"),
    [
        ("Naive", {"engine": "megatron"}, "dpo is built for deepspeed, fsdp2 and ddp"),
        ("Z3", {"engine": "fsdp2", "tp": 2, "gpus": 2}, "without TP and CP"),
        ("Q", {}, "use L or QL"),
        ("PT", {}, "use L or QL"),
        ("Z3+O", {"engine": "deepspeed"}, "leave O out, or use L"),
        ("Z2+O", {"engine": "fsdp2"}, "leave O out, or use L"),
        ("F", {"loss": "chunked"}, "whole logits"),
        ("F", {"lengths": "100"}, "sequences of one length"),
        ("F", {"compile": True}, "plain layers"),
    ],
)
def test_what_does_not_go_together(method: str, more: dict[str, Any], said: str) -> None:
    assert said in str(impossible(asked(method, **more), MODEL))
    assert impossible(asked("L+Z3+O", engine="deepspeed"), MODEL) is None


def test_grpo_is_predicted_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    how = ["--model", "7b", "--engine", "ddp", "--method", "L+F", "--task", "grpo"]
    assert cli.invoke(["memory", *how]) == 0
    told = capsys.readouterr()
    assert "7b_grpo_ddp_L+F" in told.out and "an engine of rollouts is assumed" in told.err
    assert cli.invoke(["sweep", *how, "--device", "cpu"]) == 2
    assert "of what is run dpo is the nearest (--task dpo)." in capsys.readouterr().err
