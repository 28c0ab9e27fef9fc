"""How long a step takes on given GPUs: a sum of operators, each as fast as that kind of GPU was measured to run it.

GEMM         a = 2TNK / (eta_c F), b = bytes / (eta_b BW), t = (a^p + b^p)^(1/p) + launch   (soft roofline);
             kernels with fixed tiles fill up TN to whole tiles, and in part to whole waves of them (`Waves`); tiles
             that run in pairs wait for each other
decode       KV bytes / (eta_kv BW) + per row and head + launch; another set of these beside prefills
prefill      4 heads d sum q(c + q/2) / (eta F) + per token and head
element-wise bytes / (eta BW) + launches
all-reduce   a measured table, or alpha + 2(n-1)/n s / beta + gamma sqrt(s); two a layer

A GPU's tables are of long runs, in which products keep it at its power limit. Where it has `Boost`, products that come
one by one run at a higher clock until the limit is felt: `StepClock` follows that from step to step.

Each kind of layer has its own; where it has a window, decode and prefill see what the window leaves. Latent attention
reads a latent once for all heads, which may be bound by their FLOPs (arXiv 2405.04434). Quantized weights are read
quantized; where the GPU computes in that format so does the GEMM, else in 16 bit.

F: peak FLOP/s in 16 bit without sparsity. BW: peak bytes/s of the memory. T: tokens in the step. Everything else is in
`servers/data/gpus.json`, each value with its source and its error.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from backends.decoder import Attention as Heads
from backends.decoder import LatentAttention, Layers, Mlp, ModelSpec, Precision, Product, Recurrent, Window
from servers.schedulers import Step
from servers.simulator import experts
from servers.simulator.formats import computes

LATENT_TILE = 64  # heads that share a tile where all share one latent (FlashAttention 3, FlashMLA)
# Launches of a layer kernel by kernel, beside norms and products: counted in steps of vLLM 0.25.1
# (results:models/steps), and what Python does around them in operators that are not compiled, in units of a launch
ATTENTION_LAUNCHES, LATENT_LAUNCHES = 3, 8  # rotary positions, the cache's write, attention; copies of keys and values
# Sorting, two group products, gate, sum; a router of plain operators, and the gate of a shared expert beside it
ROUTED_LAUNCHES, PLAIN_ROUTING_LAUNCHES = 12, 9
GRAPH_LAUNCHES = 2.0  # of latent attention between parts of graphs, over those of others
LATENT_MOVED = 16  # values of the queries' width that a token's keys, queries and outputs are copied and rotated in
FASTER = 2.0  # 8-bit products over 16-bit ones by the same tensor cores; 4-bit over 8-bit
FLOAT_ROUTER_LAUNCHES = 2  # of a router in 32 bit, beside its product: the sum of its parts, and the choice by groups
FLOAT_RATIO = 1 / 27  # of the 16-bit peak, products in 32 bit without tensor cores: a router's, 256 to 4096 tokens
# Group products of few tokens have tiles of so many rows and 64 columns (vLLM's defaults, get_default_config of its
# fused_moe.py). Several tiles for one expert's rows read its weights as often, where they are too large to stay in the
# L2 cache; bytes that all tiles read a second, for each FLOP/s of the peak. 48 rows on 4 experts of 33 MB (gate and up)
# take 1.7 times as long as 16, on 8 of 23 MB 1.6, on 6 of 12 MB 1.4 (results:models/steps_mixtures, models/steps)
NARROW_TILES, NARROW_COLUMNS = ((32, 16), (64, 32)), 64
TILES_READ, L2_KEEPS = 0.007, 16 << 20
# The largest of vLLM's graphs, by type of model, where it is not 512 (vllm/model_executor/models/config.py of 0.25)
GRAPH_TOKENS = {"gpt_oss": 1024}
# Of products of at most so many rows: rows and columns of the tiles that run together, and how many these are. vLLM's
# fp8 kernels on Hopper (csrc/quantization/w8a8/cutlass/c3x/scaled_mm_sm90_fp8_dispatch.cuh).
TILES = (
    (64, 64, 64, 1),
    (128, 128, 128, 2),
    (math.inf, 256, 128, 2),
)


class Waves(msgspec.Struct, frozen=True, kw_only=True):
    """The waves of kernels with the tiles of `TILES`, one on each processor at a time. idle: how much of the processors
    that are without a tile in the last wave counts as computed."""

    processors: int
    idle: float


class GemmCost(msgspec.Struct, frozen=True, kw_only=True):
    """narrow: (rows, memory_ratio) for products of at most so many rows, whose kernels have other tiles; ascending.
    waves: None where kernels choose their tiles by the product, as cuBLAS's do."""

    compute_ratio: float
    memory_ratio: float
    softness: float
    launch_us: float
    narrow: tuple[tuple[int, float], ...] = ()
    waves: Waves | None = None

    def outputs(self, rows: float, n: float) -> float:
        """How many outputs a product with rows x n computes, in whole tiles and waves."""
        if self.waves is None:
            return rows * n
        tiled, whole = tiled_outputs(rows, n, self.waves.processors)
        return tiled + self.waves.idle * (whole - tiled)

    def memory_ratio_of(self, rows: float) -> float:
        for most, ratio in self.narrow:
            if rows <= most:
                return ratio
        return self.memory_ratio


