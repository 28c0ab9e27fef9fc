"""Bytes that autograd keeps of a Hugging Face Llama's forward pass in bf16, and what its backward pass needs besides.

Coefficients are bytes per (b s h), (b s f), (b a s^2): batch, sequence, hidden, intermediate, heads. They are counted
operator by operator and were checked with saved-tensor hooks on real models (eager, flash and math attention; full
training, LoRA, prompt tuning, frozen linears; grouped keys and values): exact. Korthikanti et al.'s
34 s b h + 5 a s^2 b is of a GPT with dropout masks, GELU and a 4h MLP, and does not fit Llama (METHODOLOGY.md).
Megatron's layer is taken to keep the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.catalog import ModelSpec
from training_probe.grid import LORA_RANK, PROMPT_TOKENS, Cell
from training_probe.memory.parameters import adapted_linears

# Compiled layers recompute what is cheap: 16 b s h + 6 b s f in all, fitted to one run (7B, FSDP2 on 4 H200, batch
# 4 x 4096, torch 2.11).
COMPILED_NORMS = 4
COMPILED_LESS_WIDE = 2


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of one decoder layer. kept: between forward and backward. formula: of `kept`, in words. working: the most
    that is alive in its backward pass, what is recomputed included, beyond the kept bytes of other layers."""

    kept: int
    formula: str
    working: int


def tokens_in_model(cell: Cell) -> int:
    """Positions of one sequence, prompt tuning's virtual ones included."""
    return cell.seq_len + (PROMPT_TOKENS if cell.letters.adapter == "PT" else 0)


def layer_bytes(cell: Cell, spec: ModelSpec, batch: int) -> LayerBytes:
    """Of one layer and one micro batch of `batch` sequences on one GPU."""
    method, length = cell.letters, tokens_in_model(cell)
    tokens = batch * length
    attention_square = spec.heads * length  # bytes per token, times a coefficient
    if method.recompute == "full":
        whole, _ = _saved(cell, spec, attention_recomputed=False)
        kept = 2.0 * spec.hidden
        formula = "2*b*s*h, a layer's input"
        working = whole + _transient(cell, spec, attention_square)
    elif method.recompute == "selective":
        kept, formula = _saved(cell, spec, attention_recomputed=True)
        whole, _ = _saved(cell, spec, attention_recomputed=False)
        working = whole + _transient(cell, spec, attention_square)
    else:
        kept, formula = _saved(cell, spec, attention_recomputed=False)
        working = kept + _transient(cell, spec, attention_square)
    return LayerBytes(kept=round(tokens * kept), formula=formula, working=round(tokens * working))


def outside_bytes(cell: Cell, spec: ModelSpec, batch: int) -> int:
    """The last norm and the head's input, without logits."""
    coefficient = 4 if cell.letters.adapter else 8
    return batch * tokens_in_model(cell) * coefficient * spec.hidden


def logits_bytes(cell: Cell, spec: ModelSpec, batch: int) -> int:
    """At their largest, in the backward pass of the loss: log-probabilities, their gradient and that of the logits,
    each fp32 (at the end of the forward pass it is 10 bytes: bf16 logits, their fp32 copy, log-probabilities)."""
    return 12 * batch * tokens_in_model(cell) * spec.vocab_size // cell.tp


def _saved(cell: Cell, spec: ModelSpec, *, attention_recomputed: bool) -> tuple[float, str]:
    """Bytes per token of a layer, and the formula. Norms are whole on every rank of a tensor-parallel group, the rest
    is divided."""
    method = cell.letters
    lora = method.adapter in ("L", "QL")
    inputs_kept = lora or not (method.adapter or method.quantized)  # a frozen linear layer does not need its input
    norms = 8 if method.adapter else 12  # fp32 input; the normalised value too where the norm's weight trains
    if cell.compile:
        norms = COMPILED_NORMS
    inputs = 4 if inputs_kept else 0  # of q, k, v together, and of gate and up

    fused = cell.attention == "flash"
    grouped = spec.kv_heads / spec.heads if fused else 1.0  # eager and math copy keys and values for every head
    in_fp32 = cell.attention == "math" and not attention_recomputed
    queries = 12.0 if in_fp32 else 2 + 4 * grouped
    output = 2 if inputs_kept or (fused and not attention_recomputed) else 0
    wide = (8 if inputs_kept else 6) - (COMPILED_LESS_WIDE if cell.compile else 0)
    square = 0 if fused or attention_recomputed else {"eager": 6, "math": 4}[cell.attention]

    whole = norms + inputs
    divided = queries + output
    active = spec.active_experts
    mlp = active * wide * spec.intermediate + (active * 4 * spec.hidden if spec.experts > 1 else 0)
    small = 8.0 + (4.0 * spec.heads / cell.tp if fused else 0)  # reciprocal deviations; log-sum-exp
    adapters = 2.0 * LORA_RANK * len(adapted_linears(spec)) if lora else 0.0
    per_token = (
        whole * spec.hidden
        + (divided * spec.hidden + mlp + square * spec.heads * tokens_in_model(cell)) / cell.tp
        + small
        + adapters
    )
    formula = f"{whole + divided:g}*b*s*h + {active * wide}*b*s*f" + (f" + {square}*b*a*s^2" if square else "")
    return per_token, formula


def _transient(cell: Cell, spec: ModelSpec, attention_square: int) -> float:
    """Bytes per token of a layer's gradients at their largest, less what has been freed of it by then: in the MLP two
    wide gradients and two of the hidden state, in attention the gradients of probabilities and scores."""
    mlp = 4.0 * spec.active_experts * spec.intermediate / cell.tp + 4 * spec.hidden
    freed = 8.0 * spec.active_experts * spec.intermediate / cell.tp
    # flash: gradients of q, k and v, an fp32 sum of q's. Else: probabilities' gradient, its fp32 copy, scores' gradient
    attention = 10.0 * spec.hidden if cell.attention == "flash" else 8.0 * attention_square
    return max(mlp, attention / cell.tp - freed)
