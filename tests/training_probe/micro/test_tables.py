"""Micro-benchmarks without torch: presets, definitions, tables and reports from points with known answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.document import terminal
from loadgen.document.content import Table
from training_probe.flops import peak_flops
from training_probe.micro import presets, tables
from training_probe.micro import report as micro_report
from training_probe.micro.run import MicroManifest
from training_probe.points import (
    About,
    Collective,
    Copy,
    Gemm,
    Measured,
    MicroError,
    Name,
    Point,
    Task,
    bus_factor,
    measured,
    size_text,
    whole_elements,
)  # fmt: skip

H200 = "NVIDIA H200"


def at(point: Point, seconds: float) -> Measured:
    return measured(point, [seconds] * 5, 3)


# Definitions.


@pytest.mark.parametrize(
    ("name", "ranks", "factor"),
    [
        ("allreduce", 2, 1.0), ("allreduce", 8, 1.75), ("allgather", 8, 0.875), ("reducescatter", 4, 0.75),
        ("alltoall", 4, 0.75), ("reduce", 8, 1.0), ("broadcast", 8, 1.0), ("sendrecv", 8, 1.0),
    ],
)  # fmt: skip
def test_bus_bandwidth_as_nccl_tests_has_it(name: Name, ranks: int, factor: float) -> None:
    assert bus_factor(name, ranks) == factor
    result = at(Collective(name=name, size_bytes=10**9, ranks=ranks, p2p=True), 0.5)
    assert result.bytes_per_s == 2e9
    assert result.bus_bytes_per_s == factor * 2e9


def test_flops_of_table_12_are_the_papers_shares() -> None:
    """2 M N K over the paper's own times and the A800's 312 TFLOP/s gives the percents that it printed."""
    for (m, n, k), (ms, percent) in presets.TABLE_12.items():
        speed = at(Gemm(m=m, n=n, k=k, dtype="bf16"), ms / 1000).flops_per_s
        share = tables.share(speed, peak_flops("A800"))
        assert share is not None and 100 * share == pytest.approx(percent, abs=0.06)


def test_median_and_spread() -> None:
    result = measured(Copy(route="d2d", size_bytes=1000), [float(value) for value in range(11)], 7)
    assert (result.median_s, result.p10_s, result.p90_s, result.samples, result.launches) == (5.0, 1.0, 9.0, 11, 7)
    assert result.bytes_per_s == 200.0 and result.flops_per_s is None and result.bus_bytes_per_s is None


def test_a_wrong_collective_is_no_result() -> None:
    point = Collective(name="reduce", size_bytes=8, ranks=2)
    result = measured(point, [1.0, 1.0], 1, correct=False)
    assert result.outcome == "wrong" and result.bytes_per_s is None and result.bus_bytes_per_s is None
    (table,) = tables.build([result], H200)
    assert [*map(tuple, table.texts())] == [("reduce", "8 B", "wrong [1]")]  # no time either
    assert cells(table, "algbw GB/s") == ["wrong [1]"] and tuple(table.notes) == ("the result is not what it must be",)


def test_a_remark_stands_beside_its_number() -> None:
    result = measured(Copy(route="d2d", size_bytes=10**9), [0.5, 0.5], 1, remark="too late")
    (table,) = tables.build([result], H200)
    assert cells(table, "GB/s") == ["2.000 [1]"] and tuple(table.notes) == ("too late",)


@given(st.integers(1, 1 << 36), st.integers(2, 64))
def test_sizes_are_shared_evenly(size: int, ranks: int) -> None:
    found = whole_elements(size, ranks)
    assert found % (4 * ranks) == 0 and found > 0
    assert found <= size or found == 4 * ranks
    assert size - found < 4 * ranks


def test_peaks_of_other_dtypes() -> None:
    """NVIDIA's data sheets, dense."""
    assert peak_flops("NVIDIA H200", "fp8") == pytest.approx(1979e12, rel=1e-3)
    assert peak_flops("NVIDIA H100 80GB HBM3", "tf32") == pytest.approx(495e12, rel=2e-3)
    assert peak_flops("NVIDIA A100-SXM4-80GB", "int8") == 624e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert peak_flops("NVIDIA GeForce RTX 4090", "int8") == pytest.approx(660.6e12, rel=1e-3)
    assert peak_flops("NVIDIA H200", "fp32") is None and peak_flops("CPU", "bf16") is None


# Presets.


def test_figure_11_has_four_curves() -> None:
    points = presets.gemms("cuda", preset="paper-fig11")
    curves: dict[str, list[int]] = {}
    for point in points:
        if not point.peak:
            curves.setdefault(point.curve, []).append(point.m)
    assert {name: (rows[0], rows[-1], len(rows)) for name, rows in curves.items()} == {
        "N4096_K4096": (4096, 16384, 25),
        "N11008_K4096": (4096, 16384, 25),
        "N16384_K16384": (4096, 16384, 25),
        "unaligned_N11008_K4096": (4109, 16397, 25),
    }
    assert [point.peak for point in points] == [True] + [False] * 100


def test_every_dtype_has_its_large_product() -> None:
    points = presets.gemms("cuda", m=(64,), n=(64,), k=(64,), dtypes=("bf16", "fp8"))
    assert [(point.dtype, point.m) for point in points] == [("bf16", 8192), ("bf16", 64), ("fp8", 8192), ("fp8", 64)]


