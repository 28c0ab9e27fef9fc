"""What the engines' predicted memory is put together from: a layer's activations, terms, moments of a step, one rank,
and what several of the engines hold.

Activations are the bytes that autograd keeps of a Hugging Face Llama's forward pass in bf16, and what its backward pass
needs besides. Coefficients are bytes per (b s h), (b s f), (b a s^2): batch, sequence, hidden, intermediate, heads.
They are counted operator by operator and were checked with saved-tensor hooks on real models (eager, flash and math
attention; full training, LoRA, prompt tuning, frozen linears; grouped keys and values): exact. Korthikanti et al.'s 34
s b h + 5 a s^2 b is of a GPT with dropout masks, GELU and a 4h MLP, and does not fit Llama (docs/predictions.md).
Megatron's layer is taken to keep the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from training_probe.flops import Weights, adapted_linears
from training_probe.grid import LORA_RANK, PROMPT_TOKENS, Cell, Method
from training_probe.llama_shape import LlamaShape

# --- What is set or measured, and may need a new look with a new version ---
# Context, modules and NCCL's own memory are outside torch's allocator. About half a GiB; not measured here yet.
CUDA_CONTEXT_BYTES = 512 << 20
# cuBLAS takes 32 MiB on Hopper (8 on others) for each thread that calls it, forward and autograd's, cuBLASLt once more.
LIBRARIES_BYTES = 96 << 20
# NF4 with double quantization: half a byte, a byte of scale for 64 weights, 4 bytes for 256 such scales.
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
# LoRA and prompt adapters are bf16 (autocast_adapter_dtype=False). PEFT's default is fp32, and keeps fp32 inputs, too.
ADAPTER_BYTES = 2
# Compiled layers recompute what is cheap: 16 b s h + 6 b s f in all, fitted to one run (7B, FSDP2 on 4 H200, batch
# 4 x 4096, torch 2.11).
COMPILED_NORMS = 4
COMPILED_LESS_WIDE = 2
# --- ---

STATES_BF16, STATES_FP32 = 4, 8  # Adam's two moments, bytes per parameter
MASTER = 4


# Activations.


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


def layer_bytes(cell: Cell, spec: LlamaShape, batch: int) -> LayerBytes:
    """Of one layer and one micro batch of `batch` sequences on one GPU."""
    method, length = cell.letters, tokens_in_model(cell)
    tokens = batch * length
    attention_square = spec.heads * length  # bytes per token, times a coefficient
    kept, formula = _saved(cell, spec, attention_recomputed=False)
    working = kept + _transient(cell, spec, attention_square)
    if method.recompute == "full":
        kept, formula = 2.0 * spec.hidden, "2*b*s*h, a layer's input"
    elif method.recompute == "selective":
        kept, formula = _saved(cell, spec, attention_recomputed=True)
    return LayerBytes(kept=round(tokens * kept), formula=formula, working=round(tokens * working))


def outside_bytes(cell: Cell, spec: LlamaShape, batch: int) -> int:
    """The last norm and the head's input, without logits."""
    coefficient = 4 if cell.letters.adapter else 8
    return batch * tokens_in_model(cell) * coefficient * spec.hidden


def logits_bytes(cell: Cell, spec: LlamaShape, batch: int) -> int:
    """At their largest, in the backward pass of the loss: log-probabilities, their gradient and that of the logits,
    each fp32 (at the end of the forward pass it is 10 bytes: bf16 logits, their fp32 copy, log-probabilities)."""
    return 12 * batch * tokens_in_model(cell) * spec.vocab_size // cell.tp


def _saved(cell: Cell, spec: LlamaShape, *, attention_recomputed: bool) -> tuple[float, str]:
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
        + (divided * spec.query_width + mlp + square * spec.heads * tokens_in_model(cell)) / cell.tp
        + small
        + adapters
    )
    widths = f"{whole + divided:g}*b*s*h"
    if spec.query_width != spec.hidden:
        widths = f"{whole:g}*b*s*h + {divided:g}*b*s*a*{spec.head_dim}"
    formula = f"{widths} + {active * wide}*b*s*f" + (f" + {square}*b*a*s^2" if square else "")
    return per_token, formula


def _transient(cell: Cell, spec: LlamaShape, attention_square: int) -> float:
    """Bytes per token of a layer's gradients at their largest, less what has been freed of it by then: in the MLP two
    wide gradients and two of the hidden state, in attention the gradients of probabilities and scores."""
    mlp = 4.0 * spec.active_experts * spec.intermediate / cell.tp + 4 * spec.hidden
    freed = 8.0 * spec.active_experts * spec.intermediate / cell.tp
    # flash: gradients of q, k and v, an fp32 sum of q's. Else: probabilities' gradient, its fp32 copy, scores' gradient
    attention = 10.0 * spec.query_width if cell.attention == "flash" else 8.0 * attention_square
    return max(mlp, attention / cell.tp - freed)


# Terms and moments.


class Term(msgspec.Struct, frozen=True):
    """`formula` has the numbers filled in; B is bytes."""

    name: str
    bytes: int
    formula: str


