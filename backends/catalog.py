"""Facts about models, as their published config.json files state them; what follows from those is derived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
# CUDA context, activations of a prefill, captured graphs, communication buffers: on each GPU beside weights and KV.
RESERVED_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder of the Llama family: RMSNorm, rotary positions, grouped-query attention, gated MLP (or a mixture of
    such MLPs), no biases. tied: input and output embeddings are one.

    `hidden` and `intermediate` are widths; `max_position` is the longest sequence, in tokens, that the model was made
    for. A dense model has 1 expert, of which 1 is active. gated: its weights need a licence and a token of the hub.
    """

    name: str
    hf_id: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab_size: int
    max_position: int
    experts: int = 1
    active_experts: int = 1
    tied: bool = False
    aliases: tuple[str, ...] = ()
    gated: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Parameters in memory."""
        return self._parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through."""
        return self._parameters(self.active_experts)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Keys and values of one token over all layers and GPUs."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def tensor_parallel(self, tp: int) -> bool:
        """Whether attention can be split over `tp` GPUs: heads evenly, key-value heads evenly or each on several."""
        return self.heads % tp == 0 and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)

    def serving_bytes(self, dtype: str, tp: int, tokens: int, reserved_bytes: int = RESERVED_BYTES) -> int:
        """Least memory of each of `tp` GPUs that serves one sequence of `tokens`: weights, its KV, what is reserved."""
        kv = tokens * self.kv_bytes_per_token(dtype) // min(tp, self.kv_heads)
        return self.parameters * DTYPE_BYTES[dtype] // tp + kv + reserved_bytes

    def smallest_tp(
        self, dtype: str, tokens: int, gpu_bytes: float, at_most: int = 64, reserved_bytes: int = RESERVED_BYTES
    ) -> int | None:
        """The smallest power of two of GPUs with `gpu_bytes` each (what may be used of them) that can serve it."""
        sizes = (2**power for power in range(at_most.bit_length()) if 2**power <= at_most)
        split = (tp for tp in sizes if self.tensor_parallel(tp))
        return next((tp for tp in split if self.serving_bytes(dtype, tp, tokens, reserved_bytes) <= gpu_bytes), None)

    def _parameters(self, experts: int) -> int:
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv_heads * self.head_dim  # q and o; k and v
        mlp = experts * 3 * self.hidden * self.intermediate  # gate, up, down
        router = self.hidden * self.experts if self.experts > 1 else 0
        norms = 2 * self.hidden
        embeddings = (1 if self.tied else 2) * self.vocab_size * self.hidden  # in and out
        return embeddings + self.layers * (attention + mlp + router + norms) + self.hidden


MODELS = (
    ModelSpec(
        name="llama-2-7b", hf_id="meta-llama/Llama-2-7b-hf", aliases=("7b",), hidden=4096, layers=32, heads=32,
        kv_heads=32, intermediate=11008, vocab_size=32000, max_position=4096, gated=True,
    ),
    ModelSpec(
        name="llama-2-13b", hf_id="meta-llama/Llama-2-13b-hf", aliases=("13b",), hidden=5120, layers=40, heads=40,
        kv_heads=40, intermediate=13824, vocab_size=32000, max_position=4096, gated=True,
    ),
    ModelSpec(
        name="llama-2-70b", hf_id="meta-llama/Llama-2-70b-hf", aliases=("70b",), hidden=8192, layers=80, heads=64,
        kv_heads=8, intermediate=28672, vocab_size=32000, max_position=4096, gated=True,
    ),
    ModelSpec(
        name="llama-3-8b", hf_id="meta-llama/Meta-Llama-3-8B", hidden=4096, layers=32, heads=32,
        kv_heads=8, intermediate=14336, vocab_size=128256, max_position=8192, gated=True,
    ),
    ModelSpec(
        name="llama-3-70b", hf_id="meta-llama/Meta-Llama-3-70B", hidden=8192, layers=80, heads=64,
        kv_heads=8, intermediate=28672, vocab_size=128256, max_position=8192, gated=True,
    ),
    ModelSpec(
        name="mixtral-8x7b", hf_id="mistralai/Mixtral-8x7B-v0.1", hidden=4096, layers=32, heads=32, kv_heads=8,
        intermediate=14336, vocab_size=32000, max_position=32768, experts=8, active_experts=2,
    ),
)  # fmt: skip

_BY_NAME = {name.lower(): model for model in MODELS for name in (model.name, model.hf_id, *model.aliases)}


def find(name: str) -> ModelSpec | None:
    """The model of that name, alias or Hugging Face id, in any case of letters; None when it is not in the catalog."""
    return _BY_NAME.get(name.lower())


# Models whose size is another: quantized weights, mixtures of experts that are not as wide as `intermediate_size`.
_NOT_OURS = (
    "quantization_config", "num_experts", "n_routed_experts", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip


def from_config(name: str, config: Mapping[str, Any]) -> ModelSpec | None:
    """The model of a config.json as transformers writes it; None when it does not say enough, or is no such decoder."""
    if any(config.get(key) for key in _NOT_OURS):
        return None
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        if config.get("head_dim") not in (None, hidden // heads):
            return None
        model = ModelSpec(
            name=name,
            hf_id=name,
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            intermediate=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            max_position=int(config["max_position_embeddings"]),
            experts=int(config.get("num_local_experts") or 1),
            active_experts=int(config.get("num_experts_per_tok") or 1),
            tied=bool(config.get("tie_word_embeddings")),
        )
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    sizes = (model.hidden, model.layers, model.heads, model.kv_heads, model.intermediate, model.vocab_size)
    return model if min(sizes) > 0 and model.experts >= model.active_experts > 0 else None
