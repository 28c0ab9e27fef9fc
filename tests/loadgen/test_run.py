"""Whole runs of the installed command against the embedded server: files, signals, workers, memory.

Times are bounded by the truth and by how late the machine itself was meanwhile (`tests.lateness`)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import backends
from loadgen.rundir import records
from tests.lateness import Lateness, assert_valid_unless_the_machine_was_late, measured_lateness

LOADGEN = [sys.executable, "-c", "from loadgen.cli import main; main()"]
FAST = ["--no-calibrate", "--warmup", "0"]
BURST_MS = 60  # in which the slowest machine that runs these tests reads forty requests, and as many events
CLIENT_MS = 10  # in which it does what one request needs
WAITS = 5  # for a core: the server's read and timer, the client's read, and others before each
pytestmark = [pytest.mark.processes, pytest.mark.always]


def loadgen(*argv: str, expect: int | tuple[int, ...] = (0, 4)) -> tuple[dict[str, Any], str]:
    """The last line of standard output, and standard error. A machine that is busy with other tests may make the client
    late, which is a verdict (4) and no failure of what these tests are about."""
    result = subprocess.run([*LOADGEN, *argv], capture_output=True, text=True, timeout=120)
    assert result.returncode in (expect if isinstance(expect, tuple) else (expect,)), result.stderr
    lines = result.stdout.splitlines()
    return (json.loads(lines[-1]) if lines else {}), result.stderr


@contextlib.contextmanager
def serving(*options: str) -> Iterator[str]:
    quick = () if "--itl-ms" in options else ("--itl-ms", "10")
    process = subprocess.Popen(
        [sys.executable, "-m", "servers", "--port", "0", "--exit-with-stdin", *quick, *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())["url"]
    process.terminate()
    process.communicate(timeout=10)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(*getattr(request, "param", ())) as url:
        yield url


@pytest.mark.parametrize("backend", ["vllm", "openai", "openai-chat", "lightllm", "tgi", "sglang"])
def test_the_main_job(backend: str, tmp_path: Path) -> None:
    with measured_lateness() as watched:
        report, said = loadgen(
            "run", "--launch", "embedded", "--backend", backend, "--requests", "40", "--output-tokens", "8",
            "--out", str(tmp_path / "run"),
        )  # fmt: skip
    lateness = watched.during(tmp_path / "run")
    assert_valid_unless_the_machine_was_late(report, lateness)
    names = {"manifest.json", "requests.jsonl", "report.json", "report.md", "report.html", "snapshot.json"}
    if backends.get(backend).server_metrics:
        names.add("server.jsonl")
    assert {path.name for path in (tmp_path / "run").iterdir()} == names
    assert report == json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["requests"] == {"planned": 40, "ok": 40, "failed": 0, "by_outcome": {"ok": 40}}
    assert report["tokens"] == {"prompt": 40 * 512, "output": 40 * 8}
    assert report["emulated"] is True and "emulated" in said
    assert "emulated" in (tmp_path / "run" / "report.md").read_text()
    # The truth is 200 ms and 40 ms, each within a tenth. Forty requests at once are read one after the other.
    assert_within(report["metrics"]["ttft_ms"], 180, 220 + BURST_MS, lateness)
    assert_within(report["metrics"]["e2el_ms"], 180 + 7 * 36, 220 + 7 * 44 + BURST_MS, lateness)
    assert 36 <= report["metrics"]["tpot_ms"]["p50"] <= 44 + lateness.percentile_ms(90)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["ceiling"]["events_per_s_per_core"] > 1000
    assert manifest["ceiling"]["event_error_p50_ms"] > 0
    again, _ = loadgen("report", str(tmp_path / "run"))
    assert again == report


def test_sessions(tmp_path: Path) -> None:
    """What the report says of them is what a look at the records, line by line, says."""
    out = tmp_path / "run"
    report, _ = loadgen(
        "run", "--launch", "embedded", "--backend", "openai-chat", *FAST, "--sessions", "12", "--turns", "uniform:1:6",
        "--think-time", "uniform:0:0.2", "--input-tokens", "uniform:10:40", "--output-tokens", "4", "--workers", "2",
        "--out", str(out),
    )  # fmt: skip
    lines = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    rows = sorted((line for line in lines if "turn" in line), key=lambda line: (line["session"], line["turn"]))
    pairs = [(a, b) for a, b in itertools.pairwise(rows) if a["session"] == b["session"]]
    assert all(a["done_ns"] <= b["scheduled_ns"] <= b["sent_ns"] and a["turn"] + 1 == b["turn"] for a, b in pairs)
    assert all(b["prompt_tokens"] > a["prompt_tokens"] + a["output_tokens"] for a, b in pairs)  # all that was said
    found = report["sessions"]
    assert report["requests"]["ok"] == len(rows) == found["turns"] == report["requests"]["planned"]
    assert (found["begun"], found["ended"], found["failed"], found["open_max"]) == (12, 12, 0, 12)
    thoughts_ms = [(b["scheduled_ns"] - a["done_ns"]) / 1e6 for a, b in pairs]
    assert found["think_time_ms"]["n"] == len(pairs) and 0 <= min(thoughts_ms) <= max(thoughts_ms) <= 200
    assert found["think_time_ms"]["mean"] == pytest.approx(statistics.mean(thoughts_ms))
    assert found["turn_lag_ms"]["max"] == max((b["sent_ns"] - b["scheduled_ns"]) / 1e6 for _, b in pairs)
    assert {row["session"] for row in rows if row["turn"] == 1} == set(range(12))
    by_turn = {turn["from_turn"]: turn for turn in report["turns"]}
    second = [row for row in rows if row["turn"] == 2]
    assert by_turn[2]["requests"] == by_turn[2]["ok"] == len(second)
    assert by_turn[2]["prompt_tokens_mean"] == pytest.approx(statistics.mean(row["prompt_tokens"] for row in second))
    assert sum(turn["requests"] for turn in report["turns"]) == len(rows)
    assert loadgen("report", str(out))[0] == report


def test_agents(tmp_path: Path) -> None:
    """From the embedded server, and predicted: the same turns wait for the same ones, and a session's time is the sum
    of its parts."""
    agents = (
        "--sessions", "3", "--turns", "3", "--subagents", "0.6:2:2", "--think-time", "0.02", "--prefix", "1:32",
        "--first-tokens", "uniform:40:60", "--input-tokens", "uniform:5:20", "--output-tokens", "uniform:2:6",
        "--context-tokens", "140",
    )  # fmt: skip
    out = tmp_path / "run"
    report, shown = loadgen("run", "--launch", "embedded", "--backend", "vllm", *FAST, *agents, "--out", str(out))
    rows = [line for line in map(json.loads, (out / "requests.jsonl").read_text().splitlines()) if "turn" in line]
    row_of = {(row["session"], row["turn"]): row for row in rows}
    for (session, turn), row in row_of.items():
        after = row.get("after", [turn - 1] if turn > 1 else [])
        assert all(row_of[session, each]["done_ns"] <= row["scheduled_ns"] <= row["sent_ns"] for each in after)
    found = report["sessions"]
    assert report["requests"]["ok"] == len(rows) and found["ended"] == 3
    assert found["task_ms"]["mean"] == pytest.approx(found["tokens_wait_ms"]["mean"] + found["tools_ms"]["mean"])
    assert "waiting for tokens" in (out / "report.html").read_text() and "waiting for tokens" in shown
    assert not {finding["code"] for finding in report["verdict"]["findings"]} & {"HISTORY_DROPPED", "PROMPT_LENGTH"}
    told, _ = loadgen("predict", "--gpu", "h200", *agents, "--out", str(tmp_path / "told"))
    assert told["sessions"]["ended"] == 3
    predicted = map(json.loads, (tmp_path / "told" / "requests.jsonl").read_text().splitlines())
    afters = {row["id"]: row.get("after") for row in predicted if "turn" in row}
    assert afters == {row["id"]: row.get("after") for row in rows} and any(afters.values())


def test_replies_think_for_as_long_as_their_budget(tmp_path: Path) -> None:
    """Every reply thinks for what was drawn and answers with 6 tokens, as the server counts and as they come."""
    out = tmp_path / "run"
    report, shown = loadgen(
        "run", "--launch", "embedded", "--backend", "openai-chat", *FAST, "--requests", "30",
        "--arrival", "constant:60", "--thinking-tokens", "uniform:2:9", "--output-tokens", "6", "--out", str(out),
    )  # fmt: skip
    rows = [line for line in map(json.loads, (out / "requests.jsonl").read_text().splitlines()) if "events" in line]
    measured = [row for row in rows if row["phase"] == "measured"]
    thought = [row["reasoning_tokens"] for row in measured]
    assert len(measured) == 30 and set(thought) <= set(range(2, 10)) and len(set(thought)) > 3
    assert all(row["output_tokens"] == row["asked_tokens"] == row["reasoning_tokens"] + 6 for row in measured)
    for row in measured:  # the answer begins with the event after the last thought
        arrivals_us = list(itertools.accumulate([row["first_token_ns"] // 1000, *row["itl_us"]]))
        assert row["answer_ns"] // 1000 == arrivals_us[row["reasoning_tokens"]]
    found = report["reasoning"]
    assert found["replies"] == 30 and found["thinking_tokens_mean"] == pytest.approx(statistics.mean(thought))
    assert found["thinking_ratio"] == pytest.approx(sum(thought) / (sum(thought) + 180))
    assert "Reasoning: 30.00 replies thought for" in shown or "Reasoning: 30 replies thought for" in shown
    assert "tpot, of the answer" in shown and report["verdict"]["findings"] is not None


def last_snapshot(directory: Path) -> tuple[str, int]:
    """The state that a run's snapshot tells, and how many requests were well."""
    told = json.loads((directory / "snapshot.json").read_text())
    samples = next(family["samples"] for family in told["families"] if family["name"] == "llm_dissect_requests")
    return told["state"], next(each["value"] for each in samples if each["labels"] == {"outcome": "ok"})


