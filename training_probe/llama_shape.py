"""The models that the engines can build of numbers alone: layers alike, norms before attention and MLP, grouped-query
attention, a gated MLP or a mixture of such MLPs.

What any config.json says is a `ModelSpec` (backends/decoder.py), from which parameters, FLOPs and memory follow;
`shape_of` takes from it what the engines build, or says what they do not. The JSON of a `LlamaShape` is kept in
manifests of sweeps, and only grows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backends import catalog
from backends.decoder import Attention, LatentAttention, Layers, Mlp, ModelSpec


class NoShape(ValueError):
    """A model that is not built so. A clause, with what is in the way."""


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """A decoder of the Llama family. `hidden` and `intermediate` are widths; `max_position` is the longest sequence, in
    tokens. A dense model has 1 expert, of which 1 is active. tied: input and output embeddings are one. head_width: of
    a head, where it is not hidden / heads. biases: of q, k, v and o, how many have one (0, 3 or 4)."""

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
    head_width: int | None = None
    biases: int = 0

    @property
    def head_dim(self) -> int:
        return self.head_width or self.hidden // self.heads

    @property
    def decoder(self) -> ModelSpec:
        """As kinds of layers, of which it has one: what parameters, FLOPs and memory follow from."""
        attention = Attention(
            heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, biased=self.biases
        )  # fmt: skip
        mlp = Mlp(width=self.intermediate, experts=self.experts, active=self.active_experts)
        return ModelSpec(
            name=self.name, hf_id=self.hf_id, hidden=self.hidden, vocab_size=self.vocab_size,
            max_position=self.max_position, kinds=(Layers(count=self.layers, attention=attention, mlp=mlp),),
            tied=self.tied,
        )  # fmt: skip

    @property
    def parameters(self) -> int:
        """Parameters in memory."""
        return self.decoder.parameters


def known(name: str) -> LlamaShape | None:
    """That of a model of the catalog; None for one that is not there, or is not built so."""
    spec = catalog.find(name)
    if spec is None:
        return None
    try:
        return shape_of(spec)
    except NoShape:
        return None


def shape_of(spec: ModelSpec) -> LlamaShape:
    """Raises NoShape."""
    kind = spec.kinds[0]
    reason = next(_objections(spec, kind), None)
    if reason is not None:
        raise NoShape(f"{spec.name} (model_type {spec.model_type}) {reason}")
    attention, mlp = kind.attention, kind.mlp
    assert isinstance(attention, Attention)
    return LlamaShape(
        name=spec.name, hf_id=spec.hf_id, hidden=spec.hidden, layers=spec.layers, heads=attention.heads,
        kv_heads=attention.kv_heads, intermediate=mlp.width, vocab_size=spec.vocab_size,
        max_position=spec.max_position, experts=mlp.experts, active_experts=mlp.active, tied=spec.tied,
        head_width=None if attention.query_width == spec.hidden else attention.head_dim, biases=attention.biased,
    )  # fmt: skip


def _objections(spec: ModelSpec, kind: Layers) -> Iterator[str]:
    """What of a config.json is in the way, a clause after the model's name."""
    attention, mlp = kind.attention, kind.mlp
    if not isinstance(attention, Attention):
        yield (
            "has latent attention (kv_lora_rank)"
            if isinstance(attention, LatentAttention)
            else ("has linear attention or state-space layers (layer_types)")
        )
        return
    if len(spec.kinds) > 1:
        other = next(each for each in spec.kinds if each is not kind)
        field = "layer_types" if other.attention != attention else "dense layers between mixtures of experts"
        yield f"has layers of {len(spec.kinds)} kinds ({field})"
    if spec.model_type == "gemma":
        yield "scales its embeddings (model_type)"
    if spec.quantization is not None:
        yield f"comes quantized (quantization_config: {spec.quantization})"
    if attention.gated or attention.ties_kv or attention.borrows_kv or kind.extra or spec.other_parameters:
        yield "has gates, shared keys or embeddings of its layers (model_type)"
    if attention.qk_norm or attention.wide_norm:
        yield "has norms of queries and keys"
    if attention.sinks:
        yield "has attention sinks"
    if kind.norms != 2 or spec.norm_values != 1:
        yield "has other norms than two of a weight each in a layer"
    if not mlp.gated or mlp.biased:
        yield "has an MLP with biases or without a gate (mlp_bias)"
    if mlp.shared or mlp.router_bias:
        yield "has experts that all tokens share"
