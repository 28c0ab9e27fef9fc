"""HTTP as clients do it, well and badly: order, framing, limits, and what a stream promises about time."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servers.serve import http as server_http
from servers.serve.http import ServerConnection
from servers.serve.timing import FixedTiming
from tests.servers.reader import TIMEOUT_S, ask_on, http_request, running, serving, stamps
from tests.servers.serve.test_timing import Note, drain

COMPLETION = {"prompt": "a", "max_tokens": 3, "stream": True}


def test_events_are_never_early_and_one_write_each(tmp_path: Path) -> None:
    ttft_ns, itl_ns = 20_000_000, 3_000_000
    with running(tmp_path, ttft_ms=20, itl_ms=3) as server:
        for number in range(3):
            server.post("/v1/completions", COMPLETION | {"max_tokens": 20}, X_Request_Id=str(number))
    rows = stamps(server.stamps_path)
    assert list(rows) == ["0", "1", "2"]
    for received_ns, sent in rows.values():
        assert len(sent) == 20
        for number, sent_ns in enumerate(sent):
            assert sent_ns >= received_ns + ttft_ns + number * itl_ns


def test_a_reply_in_one_piece_comes_when_its_last_token_is_due(tmp_path: Path) -> None:
    with running(tmp_path, ttft_ms=20, itl_ms=5) as server:
        server.post("/v1/completions", COMPLETION | {"stream": False, "max_tokens": 5}, X_Request_Id="r")
    received_ns, sent = stamps(server.stamps_path)["r"]
    assert len(sent) == 1
    assert sent[0] >= received_ns + 40_000_000


def test_jitter_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    """Seen on the wire: due times differ from request to request, and no event is sent before its own."""
    with serving(tmp_path, FixedTiming(10_000_000, 4_000_000, 0.5, 11)) as server:
        for number in range(2):
            server.post("/v1/completions", COMPLETION | {"max_tokens": 10}, X_Request_Id=str(number))
    for number, (received_ns, sent) in enumerate(stamps(server.stamps_path).values()):
        timing = FixedTiming(10_000_000, 4_000_000, 0.5, 11)
        note = Note(number + 1, received_ns, 10)
        timing.submit(note)
        drain(timing)
        assert all(sent_ns >= due_ns for sent_ns, due_ns in zip(sent, note.due_ns, strict=True))


def test_keep_alive_serves_many_requests_on_one_connection(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
        connection.connect()
        port = connection.sock.getsockname()
        for _ in range(3):
            assert ask_on(connection, "POST", "/v1/completions", COMPLETION).events[-1] == b"data: [DONE]\n\n"
            assert ask_on(connection, "GET", "/health").status == 200
            assert ask_on(connection, "GET", "/nowhere").status == 404
            assert ask_on(connection, "POST", "/v1/completions", {"prompt": ""}).status == 400
            assert connection.sock.getsockname() == port
        connection.close()


def test_a_request_cut_anywhere_is_the_same_request(tmp_path: Path) -> None:
    request = http_request("/v1/completions", COMPLETION, "X-Request-Id: r", "Connection: close")
    with running(tmp_path, ttft_ms=0, itl_ms=0) as server:
        whole = server.raw(request)
        assert whole.count(b"data: ") == 4
        bytewise = server.raw(*(request[at : at + 1] for at in range(len(request))))
        halves = server.raw(request[:200], request[200:])
        parts = (b'{"prompt":"a","max_tok', b'ens":3,"stream":true}')
        chunked = server.raw(
            b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nX-Request-Id: r\r\n",
            b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n",
            *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts),
            b"0\r\n\r\n",
        )
    head, _, body = whole.partition(b"\r\n\r\n")
    for other in (bytewise, halves, chunked):
        other_head, _, other_body = other.partition(b"\r\n\r\n")
        assert other_head == head
        assert [line.partition(b'"model"')[2] for line in other_body.splitlines()] == [
            line.partition(b'"model"')[2] for line in body.splitlines()
        ]


def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    first = http_request("/v1/completions", COMPLETION, "X-Request-Id: one")
    second = http_request("/v1/completions", COMPLETION | {"stream": False}, "X-Request-Id: two")
    last = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
    with running(tmp_path) as server:
        received = server.raw(first + second + last)
    assert received.count(b"HTTP/1.1 200 OK") == 3
    assert received.index(b"cmpl-one") < received.index(b"[DONE]") < received.index(b"cmpl-two")
    assert received.endswith(b"Content-Length: 0\r\nConnection: close\r\n\r\n")


def test_every_answer_says_that_it_is_emulated(tmp_path: Path) -> None:
    with running(tmp_path, "vllm", "http_error:503:2", api_key="k") as server:
        asked = [
            ("GET", "/health"),
            ("GET", "/metrics"),
            ("GET", "/nowhere"),
            ("DELETE", "/health"),
            ("GET", "/v1/models"),
        ]
        answers = [server.ask(method, path) for method, path in asked]
        answers += [server.post("/v1/completions", COMPLETION, Authorization="Bearer k") for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 200, 401, 405, 401, 200, 503]
    assert {answer.headers["server"] for answer in answers} == {"llm-dissect (emulated)"}


@pytest.mark.parametrize("dialect", ["vllm", "tgi", "lightllm", "sglang"])
def test_wrong_routes_and_methods(tmp_path: Path, dialect: str) -> None:
    with running(tmp_path, dialect) as server:
        assert server.ask("GET", "/nowhere?x=1").status == 404
        assert server.post("/nowhere", {}).status == 404
        assert server.post("/health", {}).status == 405
        assert server.ask("GET", "/health?x=1").status == 200
        head = server.ask("HEAD", "/metrics")
        assert (head.status, head.body) == (200, b"")
    if dialect == "vllm":
        with running(tmp_path, dialect) as server:
            error = server.ask("GET", "/v1/completions").json["error"]
            assert (error["message"], error["code"]) == ("Method Not Allowed", 405)


@pytest.mark.parametrize(
    ("dialect", "asked", "body"),
    [("vllm", ("GET", "/v1/models"), b'{"error":"Unauthorized"}'),
     ("sglang", ("GET", "/server_info"), b'{"error":"Unauthorized"}'),
     ("tgi", ("POST", "/tokenize", {"inputs": "a"}), b"")],
)  # fmt: skip
def test_api_key(tmp_path: Path, dialect: str, asked: tuple[Any, ...], body: bytes) -> None:
    with running(tmp_path, dialect, api_key="sesame") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
            answer = server.ask(*asked, **headers)
            assert (answer.status, answer.body) == (401, body)
        assert server.ask(*asked, Authorization="Bearer sesame").status == 200
        assert server.ask("GET", "/health").status == 200


def test_what_is_no_http_is_refused_and_closed(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        for junk in (b"\x16\x03\x01\x02\x00", b"hello\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n"):
            received = server.raw(junk)
            assert received.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert b"Connection: close" in received
        assert server.ask("GET", "/health").status == 200


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_http, "MAX_BODY_BYTES", 1000)
    with running(tmp_path) as server:
        assert server.raw(http_request("/v1/completions", "x" * 1001)).startswith(b"HTTP/1.1 413 ")
        long_head = b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: %b\r\n" % (n, b"y" * 1000) for n in range(70))
        assert server.raw(long_head + b"\r\n").startswith(b"HTTP/1.1 431 ")
        assert server.post("/v1/completions", COMPLETION).status == 200


@pytest.mark.parametrize("wire", ["clean", "lumps:5", "whole"])
@pytest.mark.parametrize("asked", ["Connection: close", "Connection: keep-alive"])
def test_a_stream_of_http_1_0_ends_with_the_connection(tmp_path: Path, wire: str, asked: str) -> None:
    """As nginx asks by default."""
    with running(tmp_path, wire=wire) as server:
        assert b"200 OK" in server.raw(b"GET /health HTTP/1.0\r\n\r\n")
        new = http_request("/v1/completions", COMPLETION | {"max_tokens": 20}, asked)
        head, _, body = server.raw(new.replace(b"HTTP/1.1", b"HTTP/1.0")).partition(b"\r\n\r\n")
        stream = server.post("/v1/completions", COMPLETION | {"max_tokens": 20}).body
    assert head.startswith(b"HTTP/1.1 200 ") and b"Connection: close" in head and b"chunked" not in head
    assert body.count(b"data: ") == stream.count(b"data: ") and body.endswith(b"data: [DONE]\n\n")
    times = stamps(server.stamps_path)
    assert {len(sent) for _, sent in times.values()} == {20}


def test_a_fault_strikes_a_stream_of_http_1_0(tmp_path: Path) -> None:
    with running(tmp_path, "vllm", "truncate:1") as server:
        old = http_request("/v1/completions", COMPLETION | {"max_tokens": 8}).replace(b"HTTP/1.1", b"HTTP/1.0")
        assert server.raw(old).count(b"data: ") == 4


def test_expect_100_continue(tmp_path: Path) -> None:
    head, _, body = http_request("/v1/completions", COMPLETION, "Expect: 100-continue", "Connection: close").partition(
        b"\r\n\r\n"
    )
    with running(tmp_path) as server, socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as sock:
        sock.sendall(head + b"\r\n\r\n")
        assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")


def test_two_hundred_streams_at_once(tmp_path: Path) -> None:
    request = http_request("/v1/completions", COMPLETION | {"max_tokens": 10}, "Connection: close")
    with running(tmp_path, ttft_ms=100, itl_ms=2) as server:
        socks = [socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) for _ in range(200)]
        for sock in socks:
            sock.sendall(request)
        received = dict.fromkeys(socks, b"")
        left = set(socks)
        while left:
            for sock in select.select(list(left), [], [], TIMEOUT_S)[0]:
                data = sock.recv(65536)
                received[sock] += data
                if not data:
                    left.discard(sock)
                    sock.close()
    assert all(reply.count(b"data: ") == 11 and reply.endswith(b"0\r\n\r\n") for reply in received.values())
    assert len({reply.partition(b'"id":"')[2][:37] for reply in received.values()}) == 200


def test_a_slow_reader_gets_everything_in_order(tmp_path: Path) -> None:
    """More than the kernel's buffers hold: what is left waits in the server."""
    n_tokens = 4000
    with running(tmp_path, ttft_ms=0, itl_ms=0) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(TIMEOUT_S)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(http_request("/v1/completions", COMPLETION | {"max_tokens": n_tokens}, "Connection: close"))
        deadline = time.monotonic() + TIMEOUT_S
        while server.metrics()['vllm:generation_tokens_total{model_name="m",engine="0"}'] < n_tokens:
            assert time.monotonic() < deadline
        response = http.client.HTTPResponse(sock)
        response.begin()
        frames = response.read().split(b"\n\n")
    words = [json.loads(frame[6:])["choices"][0]["text"] for frame in frames[:-2]]
    assert len(words) == n_tokens
    assert words[:16] * (n_tokens // 16) == words


def test_a_reader_too_far_behind_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_http, "MAX_UNSENT_BYTES", 10_000)
    with running(tmp_path, ttft_ms=0, itl_ms=0, max_model_len=10**6) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(TIMEOUT_S)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(http_request("/v1/completions", COMPLETION | {"max_tokens": 900_000}))
        deadline = time.monotonic() + TIMEOUT_S
        while server.metrics()['vllm:num_requests_running{model_name="m",engine="0"}']:
            assert time.monotonic() < deadline
        with pytest.raises(ConnectionResetError):
            while sock.recv(65536):
                pass
    assert "unread; its connection is closed" in capfd.readouterr().err


