"""A server that says exactly what a test tells it to, byte for byte: the world whose truth is known."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

Step = bytes | float  # bytes to send, or seconds to wait
CLOSE, RESET = "close", "reset"
Script = Iterable[Step | str]  # may end in CLOSE or RESET; otherwise the connection stays open


@dataclass
class Scripted:
    """What the server saw. `script(n)` gives the reply to its n-th request."""

    script: Callable[[int], Script]
    url: str = ""
    requests: list[tuple[bytes, dict[str, str], bytes]] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line, *fields = head.decode("latin-1").split("\r\n")
                headers = {k.lower(): v for k, _, v in (f.partition(": ") for f in fields if f)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append((line.encode(), headers, body))
                if not await self._play(writer, self.script(len(self.requests) - 1)):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _play(self, writer: asyncio.StreamWriter, script: Script) -> bool:
        for step in script:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif step == CLOSE:
                return False
            elif step == RESET:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                return False
            else:
                await asyncio.sleep(float(step))
        return True


@contextlib.asynccontextmanager
async def scripted(
    script: Callable[[int], Script], host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[Scripted]:
    world = Scripted(script)
    server = await asyncio.start_server(world.serve, host, 0, ssl=tls, backlog=512)
    port = server.sockets[0].getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    world.url = f"{'https' if tls else 'http'}://{name}:{port}"
    try:
        yield world
    finally:
        server.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = chunk(b"")


def event(text: str = " a", finish: str | None = None) -> bytes:
    reason = f'"{finish}"' if finish else "null"
    return b'data: {"choices":[{"index":0,"text":"%s","finish_reason":%s}]}\n\n' % (text.encode(), reason.encode())


def usage(prompt: int, output: int) -> bytes:
    return b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\n' % (prompt, output)


DONE = b"data: [DONE]\n\n"


def tokens(n: int, prompt: int = 4) -> list[bytes]:
    """The chunks of a whole reply of `n` tokens in vLLM's manner."""
    body = [event() for _ in range(n - 1)] + [event(finish="length"), usage(prompt, n), DONE]
    return [STREAM_HEAD, *map(chunk, body), END]
