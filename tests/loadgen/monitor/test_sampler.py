"""The server's own view: what is picked out of a server's text, what the process writes, what is read off its file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backends
from backends.gpus import GpuSample
from loadgen.monitor import sampler
from loadgen.monitor.prometheus import Series, Unreadable
from loadgen.monitor.sampler import sampling
from loadgen.monitor.server_view import Header, Sample, Server, ServerView, read
from tests.servers.reader import running

SECONDS = 1_000_000_000
TOKEN = "key-that-nobody-may-see"
RUN = "20261121-120000-abc123"
GIB = 2**30


# --- picking series out of the text ---


def test_several_label_sets_are_added_and_ratios_averaged() -> None:
    series = Series({"running": "vllm:running", "kv_cache_usage_ratio": "vllm:kv", "preemptions": "vllm:pre_total"})
    text = """
# TYPE vllm:running gauge
vllm:running{model_name="a b}",engine="0"} 3.0
vllm:running{model_name="a b}",engine="1"} 4.0
# TYPE vllm:kv gauge
vllm:kv{engine="0"} 0.5
vllm:kv{engine="1"} 0.25
# TYPE vllm:pre_total counter
vllm:pre_total{engine="0"} 1e1
# TYPE vllm:pre_created gauge
vllm:pre_created{engine="0"} 1.7e9
vllm:running_more{engine="0"} 99
"""
    assert series.pick(text) == {"running": 7.0, "kv_cache_usage_ratio": 0.375, "preemptions": 10.0}


@pytest.mark.parametrize("declared", ["x:hits", "x:hits_total"])
@pytest.mark.parametrize("shown", ["x:hits", "x:hits_total"])
@pytest.mark.parametrize("typed", [True, False])
def test_a_counter_is_found_with_and_without_total(declared: str, shown: str, typed: bool) -> None:
    text = (f"# TYPE {shown} counter\n" if typed else "") + f"{shown} 5\n"
    assert Series({"prefix_cache_hits": declared}).pick(text) == {"prefix_cache_hits": 5.0}


def test_the_exact_name_comes_first() -> None:
    assert Series({"preemptions": "x_total"}).pick("x 1\nx_total 2\n") == {"preemptions": 2.0}
    assert Series({"preemptions": "x"}).pick("x_total 2\nx 1\n") == {"preemptions": 1.0}


@pytest.mark.parametrize("shown", ["vllm:new", "vllm:old"])
def test_names_of_older_versions(shown: str) -> None:
    series = Series({"kv_cache_usage_ratio": "vllm:new vllm:old", "itl_seconds": "vllm:new_seconds vllm:old_seconds"})
    text = f"{shown} 0.5\n{shown}_seconds_sum 3\n{shown}_seconds_count 2\n"
    assert series.pick(text) == {"kv_cache_usage_ratio": 0.5, "itl_seconds_sum": 3.0, "itl_seconds_count": 2.0}
    both = Series({"kv_cache_usage_ratio": "vllm:new vllm:old"})
    assert both.pick("vllm:old 0.5\nvllm:new 0.25\n") == {"kv_cache_usage_ratio": 0.25}


def test_a_histogram_gives_its_sum_and_count_alone() -> None:
    text = """# TYPE lightllm_request_queue_duration_bucket histogram
