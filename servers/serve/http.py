"""One client's connection: requests read off its socket, answers written to it in order.

Writing goes straight to the socket, so that a stamp taken before `send` is the time at which the kernel got the bytes;
what the kernel does not take at once waits here, in order and bounded. Reading is split in two: the bytes are taken and
stamped at once, and parsed when the server has nothing due.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from http.client import responses
from typing import Protocol

import httptools
import msgspec

from servers.serve.wire import Dialect, Headers, Page

SERVER_HEADER = b"Server: llm-dissect (emulated)\r\n"
MAX_HEAD_BYTES = 64 * 1024
MAX_OVERHEAD = 16  # bytes for each byte of a body: a chunk of one byte takes seven
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_UNSENT_BYTES = 4 * 1024 * 1024  # a reader that is further behind is cut off
MAX_WAITING_REQUESTS = 100  # pipelined on one connection
_READ_BYTES = 256 * 1024
LAST_CHUNK = b"0\r\n\r\n"


class Request(msgspec.Struct, frozen=True):
    """Header names are lower case."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes
    received_ns: int
    keep_alive: bool
    http_1_0: bool  # a stream ends with the connection, and so does everything else


class ConnectionOwner(Protocol):
    """What a connection needs of the server that accepted it. `unparsed`: bytes read, and when, to be parsed later."""

    dialect: Dialect
    unparsed: deque[tuple[ServerConnection, bytes, int]]

    def handle(self, connection: ServerConnection, request: Request) -> None:
        """Answers one request, now or later."""

    def watch(self, connection: ServerConnection, events: int) -> None:
        """From now on calls `ready` for these events of the selector; 0: for none."""

    def forget(self, connection: ServerConnection) -> None:
        """The connection is about to be closed."""

    def log(self, sentence: str) -> None:
        """Tells whoever runs the server."""


