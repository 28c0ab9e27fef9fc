"""What one decoder layer keeps between forward and backward, and has at most in its backward pass. Pure.

Activations are the bytes that autograd keeps of a Hugging Face decoder's forward pass in bf16, and what its backward
pass needs besides. Coefficients are bytes per (b s h), (b s f), (b a s^2): batch, sequence, hidden, MLP width, heads.
They are counted operator by operator and were checked with saved-tensor hooks on real models, kind of layer by kind of
layer (docs/predictions.md says which). Korthikanti et al.'s 34 s b h + 5 a s^2 b is of a GPT with dropout masks, GELU
and a 4h MLP, and does not fit Llama. Megatron's layer is taken to keep the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from backends.decoder import Attention, LatentAttention, Layers, Mlp, ModelSpec, Recurrent
from training_probe.flops import adapted_linears, expert_lora, kept_products, repeating_layers
from training_probe.grid import LORA_TARGETS, OF_EXPERTS, PROMPT_TOKENS, Cell

# Compiled layers recompute what is cheap: 16 b s h + 6 b s f in all, fitted to one run (7B, FSDP2 on 4 H200, batch
# 4 x 4096, torch 2.11).
COMPILED_NORM = 2
COMPILED_LESS_WIDE = 2


# Of tensor-parallel ranks these have a part of the inputs and, summed, all outputs; other linear layers the reverse.
BY_ROWS = ("o_proj", "down_proj")


class _Operators(NamedTuple):
    """How transformers 5.17 computes what differs between families, in bytes. normalised: of a norm's normalised value,
    which its training weight keeps. square: of eager softmax, per b a s^2. wide: of an expert's activation, per b s f,
    its frozen weights left out. fp32_router: the router takes an fp32 copy of the hidden state and of its own weight.
    output_copied: FlashAttention's output has the order of queries that were put together of rotated and other values,
    and is copied for the linear layer behind it. unit_norms: queries and keys of layers that see a chunk are scaled to
    one length. every_expert: each computes all tokens. logits: kept beside those of the loss, per b s V."""

    normalised: int = 2
    square: int = 6
    wide: int = 6
    fp32_router: bool = False
    output_copied: bool = False
    unit_norms: bool = False
    every_expert: bool = False
    logits: int = 0


_OF_QKV, _OF_GATE_UP = {"q_proj", "k_proj", "v_proj", "qkv_proj"}, {"gate_proj", "up_proj", "gate_up_proj"}
_OF_MLP = {*_OF_GATE_UP, "down_proj"}
_LLAMA = _Operators()
_OPERATORS = {
    "gemma": _Operators(normalised=4),  # fp32, times 1 + weight
    "gemma2": _Operators(normalised=4, square=8, logits=2),  # the tanh that caps scores, and that of logits
    "gemma3": _Operators(normalised=4),
    "gpt_oss": _Operators(normalised=4, square=2, wide=12),  # clamps and a sigmoid of its own; softmax in bf16
    "llama4": _Operators(square=2, unit_norms=True, every_expert=True),
    "deepseek_v2": _Operators(fp32_router=True),
    "deepseek_v3": _Operators(fp32_router=True),
    "kimi_k2": _Operators(fp32_router=True),
    "glm4": _Operators(output_copied=True),
    "glm4_moe": _Operators(fp32_router=True, output_copied=True),
}


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of a layer of one kind, of which there are `count`. kept: between forward and backward. formula: of `kept`,
    in words, and the widths in it. working: the most that is alive in its backward pass, what is recomputed included,
    beyond the kept bytes of other layers."""

    count: int
    kept: int
    formula: str
    sizes: str
    working: int


def uncounted(cell: Cell, spec: ModelSpec) -> str | None:
    """Why its memory is not known, a clause with the field of its config.json; None where it is."""
    name = f"{spec.name} (model_type {spec.model_type})"
    if spec.norm_values != 1:
        return f"{name} has norms with biases (norm_epsilon), and what those keep was not counted"
    if cell.checkpoint == "op" and any(kind.mlp.experts > 1 for kind in spec.kinds):
        return f"{name} is a mixture of experts, and what --checkpoint op keeps of those was not counted"
    if not cell.letters.has_lora:
        return None
    adapted = {target for kind in spec.kinds for target in adapted_linears(cell, spec, kind)}
    if any(expert_lora(cell, spec, kind) for kind in spec.kinds):
        adapted |= OF_EXPERTS
    if cell.lora_targets != LORA_TARGETS and (lacking := [each for each in cell.lora_targets if each not in adapted]):
        return f"{name} has no linear layer {lacking[0]} that LoRA could adapt"
    return None


