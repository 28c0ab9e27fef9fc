"""What each engine holds at each moment of a training step: the terms of `training_probe.memory`.

One generator an engine; each yields the moments that can be the highest. Between them memory moves in a line, a layer's
activations going and its gradients coming, so the ends are enough. DeepSpeed's are in `memory_deepspeed`. Everything
empirical is a constant at the top of a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from backends.catalog import ModelSpec
from training_probe.grid import Cell
from training_probe.memory import deepspeed
from training_probe.memory.activations import layer_bytes
from training_probe.memory.parameters import weights
from training_probe.memory.rank import (
    MASTER,
    STATES_FP32,
    Phase,
    Rank,
    Term,
    libraries,
    product,
    with_bf16_states,
    with_new_gradients,
)

# torch's AdamW, which megatron-core takes where apex and Transformer Engine are not, has all square roots at once.
FOREACH_ADAM_BYTES = 4


def phases(cell: Cell, spec: ModelSpec, batch: int) -> tuple[tuple[Phase, ...], tuple[Term, ...]]:
    """The moments of a step on the worst rank, and the host's terms."""
    if cell.engine == "megatron":
        stages = [tuple(_megatron(rank)) for rank in _stages(cell, spec, batch)]
        return max(stages, key=lambda stage: max(phase.bytes for phase in stage)), ()
    method = cell.letters
    rank = Rank(
        cell=cell, spec=spec, method=method, counts=weights(spec, method), batch=batch,
        layer=layer_bytes(cell, spec, batch), layers=spec.layers,
    )  # fmt: skip
    if cell.engine == "fsdp2":
        return tuple(_fsdp2(rank)), tuple(_host(rank))
    if cell.engine == "ddp":
        return tuple(_ddp(rank)), ()
    return tuple(deepspeed.moments(rank)), tuple(_host(rank))


def _ddp(rank: Rank) -> Iterator[Phase]:
    """Like DeepSpeed without ZeRO, but gradients are views of buckets, which stay; alone there are none."""
    trainable = rank.counts.trainable
    held = with_bf16_states(rank)
    if rank.ranks == 1:
        yield from with_new_gradients(rank, held)
        yield Phase("optimizer step", (*held, product("gradients", 2, trainable, "trainable")))
        return
    held.append(product("gradients", 2, trainable, "trainable, as buckets"))
    yield rank.loss(held)
    yield rank.last_layer(
        [*held, product("newest gradient", 2, rank.counts.largest_trainable, "elements, on its way to a bucket")]
    )


def _fsdp2(rank: Rank) -> Iterator[Phase]:
    """fully_shard on each layer and on the root, which holds embeddings, last norm and head. What is trained
    is fp32, beside a frozen model bf16; gradients are reduced in fp32."""
    counts, ranks, offload = rank.counts, rank.ranks, rank.method.offload
    trainable, root = counts.trainable, (1 if rank.spec.tied else 2) * counts.embedding
    width = 2 if rank.method.adapter else 4  # bytes of a trained weight, its gradient and each moment
    held = libraries(rank)
    gradients = []
    if not offload:
        held += [
            product("parameters", width, trainable, "trainable", ranks),
            *([product("frozen parameters", 2, counts.frozen, "frozen", ranks)] if counts.frozen else []),
            product("optimizer states", 2 * width, trainable, "trainable", ranks),
        ]
        gradients = [product("gradients", width, trainable, "trainable", ranks)]
    if rank.method.zero == 3:  # a layer in use and the next one
        gathered = product("gathered parameters", 2, root + 2 * counts.layer, "of the root and 2 layers")
        fewer = product("gathered parameters", 2, root + counts.layer, "of the root and the next layer")
    else:
        gathered = product("gathered parameters", 2, counts.total, "parameters, kept for the backward pass")
        fewer = product("gathered parameters", 2, counts.total - counts.layer, "parameters, without the layer done")
    last = product("gathered parameters", 2, root + counts.layer, "of the root and a layer")
    before = gradients if rank.accumulates else []
    root_trains = 0 if rank.method.adapter else root
    own = product("layer's gradients", 2, counts.layer_trainable, "trainable of a layer, not yet divided")
    reduced = product("buckets", 4, counts.layer_trainable, "trainable of a layer, fp32, to be reduced")
    head = product(
        "head's gradient", 2, min(root_trains, counts.embedding), "elements, kept until the root's are reduced"
    )
    yield rank.loss([*held, *before, gathered])
    yield rank.last_layer([*held, *before, gathered, own, head])
    remaining = rank.activations(rank.layers - 1, outside=False)
    yield Phase("first reduction", (*held, *before, fewer, own, reduced, head, remaining))
    reached = [] if offload else [product("gradients", width, trainable - root_trains, "trainable but the root", ranks)]
    yield rank.first_layer([*held, *(before or reached), last, own, reduced, head])
    roots = product("buckets", 6, root_trains, "elements of the root: bf16 gradients, fp32 to be reduced")
    yield Phase("last reduction", (*held, *gradients, roots))
    yield Phase("optimizer step", (*held, *gradients))