def assert_within(metric: dict[str, float], least_ms: float, most_ms: float, lateness: Lateness) -> None:
    """No reply is early. Late is what the machine was, as often as a reply waits for it. The last tenth may have met a
    stall that struck where nobody looked. One of all replies met no stall: a client that is always late shows in it,
    however busy the machine is."""
    assert least_ms <= metric["min"] <= most_ms + lateness.percentile_ms(90)
    assert metric["p90"] <= most_ms + WAITS * lateness.worst_ms


@pytest.mark.parametrize("server", [("--ttft-ms", "50")], indirect=True)
def test_both_transports_and_workers_agree(server: str, tmp_path: Path) -> None:
    """The truth is 50 ms and 10 ms: every client reports it, and all send the same load."""
    bodies = []
    for name, options in {
        "fast": [], "kernel": ["--kernel-timestamps"], "aiohttp": ["--transport", "aiohttp"],
        "workers": ["--workers", "2"], "fresh": ["--connect", "fresh"],
    }.items():  # fmt: skip
        with measured_lateness() as watched:
            report, _ = loadgen(
                "run", "--url", server, *FAST, "--requests", "30", "--output-tokens", "9", "--arrival", "poisson:50",
                "--out", str(tmp_path / name), *options,
            )  # fmt: skip
        lateness = watched.during(tmp_path / name)
        assert_valid_unless_the_machine_was_late(report, lateness)
        assert report["requests"]["ok"] == 30
        assert report["tokens"] == {"prompt": 30 * 512, "output": 30 * 9}
        assert_within(report["metrics"]["ttft_ms"], 50, 50 + CLIENT_MS, lateness)
        assert_within(report["metrics"]["e2el_ms"], 50 + 8 * 10, 50 + 8 * 10 + CLIENT_MS, lateness)
        if (pace := report["metrics"]["tpot_ms"]) is not None and pace["p50"] is not None:
            assert abs(pace["p50"] - 10) <= 0.5 + lateness.percentile_ms(90) / 2
        else:  # a late client reads several tokens at once
            assert lateness.percentile_ms(90) > 5
        table, facts = records.read(tmp_path / name)
        bodies.append(table.scheduled_ns.tolist())
        assert len(facts) == (2 if name == "workers" else 1)
        assert last_snapshot(tmp_path / name) == ("finished", 30)
    assert all(body == bodies[0] for body in bodies)


