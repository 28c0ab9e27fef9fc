"""The parameters of a cell by kind, the model FLOPs of a token that follow from them, and the share of the
device's peak that a speed is: MFU and HFU. Pure.

Parameters are frozen and quantized as the trials build them: Q and QL quantize the linear layers of the decoder and
leave embeddings, norms and head in 16 bits; LoRA sits on the linear layers that the cell names (by default of seven
names, `LORA_TARGETS`), prompt tuning before the first token.

FLOPs are counted of matrix products and attention's two batched products, a multiply-add as 2. Attention counts the
full s x s square although it is causal, as PaLM (appendix B) and llm-foundry do, so that numbers can be laid beside
theirs. Not counted: norms, softmax, rotations, the loss, the embedding's look-up, dequantization, the optimizer.
docs/training.md ("Model FLOPs, MFU and HFU") derives the terms.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from backends.decoder import Attention, LatentAttention, Layers, Mlp, ModelSpec, Recurrent
from training_probe.grid import EXPERTS_ADAPTED, GATE_WITH_UP, OF_EXPERTS, PROMPT_TOKENS, QKV_TOGETHER, Cell
from training_probe.packing import Extent

# Dense bf16 matrix products with fp32 accumulation, FLOP/s, by words of the name that torch and NVML report; the first
# entry that fits counts, so a longer name stands before a shorter one. NVIDIA's datasheets and white papers (GA102
# for the RTX 3090 and A6000, AD102 for the RTX 4090); numbers "with sparsity" are halved.
PEAKS: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("GH200", 989.4e12),
    ("H200 NVL", 835e12),
    ("H200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("H800 PCIe", 756e12),
    ("H800", 989.4e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("A40", 149.7e12),
    ("A10", 125e12),
    ("L4", 121e12),
    ("RTX 6000 Ada", 364.2e12),
    ("RTX A6000", 154.8e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)

# Other dtypes by the same tensor cores, as multiples of bf16's rate, from the same sources; fp16 accumulates in fp32.
OF_BF16 = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5, "int8": 2.0, "fp8": 2.0}
INT8_OF_BF16 = {"RTX 4090": 4.0, "RTX 3090": 4.0}  # their bf16 is halved by fp32 accumulation
WITHOUT_FP8 = {"A100", "A800", "A40", "A10", "RTX A6000", "RTX 3090"}

OTHER_CHIPS = {"mig", "laptop", "ti", "d"}  # words that make it a slower or faster one than the name before them


# Parameters.


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Parameter counts. `trainable` contains `adapter`; frozen + four_bit + trainable is everything in memory.

    layer: of one decoder layer with its adapters, the largest kind. layer_trainable: those of a layer that train, at
    most. embedding: one of the two tables. largest_trainable: the largest tensor with a gradient.
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


def attention_linears(attention: Attention | LatentAttention | Recurrent, hidden: int) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the linear layers of one layer's attention, by the names that transformers has for them."""
    if isinstance(attention, Recurrent):  # its projections of the hidden state as one
        own = {"in_proj": (hidden, attention.inputs), "out_proj": (attention.inner, hidden)}
        return own if attention.heads else {}
    if isinstance(attention, Attention):
        kv = (hidden, attention.kv_heads * attention.head_dim)
        names = ("k_proj", "v_proj")[: attention.kv_projections]
        query = (hidden, attention.query_width * (1 + attention.gated))
        return {"q_proj": query, **dict.fromkeys(names, kv), "o_proj": (attention.query_width, hidden)}
    query = (hidden, attention.query_width)
    rank = attention.q_rank
    queries = {"q_proj": query}
    if rank is not None:
        queries = {"q_a_proj": (hidden, rank), "q_b_proj": (rank, attention.query_width)}
    return {
        **queries,
        "kv_a_proj_with_mqa": (hidden, attention.kv_rank + attention.rope),
        "kv_b_proj": (attention.kv_rank, attention.heads * (attention.nope + attention.value)),
        **_indexer_linears(attention, hidden),
        "o_proj": (attention.heads * attention.value, hidden),
    }


