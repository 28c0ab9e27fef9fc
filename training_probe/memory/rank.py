"""What the engines' predicted memory is put together from: terms, moments of a step, one rank, and what several of the
engines hold. The activations of a layer are `layers`'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from backends.decoder import ModelSpec
from training_probe.flops import Weights, largest_matrix, layer_linears, magnitudes, matrix_parameters
from training_probe.grid import LOSS_CHUNKS, Cell, Method
from training_probe.memory.layers import (
    BY_ROWS,
    LayerBytes,
    dora_bytes,
    liger_tokens,
    logits_bytes,
    outside_bytes,
    tokens_in_model,
)
from training_probe.own_deepspeed import DEFAULT_SIZES, ZeroSizes

# --- What is set or measured, and may need a new look with a new version ---
# cuBLAS takes 32 MiB on Hopper (8 on others) for each thread that calls it, forward and autograd's, cuBLASLt once more.
LIBRARIES_BYTES = 96 << 20
# NF4: half a byte, and of 64 weights a scale: 4 bytes, or with double quantization one, and 4 for 256 such scales.
NF4_BYTES, NF4_DOUBLE_BYTES = 0.5 + 4 / 64, 0.5 + 1 / 64 + 4 / (64 * 256)
PACKED_BYTES = 0.5  # what FSDP2 divides of them
# Moments of 8-bit AdamW, bitsandbytes' and torchao's: a byte each, and 4 for 256 of them. Tensors of less than 4096
# elements, which keep 32 bits, are norms and biases.
SCALES_8BIT = 2 * 4 / 256  # which are not paged
STATES_8BIT = 2 + SCALES_8BIT
# torchao rounds to fp8 through fp32: a copy, and that times the scale. Compiled it is one kernel.
FP8_CAST_BYTES = 8
# --- ---

STATES_FP32 = 8  # Adam's two moments, bytes per parameter
MASTER = 4


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
    """What is the same for all engines, on one rank. kinds: of the layers that it computes. in_flight: micro batches
    whose activations it holds at once (pipeline). head: whether it computes logits."""

    cell: Cell
    spec: ModelSpec
    method: Method
    counts: Weights
    batch: int
    kinds: tuple[LayerBytes, ...]
    in_flight: int = 1
    head: bool = True
    zero: ZeroSizes = DEFAULT_SIZES

    @property
    def layers(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def ranks(self) -> int:
        """Among which ZeRO divides."""
        return self.cell.shards

    @property
    def accumulates(self) -> bool:
        return self.cell.grad_accum > 1

    @property
    def trained_bytes(self) -> int:
        """Of a weight that trains, and of its gradient, where an engine leaves the model as it is."""
        return 4 if self.cell.wide_adapters else 2

    def states(self, usual: float, ranks: int = 1, *, master: int = 0, momentum: float | None = None) -> list[Term]:
        """What the optimizer holds. usual: of plain AdamW's two moments, bytes a parameter; momentum: of Muon's one, by
        default half of that; master: of a copy of the weight beside them."""
        trainable = self.counts.trainable
        if self.cell.optim != "muon":
            moments = {"adamw-8bit": STATES_8BIT, "paged-adamw-8bit": SCALES_8BIT}.get(self.cell.optim, usual)
            return [product("optimizer states", master + moments, trainable, "trainable", ranks)]
        own = usual / 2 if momentum is None else momentum
        return [
            product("Muon's momentum", master + own, self.matrices, "elements of layers' matrices", ranks),
            product("optimizer states", master + usual, trainable - self.matrices, "other trainable, by AdamW", ranks),
        ]

    @property
    def matrices(self) -> int:
        """How many elements of what trains Muon updates."""
        return self.counts.adapter - magnitudes(self.cell, self.spec) or matrix_parameters(self.spec) // (
            self.cell.tp * self.cell.pp
        )

    def muon(self, each: float, ranks: int = 1) -> list[Term]:
        """What Muon has besides of the matrix that it makes an update for, of a gradient of `each` bytes: that with the
        momentum, one or two in bf16, and two squares."""
        if self.cell.optim != "muon":
            return []
        rows, columns = sorted(largest_matrix(self.cell, self.spec))
        return [
            product("Muon's update", 2 * each, rows * columns, "elements of the largest matrix", ranks),
            product("Muon's squares", 4, rows * rows, "elements, bf16, two of them"),
        ]

    def loss(self, held: Iterable[Term]) -> Moment:
        """The gradient of the logits: all activations and the loss's tensors."""
        most = max(self._logits(), self._dora(), key=lambda terms: sum(term.bytes for term in terms))
        return Moment("loss", (*held, self.activations(self.layers), *most))

    def last_layer(self, held: Iterable[Term], name: str = "backward, last layer", gone: int = 0) -> Moment:
        """A layer in the backward pass, when `gone` layers after it are done."""
        before = self.activations(self.layers - 1 - gone, outside=False)
        return Moment(name, (*held, before, *self._working()))

    def first_layer(self, held: Iterable[Term]) -> Moment:
        """The end of the backward pass: the activations of one layer are left."""
        return Moment("backward, first layer", (*held, *self._working()))

    def activations(self, layers: int, outside: bool = True) -> Term:
        """Activations of `layers` layers of the last micro batch, and of all before it in the pipeline. Where kinds of
        layers differ, those that keep most: in which order they stand is not known."""
        cell, spec = self.cell, self.spec
        if cell.offload_activations:
            beyond = outside_bytes(cell, spec, self.batch) if outside and self.head else 0
            return Term("activations", beyond, "last norm, and those of layers on the host")
        kept, parts, left = 0, [], layers
        for kind in sorted(self.kinds, key=lambda kind: -kind.kept):
            own = min(kind.count, left)
            left -= own
            total = own + (self.in_flight - 1) * kind.count
            kept += total * kind.kept
            sizes = "" if len(self.kinds) == 1 else f", {kind.sizes}"
            parts += [f"{total} layers x ({kind.formula}{sizes})"] if total or len(self.kinds) == 1 else []
        beyond = outside_bytes(cell, spec, self.batch) if outside and self.head else 0
        sizes = f"b={self.batch} s={cell.longest} h={spec.hidden}"
        sizes += f" {self.kinds[0].sizes}" if len(self.kinds) == 1 else ""
        text = f"{' + '.join(parts)}, {sizes}" + (f", tp={cell.tp}" if cell.tp > 1 else "")
        return Term("activations", kept + beyond, text + (" + last norm" if beyond else ""))

    def _logits(self) -> list[Term]:
        tokens = self.batch * tokens_in_model(self.cell)
        if not self.head:
            return []
        if self.cell.loss == "plain":
            coefficient, what = logits_bytes(self.spec)
            size = coefficient * tokens * self.spec.vocab_size // self.cell.tp
            text = f"{coefficient} B x {self.batch} x {self.cell.longest} x {self.spec.vocab_size} ({what})"
            return [Term("logits and loss", size, text)]
        table = 0 if self.method.adapter else self.counts.embedding
        if self.cell.loss == "liger":
            own = liger_tokens(tokens, self.spec)
            return [*self._chunk(2, own, "bf16 logits of a chunk, overwritten by their gradient"),
                    *_summed(table, 1, "summed, kept for the backward pass")]  # fmt: skip
        own = -(-tokens // LOSS_CHUNKS)
        logits = [*self._chunk(12, own, f"{logits_bytes(self.spec)[1]}; of a chunk"), *_summed(table, 1, "summed")]
        products = [*self._chunk(2, own, "bf16 gradient of a chunk's logits"), *_summed(table, 2, "newest and summed")]
        return max(logits, products, key=lambda terms: sum(term.bytes for term in terms))

    def _chunk(self, coefficient: int, tokens: int, what: str) -> Iterator[Term]:
        text = f"{coefficient} B x {tokens} x {self.spec.vocab_size} ({what})"
        yield Term("logits and loss", coefficient * tokens * self.spec.vocab_size, text)

    def _working(self) -> Iterator[Term]:
        again = "recomputed and its gradients" if self.cell.recomputes else "and its gradients"
        working = max(kind.working for kind in self.kinds)
        yield Term("working set", working, f"one layer's activations, {again}")
        if self.method.four_bit:
            widest = max(kind.mlp.width for kind in self.spec.kinds)
            yield product("dequantized weight", 2, self.spec.hidden * widest, "elements")
        if self.cell.fp8:
            yield self._fp8_copies()

    def _dora(self) -> list[Term]:
        most = max(dora_bytes(self.cell, self.spec, kind) for kind in self.spec.kinds)
        return [Term("DoRA's weight", most, "unit matrix, product, scaled, sum, copy")] if most else []

    def _fp8_copies(self) -> Term:
        """Copies of the largest linear layer in its backward pass: autograd keeps inputs and weights in bf16, and each
        pass rounds them anew. The gradient of the inputs needs the weight also transposed, that of the weight both
        others."""
        cell, tokens = self.cell, self.batch * tokens_in_model(self.cell)
        sizes = []
        for kind in self.spec.kinds:
            for name, (inputs, outputs) in layer_linears(self.spec, kind).items():
                if name in BY_ROWS:
                    inputs //= cell.tp
                else:
                    outputs //= cell.tp
                weight = inputs * outputs
                copies = max(2 * weight + tokens * outputs, weight + 2 * tokens * (inputs + outputs))
                cast = 0 if cell.compile else FP8_CAST_BYTES * max(weight, tokens * inputs, tokens * outputs)
                sizes.append((copies + cast, f"{name} in fp8" + ("" if cell.compile else ", cast through fp32")))
        return Term("fp8 copies", *max(sizes))


def _summed(table: int, count: int, what: str) -> Iterator[Term]:
    """Each chunk has a gradient of the head's weight, where that trains."""
    if table:
        yield product("head's gradients in chunks", 2 * count, table, f"elements of the head, {what}")


def whole_parameters(rank: Rank) -> list[Term]:
    """Parameters that every rank has all of, in 16 bits or 4."""
    counts = rank.counts
    terms = [*four_bit(rank, 1), *reference(rank)]
    terms.append(product("parameters", 2, counts.frozen + counts.trainable - counts.adapter, "parameters"))
    if counts.adapter:
        terms.append(product("adapters", rank.trained_bytes, counts.adapter, "adapter parameters"))
    return terms


def reference(rank: Rank, ranks: int = 1) -> list[Term]:
    """The frozen model beside a policy that is trained whole. What its forward pass takes is less than the policy's."""
    counts = rank.counts.total if rank.cell.own_reference else 0
    return [product("reference", 2, counts, "frozen parameters", ranks)] if counts else []


def four_bit(rank: Rank, ranks: int) -> list[Term]:
    four_bit = rank.counts.four_bit
    each = NF4_DOUBLE_BYTES if rank.cell.double_quant else NF4_BYTES
    if not four_bit or rank.cell.engine != "fsdp2":
        return [product("4-bit weights", each, four_bit, "weights, NF4", ranks)] if four_bit else []
    scales = product("scales of 4-bit weights", each - PACKED_BYTES, four_bit, "weights, on every rank")
    return [product("4-bit weights", PACKED_BYTES, four_bit, "weights, packed NF4", ranks), scales]


def libraries(rank: Rank) -> list[Term]:
    bytes_ = LIBRARIES_BYTES if rank.cell.device == "cuda" else 0
    return [Term("CUDA libraries", bytes_, "workspaces of cuBLAS")]


def with_bf16_states(rank: Rank) -> list[Term]:
    """What a model holds all the time whose optimizer keeps states of its weights' kind, and nothing is divided."""
    return [
        *whole_parameters(rank),
        *rank.states(2 * rank.trained_bytes),
        *libraries(rank),
    ]


def with_new_gradients(rank: Rank, held: list[Term]) -> Iterator[Moment]:
    """Both passes where autograd makes the gradients anew: the head's are the first, the embeddings' the last. A table
    that is both has two, and then their sum."""
    counts, each = rank.counts, rank.trained_bytes
    table = 0 if rank.method.adapter else counts.embedding
    if rank.accumulates:
        whole = product("gradients", each, counts.trainable, "trainable, until the last micro batch")
        before, first, last = [whole], whole, whole
    else:
        missing = counts.layer_trainable + (0 if rank.spec.tied else table)
        before, first = [], product("gradients", 2, table, "elements of the head")
        last = product(
            "gradients", each, counts.trainable - missing, "trainable, without the first layer's and embeddings'"
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
