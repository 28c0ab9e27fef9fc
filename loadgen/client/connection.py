"""HTTP/1.1 connections, the hot path of the instrument, and the transport that opens them before the clock starts, so
that sending is a single write.

At 100,000 events a second a core has 10 us for each, most of them the kernel's. What is done per event is: one stamp
for the read, taken before anything is parsed; undo HTTP (httptools); one codec call; one append. Must never allocate,
log or wait on the way of a plain token.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
import struct
import time
from array import array
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from backends.protocol import HttpRequest
from loadgen.client.exchange import Exchange
from loadgen.clock import now_ns
from loadgen.plan import Timeouts
from loadgen.target import Target, TransportError, no_connection, reason

HEADER_LIMIT_BYTES = 65_536
TCP_QUICKACK = 12  # <linux/tcp.h>; Python names it on Linux alone
REUSE_LIMIT_NS = 2_000_000_000  # an idle connection older than this is replaced: servers close theirs after 5 s
CONNECTS_IN_FLIGHT = 64  # below any listen backlog (LightLLM's is 100)
SO_TIMESTAMPNS = 35  # <asm-generic/socket.h>; Python does not name it


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection: at most one exchange at a time."""

    def __init__(self, owner: FastTransport, sock: socket.socket) -> None:
        self.owner = owner
        self.sock = sock
        self.transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.now = 0
        self.body_bytes = 0  # of the last piece of a body
        self.head = b""  # what was read of a reply whose headers are not complete
        self.early_bytes = 0  # of heads before it, such as 100 Continue's
        self.in_headers = False
        self.idle_since_ns = -1  # -1: never used
        self.payload: bytes | None = None  # a request on a reused connection, until its reply begins
        self.raw = owner.plain  # plain sockets are written to directly: uvloop would queue until its next turn

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class

    def start(self, exchange: Exchange, payload: bytes) -> None:
        self.exchange = exchange
        exchange.abort = self.abort
        self.in_headers = True
        self.head = b""
        self.early_bytes = 0
        if self.idle_since_ns >= 0:
            self.payload = payload
        exchange.sent_ns = now_ns()
        if self.raw:
            try:
                written = self.sock.send(payload)
            except BlockingIOError:
                written = 0
            except OSError as error:
                self.broken(f"cannot send: {error.strerror}")
                self.abort()
                return
            if written == len(payload):
                return
            payload = payload[written:]
        self.write_rest(payload)

    def is_silent(self) -> bool:
        """Whether nothing has come in since the last reply, by the kernel: a byte or an end that the event loop has not
        seen yet must not meet the next request. Of a reused plain socket; of others the event loop alone knows."""
        if self.idle_since_ns < 0 or not self.raw:
            return True
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def write_rest(self, payload: bytes) -> None:
        assert self.transport is not None
        self.transport.write(payload)

    def data_received(self, data: bytes) -> None:
        self.read(data, now_ns())

    def read(self, data: bytes, now: int) -> None:
        """Takes what was read at `now`. Nearly every read is nothing but one more plain token."""
        exchange = self.exchange
        if exchange is None:  # nobody asked: it must not become the next request's reply
            self.abort()
            return
        if (plain := exchange.plain) is not None and plain.recognises(data):
            exchange.last_read_ns = now
            exchange.times.append(now)
            return
        self.now = now
        self.parse(data)
        exchange = self.exchange
        if exchange is not None and exchange.plain is not None:
            exchange.plain.learn_read(data, self.body_bytes)

    def parse(self, data: bytes) -> None:
        self.body_bytes = 0
        if self.in_headers:
            self.head += data
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.give_up(f"not HTTP: {error}")
        if self.in_headers and self.early_bytes + len(self.head) > HEADER_LIMIT_BYTES:
            self.give_up(f"response headers over {HEADER_LIMIT_BYTES} bytes")

    def give_up(self, reason: str) -> None:
        if self.exchange is not None:
            self.exchange.fail("protocol_error", reason, self.now)
        self.abort()

    # The parser's callbacks. An exchange that is finished early (timeout, error) leaves its connection closed.

    def on_message_begin(self) -> None:
        if self.exchange is None:  # a second reply, or junk, right behind the one that was asked for
            self.abort()

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status < 100:
            self.give_up(f"not HTTP: status {status}")
        elif status < 200:  # the real reply follows, whose headers are its own
            self.payload = None
            if any(_field(self.head, name) for name in (b"transfer-encoding", b"content-length")):
                self.give_up(f"not HTTP: status {status} with a body")
            early, _, self.head = self.head.partition(b"\r\n\r\n")
            self.early_bytes += len(early)
        elif self.exchange is not None:
            self.in_headers = False
            self.payload = None
            wanted_headers = (b"location", b"retry-after") if status != 200 else ()
            self.exchange.headers(status, self.now, *[_field(self.head, name) for name in wanted_headers])
            if self.exchange.take_head is not None:
                self.exchange.take_head(self.head)
            self.head = b""

    def on_body(self, data: bytes) -> None:
        self.body_bytes = len(data)
        if self.exchange is not None and not self.exchange.body(data, self.now):
            self.abort()

    def on_message_complete(self) -> None:
        exchange = self.exchange
        if exchange is None or self.in_headers:  # 1xx: the real reply follows
            return
        self.exchange = None
        if self.parser.should_keep_alive() and self.owner.reuse:
            self.idle_since_ns = self.now
            self.owner.idle[self] = None
        else:
            self.abort()
        exchange.eof(self.now, self.owner.error_message)

    def eof_received(self) -> bool:
        if self.exchange is None:  # at once: the event loop would close it later, and a request may come before
            self.abort()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.owner.forget(self)
        if error is not None:
            self.broken(f"connection broke: {getattr(error, 'strerror', None) or error}")
        elif self.exchange is not None and self.exchange.status < 0:
            self.broken("the server closed the connection without a reply")
        elif self.exchange is not None:  # the decoder knows whether what came is a whole reply
            self.exchange.eof(now_ns(), self.owner.error_message)
        self.exchange = None
        # both know this connection: while a run has the garbage collector off, a cycle would stay
        del self.parser
        self.transport = None

    def broken(self, reason: str) -> None:
        """The connection died. A server may close an idle one just when it is used again: a request that met such a
        one, and saw no byte of a reply, is sent again on a fresh one."""
        exchange, self.exchange = self.exchange, None
        if exchange is None or exchange.finished:
            return
        if self.payload is not None and not self.head:
            exchange.retried = True
            self.owner.send_fresh(exchange, self.payload)
        elif exchange.status not in (-1, 200):  # the status is the server's answer, however its words ended
            exchange.eof(now_ns(), self.owner.error_message)
        else:
            exchange.fail("reset", reason, now_ns())

    def abort(self) -> None:
        self.exchange = None
        self.owner.forget(self)
        if self.transport is not None:
            self.transport.abort()


