"""Micro-benchmarks without torch: presets, definitions, tables and reports from points with known answers, processes
that crash or hang (stand-ins), and mistakes, which are one sentence."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import gpus
from training_probe import cli, layout, micro_cli, micro_report, micro_run, micro_tables
from training_probe import micro_presets as presets
from training_probe.flops import peak_flops
from training_probe.micro_points import (
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
from training_probe.micro_run import Manifest

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
        share = micro_tables.share(speed, peak_flops("A800"))
        assert share is not None and 100 * share == pytest.approx(percent, abs=0.06)


def test_median_and_spread() -> None:
    result = measured(Copy(route="d2d", size_bytes=1000), [float(value) for value in range(11)], 7)
    assert (result.median_s, result.p10_s, result.p90_s, result.samples, result.launches) == (5.0, 1.0, 9.0, 11, 7)
    assert result.bytes_per_s == 200.0 and result.flops_per_s is None and result.bus_bytes_per_s is None


def test_a_wrong_collective_is_no_result() -> None:
    point = Collective(name="reduce", size_bytes=8, ranks=2)
    result = measured(point, [1.0, 1.0], 1, correct=False)
    assert result.outcome == "wrong" and result.bytes_per_s is None and result.bus_bytes_per_s is None
    (table,) = micro_tables.build([result], H200)
    assert table.rows == (("reduce", "8 B", "wrong [1]"),)  # no time either
    assert cells(table, "algbw GB/s") == ["wrong [1]"] and table.notes == ("the result is not what it must be",)


def test_a_remark_stands_beside_its_number() -> None:
    result = measured(Copy(route="d2d", size_bytes=10**9), [0.5, 0.5], 1, remark="too late")
    (table,) = micro_tables.build([result], H200)
    assert cells(table, "GB/s") == ["2.000 [1]"] and table.notes == ("too late",)


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


def cells(table: layout.Table, head: str) -> list[str]:
    place = [column.head for column in table.columns].index(head)
    return [row[place] for row in table.rows]


def test_gemm_table() -> None:
    points = presets.gemms("cuda", preset="paper-table12")
    found = [at(point, point.flops / 494.7e12) for point in points]
    found.append(Measured(point=Gemm(m=1, n=2, k=3, dtype="int8"), outcome="unsupported", reason="M must be > 16"))
    (table,) = micro_tables.build(found, H200)
    assert cells(table, "data sheet") == ["50.0"] * 3 + [""]
    assert cells(table, "measured") == ["100.0"] * 3 + [""]
    assert cells(table, "TFLOP/s") == ["494.7"] * 3 + ["unsupported [1]"]
    assert table.notes == ("M must be > 16",)
    paper = [column.group for column in table.columns].index("A800, Table XII")
    assert [row[paper : paper + 2] for row in table.rows[1:3]] == [("0.289", "66.6"), ("3.870", "79.4")]
    assert any("2311.03687" in sentence for sentence in table.caption)


def test_shares_are_of_the_fastest_product() -> None:
    large = Gemm(m=8192, n=8192, k=8192, dtype="fp32", peak=True)
    other = Gemm(m=4096, n=4096, k=4096, dtype="fp32")
    (table,) = micro_tables.build([at(large, large.flops / 40e12), at(other, other.flops / 50e12)], H200)
    assert cells(table, "measured") == ["80.0", "100.0"]
    assert "data sheet" not in [column.head for column in table.columns]
    assert not any("2311.03687" in sentence for sentence in table.caption)


def test_collectives_table_sets_p2p_side_by_side() -> None:
    on, off = (Collective(name="allgather", size_bytes=1 << 30, ranks=4, p2p=way) for way in (True, False))
    (table,) = micro_tables.build([at(on, 0.001), at(off, 0.01)], H200)
    assert len(table.rows) == 1
    assert [group for group, _ in table.groups()] == ["", "P2P on", "P2P off"]
    busbw = [at for at, column in enumerate(table.columns) if column.head == "busbw GB/s"]
    assert [table.rows[0][place] for place in busbw] == ["805.3", "80.53"]


def manifest(points: list[Any], **more: Any) -> Manifest:
    """`timeout_s` is short: for stand-ins."""
    given = {
        "run_id": "r", "started_unix_s": 0.0, "version": "1", "kind": "memcpy", "device": "cpu", "device_name": "CPU",
        "task": Task(device="cpu", points=points, samples=5), "timeout_s": 60.0, **more,
    }  # fmt: skip
    return Manifest(**given)


def test_report_derives_and_counts() -> None:
    points = presets.gemms("cuda", m=(64,), n=(64,), k=(64,))
    found = [at(points[0], points[0].flops / 700e12)]
    report = micro_report.build(found, manifest(points, kind="gemm", device_name=H200), About(device_name=H200))
    assert report["schema"] == "training_probe.micro/1"
    assert report["points"] == {"planned": 2, "all": 1, "by_outcome": {"ok": 1}}
    assert report["results"][0]["data_sheet_peak_ratio"] == pytest.approx(700 / 989.4)
    text = micro_report.text(found, report, 100)
    assert "1 of 2 points: 1 ok." in text and "700 TFLOP/s, 70.7 % of the data sheet's 989.4" in text
    json.dumps(msgspec.to_builtins(report))


# Processes.

STAND_IN = """
import os, pathlib, sys, time
import msgspec
from training_probe.micro_points import *
directory = pathlib.Path(sys.argv[1])
task = msgspec.json.decode((directory / TASK_FILE).read_bytes(), type=Task)
(directory / ABOUT_FILE).write_bytes(msgspec.json.encode(About(device_name="CPU", versions={"torch": "0"})))
(directory / "p2p").write_text(os.environ.get("NCCL_P2P_DISABLE", "unset"))
with (directory / POINTS_FILE).open("ab", buffering=0) as file:
    for number, point in enumerate(task.points):
        if number == int(sys.argv[2]):
            how = sys.argv[3]
            if how == "hang":
                time.sleep(600)
            print("Traceback ...\\ncannot go on: an illegal memory access", file=sys.stderr)
            os._exit(1)
        file.write(msgspec.json.encode(measured(point, [0.1, 0.1], 1)) + b"\\n")
