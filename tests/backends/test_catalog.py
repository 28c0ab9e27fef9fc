"""Derived sizes equal the published ones, to the parameter."""

from __future__ import annotations

from typing import Any

import pytest

from backends.catalog import MODELS, find, from_config


@pytest.mark.parametrize(
    ("name", "parameters"),  # as in each repository's safetensors index: bytes / 2
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_parameters(name: str, parameters: int) -> None:
    model = find(name)
    assert model is not None
    assert model.parameters == parameters
    if model.experts == 1:
        assert model.active_parameters == parameters


def test_mixtral_is_sparse() -> None:
    model = find("mixtral-8x7b")
    assert model is not None
    assert round(model.active_parameters / 1e9, 1) == 12.9  # the paper: 47B in all, 13B active


def test_find() -> None:
    for alias, name in {"7b": "llama-2-7b", "13B": "llama-2-13b", "70b": "llama-2-70b"}.items():
        found = find(alias)
        assert found is not None and found.name == name
    found = find("META-LLAMA/llama-2-7B-hf")
    assert found is not None and found.name == "llama-2-7b"
    assert find("gpt-5") is None
    assert find("") is None


def test_names_are_unique_and_shapes_fit() -> None:
    names = [name.lower() for model in MODELS for name in (model.name, model.hf_id, *model.aliases)]
    assert len(names) == len(set(names))
    for model in MODELS:
        assert model.hidden % model.heads == 0
        assert model.heads % model.kv_heads == 0
        assert model.head_dim == 128


# As transformers writes the config of Llama-2-7B.
LLAMA: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip


def test_from_config() -> None:
    model = from_config("m", LLAMA)
    assert model is not None and model.parameters == 6_738_415_616
    tied = from_config("m", {**LLAMA, "tie_word_embeddings": True})
    assert tied is not None and model.parameters - tied.parameters == 32000 * 4096
    mixtral = from_config("m", {
        **LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    })  # fmt: skip
    assert mixtral is not None and mixtral.parameters == 46_702_792_704


@pytest.mark.parametrize(
    "more",
    [
        {"quantization_config": {"quant_method": "awq", "bits": 4}},  # 4 bits are not 16
        {"num_experts": 60, "moe_intermediate_size": 1408, "num_experts_per_tok": 4},  # Qwen2-MoE
        {"n_routed_experts": 64, "moe_intermediate_size": 1408},  # DeepSeek
        {"shared_expert_intermediate_size": 5632},
        {"head_dim": 256}, {"hidden_size": 0}, {"hidden_size": None}, {"num_attention_heads": 0},
        {"num_attention_heads": -32}, {"num_hidden_layers": 0}, {"vocab_size": -1}, {"intermediate_size": "wide"},
        {"num_local_experts": 8, "num_experts_per_tok": 9},
    ],
)  # fmt: skip
def test_a_size_that_is_not_known(more: dict[str, Any]) -> None:
    assert from_config("m", {**LLAMA, **more}) is None