class ServerConnection:
    """`received_ns` is when the last byte of the request being answered was read, in monotonic nanoseconds. `on_close`
    is called once when the connection closes, whoever closes it."""

    def __init__(self, sock: socket.socket, server: ConnectionOwner) -> None:
        self.sock = sock
        self.open = True
        self.received_ns = 0
        self.chunked = True  # how the stream under way is framed
        self.on_close: Callable[[], None] | None = None
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._read_ns = 0
        self._free_ns = 0  # when the answer before ended: a request that waited for it is received then
        self._used_ns = time.monotonic_ns()
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._read_bytes = self._body_bytes = 0
        self._in_head = True
        self._ended = False  # the client sends nothing more, and may still read
        self._waiting: deque[Request] = deque()
        self._current: Request | None = None
        self._unsent = bytearray()
        self._closing = False  # once all is sent

    # -- reading

    def ready(self, mask: int, now_ns: int) -> None:
        """The socket can be read or written."""
        if mask & selectors.EVENT_WRITE:
            self._send_rest()
        if mask & selectors.EVENT_READ and self.open:
            try:
                data = self.sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            self._used_ns = now_ns
            self._ended = not data
            if self._ended:
                self._watch()
            if self._ended and self._closing:
                self.close_when_sent()
            else:  # also an end: it stands behind what was sent before
                self._server.unparsed.append((self, data, now_ns))

    def _watch(self) -> None:
        reading, writing = not self._ended, bool(self._unsent)
        self._server.watch(self, selectors.EVENT_READ * reading | selectors.EVENT_WRITE * writing)

    def idle_since_ns(self) -> int | None:
        """When it was last used; None while a request is there or an answer is not sent."""
        return None if self._current or self._waiting or self._unsent else max(self._used_ns, self._free_ns)

    def parse(self, data: bytes, read_ns: int) -> None:
        """Parses what was read at `read_ns` and answers the requests that are complete by it."""
        if not self.open or self._closing:
            return
        self._read_ns = read_ns
        try:
            if data:
                self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            self._refuse(400, "the request is no HTTP/1.1.")
            return
        self._read_bytes += len(data)
        if self._read_bytes - self._body_bytes > MAX_HEAD_BYTES + MAX_OVERHEAD * self._body_bytes:
            self._refuse(431, f"the headers are longer than {MAX_HEAD_BYTES} bytes.")
        elif self._body_bytes > MAX_BODY_BYTES:
            self._refuse(413, f"the body is longer than {MAX_BODY_BYTES} bytes.")
        elif len(self._waiting) > MAX_WAITING_REQUESTS:
            self._refuse(429, "too many requests are waiting on one connection.")
        else:
            self._answer_next()
            if self._ended and self.open and self._current is None and not data:
                self.close_when_sent()

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body = b"", {}, []
        self._read_bytes = self._body_bytes = 0
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which is no header
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._headers.get(b"expect", b"").lower() == b"100-continue" and self._current is None:
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes <= MAX_BODY_BYTES:
            self._body.append(body)

    def on_message_complete(self) -> None:
        self._waiting.append(
            Request(
                method=self._parser.get_method().decode("latin-1"),
                path=self._url.partition(b"?")[0].decode("latin-1"),
                headers=self._headers,
                body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
                received_ns=self._read_ns,
                keep_alive=self._parser.should_keep_alive() and self._parser.get_http_version() != "1.0",
                http_1_0=self._parser.get_http_version() == "1.0",
            )
        )
        self._body = []

    def _answer_next(self) -> None:
        while self._waiting and self._current is None and self.open and not self._closing:
            self._current = self._waiting.popleft()
            self.chunked = not self._current.http_1_0
            self.received_ns = max(self._current.received_ns, self._free_ns)
            self._server.handle(self, self._current)

    def _refuse(self, status: int, message: str) -> None:
        if self._current is not None:  # cannot be told within the reply that is under way
            self.close()
            return
        self.respond(self._server.dialect.error(status, message))

    # -- answering

    def respond(self, page: Page, behind: bytes = b"") -> None:
        """Answers the current request with a whole page; `behind` goes out in the same write."""
        self.send(self.page(page) + behind)
        self._finish()

    def page(self, page: Page) -> bytes:
        """A whole page as an answer to the current request."""
        return self._head(page) + (b"" if self._current is not None and self._current.method == "HEAD" else page.body)

    def send_cut(self, page: Page) -> None:
        """The head of an answer and the first half of its body."""
        self.send(self._head(page) + page.body[: len(page.body) // 2])

    def begin_stream(self, content_type: str, headers: Headers = ()) -> None:
        """Starts an answer in pieces; each goes through `framed` and `send`."""
        self.send(self.stream_head(content_type, headers))

    def stream_head(self, content_type: str, headers: Headers = ()) -> bytes:
        lines = "".join(f"{name}: {value}\r\n" for name, value in (("Content-Type", content_type), *headers)).encode()
        keep = b"" if self._keep_alive() else b"Connection: close\r\n"
        coding = b"Transfer-Encoding: chunked\r\n" if self.chunked else b""
        return b"HTTP/1.1 200 OK\r\n" + SERVER_HEADER + lines + coding + keep + b"\r\n"

    def framed(self, data: bytes) -> bytes:
        """A piece of a stream, as the client's version of HTTP has it."""
        return chunk(data) if self.chunked else data

    def stream_end(self, last: bytes) -> bytes:
        """`last`, if any, as one more piece, and the end of a stream."""
        return self.framed(last) + (LAST_CHUNK if self.chunked else b"")

    def end_stream(self, last: bytes, behind: bytes = b"") -> None:
        """Sends `last`, if any, and ends the stream; `behind` goes out in the same write."""
        self.send(self.stream_end(last) + behind)
        self._finish()

    def send(self, data: bytes) -> None:
        """Hands `data` to the kernel, or keeps what it does not take."""
        if not self._unsent:
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.close()
                return
            if sent == len(data):
                return
            data = data[sent:]
            self._unsent += data
            self._watch()
        else:
            self._unsent += data
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self._server.log(f"a client left {len(self._unsent)} bytes unread; its connection is closed.")
            self.reset()

    def close(self) -> None:
        """Closes now, cleanly where everything was read; the reply under way is given up."""
        if not self.open:
            return
        self.open = False
        self._server.forget(self)
        self.sock.close()
        self._waiting.clear()
        del self._parser  # it refers back to this object; nothing is left for a garbage collector
        if self.on_close is not None:
            self.on_close()

    def reset(self) -> None:
        """Closes so that the client sees a reset."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def _send_rest(self) -> None:
        try:
            sent = self.sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._watch()
            if self._closing:
                self.close_when_sent()

    def _finish(self) -> None:
        """The answer is complete: the next request, or the end of the connection."""
        keep_alive = self._keep_alive()
        self._current = None
        self._free_ns = time.monotonic_ns()
        if not keep_alive:
            self.close_when_sent()
        elif self._waiting or self._ended:
            self._server.unparsed.append((self, b"", 0))

    def close_when_sent(self) -> None:
        """Closes for writing once all is sent, and altogether when the client does: closing with bytes unread would
        reset the connection and take the answer with it."""
        self._closing = True
        if self._ended and not self._unsent:
            self.close()
        elif not self._unsent:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)

    def _keep_alive(self) -> bool:
        return self._current is not None and self._current.keep_alive

    def _head(self, page: Page) -> bytes:
        phrase = responses.get(page.status, "Error")
        lines = [f"HTTP/1.1 {page.status} {phrase}\r\n".encode(), SERVER_HEADER]
        if page.content_type is not None:
            lines.append(f"Content-Type: {page.content_type}\r\n".encode())
        lines += [f"{name}: {value}\r\n".encode() for name, value in page.headers]
        lines.append(b"Content-Length: %d\r\n" % len(page.body))
        if not self._keep_alive():
            lines.append(b"Connection: close\r\n")
        return b"".join(lines) + b"\r\n"


def chunk(data: bytes) -> bytes:
    """`data`, if any, as one chunk of HTTP's chunked coding: an empty one would be the last."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
