"""How long the operators of a decoder take on this GPU: matrix products, attention, element-wise kernels, all-reduces.

    python benchmarks/gpu_operators.py OUT.csv            # one GPU, 16 bit: gemm, elementwise, attention
    python benchmarks/gpu_operators.py OUT.csv --kinds gemm_fp8 layer attention_fp8 experts chunks --seconds 230
    python benchmarks/gpu_operators.py OUT.csv --kinds served       # attention of rows as a server runs it, 80 s
    python benchmarks/gpu_operators.py OUT.csv --kinds partial      # products that do not fill a kernel's tiles
    python benchmarks/gpu_operators.py OUT.csv --kinds latent windows head norms experts --seconds 100  # other models
    python benchmarks/gpu_operators.py OUT.csv --ranks 4  # all-reduces among 4 GPUs; NCCL_P2P_DISABLE=1 is honoured

One line an operator: kind, sizes, median microseconds. Every measurement is a CUDA graph of many launches over buffers
larger than the L2 cache together, so neither launch overhead nor a warm cache shows (`l2=warm` in the sizes: one buffer
for all launches). `servers/data` is fitted to these. With --seconds, the kinds share that time and each ends in time;
its sizes come in an order in which any beginning is of use. Needs torch; attention, experts, the servers' own
element-wise kernels and all-reduce come from an installed vLLM (FlashAttention 3). A kind that cannot run here is named
with its reason, and the others go on. Without a GPU a few small sizes run on the CPU: a rehearsal, no measurement.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

Row = tuple[str, str, float]
SHAPES = {  # (hidden, intermediate, heads, KV heads)
    "7b": (4096, 11008, 32, 32),
    "13b": (5120, 13824, 40, 40),
    "70b": (8192, 28672, 64, 8),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
FP8_SHAPES = {  # those, and what people serve in fp8
    "llama-3.1-8b": (4096, 14336, 32, 8),
    "qwen3-32b": (5120, 25600, 64, 8),
    "70b": (8192, 28672, 64, 8),
    "7b": (4096, 11008, 32, 32),
}
FP8_TOKENS = (1, 16, 64, 256, 1024, 8192, 4, 128, 512, 2048, 8, 32, 192, 768, 4096)
PARTIAL_SHAPES = [FP8_SHAPES[name] for name in ("llama-3.1-8b", "qwen3-32b")]
PARTIAL_TOKENS = (  # each below, at or beyond a multiple of 128 or 256
    546, 713, 768, 837, 997, 1024, 1053, 1200, 1280, 513, 600, 640, 760, 900, 1281, 1500, 512, 300, 384, 257, 256,
    200, 160, 130, 450, 1828, 2049, 2048, 2300, 4100, 4096, 8192, 8000,
)  # fmt: skip
EXPERTS = {  # (experts, chosen, hidden, width of an expert)
    "deepseek-v2-lite": (64, 6, 2048, 1408),
    "glm-4.5-air": (128, 8, 4096, 1408),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "mixtral-8x7b at TP 2": (8, 2, 4096, 7168),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen3-235b-a22b at TP 4": (128, 8, 4096, 384),
}
LATENT = (512, 64, 128, 128)  # of DeepSeek's: rank, rotary, other values of a head's query and key, its values
WINDOWED = {  # heads, KV heads, values of a head, window
    "gemma-3-12b": (16, 8, 256, 1024),
    "gemma-3-27b": (32, 16, 128, 1024),
    "gpt-oss-20b": (64, 8, 64, 128),
}
HEADS = {  # words, hidden
    "qwen3-8b": (151936, 4096),
    "gemma-3-12b": (262208, 3840),
    "phi-4": (100352, 5120),
    "deepseek-v2-lite": (102400, 2048),
    "gpt-oss-20b": (201088, 2880),
}
L2_BYTES = 256 << 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REHEARSED = (1, 16)  # tokens, on a CPU


def timed_us(launches: list[Callable[[], object]]) -> float:
    """Median microseconds of one launch, from replays of a graph of all of them."""
    if DEVICE == "cpu":
        begun = time.perf_counter()
        for launch in launches:
            launch()
        return (time.perf_counter() - begun) * 1e6 / len(launches)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # that made the inputs: ids not yet written are any number
    with torch.cuda.stream(side):
        for launch in launches[:2]:
            launch()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return replayed_us(graph, len(launches))


def replayed_us(graph: torch.cuda.CUDAGraph, launches: int, before: Callable[[], object] = lambda: None) -> float:
    """Median microseconds of one of the graph's launches; the first of its replays does not count."""
    spans = []
    for _ in range(8):
        before()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) * 1000 / launches)
    return statistics.median(spans[1:])


