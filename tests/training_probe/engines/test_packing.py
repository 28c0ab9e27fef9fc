"""Padded and packed sequences through the real engines: each reaches the loss of a plain loop that takes one sequence
after the other, so that no sequence sees another and no padding is learned."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training_probe.engines import tiny
from training_probe import grid
from training_probe.protocol import BETAS, CLIP_NORM, WEIGHT_DECAY, Trial, learning_rate

pytestmark = tiny.needs_engines

STEPS = 4
AGREE = 4e-4  # without positions of their own it would be 4e-3, with a label across a border 9e-4
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip
PLAIN = [
    *(("ddp", method) for method in ("Naive", "F", "R", "F+R", "RS", "F+RS")), ("deepspeed", "F"),
]  # fmt: skip
WITH_MASTERS = [("deepspeed", "F+Z2"), ("deepspeed", "Z3"), ("fsdp2", "F+Z3"), ("fsdp2", "R+Z2")]


def trial(engine: str, method: str, **more: Any) -> Trial:
    sizes = {"seq_len": 48, "micro_batch": 3, "lengths": "lognormal:14:0.7", **more}
    asked = tiny.cell(engine, method, **sizes)
    assert asked.drawn is not None
    return Trial(cell=asked, config=dict(QWEN3), rows=asked.drawn.replicas)


def reference(torch: Any, asked: Trial, *, masters: bool) -> list[float]:
    """One sequence after the other, with the mean over the predicted tokens of a micro batch. masters: fp32 weights
    beside the bf16 ones."""
    import transformers

    from training_probe.worker import batches, model

    config = transformers.AutoConfig.for_model(**QWEN3, pad_token_id=None)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    own = list(plain.train().parameters())
    with torch.no_grad():
        for path, parameter in plain.named_parameters():
            parameter.copy_(model.draw(path, parameter.shape, 0, "cpu"))
    trained = [parameter.detach().float() for parameter in own] if masters else own
    adam = torch.optim.AdamW(trained, lr=learning_rate(grid.Method()), betas=BETAS, weight_decay=WEIGHT_DECAY)
    step = batches.batch(asked, 0, torch.device("cpu"), config.vocab_size)
    found = []
    for _ in range(STEPS):
        each = []
        for inputs, rows in zip(step, asked.rows[0], strict=True):
            summed, predicted = torch.zeros(()), sum(length - 1 for row in rows for length in row)
            for ids, row in zip(inputs["input_ids"], rows, strict=True):
                for sequence in ids[: sum(row)].split(list(row)):
                    logits = plain(input_ids=sequence[None]).logits[0, :-1].float()
                    summed = summed + torch.nn.functional.cross_entropy(logits, sequence[1:], reduction="sum")
            (summed / predicted / len(step)).backward()
            each.append(float(summed.detach() / predicted))
        for master, parameter in zip(trained, own, strict=True):
            master.grad = parameter.grad.float() if masters else parameter.grad
        torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        adam.step()
        with torch.no_grad():
            for master, parameter in zip(trained, own, strict=True):
                parameter.copy_(master)
                parameter.grad = None
        found.append(sum(each) / len(each))
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_engines_reach_the_loss_of_one_sequence_after_another(alone: Any, packing: bool) -> None:
    sizes = {"packing": packing, "grad_accum": 2}
    plain, with_masters = (reference(alone, trial("ddp", "Naive", **sizes), masters=each) for each in (False, True))
    assert plain[0] - plain[-1] > 0.05
    for engine, method in PLAIN:
        assert tiny.losses(trial(engine, method, **sizes), STEPS) == pytest.approx(plain, abs=AGREE), (engine, method)
    for engine, method in WITH_MASTERS:
        assert tiny.losses(trial(engine, method, **sizes), STEPS) == pytest.approx(with_masters, abs=AGREE), (
            engine,
            method,
        )


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("option", [{"loss": "chunked"}, {"checkpoint": "1"}, {"attention": "math"}])
def test_other_losses_and_kernels_take_them_too(alone: Any, packing: bool, option: dict[str, str]) -> None:
    plain = tiny.losses(trial("ddp", "Naive", packing=packing), STEPS)
    assert tiny.losses(trial("ddp", "Naive", packing=packing, **option), STEPS) == pytest.approx(plain, abs=AGREE)


@pytest.mark.parametrize("method", ["L", "QL"])
def test_adapters_take_packed_rows(alone: Any, method: str) -> None:
    found = [tiny.losses(trial("ddp", letters, packing=True), STEPS) for letters in (method, f"{method}+F")]
    assert found[0] == pytest.approx(found[1], abs=AGREE) and found[0][0] - found[0][-1] > 0.02


def test_prompt_tuning_takes_padded_ones(alone: Any) -> None:
    found = tiny.losses(trial("ddp", "PT"), STEPS)
    assert found[-1] < found[0]
