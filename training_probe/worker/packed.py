"""4-bit weights under FSDP2: bitsandbytes' NF4, packed into bf16, so that FSDP divides and gathers it like any weight.

Each rank quantizes whole weights, of which it keeps its part of what is packed and all of the scales: bitsandbytes
finds these beside the weight, in the layer, each time that FSDP has gathered it anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from training_probe.grid import Cell
from training_probe.worker import model as models
from training_probe.worker import sharding

PACKED = 4  # weights in one element of bf16


def put_in(model: Any, cell: Cell) -> nn.Module:
    """Puts such a layer in the place of each linear one of the decoder, on the meta device."""
    import bitsandbytes as bnb

    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        layer = bnb.nn.Linear4bit(
            module.in_features, module.out_features, bias=module.bias is not None, compute_dtype=torch.bfloat16,
            compress_statistics=cell.double_quant, quant_type="nf4", quant_storage=torch.bfloat16, device="meta",
        )  # fmt: skip
        elements = -(-module.in_features * module.out_features // PACKED)
        layer.weight = bnb.nn.Params4bit(
            torch.empty((elements, 1), dtype=torch.bfloat16, device="meta"), compress_statistics=cell.double_quant,
            quant_type="nf4", quant_storage=torch.bfloat16, bnb_quantized=True, module=layer,
        )  # fmt: skip
        setattr(model.get_submodule(parent), name, layer)
    model.is_loaded_in_4bit = True  # or PEFT takes the layers for plain ones
    whole: nn.Module = model
    return whole


def made_plain(model: nn.Module) -> nn.Module:
    """Makes plain parameters of what is packed, which are all that FSDP divides; they know the size that they had."""
    for _, layer in _layers(model):
        plain: Any = nn.Parameter(layer.weight.data, requires_grad=False)
        plain.quant_state = SimpleNamespace(shape=torch.Size((layer.out_features, layer.in_features)))
        layer.weight = plain
    return model


def fill(model: nn.Module, cell: Cell, seed: int, device: torch.device) -> set[str]:
    """Draws and quantizes the weights; the names of these parameters."""
    from bitsandbytes.functional import quantize_4bit

    names = set()
    for path, layer in _layers(model):
        name = f"{path}.weight"
        drawn = models.draw(name, torch.Size((layer.out_features, layer.in_features)), seed, device)
        packed, layer.quant_state = quantize_4bit(
            drawn, compress_statistics=cell.double_quant, quant_type="nf4", quant_storage=torch.bfloat16
        )
        sharding.fill(layer.weight, packed)
        names.add(name)
    return names


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    import bitsandbytes as bnb

    return ((path, each) for path, each in model.named_modules() if isinstance(each, bnb.nn.Linear4bit))
