"""The exporter: what Prometheus' own parsers read from it, what ages out, what is broken."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from loadgen.monitor import exporter
from loadgen.monitor.exporter import KEEP_S, STALE_S, Exporter, serve
from loadgen.rundir import Histogram, MetricFamily, MetricSample, RunError, Snapshot, write_snapshot

OPEN_METRICS = "application/openmetrics-text;version=1.0.0"
HOSTILE = 'a"b\\c\nd{e}'


def snapshot(run_id: str, **more: object) -> Snapshot:
    histogram = Histogram([0.1, 0.2], [1, 2, 3], 1.5, {}, {0: ("7", 0.05)})
    families = [
        MetricFamily(
            "llm_dissect_requests",
            "counter",
            "Requests.",
            [MetricSample(5, {"outcome": "ok"}), MetricSample(1, {"outcome": "timeout"})],
        ),
        MetricFamily("llm_dissect_requests_in_flight", "gauge", "In flight.", [MetricSample(3)]),
        MetricFamily("llm_dissect_time_to_first_token_seconds", "histogram", "TTFT.", histograms=[histogram]),
    ]
    usual: dict[str, object] = {
        "run_id": run_id, "program": "loadgen", "state": "running", "labels": {"model": HOSTILE}, "families": families
    }  # fmt: skip
    return Snapshot(**{**usual, **more})  # type: ignore[arg-type]


def put(runs: Path, name: str, **more: object) -> Path:
    (runs / name).mkdir(exist_ok=True)
    write_snapshot(runs / name, snapshot(name, **more))
    return runs / name / "snapshot.json"


def page(
    runs: Path, now: float | None = None, keep_s: float = KEEP_S
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of the page, as Prometheus' parser reads it: (name, labels) -> value."""
    clock = time.time if now is None else lambda: now
    text = Exporter(runs, keep_s, clock).page()[0].decode()
    samples = {}
    for family in parse_text(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples
            samples[key] = sample.value
    return samples


def one(samples: dict[tuple[str, tuple[tuple[str, str], ...]], float], name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_both_formats_are_read_by_prometheus_own_parsers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        put(tmp_path, name)
    samples = page(tmp_path)
    assert one(samples, "llm_dissect_requests_total", run_id="a", outcome="ok") == 5
    assert one(samples, "llm_dissect_time_to_first_token_seconds_bucket", run_id="b", le="0.2") == 3
    assert one(samples, "llm_dissect_time_to_first_token_seconds_bucket", run_id="b", le="+Inf") == 6
    assert one(samples, "llm_dissect_time_to_first_token_seconds_count", run_id="b") == 6
    assert one(samples, "llm_dissect_run_info", run_id="a", program="loadgen", model=HOSTILE) == 1
    assert one(samples, "llm_dissect_run_state", run_id="a", program="loadgen", state="running") == 1
    assert one(samples, "llm_dissect_exporter_runs") == 2
    families = list(parse_open_metrics(Exporter(tmp_path).page(OPEN_METRICS)[0].decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))  # a family stands once, with the samples of all runs
    ttft = next(family for family in families if family.name == "llm_dissect_time_to_first_token_seconds")
    exemplars = [sample.exemplar for sample in ttft.samples if sample.exemplar]
    assert [exemplar.labels for exemplar in exemplars] == [{"request_id": "7"}] * 2


def test_a_changed_snapshot_is_read_again(tmp_path: Path) -> None:
    shown = Exporter(tmp_path)
    path = put(tmp_path, "a")
    assert b"llm_dissect_requests_in_flight" in shown.page()[0]
    put(tmp_path, "a", families=[], state="finished")
    os.utime(path, ns=(1, time.time_ns() + 5_000_000))
    text = shown.page()[0]
    assert b"llm_dissect_requests_in_flight" not in text and b'state="finished"' in text


def test_broken_snapshots_are_left_out_and_counted_while_they_are_there(tmp_path: Path) -> None:
    put(tmp_path, "good")
    shown = Exporter(tmp_path)
    broken = {
        "cut": b'{"schema": "llm_dissect.snapsh', "empty": b"", "other": b'{"a": 1}', "bytes": b"\xff\xfe",
        "schema": json.dumps({"schema": "x/9", "run_id": "q", "program": "p", "state": "running"}).encode(),
        "deep": b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "exemplar": msgspec.json.encode(snapshot("exemplar")).replace(b'["7",', b'["' + b"7" * 119 + b'",'),
        "surrogate": msgspec.json.encode(snapshot("surrogate")).replace(b'"TTFT."', b'"\\ud800"'),
        "huge": msgspec.json.encode(snapshot("huge")).replace(b'"counts":[1,', b'"counts":[1' + b"0" * 400 + b","),
    }  # fmt: skip
    for name, content in broken.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "snapshot.json").write_bytes(content)
    for accept in ("", OPEN_METRICS, "text/plain"):
        text = shown.page(accept)[0].decode()
        assert "llm_dissect_exporter_broken_snapshots 9.0" in text and "llm_dissect_exporter_runs 1.0" in text
    assert 'run_id="good"' in text
    put(tmp_path, "cut")
    (tmp_path / "empty" / "snapshot.json").unlink()
    text = shown.page()[0].decode()
    assert "llm_dissect_exporter_broken_snapshots 7.0" in text and 'run_id="cut"' in text


def test_what_lies_about_in_the_directory_hides_no_run(tmp_path: Path) -> None:
    put(tmp_path, "a")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "note.txt").write_text("x")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "snapshot.json")
    samples = page(tmp_path)
    assert one(samples, "llm_dissect_exporter_runs") == 1 and one(samples, "llm_dissect_exporter_broken_snapshots") == 0