def _indexer_linears(attention: LatentAttention, hidden: int) -> dict[str, tuple[int, int]]:
    heads, width = attention.index_heads, attention.index_width
    if not heads:
        return {}
    return {"wq_b": (attention.q_rank or hidden, heads * width), "wk": (hidden, width), "weights_proj": (hidden, heads)}


def mlp_linears(spec: ModelSpec, mlp: Mlp) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the linear layers of one layer's MLP; of a mixture those of the expert that all tokens
    share, since the other experts are one tensor and no linear layers."""
    width = mlp.width if mlp.experts == 1 else mlp.shared
    down = {"down_proj": (width, spec.hidden)}
    if not width:
        return {}
    if spec.model_type in GATE_WITH_UP:
        return {"gate_up_proj": (spec.hidden, 2 * width), **down}
    if not mlp.gated:
        return {"up_proj": (spec.hidden, width), **down}
    return {"gate_proj": (spec.hidden, width), "up_proj": (spec.hidden, width), **down}


def layer_linears(spec: ModelSpec, kind: Layers) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the linear layers of one such layer, attention's first, in the order of their products."""
    return {**attention_linears(kind.attention, spec.hidden), **mlp_linears(spec, kind.mlp)}


def adapted_linears(cell: Cell, spec: ModelSpec, kind: Layers) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the linear layers of such a layer that the cell's LoRA adapts, by their names; none without
    LoRA."""
    if not cell.letters.has_lora:
        return {}
    linears = layer_linears(spec, kind)
    if spec.model_type in QKV_TOGETHER:
        separate = [linears.pop(name) for name in ("q_proj", "k_proj", "v_proj")]
        linears = {"qkv_proj": (spec.hidden, sum(outputs for _, outputs in separate)), **linears}
    left = OF_EXPERTS if spec.model_type in EXPERTS_ADAPTED else set()
    return {name: sizes for name, sizes in linears.items() if name in cell.adapts and name not in left}


def expert_lora(cell: Cell, spec: ModelSpec, kind: Layers) -> dict[str, int]:
    """Parameters of LoRA on one expert of such a layer, by the two tensors of all experts that PEFT adapts: gate and up
    as one with twice the rank."""
    if not cell.letters.has_lora or spec.model_type not in EXPERTS_ADAPTED or kind.mlp.experts == 1:
        return {}
    width, rank, found = kind.mlp.width, cell.lora_rank, {}
    if "gate_proj" in cell.adapts:
        found["gate_up_proj"] = 2 * rank * (spec.hidden + 2 * width)
    if "down_proj" in cell.adapts:
        found["down_proj"] = rank * (width + spec.hidden)
    return found


@functools.lru_cache(maxsize=256)
def weights(spec: ModelSpec, cell: Cell) -> Weights:
    """The counts of the model as this cell trains it, computed once."""
    method, table = cell.letters, spec.vocab_size * spec.hidden
    layers = [_layer_weights(spec, kind, cell) for kind in spec.kinds]
    counts = [kind.count for kind in spec.kinds]
    base = spec.parameters
    four_bit = sum(count * each.four_bit for count, each in zip(counts, layers, strict=True))
    lora = sum(count * each.lora for count, each in zip(counts, layers, strict=True))
    largest = max(each.largest for each in layers)
    adapter, trainable = 0, base - four_bit
    if method.adapter:
        adapter = trainable = PROMPT_TOKENS * spec.hidden if method.adapter == "PT" else lora
    return Weights(
        frozen=base - four_bit if method.adapter else 0, four_bit=four_bit, trainable=trainable, adapter=adapter,
        layer=max(each.parameters + each.lora for each in layers), layer_trainable=max(each.trains for each in layers),
        embedding=table,
        largest_trainable=adapter if method.adapter == "PT" else largest if method.adapter else max(table, largest),
    )  # fmt: skip


class _LayerWeights(NamedTuple):
    """Parameter counts of one layer, without adapters, and of its LoRA. largest: of its largest tensor that trains."""

    parameters: int
    four_bit: int
    lora: int
    trains: int
    largest: int


def _layer_weights(spec: ModelSpec, kind: Layers, cell: Cell) -> _LayerWeights:
    mlp, method = kind.mlp, cell.letters
    parameters = kind.parameters(spec.hidden, spec.norm_values, mlp.experts)
    linears = layer_linears(spec, kind).values()
    four_bit = sum(inputs * outputs for inputs, outputs in linears) if method.four_bit else 0
    adapted = adapted_linears(cell, spec, kind).values()
    of_experts = mlp.experts * sum(expert_lora(cell, spec, kind).values())
    lora = sum(cell.lora_rank * (inputs + outputs) + cell.dora * outputs for inputs, outputs in adapted) + of_experts
    # of a mixture, gate and up of all experts are one tensor
    largest = max((inputs * outputs for inputs, outputs in linears), default=0)
    if mlp.experts > 1:
        largest = max(largest, 2 * mlp.experts * spec.hidden * mlp.width)
    trains = parameters
    if method.adapter:
        trains, largest = lora, cell.lora_rank * max((max(sizes) for sizes in adapted), default=0)
        if of_experts:  # the outer one of gate and up, of all experts
            largest = max(largest, 2 * cell.lora_rank * mlp.experts * max(spec.hidden, 2 * mlp.width))
    elif method.quantized:
        trains, largest = kind.norms * spec.norm_values * spec.hidden, 0
    return _LayerWeights(parameters=parameters, four_bit=four_bit, lora=lora, trains=trains, largest=largest)


# FLOPs.


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs per token of the data. recomputed: forward work that is done twice, which no model needs. padding: all that
    is done beyond what the tokens need. reference: the forward pass of a frozen model beside the policy."""

    forward: float
    backward: float
    recomputed: float
    padding: float = 0.0
    reference: float = 0.0

    @property
    def model(self) -> float:
        """What MFU counts."""
        return self.forward + self.backward + self.reference

    @property
    def hardware(self) -> float:
        """What HFU counts."""
        return self.model + self.recomputed + self.padding


