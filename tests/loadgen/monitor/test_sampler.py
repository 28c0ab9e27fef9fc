"""The sidecar's process: the samples that it writes, their schedule, and that no part of it stops another."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadgen.monitor.server_view import read
from tests.loadgen.monitor.directories import RUN, write_manifest
from tests.loadgen.monitor.metrics_server import Script

GIB = 2**30

FAKE_NVML = """
import os, signal, sys, time
from tests.backends.test_gpus import FakeNvml, always
class Nvml(FakeNvml):
    def nvmlDeviceGetPowerUsage(self, handle):
        %s
        return super().nvmlDeviceGetPowerUsage(handle)
sys.modules["pynvml"] = Nvml("NVIDIA H200", 2, "570.86.10", always(0))
from loadgen.monitor.__main__ import main
main()
"""
WELL, HANGS = FAKE_NVML % "pass", FAKE_NVML % "time.sleep(60)"
CRASHES = FAKE_NVML % "os.kill(os.getpid(), signal.SIGSEGV)"


class Process:
    """`python -m loadgen.monitor`, or code in its place, that was told to begin; `begun` is its reply."""

    def __init__(
        self, directory: Path, url: str = "http://127.0.0.1:9", code: str = "", manifest: bool = True, **changes: Any
    ) -> None:
        self.path = directory / "server.jsonl"
        if manifest:
            write_manifest(directory)
        argv = ["-c", code] if code else ["-m", "loadgen.monitor"]
        self.process = subprocess.Popen([sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        source = {"url": url, "series": {"running": "running"}}
        self.send(type="Begin", **{"directory": str(directory), "run_id": RUN, "source": source} | changes)
        self.begun = self.reply()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def send(self, **message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def reply(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or b"null")

    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.path.read_bytes().splitlines()]

    def wait_for(self, enough: Callable[[list[Any]], bool]) -> list[Any]:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if enough(lines := self.lines()[1:]):
                return lines
            time.sleep(0.02)
        raise AssertionError(self.lines())

    def end(self) -> list[Any]:
        """Ends it as its run does, and gives every line of samples that it wrote."""
        self.send(type="End")
        self.process.communicate(timeout=20)
        assert self.process.returncode == 0
        return self.lines()


BEGUN = {"type": "Begun", "problem": None}


def test_first_sample_before_ready_last_one_at_the_end(tmp_path: Path, script: Script) -> None:
    with Process(tmp_path, script.url) as process:
        assert process.begun == BEGUN
        header, first = process.lines()
        assert header == {"schema": "loadgen.server/1", "run_id": RUN, "series": ["running"], "gpus": [], "error": None}
        assert list(first) == ["at_ns", "took_ms", "metrics", "gpus", "error"]
        assert (first["metrics"], first["gpus"], first["error"]) == ({"running": 3.0}, [], None)
        script.body = b"running 5\n"
        process.process.send_signal(signal.SIGINT)  # Ctrl-C reaches the whole terminal
        before_ns = time.monotonic_ns()
        last = process.end()[-1]
        assert last["metrics"] == {"running": 5.0} and last["at_ns"] > before_ns
    assert {request["path"] for request in script.seen} == {"/metrics"}
    assert "authorization" not in script.seen[0]


def test_a_run_that_was_killed_waits_for_no_server(tmp_path: Path, script: Script) -> None:
    with Process(tmp_path, script.url, period_s=60) as process:
        seen = len(script.seen)
        process.process.communicate(timeout=20)
        assert process.process.returncode == 0
        header, first = process.lines()
        assert header["run_id"] == RUN and first["error"] is None and len(script.seen) == seen
    assert json.loads((tmp_path / "snapshot.json").read_bytes())["state"] == "stopped"


def test_samples_keep_to_their_schedule(tmp_path: Path) -> None:
    with Process(tmp_path, code=WELL, source=None, gpus=[1, 0], period_s=0.05) as process:
        process.wait_for(lambda lines: len(lines) >= 5)
        header, *rows = process.end()
    assert header["gpus"] == ["NVIDIA H200"] * 2 and header["series"] == [] and header["error"] is None
    beats = [(row["at_ns"] - rows[0]["at_ns"]) // 50_000_000 for row in rows[:-1]]
    assert beats == sorted(set(beats)), "a late sample moves none of the others"
    assert rows[0]["gpus"][0] == {
        "index": 1, "memory_used_bytes": 2 * GIB, "power_w": 250.501, "utilization_ratio": 0.87, "energy_mj": 1000500,
        "thermal_ns": 5000, "power_ns": 7000, "clock_reasons": 0x44, "processes": [77, 812],
    }  # fmt: skip
    assert [gpu["index"] for gpu in rows[-1]["gpus"]] == [1, 0]
    energies = [row["gpus"][0]["energy_mj"] for row in rows]
    assert energies == sorted(set(energies))


def test_a_sample_that_is_asked_for_comes_at_once_and_moves_none(tmp_path: Path, script: Script) -> None:
    with Process(tmp_path, script.url, period_s=0.4) as process:
        for value in (5, 6):
            script.body = b"running %d\n" % value
            process.send(type="TakeSample", number=value)
            assert process.reply() == {"type": "SampleTaken", "number": value}
            assert process.lines()[-1]["metrics"] == {"running": float(value)}
        rows = process.wait_for(lambda lines: len(lines) >= 6)
    beats = [(row["at_ns"] - rows[0]["at_ns"]) / 0.4e9 for row in rows if row["metrics"] != {"running": 5.0}]
    assert {round(beat) for beat in beats if abs(beat - round(beat)) < 0.2} >= {0, 1, 2}


def test_gpus_that_are_not_there_are_said_in_the_header(tmp_path: Path, script: Script) -> None:
    with Process(tmp_path, script.url, code=WELL, gpus=[0, 9]) as process:
        header, *rows = process.end()
    assert header["error"] == "the GPUs cannot be sampled: there is no GPU 9 here" and header["gpus"] == []
    assert rows[-1]["metrics"] == {"running": 3.0} and rows[-1]["error"] is None


@pytest.mark.parametrize("gpus", [None, [0]])
def test_a_server_without_metrics(tmp_path: Path, script: Script, gpus: list[int] | None) -> None:
    script.status = 404
    with Process(tmp_path, script.url, code=WELL, gpus=gpus or []) as process:
        assert process.begun == BEGUN
        header, *rows = process.end()
    assert header["error"] == "the server has no metrics: GET /metrics answers 404" and header["series"] == []
    assert len(script.seen) == 1  # not asked again
    assert (len(rows) > 0) == (gpus is not None)
    assert all(row["error"] is None and row["metrics"] == {} and row["gpus"] for row in rows)


def test_a_server_that_dies_and_one_that_comes_to_itself(tmp_path: Path, script: Script) -> None:
    script.status = 503
    with Process(tmp_path, script.url, period_s=0.3) as process:
        assert process.lines()[1]["error"] == "GET /metrics answers 503"
        script.status, script.body = 200, b"<html>"
        process.wait_for(
            lambda lines: lines[-1]["error"] == "the answer to GET /metrics is not Prometheus' text format"
        )
        script.body = b"running 4\n"
        process.wait_for(lambda lines: lines[-1]["metrics"] == {"running": 4.0})
        script.stop()
        process.wait_for(lambda lines: "no connection" in (lines[-1]["error"] or ""))
        header, *rows = process.end()
    assert header["series"] == ["running"] and header["error"] is None
    assert all((row["error"] is None) == bool(row["metrics"]) for row in rows)


def test_a_server_that_never_ends_its_answer(tmp_path: Path) -> None:
    """A byte now and then would keep any limit on a single read from being reached."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                        while True:
                            connection.sendall(b"# \n")
                            time.sleep(0.02)

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        with Process(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}", period_s=0.2) as process:
            rows = process.end()[1:]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert {row["error"] for row in rows} == {"GET /metrics was not answered within 0.16 s"}