def test_a_run_that_is_there_twice_is_shown_once_as_written_last(tmp_path: Path) -> None:
    put(tmp_path, "a")
    (tmp_path / "latest").symlink_to("a")
    (tmp_path / "copy").mkdir()
    write_snapshot(tmp_path / "copy", snapshot("a", state="finished"))
    os.utime(tmp_path / "copy" / "snapshot.json", ns=(1, time.time_ns() + 5_000_000))
    samples = page(tmp_path)  # it asserts that no series is there twice
    assert one(samples, "llm_dissect_exporter_runs") == 1
    assert one(samples, "llm_dissect_run_state", run_id="a", program="loadgen", state="finished") == 1


def test_snapshots_of_another_version_share_their_families(tmp_path: Path) -> None:
    for name, kind, help_text in (
        ("a", "gauge", "Old words."),
        ("b", "gauge", "New words."),
        ("c", "counter", "Other."),
    ):
        put(tmp_path, name, families=[MetricFamily("llm_dissect_x", kind, help_text, [MetricSample(1)])])  # type: ignore[arg-type]
    families = list(parse_open_metrics(Exporter(tmp_path).page(OPEN_METRICS)[0].decode()))
    (shared,) = (family for family in families if family.name == "llm_dissect_x")
    assert len(shared.samples) == (2 if shared.type == "gauge" else 1)


def test_runs_age_and_stale_ones_say_so(tmp_path: Path) -> None:
    running, finished = put(tmp_path, "running"), put(tmp_path, "finished", state="finished")
    now = running.stat().st_mtime
    later = page(tmp_path, now + STALE_S + 1)
    assert one(later, "llm_dissect_run_state", run_id="running", program="loadgen", state="stale") == 1
    assert one(later, "llm_dissect_run_state", run_id="finished", program="loadgen", state="finished") == 1
    assert one(page(tmp_path, now + 101, keep_s=100), "llm_dissect_exporter_runs") == 0
    assert finished.exists()


def test_a_run_is_in_one_of_all_states(tmp_path: Path) -> None:
    put(tmp_path, "a", state="stopped")
    states = {each: {"run_id": "a", "program": "loadgen", "state": each} for each in exporter.STATES}
    samples = page(tmp_path)
    found = {each: one(samples, "llm_dissect_run_state", **labels) for each, labels in states.items()}
    assert found == {"running": 0, "finished": 0, "stopped": 1, "stale": 0}
    old = [labels for (name, labels) in samples if name == "bench_run_state"]
    assert old == [tuple(sorted(states["stopped"].items()))]  # as it was: the present one alone


