"""The parameters of a cell by kind, the model FLOPs of a token that follow from them, and the share of the
device's peak that a speed is: MFU and HFU. Pure.

Parameters are frozen and quantized as the trials build them: Q and QL quantize the linear layers of the decoder and
leave embeddings, norms and head in 16 bits; LoRA sits on the linear layers of seven names (`LORA_TARGETS`), prompt
tuning before the first token.

FLOPs are counted of matrix products and attention's two batched products, a multiply-add as 2. Attention counts the
full s x s square although it is causal, as PaLM (appendix B) and llm-foundry do, so that numbers can be laid beside
theirs. Not counted: norms, softmax, rotations, the loss, the embedding's look-up, dequantization, the optimizer.
docs/training.md ("Model FLOPs, MFU and HFU") derives the terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from backends.decoder import Attention, LatentAttention, Layers, Mlp, ModelSpec
from training_probe.grid import LORA_RANK, PROMPT_TOKENS, Cell, Method

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

# What LoRA adapts, by the names that transformers has for linear layers; and the model types whose gate and up are one
# linear layer with another name.
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GATE_WITH_UP = ("glm4",)

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


def attention_linears(attention: Attention | LatentAttention, hidden: int) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the linear layers of one layer's attention, by the names that transformers has for them."""
    query = (hidden, attention.query_width)
    if isinstance(attention, Attention):
        kv = (hidden, attention.kv_values // 2)
        return {"q_proj": query, "k_proj": kv, "v_proj": kv, "o_proj": (attention.query_width, hidden)}
    rank = attention.q_rank
    queries = {"q_proj": query}
    if rank is not None:
        queries = {"q_a_proj": (hidden, rank), "q_b_proj": (rank, attention.query_width)}
    return {
        **queries,
        "kv_a_proj_with_mqa": (hidden, attention.kv_rank + attention.rope),
        "kv_b_proj": (attention.kv_rank, attention.heads * (attention.nope + attention.value)),
        "o_proj": (attention.heads * attention.value, hidden),
    }


def mlp_linears(spec: ModelSpec, mlp: Mlp) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the linear layers of one layer's MLP; of a mixture those of the expert that all tokens
    share, since the other experts are one tensor and no linear layers."""
    width = mlp.width if mlp.experts == 1 else mlp.shared
    down = {"down_proj": (width, spec.hidden)}
    if not width:
        return {}
    if spec.model_type in GATE_WITH_UP:
        return {"gate_up_proj": (spec.hidden, 2 * width), **down}
    return {"gate_proj": (spec.hidden, width), "up_proj": (spec.hidden, width), **down}


def adapted_linears(spec: ModelSpec, kind: Layers) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers of such a layer that LoRA adapts: those with one of the seven names."""
    linears = {**attention_linears(kind.attention, spec.hidden), **mlp_linears(spec, kind.mlp)}
    return [sizes for name, sizes in linears.items() if name in LORA_TARGETS]


def weights(spec: ModelSpec, method: Method) -> Weights:
    """The counts of the model as this method trains it."""
    table = spec.vocab_size * spec.hidden
    layers = [_layer_weights(spec, kind, method) for kind in spec.kinds]
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


def _layer_weights(spec: ModelSpec, kind: Layers, method: Method) -> _LayerWeights:
    mlp, attention = kind.mlp, kind.attention
    parameters = kind.parameters(spec.hidden, spec.norm_values, mlp.experts)
    linears = [*attention_linears(attention, spec.hidden).values(), *mlp_linears(spec, mlp).values()]
    four_bit = sum(inputs * outputs for inputs, outputs in linears) if method.four_bit else 0
    lora = 0
    if method.adapter in ("L", "QL"):
        lora = sum(LORA_RANK * (inputs + outputs) for inputs, outputs in adapted_linears(spec, kind))
    # of a mixture, gate and up of all experts are one tensor
    largest = max(inputs * outputs for inputs, outputs in linears)
    if mlp.experts > 1:
        largest = max(largest, 2 * mlp.experts * spec.hidden * mlp.width)
    trains = parameters
    if method.adapter:
        trains, largest = lora, LORA_RANK * max(spec.hidden, attention.query_width, mlp.width, mlp.shared)
    elif method.quantized:
        trains, largest = kind.norms * spec.norm_values * spec.hidden, 0
    return _LayerWeights(parameters=parameters, four_bit=four_bit, lora=lora, trains=trains, largest=largest)


# FLOPs.


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs per token of the data. recomputed: forward work that is done twice, which no model needs."""

    forward: float
    backward: float
    recomputed: float

    @property
    def model(self) -> float:
        """What MFU counts."""
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        """What HFU counts."""
        return self.model + self.recomputed


def flops_per_token(cell: Cell, spec: ModelSpec) -> Flops:
    """Forward, backward and recomputed FLOPs per token, over all GPUs that share its work.

    With M matmul parameters that a token passes through (adapters too, active experts only), T of them trainable, and
    attention's a = 4 L s h: forward 2M + a; backward 2M (gradients of inputs) + 2T (of weights) + 2a. Full training has
    T = M, so 6M + 3a. h: the width of all heads; with latent attention 2h is that of keys and values together. What a
    window would spare is not taken off: no kernel that is used here leaves it out.
    """
    method = cell.letters
    counts = weights(spec, method)
    length = cell.seq_len + (PROMPT_TOKENS if method.adapter == "PT" else 0)
    longer = length / cell.seq_len  # virtual tokens pass through the model and are no tokens of the data

    lora = counts.adapter if method.adapter in ("L", "QL") else 0
    in_layers = sum(kind.count * _layer_parameters(spec, kind) for kind in spec.kinds) + lora
    head = spec.vocab_size * spec.hidden
    trained = lora if method.adapter else head if method.quantized else in_layers + head
    attention = float(length * sum(kind.count * kind.attention.pair_flops for kind in spec.kinds))

    repeated = {
        "none": 0.0, "full": 2.0 * (in_layers - _not_repeated(cell, spec)) + attention,
        "selective": attention if method.flash else attention / 2,
    }[method.recompute]  # fmt: skip
    return Flops(
        forward=longer * (2.0 * (in_layers + head) + attention),
        backward=longer * (2.0 * (in_layers + head) + 2.0 * trained + 2.0 * attention),
        recomputed=longer * repeated,
    )


def mfu(cell: Cell, spec: ModelSpec, tokens_per_s: float, device_name: str) -> float | None:
    """Model FLOPs utilization, a ratio: tokens_per_s is of all GPUs together. None where the peak is not known."""
    return _utilization(flops_per_token(cell, spec).model, cell, tokens_per_s, device_name)


def hfu(cell: Cell, spec: ModelSpec, tokens_per_s: float, device_name: str) -> float | None:
    """Hardware FLOPs utilization, a ratio: recomputed work counts too. None where the peak is not known."""
    return _utilization(flops_per_token(cell, spec).hardware, cell, tokens_per_s, device_name)


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


def _utilization(flops: float, cell: Cell, tokens_per_s: float, device_name: str) -> float | None:
    peak = None if cell.device == "cpu" else peak_flops(device_name)
    return None if peak is None else flops * tokens_per_s / (cell.gpus * peak)


def _not_repeated(cell: Cell, spec: ModelSpec) -> int:
    """Parameters whose product recomputed layers leave out: torch.utils.checkpoint stops once it has what the backward
    pass needs, which of an MLP's last product is what goes in. With LoRA it is also what comes out; with experts the
    routing needs that, and a norm behind the MLP does; Megatron has its own checkpoint; a compiled layer is one
    piece."""
    if cell.engine == "megatron" or cell.compile or cell.letters.adapter in ("L", "QL"):
        return 0
    plain = [kind for kind in spec.kinds if kind.mlp.experts == 1 and kind.norms == 2]
    return sum(kind.count * spec.hidden * kind.mlp.width for kind in plain)


def _layer_parameters(spec: ModelSpec, kind: Layers) -> int:
    """Matmul parameters of one layer that a token passes through."""
    mlp = kind.mlp
    router = spec.hidden * (mlp.experts + mlp.shared_gate) if mlp.experts > 1 else 0
    return kind.attention.weights(spec.hidden) + mlp.weights(spec.hidden, mlp.active) + router
