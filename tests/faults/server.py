"""A server that misbehaves at one request, by the case's script, and answers every other request rightly.

Requests are told apart by the number at the end of `X-Request-Id`. Requests 0 and 1 come first, on two connections.
Request 2 is the one that the script answers; request 3 is answered beside it. Requests 4 and 5 come afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import struct
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from tests.faults.protocols import ID, JSON_HEAD, OUTPUT_TOKENS, Protocol, id_of, sized

STRUCK, BESIDE, LAST = 2, 3, 5
BESIDE_S = 0.03  # at most that the request beside waits in the middle of its reply: less than any timeout of the suite


class Act(Enum):
    """What a script does beside writing bytes and waiting for seconds."""

    CLOSE = auto()
    RESET = auto()
    END_WRITING = auto()  # closes its own direction only
    HOLD = auto()  # sends nothing more until the client closes
    WHEN_IDLE = auto()  # waits until the client has the reply and the connection lies idle


Step = bytes | float | Act
Script = Iterable[Step]


@dataclass
class Stage:
    """What server and client of one case tell each other. done: the client has the outcome of the struck request;
    played: the server has done its part."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    played: asyncio.Event = field(default_factory=asyncio.Event)


class Server:
    """`scripts`: one for each try of the struck request; further tries meet the last one again. `tries`: the numbers of
    the requests in the order of their arrival."""

    def __init__(self, protocol: Protocol, stage: Stage, whole: bool) -> None:
        self.protocol = protocol
        self.stage = stage
        self.whole = whole
        self.scripts: list[list[Step]] = []
        self.tries: list[int] = []
        self.url = ""
        self._reset_connection = -1
        self._connections = 0
        self._listening = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._port = 0

    async def listen(self) -> None:
        """Listens, if it does not, on the port that it had."""
        async with self._listening:
            if self._server is None:
                await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=1 << 20)
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        """Listens no more; connections stay."""
        assert self._server is not None
        self._server.close()
        self._server = None

    def reset_next_connection(self) -> None:
        """The next connection that is accepted is reset at once."""
        self._reset_connection = self._connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, self._connections = self._connections, self._connections + 1
        try:
            if connection == self._reset_connection:
                _reset(writer)
                self.stage.played.set()
                return
            while await self._answer(await _request_number(reader), reader, writer):
                pass
        except (asyncio.IncompleteReadError, OSError, RuntimeError, asyncio.CancelledError):
            pass  # the client has left: uvloop raises RuntimeError for a write to what is closed
        finally:
            self.stage.played.set()
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    async def _answer(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """False: nothing more comes on this connection."""
        self.tries.append(number)
        if number == STRUCK and self.scripts:
            script = self.scripts[min(self.tries.count(STRUCK), len(self.scripts)) - 1]
            try:
                return await self._play(script, reader, writer)
            finally:
                self.stage.played.set()
        begin, rest = _right_reply(self.protocol, self.whole, number)
        await _write(writer, begin)
        if number == BESIDE:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stage.played.wait(), BESIDE_S)
        await _write(writer, rest)
        return True

    async def _play(self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        for step in script:
            match step:
                case bytes():
                    await _write(writer, step)
                case Act.CLOSE:
                    return False
                case Act.RESET:
                    _reset(writer)
                    return False
                case Act.END_WRITING:
                    writer.write_eof()
                case Act.HOLD:
                    self.stage.played.set()
                    await reader.read()
                    return False
                case Act.WHEN_IDLE:
                    await self.stage.done.wait()
                case seconds:
                    await asyncio.sleep(seconds)
        return True


async def _request_number(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    body = await reader.readexactly(int(fields.get("content-length", 0)))
    asked = b'"max_new_tokens"' if b'"inputs"' in body else b'"max_tokens"'
    assert asked + b":%d" % OUTPUT_TOKENS in body
    return int(fields["x-request-id"].rpartition("-")[2])


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    await asyncio.sleep(0)  # the client shares this loop: it may read now


@functools.cache
def _right_reply(protocol: Protocol, whole: bool, number: int) -> tuple[bytes, bytes]:
    """In two halves, with an id of its own where the protocol has one."""
    writes = [sized(protocol.whole(), JSON_HEAD)] if whole else protocol.good()
    writes = [data.replace(ID, id_of(number)) for data in writes]
    middle = len(writes) // 2
    return b"".join(writes[:middle]), b"".join(writes[middle:])


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.asynccontextmanager
async def serving(protocol: Protocol, stage: Stage, whole: bool = False) -> AsyncIterator[Server]:
    server = Server(protocol, stage, whole)
    await server.listen()
    try:
        yield server
    finally:
        await server.listen()  # a case may have closed it
        server.close()