class QuickConnection(Connection):
    """A connection that acknowledges each read at once. The kernel goes back to delayed ACKs by itself, so this is set
    again each time."""

    def data_received(self, data: bytes) -> None:
        now = now_ns()
        acknowledge(self.sock)
        self.read(data, now)


def acknowledge(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be closed by now
        sock.setsockopt(socket.IPPROTO_TCP, TCP_QUICKACK, 1)


class StampedConnection(Connection):
    """A connection that reads its own socket, so that the kernel's receive stamps come with the bytes.

    The stamp of a read is the kernel's for the last segment in it (SO_TIMESTAMPNS, wall clock, moved to the monotonic
    clock); read stamp minus kernel stamp is the client's own receive lag. Plain sockets on Linux only.
    """

    def connect(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.backlog = b""
        self.closed = False
        self.sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        loop.add_reader(self.sock.fileno(), self.on_readable)

    def on_readable(self) -> None:
        try:
            data, ancillary, _, _ = self.sock.recvmsg(65_536, 64)
        except BlockingIOError:
            return
        except OSError as error:
            self.lose(error)
            return
        read_ns = now_ns()
        if self.owner.quick_acks:
            acknowledge(self.sock)
        if not data:
            self.lose(None)
            return
        stamp = read_ns
        for level, kind, value in ancillary:
            if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
                seconds, nanoseconds = struct.unpack("qq", value)
                stamp = seconds * 1_000_000_000 + nanoseconds - self.owner.wall_minus_monotonic_ns
                if self.exchange is not None:
                    self.owner.receive_lag_ns.append(read_ns - stamp)
        self.read(data, stamp)

    def write_rest(self, payload: bytes) -> None:
        self.backlog += payload
        self.loop.add_writer(self.sock.fileno(), self.on_writable)

    def on_writable(self) -> None:
        try:
            self.backlog = self.backlog[self.sock.send(self.backlog) :]
        except BlockingIOError:
            return
        except OSError as error:
            self.lose(error)
            return
        if not self.backlog:
            self.loop.remove_writer(self.sock.fileno())

    def lose(self, error: Exception | None) -> None:
        if not self.closed:
            self.closed = True
            self.loop.remove_reader(self.sock.fileno())
            self.loop.remove_writer(self.sock.fileno())
            self.sock.close()
            self.connection_lost(error)

    def abort(self) -> None:
        self.exchange = None
        self.lose(None)


def _field(head: bytes, name: bytes) -> str:
    """What the headers have under that name; empty where they have none."""
    found = re.search(rb"\n%b:([^\r\n]*)" % name, head.partition(b"\r\n\r\n")[0], re.IGNORECASE)
    return found.group(1).decode("latin-1").strip() if found else ""


def wall_minus_monotonic_ns() -> int:
    """Offset between the clocks, from the tightest of some readings (ns)."""
    readings = []
    for _ in range(20):
        before, wall, after = now_ns(), time.time_ns(), now_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


class Transport(Protocol):
    """What the engine needs of a client. `connect_ns` holds the duration of every connect so far."""

    connect_ns: array[int]
    receive_lag_ns: array[int]

    async def open(self, connections: int) -> None:
        """Sees to it that so many connections are open and idle. Raises TransportError."""

    def prepare(self, request: HttpRequest, request_id: str) -> bytes | HttpRequest:
        """Does all work that can be done before the request is due."""

    def send(self, exchange: Exchange, prepared: bytes | HttpRequest) -> None:
        """Sends now; the exchange hears of everything that follows."""

    async def close(self) -> None: ...


class BaseTransport:
    """What every transport holds. fresh: each request has a connection of its own."""

    def __init__(
        self, target: Target, error_message: Callable[[int, bytes], str], timeouts: Timeouts, *, fresh: bool = False
    ) -> None:
        self.target, self.error_message, self.timeouts = target, error_message, timeouts
        self.reuse = not fresh
        self.connect_ns = array("q")
        self.receive_lag_ns = array("q")
        self._tasks: set[asyncio.Task[None]] = set()


class FastTransport(BaseTransport):
    """Own sockets on the event loop, httptools, keep-alive: the transport that measures."""

    def __init__(
        self,
        target: Target,
        error_message: Callable[[int, bytes], str],
        timeouts: Timeouts,
        *,
        fresh: bool = False,
        kernel_timestamps: bool = False,
        quick_acks: bool = False,
    ) -> None:
        super().__init__(target, error_message, timeouts, fresh=fresh)
        self.plain = not target.tls
        self.kernel_timestamps = kernel_timestamps
        self.quick_acks = quick_acks
        self.wall_minus_monotonic_ns = wall_minus_monotonic_ns()
        self.idle: dict[Connection, None] = {}  # the one that was used last is the last
        self.live: set[Connection] = set()
        self._address: tuple[int, tuple[str, int] | tuple[str, int, int, int]] | None = None
        self._tls = target.tls_context() if target.tls else None
        host = target.host if ":" not in target.host else f"[{target.host}]"
        self._host_header = f"{host}:{target.port}"
        self._head: tuple[object, bytes] = (None, b"")  # of the request before, and what it was made of

    def prepare(self, request: HttpRequest, request_id: str) -> bytes:
        made_of = (request.method, request.path, request.headers)
        if self._head[0] != made_of:
            self._head = (made_of, self._head_of(request))
        return self._head[1] % {b"id": request_id.encode("latin-1"), b"length": len(request.body)} + request.body

    def _head_of(self, request: HttpRequest) -> bytes:
        """The head of such requests, a format with places for the id and the length of the body."""
        stated = {name: value.replace("%", "%%") for name, value in self.target.headers(request).items()}
        fields = {"Host": self._host_header.replace("%", "%%"), "Accept": "*/*", "X-Request-Id": "%(id)s"}
        fields |= stated | {"Content-Length": "%(length)d"}
        lines = [f"{request.method} {self.target.path(request.path)} HTTP/1.1".replace("%", "%%")]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    async def open(self, connections: int) -> None:
        if not self.reuse:  # every request opens its own; only see that somebody is there
            connections = min(connections, 1)
        for stale in [connection for connection in self.idle if self._is_stale(connection)]:
            stale.abort()
        remaining = connections - len(self.idle)
        try:

            async def some() -> None:
                nonlocal remaining
                while remaining > 0:
                    remaining -= 1
                    self.idle[await self._connect()] = None

            async with asyncio.TaskGroup() as group:
                for _ in range(max(0, min(CONNECTS_IN_FLIGHT, remaining))):
                    group.create_task(some())
        except* (OSError, TimeoutError) as errors:
            first = errors.exceptions[0]
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            if not self.idle:
                raise TransportError(await asyncio.to_thread(no_connection, self.target, first)) from None
            raise TransportError(
                f"opened {len(self.idle)} of {connections} connections to {self.target.url}, then: "
                f"{reason(first)}; lower the load or raise the server's limits."
            ) from None

    async def _connect(self) -> Connection:
        """Opens one connection; its duration, name look-up apart, goes into `connect_ns`. Raises OSError."""
        loop = asyncio.get_running_loop()
        if self._address is None:
            self._address = await self._first_address()
        family, address = self._address
        began = now_ns()
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(self.timeouts.connect_s):
                if not _is_connected(sock, address):
                    await loop.sock_connect(sock, address)
                connection: Connection
                if self.kernel_timestamps:
                    connection = stamped = StampedConnection(self, sock)
                    stamped.connect(loop)
                else:
                    connection = QuickConnection(self, sock) if self.quick_acks else Connection(self, sock)
                    name = self.target.host if self._tls else None
                    await loop.create_connection(lambda: connection, sock=sock, ssl=self._tls, server_hostname=name)
        except BaseException:
            sock.close()
            raise
        self.connect_ns.append(now_ns() - began)
        self.live.add(connection)
        return connection

    async def _first_address(self) -> tuple[int, tuple[str, int] | tuple[str, int, int, int]]:
        """The first address of the host that accepts a connection (IPv6 or IPv4)."""
        loop = asyncio.get_running_loop()
        failure: Exception = OSError("the name has no address")
        for family, _, _, _, address in await loop.getaddrinfo(
            self.target.host, self.target.port, type=socket.SOCK_STREAM
        ):
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.setblocking(False)
                try:
                    async with asyncio.timeout(self.timeouts.connect_s):
                        await loop.sock_connect(sock, address)
                except (OSError, TimeoutError) as error:
                    failure = error
                else:
                    return family, address  # type: ignore[return-value]
        raise failure

    def send(self, exchange: Exchange, prepared: bytes | HttpRequest) -> None:
        assert isinstance(prepared, bytes)
        while self.idle:
            connection, _ = self.idle.popitem()
            if not self._is_stale(connection) and connection.is_silent():
                connection.start(exchange, prepared)
                return
            connection.abort()
        self.send_fresh(exchange, prepared)

    def send_fresh(self, exchange: Exchange, payload: bytes) -> None:
        """Sends on a fresh connection."""
        task = asyncio.get_running_loop().create_task(self._connect_and_send(exchange, payload))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _is_stale(connection: Connection) -> bool:
        return 0 <= connection.idle_since_ns < now_ns() - REUSE_LIMIT_NS

    async def _connect_and_send(self, exchange: Exchange, payload: bytes) -> None:
        exchange.abort = _cancel(asyncio.current_task())
        try:
            connection = await self._connect()
        except TimeoutError:
            exchange.fail("timeout", f"no connection within {self.timeouts.connect_s:g} s", now_ns())
        except OSError as error:
            ours = error.errno in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)  # not the server's doing
            exchange.fail("dropped" if ours else "refused", f"no connection: {reason(error)}", now_ns())
        else:
            if exchange.finished:
                connection.abort()
            else:
                connection.start(exchange, payload)

    def forget(self, connection: Connection) -> None:
        self.live.discard(connection)
        self.idle.pop(connection, None)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.idle.clear()
        for connection in list(self.live):
            connection.abort()
        await asyncio.sleep(0)


def _is_connected(sock: socket.socket, address: tuple[str, int] | tuple[str, int, int, int]) -> bool:
    """Begins to connect, and says whether that is over, as it is at once to a server on this machine: to wait for it in
    the event loop costs as much CPU time again as all the rest."""
    try:
        sock.connect(address)
    except BlockingIOError:
        try:
            sock.getpeername()
        except OSError:  # also where it was refused, which the loop then says
            return False
    return True


def _cancel(task: asyncio.Task[None] | None) -> Callable[[], None]:
    def cancel() -> None:
        if task is not None:
            task.cancel()

    return cancel
