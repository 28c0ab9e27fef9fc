"""Operator tables and the fits to them: known parameters are found again, and what is kept is what the entries say."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from backends import catalog
from servers.simulator import experts, hardware
from servers.simulator.cost import Arithmetic, GemmCost, GpuSpec, Overheads, StepCost, arithmetic
from tests.data import unpacked

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import fit_operators  # noqa: E402

GPUS = hardware.known()
OPERATORS = unpacked("operators")
PUBLISHED = OPERATORS / "published"
ATTENTION = ("decode", "prefill", "chunk", "mixed")
FLOPS, BANDWIDTH = 100e12 / 1e6, 1e12 / 1e6  # a microsecond


def product_us(t: int, n: int, k: int, width: float) -> float:
    """With a softness so large that it is the larger of both times, and 3 us."""
    compute, memory = 2 * t * n * k / (0.8 * FLOPS), (width * (n * k + t * k) + 2 * t * n) / (0.9 * BANDWIDTH)
    return float((compute**8 + memory**8) ** (1 / 8)) + 3


@pytest.mark.parametrize(("kind", "width"), [("gemm", 2), ("gemm_fp8", 1), ("gemm_nvfp4", 0.5625)])
def test_the_parameters_of_products_are_found_again(kind: str, width: float) -> None:
    shapes = [(t, n, k) for t in (1, 16, 64, 256, 1024, 4096) for n in (1024, 8192) for k in (512, 4096, 16384)]
    rows = [({"t": str(t), "n": str(n), "k": str(k), "by": "vllm"}, product_us(t, n, k, width)) for t, n, k in shapes]
    entry = fit_operators.fitted({kind: rows}, FLOPS, BANDWIDTH, 0.5)
    part = entry["gemm"] if kind == "gemm" else entry["gemms"][kind.removeprefix("gemm_")]
    assert part == pytest.approx({"compute_ratio": 0.8, "memory_ratio": 0.9, "softness": 8, "launch_us": 3}, rel=0.02)
    assert " 0.0% of 36" in entry["error"]


def test_element_wise_work_is_fitted_where_norms_rotations_and_gates_were_measured() -> None:
    def us(values: int) -> float:
        return 2 * values / (0.6 * BANDWIDTH) + 2.5

    tokens = (1, 64, 512, 4096)
    rows: fit_operators.Rows = {
        "norm": [({"t": str(t), "h": "4096"}, us(4 * t * 4096)) for t in tokens],
        "rope": [({"t": str(t), "q": "32", "kv": "8"}, us(2 * t * 40 * 128)) for t in tokens],
        "silu": [({"t": str(t), "i": "11008"}, us(3 * t * 11008)) for t in tokens],
    }
    part, errors = fit_operators.elementwise(rows, BANDWIDTH, 0.45)
    assert part == pytest.approx({"memory_ratio": 0.6, "launch_us": 2.5}, rel=0.01)
    assert len(errors[0][2]) == 12
    del rows["rope"]
    part, errors = fit_operators.elementwise(rows, BANDWIDTH, 0.45)
    assert part["memory_ratio"] == 0.45 and not errors  # of the caller: two kinds are not a layer


def test_element_wise_work_is_that_of_the_servers_kernels_with_a_warm_cache() -> None:
    def row(by: str, l2: str, us: float) -> tuple[dict[str, str], float]:
        return {"t": "4096", "h": "4096", "q": "32", "kv": "8", "i": "4096", "by": by, "l2": l2}, us

    kinds = ("norm", "rope", "silu", "kv_write")
    rows: fit_operators.Rows = {
        kind: [row("vllm", "warm", 5.0), row("vllm", "cold", 50.0), row("inductor", "warm", 500.0)] for kind in kinds
    }
    _, errors = fit_operators.elementwise(rows, BANDWIDTH, 0.45)
    assert set(errors[0][2]) == {5.0} and len(errors[0][2]) == len(kinds)


def test_group_products_are_fitted_to_the_experts_that_are_reached() -> None:
    """A mixture of 64 experts, 4 a token, evenly and by Zipf's law, by known parameters."""
    other: fit_operators.Part = {"memory_ratio": 0.5, "launch_us": 2.0}
    rows = []
    for t in (1, 8, 64, 512, 4096):
        for h, i in ((1024, 512), (4096, 2048)):
            for routing in ("even", "zipf"):
                popularity = [1 / (1 + (routing == "zipf") * rank) for rank in range(64)]
                read = experts.reached(experts.chances(popularity, 4), t)
                us = 2 * 4 * t * (3 * i + h) / (0.5 * BANDWIDTH) + 4.0
                for n, k in ((2 * i, h), (h, i)):
                    compute = 2 * 4 * t * n * k / (0.7 * FLOPS)
                    memory = 2 * (read * n * k + 4 * t * (k + n)) / (0.8 * BANDWIDTH)
                    us += (compute**3 + memory**3) ** (1 / 3) + 6
                sizes = f"t={t};e=64;k=4;h={h};i={i};dtype=bf16;routing={routing}"
                for tuned, times in (("yes", 1), ("no", 2)):  # its defaults are slower, and are not taken
                    rows.append((dict(pair.split("=") for pair in f"{sizes};tuned={tuned}".split(";")), times * us))
    part, *_ = fit_operators.experts(rows, FLOPS, BANDWIDTH, other)["bf16"]
    assert part == pytest.approx({"compute_ratio": 0.7, "memory_ratio": 0.8, "softness": 3, "launch_us": 6}, rel=0.02)


