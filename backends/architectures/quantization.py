"""What a config.json says of quantized weights: their format, their groups, and which layers it leaves out."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from backends.architectures.fields import Fields, MalformedConfig, UnknownModel
from backends.decoder import QUANTIZATIONS, Attention, LatentAttention, Mlp, Recurrent
from backends.untrusted import printable

# What quantization_config.quant_method says, where it says enough.
_METHODS = {
    "fp8": "fp8", "fbgemm_fp8": "fp8", "awq": "awq", "gptq": "gptq", "mxfp4": "mxfp4",
    "auto-round": "gptq", "intel/auto-round": "gptq",
}  # fmt: skip
_BITS = (2, 3, 4, 8)
MOST_PATTERNS = 100_000


def quantization(fields: Fields) -> tuple[str | None, float | None, list[str]]:
    """Its name, the bytes of a weight where its groups are others than usual, and the modules that it leaves out.
    Raises UnknownModel."""
    config = fields.get("quantization_config")
    if not config:
        config = fields.get("compression_config")  # as compressed-tensors called it once
    if not config:
        return None, None, []
    if not isinstance(config, dict):
        raise MalformedConfig("quantization_config is no object")
    method = str(config.get("quant_method"))
    name, each = _METHODS.get(method), None
    if name in ("awq", "gptq"):
        bits = config.get("bits", config.get("w_bit", 4))
        if bits not in _BITS or isinstance(bits, bool) or (method == "awq" and bits != 4):
            raise UnknownModel(
                f"quantization_config.bits of {method} is {printable(str(bits), 20)}, and 4 is known here"
            )
        each = _grouped_bytes(bits, config.get("group_size", config.get("q_group_size", 128)), zeros=True)
    if method == "modelopt":
        name = {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(config.get("quant_algo")))
    if method == "compressed-tensors":
        name, each = _compressed(config)
    if name not in QUANTIZATIONS:
        known = ", ".join([*_METHODS, "modelopt", "compressed-tensors"])
        raise UnknownModel(
            f"quantization_config.quant_method '{printable(method, 40)}' is not known here, or its format is not; "
            f"known are {known}"
        )
    return name, None if each == QUANTIZATIONS[name].weight_bytes else each, _left_out(config)


def _grouped_bytes(bits: int, group: Any, *, zeros: bool) -> float:
    """Bytes of one weight, with its part of a scale of 16 bit, and of a zero of its own width. Without a group (-1) a
    whole row has one."""
    if isinstance(group, bool) or not isinstance(group, int) or (group != -1 and not 0 < group <= 1 << 20):
        raise MalformedConfig(f"quantization_config.group_size is {printable(repr(group), 20)} and must be a number")
    return bits / 8 + (0 if group == -1 else (2 + bits / 8 * zeros) / group)


def _compressed(config: Mapping[str, Any]) -> tuple[str | None, float | None]:
    """The name here of what compressed-tensors calls the weights of its first group, and the bytes of each."""
    groups = config.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return None, None
    names = {"float8": "fp8", "int8": "int8", "int4": "gptq", "float4": "nvfp4"}
    name = names.get(f"{weights.get('type')}{weights.get('num_bits')}")
    if name == "nvfp4" and weights.get("group_size") == 32:
        name = "mxfp4"
    if name != "gptq":
        return name, None
    size = weights.get("group_size")
    return name, _grouped_bytes(4, -1 if size is None else size, zeros=not weights.get("symmetric", True))


def _left_out(config: Mapping[str, Any]) -> list[str]:
    """Patterns of modules that stay as they are, by any of the names that a file has for their list."""
    found: list[str] = []
    for name in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"):
        listed = config.get(name)
        if isinstance(listed, list):
            found += [each for each in listed[:MOST_PATTERNS] if isinstance(each, str)]
    dynamic = config.get("dynamic")  # of GPTQModel: "-:" before a pattern takes its modules out
    if isinstance(dynamic, dict):
        found += [f"re:{each[2:]}" for each in dynamic if isinstance(each, str) and each.startswith("-:")]
    return found


def unquantized(
    patterns: Sequence[str], layers: Sequence[tuple[Attention | LatentAttention | Recurrent, Mlp]], hidden: int
) -> tuple[tuple[str, float], ...]:
    """As of Precision: the share of each part's weights, over all layers, that the patterns name."""
    if not patterns:
        return ()
    whole: dict[str, float] = {}
    plain: dict[str, float] = {}
    named = _Patterns(patterns)
    for number, (mixer, mlp) in enumerate(layers):
        for part, module, weights in _modules(mixer, mlp, hidden):
            whole[part] = whole.get(part, 0.0) + weights
            if named.name(f"model.layers.{number}.{module}"):
                plain[part] = plain.get(part, 0.0) + weights
    return tuple((part, weights / whole[part]) for part, weights in sorted(plain.items()) if weights)