"""


class StandIn(micro_run.Command):
    """Measures without measuring; at point `fails_at` it crashes or hangs."""

    def __init__(self, fails_at: int = -1, how: str = "crash") -> None:
        self._arguments = (str(fails_at), how)

    def __call__(self, *, python: str, processes: int, port: int, directory: Path) -> tuple[str, ...]:
        return (python, "-c", STAND_IN, str(directory), *self._arguments)


linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are started on Linux only")


@linux
def test_a_measurement_leaves_a_whole_report(tmp_path: Path) -> None:
    points = presets.copies("cpu")
    said: list[str] = []
    assert micro_run.measure(manifest(points), tmp_path / "out", said.append, StandIn()) == 0
    found, report = micro_report.redo(tmp_path / "out")
    assert [result.point for result in found] == points
    assert report["points"]["by_outcome"] == {"ok": len(points)} and report["versions"] == {"torch": "0"}
    assert json.loads((tmp_path / "out" / "report.json").read_bytes()) == msgspec.to_builtins(report)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"manifest.json", "micro.jsonl", "report.md", "tables.tex", "memcpy.svg", "memcpy.png"} <= names
    assert "(memcpy.svg)" in (tmp_path / "out" / "report.md").read_text()


@linux
@pytest.mark.parametrize(
    ("how", "outcome", "timeout_s", "why"),
    [("crash", "crashed", 60.0, "an illegal memory access"), ("hang", "timeout", 1.5, "no result in 1.5 s")],
)
def test_points_that_were_not_reached_are_told(
    tmp_path: Path, how: str, outcome: str, timeout_s: float, why: str
) -> None:
    points = presets.copies("cpu")[:4]
    micro_run.measure(manifest(points, timeout_s=timeout_s), tmp_path / "out", lambda _: None, StandIn(2, how))
    found = micro_run.read_results(tmp_path / "out")
    assert [result.outcome for result in found] == ["ok", "ok", outcome, outcome]
    assert found[2].reason == why
    assert found[3].reason == f"not reached: the point before it ended so: {why}"


@linux
def test_a_signal_stops_it_and_keeps_what_there_is(tmp_path: Path) -> None:
    points = presets.copies("cpu")[:3]
    results = tmp_path / "out" / micro_run.RESULTS_FILE

    def interrupt() -> None:
        while not (results.exists() and results.read_bytes().count(b"\n") == 2):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    said: list[str] = []
    assert micro_run.measure(manifest(points), tmp_path / "out", said.append, StandIn(2, "hang")) == 130
    assert said[-1].startswith("stopped; what was measured is in")
    assert [result.outcome for result in micro_run.read_results(tmp_path / "out")] == ["ok", "ok"]


@linux
def test_p2p_on_and_off_are_two_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = presets.collectives("cuda", 2, names=("reduce",), sizes=(1024,))
    for before, seen in ((None, {"on": "unset", "off": "1"}), ("1", {"on": "0", "off": "1"})):
        if before:
            monkeypatch.setenv("NCCL_P2P_DISABLE", before)
        out = tmp_path / f"out-{before}"
        asked = manifest(points, kind="collectives", ranks=2)
        assert micro_run.measure(asked, out, lambda _: None, StandIn()) == 0
        assert {way: (out / "runs" / f"p2p-{way}" / "p2p").read_text() for way in ("on", "off")} == seen
        assert [result.point for result in micro_run.read_results(out)] == points


def test_a_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    line = msgspec.json.encode(at(Copy(route="h2h", size_bytes=1), 1.0))
    (tmp_path / micro_run.RESULTS_FILE).write_bytes(line + b"\n" + line[:40])
    assert len(micro_run.read_results(tmp_path)) == 1


@pytest.mark.parametrize(("field", "value"), [("ranks", 0), ("size_bytes", -5), ("median_s", -1)])
def test_a_point_that_cannot_be_is_refused(field: str, value: int, tmp_path: Path) -> None:
    row = msgspec.to_builtins(at(Collective(name="allreduce", size_bytes=8, ranks=2), 1.0))
    (row["point"] if field in row["point"] else row)[field] = value
    (tmp_path / micro_run.RESULTS_FILE).write_bytes(msgspec.json.encode(row) + b"\n")
    with pytest.raises(MicroError, match=f"no result of this version: .*{field}"):
        micro_run.read_results(tmp_path)


# The command line.


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "read", lambda: gpus.Inventory(problem="no NVIDIA driver"))
    monkeypatch.setattr(micro_cli, "find_spec", lambda name: object())
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    card = gpus.Gpu(index=0, name=H200, uuid="GPU-1", memory_bytes=1, used_bytes=0)
    monkeypatch.setattr(gpus, "read", lambda: gpus.Inventory(gpus=(card,)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def one_sentence(argv: list[str], capsys: pytest.CaptureFixture[str], message: str) -> None:
    assert cli.invoke(["micro", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("training_probe: ") and message in captured.err, captured.err


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gemm", "--m", "0"], "--m is 0; it must be from 1"),
        (["gemm", "--k", "1.5"], "'1.5' is not a whole number"),
        (["gemm", "--dtype", "fp4"], "fp4"),
        (["gemm", "--preset", "paper-fig11"], "for GPUs and this machine has none"),
        (["gemm", "--preset", "paper-fig11", "--device", "cpu", "--m", "5"], "leave --m, --n and --k out"),
        (["gemm", "--device", "cuda"], "no GPU that can be used (no NVIDIA driver)"),
        (["gemm", "--samples", "1"], "--samples is 1; it must be from 2"),
        (["memcpy", "--timeout", "0"], "--timeout is 0; it must be above 0"),
        (["memcpy", "--sizes", "1T"], "'1T' is no size"),
        (["memcpy", "--sizes", "0"], "must be from 1 byte to 64 GiB"),
        (["collectives", "--gpus", "1"], "--gpus is 1; collectives need at least 2"),
        (["collectives", "--gpus", "65"], "at most 64 ranks"),
        (["collectives", "--p2p", "off"], "P2P is between GPUs; leave --p2p out"),
        (["collectives", "--op", "gather"], "gather"),
    ],
)
def test_mistakes_are_one_sentence(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    one_sentence(argv, capsys, message)


@pytest.mark.usefixtures("one_gpu")
def test_collectives_need_two_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    one_sentence(["collectives"], capsys, "one GPU that can be used; collectives need at least 2")
    one_sentence(["collectives", "--gpus", "2"], capsys, "--gpus is 2 and this machine has 1")
    one_sentence(["collectives", "--gpus", "1"], capsys, "--gpus is 1; collectives need at least 2")


@pytest.mark.usefixtures("no_gpu")
def test_torch_is_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_cli, "find_spec", lambda name: None)
    one_sentence(["gemm"], capsys, "torch is not installed; pip install 'llm-dissect[train]'")


@linux
@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("how", "code"), [(StandIn(), 0), (StandIn(1), 3)])
def test_exit_codes_and_the_last_line(
    how: StandIn, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(micro_run, "Command", lambda: how)
    assert cli.invoke(["micro", "memcpy", "--sizes", "1K", "4K", "--out", str(tmp_path / "o")]) == code
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["kind"] == "memcpy" and report["points"]["all"] == 2
    assert cli.invoke(["report", str(tmp_path / "o")]) == code
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    one_sentence(["memcpy", "--out", str(tmp_path / "o")], capsys, "exists and is not empty")