def tokens_in_model(cell: Cell) -> int:
    """Positions of the longest row, prompt tuning's virtual ones included."""
    return cell.longest + (PROMPT_TOKENS if cell.letters.adapter == "PT" else 0)


def layer_bytes(cell: Cell, spec: ModelSpec, batch: int) -> tuple[LayerBytes, ...]:
    """Bytes of each kind of layer for one micro batch of `batch` sequences on one GPU; equal kinds are one."""
    kinds: dict[LayerBytes, int] = {}
    for kind, again in zip(spec.kinds, repeating_layers(cell, spec), strict=True):
        for recomputed, count in ((True, again), (False, kind.count - again)):
            if count:
                own = _of_kind(cell, spec, kind, batch, recomputed=recomputed)
                kinds[own] = kinds.get(own, 0) + count
    return tuple(replace(own, count=count) for own, count in kinds.items())


def outside_bytes(cell: Cell, spec: ModelSpec, batch: int) -> int:
    """The last norm and the head's input, without logits. A frozen head keeps no input, but a loss in chunks begins
    with it, and Liger's ends with its gradient."""
    coefficient = (4 if cell.loss == "plain" else 6) if cell.letters.adapter else 6 + _operators(spec).normalised
    return batch * tokens_in_model(cell) * coefficient * spec.hidden


def logits_bytes(spec: ModelSpec) -> tuple[int, str]:
    """Bytes of one logit at most, in the backward pass of the loss, and what they are: log-probabilities, their
    gradient and that of the logits, each fp32 (at the end of the forward pass it is 10 bytes: bf16 logits, their fp32
    copy, log-probabilities)."""
    capped = _operators(spec).logits
    return 12 + capped, "log-probabilities, two gradients" + (", the tanh of its cap" if capped else "")