class Moment(msgspec.Struct, frozen=True):
    """One moment of a step, and everything that is allocated then."""

    name: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> int:
        return sum(term.bytes for term in self.terms)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What is the same for all engines, on one rank. layers: those it computes. in_flight: micro batches whose
    activations it holds at once (pipeline). head: whether it computes logits."""

    cell: Cell
    spec: LlamaShape
    method: Method
    counts: Weights
    batch: int
    layer: LayerBytes
    layers: int
    in_flight: int = 1
    head: bool = True

    @property
    def ranks(self) -> int:
        """Among which ZeRO divides."""
        return self.cell.data_parallel

    @property
    def accumulates(self) -> bool:
        return self.cell.grad_accum > 1

    def loss(self, held: Iterable[Term]) -> Moment:
        """The gradient of the logits: all activations and the loss's tensors."""
        return Moment("loss", (*held, self.activations(self.layers), *self._logits()))

    def last_layer(self, held: Iterable[Term], name: str = "backward, last layer", gone: int = 0) -> Moment:
        """A layer in the backward pass, when `gone` layers after it are done."""
        before = self.activations(self.layers - 1 - gone, outside=False)
        return Moment(name, (*held, before, *self._working()))

    def first_layer(self, held: Iterable[Term]) -> Moment:
        """The end of the backward pass: the activations of one layer are left."""
        return Moment("backward, first layer", (*held, *self._working()))

    def activations(self, layers: int, outside: bool = True) -> Term:
        """Of `layers` layers of the last micro batch, and all of those before it in the pipeline."""
        total = layers + (self.in_flight - 1) * self.layers
        beyond = outside_bytes(self.cell, self.spec, self.batch) if outside and self.head else 0
        spec = self.spec
        sizes = f"b={self.batch} s={self.cell.seq_len} h={spec.hidden} f={spec.intermediate} a={spec.heads}"
        text = f"{total} layers x ({self.layer.formula}), {sizes}" + (
            f", tp={self.cell.tp}" if self.cell.tp > 1 else ""
        )
        return Term("activations", total * self.layer.kept + beyond, text + (" + last norm" if beyond else ""))

    def _logits(self) -> Iterator[Term]:
        if self.head:
            text = (
                f"12 B x {self.batch} x {self.cell.seq_len} x {self.spec.vocab_size} (log-probabilities, two gradients)"
            )
            yield Term("logits and loss", logits_bytes(self.cell, self.spec, self.batch), text)

    def _working(self) -> Iterator[Term]:
        again = "recomputed and its gradients" if self.method.recompute != "none" else "and its gradients"
        yield Term("working set", self.layer.working, f"one layer's activations, {again}")
        if self.method.four_bit:
            yield product("dequantized weight", 2, self.spec.hidden * self.spec.intermediate, "elements")


def whole_parameters(rank: Rank) -> list[Term]:
    """Parameters that every rank has all of, in 16 bits or 4."""
    counts = rank.counts
    terms = four_bit(rank, 1)
    terms.append(product("parameters", 2, counts.frozen + counts.trainable - counts.adapter, "parameters"))
    if counts.adapter:
        terms.append(product("adapters", ADAPTER_BYTES, counts.adapter, "adapter parameters"))
    return terms


def four_bit(rank: Rank, ranks: int) -> list[Term]:
    four_bit = rank.counts.four_bit
    return [product("4-bit weights", NF4_BYTES, four_bit, "weights, NF4", ranks)] if four_bit else []


def libraries(rank: Rank) -> list[Term]:
    bytes_ = LIBRARIES_BYTES if rank.cell.device == "cuda" else 0
    return [Term("CUDA libraries", bytes_, "workspaces of cuBLAS")]


def with_bf16_states(rank: Rank) -> list[Term]:
    """What a bf16 model holds all the time whose optimizer keeps bf16 states, and nothing is divided."""
    return [
        *whole_parameters(rank),
        product("optimizer states", STATES_BF16, rank.counts.trainable, "trainable"),
        *libraries(rank),
    ]


def with_new_gradients(rank: Rank, held: list[Term]) -> Iterator[Moment]:
    """Both passes where autograd makes the gradients anew: the head's are the first, the embeddings' the last. A table
    that is both has two, and then their sum."""
    counts = rank.counts
    table = 0 if rank.method.adapter else counts.embedding
    if rank.accumulates:
        whole = product("gradients", 2, counts.trainable, "trainable, until the last micro batch")
        before, first, last = [whole], whole, whole
    else:
        missing = counts.layer_trainable + (0 if rank.spec.tied else table)
        before, first = [], product("gradients", 2, table, "elements of the head")
        last = product(
            "gradients", 2, counts.trainable - missing, "trainable, without the first layer's and embeddings'"
        )
    yield rank.loss([*held, *before])
    yield rank.last_layer([*held, first])
    yield rank.first_layer([*held, last])
    if rank.spec.tied and table:
        own = product("gradients", 2, counts.trainable, "trainable")
        yield Moment(
            "backward, embeddings", (*held, own, product("newest gradient", 4, table, "elements, and the sum"))
        )


def product(name: str, coefficient: float, count: int, what: str, ranks: int = 1) -> Term:
    """Bytes of `count` elements, divided among ranks, rounded up."""
    own = -(-count // ranks)
    return Term(
        name,
        round(coefficient * own),
        f"{coefficient:g} B x {count:,} {what}" + (f" / {ranks} ranks" if ranks > 1 else ""),
    )
