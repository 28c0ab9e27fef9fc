"""Direct preference optimisation (Rafailov et al. 2023): the policy learns to prefer the first half of a micro batch,
the chosen sequences, to the second half, the rejected ones, beside a frozen reference that it began as.

Every token of a sequence counts in its log-probability: pairs share no prompt. The reference goes first, without
gradients, so that what it keeps is gone before the policy's activations come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from training_probe.protocol import DPO_BETA
from training_probe.worker.loss import IGNORED

Model = Callable[..., Any]  # a transformers model, however an engine wraps it


def loss(policy: Model, reference: Model, ids: Tensor) -> Tensor:
    """The mean over the pairs of (2 x pairs, sequence) token ids."""
    with torch.no_grad():
        before = _log_probabilities(reference(input_ids=ids).logits, ids)
    chosen, rejected = (_log_probabilities(policy(input_ids=ids).logits, ids) - before).chunk(2)
    return -functional.logsigmoid(DPO_BETA * (chosen - rejected)).mean()


def without_adapters(policy: Model, model: nn.Module) -> Model:
    """The policy's own frozen model, as its reference."""

    def reference(**inputs: Any) -> Any:
        with _switched_off(model):
            return policy(**inputs)

    return reference


@contextlib.contextmanager
def _switched_off(model: nn.Module) -> Iterator[None]:
    """As PEFT's disable_adapter, which also changes which parameters have gradients: engines look at that but once."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """The sum over each sequence's tokens but the first."""
    following = functional.pad(ids[:, 1:], (0, 1), value=IGNORED)
    each = functional.cross_entropy(logits.float().flatten(0, 1), following.flatten(), reduction="none")
    return -each.view_as(ids).sum(-1)