lightllm_request_queue_duration_bucket_bucket{le="+Inf"} 9.0
lightllm_request_queue_duration_bucket_count 9.0
lightllm_request_queue_duration_bucket_sum 9.5
# TYPE first histogram
first_bucket{le="0.1"} 1.0
first_bucket{le="+Inf"} 2.0
first_count 2.0
first_sum 0.75
# TYPE first_created gauge
first_created 1.7e9
"""
    assert Series({"ttft_seconds": "first"}).pick(text) == {"ttft_seconds_sum": 0.75, "ttft_seconds_count": 2.0}
    odd = Series({"ttft_seconds": "lightllm_request_queue_duration_bucket"})
    assert odd.pick(text) == {"ttft_seconds_sum": 9.5, "ttft_seconds_count": 9.0}


def test_what_the_official_library_writes() -> None:
    registry = prometheus_client.CollectorRegistry()
    hits = prometheus_client.Counter("x:hits", "Hits.", ["engine"], registry=registry)
    usage = prometheus_client.Gauge("x:usage", "Usage.", ["engine"], registry=registry)
    first = prometheus_client.Histogram("x:first_seconds", "First.", ["engine"], registry=registry)
    for engine, tokens in (("0", 16), ("1", 32)):
        hits.labels(engine).inc(tokens)
        usage.labels(engine).set(tokens / 64)
        first.labels(engine).observe(tokens)
    series = Series(
        {"prefix_cache_hits": "x:hits_total", "kv_cache_usage_ratio": "x:usage", "ttft_seconds": "x:first_seconds"}
    )
    assert series.pick(prometheus_client.generate_latest(registry).decode()) == {
        "prefix_cache_hits": 48.0,
        "kv_cache_usage_ratio": 0.375,
        "ttft_seconds_sum": 48.0,
        "ttft_seconds_count": 2.0,
    }


def test_what_is_not_a_number_is_left_out() -> None:
    series = Series({"running": "a", "waiting": "b", "kv_cache_usage_ratio": "c"})
    assert series.pick("a NaN\nb +Inf\nc 0.5\n") == {"kv_cache_usage_ratio": 0.5}
    assert series.pick('a{x="1"} 1e308\na{x="2"} 1e308\nb 1\n') == {"waiting": 1.0}  # their sum is beyond a float


@pytest.mark.parametrize(
    "text",
    [
        "<!DOCTYPE html>\n<html>",
        '{"running": 3}',
        "running",
        "running three",
        'running{a="b 1',
        "running 1" + "0" * 400,
    ],
)
def test_garbage_is_unreadable(text: str) -> None:
    with pytest.raises(Unreadable, match="not Prometheus' text format"):
        Series({"running": "running"}).pick(text)


@given(st.text(alphabet='running{}="\\, \n#1e.N\x00é_TYPEgauge'))
@settings(max_examples=300, deadline=None)
def test_any_text_is_picked_or_unreadable(text: str) -> None:
    with contextlib.suppress(Unreadable):
        picked = Series({"running": "running"}).pick(text)
        assert all(isinstance(value, float) for value in picked.values())


# --- the process ---


@dataclass
class Script:
    """What a server answers to GET /metrics, and what it was sent."""

    url: str = ""
    status: int = 200
    body: bytes = b""
    seen: list[dict[str, str]] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None


@pytest.fixture
def script() -> Iterator[Script]:
    said = Script(body=b"running 3\n")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            said.seen.append({"path": self.path, **{name.lower(): value for name, value in self.headers.items()}})
            self.send_response(said.status)
            self.send_header("Content-Length", str(len(said.body)))
            self.end_headers()
            self.wfile.write(said.body)
            self.close_connection = stopped.is_set()

        def log_message(self, *_: Any) -> None: ...

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None: ...

    stopped = threading.Event()
    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()

    def stop() -> None:
        if not stopped.is_set():
            stopped.set()
            server.shutdown()
            server.server_close()
            thread.join()

    said.url, said.stop = f"http://127.0.0.1:{server.server_address[1]}", stop
    yield said
    stop()


FAKE_NVML = """
import sys
from tests.backends.test_gpus import FakeNvml, always
sys.modules["pynvml"] = FakeNvml("NVIDIA H200", 2, "570.86.10", always(0))
from loadgen.monitor import sampler
sampler.main()
"""


class Scraper:
    """`python -m loadgen.monitor.sampler` with these orders, or code in its place; it has printed its first line."""

    def __init__(self, directory: Path, url: str = "http://127.0.0.1:9", code: str = "", **orders: Any) -> None:
        self.path = directory / "server.jsonl"
        argv = ["-c", code] if code else ["-m", "loadgen.monitor.sampler"]
        self.process = subprocess.Popen([sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        values = {"url": url + "/metrics", "series": {"running": "running"}, "run_id": RUN, "path": str(self.path)}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(values | orders).encode() + b"\n")
        self.process.stdin.flush()
        self.said = self.process.stdout.readline().decode().strip()

    def __enter__(self) -> Scraper:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

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
        """Closes its standard input and gives every line that it wrote."""
        self.process.communicate(timeout=20)
        assert self.process.returncode == 0
        return self.lines()


def test_first_sample_before_ready_last_one_at_the_end(tmp_path: Path, script: Script) -> None:
    with Scraper(tmp_path, script.url) as scraper:
        assert scraper.said == "ready"
        header, first = scraper.lines()
        assert header == {"schema": "loadgen.server/1", "run_id": RUN, "series": ["running"], "gpus": [], "error": None}
        assert list(first) == ["at_ns", "took_ms", "metrics", "gpus", "error"]
        assert (first["metrics"], first["gpus"], first["error"]) == ({"running": 3.0}, [], None)
        script.body = b"running 5\n"
        scraper.process.send_signal(signal.SIGINT)  # Ctrl-C reaches the whole terminal
        before_ns = time.monotonic_ns()
        last = scraper.end()[-1]
        assert last["metrics"] == {"running": 5.0} and last["at_ns"] > before_ns
    assert {request["path"] for request in script.seen} == {"/metrics"}
    assert "authorization" not in script.seen[0]


def test_samples_keep_to_their_schedule(tmp_path: Path) -> None:
    with Scraper(tmp_path, code=FAKE_NVML, series={}, gpus=[1, 0], period_s=0.05) as scraper:
        scraper.wait_for(lambda lines: len(lines) >= 5)
        header, *rows = scraper.end()
    assert header["gpus"] == ["NVIDIA H200"] * 2 and header["series"] == [] and header["error"] is None
    beats = [(row["at_ns"] - rows[0]["at_ns"]) // 50_000_000 for row in rows[:-1]]
    assert beats == sorted(set(beats)), "a late sample moves none of the others"
    assert rows[0]["gpus"][0] == {
        "index": 1, "memory_used_bytes": 2 * GIB, "power_w": 250.501, "utilization_ratio": 0.87, "energy_mj": 1000500,
    }  # fmt: skip
    assert [gpu["index"] for gpu in rows[-1]["gpus"]] == [1, 0]
    energies = [row["gpus"][0]["energy_mj"] for row in rows]
    assert energies == sorted(set(energies))


def test_a_sample_that_is_asked_for_comes_at_once_and_moves_none(tmp_path: Path, script: Script) -> None:
    with Scraper(tmp_path, script.url, period_s=0.4) as scraper:
        asked = scraper.process
        assert asked.stdin is not None and asked.stdout is not None
        for value in (5, 6):
            script.body = b"running %d\n" % value
            asked.stdin.write(b"\n")
            asked.stdin.flush()
            assert asked.stdout.readline() == b"taken\n"
            assert scraper.lines()[-1]["metrics"] == {"running": float(value)}
        rows = scraper.wait_for(lambda lines: len(lines) >= 6)
    beats = [(row["at_ns"] - rows[0]["at_ns"]) / 0.4e9 for row in rows if row["metrics"] != {"running": 5.0}]
    assert {round(beat) for beat in beats if abs(beat - round(beat)) < 0.2} >= {0, 1, 2}


def test_gpus_that_are_not_there_are_said_in_the_header(tmp_path: Path, script: Script) -> None:
    with Scraper(tmp_path, script.url, code=FAKE_NVML, gpus=[0, 9]) as scraper:
        header, *rows = scraper.end()
    assert header["error"] == "the GPUs cannot be sampled: there is no GPU 9 here" and header["gpus"] == []
    assert rows[-1]["metrics"] == {"running": 3.0} and rows[-1]["error"] is None


@pytest.mark.parametrize("gpus", [None, [0]])
def test_a_server_without_metrics(tmp_path: Path, script: Script, gpus: list[int] | None) -> None:
    script.status = 404
    with Scraper(tmp_path, script.url, code=FAKE_NVML, gpus=gpus) as scraper:
        assert scraper.said == "ready"
        header, *rows = scraper.end()
    assert header["error"] == "the server has no metrics: GET /metrics answers 404" and header["series"] == []
    assert len(script.seen) == 1  # not asked again
    assert (len(rows) > 0) == (gpus is not None)
    assert all(row["error"] is None and row["metrics"] == {} and row["gpus"] for row in rows)


def test_a_server_that_dies_and_one_that_comes_to_itself(tmp_path: Path, script: Script) -> None:
    script.status = 503
    with Scraper(tmp_path, script.url, period_s=0.3) as scraper:
        assert scraper.lines()[1]["error"] == "GET /metrics answers 503"
        script.status, script.body = 200, b"<html>"
        scraper.wait_for(
            lambda lines: lines[-1]["error"] == "the answer to GET /metrics is not Prometheus' text format"
        )
        script.body = b"running 4\n"
        scraper.wait_for(lambda lines: lines[-1]["metrics"] == {"running": 4.0})
        script.stop()
        scraper.wait_for(lambda lines: "no connection" in (lines[-1]["error"] or ""))
        header, *rows = scraper.end()
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
        with Scraper(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}", period_s=0.2) as scraper:
            rows = scraper.end()[1:]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert {row["error"] for row in rows} == {"GET /metrics was not answered within 0.16 s"}


def test_a_killed_process_leaves_its_samples(tmp_path: Path, script: Script) -> None:
    with Scraper(tmp_path, script.url) as scraper:
        scraper.process.kill()
        scraper.process.wait()
        assert scraper.lines()[1]["metrics"] == {"running": 3.0}
    view = read(tmp_path, RUN, time.monotonic_ns(), time.monotonic_ns())
    assert view is not None and view.server is not None
    assert (view.server.running_max, view.server.samples, view.server.covered) == (3, 1, False)


def test_what_it_cannot_do_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "server.jsonl").write_text("kept")
    with Scraper(tmp_path) as scraper:
        assert scraper.said == "server.jsonl cannot be written: File exists"
        scraper.process.communicate(timeout=20)
    assert (tmp_path / "server.jsonl").read_text() == "kept"
    with Scraper(tmp_path, series=7) as scraper:
        assert scraper.said == "the sampling process was given orders that it cannot read"


# --- sampling ---


def watch(directory: Path, url: str, inside: Callable[[], None] = lambda: None, **changes: Any) -> None:
    values: dict[str, Any] = {"token": None, "series": {"running": "running"}, "gpus": None, **changes}

    async def run() -> None:
        async with sampling() as watch:
            await watch.begin(url, run_id=RUN, directory=directory, **values)
            await asyncio.to_thread(inside)

    asyncio.run(run())


def test_the_token_is_sent_and_is_nowhere_else(tmp_path: Path, script: Script) -> None:
    argvs: list[bytes] = []

    def inside() -> None:
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                argvs.append(process.read_bytes())

    watch(tmp_path, script.url + "/v1/", inside, token=TOKEN)
    assert {request["authorization"] for request in script.seen} == {f"Bearer {TOKEN}"}
    assert {request["path"] for request in script.seen} == {"/metrics"}
    assert any(b"loadgen.monitor.sampler" in argv for argv in argvs)
    assert not any(TOKEN.encode() in argv for argv in argvs)
    assert [path.name for path in tmp_path.iterdir()] == ["server.jsonl"]
    assert TOKEN not in (tmp_path / "server.jsonl").read_text()
    assert TOKEN not in repr(sampler.Orders(url="u", token=TOKEN, series={}, run_id="r", path="p"))


def test_a_token_that_no_header_can_carry_stays_hidden_too(tmp_path: Path, script: Script) -> None:
    watch(tmp_path, script.url, token=TOKEN + "\n")
    text = (tmp_path / "server.jsonl").read_text()
    assert TOKEN not in text and "GET /metrics failed: LocalProtocolError" in text


def test_nothing_to_watch_leaves_no_file(tmp_path: Path) -> None:
    watch(tmp_path, "http://127.0.0.1:9", series={})
    watch(tmp_path, "http://127.0.0.1:9", series={}, gpus=[])
    assert list(tmp_path.iterdir()) == []


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
            patch.setattr(sampler, "START_TIMEOUT_S", 0.3)
            watch(tmp_path / name, script.url, lambda: entered.append(1))
        view = read(tmp_path / name, RUN, 0, 0)
        assert view is not None and view.server is not None
        assert view.server.problem == f"the sampling process {problem}"
    assert len(entered) == 3


def test_an_error_inside_comes_through_and_the_process_ends(tmp_path: Path, script: Script) -> None:
    def fail() -> None:
        raise RuntimeError("of the run")

    with pytest.raises(RuntimeError, match="of the run"):
        watch(tmp_path, script.url, fail)
    assert len((tmp_path / "server.jsonl").read_text().splitlines()) >= 3  # it took its last sample


def test_it_does_not_outlive_a_killed_parent(tmp_path: Path, script: Script) -> None:
    parent = f"""
