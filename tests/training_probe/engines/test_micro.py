"""`training_probe micro` with real torch on the CPU, as its users start it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training_probe.engines import tiny
from training_probe.micro.presets import COLLECTIVES

pytestmark = [
    tiny.needs_engines,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are started on Linux only"),
]

MAIN = "import sys; from training_probe.cli import main; main()"
LIMIT_S = 120


def run(directory: Path, *options: str) -> dict[str, Any]:
    """The report: the last line of standard output."""
    argv = (sys.executable, "-c", MAIN, "micro", *options, "--device", "cpu", "--out", str(directory))
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode in tiny.MEASURED, ended.stderr[-3000:]
    report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert (directory / "report.md").exists() and (directory / f"{options[0]}.svg").exists()
    return report


def test_products_of_every_dtype(tmp_path: Path) -> None:
    dtypes = ("fp32", "bf16", "tf32", "int8")
    options = ("--m", "32", "45", "--n", "64", "--k", "48", "--samples", "5")
    report = run(tmp_path / "o", "gemm", *options, "--dtype", *dtypes)
    by_dtype: dict[str, list[dict[str, Any]]] = {}
    for row in report["results"]:
        by_dtype.setdefault(row["point"]["dtype"], []).append(row)
    assert set(by_dtype) == set(dtypes)
    for dtype in ("fp32", "bf16", "int8"):
        assert [row["outcome"] for row in by_dtype[dtype]] == ["ok"] * 3
        for row in by_dtype[dtype]:
            point = row["point"]
            assert row["samples"] == 5 and row["p10_s"] <= row["median_s"] <= row["p90_s"]
            assert row["flops_per_s"] * row["median_s"] == pytest.approx(2 * point["m"] * point["n"] * point["k"])
            assert 0 < row["measured_peak_ratio"] <= 1 and row["data_sheet_peak_ratio"] is None
    assert {row["outcome"] for row in by_dtype["tf32"]} == {"unsupported"}
    assert "Ampere" in by_dtype["tf32"][0]["reason"]


def test_a_product_is_what_it_says() -> None:
    """The buffers of a launch give A B^T, in every dtype that this CPU has."""
    import torch

    from training_probe.points import Dtype, Gemm
    from training_probe.worker.micro import gemm

    made: list[Any] = []
    expected: dict[Dtype, float] = {"fp32": 1e-5, "bf16": 2e-2, "int8": 0.0}
    for dtype, tolerance in expected.items():
        product = gemm.product_of(dtype, torch.device("cpu"))
        a, b = (gemm.normal_matrices((1, rows, 64), dtype, torch.device("cpu"))[0] for rows in (32, 48))
        out = torch.empty(32, 48, dtype=torch.int32 if dtype == "int8" else a.dtype)
        product(a, b.t(), out)
        exact = a.double() @ b.double().t()
        assert float((out.double() - exact).abs().max()) <= tolerance * float(exact.abs().max()), dtype
        assert a.float().std() > 0.5  # not constants
        made.append(gemm.launch_of(Gemm(m=4, n=4, k=4, dtype=dtype), torch.device("cpu")))
    for launch in made:
        launch()


def test_copies_within_the_host(tmp_path: Path) -> None:
    report = run(tmp_path / "o", "memcpy", "--sizes", "1K", "1M", "--samples", "5")
    assert [(row["point"]["route"], row["point"]["size_bytes"], row["outcome"]) for row in report["results"]] == [
        ("h2h", 1 << 10, "ok"),
        ("h2h", 1 << 20, "ok"),
    ]


def test_collectives_over_gloo_are_right(tmp_path: Path) -> None:
    """Every collective gives what it must, or says that gloo cannot."""
    report = run(tmp_path / "o", "collectives", "--sizes", "1K", "1000000", "--samples", "5")
    assert report["ranks"] == 2 and len(report["results"]) == 2 * len(COLLECTIVES)
    for row in report["results"]:
        assert row["outcome"] in ("ok", "unsupported"), row
        if row["outcome"] == "ok":
            assert row["correct"] is True and row["bus_bytes_per_s"] > 0
    done = {row["point"]["name"] for row in report["results"] if row["outcome"] == "ok"}
    assert {"allreduce", "allgather", "reduce", "broadcast", "sendrecv"} <= done


def test_three_ranks_and_an_uneven_size(tmp_path: Path) -> None:
    report = run(tmp_path / "o", "collectives", "--gpus", "3", "--op", "alltoall", "sendrecv", "reducescatter",
                 "--sizes", "1K", "--samples", "2")  # fmt: skip
    assert {row["point"]["size_bytes"] for row in report["results"]} == {1020}
    assert all(row["correct"] for row in report["results"] if row["outcome"] == "ok")