def test_old_names_say_that_they_go_and_old_snapshots_have_the_new_ones(tmp_path: Path) -> None:
    new = [MetricFamily("llm_dissect_training_steps", "counter", "Steps.", [MetricSample(8)])]
    put(tmp_path, "new", families=[*snapshot("new").families, *new])
    was = [
        msgspec.structs.replace(each, name=each.name.replace("llm_dissect_", "bench_"))
        for each in snapshot("x").families
    ]
    put(tmp_path, "old", families=was)
    samples = page(tmp_path)
    for name in ("requests_total", "time_to_first_token_seconds_count", "run_info", "exporter_runs"):
        by_prefix = [
            {labels: value for (each, labels), value in samples.items() if each == f"{prefix}{name}"}
            for prefix in ("llm_dissect_", "bench_")
        ]
        assert by_prefix[0] and by_prefix[0] == by_prefix[1]
    assert "bench_training_steps_total" not in {name for name, _ in samples}
    text = Exporter(tmp_path).page()[0].decode()
    helps = [line for line in text.splitlines() if line.startswith("# HELP bench_")]
    assert helps and all(" Deprecated, gone in the next version: llm_dissect_" in line for line in helps)


def test_a_run_directory_itself_and_none_at_all(tmp_path: Path) -> None:
    put(tmp_path, "a")
    assert one(page(tmp_path / "a"), "llm_dissect_exporter_runs") == 1
    assert one(page(tmp_path / "nowhere"), "llm_dissect_exporter_runs") == 0


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    put(tmp_path, "a")
    server = serve(Exporter(tmp_path), "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain; version=0.0.4"),
        ("text/plain", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.3", "application/openmetrics-text; version=1.0.0"),
    ],
)
def test_the_format_is_negotiated(url: str, accept: str, kind: str) -> None:
    request = urllib.request.Request(f"{url}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request) as answer:
        body = answer.read().decode()
        assert answer.headers["Content-Type"].startswith(kind)
    assert body.endswith("# EOF\n") == kind.startswith("application")


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("POST", 405), ("DELETE", 405)])
def test_it_is_only_read(url: str, method: str, status: int) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    connection.request(method, "/metrics")
    assert connection.getresponse().status == status
    connection.close()


def test_a_client_that_hangs_up_is_no_news(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"GET /met")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for _ in range(2):
        urllib.request.urlopen(f"{url}/metrics").close()
    assert capfd.readouterr().err == ""


def test_other_paths_are_not_found(url: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url}/etc/passwd")
    assert refused.value.code == 404


def test_a_taken_port_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RunError, match=r"cannot listen on 127\.0\.0\.1:"):
            serve(Exporter(Path()), "127.0.0.1", taken.getsockname()[1])
    with pytest.raises(RunError, match=r"cannot listen on .*0-65535; name"):
        serve(Exporter(Path()), "127.0.0.1", 99999)


