"""Facts about models, as their config.json files state them: those that people serve, and any that a user names.

`from_config` reads a config.json as transformers does, defaults included. What it cannot describe it refuses, with the
field that stopped it: a wrong size would be worse than none.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from backends.decoder import QUANTIZATIONS, Attention, LatentAttention, Layers, Mlp, ModelSpec, Window
from backends.untrusted import printable

DATA = Path(__file__).parent / "data" / "models.json"
MOST = 1 << 40  # of anything that a config.json counts
MOST_LAYERS = 10_000


class UnknownModel(ValueError):
    """A config.json that describes no decoder that is known here. A clause, with the field that stopped it."""


class MalformedConfig(UnknownModel):
    """One that describes no model at all: a size is missing or makes no sense."""


class _Entry(msgspec.Struct, frozen=True):
    """A model of the catalog: its names, and of its config.json what decides its size."""

    name: str
    hf_id: str
    config: dict[str, Any]
    aliases: tuple[str, ...] = ()
    gated: bool = False


@functools.cache
def models() -> tuple[ModelSpec, ...]:
    """Those that come with this package."""
    return tuple(
        replace(from_config(each.name, each.config), hf_id=each.hf_id, aliases=each.aliases, gated=each.gated)
        for each in _entries()
    )


@functools.cache
def _entries() -> tuple[_Entry, ...]:
    return msgspec.json.decode(DATA.read_bytes(), type=tuple[_Entry, ...])


def config_of(model: ModelSpec) -> dict[str, Any]:
    """What the config.json of a model of the catalog says of its size; the rest is as its family has it by default."""
    return next(each.config for each in _entries() if each.name == model.name)


@functools.cache
def _by_name() -> dict[str, ModelSpec]:
    return {name.lower(): model for model in models() for name in (model.name, model.hf_id, *model.aliases)}


def find(name: str) -> ModelSpec | None:
    """The model of that name, alias or Hugging Face id, in any case of letters; None when it is not in the catalog."""
    return _by_name().get(name.lower())


def from_config(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """The model of a config.json; of one that takes more than text, its decoder of text. Raises UnknownModel."""
    text = config.get("text_config")
    fields = _Fields({**config, **text} if isinstance(text, dict) else config)
    model_type = fields.get("model_type", "mixtral" if fields.get("num_local_experts") else "llama")
    family = _FAMILIES.get(str(model_type).removesuffix("_text"))
    if family is None:
        raise UnknownModel(f"model_type '{printable(str(model_type), 40)}' is not known here")
    layers = fields.size("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise MalformedConfig(f"num_hidden_layers is {layers}, at most {MOST_LAYERS} are counted")
    attention, windows = family.attention(fields), _windows(fields, family, layers)
    mlps = _mlps(fields, family, layers)
    kinds = Counter(zip(windows, mlps, strict=True))
    quantization, experts_only = _quantization(fields)
    return ModelSpec(
        name=name,
        hf_id=name,
        hidden=fields.size("hidden_size"),
        vocab_size=fields.size("vocab_size"),
        max_position=fields.size("max_position_embeddings"),
        kinds=tuple(
            Layers(count=count, attention=replace(attention, window=window), mlp=mlp, norms=family.norms)
            for (window, mlp), count in kinds.items()
        ),
        tied=bool(config.get("tie_word_embeddings", fields.get("tie_word_embeddings", family.tied))),
        norm_values=family.norm_values,
        model_type=str(model_type),
        quantization=quantization,
        experts_only=experts_only,
    )


class _Fields:
    """A config.json, whose values may be anything."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def get(self, name: str, default: Any = None) -> Any:
        """As it is there; the default where it is not, or null."""
        value = self._config.get(name)
        return default if value is None else value

    def stated(self, name: str, default: Any) -> Any:
        """As it is there, null too; the default where it is not."""
        return self._config.get(name, default)

    def size(self, name: str, default: int | None = None) -> int:
        """A number above 0. Raises UnknownModel."""
        value = self.get(name, default)
        if value is None:
            raise MalformedConfig(f"{name} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MOST:
            raise MalformedConfig(f"{name} is {printable(repr(value), 40)} and must be a whole number above 0")
        return value

    def numbers(self, name: str) -> list[int] | None:
        """A list of layers' numbers. Raises UnknownModel."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise MalformedConfig(f"{name} is no list of layers")
        return value


def _grouped(
    biased: Callable[[_Fields], int],
    qk_norm: bool | str = False,
    head_dim: int | None = None,
    sinks: bool = False,
    cap: float | None = None,
) -> Callable[[_Fields], Attention]:
    """How a family's attention is read. qk_norm: whether it has these norms, or the field that says so. cap: of the
    scores, where attn_logit_softcapping does not say otherwise."""

    def attention(fields: _Fields) -> Attention:
        heads = fields.size("num_attention_heads")
        usual = head_dim
        if usual is None and fields.get("head_dim") is None:
            usual = fields.size("hidden_size") // heads
            if not usual or fields.size("hidden_size") % heads:
                raise MalformedConfig(
                    f"num_attention_heads is {heads}, which does not divide hidden_size, and head_dim is missing"
                )
        kv_heads = fields.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise MalformedConfig(
                f"num_key_value_heads is {kv_heads}, which does not divide the {heads} num_attention_heads"
            )
        capped = cap is not None and fields.stated("attn_logit_softcapping", cap) is not None
        normed = bool(fields.get(qk_norm)) if isinstance(qk_norm, str) else qk_norm
        return Attention(
            heads=heads, kv_heads=kv_heads, head_dim=fields.size("head_dim", usual), biased=biased(fields),
            qk_norm=normed, sinks=sinks, capped=capped,
        )  # fmt: skip

    return attention


def _latent(fields: _Fields) -> LatentAttention:
    return LatentAttention(
        heads=fields.size("num_attention_heads"),
        q_rank=None if fields.get("q_lora_rank") is None else fields.size("q_lora_rank"),
        kv_rank=fields.size("kv_lora_rank"),
        rope=fields.size("qk_rope_head_dim"),
        nope=fields.size("qk_nope_head_dim"),
        value=fields.size("v_head_dim"),
        biased=int(bool(fields.get("attention_bias"))),
    )


def _biased(fields: _Fields) -> int:
    return 4 if fields.get("attention_bias") else 0


def _biased_unless(fields: _Fields) -> int:
    return 4 if fields.get("attention_bias", True) else 0


def _never(fields: _Fields) -> int:
    return 0


def _qkv(field_name: str, default: bool = False) -> Callable[[_Fields], int]:
    return lambda fields: 3 if fields.get(field_name, default) else 0


def _dense(fields: _Fields) -> Mlp:
    return Mlp(width=fields.size("intermediate_size"), biased=bool(fields.get("mlp_bias")))


def _all_layers(fields: _Fields, layers: int) -> list[bool]:
    return [True] * layers


def _mixtral(fields: _Fields) -> Mlp:
    return Mlp(
        width=fields.size("intermediate_size"),
        experts=fields.size("num_local_experts", 8),
        active=fields.size("num_experts_per_tok", 2),
    )


def _qwen_experts(fields: _Fields) -> Mlp:
    shared = fields.get("shared_expert_intermediate_size", 0)
    return Mlp(
        width=fields.size("moe_intermediate_size"),
        experts=fields.size("num_experts"),
        active=fields.size("num_experts_per_tok"),
        shared=fields.size("shared_expert_intermediate_size") if shared else 0,
        shared_gate=bool(shared),
    )


def _qwen_sparse(fields: _Fields, layers: int) -> list[bool]:
    dense, step = fields.numbers("mlp_only_layers") or [], fields.size("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def _gpt_oss(fields: _Fields) -> Mlp:
    return Mlp(
        width=fields.size("intermediate_size"),
        experts=fields.size("num_local_experts"),
        active=fields.size("num_experts_per_tok", fields.get("experts_per_token")),
        biased=True,
        router_bias=True,
    )


def _llama4_experts(fields: _Fields) -> Mlp:
    width = fields.size("intermediate_size")
    experts, active = fields.size("num_local_experts"), fields.size("num_experts_per_tok", 1)
    return Mlp(width=width, experts=experts, active=active, shared=width)


def _llama4_dense(fields: _Fields) -> Mlp:
    return Mlp(width=fields.size("intermediate_size_mlp"))


def _llama4_sparse(fields: _Fields, layers: int) -> list[bool]:
    sparse, step = fields.numbers("moe_layers"), fields.size("interleave_moe_layer_step", 1)
    return [layer in sparse if sparse is not None else (layer + 1) % step == 0 for layer in range(layers)]


def _deepseek_experts(fields: _Fields) -> Mlp:
    width, shared = fields.size("moe_intermediate_size"), fields.get("n_shared_experts", 0)
    return Mlp(
        width=width,
        experts=fields.size("n_routed_experts"),
        active=fields.size("num_experts_per_tok"),
        shared=width * fields.size("n_shared_experts") if shared else 0,
        router_bias=fields.get("topk_method", "noaux_tc") == "noaux_tc",
    )


def _deepseek_sparse(fields: _Fields, layers: int) -> list[bool]:
    first, every = fields.get("first_k_dense_replace", 0), fields.size("moe_layer_freq", 1)
    if not isinstance(first, int):
        raise MalformedConfig("first_k_dense_replace is no number of layers")
    return [layer >= first and layer % every == 0 for layer in range(layers)]


def _none(fields: _Fields, layers: int) -> list[str]:
    return ["full_attention"] * layers


def _every(fields: _Fields, layers: int) -> list[str]:
    return ["sliding_attention" if fields.get("sliding_window") else "full_attention"] * layers


def _alternating(pattern: int) -> Callable[[_Fields, int], list[str]]:
    """Every so many layers one sees everything."""

    def windows(fields: _Fields, layers: int) -> list[str]:
        step = fields.size("sliding_window_pattern", pattern)
        return ["full_attention" if (layer + 1) % step == 0 else "sliding_attention" for layer in range(layers)]

    return windows


def _late(fields: _Fields, layers: int) -> list[str]:
    """Qwen's: layers from max_window_layers on, where windows are in use at all."""
    first = fields.get("max_window_layers", 28) if fields.get("use_sliding_window") else layers
    if not isinstance(first, int):
        raise MalformedConfig("max_window_layers is no number of layers")
    return ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]


