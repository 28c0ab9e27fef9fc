"""A micro-benchmark's page as data: speeds are the report's own, with the spread of the samples and the roof."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.document.content import Document
from tests.training_probe.pages import charts_of, numbers_of
from training_probe.flops import peak_flops
from training_probe.micro import report
from training_probe.micro.run import MicroManifest
from training_probe.points import GB, Collective, Copy, Gemm, Kind, Measured, Point, Task, measured

H200 = "NVIDIA H200"


def timed(point: Point, median_s: float) -> Measured:
    """Ten percent and ninety percent are a tenth below and above."""
    return measured(point, [median_s * factor for factor in (0.9, 0.9, 1.0, 1.1, 1.1)], 3)


def written(kind: Kind, *results: Measured) -> tuple[Document, report.MicroReport]:
    task = Task(device="cuda", points=[each.point for each in results], samples=5)
    manifest = MicroManifest(
        run_id="r", started_unix_s=1.0, version="0", kind=kind, device="cuda", device_name=H200, ranks=2, task=task,
        timeout_s=1.0, argv=("micro", kind),
    )  # fmt: skip
    document = report.document(results, manifest, None)
    assert isinstance(document.report, report.MicroReport)
    return document.page(Path()), document.report


def test_products_stand_under_the_roof_with_their_spread() -> None:
    shapes = [Gemm(m=m, n=4096, k=4096, dtype="bf16", curve="N4096_K4096") for m in (8192, 4096)]
    peak = Gemm(m=8192, n=8192, k=8192, dtype="bf16", peak=True)
    page, made = written("gemm", timed(peak, 1.5e-3), *(timed(each, 4e-4) for each in shapes))
    chart = charts_of(page)["Matrix products, bf16"]
    (line,) = chart.series
    assert (line.name, list(line.x)) == ("N4096_K4096", [4096, 8192])
    speeds = [each["flops_per_s"] for each in made.results]
    assert list(line.y) == pytest.approx([speeds[2] / 1e12, speeds[1] / 1e12])
    assert line.low is not None and line.high is not None
    assert (line.low[0], line.high[0]) == pytest.approx((speeds[2] / 1.1e12, speeds[2] / 0.9e12))
    sheet = peak_flops(H200, "bf16")
    assert sheet is not None
    assert [(mark.label, mark.value) for mark in chart.marks] == [
        ("data sheet", sheet / 1e12), ("measured peak", pytest.approx(max(speeds) / 1e12)),
    ]  # fmt: skip
    assert set(numbers_of(page)) >= {speed / 1e12 for speed in speeds}


def test_collectives_are_over_size_on_logarithmic_axes() -> None:
    points = [
        Collective(name="allreduce", size_bytes=size, ranks=4, p2p=p2p)
        for p2p in (True, False)
        for size in (1 << 20, 1 << 30)
    ]  # fmt: skip
    results = [timed(each, 1e-3) for each in points]
    failed = Measured(point=points[0], outcome="wrong", reason="the result is not what it must be")
    page, made = written("collectives", *results, failed)
    found = charts_of(page)
    throughput, latency = found["AllReduce: throughput"], found["AllReduce: latency"]
    assert set(throughput.log_now) == set(latency.log_now) == {"x", "y"}
    assert [each.name for each in throughput.series] == ["P2P on, 4 ranks", "P2P off, 4 ranks"]
    on = throughput.series[0]
    assert (list(on.x), on.labels) == ([1, 1024], ["1 MiB", "1 GiB"])
    assert list(on.y) == pytest.approx([each["bus_bytes_per_s"] / GB for each in made.results[:2]])
    assert list(latency.series[1].y) == [1.0, 1.0]
    assert page.tone == "bad" and "1 wrong" in page.verdict


def test_copies_and_their_latency() -> None:
    page, made = written("memcpy", timed(Copy(route="h2d", pinned=True, size_bytes=1 << 20), 2e-5))
    found = charts_of(page)
    assert found["Memory copies: throughput"].series[0].name == "H to D pinned"
    assert found["Memory copies: throughput"].series[0].y[0] == pytest.approx(made.results[0]["bytes_per_s"] / GB)
    assert found["Memory copies: latency"].series[0].y == (20.0,)
    assert found["Memory copies: latency"].series[0].kind == "points"  # one alone is no line


def test_a_kind_that_measured_nothing_has_no_chart() -> None:
    page, _ = written("memcpy", Measured(point=Copy(route="h2d", size_bytes=1), outcome="crashed", reason="x"))
    assert not charts_of(page) and page.tone == "bad"
