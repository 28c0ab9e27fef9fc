"""What lies between the server and its clients: a wire that bends their times, as real servers and proxies have it.

nagle     TCP_NODELAY is not set: the kernel holds small writes back until the client has acknowledged the headers,
          which its kernel delays by 40 ms on a kept connection (TGI, sglang-router, Dynamo's frontend)
whole     a proxy keeps a reply and sends it in one piece (the defaults of HAProxy and lighttpd)
lumps:MS  a proxy sends what has come every MS milliseconds
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass
from time import monotonic_ns

from servers.serve.http import ConnectionOwner, ServerConnection
from servers.serve.wire import Headers

KINDS = {
    "clean": "each event leaves at once",
    "nagle": "small writes wait for the client's ACK",
    "whole": "a reply leaves in one piece",
    "lumps:MS": "what has come leaves every MS milliseconds",
}
HELP = ", ".join(f"{kind} ({does})" for kind, does in KINDS.items())


@dataclass(frozen=True)
class Between:
    """lump_ms: how long events are kept; 0: not at all, infinite: until the reply's end."""

    nagle: bool = False
    lump_ms: float = 0.0

    def accepted(self, sock: socket.socket, server: ConnectionOwner) -> ServerConnection:
        """The connection of a client that the listener took."""
        return KeptConnection(sock, server, self.lump_ms) if self.lump_ms else ServerConnection(sock, server)


CLEAN = Between()


def read(text: str) -> Between:
    """Raises ValueError with one sentence."""
    kind, colon, amount = text.partition(":")
    if not colon and kind in ("clean", "nagle", "whole"):
        return Between(nagle=kind == "nagle", lump_ms=math.inf if kind == "whole" else 0.0)
    try:
        lump_ms = float(amount) if kind == "lumps" else math.nan
    except ValueError:
        lump_ms = math.nan
    if not 0 < lump_ms <= 60_000:
        raise ValueError(f"--wire '{text}' is no wire; use {HELP}, MS above 0 and at most 60000.")
    return Between(lump_ms=lump_ms)


class KeptConnection(ServerConnection):
    """A connection whose streams are kept and let go in pieces, as a proxy does it that an event wakes up."""

    def __init__(self, sock: socket.socket, server: ConnectionOwner, lump_ms: float) -> None:
        super().__init__(sock, server)
        self._lump_ms = lump_ms
        self._kept = bytearray()
        self._let_go_ns = 0
        self._streaming = False

    def begin_stream(self, content_type: str, headers: Headers = ()) -> None:
        if math.isfinite(self._lump_ms):  # a proxy that has the headers sends them on
            super().begin_stream(content_type, headers)
        else:
            self._kept += self.stream_head(content_type, headers)
        self._streaming, self._let_go_ns = True, monotonic_ns()

    def send(self, data: bytes) -> None:
        if not self._streaming:
            super().send(data)
            return
        self._kept += data
        now_ns = monotonic_ns()
        if now_ns - self._let_go_ns >= self._lump_ms * 1e6:
            self._let_go_ns = now_ns
            self._let_go()

    def end_stream(self, last: bytes, behind: bytes = b"") -> None:
        self._kept += self.stream_end(last) + behind
        self._streaming = False
        self._let_go()
        self._finish()

    def _let_go(self) -> None:
        data = bytes(self._kept)
        self._kept.clear()
        super().send(data)
