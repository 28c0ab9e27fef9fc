"""Derived sizes equal the published ones, to the parameter."""

from __future__ import annotations

import pytest

from backends.catalog import MODELS, find


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