import asyncio, os, signal
from pathlib import Path
from loadgen.monitor.sampler import sampling
start = asyncio.create_subprocess_exec
async def telling(*argv, **options):
    process = await start(*argv, **options)
    print(process.pid, flush=True)
    return process
asyncio.create_subprocess_exec = telling
async def run():
    async with sampling() as watch:
        await watch.begin({script.url!r}, None, {{"running": "running"}}, "r", Path({str(tmp_path)!r}), None)
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
        ("vllm", set()),
        ("lightllm", {"paused", "kv_reserved_tokens"}),
        ("tgi", {"kv_reserved_tokens"}),
    ],
)
def test_every_dialect_of_the_embedded_server(tmp_path: Path, dialect: str, absent: set[str]) -> None:
    """Names agree with the backend's, and counts with what was sent."""
    series = backends.get(dialect).server_metrics
    path, body = {
        "vllm": ("/v1/completions", {"prompt": [0] * 5, "max_tokens": 4}),
        "lightllm": ("/generate", {"inputs": [0] * 5, "parameters": {"max_new_tokens": 4}}),
        "tgi": ("/generate", {"inputs": "a b c d e", "parameters": {"max_new_tokens": 4}}),
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

        watch(tmp_path, f"http://127.0.0.1:{server.port}", inside, series=series, token=TOKEN)
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
    assert (seen.itl_mean_ms is None) == (dialect != "vllm")
    assert seen.prefix_cache_hits == (None if dialect == "tgi" else 0)  # TGI cannot tell
    assert seen.prefix_cache_queries == (None if dialect == "tgi" else 15)
    assert seen.preemptions == (0 if dialect == "vllm" else None)


def test_lightllms_own_names() -> None:
    """Its cache tells of hits in a histogram of tokens; versions before 1.2 count tokens in histograms alone."""
    text = """# TYPE lightllm_cache_length histogram
lightllm_cache_length_bucket{le="+Inf"} 2.0
lightllm_cache_length_count 2.0
lightllm_cache_length_sum 300.0
lightllm_request_input_length_sum 1024.0
lightllm_request_generated_tokens_sum 64.0
lightllm_batch_current_size 2.0
lightllm_batch_pause_size 1.0
lightllm_batch_current_max_tokens 1088.0
"""
    known = {
        "prefix_cache_hits": 300.0, "prefix_cache_queries": 1024.0, "prompt_tokens": 1024.0, "generation_tokens": 64.0,
        "running": 2.0, "paused": 1.0, "kv_reserved_tokens": 1088.0,
    }  # fmt: skip
    series = Series(backends.get("lightllm").server_metrics)
    assert series.pick(text) == known
    newer = text + "lightllm_prompt_tokens_total 512.0\nlightllm_num_running_reqs 2.0\n"
    assert series.pick(newer) == {**known, "prompt_tokens": 512.0}


# --- reading, with known answers ---


def write(directory: Path, samples: list[Sample], **header: Any) -> None:
    values: dict[str, Any] = {"run_id": RUN, "series": ["running"], "gpus": [], **header}
    lines = [msgspec.json.encode(Header(**values)), *map(msgspec.json.encode, samples)]
    (directory / "server.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def at(at_s: float, took_ms: float = 5.0, error: str | None = None, gpus: Any = (), **metrics: float) -> Sample:
    return Sample(at_ns=round(at_s * SECONDS), took_ms=took_ms, metrics=metrics, error=error, gpus=list(gpus))


def seen(directory: Path, t0_s: float = 10.0, end_s: float = 12.5) -> Server:
    view = read(directory, RUN, round(t0_s * SECONDS), round(end_s * SECONDS))
    assert view is not None and view.server is not None
    return view.server


def test_known_samples(tmp_path: Path) -> None:
    reserved = {"paused": 2, "kv_reserved_tokens": 900}
    counters = {"prefix_cache_queries": 0.0, "preemptions": 1.0, "ttft_seconds_sum": 7.0, "ttft_seconds_count": 70.0}
    grown = {"prefix_cache_queries": 512.0, "preemptions": 4.0, "ttft_seconds_sum": 9.0, "ttft_seconds_count": 75.0}
    grown["prefix_cache_hits"] = 16.0
    write(
        tmp_path,
        [
            at(8.6, running=99, prompt_tokens=0),  # long before
            at(9.6, running=1, waiting=0, kv_cache_usage_ratio=0.1, prompt_tokens=100, **counters),
            at(10.6, running=8, waiting=3, kv_cache_usage_ratio=0.9, prompt_tokens=300, **reserved, **counters),
            at(11.6, running=5, waiting=9, kv_cache_usage_ratio=0.4, prompt_tokens=400, **counters),
            at(12.6, running=0, waiting=0, kv_cache_usage_ratio=0.0, prompt_tokens=612, generation_tokens=40, **grown),
            at(13.6, running=50, prompt_tokens=10_000),  # long after
        ],
    )  # fmt: skip
    assert seen(tmp_path) == Server(
        samples=4,
        covered=True,
        running_max=8,
        waiting_max=9,
        paused_max=2,
        kv_cache_usage_max_ratio=0.9,
        kv_reserved_max_tokens=900,
        preemptions=3,
        prefix_cache_hits=16,  # not shown before: it had counted nothing
        prefix_cache_queries=512,
        prompt_tokens=512,
        generation_tokens=40,
        ttft_mean_ms=400.0,
    )


def test_a_sample_counts_as_before_when_it_was_there_before(tmp_path: Path) -> None:
    """The server may have answered at any time while it was asked."""
    late = at(9.9, took_ms=200, prompt_tokens=2), at(12.4, took_ms=200, prompt_tokens=3)
    write(tmp_path, [at(8.5, prompt_tokens=1), *late, at(13.0, prompt_tokens=4)])
    assert (seen(tmp_path).prompt_tokens, seen(tmp_path).samples) == (3, 4)


def test_counts_go_from_good_sample_to_good_sample(tmp_path: Path) -> None:
    rows = [
        at(8, prompt_tokens=5),
        at(9, error="busy"),
        at(10.5, prompt_tokens=7),
        at(11, error="gone"),
        at(12, error="busy"),
    ]
    write(tmp_path, [*rows, at(13, error="busy"), at(14, prompt_tokens=25)])
    found = seen(tmp_path)
    assert (found.prompt_tokens, found.samples, found.failed, found.failure) == (20, 7, 4, "busy")
    assert found.covered and found.problem is None
    write(tmp_path, rows)  # it died
    found = seen(tmp_path)
    assert (found.prompt_tokens, found.samples, found.failed, found.covered) == (2, 5, 3, False)
    write(tmp_path, [at(10.5, prompt_tokens=7), at(13, prompt_tokens=8)])  # it began late
    assert (seen(tmp_path).prompt_tokens, seen(tmp_path).covered) == (1, False)


def test_a_server_that_began_anew_gives_no_counts(tmp_path: Path) -> None:
    write(tmp_path, [at(9, running=1, prompt_tokens=5), at(11, running=4, prompt_tokens=1), at(13, prompt_tokens=50)])
    assert (seen(tmp_path).prompt_tokens, seen(tmp_path).running_max) == (None, 4)


def test_a_mean_of_nothing_is_nothing(tmp_path: Path) -> None:
    write(tmp_path, [at(9, itl_seconds_sum=1.0, itl_seconds_count=3), at(13, itl_seconds_sum=1.0, itl_seconds_count=3)])
    assert seen(tmp_path).itl_mean_ms is None


def test_metrics_that_hold_nothing_of_ours(tmp_path: Path) -> None:
    write(tmp_path, [at(9), at(13)])
    assert seen(tmp_path).problem == "GET /metrics shows none of the series that this kind of server has"


def test_no_file_and_files_that_are_damaged(tmp_path: Path) -> None:
    assert read(tmp_path, RUN, 0, 0) is None
    path = tmp_path / "server.jsonl"
    write(tmp_path, [at(9, prompt_tokens=5), at(13, prompt_tokens=9)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])  # killed while it wrote
    assert (seen(tmp_path).samples, seen(tmp_path).covered, seen(tmp_path).problem) == (1, False, None)
    lines = whole.splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + b'{"at_ns": "\xff"}\n' + lines[2])
    assert (seen(tmp_path).samples, seen(tmp_path).problem) == (1, "server.jsonl line 3 is not a sample")
    for text, problem in (
        (b"", "server.jsonl does not begin with a loadgen.server/1 header"),
        (b"\xff\n", "server.jsonl does not begin with a loadgen.server/1 header"),
        (whole.replace(b"server/1", b"server/2"), "server.jsonl has another schema than loadgen.server/1"),
        (whole.replace(RUN.encode(), b"other"), "server.jsonl is of another run"),
    ):
        path.write_bytes(text)
        assert seen(tmp_path) == Server(problem=problem)
    path.unlink()
    path.mkdir()
    assert seen(tmp_path) == Server(problem="server.jsonl cannot be read: Is a directory")


def test_gpus_alone_say_nothing_of_the_server(tmp_path: Path) -> None:
    write(tmp_path, [at(9, gpus=[gpu(0)]), at(13, gpus=[gpu(0)])], series=[], gpus=["H"])
    view = read(tmp_path, RUN, 10 * SECONDS, 12 * SECONDS)
    assert view is not None and view.server is None and view.gpus is not None
    write(tmp_path, [], series=[])
    assert read(tmp_path, RUN, 0, 0) == ServerView()


def gpu(index: int, used: float | None = 1, w: float | None = 100, mj: int | None = None) -> GpuSample:
    used_bytes = None if used is None else round(used * GIB)
    return GpuSample(index=index, memory_used_bytes=used_bytes, power_w=w, utilization_ratio=None, energy_mj=mj)


def gpus_of(directory: Path, *samples: Sample) -> dict[str, Any]:
    write(directory, list(samples), series=[], gpus=["H200", "B200"])
    view = read(directory, RUN, 10 * SECONDS, 12 * SECONDS)
    assert view is not None and view.gpus is not None
    built: dict[str, Any] = msgspec.to_builtins(view.gpus)
    return built


def test_known_gpus(tmp_path: Path) -> None:
    rows = [
        at(9, gpus=[gpu(3, 10, 100, 5_000), gpu(1, 40, 300, 70_000)]),
        at(11, gpus=[gpu(3, 30, 200, 305_000), gpu(1, 20, 300, 670_000)]),
        at(12, gpus=[gpu(3, 20, 400, 605_000), gpu(1, 31, 300, 970_000)]),
        at(20, gpus=[gpu(3, 99, 999, 999_000), gpu(1, 99, 999, 999_000)]),  # after the run
    ]
    assert gpus_of(tmp_path, *rows) == {
        "each": [
            {"index": 3, "name": "H200", "memory_peak_bytes": 30 * GIB},
            {"index": 1, "name": "B200", "memory_peak_bytes": 40 * GIB},
        ],
        "memory_peak_bytes": 51 * GIB,  # at once, not the sum of the peaks
        "power_mean_w": 250 + 300,  # from 10 to 12 s
        "energy_j": (600 - 100) + (900 - 300),  # what was used from 9 to 10 s is none of the run's
        "energy_from": "counter",
    }


def test_energy_without_counters_is_the_area_under_the_power(tmp_path: Path) -> None:
    rows = [at(9, gpus=[gpu(0, w=100, mj=1), gpu(1, w=50)]), at(11, gpus=[gpu(0, w=200, mj=2), gpu(1, w=50)]),
            at(12, gpus=[gpu(0, w=400, mj=3), gpu(1, w=50)])]  # fmt: skip
    found = gpus_of(tmp_path, *rows)  # one of the two has no counter
    assert (found["energy_j"], found["energy_from"]) == (200 + 300 + 100, "power")
    rows[0].gpus[1] = gpu(1, w=50, mj=9)  # a counter that fell: the driver was loaded anew
    rows[2].gpus[1] = gpu(1, w=50, mj=2)
    assert gpus_of(tmp_path, *rows)["energy_from"] == "power"


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("first_s", [9.05, 9.4, 9.75])
def test_energy_is_of_the_load_alone(tmp_path: Path, first_s: float, counted: bool) -> None:
    """A second of load at 700 W between idling at 60 W, sampled once a second, wherever the samples fall."""

    def row(at_s: float) -> Sample:
        busy_s = min(max(at_s - 10, 0), 1)
        idle_s = at_s - 9 - busy_s
        watts = 700 if 10 <= at_s <= 11 else 60
        return at(at_s, gpus=[gpu(0, 1, watts, round(1000 * (700 * busy_s + 60 * idle_s)) if counted else None)])

    write(tmp_path, [row(first_s + second) for second in range(4)], series=[], gpus=["H200"])
    view = read(tmp_path, RUN, 10 * SECONDS, 11 * SECONDS)
    assert view is not None and view.gpus is not None
    assert view.gpus.energy_j == pytest.approx(700) and view.gpus.power_mean_w == pytest.approx(700)
    assert view.gpus.energy_from == ("counter" if counted else "power")


def test_energy_of_a_run_between_two_samples(tmp_path: Path) -> None:
    """The counter knows what the power samples missed."""
    write(tmp_path, [at(9.8, gpus=[gpu(0, 1, 60, 0)]), at(10.8, gpus=[gpu(0, 1, 60, 380_000)])], series=[], gpus=["H"])
    view = read(tmp_path, RUN, 10 * SECONDS, round(10.5 * SECONDS))
    assert view is not None and view.gpus is not None
    assert view.gpus.energy_j == pytest.approx(380 - 60 * 0.5)


def test_mean_power_is_the_counted_energy_over_its_time(tmp_path: Path) -> None:
    """Power samples are means of a second, or of a moment; and where they end before the run, so does the counting."""
    spent = gpus_of(tmp_path, at(10, gpus=[gpu(0, 1, 60, 0)]), at(11, gpus=[gpu(0, 1, 700, 300_000)]),
                    at(12, gpus=[gpu(0, 1, 60, 800_000)]))  # fmt: skip
    assert (spent["energy_j"], spent["power_mean_w"]) == (800, 400)
    part = gpus_of(tmp_path, at(10, gpus=[gpu(0, 1, 600, 0)]), at(11, gpus=[gpu(0, 1, 600, 600_000)]))
    assert (part["energy_j"], part["power_mean_w"]) == (600, 600)
    blind = gpus_of(tmp_path, at(9, gpus=[gpu(0, 1, None, 0)]), at(13, gpus=[gpu(0, 1, None, 2_000_000)]))
    assert (blind["energy_j"], blind["power_mean_w"]) == (2000, 500)


def test_what_gpus_do_not_tell_is_none(tmp_path: Path) -> None:
    found = gpus_of(tmp_path, at(9, gpus=[gpu(0, None, None)]), at(13, gpus=[gpu(0, None, None)]))
    assert found == {
        "each": [{"index": 0, "name": "H200", "memory_peak_bytes": None}],
        "memory_peak_bytes": None, "power_mean_w": None, "energy_j": None, "energy_from": None,
    }  # fmt: skip
    lost = gpus_of(tmp_path, at(9, gpus=[gpu(0), gpu(1)]), at(11, gpus=[gpu(0), gpu(1)]),
                   at(13, gpus=[gpu(0), gpu(1, None, None)]))  # fmt: skip
    assert lost["energy_j"] is None and lost["memory_peak_bytes"] == 2 * GIB
    assert gpus_of(tmp_path, at(9, gpus=[gpu(0, 1, 70)]))["power_mean_w"] == 70


def test_the_process_is_light() -> None:
    """It shares the machine with the client: neither the engine nor numpy is in it."""
    heavy = {"numpy", "loadgen.client.engine", "httptools", "aiohttp", "pynvml"}
    code = f"import sys, loadgen.monitor.sampler; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
