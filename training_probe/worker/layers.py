"""How the layers of a model are computed: what activation checkpointing keeps of them, and products in fp8.

Both follow torchtitan, whose words for them `--checkpoint` and `--fp8` have.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from training_probe.grid import Cell
from training_probe.protocol import Unsupported

FP8_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
_aten = torch.ops.aten
_PRODUCT = _aten.mm.default  # of a linear layer without bias; eager attention has bmm
# What is dear to compute and small to keep. max: the scales of fp8 tensors.
_KEPT = {
    _PRODUCT,
    _aten.max.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def checkpointed(model: nn.Module, layers: nn.ModuleList, cell: Cell) -> None:
    """Makes the layers recompute in the backward pass what the cell's `checkpoint` names."""
    if cell.checkpoint == "op":
        for layer in layers:  # within the layer, so that a compiled one contains it
            layer.forward = functools.wraps(layer.forward)(_by_operator(layer.forward))
    elif every := cell.recomputed_every:
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for number, layer in enumerate(layers, 1):
            layer.gradient_checkpointing = number % every == 0


def _by_operator(forward: Any) -> Any:
    def recomputing(*args: Any, **settings: Any) -> Any:
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts, **settings
        )  # nothing in a layer is random

    return recomputing


def _contexts() -> Any:
    """Contexts of one forward pass and its recomputation: every second product is computed again."""
    products = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **settings: Any) -> CheckpointPolicy:
        kept = operator in _KEPT
        if operator is _PRODUCT:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def to_fp8(layers: nn.ModuleList, cell: Cell) -> None:
    """Makes torchao's fp8 layers of the linear ones, with its recipe `tensorwise`: one dynamic scale a tensor. On the
    CPU torchao emulates the products: rounded to fp8, multiplied in higher precision. Raises Unsupported."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if cell.device == "cuda" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        raise Unsupported("fp8 products need a GPU of compute capability 8.9 or higher (Ada, Hopper)")
    convert_to_float8_training(layers, config=Float8LinearConfig(emulate=cell.device == "cpu"))
