"""Whole sweeps against the embedded server: one server, ordinary runs, Ctrl-C, resuming, and what is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from backends.launch import Exit
from loadgen import cli
from tests.loadgen.server.test_managed import Fake
from tests.loadgen.test_run import FAST, LOADGEN, loadgen, serving

pytestmark = pytest.mark.processes
LOAD = ("--launch", "embedded", "--output-tokens", "4", *FAST)
RUN_FILES = {
    "manifest.json", "requests.jsonl", "server.jsonl", "snapshot.json", "report.json", "report.md",
    "report.html",
}  # fmt: skip
SWEEP_FILES = {"sweep.json", "sweep.md", "sweep.html"}


def manifests(out: Path, names: list[str]) -> list[dict[str, Any]]:
    return [json.loads((out / name / "manifest.json").read_text()) for name in names]


def test_every_point_is_an_ordinary_run_of_one_server(tmp_path: Path) -> None:
    out = tmp_path / "s"
    swept, said = loadgen("sweep", *LOAD, "--rates", "10", "40", "--requests", "20", "--seed", "5", "--out", str(out))
    assert {path.name for path in out.iterdir()} == {"rate-10", "rate-40", *SWEEP_FILES}
    assert {path.name for path in (out / "rate-10").iterdir()} == RUN_FILES
    assert said.count("the embedded server runs") == 1 and "EMULATED" in said
    assert swept == json.loads((out / "sweep.json").read_text())
    assert swept["schema"] == "loadgen.sweep/1" and swept["complete"] and swept["starts"] == 1
    first, second = manifests(out, ["rate-10", "rate-40"])
    assert [each["arrival"] for each in (first, second)] == ["poisson:10", "poisson:40"]
    assert [each["config"]["seed"] for each in (first, second)] == [5, 6]
    assert first["url"] == second["url"] and first["run_id"] != second["run_id"]
    assert set(swept["waits"]) == {"rate-10", "rate-40"}
    assert all(wait["idle"] and wait["by"] == "metrics" for wait in swept["waits"].values())
    began = {name: json.loads((out / name / "manifest.json").read_text())["started_unix_s"] for name in swept["waits"]}
    assert sorted(began, key=began.__getitem__) == [run["directory"] for run in swept["plan"]["order"]]
    report = json.loads((out / "rate-40" / "report.json").read_text())
    point = swept["points"][1]
    assert point["metrics"]["ttft_p99"]["mean"] == report["metrics"]["ttft_ms"]["p99"]
    assert (point["value"], point["requests_ok"]) == ("40", 20)
    for name in ("sweep.md", "rate-10/report.md"):
        assert "emulated" in (out / name).read_text()
    alone = subprocess.run([*LOADGEN, "report", str(out / "rate-10")], capture_output=True, text=True, timeout=60)
    assert json.loads(alone.stdout.splitlines()[-1])["requests"]["ok"] == 20


def test_a_server_without_metrics_is_probed(tmp_path: Path) -> None:
    with serving("--dialect", "openai", "--ttft-ms", "20") as url:
        swept, _ = loadgen(
            "sweep", "--backend", "openai", "--url", url, *FAST, "--concurrencies", "1", "4", "--requests", "8",
            "--output-tokens", "4", "--out", str(tmp_path / "s"),
        )  # fmt: skip
    assert {wait["by"] for wait in swept["waits"].values()} == {"probe"}
    assert sorted(run["directory"] for run in swept["runs"]) == ["concurrency-1", "concurrency-4"]


def test_a_point_that_falls_behind_ends_early_and_is_kept(tmp_path: Path) -> None:
    """8 requests in flight of about 0.3 s each: some 24 a second can be served."""
    out = tmp_path / "s"
    swept, said = loadgen(
        "sweep", "--gpu", "h200", "--model", "7b", "--max-running", "8", "--input-tokens", "32", "--output-tokens",
        "64", *FAST, "--rates", "4", "80", "--duration", "20", "--out", str(out),
    )  # fmt: skip
    assert swept["complete"] and said.count("the run ends (--stop-when-overloaded)") == 1
    low, high = swept["points"]
    assert (low["fell_behind"], high["fell_behind"]) == (False, True)
    assert swept["pareto"]["output_tokens_per_s"] == ["4"]
    report = json.loads((out / "rate-80" / "report.json").read_text())
    codes = {each["code"] for each in report["verdict"]["findings"]}
    assert codes >= {"STOPPED_OVERLOADED", "OVERLOADED"} and "INTERRUPTED" not in codes
    assert report["requests"]["planned"] > sum(report["requests"]["by_outcome"].values())
    assert report["steady"]["keeping_up"]["served_per_s"] == pytest.approx(24, rel=0.25)
    again, _ = loadgen("sweep", "--resume", str(out))
    assert again["starts"] == 1  # nothing was left to do


def test_the_server_takes_the_longest_point_also_when_a_short_one_is_first(tmp_path: Path) -> None:
    swept, _ = loadgen(
        "sweep", "--gpu", "h200", "--model", "llama-3.1-8b", *FAST, "--input-tokens", "64", "6000", "--output-tokens",
        "4", "--requests", "2", "--prefix", "1:32", "--speed", "4", "--out", str(tmp_path / "s"),
    )  # fmt: skip
    assert swept["complete"] and swept["gpus"] == 1
    assert [point["requests_ok"] for point in swept["points"]] == [2, 2]
    assert "output_tokens_per_s_per_gpu" in swept["points"][0]["metrics"]


def test_ctrl_c_keeps_what_there_is_and_resume_does_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s"
    argv = ["sweep", *LOAD, "--concurrencies", "2", "4", "--repeat", "2", "--requests", "20", "--out", str(out)]
    process = subprocess.Popen([*LOADGEN, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list(out.glob("*/requests.jsonl"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    second = subprocess.run([*LOADGEN, "sweep", "--resume", str(out)], capture_output=True, text=True, timeout=60)
    assert second.returncode == 2 and "is still being measured by another process" in second.stderr
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr and f"--resume {out}" in stderr
    swept = json.loads(stdout.splitlines()[-1])
    assert not swept["complete"] and {path.name for path in out.iterdir()} >= SWEEP_FILES
    kept = {run["directory"]: run["run_id"] for run in swept["runs"] if run["state"] == "finished"}
    stopped = [run["directory"] for run in swept["runs"] if run["state"] == "unfinished"]
    assert 1 <= len(kept) <= 2 and len(kept) + len(stopped) == 2

    for more in (["--seed", "9"], ["--requests", "21"], ["--repeat", "1"], ["--rates", "3"]):
        assert cli.invoke(["sweep", "--resume", str(out), *more]) == 2
        assert f"{more[0]} differs from that of the sweep" in capsys.readouterr().err
    again, said = loadgen("sweep", "--resume", str(out), "--requests", "20")
    assert again["complete"] and again["starts"] == 2
    ids = {run["directory"]: run["run_id"] for run in again["runs"]}
    assert {name: ids[name] for name in kept} == kept and len(set(ids.values())) == 4
    assert said.count("VALID, finished") == 4 - len(kept)  # of INVALID too
    assert [path.name for path in (out / "unfinished").glob("*")] == [f"{name}.1" for name in stopped]

    finished, said = loadgen("sweep", "--resume", str(out))
    assert "the embedded server runs" not in said and finished["points"] == again["points"]


def test_a_server_that_never_was_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "s"
    _, said = loadgen("sweep", "--url", "http://127.0.0.1:9", "--rates", "1", "2", "--out", str(out), expect=3)
    assert "cannot reach" in said and not out.exists()


def started(
    fake: Fake, out: Path, capsys: pytest.CaptureFixture[str], *line: str, expect: int | tuple[int, ...]
) -> Any:
    """`loadgen sweep` with a launcher that starts nothing: the last line, and what was said."""
    place = ["--resume", str(out)] if line == () else [*line, "--out", str(out)]
    code = cli.invoke(["sweep", *place])
    captured = capsys.readouterr()
    assert code in (expect if isinstance(expect, tuple) else (expect,)), captured.err
    return (json.loads(captured.out) if captured.out else {}), captured.err


STARTED = (
    "--backend", "vllm", "--model", "org/m", "--gpus", "none", "--requests", "4", "--output-tokens", "2",
    "--warmup", "0", "--no-calibrate",
)  # fmt: skip


def test_one_start_serves_the_longest_prompt_of_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s"
    with serving("--model", "org/m", "--max-model-len", "9000") as url:
        fake = Fake([url])
        monkeypatch.setattr("loadgen.server.launch.docker", fake)
        swept, _ = started(fake, out, capsys, *STARTED, "--input-tokens", "16", "5000", expect=(0, 4))
    assert fake.starts == fake.stopped == 1
    launches = [each["launch"] for each in manifests(out, ["input-tokens-16", "input-tokens-5000"])]
    assert launches[0] == launches[1] and launches[0]["max_model_len"] >= 5002
    assert swept["complete"] and swept["gpus"] is None  # none of this machine's
    assert not (out / "server-1").exists()  # where nothing was left


def test_a_point_at_which_the_server_died_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s"
    with serving("--model", "org/m", "--fault", "http_error:503:@5") as url:
        fake = Fake([url], "torch.OutOfMemoryError: CUDA out of memory\n", Exit(1), polls=2)
        monkeypatch.setattr("loadgen.server.launch.docker", fake)
        swept, said = started(fake, out, capsys, *STARTED, "--concurrencies", "1", "2", expect=(3, 4))
    assert [run["state"] for run in swept["runs"]].count("unfinished") == 1
    assert "CUDA out of memory" in said and "are left for `loadgen sweep --resume" in said
    with serving("--model", "org/m") as url:
        monkeypatch.setattr("loadgen.server.launch.docker", Fake([url]))
        swept, said = started(fake, out, capsys, expect=(0, 4))
    assert swept["complete"] and swept["starts"] == 2
    assert len(list((out / "unfinished").iterdir())) == 1