@pytest.mark.parametrize(
    "arguments",
    [("--runs", "nowhere"), ("--port", "99999"), ("--keep-days", "0"), ("--host", "::g")],
)
def test_export_refuses_what_makes_no_sense(tmp_path: Path, arguments: tuple[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from loadgen.cli import main; main()", "export", "--runs", str(tmp_path), *arguments],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(exporter.__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr


def ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]"])
def test_export_says_where_it_listens(host: str, tmp_path: Path) -> None:
    if host != "127.0.0.1" and not ipv6():
        pytest.skip("this machine has no IPv6")
    put(tmp_path, "a")
    words = [sys.executable, "-c", "from loadgen.cli import main; main()", "export", "--runs", tmp_path, "--port", "0"]
    words += ["--host", host]
    env = {**os.environ, "PYTHONPATH": str(Path(exporter.__file__).parents[2])}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        assert url.startswith("http://[::1]:" if "::1" in host else "http://127.0.0.1:")
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert b'run_id="a"' in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0 and process.stderr.read() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_export_ends_in_good_order(number: signal.Signals, tmp_path: Path) -> None:
    """Also while somebody who says nothing is connected."""
    words = [sys.executable, "-c", "from loadgen.cli import main; main()", "export", "--runs", tmp_path, "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(Path(exporter.__file__).parents[2])}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        port = int(process.stderr.readline().split()[-1].removesuffix("/metrics").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 10):
            process.send_signal(number)
            assert (process.communicate(timeout=10), process.returncode) == (("", ""), 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 10)


HOSTILE_FAMILIES = {
    "a reserved label": MetricFamily("llm_dissect_x", "gauge", "X.", [MetricSample(1, {"__name__": "llm_dissect_y"})]),
    "no label": MetricFamily("llm_dissect_x", "gauge", "X.", [MetricSample(1, {"a b": "c"})]),
    "an empty label": MetricFamily("llm_dissect_x", "gauge", "X.", [MetricSample(1, {"": "c"})]),
    "another run's": MetricFamily("llm_dissect_x", "gauge", "X.", [MetricSample(1, {"run_id": "good"})]),
    "a bucket": MetricFamily("llm_dissect_x", "gauge", "X.", [MetricSample(1, {"le": "1"})]),
    "no name": MetricFamily("bench x\ny", "gauge", "X."),
    "another program's": MetricFamily("up", "gauge", "X.", [MetricSample(1)]),
    "our own": MetricFamily("llm_dissect_exporter_runs", "gauge", "X.", [MetricSample(1)]),
    "each run's": MetricFamily("llm_dissect_run_info", "gauge", "X.", [MetricSample(1)]),
    "a series twice": MetricFamily(
        "llm_dissect_x", "gauge", "X.", [MetricSample(1, {"a": "b"}), MetricSample(2, {"a": "b"})]
    ),
    "a counter's": MetricFamily("llm_dissect_requests_total", "gauge", "X.", [MetricSample(1)]),
    "a histogram's": MetricFamily("llm_dissect_time_to_first_token_seconds_count", "gauge", "X.", [MetricSample(1)]),
    "bounds that fall": MetricFamily(
        "llm_dissect_x", "histogram", "X.", histograms=[Histogram([2.0, 1.0], [1, 1, 1], 1.0)]
    ),
    "a counter's beginning": MetricFamily("llm_dissect_requests_created", "gauge", "X.", [MetricSample(1)]),
    "a count below zero": MetricFamily("llm_dissect_x", "counter", "X.", [MetricSample(-1.0)]),
    "counts below zero": MetricFamily("llm_dissect_x", "histogram", "X.", histograms=[Histogram([1.0], [-1, 1], 1.0)]),
}


@pytest.mark.parametrize("family", HOSTILE_FAMILIES.values(), ids=HOSTILE_FAMILIES.keys())
@pytest.mark.parametrize("accept", ["", OPEN_METRICS])
def test_no_snapshot_makes_the_page_unreadable(accept: str, family: MetricFamily, tmp_path: Path) -> None:
    put(tmp_path, "good")
    put(tmp_path, "bad", families=[family])
    os.utime(tmp_path / "bad" / "snapshot.json", ns=(1, time.time_ns() + 10**9))  # which comes last
    text = Exporter(tmp_path).page(accept)[0].decode()
    parsed = list((parse_open_metrics if accept else parse_text)(text))
    runs = {sample.labels.get("run_id") for metric in parsed for sample in metric.samples}
    assert "good" in runs and "bad" not in runs
    assert "llm_dissect_exporter_broken_snapshots 1.0" in text


def test_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    evil = "\x1b[31m\u202e\x00\r"
    family = MetricFamily("llm_dissect_x", "gauge", evil, [MetricSample(1, {"a": evil})])
    histogram = Histogram([1.0], [1, 1], 1.0, exemplars={0: (evil, 0.5)})
    families = [family, MetricFamily("llm_dissect_y", "histogram", evil, histograms=[histogram])]
    put(tmp_path, "r", labels={"model": evil}, families=families)
    for accept in ("", OPEN_METRICS):
        text = Exporter(tmp_path).page(accept)[0].decode()
        assert "llm_dissect_x" in text and text.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=x", "application/openmetrics-text;version=1.0.0;escaping=evil\x1b",
        "text/plain;version=99999999999999999999.x", "text/plain;version=", ";;;,,,", "\xff", "*/*;q=x", "a" * 60_000,
    ],
)  # fmt: skip
def test_odd_accept_headers(accept: str, tmp_path: Path) -> None:
    put(tmp_path, "a")
    text, content_type = Exporter(tmp_path).page(accept)
    assert b'run_id="a"' in text and content_type.isprintable()


