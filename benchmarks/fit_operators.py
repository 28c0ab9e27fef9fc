"""Fits a GPU's entry in servers/data/gpus.json to its table of operators (benchmarks/gpu_operators.py).

    .venv/bin/python benchmarks/fit_operators.py benchmarks/operators/h200.csv --flops 989e12 --bandwidth 4.8e12

Prints the fitted part of the entry and its mean absolute relative errors. Two values are not the table's: element-wise
work is that of a whole layer in a server (a kernel alone misses copies, rotary positions, the KV write), so its ratio
is fitted to the prefill rate of real runs and given with --elementwise.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

Floats = npt.NDArray[np.float64]
Rows = dict[str, list[tuple[dict[str, str], float]]]
Part = dict[str, float]
Error = tuple[str, Floats, Floats]  # what, predicted, measured
Fitted = tuple[Part, Floats, Floats]
MOST_SOFTNESS = 20  # beyond, a roofline is as good as sharp, and its exponent arbitrary
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
    """As among the most GPUs, within it as among fewer, down to two."""
    of_p2p = [(sizes, us) for sizes, us in reduced if sizes["p2p"] == p2p]
    found: dict[str, Any] = {}
    for ranks in sorted({int(sizes["n"]) for sizes, _ in of_p2p}):
        table = [(sizes, us) for sizes, us in of_p2p if int(sizes["n"]) == ranks]
        found = {
            "ranks": ranks,
            "bytes": [int(sizes["bytes"]) for sizes, _ in table],
            "us": [round(us, 2) for _, us in table],
        } | ({"pair": found} if found else {})
    return found


def fit(predicted: Callable[[Floats], Floats], measured: Floats, start: tuple[float, ...]) -> Floats:
    """The positive parameters of `predicted` with the least squares of the logarithm of its ratio to `measured`."""
    result = least_squares(lambda x: np.log(predicted(np.exp(x)) / measured), np.log(start), loss="soft_l1")
    return np.exp(result.x)


def products(rows: list[tuple[dict[str, str], float]], flops: float, bandwidth: float, width: float) -> Fitted:
    """width: bytes of a value of both operands; the product is in 16 bit."""
    t, n, k, us = columns(rows, "t", "n", "k")

    def gemm(x: Floats) -> Floats:
        a, b = 2 * t * n * k / (x[0] * flops), (width * (n * k + t * k) + 2 * t * n) / (x[1] * bandwidth)
        most = np.maximum(a, b)
        return most * (1 + (np.minimum(a, b) / most) ** x[2]) ** (1 / x[2]) + x[3]

    x = np.minimum(fit(gemm, us, (0.75, 0.9, 2.0, 4.0)), (np.inf, np.inf, MOST_SOFTNESS, np.inf))
    names = ("compute_ratio", "memory_ratio", "softness", "launch_us")
    return dict(zip(names, x.round(3).tolist(), strict=True)), gemm(x), us


def attention(rows: Rows, flops: float, bandwidth: float, kind: str = "", width: int = 2) -> tuple[Part, list[Error]]:
    """kind: the end of the rows' names; width: bytes of a value in the cache. `mixed` only where it was measured."""
    b, c, heads, kv, decode_us = columns(rows["decode" + kind], "b", "c", "h", "kv")

    def decode(x: Floats) -> Floats:
        return 256 * width * b * c * kv / (x[0] * bandwidth) + x[1] + x[2] * 1e-3 * b * heads

    d = fit(decode, decode_us, (0.8, 10.0, 1.0))

    pb, q, ph, prefill_us = columns(rows["prefill" + kind], "b", "q", "h")

    def prefill(x: Floats) -> Floats:
        return d[1] + 256 * ph * pb * q * q / (x[0] * flops) + x[1] * 1e-3 * pb * q * ph

    p = fit(prefill, prefill_us, (0.6, 0.3))
    part = {
        "decode_memory_ratio": round(d[0], 3),
        "decode_launch_us": round(d[1], 2),
        "decode_row_head_ns": round(d[2], 3),
        "prefill_compute_ratio": round(p[0], 3),
        "prefill_token_head_ns": round(p[1], 3),
    }
    errors = [
        (f"decode attention{said(kind)}", decode(d), decode_us),
        (f"prefill attention{said(kind)}", prefill(p), prefill_us),
    ]
    if "mixed" + kind in rows:
        mb, mp, mh, mkv, mixed_us = columns(rows["mixed" + kind], "b", "p", "h", "kv")
        alone = 256 * width * mb * 600 * mkv / (d[0] * bandwidth) + d[2] * 1e-3 * mb * mh
        prompts = d[1] + 256 * mh * mp * 512 * 512 / (p[0] * flops) + p[1] * 1e-3 * mp * 512 * mh
        m = fit(lambda x: x[0] * alone + prompts, mixed_us, (1.2,))
        part["mixed"] = round(m[0], 3)
        errors.append((f"mixed{said(kind)}", m[0] * alone + prompts, mixed_us))
    return part, errors


