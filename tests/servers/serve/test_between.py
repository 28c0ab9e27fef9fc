"""Wires that bend times: what they are, and which pieces they send."""

from __future__ import annotations

import math
import socket
from pathlib import Path

import pytest

from servers.serve import between
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
    with pytest.raises(ValueError, match=r"is no wire; use clean .*, nagle"):
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