def start(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*LOADGEN, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def severities(report: dict[str, Any]) -> dict[str, str]:
    return {finding["code"]: finding["severity"] for finding in report["verdict"]["findings"]}


def wait_for_rows(directory: Path, least: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if len(records.read(directory)[0]) >= least:
                return
        except records.RecordsError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{directory} never had {least} rows")


def wait_for_headers(directory: Path, clients: int) -> None:
    deadline = time.monotonic() + 60
    while len([path for path in directory.glob("requests*.jsonl") if path.stat().st_size]) < clients:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_run_still_reports(server: str, tmp_path: Path, number: signal.Signals, workers: str) -> None:
    process = start(
        "run", "--url", server, *FAST, "--requests", "5000", "--output-tokens", "4", "--arrival", "constant:100",
        "--workers", workers, "--out", str(tmp_path),
    )  # fmt: skip
    wait_for_rows(tmp_path, 20)
    os.killpg(process.pid, number)  # as a terminal does
    out, said = process.communicate(timeout=30)
    report = json.loads(out.splitlines()[-1])
    assert process.returncode == 128 + number, said
    assert 20 <= report["requests"]["ok"] < 2000
    assert severities(report)["INTERRUPTED"] == "invalid" and "KILLED" not in severities(report)
    assert (tmp_path / "report.html").exists() and (tmp_path / "report.json").exists()
    assert last_snapshot(tmp_path) == ("stopped", report["requests"]["ok"])


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_second_signal_ends_the_replies_under_way(tmp_path: Path, workers: str) -> None:
    with serving("--ttft-ms", "600000") as url:
        process = start(
            "run", "--url", url, *FAST, "--requests", "20", "--workers", workers, "--out", str(tmp_path),
            "--no-server-metrics",
        )  # fmt: skip
        wait_for_headers(tmp_path, int(workers))
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)  # closer together, they would be one
        process.send_signal(signal.SIGTERM)
        out, said = process.communicate(timeout=60)
    report = json.loads(out.splitlines()[-1])
    assert process.returncode == 143, said
    assert report["requests"]["by_outcome"] == {"cancelled": 20}


def test_a_second_signal_ends_what_cannot_be_hurried(tmp_path: Path) -> None:
    """Here the end of a server that heeds no signal, for which the run would wait."""
    code = (
        "import signal, os; from loadgen.event_loop import StopSignals\n"
        "with StopSignals() as stop:\n"
        "    stop.on_signal(lambda: print('first', flush=True))\n"
        "    print('ready', flush=True)\n"
        "    while True: signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "first\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    process.stdout.close()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_stopped_before_the_load(tmp_path: Path, workers: str) -> None:
    """Its warm-up takes longer than anybody waits."""
    with serving("--ttft-ms", "60000") as url:
        process = start("run", "--url", url, "--no-calibrate", "--workers", workers, "--out", str(tmp_path))
        deadline = time.monotonic() + 30
        while not (tmp_path / "server.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(2.0)
        os.killpg(process.pid, signal.SIGINT)
        out, said = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "stopped before the load began; nothing was measured." in said and "Traceback" not in said
    assert not list(tmp_path.glob("requests*"))


def test_nohup_is_heeded(server: str, tmp_path: Path) -> None:
    argv = ["run", "--url", server, *FAST, "--requests", "100", "--output-tokens", "4", "--arrival", "constant:100"]
    process = subprocess.Popen(["nohup", *LOADGEN, *argv, "--out", str(tmp_path)],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    wait_for_rows(tmp_path, 20)
    process.send_signal(signal.SIGHUP)
    out, said = process.communicate(timeout=30)
    assert json.loads(out.splitlines()[-1])["requests"]["ok"] == 100, said


def test_a_run_that_nobody_reads(server: str, tmp_path: Path) -> None:
    """What is said goes nowhere, and the run goes on; that its report was not read shows in the exit code."""
    argv = [*LOADGEN, "run", "--url", server, *FAST, "--requests", "20", "--output-tokens", "2"]
    reader, deaf = os.pipe()
    os.close(reader)
    with os.fdopen(deaf, "wb") as nobody:
        unheard = subprocess.run([*argv, "--out", str(tmp_path / "a")], stdout=subprocess.PIPE, stderr=nobody)
        unread = subprocess.run([*argv, "--out", str(tmp_path / "b")], stdout=nobody, stderr=subprocess.PIPE)
    assert unheard.returncode in (0, 4) and json.loads(unheard.stdout)["requests"]["ok"] == 20
    assert unread.returncode == 141 and b"Traceback" not in unread.stderr
    assert (tmp_path / "a/report.json").exists() and (tmp_path / "b/report.json").exists()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_killed_run_keeps_what_finished(server: str, tmp_path: Path, workers: str) -> None:
    process = start(
        "run", "--url", server, *FAST, "--requests", "5000", "--output-tokens", "4", "--arrival", "constant:100",
        "--workers", workers, "--out", str(tmp_path),
    )  # fmt: skip
    wait_for_rows(tmp_path, 20)
    process.kill()
    process.communicate(timeout=30)
    report, _ = loadgen("report", str(tmp_path), expect=(0, 4))
    assert report["requests"]["ok"] >= 20
    codes = {finding["code"] for finding in report["verdict"]["findings"]}
    assert "KILLED" in codes and "INTERRUPTED" not in codes and not report["verdict"]["valid"]
    for _ in range(100):
        if (tmp_path / "snapshot.json").exists() and last_snapshot(tmp_path)[0] == "stopped":
            break
        time.sleep(0.1)
    table, _ = records.read(tmp_path)
    assert last_snapshot(tmp_path) == ("stopped", int(table.measured().ok.sum()))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk_is_one_sentence_and_what_is_written_stays(server: str, tmp_path: Path, workers: str) -> None:
    run = subprocess.run(
        [*LOADGEN, "run", "--url", server, *FAST, "--requests", "400", "--output-tokens", "16", "--workers", workers,
         "--no-server-metrics", "--out", str(tmp_path)],
        capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )  # fmt: skip
    assert run.returncode == 2 and "Traceback" not in run.stderr
    table, _ = records.read(tmp_path)
    assert run.stderr.splitlines()[-1] == (
        f"loadgen: the load was stopped: {tmp_path} cannot be written: File too large; it holds {len(table)} finished "
        f"requests, which `loadgen report {tmp_path}` shows."
    )
    assert len(table) > 20 and not (tmp_path / "requests.jsonl.part").exists()


def mount(place: Path, options: str) -> None:
    """A disk of its own below a directory, or a skipped test where this machine does not let us mount one."""
    if sys.platform != "linux":
        pytest.skip("a tmpfs is Linux's")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount(place, "size=64k")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "full").open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_disk_that_fills_up_stops_the_load_and_keeps_what_is_written(server: str, disk: Path, workers: str) -> None:
    directory = disk / "run"
    run = subprocess.run(
        [*LOADGEN, "run", "--url", server, *FAST, "--requests", "2000", "--output-tokens", "16", "--workers", workers,
         "--arrival", "constant:400", "--out", str(directory)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 2 and "Traceback" not in run.stderr, run.stderr
    table, _ = records.read(directory)
    assert f"loadgen: the load was stopped: {directory} cannot be written: No space left on device; it holds " in (
        run.stderr
    )
    assert f"it holds {len(table)} finished requests" in run.stderr
    assert 20 < len(table) < 2000 and not list(directory.glob("*.part"))
    fill(disk)
    shown = subprocess.run([*LOADGEN, "report", str(directory)], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 4 and json.loads(shown.stdout)["requests"]["ok"] == len(table)
    assert f"cannot write the report to {directory}: No space left on device." in shown.stderr


def test_no_run_begins_on_a_full_disk(server: str, disk: Path) -> None:
    (disk / "run").mkdir()
    fill(disk)
    run = subprocess.run(
        [*LOADGEN, "run", "--url", server, *FAST, "--requests", "5", "--out", str(disk / "run")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (2, "") and "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1] == (
        f"loadgen: cannot write to {disk / 'run'}: No space left on device; name another --out."
    )


def test_a_disk_that_is_only_read(server: str, tmp_path: Path, disk: Path) -> None:
    """A run that is on it is shown, and none begins there."""
    first, _ = loadgen(
        "run", "--url", server, *FAST, "--requests", "10", "--output-tokens", "2", "--out", str(tmp_path / "run")
    )
    subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
    shutil.copytree(tmp_path / "run", disk / "run")
    kept = {path.name: path.read_bytes() for path in (disk / "run").iterdir()}
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    shown, said = loadgen("report", str(disk / "run"))
    assert shown == first
    assert f"cannot write the report to {disk / 'run'}: Read-only file system." in said
    assert {path.name: path.read_bytes() for path in (disk / "run").iterdir()} == kept
    _, said = loadgen("run", "--url", server, *FAST, "--requests", "5", "--out", str(disk / "new"), expect=2)
    assert said == f"loadgen: cannot write to {disk / 'new'}: Read-only file system; name another --out.\n"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_directory_that_is_removed_stops_the_load(server: str, tmp_path: Path, workers: str) -> None:
    directory = tmp_path / "run"
    process = start(
        "run", "--url", server, *FAST, "--requests", "5000", "--output-tokens", "4", "--arrival", "constant:50",
        "--workers", workers, "--out", str(directory),
    )  # fmt: skip
    wait_for_rows(directory, 10)
    while directory.exists():  # a snapshot may come in between
        shutil.rmtree(directory, ignore_errors=True)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert said.splitlines()[-1] == (
        f"loadgen: the load was stopped: {directory} cannot be written: it was removed; it holds no request of this "
        "run."
    )


def test_a_report_that_cannot_be_written_is_printed(server: str, tmp_path: Path) -> None:
    loadgen("run", "--url", server, *FAST, "--requests", "10", "--output-tokens", "2", "--out", str(tmp_path))
    kept = (tmp_path / "report.json").read_bytes()
    report = subprocess.run(
        [*LOADGEN, "report", str(tmp_path)], capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )  # fmt: skip
    assert report.returncode in (0, 4) and "Traceback" not in report.stderr
    assert json.loads(report.stdout)["requests"]["ok"] == 10
    assert f"loadgen: cannot write the report to {tmp_path}: File too large." in report.stderr.splitlines()
    assert (tmp_path / "report.json").read_bytes() == kept
    assert not list(tmp_path.glob("*.part"))


def processes_of(run: subprocess.Popen[str], module: str) -> list[int]:
    """The run's own processes that run a module."""
    pids = map(int, Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())
    return [pid for pid in pids if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


def test_a_run_whose_snapshots_end_says_so_and_goes_on(server: str, tmp_path: Path) -> None:
    process = start(
        "run", "--url", server, *FAST, "--requests", "100", "--output-tokens", "4", "--arrival", "constant:50",
        "--out", str(tmp_path),
    )  # fmt: skip
    wait_for_rows(tmp_path, 10)
    (pid,) = processes_of(process, "loadgen.monitor")
    os.kill(pid, signal.SIGKILL)
    out, said = process.communicate(timeout=60)
    assert json.loads(out.splitlines()[-1])["requests"]["ok"] == 100
    (note,) = (line for line in said.splitlines() if "snapshot" in line and not line.startswith(str(tmp_path)))
    assert note == (
        "note: snapshot.json is missing or not up to date, because the process that writes it died of signal 9."
    )


def test_a_count_and_a_duration_together(server: str, tmp_path: Path) -> None:
    report, _ = loadgen(
        "run", "--url", server, *FAST, "--requests", "1000", "--arrival", "constant:20", "--duration", "1",
        "--output-tokens", "2", "--out", str(tmp_path),
    )  # fmt: skip
    assert report["requests"]["planned"] == report["requests"]["ok"] == 20


@pytest.mark.parametrize("server", [("--fault", "http_error:503:2")], indirect=True)
def test_invalid_measurement_is_exit_4(server: str, tmp_path: Path) -> None:
    report, said = loadgen("run", "--url", server, *FAST, "--requests", "20", "--out", str(tmp_path), expect=4)
    assert report["requests"]["by_outcome"] == {"http_error": 10, "ok": 10}
    assert report["verdict"]["valid"] is False and "INVALID" in said


def failures(url: str, out: Path, requests: int = 20) -> dict[str, int]:
    """What a run that is not valid says of its requests."""
    report, _ = loadgen("run", "--url", url, *FAST, "--requests", str(requests), "--out", str(out), expect=4)
    return dict(report["requests"]["by_outcome"])


@pytest.mark.parametrize("server", [("--fault", "slow_start:600")], indirect=True)
def test_a_server_that_is_not_up_yet(server: str, tmp_path: Path) -> None:
    assert failures(server, tmp_path) == {"http_error": 20}


@pytest.mark.parametrize("server", [("--fault", "http_error:429:@3", "--fault", "stream_error:@5")], indirect=True)
def test_single_requests_that_fail(server: str, tmp_path: Path) -> None:
    assert failures(server, tmp_path) == {"http_error": 1, "stream_error": 1, "ok": 18}


@pytest.mark.parametrize("server", [("--fault", "http_error:503:25%", "--seed", "1")], indirect=True)
def test_a_share_of_requests_that_fail(server: str, tmp_path: Path) -> None:
    failed = failures(server, tmp_path / "a", 200)["http_error"]
    assert 30 < failed < 70


@pytest.mark.parametrize("server", [("--fault", "die:12", "--ttft-ms", "2000")], indirect=True)
def test_a_server_that_dies_in_the_run(server: str, tmp_path: Path) -> None:
    seen = failures(server, tmp_path)
    assert "ok" not in seen and sum(seen.values()) == 20


SMALL_CACHE = ("--gpu", "h200", "--model", "llama-2-7b", "--kv-tokens", "20000", "--fault", "kv_exhaustion:20%")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_the_server_counted_is_of_the_load_alone(workers: str, server: str, tmp_path: Path) -> None:
    argv = ["run", "--url", server, "--no-calibrate", "--workers", workers, "--warmup", "9"]
    report, _ = loadgen(
        *argv, "--requests", "20", "--input-tokens", "50", "--output-tokens", "7", "--out", str(tmp_path)
    )
    assert (report["server"]["prompt_tokens"], report["server"]["generation_tokens"]) == (20 * 50, 20 * 7)


@pytest.mark.parametrize("server", [SMALL_CACHE], indirect=True)
def test_preemptions_that_storm_are_found(server: str, tmp_path: Path) -> None:
    report, _ = loadgen("run", "--url", server, *FAST, "--requests", "30", "--output-tokens", "60", "--out",
                        str(tmp_path), expect=(0, 4))  # fmt: skip
    assert report["requests"]["ok"] == 30
    assert report["server"]["preemptions"] > 0
    assert "PREEMPTIONS" in {finding["code"] for finding in report["verdict"]["findings"]}


@pytest.mark.parametrize("factor", [(), ("--fault", "slow_rank:4")])
def test_a_slow_rank_shows_in_every_token(factor: tuple[str, ...], tmp_path: Path) -> None:
    with serving("--gpu", "h200", "--gpus", "2", "--tp", "2", "--model", "llama-2-7b", *factor) as url:
        report, _ = loadgen("run", "--url", url, *FAST, "--requests", "4", "--out", str(tmp_path), expect=(0, 4))
    assert (report["metrics"]["tpot_ms"]["min"] > 10) == bool(factor)


class Arguments:
    """The arguments of every process of this machine that starts while the block lasts, read again and again: its own
    thread reads, so that what the test itself waits for goes on. `ours` are those of processes whose environment names
    `directory`, and not of what other tests start meanwhile."""

    def __init__(self, directory: Path) -> None:
        self.seen: set[bytes] = set()
        self.ours: set[bytes] = set()
        self._directory = str(directory).encode()
        self._before = set(Path("/proc").glob("[0-9]*"))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        while not self._over.wait(0.02):
            for process in set(Path("/proc").glob("[0-9]*")) - self._before:
                with contextlib.suppress(OSError):  # it has ended
                    line = (process / "cmdline").read_bytes()
                    self.seen.add(line)
                    if self._directory in (process / "environ").read_bytes():
                        self.ours.add(line)

    def __enter__(self) -> Arguments:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def written_below(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("own_server", [False, True], ids=["url", "embedded"])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_secrets_go_to_the_server_and_nowhere_else(
    workers: str, own_server: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not into files, nor standard output and error, nor the arguments of any process: of a run that ends well and of
    one whose key is refused."""
    key, value, wrong = (f"k{secrets.token_hex(16)}" for _ in range(3))
    for name, secret in {"TEST_SERVER_KEY": key, "TEST_WRONG_KEY": wrong, "TEST_HEADER": value}.items():
        monkeypatch.setenv(name, secret)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    argv = ["run", *FAST, "--requests", "40", "--output-tokens", "4", "--arrival", "constant:40", "--workers", workers,
            "--header", "X-Gateway-Key=env:TEST_HEADER"]  # fmt: skip
    with Arguments(tmp_path) as arguments:
        if own_server:
            report, said = loadgen(*argv, "--api-key-env", "TEST_SERVER_KEY", "--launch", "embedded", "--out", "run")
        else:
            with serving("--api-key-env", "TEST_SERVER_KEY") as url:
                bare, refused = loadgen(*argv, "--url", url, "--out", "bare", expect=3)
                argv += ["--url", url]
                _, denied = loadgen(*argv, "--api-key-env", "TEST_WRONG_KEY", "--out", "denied", expect=3)
                report, said = loadgen(*argv, "--api-key-env", "TEST_SERVER_KEY", "--out", "run")
            assert bare == {} and "--api-key-env" in refused
            said += refused + denied
    again, said_again = loadgen("report", "run")
    assert report["requests"]["ok"] == 40 and again == report
    manifest = (tmp_path / "run" / "manifest.json").read_text()
    assert "TEST_SERVER_KEY" in manifest and "env:TEST_HEADER" in manifest  # so that the run can be done again
    started = [line for line in arguments.ours if str(sys.executable).encode() in line]
    assert any(b"loadgen.monitor" in line for line in started)
    assert any(b"multiprocessing" in line for line in started) == (workers == "2")
    told = (json.dumps(report) + said + said_again).encode() + written_below(tmp_path) + b"".join(arguments.seen)
    for secret in (key, value, wrong):
        assert secret.encode() not in told


def test_dataset(server: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": list(range(10 + n)), "output_tokens": 2 + n} for n in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report, _ = loadgen("run", "--url", server, "--no-calibrate", "--dataset", str(file), "--warmup", "2",
                        "--out", str(tmp_path / "run"))  # fmt: skip
    assert report["requests"]["ok"] == 10
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700  # prompts of others may get into it
    assert report["tokens"] == {"prompt": sum(range(10, 20)), "output": sum(range(2, 12))}
    _, said = loadgen("run", "--url", server, "--dataset", str(file), "--requests", "11", "--out", str(tmp_path / "x"),
                      expect=2)  # fmt: skip
    assert "prefix cache" in said


@pytest.mark.parametrize(
    ("backend", "asked", "template_tokens"),
    [("openai", (), 0), ("openai-chat", (), 5), ("lightllm", ("--no-stream",), 0)],
)
def test_conversations(backend: str, asked: tuple[str, ...], template_tokens: int, tmp_path: Path) -> None:
    """The embedded server counts words: each turn has those before it, and those of its real replies."""
    share_gpt = [
        {
            "conversations": [
                {"from": "human", "value": "one two three"},
                {"from": "gpt", "value": "as long as a reply of the file"},
                {"from": "human", "value": "four five"},
                {"from": "gpt", "value": "x"},
                {"from": "human", "value": "six"},
            ],
            "output_tokens": [3, 4, 5],
        },
        {"conversations": [{"from": "human", "value": "seven"}]},
        {"conversations": [{"from": "human", "value": "warm up"}]},
        {"conversations": [{"from": "gpt", "value": "alone"}]},
    ]
    file, out = tmp_path / "sharegpt.json", tmp_path / "run"
    file.write_text(json.dumps(share_gpt))
    report, said = loadgen(
        "run", "--launch", "embedded", "--backend", backend, *asked, "--no-calibrate", "--dataset", str(file),
        "--warmup", "1", "--think-time", "0.05", "--output-tokens", "6", "--out", str(out),
    )  # fmt: skip
    assert "of the dataset these are not sent: 1 conversation without a user's message." in said
    assert report["requests"] == {"planned": 4, "ok": 4, "failed": 0, "by_outcome": {"ok": 4}}
    lines = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    rows = sorted((line for line in lines if line.get("phase") == "measured"), key=lambda row: int(row["id"]))
    assert [(row["session"], row["turn"], row["output_tokens"]) for row in rows] == [
        (0, 1, 3), (0, 2, 4), (0, 3, 5), (1, 1, 6),
    ]  # fmt: skip
    assert [row["prompt_tokens"] - template_tokens for row in rows] == [3, 3 + 3 + 2, 8 + 4 + 1, 1]
    assert out.stat().st_mode & 0o777 == 0o700


def test_machine_that_cannot_hold_the_load(tmp_path: Path) -> None:
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); {LOADGEN[2]}"
    result = subprocess.run(
        [sys.executable, "-c", limit, "run", "--requests", "1000", *FAST, "--out", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 3
    assert "open files" in result.stderr and "Traceback" not in result.stderr


LONG = """
import asyncio, resource, sys, tempfile
from pathlib import Path
from backends.protocol import Sampling
from loadgen.config import Config
from loadgen.plan import ClientJob
from loadgen.plan import ClientPlan, PromptSource
from loadgen.client.engine import run_here
from loadgen.event_loop import run_loop
from loadgen.target import Target
from loadgen.plan import Timeouts
load = Config(requests=int(sys.argv[2]), concurrency=64, seed=1, input_tokens=16, output_tokens=2).load
job = ClientJob(run_id="r", version="0", model="m", sampling=Sampling(2), load=load, warmup=0,
          timeouts=Timeouts(10.0, 600.0, 120.0, 3600.0))
plan = ClientPlan(job=job, backend="vllm", target=Target(sys.argv[1]), transport="fast", fresh=False,
            kernel_timestamps=False, prompts=PromptSource())
with tempfile.TemporaryDirectory() as scratch:
    run_loop(run_here(plan, Path(scratch), lambda snapshots: None))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize("server", [("--ttft-ms", "0", "--itl-ms", "0", "--model", "m")], indirect=True)
def test_memory_stays_flat_over_many_requests(server: str) -> None:
    """Three times the requests may not keep anything of them in the client: what is finished is on disk."""

    def peak_kib(requests: int) -> int:
        result = subprocess.run(
            [sys.executable, "-c", LONG, server, str(requests)], capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, result.stderr
        return int(result.stdout)

    # Fewer than 10,000 would show the allocator and the collector still finding their level, about 4 MB.
    few_kib = peak_kib(10_000)
    # The least of some tries: on a busy machine finished requests pile up for a while before they are written.
    assert any((peak_kib(30_000) - few_kib) * 1024 / 20_000 < 100 for _ in range(3))