def test_a_client_that_leaves_is_forgotten(tmp_path: Path) -> None:
    with running(tmp_path, ttft_ms=10, itl_ms=10) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(http_request("/v1/completions", COMPLETION | {"max_tokens": 4000}))
            assert sock.recv(100)
        deadline = time.monotonic() + TIMEOUT_S
        while server.metrics()['vllm:num_requests_running{model_name="m",engine="0"}']:
            assert time.monotonic() < deadline
        assert server.metrics()['vllm:request_success_total{model_name="m",engine="0",finished_reason="abort"}'] == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("requests", [1, 2])
def test_a_client_that_ends_its_half_gets_its_replies(stream: bool, requests: int, tmp_path: Path) -> None:
    with running(tmp_path, ttft_ms=20, itl_ms=1) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as sock:
            sock.sendall(requests * http_request("/v1/completions", COMPLETION | {"stream": stream}))
            sock.shutdown(socket.SHUT_WR)
            received = b""
            while data := sock.recv(65536):
                received += data
        assert received.count(b"HTTP/1.1 200") == requests
        assert received.count(b"[DONE]") == requests * stream
        assert server.post("/v1/completions", COMPLETION).status == 200


def test_a_client_that_ends_its_half_within_a_request_is_let_go(tmp_path: Path) -> None:
    request = http_request("/v1/completions", COMPLETION)
    with running(tmp_path) as server, socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as sock:
        sock.sendall(request[: len(request) // 2])
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b""


def test_trailers_are_no_headers(tmp_path: Path) -> None:
    """A key or a type behind the body was not there when the body was read."""
    body = json.dumps(COMPLETION | {"stream": False}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"
    chunked = b"\r\n%x\r\n%b\r\n0\r\n" % (len(body), body)
    kind = b"Content-Type: application/json\r\n"
    with running(tmp_path) as server:
        assert server.raw(head + kind + chunked + b"\r\n").startswith(b"HTTP/1.1 200")
        assert not server.raw(head + chunked + kind + b"\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /health HTTP/1.1\r\nX: ", b"GET /", b"",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: ",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;x=",
    ],
    ids=["header", "path", "nothing", "trailer", "chunk"],
)  # fmt: skip
def test_what_has_no_end_is_refused_early(begin: bytes, tmp_path: Path) -> None:
    with running(tmp_path) as server, socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as sock:
        sock.sendall(begin)
        answer = b""
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                sock.sendall(4096 * (b"a" if begin else b"\r"))
                if select.select([sock], [], [], 0.02)[0]:
                    answer = sock.recv(4096)
                    break
        assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))