def liger_tokens(tokens: int, spec: ModelSpec) -> int:
    """How many tokens are in a chunk of Liger's: their logits are to be no larger than the hidden states of all, and
    their number is rounded up to a power of two."""
    chunks = -(-spec.vocab_size // spec.hidden)
    return min(tokens, 1 << (-(-tokens // chunks) - 1).bit_length())


def _operators(spec: ModelSpec) -> _Operators:
    return _OPERATORS.get(spec.model_type.removesuffix("_text"), _LLAMA)


def _of_kind(cell: Cell, spec: ModelSpec, kind: Layers, batch: int, *, recomputed: bool) -> LayerBytes:
    """Bytes of one layer, which computes something twice or does not."""
    method, length = cell.letters, tokens_in_model(cell)
    tokens = batch * length
    kept, formula = _saved(cell, spec, kind, attention_recomputed=False)
    transient = tokens * _transient(cell, spec, kind)
    if recomputed:
        transient = max(transient, dora_bytes(cell, spec, kind))
    whole = tokens * kept
    once, merged = _once(cell, spec, kind.mlp), _merged(cell, spec, kind)  # what does not grow with tokens
    lasting = once + sum(merged)
    if recomputed and cell.checkpoint == "op":
        beside = _kept_by_operator(cell, spec, kind)
        kept, formula, lasting = 2.0 * spec.hidden + beside, f"2*b*s*h + {beside:g}*b*s, by operator", 0
    elif recomputed and method.recompute != "selective":
        kept, formula, lasting = 2.0 * spec.hidden, "2*b*s*h, a layer's input", 0
    elif method.recompute == "selective":
        kept, formula = _saved(cell, spec, kind, attention_recomputed=True)
    return LayerBytes(
        count=1, kept=round(tokens * kept) + lasting, formula=formula,
        working=round(whole + transient) + once + sum(merged) + min(merged, default=0),
        sizes=f"f={kind.mlp.width} a={kind.attention.heads}",
    )  # fmt: skip


def dora_bytes(cell: Cell, spec: ModelSpec, kind: Layers) -> int:
    """What PEFT has of the largest layer that DoRA adapts while it takes the norm of its weight, in the forward pass: a
    unit matrix, the adapter's product, that scaled, the sum, and in fp32 a copy of the weight; 0 without DoRA."""
    adapted = adapted_linears(cell, spec, kind).values() if cell.dora else ()
    each, squares = (4, 4) if cell.wide_inputs else (2, 3)
    return max((each * inputs * (inputs + squares * outputs) for inputs, outputs in adapted), default=0)


def _kept_by_operator(cell: Cell, spec: ModelSpec, kind: Layers) -> float:
    """What --checkpoint op keeps of a layer beside its input, bytes per token: what every second product gives, and of
    FlashAttention the output and the log-sum-exp. On a rank of a tensor-parallel group the sums of o and down are
    whole. A compiled layer keeps nothing that no gradient needs, as the last product's result."""
    kept = kept_products(cell, spec, kind)
    if cell.compile and "down_proj" not in adapted_linears(cell, spec, kind):
        kept.pop("down_proj", None)
    total = 0.0
    for name, (_, outputs) in kept.items():
        each = 4.0 if cell.wide_inputs and ", LoRA " in name else 2.0
        total += each * outputs / (1 if name in BY_ROWS else cell.tp)
    if cell.attention == "flash":
        output = kind.attention.query_width
        if isinstance(kind.attention, LatentAttention):
            output = kind.attention.heads * kind.attention.value
        total += (2.0 * output + 4.0 * kind.attention.heads) / cell.tp
    return total


def _saved(cell: Cell, spec: ModelSpec, kind: Layers, *, attention_recomputed: bool) -> tuple[float, str]:
    """Bytes per token of a layer, and the formula. Norms are whole on every rank of a tensor-parallel group, the rest
    is divided."""
    heads = kind.attention.heads
    adapted = adapted_linears(cell, spec, kind)
    inputs = _inputs(cell, kind, set(adapted))
    norm = 4 + _normalised(cell, spec)  # fp32 input; the normalised value too where the norm's weight trains
    if cell.compile:
        norm = COMPILED_NORM
    whole = kind.norms * norm + 2 * (inputs.qkv + inputs.gate_up)

    fused = cell.attention == "flash" or isinstance(kind.attention, Recurrent)
    square = 0 if fused or attention_recomputed else {"eager": _operators(spec).square, "math": 4}[cell.attention]
    heads_bytes = _heads(cell, _operators(spec), kind.attention, inputs.output, attention_recomputed)
    wide = (8 if inputs.down else 6) - (COMPILED_LESS_WIDE if cell.compile else 0)
    mlp, wide_text = _mlp(cell, spec, kind, wide)
    small = 4.0 * kind.norms + (4.0 * heads / cell.tp if fused else 0)  # reciprocal deviations; log-sum-exp
    adapters = 2.0 * cell.lora_rank * len(adapted)
    if cell.wide_inputs:  # each adapter casts its own input, and keeps that; and the product of its first matrix
        adapters = 4.0 * sum(cell.lora_rank + into for into, _ in adapted.values())
    if cell.dora:  # what comes out of the layer and of the adapter, for the gradient of the magnitudes
        adapters += (6.0 if cell.wide_inputs else 4.0) * sum(outputs for _, outputs in adapted.values())
    extras = sum(_before_heads(cell, spec, kind, inputs.latent)) + _router(cell, spec, kind.mlp)
    per_token = (
        whole * spec.hidden
        + (heads_bytes + mlp + square * heads * tokens_in_model(cell)) / cell.tp
        + small
        + adapters
        + extras
    )
    width = kind.attention.query_width
    widths = f"{whole + (heads_bytes / width if width else 0):g}*b*s*h"
    if width != spec.hidden or extras:
        widths = f"{whole:g}*b*s*h + {heads_bytes + extras:g}*b*s"
        if isinstance(kind.attention, Attention) and not extras:
            widths = f"{whole:g}*b*s*h + {heads_bytes / width:g}*b*s*a*{kind.attention.head_dim}"
    formula = f"{widths} + {wide_text}" + (f" + {square}*b*a*s^2" if square else "")
    return per_token, formula


class _Inputs(NamedTuple):
    """Which linear layers' inputs are kept: q, k and v have one together, gate and up another."""

    qkv: bool
    output: bool
    gate_up: bool
    down: bool
    latent: bool


def _inputs(cell: Cell, kind: Layers, adapted: set[str]) -> _Inputs:
    """A linear layer needs its input for the gradients of its weight, or of an adapter's: not where it is frozen."""
    method = cell.letters
    if not adapted:
        trains = not (method.adapter or method.quantized)
        return _Inputs(trains, trains, trains, trains, trains)
    if cell.wide_inputs:
        adapted = set()
    return _Inputs(
        qkv=not adapted.isdisjoint(_OF_QKV), output="o_proj" in adapted,
        gate_up=not adapted.isdisjoint(_OF_GATE_UP), down="down_proj" in adapted,
        latent=False,
    )  # fmt: skip


def _heads(
    cell: Cell,
    operators: _Operators,
    attention: Attention | LatentAttention | Recurrent,
    input_kept: bool,
    recomputed: bool,
) -> float:
    """Queries, keys and values as attention takes them, and its output; bytes per token. Eager and math attention copy
    keys and values for every head; math computes in fp32."""
    fused = cell.attention == "flash"
    if isinstance(attention, Recurrent):
        # Not measured. Projections, before and behind the convolution; the output, gated: what a fused kernel keeps
        # (flash-linear-attention: also 64 values of 16 bits a head and token, some 5 %). Without one transformers
        # computes in 32 bits, copies keys for every value head, and keeps several times as much.
        return 4.0 * attention.inputs + 6.0 * attention.inner
    if isinstance(attention, Attention):
        output = attention.query_width
        keys_and_values = 2 * attention.kv_heads * attention.head_dim if fused else 2 * attention.query_width
        keys_and_values += (2 if attention.gated else 0) * output  # the gate, and what it multiplies
    else:
        output = attention.heads * attention.value
        keys_and_values = attention.query_width + output
    each = 4 if cell.attention == "math" and not recomputed else 2
    copies = int(input_kept)
    if fused and not recomputed and (not input_kept or operators.output_copied or cell.cp > 1):
        copies += 1  # the kernel's own
    return each * (attention.query_width + keys_and_values) + 2 * output * copies


def _before_heads(cell: Cell, spec: ModelSpec, kind: Layers, inputs_kept: bool) -> Iterator[float]:
    """Bytes per token of the norms of queries and keys, or of the latents, which are inputs of linear layers too,
    with the norms' reciprocal deviations."""
    attention, normalised = kind.attention, _normalised(cell, spec)
    if isinstance(attention, Recurrent):
        return
    if isinstance(attention, Attention):
        normed = attention.query_width + attention.kv_heads * attention.head_dim
        if attention.qk_norm or attention.wide_norm:
            yield (4 + normalised) * normed + 4 * (attention.heads + attention.kv_heads)
        elif _operators(spec).unit_norms and attention.window is not None:
            yield 4 * normed + 4 * (attention.heads + attention.kv_heads)
        return
    for rank in (attention.kv_rank, attention.q_rank):
        if rank is not None:
            yield (4 + normalised + (2 if inputs_kept else 0)) * rank + 4


def _normalised(cell: Cell, spec: ModelSpec) -> int:
    return 0 if cell.letters.adapter else _operators(spec).normalised


def _mlp(cell: Cell, spec: ModelSpec, kind: Layers, wide: int) -> tuple[float, str]:
    """Bytes per token of the MLP, or of the experts that a token passes through, and the formula. wide: per b s f of a
    dense one. An expert's outputs are scattered (2 b s h), and its tokens gathered (2 b s h more): these, and what
    enters its second product, are kept where the tensors that they multiply train."""
    mlp = kind.mlp
    wide -= 0 if mlp.gated else 2  # nothing to multiply with
    if mlp.experts == 1:
        return wide * mlp.width, f"{wide}*b*s*f"
    operators = _operators(spec)
    ran = mlp.experts if operators.every_expert else mlp.active
    shared = wide * mlp.shared + (2 * spec.hidden if mlp.shared_gate else 0)
    trained = {"gate_up_proj", "down_proj"} if cell.letters.adapter is None else set(expert_lora(cell, spec, kind))
    expert = operators.wide + (2 if "down_proj" in trained else 0) - (COMPILED_LESS_WIDE if cell.compile else 0)
    moved = 4 if "gate_up_proj" in trained else 2
    text = f"{ran * expert}*b*s*f + {moved * ran}*b*s*h" + (f" + {shared}*b*s (shared)" if shared else "")
    return ran * (expert * mlp.width + moved * spec.hidden) + shared, text


def _router(cell: Cell, spec: ModelSpec, mlp: Mlp) -> float:
    """The copy of the hidden state that a router in fp32 keeps where it trains; bytes per token. What chooses experts
    besides, 4 bytes an expert and some 50 an active one, is left out."""
    return 4.0 * spec.hidden if mlp.experts > 1 and _operators(spec).fp32_router and not cell.letters.adapter else 0.0


def _once(cell: Cell, spec: ModelSpec, mlp: Mlp) -> int:
    """Bytes that do not grow with tokens: the copy of the router's weight in fp32."""
    return 4 * mlp.experts * spec.hidden if mlp.experts > 1 and _operators(spec).fp32_router else 0


def _merged(cell: Cell, spec: ModelSpec, kind: Layers) -> list[int]:
    """Bytes of all experts' weights with their LoRA added, of which PEFT makes new tensors in each forward pass: its
    products need them in the backward pass. An fp32 LoRA has copies in bf16 for it. Their gradients are as large; that
    of the second product is there beside all of them."""
    sizes = []
    for name, parameters in expert_lora(cell, spec, kind).items():
        weights = (2 if name == "gate_up_proj" else 1) * spec.hidden * kind.mlp.width
        sizes.append(2 * kind.mlp.experts * (weights + (parameters if cell.wide_inputs else 0)))
    return sizes


def _transient(cell: Cell, spec: ModelSpec, kind: Layers) -> float:
    """Bytes per token of a layer's gradients at their largest, less what has been freed of it by then: in the MLP two
    wide gradients and two of the hidden state, in attention the gradients of probabilities and scores."""
    attention, mlp = kind.attention, kind.mlp
    wide = mlp.width
    if mlp.experts > 1:
        wide = (mlp.experts if _operators(spec).every_expert else mlp.active) * mlp.width + mlp.shared
    gradients = 4.0 * wide / cell.tp + 4 * spec.hidden
    if cell.ep > 1 and mlp.experts > 1:  # rows as they are sent to the ranks of their experts, and as they come
        gradients += 4.0 * mlp.active * spec.hidden
    if cell.wide_inputs and not _OF_MLP.isdisjoint(adapted_linears(cell, spec, kind)):
        gradients += (12.0 if cell.dora else 4.0) * wide  # an fp32 gradient more; of each of what DoRA sums
    freed = 8.0 * wide / cell.tp
    # flash: gradients of q, k and v, an fp32 sum of q's. Else: probabilities' gradient, its fp32 copy, scores' gradient
    query = attention.query_width
    values = attention.heads * attention.value if isinstance(attention, LatentAttention) else query
    scores = 8.0 * attention.heads * tokens_in_model(cell)
    linear = cell.attention == "flash" or isinstance(attention, Recurrent)
    alive = 8.0 * query + 2.0 * values if linear else scores
    if cell.cp > 1:
        alive += _around_ring(cell, attention, query, values)
    return max(gradients, alive / cell.tp - freed)


def _around_ring(cell: Cell, attention: Attention | LatentAttention | Recurrent, query: int, values: int) -> float:
    """Bytes per token that the backward pass of a ring has beside the gradients of one of its steps: gradients summed
    in fp32, those of keys and values as they are sent and received too; keys and values of all ranks, and as they are
    sent; the gradients of the step before."""
    both = 2 * attention.kv_heads * attention.head_dim if isinstance(attention, Attention) else query + values
    return 4.0 * query + 3 * 4.0 * both + 2.0 * both * (cell.cp + 1) + 2.0 * (query + both)
