"""A decoder as arithmetic: its parameters, the values that its KV cache keeps, and the bytes of both.

A model is a few kinds of layers, each so many times (`Layers`): what its attention keeps and reads, and how wide its
MLP or its experts are. Everything else follows. Nothing here reads a file; `catalog` makes a `ModelSpec` of a
config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from backends.exit_codes import UserError

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
# CUDA context, activations of a prefill, captured graphs, communication buffers: on each GPU beside weights and KV.
RESERVED_BYTES = 2 << 30
MOST_GPUS = 512  # that are tried for a model that does not fit


class PrecisionError(UserError, ValueError):
    """A number format that a model cannot be served in. One sentence."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """weight_bytes: of one weight, its part of the scales and zeros included. computes: the format of the matrix
    products where the GPU has it; None: weights are widened to 16 bit first."""

    name: str
    weight_bytes: float
    computes: str | None


# Scales: fp8 and int8 have one for a row or a block of 128 x 128 at most, which is nothing; awq and gptq one of 16 bit
# and a zero of 4 bit for 128 weights; nvfp4 one of 8 bit for 16; mxfp4 (OCP microscaling) one of 8 bit for 32.
QUANTIZATIONS = {
    each.name: each
    for each in (
        Quantization(name="fp8", weight_bytes=1.0, computes="fp8"),
        Quantization(name="int8", weight_bytes=1.0, computes="int8"),
        Quantization(name="awq", weight_bytes=0.5 + 2.5 / 128, computes=None),
        Quantization(name="gptq", weight_bytes=0.5 + 2.5 / 128, computes=None),
        Quantization(name="nvfp4", weight_bytes=0.5 + 1 / 16, computes="nvfp4"),
        Quantization(name="mxfp4", weight_bytes=0.5 + 1 / 32, computes=None),
    )
}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats of a served model. dtype: of what is not quantized, and of activations. kv_cache_dtype: auto (that
    of the activations) or fp8. unquantized: of "attention", a dense "mlp", "experts" and the "shared" expert the share
    of the weights that is not; 0 where it is not named."""

    dtype: str = "float16"
    quantization: Quantization | None = None
    kv_cache_dtype: str = "auto"
    unquantized: tuple[tuple[str, float], ...] = ()

    def quantized(self, part: str) -> float:
        """The share of a part's weights that is quantized."""
        return 0.0 if self.quantization is None else 1.0 - dict(self.unquantized).get(part, 0.0)

    @property
    def value_bytes(self) -> int:
        """Bytes of an activation, and of a weight that is not quantized."""
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes(self) -> int:
        """Bytes of one value in the KV cache."""
        return 1 if self.kv_cache_dtype == "fp8" else self.value_bytes

    def __str__(self) -> str:
        names = [self.dtype if self.quantization is None else self.quantization.name]
        names += [] if self.kv_cache_dtype == "auto" else [f"a KV cache in {self.kv_cache_dtype}"]
        return " with ".join(names)


