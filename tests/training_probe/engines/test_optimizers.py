"""Steps that are too small for bf16: what rounds to the nearest loses them, what --states offers does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training_probe.engines import tiny
from training_probe.protocol import BETAS

pytestmark = tiny.needs_engines

WEIGHTS, STEPS, RATE = 4096, 100, 1e-4


def moved(torch: Any, optimizer: Any, **settings: Any) -> Any:
    """By how much weights of 1 have moved after steps of RATE each, of a gradient that is always the same; the nearest
    values in bf16 are 1 - 1/256 and 1 + 1/128."""
    weights = torch.nn.Parameter(torch.ones(WEIGHTS, dtype=torch.bfloat16))
    chosen = optimizer([{"params": [weights]}], lr=RATE, betas=BETAS, weight_decay=0.0, **settings)
    for _ in range(STEPS):
        weights.grad = torch.ones_like(weights)
        chosen.step()
    return 1 - weights.detach().float()


def test_a_step_below_half_of_the_last_place_is_lost_in_plain_bf16_alone() -> None:
    torch: Any = pytest.importorskip("torch")
    import torchao.optim

    from training_probe.worker.optimizers import KahanAdamW

    torch.manual_seed(0)
    whole = STEPS * RATE
    assert moved(torch, torch.optim.AdamW).abs().max() == 0
    kahan = moved(torch, KahanAdamW)
    assert kahan.unique().numel() == 1 and float(kahan[0]) == pytest.approx(whole, abs=1 / 512)
    stochastic = moved(torch, torchao.optim._AdamW, bf16_stochastic_round=True)
    assert stochastic.unique().numel() > 2  # each by itself is a guess
    assert float(stochastic.mean()) == pytest.approx(whole, rel=0.05)
