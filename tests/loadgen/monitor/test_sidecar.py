"""The sidecar as its run sees it: samples and snapshots of its directory, the token, and every way it can fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backends
from loadgen.client.engine import LiveCounters as Seen
from loadgen.event_loop import run_loop
from loadgen.monitor import sidecar as sidecar_module
from loadgen.monitor.messages import Begin, Live, MetricsSource
from loadgen.monitor.server_view import read
from loadgen.monitor.sidecar import sidecar
from loadgen.run import together
from loadgen.rundir import RunError
from tests.loadgen.monitor.directories import RUN, read_snapshot, record, value, write_manifest, write_records
from tests.loadgen.monitor.metrics_server import Script
from tests.servers.reader import running

TOKEN = "key-that-nobody-may-see"


def monitored(directory: Path, url: str, inside: Callable[[], None] = lambda: None, **changes: Any) -> None:
    values: dict[str, Any] = {"token": None, "series": {"running": "running"}, "gpus": (), **changes}
    write_manifest(directory)
    source = MetricsSource(url=url, token=values["token"], series=values["series"], replicas=values.get("replicas", ()))

    async def run() -> None:
        async with sidecar(sample_server=True) as monitor:
            monitor.begin(directory, RUN, source, values["gpus"])
            await monitor.sample()
            await asyncio.to_thread(inside)

    asyncio.run(run())


def test_the_token_is_sent_and_is_nowhere_else(tmp_path: Path, script: Script) -> None:
    argvs: list[bytes] = []

    def inside() -> None:
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                argvs.append(process.read_bytes())

    monitored(tmp_path, script.url + "/v1/", inside, token=TOKEN)
    assert {request["authorization"] for request in script.seen} == {f"Bearer {TOKEN}"}
    assert {request["path"] for request in script.seen} == {"/metrics"}
    assert any(b"\0loadgen.monitor\0" in argv for argv in argvs)
    assert not any(TOKEN.encode() in argv for argv in argvs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "server.jsonl", "snapshot.json"]
    assert TOKEN not in (tmp_path / "server.jsonl").read_text()
    source = MetricsSource(url="u", token=TOKEN, series={})
    assert TOKEN not in repr(source) and TOKEN not in repr(Begin(directory="d", run_id="r", source=source))


def test_a_token_that_no_header_can_carry_stays_hidden_too(tmp_path: Path, script: Script) -> None:
    monitored(tmp_path, script.url, token=TOKEN + "\n")
    text = (tmp_path / "server.jsonl").read_text()
    assert TOKEN not in text and "GET /metrics failed: LocalProtocolError" in text


def test_nothing_to_watch_leaves_no_file(tmp_path: Path) -> None:
    monitored(tmp_path, "http://127.0.0.1:9", series={})
    monitored(tmp_path, "http://127.0.0.1:9", series={}, gpus=[])
    assert not (tmp_path / "server.jsonl").exists()


def test_a_failed_start_does_not_fail_the_run(tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    for name, python, problem in (
        ("none", str(tmp_path / "python"), "was not started: No such file or directory"),
        ("dies", "/bin/false", "ended with exit code 1 before it was ready"),
        ("hangs", str(silent), "was not ready within 0.3 s"),
    ):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", python)
            patch.setattr(sidecar_module, "START_TIMEOUT_S", 0.3)
            patch.setattr(sidecar_module, "STOP_TIMEOUT_S", 0.3)
            monitored(tmp_path / name, script.url, lambda: entered.append(1))
        view = read(tmp_path / name, RUN, 0, 0)
        assert view is not None and view.server is not None
        assert view.server.problem == f"the sampling process {problem}"
    assert len(entered) == 3


def test_a_gpu_library_that_crashes_costs_the_samples_and_no_snapshot(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    libraries = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    (tmp_path / "libnvidia-ml.so.1").symlink_to(next(path for path in libraries if "/libc" in path))  # there is one
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    write_manifest(tmp_path)

    async def beside() -> str | None:
        async with sidecar() as monitor:
            source = MetricsSource(url=script.url, series={"running": "running"})
            monitor.begin(tmp_path, RUN, source, [0])
            await monitor.sample()
            monitor.progress(Live(planned=50, in_flight=3))
        return monitor.trouble

    assert asyncio.run(beside()) is None
    assert value(read_snapshot(tmp_path), "llm_dissect_requests_planned") == 50
    view = read(tmp_path, RUN, 0, 0)
    assert view is not None and view.server is not None
    assert view.server.problem == "the sampling process ended with exit code -11 before it was ready"


def test_an_error_inside_comes_through_and_the_process_ends(tmp_path: Path, script: Script) -> None:
    def fail() -> None:
        raise RuntimeError("of the run")

    with pytest.raises(RuntimeError, match="of the run"):
        monitored(tmp_path, script.url, fail)
    assert len((tmp_path / "server.jsonl").read_text().splitlines()) >= 3  # it took its last sample


def test_it_does_not_outlive_a_killed_parent(tmp_path: Path, script: Script) -> None:
    parent = f"""