def test_copies() -> None:
    figure = presets.copies("cuda", preset="paper-fig12")
    assert {point.label for point in figure} == {"H to D pinned", "D to H pinned", "H to D pageable", "D to H pageable"}
    assert (figure[0].size_bytes, max(point.size_bytes for point in figure)) == (1 << 10, 1 << 30)
    assert "D to D" in {point.label for point in presets.copies("cuda")}
    assert {point.route for point in presets.copies("cpu")} == {"h2h"}


def test_collectives() -> None:
    both = presets.collectives("cuda", 8, preset="paper-fig13")
    assert {(point.name, point.p2p) for point in both} == {("allgather", True), ("allgather", False)}
    assert {point.name for point in presets.collectives("cuda", 8, preset="paper-fig14")} == {"reducescatter"}
    last = presets.collectives("cuda", 8, preset="paper-fig15")
    assert {point.name for point in last} == {"allgather", "reducescatter", "reduce"}
    assert {point.p2p for point in last} == {True}
    assert {point.p2p for point in presets.collectives("cpu", 2)} == {None}
    assert len({point.name for point in presets.collectives("cpu", 2)}) == 7


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("64K", 1 << 16), ("64kb", 1 << 16), ("1GiB", 1 << 30), ("3 M", 3 << 20)]
)
def test_sizes_as_typed(text: str, size: int) -> None:
    assert presets.size(text) == size


@pytest.mark.parametrize("text", ["", "K", "1.5M", "-1", "0", "1T", "9999999999G", "٣K", "64KK"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(MicroError):
        presets.size(text)


def test_sizes_as_shown() -> None:
    assert [size_text(size) for size in (12, 1 << 10, 1536, 1 << 30)] == ["12 B", "1 KiB", "1.5 KiB", "1 GiB"]


# Tables and reports.


def cells(table: Table, head: str) -> list[str]:
    place = [column.head for column in table.columns].index(head)
    return [row[place] for row in table.texts()]


def test_gemm_table() -> None:
    points = presets.gemms("cuda", preset="paper-table12")
    found = [at(point, point.flops / 494.7e12) for point in points]
    found.append(Measured(point=Gemm(m=1, n=2, k=3, dtype="int8"), outcome="unsupported", reason="M must be > 16"))
    (table,) = tables.build(found, H200)
    assert cells(table, "data sheet") == ["50.0"] * 3 + [""]
    assert cells(table, "measured") == ["100.0"] * 3 + [""]
    assert cells(table, "TFLOP/s") == ["494.7"] * 3 + ["unsupported [1]"]
    assert tuple(table.notes) == ("M must be > 16",)
    paper = [column.group for column in table.columns].index("A800, Table XII")
    assert [tuple(row[paper : paper + 2]) for row in table.texts()[1:3]] == [("0.289", "66.6"), ("3.870", "79.4")]
    assert any("2311.03687" in sentence for sentence in table.below)


def test_shares_are_of_the_fastest_product() -> None:
    large = Gemm(m=8192, n=8192, k=8192, dtype="fp32", peak=True)
    other = Gemm(m=4096, n=4096, k=4096, dtype="fp32")
    (table,) = tables.build([at(large, large.flops / 40e12), at(other, other.flops / 50e12)], H200)
    assert cells(table, "measured") == ["80.0", "100.0"]
    assert "data sheet" not in [column.head for column in table.columns]
    assert not any("2311.03687" in sentence for sentence in table.below)


def test_collectives_table_sets_p2p_side_by_side() -> None:
    on, off = (Collective(name="allgather", size_bytes=1 << 30, ranks=4, p2p=way) for way in (True, False))
    (table,) = tables.build([at(on, 0.001), at(off, 0.01)], H200)
    assert len(table.texts()) == 1
    assert [group for group, _ in table.groups()] == ["", "P2P on", "P2P off"]
    busbw = [at for at, column in enumerate(table.columns) if column.head == "busbw GB/s"]
    assert [table.texts()[0][place] for place in busbw] == ["805.3", "80.53"]


def manifest(points: list[Any], **more: Any) -> MicroManifest:
    """`timeout_s` is short: for stand-ins."""
    given = {
        "run_id": "r", "started_unix_s": 0.0, "version": "1", "kind": "memcpy", "device": "cpu", "device_name": "CPU",
        "task": Task(device="cpu", points=points, samples=5), "timeout_s": 60.0, **more,
    }  # fmt: skip
    return MicroManifest(**given)


def test_report_derives_and_counts(tmp_path: Path) -> None:
    points = presets.gemms("cuda", m=(64,), n=(64,), k=(64,))
    found = [at(points[0], points[0].flops / 700e12)]
    measured = (found, manifest(points, kind="gemm", device_name=H200), About(device_name=H200))
    report = micro_report.build(*measured)
    assert report.schema == "training_probe.micro/1"
    assert msgspec.to_builtins(report.points) == {"planned": 2, "all": 1, "by_outcome": {"ok": 1}}
    assert report.results[0]["data_sheet_peak_ratio"] == pytest.approx(700 / 989.4)
    text = terminal.render(micro_report.document(*measured).page(tmp_path), 100)
    assert "1 of 2 points, 1 missing: 1 ok." in text and "700 TFLOP/s, 70.7 % of the data sheet's 989.4" in text
    json.dumps(msgspec.to_builtins(report))
