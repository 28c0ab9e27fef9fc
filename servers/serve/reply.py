"""One accepted request on its way out: which bytes leave at each token that falls due, and what is remembered of it.

The timing calls `emit` once a token; everything else follows from that. A plain token in the middle of a stream is the
hot path and does no more than make the event, stamp it and hand it to the socket; the first token, the last one and
whatever a fault does take the other. A reply whose client has left sends nothing more.
"""

from __future__ import annotations

from array import array
from time import monotonic_ns
from typing import Protocol

from servers.serve.faults import FIRST, MIDWAY, Fault
from servers.serve.http import ServerConnection
from servers.serve.telemetry import Telemetry
from servers.serve.wire import Dialect, Finish, Page, Wire

COALESCED_EVENTS = 4
JUNK = b"junk\r\n"
GARBAGE = b'data: {"id":"\x00\xff\xfe","choices":[{"text":\n\n'


class ReplyOwner(Protocol):
    """What a reply needs of the server that accepted its request."""

    dialect: Dialect
    telemetry: Telemetry

    def ended(self, reply: Reply, finish: Finish | None, failure: str) -> None:
        """The reply is over, complete for the reason `finish` or broken off by `failure`."""


class Reply:
    """Times are monotonic nanoseconds; `first_ns` and `last_ns` are stamps of tokens, 0 before the first.

    `stamps` holds one time for each event that carried tokens, taken right before it was handed to the kernel; a reply
    that is not streamed has one for the whole. `together`: where a request asks for several sequences, those of its
    replies that are still under way, this one too; they share the connection, and the last to end ends it.
    """

    def __init__(
        self,
        server: ReplyOwner,
        connection: ServerConnection,
        wire: Wire,
        index: int,
        request_id: str,
        fault: Fault | None,
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.received_ns = connection.received_ns
        self.n_prompt_tokens = wire.prompt_tokens
        self.n_cached_tokens = 0
        self.max_tokens = self.n_tokens = wire.output_tokens
        self.count = 0
        self.first_ns = self.last_ns = 0
        self.stamps = array("q")
        self.together: list[Reply] = []
        self._server = server
        self.connection = connection
        self._wire = wire
        self._finish: Finish = "length"
        self._kind = fault.kind if fault else ""
        self._token = wire.token
        self._send = connection.send
        self._observe_itl = server.telemetry.itl.observe
        self._streaming = wire.streaming
        # plain tokens are those of HTTP/1.1 alone
        self._none_plain = self._kind in ("merge", "coalesce") or (wire.streaming and not connection.chunked)
        self._special = 1  # the next token that is not a plain one
        self._held_tokens = 0  # due, and waiting for the event that will carry them
        self._held_events: list[bytes] = []
        self._change_facts()
        self.segments, self.adapter = wire.segments(self.n_tokens), wire.adapter
        self.priority = wire.priority
        self._midway = 0
        if self._kind in FIRST:
            self._midway = 1
        elif self._kind in MIDWAY:
            whole = self._kind == "stream_error" and wire.failure_before_output
            self._midway = 1 if whole else self.n_tokens // 2 + 1

    def emit(self) -> None:
        """The next token is due: sends it."""
        self.count = count = self.count + 1
        if count == self._special:
            self._emit_special(count)
            return
        if self._streaming:
            event = self._token(count)
            chunk = b"%x\r\n%b\r\n" % (len(event), event)
            now_ns = monotonic_ns()
            self._send(chunk)
            self.stamps.append(now_ns)
        else:
            now_ns = monotonic_ns()
        self._observe_itl(now_ns - self.last_ns)
        self.last_ns = now_ns

    def found(self, cached_tokens: int) -> None:
        """So many tokens of the prompt were in the prefix cache."""
        self.n_cached_tokens = self._wire.cached_tokens = cached_tokens

    def abandon(self) -> None:
        """The client has left."""
        if self._kind != "unnoticed":
            self._break_off("client left")

    def _break_off(self, failure: str) -> None:
        for reply in [*self.together] or [self]:
            self._server.ended(reply, None, failure)

    def _change_facts(self) -> None:
        wire = self._wire
        if self._kind == "short":
            self.n_tokens = max(1, self.n_tokens // 2)
            self._finish = "stop"
        elif self._kind == "cached":
            self.n_cached_tokens = wire.cached_tokens = wire.prompt_tokens // 2
        elif self._kind == "wrong_prompt_tokens":
            wire.prompt_tokens += 1

    def _emit_special(self, count: int) -> None:
        if count == self._midway and self._strike():
            return
        last = count == self.n_tokens
        self._special = count + 1 if self._none_plain else self._next_special(count)
        self._held_tokens += 1
        if self._kind == "merge" and self._held_tokens < 2 and not last:
            return
        if self._streaming:
            event = self._wire.event(count, self._held_tokens, self._finish if last else None)
            self._held_events.append(self.connection.framed(event))
        self._held_tokens = 0
        if self._kind == "coalesce" and len(self._held_events) < COALESCED_EVENTS and not last and self._streaming:
            return
        self._flush()
        if last:
            self._complete()

    def _next_special(self, count: int) -> int:
        return self._midway if count < self._midway else self.n_tokens

    def _flush(self) -> None:
        """Sends what is held, and stamps it."""
        data = b"".join(self._held_events)
        now_ns = monotonic_ns()
        if data:
            self._send(data)
            self.stamps.extend([now_ns] * len(self._held_events))
            self._held_events.clear()
        if self.first_ns:
            self._observe_itl(now_ns - self.last_ns)
            self.last_ns = now_ns
        else:
            self.first_ns = self.last_ns = now_ns
            self._server.telemetry.first_token(self)

    def _complete(self) -> None:
        if not self.connection.open:
            if self._kind == "unnoticed":
                self._server.ended(self, self._finish, "")
            return
        self._server.ended(self, self._finish, "")
        connection, wire = self.connection, self._wire
        wire.ends(self.count, self._finish)
        wire.took_ns = (self.first_ns - self.received_ns, self.last_ns - self.first_ns)
        if self.together:
            return
        if self._streaming:
            tail = wire.tail(self.count, done=self._kind != "no_done")
            if self._kind == "late_token":
                tail += wire.token(self.count)
            connection.end_stream(tail, self._behind(tail))
        else:
            seconds = (self.last_ns - self.received_ns) / 1e9
            self.stamps.append(monotonic_ns())
            page = wire.whole(self.count, self._finish, seconds)
            again = connection.page(page) if self._kind == "unasked_reply" else b""
            connection.respond(page, JUNK if self._kind == "junk_after" else again)
        if self._kind == "close_idle":
            connection.close_when_sent()

    def _behind(self, tail: bytes) -> bytes:
        """What a fault sends behind the end of a stream."""
        if self._kind == "junk_after":
            return JUNK
        if self._kind != "unasked_reply":
            return b""
        reply = self._wire.event(self.count, self.count, self._finish) + tail
        head = self.connection.stream_head(self._wire.content_type, self._wire.headers)
        return head + self.connection.stream_end(reply)

    def _strike(self) -> bool:
        """Breaks the reply midway. False where it goes on after that."""
        self.count -= 1  # the token that was due is not sent
        connection, kind = self.connection, self._kind
        if kind == "garbage" and self._streaming:
            self.count += 1
            connection.send(connection.framed(GARBAGE))
            return False
        self._break_off(kind)
        if kind == "reset":
            connection.reset()
        elif kind == "done_only" and self._streaming:
            connection.end_stream(self._wire.done)
        elif kind == "done_only":
            connection.respond(Page(200, b""))
        elif kind == "bad_chunk":
            connection.send(b"zz\r\n")
        elif kind == "truncate":
            if not self._streaming:
                connection.send_cut(self._wire.whole(self.n_tokens, self._finish, 0.0))
            connection.close()
        elif kind == "stream_error" and self._streaming:
            connection.end_stream(self._wire.failure())
        elif kind == "stream_error":
            connection.respond(self._server.dialect.error(500))
        elif kind == "garbage":
            connection.respond(Page(200, GARBAGE))
        return True  # stall: the connection stays as it is