import asyncio, os, signal
from pathlib import Path
from loadgen.monitor.messages import MetricsSource
from loadgen.monitor.sidecar import sidecar
start = asyncio.create_subprocess_exec
async def started(*argv, **options):
    process = await start(*argv, **options)
    print(process.pid, flush=True)
    return process
asyncio.create_subprocess_exec = started
async def run():
    async with sidecar() as monitor:
        source = MetricsSource(url={script.url!r}, series={{"running": "running"}})
        monitor.begin(Path({str(tmp_path)!r}), "r", source)
        await monitor.sample()
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(run())
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=30)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, deadline = int(done.stdout), time.monotonic() + 20
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    """Whether the process runs; not as a zombie whose new parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("dialect", "absent"),
    [
        ("vllm", {"adapters_running", "adapters_waiting"}),
        ("lightllm", {"paused", "kv_reserved_tokens"}),
        ("tgi", {"kv_reserved_tokens"}),
        ("sglang", {"paused", "adapters_loaded"}),
    ],
)
def test_every_dialect_of_the_embedded_server(tmp_path: Path, dialect: str, absent: set[str]) -> None:
    """Names agree with the backend's, and counts with what was sent."""
    series = backends.get(dialect).server_metrics
    path, body = {
        "vllm": ("/v1/completions", {"prompt": [0] * 5, "max_tokens": 4}),
        "lightllm": ("/generate", {"inputs": [0] * 5, "parameters": {"max_new_tokens": 4}}),
        "tgi": ("/generate", {"inputs": "a b c d e", "parameters": {"max_new_tokens": 4}}),
        "sglang": ("/generate", {"input_ids": [0] * 5, "sampling_params": {"max_new_tokens": 4}}),
    }[dialect]
    with running(tmp_path, dialect, ttft_ms=20, itl_ms=10, api_key=TOKEN) as server:

        def post() -> None:
            server.post(path, body, Authorization=f"Bearer {TOKEN}")

        post()  # before t = 0: a warm-up
        t0_ns: list[int] = []

        def inside() -> None:
            t0_ns.append(time.monotonic_ns())
            for _ in range(3):
                post()
            t0_ns.append(time.monotonic_ns())

        monitored(tmp_path, f"http://127.0.0.1:{server.port}", inside, series=series, token=TOKEN)
    lines = [json.loads(line) for line in (tmp_path / "server.jsonl").read_text().splitlines()]
    histograms = {name for name in series if name.endswith("_seconds")}
    shown = {name + part for name in histograms for part in ("_sum", "_count")} | set(series) - histograms
    assert set(lines[-1]["metrics"]) == shown - absent
    view = read(tmp_path, RUN, *t0_ns)
    assert view is not None and view.gpus is None and (seen := view.server) is not None
    assert (seen.covered, seen.failed, seen.problem, seen.failure) == (True, 0, None, None)
    assert (seen.prompt_tokens, seen.generation_tokens) == (18 if dialect == "tgi" else 15, 12)  # TGI adds a BOS
    assert (seen.waiting_max, seen.running_max) == (0, 0 if seen.samples == 2 else seen.running_max)
    assert seen.e2el_mean_ms is not None and seen.e2el_mean_ms >= 20 + 3 * 10
    assert (seen.ttft_mean_ms or 20) >= 20 and (seen.ttft_mean_ms is None) == (dialect == "tgi")
    assert (seen.itl_mean_ms is None) == (dialect not in ("vllm", "sglang"))
    assert seen.prefix_cache_hits == (None if dialect == "tgi" else 0)  # TGI cannot tell
    assert seen.prefix_cache_queries == (None if dialect == "tgi" else 15)
    assert seen.preemptions == (0 if dialect in ("vllm", "sglang") else None)


# --- snapshots ---


