"""The embedded server's own timetable: what it says is true, and how late it was."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import backends
from loadgen import cli, rundir
from loadgen.probe import identify
from loadgen.report import build, text
from loadgen.target import Target, get
from servers.app import DIALECTS
from servers.serve.lateness import Lateness
from servers.serve.wire import DialectSettings


def test_quantiles_are_of_the_tokens() -> None:
    late = Lateness()
    for milliseconds in range(1, 101):
        late.count(milliseconds * 1_000_000 - 1)
    table = late.timetable((200.0, 40.0, 0.1))
    assert (table.ttft_ms, table.tpot_ms, table.jitter_ratio, table.tokens) == (200, 40, 0.1, 100)
    assert (table.late_p50_ms, table.late_p99_ms) == pytest.approx((50, 99))
    assert table.late_max_ms == pytest.approx(100)


def test_without_tokens_nothing_is_late() -> None:
    table = Lateness().timetable(None)
    assert (table.ttft_ms, table.tokens, table.late_p50_ms, table.late_max_ms) == (None, 0, None, None)


@pytest.mark.processes
def test_a_run_says_what_was_true_beside_what_it_measured(tmp_path: Path) -> None:
    words = f"--requests 20 --output-tokens 8 --no-calibrate --out {tmp_path}/run"
    assert cli.invoke(["run", *words.split()]) in (0, 4)
    table = rundir.read_manifest(tmp_path / "run").timetable
    assert table is not None and (table.ttft_ms, table.tpot_ms) == (200, 40)
    assert table.tokens == (20 + 8) * 8  # with the warm-up of eight requests
    assert table.late_p50_ms is not None and table.late_p99_ms is not None and table.late_p50_ms <= table.late_p99_ms
    report, _ = build.from_directory(tmp_path / "run")
    assert report.metrics["ttft_ms"].min is not None and report.metrics["ttft_ms"].min >= 200 * (1 - table.jitter_ratio)
    assert "Known truth: ttft 200.0 ms" in text.render(report)


@pytest.mark.parametrize(("name", "path"), [("vllm", "/v1/models"), ("openai", "/v1/models"), ("tgi", "/info")])
def test_behind_a_proxy_without_the_header_it_is_still_emulated(name: str, path: str) -> None:
    page = DIALECTS[name](DialectSettings("m", 4096, False)).pages[path]()

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == path else 404)
            self.send_header("Content-Length", str(len(page.body)))
            self.end_headers()
            self.wfile.write(page.body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        target = Target(f"http://127.0.0.1:{proxy.server_port}")
        assert "emulated" not in get(target, path)[1].get("server", "")
        assert identify(backends.get(name), target, named=True).emulated
        proxy.shutdown()
