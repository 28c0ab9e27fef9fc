"""Fits a GPU's entry in servers/data/gpus.json to its tables of operators (benchmarks/gpu_operators.py).

    python benchmarks/kept.py unpack operators DIR
    python benchmarks/fit_operators.py DIR/h200.csv DIR/h200_dtypes.csv DIR/h200_served.csv --flops 989e12 \\
        --bandwidth 4.8e12 --by-rows

Prints the fitted part of the entry and its mean absolute relative errors. A product counts by the root of its time over
that of the others of as many tokens: with all alike, the largest products, which a step's time is made of, would be 5 %
too fast beyond 256 tokens and 3 % too slow below, and the small ones make up for it. Element-wise work that the tables
lack is given with --elementwise, by default the H200's.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from servers.simulator.cost import tiled_outputs
from servers.simulator.experts import chances, reached

Floats = npt.NDArray[np.float64]
Rows = dict[str, list[tuple[dict[str, str], float]]]
Part = dict[str, Any]
Error = tuple[str, Floats, Floats]  # what, predicted, measured
Fitted = tuple[Part, Floats, Floats]
MOST_SOFTNESS = 20  # beyond, a roofline is as good as sharp, and its exponent arbitrary
ELEMENTWISE: dict[str, Callable[[dict[str, int]], int]] = {  # values that are read and written, for each token
    "norm": lambda sizes: 4 * sizes["h"],
    "rope": lambda sizes: 256 * (sizes["q"] + sizes["kv"]),
    "silu": lambda sizes: 3 * sizes["i"],
    "kv_write": lambda sizes: 512 * sizes["kv"],
}
# the largest all-reduce, by GPUs, that vLLM 0.25 leaves to FlashInfer on a B200 (FI_ALLREDUCE_FUSION_MAX_SIZE_MB)
FLASHINFER_BYTES = {2: 64 << 20, 4: 32 << 20, 8: 1 << 20}
NARROW = {"fp8": (16, 64)}  # rows up to which vLLM's products in fp8 have kernels of their own (scaled_mm, sm90)
# of the rows as served that are fitted: the reads of shorter ones matter little; beside prefills, few rows with longer
# ones wait for the one processor that reads the longest
CONTEXTS, MIXED_CONTEXTS = (128, math.inf), (128, 2400)
PROCESSORS = 132  # of an H100 and an H200
WIDTHS = {"fp8": 1.0, "nvfp4": 0.5 + 1 / 16}  # bytes of a value with its share of a block's scale


def read(path: Path) -> Rows:
    rows: Rows = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            sizes = dict(pair.split("=") for pair in row["sizes"].split(";"))
            rows.setdefault(row["kind"], []).append((sizes, float(row["us"])))
    return rows


def columns(rows: list[tuple[dict[str, str], float]], *names: str) -> list[Floats]:
    return [np.array([float(sizes[name]) for sizes, _ in rows]) for name in names] + [np.array([us for _, us in rows])]


def error(predicted: Floats, measured: Floats) -> float:
    return round(float(np.mean(np.abs(predicted / measured - 1))), 3)


def link(reduced: list[tuple[dict[str, str], float]], p2p: str) -> dict[str, Any]:
    """As among the most GPUs, within it as among fewer, down to two. FlashInfer's kernels are TensorRT-LLM's."""
    tables: dict[int, dict[int, float]] = {}
    of_p2p = [row for row in reduced if row[0]["p2p"] == p2p]
    for sizes, us in sorted(of_p2p, key=lambda row: row[0].get("by") == "trtllm"):
        ranks, size = int(sizes["n"]), int(sizes["bytes"])
        if sizes.get("by") != "trtllm" or size <= FLASHINFER_BYTES.get(ranks, 0):
            tables.setdefault(ranks, {})[size] = round(us, 2)
    found: dict[str, Any] = {}
    for ranks, table in sorted(tables.items()):
        sizes_bytes = sorted(table)
        found = {"ranks": ranks, "bytes": sizes_bytes, "us": [table[size] for size in sizes_bytes]} | (
            {"pair": found} if found else {}
        )
    return found


def fit(
    predicted: Callable[[Floats], Floats],
    measured: Floats,
    start: tuple[float, ...],
    counts: Floats | float = 1.0,
    square_below: float = 1.0,
) -> Floats:
    """The positive parameters of `predicted` with the least squares of the logarithm of its ratio to `measured`, each
    times what it counts. Beyond `square_below` it counts by itself, not by its square."""
    result = least_squares(
        lambda x: counts * np.log(predicted(np.exp(x)) / measured), np.log(start), loss="soft_l1", f_scale=square_below
    )
    return np.exp(result.x)


def soft_roofline(compute: Floats, memory: Floats, softness: float) -> Floats:
    most = np.maximum(compute, memory)
    with np.errstate(over="ignore"):  # a softness near 0, which a search may try
        return np.asarray(most * (1 + (np.minimum(compute, memory) / most) ** softness) ** (1 / softness))


def as_gemm(x: Floats) -> Part:
    values = np.minimum(x, (np.inf, np.inf, MOST_SOFTNESS, np.inf)).round(3).tolist()
    return dict(zip(("compute_ratio", "memory_ratio", "softness", "launch_us"), values, strict=True))


def products(
    rows: list[tuple[dict[str, str], float]],
    flops: float,
    bandwidth: float,
    width: float,
    narrow: tuple[int, ...] = (),
    outliers: bool = False,
) -> Fitted:
    """width: bytes of a value of both operands; the product is in 16 bit. narrow: the most rows of a product that has
    kernels of its own, each of which reads at its own rate; all then have tiles of fixed sizes. outliers: whether there
    are some."""
    t, n, k, us = columns(rows, "t", "n", "k")
    counts = np.sqrt([time / us[t == tokens].mean() for tokens, time in zip(t, us, strict=True)])
    kernel = np.searchsorted(narrow, t)
    tiled, whole = np.array([tiled_outputs(*sizes, PROCESSORS) for sizes in zip(t, n, strict=True)]).T

    def gemm(x: Floats) -> Floats:
        outputs, ratio = t * n, x[1]
        if narrow:
            outputs, ratio = tiled + x[4] * (whole - tiled), np.append(x[5:], x[1])[kernel]
        a, b = 2 * outputs * k / (x[0] * flops), (width * (n * k + t * k) + 2 * t * n) / (ratio * bandwidth)
        return soft_roofline(a, b, x[2]) + x[3]

    of_tiles = (0.5,) + (0.9,) * len(narrow) if narrow else ()
    x = fit(gemm, us, (0.75, 0.9, 2.0, 4.0, *of_tiles), counts, 0.1 if outliers else 1.0)
    part, own = as_gemm(x[:4]), x[4:].round(3).tolist()
    predicted = gemm(np.array([*part.values(), *own]))
    if narrow:
        idle, *ratios = own
        part["narrow"] = [[most, ratio] for most, ratio in zip(narrow, ratios, strict=True)]
        part["waves"] = {"processors": PROCESSORS, "idle": idle}
    return part, predicted, us


def experts(rows: list[tuple[dict[str, str], float]], flops: float, bandwidth: float, part: Part) -> dict[str, Fitted]:
    """By dtype: both products of a mixture, each of all its experts in one launch, with vLLM's tuned block sizes where
    it has them. `part`: of element-wise work, of which the gate and the sum over a token's experts are in the times."""
    best = {tuple(v for k, v in sizes.items() if k != "tuned"): (sizes, us) for sizes, us in rows
            if sizes["tuned"] == "no"}  # fmt: skip
    best |= {tuple(v for k, v in sizes.items() if k != "tuned"): (sizes, us) for sizes, us in rows
             if sizes["tuned"] == "yes"}  # fmt: skip
    found = {}
    for dtype, width in (("bf16", 2.0), ("fp8", 1.0)):
        of_dtype = [(sizes, us) for sizes, us in best.values() if sizes["dtype"] == dtype]
        if not of_dtype:
            continue
        t, e, k, h, i, us = columns(of_dtype, "t", "e", "k", "h", "i")
        uneven = [sizes["routing"] == "zipf" for sizes, _ in of_dtype]
        read = np.array([
            reached(chances([1 / (1 + law * rank) for rank in range(int(count))], chosen), tokens)
            for tokens, count, chosen, law in zip(t, e, k, uneven, strict=True)
        ])  # fmt: skip
        other = 2 * t * k * (3 * i + h) / (part["memory_ratio"] * bandwidth) + 2 * part["launch_us"]

        def block(x: Floats, sizes: tuple[Floats, ...] = (t * k, h, i, read, other), width: float = width) -> Floats:
            rows, h, i, read, total = sizes
            for n, k in ((2 * i, h), (h, i)):
                moved = width * (read * n * k + rows * k) + 2 * rows * n
                total = total + soft_roofline(2 * rows * n * k / (x[0] * flops), moved / (x[1] * bandwidth), x[2])
            return total + 2 * x[3]

        gemm = as_gemm(fit(block, us, (0.5, 0.8, 2.0, 4.0)))
        found[dtype] = gemm, block(np.array(list(gemm.values()))), us
    return found


