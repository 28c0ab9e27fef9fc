"""Known answers for the shapes that servers, gateways and proxies give a reply of 40 tokens: the first one is made
100 ms after the request, and one more every 20 ms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import backends
from loadgen.client.exchange import Exchange
from loadgen.report import build
from loadgen.report.schema import Report
from loadgen.rundir.records import Record, table
from tests.loadgen.tables import facts, manifest

MS = 1_000_000
TOKENS, TTFT_MS, ITL_MS = 40, 100, 20
Events = list[tuple[float, bytes]]


def event(choices: list[Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


def delta(finish: str | None = None, **fields: Any) -> list[Any]:
    return [{"index": 0, "delta": fields, "finish_reason": finish}]


def used(tokens: Any = TOKENS, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": 4, "completion_tokens": tokens, **more}


def at_ms(token: int) -> float:
    return TTFT_MS + ITL_MS * (token - 1)


def tokens(first: int = 1, last: int = TOKENS, finish: str | None = None, **more: Any) -> Events:
    return [(at_ms(n), event(delta(finish, content=f" w{n}"), **more)) for n in range(first, last + 1)]


def each(last: int, **fields: Any) -> Events:
    """Tokens up to `last` whose deltas have these fields."""
    return [(at_ms(n), event(delta(**fields))) for n in range(1, last + 1)]


def signs(**fields: Any) -> Events:
    """Three events long before the first token."""
    return [(3 + n, event(delta(**fields))) for n in range(3)]


def end(usage: dict[str, Any] | None = None) -> Events:
    return [
        (at_ms(TOKENS), event(delta("stop"))),
        (at_ms(TOKENS), event([], usage=used() if usage is None else usage)),
        (at_ms(TOKENS), b"data: [DONE]\n\n"),
    ]


def recorded(events: Events) -> Record:
    backend, done = backends.get("openai-chat"), list[Exchange]()
    exchange = Exchange(0, "measured", 0, 4, TOKENS, backend.decoder(True), done.append)
    exchange.sent_ns = 0
    exchange.headers(200, MS)
    for at, data in events:
        assert exchange.body(data, int(at * MS))
    exchange.eof(int(events[-1][0] * MS), backend.error_message)
    assert [each.outcome for each in done] == ["ok"]
    return exchange.record(0, streamed=True)


def reported(events: Events) -> Report:
    record = recorded(events)
    return build.build(manifest(), table(msgspec.structs.replace(record, id=n) for n in range(20)), [facts()])


PARTS = [{"type": "thinking", "thinking": [{"type": "text", "text": "so"}]}]
HIDDEN = {"completion_tokens_details": {"reasoning_tokens": 30}}
SHAPES = {
    # name: events, ttft, tpot, ttft of the answer
    "thoughts in parts": ([*each(30, content=PARTS), *tokens(31), *end()], 100, 20, 700),
    "texts in parts": ([*each(TOKENS, content=[{"type": "text", "text": "a"}]), *end()], 100, 20, None),
    "parts of no text": ([*signs(content=[{"type": "text", "text": ""}]), *tokens(), *end()], 100, 20, None),
    "thinking": ([*each(30, thinking="so"), *tokens(31), *end()], 100, 20, 700),
    "reasoning details": ([*each(30, content="", reasoning_details=[{}]), *tokens(31), *end()], 100, 20, 700),
    "signs of life in thoughts": ([*signs(reasoning_content=""), *tokens(31), *end(used(**HIDDEN))], 700, 20, None),
    "signs of life as many as hidden tokens": (
        [*signs(content=""), *tokens(4), *end(used(completion_tokens_details={"reasoning_tokens": 3}))], 160, 20, None,
    ),
    "thoughts summed up": ([*each(2, reasoning_content="so"), *tokens(31), *end(used(**HIDDEN))], 100, None, 700),
    "a function's call": ([*each(TOKENS, function_call={"arguments": "a"}), *end()], 100, 20, None),
    "sound": ([*each(TOKENS, audio={"data": "aa"}), *end()], 100, 20, None),
    "usage of 0 in each": ([*tokens(usage=used(0)), *end()], 100, 20, None),
    "usage of 1 in each": ([*tokens(usage=used(1)), *end()], 100, 20, None),
    "the whole reply's usage in each": ([*tokens(usage=used()), *end()], 100, 20, None),
    "counts as floats": ([*tokens(), *end(used(40.0))], 100, 20, None),
    "null as a word": ([*tokens(finish="null"), *end()], 100, 20, None),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str) -> None:
    events, ttft, tpot, answer = SHAPES[shape]
    report = reported(events)
    assert report.verdict.valid
    assert report.metrics["ttft_ms"].p50 == ttft
    assert report.metrics["tpot_ms"].p50 == (None if tpot is None else pytest.approx(tpot))
    assert (report.ttft_answer_ms.p50 if report.ttft_answer_ms else None) == answer
    if tpot is None:
        assert "HIDDEN_TOKENS" in {finding.code for finding in report.verdict.findings}


def test_usage_of_0_in_each_event_and_none_at_the_end_is_no_count() -> None:
    record = recorded(
        [*tokens(usage=used(0)), (at_ms(TOKENS), event(delta("stop"))), (at_ms(TOKENS), b"data: [DONE]\n\n")]
    )
    assert (record.events, record.output_tokens) == (TOKENS, None)


def held_until(token: int, events: Events) -> Events:
    late = [data for at, data in events if at <= at_ms(token)]
    return [(at_ms(token), b"".join(late)), *events[len(late) :]]


def lumped(events: Events, every: int, apart_ms: float) -> Events:
    """Let go every so many events, each in a read of its own."""

    def spread() -> Iterator[tuple[float, bytes]]:
        for first in range(0, len(events), every):
            lump = events[first : first + every]
            yield from ((lump[-1][0] + apart_ms * place, data) for place, (_, data) in enumerate(lump))

    return list(spread())


@pytest.mark.parametrize(
    ("events", "code"),
    [
        (held_until(10, [*tokens(), *end()]), "BUFFERED"),
        (held_until(4, [*tokens(), *end()]), "BUFFERED"),
        (lumped([*tokens(), *end()], 5, 0.05), "GROUPED_EVENTS"),
        (lumped([*tokens(), *end()], 5, 0.5), "GROUPED_EVENTS"),
        (lumped([*tokens(), *end()], 2, 1.2), "GROUPED_EVENTS"),
        (lumped([*tokens(), *end()], 5, 1.0), "GROUPED_EVENTS"),
        (lumped([*tokens(), *end()], 99, 0.05), "BUFFERED"),
        (lumped([*tokens(), *end()], 99, 0.2), "BUFFERED"),
    ],
)
def test_what_holds_a_stream_back_is_told_however_it_lets_go(events: Events, code: str) -> None:
    report = reported(events)
    assert not report.verdict.valid
    assert code in {finding.code for finding in report.verdict.findings if finding.severity == "invalid"}
    assert report.ttft_of_delivery or code == "GROUPED_EVENTS" or report.metrics["tpot_ms"].p50 is not None


def test_a_server_that_is_a_token_late_holds_nothing_back() -> None:
    report = reported(held_until(2, [*tokens(), *end()]))
    assert report.verdict.valid and report.metrics["tpot_ms"].p50 == pytest.approx(ITL_MS)


def test_a_replay_that_a_server_could_be_is_a_warning() -> None:
    report = reported(lumped([*tokens(), *end()], 99, 0.6))
    assert report.verdict.valid
    assert "BUFFERED" in {finding.code for finding in report.verdict.findings}