def test_decode_is_fitted_to_rows_as_served_where_there_are_any() -> None:
    """Alone and beside prompts, by known parameters; other rows are twice as slow, and are not taken."""

    def row(b: int, c: int, h: int, kv: int, beside: int, **more: str) -> tuple[dict[str, str], float]:
        ratio, launch_us, tile_ns, head_ns = (0.5, 20.0, 30.0, 0.5) if beside else (0.8, 10.0, 4.0, 1.0)
        us = 512 * b * c * kv / (ratio * BANDWIDTH) + launch_us + b * (tile_ns * kv + head_ns * h) * 1e-3
        us += 256 * h * beside * 512**2 / (0.6 * FLOPS) + 0.3e-3 * beside * 512 * h
        sizes = {"b": b, "c": c, "h": h, "kv": kv, "p": beside, "q": 512}
        return {name: str(size) for name, size in sizes.items()} | more, us if more else 2 * us

    sizes = [(b, c, h, kv) for b in (16, 64, 256) for c in (128, 600, 2400) for h, kv in ((32, 8), (32, 32), (8, 1))]
    prompts = [
        ({"b": "1", "q": str(q), "c": str(c), "h": str(h)},
         10 + 512 * h * q * (c + q / 2) / (0.6 * FLOPS) + 0.3e-3 * q * h)
        for q in (128, 512, 2048) for c in (0, 512) for h in (8, 32)
    ]  # fmt: skip
    rows: fit_operators.Rows = {"prefill": prompts}
    for name, beside in (("decode", 0), ("mixed", 1)):
        rows[name] = [row(*each, beside, blocks="in_order") for each in sizes] + [row(*each, beside) for each in sizes]
    part, errors = fit_operators.attention(rows, FLOPS, BANDWIDTH)
    assert list(part["decode"].values()) == pytest.approx([0.8, 10.0, 4.0, 1.0], rel=0.01)
    assert list(part["mixed"].values()) == pytest.approx([0.5, 20.0, 30.0, 0.5], rel=0.01)
    assert (part["prefill_compute_ratio"], part["prefill_token_head_ns"]) == pytest.approx((0.6, 0.3), rel=0.01)
    assert [len(measured) for _, _, measured in errors] == [27, 12, 27]


@pytest.mark.parametrize("gpu", ["a100", "a800", "a40", "rtx4090", "rtx3090", "rtxpro6000", "l40s", "b200"])
def test_rows_beside_prefills_where_they_were_not_measured(gpu: str) -> None:
    """Slower than alone by what they are on the H100; a B200's are in a launch of their own."""
    h100 = GPUS["h100"].attention
    for fit in (GPUS[gpu].attention, *GPUS[gpu].attentions.values()):
        alone = msgspec.structs.asdict(fit.decode)
        wanted = alone | {"launch_us": 2 * fit.decode.launch_us}
        if gpu != "b200":
            wanted = {
                name: max(0, alone[name] + getattr(h100.mixed, name) - getattr(h100.decode, name)) for name in alone
            }
            wanted["memory_ratio"] = alone["memory_ratio"] * h100.mixed.memory_ratio / h100.decode.memory_ratio
        assert msgspec.structs.asdict(fit.mixed) == pytest.approx(wanted, abs=0.001)


