"""The truth about HTTP: heads, framing, statuses, and bytes that belong to no reply."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from dataclasses import replace

from tests.faults.case import OK, Case, Expected
from tests.faults.protocols import (
    ALL,
    CHAT,
    END,
    EVENT_STREAM,
    HEAD,
    HTTP_OK,
    ID,
    JSON_HEAD,
    LIGHTLLM,
    MESSAGE,
    OPENAI,
    TGI,
    VLLM,
    Protocol,
    chunk,
    id_of,
    sized,
    stream,
)
from tests.faults.server import Act, Script, Step

NOT_HTTP = Expected(outcome="protocol_error", error="not HTTP", events=0)
TRUNCATED = Expected(outcome="truncated")
CLOSING = EVENT_STREAM + b"Connection: close\r\n"
NEVER = Expected(outcome="timeout", error="silent")
NEXT_REPLY = "aiohttp takes the bytes that follow for the next reply, and reports these"
LENIENT = "aiohttp reads what HTTP/1.0 allowed, as RFC 9112 leaves a client free to do"
BROKEN_CHUNK = "aiohttp does not report a broken chunk: the idle timeout ends the request"


def body(protocol: Protocol) -> bytes:
    return b"".join(protocol.reply())


def whole_reply(protocol: Protocol) -> bytes:
    return b"".join(protocol.good())


def in_turns(cases: list[Case]) -> list[Case]:
    """HTTP lies below the protocols: each of these cases is played over two of them, in turns."""
    pairs = itertools.cycle(((VLLM, TGI), (CHAT, LIGHTLLM)))
    return [replace(case, protocols=next(pairs)) if case.protocols == ALL else case for case in cases]


def foreign_reply(protocol: Protocol) -> bytes:
    """A whole reply of 3 tokens, which no request asked for: who takes it for its own has 3, not 8."""
    return b"".join(stream(*protocol.reply(3)))


def pieces(data: bytes, size: int) -> list[Step]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def headed(head: bytes, after: bytes = b"") -> Script:
    """A reply that begins with `head` in place of the right one, up to the empty line; nothing more comes after it."""
    return [head + after]


def with_head(head: bytes) -> Callable[[Protocol], Script]:
    """The right reply in chunks after this head."""
    return lambda protocol: [head + b"Transfer-Encoding: chunked\r\n\r\n", *stream(*protocol.reply())[1:]]


def error_reply(status: bytes, content: bytes, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 " + status + b"\r\n" + more + b"Content-Length: %d\r\n\r\n" % len(content) + content


def status_of_its_own(status: bytes) -> Callable[[Protocol], Script]:
    return lambda protocol: [error_reply(status, json.dumps(protocol.error()).encode())]


def http_error(error: str) -> Expected:
    return Expected(outcome="http_error", error=error, events=0)


def redirect(status: bytes) -> Case:
    code = status[:3].decode()
    return Case(
        name=f"redirect {code}",
        does=f"answers {status.decode()} with a Location",
        expected=http_error("http://elsewhere.invalid/v1"),
        script=lambda protocol: [error_reply(status, b"", b"Location: http://elsewhere.invalid/v1\r\n")],
        protocols=(VLLM, LIGHTLLM),
    )


def error_status(status: bytes) -> Case:
    code = status[:3].decode()
    return Case(
        name=f"status {code}",
        does=f"answers {status.decode()} with its own error body",
        expected=http_error(f"{status.decode()}: {MESSAGE}"),
        script=status_of_its_own(status),
    )


def broken_head(name: str, does: str, head: bytes, protocols: tuple[Protocol, ...] = (VLLM, TGI)) -> Case:
    return Case(name=name, does=does, expected=NOT_HTTP, script=lambda _: headed(head), protocols=protocols)


CODING = [
    Case(
        name="chunk extensions",
        does="adds extensions to the sizes of chunks",
        expected=OK,
        script=lambda p: [HEAD, *(b"%x;a=b\r\n%b\r\n" % (len(e), e) for e in p.reply()), END],
    ),
    Case(
        name="chunk sizes with zeros",
        does="writes the sizes of chunks in capitals with leading zeros",
        expected=OK,
        script=lambda p: [HEAD, *(b"%08X\r\n%b\r\n" % (len(e), e) for e in p.reply()), END],
    ),
    Case(
        name="trailers",
        does="sends trailers after the last chunk",
        expected=OK,
        script=lambda p: [*p.good()[:-1], b"0\r\nX-Sum: 1\r\nServer-Timing: a;dur=1\r\n\r\n"],
    ),
    Case(name="content length", does="states the length of the body", expected=OK, script=lambda p: [sized(body(p))]),
    Case(
        name="http 1.0",
        does="answers in HTTP/1.0 without a length and closes",
        expected=OK,
        script=lambda p: [b"HTTP/1.0 200 OK\r\n" + EVENT_STREAM + b"\r\n", *p.reply(), Act.CLOSE],
    ),
    Case(
        name="until close",
        does="answers in HTTP/1.1 without a length and closes",
        expected=OK,
        script=lambda p: [HTTP_OK + EVENT_STREAM + b"\r\n", *p.reply(), Act.CLOSE],
    ),
    Case(
        name="connection close",
        does="announces that it closes, and closes",
        expected=OK,
        script=lambda p: [HEAD.replace(EVENT_STREAM, CLOSING), *p.good()[1:], Act.CLOSE],
    ),
    Case(
        name="announced close",
        does="announces that it closes, and does not",
        expected=OK,
        script=lambda p: [HEAD.replace(EVENT_STREAM, CLOSING), *p.good()[1:]],
    ),
    Case(
        name="early answer",
        does="sends the reply in one write with 100 Continue before it",
        expected=OK,
        script=lambda p: [b"HTTP/1.1 100 Continue\r\n\r\n" + whole_reply(p)],
    ),
    Case(
        name="1xx before the reply",
        does="sends 102 and 103 with headers before the reply",
        expected=OK,
        script=lambda p: [
            b"HTTP/1.1 102 Processing\r\n\r\n",
            b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n",
            *p.good(),
        ],
    ),
    Case(
        name="bad chunk size",
        does="sends a chunk size that is no number, midway",
        expected=Expected(outcome="protocol_error", error="not HTTP", events=4),
        aiohttp=Expected(outcome="timeout", error="silent", events=4),
        why=BROKEN_CHUNK,
        limit="idle",
        script=lambda p: [HEAD, *map(chunk, p.begin()), b"zz\r\n", Act.HOLD],
        protocols=(VLLM, LIGHTLLM),
    ),
    Case(
        name="negative chunk size",
        does="sends a negative chunk size, midway",
        expected=Expected(outcome="protocol_error", error="not HTTP", events=4),
        aiohttp=Expected(outcome="timeout", error="silent", events=4),
        why=BROKEN_CHUNK,
        limit="idle",
        script=lambda p: [HEAD, *map(chunk, p.begin()), b"-5\r\nabcde\r\n", Act.HOLD],
        protocols=(VLLM, TGI),
    ),
    Case(
        name="huge chunk size",
        does="sends a chunk size beyond 64 bits, midway",
        expected=Expected(outcome="protocol_error", error="not HTTP", events=4),
        aiohttp=Expected(outcome="timeout", error="silent", events=4),
        why=BROKEN_CHUNK,
        limit="idle",
        script=lambda p: [HEAD, *map(chunk, p.begin()), b"f" * 17 + b"\r\n", Act.HOLD],
        protocols=(VLLM, TGI),
    ),
    Case(
        name="chunk longer than its size",
        does="sends more bytes than the size of the chunk, midway",
        expected=Expected(outcome="protocol_error", error="not HTTP"),
        aiohttp=Expected(outcome="timeout", error="silent"),
        why=BROKEN_CHUNK,
        limit="idle",
        script=lambda p: [HEAD, *map(chunk, p.begin()), b"3\r\n" + p.token(5) + b"\r\n", Act.HOLD],
        protocols=(CHAT, TGI),
    ),
    Case(
        name="chunk shorter than its size",
        does="closes within a chunk",
        expected=Expected(outcome="truncated", events=5),
        script=lambda p: [HEAD, *map(chunk, p.begin()), b"ffff\r\n" + p.token(5), Act.CLOSE],
    ),
    Case(
        name="length too short",
        does="states a length of half of the body, and sends all of it",
        expected=Expected(outcome="truncated"),
        aiohttp=Expected(outcome="protocol_error", error="not HTTP"),
        why=NEXT_REPLY,
        script=lambda p: [HTTP_OK + EVENT_STREAM + b"Content-Length: %d\r\n\r\n" % (len(body(p)) // 2) + body(p)],
    ),
    Case(
        name="length too long",
        does="states a length beyond the body, and keeps the connection",
        expected=Expected(outcome="timeout", error="silent", events=8),
        limit="idle",
        script=lambda p: [
            HTTP_OK + EVENT_STREAM + b"Content-Length: %d\r\n\r\n" % (len(body(p)) + 9) + body(p),
            Act.HOLD,
        ],
    ),
    Case(
        name="length too long, closed midway",
        does="states a length, and closes after half of the tokens",
        expected=Expected(outcome="truncated", events=4),
        script=lambda p: [
            HTTP_OK + EVENT_STREAM + b"Content-Length: %d\r\n\r\n" % len(body(p)),
            b"".join(p.begin()),
            Act.CLOSE,
        ],
    ),
    Case(
        name="closed before the last chunk",
        does="closes after the last event, without the last chunk",
        expected=OK,
        script=lambda p: [*p.good()[:-1], Act.CLOSE],
    ),
    Case(
        name="coded body",
        does="compresses the body, though identity was asked for",
        expected=Expected(outcome="protocol_error", events=0),
        script=lambda p: [
            sized(gzip.compress(body(p), mtime=0), HTTP_OK + EVENT_STREAM + b"Content-Encoding: gzip\r\n")
        ],
    ),
    Case(
        name="unknown transfer coding",
        does="names a transfer coding of its own before chunked",
        expected=Expected(outcome="protocol_error", events=0),
        script=lambda p: [
            HTTP_OK + EVENT_STREAM + b"Transfer-Encoding: zip, chunked\r\n\r\n",
            *(chunk(gzip.compress(e, mtime=0)) for e in p.reply()),
            END,
        ],
    ),
]

FRAMING = [
    Case(name="right reply", does="answers rightly, one write an event", expected=OK, script=lambda p: p.good()),
    Case(name="one write", does="sends the whole reply in one write", expected=OK, script=lambda p: [whole_reply(p)]),
    Case(
        name="byte by byte",
        does="cuts the reply at every byte of its first and last 300",
        expected=OK,
        script=lambda p: [
            *pieces(whole_reply(p)[:300], 1),
            whole_reply(p)[300:-300],
            *pieces(whole_reply(p)[-300:], 1),
        ],
    ),
    Case(
        name="odd pieces",
        does="cuts the reply into pieces of 7 bytes",
        expected=OK,
        script=lambda p: pieces(whole_reply(p), 7),
    ),
    Case(
        name="chunks across events",
        does="ends its chunks in the middle of events",
        expected=OK,
        script=lambda p: [HEAD, *(chunk(bytes(piece)) for piece in pieces(body(p), 11)), END],
    ),
    *in_turns(CODING),
]

HEADS = [
    Case(
        name="headers in other cases",
        does="writes header names in other cases, without spaces",
        expected=OK,
        script=lambda p: (
            [b"HTTP/1.1 200 OK\r\ncOnTeNt-TYPE:text/event-stream\r\ntransfer-ENCODING:chunked\r\n\r\n", *p.good()[1:]]
        ),
    ),
    Case(
        name="no reason phrase",
        does="sends a status line without a reason",
        expected=OK,
        script=lambda p: [HEAD.replace(b"200 OK", b"200 "), *p.good()[1:]],
    ),
    Case(
        name="folded header",
        does="folds a header over two lines",
        expected=NOT_HTTP,
        aiohttp=OK,
        why=LENIENT,
        script=with_head(HTTP_OK + b"X-A: one\r\n two\r\n"),
    ),
    Case(
        name="LF in the head",
        does="ends the lines of its head with LF alone",
        expected=NOT_HTTP,
        aiohttp=OK,
        why=LENIENT,
        script=lambda p: [HEAD.replace(b"\r\n", b"\n"), *p.good()[1:]],
    ),
    Case(
        name="CR in the head",
        does="ends the lines of its head with CR alone",
        expected=NOT_HTTP,
        script=lambda p: [HEAD.replace(b"\r\n", b"\r"), *p.good()[1:]],
    ),
    Case(
        name="LF after chunk sizes",
        does="ends the lines of chunk sizes with LF alone",
        expected=Expected(outcome="protocol_error", error="not HTTP", events=0),
        aiohttp=Expected(outcome="timeout", error="silent", events=0),
        why=BROKEN_CHUNK,
        script=lambda p: [HEAD, *(b"%x\n%b\r\n" % (len(e), e) for e in p.reply()), END],
        limit="idle",
        protocols=(VLLM, TGI),
    ),
    Case(
        name="space before the colon",
        does="puts a space before the colon of a header",
        expected=NOT_HTTP,
        script=with_head(HTTP_OK + b"X-A : one\r\n"),
    ),
    Case(
        name="many headers",
        does="sends 100 headers of 40 bytes",
        expected=OK,
        script=with_head(HTTP_OK + b"".join(b"X-Pad-%02d: %b\r\n" % (n, b"x" * 28) for n in range(100))),
    ),
    Case(
        name="header flood",
        does="sends headers without end",
        expected=Expected(outcome="protocol_error", error="eader", events=0),
        script=lambda p: [HTTP_OK, *[b"X-Pad: " + b"x" * 1000 + b"\r\n"] * 300],
    ),
    Case(
        name="endless header",
        does="sends one header line of 300 kB",
        expected=Expected(outcome="protocol_error", events=0),
        script=lambda p: [HTTP_OK, b"X-Pad: ", *[b"x" * 10_000] * 30],
    ),
    Case(
        name="1xx flood",
        does="sends 4000 times 100 Continue",
        expected=Expected(outcome="protocol_error", error="headers", events=0),
        aiohttp=Expected(outcome="timeout", error="no first byte"),
        why="aiohttp reads interim replies without a limit: the first-byte timeout ends the request",
        limit="first byte",
        script=lambda p: [b"HTTP/1.1 100 Continue\r\n\r\n" * 4000, Act.HOLD],
        protocols=(VLLM, TGI),
    ),
    broken_head("ssh", "greets as an SSH server", b"SSH-2.0-OpenSSH_9.2\r\n", ALL),
    broken_head("misspelt protocol", "names the protocol HTP/1.1", b"HTP/1.1 200 OK\r\n\r\n"),
    broken_head("status without digits", "sends the status abc", b"HTTP/1.1 abc OK\r\n\r\n"),
    broken_head("status of four digits", "sends the status 2000", b"HTTP/1.1 2000 OK\r\n\r\n"),
    broken_head(
        "http 2",
        "answers with frames of HTTP/2",
        b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64\r\n\r\n",
    ),
    broken_head("tls alert", "answers with an alert of TLS", b"\x15\x03\x01\x00\x02\x02\x46", ALL),
    broken_head("body at once", "sends events without a head", b'data: {"choices":[]}\r\n\r\n'),
    broken_head("header without colon", "sends a header line without a colon", HTTP_OK + b"no colon here\r\n\r\n"),
    broken_head("control byte in a header", "sends a zero byte within a header", HTTP_OK + b"X-A: \x00\r\n\r\n"),
    broken_head(
        "lengths that differ", "states two lengths", HTTP_OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef"
    ),
    broken_head("negative length", "states a negative length", HTTP_OK + b"Content-Length: -5\r\n\r\n"),
    broken_head("length in words", "states a length of ten", HTTP_OK + b"Content-Length: ten\r\n\r\n"),
    Case(
        name="length and chunks",
        does="states a length and sends chunks",
        expected=NOT_HTTP,
        script=with_head(HTTP_OK + b"Content-Length: 10\r\n"),
    ),
    Case(
        name="switched protocols",
        does="answers 101 and speaks WebSocket",
        expected=Expected(outcome="protocol_error", events=0),
        aiohttp=Expected(outcome="http_error", error="HTTP 101", events=0),
        why="aiohttp takes 101 for a reply",
        script=lambda p: [
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81\x05hello"
        ],
    ),
]

STATUSES = [
    *map(error_status, (b"400 Bad Request", b"404 Not Found", b"422 Unprocessable Entity")),
    *map(error_status, (b"429 Too Many Requests", b"500 Internal Server Error", b"503 Service Unavailable")),
    *map(redirect, (b"301 Moved Permanently", b"302 Found", b"307 Temporary Redirect", b"308 Permanent Redirect")),
    Case(
        name="status 201",
        does="answers rightly with status 201",
        expected=http_error("HTTP 201"),
        script=lambda p: [HEAD.replace(b"200 OK", b"201 Created"), *p.good()[1:]],
    ),
    Case(
        name="status 204",
        does="answers 204 without a body",
        expected=http_error("HTTP 204"),
        script=lambda p: [b"HTTP/1.1 204 No Content\r\n\r\n"],
    ),
    Case(
        name="status 206",
        does="answers rightly with status 206",
        expected=http_error("HTTP 206"),
        script=lambda p: [HEAD.replace(b"200 OK", b"206 Partial Content"), *p.good()[1:]],
        protocols=(VLLM, TGI),
    ),
    Case(
        name="status 304",
        does="answers 304 without a body",
        expected=http_error("HTTP 304"),
        script=lambda p: [b"HTTP/1.1 304 Not Modified\r\n\r\n"],
        protocols=(VLLM, TGI),
    ),
    Case(
        name="status 599",
        does="answers a status that no standard knows",
        expected=http_error("HTTP 599"),
        script=status_of_its_own(b"599 Whatever"),
        protocols=(VLLM, TGI),
    ),
    Case(
        name="proxy's error page",
        does="answers 502 with a page of HTML",
        expected=http_error("<h1>Bad Gateway</h1>"),
        script=lambda p: [error_reply(b"502 Bad Gateway", b"<html><body><h1>Bad Gateway</h1></body></html>")],
    ),
    Case(
        name="error without a body",
        does="answers 500 with an empty body",
        expected=http_error("500 Internal Server Error: no message"),
        script=lambda p: [error_reply(b"500 Internal Server Error", b"")],
    ),
    Case(
        name="error in bytes",
        does="answers 500 with bytes that are no text",
        expected=http_error("HTTP 500"),
        script=lambda p: [error_reply(b"500 Internal Server Error", bytes(range(256)))],
        protocols=(VLLM, TGI),
    ),
    Case(
        name="endless error",
        does="answers 500 with a body of 2 MB",
        expected=http_error("HTTP 500"),
        script=lambda p: [error_reply(b"500 Internal Server Error", b"e" * 2_000_000)],
        protocols=(VLLM, TGI),
    ),
    Case(
        name="error cut off",
        does="answers 500 and closes within the body",
        expected=http_error("HTTP 500"),
        script=lambda p: [error_reply(b"500 Internal Server Error", b'{"error": "half')[:-4], Act.CLOSE],
    ),
    Case(
        name="error status and reset",
        does="answers 500 and resets within the body",
        expected=http_error("HTTP 500"),
        script=lambda p: [
            b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 900\r\n\r\n" + json.dumps(p.error()).encode(),
            0.05,
            Act.RESET,
        ],
    ),
]

FOREIGN_BYTES = [
    Case(
        name="junk after the last chunk",
        does="sends bytes after the last chunk, in the same write",
        expected=OK,
        script=lambda p: [*p.good()[:-1], END + b"junk\r\n"],
    ),
    Case(
        name="line end after the last chunk",
        does="sends an empty line after the last chunk, in the same write",
        expected=OK,
        script=lambda p: [*p.good()[:-1], END + b"\r\n"],
    ),
    Case(
        name="second reply in one write",
        does="sends a second reply in the same write",
        expected=OK,
        script=lambda p: [whole_reply(p) + foreign_reply(p)],
    ),
    Case(
        name="second reply in the last write",
        does="sends a second reply with the last chunk of the first",
        expected=OK,
        script=lambda p: [*p.good()[:-1], END + foreign_reply(p)],
    ),
    Case(
        name="unasked reply",
        does="sends a second whole reply on the idle connection",
        expected=OK,
        script=lambda p: [*p.good(), Act.WHEN_IDLE, foreign_reply(p)],
    ),
    Case(
        name="unasked head",
        does="sends the head of a second reply on the idle connection",
        expected=OK,
        script=lambda p: [*p.good(), Act.WHEN_IDLE, HEAD],
    ),
    Case(
        name="unasked 408",
        does="sends 408 Request Timeout on the idle connection and closes it, as proxies do",
        expected=OK,
        script=lambda p: [*p.good(), Act.WHEN_IDLE, error_reply(b"408 Request Timeout", b""), Act.CLOSE],
    ),
    Case(
        name="unasked byte",
        does="sends one byte on the idle connection",
        expected=OK,
        script=lambda p: [*p.good(), Act.WHEN_IDLE, b"\n"],
    ),
    Case(
        name="tokens after an error status",
        does="answers 503, then sends a whole reply on the idle connection",
        expected=http_error(MESSAGE),
        script=lambda p: [
            error_reply(b"503 Service Unavailable", json.dumps(p.error()).encode()),
            Act.WHEN_IDLE,
            foreign_reply(p),
        ],
    ),
    Case(
        name="body after 204",
        does="answers 204 with a body",
        expected=http_error("HTTP 204"),
        aiohttp=Expected(outcome="protocol_error", error="not HTTP"),
        why=NEXT_REPLY,
        script=lambda p: [b"HTTP/1.1 204 No Content\r\n\r\n" + body(p)],
    ),
    Case(
        name="reply to an earlier request",
        does="answers with the id of the reply to request 0",
        expected=Expected(outcome="protocol_error", error="the id of an earlier one"),
        script=lambda p: [data.replace(ID, id_of(0)) for data in p.good()],
        protocols=OPENAI,
    ),
    Case(
        name="whole reply to an earlier request",
        does="answers in one piece, with the id of the reply to request 0",
        expected=Expected(outcome="protocol_error", error="the id of an earlier one"),
        script=lambda p: [sized(p.whole().replace(ID, id_of(0)), JSON_HEAD)],
        protocols=OPENAI,
        whole=True,
    ),
]

WHOLE = [
    Case(
        name="whole reply",
        does="answers in one piece",
        expected=Expected(outcome="ok", tokens=8, events=0),
        script=lambda p: [sized(p.whole(), JSON_HEAD)],
        whole=True,
    ),
    Case(
        name="whole reply byte by byte",
        does="cuts a reply in one piece at every byte",
        expected=Expected(outcome="ok", tokens=8, events=0),
        script=lambda p: pieces(sized(p.whole(), JSON_HEAD), 1),
        whole=True,
    ),
    Case(
        name="whole reply in chunks",
        does="answers in one piece, in two chunks",
        expected=Expected(outcome="ok", tokens=8, events=0),
        script=lambda p: stream(p.whole()[:50], p.whole()[50:]),
        whole=True,
    ),
    Case(
        name="whole reply cut off",
        does="answers half of the document in good order",
        expected=TRUNCATED,
        script=lambda p: [sized(p.whole()[: len(p.whole()) // 2], JSON_HEAD)],
        whole=True,
    ),
    Case(
        name="whole reply, closed midway",
        does="closes in the middle of the document",
        expected=TRUNCATED,
        script=lambda p: [sized(p.whole(), JSON_HEAD)[:-30], Act.CLOSE],
        whole=True,
    ),
    Case(
        name="whole reply, reset midway",
        does="resets in the middle of the document",
        expected=Expected(outcome="reset"),
        script=lambda p: [sized(p.whole(), JSON_HEAD)[:-30], 0.05, Act.RESET],
        whole=True,
    ),
    Case(
        name="whole reply without a body",
        does="answers 200 with an empty body",
        expected=TRUNCATED,
        script=lambda p: [sized(b"", JSON_HEAD)],
        whole=True,
    ),
    Case(
        name="whole reply of another kind",
        does="answers 200 with a page of HTML",
        expected=Expected(outcome="protocol_error", error="<html>"),
        script=lambda p: [sized(b"<html>log in</html>")],
        whole=True,
    ),
    Case(
        name="whole reply with an error",
        does="answers 200 with its error body",
        expected=Expected(outcome="stream_error", error=MESSAGE),
        script=lambda p: [sized(json.dumps(p.error()).encode(), JSON_HEAD)],
        whole=True,
    ),
    Case(
        name="whole reply of no tokens",
        does="counts 0 tokens where 8 were asked for",
        expected=TRUNCATED,
        script=lambda p: [sized(p.whole(0), JSON_HEAD)],
        whole=True,
    ),
    Case(
        name="events for a whole reply",
        does="streams, though one piece was asked for",
        expected=Expected(outcome="protocol_error"),
        script=lambda p: p.good(),
        whole=True,
    ),
    Case(
        name="whole reply without counts",
        does="leaves the usage out of a reply in one piece",
        expected=Expected(outcome="ok", events=0, findings=("NO_TOKEN_COUNT",)),
        script=lambda p: [sized(json.dumps({**json.loads(p.whole()), "usage": None}).encode(), JSON_HEAD)],
        whole=True,
        protocols=OPENAI,
    ),
]

HEADS, STATUSES = in_turns(HEADS), in_turns(STATUSES)
CASES = [*FRAMING, *HEADS, *STATUSES, *FOREIGN_BYTES, *WHOLE]
