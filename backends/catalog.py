"""Facts about models, as their config.json files state them: those that people serve, and any that a user names.

`from_config` reads a config.json as transformers does, defaults included. What it cannot describe it refuses, with the
field that stopped it: a wrong size would be worse than none.
"""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from backends.architectures import FAMILIES, Family, mixers
from backends.architectures.fields import Fields, MalformedConfig, UnknownModel
from backends.architectures.quantization import quantization, unquantized
from backends.decoder import Layers, Mlp, ModelSpec
from backends.untrusted import printable

DATA = Path(__file__).parent / "data" / "models.json"
DEFAULTS = Path(__file__).parent / "data" / "defaults.json"
MOST_LAYERS = 10_000


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
    return tuple(_model(each.name) for each in _entries())


@functools.cache
def _model(name: str) -> ModelSpec:
    each = next(each for each in _entries() if each.name == name)
    return replace(from_config(name, each.config), hf_id=each.hf_id, aliases=each.aliases, gated=each.gated)


@functools.cache
def _entries() -> tuple[_Entry, ...]:
    return msgspec.json.decode(DATA.read_bytes(), type=tuple[_Entry, ...])


def config_of(model: ModelSpec) -> dict[str, Any]:
    """What the config.json of a model of the catalog says of its size; the rest is as its family has it by default."""
    return next(each.config for each in _entries() if each.name == model.name)


def names() -> list[str]:
    """What users may call them, without their Hugging Face ids."""
    return [name for each in _entries() for name in (*each.aliases, each.name) if "/" not in name]


@functools.cache
def _first_names() -> dict[str, str]:
    """By each name of a model, in small letters, the one that it goes by."""
    return {name.lower(): each.name for each in _entries() for name in (each.name, each.hf_id, *each.aliases)}


def find(name: str) -> ModelSpec | None:
    """The model of that name, alias or Hugging Face id, in any case of letters; None when it is not in the catalog."""
    found = _first_names().get(name.lower())
    return None if found is None else _model(found)


_TEXTS = ("text_config", "llm_config", "language_config")  # of one that takes more than text, its decoder of text


@functools.cache
def _defaults() -> dict[str, dict[str, Any]]:
    """What each model_type has where its config.json is silent, as transformers 5.17's configuration classes say."""
    return msgspec.json.decode(DEFAULTS.read_bytes(), type=dict[str, dict[str, Any]])


def from_config(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """The model of a config.json; of one that takes more than text, its decoder of text. Raises UnknownModel."""
    text = next((config[name] for name in _TEXTS if isinstance(config.get(name), dict)), None)
    stated = {**config, **text} if isinstance(text, dict) else dict(config)
    guess = "mixtral" if stated.get("num_local_experts") else "llama"
    model_type = str(stated.get("model_type") or guess)
    short = model_type.removesuffix("_text")
    family = FAMILIES.get(short)
    if family is None:
        raise UnknownModel(_unknown(model_type))
    defaults = _defaults().get(short, {}) if stated.get("model_type") else {}
    tied = config.get("tie_word_embeddings", stated.get("tie_word_embeddings", defaults.get("tie_word_embeddings")))
    fields = Fields({**defaults, **stated}, stated)
    layers = family.layers(fields)
    if layers > MOST_LAYERS:
        raise MalformedConfig(f"num_hidden_layers is {layers}, at most {MOST_LAYERS} are counted")
    mixed, mlps = mixers(fields, family, layers), _mlps(fields, family, layers)
    if not any(mixer.kv_values for mixer in mixed):
        raise UnknownModel("layer_types has no layer of attention with a KV cache, and one is needed here")
    kinds = Counter(zip(mixed, mlps, strict=True))
    method, weight_bytes, left_out = quantization(fields)
    hidden = fields.size("hidden_size")
    norms, extra, other = family.norms(fields), family.extra(fields, hidden), family.other(fields, hidden, layers)
    return ModelSpec(
        name=name,
        hf_id=name,
        hidden=hidden,
        vocab_size=fields.size("vocab_size"),
        max_position=fields.size("max_position_embeddings"),
        kinds=tuple(
            Layers(count=count, attention=mixer, mlp=mlp, norms=norms, extra=extra)
            for (mixer, mlp), count in kinds.items()
        ),
        tied=family.tied if tied is None else bool(tied),
        norm_values=family.norm_values,
        model_type=model_type,
        quantization=method,
        weight_bytes_each=weight_bytes,
        unquantized=unquantized(left_out, list(zip(mixed, mlps, strict=True)), hidden),
        other_parameters=other,
    )


def _unknown(model_type: str) -> str:
    near = difflib.get_close_matches(model_type.removesuffix("_text"), FAMILIES, n=1, cutoff=0.4)
    nearest = f"; its nearest relative is {near[0]}" if near else ""
    return (
        f"model_type '{printable(model_type, 40)}' is not known here; known are {', '.join(sorted(FAMILIES))}{nearest}"
    )


def _mlps(fields: Fields, family: Family, layers: int) -> list[Mlp]:
    """That of each layer. Raises UnknownModel."""
    if family.mlps is not None:
        return family.mlps(fields, layers)
    if family.experts is None:
        strange = next((name for name in _EXPERTS if fields.given(name)), None)
        if strange is not None:
            raise UnknownModel(
                f"{strange} says that it is a mixture of experts, which its model_type does not have here"
            )
        return [family.mlp(fields)] * layers
    sparse = _sparse(fields, family, layers)
    if not any(sparse):
        return [family.mlp(fields)] * layers
    experts = family.experts(fields)
    if experts.active > experts.experts:
        raise MalformedConfig(f"num_experts_per_tok is {experts.active} and there are {experts.experts} experts")
    dense = family.mlp(fields) if not all(sparse) else experts
    return [experts if each else dense for each in sparse]


def _sparse(fields: Fields, family: Family, layers: int) -> list[bool]:
    """Which layers are mixtures."""
    types = fields.get("mlp_layer_types")
    if types is None:
        return family.sparse(fields, layers)
    if not isinstance(types, list) or len(types) != layers:
        raise MalformedConfig(f"mlp_layer_types does not name the {layers} layers")
    return [each != "dense" for each in types]


_EXPERTS = (
    "num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size", "shared_expert_intermediate_size"
)  # fmt: skip
