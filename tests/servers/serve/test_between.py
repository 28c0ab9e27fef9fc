"""Wires that bend times: what they are, which pieces they send, and what loadgen makes of runs over them."""

from __future__ import annotations

import json
import math
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from servers.serve import between
from tests.loadgen.screen import LOADGEN
from tests.servers.reader import Running, http_request, running

TOKENS = 12
COMPLETION = {"prompt": "a", "max_tokens": TOKENS, "stream": True}


def test_wires() -> None:
    assert between.read("clean") == between.CLEAN
    assert between.read("nagle") == between.Between(nagle=True)
    assert between.read("whole") == between.Between(lump_ms=math.inf)
    assert between.read("lumps:2.5") == between.Between(lump_ms=2.5)


@pytest.mark.parametrize(
    "text", ["", "Nagle", "lumps", "lumps:", "lumps:0", "lumps:-1", "lumps:nan", "lumps:inf", "whole:3"]
)
def test_what_is_no_wire(text: str) -> None:
    with pytest.raises(ValueError, match="is no wire; use clean, nagle"):
        between.read(text)


def pieces(server: Running) -> list[bytes]:
    """A streamed reply in the pieces in which it came."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(http_request("/v1/completions", COMPLETION))
        read: list[bytes] = []
        while not b"".join(read).endswith(b"0\r\n\r\n"):
            read.append(sock.recv(1 << 20))
            assert read[-1]
        return read


def test_a_whole_reply_comes_at_once(tmp_path: Path) -> None:
    with running(tmp_path, ttft_ms=5, itl_ms=3, wire="whole") as server:
        (reply,) = pieces(server)
        assert reply.startswith(b"HTTP/1.1 200") and reply.count(b'"text"') == TOKENS
        assert server.ask("GET", "/v1/models").status == 200  # what is no stream is not kept
        assert server.post("/v1/completions", COMPLETION | {"stream": False}).status == 200


def test_lumps_hold_what_came_meanwhile(tmp_path: Path) -> None:
    with running(tmp_path, ttft_ms=10, itl_ms=10, wire="lumps:45") as server:
        head, *lumps = pieces(server)
    assert head.startswith(b"HTTP/1.1 200")
    counts = [lump.count(b'"text"') for lump in lumps]
    assert sum(counts) == TOKENS and len(counts) < TOKENS / 2


def measured(url: str, out: Path, *more: str) -> Any:
    words = [
        "run",
        "--backend",
        "openai",
        "--url",
        url,
        "--requests",
        "12",
        "--concurrency",
        "1",
        "--input-tokens",
        "8",
    ]
    words += ["--output-tokens", "24", "--warmup", "1", "--no-calibrate", "--out", str(out), *more]
    done = subprocess.run([*LOADGEN, *words], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 4), done.stderr
    return json.loads((out / "report.json").read_text())


@pytest.mark.processes
@pytest.mark.parametrize("wire", ["whole", "lumps:40"])
def test_what_a_proxy_keeps_is_told(tmp_path: Path, wire: str) -> None:
    with running(tmp_path, "openai", ttft_ms=10, itl_ms=5, wire=wire) as server:
        report = measured(server.server.url, tmp_path / "run", "--goodput", "tpot:50")
    assert not report["verdict"]["valid"]
    assert "BUFFERED" in {finding["code"] for finding in report["verdict"]["findings"]}
    assert report["metrics"]["tpot_ms"]["n"] == report["metrics"]["itl_ms"]["n"] == 0
    assert report["goodput"]["request_goodput"] is None and report["ttft_of_delivery"]
