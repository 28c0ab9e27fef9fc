"""How long the operators of a Llama take on this GPU: matrix products, attention, element-wise kernels, all-reduces.

    python benchmarks/gpu_operators.py OUT.csv            # one GPU
    python benchmarks/gpu_operators.py OUT.csv --ranks 4  # all-reduces among 4 GPUs; NCCL_P2P_DISABLE=1 is honoured

One line an operator: kind, sizes, median microseconds. Every measurement is a CUDA graph of many launches over buffers
larger than the L2 cache together, so neither launch overhead nor a warm cache shows. `servers/data` is fitted to these.
Needs torch; attention, element-wise kernels and the servers' all-reduce come from an installed vLLM (FlashAttention 3).
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

Row = tuple[str, str, float]
SHAPES = {  # (hidden, intermediate, heads, KV heads)
    "7b": (4096, 11008, 32, 32),
    "13b": (5120, 13824, 40, 40),
    "70b": (8192, 28672, 64, 8),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
L2_BYTES = 256 << 20


def timed_us(launches: list[Callable[[], object]]) -> float:
    """Median microseconds of one launch, from replays of a graph of all of them."""
    side = torch.cuda.Stream()
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


def gemms() -> Iterator[Row]:
    wanted = {(32000, 4096)}
    for hidden, inner, heads, kv in SHAPES.values():
        for tp in (1, 2, 4, 8):
            qkv = (heads + 2 * max(kv, tp)) * 128 // tp
            wanted |= {(qkv, hidden), (hidden, heads * 128 // tp), (2 * inner // tp, hidden), (hidden, inner // tp)}
    for n, k in sorted(wanted):
        copies = max(2, min(64, L2_BYTES // (2 * n * k)))
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        for tokens in TOKENS:
            x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(tokens, n, device="cuda", dtype=torch.bfloat16)
            launches = [lambda w=w, x=x, out=out: torch.mm(x, w.t(), out=out) for w in weights]
            launches = (launches * (1 + 16 // len(launches)))[:64] if tokens <= 1024 else launches[:4]
            yield "gemm", f"t={tokens};n={n};k={k}", timed_us(launches)
        del weights


def attention() -> Iterator[Row]:
    """Decode (one query a sequence), prefill, and both in one launch, over a paged KV cache of 16-token blocks."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def run(queries: list[int], contexts: list[int], heads: int, kv: int) -> float:
        blocks = [-(-context // 16) for context in contexts]
        cache = torch.randn(2, sum(blocks), 16, kv, 128, device="cuda", dtype=torch.bfloat16)
        order = torch.randperm(sum(blocks), device="cuda", dtype=torch.int32)
        table = torch.zeros(len(blocks), max(blocks), device="cuda", dtype=torch.int32)
        at = 0
        for row, count in enumerate(blocks):
            table[row, :count] = order[at : at + count]
            at += count
        q = torch.randn(sum(queries), heads, 128, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(q)
        starts = torch.tensor([0, *queries], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
        used = torch.tensor(contexts, device="cuda", dtype=torch.int32)

        def launch() -> object:
            return flash_attn_varlen_func(
                q=q, k=cache[0], v=cache[1], out=out, cu_seqlens_q=starts, max_seqlen_q=max(queries), seqused_k=used,
                max_seqlen_k=max(contexts), softmax_scale=128**-0.5, causal=True, block_table=table, fa_version=3,
            )  # fmt: skip

        return timed_us([launch] * 8)

    for heads, kv in ((32, 32), (40, 40), (64, 8), (16, 16), (8, 8), (16, 2), (8, 1)):
        for batch in (1, 4, 16, 64, 128, 256, 512, 900):
            for context in (256, 512, 600, 1024, 2048):
                if batch * context * kv * 512 < 24e9:
                    took = run([1] * batch, [context] * batch, heads, kv)
                    yield "decode", f"b={batch};c={context};h={heads};kv={kv}", took
        for count, length in ((1, 128), (1, 512), (4, 512), (15, 512), (1, 2048), (4, 2048)):
            took = run([length] * count, [length] * count, heads, kv)
            yield "prefill", f"b={count};q={length};h={heads};kv={kv}", took
        for decodes in (16, 64, 256, 512):
            for prefills in (1, 4, 15):
                took = run([512] * prefills + [1] * decodes, [512] * prefills + [600] * decodes, heads, kv)
                yield "mixed", f"b={decodes};c=600;p={prefills};q=512;h={heads};kv={kv}", took


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


def write(out: Path, kinds: list[Iterator[Row]]) -> None:
    with out.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("kind", "sizes", "us"))
        for kind in kinds:
            try:
                for name, sizes, took in kind:
                    table.writerow((name, sizes, f"{took:.3f}"))
                    file.flush()
            except Exception:
                traceback.print_exc()  # what was measured is kept


def _rank(rank: int, ranks: int, out: Path) -> None:
    rows = all_reduces(rank, ranks)
    if rank == 0:
        write(out, [rows])
    else:
        for _ in rows:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    chosen = parser.parse_args()
    if chosen.ranks > 1:
        os.environ.setdefault("BENCH_PORT", "29517")
        torch.multiprocessing.spawn(_rank, (chosen.ranks, chosen.out), nprocs=chosen.ranks)
    else:
        torch.manual_seed(0)
        print(torch.cuda.get_device_name(), torch.__version__, file=sys.stderr)
        with torch.inference_mode():
            write(chosen.out, [gemms(), elementwise(), attention()])


if __name__ == "__main__":
    main()