def test_a_link_holds_those_of_fewer_gpus() -> None:
    reduced = [
        ({"n": str(n), "bytes": str(size), "p2p": "on"}, n * size / 1e3) for n in (4, 2, 8) for size in (1000, 2000)
    ]
    found = fit_operators.link(reduced, "on")
    assert (found["ranks"], found["pair"]["ranks"], found["pair"]["pair"]["ranks"]) == (8, 4, 2)
    assert found["pair"]["us"] == [4, 8] and "pair" not in found["pair"]["pair"]
    assert fit_operators.link(reduced, "off") == {}
    megabyte = 1 << 20
    tables = [({"n": "8", "bytes": str(size), "by": by, "p2p": "on"}, us)
              for by, us in (("trtllm", 1.0), ("vllm", 2.0)) for size in (megabyte, 2 * megabyte)]  # fmt: skip
    assert fit_operators.link(tables, "on") == {"ranks": 8, "bytes": [megabyte, 2 * megabyte], "us": [1.0, 2.0]}


def test_outliers_pull_a_fit_less() -> None:
    """Products at a known rate, every twelfth of which took three times as long."""
    rows = [
        ({"t": str(t), "n": "4096", "k": str(k), "by": "vllm"}, (4096 * k + t * (k + 2 * 4096)) / (0.8 * BANDWIDTH) + 5)
        for t in (1, 4, 16, 64) for k in (4096, 8192, 16384, 32768, 65536, 131072)
    ]  # fmt: skip
    rows = [(sizes, us * (3 if place % 12 == 5 else 1)) for place, (sizes, us) in enumerate(rows)]
    plain, robust = (
        fit_operators.products(rows, FLOPS, BANDWIDTH, 1.0, outliers=outliers)[0]["memory_ratio"]
        for outliers in (False, True)
    )
    assert abs(robust - 0.8) < 0.05 < abs(plain - 0.8)


def in_fp8(gpu: str) -> tuple[StepCost, Arithmetic]:
    model = catalog.find("llama-3.1-8b")
    assert model is not None
    precision = model.precision("bfloat16", "fp8")
    return StepCost(model, GPUS[gpu], 1, None, precision, Overheads()), arithmetic(GPUS[gpu], precision)


def test_products_in_waves_are_found_again() -> None:
    """Made by an entry that has them, at sizes that fill the last one more or less."""
    cost, numbers = in_fp8("h100")
    rows = [
        ({"t": str(t), "n": str(n), "k": str(k), "by": "vllm"}, 1e6 * cost.gemm_s(t, n, k, 1, numbers))
        for t in (1, 16, 64, 128, 192, 256, 512, 1024, 4096) for n in (1536, 2560, 4096, 8192) for k in (2048, 8192)
    ]  # fmt: skip
    part, *_ = fit_operators.products(
        rows, GPUS["h100"].flops / 1e6, GPUS["h100"].memory_bytes_per_s / 1e6, 1, (16, 64)
    )
    known = msgspec.to_builtins(GPUS["h100"].gemms["fp8"])
    assert part["waves"]["idle"] == pytest.approx(known["waves"]["idle"], rel=0.02)
    assert part["compute_ratio"] == pytest.approx(known["compute_ratio"], rel=0.02)


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_products_in_fp8_beside_those_that_others_published(gpu: str) -> None:
    """No entry is fitted to them. Without its waves it is further off."""
    cost, numbers = in_fp8(gpu)
    rows = fit_operators.read(PUBLISHED / f"{gpu}.csv")["gemm_fp8"]

    def off(numbers: Arithmetic) -> float:
        took = [(cost.gemm_s(*(int(sizes[name]) for name in "tnk"), 1, numbers) * 1e6, us) for sizes, us in rows]
        return sum(abs(predicted / us - 1) for predicted, us in took) / len(took)

    assert off(numbers) < 0.095 < off(replace(numbers, fit=msgspec.structs.replace(numbers.fit, waves=None)))