@pytest.mark.parametrize("ids", [[-1], [1 << 20], [1, 10**30], [1.5], [True]])
@pytest.mark.parametrize(
    ("dialect", "path", "fields"),
    [
        ("vllm", "/v1/completions", lambda ids: {"prompt": ids, "max_tokens": 1}),
        ("vllm", "/v1/completions", lambda ids: {"prompt": [ids], "max_tokens": 1}),
        ("lightllm", "/generate", lambda ids: {"inputs": ids, "parameters": {"max_new_tokens": 1}}),
    ],
)  # fmt: skip
def test_token_ids_that_are_none(
    dialect: str, path: str, fields: Callable[[list[object]], dict[str, object]], ids: list[object], tmp_path: Path
) -> None:
    with running(tmp_path, dialect) as server:
        assert 400 <= server.post(path, fields(ids)).status < 500
        assert server.post(path, fields([0, (1 << 20) - 1])).status == 200


def test_nothing_is_left_for_the_garbage_collector(tmp_path: Path) -> None:
    """The server runs with it switched off."""
    with running(tmp_path, "vllm", "reset:5", ttft_ms=0, itl_ms=0) as server:
        gc.collect()
        gc.disable()
        try:
            for _ in range(40):
                with contextlib.suppress(ConnectionResetError):
                    server.raw(http_request("/v1/completions", COMPLETION, "Connection: close"))
            kept = [each for each in gc.get_objects() if isinstance(each, ServerConnection)]
            assert len(kept) <= 2  # the last one or two may still be closing
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("dialect", "path"),
    [
        ("vllm", "/v1/completions"), ("vllm", "/v1/chat/completions"), ("openai", "/v1/completions"),
        ("tgi", "/generate_stream"), ("tgi", "/"), ("lightllm", "/generate"), ("sglang", "/generate"),
    ],
)  # fmt: skip
def test_bodies_that_no_decoder_takes(dialect: str, path: str, tmp_path: Path) -> None:
    """They are the client's fault, and the server goes on, on the same connection."""
    not_utf8 = b'{"prompt":"\xff","inputs":"\xff","text":"\xff","messages":[{"role":"user","content":"\xff"}]}'
    deep = b"[" * 100_000
    nested = b'{"prompt":%b,"inputs":%b,"messages":%b,"parameters":%b,"text":%b}' % ((deep,) * 5)
    with running(tmp_path, dialect) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
        for body in (not_utf8, nested):
            answer = ask_on(connection, "POST", path, body)
            assert answer.status == 400 and b"Traceback" not in answer.body, answer.body[:300]
        connection.close()
