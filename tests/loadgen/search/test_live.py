"""Whole searches on the embedded server: the answer, Ctrl-C, a kill and going on, and what is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.loadgen.test_run import LOADGEN

pytestmark = pytest.mark.processes
MODELLED = ("--gpu", "h200", "--model", "13b", "--input-tokens", "512", "--output-tokens", "16")
FIXED = ("--launch", "embedded", "--output-tokens", "4", "--warmup", "2")
SLO = ("--slo", "ttft_ms=400,tpot_ms=60")


def search(*argv: str, code: int = 0) -> tuple[dict[str, Any], str]:
    done = subprocess.run([*LOADGEN, "search", *argv], capture_output=True, text=True, timeout=170)
    assert done.returncode == code, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_the_highest_rate_of_a_modelled_server(tmp_path: Path) -> None:
    out = tmp_path / "a"
    found, said = search(*MODELLED, *SLO, "--budget-minutes", "0.6", "--out", str(out))
    assert found == json.loads((out / "search.json").read_text())
    assert found["schema"] == "loadgen.search/1" and found["emulated"]
    rate = found["rate_per_s"]
    assert rate["low"] <= rate["value"] and (rate["high"] is None or rate["value"] <= rate["high"])
    assert 0 < found["attained_ratio"] <= 1 and found["ended_because"]
    assert "modelled" in found["started_from"] and "EMULATED" in said
    assert sum(each["probe"]["seconds"] for each in found["probes"]) <= 36 + 6
    for each in found["probes"]:
        assert (out / each["directory"] / "requests.jsonl").exists()
        assert (out / each["directory"] / "manifest.json").exists()
    assert (out / "search.md").exists() and (out / "search.png").exists()


def test_an_objective_that_one_request_misses_has_no_answer(tmp_path: Path) -> None:
    found, said = search(*FIXED, "--slo", "ttft_ms=0.001", "--out", str(tmp_path / "a"))
    assert found["rate_per_s"]["value"] is None and found["ended"] == "none" and len(found["probes"]) == 1
    assert "No load meets the objective" in said


def begun(out: Path, probes: int, *argv: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([*LOADGEN, "search", *argv, "--out", str(out)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    deadline = time.monotonic() + 90
    while not (out / str(probes) / "requests.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


def test_ctrl_c_leaves_an_answer(tmp_path: Path) -> None:
    out = tmp_path / "a"
    process = begun(out, 3, *FIXED, "--slo", "ttft_ms=500", "--budget-minutes", "2")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    found = json.loads(stdout.splitlines()[-1])
    assert found["ended"] == "stopped" and found == json.loads((out / "search.json").read_text())
    assert "Traceback" not in stderr


def test_a_killed_search_goes_on_with_the_same_probes(tmp_path: Path) -> None:
    out = tmp_path / "a"
    process = begun(out, 3, *FIXED, "--slo", "ttft_ms=500", "--budget-minutes", "0.4")
    process.kill()
    process.communicate()
    before = json.loads((out / "search.json").read_text())["probes"]
    assert before
    found, _ = search("--resume", str(out))
    assert found["probes"][: len(before)] == before
    assert [each["number"] for each in found["probes"]] == list(range(1, len(found["probes"]) + 1))
    assert len({each["directory"] for each in found["probes"]}) == len(found["probes"]) > len(before)
    assert found["ended"] != "running"
