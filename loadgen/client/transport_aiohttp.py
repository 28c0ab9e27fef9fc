"""The second opinion: the same exchanges over aiohttp, which shares no socket or HTTP code with the fast transport.

Slower by design of its library (about three times the CPU per event); connections open when a request is sent, since
aiohttp cannot open them ahead of time. Use it to check the fast transport, not to measure a fast server.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from backends.protocol import HttpRequest
from backends.untrusted import printable
from loadgen.client.connection import BaseTransport
from loadgen.client.exchange import Exchange
from loadgen.clock import now_ns
from loadgen.target import reason


class _Protocol(ResponseHandler):
    """A connection that knows how many requests it had, and how many bytes came since the present one was sent.
    reply_bytes: as many, when its reply had ended."""

    requests = 0
    received_bytes = 0
    reply_bytes = 0

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        super().data_received(data)

    @property
    def received_unasked(self) -> bool:
        return self.requests > 0 and (self.should_close or self.received_bytes != self.reply_bytes)

    @property
    def unanswered(self) -> bool:
        """It was used before, and nothing has come for its present request."""
        return self.requests > 1 and self.received_bytes == 0


_protocol: ContextVar[_Protocol] = ContextVar("_protocol")  # of the request that this task sends


class _Connector(aiohttp.TCPConnector):
    """Gives out no connection that received bytes while it was idle: aiohttp would take these for the next reply."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory: Any = partial(_Protocol, loop=self._loop)

    async def connect(self, *args: Any, **kwargs: Any) -> aiohttp.connector.Connection:
        while True:
            connection = await super().connect(*args, **kwargs)
            protocol = connection.protocol
            assert isinstance(protocol, _Protocol)
            if protocol.received_unasked:
                connection.close()
                continue
            protocol.requests += 1
            protocol.received_bytes = 0
            _protocol.set(protocol)
            return connection


class AiohttpTransport(BaseTransport):
    _session: aiohttp.ClientSession | None = None
    _fresh_session: aiohttp.ClientSession | None = None  # for requests whose reused connection died

    async def open(self, connections: int) -> None:
        """Nothing to open ahead: a session opens a connection when a request needs one."""
        if self._session is None:
            self._session, self._fresh_session = self._new_session(not self.reuse), self._new_session(True)

    def _new_session(self, fresh: bool) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()

        async def started(session: object, context: SimpleNamespace, params: object) -> None:
            context.began = now_ns()

        async def ended(session: object, context: SimpleNamespace, params: object) -> None:
            self.connect_ns.append(now_ns() - context.began)

        trace.on_connection_create_start.append(started)
        trace.on_connection_create_end.append(ended)
        connector = _Connector(limit=0, force_close=fresh, ssl=self.target.tls_context())
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.timeouts.connect_s)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, trace_configs=[trace], auto_decompress=False)

    def prepare(self, request: HttpRequest, request_id: str) -> HttpRequest:
        headers = (
            *self.target.headers(request).items(),
            ("X-Request-Id", request_id),
            ("Accept-Encoding", "identity"),
        )
        return HttpRequest(request.method, self.target.path(request.path), request.body, headers)

    def send(self, exchange: Exchange, prepared: bytes | HttpRequest) -> None:
        assert isinstance(prepared, HttpRequest)
        task = asyncio.get_running_loop().create_task(self._exchange(exchange, prepared))
        exchange.abort = task.cancel  # type: ignore[assignment]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _exchange(self, exchange: Exchange, request: HttpRequest) -> None:
        session = self._fresh_session if exchange.retried else self._session
        assert session is not None
        url = URL(self.target.url).join(URL(request.path, encoded=True))
        exchange.sent_ns = now_ns()
        try:
            async with session.request(
                request.method, url, data=request.body, headers=request.headers, allow_redirects=False
            ) as reply:
                exchange.headers(
                    reply.status, now_ns(), *(reply.headers.get(name, "") for name in ("Location", "Retry-After"))
                )
                if exchange.take_head is not None:
                    exchange.take_head(b"".join(b"%b: %b\r\n" % field for field in reply.raw_headers))
                async for data in reply.content.iter_any():
                    if not exchange.body(data, now_ns()):
                        reply.close()
                        return
                protocol = _protocol.get()
                protocol.reply_bytes = protocol.received_bytes
                exchange.eof(now_ns(), self.error_message)
        except aiohttp.ConnectionTimeoutError as error:
            exchange.fail("timeout", str(error), now_ns())
        except aiohttp.ClientConnectorError as error:
            exchange.fail("refused", f"no connection: {reason(error.os_error)}", now_ns())
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError) as error:
            if _protocol.get().unanswered:  # sent again, as by the fast transport
                exchange.retried = True
                await self._exchange(exchange, request)
            else:
                self._broken(exchange, error)
        except aiohttp.ClientError as error:
            exchange.fail("protocol_error", f"not HTTP: {printable(str(error))}", now_ns())

    def _broken(self, exchange: Exchange, error: aiohttp.ClientError) -> None:
        """aiohttp raises one exception for a body cut short and a broken connection; only its text tells them apart."""
        cut_short = isinstance(error, aiohttp.ClientPayloadError) and "ConnectionResetError" not in str(error)
        if cut_short or exchange.status not in (-1, 200):
            exchange.eof(now_ns(), self.error_message)
        else:
            exchange.fail("reset", f"connection broke: {printable(str(error))}", now_ns())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for session in (self._session, self._fresh_session):
            if session is not None:
                await session.close()
