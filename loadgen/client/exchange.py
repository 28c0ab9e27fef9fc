"""One request and what came back: the transport reports what happened, this keeps it. No socket, no clock.

A transport calls, in order: `sent`, `headers`, `body` for each read, then exactly one of `eof` (the reply ended) or
`fail`. It may begin again, once, as long as nothing of a reply has come (`retried`). Every stamp comes from the
transport, taken once per socket read before anything is parsed.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from msgspec import UNSET

from backends.identity import TGI_NAME
from backends.protocol import (
    HELD_BACK,
    REASONING,
    TOKEN,
    Decoder,
    Delta,
    Kept,
    Prompt,
    ProtocolError,
    ReplyIdentity,
    ServerRecord,
    Truncated,
)
from backends.replies import MAX_ERROR_BYTES
from backends.untrusted import printable
from loadgen.rundir.pace import first_tokens
from loadgen.rundir.records import Record

MOST_MODELS, MOST_NAME_CHARS, OTHERS = 64, 100, "others"  # that replies name
MOST_IDS, FEWEST_IDS = 1 << 16, 2  # that are kept, and that show whether a server's ids tell its replies apart
LONG_ID, SHORT_NUMBER, SPREAD = 6, 7, 64  # characters, digits, and how far apart a series lies that is in flight
_NUMBER, _TAIL = re.compile(r"[0-9]{1,7}\Z"), re.compile(r"[0-9A-Za-z]+\Z")


class Names:
    """What the replies to one client call themselves."""

    def __init__(self, asked: str) -> None:
        """asked: the model that every request names."""
        self.asked = asked
        self._models: dict[str, str] = {}
        self._ids: dict[str, None] | None = {}  # the latest; None: this server's ids do not tell replies apart
        self._lowest, self._highest = 1 << 62, -1  # of ids that are a number, or end with one

    def take(self, identity: ReplyIdentity, adapter: str = "") -> str:
        """The model that a reply names where it is not the one, or its adapter, that was asked for. Raises
        ProtocolError for a reply with the id of an earlier one."""
        if identity.id and self._ids is not None:
            self._take_id(identity.id)
        if not identity.model or identity.model in (self.asked, adapter) or self.asked == TGI_NAME:
            return ""
        if len(self._models) < MOST_MODELS:
            return self._models.setdefault(identity.model, printable(identity.model, MOST_NAME_CHARS))
        return self._models.get(identity.model, OTHERS)

    def _take_id(self, id: str) -> None:
        assert self._ids is not None
        if id not in self._ids:
            if len(self._ids) >= MOST_IDS:
                del self._ids[next(iter(self._ids))]
            self._ids[id] = None
            if number := _NUMBER.search(id):
                self._lowest, self._highest = min(self._lowest, int(number[0])), max(self._highest, int(number[0]))
        elif len(self._ids) >= FEWEST_IDS and self._are_unique(id):
            raise ProtocolError(
                f"the reply has the id of an earlier one, {printable(id, MOST_NAME_CHARS)}: it answers another "
                "request, or comes out of a gateway's cache"
            )
        elif not _is_long(id):  # a long one is all that this server has, or the first of ids that each come twice
            self._ids = None

    def _are_unique(self, id: str) -> bool:
        """Whether two replies cannot have an id like this by chance: it is long, or one of a series. What looks like a
        time, or is drawn from a thousand numbers, does not tell replies apart."""
        assert self._ids is not None
        if _is_long(id):
            return True
        tail = _TAIL.search(id)
        close = self._highest - self._lowest < 2 * len(self._ids) + SPREAD
        return tail is not None and tail[0].isdigit() and len(tail[0]) <= SHORT_NUMBER and close


def _is_long(id: str) -> bool:
    tail = _TAIL.search(id)
    return tail is not None and not tail[0].isdigit() and len(tail[0]) >= LONG_ID


class Exchange:
    """State of one request. `on_done(self)` is called once, when the outcome is known."""

    __slots__ = (
        "abort",
        "adapter",
        "after",
        "asked_items",
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
        "items",
        "kept",
        "last_read_ns",
        "location",
        "model",
        "names",
        "on_done",
        "outcome",
        "output_tokens",
        "phase",
        "plain",
        "priority",
        "prompt",
        "prompt_tokens",
        "reasoning",
        "reasoning_tokens",
        "refusals_ns",
        "retried",
        "retry_after",
        "scheduled_ns",
        "sent_ns",
        "server",
        "session",
        "shared_tokens",
        "status",
        "take_head",
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
        self.feed: Callable[[bytes], Iterable[Delta]] = decoder.feed
        self.plain = decoder.plain
        self.take_head: Callable[[bytes], None] | None = getattr(decoder, "head", None)
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
        self.after: tuple[int, ...] = ()  # the turns that it waited for, where these were not just the one before it
        self.names: Names | None = None  # until it is known who the reply says that it is
        self.adapter = ""  # of the model, that is asked for
        self.priority: int | None = None
        self.model = ""  # that the reply names, where it is not the one that was asked for
        self.prompt: Prompt | None = None  # with what was said to it: for the session's next turn
        self.kept: Kept | None = None
        self.retried = False  # sent again after its reused connection had died
        self.refusals_ns: list[int] = []  # when it had been sent, each time that it is sent again after a refusal
        self.retry_after = ""  # what a refusal says of when to come again
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.server: ServerRecord | None = None
        self.asked_items = 0  # texts that the reply is to answer, each with a vector or a score; 0: it is a text itself
        self.items: int | None = None  # that it answers
        self.reasoning_tokens = 0
        self.times = array("q")  # arrival of each event that carried output
        self.carried: list[int] = []  # the place in `times` of each event that was not one token, and its tokens
        self.empties: list[int] = []  # the places of events that may be no output
        self.reasoning: list[int] = []  # the places of events that are no part of the answer

    @property
    def finished(self) -> bool:
        return self.done_ns >= 0

    def headers(self, status: int, now: int, location: str = "", retry_after: str = "") -> None:
        self.headers_ns = self.last_read_ns = now
        self.status = status
        if status != 200:
            self.location = location if 300 <= status < 400 else ""
            self.retry_after = retry_after
            self.feed = self._keep_error

    def abandon_after(self, tokens: int) -> None:
        """The client gives the reply up once it has brought so many tokens. Each read is parsed then."""
        self.plain, self.feed = None, self._until(tokens, self.decoder.feed)

    def _until(self, tokens: int, feed: Callable[[bytes], Iterable[Delta]]) -> Callable[[bytes], Iterator[Delta]]:
        left = tokens

        def feed_on(data: bytes) -> Iterator[Delta]:
            nonlocal left
            for delta in feed(data):
                yield delta  # and `body` takes it
                left -= delta.n_tokens
                if left <= 0 and delta.n_tokens:
                    self.fail("abandoned", "", self.last_read_ns)
                    raise ProtocolError("given up")  # `body` gives the connection up

        return feed_on

    def again(self) -> None:
        """A server that had no room is asked once more: as if it had not been sent."""
        self.refusals_ns.append(self.sent_ns)
        self.sent_ns = self.headers_ns = self.done_ns = self.last_read_ns = -1
        self.status = -1
        self.outcome = self.location = self.retry_after = ""
        self.error = None

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
        if self.names is not None and (identity := self.decoder.identity) is not None:
            names, self.names = self.names, None
            self.model = names.take(identity, self.adapter)
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
        if delta.items is not None:
            self.items = delta.items
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
            if self.asked_items and self.items != self.asked_items:
                problem = f"the reply answers {self.items or 0} of {self.asked_items} items"
                self._finish("truncated", problem, now)
            elif self.times or self.output_tokens == self.asked_tokens == 0:
                self._finish("ok", None, now)
            else:
                self._finish("truncated", "the reply ended without any output", now)

    def fail(self, outcome: str, message: str, now: int) -> None:
        if not self.finished:
            self._finish(outcome, message or None, now)

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
        sent_ns = [stamp - t0_ns for stamp in (*self.refusals_ns, self.sent_ns) if stamp >= 0]
        return Record(
            id=self.id,
            scheduled_ns=self.scheduled_ns - t0_ns,
            sent_ns=sent_ns[0] if sent_ns else None,
            headers_ns=since(self.headers_ns),
            first_token_ns=since(times[0]) if times else None,
            last_token_ns=since(times[-1]) if times else None,
            done_ns=since(self.done_ns),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            first_tokens=first_tokens(
                self.output_tokens, itl_us, self.carried, 0 if self.reasoning else self.reasoning_tokens
            ),
            reasoning_tokens=self.reasoning_tokens or len(self.reasoning) or UNSET,
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
            items=self.asked_items or UNSET,
            retried=True if self.retried else UNSET,
            resent_ns=sent_ns[1:] or UNSET,
            shared_tokens=self.shared_tokens or UNSET,
            model=self.model or UNSET,
            adapter=self.adapter or UNSET,
            priority=UNSET if self.priority is None else self.priority,
            session=self.session if self.turn > 0 else UNSET,
            turn=self.turn if self.turn > 0 else UNSET,
            after=self.after or UNSET,
            itl_us=itl_us,
        )
