"""One request and what came back: the transport reports what happened, this keeps it. No socket, no clock.

A transport calls, in order: `sent`, `headers`, `body` for each read, then exactly one of `eof` (the reply ended) or
`fail`. It may begin again, once, as long as nothing of a reply has come (`retried`). Every stamp comes from the
transport, taken once per socket read before anything is parsed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import UNSET

from backends.protocol import (
    HELD_BACK,
    REASONING,
    TOKEN,
    Decoder,
    Delta,
    Kept,
    Prompt,
    ProtocolError,
    ServerRecord,
    Truncated,
)
from backends.replies import MAX_ERROR_BYTES
from backends.untrusted import printable
from loadgen.rundir.pace import first_tokens
from loadgen.rundir.records import Record


class Exchange:
    """State of one request. `on_done(self)` is called once, when the outcome is known."""

    __slots__ = (
        "abort",
        "asked_prompt_tokens",
        "asked_tokens",
        "cached_tokens",
        "carried",
        "decoder",
        "done_ns",
        "empties",
        "error",
        "error_body",
        "feed",
        "headers_ns",
        "id",
        "kept",
        "last_read_ns",
        "location",
        "on_done",
        "outcome",
        "output_tokens",
        "phase",
        "plain",
        "prompt",
        "prompt_tokens",
        "reasoning",
        "reasoning_tokens",
        "retried",
        "scheduled_ns",
        "sent_ns",
        "server",
        "session",
        "shared_tokens",
        "status",
        "times",
        "turn",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        phase: str,
        scheduled_ns: int,
        asked_prompt_tokens: int,
        asked_tokens: int,
        decoder: Decoder,
        on_done: Callable[[Exchange], None],
    ) -> None:
        self.id = id
        self.phase = phase
        self.scheduled_ns = scheduled_ns
        self.asked_prompt_tokens = asked_prompt_tokens
        self.asked_tokens = asked_tokens
        self.decoder = decoder
        self.feed = decoder.feed
        self.plain = decoder.plain
        self.on_done = on_done
        self.abort: Callable[[], None] | None = None  # the transport's way to give the connection up
        self.sent_ns = self.headers_ns = self.done_ns = self.last_read_ns = -1
        self.status = -1
        self.outcome = ""
        self.error: str | None = None
        self.error_body = b""
        self.location = ""  # where a redirect points
        self.shared_tokens = 0  # of the prompt's beginning that an earlier request of the load has sent
        self.session = self.turn = -1  # of a session, the first turn being 1
        self.prompt: Prompt | None = None  # with what was said to it: for the session's next turn
        self.kept: Kept | None = None
        self.retried = False  # sent again after its reused connection had died
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.server: ServerRecord | None = None
        self.reasoning_tokens = 0
        self.times = array("q")  # arrival of each event that carried output
        self.carried: list[int] = []  # the place in `times` of each event that was not one token, and its tokens
        self.empties: list[int] = []  # the places of events that may be no output
        self.reasoning: list[int] = []  # the places of events that are no part of the answer

    @property
    def finished(self) -> bool:
        return self.done_ns >= 0

    def headers(self, status: int, now: int, location: str = "") -> None:
        self.headers_ns = self.last_read_ns = now
        self.status = status
        if status != 200:
            self.location = location
            self.feed = self._keep_error

    def body(self, data: bytes, now: int) -> bool:
        """Takes body bytes read at `now`. False: the reply is broken and the connection must be given up."""
        self.last_read_ns = now
        try:
            for delta in self.feed(data):
                if delta is TOKEN:
                    self.times.append(now)
                else:
                    self._take(delta, now)
        except ProtocolError as error:
            self.fail("protocol_error", str(error), now)
            return False
        return True

    def _keep_error(self, data: bytes) -> Sequence[Delta]:
        if len(self.error_body) < MAX_ERROR_BYTES:
            self.error_body += data
        return ()

    def _take(self, delta: Delta, now: int) -> None:
        if delta.n_tokens:
            self._take_event(delta, now)
        if delta.prompt_tokens is not None:
            self.prompt_tokens = delta.prompt_tokens
        if delta.output_tokens is not None:
            self.output_tokens = delta.output_tokens
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if delta.server is not None:
            self.server = delta.server
        if delta.reasoning_tokens is not None:
            self.reasoning_tokens = delta.reasoning_tokens
        if delta.error is not None and self.error is None:
            self.error = delta.error

    def _take_event(self, delta: Delta, now: int) -> None:
        if delta is HELD_BACK:
            self.empties.append(len(self.times))
        if delta.n_tokens != 1:
            self.carried += (len(self.times), delta.n_tokens)
        if delta is REASONING:
            self.reasoning.append(len(self.times))
        self.times.append(now)

    def _leave_out_empties(self) -> None:
        """Unless the server counts just as many tokens as there were events, and none that it hid, empty ones may be
        signs of life: all of them where it counts so many fewer, else at least those before the first text, which must
        not pass for a first token."""
        counted, empties = self.output_tokens, self.empties
        hidden = 0 if self.reasoning else self.reasoning_tokens
        surplus = len(empties) if counted is None else len(self.times) - counted
        if (surplus == 0 and not hidden) or self.carried:
            return
        leading = sum(place == at for at, place in enumerate(empties))
        left_out = set(empties if surplus >= len(empties) else empties[:leading])
        kept, reasoning = [place for place in range(len(self.times)) if place not in left_out], set(self.reasoning)
        self.reasoning = [place for place, before in enumerate(kept) if before in reasoning]
        self.empties = []
        self.times = array("q", (self.times[place] for place in kept))

    def _answer_ns(self) -> int:
        """When the answer began, of a reply whose reasoning was told apart; -1 of any other."""
        if not self.reasoning:
            return -1
        others = set(self.reasoning).union(self.empties)
        return next((stamp for place, stamp in enumerate(self.times) if place not in others), -1)

    def eof(self, now: int, error_message: Callable[[int, bytes], str]) -> None:
        """The reply ended in good order as far as HTTP can tell."""
        if self.finished:
            return
        if self.status != 200:
            message = error_message(self.status, self.error_body)
            redirect = f"; it redirects to {printable(self.location)}" if self.location else ""
            self._finish("http_error", message + redirect, now)
            return
        try:
            for delta in self.decoder.eof():
                self._take(delta, now)
        except Truncated as error:
            self._finish("truncated", str(error), now)
        except ProtocolError as error:
            self._finish("protocol_error", str(error), now)
        else:
            if self.empties:
                self._leave_out_empties()
            if self.times or self.output_tokens == self.asked_tokens == 0:
                self._finish("ok", None, now)
            else:
                self._finish("truncated", "the reply ended without any output", now)

    def fail(self, outcome: str, message: str, now: int) -> None:
        if not self.finished:
            self._finish(outcome, message, now)

    def _finish(self, outcome: str, error: str | None, now: int) -> None:
        if self.error is not None:  # the server's own error comes first, however the reply went on after it
            outcome, error = "stream_error", self.error
        self.outcome = outcome
        self.error = error
        self.done_ns = now
        self.abort = None
        self.feed = self.decoder.feed  # not a method of its own: nothing of an exchange may be a cycle
        self.error_body = b""
        self.on_done(self)

    def record(self, t0_ns: int, streamed: bool) -> Record:
        """The row of this exchange, times relative to `t0_ns`. Without streaming there is no first token to time."""

        def since(stamp: int) -> int | None:
            return stamp - t0_ns if stamp >= 0 else None

        times = self.times if streamed else self.times[:0]
        answer_ns = self._answer_ns()
        itl_us = np.diff((np.frombuffer(times, np.int64) - t0_ns) // 1000).tolist()
        return Record(
            id=self.id,
            scheduled_ns=self.scheduled_ns - t0_ns,
            sent_ns=since(self.sent_ns),
            headers_ns=since(self.headers_ns),
            first_token_ns=since(times[0]) if times else None,
            last_token_ns=since(times[-1]) if times else None,
            done_ns=since(self.done_ns),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            first_tokens=first_tokens(
                self.output_tokens, itl_us, self.carried, 0 if self.reasoning else self.reasoning_tokens
            ),
            answer_ns=answer_ns - t0_ns if streamed and answer_ns >= 0 else UNSET,
            asked_prompt_tokens=self.asked_prompt_tokens,
            asked_tokens=self.asked_tokens,
            cached_tokens=self.cached_tokens,
            events=len(times),
            status=self.status if self.status >= 0 else None,
            outcome=self.outcome,
            phase=self.phase,
            error=self.error,
            server=UNSET if self.server is None else self.server,
            retried=True if self.retried else UNSET,
            shared_tokens=self.shared_tokens or UNSET,
            session=self.session if self.turn > 0 else UNSET,
            turn=self.turn if self.turn > 0 else UNSET,
            itl_us=itl_us,
        )
