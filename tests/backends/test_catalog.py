"""Derived sizes equal the published ones, to the parameter where those are whole; what is not described is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.architectures.fields import UnknownModel
from backends.catalog import DATA, config_of, find, from_config, models
from backends.decoder import (
    QUANTIZATIONS,
    Attention,
    LatentAttention,
    Mlp,
    ModelSpec,
    Precision,
    PrecisionError,
    Window,
)

# As each repository's safetensors index has them (bytes / 2 of 16-bit weights), or its model card where the weights are
# quantized, hold a vision tower or layers that are not served; ENTRIES lists every model of the catalog.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824, "llama-3.3-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112,
    "mistral-7b": 7_248_023_552, "mistral-7b-v0.1": 7_241_732_096, "mistral-nemo": 12_247_782_400,
    "mistral-small": 23_572_403_200,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976,  # their files hold the tied table twice
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320,
    # the decoder of text alone, as Keras' presets of Gemma 3 count it (keras-hub, gemma3_presets.py)
    "gemma-3-4b": 3_880_099_328, "gemma-3-12b": 11_765_788_416, "gemma-3-27b": 27_009_002_240,
    "gpt-oss-20b": 20.91e9, "gpt-oss-120b": 116.83e9,  # model card, arXiv 2508.10925, table 1
    "deepseek-v3": 671.0e9,  # arXiv 2412.19437, 4.2, without the multi-token prediction module
    "phi-4": 14_659_507_200, "glm-4-9b": 9_400_279_040,
    "glm-4.5-air": 106.85e9,  # zai-org/GLM-4.5, README, "106B"; transformers counts 106.852 without the MTP layer
    "yi-6b": 6_061_035_520, "yi-34b": 34_388_917_248,
    "codellama-7b": 6_738_546_688, "codellama-34b": 33_743_970_304,
    # the decoder of text: transformers' Llama4ForCausalLM of the same config (docs of Meta say 109B and 400B in all)
    "llama-4-scout": 107_769_861_120, "llama-4-maverick": 400_711_848_960,
}  # fmt: skip
TOLERANCE = 0.005
ACTIVE = {  # as their cards say: billions that a token passes through
    "mixtral-8x7b": 12.9, "qwen3-235b-a22b": 22, "llama-4-scout": 17, "llama-4-maverick": 17, "deepseek-v3": 37,
}  # fmt: skip


# config.json files, as far as they decide sizes, and what transformers 5.17 makes of them: the parameters of a decoder
# of text (its AutoModelForCausalLM on torch's meta device; where it has none for a decoder alone, TextModel and head).
HYBRIDS = Path(__file__).parent / "decoders.json"


def known(name: str) -> ModelSpec:
    found = find(name)
    assert found is not None
    return found


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_parameters(model: ModelSpec) -> None:
    published = PUBLISHED[model.name]
    if isinstance(published, int) and "gemma-3" not in model.name:
        assert model.parameters == published
    assert model.parameters == pytest.approx(published, rel=TOLERANCE)
    dense = all(kind.mlp.experts == 1 for kind in model.kinds)
    assert (model.active_parameters == model.parameters) is dense


def test_the_catalog_holds_what_people_serve() -> None:
    assert len(models()) >= 30
    assert {model.name for model in models()} == PUBLISHED.keys()
    names = [name.lower() for model in models() for name in (model.name, model.hf_id, *model.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ACTIVE)
def test_mixtures_are_sparse(name: str) -> None:
    """Cards count the table that is looked up, or not: half a billion either way."""
    assert known(name).active_parameters / 1e9 == pytest.approx(ACTIVE[name], abs=0.6)


def test_find() -> None:
    for alias, name in {"7b": "llama-2-7b", "13B": "llama-2-13b", "70b": "llama-2-70b"}.items():
        assert known(alias).name == name
    assert known("META-LLAMA/llama-2-7B-hf").name == "llama-2-7b"
    assert known("deepseek-r1").name == "deepseek-v3"
    assert find("gpt-5") is None
    assert find("") is None


# As transformers writes the config of Llama-2-7B.
LLAMA: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip


def test_from_config() -> None:
    model = from_config("m", LLAMA)
    assert model.parameters == 6_738_415_616
    tied = from_config("m", {**LLAMA, "tie_word_embeddings": True})
    assert model.parameters - tied.parameters == 32000 * 4096
    mixtral = from_config("m", {
        **LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    })  # fmt: skip
    assert mixtral.parameters == 46_702_792_704
    wide = from_config("m", {**LLAMA, "head_dim": 256})  # queries, keys, values and what follows are twice as wide
    assert wide.parameters - model.parameters == 32 * 4 * 4096 * 4096
    biased = from_config("m", {**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert biased.parameters - model.parameters == 32 * (4 * 4096 + 2 * 11008 + 4096)


def test_a_wrapper_of_more_than_text_is_read_through() -> None:
    """As Gemma 3 and Llama 4 lie on the hub."""
    inner = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    wrapped = {"model_type": "llama4", "vision_config": {"hidden_size": 7}, "tie_word_embeddings": False}
    inner |= {
        "model_type": "llama4_text", "head_dim": 128, "intermediate_size_mlp": 16384, "attention_chunk_size": 8192,
        "num_local_experts": 16, "num_experts_per_tok": 1,
    }  # fmt: skip
    model = from_config("m", {**wrapped, "text_config": inner})
    assert model.model_type == "llama4_text" and model.hidden == 4096
    assert sorted((kind.count, kind.attention.window) for kind in model.kinds if kind.attention.window) == [
        (24, Window(tokens=8192, chunked=True))
    ]


@pytest.mark.parametrize("wrapper", ["text_config", "llm_config", "language_config"])
def test_the_decoder_of_text_has_several_names(wrapper: str) -> None:
    inner = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 8}
    model = from_config("m", {"model_type": "internvl_chat", wrapper: inner, "vision_config": {"hidden_size": 7}})
    assert model.parameters == from_config("m", inner).parameters and model.model_type == "qwen2"


def windows(config: dict[str, Any]) -> dict[int | None, int]:
    """Layers by their window."""
    found: dict[int | None, int] = {}
    for kind in from_config("m", {**LLAMA, **config}).kinds:
        window = kind.attention.window
        found[window and window.tokens] = found.get(window and window.tokens, 0) + kind.count
    return found


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "llama", "sliding_window": 4096}, {None: 32}),  # which Llama does not know
        ({"model_type": "mistral", "sliding_window": 4096}, {4096: 32}),
        ({"model_type": "mistral", "sliding_window": None}, {None: 32}),
        ({"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False}, {None: 32}),
        (
            {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 20},
            {None: 20, 512: 12},
        ),
        ({"model_type": "gemma2", "sliding_window": 4096}, {4096: 16, None: 16}),
        ({"model_type": "gemma3_text", "sliding_window": 1024}, {1024: 27, None: 5}),
        ({"model_type": "gemma3_text", "sliding_window": 1024, "sliding_window_pattern": 4}, {1024: 24, None: 8}),
        (
            {"layer_types": ["sliding_attention"] * 30 + ["full_attention"] * 2, "sliding_window": 64},
            {64: 30, None: 2},
        ),
    ],
)
def test_windows_are_read_as_transformers_reads_them(config: dict[str, Any], layers: dict[int | None, int]) -> None:
    assert windows(config) == layers


QWEN_MOE: dict[str, Any] = {
    **LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "sparse", "shared"),
    [
        (QWEN_MOE, 32, 0),
        ({**QWEN_MOE, "decoder_sparse_step": 2}, 16, 0),
        ({**QWEN_MOE, "mlp_only_layers": [0, 5, 31]}, 29, 0),
        ({**QWEN_MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 512}, 32, 512),
        (
            {
                **LLAMA, "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2,
                "moe_intermediate_size": 256, "n_shared_experts": 2, "first_k_dense_replace": 3,
            },
            29, 512,
        ),
    ],
)  # fmt: skip
def test_which_layers_are_mixtures(config: dict[str, Any], sparse: int, shared: int) -> None:
    kinds = from_config("m", config).kinds
    assert sum(kind.count for kind in kinds if kind.mlp.experts == 8) == sparse
    assert {kind.mlp.shared for kind in kinds if kind.mlp.experts == 8} == {shared}
    assert {kind.mlp.width for kind in kinds if kind.mlp.experts == 1} <= {11008}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"model_type": "mamba2"}, "model_type 'mamba2'"),
        ({"num_experts": 60}, "num_experts"),  # a mixture that calls itself no such thing
        ({"n_routed_experts": 64}, "n_routed_experts"),
        ({"shared_expert_intermediate_size": 5632}, "shared_expert_intermediate_size"),
        ({"hidden_size": 0}, "hidden_size is 0"), ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_attention_heads": 0}, "num_attention_heads"), ({"num_attention_heads": -32}, "num_attention_heads"),
        ({"num_attention_heads": 31}, "num_attention_heads is 31"), ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"), ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": -1}, "vocab_size"), ({"vocab_size": 1 << 60}, "vocab_size"),
        ({"intermediate_size": "wide"}, "intermediate_size is 'wide'"), ({"head_dim": True}, "head_dim"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types holds 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types"), ({"layer_types": 7}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method 'bitsandbytes'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 8}}, "quantization_config.bits"),
        ({"quantization_config": 7}, "quantization_config"),
        ({"model_type": "kimi_k2"}, "kv_lora_rank is missing"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-X"}, "hybrid_override_pattern"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*E", "moe_latent_size": 64}, "moe_latent_size"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 32}, "layer_types has no layer of"),
        ({"model_type": "gemma3n", "num_kv_shared_layers": 99}, "num_kv_shared_layers"),
        ({"model_type": "deepseek_v3", "mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"quantization_config": {"quant_method": "gptq", "group_size": 0}}, "quantization_config.group_size"),
        ({"model_type": "glm5"}, "its nearest relative is glm"),
        ({**QWEN_MOE, "mlp_only_layers": "all"}, "mlp_only_layers"),
    ],
)  # fmt: skip
def test_what_stopped_it_is_named(more: dict[str, Any], field: str) -> None:
    with pytest.raises(UnknownModel, match=re.escape(field)):
        from_config("m", {**LLAMA, **more})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
ENTRIES = json.loads(DATA.read_bytes()) + [{"config": each["config"]} for each in json.loads(HYBRIDS.read_bytes())]
FIELDS = sorted({field for each in ENTRIES for field in each["config"]} | {"layer_types", "text_config", "moe_layers"})


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # the clock of a busy machine
@given(st.sampled_from(ENTRIES), st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=3))
def test_a_damaged_config_is_described_or_refused(entry: dict[str, Any], damage: dict[str, Any]) -> None:
    try:
        model = from_config("m", {**entry["config"], **damage})
    except UnknownModel as reason:
        assert "\n" not in str(reason) and len(str(reason)) < 1000
        return
    assert 0 < model.active_parameters <= model.parameters
    assert model.weight_bytes(model.precision("float16")) > 0


def test_quantized_weights_and_what_stays_16_bit() -> None:
    """Embeddings, head and norms stay; the linear layers take what their format says (Llama-3.1-8B: 16.1 GB)."""
    model = known("llama-3.1-8b")
    stays = 2 * (2 * 128256 * 4096 + (2 * 32 + 1) * 4096)
    linear = model.parameters - stays // 2
    assert model.weight_bytes(Precision()) == 2 * model.parameters
    for name, least in (("fp8", 1.0), ("int8", 1.0), ("awq", 0.5), ("gptq", 0.5), ("nvfp4", 0.5)):
        precision = model.precision("bfloat16", name)
        assert least <= (model.weight_bytes(precision) - stays) / linear < 1.13 * least
    # hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4 is 5.73 GB on the hub
    assert model.weight_bytes(model.precision("float16", "awq")) == pytest.approx(5.73e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gpt-oss-20b", 13.76e9), ("gpt-oss-120b", 65.25e9),  # their safetensors files on the hub
        ("deepseek-v3", 671.0e9 + 0.94e9 * 2),  # FP8 but embeddings, head and routers
    ],
)  # fmt: skip
def test_weights_that_come_quantized(name: str, size: float) -> None:
    model = known(name)
    assert model.weight_bytes(model.precision("bfloat16")) == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {
                "num_bits": 8, "type": "int"}}}}, "int8",
        ),
    ],
)  # fmt: skip
def test_a_quantization_config_is_read(config: dict[str, Any], name: str) -> None:
    model = from_config("m", {**LLAMA, "quantization_config": config})
    assert model.precision("float16").quantization is QUANTIZATIONS[name]
    other = "fp8" if name != "fp8" else "awq"
    with pytest.raises(PrecisionError, match=f"^m comes quantized as {name} and --quantization says {other}; "):
        model.precision("float16", other)


def test_what_a_token_keeps() -> None:
    """Published: 512 KiB of Llama-2-7B, 320 of 70B; DeepSeek-V3's 70,272 bytes (its report's 70.272 KB); fp8: half."""
    for name, size in (("7b", 512 << 10), ("70b", 320 << 10), ("deepseek-v3", 70_272), ("qwen3-32b", 256 << 10)):
        model = known(name)
        assert model.kv_bytes_per_token(Precision()) == size
        assert model.kv_bytes_per_token(Precision(kv_cache_dtype="fp8")) == size // 2


def test_a_latent_is_kept_by_every_gpu_and_kv_heads_are_divided() -> None:
    latent, grouped = known("deepseek-v3"), known("llama-3-70b")
    precision = Precision()

    def kv(model: ModelSpec, tp: int) -> int:
        return model.serving_bytes(precision, tp, 4096, 0) - model.serving_bytes(precision, tp, 0, 0)

    assert kv(latent, 8) == kv(latent, 1)
    assert kv(grouped, 8) == kv(grouped, 1) // 8 == kv(grouped, 16)


def test_why_gpus_cannot_share_it() -> None:
    assert known("7b").undivided(8) is None and known("phi-4").undivided(2) is None
    assert known("qwen2.5-7b").undivided(8) == "has 28 attention heads, which --tp 8 does not divide"
    assert known("phi-4").undivided(4) == "has 10 KV heads, which --tp 4 neither divides nor is a multiple of"
    experts = Mlp(width=768, experts=128, active=8)
    assert experts.undivided(512) == "has experts of width 768, which --tp 512 does not divide"


@given(st.integers(1, 300), st.integers(0, 900), st.integers(1, 300), st.booleans())
def test_a_window_is_what_its_queries_see(size: int, cached: int, tokens: int, chunked: bool) -> None:
    """One by one, a query in the middle of its token."""
    window = Window(tokens=size, chunked=chunked)
    counted = 0.0
    for position in range(cached, cached + tokens):
        first = position // size * size if chunked else max(0, position + 1 - size)
        seen = position + 1 - first
        assert window.seen(position + 1) == seen
        counted += seen - (0.5 if chunked or position < size else 0.0)
    assert window.work(cached, tokens) == pytest.approx(counted)


def test_latent_attention_multiplies_what_it_stores() -> None:
    """The products of a token hold every weight once: kv_b is split into what meets keys and what meets values."""
    for attention in (known("deepseek-v3").kinds[0].attention, known("llama-3-8b").kinds[0].attention):
        hidden = 7168 if isinstance(attention, LatentAttention) else 4096
        held = sum(each.outputs * each.inputs * each.copies for each in attention.products(hidden, 1))
        assert isinstance(attention, Attention | LatentAttention) and held == attention.weights(hidden)


@pytest.mark.parametrize("each", json.loads(HYBRIDS.read_bytes()), ids=lambda each: str(each["name"]))
def test_decoders_are_as_large_as_transformers_makes_them(each: dict[str, Any]) -> None:
    """But for the biases of routers, which are buffers there, and lie in the files."""
    model = from_config(each["name"], each["config"])
    biases = sum(kind.count * kind.mlp.experts for kind in model.kinds if kind.mlp.router_bias and kind.mlp.experts > 1)
    ours = model.parameters - (biases if "gemma4" not in model.model_type else 0)
    assert ours == each["parameters"] or model.parameters == each["parameters"]
    assert model.kv_bytes_per_token(Precision(dtype="bfloat16")) == each["kv_bytes"]
    assert model.state_bytes(Precision(dtype="bfloat16")) == each["state_bytes"]


def test_defaults_are_those_of_transformers() -> None:
    """Gemma 3's files leave heads, vocabulary and context out."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    model = from_config("m", {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **text}})
    assert model.kinds == known("gemma-3-4b").kinds and model.parameters == known("gemma-3-4b").parameters
    assert (model.vocab_size, model.max_position, model.tied) == (262_208, 131_072, True)
    whole = from_config("m", {"model_type": "llama"})
    assert whole.parameters == 6_738_415_616 and whole.max_position == 2048
    with pytest.raises(UnknownModel, match="hidden_size is missing"):
        from_config("m", {"model_type": "llama", "hidden_size": None})


