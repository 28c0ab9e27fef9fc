"""Names for the parts of a model, as ranges in a profiler's trace: what an operator belongs to is the innermost range
around it. The model runs the very code that it runs without them.

The parts are those of the paper's Table VI, and one for each place where something is left over: the residual sums of a
layer, masks and reshapes of attention, the model's own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function

from training_probe.protocol import PART, Part

_BY_NAME: dict[str, Part] = {
    "embed_tokens": "Embedding", "q_proj": "QKV", "k_proj": "QKV", "v_proj": "QKV", "o_proj": "Output", "mlp": "MLP",
    "input_layernorm": "RMSNorm", "post_attention_layernorm": "RMSNorm", "norm": "RMSNorm", "lm_head": "Linear",
    "rotary_emb": "RoPE", "self_attn": "Attention, rest", "qkv_proj": "QKV", "q_norm": "RMSNorm", "k_norm": "RMSNorm",
    "pre_feedforward_layernorm": "RMSNorm", "post_feedforward_layernorm": "RMSNorm",
    "post_self_attn_layernorm": "RMSNorm", "post_mlp_layernorm": "RMSNorm",
}  # fmt: skip


def scoped(part: Part, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, and in a trace a range around it."""

    @functools.wraps(function)
    def within(*args: Any, **settings: Any) -> Any:
        with record_function(PART + part):
            return function(*args, **settings)

    return within


def name_parts(model: nn.Module) -> None:
    """Puts a range around each part of a transformers decoder, also around its adapters."""
    model.forward = scoped("Model, rest", model.forward)
    for path, module in model.named_modules():
        part = _BY_NAME.get(path.rpartition(".")[2])
        if part is None and hasattr(module, "self_attn"):
            part = "Residual"
        if part is not None:
            module.forward = scoped(part, module.forward)
        if hasattr(module, "loss_function"):
            module.loss_function = scoped("Loss", module.loss_function)
        if hasattr(module, "o_proj"):
            _name_rotation(sys.modules[type(module).__module__])


def _name_rotation(code: Any) -> None:
    """RoPE is a function of the model's code, not a module."""
    plain = getattr(code, "apply_rotary_pos_emb", None)
    if plain is not None and not hasattr(plain, "__wrapped__"):
        code.apply_rotary_pos_emb = scoped("RoPE", plain)


def eager(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Attention of separate operators, its two products and its softmax named."""

    def named(*args: Any, **settings: Any) -> Any:
        with _Products():
            return attention(*args, **settings)

    return named


class _Products(TorchFunctionMode):  # type: ignore[misc]
    """Within it the first product is Bmm0, the next Bmm1."""

    def __init__(self) -> None:
        super().__init__()
        self._products = iter(("Bmm0", "Bmm1"))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        part = None
        if func is torch.matmul:
            part = next(self._products, None)
        elif func is torch.nn.functional.softmax:
            part = "Softmax"
        if part is None:
            return func(*args, **(kwargs or {}))
        with record_function(PART + part):
            return func(*args, **(kwargs or {}))
