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
    """As among the most GPUs, and as between two where that was measured too."""
    counts = {int(sizes["n"]) for sizes, _ in reduced if sizes["p2p"] == p2p}

    def among(ranks: int) -> dict[str, Any]:
        table = [(sizes, us) for sizes, us in reduced if sizes["p2p"] == p2p and int(sizes["n"]) == ranks]
        return {
            "ranks": ranks,
            "bytes": [int(sizes["bytes"]) for sizes, _ in table],
            "us": [round(us, 2) for _, us in table],
        }

    pair = {"pair": among(2)} if 2 in counts and counts != {2} else {}
    return among(max(counts)) | pair if counts else {}


def fit(predicted: Callable[[Floats], Floats], measured: Floats, start: tuple[float, ...]) -> Floats:
    """The positive parameters of `predicted` with the least squares of the logarithm of its ratio to `measured`."""
    result = least_squares(lambda x: np.log(predicted(np.exp(x)) / measured), np.log(start), loss="soft_l1")
    return np.exp(result.x)


def fitted(rows: Rows, flops: float, bandwidth: float, elementwise: float) -> dict[str, Any]:
    """The fitted part of the entry. flops, bandwidth: of the data sheet, in a microsecond."""
    t, n, k, gemm_us = columns(rows["gemm"], "t", "n", "k")

    def gemm(x: Floats) -> Floats:
        a, b = 2 * t * n * k / (x[0] * flops), 2 * (n * k + t * (n + k)) / (x[1] * bandwidth)
        most = np.maximum(a, b)
        return most * (1 + (np.minimum(a, b) / most) ** x[2]) ** (1 / x[2]) + x[3]

    g = fit(gemm, gemm_us, (0.75, 0.9, 2.0, 4.0))

    b, c, heads, kv, decode_us = columns(rows["decode"], "b", "c", "h", "kv")

    def decode(x: Floats) -> Floats:
        return 512 * b * c * kv / (x[0] * bandwidth) + x[1] + x[2] * 1e-3 * b * heads

    d = fit(decode, decode_us, (0.8, 10.0, 1.0))

    pb, q, ph, prefill_us = columns(rows["prefill"], "b", "q", "h")

    def prefill(x: Floats) -> Floats:
        return d[1] + 256 * ph * pb * q * q / (x[0] * flops) + x[1] * 1e-3 * pb * q * ph

    p = fit(prefill, prefill_us, (0.6, 0.3))

    mb, mp, mh, mkv, mixed_us = columns(rows["mixed"], "b", "p", "h", "kv")
    alone = 512 * mb * 600 * mkv / (d[0] * bandwidth) + d[2] * 1e-3 * mb * mh
    prompts = d[1] + 256 * mh * mp * 512 * 512 / (p[0] * flops) + p[1] * 1e-3 * mp * 512 * mh
    m = fit(lambda x: x[0] * alone + prompts, mixed_us, (1.2,))

    _, norm_us = columns(rows["norm"], "h")
    small = float(np.median(norm_us[np.array([float(s["t"]) for s, _ in rows["norm"]]) <= 16]))
    reduced = rows.get("all_reduce", [])
    links = {name: found for p2p, name in (("on", "nvlink"), ("off", "host")) if (found := link(reduced, p2p))}
    return {
        "gemm": dict(zip(("compute_ratio", "memory_ratio", "softness", "launch_us"), g.round(3).tolist(), strict=True)),
        "attention": {
            "decode_memory_ratio": round(d[0], 3),
            "decode_launch_us": round(d[1], 2),
            "decode_row_head_ns": round(d[2], 3),
            "prefill_compute_ratio": round(p[0], 3),
            "prefill_token_head_ns": round(p[1], 3),
            "mixed": round(m[0], 3),
        },
        "elementwise": {"memory_ratio": elementwise, "launch_us": round(small, 2)},
        "links": links,
        "error": "mean absolute relative error: "
        + ", ".join(
            f"{what} {error(predicted, measured):.1%} of {len(measured)}"
            for what, predicted, measured in (
                ("GEMM", gemm(g), gemm_us),
                ("decode attention", decode(d), decode_us),
                ("prefill attention", prefill(p), prefill_us),
                ("mixed", m[0] * alone + prompts, mixed_us),
            )
        ),
    }


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
