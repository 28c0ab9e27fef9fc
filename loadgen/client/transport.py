"""Where requests go and on which connections: opened before the clock starts, so that sending is a single write."""

from __future__ import annotations

import asyncio
import errno
import socket
from array import array
from collections.abc import Callable
from typing import Protocol

from backends.protocol import HttpRequest
from loadgen.client.connection import Connection, QuickConnection, StampedConnection, wall_minus_monotonic_ns
from loadgen.client.exchange import Exchange
from loadgen.clock import now_ns
from loadgen.plan import Timeouts
from loadgen.target import Target, TransportError, no_connection, reason

REUSE_LIMIT_NS = 2_000_000_000  # an idle connection older than this is replaced: servers close theirs after 5 s
CONNECTS_IN_FLIGHT = 64  # below any listen backlog (LightLLM's is 100)


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


class FastTransport:
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
        self.target = target
        self.error_message = error_message
        self.timeouts = timeouts
        self.reuse = not fresh
        self.plain = not target.tls
        self.kernel_timestamps = kernel_timestamps
        self.quick_acks = quick_acks
        self.wall_minus_monotonic_ns = wall_minus_monotonic_ns()
        self.idle: dict[Connection, None] = {}
        self.live: set[Connection] = set()
        self.connect_ns = array("q")
        self.receive_lag_ns = array("q")
        self._address: tuple[int, tuple[str, int] | tuple[str, int, int, int]] | None = None
        self._tls = target.tls_context() if target.tls else None
        self._tasks: set[asyncio.Task[None]] = set()
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


def _cancel(task: asyncio.Task[None] | None) -> Callable[[], None]:
    def cancel() -> None:
        if task is not None:
            task.cancel()

    return cancel
