"""Whole searches on the embedded server: the answer, Ctrl-C, a kill and going on, and what is refused."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from loadgen.search.results import CLIENT_LIMITS
from tests.loadgen.test_run import LOADGEN, serving
from tests.servers.reader import running

pytestmark = pytest.mark.processes
MODELLED = ("--gpu", "h200", "--model", "13b", "--input-tokens", "512", "--output-tokens", "16")
FIXED = ("--launch", "embedded", "--output-tokens", "4", "--warmup", "2")
SHORT = (*FIXED, "--slo", "ttft_ms=500", "--budget-minutes", "0.4")
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
        assert (out / each["directory"] / "report.html").exists()
    assert all((out / name).exists() for name in ("search.md", "search.html"))


def test_an_objective_that_one_request_misses_has_no_answer(tmp_path: Path) -> None:
    found, said = search(*FIXED, "--slo", "ttft_ms=0.001", "--out", str(tmp_path / "a"))
    assert found["rate_per_s"]["value"] is None and found["ended"] == "none" and len(found["probes"]) == 1
    assert "No load meets the objective" in said


def test_an_objective_that_nobody_can_judge_is_not_searched(tmp_path: Path) -> None:
    with running(tmp_path, "openai", "merge:1") as server:
        url = ("--backend", "openai", "--url", server.server.url, "--output-tokens", "8", "--warmup", "1")
        found, said = search(*url, "--slo", "tpot_ms=50", "--out", str(tmp_path / "a"))
    assert found["rate_per_s"]["value"] is None and found["ended"] == "unknown" and len(found["probes"]) == 1
    assert "tpot cannot be known here" in said


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


def test_a_search_that_is_killed_again_and_again_goes_on_with_the_same_probes(tmp_path: Path) -> None:
    """Wherever it was: before its server listens, within a probe, between two."""
    out, moments = tmp_path / "a", random.Random(3)
    before: list[dict[str, Any]] = []
    for attempt in range(30):
        if attempt >= 6 and before:  # a machine that others use may not end one probe in the first six
            break
        going_on = (out / "search.json").exists()
        argv = ("--resume", str(out)) if going_on else (*SHORT, "--out", str(out))
        process = subprocess.Popen([*LOADGEN, "search", *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(moments.uniform(0.3, 9))
        process.kill()
        process.wait()
        if (out / "search.json").exists():
            kept = json.loads((out / "search.json").read_text())["probes"]
            assert kept[: len(before)] == before
            before = kept
    assert before
    found, _ = search("--resume", str(out))
    assert found["probes"][: len(before)] == before
    assert [each["number"] for each in found["probes"]] == list(range(1, len(found["probes"]) + 1))
    assert len({each["directory"] for each in found["probes"]}) == len(found["probes"])
    assert found["ended"] != "running"


@pytest.mark.parametrize("options", [("--axis", "concurrency"), ("--workers", "2"), ("--transport", "aiohttp")])
def test_a_server_that_was_not_started_for_it(options: tuple[str, ...], tmp_path: Path) -> None:
    """Modelled behind a URL, so the search does not know its hardware. It has 8 places: with 16 in flight all wait for
    one, and alone none does. Where its cores are taken the client is too slow, and a probe must have seen that."""
    with serving("--gpu", "h200", "--gpus", "1", "--model", "13b", "--max-running", "8") as url:
        found, _ = search("--url", url, "--output-tokens", "16", "--warmup", "2", "--slo", "ttft_ms=100", "--attain",
                          "0.9", "--budget-minutes", "0.3", *options, "--out", str(tmp_path / "a"))  # fmt: skip
    in_flight = options[0] == "--axis"
    highest = found["concurrency" if in_flight else "rate_per_s"]
    by_client = any(code in CLIENT_LIMITS for each in found["probes"] for code in each["findings"])
    assert 0 < highest["value"] < (16 if in_flight else 30)
    assert found["limited_by"] in ("ttft", "throughput") or (found["limited_by"] == "client" and by_client)
    assert [each["kind"] for each in found["probes"][:2]] == ["alone", "probe" if in_flight else "saturation"]
    assert "modelled" not in found["started_from"]
