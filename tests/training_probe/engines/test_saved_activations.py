"""What autograd keeps of real Hugging Face decoders, beside what `layer_bytes` says it keeps. Needs torch, no GPU."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest

from backends.catalog import from_config
from backends.decoder import ModelSpec
from training_probe.flops import kept_products, weights
from training_probe.grid import EXPERTS_ADAPTED, LORA_TARGETS, PROMPT_TOKENS, Cell, cell
from training_probe.memory.layers import layer_bytes, outside_bytes, uncounted

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")

HIDDEN, INTERMEDIATE, HEADS, VOCABULARY, BATCH, LENGTH = 256, 704, 4, 128, 2, 64
ON_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def build(each: Cell, config: Any) -> Any:
    """A bf16 model that trains what the cell's method trains; linear layers that are frozen stand for 4-bit ones."""
    from training_probe.worker import layers
    from training_probe.worker.model import of_text

    attention = "eager" if each.attention == "eager" else "sdpa"
    model = of_text(config, dtype=torch.bfloat16, attn_implementation=attention)
    if each.letters.adapter == "L":
        lora = peft.LoraConfig(
            r=each.lora_rank, lora_dropout=0.0, target_modules=list(each.adapts), task_type="CAUSAL_LM",
            use_dora=each.dora,
        )  # fmt: skip
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=each.wide_adapters)
    elif each.letters.adapter == "PT":
        prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=PROMPT_TOKENS)
        model = peft.get_peft_model(model, prompt).to(torch.bfloat16)
    elif each.letters.quantized:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("_proj" not in name)
    if each.letters.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    body = next(module for module in model.modules() if hasattr(module, "rotary_emb"))
    if each.fp8:
        layers.to_fp8(body.layers, each)
    layers.checkpointed(model, body.layers, each)
    return model.train()


def kept_bytes(each: Cell, config: Any) -> int:
    """Bytes of all storages that the graph of one forward pass holds, parameters left out."""
    model = build(each, config)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    packed: list[Any] = []  # as weak references: a graph may go before the pass is over

    def pack(tensor: Any) -> Any:
        packed.append(weakref.ref(tensor))
        return tensor

    backends = torch.nn.attention.SDPBackend
    backend = {"eager": None, "flash": backends.FLASH_ATTENTION, "math": backends.MATH}[each.attention]
    chosen = torch.nn.attention.sdpa_kernel([backend]) if backend is not None else contextlib.nullcontext()
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    before = {old.untyped_storage().data_ptr() for old in gc.get_objects() if type(old) is torch.Tensor}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), chosen:
        loss = model(input_ids=ids, labels=ids).loss
    assert torch.isfinite(loss)
    if each.checkpoint == "op":  # holds what it keeps itself, and no graph does
        gc.collect()
        for thing in gc.get_objects():
            if type(thing) is torch.Tensor and thing.untyped_storage().data_ptr() not in before:
                pack(thing)
    alive = [tensor.untyped_storage() for each in packed if (tensor := each()) is not None]
    storages = {storage.data_ptr(): storage.nbytes() for storage in alive}
    return sum(size for address, size in storages.items() if address not in parameters)


def fields(model_type: str, layers: int, **more: Any) -> dict[str, Any]:
    """What a config.json would say."""
    return {
        "model_type": model_type, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "num_hidden_layers": layers, "head_dim": 96,
        "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "use_cache": False, "pad_token_id": 0, **more,
    }  # fmt: skip


