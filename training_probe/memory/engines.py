"""What each engine holds at each moment of a training step: the terms of `training_probe.memory`.

One generator an engine; each yields the moments that can be the highest. Between them memory moves in a line, a layer's
activations going and its gradients coming, so the ends are enough. DeepSpeed's are counted as 0.19's sources allocate;
`results:h200/training/peaks.txt` shows what they do. Everything empirical is a constant at the top of a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from backends.decoder import Attention, ModelSpec
from training_probe.flops import weights
from training_probe.grid import Cell
from training_probe.memory.layers import layer_bytes, tokens_in_model
from training_probe.memory.rank import (
    MASTER,
    STATES_FP32,
    Moment,
    Rank,
    Term,
    four_bit,
    libraries,
    product,
    reference,
    whole_parameters,
    with_bf16_states,
    with_new_gradients,
)
from training_probe.own_deepspeed import ZeroSizes
from training_probe.protocol import KAHAN_CHUNK

# --- What is set or measured, and may need a new look with a new version ---
# Elements that DeepSpeed reduces at once without ZeRO.
PLAIN_BUCKET = 500_000_000
# By how many ZeRO 3 oversteps the limit of gathered parameters among several ranks: it is checked before the last
# parameter of a prefetched group is added, and not for what a module needs at once. Two cells had 0.09 and 0.19 billion
# more.
OVER_LIVE = 100_000_000
# Buckets that ZeRO 1 and 2 fill in turn: 2 with overlap_comm, as this probe sets it, 1 without. ZeRO 3 has one.
OVERLAP_BUCKETS = 2
# With offload the norm of each gradient is taken on the device, in fp64; ZeRO 3 of so many elements at a time.
NORM_BYTES, NORM_ELEMENTS = 8, 250_000_000
# engine.allreduce_gradients without ZeRO: a flat bf16 copy and its fp32 form, which is what it sends where no bf16
# section asks for less; bytes per element of a bucket.
PLAIN_REDUCE_BYTES = 6
# torch's AdamW, which megatron-core takes where apex and Transformer Engine are not, has all square roots at once.
FOREACH_ADAM_BYTES = 4
# ZeRO 1 and 2 keep Muon's momentum twice in the gradients' bf16: the last step's and the one that is being made. ZeRO 3
# gathers as many elements as a bucket has, of gradients and of the momentum, through a buffer.
MUON_STAGED, MUON_GATHERED = 4, 6
KAHAN_BYTES = 16  # mean, square and their gradient; then mean, square, weight and its exact form
# --- ---


def moments(cell: Cell, spec: ModelSpec, batch: int, zero: ZeroSizes) -> tuple[tuple[Moment, ...], tuple[Term, ...]]:
    """The moments of a step on the worst rank, and the host's terms."""
    if cell.engine == "megatron":
        stages = [tuple(_megatron(rank)) for rank in _stages(cell, spec, batch)]
        return max(stages, key=lambda stage: max(phase.bytes for phase in stage)), ()
    method, counts = cell.letters, weights(spec, cell)
    if cell.tp > 1:  # norms, which are whole on each rank, are less than a ten-thousandth
        divided = {name: count // cell.tp for name, count in vars(counts).items()}
        counts = replace(counts, **divided)
    rank = Rank(
        cell=cell, spec=spec, method=method, counts=counts, batch=batch,
        kinds=layer_bytes(cell, spec, batch), zero=zero,
    )  # fmt: skip
    if cell.engine == "fsdp2":
        return tuple(_fsdp2(rank)), (*_host(rank), *_activations(rank))
    if cell.engine == "ddp":
        return tuple(_ddp(rank)), (*_paged(rank), *_activations(rank))
    return tuple(_deepspeed(rank)), (*_host(rank), *_activations(rank))


def _deepspeed(rank: Rank) -> Iterator[Moment]:
    """The moments of the method's stage of ZeRO."""
    return {0: _plain, 3: _zero_3}.get(rank.method.zero, _zero_2)(rank)


def _plain(rank: Rank) -> Iterator[Moment]:
    """No ZeRO and no bf16 section: a bf16 model, bf16 states, gradients made anew each step."""
    trainable = rank.counts.trainable
    held = with_bf16_states(rank)
    yield from with_new_gradients(rank, held)
    gradients = product("gradients", rank.trained_bytes, trainable, "trainable")
    flat = PLAIN_REDUCE_BYTES if rank.trained_bytes == 2 else 4  # what is fp32 already has no copy
    bucket = min(trainable, PLAIN_BUCKET + rank.counts.largest_trainable)
    yield Moment("reduction", (*held, gradients, product("buckets", flat, bucket, "elements, flat and fp32")))
    if update := rank.muon(rank.trained_bytes):
        yield Moment("optimizer step", (*held, gradients, *update))


def _zero_2(rank: Rank) -> Iterator[Moment]:
    """ZeRO 1 and 2: stage_1_and_2.py. With overlap_comm both drop the gradients of others as buckets are reduced. What
    a bucket has for one rank is reduced where it lies; only one that several ranks have a part of is copied."""
    counts, ranks, offload = rank.counts, rank.ranks, rank.method.offload
    trainable = counts.trainable
    held = [*whole_parameters(rank), *libraries(rank)]
    if offload:
        held.append(product("offload buffer", 2, counts.largest_trainable, "elements of the largest tensor"))
    else:
        held += rank.states(STATES_FP32, ranks, master=MASTER, momentum=MUON_STAGED)
    buckets = product("buckets", 2 * OVERLAP_BUCKETS, rank.zero.reduce_bucket, f"elements of {OVERLAP_BUCKETS} buckets")
    copied = min(trainable, rank.zero.reduce_bucket) if ranks > 1 else 0
    copy = product("reduction copy", 2, copied, "elements of a bucket, flattened")
    own = [] if offload else [product("gradients", 2, trainable, "trainable", ranks)]
    before, meanwhile, after = _accumulated(rank)
    arriving = product("newest gradient", 2, counts.largest_trainable, "elements of the largest tensor")
    norm = []
    if offload:
        part = min(counts.largest_trainable, -(-trainable // ranks))
        norm.append(product("norm", NORM_BYTES, part, "elements of the largest tensor"))
    yield rank.loss([*held, *before])
    # the buckets are taken when the first gradient comes: with prompt tuning at the very end
    yield rank.last_layer([*held, *before, *([buckets] if counts.layer_trainable else [])])
    if (gone := _layers_in_bucket(rank)) is None:  # one bucket, reduced after the backward pass
        yield rank.first_layer([*held, *before, buckets, arriving])
        largest = max(([copy], own, norm), key=lambda terms: sum(term.bytes for term in terms))
        yield Moment("reduction", (*held, *after, buckets, *largest))
    else:
        aside = [*_aside(rank), *norm]
        yield rank.last_layer([*held, *meanwhile, *own, buckets, *aside], "first reduction", gone)
        if ranks > 1:
            shared = max(gone, _layers_of(rank, -(-trainable // ranks)))  # the last rank's
            yield rank.last_layer([*held, *meanwhile, *own, buckets, copy], "reduction for two ranks", shared)
        always = [copy] if trainable < ranks * rank.zero.reduce_bucket else []
        yield rank.first_layer([*held, *after, *own, buckets, *always, arriving])
        yield Moment("last reduction", (*held, *after, *own, buckets, *aside))
    if update := rank.muon(2):
        made = product("Muon's updates", 2, rank.matrices, "elements of layers' matrices", ranks)
        yield Moment("Muon's updates", (*held, *own, buckets, made, *update))
    if not offload:
        step = product("optimizer temporaries", 6, trainable, "trainable: a flat bf16 copy, fp32 gradients", ranks)
        yield Moment("optimizer step", (*held, *own, step))


def _accumulated(rank: Rank) -> tuple[list[Term], list[Term], list[Term]]:
    """Gradients of earlier micro batches with ZeRO 1 and 2: until the first bucket is full, while others are filled,
    and in the end. ZeRO 2 has its part, and makes a new one in each micro batch; ZeRO 1 passes all of them through the
    buckets in the last."""
    trainable = rank.counts.trainable
    if not rank.accumulates or (rank.method.offload and rank.method.zero == 2):
        return [], [], []
    if rank.method.zero == 2:
        kept = [product("accumulated gradients", 2, trainable, "trainable", rank.ranks)]
        return kept, kept, kept
    rest = max(0, trainable - rank.zero.reduce_bucket)
    return (
        [product("accumulated gradients", 2, trainable, "trainable, until the last micro batch")],
        [product("accumulated gradients", 2, rest, "trainable that no bucket has had")],
        [],
    )


def _aside(rank: Rank) -> list[Term]:
    """What lies in no bucket: a gradient that is larger than one, and the head's where the embeddings add to it."""
    counts = rank.counts
    tied = rank.spec.tied and not rank.method.adapter
    if counts.largest_trainable <= rank.zero.reduce_bucket and not tied:
        return []
    return [product("largest gradient", 2, counts.largest_trainable, "elements, in no bucket")]


def _zero_3(rank: Rank) -> Iterator[Moment]:
    """ZeRO 3: stage3.py. One rank gathers nothing: its parameters are views, unless they come from the host."""
    counts, ranks, offload = rank.counts, rank.ranks, rank.method.offload
    trainable = counts.trainable
    bucket = product("buckets", 2, rank.zero.reduce_bucket, "elements of the bucket")
    held = [bucket, *libraries(rank), *reference(rank, ranks)]
    if not rank.method.offloads_parameters:
        held += [*four_bit(rank, ranks), product("parameters", 2, counts.frozen + trainable, "parameters", ranks)]
    if not offload:
        held += [
            *rank.states(STATES_FP32, ranks, master=MASTER, momentum=2),
            product("gradients", 2, trainable, "trainable", ranks),
        ]
    gathers = ranks > 1 or rank.method.offloads_parameters
    live = [_live(rank)] if gathers else []
    few = [product("gathered parameters", 2, counts.embedding, "of the embeddings")] if gathers else []
    # what is larger than a bucket is alone in it, and not copied
    copied = max(min(trainable, rank.zero.reduce_bucket), counts.largest_trainable)
    reduced = [product("reduction copy", 2, copied, "elements of a bucket, interleaved")]
    if offload:  # one gradient after another comes back from the host for it
        part = -(-counts.largest_trainable // ranks)
        reduced.append(product("returning gradient", 2, part, "elements of the largest tensor's part"))
        reduced.append(product("norm", NORM_BYTES, min(part, NORM_ELEMENTS), "elements of it"))
    arriving = product("newest gradient", 2, counts.largest_trainable, "elements of the largest tensor")
    yield rank.loss([*held, *live])
    yield rank.last_layer([*held, *live])
    if (gone := _layers_in_bucket(rank)) is not None:
        yield rank.last_layer([*held, *live, *reduced], "first reduction", gone)
    yield rank.first_layer([*held, *live, arriving])
    yield Moment("last reduction", (*held, *few, *reduced))
    if update := rank.muon(2):
        gathered = product(
            "Muon's updates",
            2 if ranks == 1 else MUON_GATHERED,
            min(rank.matrices, rank.zero.reduce_bucket),
            "elements of a bucket",
        )
        yield Moment("Muon's updates", (*held, gathered, *update))
    if not offload:
        group = min(-(-trainable // ranks), rank.zero.sub_group + -(-counts.largest_trainable // ranks))
        step = product("optimizer temporaries", 6, group, "elements of a sub-group: a flat bf16 copy, fp32 gradients")
        yield Moment("optimizer step", (*held, step))


def _live(rank: Rank) -> Term:
    """What ZeRO 3 has gathered at most in either pass; the head, however large."""
    counts = rank.counts
    over = OVER_LIVE if rank.ranks > 1 else 0
    elements = min(counts.total - counts.four_bit, max(rank.zero.max_live + over, counts.embedding))
    return product("gathered parameters", 2, elements, "live parameters")


def _layers_in_bucket(rank: Rank) -> int | None:
    """How many whole layers' gradients fill the first bucket, after the head's; None when they all do not."""
    counts = rank.counts
    if counts.trainable <= rank.zero.reduce_bucket or not counts.layer_trainable:
        return None
    return _layers_of(rank, rank.zero.reduce_bucket)


def _layers_of(rank: Rank, gradients: int) -> int:
    """How many whole layers are among the first of the gradients, after the head's."""
    counts = rank.counts
    head = 0 if rank.method.adapter or rank.spec.tied else counts.embedding
    return min(rank.layers - 1, max(0, gradients - head) // counts.layer_trainable)


def _ddp(rank: Rank) -> Iterator[Moment]:
    """Like DeepSpeed without ZeRO, but gradients are views of buckets, which stay; alone there are none."""
    trainable = rank.counts.trainable
    held = with_bf16_states(rank)
    if rank.ranks == 1:
        yield from with_new_gradients(rank, held)
        gradients = product("gradients", rank.trained_bytes, trainable, "trainable")
        yield Moment("optimizer step", (*held, gradients, *rank.muon(rank.trained_bytes)))
        return
    held.append(product("gradients", rank.trained_bytes, trainable, "trainable, as buckets"))
    yield rank.loss(held)
    yield rank.last_layer(
        [
            *held,
            product("newest gradient", rank.trained_bytes, rank.counts.largest_trainable, "elements, on its way"),
        ]
    )
    if update := rank.muon(rank.trained_bytes):
        yield Moment("optimizer step", (*held, *update))


def _fsdp2(rank: Rank) -> Iterator[Moment]:
    """fully_shard on each layer and on the root, which holds embeddings, last norm and head. What is trained
    is fp32, beside a frozen model bf16; gradients are reduced in fp32. With TP each rank has a part of every
    layer, which is what is sharded and gathered; with HSDP each replica is sharded by itself. With EP a rank gathers
    its own experts alone."""
    counts, ranks, offload = rank.counts, rank.ranks, rank.method.offload
    trainable, root = counts.trainable, (1 if rank.spec.tied else 2) * counts.embedding
    width = _fsdp2_bytes(rank)  # bytes of a trained weight, its gradient and each moment
    everywhere, in_layer = _experts_elsewhere(rank)
    kahan = rank.cell.states == "bf16-kahan"
    # packed, four weights are as large as one of bf16
    whole = counts.total - counts.four_bit * 3 // 4 - everywhere
    layer = counts.layer - counts.four_bit // rank.spec.layers * 3 // 4 - in_layer
    layer_trainable = counts.layer_trainable - in_layer
    held = [*libraries(rank), *four_bit(rank, ranks), *reference(rank, ranks)]
    gradients = []
    if not offload:
        held += [
            product("parameters", width, trainable, "trainable", ranks),
            *([product("frozen parameters", 2, counts.frozen, "frozen", ranks)] if counts.frozen else []),
            *rank.states(2 * width, ranks),
            *([product("remainders", 2, trainable, "trainable, Kahan's", ranks)] if kahan else []),
        ]
        gradients = [product("gradients", width, trainable, "trainable", ranks)]
    if rank.method.zero == 3:  # a layer in use and the next one
        gathered = product("gathered parameters", 2, root + 2 * layer, "of the root and 2 layers")
        fewer = product("gathered parameters", 2, root + layer, "of the root and the next layer")
    else:
        gathered = product("gathered parameters", 2, whole, "parameters, kept for the backward pass")
        fewer = product("gathered parameters", 2, whole - layer, "parameters, without the layer done")
    last = product("gathered parameters", 2, root + layer, "of the root and a layer")
    before = gradients if rank.accumulates else []
    root_trains = 0 if rank.method.adapter else root
    own = product("layer's gradients", 2, layer_trainable, "trainable of a layer, not yet divided")
    reduced = product("buckets", 4, layer_trainable, "trainable of a layer, fp32, to be reduced")
    if rank.cell.states != "fp32":  # an fp32 gradient is where it was reduced to
        into = 4 + 4 / ranks
        reduced = product("buckets", into, layer_trainable, "trainable of a layer, fp32, to be reduced and reduced")
    head = product(
        "head's gradient", 2, min(root_trains, counts.embedding), "elements, kept until the root's are reduced"
    )
    yield rank.loss([*held, *before, gathered])
    yield rank.last_layer([*held, *before, gathered, own, head])
    remaining = rank.activations(rank.layers - 1, outside=False)
    yield Moment("first reduction", (*held, *before, fewer, own, reduced, head, remaining))
    reached = [] if offload else [product("gradients", width, trainable - root_trains, "trainable but the root", ranks)]
    yield rank.first_layer([*held, *(before or reached), last, own, reduced, head])
    roots = product("buckets", 6, root_trains, "elements of the root: bf16 gradients, fp32 to be reduced")
    yield Moment("last reduction", (*held, *gradients, roots))
    part = min(-(-counts.largest_trainable // ranks), KAHAN_CHUNK)
    wide = [product("Kahan's sum", KAHAN_BYTES, part, "elements at a time, fp32")] if kahan else []
    yield Moment("optimizer step", (*held, *gradients, *rank.muon(width), *wide))


def _experts_elsewhere(rank: Rank) -> tuple[int, int]:
    """How many parameters of experts other ranks of an expert-parallel group have, which this one never gathers: of all
    layers, and of the one that has most."""
    hidden, away = rank.spec.hidden, []
    for kind in rank.spec.kinds:
        mlp, here = kind.mlp, kind.mlp.experts // rank.cell.ep
        own = 0
        if mlp.experts > 1:
            own = sum(count(hidden, mlp.experts) - count(hidden, here) for count in (mlp.weights, mlp.others))
        away.append((kind.count * own, own))
    return sum(every for every, _ in away), max(own for _, own in away)


def _fsdp2_bytes(rank: Rank) -> int:
    return rank.trained_bytes if rank.method.adapter or rank.cell.states != "fp32" else 4


def _megatron(rank: Rank) -> Iterator[Moment]:
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
    yield Moment("optimizer step", (*held, roots))


def _stages(cell: Cell, spec: ModelSpec, batch: int) -> Iterator[Rank]:
    """The first and the last rank of a pipeline; without one they are the same. All layers are of one kind."""
    method = cell.letters
    whole = weights(spec, cell)
    layers = spec.layers // cell.pp
    kinds = tuple(replace(kind, count=layers) for kind in layer_bytes(cell, spec, batch))
    for first, last in {(True, cell.pp == 1), (cell.pp == 1, True)}:
        parameters = (layers * whole.layer + (first + last) * whole.embedding) // cell.tp
        counts = replace(whole, trainable=parameters, largest_trainable=whole.largest_trainable // cell.tp)
        in_flight = min(cell.pp, cell.grad_accum) if first else 1
        yield Rank(
            cell=cell, spec=spec, method=method, counts=counts, batch=batch, kinds=kinds, in_flight=in_flight,
            head=last,
        )  # fmt: skip


def _host(rank: Rank) -> Iterator[Term]:
    """What offload keeps on the node, all ranks together. Pinned buffers are rounded up to a power of two by torch."""
    if not rank.method.offload:
        yield from _paged(rank)
        return
    counts, ranks = rank.counts, rank.ranks
    trainable = counts.trainable
    own = -(-trainable // ranks)
    if rank.cell.engine == "fsdp2":
        width, replicas = _fsdp2_bytes(rank), rank.cell.dp_replicate
        trainable *= replicas
        yield product("frozen parameters", 2, replicas * counts.frozen, "frozen")
        yield product("parameters and gradients", 2 * width, trainable, "trainable")
        yield product("optimizer states", 2 * width, trainable, "trainable")
        beyond = replicas * _rounded_up(rank.spec, 2 if rank.method.adapter else width, ranks)
        times = 1 if rank.method.adapter else 2  # frozen parameters; parameters and gradients
        yield Term("rounding", times * beyond, f"{times} x pinned tensors, each to a power of two")
        return
    if rank.method.zero == 3:
        if rank.method.offloads_parameters:
            yield _pinned("parameters", 2, -(-(counts.frozen + trainable) // ranks), ranks)
        yield _pinned("gradients", 2, own, ranks)
        yield product("fp32 gradients", 4, trainable, "trainable, pinned by sub-group")
        yield product("master weights", MASTER, trainable, "trainable")
    else:
        yield _pinned("master weights", MASTER, own, ranks)
        yield _pinned("fp32 gradients", 4, own, ranks)
        yield _pinned("bf16 parameters", 2, own, ranks)
    yield product("optimizer states", STATES_FP32, trainable, "trainable")


def _activations(rank: Rank) -> Iterator[Term]:
    """What --offload-activations keeps on the node, all ranks together, each tensor pinned by itself to a power of two:
    those as wide as the hidden state and those as wide as the MLP."""
    cell, spec = rank.cell, rank.spec
    if not cell.offload_activations:
        return
    kept = beyond = 0.0
    tokens = rank.batch * tokens_in_model(cell)
    widest = max(kind.mlp.width for kind in spec.kinds)
    of_hidden, of_mlp = (_power_of_two(2 * tokens * width) / (2 * tokens * width) for width in (spec.hidden, widest))
    for kind in rank.kinds:
        share = 0.0 if cell.recomputes else min(1.0, 8 * tokens * widest / kind.kept)
        kept += kind.count * kind.kept
        beyond += kind.count * kind.kept * (share * (of_mlp - 1) + (1 - share) * (of_hidden - 1))
    yield Term("activations", round(cell.gpus * kept), f"{cell.gpus} x what {rank.layers} layers keep")
    yield Term("rounding of activations", round(cell.gpus * beyond), "each pinned tensor to a power of two, about")


def _paged(rank: Rank) -> Iterator[Term]:
    """What bitsandbytes pages: on the GPU as far as there is room, which torch does not count, at worst all here."""
    if rank.cell.optim == "paged-adamw-8bit":
        replicas = rank.ranks if rank.cell.engine == "ddp" or not rank.method.zero else 1
        yield product(
            "paged moments", 2, replicas * rank.counts.trainable, "trainable, those that the GPU has no room for"
        )


def _rounded_up(spec: ModelSpec, width: int, ranks: int) -> int:
    """Bytes of all ranks beyond those of the weights, where each rank's part of each is pinned by itself."""
    beyond = 0
    embedding = (1, spec.vocab_size * spec.hidden)
    tensors = [embedding] if spec.tied else [embedding, embedding]
    for kind in spec.kinds:
        tensors.append((kind.mlp.matrices * kind.count * kind.mlp.experts, spec.hidden * kind.mlp.width))
        if isinstance(kind.attention, Attention):
            tensors.append((2 * kind.count, spec.hidden * kind.attention.query_width))
            kv_width = kind.attention.kv_heads * kind.attention.head_dim
            tensors.append((kind.attention.kv_projections * kind.count, spec.hidden * kv_width))
    for count, elements in tensors:
        own = width * -(-elements // ranks)
        beyond += count * ranks * (_power_of_two(own) - own)
    return beyond


def _power_of_two(size: int) -> int:
    """The smallest that is not below it."""
    return 1 << (max(1, size) - 1).bit_length()


def _pinned(name: str, coefficient: int, count: int, ranks: int) -> Term:
    return Term(
        name,
        ranks * _power_of_two(coefficient * count),
        f"{ranks} ranks x {coefficient} B x {count:,}, pinned: to a power of two",
    )