def said(kind: str) -> str:
    return kind.replace("_", " in ")


def elementwise(rows: Rows, bandwidth: float, given: float) -> tuple[Part, list[Error]]:
    """From norms that add the residual (4 values a token and width), rotations of queries and keys (2) and gates (3),
    where all three were measured. Otherwise `given`, and the launch of small norms."""
    if "rope" not in rows:
        if "norm" not in rows:
            return {}, []
        small = [us for sizes, us in rows["norm"] if float(sizes["t"]) <= 16]
        return {"memory_ratio": given, "launch_us": round(float(np.median(small)), 2)}, []
    moved, took = [], []
    for name, count in (("norm", lambda s: 4 * s["h"]), ("rope", lambda s: 256 * (s["q"] + s["kv"])),
                        ("silu", lambda s: 3 * s["i"])):  # fmt: skip
        for sizes, us in rows[name]:
            if sizes.get("l2", "cold") == "cold" and sizes.get("by", "inductor") == "inductor":
                numbers = {key: int(value) for key, value in sizes.items() if value.isdigit()}
                moved.append(2.0 * numbers["t"] * count(numbers))
                took.append(us)
    moved_bytes, us = np.array(moved), np.array(took)
    x = fit(lambda x: moved_bytes / (x[0] * bandwidth) + x[1], us, (0.5, 3.0))
    part = {"memory_ratio": round(x[0], 3), "launch_us": round(x[1], 2)}
    return part, [("element-wise", moved_bytes / (x[0] * bandwidth) + x[1], us)]


def fitted(rows: Rows, flops: float, bandwidth: float, given: float) -> dict[str, Any]:
    """The fitted part of the entry. flops, bandwidth: of the data sheet, in a microsecond."""
    entry: dict[str, Any] = {}
    errors: list[Error] = []
    if "gemm" in rows:
        entry["gemm"], *of = products(rows["gemm"], flops, bandwidth, 2)
        errors.append(("GEMM", *of))
    for dtype, width in WIDTHS.items():
        if of_dtype := rows.get(f"gemm_{dtype}"):
            by_vllm = [row for row in of_dtype if row[0]["by"] == "vllm"]
            part, *of = products(by_vllm or of_dtype, flops, bandwidth, width)
            entry.setdefault("gemms", {})[dtype] = part
            errors.append((f"GEMM in {dtype}", *of))
    for name, kind, width in (("attention", "", 2), ("attention_fp8", "_fp8", 1)):
        if "decode" + kind in rows:
            entry[name], found = attention(rows, flops, bandwidth, kind, width)
            errors += found
    entry["elementwise"], found = elementwise(rows, bandwidth, given)
    errors += found
    reduced = rows.get("all_reduce", [])
    entry["links"] = {name: of for p2p, name in (("on", "nvlink"), ("off", "host")) if (of := link(reduced, p2p))}
    said_errors = (f"{what} {error(predicted, us):.1%} of {len(us)}" for what, predicted, us in errors)
    return entry | {"error": "mean absolute relative error: " + ", ".join(said_errors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--flops", type=float, required=True)
    parser.add_argument("--bandwidth", type=float, required=True)
    parser.add_argument("--elementwise", type=float, default=0.45)
    chosen = parser.parse_args()
    entry = fitted(read(chosen.table), chosen.flops / 1e6, chosen.bandwidth / 1e6, chosen.elementwise)
    print(json.dumps(entry, indent=1))


if __name__ == "__main__":
    main()
