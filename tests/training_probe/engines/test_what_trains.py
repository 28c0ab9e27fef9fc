"""What a step changes and what it leaves as it was, to the bit; and that every engine starts from the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.training_probe.engines import tiny
from training_probe.flops import flops_per_token
from training_probe.grid import LORA_RANK, PROMPT_TOKENS

pytestmark = tiny.needs_engines

STEPS = 3


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """torch, in a process group of this process alone."""
    import os

    import torch
    import torch.distributed as dist

    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DS_ACCELERATOR")}
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DS_ACCELERATOR="cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch
    dist.destroy_process_group()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


class Training:
    """One trial in this process, whose model can be looked at."""

    def __init__(self, torch: Any, engine: str, method: str, **more: Any) -> None:
        from training_probe.worker import engines, measure, model

        self.trial = tiny.trial(tiny.cell(engine, method, **more))
        device = torch.device("cpu")
        self._kernel = model.attention_kernel
        self.stepper: Any = engines.build(self.trial, device)
        self._batch = measure.batch(self.trial, 0, device, tiny.SPEC.vocab_size)
        self.model = self.stepper._engine.module if engine == "deepspeed" else self.stepper._model

    def gradients(self) -> None:
        """Both passes of all micro batches."""
        with self._kernel(self.trial.cell):
            for left in reversed(range(len(self._batch))):
                loss = self.stepper.forward(self._batch[-1 - left], left == 0)
                self.stepper.backward(loss, left == 0)

    def step(self) -> None:
        self.gradients()
        self.stepper.step()

    def digests(self) -> dict[str, str]:
        """Of the bytes of every parameter, packed ones included."""
        return {name: digest(parameter) for name, parameter in self.model.named_parameters()}


def digest(parameter: Any) -> str:
    import torch

    return hashlib.sha256(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def moved(training: Training) -> set[str]:
    before = training.digests()
    for _ in range(STEPS):
        training.step()
    return {name for name, now in training.digests().items() if now != before[name]}


@pytest.mark.parametrize("method", ["L", "QL"])
@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_lora_moves_all_adapters_and_nothing_else(alone: Any, engine: str, method: str) -> None:
    training = Training(alone, engine, method)
    adapters = {name for name, _ in training.model.named_parameters() if ".lora_" in name}
    assert len(adapters) == tiny.SPEC.layers * 7 * 2
    assert moved(training) == adapters
    hidden, wide, kv = 128, 344, 64
    linears = [(hidden, hidden)] * 2 + [(hidden, kv)] * 2 + [(hidden, wide)] * 2 + [(wide, hidden)]
    assert training.stepper.parameters[1] == tiny.SPEC.layers * sum(LORA_RANK * (a + b) for a, b in linears)


@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_q_trains_embeddings_norms_and_head(alone: Any, engine: str) -> None:
    """Norms have gradients and yet stand still: near one, bf16 has no room for a step of 1e-4."""
    training = Training(alone, engine, "Q")
    names = {name for name, _ in training.model.named_parameters()}
    trainable = {name for name, parameter in training.model.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name in names if "_proj" not in name}
    assert len(names - trainable) == tiny.SPEC.layers * 7
    assert moved(training) == {name for name in trainable if "norm" not in name}


@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_prompt_tuning_moves_the_prompt(alone: Any, engine: str) -> None:
    training = Training(alone, engine, "PT")
    (prompt,) = moved(training)
    assert "prompt_encoder" in prompt
    assert training.stepper.parameters[1] == PROMPT_TOKENS * tiny.SPEC.hidden


@pytest.mark.parametrize(("engine", "method"), [("ddp", "Naive"), ("deepspeed", "Z2")])
def test_full_training_moves_everything(alone: Any, engine: str, method: str) -> None:
    training = Training(alone, engine, method)
    names = set(training.digests())
    assert moved(training) >= {name for name in names if "norm" not in name}


def test_weights_go_by_their_names_in_every_engine(alone: Any) -> None:
    from torch.distributed.tensor import DTensor

    replicated = Training(alone, "ddp", "Naive").digests()
    assert Training(alone, "deepspeed", "Z2").digests() == replicated
    adapted = Training(alone, "ddp", "L").digests()
    base = {name.removeprefix("base_model.model.").replace(".base_layer", ""): value for name, value in adapted.items()}
    assert {name: value for name, value in base.items() if ".lora_" not in name} == replicated
    sharded = Training(alone, "fsdp2", "Z3").model
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        assert digest(parameter.full_tensor().bfloat16()) == replicated[name], name


def test_weights_differ_between_seeds_and_names(alone: Any) -> None:
    from training_probe.worker import model

    shape = alone.Size([64, 64])
    one = model.draw("layers.0.self_attn.q_proj.weight", shape, 0, "cpu")
    for other in (model.draw("layers.1.self_attn.q_proj.weight", shape, 0, "cpu"),
                  model.draw("layers.0.self_attn.q_proj.weight", shape, 1, "cpu")):  # fmt: skip
        assert not alone.equal(one, other)
    assert one.float().std().item() == pytest.approx(model.STD, rel=0.05)


@pytest.mark.parametrize("method", ["Q", "QL"])
def test_no_weight_of_a_4_bit_model_is_constant(alone: Any, method: str) -> None:
    """Zeros would multiply faster. A norm begins as ones, the second matrix of a LoRA as zeros."""
    training = Training(alone, "ddp", method)
    packed = 0
    for name, parameter in training.model.named_parameters():
        bytes_ = parameter.detach().contiguous().view(alone.uint8)
        if "norm" in name or ".lora_B." in name:
            continue
        assert bytes_.unique().numel() > 16, name
        if getattr(parameter, "quant_state", None) is not None:
            packed += 1
            weights = parameter.quant_state.shape.numel()
            assert bytes_.numel() == pytest.approx(weights / 2, rel=0.01), name  # the last block may be padded
    assert packed == tiny.SPEC.layers * 7


def test_gradients_of_accumulated_micro_batches_are_those_of_one_large_one(alone: Any) -> None:
    found = []
    for how in ({"micro_batch": 1, "grad_accum": 3}, {"micro_batch": 3}):
        training = Training(alone, "ddp", "Naive", **how)
        training.gradients()
        found.append([parameter.grad.float() for parameter in training.model.parameters()])
    for accumulated, at_once in zip(*found, strict=True):
        assert (accumulated - at_once).norm() < 0.03 * at_once.norm()


@pytest.mark.parametrize("method", ["Naive", "R", "RS", "PT", "PT+R"])
def test_a_step_computes_what_is_counted(alone: Any, method: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    training = Training(alone, "ddp", method)
    with FlopCounterMode(display=False) as counted:
        training.gradients()
    cell = training.trial.cell
    assert cell.micro_batch is not None
    tokens = cell.seq_len * cell.micro_batch
    expected = tokens * flops_per_token(cell, tiny.SPEC.decoder).hardware
    assert counted.get_total_flops() == pytest.approx(expected, rel=1e-4)  # rotary embeddings are left out
