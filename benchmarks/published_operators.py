"""Excerpts of operator tables that others measured and published, in the form of benchmarks/gpu_operators.py.

    pip download --no-deps aiconfigurator-core==0.12.0    # and unpack the wheel; pyarrow reads its tables
    python benchmarks/published_operators.py aic .../aiconfigurator_core/systems/data/l40s OUT.csv
    python benchmarks/published_operators.py vidur .../data/profiling/compute/a800/meta-llama/Llama-2-7b-hf OUT.csv

`aic`: one GPU's tables of NVIDIA's aiconfigurator, made by vLLM's own kernels. Its products in fp8 begin with 16-bit
activations and contain the kernels that quantize these; its tables of those kernels are taken off here. Those in nvfp4
keep what they contain of that kind: there is no table of it. Sizes of all-reduces are its numbers of elements, times 2
bytes; beside vLLM's own kernels are those of TensorRT-LLM, which vLLM calls through FlashInfer on a B200. Attention
reads its cache again and again, so a cache that the GPU's L2 holds is left out unless it is small.

`vidur`: Vidur's format, which Frontier uses too; times are medians. Its norm does not add the residual, so `norm` is
its norm and its addition together.

Only the sizes below are taken: those of decoders that people serve, evenly over rows. benchmarks/operators/published
holds the results and says what they are made from.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = tuple[str, str, float]
TOKENS = {1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192}
SHAPES = {  # (n, k) of a product
    (1024, 4096), (2048, 4096), (4096, 1024), (4096, 2048), (4096, 4096), (6144, 4096), (12288, 4096), (4096, 12288),
    (16384, 4096), (4096, 16384), (8192, 2048), (2048, 8192), (8192, 4096), (8192, 8192), (10240, 8192), (16384, 8192),
    (8192, 16384), (5120, 5120), (7168, 5120), (5120, 2560), (10240, 5120), (51200, 5120), (5120, 12288),
}  # fmt: skip
HEADS = {(32, 8), (40, 8), (64, 8), (16, 8), (32, 4), (16, 4), (16, 2), (8, 1), (32, 32)}  # queries, keys of one GPU
DECODED = ({1, 4, 16, 64, 128, 256, 512}, {256, 512, 1024, 2048, 4096, 16384})  # sequences, tokens of each
PREFILLED = ({1, 4, 16}, {128, 512, 1024, 2048, 4096, 8192})
LONGEST_PREFILL = 16384  # tokens of all sequences together
REDUCED = [1 << power for power in range(13, 29)]  # bytes
L2_BYTES = {
    "a100_sxm": 40 << 20, "h100_sxm": 50 << 20, "h200_sxm": 50 << 20, "b200_sxm": 126 << 20, "l40s": 96 << 20,
    "rtx_pro_6000_server": 128 << 20,
}  # fmt: skip
SMALL_CACHE_BYTES = 1 << 20  # read within a microsecond from anywhere


def table(directory: Path, pattern: str) -> list[dict[str, Any]]:
    """The newest of the tables of that name; none where the GPU has none."""
    from packaging.version import Version
    from pyarrow import parquet

    found = sorted(directory.glob(pattern), key=lambda path: Version(path.parts[-2]))
    rows: list[dict[str, Any]] = parquet.read_table(found[-1]).to_pylist() if found else []
    return rows


def products(directory: Path) -> Iterator[Row]:
    quantizing: dict[tuple[int, int], float] = {}
    for name in ("computescale", "scale_matrix"):
        for row in table(directory, f"quantize/vllm/*/{name}_perf.parquet"):
            if row["quant_dtype"] == "fp8":
                at = row["m"], row["k"]
                quantizing[at] = quantizing.get(at, 0.0) + row["latency"] * 1e3
    for row in table(directory, "gemm/vllm/*/gemm_perf.parquet"):
        m, n, k, us = row["m"], row["n"], row["k"], row["latency"] * 1e3
        if m not in TOKENS or (n, k) not in SHAPES:
            continue
        if row["gemm_dtype"] == "bfloat16":
            yield "gemm", f"t={m};n={n};k={k}", us
        elif row["gemm_dtype"] == "fp8":
            yield "gemm_fp8", f"t={m};n={n};k={k};by=vllm", us - quantizing[m, k]
        elif row["gemm_dtype"] == "nvfp4":
            yield "gemm_nvfp4", f"t={m};n={n};k={k};by=vllm", us
    for (m, k), us in quantizing.items():
        if m in TOKENS and k in {4096, 5120, 8192}:
            yield "quant", f"t={m};h={k}", us


def attention(directory: Path) -> Iterator[Row]:
    l2_bytes = L2_BYTES[directory.name]
    for row in table(directory, "attention/vllm/*/generation_attention_perf.parquet"):
        b, c, h, kv, kind = _attended(row, "decode", row["step"] + 1)
        cache_bytes = (256 if kind.endswith("fp8") else 512) * b * c * kv
        beside_l2 = not SMALL_CACHE_BYTES < cache_bytes < 2 * l2_bytes
        if kind and (h, kv) in HEADS and b in DECODED[0] and c in DECODED[1] and beside_l2:
            yield kind, f"b={b};c={c};h={h};kv={kv}", row["latency"] * 1e3
    for row in table(directory, "attention/vllm/*/context_attention_perf.parquet"):
        b, q, h, kv, kind = _attended(row, "prefill", row["isl"])
        if kind and (h, kv) in HEADS and b in PREFILLED[0] and q in PREFILLED[1] and b * q <= LONGEST_PREFILL:
            yield kind, f"b={b};q={q};h={h};kv={kv}", row["latency"] * 1e3


def _attended(row: dict[str, Any], kind: str, tokens: int) -> tuple[int, int, int, int, str]:
    """Sequences, tokens, heads of queries and of keys; no kind where heads are not 128 wide or see a window."""
    plain = row["head_dim"] == 128 and not row.get("window_size")
    dtype = "_fp8" if row["kv_cache_dtype"] == "fp8" else ""
    return row["batch_size"], tokens, row["num_heads"], row["num_key_value_heads"], kind + dtype if plain else ""


def reductions(directory: Path) -> Iterator[Row]:
    for by, backend in (("vllm", "vllm_graph"), ("trtllm", None)):
        for row in table(directory, f"comm/{by}/*/custom_allreduce_perf.parquet"):
            if row.get("backend") == backend and 2 * row["message_size"] in REDUCED:
                sizes = f"n={row['num_gpus']};bytes={2 * row['message_size']};by={by};p2p=on"
                yield "all_reduce", sizes, row["latency"] * 1e3


def vidur(directory: Path) -> Iterator[Row]:
    """Of a model's tables, mlp.csv and, where there is one, attention.csv."""
    seen: set[tuple[str, str]] = set()
    for kind, sizes, us in (*_dense(directory / "mlp.csv"), *_attention(directory / "attention.csv")):
        if us > 0 and (kind, sizes) not in seen:
            seen.add((kind, sizes))
            yield kind, sizes, us


