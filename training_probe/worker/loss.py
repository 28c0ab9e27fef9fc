"""The head and the cross-entropy as one, so that the logits of all tokens are never there at once.

A transformers decoder computes its logits with its head and hands them to its loss function. Here the head passes the
hidden states on, and the loss calls the head a second time, with labels. So whoever gathers the head's weight around
that module, as ZeRO 3 does, gathers it for the loss, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss

from training_probe.grid import LOSS_CHUNKS, Cell
from training_probe.protocol import Unsupported

IGNORED = -100  # the label of tokens that have no loss, transformers' as well


def join_head(model: Any, cell: Cell) -> None:
    """Makes the model's loss that of the cell, over its head and labels (with CP those are the tokens that follow).
    Raises Unsupported."""
    head = model.get_output_embeddings()
    plain = head.forward
    own = _liger if cell.loss == "liger" else _chunked
    passed_on: list[int] = []

    def forward(hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is not None:
            return own(head, plain, hidden, labels)
        passed_on[:] = [hidden.data_ptr()]
        return hidden

    def loss(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
        if [logits.data_ptr()] != passed_on:
            raise Unsupported(f"{type(model).__name__} does more to its logits than its head does")
        following = labels if cell.cp > 1 else functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        joint: Tensor = head(logits.flatten(0, 1), following.flatten())
        return joint

    head.forward = forward
    model.loss_function = loss


def of_following(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """transformers' own mean loss where labels are the tokens that follow, as with context parallelism."""
    mean: Tensor = ForCausalLMLoss(logits, labels, vocab_size, shift_labels=labels)
    return mean


def _chunked(head: nn.Module, plain: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor) -> Tensor:
    """The mean loss. The logits of a chunk of tokens are let go of, and computed again in the backward pass."""

    def summed(tokens: Tensor, wanted: Tensor) -> Tensor:
        return functional.cross_entropy(plain(tokens).float(), wanted, ignore_index=IGNORED, reduction="sum")

    total = torch.zeros((), device=hidden.device)
    for tokens, wanted in zip(hidden.chunk(LOSS_CHUNKS), labels.chunk(LOSS_CHUNKS), strict=True):
        total = total + checkpoint(summed, tokens, wanted, use_reentrant=False, preserve_rng_state=False)
    return total / (labels != IGNORED).sum()


def _liger(head: Any, plain: object, hidden: Tensor, labels: Tensor) -> Tensor:
    """Liger's kernel, which computes gradients in the forward pass. On the CPU Triton interprets it (the launcher asks
    it to): it trains, and its speed says nothing."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    loss: Tensor = LigerFusedLinearCrossEntropyFunction.apply(hidden, head.weight, labels, head.bias)[0]
    return loss