def _megatron(rank: Rank) -> Iterator[Phase]:
    """bf16 parameters, fp32 main gradients that stay, fp32 master weights and moments, which Z1 divides."""
    parameters, states = rank.counts.trainable, rank.ranks if rank.method.zero else 1
    held = [
        product("parameters", 2, parameters, "parameters of a rank"),
        product("gradients", 4, parameters, "parameters of a rank, fp32"),
        product("optimizer states", MASTER + STATES_FP32, parameters, "parameters of a rank", states),
        *libraries(rank),
    ]
    yield rank.loss(held)
    yield rank.last_layer([*held, product("newest gradient", 2, rank.counts.largest_trainable, "elements, bf16")])
    roots = product("optimizer step", FOREACH_ADAM_BYTES, parameters, "parameters of a rank, square roots", states)
    yield Phase("optimizer step", (*held, roots))


def _stages(cell: Cell, spec: ModelSpec, batch: int) -> Iterator[Rank]:
    """The first and the last rank of a pipeline; without one they are the same."""
    method = cell.letters
    whole = weights(spec, method)
    layer = layer_bytes(cell, spec, batch)
    layers = spec.layers // cell.pp
    for first, last in {(True, cell.pp == 1), (cell.pp == 1, True)}:
        parameters = (layers * whole.layer + (first + last) * whole.embedding) // cell.tp
        counts = replace(whole, trainable=parameters, largest_trainable=whole.largest_trainable // cell.tp)
        in_flight = min(cell.pp, cell.grad_accum) if first else 1
        yield Rank(
            cell=cell, spec=spec, method=method, counts=counts, batch=batch, layer=layer, layers=layers,
            in_flight=in_flight, head=last,
        )  # fmt: skip


def _host(rank: Rank) -> Iterator[Term]:
    """What offload keeps on the node, all ranks together. Pinned buffers are rounded up to a power of two by torch."""
    if not rank.method.offload:
        return
    counts, ranks = rank.counts, rank.ranks
    trainable = counts.trainable
    own = -(-trainable // ranks)
    if rank.cell.engine == "fsdp2":
        width = 2 if rank.method.adapter else 4
        yield product("frozen parameters", 2, counts.frozen, "frozen")
        yield product("parameters and gradients", 2 * width, trainable, "trainable")
        yield product("optimizer states", 2 * width, trainable, "trainable")
        return
    if rank.method.zero == 3:
        yield _pinned("parameters", 2, -(-(counts.frozen + trainable) // ranks), ranks)
        yield _pinned("gradients", 2, own, ranks)
        yield product("fp32 gradients", 4, trainable, "trainable, pinned by sub-group")
        yield product("master weights", MASTER, trainable, "trainable")
    else:
        yield _pinned("master weights", MASTER, own, ranks)
        yield _pinned("fp32 gradients", 4, own, ranks)
        yield _pinned("bf16 parameters", 2, own, ranks)
    yield product("optimizer states", STATES_FP32, trainable, "trainable")


def _pinned(name: str, coefficient: int, count: int, ranks: int) -> Term:
    rounded = 1 << (max(1, coefficient * count) - 1).bit_length()
    return Term(name, ranks * rounded, f"{ranks} ranks x {coefficient} B x {count:,}, pinned: to a power of two")