def test_more_scrapes_than_it_can_answer_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that take for ever: no more threads than there may be, and the last is refused while they go on."""
    monkeypatch.setattr(exporter, "MOST_CONNECTIONS", 3)
    monkeypatch.setattr(exporter, "MOST_WAIT_S", 0.01)
    begun, free = threading.Event(), threading.Event()

    class Slow(Exporter):
        def page(self, accept: str = "") -> tuple[bytes, str]:
            begun.set()
            assert free.wait(60)
            return b"slow", "text/plain"

    def status() -> int:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().status
        finally:
            connection.close()

    with serve(Slow(tmp_path), "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answers: list[int] = []
        first = threading.Thread(target=lambda: answers.append(status()))
        first.start()
        assert begun.wait(30)
        assert status() == 503  # a page is being made
        silent = [socket.create_connection(("127.0.0.1", server.server_port), timeout=30) for _ in range(2)]
        while exporter_threads(server):
            time.sleep(0.01)
        with contextlib.suppress(ConnectionError):  # refused before it has said anything
            assert status() == 503
        for sock in silent:
            sock.close()
        free.set()
        first.join()
        assert answers == [200]
        server.shutdown()


def test_two_hundred_scrapes_a_second_are_answered_or_refused(tmp_path: Path) -> None:
    """All of them, whoever comes first: one page is made at a time, and who waits meanwhile shares the next."""
    put(tmp_path, "a")
    under_way, most, made, lock = [0], [0], [0], threading.Lock()

    class Counted(Exporter):
        def page(self, accept: str = "") -> tuple[bytes, str]:
            with lock:
                under_way[0] += 1
                made[0] += 1
                most[0] = max(most[0], under_way[0])
            try:
                time.sleep(0.02)
                return super().page(accept)
            finally:
                with lock:
                    under_way[0] -= 1

    answers: list[int] = []

    def scrape() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            reply = connection.getresponse()
            body = reply.read()
        assert b'run_id="a"' in body or reply.status == 503
        answers.append(reply.status)

    with serve(Counted(tmp_path), "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        threads = [threading.Thread(target=scrape) for _ in range(200)]
        for thread in threads:
            thread.start()
            time.sleep(0.005)
        for thread in threads:
            thread.join()
        server.shutdown()
    assert set(answers) <= {200, 503} and answers.count(200) >= 2
    assert most[0] == 1 and made[0] <= answers.count(200)


def test_a_scrape_shows_what_was_written_before_it(tmp_path: Path) -> None:
    """Also while others scrape all the time."""
    ended = threading.Event()

    def body() -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            reply = connection.getresponse()
            return reply.read() if reply.status == 200 else b""

    def others() -> None:
        while not ended.is_set():
            body()

    with serve(Exporter(tmp_path), "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        threads = [threading.Thread(target=others) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(20):
            put(tmp_path, f"run-{number}")
            shown = body()
            assert not shown or f'run_id="run-{number}"'.encode() in shown
        ended.set()
        for thread in threads:
            thread.join()
        server.shutdown()


def exporter_threads(server: Any) -> bool:
    """Whether a thread is free."""
    if not server.free_connections.acquire(blocking=False):
        return False
    server.free_connections.release()
    return True
