"""The second opinion: the same exchanges over aiohttp, which shares no socket or HTTP code with the fast transport.

Slower by design of its library (about three times the CPU per event); connections open when a request is sent, since
aiohttp cannot open them ahead of time. Use it to check the fast transport, not to measure a fast server.
"""

from __future__ import annotations

import asyncio
import ssl
from array import array
from collections.abc import Callable

import aiohttp
from yarl import URL

from backends.protocol import HttpRequest
from loadgen.client.exchange import Exchange
from loadgen.clock import now_ns
from loadgen.plan import Timeouts
from loadgen.target import Target


class AiohttpTransport:
    def __init__(
        self,
        target: Target,
        error_message: Callable[[int, bytes], str],
        timeouts: Timeouts,
        *,
        fresh: bool = False,
    ) -> None:
        self.target = target
        self.error_message = error_message
        self.connect_ns = array("q")
        self.receive_lag_ns = array("q")
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s)
        self._fresh = fresh
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, connections: int) -> None:
        """Nothing to open ahead: a session opens a connection when a request needs one."""
        if self._session is not None:
            return
        trace = aiohttp.TraceConfig()

        async def started(session: object, context: object, params: object) -> None:
            context.began = now_ns()  # type: ignore[attr-defined]

        async def ended(session: object, context: object, params: object) -> None:
            self.connect_ns.append(now_ns() - context.began)  # type: ignore[attr-defined]

        trace.on_connection_create_start.append(started)
        trace.on_connection_create_end.append(ended)
        connector = aiohttp.TCPConnector(limit=0, force_close=self._fresh, ssl=ssl.create_default_context())
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, trace_configs=[trace], auto_decompress=False
        )

    def prepare(self, request: HttpRequest, request_id: str) -> HttpRequest:
        headers = (
            *self.target.headers(request).items(),
            ("X-Request-Id", request_id),
            ("Accept-Encoding", "identity"),
        )
        return HttpRequest(request.method, self.target.base_path + request.path, request.body, headers)

    def send(self, exchange: Exchange, prepared: bytes | HttpRequest) -> None:
        assert isinstance(prepared, HttpRequest)
        task = asyncio.get_running_loop().create_task(self._exchange(exchange, prepared))
        exchange.abort = task.cancel  # type: ignore[assignment]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _exchange(self, exchange: Exchange, request: HttpRequest) -> None:
        assert self._session is not None
        url = URL(self.target.url).join(URL(request.path, encoded=True))
        exchange.sent_ns = now_ns()
        try:
            async with self._session.request(
                request.method, url, data=request.body, headers=request.headers, allow_redirects=False
            ) as reply:
                exchange.headers(reply.status, now_ns())
                async for data in reply.content.iter_any():
                    if not exchange.body(data, now_ns()):
                        reply.close()
                        return
                exchange.eof(now_ns(), self.error_message)
        except aiohttp.ConnectionTimeoutError as error:
            exchange.fail("timeout", str(error), now_ns())
        except aiohttp.ClientConnectorError as error:
            exchange.fail("refused", f"no connection: {error.strerror or error}", now_ns())
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            self._broken(exchange, error)
        except aiohttp.ClientError as error:
            exchange.fail("protocol_error", f"not HTTP: {error}", now_ns())

    def _broken(self, exchange: Exchange, error: aiohttp.ClientError) -> None:
        """aiohttp raises one exception for a body cut short and a broken connection; only its text tells them apart."""
        if isinstance(error, aiohttp.ClientPayloadError) and "ConnectionResetError" not in str(error):
            exchange.eof(now_ns(), self.error_message)
        else:
            exchange.fail("reset", f"connection broke: {error}", now_ns())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._session is not None:
            await self._session.close()