def config_of(described: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(**described)


def asked(method: str, attention: str, **more: Any) -> Cell:
    letters = f"F+{method}".removesuffix("+Naive") if attention == "flash" else method
    how = "math" if attention == "math" else "eager"
    return cell(letters, model="small", task="finetune", seq_len=LENGTH, micro_batch=BATCH, attention=how, **more)


@pytest.mark.parametrize("kv_heads", [HEADS, HEADS // 2])
@pytest.mark.parametrize("attention", ["eager", "flash", "math"])
@pytest.mark.parametrize("method", ["Naive", "Q", "L", "PT", "R"])
def test_a_layer_keeps_what_is_predicted(method: str, attention: str, kv_heads: int) -> None:
    each = asked(method, attention)
    described = [fields("llama", layers, num_key_value_heads=kv_heads, head_dim=None) for layers in (2, 3)]
    spec = from_config("small", described[0])
    two, three = (kept_bytes(each, config_of(one)) for one in described)
    assert layer_bytes(each, spec, BATCH)[0].kept == pytest.approx(three - two, rel=0.002)
    if method == "Naive":
        logits = 4 * BATCH * LENGTH * VOCABULARY
        beside = two - 2 * (three - two)
        assert outside_bytes(each, spec, BATCH) + logits == pytest.approx(beside, rel=0.1)  # cos, sin, masks, labels


@pytest.mark.parametrize("kv_heads", [HEADS, HEADS // 2])
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("method", ["Naive", "L", "PT"])
def test_operators_that_are_dear_are_kept(method: str, attention: str, kv_heads: int) -> None:
    each = asked(method, attention, checkpoint="op")
    described = [fields("llama", layers, num_key_value_heads=kv_heads, head_dim=None) for layers in (2, 3)]
    two, three = (kept_bytes(each, config_of(one)) for one in described)
    (predicted,) = layer_bytes(each, from_config("small", described[0]), BATCH)
    assert predicted.kept == pytest.approx(three - two, rel=0.002)


def test_a_product_with_a_bias_is_none_of_those_counted() -> None:
    """Qwen2's q, k and v: so o and up are kept."""
    each = asked("Naive", "flash", checkpoint="op")
    described = [fields("qwen2", layers, head_dim=HIDDEN // HEADS) for layers in (2, 3)]
    two, three = (kept_bytes(each, config_of(one)) for one in described)
    spec = from_config("small", described[0])
    assert list(kept_products(each, spec, spec.kinds[0])) == ["o_proj", "up_proj"]
    assert layer_bytes(each, spec, BATCH)[0].kept == pytest.approx(three - two, rel=0.002)


@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_every_third_layer_keeps_its_input_alone(attention: str) -> None:
    each = asked("Naive", attention, checkpoint="3")
    described = [fields("llama", layers, head_dim=None) for layers in (2, 6)]
    two, six = (kept_bytes(each, config_of(one)) for one in described)
    specs = [from_config("small", one) for one in described]
    fewer, most = (layer_bytes(each, spec, BATCH) for spec in specs)
    assert sorted(kind.count for kind in most) == [2, 4] and [kind.count for kind in fewer] == [2]
    predicted = sum(kind.count * kind.kept for kind in most) - sum(kind.count * kind.kept for kind in fewer)
    assert predicted == pytest.approx(six - two, rel=0.002)


def test_fp8_keeps_what_bf16_keeps() -> None:
    """torchao rounds anew in the backward pass."""
    pytest.importorskip("torchao")
    for checkpoint in ("", "op"):
        each = asked("Naive", "flash", checkpoint=checkpoint, fp8=True, device="cpu")
        described = [fields("llama", layers, head_dim=None) for layers in (2, 3)]
        two, three = (kept_bytes(each, config_of(one)) for one in described)
        (predicted,) = layer_bytes(each, from_config("small", described[0]), BATCH)
        assert predicted.kept == pytest.approx(three - two, rel=0.002)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "glm4"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize(
    "targets", [("q_proj",), ("q_proj", "v_proj"), ("o_proj",), ("down_proj",), ("k_proj", "o_proj", "down_proj"),
                ("gate_proj", "up_proj"), LORA_TARGETS]
)  # fmt: skip
@pytest.mark.parametrize("adapter_dtype", ["bf16", "fp32"])
def test_lora_keeps_the_inputs_of_what_it_adapts(
    adapter_dtype: str, targets: tuple[str, ...], attention: str, model_type: str
) -> None:
    if model_type == "glm4" and targets == ("gate_proj", "up_proj"):
        pytest.skip("its gate and up are one layer of another name")
    each = asked("L", attention, lora_rank=24, lora_targets=targets, adapter_dtype=adapter_dtype)
    _, predicted, kept = predicted_and_kept(each, model_type, {})
    assert predicted == pytest.approx(kept, rel=0.012 if model_type == "glm4" else 0.002)


@pytest.mark.parametrize("targets", [("q_proj",), ("o_proj", "down_proj"), LORA_TARGETS])
@pytest.mark.parametrize("adapter_dtype", ["bf16", "fp32"])
def test_dora_keeps_what_comes_out_as_well(adapter_dtype: str, targets: tuple[str, ...]) -> None:
    each = asked("L", "eager", lora_rank=24, lora_targets=targets, adapter_dtype=adapter_dtype, dora=True)
    _, predicted, kept = predicted_and_kept(each, "llama", {})
    assert predicted == pytest.approx(kept, rel=0.01)  # and norms of rows


@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("method", ["Naive", "L"])
def test_heads_of_a_width_of_their_own(method: str, attention: str) -> None:
    """As Mistral-Nemo's, whose heads together are narrower than the hidden state, and Qwen3's, which are wider."""
    each = asked(method, attention)
    for head_dim in (32, 128):
        described = [fields("llama", layers, head_dim=head_dim) for layers in (2, 3)]
        two, three = (kept_bytes(each, config_of(one)) for one in described)
        (predicted,) = layer_bytes(each, from_config("small", described[0]), BATCH)
        assert predicted.kept == pytest.approx(three - two, rel=0.002)


# Latent attention, and layers that stand in front of mixtures, all of them.
LATENT = {
    "num_key_value_heads": HEADS, "head_dim": 16, "q_lora_rank": 112, "kv_lora_rank": 80, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 48, "v_head_dim": 40,
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 320}
DENSE: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma2": {"sliding_window": 1024},
    "gemma3_text": {"sliding_window": 1024},
    "glm4": {},
    "deepseek_v3": {
        **LATENT, **ROUTED, "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 9,
    },
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {**ROUTED, "num_experts": 6, "shared_expert_intermediate_size": 352},
    "qwen3_moe": {**ROUTED, "num_experts": 6},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 1024},
    "glm4_moe": {
        **ROUTED, "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "use_qk_norm": True,
        "first_k_dense_replace": 0,
    },
    "deepseek_v2": {
        **LATENT, **ROUTED, "q_lora_rank": None, "n_routed_experts": 6, "n_shared_experts": 2, "topk_method": "greedy",
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": {
        **LATENT, **ROUTED, "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "llama4_text": {
        "num_local_experts": 6, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "use_qk_norm": True,
        "intermediate_size_mlp": 640, "attention_chunk_size": 1024, "no_rope_layers": [1] * 6,
    },
}  # fmt: skip


def predicted_and_kept(each: Cell, model_type: str, more: dict[str, Any]) -> tuple[ModelSpec, int, int]:
    """Of the two layers that a model of four has more than one of two; the model."""
    described = [fields(model_type, layers, **more) for layers in (2, 4)]
    for one in described:
        if "no_rope_layers" in one:
            one["no_rope_layers"] = one["no_rope_layers"][: one["num_hidden_layers"]]
    specs = [from_config("small", one) for one in described]
    two, four = (kept_bytes(each, config_of(one)) for one in described)
    fewer, most = (sum(kind.count * kind.kept for kind in layer_bytes(each, spec, BATCH)) for spec in specs)
    return specs[1], most - fewer, four - two


@pytest.mark.parametrize("model_type", DENSE)
@pytest.mark.parametrize("attention", ["eager", "flash", "math"])
@pytest.mark.parametrize("method", ["Naive", "Q", "L", "PT"])
def test_other_families_keep_what_is_predicted(method: str, attention: str, model_type: str) -> None:
    if model_type == "deepseek_v3" and attention == "flash":
        pytest.skip("torch's FlashAttention wants keys and values of one width")
    spec, predicted, kept = predicted_and_kept(asked(method, attention), model_type, DENSE[model_type])
    assert spec.kinds[0].mlp.experts == 1
    # Gemma's norms keep 1 + weight, GLM's layers their own cos and sin: nothing, where models are not small
    assert predicted == pytest.approx(kept, rel=0.002 if model_type in ("qwen3", "deepseek_v3") else 0.012)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("method", ["Naive", "L"])
def test_text_of_models_that_see_keeps_what_is_predicted(method: str, attention: str, model_type: str) -> None:
    section = {"mrope_section": [16, 16, 16] if model_type == "qwen3_vl" else [12, 10, 10], "rope_type": "default"}
    text = fields(model_type, 2, rope_scaling=section)
    if model_type == "qwen2_5_vl":
        text["head_dim"] = HIDDEN // HEADS
    sees = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": HIDDEN}
    described = [
        {"model_type": model_type, "vision_config": sees, "text_config": {**text, "num_hidden_layers": layers}}
        for layers in (2, 4)
    ]
    each = asked(method, attention)
    two, four = (kept_bytes(each, config_of(one)) for one in described)
    fewer, most = (
        sum(kind.count * kind.kept for kind in layer_bytes(each, from_config("small", one), BATCH)) for one in described
    )
    assert most - fewer == pytest.approx(four - two, rel=0.03)


@pytest.mark.parametrize("model_type", MIXTURES)
@pytest.mark.parametrize(
    ("method", "attention", "more"),
    [
        ("Naive", "eager", {}), ("Naive", "math", {}), ("PT", "eager", {}), ("L", "eager", {}),
        ("L", "eager", {"adapter_dtype": "bf16"}), ("L", "eager", {"lora_targets": ON_ATTENTION}),
        ("L", "math", {"lora_targets": ("o_proj", "down_proj")}),
    ],
)  # fmt: skip
def test_mixtures_keep_what_is_predicted(method: str, attention: str, more: dict[str, Any], model_type: str) -> None:
    """5 bytes an expert and 50 an active one at most are left out, and of sinks 10 a head. Where LoRA is on experts,
    their weights with it added are kept as well."""
    if model_type == "gpt_oss" and attention == "math":
        pytest.skip("transformers has no SDPA with sinks")
    spec, predicted, kept = predicted_and_kept(asked(method, attention, **more), model_type, MIXTURES[model_type])
    mlp = next(kind.mlp for kind in spec.kinds if kind.mlp.experts > 1)
    left_out = 2 * BATCH * (LENGTH + PROMPT_TOKENS * (method == "PT")) * (5 * mlp.experts + 50 * mlp.active + 12 + 40)
    assert 0 <= kept - predicted <= left_out


@pytest.mark.parametrize("model_type", [*DENSE, *MIXTURES])
def test_lora_is_counted_as_peft_adds_it(model_type: str) -> None:
    described = fields(model_type, 2, **(DENSE | MIXTURES)[model_type])
    if "no_rope_layers" in described:
        described["no_rope_layers"] = described["no_rope_layers"][:2]
    each, spec = asked("L", "eager"), from_config("small", described)
    with torch.device("meta"):
        built = build(each, config_of(described))
    names = {name for name, parameter in built.named_parameters() if parameter.requires_grad}
    assert any(".experts." in name for name in names) == (model_type in EXPERTS_ADAPTED and model_type in MIXTURES)
    trained = [parameter.numel() for parameter in built.parameters() if parameter.requires_grad]
    counted = weights(spec, each)
    assert uncounted(each, spec) is None
    assert (counted.adapter, counted.largest_trainable) == (sum(trained), max(trained))