class Boost(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU computes faster before its power limit slows it. ratio: of the rates at its highest clock over those
    of the tables; most_ms: how much time that saves at most at once; refill: and how much of that comes back in a
    second that is not bound by computing."""

    ratio: float
    most_ms: float
    refill_ms: float


class DecodeAttentionCost(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of rows with one query each. memory_ratio: of the peak, as their cache is read. tile_ns: for each row
    and KV head, whose query heads are one tile of the kernel's; head_ns: for each row and query head."""

    memory_ratio: float
    launch_us: float
    tile_ns: float
    head_ns: float = 0.0


class AttentionCost(msgspec.Struct, frozen=True, kw_only=True):
    """decode: of rows alone. mixed: of rows in one launch with prefills, whose tiles are larger."""

    decode: DecodeAttentionCost
    mixed: DecodeAttentionCost
    prefill_compute_ratio: float
    prefill_token_head_ns: float


class ElementwiseCost(msgspec.Struct, frozen=True, kw_only=True):
    memory_ratio: float
    launch_us: float


class GpuLink(msgspec.Struct, frozen=True, kw_only=True):
    """How GPUs reduce. Either `bytes` and `us` as measured among `ranks`, or alpha, beta and gamma. pair: among fewer,
    at least two, where that is known by itself."""

    ranks: int = 0
    bytes: tuple[int, ...] = ()
    us: tuple[float, ...] = ()
    alpha_us: float = 0.0
    beta_bytes_per_s: float = math.inf
    gamma_us: float = 0.0  # for sqrt(1 MB)
    pair: GpuLink | None = None

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        """Seconds until `ranks` GPUs all hold the sum of `size_bytes` from each."""
        if self.pair is not None and ranks <= max(self.pair.ranks, 2):
            return self.pair.all_reduce_s(size_bytes, ranks)
        if not self.us:
            ring = 2 * (ranks - 1) / ranks * size_bytes / self.beta_bytes_per_s
            return self.alpha_us * 1e-6 + ring + self.gamma_us * 1e-6 * math.sqrt(size_bytes / 1e6)
        scale = ((ranks - 1) / ranks) / ((self.ranks - 1) / self.ranks)
        return _interpolate(self.bytes, self.us, size_bytes * scale) * 1e-6


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of GPU. memory_bytes: what a server sees of it. links: nvlink, nvlink-pairs, pcie, host, where it has
    them; the usual one first. gemm: in 16 bit; gemms: in other dtypes, by name ("fp8"), whose compute_ratio is still of
    `flops`, the 16-bit peak; experts: group products of mixtures, by name ("bf16" for all of 16 bit), where those were
    measured. attentions: over a cache in other dtypes. latent: of DeepSeek's latent attention."""

    name: str
    aliases: tuple[str, ...] = ()
    flops: float
    memory_bytes_per_s: float
    memory_bytes: int
    gemm: GemmCost
    gemms: dict[str, GemmCost] = {}
    experts: dict[str, GemmCost] = {}
    attention: AttentionCost
    attentions: dict[str, AttentionCost] = {}
    latent: AttentionCost | None = None
    elementwise: ElementwiseCost
    links: dict[str, GpuLink]
    boost: Boost | None = None
    source: str
    error: str

    def boosted(self, ratio: float) -> GpuSpec:
        """The same GPU, which computes so many times as fast and reads its memory as before."""

        def faster(fit: GemmCost) -> GemmCost:
            return msgspec.structs.replace(fit, compute_ratio=ratio * fit.compute_ratio)

        def attends(fit: AttentionCost) -> AttentionCost:
            return msgspec.structs.replace(fit, prefill_compute_ratio=ratio * fit.prefill_compute_ratio)

        return msgspec.structs.replace(
            self,
            gemm=faster(self.gemm),
            gemms={name: faster(fit) for name, fit in self.gemms.items()},
            experts={name: faster(fit) for name, fit in self.experts.items()},
            attention=attends(self.attention),
            attentions={name: attends(fit) for name, fit in self.attentions.items()},
            latent=self.latent and attends(self.latent),
            boost=None,
        )


class Overheads(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's own software adds. step: before each step's kernels run; layer: least time of a layer where
    kernels are launched one by one (0 with CUDA graphs). attention_ratio: the time of its attention over that of the
    GPU's table (FlashAttention 3). reduce: for reductions slower than those measured alone.

    launch: what the CPU takes to put a step together, and to launch it where it is one CUDA graph, while the GPU may
    still be at the step before; launch_row: and for each row, to schedule it and to take in its token. All 0 where that
    is not known. launch_layer: for each layer, where a step has prefills and its parts are CUDA graphs;
    launch_eager_layer: where it has more than graph_tokens tokens and every kernel is launched by itself, for a layer
    with the launches of Llama's; others take it in proportion to theirs. Steps of at most graph_tokens tokens are
    filled up to a graph's size. decode_graphs and prefill_graphs: those sizes, ascending, of a server that has other
    ones than vLLM's, for steps of decodes and for steps with prefills; graph_tokens says nothing then."""

    step_us: float = 0.0
    row_us: float = 0.0
    prefill_token_us: float = 0.0
    layer_us: float = 0.0
    attention_ratio: float = 1.0
    reduce_us: float = 0.0
    reduce_ratio: float = 1.0
    launch_us: float = 0.0
    launch_row_us: float = 0.0
    launch_layer_us: float = 0.0
    launch_eager_layer_us: float = 0.0
    launch_spread: float = 0.0
    graph_tokens: int = 0
    decode_graphs: tuple[int, ...] = ()
    prefill_graphs: tuple[int, ...] = ()

    def graph_of(self, rows: int, prefill_tokens: int) -> int | None:
        """Tokens of the CUDA graph, or of its parts, that a step is filled up to; None: there is none as large."""
        tokens = rows + prefill_tokens
        if not self.decode_graphs:
            return graph_size(tokens) if tokens <= self.graph_tokens else None
        sizes = self.prefill_graphs if prefill_tokens else self.decode_graphs
        at = bisect.bisect_left(sizes, tokens)
        return sizes[at] if at < len(sizes) else None


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


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """How a GPU multiplies: bytes of a weight and of an input, the fit of the products, and that of a mixture's.
    assumed: derived from the fit in 16 bit, for want of a measured one."""

    weight_bytes: float
    input_bytes: float
    fit: GemmCost
    experts: GemmCost | None
    assumed: bool = False


def arithmetic(gpu: GpuSpec, precision: Precision) -> Arithmetic:
    """The arithmetic of the weights that are quantized, or of all where none are."""
    quantization, width = precision.quantization, precision.value_bytes
    if quantization is None:
        return Arithmetic(weight_bytes=width, input_bytes=width, fit=gpu.gemm, experts=gpu.experts.get("bf16"))
    native = computes(gpu.name, quantization.computes)
    if native is None:
        weight_bytes = quantization.weight_bytes
        return Arithmetic(weight_bytes=weight_bytes, input_bytes=width, fit=gpu.gemm, experts=gpu.experts.get("bf16"))
    fit = gpu.gemms.get(native)
    if fit is None:
        times = FASTER**2 if native == "nvfp4" else FASTER
        fit = msgspec.structs.replace(gpu.gemm, compute_ratio=times * gpu.gemm.compute_ratio)
    bytes_ = quantization.weight_bytes
    return Arithmetic(
        weight_bytes=bytes_, input_bytes=bytes_, fit=fit, experts=gpu.experts.get(native),
        assumed=native not in gpu.gemms,
    )  # fmt: skip


class StepCost:
    """Seconds that a step takes on `tp` GPUs of one kind."""

    def __init__(
        self, model: ModelSpec, gpu: GpuSpec, tp: int, link: GpuLink | None, precision: Precision, overheads: Overheads
    ) -> None:
        self._gpu = gpu
        self._model = model
        self._tp = tp
        self._link = link
        self._precision = precision
        if overheads.graph_tokens:
            most = GRAPH_TOKENS.get(model.model_type, overheads.graph_tokens)
            overheads = msgspec.structs.replace(overheads, graph_tokens=most)
        self._overheads = overheads
        self._attention_ratio = overheads.attention_ratio
        self._plain = arithmetic(gpu, Precision(dtype=precision.dtype))
        self._quantized = arithmetic(gpu, precision)
        self._dense: dict[int, float] = {}  # tokens -> what depends on their number alone
        self._head: dict[int, float] = {}
        # rows -> of steps without prefills: all but attention, attention but for the context, software
        self._decodes: dict[int, tuple[float, float, float]] = {}
        attention = self._attention = _attention_of(model, gpu, precision)
        layers = model.layers
        regimes = attention.decode, attention.mixed
        self._decode_launch, self._mixed_launch = (layers * rows.launch_us * 1e-6 for rows in regimes)
        self._decode_row, self._mixed_row = (
            sum(kind.count * self._row_s(rows, kind.attention) for kind in model.kinds) for rows in regimes
        )
        self._prefill_token = sum(kind.count * self._token_s(kind.attention) for kind in model.kinds)
        self._reads, self._mixed_reads = (
            [(kind.attention.window, self._context_s(kind, rows)) for kind in model.kinds] for rows in regimes
        )
        self._pairs = [(kind.attention.window, self._pair_s(kind)) for kind in model.kinds]
        whole = len(self._reads) == 1 and self._reads[0][0] is None  # one kind of layers, without a window
        self._read_s = self._reads[0][1] if whole else None
        self._floor = layers * overheads.layer_us * 1e-6
        launches = sum(kind.count * launches_of(kind, model.hidden) for kind in model.kinds)
        self._eager_us = overheads.launch_eager_layer_us * launches / LLAMA_LAUNCHES
        latent = sum(kind.count for kind in model.kinds if isinstance(kind.attention, LatentAttention))
        self._graph_us = overheads.launch_layer_us * (layers + (GRAPH_LAUNCHES - 1) * latent)

    def with_overheads(self, overheads: Overheads) -> StepCost:
        return StepCost(self._model, self._gpu, self._tp, self._link, self._precision, overheads)

    def at_full_clock(self) -> StepCost | None:
        """The same at the GPU's highest clock, where that is known to be higher than that of its tables."""
        boost = self._gpu.boost
        if boost is None:
            return None
        gpu = self._gpu.boosted(boost.ratio)
        return StepCost(self._model, gpu, self._tp, self._link, self._precision, self._overheads)

    def clock(self, factor: float = 1.0) -> StepClock:
        """The clock of a server that begins. factor: of all times, where one of its GPUs is slower."""
        return StepClock(self, self._gpu.boost, self._overheads.launch_spread, factor)

    def __call__(self, step: Step) -> float:
        rows = step.decode_rows
        if step.prefill_rows or self._read_s is None or len(step.emits) != rows:
            seconds = self._kernels_s(rows, step.prefill_tokens, len(step.emits)) + self._attention_s(step)
            software_s = self._software_s(step)
        else:  # most steps: in their rows' context alone they differ
            decode = self._decodes.get(rows)
            if decode is None:
                kernels_s, row_s = self._kernels_s(rows, 0, rows), rows * self._decode_row
                decode = self._decodes[rows] = kernels_s, row_s, self._software_s(step)
            kernels_s, row_s, software_s = decode
            attention = row_s + step.decode_context * self._read_s
            seconds = kernels_s + (self._decode_launch + attention * self._attention_ratio)
        if seconds < self._floor:
            seconds = self._floor
        return seconds + software_s

    def _kernels_s(self, rows: int, prefill_tokens: int, samples: int) -> float:
        """All but attention."""
        tokens = self._overheads.graph_of(rows, prefill_tokens) or rows + prefill_tokens
        dense = self._dense.get(tokens)
        if dense is None:
            dense = self._dense[tokens] = self._dense_s(tokens)
        head = self._head.get(samples)
        if head is None:
            head = self._head[samples] = self._head_s(samples)
        return dense + head

    def _software_s(self, step: Step) -> float:
        own, samples = self._overheads, len(step.emits)
        return (own.step_us + own.row_us * samples + own.prefill_token_us * step.prefill_tokens) * 1e-6

    @property
    def by_sums(self) -> bool:
        """Whether the rows' context together says what they take; else, with windows, it takes the length of each."""
        return self._read_s is not None

    def launch_s(self, step: Step) -> tuple[float, float]:
        """Seconds that the CPU takes in the mean to launch the step, and of these before its first kernel, or its
        graph, is."""
        own = self._overheads
        us = prepare_us = own.launch_us + own.launch_row_us * len(step.emits)
        if own.graph_of(step.decode_rows, step.prefill_tokens) is None:
            us += self._eager_us
        elif step.prefill_rows:
            us += self._graph_us
        return us * 1e-6, prepare_us * 1e-6

    def terms(self, step: Step) -> Terms:
        """What `step` takes, by operator."""
        own = self._overheads
        rows, prefill_tokens, samples = step.decode_rows, step.prefill_tokens, len(step.emits)
        tokens = own.graph_of(rows, prefill_tokens) or rows + prefill_tokens
        kinds = [(kind.count, self._layer_terms(kind, tokens)) for kind in self._model.kinds]
        attention_gemm, mlp_gemm, norms, rope, gate, all_reduce = (
            sum(count * terms[place] for count, terms in kinds) for place in range(6)
        )
        layers_s = sum(count * sum(terms) for count, terms in kinds)
        head, attention = self._head_s(samples), self._attention_s(step)
        return Terms(
            attention_gemm=attention_gemm, attention=attention, rope=rope, norms=norms, mlp_gemm=mlp_gemm, gate=gate,
            all_reduce=all_reduce, head=head, waiting=max(0.0, self._floor - layers_s - head - attention),
            software=self._software_s(step),
        )  # fmt: skip

    def unmeasured_s(self, rows: int, context: int) -> dict[str, float]:
        """By name the operators that nobody measured on such a GPU: seconds of a step in which so many rows decode at
        that context each."""
        seconds: dict[str, float] = {}
        for kind in self._model.kinds:
            for name, each_s in self._unmeasured_s(kind, rows, context):
                seconds[name] = seconds.get(name, 0.0) + kind.count * each_s
        return seconds

    def _unmeasured_s(self, kind: Layers, rows: int, context: int) -> Iterator[tuple[str, float]]:
        """Of one layer."""
        heads, decode = kind.attention, self._attention.decode
        if isinstance(heads, Recurrent) and heads.heads:
            yield "linear attention", rows * self._row_s(decode, heads)
        elif isinstance(heads, LatentAttention) and (self._gpu.latent is None or heads.index_heads):
            read_s = self._context_s(kind, decode) / kind.count
            sparse = "sparse latent" if heads.index_heads else "latent"
            yield (
                f"{sparse} attention",
                decode.launch_us * 1e-6 + rows * (self._row_s(decode, heads) + context * read_s),
            )
        if kind.mlp.experts > 1 and self._quantized.experts is None:
            yield "group products of experts", self.experts_s(kind.mlp, rows, kind.mlp.matrices - 1)

    def gemm_s(self, rows: float, n: float, k: float, weights: float = 1, numbers: Arithmetic | None = None) -> float:
        """Seconds for rows x k times k x n; with several weights all in one launch, each with a share of the rows.
        numbers: default those of weights that are not quantized."""
        numbers = numbers or self._plain
        fit, width = numbers.fit, self._plain.weight_bytes
        compute = 2 * fit.outputs(rows, n) * k / (fit.compute_ratio * self._gpu.flops)
        read = numbers.weight_bytes / width * (weights * n * k) + rows * (n + numbers.input_bytes / width * k)
        memory = width * read / (fit.memory_ratio_of(rows) * self._gpu.memory_bytes_per_s)
        return _soft_max(compute, memory, fit.softness) + fit.launch_us * 1e-6

    def _row_s(self, rows: DecodeAttentionCost, heads: Heads | LatentAttention | Recurrent) -> float:
        """Seconds for a row on one GPU, in one layer, whatever its context. A state is read and written."""
        if isinstance(heads, Recurrent):
            moved = 2 * heads.state_bytes(self._precision) / self._tp
            return moved / (rows.memory_ratio * self._gpu.memory_bytes_per_s)
        queries = heads.heads / self._tp
        tiles = (
            math.ceil(queries / LATENT_TILE)
            if isinstance(heads, LatentAttention)
            else max(1.0, heads.kv_heads / self._tp)
        )
        return (rows.tile_ns * tiles + rows.head_ns * queries) * 1e-9

    def _token_s(self, heads: Heads | LatentAttention | Recurrent) -> float:
        """Seconds for a token of a prefill, in one layer, whatever its context. A state is updated and asked."""
        if isinstance(heads, Recurrent):
            flops = 4 * heads.state / self._tp
            return flops / (self._attention.prefill_compute_ratio * self._gpu.flops)
        return self._attention.prefill_token_head_ns * 1e-9 * (heads.heads / self._tp)

    def _context_s(self, kind: Layers, rows: DecodeAttentionCost) -> float:
        """For each token that rows see, over all layers of the kind: its cache is read, and multiplied."""
        heads, tp = kind.attention, self._tp
        values = kind.count * heads.kv_values_of(tp)
        read_s = values * self._precision.kv_bytes / (rows.memory_ratio * self._gpu.memory_bytes_per_s)
        if not isinstance(heads, LatentAttention):
            return read_s
        flops = kind.count * heads.decode_pair_flops / tp
        return max(read_s, flops / (self._attention.prefill_compute_ratio * self._gpu.flops))

    def _pair_s(self, kind: Layers) -> float:
        """For each pair of query and key in a prefill."""
        flops = kind.count * (kind.attention.pair_flops / self._tp)
        return flops / (self._attention.prefill_compute_ratio * self._gpu.flops)

    def _attention_s(self, step: Step) -> float:
        if step.prefill_rows and step.decode_rows:
            launch_s, row_s, reads = self._mixed_launch, self._mixed_row, self._mixed_reads
        else:
            launch_s, row_s, reads = self._decode_launch, self._decode_row, self._reads
        seconds = step.decode_rows * row_s
        if self._read_s is not None:
            seconds += step.decode_context * reads[0][1] + step.prefill_work * self._pairs[0][1]
        else:
            seconds += sum(_context_seen(step, window) * read_s for window, read_s in reads)
            seconds += sum(_work_seen(step, window) * pair_s for window, pair_s in self._pairs)
        seconds += step.prefill_tokens * self._prefill_token
        return launch_s + seconds * self._attention_ratio

    def _dense_s(self, tokens: int) -> float:
        return sum(kind.count * _added(self._layer_terms(kind, tokens)) for kind in self._model.kinds)

    def _layer_terms(self, kind: Layers, tokens: int) -> tuple[float, float, float, float, float, float]:
        """Seconds of one layer: products of attention and of the MLP, norms, rotary positions, the gate, reductions."""
        norms, rope, gate = self._elementwise_terms(kind, tokens)
        return (
            self._attention_gemm_s(kind, tokens),
            self._mlp_s(kind, tokens),
            norms,
            rope,
            gate,
            self._reduce_s(tokens),
        )

    def _attention_gemm_s(self, kind: Layers, tokens: int) -> float:
        numbers = self._numbers("attention")

        def product_s(each: Product) -> float:
            rows = tokens * each.copies
            return self.gemm_s(rows, each.outputs, each.inputs, each.copies, numbers) + self._quantize_s(
                rows, each.inputs, numbers
            )

        return sum(map(product_s, kind.attention.products(self._model.hidden, self._tp)))

    def _numbers(self, part: str) -> Arithmetic:
        """The arithmetic of a part of the layers: that of most of its weights."""
        return self._quantized if self._precision.quantized(part) >= 0.5 else self._plain

    def _quantize_s(self, rows: float, k: float, numbers: Arithmetic) -> float:
        """Seconds to bring the inputs of a product, rows x k, into its number format."""
        if numbers.input_bytes == self._plain.input_bytes:
            return 0.0
        fit = self._gpu.elementwise
        moved = rows * k * (self._plain.input_bytes + numbers.input_bytes)
        return moved / (fit.memory_ratio * self._gpu.memory_bytes_per_s) + fit.launch_us * 1e-6

    def _reduce_s(self, tokens: int) -> float:
        """Two all-reduces, after attention and after the MLP."""
        if self._link is None or self._tp == 1:
            return 0.0
        alone = self._link.all_reduce_s(tokens * self._model.hidden * self._precision.value_bytes, self._tp)
        return 2 * (alone * self._overheads.reduce_ratio + self._overheads.reduce_us * 1e-6)

    def _mlp_s(self, kind: Layers, tokens: int) -> float:
        """Dense, or a mixture: each expert that any token reaches reads its weights and takes its share of tokens."""
        mlp = kind.mlp
        first = mlp.matrices - 1  # gate and up are one product
        if mlp.experts == 1:
            return self._dense_mlp_s(tokens, first, mlp.width / self._tp, "mlp")
        seconds = self.router_s(mlp, tokens) + self.experts_s(mlp, tokens, first)
        return seconds + (self._dense_mlp_s(tokens, first, mlp.shared / self._tp, "shared") if mlp.shared else 0.0)

    def _dense_mlp_s(self, tokens: int, first: int, inner: float, part: str) -> float:
        if not inner:
            return 0.0
        hidden, numbers = self._model.hidden, self._numbers(part)
        up = self.gemm_s(tokens, first * inner, hidden, 1, numbers) + self._quantize_s(tokens, hidden, numbers)
        return up + self.gemm_s(tokens, hidden, inner, 1, numbers) + self._quantize_s(tokens, inner, numbers)

    def router_s(self, mlp: Mlp, tokens: int) -> float:
        """Of a router in 32 bit all kernels; of others its product alone."""
        seconds = self.gemm_s(tokens, mlp.experts, self._model.hidden)
        if mlp.router_float:
            flops = 2 * tokens * mlp.experts * self._model.hidden
            seconds += flops / (FLOAT_RATIO * self._gpu.flops)
            seconds += FLOAT_ROUTER_LAUNCHES * self._gpu.elementwise.launch_us * 1e-6
        return seconds

    def experts_s(self, mlp: Mlp, tokens: int, first: int) -> float:
        """Where group products were measured, these quantize their inputs themselves; the sum over a token's experts
        comes after them."""
        hidden, inner, numbers, choices = self._model.hidden, mlp.width / self._tp, self._quantized, tokens * mlp.active
        chances = experts.uneven(mlp.experts, mlp.active, mlp.imbalance)
        read = experts.reached(chances, tokens)
        after = 0.0
        if numbers.experts is not None:
            fit = self._gpu.elementwise
            numbers = replace(numbers, fit=numbers.experts)
            values = choices * hidden * self._precision.value_bytes
            after = values / (fit.memory_ratio * self._gpu.memory_bytes_per_s) + fit.launch_us * 1e-6
        up = self.gemm_s(choices, first * inner, hidden, read, numbers)
        products = up + self.gemm_s(choices, hidden, inner, read, numbers)
        rows = next((rows for most, rows in NARROW_TILES if tokens <= most), math.inf)
        plain = numbers.weight_bytes == self._plain.weight_bytes
        if tokens * chances[0] > rows and plain and first * inner * hidden * numbers.weight_bytes > L2_KEEPS:
            tiles = experts.tiles(chances, tokens, rows) * mlp.matrices * hidden * inner / NARROW_COLUMNS
            read_s = tiles * (rows + NARROW_COLUMNS) * numbers.weight_bytes / (TILES_READ * self._gpu.flops)
            products = max(products, read_s + 2 * numbers.fit.launch_us * 1e-6)
        return products + after

    def _elementwise_terms(self, kind: Layers, tokens: int) -> tuple[float, float, float]:
        """Norms that add the residual (4 values a token each); rotary positions and the KV write, and norms of queries
        and keys where there are any; the gate."""
        fit, heads, mlp = self._gpu.elementwise, kind.attention, kind.mlp
        a_value = self._precision.value_bytes / (fit.memory_ratio * self._gpu.memory_bytes_per_s)
        launch = fit.launch_us * 1e-6
        queries, kv = heads.query_width / self._tp, heads.kv_values_of(self._tp)
        rope = tokens * 2 * (queries + kv) * a_value + launch
        if isinstance(heads, LatentAttention):
            rope += tokens * LATENT_MOVED * queries * a_value + 4 * launch
        if mlp.routed_plainly:
            rope += PLAIN_ROUTING_LAUNCHES * launch
        if isinstance(heads, Heads) and heads.qk_norm:
            rope += tokens * 2 * (queries + kv / 2) * a_value + 2 * launch
        return (
            tokens * 4 * kind.norms * self._model.hidden * a_value + kind.norms * launch,
            rope,
            tokens * mlp.matrices * (mlp.width * mlp.active + mlp.shared) / self._tp * a_value
            + launch * (1 + bool(mlp.shared and not mlp.routed_plainly)),
        )

    def _head_s(self, samples: int) -> float:
        return self.gemm_s(max(samples, 1), self._model.vocab_size / self._tp, self._model.hidden)


class StepClock:
    """How long each step of one server takes on its GPUs, and its CPU to launch it, in the order of the steps."""

    def __init__(self, cost: StepCost, boost: Boost | None, spread: float, factor: float) -> None:
        self._cost_s, self._launch_s, self._factor = cost.__call__, cost.launch_s, factor
        self._pace = None if not spread else partial(random.Random(0).lognormvariate, -(spread**2) / 2, spread)
        self._fast = cost.at_full_clock()
        if boost is not None:
            self._ratio, self._most_s, self._refill = boost.ratio, boost.most_ms * 1e-3, boost.refill_ms * 1e-3
            self._left_s = self._most_s  # of what the highest clock may still save
        self._until_s = 0.0

    def launch_s(self, step: Step) -> tuple[float, float]:
        """As of StepCost, but one launch of those whose mean that is. Steps of decodes alone take the mean: they are
        launched alike many times."""
        launch_s, prepare_s = self._launch_s(step)
        if step.prefill_rows and self._pace is not None:
            launch_s = prepare_s + (launch_s - prepare_s) * self._pace()
        return launch_s, prepare_s

    def step_s(self, step: Step, begin_s: float) -> float:
        seconds = self._cost_s(step)
        if self._fast is not None:
            if step.prefill_rows:
                seconds -= self._saved_s(step, begin_s, seconds)
            elif self._left_s < self._most_s:  # nothing is saved, and some comes back
                self._rest(seconds, begin_s)
        seconds *= self._factor
        self._until_s = begin_s + seconds
        return seconds

    def _saved_s(self, step: Step, begin_s: float, seconds: float) -> float:
        assert self._fast is not None
        could_s = seconds - self._fast(step)
        self._rest(max(seconds - could_s * self._ratio / (self._ratio - 1), 0.0), begin_s)
        saved_s = could_s if could_s < self._left_s else self._left_s
        self._left_s -= saved_s
        return saved_s

    def _rest(self, free_s: float, begin_s: float) -> None:
        """What comes back in seconds without products, and in those without a step, until begin_s."""
        if begin_s > self._until_s:
            free_s += begin_s - self._until_s
        left_s = self._left_s + free_s * self._refill
        self._left_s = left_s if left_s < self._most_s else self._most_s


def launches_of(kind: Layers, hidden: int) -> int:
    """How many kernels a layer launches where each is launched by itself, without a quantization's."""
    heads, mlp = kind.attention, kind.mlp
    launches = kind.norms + sum(1 for _ in heads.products(hidden, 1))
    launches += LATENT_LAUNCHES if isinstance(heads, LatentAttention) else ATTENTION_LAUNCHES
    launches += isinstance(heads, Heads) and (heads.qk_norm or heads.wide_norm)
    dense = 3  # two products and the gate
    if mlp.experts == 1:
        return launches + dense
    launches += PLAIN_ROUTING_LAUNCHES * mlp.routed_plainly + FLOAT_ROUTER_LAUNCHES * mlp.router_float
    return launches + ROUTED_LAUNCHES + dense * bool(mlp.shared)


LLAMA_LAUNCHES = 10  # of `launches_of`


def _attention_of(model: ModelSpec, gpu: GpuSpec, precision: Precision) -> AttentionCost:
    if gpu.latent is not None and any(isinstance(kind.attention, LatentAttention) for kind in model.kinds):
        return gpu.latent
    return gpu.attentions.get(precision.kv_cache_dtype, gpu.attention)


def graph_size(tokens: int) -> int:
    """The size of vLLM's CUDA graph that a step of so many tokens runs in: 1, 2, 4, multiples of 8, and from 256 on of
    16 (vllm/config/vllm.py of 0.25)."""
    if tokens <= 4:
        return tokens if tokens != 3 else 4
    return -(-tokens // 8) * 8 if tokens <= 256 else -(-tokens // 16) * 16


def _added(terms: tuple[float, float, float, float, float, float]) -> float:
    attention_gemm, mlp_gemm, norms, rope, gate, reduce = terms
    return attention_gemm + mlp_gemm + (norms + rope + gate + reduce)


def _context_seen(step: Step, window: Window | None) -> float:
    """Tokens that the step's decode rows see together. What each has is taken in proportion to the lengths of all that
    get a token: alone each is known only to the scheduler."""
    if window is None or step.decode_context <= window.tokens:
        return step.decode_context
    lengths = step.lengths or [sequence.prompt + sequence.emitted for sequence in step.emits]
    scale = step.decode_context / step.decode_rows * len(lengths) / sum(lengths)
    longest = max(lengths) * scale
    if longest <= window.tokens:
        return step.decode_context
    seen = sum([window.seen(round(length * scale)) for length in lengths])
    return seen * step.decode_rows / len(lengths)


def _work_seen(step: Step, window: Window | None) -> float:
    """Pairs of query and key of the step's prefills."""
    if window is None:
        return step.prefill_work
    return sum(window.work(cached, tokens) for cached, tokens in step.chunks)


def tiled_outputs(rows: float, n: float, processors: int) -> tuple[float, float]:
    """Outputs of a product with rows x n in whole tiles, and in whole waves of them. Tiles that run in pairs wait for
    each other: the fewer rows the second of the last pair has, the longer all take, where there are several pairs by up
    to one more (measured: results:operators/h100_partial.csv)."""
    height, width, together = next(tiles for most, *tiles in TILES if rows <= most)
    high, wide = math.ceil(rows / height), math.ceil(n / width)
    tiles, tile = together * high * wide, height * width / together
    waiting = 0.0
    if together > 1:
        empty = min(1.0, 2 * (high - rows / height))  # of the second tile
        waiting = empty * (1 - 1 / high) * together * wide * tile
    return tiles * tile + waiting, math.ceil(tiles / processors) * processors * tile + waiting


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
