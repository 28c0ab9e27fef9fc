"""The framing alone: what of a body is the data of an event, by the rules of the HTML standard, section 9.2."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Sequence

import pytest

from backends import replies, sse
from backends.protocol import TOKEN, Delta, ProtocolError, Truncated
from backends.sse import EventReply


class Data(EventReply):
    """Keeps the data of each event; the event b"end" completes the reply."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    def read(self, data: bytes) -> Sequence[Delta]:
        self.seen.append(data.removeprefix(b" "))
        self.complete = self.complete or self.seen[-1] == b"end"
        return (TOKEN,)


def data_of(*pieces: bytes) -> list[bytes]:
    reply = Data()
    deltas = [delta for piece in pieces for delta in reply.feed(piece)]
    assert len(deltas) == len(reply.seen)
    return reply.seen


@pytest.mark.parametrize(
    ("body", "data"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data:a\n\ndata: a\n\n", [b"a", b"a"]),
        (b"data\n\ndata\ndata\n\ndata:", [b"", b"\n"]),  # an example of the standard
        (b"data:a\n data: b\n\n", None),  # a field name may not begin with a space
        (b": comment\n\n:\n\ndata: a\n: within\n\n", [b"a"]),
        (b"event: x\nid: 7\nretry: 10\ndata: a\n\n", [b"a"]),
        (b"event\nid\nretry\n\n", []),
        (b"id: 7\n\ndata: a\n\n", [b"a"]),
        (b'data: {"a":\ndata: 1}\n\n', [b'{"a":\n 1}']),
        (b"\n\n\ndata: a\n\n\n\n", [b"a"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"\xef\xbb\xbf\n\ndata: a\n\n", [b"a"]),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", None),  # a byte order mark may only come first
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\r\n\ndata: b\n\r\n", [b"a", b"b"]),
        (b"data: a\n\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\rdata: b\n\n", [b"a\n b"]),
        (b"data: a\r\ndata: b\r\n\r\n", [b"a\n b"]),
        (b"data: \xe2\x80\xa8\x0b\x0c\n\n", ["\u2028\x0b\x0c".encode()]),  # other separators end no line
        (b"Data: a\n\n", None),
        (b"hello\n\n", None),
    ],
)
def test_data_of_events(body: bytes, data: list[bytes] | None) -> None:
    ways = [[body], [bytes([byte]) for byte in body]]
    ways += [[body[:at], b"", body[at:]] for at in range(1, len(body))]
    for pieces in ways:
        if data is None:
            with pytest.raises(ProtocolError, match="not a stream of events"):
                data_of(*pieces, b"\n", b"\n")
        else:
            assert data_of(*pieces) == data


def test_the_short_way_is_the_long_way() -> None:
    """One event a read, after the first, takes another path than all else: also where it only looks like one event."""
    for tricky in (
        b"data: b\n\n",
        b"data: b\nid: 1\n\n",
        b"data: b\rdata: c\n\n",
        b"data: b\n",
        b"data: b\n\n: ",
        b"\n\n",
    ):
        assert data_of(b"data: a\n\n", tricky, b"data: z\n\n") == data_of(b"data: a\n\n" + tricky + b"data: z\n\n")


@pytest.mark.parametrize("unit", [b"data: aaaa\n", b"data\n", b"x" * 10, b": aaaaaaaaaaaaa", b"data: aaaa"])
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, unit: bytes, size: int) -> None:
    monkeypatch.setattr(sse, "MAX_BYTES", 1000)
    body = unit * 1000
    reply = Data()
    held = 0
    with pytest.raises(ProtocolError, match="longer than"):
        for at in range(0, len(body), size):
            reply.feed(body[at : at + size])
            held = at
    assert held <= 5 * 1000 + size  # of a line `data` its end alone is held


def test_an_event_too_long_is_refused_also_in_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_BYTES", 1000)
    for body in (b"data: aaaa\n" * 168 + b"\n", b"data: " + b"a" * 995 + b"\n\n"):
        with pytest.raises(ProtocolError, match="longer than"):
            data_of(body)


def test_nothing_is_read_after_a_breach() -> None:
    reply = Data()
    reply.feed(b"data: a\n\n")
    assert list(reply.feed(b"data: b\n\nhello\n\n")) == [TOKEN]
    with pytest.raises(ProtocolError, match="'hello'"):
        reply.feed(b"data: c\n\n")
    with pytest.raises(ProtocolError, match="'hello'"):
        reply.eof()
    assert reply.seen == [b"a", b"b"]


def test_events_below_the_bound_may_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_BYTES", 1000)
    body = (b"data: " + b"a" * 900 + b"\n\n: " + b"b" * 990 + b"\n") * 20
    assert data_of(*(body[at : at + 64] for at in range(0, len(body), 64))) == [b"a" * 900] * 20


def test_the_bound_is_4_mib() -> None:
    assert replies.MAX_BYTES == 4 * 1024 * 1024
    with pytest.raises(ProtocolError, match="longer than 4194304 bytes"):
        data_of(*[b"data: " + b"a" * 65530] * 65)


@pytest.mark.parametrize("unit", [b"data\n", b"data:a\n", b"data:ab\n", b"a", b":", b": x\n"])
def test_what_is_pending_takes_memory_as_it_came(unit: bytes) -> None:
    """It was twenty times as much where an event had many short lines."""
    reply, read = Data(), unit * (8192 // len(unit))
    tracemalloc.start()
    for _ in range(32):
        reply.feed(read)
    with contextlib.suppress(ProtocolError):
        reply.eof()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 32 * len(read)


@pytest.mark.parametrize(
    "left", [b"data: a", b"data: a\n", b"d", b"data: a\nid", b"data: a\n:", b"id: 7", b"data: [DON"]
)
def test_what_is_left_at_the_end_is_no_event(left: bytes) -> None:
    reply = Data()
    reply.feed(b"data: end\n\n" + left)
    with pytest.raises(Truncated, match="inside an event"):
        reply.eof()


@pytest.mark.parametrize("left", [b"", b"\n", b": half a comm", b"data:\n", b"data: [DONE]", b"data:[DONE]\n"])
def test_what_may_be_left(left: bytes) -> None:
    reply = Data()
    reply.feed(b"data: end\n\n" + left)
    assert list(reply.eof()) == []
