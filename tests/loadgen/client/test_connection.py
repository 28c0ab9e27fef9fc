"""The hot path's short cut must not show: however a reply is cut into reads, the same is recorded."""

from __future__ import annotations

from array import array
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backends
from loadgen.client.connection import Connection
from loadgen.client.exchange import Exchange
from tests.loadgen.scripted import DONE, END, STREAM_HEAD, chunk, event, usage

VLLM = backends.get("vllm")
CHAT = backends.get("openai-chat")


def told(reads: list[bytes], backend: backends.Backend = VLLM) -> tuple[Any, ...]:
    """What an exchange keeps of these reads; the k-th is stamped k."""
    owner: Any = SimpleNamespace(
        plain=True,
        reuse=True,
        idle={},
        receive_lag_ns=array("q"),
        error_message=backend.error_message,
        forget=lambda _: None,
    )
    connection = Connection(owner, None)  # type: ignore[arg-type]
    connection.transport = SimpleNamespace(abort=lambda: None)  # type: ignore[assignment]
    exchange = Exchange(0, "measured", 0, 4, 3, backend.decoder(True), lambda _: None)
    connection.exchange = exchange
    connection.in_headers = True
    exchange.sent_ns = 0
    for number, read in enumerate(reads, 1):
        connection.read(read, number)
    counts = (exchange.prompt_tokens, exchange.output_tokens, exchange.cached_tokens)
    count = exchange.plain.count if exchange.plain is not None else 0
    return exchange.outcome, exchange.error, len(exchange.times), count, counts


def chat(text: str) -> bytes:
    return b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}\n\n' % text.encode()


# Texts that look alike to a careless eye: quotes, escapes, other lengths and characters, none, and frames in text.
TEXTS = (
    *("a", " b", "cc", "dddddddddddddddddd", "", "é", "f3", "data: {"),
    *('\\"', "\\\\", "\\u00e9", "\\n\\n", '\\",\\"finish_reason\\":\\"stop', '\\"text\\":\\"x'),
)
BROKEN = [
    b'data: {"choices":[{"index":0,"text":"a"b","finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"a\x01","finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"\xff","finish_reason":null}]}\n\n',
    b'data: {"error":{"message":"died"}}\n\n',
    b": keep-alive\n\n",
]


@st.composite
def replies(draw: st.DrawFn) -> bytes:
    texts = draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=12))
    events = [event(text) for text in texts]
    if draw(st.booleans()):
        events.insert(draw(st.integers(0, len(events))), draw(st.sampled_from(BROKEN)))
    events += [event("z", "length"), usage(4, len(texts) + 1), DONE]
    together = draw(st.lists(st.integers(0, len(events)), max_size=3))
    chunks, at = [], 0
    for cut in [*sorted(set(together)), len(events)]:
        chunks += (
            [chunk(b"".join(events[at:cut]))] if cut - at > 1 and draw(st.booleans()) else map(chunk, events[at:cut])
        )
        at = cut
    return b"".join([STREAM_HEAD, *chunks, END])


@given(replies(), st.lists(st.integers(0, 2000), max_size=12))
@settings(deadline=None, max_examples=400)
def test_any_cut_tells_the_same(reply: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(reply)}), len(reply)]
    pieces = [reply[a:b] for a, b in pairwise(edges)]
    by_chunk = [part + b"\n\n\r\n" for part in reply.split(b"\n\n\r\n")[:-1]] + [reply.rpartition(b"\n\n\r\n")[2]]
    assert b"".join(by_chunk) == reply
    whole = told([reply])
    assert told(pieces) == whole
    assert told(by_chunk) == whole
    assert told([bytes([byte]) for byte in reply]) == whole


def test_no_short_cut_after_a_breach_that_came_with_a_token() -> None:
    """The breach is raised by the next read; what it holds must not be taken for one more token before that."""
    plain, broken = event("a"), event('a"b')
    reads = [STREAM_HEAD + chunk(plain), chunk(plain), chunk(plain + broken), chunk(plain)]
    assert told(reads)[:3] == told([b"".join(reads)])[:3]
    assert told(reads)[0] == "protocol_error" and told(reads)[2] == 3


@pytest.mark.parametrize(("backend", "frame"), [(VLLM, event), (CHAT, chat)])
def test_the_short_cut_is_taken(backend: backends.Backend, frame: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    whole_parse = Connection.parse
    monkeypatch.setattr(Connection, "parse", lambda self, data: (parsed.append(data), whole_parse(self, data)))
    texts = ["one", "two", "six", '\\"no', "ten", "three", "seven", "ten"]
    reads = [STREAM_HEAD, *(chunk(frame(text)) for text in texts)]
    outcome = told(reads, backend)
    assert outcome[2:4] == (len(texts), len(texts))
    # The first event may begin with a byte order mark, "two" is learned; then what is not plain or of a new size.
    assert parsed == [STREAM_HEAD, *(chunk(frame(text)) for text in ("one", "two", '\\"no', "three"))]


def test_every_plain_token_is_stamped() -> None:
    reads = [
        STREAM_HEAD,
        *[chunk(event(" x"))] * 50,
        chunk(event(finish="length")),
        chunk(usage(4, 51)),
        chunk(DONE),
        END,
    ]
    assert told(reads) == ("ok", None, 51, 51, (4, 51, None))
