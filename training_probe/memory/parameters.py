"""How many parameters a cell has, and of what kind: frozen, 4-bit, trainable, adapters. Pure; counts, no bytes.

Frozen and quantized is what the trials build so: Q and QL quantize the linear layers of the decoder and leave
embeddings, norms and head in 16 bits; LoRA sits on all seven linear layers, prompt tuning before the first token.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.catalog import ModelSpec
from training_probe.grid import LORA_RANK, PROMPT_TOKENS, Method


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Parameter counts. `trainable` contains `adapter`; frozen + four_bit + trainable is everything in memory.

    layer: of one decoder layer with its adapters. layer_trainable: those of it that train. embedding: one of the two
    tables. largest_trainable: the largest tensor with a gradient.
    """

    frozen: int
    four_bit: int
    trainable: int
    adapter: int
    layer: int
    layer_trainable: int
    embedding: int
    largest_trainable: int

    @property
    def total(self) -> int:
        return self.frozen + self.four_bit + self.trainable


def attention_linears(spec: ModelSpec) -> list[tuple[int, int]]:
    """(inputs, outputs) of q, k, v and o of one layer."""
    kv = spec.kv_heads * spec.head_dim
    return [(spec.hidden, spec.hidden), (spec.hidden, kv), (spec.hidden, kv), (spec.hidden, spec.hidden)]


def mlp_linears(spec: ModelSpec) -> list[tuple[int, int]]:
    """(inputs, outputs) of gate, up and down of one expert."""
    wide = spec.intermediate
    return [(spec.hidden, wide), (spec.hidden, wide), (wide, spec.hidden)]


def adapted_linears(spec: ModelSpec) -> list[tuple[int, int]]:
    """The linear layers of one decoder layer that LoRA adapts: all seven; of a mixture of experts those of attention,
    since its experts are one tensor and no linear layers."""
    return attention_linears(spec) + (mlp_linears(spec) if spec.experts == 1 else [])


def weights(spec: ModelSpec, method: Method) -> Weights:
    """The counts of the model as this method trains it."""
    table = spec.vocab_size * spec.hidden
    tables = table if spec.tied else 2 * table
    norms, final_norm = 2 * spec.hidden, spec.hidden
    layer = (spec.parameters - tables - final_norm) // spec.layers
    linear = sum(inputs * outputs for inputs, outputs in attention_linears(spec) + mlp_linears(spec))
    lora = sum(LORA_RANK * (inputs + outputs) for inputs, outputs in adapted_linears(spec))
    base = spec.parameters
    four_bit = spec.layers * linear if method.four_bit else 0
    if method.adapter:
        prompt = method.adapter == "PT"
        adapter = PROMPT_TOKENS * spec.hidden if prompt else spec.layers * lora
        in_layer = 0 if prompt else lora
        return Weights(
            frozen=base - four_bit, four_bit=four_bit, trainable=adapter, adapter=adapter, layer=layer + in_layer,
            layer_trainable=in_layer, embedding=table,
            largest_trainable=adapter if prompt else LORA_RANK * max(spec.intermediate, spec.hidden),
        )  # fmt: skip
    experts = 2 * spec.experts if spec.experts > 1 else 1  # of a mixture, gate and up of all experts are one tensor
    largest = 0 if method.quantized else experts * spec.hidden * spec.intermediate
    return Weights(
        frozen=0, four_bit=four_bit, trainable=base - four_bit, adapter=0, layer=layer,
        layer_trainable=norms if method.quantized else layer, embedding=table,
        largest_trainable=max(table, largest),
    )  # fmt: skip