def test_what_no_layer_of_a_hybrid_keeps_is_not_counted() -> None:
    """Qwen3-Next-80B: 12 of 48 layers keep 2 heads of 256; the others a state of 32 heads of 128 x 128 and three tokens
    of the convolution's 8192 inputs, as vLLM's MambaStateShapeCalculator has them."""
    config = next(each["config"] for each in json.loads(HYBRIDS.read_bytes()) if each["name"] == "qwen3-next-80b")
    model, precision = from_config("m", config), Precision(dtype="bfloat16")
    assert model.kv_bytes_per_token(precision) == 12 * 2 * 2 * 256 * 2 == 24_576
    assert model.state_bytes(precision) == 36 * (32 * 128 * 128 + 3 * 8192) * 2
    wide = from_config("m", {**config, "mamba_ssm_dtype": "float32"})
    assert wide.state_bytes(precision) == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    one, two = (model.serving_bytes(precision, tp, 1000, 0) for tp in (1, 2))
    assert one == model.weight_bytes(precision) + 1000 * 24_576 + model.state_bytes(precision)
    assert two == one // 2
    v32 = next(each["config"] for each in json.loads(HYBRIDS.read_bytes()) if each["name"] == "deepseek-v3.2")
    sparse = from_config("m", v32)
    assert sparse.kv_bytes_per_token(precision) == 61 * (1152 + 132)
    assert sparse.kv_bytes_per_token(Precision(kv_cache_dtype="fp8")) == 61 * (656 + 132)  # vLLM's fp8_ds_mla


