"""A property: however a server puts tokens into events, and a wire events into reads, no run that is called valid has a
ttft, tpot or itl that is not the truth. Bytes in, a report out; the times are made up, so the truth is exact."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import backends
from loadgen.client.exchange import Exchange
from loadgen.report import build
from loadgen.report.schema import Report
from loadgen.rundir.records import Record, table
from tests.loadgen.tables import facts, manifest

MS = 1_000_000
HEAD_MS = 1


@dataclass(frozen=True)
class Server:
    """A token every `itl_ms` from `ttft_ms` on. The first `hidden` have no event; the others are put into events by
    `groups`, and the events say how many tokens there are so far where it is `telling`. alive: empty texts before the
    first token, as keep-alives. Not drawn: events without text, these and the last one, that are just as many as tokens
    are missing: nothing tells them from tokens whose bytes are held back."""

    ttft_ms: int
    itl_ms: int
    hidden: int
    groups: tuple[int, ...]
    telling: bool
    told_reasoning: bool
    alive: int
    chat: bool

    @property
    def tokens(self) -> int:
        return self.hidden + sum(self.groups)

    def events(self) -> list[tuple[int, bytes]]:
        """When each event is sent, in ms, and the event."""
        sent = [(HEAD_MS + number, self._event("", None)) for number in range(self.alive)]
        made = self.hidden
        for group in self.groups:
            made += group
            at_ms = self.ttft_ms + (made - 1) * self.itl_ms
            sent.append((at_ms, self._event(" w" * group, made if self.telling else None)))
        return sent

    def first_ms(self) -> int:
        return self.ttft_ms + (self.hidden + self.groups[0] - 1) * self.itl_ms

    def tail(self) -> bytes:
        usage: dict[str, Any] = {"prompt_tokens": 4, "completion_tokens": self.tokens}
        if self.told_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.hidden}
        end = {"choices": [self._choice("", "stop")]}
        return _frame(end) + _frame({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"

    def _choice(self, text: str, finish: str | None = None) -> dict[str, Any]:
        return {"index": 0, **({"delta": {"content": text}} if self.chat else {"text": text}), "finish_reason": finish}

    def _event(self, text: str, total: int | None) -> bytes:
        usage = {} if total is None else {"usage": {"prompt_tokens": 4, "completion_tokens": total}}
        return _frame({"choices": [self._choice(text)], **usage})


def _frame(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


@st.composite
def servers(draw: st.DrawFn) -> Server:
    uneven = st.lists(st.integers(1, 5), min_size=2, max_size=40)
    one_each = st.integers(2, 60).map(lambda n: [1] * n)
    telling, hidden = draw(st.booleans()), draw(st.just(0) | st.integers(0, 80))
    server = Server(
        ttft_ms=draw(st.integers(10, 300)),
        itl_ms=draw(st.integers(2, 60)),
        hidden=hidden,
        groups=tuple(draw(uneven | one_each)),
        telling=telling,
        told_reasoning=draw(st.booleans()),
        alive=0 if telling else draw(st.integers(0, 3)),
        chat=draw(st.booleans()),
    )
    missing = server.tokens - len(server.groups)
    assume(telling or missing not in ({1} if not server.alive else {server.alive, server.alive + 1}))  # see `Server`
    return server


def replied(server: Server, lump_ms: int) -> Record:
    """The record of a reply whose events a proxy lets go every `lump_ms` (0: at once)."""
    done: list[Exchange] = []
    backend = backends.get("openai-chat" if server.chat else "openai")
    exchange = Exchange(0, "measured", 0, 4, server.tokens, backend.decoder(True), done.append)
    exchange.sent_ns = 0
    exchange.headers(200, HEAD_MS * MS)
    held, let_go_ms = b"", 0
    events = server.events()
    for number, (at_ms, event) in enumerate(events):
        held += event
        if at_ms - let_go_ms >= lump_ms or number == len(events) - 1:
            let_go_ms = at_ms
            assert exchange.body(held, at_ms * MS)
            held = b""
    exchange.body(server.tail(), events[-1][0] * MS)
    exchange.eof(events[-1][0] * MS, backend.error_message)
    assert done == [exchange]
    return exchange.record(0, streamed=True)


def report_of(record: Record) -> Report:
    return build.build(manifest(), table(msgspec.structs.replace(record, id=number) for number in range(5)), [facts()])


@given(servers(), st.just(0) | st.integers(1, 400))
@settings(max_examples=300, deadline=None)
def test_no_valid_run_has_a_number_that_is_not_the_truth(server: Server, lump_ms: int) -> None:
    record = replied(server, lump_ms)
    assert (record.outcome, record.output_tokens) == ("ok", server.tokens)
    report = report_of(record)
    if not report.verdict.valid:
        return
    ttft, tpot, itl = (report.metrics[name].p50 for name in ("ttft_ms", "tpot_ms", "itl_ms"))
    codes = {finding.code for finding in report.verdict.findings}
    if tpot is None:
        assert codes & {"HIDDEN_TOKENS", "BUFFERED"} or len(server.groups) < 2
    elif not lump_ms:
        assert abs(tpot / server.itl_ms - 1) < 0.021
    if not lump_ms:
        assert ttft == server.first_ms()
        gaps = sorted(group * server.itl_ms for group in server.groups[1:])
        assert itl is None or gaps[0] <= itl <= gaps[-1]


@given(servers())
@settings(max_examples=100, deadline=None)
def test_a_server_that_tells_has_its_pace(server: Server) -> None:
    """A token an event, or a running count: tpot is there, and right."""
    if not server.telling and (set(server.groups) != {1} or (server.hidden and not server.told_reasoning)):
        return
    report = report_of(replied(server, 0))
    assert report.verdict.valid
    tpot = report.metrics["tpot_ms"].p50
    assert tpot is not None and abs(tpot / server.itl_ms - 1) < 1e-3


@given(st.integers(3, 60), st.integers(2, 20))
def test_a_reply_in_one_piece_has_no_pace(tokens: int, itl_ms: int) -> None:
    server = Server(50, itl_ms, 0, (1,) * tokens, False, False, 0, True)
    report = report_of(replied(server, 1 << 20))
    assert not report.verdict.valid and report.ttft_of_delivery
    assert report.metrics["tpot_ms"].p50 is report.metrics["itl_ms"].p50 is None
    assert "BUFFERED" in {finding.code for finding in report.verdict.findings}


@pytest.mark.parametrize("counted", [True, False])
def test_reasoning_that_is_told_apart_has_its_own_first_token_and_pace(counted: bool) -> None:
    """It thinks for 3 tokens, 100 ms apart, and answers with 3 that come 100 ms and 300 ms apart."""
    done: list[Exchange] = []
    backend = backends.get("openai-chat")
    exchange = Exchange(0, "measured", 0, 4, 6, backend.decoder(True), done.append)
    exchange.sent_ns = 0
    exchange.headers(200, MS)
    for at, delta in enumerate([{"reasoning_content": "a"}] * 3 + [{"content": "b"}] * 3, 1):
        exchange.body(_frame({"choices": [{"index": 0, "delta": delta}]}), (100 * at + 200 * (at == 6)) * MS)
    exchange.body(_frame({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}), 800 * MS)
    usage: dict[str, Any] = {"prompt_tokens": 4, "completion_tokens": 6}
    if counted:
        usage["completion_tokens_details"] = {"reasoning_tokens": 3}
    exchange.body(_frame({"choices": [], "usage": usage}) + b"data: [DONE]\n\n", 800 * MS)
    exchange.eof(800 * MS, backend.error_message)
    assert exchange.times == array("q", [100 * at * MS for at in (1, 2, 3, 4, 5, 8)])
    report = report_of(exchange.record(0, streamed=True))
    thought = report.reasoning
    assert thought is not None and thought.replies == 5
    assert (thought.thinking_tokens_mean, thought.thinking_ratio) == (3, 0.5)
    assert thought.thinking_ms.p50 == 300 and thought.answer_tpot_ms.p50 == 200
    assert report.metrics["ttft_ms"].p50 == 100
    assert report.ttft_answer_ms is not None and report.ttft_answer_ms.p50 == 400
    assert report.metrics["tpot_ms"].p50 == 140


def test_hidden_reasoning_has_a_share_and_no_time() -> None:
    done: list[Exchange] = []
    backend = backends.get("openai-chat")
    exchange = Exchange(0, "measured", 0, 4, 12, backend.decoder(True), done.append)
    exchange.sent_ns = 0
    exchange.headers(200, MS)
    for at in range(1, 4):
        exchange.body(_frame({"choices": [{"index": 0, "delta": {"content": "b"}}]}), (1000 + 100 * at) * MS)
    exchange.body(_frame({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}), 1300 * MS)
    usage = {"prompt_tokens": 4, "completion_tokens": 12, "completion_tokens_details": {"reasoning_tokens": 9}}
    exchange.body(_frame({"choices": [], "usage": usage}) + b"data: [DONE]\n\n", 1300 * MS)
    exchange.eof(1300 * MS, backend.error_message)
    thought = report_of(exchange.record(0, streamed=True)).reasoning
    assert thought is not None and thought.thinking_ratio == 0.75 and thought.thinking_ms.n == 0
    assert thought.answer_tpot_ms.n == 0  # tpot is that of the answer already