@functools.lru_cache(maxsize=256)
def flops_per_token(cell: Cell, spec: ModelSpec) -> Flops:
    """Forward, backward and recomputed FLOPs per token, over all GPUs that share its work.

    With M matmul parameters that a token passes through (adapters too, active experts only), T of them trainable, and
    attention's a = 4 L s h: forward 2M + a; backward 2M (gradients of inputs) + 2T (of weights) + 2a. Full training has
    T = M, so 6M + 3a. h: the width of all heads; with latent attention 2h is that of keys and values together. What a
    window would spare is not taken off: no kernel that is used here leaves it out.
    """
    virtual = PROMPT_TOKENS if cell.letters.adapter == "PT" else 0  # they pass through, and are no tokens of the data
    drawn = cell.drawn
    if drawn is None:
        return _of_extent(cell, spec, Extent((cell.seq_len + virtual) / cell.seq_len, cell.seq_len + virtual))
    needed = _of_extent(cell, spec, drawn.needed(virtual))
    computed = _of_extent(cell, spec, drawn.computed(virtual, by_sequence=cell.letters.flash))
    return replace(needed, recomputed=computed.recomputed, padding=computed.model - needed.model)


def _of_extent(cell: Cell, spec: ModelSpec, extent: Extent) -> Flops:
    method, counts, (longer, length) = cell.letters, weights(spec, cell), extent

    lora = counts.adapter - magnitudes(cell, spec) if method.has_lora else 0
    for kind in spec.kinds:  # a token passes through the active experts alone
        lora -= kind.count * (kind.mlp.experts - kind.mlp.active) * sum(expert_lora(cell, spec, kind).values())
    in_layers = matrix_parameters(spec) + lora
    head = spec.vocab_size * spec.hidden
    trained = lora if method.adapter else head if method.quantized else in_layers + head
    attention = float(length * sum(kind.count * kind.attention.pair_flops for kind in spec.kinds))

    repeated = sum(
        again * _repeated(cell, spec, kind, length)
        for kind, again in zip(spec.kinds, repeating_layers(cell, spec), strict=True)
    )
    if cell.loss == "chunked":
        repeated += 2.0 * head
    norms, again = _dora(cell, spec)
    repeated += again
    return Flops(
        forward=longer * (2.0 * (in_layers + head) + attention) + norms,
        backward=longer * (2.0 * (in_layers + head) + 2.0 * trained + 2.0 * attention),
        recomputed=longer * repeated,
        reference=longer * (2.0 * (in_layers - lora + head) + attention) if cell.has_reference else 0.0,
    )