def attention(rows: Rows, flops: float, bandwidth: float, kind: str = "", width: int = 2) -> tuple[Part, list[Error]]:
    """kind: the end of the rows' names; width: bytes of a value in the cache. Rows as a server runs them take the place
    of others. `mixed` only where it was measured so."""

    def decodes(of: list[tuple[dict[str, str], float]], beside: Floats | float = 0.0) -> Fitted:
        """beside: what else their launch takes."""
        b, c, heads, kv, us = columns(of, "b", "c", "h", "kv")

        def took(x: Floats) -> Floats:
            each_ns = x[2] * kv + x[3] * heads
            return 256 * width * b * c * kv / (x[0] * bandwidth) + x[1] + each_ns * 1e-3 * b + beside

        x = fit(took, us, (0.8, 10.0, 1.0, 1.0))
        names = ("memory_ratio", "launch_us", "tile_ns", "head_ns")
        return dict(zip(names, x.round(3).tolist(), strict=True)), took(x), us

    def served(name: str, contexts: tuple[float, float]) -> list[tuple[dict[str, str], float]]:
        return [
            row for row in rows.get(name + kind, [])
            if row[0].get("blocks") == "in_order" and contexts[0] <= float(row[0]["c"]) <= contexts[1]
        ]  # fmt: skip

    alone, *of_alone = decodes(served("decode", CONTEXTS) or rows["decode" + kind])
    chunked = [({"c": "0"} | sizes, us) for name in ("prefill", "chunk") for sizes, us in rows.get(name + kind, [])]
    pb, q, past, ph, prefill_us = columns(chunked, "b", "q", "c", "h")

    def prompts(x: Floats, sizes: tuple[Floats, ...] = (pb, q, past, ph)) -> Floats:
        count, q, past, heads = sizes
        return 512 * heads * count * q * (past + q / 2) / (x[0] * flops) + x[1] * 1e-3 * count * q * heads

    p = fit(lambda x: alone["launch_us"] + prompts(x), prefill_us, (0.6, 0.3))
    part = {"decode": alone, "prefill_compute_ratio": round(p[0], 3), "prefill_token_head_ns": round(p[1], 3)}
    errors = [
        (f"decode attention{label(kind)}", *of_alone),
        (f"prefill attention{label(kind)}", alone["launch_us"] + prompts(p), prefill_us),
    ]
    if mixed := served("mixed", MIXED_CONTEXTS):
        count, q, heads, _ = columns(mixed, "p", "q", "h")
        part["mixed"], *of_mixed = decodes(mixed, prompts(p, (count, q, np.zeros_like(q), heads)))
        errors.append((f"mixed{label(kind)}", *of_mixed))
    return part, errors