def _chunked(fields: _Fields, layers: int) -> list[str]:
    """Llama 4's: layers with rotary positions see their chunk."""
    rotary, step = fields.numbers("no_rope_layers"), fields.size("no_rope_layer_interval", 4)
    if not rotary:
        rotary = [int((layer + 1) % step != 0) for layer in range(layers)]
    return ["chunked_attention" if each else "full_attention" for each in rotary]


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What a model_type says without a field of its config.json. experts: in the layers that `sparse` marks."""

    attention: Callable[[_Fields], Attention | LatentAttention] = field(default_factory=lambda: _grouped(_biased))
    mlp: Callable[[_Fields], Mlp] = _dense
    experts: Callable[[_Fields], Mlp] | None = None
    sparse: Callable[[_Fields, int], list[bool]] = _all_layers
    windows: Callable[[_Fields, int], list[str]] = _none
    norms: int = 2
    norm_values: int = 1
    tied: bool = False


_QWEN2 = _Family(attention=_grouped(_qkv("qkv_bias", True)), windows=_late)
_QWEN3 = _Family(attention=_grouped(_biased, qk_norm=True, head_dim=128), windows=_late)
_DEEPSEEK = _Family(attention=_latent, experts=_deepseek_experts, sparse=_deepseek_sparse)
_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(attention=_grouped(_never), windows=_every),
    "ministral": _Family(attention=_grouped(_never), windows=_every),
    "mistral3": _Family(attention=_grouped(_never), windows=_every),
    "mixtral": _Family(attention=_grouped(_never), experts=_mixtral, windows=_every),
    "qwen2": _QWEN2,
    "qwen2_moe": replace(_QWEN2, experts=_qwen_experts, sparse=_qwen_sparse),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(_QWEN3, experts=_qwen_experts, sparse=_qwen_sparse, windows=_none),
    "gemma": _Family(attention=_grouped(_biased, head_dim=256), tied=True),
    "gemma2": _Family(attention=_grouped(_biased, head_dim=256, cap=50.0), windows=_alternating(2), norms=4, tied=True),
    "gemma3": _Family(
        attention=_grouped(_biased, qk_norm=True, head_dim=256), windows=_alternating(6), norms=4, tied=True
    ),
    "gpt_oss": _Family(attention=_grouped(_biased_unless, sinks=True), experts=_gpt_oss, windows=_alternating(2)),
    "llama4": _Family(
        attention=_grouped(_biased), mlp=_llama4_dense, experts=_llama4_experts, sparse=_llama4_sparse,
        windows=_chunked,
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "phi3": _Family(attention=_grouped(_never), windows=_every),
    "glm": _Family(attention=_grouped(_qkv("attention_bias", True))),
    "glm4": _Family(attention=_grouped(_qkv("attention_bias", True)), norms=4),
    "glm4_moe": _Family(
        attention=_grouped(_qkv("attention_bias"), qk_norm="use_qk_norm"), experts=_deepseek_experts,
        sparse=_deepseek_sparse,
    ),
    "starcoder2": _Family(
        attention=_grouped(lambda fields: 4 if fields.get("use_bias", True) else 0),
        mlp=lambda fields: Mlp(
            width=fields.size("intermediate_size"), gated=False, biased=bool(fields.get("use_bias", True))
        ),
        windows=_every, norm_values=2, tied=True,
    ),
}  # fmt: skip


def _windows(fields: _Fields, family: _Family, layers: int) -> list[Window | None]:
    """What each layer sees. Raises UnknownModel."""
    types = fields.get("layer_types", None)
    if types is None:
        types = family.windows(fields, layers)
    if not isinstance(types, list) or len(types) != layers:
        raise MalformedConfig(f"layer_types does not name the {layers} layers")
    seen: dict[str, Window | None] = {"full_attention": None}
    if "sliding_attention" in types:
        seen["sliding_attention"] = Window(tokens=fields.size("sliding_window"))
    if "chunked_attention" in types:
        seen["chunked_attention"] = Window(tokens=fields.size("attention_chunk_size"), chunked=True)
    strange = next((each for each in types if not isinstance(each, str) or each not in seen), None)
    if strange is not None:
        raise UnknownModel(f"layer_types holds '{printable(str(strange), 40)}', which is not known here")
    return [seen[each] for each in types]


def _mlps(fields: _Fields, family: _Family, layers: int) -> list[Mlp]:
    """That of each layer. Raises UnknownModel."""
    if family.experts is None:
        strange = next((name for name in _EXPERTS if fields.get(name)), None)
        if strange is not None:
            raise UnknownModel(
                f"{strange} says that it is a mixture of experts, which its model_type does not have here"
            )
        return [family.mlp(fields)] * layers
    sparse = family.sparse(fields, layers)
    experts = family.experts(fields)
    if experts.active > experts.experts:
        raise MalformedConfig(f"num_experts_per_tok is {experts.active} and there are {experts.experts} experts")
    dense = family.mlp(fields) if not all(sparse) else experts
    return [experts if each else dense for each in sparse]


_EXPERTS = (
    "num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size", "shared_expert_intermediate_size"
)  # fmt: skip

# What quantization_config.quant_method says, where it says enough.
_METHODS = {
    "fp8": "fp8", "fbgemm_fp8": "fp8", "awq": "awq", "gptq": "gptq", "mxfp4": "mxfp4",
}  # fmt: skip


def _quantization(fields: _Fields) -> tuple[str | None, bool]:
    """Its name, and whether attention is left out. Raises UnknownModel."""
    config = fields.get("quantization_config")
    if not config:
        return None, False
    if not isinstance(config, dict):
        raise MalformedConfig("quantization_config is no object")
    method = str(config.get("quant_method"))
    name = _METHODS.get(method)
    if method in ("awq", "gptq") and config.get("bits", config.get("w_bit", 4)) != 4:
        raise UnknownModel(
            f"quantization_config.bits of {method} is {printable(str(config.get('bits')), 20)}, and 4 is known here"
        )
    if method == "modelopt":
        name = {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(config.get("quant_algo")))
    if method == "compressed-tensors":
        name = _compressed(config)
    if name not in QUANTIZATIONS:
        raise UnknownModel(f"quantization_config.quant_method '{printable(method, 40)}' is not known here")
    left_out = config.get("modules_to_not_convert") or config.get("ignore") or []
    return name, isinstance(left_out, list) and any("self_attn" in str(each) and "*" in str(each) for each in left_out)


def _compressed(config: Mapping[str, Any]) -> str | None:
    """The name here of what compressed-tensors calls the weights of its first group."""
    groups = config.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return None
    names = {"float8": "fp8", "int8": "int8", "int4": "gptq", "float4": "nvfp4"}
    return names.get(f"{weights.get('type')}{weights.get('num_bits')}")