def test_a_killed_process_leaves_its_samples(tmp_path: Path, script: Script) -> None:
    with Process(tmp_path, script.url) as process:
        process.process.kill()
        process.process.wait()
        assert process.lines()[1]["metrics"] == {"running": 3.0}
    view = read(tmp_path, RUN, time.monotonic_ns(), time.monotonic_ns())
    assert view is not None and view.server is not None
    assert (view.server.running_max, view.server.samples, view.server.covered) == (3, 1, False)


def test_what_it_cannot_do_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "server.jsonl").write_text("kept")
    with Process(tmp_path) as process:
        assert process.begun == {"type": "Begun", "problem": "server.jsonl cannot be written: File exists"}
        process.send(type="TakeSample", number=1)
        assert process.reply() == {"type": "SampleTaken", "number": 1}
        process.process.communicate(timeout=20)
        assert process.process.returncode == 0
    assert (tmp_path / "server.jsonl").read_text() == "kept"
    with Process(tmp_path, gpus=7) as process:
        assert process.begun["problem"] == "the sampling process was given orders that it cannot read"


# --- parts that fail alone ---


def state(directory: Path) -> str:
    return str(json.loads((directory / "snapshot.json").read_bytes())["state"])


def wait_for_snapshot(directory: Path) -> int:
    """Until one more is there; when it was written."""
    path, deadline = directory / "snapshot.json", time.monotonic() + 20
    before = path.stat().st_mtime_ns if path.exists() else 0
    while time.monotonic() < deadline:
        if path.exists() and (now := path.stat().st_mtime_ns) > before:
            return now
        time.sleep(0.02)
    raise AssertionError("no snapshot")