def test_client_processes_are_added_up_and_the_worst_of_them_is_shown() -> None:
    one = Seen(
        planned=3, done=1, failed=1, in_flight=2, events=5, events_in_flight=4, elapsed_s=1.0, ttft_ms=[7.0],
        cpu_ratio=0.5, loop_lag_ms=0.25,
    )  # fmt: skip
    other = Seen(planned=3, done=0, failed=0, in_flight=2, events=5, elapsed_s=1.5, ttft_ms=[], loop_lag_ms=3.0)
    assert together([one, other]) == Live(
        planned=6, in_flight=4, events=10, events_in_flight=4, done=1, failed=1, elapsed_s=1.5, cpu_ratio=0.5,
        loop_lag_ms=3.0,
    )  # fmt: skip
    assert together([one, other], remote=True).latest_ttft_ms == [7.0]
    assert (
        together([one, Seen(planned=None, done=0, failed=0, in_flight=0, events=0, elapsed_s=0.0, ttft_ms=[])]).planned
        is None
    )


def test_the_process_beside_a_run_writes_a_last_snapshot_when_it_is_let_go(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path)
    write_records(tmp_path / "requests.jsonl", [record(number) for number in range(1, 11)])

    async def beside() -> None:
        async with sidecar() as monitor:
            monitor.begin(tmp_path, RUN)
            monitor.progress(Live(planned=50, in_flight=3))
        assert monitor.trouble is None

    asyncio.run(beside())
    snapshot = read_snapshot(tmp_path)
    assert snapshot.run_id == manifest.run_id and snapshot.state == "finished"
    assert value(snapshot, "llm_dissect_requests", outcome="ok") == 10
    assert value(snapshot, "llm_dissect_requests_planned") == 50
    assert snapshot.labels == {"backend": "vllm", "model": "m", "arrival": "burst", "emulated": "true", "version": "1"}


def test_a_run_that_never_began_leaves_no_snapshot(tmp_path: Path) -> None:
    async def beside() -> None:
        async with sidecar():
            pass

    asyncio.run(beside())
    assert not list(tmp_path.iterdir())


def test_the_run_is_served_at_the_port(tmp_path: Path) -> None:
    write_manifest(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def page() -> str:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
                if "llm_dissect_requests_in_flight" in (text := reply.read().decode()):
                    return str(text)
            time.sleep(0.05)
        raise AssertionError("no page")

    async def beside() -> str:
        async with sidecar(port) as monitor:
            monitor.begin(tmp_path, RUN)
            monitor.progress(Live(planned=50, in_flight=3))
            return await asyncio.to_thread(page)

    assert f'llm_dissect_run_state{{program="loadgen",run_id="{RUN}",state="running"}} 1.0' in asyncio.run(beside())
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RunError, match="cannot listen on"):
        asyncio.run(beside())


def test_a_port_that_somebody_takes_meanwhile_costs_no_snapshot(tmp_path: Path) -> None:
    write_manifest(tmp_path)
    write_records(tmp_path / "requests.jsonl", [record(1)])

    async def beside(port: int) -> None:
        async with sidecar(port) as monitor:
            with socket.create_server(("127.0.0.1", port)):
                monitor.begin(tmp_path, RUN)
                await monitor.end()

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asyncio.run(beside(port))
    assert read_snapshot(tmp_path).state == "finished"


def test_a_process_that_dies_does_not_disturb_the_run_and_is_told_of(tmp_path: Path) -> None:
    write_manifest(tmp_path)

    async def beside() -> str | None:
        async with sidecar() as monitor:
            monitor.begin(tmp_path, RUN)
            assert monitor.process is not None
            monitor.process.kill()
            for _ in range(20):
                monitor.progress(Live(planned=50, in_flight=3))
                await asyncio.sleep(0.01)
        return monitor.trouble

    note = "snapshot.json is missing or not up to date, because the process that writes it died of signal 9."
    assert asyncio.run(beside()) == run_loop(beside()) == note


def test_a_process_that_fails_is_told_of(tmp_path: Path) -> None:
    async def beside() -> str | None:
        async with sidecar() as monitor:
            monitor.begin(tmp_path, RUN)  # it holds no manifest
        return monitor.trouble

    note = asyncio.run(beside())
    assert note is not None and note.endswith("because the process that writes it failed (exit code 1).")


def test_a_process_that_cannot_be_started_does_not_disturb_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))

    async def beside() -> str | None:
        async with sidecar() as monitor:
            monitor.begin(tmp_path, RUN)
            monitor.progress(Live(planned=50, in_flight=3))
        return monitor.trouble

    note = asyncio.run(beside())
    assert note is not None and note.endswith("because the process that writes it was not started.")
    assert not list(tmp_path.iterdir())
