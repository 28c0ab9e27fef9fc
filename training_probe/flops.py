"""The parameters of a cell by kind, the model FLOPs of a token that follow from them, and the share of the
device's peak that a speed is: MFU and HFU. Pure.

Parameters are frozen and quantized as the trials build them: Q and QL quantize the linear layers of the decoder and
leave embeddings, norms and head in 16 bits; LoRA sits on all seven linear layers, prompt tuning before the first token.

FLOPs are counted of matrix products and attention's two batched products, a multiply-add as 2. Attention counts the
full s x s square although it is causal, as PaLM (appendix B) and llm-foundry do, so that numbers can be laid beside
theirs. Not counted: norms, softmax, rotations, the loss, the embedding's look-up, dequantization, the optimizer.
docs/training.md ("Model FLOPs, MFU and HFU") derives the terms.
"""

from __future__ import annotations

from dataclasses import dataclass

from training_probe.grid import LORA_RANK, PROMPT_TOKENS, Cell, Method
from training_probe.llama_shape import LlamaShape

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


def attention_linears(spec: LlamaShape) -> list[tuple[int, int]]:
    """(inputs, outputs) of q, k, v and o of one layer."""
    kv = spec.kv_heads * spec.head_dim
    return [(spec.hidden, spec.query_width), (spec.hidden, kv), (spec.hidden, kv), (spec.query_width, spec.hidden)]


def mlp_linears(spec: LlamaShape) -> list[tuple[int, int]]:
    """(inputs, outputs) of gate, up and down of one expert."""
    wide = spec.intermediate
    return [(spec.hidden, wide), (spec.hidden, wide), (wide, spec.hidden)]


def adapted_linears(spec: LlamaShape) -> list[tuple[int, int]]:
    """The linear layers of one decoder layer that LoRA adapts: all seven; of a mixture of experts those of attention,
    since its experts are one tensor and no linear layers."""
    return attention_linears(spec) + (mlp_linears(spec) if spec.experts == 1 else [])


def weights(spec: LlamaShape, method: Method) -> Weights:
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


def flops_per_token(cell: Cell, spec: LlamaShape) -> Flops:
    """Forward, backward and recomputed FLOPs per token, over all GPUs that share its work.

    With M matmul parameters that a token passes through (adapters too, active experts only), T of them trainable, and
    attention's a = 4 L s h: forward 2M + a; backward 2M (gradients of inputs) + 2T (of weights) + 2a. Full training has
    T = M, so 6M + 3a. h: the width of all heads.
    """
    method = cell.letters
    counts = weights(spec, method)
    length = cell.seq_len + (PROMPT_TOKENS if method.adapter == "PT" else 0)
    longer = length / cell.seq_len  # virtual tokens pass through the model and are no tokens of the data

    lora = counts.adapter if method.adapter in ("L", "QL") else 0
    in_layers = spec.layers * _layer_parameters(spec) + lora
    head = spec.vocab_size * spec.hidden
    trained = lora if method.adapter else head if method.quantized else in_layers + head
    attention = 4.0 * spec.layers * length * spec.query_width

    repeated = {
        "none": 0.0, "full": 2.0 * (in_layers - _not_repeated(cell, spec)) + attention,
        "selective": attention if method.flash else attention / 2,
    }[method.recompute]  # fmt: skip
    return Flops(
        forward=longer * (2.0 * (in_layers + head) + attention),
        backward=longer * (2.0 * (in_layers + head) + 2.0 * trained + 2.0 * attention),
        recomputed=longer * repeated,
    )


def mfu(cell: Cell, spec: LlamaShape, tokens_per_s: float, device_name: str) -> float | None:
    """Model FLOPs utilization, a ratio: tokens_per_s is of all GPUs together. None where the peak is not known."""
    return _utilization(flops_per_token(cell, spec).model, cell, tokens_per_s, device_name)


def hfu(cell: Cell, spec: LlamaShape, tokens_per_s: float, device_name: str) -> float | None:
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


def _not_repeated(cell: Cell, spec: LlamaShape) -> int:
    """Parameters whose product recomputed layers leave out: torch.utils.checkpoint stops once it has what the backward
    pass needs, which of an MLP's last product is what goes in. With LoRA it is also what comes out, with experts the
    routing needs that; Megatron has its own checkpoint; a compiled layer is one piece."""
    if cell.engine == "megatron" or cell.compile or cell.letters.adapter in ("L", "QL") or spec.experts > 1:
        return 0
    return spec.layers * spec.hidden * spec.intermediate


def _layer_parameters(spec: LlamaShape) -> int:
    """Matmul parameters of one layer that a token passes through."""
    attention = sum(inputs * outputs for inputs, outputs in attention_linears(spec))
    expert = sum(inputs * outputs for inputs, outputs in mlp_linears(spec))
    router = spec.hidden * spec.experts if spec.experts > 1 else 0
    return attention + spec.active_experts * expert + router