class Product(NamedTuple):
    """One matrix product of a token: `inputs` to `outputs` features, `copies` of them side by side."""

    outputs: float
    inputs: float
    copies: float = 1


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which keys a query sees: the last `tokens`, its own included; or, `chunked`, those since the last multiple of
    `tokens`."""

    tokens: int
    chunked: bool = False

    def seen(self, context: int) -> int:
        """Keys that the query at the end of `context` tokens sees."""
        return (context - 1) % self.tokens + 1 if self.chunked else min(context, self.tokens)

    def work(self, cached: int, tokens: int) -> float:
        """Pairs of query and key of `tokens` that follow `cached` ones, in units of `Step.prefill_work`."""
        return self._area(cached + tokens) - self._area(cached)

    def _area(self, length: int) -> float:
        """Integrates over all queries before `length` how many keys each sees."""
        size = self.tokens
        if self.chunked:
            whole, rest = divmod(length, size)
            return whole * size * size / 2 + rest * rest / 2
        within = min(length, size)
        return within * within / 2 + (length - within) * size


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Queries, keys and values of `head_dim` each; `kv_heads` of the latter two, that several query heads share.

    biased: how many of q, k, v, o have a bias, in that order (0, 3 or 4). qk_norm: learned norms of each head's query
    and key; wide_norm: of all heads' together. sinks: a learned logit a head. capped: scores pass through a tanh.
    gated: a gate as wide as the queries comes with them. ties_kv: values are projected as the keys are. borrows_kv:
    keys and values are those of an earlier layer."""

    heads: int
    kv_heads: int
    head_dim: int
    window: Window | None = None
    biased: int = 0
    qk_norm: bool = False
    sinks: bool = False
    capped: bool = False
    wide_norm: bool = False
    gated: bool = False
    ties_kv: bool = False
    borrows_kv: bool = False

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_values(self) -> int:
        """Values of one token that the cache keeps, over all GPUs."""
        return 0 if self.borrows_kv else 2 * self.kv_heads * self.head_dim

    @property
    def kv_projections(self) -> int:
        """How many products make keys and values: none of borrowed ones, one where both are the same."""
        return 0 if self.borrows_kv else 1 if self.ties_kv else 2

    def token_bytes(self, precision: Precision) -> int:
        """What the cache keeps of one token."""
        return self.kv_values * precision.kv_bytes

    def state_bytes(self, precision: Precision) -> int:
        """What it keeps of one sequence beside."""
        return 0

    @property
    def pair_flops(self) -> int:
        """FLOPs of one pair of query and key in a prefill, over all heads."""
        return 4 * self.heads * self.head_dim

    def shares(self, tp: int) -> int:
        """Among how many of `tp` GPUs a token's cache is divided; the others hold copies."""
        return min(tp, self.kv_heads)

    def kv_values_of(self, tp: int) -> float:
        """Numbers of a token's keys and values on one GPU, as its attention reads them."""
        return 2 * max(1.0, self.kv_heads / tp) * self.head_dim

    def products(self, hidden: int, tp: int) -> Iterator[Product]:
        """As one of `tp` GPUs computes them."""
        queries = self.query_width / tp
        yield Product(queries * (1 + self.gated) + self.kv_values_of(tp) * self.kv_projections / 2, hidden)
        yield Product(hidden, queries)

    def weights(self, hidden: int) -> int:
        """Parameters of the linear layers, without biases."""
        return hidden * (self.query_width * (2 + self.gated) + self.kv_heads * self.head_dim * self.kv_projections)

    def others(self, hidden: int) -> int:
        """Biases, norms of heads, sinks."""
        kv_width = self.kv_heads * self.head_dim
        projected = self.query_width + kv_width * self.kv_projections
        biases = {0: 0, 3: projected, 4: projected + hidden}
        keys = not self.borrows_kv
        norms = self.query_width + kv_width if self.wide_norm else self.head_dim * (1 + keys) * self.qk_norm
        return biases[self.biased] + norms + self.heads * self.sinks

    def undivided(self, tp: int) -> str | None:
        """Why `tp` GPUs cannot share it, a clause."""
        if self.heads % tp:
            return f"has {self.heads} attention heads, which --tp {tp} does not divide"
        if self.kv_heads % tp and tp % self.kv_heads:
            return f"has {self.kv_heads} KV heads, which --tp {tp} neither divides nor is a multiple of"
        return None


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention (arXiv 2405.04434, 2.1): the cache keeps one latent of `kv_rank` and one
    rotary key of `rope` values a token, for all heads, and every GPU of a tensor parallel group keeps them all.

    q_rank: of the queries' own latent; None: they come from the hidden state. nope, value: of each head. index_heads,
    index_width: of the indexer that chooses which tokens are attended to (DeepSeek-V3.2); 0: all are."""

    heads: int
    q_rank: int | None
    kv_rank: int
    rope: int
    nope: int
    value: int
    window: Window | None = None
    biased: int = 0
    index_heads: int = 0
    index_width: int = 0

    @property
    def query_width(self) -> int:
        return self.heads * (self.nope + self.rope)

    @property
    def kv_values(self) -> int:
        """Values of one token that the cache keeps."""
        return self.kv_rank + self.rope

    def token_bytes(self, precision: Precision) -> int:
        """What the cache keeps of one token. With an indexer, as vLLM has it (its DeepseekV32IndexerCache,
        `fp8_ds_mla` of its MLA backends): its key of 8 bits, with a scale of 32 for 128 of them, 132 bytes; and an fp8
        cache has the latent in 8 bits with such scales, and the rotary key in 16, 656 bytes."""
        if not self.index_heads:
            return self.kv_values * precision.kv_bytes
        latent = self.kv_values * precision.kv_bytes
        if precision.kv_bytes == 1:
            latent = self.kv_rank + 4 * -(-self.kv_rank // 128) + 2 * self.rope
        return latent + self.index_width + 4 * -(-self.index_width // 128)

    def state_bytes(self, precision: Precision) -> int:
        return 0

    @property
    def pair_flops(self) -> int:
        """FLOPs of one pair of query and key in a prefill, which has keys and values of each head."""
        return 2 * self.heads * (self.nope + self.rope + self.value)

    @property
    def decode_pair_flops(self) -> int:
        """FLOPs of one pair in a decode step, where every head meets the latent itself."""
        return 2 * self.heads * (2 * self.kv_rank + self.rope)

    def shares(self, tp: int) -> int:
        return 1

    def kv_values_of(self, tp: int) -> float:
        return float(self.kv_values)

    def products(self, hidden: int, tp: int) -> Iterator[Product]:
        """As one of `tp` GPUs computes them; what leads to the latents is done by each."""
        heads, latent = self.heads / tp, self.kv_rank + self.rope
        queries = heads * (self.nope + self.rope)
        if self.q_rank is None:
            yield Product(queries + latent, hidden)
        else:
            yield Product(self.q_rank + latent, hidden)
            yield Product(queries, self.q_rank)
        if self.index_heads:  # done by each
            yield Product(self.index_width + self.index_heads, hidden)
            yield Product(self.index_heads * self.index_width, self.q_rank or hidden)
        yield Product(self.kv_rank, self.nope, heads)
        yield Product(self.value, self.kv_rank, heads)
        yield Product(hidden, heads * self.value)

    def weights(self, hidden: int) -> int:
        """Parameters of the linear layers."""
        queries = hidden * self.query_width
        if self.q_rank is not None:
            queries = self.q_rank * (hidden + self.query_width)
        keys = hidden * (self.kv_rank + self.rope) + self.kv_rank * self.heads * (self.nope + self.value)
        index = (self.q_rank or hidden) * self.index_heads * self.index_width
        index += hidden * (self.index_width + self.index_heads)
        return queries + keys + self.heads * self.value * hidden + index

    def others(self, hidden: int) -> int:
        """Norms of the latents, biases."""
        ranks = self.kv_rank + (self.q_rank or 0)
        return (
            ranks
            + 2 * self.index_width
            + ((self.q_rank or 0) + self.kv_rank + self.rope + hidden if self.biased else 0)
        )

    def undivided(self, tp: int) -> str | None:
        return f"has {self.heads} attention heads, which --tp {tp} does not divide" if self.heads % tp else None


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """What keeps a state of one size for each sequence, whatever its length: linear attention, or a state-space model.

    inputs: features of all its projections of the hidden state; inner: those that enter the last projection. state: its
    values, in 32 bits where it is `wide`; recent: the inputs of its convolution that are kept beside. rest: parameters
    beside the projections. With 0 heads it stands for a layer that is an MLP alone."""

    heads: int = 0
    inputs: int = 0
    inner: int = 0
    state: int = 0
    recent: int = 0
    rest: int = 0
    wide: bool = False
    window: Window | None = None
    biased: int = 0
    kv_values: int = 0
    pair_flops: int = 0

    @property
    def query_width(self) -> int:
        return self.inner

    def token_bytes(self, precision: Precision) -> int:
        return 0

    def state_bytes(self, precision: Precision) -> int:
        """What it keeps of one sequence, over all GPUs; as MambaStateShapeCalculator and MambaStateDtypeCalculator of
        vLLM's mamba_utils.py have it without speculation."""
        return self.state * (4 if self.wide else precision.value_bytes) + self.recent * precision.value_bytes

    def shares(self, tp: int) -> int:
        return tp

    def kv_values_of(self, tp: int) -> float:
        return 0.0

    def products(self, hidden: int, tp: int) -> Iterator[Product]:
        if self.heads:
            yield Product(self.inputs / tp, hidden)
            yield Product(hidden, self.inner / tp)

    def weights(self, hidden: int) -> int:
        return hidden * (self.inputs + self.inner)

    def others(self, hidden: int) -> int:
        return self.rest

    def undivided(self, tp: int) -> str | None:
        return (
            f"has {self.heads} heads of linear attention, which --tp {tp} does not divide" if self.heads % tp else None
        )


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """`experts` MLPs of `width`, of which a token passes through `active`, and beside them one of `shared` that all
    pass through; a dense one has 1 expert. gated: three matrices, not two. biased: with biases. shared_gate: a learned
    weight of the shared one. router_bias: of the router's scores. router_float: these are computed in 32 bit.
    routed_plainly: by operators of PyTorch, on scores in 16 bit. imbalance: the load of the busiest expert over the
    mean. With a width of 0 it stands for a layer that has none."""

    width: int
    experts: int = 1
    active: int = 1
    shared: int = 0
    gated: bool = True
    biased: bool = False
    shared_gate: bool = False
    router_bias: bool = False
    router_float: bool = False
    routed_plainly: bool = False
    imbalance: float = 1.0

    @property
    def matrices(self) -> int:
        return 3 if self.gated else 2

    def weights(self, hidden: int, experts: int) -> int:
        """Parameters of the linear layers with `experts` experts, without the router."""
        return self.matrices * hidden * (experts * self.width + self.shared)

    def others(self, hidden: int, experts: int) -> int:
        """The router and biases."""
        router = self.experts * (hidden + self.router_bias) if self.experts > 1 else 0
        biases = experts * ((self.matrices - 1) * self.width + hidden) if self.biased else 0
        return router + biases + (hidden if self.shared_gate else 0)

    def undivided(self, tp: int) -> str | None:
        """Why `tp` GPUs cannot share it, a clause."""
        what = "experts" if self.experts > 1 else "an MLP"
        odd = next((width for width in (self.width, self.shared) if width % tp), None)
        return None if odd is None else f"has {what} of width {odd}, which --tp {tp} does not divide"


