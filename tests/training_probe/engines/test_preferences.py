"""Direct preference optimisation through the real engines: each reaches the loss of a plain loop that has a policy, a
frozen copy of it, and the loss as its paper writes it."""

from __future__ import annotations

from math import log
from typing import Any

import pytest

from tests.training_probe.engines import tiny
from training_probe import grid
from training_probe.protocol import BETAS, CLIP_NORM, WEIGHT_DECAY, Trial, learning_rate

pytestmark = tiny.needs_engines

STEPS, BETA = 4, 0.1
AGREE = 2e-3  # of losses that fall by 0.1
PLAIN = [("ddp", "Naive"), ("ddp", "F"), ("ddp", "R"), ("deepspeed", "Naive")]
WITH_MASTERS = [("deepspeed", "Z2"), ("deepspeed", "Z3"), ("deepspeed", "Z2+O"), ("fsdp2", "F+Z3"), ("fsdp2", "Z2")]
ADAPTED = [("ddp", "L"), ("ddp", "L+F+R"), ("deepspeed", "L"), ("fsdp2", "L+Z3"), ("fsdp2", "L+Z2"),
           ("deepspeed", "L+Z3"), ("ddp", "QL"), ("deepspeed", "QL+Z2"), ("fsdp2", "QL+Z3")]  # fmt: skip


def trial(engine: str, method: str, **more: Any) -> Trial:
    return tiny.trial(tiny.cell(engine, method, task="dpo", seq_len=24, **more))


def reference(torch: Any, asked: Trial, *, masters: bool) -> list[float]:
    """masters: fp32 weights beside the bf16 ones."""
    from training_probe.worker import batches, model

    policy, frozen = (model.build(asked) for _ in range(2))
    for each in (policy, frozen):
        model.materialise(each, asked, torch.device("cpu"))
    own = list(policy.parameters())
    trained = [parameter.detach().float() for parameter in own] if masters else own
    adam = torch.optim.AdamW(trained, lr=learning_rate(grid.Method()), betas=BETAS, weight_decay=WEIGHT_DECAY)

    def log_probability(of: Any, sequence: Any) -> Any:
        logits = of(input_ids=sequence[None]).logits[0, :-1].float()
        return torch.log_softmax(logits, -1).gather(-1, sequence[1:, None]).sum()

    found = []
    step = batches.batch(asked, 0, torch.device("cpu"), tiny.SPEC.vocab_size)
    for _ in range(STEPS):
        values = []
        for inputs in step:
            pairs = zip(*inputs["input_ids"].chunk(2), strict=True)
            for chosen, rejected in pairs:
                with torch.no_grad():
                    before = log_probability(frozen, chosen) - log_probability(frozen, rejected)
                after = log_probability(policy, chosen) - log_probability(policy, rejected)
                values.append(-torch.log(torch.sigmoid(BETA * (after - before))))
        loss = torch.stack(values).mean()
        loss.backward()
        for master, parameter in zip(trained, own, strict=True):
            master.grad = parameter.grad.float() if masters else parameter.grad
        torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        adam.step()
        with torch.no_grad():
            for master, parameter in zip(trained, own, strict=True):
                parameter.copy_(master)
                parameter.grad = None
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("grad_accum", [1, 2])
def test_engines_reach_the_loss_of_a_plain_loop(alone: Any, grad_accum: int) -> None:
    plain, with_masters = (
        reference(alone, trial("ddp", "Naive", grad_accum=grad_accum), masters=each) for each in (False, True)
    )
    assert plain[0] == pytest.approx(log(2), abs=1e-6) and plain[0] - plain[-1] > 0.1
    for engine, method in PLAIN:
        found = tiny.losses(trial(engine, method, grad_accum=grad_accum), STEPS)
        assert found[0] == pytest.approx(log(2), abs=1e-6), (engine, method)
        assert found == pytest.approx(plain, abs=AGREE), (engine, method)
    for engine, method in WITH_MASTERS:
        found = tiny.losses(trial(engine, method, grad_accum=grad_accum), STEPS)
        assert found[0] == pytest.approx(log(2), abs=1e-6), (engine, method)
        assert found == pytest.approx(with_masters, abs=AGREE), (engine, method)


@pytest.mark.parametrize(("engine", "method"), ADAPTED)
def test_an_adapted_policy_without_its_adapters_is_its_reference(alone: Any, engine: str, method: str) -> None:
    """LoRA begins as nothing, so the first loss is the logarithm of 2; it falls only where the reference stays."""
    found = tiny.losses(trial(engine, method), STEPS)
    expected = tiny.losses(trial("ddp", "QL" if "QL" in method else "L"), STEPS)
    assert found[0] == pytest.approx(log(2), abs=1e-6)
    assert found[-1] < 0.6 and found == pytest.approx(expected, abs=0.02)


def test_the_loss_of_the_paper_by_hand(alone: Any) -> None:
    """Two tokens, of which the policy gives the chosen one twice the odds of the reference, the rejected one half."""
    from training_probe.worker import preference

    ids = alone.tensor([[0, 1], [0, 2]])
    even = alone.zeros(2, 2, 3)
    leaning = alone.tensor([[0.0, log(4.0), log(1.0)]]).expand(2, 2, 3)

    class Out:
        def __init__(self, logits: Any) -> None:
            self.logits = logits

    found = preference.loss(lambda input_ids: Out(leaning), lambda input_ids: Out(even), ids)
    assert float(found) == pytest.approx(log(1 + 4**-0.1))


def test_the_loss_of_trl(alone: Any) -> None:
    """What DPOTrainer of TRL 1.16.0 gave for these models and tokens (beta 0.1, a prompt of one token)."""
    import transformers

    from training_probe.worker import preference

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    policy, frozen = (transformers.LlamaForCausalLM(config).float() for _ in range(2))
    for model, shift in ((policy, 0.8), (frozen, 0.0)):
        for number, parameter in enumerate(model.parameters()):
            wave = alone.sin(alone.arange(parameter.numel(), dtype=alone.float64) * 0.7 + number + shift) / 10
            parameter.data = alone.ones_like(parameter) if parameter.dim() == 1 else wave.float().view(parameter.shape)
    ids = alone.tensor([
        [3, 17, 21, 31, 47, 7, 35, 7, 63], [9, 34, 38, 48, 2, 24, 52, 24, 63],
        [3, 51, 55, 3, 19, 41, 7, 41, 63], [9, 6, 10, 20, 36, 58, 24, 58, 63],
    ])  # fmt: skip
    assert float(preference.loss(policy, frozen, ids)) == pytest.approx(0.7011025547981262, abs=1e-5)
