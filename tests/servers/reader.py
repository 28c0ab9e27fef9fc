"""An independent reader of what the embedded server writes: the standard library's HTTP, raw sockets and json only."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from servers.app import DIALECTS
from servers.serve import between, faults
from servers.serve.server import Server
from servers.serve.stamps import StampsFile
from servers.serve.timing import FixedTiming
from servers.serve.wire import DialectSettings

TIMEOUT_S = 10.0


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[bytes]:
        """The frames of an event stream, each with the blank line that ends it."""
        assert self.body.endswith(b"\n\n")
        return [frame + b"\n\n" for frame in self.body.split(b"\n\n")[:-1]]

    @property
    def data(self) -> list[Any]:
        """The JSON of every frame but `[DONE]`."""
        payloads = [frame.removeprefix(b"data:").strip() for frame in self.events]
        return [json.loads(payload) for payload in payloads if payload != b"[DONE]"]


@dataclass
class Running:
    """A server in a thread of this process."""

    port: int
    server: Server
    stamps_path: Path

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            return ask_on(connection, method, path, body, **headers)
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.ask("POST", path, body, **headers)

    def raw(self, *pieces: bytes) -> bytes:
        """Sends the pieces one by one; everything that comes back until the server closes. ConnectionResetError."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                sock.sendall(piece)
            received = b""
            while data := sock.recv(65536):
                received += data
            return received

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics` by its name and labels."""
        text = self.ask("GET", "/metrics").body.decode()
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in samples}


def ask_on(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """Keyword `Content_Type` is the header Content-Type; bodies that are not bytes are sent as JSON."""
    payload = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, payload, sent)
    response = connection.getresponse()
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def http_request(path: str, body: Any, *headers: str) -> bytes:
    """One POST as bytes."""
    payload = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(payload)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + payload


def running(
    directory: Path, dialect: Any = "vllm", *fault: str, ttft_ms: float = 2, itl_ms: float = 1, **more: Any
) -> contextlib.AbstractContextManager[Running]:
    """A server with exact times; `more` as `serving` takes it."""
    return serving(directory, FixedTiming(round(ttft_ms * 1e6), round(itl_ms * 1e6)), dialect, *fault, **more)


@contextlib.contextmanager
def serving(
    directory: Path, timing: FixedTiming, dialect: Any = "vllm", *fault: str,
    seed: int = 0, api_key: str | None = None, wire: str = "clean", **settings: Any,
) -> Iterator[Running]:  # fmt: skip
    stamps_path = directory / "stamps.npz"
    server = Server(
        DIALECTS[dialect](DialectSettings("m", **{"max_model_len": 4096, **settings})),
        timing,
        faults=faults.read(fault, dialect, seed),
        stamps=StampsFile(stamps_path),
        api_key=api_key,
        between=between.read(wire),
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield Running(int(server.url.rsplit(":", 1)[1]), server, stamps_path)
    finally:
        server.stop()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def stamps(path: Path) -> dict[str, tuple[int, list[int]]]:
    """The stamps file: request id -> when it was received, and when each event was sent."""
    with np.load(path) as file:
        offsets = file["offsets"]
        return {
            str(request_id): (int(received), file["sent_ns"][offsets[row] : offsets[row + 1]].tolist())
            for row, (request_id, received) in enumerate(zip(file["request_id"], file["received_ns"], strict=True))
        }