@dataclass(frozen=True, kw_only=True)
class Layers:
    """`count` layers alike. norms: those over the hidden state. extra: parameters beside all that."""

    count: int
    attention: Attention | LatentAttention | Recurrent
    mlp: Mlp
    norms: int = 2
    extra: int = 0

    def parts(self, hidden: int) -> dict[str, int]:
        """Weights of the linear layers of one layer, by what a quantization may leave out."""
        mlp = self.mlp
        routed = mlp.weights(hidden, mlp.experts) - mlp.weights(hidden, 0)
        own = {"experts": routed, "shared": mlp.weights(hidden, 0)} if mlp.experts > 1 else {"mlp": routed}
        return {"attention": self.attention.weights(hidden), **own}

    def parameters(self, hidden: int, norm_values: int, experts: int) -> int:
        """Parameters of one layer with `experts` of its experts. norm_values: those of a norm, in widths."""
        attention = self.attention.weights(hidden) + self.attention.others(hidden)
        mlp = self.mlp.weights(hidden, experts) + self.mlp.others(hidden, experts)
        return attention + mlp + self.norms * norm_values * hidden + self.extra


# bytes of each GPU that are neither weights nor KV, of the format and of how many GPUs share a model
Reserve = Callable[[Precision, int], int]


def _reserved_bytes(precision: Precision, tp: int) -> int:
    return RESERVED_BYTES


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder. hf_id: of the hub, or its directory. `hidden` is a width; `max_position` is the longest
    sequence, in tokens, that the model was made for. tied: input and output embeddings are one. norm_values: parameters
    of a norm, in widths: 2 with a bias. other_parameters: beside embeddings and layers. quantization: that of its
    published weights, by name; weight_bytes_each: of such a weight, where its groups are other ones; unquantized: as of
    Precision. gated: they need a licence and a token of the hub. model_type: that of its config.json.
    """

    name: str
    hf_id: str
    hidden: int
    vocab_size: int
    max_position: int
    kinds: tuple[Layers, ...]
    tied: bool = False
    norm_values: int = 1
    model_type: str = "llama"
    quantization: str | None = None
    weight_bytes_each: float | None = None
    unquantized: tuple[tuple[str, float], ...] = ()
    other_parameters: int = 0
    aliases: tuple[str, ...] = ()
    gated: bool = False

    @property
    def layers(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def architecture(self) -> str:
        """Its class, by the operators that a server runs for it."""
        attentions = [kind.attention for kind in self.kinds]
        others = (
            ("latent attention", any(isinstance(each, LatentAttention) for each in attentions)),
            ("linear attention", any(isinstance(each, Recurrent) and each.heads for each in attentions)),
            ("windows", any(each.window is not None for each in attentions)),
        )
        mlp = "mixture" if any(kind.mlp.experts > 1 for kind in self.kinds) else "dense"
        return " with ".join([mlp, *filter(None, [" and ".join(name for name, has in others if has)])])

    @property
    def parameters(self) -> int:
        """Parameters in memory."""
        return self._parameters(active=False)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through."""
        return self._parameters(active=True)

    def precision(self, dtype: str, quantization: str | None = None, kv_cache_dtype: str = "auto") -> Precision:
        """How it is served: as its weights are, or quantized as asked. Raises PrecisionError."""
        if quantization is not None and self.quantization not in (None, quantization):
            raise PrecisionError(
                f"{self.name} comes quantized as {self.quantization} and --quantization says {quantization}; leave it "
                "out."
            )
        name = quantization or self.quantization
        quantized = None if name is None else QUANTIZATIONS[name]
        if quantized is not None and self.quantization is not None and self.weight_bytes_each is not None:
            quantized = replace(quantized, weight_bytes=self.weight_bytes_each)
        return Precision(
            dtype=dtype, quantization=quantized, kv_cache_dtype=kv_cache_dtype, unquantized=self.unquantized
        )

    def weight_bytes(self, precision: Precision) -> int:
        """Bytes of all weights, over all GPUs. Embeddings, head, routers, norms and biases are never quantized."""
        if precision.quantization is None:
            return self.parameters * precision.value_bytes
        quantized = round(
            sum(
                kind.count * weights * precision.quantized(part)
                for kind in self.kinds
                for part, weights in kind.parts(self.hidden).items()
            )
        )
        rest = (self.parameters - quantized) * precision.value_bytes
        return rest + round(quantized * precision.quantization.weight_bytes)

    def kv_bytes_per_token(self, precision: Precision) -> int:
        """What the cache keeps of one token that every layer sees, over all layers, and GPUs where they share it."""
        return sum(kind.count * kind.attention.token_bytes(precision) for kind in self.kinds)

    def state_bytes(self, precision: Precision) -> int:
        """What is kept of one sequence, however long it is, over all layers and GPUs."""
        return sum(kind.count * kind.attention.state_bytes(precision) for kind in self.kinds)

    @property
    def keeping(self) -> tuple[Layers, ...]:
        """The kinds whose layers keep something of each token."""
        return tuple(kind for kind in self.kinds if kind.attention.kv_values)

    def kv_shares(self, tp: int) -> int:
        """Among how many of `tp` GPUs that is divided."""
        return self.keeping[0].attention.shares(tp)

    def undivided(self, tp: int) -> str | None:
        """Why `tp` GPUs cannot share it, a clause after its name; None where they can."""
        reasons = (part.undivided(tp) for kind in self.kinds for part in (kind.attention, kind.mlp))
        return next((reason for reason in reasons if reason is not None), None)

    def tensor_parallel(self, tp: int) -> bool:
        """Whether `tp` GPUs can share it: heads and widths evenly, key-value heads evenly or each on several."""
        return self.undivided(tp) is None

    def serving_bytes(self, precision: Precision, tp: int, tokens: int, reserved_bytes: int = RESERVED_BYTES) -> int:
        """Least memory of each of `tp` GPUs that serves one sequence of `tokens`: weights, its KV, what is reserved."""
        kv = sum(
            kind.count * kind.attention.token_bytes(precision) * _kept(kind.attention.window, tokens)
            for kind in self.kinds
        )
        state = self.state_bytes(precision) // tp if tokens else 0
        return self.weight_bytes(precision) // tp + kv // self.kv_shares(tp) + state + reserved_bytes

    def smallest_tp(
        self,
        precision: Precision,
        tokens: int,
        gpu_bytes: float,
        at_most: int = 64,
        reserve: Reserve = _reserved_bytes,
    ) -> int | None:
        """The smallest power of two of GPUs with `gpu_bytes` each (what may be used of them) that can serve it."""
        sizes = (2**power for power in range(at_most.bit_length()) if 2**power <= at_most)
        split = (tp for tp in sizes if self.tensor_parallel(tp))
        return next(
            (tp for tp in split if self.serving_bytes(precision, tp, tokens, reserve(precision, tp)) <= gpu_bytes), None
        )

    def what_fits(
        self,
        precision: Precision,
        tokens: int,
        gpu_bytes: float,
        tp: int,
        reserve: Reserve = _reserved_bytes,
    ) -> str:
        """What would hold one sequence of `tokens` where `tp` GPUs do not: a clause of options."""
        enough = self.smallest_tp(precision, tokens, gpu_bytes, MOST_GPUS, reserve)
        ways = [] if enough is None else [f"--tp {enough} would fit"]
        for option, smaller in self._smaller(precision):
            least = self.smallest_tp(smaller, tokens, gpu_bytes, MOST_GPUS, reserve)
            if least is not None and least <= tp:
                ways.append(f"{option} would fit on {least}")
                break
        return " and ".join(ways) or "it needs larger GPUs"

    def _smaller(self, precision: Precision) -> Iterator[tuple[str, Precision]]:
        """Formats that take less memory, the least change first: the options that ask for them, and what they are."""
        if precision.dtype == "float32":
            yield "--dtype float16", Precision(dtype="float16", kv_cache_dtype=precision.kv_cache_dtype)
        if precision.quantization is None:
            for name in ("fp8", "awq"):
                quantized = QUANTIZATIONS[name]
                yield (
                    f"--quantization {name}",
                    Precision(dtype=precision.dtype, quantization=quantized, kv_cache_dtype=precision.kv_cache_dtype),
                )

    def _parameters(self, *, active: bool) -> int:
        layers = sum(
            kind.count * kind.parameters(self.hidden, self.norm_values, kind.mlp.active if active else kind.mlp.experts)
            for kind in self.kinds
        )
        embeddings = (1 if self.tied else 2) * self.vocab_size * self.hidden  # in and out
        return embeddings + layers + self.norm_values * self.hidden + self.other_parameters


def _kept(window: Window | None, tokens: int) -> int:
    return tokens if window is None else min(tokens, window.tokens)
