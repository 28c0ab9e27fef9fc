"""What each model_type says of its decoder: how its config.json is read, field by field, as transformers reads it.

A family is a few functions of the fields. A new one is an entry of FAMILIES, and its defaults in data/defaults.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from backends.architectures.fields import Fields, MalformedConfig, UnknownModel
from backends.decoder import Attention, LatentAttention, Mlp, Recurrent, Window
from backends.untrusted import printable


def _grouped(
    biased: Callable[[Fields], int],
    qk_norm: bool | str = False,
    head_dim: int | None = None,
    sinks: bool = False,
    cap: float | None = None,
    gated: bool = False,
    wide_norm: bool = False,
) -> Callable[[Fields], Attention]:
    """How a family's attention is read. qk_norm: whether it has these norms, or the field that says so. cap: of the
    scores, where attn_logit_softcapping does not say otherwise."""

    def attention(fields: Fields) -> Attention:
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
            qk_norm=normed, sinks=sinks, capped=capped, gated=gated, wide_norm=wide_norm,
        )  # fmt: skip

    return attention


def _latent(fields: Fields) -> LatentAttention:
    return LatentAttention(
        heads=fields.size("num_attention_heads"),
        q_rank=None if fields.get("q_lora_rank") is None else fields.size("q_lora_rank"),
        kv_rank=fields.size("kv_lora_rank"),
        rope=fields.size("qk_rope_head_dim"),
        nope=fields.size("qk_nope_head_dim"),
        value=fields.size("v_head_dim"),
        biased=int(bool(fields.get("attention_bias"))),
    )


def _sparse_latent(fields: Fields) -> LatentAttention:
    """DeepSeek-V3.2's, with an indexer in each layer."""
    heads, width = fields.size("index_n_heads"), fields.size("index_head_dim")
    return replace(_latent(fields), index_heads=heads, index_width=width)


def _biased(fields: Fields) -> int:
    return 4 if fields.get("attention_bias") else 0


def _biased_unless(fields: Fields) -> int:
    return 4 if fields.get("attention_bias", True) else 0


def _never(fields: Fields) -> int:
    return 0


def _qkv(field_name: str, default: bool = False) -> Callable[[Fields], int]:
    return lambda fields: 3 if fields.get(field_name, default) else 0


def _dense(fields: Fields) -> Mlp:
    return Mlp(width=fields.size("intermediate_size"), biased=bool(fields.get("mlp_bias")))


def _all_layers(fields: Fields, layers: int) -> list[bool]:
    return [True] * layers


def _mixtral(fields: Fields) -> Mlp:
    return Mlp(
        width=fields.size("intermediate_size"),
        experts=fields.either("num_local_experts", "num_experts", 8),
        active=fields.size("num_experts_per_tok", 2),
    )


def _qwen_experts(fields: Fields) -> Mlp:
    shared = fields.get("shared_expert_intermediate_size", 0)
    return Mlp(
        width=fields.size("moe_intermediate_size"),
        experts=fields.either("num_experts", "num_local_experts"),
        active=fields.size("num_experts_per_tok"),
        shared=fields.size("shared_expert_intermediate_size") if shared else 0,
        shared_gate=bool(shared),
    )