def utilization(
    cell: Cell, spec: ModelSpec, tokens_per_s: float, device_name: str
) -> tuple[float | None, float | None]:
    """MFU and HFU, ratios. tokens_per_s is of all GPUs together; recomputed work counts in HFU alone. None where the
    peak is not known."""
    peak = None if cell.device == "cpu" else peak_flops(device_name)
    if peak is None:
        return None, None
    work = flops_per_token(cell, spec)
    there = cell.gpus * peak
    return work.model * tokens_per_s / there, work.hardware * tokens_per_s / there


def peak_flops(device_name: str, dtype: str = "bf16") -> float | None:
    """Dense FLOP/s of one device by the name that torch or NVML reports; None for others, MIG slices, CPUs, and dtypes
    that it has no tensor cores for, fp32 among them."""
    words = device_name.lower().replace("-", " ").split()
    if not OTHER_CHIPS.isdisjoint(words):
        return None
    for name, flops in PEAKS:
        wanted = name.lower().split()
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
            return _of_dtype(name, flops, dtype)
    return None


def _of_dtype(name: str, bf16: float, dtype: str) -> float | None:
    if dtype not in OF_BF16 or (dtype == "fp8" and name in WITHOUT_FP8):
        return None
    if dtype == "int8":
        return bf16 * INT8_OF_BF16.get(name, OF_BF16[dtype])
    return bf16 * OF_BF16[dtype]


