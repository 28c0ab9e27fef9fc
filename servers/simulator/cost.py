"""How long a step takes on given GPUs: a sum of operators, each as fast as that kind of GPU was measured to run it.

GEMM         a = 2TNK / (eta_c F), b = bytes / (eta_b BW), t = (a^p + b^p)^(1/p) + launch   (soft roofline)
decode       KV bytes / (eta_kv BW) + per row and head; slower by `mixed` in one launch with prefills
prefill      4 heads d sum q(c + q/2) / (eta F) + per token and head
element-wise bytes / (eta BW) + launches
all-reduce   a measured table, or alpha + 2(n-1)/n s / beta + gamma sqrt(s); two a layer

F: peak FLOP/s in 16 bit without sparsity. BW: peak bytes/s of the memory. T: tokens in the step. Everything else is in
`servers/data/gpus.json`, each value with its source and its error.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import msgspec

from backends.catalog import DTYPE_BYTES, ModelSpec
from servers.schedulers import Step


class Gemm(msgspec.Struct, frozen=True, kw_only=True):
    compute_ratio: float
    memory_ratio: float
    softness: float
    launch_us: float


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    decode_memory_ratio: float
    decode_launch_us: float
    decode_row_head_ns: float
    prefill_compute_ratio: float
    prefill_token_head_ns: float
    mixed: float


class Elementwise(msgspec.Struct, frozen=True, kw_only=True):
    memory_ratio: float
    launch_us: float


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How GPUs reduce. Either `bytes` and `us` as measured among `ranks`, or alpha, beta and gamma. pair: among fewer,
    at least two, where that is known by itself."""

    ranks: int = 0
    bytes: tuple[int, ...] = ()
    us: tuple[float, ...] = ()
    alpha_us: float = 0.0
    beta_bytes_per_s: float = math.inf
    gamma_us: float = 0.0  # for sqrt(1 MB)
    pair: Link | None = None

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        """Seconds until `ranks` GPUs all hold the sum of `size_bytes` from each."""
        if self.pair is not None and ranks <= max(self.pair.ranks, 2):
            return self.pair.all_reduce_s(size_bytes, ranks)
        if not self.us:
            ring = 2 * (ranks - 1) / ranks * size_bytes / self.beta_bytes_per_s
            return self.alpha_us * 1e-6 + ring + self.gamma_us * 1e-6 * math.sqrt(size_bytes / 1e6)
        scale = ((ranks - 1) / ranks) / ((self.ranks - 1) / self.ranks)
        return _interpolate(self.bytes, self.us, size_bytes * scale) * 1e-6


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of GPU. memory_bytes: what a server sees of it. links: nvlink, nvlink-pairs, pcie,
    host, where it has them; the usual one first. gemm: in 16 bit; gemms: in other dtypes, by name ("fp8"), whose
    compute_ratio is still of `flops`, the 16-bit peak."""

    name: str
    aliases: tuple[str, ...] = ()
    flops: float
    memory_bytes_per_s: float
    memory_bytes: int
    gemm: Gemm
    gemms: dict[str, Gemm] = {}
    attention: Attention
    elementwise: Elementwise
    links: dict[str, Link]
    source: str
    error: str


class Overheads(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's own software adds. step: before each step's kernels run; layer: least time of a layer where
    kernels are launched one by one (0 with CUDA graphs). attention_ratio: the time of its attention over that of the
    GPU's table (FlashAttention 3). reduce: for reductions slower than those measured alone."""

    step_us: float = 0.0
    row_us: float = 0.0
    prefill_token_us: float = 0.0
    layer_us: float = 0.0
    attention_ratio: float = 1.0
    reduce_us: float = 0.0
    reduce_ratio: float = 1.0


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The operators of a step, in seconds over all layers, which add up to what it takes.

    waiting: what the GPU waits in layers whose kernels are launched one by one. software: before the kernels run.
    """

    attention_gemm: float
    attention: float
    rope: float
    norms: float
    mlp_gemm: float
    gate: float
    all_reduce: float
    head: float
    waiting: float
    software: float


class StepCost:
    """Seconds that a step takes on `tp` GPUs of one kind."""

    def __init__(
        self, model: ModelSpec, gpu: Gpu, tp: int, link: Link | None, dtype: str, overheads: Overheads
    ) -> None:
        self._gpu = gpu
        self._model = model
        self._tp = tp
        self._link = link
        self._width = DTYPE_BYTES[dtype]
        self._overheads = overheads
        self._arguments = (model, gpu, tp, link, dtype)
        self._dense: dict[int, float] = {}  # tokens -> what depends on their number alone
        self._head: dict[int, float] = {}
        bandwidth = gpu.memory_bytes_per_s
        attention = gpu.attention
        heads = model.heads / tp
        kv_heads = max(1.0, model.kv_heads / tp)
        layers = model.layers
        self._decode_launch = layers * attention.decode_launch_us * 1e-6
        self._decode_row = layers * attention.decode_row_head_ns * 1e-9 * heads
        self._decode_context = (
            layers * 2 * kv_heads * model.head_dim * self._width / (attention.decode_memory_ratio * bandwidth)
        )
        self._prefill_work = layers * 4 * heads * model.head_dim / (attention.prefill_compute_ratio * gpu.flops)
        self._prefill_token = layers * attention.prefill_token_head_ns * 1e-9 * heads
        self._floor = layers * overheads.layer_us * 1e-6

    def with_overheads(self, overheads: Overheads) -> StepCost:
        return StepCost(*self._arguments, overheads)

    def __call__(self, step: Step) -> float:
        tokens = step.decode_rows + step.prefill_tokens
        dense = self._dense.get(tokens)
        if dense is None:
            dense = self._dense[tokens] = self._dense_s(tokens)
        samples = len(step.emits)
        head = self._head.get(samples)
        if head is None:
            head = self._head[samples] = self._head_s(samples)
        seconds = dense + head + self._attention_s(step)
        if seconds < self._floor:
            seconds = self._floor
        own = self._overheads
        return seconds + (own.step_us + own.row_us * samples + own.prefill_token_us * step.prefill_tokens) * 1e-6

    def terms(self, step: Step) -> Terms:
        """What `step` takes, by operator."""
        model, own = self._model, self._overheads
        tokens, samples, layers = step.decode_rows + step.prefill_tokens, len(step.emits), model.layers
        q, kv = self._widths()
        norms, rope, gate = self._elementwise_terms(tokens, q, kv)
        attention_gemm, mlp_gemm = self._attention_gemm_s(tokens, q, kv), self._mlp_s(tokens)
        head, attention, reduce = self._head_s(samples), self._attention_s(step), self._reduce_s(tokens)
        layer = attention_gemm + mlp_gemm + norms + rope + gate + reduce
        software = (own.step_us + own.row_us * samples + own.prefill_token_us * step.prefill_tokens) * 1e-6
        return Terms(
            attention_gemm=layers * attention_gemm, attention=attention, rope=layers * rope, norms=layers * norms,
            mlp_gemm=layers * mlp_gemm, gate=layers * gate, all_reduce=layers * reduce, head=head,
            waiting=max(0.0, self._floor - layers * layer - head - attention), software=software,
        )  # fmt: skip

    def gemm_s(self, rows: float, n: float, k: float, weights: float = 1) -> float:
        """Seconds for rows x k times k x n; with several weights all in one launch, each with a share of the rows."""
        fit = self._gpu.gemm
        compute = 2 * rows * n * k / (fit.compute_ratio * self._gpu.flops)
        memory = self._width * (weights * n * k + rows * (n + k)) / (fit.memory_ratio * self._gpu.memory_bytes_per_s)
        return _soft_max(compute, memory, fit.softness) + fit.launch_us * 1e-6

    def _attention_s(self, step: Step) -> float:
        decode = step.decode_rows * self._decode_row + step.decode_context * self._decode_context
        if step.prefill_rows:
            decode *= self._gpu.attention.mixed
            decode += step.prefill_work * self._prefill_work + step.prefill_tokens * self._prefill_token
        return self._decode_launch + decode * self._overheads.attention_ratio

    def _dense_s(self, tokens: int) -> float:
        q, kv = self._widths()
        layer = self._attention_gemm_s(tokens, q, kv) + self._mlp_s(tokens)
        layer += sum(self._elementwise_terms(tokens, q, kv)) + self._reduce_s(tokens)
        return self._model.layers * layer

    def _widths(self) -> tuple[float, float]:
        """Values of the queries, and of the keys and values, that one GPU has of a token."""
        model, tp = self._model, self._tp
        return model.heads * model.head_dim / tp, 2 * max(model.kv_heads / tp, 1.0) * model.head_dim

    def _attention_gemm_s(self, tokens: int, q: float, kv: float) -> float:
        hidden = self._model.hidden
        return self.gemm_s(tokens, q + kv, hidden) + self.gemm_s(tokens, hidden, q)

    def _reduce_s(self, tokens: int) -> float:
        """Two all-reduces, after attention and after the MLP."""
        if self._link is None or self._tp == 1:
            return 0.0
        alone = self._link.all_reduce_s(tokens * self._model.hidden * self._width, self._tp)
        return 2 * (alone * self._overheads.reduce_ratio + self._overheads.reduce_us * 1e-6)

    def _mlp_s(self, tokens: int) -> float:
        """Dense, or a mixture: each expert that any token reaches reads its weights and takes its share of tokens."""
        model = self._model
        inner = model.intermediate / self._tp
        if model.experts == 1:
            return self.gemm_s(tokens, 2 * inner, model.hidden) + self.gemm_s(tokens, model.hidden, inner)
        choices = tokens * model.active_experts
        reached = model.experts * (1 - (1 - 1 / model.experts) ** choices)
        return (
            self.gemm_s(tokens, model.experts, model.hidden)
            + self.gemm_s(choices, 2 * inner, model.hidden, reached)
            + self.gemm_s(choices, model.hidden, inner, reached)
        )

    def _elementwise_terms(self, tokens: int, q: float, kv: float) -> tuple[float, float, float]:
        """Two norms that add the residual (4 values a token each); rotary positions and the KV write; the gate."""
        model, fit = self._model, self._gpu.elementwise
        a_value = self._width / (fit.memory_ratio * self._gpu.memory_bytes_per_s)
        launch = fit.launch_us * 1e-6
        return (
            tokens * 8 * model.hidden * a_value + 2 * launch,
            tokens * 2 * (q + kv) * a_value + launch,
            tokens * 3 * model.intermediate / self._tp * model.active_experts * a_value + launch,
        )

    def _head_s(self, samples: int) -> float:
        return self.gemm_s(max(samples, 1), self._model.vocab_size / self._tp, self._model.hidden)


def _soft_max(a: float, b: float, softness: float) -> float:
    """(a^p + b^p)^(1/p): the larger of both where they differ much, up to 2^(1/p) times that where they are equal."""
    ratio = min(a, b) / max(a, b)
    return max(a, b) * math.exp(math.log1p(ratio**softness) / softness)


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Between measured points on a log-log line; beyond the last in proportion, before the first constant."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1] * x / xs[-1]
    right = bisect.bisect_right(xs, x)
    left = right - 1
    share = math.log(x / xs[left]) / math.log(xs[right] / xs[left])
    return ys[left] * math.exp(share * math.log(ys[right] / ys[left]))