LLAMA_70B = known("llama-3.1-70b")
LINEAR_70B = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)


@pytest.mark.parametrize(
    ("config", "bytes_each"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, 0.5 + 2.5 / 32),  # 43.8 GB
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, 0.5 + 2.5 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 1 + 3 / 128),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}, 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 0.5),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "g": {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}}
                },
            },
            0.5 + 2 / 32,
        ),
    ],
)
def test_groups_of_quantized_weights_cost_what_they_hold(config: dict[str, Any], bytes_each: float) -> None:
    model = from_config("m", {**config_of(LLAMA_70B), "quantization_config": config})
    rest = LLAMA_70B.parameters - LINEAR_70B
    expected = 2 * rest + LINEAR_70B * bytes_each
    assert model.weight_bytes(model.precision("bfloat16")) == pytest.approx(expected, rel=1e-6)
    if config.get("group_size") == 32:
        assert expected == pytest.approx(43.8e9, rel=0.001)


MIXTURE: dict[str, Any] = {
    **LLAMA, "model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "first_k_dense_replace": 2, "n_shared_experts": 1, "num_attention_heads": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("left_out", "parts"),
    [
        (["lm_head"], {}),
        (["lm_head", "re:.*self_attn.*"], {"attention": 1.0}),
        (["self_attn", "shared_experts"], {"attention": 1.0, "shared": 1.0}),
        (  # Kimi K2 Thinking's
            ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
            {"attention": 1.0, "shared": 1.0, "mlp": 1.0},
        ),
        (["model.layers.*.self_attn", "model.layers.*.mlp.gate"], {"attention": 1.0}),  # a router is no gate_proj
        (["model.layers.0.mlp", "model.layers.1.mlp.down_proj"], {"mlp": 4 / 6}),
        (["model.layers.0.self_attn.o_proj"], {"attention": 1 / 32 / 4}),
        ([f"model.layers.{n}.self_attn" for n in range(8)], {"attention": 8 / 32}),
        (["language_model.model.layers.0.mlp.gate_proj"], {"mlp": 1 / 6}),
        (["re:.*feed_forward.shared_expert.*", "re:vision_model.*"], {"shared": 1.0}),  # as Llama 4 calls it
        (["block_sparse_moe"], {"mlp": 1.0, "experts": 1.0, "shared": 1.0}),
        (["re:(a+)+$", "re:["], {}),  # which would take for ever, and is none
    ],
)
def test_what_a_quantization_leaves_out(left_out: list[str], parts: dict[str, float]) -> None:
    for name in ("ignore", "modules_to_not_convert"):
        config = {"quant_method": "fp8", name: left_out}
        model = from_config("m", {**MIXTURE, "quantization_config": config})
        assert dict(model.unquantized) == pytest.approx(parts)
        whole = from_config("m", {**MIXTURE, "quantization_config": {"quant_method": "fp8"}})
        more = model.weight_bytes(model.precision("bfloat16")) - whole.weight_bytes(whole.precision("bfloat16"))
        held: dict[str, int] = {}
        for kind in model.kinds:
            for part, weights in kind.parts(model.hidden).items():
                held[part] = held.get(part, 0) + kind.count * weights
        assert more == pytest.approx(sum(held[part] * share for part, share in parts.items()), abs=4)


def test_what_is_not_known_is_refused_with_what_is() -> None:
    with pytest.raises(UnknownModel) as refused:
        from_config("m", {**LLAMA, "model_type": "qwen4_moe"})
    message = str(refused.value)
    assert "known are deepseek_v2, deepseek_v3" in message and "its nearest relative is qwen" in message