def matrices(models: Iterable[tuple[int, int, int, int]], sizes: Iterable[int]) -> set[tuple[int, int]]:
    """(n, k) of every layer's matrix products at these tensor parallel sizes."""
    wanted = set()
    for hidden, inner, heads, kv in models:
        for tp in sizes:
            qkv = (heads + 2 * max(kv, tp)) * 128 // tp
            wanted |= {(qkv, hidden), (hidden, heads * 128 // tp), (2 * inner // tp, hidden), (hidden, inner // tp)}
    return wanted


def rehearsed(wanted: Iterable[tuple[int, tuple[int, ...]]]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """All of (tokens, sizes) on a GPU; on a CPU a few, with sizes divided."""
    for tokens, sizes in wanted:
        if DEVICE == "cuda":
            yield tokens, sizes
        elif tokens in REHEARSED:
            yield tokens, tuple(size if size < 256 else size // 256 * 16 for size in sizes)


def as_many(launches: list[Callable[[], object]], tokens: int) -> list[Callable[[], object]]:
    """The launches that are timed together: few of long products, short ones again from the first on."""
    return (launches * (1 + 16 // len(launches)))[:64] if tokens <= 1024 else launches[:4]


def gemms() -> Iterator[Row]:
    for n, k in sorted({(32000, 4096)} | matrices(SHAPES.values(), (1, 2, 4, 8))):
        yield from products(TOKENS, n, k)


def products(tokens_each: Iterable[int], n: int, k: int) -> Iterator[Row]:
    copies = max(2, min(64, L2_BYTES // (2 * n * k)))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    for tokens in tokens_each:
        x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(tokens, n, device="cuda", dtype=torch.bfloat16)
        launches = [lambda w=w, x=x, out=out: torch.mm(x, w.t(), out=out) for w in weights]
        yield "gemm", f"t={tokens};n={n};k={k}", timed_us(as_many(launches, tokens))


def gemms_fp8() -> Iterator[Row]:
    """8-bit floats, weights and activations: one scale each (`tensor`: cuBLASLt) or one a token and one an output
    column (`row`: CUTLASS); the last as torch runs it and as vLLM does. Products are in 16 bit."""
    try:
        from vllm import _custom_ops as ops
    except ImportError as error:
        ops = None
        print(f"gemm_fp8 by vLLM: left out, {error}", file=sys.stderr)
    shapes = sorted(matrices(FP8_SHAPES.values(), (1, 2, 4)))
    for tokens, (n, k) in rehearsed(itertools.product(FP8_TOKENS, shapes)):
        yield from products_fp8(tokens, n, k, ops)


def partial_tiles() -> Iterator[Row]:
    """Products of tokens that do not fill the tiles of a kernel, and of some that do: in fp8, then in 16 bit."""
    from vllm import _custom_ops as ops

    shapes = sorted(matrices(PARTIAL_SHAPES, (1,)))
    for tokens, (n, k) in rehearsed(itertools.product(PARTIAL_TOKENS, shapes)):
        yield from products_fp8(tokens, n, k, ops, by_torch=False)
    for n, k in shapes:
        yield from products(PARTIAL_TOKENS, n, k)


def products_fp8(tokens: int, n: int, k: int, ops: Any, by_torch: bool = True) -> Iterator[Row]:
    """ops: vLLM's, if it is installed."""
    copies = max(2, min(64, L2_BYTES // (n * k))) if DEVICE == "cuda" else 2
    weights = [torch.randn(n, k, device=DEVICE).to(torch.float8_e4m3fn).t() for _ in range(copies)]
    x = torch.randn(tokens, k, device=DEVICE).to(torch.float8_e4m3fn)
    one, of_row, of_column = (torch.ones(size, device=DEVICE) for size in ((), (tokens, 1), (1, n)))

    def torchs(w: torch.Tensor, of_x: torch.Tensor, of_w: torch.Tensor) -> object:
        return torch._scaled_mm(x, w, of_x, of_w, out_dtype=torch.bfloat16, use_fast_accum=True)

    ways = {}
    if by_torch:
        ways["tensor;by=torch"] = partial(torchs, of_x=one, of_w=one)
        ways["row;by=torch"] = partial(torchs, of_x=of_row, of_w=of_column)
    if ops is not None:
        own = partial(ops.cutlass_scaled_mm, x, scale_a=of_row, scale_b=of_column, out_dtype=torch.bfloat16)
        ways["row;by=vllm"] = own
    for scale, way in ways.items():
        launches = as_many([partial(way, w) for w in weights], tokens)
        yield "gemm_fp8", f"t={tokens};n={n};k={k};scale={scale}", timed_us(launches)


def paged(
    queries: list[int],
    contexts: list[int],
    shape: tuple[int, ...],
    fp8: bool = False,
    as_served: bool = False,
    scattered: bool = True,
) -> float:
    """Microseconds of FlashAttention 3 over a cache of 16-token blocks. shape: query heads and KV heads; then, where
    they are not 128 and all, the values of a head and the keys that a query sees. fp8: cache and queries in 8 bits.
    as_served: the kernel's tiles are planned before, as vLLM does once for all layers of a step, and each launch has a
    cache of its own, as each layer has. scattered: a sequence has any blocks, and not one after the other."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    heads, kv, width, window = (*shape, 128, 0)[:4] if len(shape) == 2 else shape
    blocks = [-(-context // 16) for context in contexts]
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    size = (2, sum(blocks), 16, kv, width)
    copies = max(1, min(8, L2_BYTES // (2 * sum(blocks) * 16 * kv * width * dtype.itemsize))) if as_served else 1
    caches = [torch.randn(*size, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(copies)]
    order = (torch.randperm if scattered else torch.arange)(sum(blocks), device="cuda", dtype=torch.int32)
    table = torch.zeros(len(blocks), max(blocks), device="cuda", dtype=torch.int32)
    at = 0
    for row, count in enumerate(blocks):
        table[row, :count] = order[at : at + count]
        at += count
    q = torch.randn(sum(queries), heads, width, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    window_size = (window - 1, 0) if window else (-1, -1)
    starts = torch.tensor([0, *queries], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    used = torch.tensor(contexts, device="cuda", dtype=torch.int32)
    given: dict[str, Any] = {}
    if fp8:
        q = q.to(dtype)
        each = torch.ones(1, device="cuda").expand(len(queries), kv)
        given = {"q_descale": each, "k_descale": each, "v_descale": each}
    if as_served:
        given["scheduler_metadata"] = get_scheduler_metadata(
            batch_size=len(queries), max_seqlen_q=max(queries), max_seqlen_k=max(contexts), num_heads_q=heads,
            num_heads_kv=kv, headdim=width, cache_seqlens=used, qkv_dtype=dtype, cu_seqlens_q=starts, page_size=16,
            causal=True, window_size=window_size,
        )  # fmt: skip

    def launch(cache: torch.Tensor) -> object:
        return flash_attn_varlen_func(
            q=q, k=cache[0], v=cache[1], out=out, cu_seqlens_q=starts, max_seqlen_q=max(queries), seqused_k=used,
            max_seqlen_k=max(contexts), softmax_scale=width**-0.5, causal=True, block_table=table, fa_version=3,
            window_size=list(window_size), **given,
        )  # fmt: skip

    return timed_us([partial(launch, caches[place % copies]) for place in range(8)])


def attention() -> Iterator[Row]:
    """Decode (one query a sequence) and prefill; as a server runs them, and both in one launch: `served`."""
    for heads, kv in ((32, 32), (40, 40), (64, 8), (16, 16), (8, 8), (16, 2), (8, 1)):
        for batch in (1, 4, 16, 64, 128, 256, 512, 900):
            for context in (256, 512, 600, 1024, 2048):
                if batch * context * kv * 512 < 24e9:
                    took = paged([1] * batch, [context] * batch, (heads, kv))
                    yield "decode", f"b={batch};c={context};h={heads};kv={kv}", took
        for count, length in ((1, 128), (1, 512), (4, 512), (15, 512), (1, 2048), (4, 2048)):
            took = paged([length] * count, [length] * count, (heads, kv))
            yield "prefill", f"b={count};q={length};h={heads};kv={kv}", took


def attention_fp8() -> Iterator[Row]:
    """The same over a cache in fp8, with queries in fp8 as vLLM's FlashAttention backend has them."""
    for batch, context in itertools.product((1, 16, 128, 512, 64, 256), (512, 2048, 1024, 8192)):
        for heads, kv in ((32, 32), (32, 8), (64, 8), (8, 1)):
            if batch * context * kv * 512 < 24e9:
                took = paged([1] * batch, [context] * batch, (heads, kv), fp8=True)
                yield "decode_fp8", f"b={batch};c={context};h={heads};kv={kv}", took
    for heads, kv in ((32, 8), (32, 32), (64, 8)):
        for count, length in ((1, 512), (4, 512), (15, 512), (1, 2048), (4, 2048)):
            took = paged([length] * count, [length] * count, (heads, kv), fp8=True)
            yield "prefill_fp8", f"b={count};q={length};h={heads};kv={kv}", took


def served() -> Iterator[Row]:
    """Decode alone and beside prefills in one launch, as a server runs them, in 16 bit and in fp8."""
    prompts = ((1, 512), (0, 0), (1, 2048), (4, 512), (1, 128))
    shapes = ((32, 8), (32, 32), (64, 8), (8, 1), (16, 2), (16, 16))
    contexts = (900, 300, 128, 2400, 600, 192, 450, 64, 10_000)
    wanted = itertools.product(contexts, shapes, (64, 256, 16, 128, 512, 1), prompts)
    for (context, (heads, kv), decodes, (prefills, length)), fp8 in itertools.product(wanted, (False, True)):
        if decodes * context * kv * 512 > 12e9:
            continue
        queries, seen = [length] * prefills + [1] * decodes, [length] * prefills + [context] * decodes
        name = ("mixed" if prefills else "decode") + ("_fp8" if fp8 else "")
        prompt = f"p={prefills};q={length};" if prefills else ""
        for scattered in (False, True) if context == 900 and not prefills else (False,):
            took = paged(queries, seen, (heads, kv), fp8, as_served=True, scattered=scattered)
            blocks = "scattered" if scattered else "in_order"
            yield name, f"b={decodes};c={context};{prompt}h={heads};kv={kv};blocks={blocks}", took


def chunks() -> Iterator[Row]:
    """16 bit: prompts after tokens that are cached already, and long contexts."""
    for heads, kv in ((32, 8), (32, 32), (64, 8)):
        for new, cached in itertools.product((512, 2048, 8192), (0, 2048, 8192, 32768)):
            yield "chunk", f"b=1;q={new};c={cached};h={heads};kv={kv}", paged([new], [new + cached], (heads, kv))
        for batch, context in ((1, 4096), (16, 4096), (64, 4096), (1, 16384), (16, 16384), (64, 16384), (1, 65536)):
            if batch * context * kv * 512 < 24e9:
                took = paged([1] * batch, [context] * batch, (heads, kv))
                yield "decode", f"b={batch};c={context};h={heads};kv={kv}", took


def latent() -> Iterator[Row]:
    """Latent attention: absorbed, where all heads share one latent (rows, and prompts of up to 512 tokens); and with
    keys and values of each head (longer prompts)."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    _, rope, nope, value = LATENT
    for heads in (16, 128):
        for batch, context in itertools.product((1, 16, 64, 128, 256), (300, 1024, 4096)):
            yield "latent_decode", f"b={batch};c={context};h={heads}", absorbed([1] * batch, [context] * batch, heads)
        for queries, decodes in (([64], 0), ([256], 0), ([512], 0), ([300] * 8, 0), ([256], 48), ([512], 48)):
            seen = [*queries, *[1024] * decodes]
            sizes = f"b={decodes};c=1024;p={len(queries)};q={queries[0]};h={heads}"
            yield "latent_short", sizes, absorbed([*queries, *[1] * decodes], seen, heads)
        for count, length in ((1, 600), (1, 1024), (8, 1024), (1, 3000), (2, 3000), (1, 8192)):
            tokens = count * length
            q, k = (torch.randn(tokens, heads, nope + rope, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            v = torch.randn(tokens, heads, value, device="cuda", dtype=torch.bfloat16)
            starts = torch.arange(0, tokens + 1, length, device="cuda", dtype=torch.int32)
            attend = partial(
                flash_attn_varlen_func, q=q, k=k, v=v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=length,
                max_seqlen_k=length, softmax_scale=(nope + rope) ** -0.5, causal=True, fa_version=3,
            )  # fmt: skip
            yield "latent_prefill", f"b={count};q={length};h={heads}", timed_us([attend] * 4)


def absorbed(queries: list[int], contexts: list[int], heads: int) -> float:
    """Microseconds of FlashAttention 3 over latents in blocks of 16 tokens, as vLLM's FLASH_ATTN_MLA runs it."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    rank, rope, nope, _ = LATENT
    blocks = [-(-context // 16) for context in contexts]
    copies = max(1, min(8, L2_BYTES // (sum(blocks) * 16 * (rank + rope) * 2)))
    size = (sum(blocks), 16, 1, rank + rope)
    caches = [torch.randn(*size, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    table = torch.zeros(len(blocks), max(blocks), device="cuda", dtype=torch.int32)
    at = 0
    for row, count in enumerate(blocks):
        table[row, :count] = torch.arange(at, at + count, device="cuda", dtype=torch.int32)
        at += count
    starts = torch.tensor([0, *queries], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    used = torch.tensor(contexts, device="cuda", dtype=torch.int32)
    q, q_v = (torch.randn(sum(queries), heads, width, device="cuda", dtype=torch.bfloat16) for width in (rope, rank))
    planned = get_scheduler_metadata(
        batch_size=len(queries), max_seqlen_q=max(queries), max_seqlen_k=max(contexts), num_heads_q=heads,
        num_heads_kv=1, headdim=rope, cache_seqlens=used, qkv_dtype=torch.bfloat16, headdim_v=rank,
        page_size=16, cu_seqlens_q=starts, causal=True,
    )  # fmt: skip

    def launch(cache: torch.Tensor) -> object:
        return flash_attn_varlen_func(
            q=q, k=cache[..., rank:], v=cache[..., :rank], q_v=q_v, max_seqlen_q=max(queries), cu_seqlens_q=starts,
            max_seqlen_k=max(contexts), seqused_k=used, block_table=table, softmax_scale=(nope + rope) ** -0.5,
            causal=True, fa_version=3, scheduler_metadata=planned,
        )  # fmt: skip

    return timed_us([partial(launch, caches[place % copies]) for place in range(8)])


def windows() -> Iterator[Row]:
    """Attention with a window and without, of heads that are as wide as those of these models."""
    for (heads, kv, width, window), seen in itertools.product(WINDOWED.values(), (True, False)):
        shape = heads, kv, width, window if seen else 0
        sizes = f"h={heads};kv={kv};d={width};w={window if seen else 0}"
        for batch, context in itertools.product((1, 16, 64, 256), (300, 1024, 3000)):
            took = paged([1] * batch, [context] * batch, shape, as_served=True, scattered=False)
            yield "window_decode", f"b={batch};c={context};{sizes}", took
        for count, length in ((1, 512), (1, 1024), (8, 1024), (1, 3000), (2, 3000), (1, 8192)):
            took = paged([length] * count, [length] * count, shape, as_served=True, scattered=False)
            yield "window_prefill", f"b={count};q={length};{sizes}", took


def head() -> Iterator[Row]:
    """The product over all words, and what makes tokens of logits where the temperature is 0."""
    for words, hidden in HEADS.values():
        yield from products((1, 8, 48, 120, 256), words, hidden)
        for rows in (1, 48, 256):
            logits = torch.randn(rows, words, device="cuda", dtype=torch.bfloat16)
            yield "argmax", f"t={rows};n={words}", timed_us([lambda x=logits: x.float().argmax(-1)] * 8)


def norms() -> Iterator[Row]:
    """Norms of each head's query and key with rotary positions, as torch.compile makes them; norms of a layer by
    vLLM's own kernel."""

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight

    def queries_and_keys(
        x: torch.Tensor, angles: torch.Tensor, of_q: torch.Tensor, of_k: torch.Tensor, heads: int, kv: int
    ) -> torch.Tensor:
        q, k = x[:, : heads * 128].view(-1, heads, 128), x[:, heads * 128 :][:, : kv * 128].view(-1, kv, 128)
        both = torch.cat((normed(q, of_q), normed(k, of_k)), 1)
        return rotated(both.flatten(1), angles, heads + kv)

    compiled = torch.compile(queries_and_keys, backend="inductor" if DEVICE == "cuda" else "eager")
    for tokens, (heads, kv) in rehearsed(itertools.product((1, 48, 512, 2048, 8192), ((32, 8), (64, 8), (32, 4)))):
        x = torch.randn(tokens, (heads + 2 * kv) * 128, device=DEVICE, dtype=torch.bfloat16)
        angles = torch.randn(tokens, 128, device=DEVICE, dtype=torch.bfloat16)
        weight = torch.ones(128, device=DEVICE, dtype=torch.bfloat16)
        run = partial(compiled, x, angles, weight, weight, heads, kv)
        yield "qk_norm_rope", f"t={tokens};q={heads};kv={kv};by=inductor", timed_us([run] * 8)


def elementwise() -> Iterator[Row]:
    from vllm import _custom_ops as ops

    for hidden, inner in ((4096, 11008), (5120, 13824), (8192, 7168)):
        for tokens in TOKENS:
            x, rest = (torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
            norm = partial(ops.fused_add_rms_norm, x, rest, weight, 1e-6)
            yield "norm", f"t={tokens};h={hidden}", timed_us([norm] * 16)
            gate = torch.randn(tokens, 2 * inner, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(tokens, inner, device="cuda", dtype=torch.bfloat16)
            yield "silu", f"t={tokens};i={inner}", timed_us([partial(torch.ops._C.silu_and_mul, out, gate)] * 16)


def add_norm(x: torch.Tensor, rest: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of the sum of a block's product and the residual, and that sum."""
    wide = x.float() + rest.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return scaled.to(x.dtype) * weight, wide.to(x.dtype)


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def rotated(x: torch.Tensor, angles: torch.Tensor, heads: int) -> torch.Tensor:
    """Queries and keys, `heads` of 128 values together, at their positions; what follows in x are the values."""
    left, right = x[:, : heads * 128].view(-1, heads, 128).chunk(2, -1)
    cos, sin = angles.unsqueeze(1).chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp8 with one scale a token."""
    scale = (x.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1e-5)
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def add_norm_fp8(x: torch.Tensor, rest: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scaled, total = add_norm(x, rest, weight)
    return *quantized(scaled), total


def gated_fp8(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return quantized(gated(x))


def _own_kernels(tokens: int, sizes: tuple[int, ...]) -> dict[str, Callable[..., object]]:
    """vLLM's kernels by kind, from the inputs that `layer` makes: what it runs without torch.compile, and the KV write
    that it always runs. Empty where vLLM is not installed."""
    try:
        from vllm import _custom_ops as ops
    except ImportError:
        return {}
    _, inner, heads, kv = sizes
    out = torch.empty(tokens, inner, device=DEVICE, dtype=torch.bfloat16)
    blocks = -(-tokens // 16)
    cache = torch.empty(2, blocks, 16, kv, 128, device=DEVICE, dtype=torch.bfloat16)
    slots = torch.randperm(blocks * 16, device=DEVICE)[:tokens]
    positions = torch.arange(tokens, device=DEVICE)
    table = torch.randn(max(tokens, 16), 128, device=DEVICE, dtype=torch.bfloat16)
    one = torch.ones(1, device=DEVICE)

    def rope(x: torch.Tensor, angles: torch.Tensor, rotated_heads: int) -> object:
        return ops.rotary_embedding(
            positions, x[:, : heads * 128], x[:, heads * 128 :][:, : kv * 128], 128, table, True
        )

    def kv_write(x: torch.Tensor) -> object:
        key, value = x[:, heads * 128 :].view(tokens, 2 * kv, 128).chunk(2, 1)
        return ops.reshape_and_cache_flash(key, value, cache[0], cache[1], slots, "auto", one, one)

    return {
        "norm": lambda x, rest, weight: ops.fused_add_rms_norm(x, rest, weight, 1e-6),
        "silu": lambda x: torch.ops._C.silu_and_mul(out, x),
        "rope": rope,
        "kv_write": kv_write,
        "quant": lambda x: ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True),
    }


def layer() -> Iterator[Row]:
    """Everything of a layer that is neither a product nor attention: as torch.compile makes it from plain torch, which
    is what vLLM runs by default, and as vLLM's own kernels. `l2=cold`: inputs and outputs that no cache holds."""
    config = torch._dynamo.config  # as vLLM compiles: for any number of tokens and one set of widths
    config.automatic_dynamic_shapes, config.recompile_limit = False, 64
    compiled = {
        "norm": add_norm, "silu": gated, "rope": rotated, "norm_fp8": add_norm_fp8, "silu_fp8": gated_fp8,
    }  # fmt: skip
    backend = "inductor" if DEVICE == "cuda" else "eager"
    ways = {name: torch.compile(each, backend=backend) for name, each in compiled.items()}
    for tokens, sizes in rehearsed(
        itertools.product((2, 64, 512, 2048, 8192, 16, 256, 1024, 4096), FP8_SHAPES.values())
    ):
        yield from _layer(tokens, sizes, ways)


def _layer(tokens: int, sizes: tuple[int, ...], ways: dict[str, Callable[..., object]]) -> Iterator[Row]:
    hidden, inner, heads, kv = sizes
    qkv = (heads + 2 * kv) * 128

    def made(*widths: int) -> tuple[torch.Tensor, ...]:
        each = tuple(torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16) for width in widths)
        for x in each:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        return each

    weight = torch.ones(hidden, device=DEVICE, dtype=torch.bfloat16)
    inputs: dict[str, tuple[str, Callable[[], tuple[Any, ...]]]] = {
        "norm": (f"h={hidden}", lambda: (*made(hidden, hidden), weight)),
        "norm_fp8": (f"h={hidden}", lambda: (*made(hidden, hidden), weight)),
        "silu": (f"i={inner}", lambda: made(2 * inner)),
        "silu_fp8": (f"i={inner}", lambda: made(2 * inner)),
        "rope": (f"q={heads};kv={kv}", lambda: (*made(qkv, 128), heads + kv)),
        "kv_write": (f"kv={kv}", lambda: made(qkv)),
        "quant": (f"h={hidden}", lambda: made(hidden)),
    }
    own = _own_kernels(tokens, sizes) if DEVICE == "cuda" else {}
    for name, (size, make) in inputs.items():
        copies = [make() for _ in range(cold_copies(make()))]
        for by, run in (("inductor", ways.get(name)), ("vllm", own.get(name))):
            for l2, given in (("cold", copies), ("warm", copies[:1] * 16)) if run is not None else ():
                kept: list[object] = []  # so that no output takes the place of the one before it
                launches = [partial(lambda run, kept, *x: kept.append(run(*x)), run, kept, *x) for x in given]
                yield name, f"t={tokens};{size};by={by};l2={l2}", timed_us(launches)


def cold_copies(inputs: tuple[Any, ...]) -> int:
    """So many inputs of that size that no cache holds them all, within 64 launches."""
    if DEVICE == "cpu":
        return 2
    return max(4, min(64, L2_BYTES // sum(x.nbytes for x in inputs if isinstance(x, torch.Tensor))))


def experts() -> Iterator[Row]:
    """A mixture's group products as vLLM's Triton kernel runs them, with its tuned block sizes for this GPU where it
    has them and with its defaults; tokens choose experts evenly, or by Zipf's law as an uneven router would."""
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    tuned_configs = fused_moe.get_moe_configs
    wanted = itertools.product((1, 64, 1024, 4, 16, 256, 4096), EXPERTS.values(), ("bf16", "fp8"))
    for tokens, (count, chosen, hidden, inner), dtype in wanted:
        w1 = torch.randn(count, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16)
        w2 = torch.randn(count, hidden, inner, device="cuda", dtype=torch.bfloat16)
        quantization = None
        if dtype == "fp8":
            w1, w2 = w1.to(torch.float8_e4m3fn), w2.to(torch.float8_e4m3fn)
            one = torch.ones(count, device="cuda")
            quantization = fp8_w8a8_moe_quant_config(w1_scale=one, w2_scale=one)
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        weights = torch.full((tokens, chosen), 1 / chosen, device="cuda")
        for routing, tuned in itertools.product(("even", "zipf"), (True, False)):
            if tuned and not tuned_configs(count, inner, None if dtype == "bf16" else "fp8_w8a8"):
                continue
            share = (
                1 / torch.arange(1, count + 1, device="cuda") if routing == "zipf" else torch.ones(count, device="cuda")
            )
            each = [torch.multinomial(share.expand(tokens, -1), chosen).to(torch.int32) for _ in range(8)]
            fused_moe.get_moe_configs = tuned_configs if tuned else lambda *_: None
            launches = [
                partial(fused_moe.fused_experts, x, w1, w2, weights, ids, quant_config=quantization) for ids in each
            ]
            took = timed_us(launches)
            sizes = f"t={tokens};e={count};k={chosen};h={hidden};i={inner};dtype={dtype}"
            yield "experts", f"{sizes};routing={routing};tuned={'yes' if tuned else 'no'}", took
        fused_moe.get_moe_configs = tuned_configs


def all_reduces(rank: int, ranks: int) -> Iterator[Row]:
    """NCCL's, and the one that vLLM's workers use (its own for small messages where GPUs can read each other)."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import get_tp_group, graph_capture

    torch.cuda.set_device(rank)
    where = "off" if os.environ.get("NCCL_P2P_DISABLE") == "1" else "on"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{os.environ['BENCH_PORT']}", rank)
        initialize_model_parallel(ranks)
        group = get_tp_group()
        if where == "off" and getattr(group.device_communicator, "ca_comm", None) is not None:
            group.device_communicator.ca_comm.disabled = True
        size = 8 << 10
        while size <= 256 << 20:
            x = torch.zeros(size // 8192, 4096, device="cuda", dtype=torch.bfloat16)
            count = 40 if size <= 4 << 20 else 10
            ways = {"nccl": partial(torch.distributed.all_reduce, x), "vllm": partial(group.all_reduce, x)}
            for name, reduce in ways.items():
                for _ in range(3):
                    reduce()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with (
                    graph_capture(device=torch.device("cuda", rank)) as context,
                    torch.cuda.graph(graph, stream=context.stream),
                ):
                    for _ in range(count):
                        reduce()
                took = replayed_us(graph, count, torch.distributed.barrier)
                yield "all_reduce", f"n={ranks};bytes={size};by={name};p2p={where}", took
            size *= 2


KINDS: dict[str, Callable[[], Iterator[Row]]] = {
    "gemm": gemms, "elementwise": elementwise, "attention": attention,
    "gemm_fp8": gemms_fp8, "layer": layer, "attention_fp8": attention_fp8, "experts": experts, "chunks": chunks,
    "served": served, "partial": partial_tiles, "latent": latent, "windows": windows, "head": head, "norms": norms,
}  # fmt: skip


def write(out: Path, kinds: dict[str, Iterator[Row]], seconds: float | None = None) -> None:
    """Every kind's rows. seconds: of all kinds together; what a kind leaves is shared by those after it."""
    begun = time.monotonic()
    with out.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("kind", "sizes", "us"))
        for at, (kind, rows) in enumerate(kinds.items()):
            now = time.monotonic()
            ends = now + (seconds - (now - begun)) / (len(kinds) - at) if seconds else float("inf")
            try:
                for name, sizes, took in rows:
                    table.writerow((name, sizes, f"{took:.3f}"))
                    file.flush()
                    if time.monotonic() > ends:
                        print(f"{kind}: its time is over; sizes are missing", file=sys.stderr)
                        break
            except Exception:
                print(f"{kind} ended early:", file=sys.stderr)
                traceback.print_exc()  # what was measured is kept
            print(f"{kind}: {time.monotonic() - now:.1f} s", file=sys.stderr)


def _rank(rank: int, ranks: int, out: Path) -> None:
    rows = all_reduces(rank, ranks)
    if rank == 0:
        write(out, {"all_reduce": rows})
    else:
        for _ in rows:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["gemm", "elementwise", "attention"])
    parser.add_argument("--seconds", type=float, help="end within this time")
    chosen = parser.parse_args()
    if chosen.ranks > 1:
        os.environ.setdefault("BENCH_PORT", "29517")
        torch.multiprocessing.spawn(_rank, (chosen.ranks, chosen.out), nprocs=chosen.ranks)
    else:
        torch.manual_seed(0)
        name = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU: a rehearsal, no measurement"
        print(name, torch.__version__, file=sys.stderr)
        with torch.inference_mode():
            write(chosen.out, {kind: KINDS[kind]() for kind in chosen.kinds}, chosen.seconds)


if __name__ == "__main__":
    main()
