"""A GGUF file of random weights, of the shape of a real model: what llama.cpp serves in place of dummy weights.

The file is whole: a vocabulary of single bytes and made-up words, so that any text and any token id below the model's
vocabulary size are a prompt. The package gguf writes it, and is loaded here alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.decoder import Attention, Layers, ModelSpec
from backends.exit_codes import lacking
from backends.launch import LaunchError

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_BLOCK = 1 << 20  # random numbers that are drawn; larger tensors repeat them
_SPREAD = 0.02
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # kinds of tokens in llama.cpp
_SPECIAL = ("<unk>", "<s>", "</s>")
_LEAST_VOCABULARY = len(_SPECIAL) + 256


def refusal(spec: ModelSpec) -> str | None:
    """Why there is no such file of this shape, a clause; None where there is."""
    if spec.model_type not in _ARCHITECTURES:
        return f"random weights are made of {', '.join(_ARCHITECTURES)} models, and {spec.name} is a {spec.model_type}"
    if spec.vocab_size < _LEAST_VOCABULARY:
        return f"{spec.name} has {spec.vocab_size} tokens, and the least that can be made is {_LEAST_VOCABULARY}"
    width = _attention(spec.kinds[0]).head_dim
    if width % 2:
        return f"{spec.name} has heads of {width} numbers, and llama.cpp turns them in pairs"
    return None


def write_random(spec: ModelSpec, dtype: str, path: Path) -> None:
    """Writes the file; it has its name when it is whole. Raises LaunchError."""
    if (why := lacking("gguf")) is not None:
        raise LaunchError(f"--dummy-weights of llama.cpp cannot be made: {why}.")
    import gguf

    if (why := refusal(spec)) is not None:
        raise LaunchError(f"{why}; name another model.")
    kinds = {"float32": gguf.GGMLQuantizationType.F32, "float16": gguf.GGMLQuantizationType.F16,
             "bfloat16": gguf.GGMLQuantizationType.BF16}  # fmt: skip
    numbers = np.random.default_rng(0).standard_normal(_BLOCK, np.float32) * np.float32(_SPREAD)
    drawn = _in_format(numbers, dtype)
    unfinished = path.with_name(f"{path.name}.part")
    try:
        writer = gguf.GGUFWriter(unfinished, _ARCHITECTURES[spec.model_type])
        _describe(writer, spec)
        tensors = list(_tensors(spec))
        for name, shape in tensors:
            plain = len(shape) == 1  # norms and biases are kept in 32 bit
            size = int(np.prod(shape)) * (4 if plain else drawn.itemsize)
            writer.add_tensor_info(name, shape, np.dtype("f4") if plain else drawn.dtype, size,
                                   raw_dtype=kinds["float32" if plain else dtype])  # fmt: skip
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, shape in tensors:
            writer.write_tensor_data(_values(name, shape, drawn))
        writer.close()
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise LaunchError(f"cannot write {path}: {error.strerror or error}; make room for it.") from None


def _in_format(numbers: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    if dtype == "bfloat16":  # numpy has none: the upper half of 32 bit
        return (numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return numbers.astype(np.float16 if dtype == "float16" else np.float32)


def _values(name: str, shape: tuple[int, ...], drawn: NDArray[Any]) -> NDArray[Any]:
    if len(shape) == 1:
        return np.zeros(shape, np.float32) if name.endswith(".bias") else np.ones(shape, np.float32)
    values = np.resize(drawn, shape)
    if name in ("token_embd.weight", "output.weight"):
        values[:_LEAST_VOCABULARY] = 0  # no reply has bytes, which are no text until a character is whole
    return values


def _attention(layers: Layers) -> Attention:
    assert isinstance(layers.attention, Attention)  # of every family that is written
    return layers.attention


def _describe(writer: Any, spec: ModelSpec) -> None:
    attention, mlp = _attention(spec.kinds[0]), spec.kinds[0].mlp
    writer.add_name(spec.name)
    writer.add_context_length(spec.max_position)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(mlp.width)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_rope_dimension_count(attention.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(spec.vocab_size)
    words = spec.vocab_size - _LEAST_VOCABULARY
    writer.add_tokenizer_model("llama")
    writer.add_token_list(
        [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *(f"\u2581w{word}" for word in range(words))]
    )
    writer.add_token_scores([0.0] * len(_SPECIAL) + [-float(rank) for rank in range(256 + words)])
    writer.add_token_types([_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, *[_NORMAL] * words])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)  # a prompt of token ids is as long as it is
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def _tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in the order of the file."""
    hidden = spec.hidden
    yield "token_embd.weight", (spec.vocab_size, hidden)
    yield "output_norm.weight", (hidden,)
    if not spec.tied:
        yield "output.weight", (spec.vocab_size, hidden)
    layers = [kind for kind in spec.kinds for _ in range(kind.count)]
    for number, kind in enumerate(layers):
        attention, width, block = _attention(kind), kind.mlp.width, f"blk.{number}"
        keys = attention.kv_heads * attention.head_dim
        yield f"{block}.attn_norm.weight", (hidden,)
        for part, size in (("q", attention.query_width), ("k", keys), ("v", keys)):
            yield f"{block}.attn_{part}.weight", (size, hidden)
            if attention.biased:
                yield f"{block}.attn_{part}.bias", (size,)
        yield f"{block}.attn_output.weight", (hidden, attention.query_width)
        if attention.qk_norm:
            yield f"{block}.attn_q_norm.weight", (attention.head_dim,)
            yield f"{block}.attn_k_norm.weight", (attention.head_dim,)
        yield f"{block}.ffn_norm.weight", (hidden,)
        yield f"{block}.ffn_gate.weight", (width, hidden)
        yield f"{block}.ffn_up.weight", (width, hidden)
        yield f"{block}.ffn_down.weight", (hidden, width)