@pytest.mark.parametrize(("hidden", "inner", "heads"), [(4096, 14336, 32), (5120, 25600, 64)])
def test_products_in_fp8_that_do_not_fill_their_tiles(hidden: int, inner: int, heads: int) -> None:
    """The four of a layer together, to which nothing is fitted. If they only filled up, they would be further off."""
    cost, numbers = in_fp8("h100")
    layer = {((heads + 16) * 128, hidden), (hidden, heads * 128), (2 * inner, hidden), (hidden, inner)}
    took: defaultdict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    for sizes, us in fit_operators.read(OPERATORS / "h100_partial.csv")["gemm_fp8"]:
        t, n, k = (int(sizes[name]) for name in "tnk")
        if (n, k) in layer and t > 256 and t % 256:
            took[t][n, k] = us

    def off(multiple: int) -> float:
        each = [
            sum(1e6 * cost.gemm_s(-(-t // multiple) * multiple, n, k, 1, numbers) for n, k in us) / sum(us.values())
            for t, us in took.items()
        ]
        return sum(abs(ratio - 1) for ratio in each) / len(each)

    assert len(took) == 22 and off(1) < 0.055
    assert off(256) > 0.11


@pytest.mark.parametrize("gpu", ["h200", "h100", *sorted(path.stem for path in PUBLISHED.glob("*.csv"))])
def test_an_entry_is_the_fit_to_its_table(gpu: str) -> None:
    """The H200 and H100 by what was measured here. The A800's prefills are those of the A100."""
    known = GPUS[gpu]
    rows = fit_operators.read(PUBLISHED / f"{gpu}.csv")
    for own in (OPERATORS / f"{gpu}{part}.csv" for part in ("", "_dtypes", "_served")):
        rows |= fit_operators.read(own) if own.exists() else {}
    rows = {kind: of_kind for kind, of_kind in rows.items() if kind.startswith(("gemm", *ATTENTION))}
    entry = fit_operators.fitted(rows, known.flops / 1e6, known.memory_bytes_per_s / 1e6, 0.45,
                                 by_rows=gpu in ("h200", "h100"), outliers=gpu == "b200")  # fmt: skip
    assert entry["gemm"]["compute_ratio"] == pytest.approx(known.gemm.compute_ratio, rel=0.01)
    assert entry["gemm"]["memory_ratio"] == pytest.approx(known.gemm.memory_ratio, rel=0.01)
    assert set(entry.get("gemms", {})) == set(known.gemms)
    for dtype, part in entry.get("gemms", {}).items():
        assert part["compute_ratio"] == pytest.approx(known.gemms[dtype].compute_ratio, rel=0.01)
        assert part["memory_ratio"] == pytest.approx(known.gemms[dtype].memory_ratio, rel=0.01)
        assert part.get("narrow", []) == [list(each) for each in known.gemms[dtype].narrow]
        waves = known.gemms[dtype].waves
        assert part.get("waves") == (None if waves is None else msgspec.structs.asdict(waves))
    for part, fit in zip(
        [entry.get("attention"), *entry.get("attentions", {}).values()],
        [known.attention, *known.attentions.values()],
        strict=True,
    ):
        shipped = msgspec.to_builtins(fit)
        for name in part or {}:
            if (gpu, name[:7]) != ("a800", "prefill"):
                assert part[name] == pytest.approx(shipped[name], rel=0.01, abs=0.002)
    for stated in entry["error"].removeprefix("mean absolute relative error: ").split(", "):
        assert stated in known.error or (gpu, stated[:7]) == ("a800", "prefill")


@pytest.mark.parametrize(
    ("gpu", "topology"),
    [("a100", "nvlink"), ("b200", "nvlink"), ("h100", "nvlink"), ("l40s", "pcie"), ("rtxpro6000", "pcie")],
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_reduces_as_published(gpu: str, topology: str, ranks: int) -> None:
    """Up to some size those of FlashInfer, whose kernel is TensorRT-LLM's, where vLLM calls it."""
    link = GPUS[gpu].links[topology]
    rows = fit_operators.read(PUBLISHED / f"{gpu}.csv")["all_reduce"]
    most = fit_operators.FLASHINFER_BYTES[ranks] if gpu == "b200" else 0
    measured = {
        int(sizes["bytes"]): us for sizes, us in rows
        if int(sizes["n"]) == ranks and (sizes["by"] == "trtllm") == (int(sizes["bytes"]) <= most)
    }  # fmt: skip
    assert len(measured) == 16
    for size, us in measured.items():
        assert link.all_reduce_s(size, ranks) * 1e6 == pytest.approx(us, abs=0.006)


def test_products_in_fp8_take_between_a_third_and_a_little_more_than_16_bit() -> None:
    """Of one layer's product: a wrong width, or a ratio of another peak, would be beyond."""

    def seconds(gpu: GpuSpec, fit: GemmCost, width: int, tokens: int) -> float:
        compute = 2 * tokens * 4096 * 8192 / (fit.compute_ratio * gpu.flops)
        moved = width * (4096 * 8192 + tokens * 8192) + 2 * tokens * 4096
        return math.hypot(compute, moved / (fit.memory_ratio * gpu.memory_bytes_per_s)) + fit.launch_us * 1e-6

    checked = [(gpu, tokens) for gpu in GPUS.values() if "fp8" in gpu.gemms for tokens in (1, 64, 4096)]
    assert len(checked) == 15
    for gpu, tokens in checked:
        ratio = seconds(gpu, gpu.gemms["fp8"], 1, tokens) / seconds(gpu, gpu.gemm, 2, tokens)
        assert 1 / 3 < ratio < 1.3, (gpu.name, tokens)