def label(kind: str) -> str:
    return kind.replace("_", " in ")


def elementwise(rows: Rows, bandwidth: float, given: float) -> tuple[Part, list[Error]]:
    """From norms that add the residual (4 values a token and width), rotations of queries and keys (2), gates (3) and
    writes of keys and values (2 each), where the first three were measured. Otherwise `given`, and the launch of small
    norms. A server's own kernels, whose inputs the kernel before has left in the L2, where they were told apart: the
    whole steps of results:h200/at_rest have room for these times, and not for those of torch.compile's kernels."""
    rows = {kind: [row for row in rows[kind] if row[0].get("by") == "vllm" and row[0].get("l2") == "warm"] or [
        row for row in rows[kind] if "by" not in row[0]] for kind in ELEMENTWISE if kind in rows}  # fmt: skip
    if "rope" not in rows:
        if "norm" not in rows:
            return {}, []
        small = [us for sizes, us in rows["norm"] if float(sizes["t"]) <= 16]
        return {"memory_ratio": given, "launch_us": round(float(np.median(small)), 2)}, []
    moved, took = [], []
    for name, of_kind in rows.items():
        for sizes, us in of_kind:
            numbers = {key: int(value) for key, value in sizes.items() if value.isdigit()}
            moved.append(2.0 * numbers["t"] * ELEMENTWISE[name](numbers))
            took.append(us)
    moved_bytes, us = np.array(moved), np.array(took)
    x = fit(lambda x: moved_bytes / (x[0] * bandwidth) + x[1], us, (0.5, 3.0))
    part = {"memory_ratio": round(x[0], 3), "launch_us": round(x[1], 2)}
    return part, [("element-wise", moved_bytes / (x[0] * bandwidth) + x[1], us)]


