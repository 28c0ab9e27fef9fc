"""Whole runs of `loadgen run --repeat` against the embedded server: one server, seeds apart, Ctrl-C, the gate after."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.loadgen.test_run import FAST, LOADGEN, loadgen

pytestmark = pytest.mark.processes
LOAD = ("--launch", "embedded", "--output-tokens", "8", "--concurrency", "8", *FAST)


def test_repeats_are_ordinary_runs_of_one_server(tmp_path: Path) -> None:
    out = tmp_path / "a"
    repeated, said = loadgen("run", *LOAD, "--requests", "40", "--repeat", "3", "--seed", "5", "--out", str(out))
    assert said.count("the embedded server runs") == 1
    assert sorted(path.name for path in out.iterdir()) == ["1", "2", "3", "repeat.html", "repeat.json"]
    assert repeated == json.loads((out / "repeat.json").read_text())
    manifests = [json.loads((out / str(number) / "manifest.json").read_text()) for number in (1, 2, 3)]
    assert [manifest["config"]["seed"] for manifest in manifests] == [5, 6, 7]
    assert len({manifest["run_id"] for manifest in manifests}) == 3
    assert len({manifest["url"] for manifest in manifests}) == 1
    reports = [json.loads((out / str(number) / "report.json").read_text()) for number in (1, 2, 3)]
    assert repeated["metrics"]["ttft_p50"]["runs"] == [report["metrics"]["ttft_ms"]["p50"] for report in reports]
    again = subprocess.run([*LOADGEN, "report", str(out)], capture_output=True, text=True, timeout=60)
    assert json.loads(again.stdout.splitlines()[-1])["metrics"] == repeated["metrics"]


def test_ctrl_c_keeps_what_there_is(tmp_path: Path) -> None:
    out = tmp_path / "a"
    argv = ["run", *LOAD, "--requests", "60", "--repeat", "50", "--out", str(out)]
    process = subprocess.Popen([*LOADGEN, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (out / "2" / "requests.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    repeated = json.loads(stdout.splitlines()[-1])
    assert repeated["planned"] == 50
    assert [run["finished"] for run in repeated["runs"]] in ([True, False], [True, True])
    assert "Traceback" not in stderr
