"""A backend that is one file of another distribution: found, listed and measured with as the built-in ones are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


class Ticking(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply(200 if self.path == "/who" else 404, b"ticking 3.2")

    def do_POST(self) -> None:
        ticks, _, _ = self.rfile.read(int(self.headers["Content-Length"])).partition(b" ")
        self._reply(200, b"tick\n" * int(ticks) + b"done\n")

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def loadgen(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(Path(__file__).parents[2])])}
    argv = [sys.executable, "-m", "loadgen", *words]
    return subprocess.run(argv, capture_output=True, text=True, cwd=installed, env=env, timeout=120)


def test_a_backend_is_one_file(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent / "made_up" / "ticking.py", tmp_path)
    declared = tmp_path / "ticking-1.dist-info"  # as an installer leaves it
    declared.mkdir()
    (declared / "METADATA").write_text("Metadata-Version: 2.1\nName: ticking\nVersion: 1\n")
    (declared / "entry_points.txt").write_text("[llm_dissect.backends]\nticking = ticking:BACKEND\n")
    assert "ticking" in loadgen(tmp_path, "backends").stdout
    with ThreadingHTTPServer(("127.0.0.1", 0), Ticking) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        run = loadgen(
            tmp_path, "run", "--backend", "ticking", "--url", url, "--requests", "6", "--input-tokens", "4",
            "--output-tokens", "5", "--no-calibrate", "--out", "run",
        )  # fmt: skip
        server.shutdown()
    assert run.returncode in (0, 4), run.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_bytes())
    assert (report["backend"], report["model"], report["server_version"]) == ("ticking", "a-clock", "3.2")
    assert report["requests"]["ok"] == 6 and report["requests"]["failed"] == 0
    tokens = [json.loads(line).get("output_tokens") for line in (tmp_path / "run" / "requests.jsonl").open()]
    assert [count for count in tokens if count is not None][-6:] == [5] * 6