def _qwen_sparse(fields: Fields, layers: int) -> list[bool]:
    dense, step = fields.numbers("mlp_only_layers") or [], fields.size("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def _gpt_oss(fields: Fields) -> Mlp:
    return Mlp(
        width=fields.size("intermediate_size"),
        experts=fields.size("num_local_experts"),
        active=fields.size("num_experts_per_tok", fields.get("experts_per_token")),
        biased=True,
        router_bias=True,
    )


def _llama4_experts(fields: Fields) -> Mlp:
    width = fields.size("intermediate_size")
    experts, active = fields.size("num_local_experts"), fields.size("num_experts_per_tok", 1)
    return Mlp(width=width, experts=experts, active=active, shared=width)


def _llama4_dense(fields: Fields) -> Mlp:
    return Mlp(width=fields.size("intermediate_size_mlp"))


def _llama4_sparse(fields: Fields, layers: int) -> list[bool]:
    sparse, step = fields.numbers("moe_layers"), fields.size("interleave_moe_layer_step", 1)
    return [layer in sparse if sparse is not None else (layer + 1) % step == 0 for layer in range(layers)]


def _deepseek_experts(fields: Fields) -> Mlp:
    width, shared = fields.size("moe_intermediate_size"), fields.get("n_shared_experts", 0)
    return Mlp(
        width=width,
        experts=fields.either("n_routed_experts", "num_local_experts"),
        active=fields.size("num_experts_per_tok"),
        shared=width * fields.size("n_shared_experts") if shared else 0,
        router_bias=fields.get("topk_method", "noaux_tc") == "noaux_tc",
        routed_plainly=fields.get("topk_method", "noaux_tc") != "noaux_tc",
    )


def _deepseek_sparse(fields: Fields, layers: int) -> list[bool]:
    first, every = fields.get("first_k_dense_replace", 0), fields.size("moe_layer_freq", 1)
    if not isinstance(first, int):
        raise MalformedConfig("first_k_dense_replace is no number of layers")
    return [layer >= first and layer % every == 0 for layer in range(layers)]


def _granite_experts(fields: Fields) -> Mlp:
    """Granite 4 has experts, and one MLP that all pass through; without experts that alone."""
    shared = fields.size("shared_intermediate_size")
    if not fields.get("num_local_experts"):
        return Mlp(width=shared)
    return replace(_mixtral(fields), shared=shared)


def _minimax_m2(fields: Fields) -> Mlp:
    return replace(_mixtral(fields), router_bias=True)


def _nemotron_mlps(fields: Fields, layers: int) -> list[Mlp]:
    """Layers are a mixer or an MLP. It has two matrices."""
    if fields.get("moe_latent_size"):
        raise UnknownModel("moe_latent_size says that experts work on a latent, which is not known here")
    dense = Mlp(width=fields.size("intermediate_size"), gated=False, biased=bool(fields.get("mlp_bias")))
    found = {"mlp": dense}
    types = _nemotron_types(fields, layers)
    if "moe" in types:
        found["moe"] = Mlp(
            width=fields.size("moe_intermediate_size"), experts=fields.either("n_routed_experts", "num_local_experts"),
            active=fields.size("num_experts_per_tok"), gated=False, router_bias=True,
            shared=fields.size("moe_shared_expert_intermediate_size") if fields.get("n_shared_experts") else 0,
        )  # fmt: skip
    return [found.get(each, Mlp(width=0)) for each in types]


def _gemma3n_mlps(fields: Fields, layers: int) -> list[Mlp]:
    widths = fields.get("intermediate_size")
    if not isinstance(widths, list):
        return [_dense(fields)] * layers
    if len(widths) != layers:
        raise MalformedConfig(f"intermediate_size does not name the {layers} layers")
    return [Mlp(width=Fields({"intermediate_size": each}, {}).size("intermediate_size")) for each in widths]


def _gemma4_mlps(fields: Fields, layers: int) -> list[Mlp]:
    """Beside experts the dense one stays; of layers that borrow keys and values it may be twice as wide."""
    width = fields.size("intermediate_size")
    if fields.get("enable_moe_block"):
        return [
            Mlp(
                width=fields.size("moe_intermediate_size"), experts=fields.size("num_experts"),
                active=fields.size("top_k_experts"), shared=width, router_bias=True,
            )
        ] * layers  # fmt: skip
    wide = 2 if fields.get("use_double_wide_mlp") else 1
    borrowing = _borrowing(fields, layers)
    return [Mlp(width=width * (wide if layer >= layers - borrowing else 1)) for layer in range(layers)]


def _borrowing(fields: Fields, layers: int) -> int:
    """How many layers, the last ones, take keys and values of earlier ones."""
    shared = fields.get("num_kv_shared_layers", 0)
    if not isinstance(shared, int) or not 0 <= shared < layers:
        raise MalformedConfig(f"num_kv_shared_layers is no number below the {layers} layers")
    return shared


# What keeps a state.


def _delta_net(fields: Fields) -> Recurrent:
    """Gated delta net, of Qwen3-Next and Qwen3.5."""
    key_heads, value_heads = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    key, value = fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")
    kernel = fields.size("linear_conv_kernel_dim")
    keys, values = key_heads * key, value_heads * value
    convolved = 2 * keys + values
    return Recurrent(
        heads=key_heads, inputs=2 * keys + 2 * values + 2 * value_heads, inner=values,
        state=value_heads * key * value, recent=convolved * (kernel - 1),
        rest=convolved * kernel + 2 * value_heads + value, wide=_wide_state(fields),
    )  # fmt: skip


def _mamba(heads: str, width: str, groups: str, state: str, kernel: str, bias: str) -> Callable[[Fields], Recurrent]:
    """Mamba 2, by the names of its fields."""

    def mamba(fields: Fields) -> Recurrent:
        inner = fields.size(heads) * _mamba_width(fields, heads, width)
        convolved = inner + 2 * fields.size(groups) * fields.size(state)
        biases = convolved if fields.get(bias, True) else 0
        inputs = inner + convolved + fields.size(heads)
        rest = convolved * fields.size(kernel) + biases + 3 * fields.size(heads) + inner
        if fields.get("mamba_proj_bias") or fields.get("use_bias"):
            rest += inputs + fields.size("hidden_size")
        return Recurrent(
            heads=fields.size(heads), inputs=inputs, inner=inner, state=inner * fields.size(state),
            recent=convolved * (fields.size(kernel) - 1), rest=rest, wide=_wide_state(fields),
        )  # fmt: skip

    return mamba


def _mamba_width(fields: Fields, heads: str, width: str) -> int:
    if fields.get(width) == "auto":  # of Granite
        return fields.size("mamba_expand", 2) * fields.size("hidden_size") // fields.size(heads)
    return fields.size(width)


def _lightning(fields: Fields) -> Recurrent:
    """The layers of MiniMax-01."""
    heads = fields.size("num_attention_heads")
    width = fields.size("head_dim", fields.size("hidden_size") // heads)
    inner = heads * width
    return Recurrent(heads=heads, inputs=4 * inner, inner=inner, state=inner * width, rest=inner)


def _wide_state(fields: Fields) -> bool:
    """vLLM keeps a state as activations are, but where the file says otherwise."""
    return "float32" in (fields.given("mamba_ssm_dtype"), fields.given("mamba_ssm_cache_dtype"))


# What each layer is.


def _none(fields: Fields, layers: int) -> list[str]:
    return ["full_attention"] * layers


def _every(fields: Fields, layers: int) -> list[str]:
    return ["sliding_attention" if fields.get("sliding_window") else "full_attention"] * layers


def _alternating(pattern: int) -> Callable[[Fields, int], list[str]]:
    """Every so many layers one sees everything."""

    def windows(fields: Fields, layers: int) -> list[str]:
        step = fields.size("sliding_window_pattern", pattern)
        return ["full_attention" if (layer + 1) % step == 0 else "sliding_attention" for layer in range(layers)]

    return windows


def _late(fields: Fields, layers: int) -> list[str]:
    """Qwen's: layers from max_window_layers on, where windows are in use at all."""
    first = fields.get("max_window_layers", 28) if fields.get("use_sliding_window") else layers
    if not isinstance(first, int):
        raise MalformedConfig("max_window_layers is no number of layers")
    return ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]


def _chunked(fields: Fields, layers: int) -> list[str]:
    """Llama 4's: layers with rotary positions see their chunk."""
    rotary, step = fields.numbers("no_rope_layers"), fields.size("no_rope_layer_interval", 4)
    if not rotary:
        rotary = [int((layer + 1) % step != 0) for layer in range(layers)]
    return ["chunked_attention" if each else "full_attention" for each in rotary]


def _hybrid(fields: Fields, layers: int) -> list[str]:
    """Every so many layers one of full attention (Qwen3-Next)."""
    step = fields.size("full_attention_interval", 4)
    return ["full_attention" if (layer + 1) % step == 0 else "linear_attention" for layer in range(layers)]


def _minimax_types(fields: Fields, layers: int) -> list[str]:
    numbers = fields.numbers("attn_type_list") or [int(layer % 2 == 0) for layer in range(layers)]
    return ["full_attention" if each else "linear_attention" for each in numbers]


def _nemotron_types(fields: Fields, layers: int) -> list[str]:
    """As a list of names, or as a pattern with a letter for each."""
    names = fields.named("layers_block_type") or fields.named("layer_types")
    if names is None:
        letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
        pattern = fields.get("hybrid_override_pattern")
        if not isinstance(pattern, str) or not set(pattern) <= letters.keys():
            raise MalformedConfig("hybrid_override_pattern is no pattern of M, *, - and E")
        names = [letters[letter] for letter in pattern]
    if len(names) != layers:
        raise MalformedConfig(f"hybrid_override_pattern does not name the {layers} layers")
    return [_SAME.get(each, each) for each in names]


def _nemotron_layers(fields: Fields) -> int:
    """transformers takes the pattern's length, whatever num_hidden_layers says."""
    pattern = fields.given("hybrid_override_pattern") or fields.given("layers_block_type")
    return len(pattern) if isinstance(pattern, (str, list)) and pattern else fields.size("num_hidden_layers")


# Older names of kinds of layers.
_SAME = {"attention": "full_attention", "mamba": "linear_attention", "deepseek_sparse_attention": "full_attention"}


def _gemma4_full(fields: Fields) -> Attention:
    """Layers of full attention have wider heads, and perhaps fewer keys, which are the values too."""
    ties = bool(fields.get("attention_k_eq_v"))
    heads, kv = fields.size("num_attention_heads"), fields.size("num_key_value_heads")
    return Attention(
        heads=heads, kv_heads=fields.size("num_global_key_value_heads", kv) if ties else kv,
        head_dim=fields.size("global_head_dim", 512), qk_norm=True, ties_kv=ties, biased=_biased(fields),
    )  # fmt: skip


def _laurel_and_altup(fields: Fields, hidden: int) -> int:
    """Gemma 3n has more: the augmented residual, the alternating updates, and the layer's own embedding."""
    inputs, rank = fields.size("altup_num_inputs"), fields.size("laurel_rank")
    altup = 2 * hidden + inputs**2 + inputs**3 + hidden * inputs
    return 2 * hidden * rank + hidden + altup + _per_layer(fields, hidden)


def _per_layer(fields: Fields, hidden: int) -> int:
    """What an embedding of its own adds to a layer (Gemma 3n and 4)."""
    width = _per_layer_width(fields)
    return 2 * hidden * width + hidden if width else 0


def _per_layer_tables(fields: Fields, hidden: int, layers: int) -> int:
    width = _per_layer_width(fields)
    table = fields.size("vocab_size_per_layer_input") if width else 0
    return (table + hidden) * layers * width + width


def _per_layer_width(fields: Fields) -> int:
    return fields.size("hidden_size_per_layer_input") if fields.get("hidden_size_per_layer_input") else 0


def _gemma3n_tables(fields: Fields, hidden: int, layers: int) -> int:
    return _per_layer_tables(fields, hidden, layers) + 2 * (fields.size("altup_num_inputs") - 1) * hidden**2


def _gemma4_extra(fields: Fields, hidden: int) -> int:
    return _per_layer(fields, hidden) + (hidden if fields.get("enable_moe_block") else 0)


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a model_type says without a field of its config.json. experts: in the layers that `sparse` marks; mlps: of
    each layer, where neither says it. full: of layers with full attention, where it is another one. recurrent: of those
    with linear attention. norms: over the hidden state in a layer. extra, other: parameters beside, of a layer and of
    the model."""

    attention: Callable[[Fields], Attention | LatentAttention] = field(default_factory=lambda: _grouped(_biased))
    mlp: Callable[[Fields], Mlp] = _dense
    experts: Callable[[Fields], Mlp] | None = None
    sparse: Callable[[Fields, int], list[bool]] = _all_layers
    windows: Callable[[Fields, int], list[str]] = _none
    mlps: Callable[[Fields, int], list[Mlp]] | None = None
    full: Callable[[Fields], Attention] | None = None
    recurrent: Callable[[Fields], Recurrent] | None = None
    norms: Callable[[Fields], int] = lambda fields: 2
    extra: Callable[[Fields, int], int] = lambda fields, hidden: 0
    other: Callable[[Fields, int, int], int] = lambda fields, hidden, layers: 0
    layers: Callable[[Fields], int] = lambda fields: fields.size("num_hidden_layers")
    norm_values: int = 1
    tied: bool = False


def _four(fields: Fields) -> int:
    return 4


_QWEN2 = Family(attention=_grouped(_qkv("qkv_bias", True)), windows=_late)
_QWEN3 = Family(attention=_grouped(_biased, qk_norm=True, head_dim=128), windows=_late)
_QWEN3_MOE = Family(attention=_grouped(_biased, qk_norm=True), experts=_qwen_experts, sparse=_qwen_sparse)
_QWEN_HYBRID = Family(
    attention=_grouped(_biased, qk_norm=True, head_dim=256, gated=True), windows=_hybrid, recurrent=_delta_net
)
_QWEN_HYBRID_MOE = replace(_QWEN_HYBRID, experts=_qwen_experts, sparse=_qwen_sparse)
_GLM_MOE = Family(
    attention=_grouped(_qkv("attention_bias"), qk_norm="use_qk_norm"),
    experts=lambda fields: replace(_deepseek_experts(fields), router_float=True),
    sparse=_deepseek_sparse,
)
_DEEPSEEK = Family(attention=_latent, experts=_deepseek_experts, sparse=_deepseek_sparse)
FAMILIES = {
    "llama": Family(),
    "mistral": Family(attention=_grouped(_never), windows=_every),
    "ministral": Family(attention=_grouped(_never), windows=_every),
    "mistral3": Family(attention=_grouped(_never), windows=_every),
    "mixtral": Family(attention=_grouped(_never), experts=_mixtral, windows=_every),
    "qwen2": _QWEN2,
    "qwen2_moe": replace(_QWEN2, experts=_qwen_experts, sparse=_qwen_sparse),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "gemma": Family(attention=_grouped(_biased, head_dim=256), tied=True),
    "gemma2": Family(
        attention=_grouped(_biased, head_dim=256, cap=50.0), windows=_alternating(2), norms=_four, tied=True
    ),
    "gemma3": Family(
        attention=_grouped(_biased, qk_norm=True, head_dim=256), windows=_alternating(6), norms=_four, tied=True
    ),
    "gpt_oss": Family(attention=_grouped(_biased_unless, sinks=True), experts=_gpt_oss, windows=_alternating(2)),
    "llama4": Family(
        attention=_grouped(_biased), mlp=_llama4_dense, experts=_llama4_experts, sparse=_llama4_sparse,
        windows=_chunked,
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": replace(_DEEPSEEK, attention=_sparse_latent),
    "kimi_k2": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "qwen2_vl": replace(_QWEN2, windows=_late),
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": replace(_QWEN3, windows=_none),
    "qwen3_vl_moe": _QWEN3_MOE,
    "qwen3_next": _QWEN_HYBRID_MOE,
    "qwen3_5": _QWEN_HYBRID,
    "qwen3_5_moe": _QWEN_HYBRID_MOE,
    "seed_oss": Family(
        attention=_grouped(
            lambda fields: (4 if fields.get("attention_out_bias") else 3) if fields.get("attention_bias") else 0
        )
    ),
    "granite": Family(),
    "granitemoehybrid": Family(
        experts=_granite_experts, windows=lambda fields, layers: ["linear_attention"] * layers,
        recurrent=_mamba(
            "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias"
        ),
    ),
    "nemotron_h": Family(
        attention=_grouped(_biased, head_dim=128), mlps=_nemotron_mlps, windows=_nemotron_types,
        layers=_nemotron_layers, norms=lambda fields: 1,
        recurrent=_mamba(
            "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias"
        ),
    ),
    "minimax": Family(
        attention=_grouped(_never), experts=_mixtral, windows=_minimax_types, recurrent=_lightning
    ),
    "minimax_text_01": Family(
        attention=_grouped(_never), experts=_mixtral, windows=_minimax_types, recurrent=_lightning
    ),
    "minimax_m2": Family(attention=_grouped(_never, wide_norm=True), experts=_minimax_m2),
    "gemma3n": Family(
        attention=_grouped(_biased, qk_norm=True, head_dim=256), mlps=_gemma3n_mlps, windows=_alternating(5),
        norms=_four, extra=_laurel_and_altup, other=_gemma3n_tables, tied=True,
    ),
    "gemma4": Family(
        attention=_grouped(_biased, qk_norm=True, head_dim=256), full=_gemma4_full, mlps=_gemma4_mlps,
        windows=_alternating(6), norms=lambda fields: 7 if fields.get("enable_moe_block") else 4,
        extra=_gemma4_extra, other=_per_layer_tables, tied=True,
    ),
    "glm4v": Family(attention=_grouped(lambda fields: 3), norms=_four),
    "glm4v_moe": _GLM_MOE,
    "phi3": Family(attention=_grouped(_never), windows=_every),
    "glm": Family(attention=_grouped(_qkv("attention_bias", True))),
    "glm4": Family(attention=_grouped(_qkv("attention_bias", True)), norms=_four),
    "glm4_moe": _GLM_MOE,
    "starcoder2": Family(
        attention=_grouped(lambda fields: 4 if fields.get("use_bias", True) else 0),
        mlp=lambda fields: Mlp(
            width=fields.size("intermediate_size"), gated=False, biased=bool(fields.get("use_bias", True))
        ),
        windows=_every, norm_values=2, tied=True,
    ),
}  # fmt: skip

Mixer = Attention | LatentAttention | Recurrent
# Layers of these compute nothing over the sequence.
_NO_MIXER = Recurrent()


def mixers(fields: Fields, family: Family, layers: int) -> list[Mixer]:
    """What each layer has over the sequence. Raises UnknownModel."""
    types = fields.get("layer_types") if family.mlps is not _nemotron_mlps else None
    if types is None:
        types = family.windows(fields, layers)
    if not isinstance(types, list) or len(types) != layers:
        raise MalformedConfig(f"layer_types does not name the {layers} layers")
    types = [_SAME.get(each, each) if isinstance(each, str) else each for each in types]
    attention = family.attention(fields)
    known: dict[str, Mixer] = {"full_attention": attention if family.full is None else family.full(fields)}
    if "sliding_attention" in types:
        known["sliding_attention"] = replace(attention, window=Window(tokens=fields.size("sliding_window")))
    if "chunked_attention" in types:
        window = Window(tokens=fields.size("attention_chunk_size"), chunked=True)
        known["chunked_attention"] = replace(attention, window=window)
    if family.recurrent is not None and "linear_attention" in types:
        known["linear_attention"] = family.recurrent(fields)
    if family.mlps is _nemotron_mlps:
        known |= {"mlp": _NO_MIXER, "moe": _NO_MIXER}
    strange = next((each for each in types if not isinstance(each, str) or each not in known), None)
    if strange is not None:
        raise UnknownModel(f"layer_types holds '{printable(str(strange), 40)}', which is not known here")
    found = [known[each] for each in types]
    own = layers - _borrowing(fields, layers)
    return [
        replace(each, borrows_kv=True) if layer >= own and isinstance(each, Attention) else each
        for layer, each in enumerate(found)
    ]