def repeating_layers(cell: Cell, spec: ModelSpec) -> list[int]:
    """How many layers of each kind compute something twice. Every N-th: as if the kinds stood one after another."""
    if (every := cell.recomputed_every) is None:
        return [kind.count if cell.recomputes else 0 for kind in spec.kinds]
    before, repeating = 0, []
    for kind in spec.kinds:
        repeating.append((before + kind.count) // every - before // every)
        before += kind.count
    return repeating


def products(cell: Cell, spec: ModelSpec, kind: Layers) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of a layer's matrix products, in their order; LoRA's two follow that of their layer. Those with
    a bias are another operator (addmm), and none of these."""
    adapted, biased = adapted_linears(cell, spec, kind), 0
    if isinstance(kind.attention, Attention):
        biased = kind.attention.biased
    sizes: dict[str, tuple[int, int]] = {}
    for number, (name, (inputs, outputs)) in enumerate(layer_linears(spec, kind).items()):
        if number >= biased:
            sizes[name] = (inputs, outputs)
        if name in adapted:
            sizes |= {f"{name}, LoRA A": (inputs, cell.lora_rank), f"{name}, LoRA B": (cell.lora_rank, outputs)}
    return sizes


def kept_products(cell: Cell, spec: ModelSpec, kind: Layers) -> dict[str, tuple[int, int]]:
    """Those that --checkpoint op keeps: the first and every second after it."""
    return dict(list(products(cell, spec, kind).items())[::2])


def _repeated(cell: Cell, spec: ModelSpec, kind: Layers, length: float) -> float:
    """FLOPs per token that a layer which recomputes does twice. Selective recomputation, of eager attention, spares the
    second product. By operator, eager attention is computed again and FlashAttention is kept."""
    attention = float(length * kind.attention.pair_flops)
    if cell.letters.recompute == "selective":
        return attention if cell.letters.flash else attention / 2
    lora = sum(cell.lora_rank * sum(sizes) for sizes in adapted_linears(cell, spec, kind).values())
    again = _layer_parameters(spec, kind) + lora + kind.mlp.active * sum(expert_lora(cell, spec, kind).values())
    if cell.checkpoint != "op":
        return 2.0 * (again - _not_repeated(cell, spec, kind)) + attention
    kept = kept_products(cell, spec, kind)
    again -= sum(inputs * outputs for inputs, outputs in kept.values())
    if "down_proj" not in kept:
        again -= _not_repeated(cell, spec, kind)
    return 2.0 * again + (0.0 if cell.letters.flash else attention)


def _not_repeated(cell: Cell, spec: ModelSpec, kind: Layers) -> int:
    """Parameters whose product a recomputed layer leaves out: torch.utils.checkpoint stops once it has what the
    backward pass needs, which of an MLP's last product is what goes in. With LoRA on it it is also what comes out; with
    experts the routing needs that, and a norm behind the MLP does; Megatron has its own checkpoint; ZeRO 3 of DeepSpeed
    its own linear layers, which keep their inputs after the product; a compiled layer is one piece, but where its
    operators are chosen."""
    own = cell.engine == "megatron" or (cell.engine == "deepspeed" and cell.letters.zero == 3)
    whole = own or (cell.compile and cell.checkpoint != "op")
    if whole or kind.mlp.experts > 1 or kind.norms != 2 or "down_proj" in adapted_linears(cell, spec, kind):
        return 0
    return spec.hidden * kind.mlp.width


def magnitudes(cell: Cell, spec: ModelSpec) -> int:
    """How many DoRA has: one for each output of an adapted layer."""
    adapted = (adapted_linears(cell, spec, kind).values() for kind in spec.kinds)
    sizes = zip(spec.kinds, adapted, strict=True)
    return sum(kind.count * outputs for kind, linears in sizes for _, outputs in linears) if cell.dora else 0


def _dora(cell: Cell, spec: ModelSpec) -> tuple[float, float]:
    """FLOPs per token of the norms of DoRA's weights, which are computed once a micro batch: of the products of its
    matrices; and what comes besides: PEFT multiplies with a unit matrix first, and recomputation does all again."""
    tokens = (cell.micro_batch or 1) * cell.seq_len
    norms = beside = 0.0
    for kind, again in zip(spec.kinds, repeating_layers(cell, spec), strict=True):
        repeated = 0 if cell.letters.recompute == "selective" else again
        for inputs, outputs in adapted_linears(cell, spec, kind).values() if cell.dora else ():
            product, unit = (2.0 * cell.lora_rank * inputs * each / tokens for each in (outputs, inputs))
            norms += kind.count * product
            beside += kind.count * unit + repeated * (product + unit)
    return norms, beside


def matrix_parameters(spec: ModelSpec) -> int:
    """Elements of the matrices of all layers, experts' left out."""
    return sum(kind.count * _layer_parameters(spec, kind) for kind in spec.kinds)


def largest_matrix(cell: Cell, spec: ModelSpec) -> tuple[int, int]:
    """Rows and columns of the largest matrix of a layer that trains."""
    sizes = [size for kind in spec.kinds for size in layer_linears(spec, kind).values()]
    if cell.letters.has_lora:
        adapted = [size for kind in spec.kinds for size in adapted_linears(cell, spec, kind).values()]
        return cell.lora_rank, max((max(size) for size in adapted), default=0)
    return max(sizes, key=lambda size: size[0] * size[1])


def _layer_parameters(spec: ModelSpec, kind: Layers) -> int:
    """Matmul parameters of one layer that a token passes through."""
    mlp = kind.mlp
    router = spec.hidden * (mlp.experts + mlp.shared_gate) if mlp.experts > 1 else 0
    return kind.attention.weights(spec.hidden) + mlp.weights(spec.hidden, mlp.active) + router