def _read(path: Path) -> Iterable[dict[str, str]]:
    if path.exists():
        with path.open() as file:
            yield from csv.DictReader(file)


def _us(row: dict[str, str], name: str) -> float:
    return float(row.get(f"time_stats.{name}.median") or 0) * 1e3


def _dense(path: Path) -> Iterator[Row]:
    for row in _read(path):
        t, tp, h, i = (
            int(row[key]) for key in ("num_tokens", "num_tensor_parallel_workers", "n_embd", "n_expanded_embd")
        )
        q, kv = int(row["n_head"]) // tp, max(int(row["n_kv_head"]) // tp, 1)
        if t not in TOKENS:
            continue
        width = h // int(row["n_head"])
        yield "gemm", f"t={t};n={(q + 2 * kv) * width};k={h}", _us(row, "attn_pre_proj")
        yield "gemm", f"t={t};n={h};k={q * width}", _us(row, "attn_post_proj")
        yield "gemm", f"t={t};n={2 * i // tp};k={h}", _us(row, "mlp_up_proj")
        yield "gemm", f"t={t};n={h};k={i // tp}", _us(row, "mlp_down_proj")
        if _us(row, "add"):
            yield "norm", f"t={t};h={h}", _us(row, "input_layernorm") + _us(row, "add")
        yield "rope", f"t={t};q={q};kv={kv}", _us(row, "attn_rope")
        yield "silu", f"t={t};i={i // tp}", _us(row, "mlp_act")


def _attention(path: Path) -> Iterator[Row]:
    for row in _read(path):
        b, q, c = (int(row[key]) for key in ("batch_size", "prefill_chunk_size", "kv_cache_size"))
        h, kv = int(row["n_q_head"]), int(row["n_kv_head"])
        if row["is_prefill"] == "True" and c == 0 and q in TOKENS and q >= 64:
            yield "prefill", f"b={b};q={q};h={h};kv={kv}", _us(row, "attn_prefill")
        elif row["is_prefill"] == "False" and c and b * 4 % 16 == 0 and c % 512 == 0:
            yield "decode", f"b={b};c={c};h={h};kv={kv}", _us(row, "attn_decode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=("aic", "vidur"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", nargs="+", help="only these kinds of operators")
    parser.add_argument("--append", action="store_true", help="to rows that OUT has from other tables")
    chosen = parser.parse_args()
    if not chosen.directory.is_dir():
        sys.exit(f"{chosen.directory} is not a directory.")
    if chosen.format == "vidur":
        rows = list(vidur(chosen.directory))
    else:
        rows = [*products(chosen.directory), *attention(chosen.directory), *reductions(chosen.directory)]
    with chosen.out.open("a" if chosen.append else "w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        if not chosen.append:
            out.writerow(("kind", "sizes", "us"))
        for kind, sizes, us in sorted(rows, key=lambda row: row[0]):
            if not chosen.kinds or kind in chosen.kinds:
                out.writerow((kind, sizes, f"{us:.2f}"))


if __name__ == "__main__":
    main()