def test_gpus_that_hang_stop_neither_the_servers_samples_nor_the_snapshots(tmp_path: Path, script: Script) -> None:
    with Process(tmp_path, script.url, code=HANGS, gpus=[0], period_s=0.2) as process:
        assert process.begun == BEGUN
        wait_for_snapshot(tmp_path)
        process.wait_for(lambda lines: len(lines) >= 4)
        begun = time.monotonic()
        header, *rows = process.end()
        assert time.monotonic() - begun < 5  # nobody waits for NVML
    assert header["gpus"] == ["NVIDIA H200"] and header["error"] is None
    for row in rows:
        assert (row["metrics"], row["gpus"]) == ({"running": 3.0}, [])
        assert row["error"] == "the GPUs were not read within 0.16 s"
    assert state(tmp_path) == "stopped"  # there are no records


def test_a_server_that_hangs_stops_neither_the_gpus_samples_nor_the_snapshots(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Process(tmp_path, url, code=WELL, gpus=[0], period_s=0.2) as process:
            wait_for_snapshot(tmp_path)
            process.wait_for(lambda lines: len(lines) >= 4)
            rows = process.end()[1:]
    energies = [row["gpus"][0]["energy_mj"] for row in rows]
    assert energies == sorted(set(energies))
    assert {row["error"] for row in rows} == {"GET /metrics was not answered within 0.16 s"}


def test_samples_go_on_without_snapshots(tmp_path: Path, script: Script) -> None:
    """Their thread fails, here for want of a manifest; the process then ends with an exit code that says so."""
    with Process(tmp_path, script.url, manifest=False, period_s=0.2) as process:
        process.wait_for(lambda lines: len(lines) >= 4)
        process.process.communicate(timeout=20)
        assert process.process.returncode == 1
    assert all(row["metrics"] == {"running": 3.0} for row in process.lines()[1:])


def test_snapshots_go_on_when_the_samples_have_no_room(tmp_path: Path, script: Script) -> None:
    limited = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))
from loadgen.monitor import snapshots
def write(directory, snapshot):
    (directory / "snapshot.json").write_text('{"state": "%s"}' % snapshot.state)
snapshots.write_snapshot = write
from loadgen.monitor.__main__ import main
main()
"""
    with Process(tmp_path, script.url, code=limited, period_s=0.05) as process:
        deadline = time.monotonic() + 20
        while process.path.stat().st_size < 900 and time.monotonic() < deadline:
            time.sleep(0.02)
        wait_for_snapshot(tmp_path)
        wait_for_snapshot(tmp_path)
        process.send(type="TakeSample", number=1)
        assert process.reply() == {"type": "SampleTaken", "number": 1}
        process.process.communicate(timeout=20)
        assert process.process.returncode == 0
    assert process.path.stat().st_size == 900 and state(tmp_path) == "stopped"
    view = read(tmp_path, RUN, time.monotonic_ns(), time.monotonic_ns())
    assert view is not None and view.server is not None and not view.server.covered


def test_the_last_sample_is_in_the_last_snapshot(tmp_path: Path, script: Script) -> None:
    with Process(tmp_path, script.url) as process:
        script.body = b"running 8\n"
        process.end()
    families = json.loads((tmp_path / "snapshot.json").read_bytes())["families"]
    (running,) = (family for family in families if family["name"] == "llm_dissect_server_requests_running")
    assert running["samples"][0]["value"] == 8


def test_a_gpu_library_that_crashes_is_known_by_its_signal(tmp_path: Path) -> None:
    with Process(tmp_path, code=CRASHES, source=None, gpus=[0]) as process:
        assert process.begun is None
        assert process.process.wait(20) == -signal.SIGSEGV


def test_the_process_is_light() -> None:
    """It shares the machine with the client: neither the engine nor numpy is in it."""
    heavy = {"numpy", "loadgen.client.engine", "httptools", "aiohttp", "pynvml"}
    code = f"import sys, loadgen.monitor.__main__; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