def fitted(
    rows: Rows, flops: float, bandwidth: float, given: float, by_rows: bool = False, outliers: bool = False
) -> dict[str, Any]:
    """The fitted part of the entry. flops, bandwidth: of the data sheet, in a microsecond. by_rows: vLLM's products of
    few rows have rates of their own. outliers: the products' tables have some."""
    entry: dict[str, Any] = {}
    errors: list[Error] = []
    if "gemm" in rows:
        entry["gemm"], *of = products(rows["gemm"], flops, bandwidth, 2, outliers=outliers)
        errors.append(("GEMM", *of))
    for dtype, width in WIDTHS.items():
        if of_dtype := rows.get(f"gemm_{dtype}"):
            by_vllm = [row for row in of_dtype if row[0]["by"] == "vllm"]
            kernels = NARROW.get(dtype, ()) if by_rows else ()
            part, *of = products(by_vllm or of_dtype, flops, bandwidth, width, kernels, outliers)
            entry.setdefault("gemms", {})[dtype] = part
            errors.append((f"GEMM in {dtype}", *of))
    if "decode" in rows:
        entry["attention"], found = attention(rows, flops, bandwidth)
        errors += found
    if "decode_fp8" in rows:
        entry["attentions"] = {"fp8": {}}
        entry["attentions"]["fp8"], found = attention(rows, flops, bandwidth, "_fp8", 1)
        errors += found
    entry["elementwise"], found = elementwise(rows, bandwidth, given)
    errors += found
    if "experts" in rows:
        for dtype, (part, *of) in experts(rows["experts"], flops, bandwidth, entry["elementwise"]).items():
            entry.setdefault("experts", {})[dtype] = part
            errors.append((f"experts in {dtype}", *of))
    reduced = rows.get("all_reduce", [])
    entry["links"] = {name: of for p2p, name in (("on", "nvlink"), ("off", "host")) if (of := link(reduced, p2p))}
    mean_errors = (f"{what} {error(predicted, us):.1%} of {len(us)}" for what, predicted, us in errors)
    return entry | {"error": "mean absolute relative error: " + ", ".join(mean_errors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--flops", type=float, required=True)
    parser.add_argument("--bandwidth", type=float, required=True)
    parser.add_argument("--elementwise", type=float, default=0.768)
    parser.add_argument("--by-rows", action="store_true", help="vLLM's products of few rows at rates of their own")
    parser.add_argument("--outliers", action="store_true", help="products off by over 10 %% count less than by squares")
    chosen = parser.parse_args()
    rows: Rows = {}
    for table in chosen.tables:
        for kind, of_kind in read(table).items():
            rows[kind] = rows.get(kind, []) + of_kind
    entry = fitted(
        rows, chosen.flops / 1e6, chosen.bandwidth / 1e6, chosen.elementwise, chosen.by_rows, chosen.outliers
    )
    print(json.dumps(entry, indent=1))


if __name__ == "__main__":
    main()
