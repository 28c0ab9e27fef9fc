"""Measurements of `training_probe micro` by stand-ins that crash or hang, what is read back, and mistakes, which are
one sentence."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from backends import exit_codes, gpus
from backends.exit_codes import install_command
from tests.training_probe.micro.test_tables import H200, at, manifest
from training_probe import cli
from training_probe.micro import cli as micro_cli
from training_probe.micro import presets, run
from training_probe.micro import report as micro_report
from training_probe.points import (
    Collective,
    Copy,
    MicroError,
)  # fmt: skip

STAND_IN = """
import os, pathlib, sys, time
import msgspec
from training_probe.points import *
directory = pathlib.Path(sys.argv[1])
task = msgspec.json.decode((directory / TASK_FILE).read_bytes(), type=Task)
(directory / ABOUT_FILE).write_bytes(msgspec.json.encode(About(device_name="CPU", versions={"torch": "0"})))
(directory / "p2p").write_text(os.environ.get("NCCL_P2P_DISABLE", "unset"))
(directory / "nvls").write_text(os.environ.get("NCCL_NVLS_ENABLE", "unset"))
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


class StandIn(run.MicroCommand):
    """Measures without measuring; at point `fails_at` it crashes or hangs."""

    def __init__(self, fails_at: int = -1, how: str = "crash") -> None:
        self._arguments = (str(fails_at), how)

    def __call__(
        self, *, python: str, processes: int, port: int, directory: Path, node: object = None
    ) -> tuple[str, ...]:
        return (python, "-c", STAND_IN, str(directory), *self._arguments)


linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are started on Linux only")


@linux
def test_a_measurement_leaves_a_whole_report(tmp_path: Path) -> None:
    points = presets.copies("cpu")
    said: list[str] = []
    assert run.measure(manifest(points), tmp_path / "out", said.append, StandIn()) == 0
    found, kept, about = (read(tmp_path / "out") for read in (run.read_results, run.read_manifest, run.read_about))
    micro_report.document(found, kept, about).publish(tmp_path / "out")
    report = micro_report.build(found, kept, about)
    assert [result.point for result in found] == points
    assert report.points.by_outcome == {"ok": len(points)} and report.versions == {"torch": "0"}
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
    run.measure(manifest(points, timeout_s=timeout_s), tmp_path / "out", lambda _: None, StandIn(2, how))
    found = run.read_results(tmp_path / "out")
    assert [result.outcome for result in found] == ["ok", "ok", outcome, outcome]
    assert found[2].reason == why
    assert found[3].reason == f"not reached: the point before it ended so: {why}"


@linux
def test_a_signal_stops_it_and_keeps_what_there_is(tmp_path: Path) -> None:
    points = presets.copies("cpu")[:3]
    results = tmp_path / "out" / run.RESULTS_FILE

    def interrupt() -> None:
        while not (results.exists() and results.read_bytes().count(b"\n") == 2):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    said: list[str] = []
    assert run.measure(manifest(points), tmp_path / "out", said.append, StandIn(2, "hang")) == 130
    assert said[-1].startswith("stopped; what was measured is in")
    assert [result.outcome for result in run.read_results(tmp_path / "out")] == ["ok", "ok"]


@linux
def test_p2p_on_and_off_are_two_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = presets.collectives("cuda", 2, names=("reduce",), sizes=(1024,))
    for before, seen in ((None, {"on": "unset", "off": "1"}), ("1", {"on": "0", "off": "1"})):
        if before:
            monkeypatch.setenv("NCCL_P2P_DISABLE", before)
        out = tmp_path / f"out-{before}"
        asked = manifest(points, kind="collectives", ranks=2)
        assert run.measure(asked, out, lambda _: None, StandIn()) == 0
        assert {way: (out / "runs" / f"p2p-{way}" / "p2p").read_text() for way in ("on", "off")} == seen
        assert [(out / "runs" / way / "nvls").read_text() for way in ("p2p-on", "p2p-off")] == ["unset", "0"]
        assert [result.point for result in run.read_results(out)] == points


def test_a_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    line = msgspec.json.encode(at(Copy(route="h2h", size_bytes=1), 1.0))
    (tmp_path / run.RESULTS_FILE).write_bytes(line + b"\n" + line[:40])
    assert len(run.read_results(tmp_path)) == 1


@pytest.mark.parametrize(("field", "value"), [("ranks", 0), ("size_bytes", -5), ("median_s", -1)])
def test_a_point_that_cannot_be_is_refused(field: str, value: int, tmp_path: Path) -> None:
    row = msgspec.to_builtins(at(Collective(name="allreduce", size_bytes=8, ranks=2), 1.0))
    (row["point"] if field in row["point"] else row)[field] = value
    (tmp_path / run.RESULTS_FILE).write_bytes(msgspec.json.encode(row) + b"\n")
    with pytest.raises(MicroError, match=f"no result of this version: .*{field}"):
        run.read_results(tmp_path)


# The command line.


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "read", lambda: gpus.Inventory(problem="no NVIDIA driver"))
    monkeypatch.setattr(micro_cli, "lacking", lambda name: None)
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
    monkeypatch.setattr(micro_cli, "lacking", exit_codes.lacking)
    monkeypatch.setitem(sys.modules, "torch", None)
    one_sentence(["gemm"], capsys, f"the Python package torch is not installed; {install_command('train')}")


@linux
@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("how", "code"), [(StandIn(), 0), (StandIn(1), 3)])
def test_exit_codes_and_the_last_line(
    how: StandIn, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "MicroCommand", lambda: how)
    assert cli.invoke(["micro", "memcpy", "--sizes", "1K", "4K", "--out", str(tmp_path / "o")]) == code
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["kind"] == "memcpy" and report["points"]["all"] == 2
    assert cli.invoke(["report", str(tmp_path / "o")]) == code
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    one_sentence(["memcpy", "--out", str(tmp_path / "o")], capsys, "exists and is not empty")


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("argv", "samples", "budget_s"),
    [
        (["gemm", "--m", "8", "--n", "8", "--k", "8"], 150, 1.5),
        (["gemm", "--preset", "paper-table12"], 320, None),
        (["gemm", "--preset", "paper-table12", "--samples", "7"], 7, None),
        (["memcpy", "--sizes", "1K"], 50, 0.5),
        (["memcpy", "--sizes", "1K", "--device", "cpu"], 50, 0.1),
    ],
)
def test_products_on_a_gpu_are_sampled_for_longer(
    argv: list[str], samples: int, budget_s: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tasks = []
    monkeypatch.setattr(run, "measure", lambda manifest, *_, **more: tasks.append(manifest.task) or 0)
    monkeypatch.setattr(micro_cli, "reported", lambda directory, code: code)
    assert cli.invoke(["micro", *argv, "--out", str(tmp_path)]) == 0
    assert [(task.samples, task.budget_s) for task in tasks] == [(samples, budget_s)]