def _modules(mixer: Attention | LatentAttention | Recurrent, mlp: Mlp, hidden: int) -> Iterator[tuple[str, str, float]]:
    """The linear layers of a layer: their part, their name, their weights. Of experts the first stands for all."""
    if isinstance(mixer, Recurrent):
        if mixer.heads:
            yield "attention", "linear_attn.in_proj", float(hidden * mixer.inputs)
            yield "attention", "linear_attn.out_proj", float(hidden * mixer.inner)
    elif isinstance(mixer, Attention):
        queries, kv = float(hidden * mixer.query_width), float(hidden * mixer.kv_heads * mixer.head_dim)
        for name, weights in (("q", queries * (1 + mixer.gated)), ("k", kv), ("v", kv), ("o", queries)):
            yield "attention", f"self_attn.{name}_proj", weights
    else:
        each = mixer.weights(hidden) / 4
        for name in ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
            yield "attention", f"self_attn.{name}", each
    places = [("experts", "mlp.experts.0", mlp.experts * mlp.width), ("shared", "mlp.shared_experts", mlp.shared)]
    for part, place, width in places if mlp.experts > 1 else [("mlp", "mlp", mlp.width)]:
        for name in ("gate_proj", "up_proj", "down_proj") if width else ():
            yield part, f"{place}.{name}", float(hidden * width)


# Other names of the same modules.
_ALSO = (
    ("linear_attn.", "mamba."), ("linear_attn.", "mixer."), ("mlp.", "block_sparse_moe."), ("mlp.", "feed_forward."),
    ("shared_experts", "shared_expert"), ("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"),
    ("q_proj", "qkv_proj"), ("k_proj", "qkv_proj"), ("v_proj", "qkv_proj"), ("in_proj", "in_proj_qkvz"),
)  # fmt: skip


class _Patterns:
    """Names of modules, exact or of one that holds others; with * as in a shell; or, behind "re:", as an expression."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._names = {each for each in patterns if "*" not in each and not each.startswith("re:")}
        self._parts = {each for each in self._names if not re.search(r"\.\d+(\.|$)", each)}
        self._globs = [re.compile(fnmatch.translate(each)) for each in patterns if "*" in each and each[:3] != "re:"]
        self._expressions = [each for each in (_expression(text[3:]) for text in patterns if text[:3] == "re:") if each]

    def name(self, module: str) -> bool:
        """Whether they name the module, or one that holds it."""
        return any(self._names_exactly(each) for each in _spellings(module))

    def _names_exactly(self, module: str) -> bool:
        words = module.split(".")
        holders = [".".join(words[:count]) for count in range(1, len(words) + 1)]
        if not self._names.isdisjoint(holders) or any(f".{part}." in f".{module}." for part in self._parts):
            return True
        if any(glob.match(holder) for glob in self._globs for holder in holders):
            return True
        return any(expression.match(module) for expression in self._expressions)


def _expression(text: str) -> re.Pattern[str] | None:
    if len(text) > 300 or re.search(r"[+*}]\)*[+*{]", text):  # which may take for ever
        return None
    try:
        return re.compile(text)
    except re.error:
        return None


def _spellings(module: str) -> Iterator[str]:
    names = {module}
    for old, new in _ALSO:
        names |= {name.replace(old, new) for name in names if old in name}
    for name in names:
        yield from (name, f"language_model.{name}", f"model.language_model.{name.removeprefix('model.')}")
