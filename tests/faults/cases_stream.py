"""The truth about events: their framing, what they say, and how many tokens they carry."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.faults.case import OK, Case, Expected
from tests.faults.protocols import (
    ALL,
    CHAT,
    DONE,
    HEAD,
    JSON_HEAD,
    LIGHTLLM,
    MESSAGE,
    OPENAI,
    OTHERS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    TGI,
    VLLM,
    Protocol,
    chunk,
    frame,
    sized,
    stream,
    usage,
)
from tests.faults.server import Act, Script

HALF = 4
TRUNCATED = Expected(outcome="truncated")
BREACH = Expected(outcome="protocol_error")
BREACH_MIDWAY = Expected(outcome="protocol_error", events=HALF)
FAILED = Expected(outcome="stream_error", error=MESSAGE)
FAILED_MIDWAY = Expected(outcome="stream_error", error=MESSAGE, events=HALF)
UNFINISHED = Expected(outcome="truncated", error="complete")


def edited(edit: Callable[[bytes], bytes]) -> Callable[[Protocol], Script]:
    """The right reply with each event edited."""
    return lambda protocol: stream(*map(edit, protocol.reply()))


def events(*make: Callable[[Protocol], list[bytes]]) -> Callable[[Protocol], Script]:
    """A reply of these events, ended in good order."""
    return lambda protocol: stream(*(event for part in make for event in part(protocol)))


def begin(protocol: Protocol) -> list[bytes]:
    return protocol.begin()


def rest(protocol: Protocol) -> list[bytes]:
    return protocol.reply()[len(protocol.begin()) :]


def reply(protocol: Protocol) -> list[bytes]:
    return protocol.reply()


def raw(*data: bytes) -> Callable[[Protocol], list[bytes]]:
    return lambda protocol: list(data)


def midway(*data: bytes) -> Callable[[Protocol], Script]:
    """The right reply with these bytes in the middle of it, as events of their own."""
    return events(begin, raw(*data), rest)


def changed(protocol: Protocol, number: int, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The event of a token, changed as JSON."""
    data = json.loads(protocol.token(number).partition(b":")[2])
    change(data)
    return frame(data)


def breach(name: str, does: str, *data: bytes, protocols: tuple[Protocol, ...] = ALL) -> Case:
    return Case(name=name, does=does, expected=BREACH_MIDWAY, script=midway(*data), protocols=protocols)


FRAMING = [
    Case(
        name="CRLF",
        does="ends lines with CR and LF",
        expected=OK,
        script=edited(lambda e: e.replace(b"\n", b"\r\n")),
    ),
    Case(name="CR", does="ends lines with CR alone", expected=OK, script=edited(lambda e: e.replace(b"\n", b"\r"))),
    Case(
        name="CRLF cut",
        does="ends lines with CR and LF, and cuts its writes between them",
        expected=OK,
        script=lambda p: [
            HEAD,
            *(chunk(part) for e in p.reply() for part in (e[:-2] + b"\r\n\r", b"\n")),
            chunk(b""),
        ],
    ),
    Case(
        name="line ends of all kinds",
        does="ends the lines of each event in another way",
        expected=OK,
        script=lambda p: stream(
            *(e[:-2] + end for e, end in zip(p.reply(), [b"\n\n", b"\r\n\r\n", b"\r\r", b"\r\n\n"] * 4, strict=False))
        ),
    ),
    Case(
        name="byte order mark",
        does="begins the body with a byte order mark",
        expected=OK,
        script=lambda p: stream(b"\xef\xbb\xbf" + p.reply()[0], *p.reply()[1:]),
    ),
    breach("byte order mark midway", "puts a byte order mark before an event midway", b"\xef\xbb\xbf: x\n\n"),
    Case(
        name="comments",
        does="sends comments midway",
        expected=OK,
        script=midway(b": keep-alive\n\n", b":\n\n", b":x\n"),
    ),
    Case(
        name="comment at the end",
        does="ends within a comment",
        expected=OK,
        script=events(reply, raw(b": bye")),
    ),
    Case(
        name="other fields",
        does="sends event, id and retry lines beside the data",
        expected=OK,
        script=edited(lambda e: b"event: message\nid: 7\nretry: 100\n" + e),
    ),
    Case(
        name="pings",
        does="sends events midway that are named ping or keep-alive and have data",
        expected=OK,
        script=midway(b'event: ping\ndata: {"type": "ping"}\n\n', b"event: keep-alive\ndata: x\n\n"),
    ),
    Case(
        name="pings by their data",
        does="sends an event midway whose data says that it is a ping",
        expected=OK,
        script=midway(b'data: {"type": "ping"}\n\n'),
        protocols=OPENAI,
    ),
    Case(
        name="empty events",
        does="sends empty data and empty lines midway",
        expected=OK,
        script=midway(b"data:\n\n", b"\n\n\n"),
    ),
    Case(
        name="data over two lines",
        does="breaks the JSON of an event into two data lines",
        expected=OK,
        script=edited(lambda e: e if b"," not in e else e.replace(b",", b",\ndata: ", 1)),
    ),
    Case(
        name="data with spaces",
        does="puts two spaces before the data, and one behind it",
        expected=OK,
        script=edited(lambda e: e.replace(b"data:", b"data:  ", 1).replace(b"\n\n", b" \n\n")),
    ),
    Case(
        name="data without a space",
        does="puts no space before the data",
        expected=OK,
        script=edited(lambda e: e.replace(b"data: ", b"data:", 1)),
    ),
    Case(
        name="all events in one chunk",
        does="sends all events in one chunk",
        expected=OK,
        script=lambda p: stream(b"".join(p.reply())),
    ),
    Case(
        name="large event",
        does="sends a token with a text of 1 MB",
        expected=OK,
        script=lambda p: stream(*p.begin(), p.token(5, "x" * 1_000_000), *rest(p)[1:]),
    ),
    Case(
        name="endless event",
        does="sends an event of 17 MiB",
        expected=Expected(outcome="protocol_error", error="longer than", events=HALF),
        script=lambda p: [
            HEAD,
            *map(chunk, p.begin()),
            *[chunk(b"data: " + b"x" * (1 << 20))] * 1,
            *[chunk(b"x" * (1 << 20))] * 16,
            Act.CLOSE,
        ],
        protocols=(VLLM,),
    ),
    breach("unknown field", "sends a line with a field that no standard knows", b"token: 7\n\n"),
    breach("page of HTML midway", "sends a page of HTML midway", b"<html>\n<body>\n"),
    Case(
        name="page of HTML",
        does="answers 200 with a page of HTML",
        expected=Expected(outcome="protocol_error", error="<html>", events=0),
        script=lambda p: [
            sized(b"<html>\n<body>log in</body>\n</html>\n", b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n")
        ],
    ),
    Case(
        name="ended within an event",
        does="leaves out the last two line ends",
        expected=TRUNCATED,
        script=lambda p: stream(*p.tokens()[:-1], p.tokens()[-1][:-2]),
    ),
    Case(
        name="[DONE] without line ends",
        does="leaves out the line ends after [DONE]",
        expected=OK,
        script=lambda p: stream(*p.reply()[:-1], DONE.strip()),
        protocols=OPENAI,
    ),
]

PAYLOADS = [
    breach("partial JSON", "sends an event that ends within its JSON", b'data: {"choices":[{"index":0,"te\n\n'),
    breach("two documents", "sends two JSON documents in one event", b'data: {"choices":[]}{"choices":[]}\n\n'),
    breach("no JSON", "sends an event of plain words", b"data: hello\n\n"),
    breach("bytes", "sends an event of bytes that are no text", b'data: {"id":"\x00\xff\xfe"}\n\n'),
    breach("a list", "sends a list", b"data: [1,2]\n\n"),
    breach("a number", "sends a number", b"data: 7\n\n"),
    breach("null", "sends null", b"data: null\n\n"),
    breach("an empty object", "sends an empty object", b"data: {}\n\n"),
    breach("NaN", "sends the number NaN", b'data: {"choices":[],"usage":{"completion_tokens":NaN}}\n\n'),
    breach("nested without end", "sends 100 000 brackets", b"data: " + b"[" * 100_000 + b"\n\n"),
    breach("other types", "sends values of other types", b'data: {"choices":7,"token":7}\n\n'),
    breach("another server's event", "sends an event of TGI", TGI.token(5), protocols=OPENAI),
    breach("an event of OpenAI", "sends an event of OpenAI", VLLM.token(5), protocols=OTHERS),
    Case(
        name="bad UTF-8",
        does="sends a text whose bytes are no UTF-8",
        expected=BREACH_MIDWAY,
        script=lambda p: stream(*p.begin(), p.token(5, "XX").replace(b"XX", b"\xc3\x28"), *rest(p)[1:]),
    ),
    Case(
        name="character cut between reads",
        does="cuts its writes within characters of four bytes",
        expected=OK,
        script=lambda p: [
            HEAD,
            *(
                chunk(part)
                for e in [p.token(n, "\U0001f642", *["length"] * (n == 8)) for n in range(1, 9)]
                for part in (e[: e.find(b"\xf0") + 2], e[e.find(b"\xf0") + 2 :])
            ),
            *map(chunk, p.tail()),
            chunk(b""),
        ],
    ),
    Case(
        name="text with everything",
        does="sends texts with quotes, braces, line ends, zero bytes and data: [DONE]",
        expected=OK,
        script=lambda p: stream(
            *p.begin(), p.token(5, '"}]}\n\ndata: [DONE]\n\n\x00\u2028'), p.token(6, "\\"), *rest(p)[2:]
        ),
    ),
    Case(
        name="unknown keys",
        does="adds keys that no version knows, nested",
        expected=OK,
        script=lambda p: stream(
            *p.begin(), changed(p, 5, lambda data: data.update(extra={"a": [1, {"b": None}]}, x=1e300)), *rest(p)[1:]
        ),
    ),
    Case(
        name="one key twice",
        does="writes a key twice, and the second counts",
        expected=OK,
        script=lambda p: (
            stream(*p.begin(), p.token(5).replace(b"{", b'{"choices":7,"choices":[],"token":null,', 1), *rest(p)[1:])
            if p is LIGHTLLM
            else p.good()
        ),
        protocols=(LIGHTLLM,),
    ),
    Case(
        name="another model",
        does="names another model than the one that was asked for",
        expected=Expected(outcome="ok", events=OUTPUT_TOKENS, tokens=OUTPUT_TOKENS, findings=("OTHER_MODEL",)),
        script=edited(lambda e: e.replace(b'"model":"m"', b'"model":"small"')),
        protocols=OPENAI,
    ),
    Case(
        name="no name",
        does="leaves id and model empty",
        expected=OK,
        script=edited(lambda e: e.replace(b'"model":"m"', b'"model":""').replace(b'"x-1"', b'""')),
        protocols=OPENAI,
    ),
]

ENDINGS = [
    Case(
        name="whole reply unasked",
        does="answers with a whole reply though a stream was asked for",
        expected=Expected(outcome="protocol_error", error="--no-stream", events=0),
        script=lambda p: [sized(p.whole(), JSON_HEAD)],
    ),
    Case(
        name="whole reply after empty lines",
        does="keeps the connection open with empty lines, then answers with a whole reply",
        expected=Expected(outcome="protocol_error", error="--no-stream", events=0),
        script=lambda p: stream(b"\n", b"\n\n", p.whole()),
        protocols=OPENAI,
    ),
    Case(
        name="empty body",
        does="answers 200 with an empty body",
        expected=Expected(outcome="truncated", events=0),
        script=lambda p: [sized(b"")],
    ),
    Case(
        name="no events",
        does="ends a stream without an event",
        expected=Expected(outcome="truncated", events=0),
        script=events(),
    ),
    Case(
        name="only comments",
        does="sends comments alone",
        expected=Expected(outcome="truncated", events=0),
        script=events(raw(b": a\n\n", b": b\n\n")),
    ),
    Case(
        name="only [DONE]",
        does="sends [DONE] alone",
        expected=Expected(outcome="truncated", events=0),
        script=events(raw(DONE)),
        protocols=OPENAI,
    ),
    Case(
        name="[DONE] alone",
        does="sends [DONE] alone, which its protocol does not have",
        expected=Expected(outcome="protocol_error", events=0),
        script=events(raw(DONE)),
        protocols=OTHERS,
    ),
    Case(
        name="[DONE] at the end",
        does="sends [DONE] after the last token, which its protocol does not have",
        expected=BREACH,
        script=events(reply, raw(DONE)),
        protocols=OTHERS,
    ),
    Case(
        name="[DONE] midway",
        does="sends [DONE] midway, which its protocol does not have",
        expected=BREACH_MIDWAY,
        script=midway(DONE),
        protocols=OTHERS,
    ),
    Case(
        name="only usage",
        does="counts 8 tokens and sends none",
        expected=Expected(outcome="truncated", events=0),
        script=events(lambda p: p.tail()),
        protocols=OPENAI,
    ),
    Case(
        name="no tokens",
        does="stops before the first token and counts 0, where 8 were asked for",
        expected=Expected(outcome="truncated", events=0),
        script=lambda p: stream(p.token(0, "", "stop"), *p.tail(0)),
        protocols=OPENAI,
    ),
    Case(
        name="only a role",
        does="opens the chat and ends it without content",
        expected=Expected(outcome="truncated", events=0),
        script=lambda p: stream(p.opening(), p.chunk({"index": 0, "delta": {}, "finish_reason": "stop"}), *p.tail(0)),
        protocols=(CHAT,),
    ),
    Case(
        name="tokens after [DONE]",
        does="sends two more tokens after [DONE]",
        expected=Expected(outcome="protocol_error", events=8),
        script=lambda p: stream(*p.reply(), p.token(9), p.token(10)),
        protocols=OPENAI,
    ),
    Case(
        name="[DONE] midway, then tokens",
        does="sends [DONE] after half of the tokens, then the others",
        expected=BREACH_MIDWAY,
        script=midway(DONE),
        protocols=OPENAI,
    ),
    Case(
        name="[DONE] twice",
        does="sends [DONE] twice",
        expected=OK,
        script=events(reply, raw(DONE)),
        protocols=OPENAI,
    ),
    Case(
        name="comments after [DONE]",
        does="sends a comment after [DONE]",
        expected=OK,
        script=events(reply, raw(b": bye\n\n")),
        protocols=OPENAI,
    ),
    Case(
        name="[DONE] after half",
        does="sends [DONE] after half of the tokens, without a finish reason",
        expected=Expected(outcome="ok", events=HALF, findings=("NO_TOKEN_COUNT",)),
        script=events(begin, raw(DONE)),
        protocols=OPENAI,
    ),
    Case(
        name="no [DONE]",
        does="leaves out [DONE]",
        expected=OK,
        script=lambda p: stream(*p.reply()[:-1]),
        protocols=OPENAI,
    ),
    Case(
        name="no finish reason",
        does="leaves out the finish reason",
        expected=OK,
        script=lambda p: stream(*p.tokens()[:-1], p.token(8), *p.tail()),
        protocols=OPENAI,
    ),
    Case(
        name="no finish reason, no [DONE]",
        does="leaves out the finish reason and [DONE]",
        expected=UNFINISHED,
        script=lambda p: stream(*p.tokens()[:-1], p.token(8), p.tail()[0]),
        protocols=OPENAI,
    ),
    Case(
        name="no last event",
        does="leaves out the last event",
        expected=Expected(outcome="truncated", error="complete", events=7),
        script=lambda p: stream(*p.tokens()[:-1]),
    ),
    Case(
        name="tokens after the last",
        does="sends another token after the one that it called the last",
        expected=Expected(outcome="protocol_error", events=8),
        script=lambda p: stream(*p.reply(), p.token(9)),
        protocols=OTHERS,
    ),
    Case(
        name="odd finish reason",
        does="ends with a finish reason of its own",
        expected=OK,
        script=lambda p: stream(*p.reply(finish="banana")),
    ),
    Case(
        name="given up",
        does="ends after half of the tokens with the finish reason abort",
        expected=Expected(outcome="stream_error", error="gave the reply up"),
        script=lambda p: stream(*p.reply(HALF, finish="abort")),
        protocols=(*OPENAI, LIGHTLLM),
    ),
    Case(
        name="error as a finish reason",
        does="ends after half of the tokens with the finish reason error",
        expected=Expected(outcome="stream_error", error="gave the reply up"),
        script=lambda p: stream(*p.reply(HALF, finish="error")),
        protocols=(*OPENAI, LIGHTLLM),
    ),
]

ERRORS = [
    Case(
        name="error first",
        does="sends an error event and no token",
        expected=Expected(outcome="stream_error", error=MESSAGE, events=0),
        script=lambda p: stream(p.error_event()),
    ),
    Case(
        name="error midway",
        does="sends an error event after half of the tokens and ends",
        expected=FAILED_MIDWAY,
        script=lambda p: stream(*p.begin(), p.error_event(), *p.tail()[1:]),
    ),
    Case(
        name="error, then tokens",
        does="sends an error event midway and goes on to a right end",
        expected=FAILED,
        script=lambda p: stream(*p.begin(), p.error_event(), *rest(p)),
    ),
    Case(
        name="error after the last token",
        does="sends an error event after the last token, in place of [DONE]",
        expected=FAILED,
        script=lambda p: stream(*p.tokens(), p.error_event()),
        protocols=OPENAI,
    ),
    Case(
        name="error after the end",
        does="sends an error event after the event that ends the reply",
        expected=Expected(outcome="protocol_error", error=MESSAGE, events=8),
        script=lambda p: stream(*p.reply(), p.error_event()),
    ),
    Case(
        name="error and reset",
        does="sends an error event midway and resets the connection",
        expected=FAILED_MIDWAY,
        script=lambda p: [HEAD, *map(chunk, p.begin()), chunk(p.error_event()), 0.05, Act.RESET],
    ),
    Case(
        name="error first and reset",
        does="sends an error event before any token and resets the connection",
        expected=Expected(outcome="stream_error", error=MESSAGE, events=0),
        script=lambda p: [HEAD, chunk(p.error_event()), 0.05, Act.RESET],
    ),
    Case(
        name="error and close",
        does="sends an error event midway and closes the connection",
        expected=FAILED_MIDWAY,
        script=lambda p: [HEAD, *map(chunk, p.begin()), chunk(p.error_event()), Act.CLOSE],
    ),
    Case(
        name="error and junk",
        does="sends an error event midway, then bytes that are no event",
        expected=FAILED_MIDWAY,
        script=lambda p: stream(*p.begin(), p.error_event(), b"junk\n\n"),
        protocols=(VLLM, TGI),
    ),
    Case(
        name="error body with 200",
        does="answers 200 with its error body in place of a stream",
        expected=Expected(outcome="stream_error", error=MESSAGE, events=0),
        script=lambda p: [sized(json.dumps(p.error()).encode(), JSON_HEAD)],
    ),
    Case(
        name="error body with 200 over lines",
        does="answers 200 with an error body that is indented over several lines",
        expected=Expected(outcome="stream_error", error=MESSAGE, events=0),
        script=lambda p: [sized(json.dumps(p.error(), indent=2).encode() + b"\n", JSON_HEAD)],
    ),
    Case(
        name="error in plain words",
        does="sends an error event that holds a string",
        expected=FAILED_MIDWAY,
        script=lambda p: stream(*p.begin(), frame({"error": MESSAGE})),
    ),
    Case(
        name="error without a wrapper",
        does="sends an error event whose message stands outside",
        expected=FAILED_MIDWAY,
        script=lambda p: stream(*p.begin(), frame({"object": "error", "message": MESSAGE, "code": 500})),
        protocols=OPENAI,
    ),
    Case(
        name="error with escape codes",
        does="sends an error whose message holds terminal codes and line ends",
        expected=Expected(outcome="stream_error", error="dead end", events=HALF),
        script=lambda p: stream(*p.begin(), p.error_event("dead\n end\x1b[31m")),
    ),
]

COUNTS = [
    Case(
        name="no usage",
        does="leaves out the usage",
        expected=Expected(outcome="ok", events=8, findings=("NO_TOKEN_COUNT",)),
        script=lambda p: stream(*p.tokens(), DONE),
        protocols=OPENAI,
    ),
    Case(
        name="no details",
        does="leaves out the details of the last event",
        expected=Expected(outcome="ok", events=8, findings=("NO_TOKEN_COUNT",)),
        script=lambda p: stream(*p.tokens()[:-1], changed(p, 8, lambda data: data.update(generated_text="all"))),
        protocols=(TGI,),
    ),
    Case(
        name="no running counts",
        does="counts 0 in each event, as LightLLM 1.1 does",
        expected=OK,
        script=lambda p: stream(
            *(
                e.replace(b'"count_output_tokens":%d' % n, b'"count_output_tokens":0')
                for n, e in enumerate(p.reply(), 1)
            )
        ),
        protocols=(LIGHTLLM,),
    ),
    Case(
        name="usage too high",
        does="counts 9 tokens for 8",
        expected=Expected(outcome="ok", tokens=9, events=8, findings=("OUTPUT_LENGTH", "MERGED_EVENTS")),
        script=lambda p: stream(*p.tokens(), *p.tail(9)),
        protocols=OPENAI,
    ),
    Case(
        name="usage too low",
        does="counts 3 tokens for 8",
        expected=Expected(outcome="ok", tokens=3, events=8, findings=("OUTPUT_LENGTH",)),
        script=lambda p: stream(*p.tokens(), *p.tail(3)),
        protocols=OPENAI,
    ),
    Case(
        name="usage of none",
        does="counts 0 tokens for 8",
        expected=Expected(outcome="ok", tokens=0, events=8, findings=("OUTPUT_LENGTH",)),
        script=lambda p: stream(*p.tokens(), *p.tail(0)),
        protocols=OPENAI,
    ),
    *(
        Case(
            name=f"usage of {name}",
            does=f"counts {name} tokens",
            expected=Expected(outcome="protocol_error", events=8),
            script=lambda p, count=count: stream(*p.tokens(), *p.tail(count)),
            protocols=OPENAI,
        )
        for name, count in (("-1", -1), ("1.5", 1.5), ("words", "eight"), ("2 to the 60", 1 << 60), ("a list", [8]))
    ),
    Case(
        name="usage null",
        does="sends usage null in each event",
        expected=OK,
        script=lambda p: stream(
            *(e.replace(b'"choices"', b'"usage":null,"choices"', 1) for e in p.tokens()), *p.tail()
        ),
        protocols=OPENAI,
    ),
    Case(
        name="usage in each event",
        does="sends a running usage in each event",
        expected=OK,
        script=lambda p: stream(
            *[
                e.replace(b'"choices"', b'"usage":%b,"choices"' % json.dumps(usage(n)).encode(), 1)
                for n, e in enumerate(p.tokens(), int(p is VLLM))
            ],
            *p.tail(),
        ),
        protocols=OPENAI,
    ),
    Case(
        name="usage before the end",
        does="sends the usage before the last token",
        expected=OK,
        script=lambda p: stream(*p.tokens()[:-1], p.tail()[0], p.tokens()[-1], DONE),
        protocols=OPENAI,
    ),
    Case(
        name="too few tokens",
        does="stops after 4 of 8 tokens",
        expected=Expected(outcome="ok", tokens=4, events=4, findings=("OUTPUT_LENGTH",)),
        script=lambda p: stream(*p.reply(HALF, finish="stop")),
    ),
    Case(
        name="too many tokens",
        does="sends 12 tokens where 8 were asked for",
        expected=Expected(outcome="ok", tokens=12, events=12, findings=("OUTPUT_LENGTH",)),
        script=lambda p: stream(*p.reply(12)),
    ),
    Case(
        name="one token",
        does="stops after one token",
        expected=Expected(outcome="ok", tokens=1, events=1, findings=("OUTPUT_LENGTH",)),
        script=lambda p: stream(*p.reply(1, finish="stop")),
    ),
    Case(
        name="usage beside a placeholder",
        does="sends the usage in a chunk with an empty choice",
        expected=OK,
        script=lambda p: stream(*p.tokens(), p.chunk({"index": 0, "delta": {}}, usage=usage()), DONE),
        protocols=OPENAI,
    ),
    Case(
        name="running usage alone",
        does="sends a running usage in each event but the last, and none after it",
        expected=OK,
        script=lambda p: stream(
            *[
                e.replace(b'"choices"', b'"usage":%b,"choices"' % json.dumps(usage(n)).encode(), 1)
                for n, e in enumerate([*p.tokens()[:-1], p.token(8)], int(p is VLLM))
            ],
            DONE,
        ),
        protocols=OPENAI,
    ),
    Case(
        name="text after the finish reason",
        does="sends another text after the finish reason, and does not count it",
        expected=OK,
        script=lambda p: stream(*p.tokens(), p.token(9), *p.tail()),
        protocols=OPENAI,
    ),
    Case(
        name="empty texts before the first token",
        does="keeps the stream alive with three empty texts",
        expected=OK,
        script=lambda p: stream(*[p.token(0, "")] * 3, *p.reply()),
        protocols=OPENAI,
    ),
    Case(
        name="hidden reasoning",
        does="counts 24 tokens, 16 of them reasoning that it does not show",
        expected=Expected(outcome="ok", tokens=24, events=8, findings=("OUTPUT_LENGTH", "MERGED_EVENTS")),
        script=lambda p: stream(*p.tokens(), *p.tail(24, completion_tokens_details={"reasoning_tokens": 16})),
        protocols=OPENAI,
    ),
    Case(
        name="hidden tokens and an end without text",
        does="counts 24 tokens for 7 texts and an end without one",
        expected=Expected(outcome="ok", tokens=24, events=7, findings=("OUTPUT_LENGTH", "MERGED_EVENTS")),
        script=lambda p: stream(*p.tokens()[:-1], p.token(8, "", "length"), *p.tail(24)),
        protocols=OPENAI,
    ),
    Case(
        name="merged tokens",
        does="sends the 8 tokens in 4 events",
        expected=Expected(outcome="ok", tokens=8, events=4, findings=("MERGED_EVENTS",)),
        script=lambda p: stream(*p.tokens(4), *p.tail(8)),
        protocols=OPENAI,
    ),
    Case(
        name="merged tokens by count",
        does="sends the 8 tokens in 4 events, with running counts",
        expected=Expected(outcome="ok", tokens=8, events=4, findings=("MERGED_EVENTS",)),
        script=lambda p: stream(p.token(2), p.token(4), p.token(6), p.token(8, finish="length")),
        protocols=(LIGHTLLM,),
    ),
    Case(
        name="merged tokens by ids",
        does="sends the 8 tokens in 4 events, with their ids",
        expected=Expected(outcome="ok", tokens=8, events=4, findings=("MERGED_EVENTS",)),
        script=lambda p: stream(
            *(e.replace(b'"logprobs":null', b'"logprobs":null,"token_ids":[5,6]') for e in p.tokens(4)), *p.tail(8)
        ),
        protocols=(VLLM,),
    ),
    Case(
        name="empty texts",
        does="sends tokens with an empty text, as servers do with half a character",
        expected=OK,
        script=lambda p: stream(*p.begin(), p.token(5, ""), p.token(6, ""), *rest(p)[2:]),
        protocols=(VLLM, *OTHERS),
    ),
    Case(
        name="last bytes held back",
        does="ends without a text, and counts it as a token",
        expected=OK,
        script=lambda p: stream(*p.tokens()[:-1], p.token(8, "", "length"), *p.tail()),
        protocols=(VLLM,),
    ),
    Case(
        name="null texts",
        does="sends two events whose text is null, beside the tokens",
        expected=OK,
        script=lambda p: stream(*p.begin(), *[p.token(5, "XX").replace(b'"XX"', b"null")] * 2, *rest(p)),
        protocols=OPENAI,
    ),
    Case(
        name="two choices",
        does="sends a second choice in each event",
        expected=OK,
        script=lambda p: stream(
            *(
                e.replace(b"]}", b',{"index":1,"text":" b","delta":{"content":" b"},"finish_reason":null}]}')
                for e in p.tokens()
            ),
            *p.tail(),
        ),
        protocols=OPENAI,
    ),
    Case(
        name="another index",
        does="sends its only choice with index 1",
        expected=OK,
        script=edited(lambda e: e.replace(b'"index":0', b'"index":1')),
        protocols=OPENAI,
    ),
    Case(
        name="indexes that repeat",
        does="gives each token the index 3",
        expected=OK,
        script=edited(lambda e: frame({**json.loads(e[6:]), "index": 3})),
        protocols=(TGI,),
    ),
    Case(
        name="counts that go back",
        does="counts its tokens 1 2 3 4 2",
        expected=Expected(outcome="protocol_error", error="went back", events=HALF),
        script=lambda p: stream(*p.begin(), p.token(2), *rest(p)[1:]),
        protocols=(LIGHTLLM,),
    ),
    Case(
        name="one token twice",
        does="sends the event of a token twice",
        expected=OK,
        script=lambda p: stream(*p.begin(), p.begin()[-1], *rest(p)),
        protocols=(LIGHTLLM,),
    ),
    Case(
        name="no choices",
        does="sends events with an empty list of choices midway, as some proxies do first",
        expected=OK,
        script=lambda p: stream(p.chunk(usage=None), *p.begin(), p.chunk(usage=None), *rest(p)),
        protocols=OPENAI,
    ),
    Case(
        name="prompt tokens",
        does="counts one prompt token too many",
        expected=Expected(outcome="ok", tokens=8, events=8, prompt_tokens=5, findings=("PROMPT_LENGTH",)),
        script=lambda p: stream(*(e.replace(b'"prompt_tokens":4', b'"prompt_tokens":5') for e in p.reply())),
        protocols=(*OPENAI, LIGHTLLM),
    ),
    Case(
        name="input length",
        does="counts one prompt token too many",
        expected=Expected(outcome="ok", tokens=8, events=8, prompt_tokens=5, findings=("PROMPT_LENGTH",)),
        script=lambda p: stream(*(e.replace(b'"input_length":4', b'"input_length":5') for e in p.reply())),
        protocols=(TGI,),
    ),
    Case(
        name="cached tokens",
        does="took half of the prompt from its cache",
        expected=Expected(
            outcome="ok", tokens=8, events=8, prompt_tokens=PROMPT_TOKENS, cached_tokens=2, findings=("CACHED_TOKENS",)
        ),
        script=lambda p: stream(*p.tokens(), *p.tail(prompt_tokens_details={"cached_tokens": 2})),
        protocols=OPENAI,
    ),
    Case(
        name="reasoning",
        does="sends half of its tokens as reasoning",
        expected=OK,
        script=lambda p: stream(
            p.opening(), *(p.token(n).replace(b'"content"', b'"reasoning_content"') for n in range(1, 5)), *rest(p)
        ),
        protocols=(CHAT,),
    ),
    Case(
        name="tool call",
        does="sends a tool call in place of content",
        expected=OK,
        script=lambda p: stream(
            p.opening(),
            *(
                p.chunk({"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "x"}}]}})
                for _ in range(OUTPUT_TOKENS)
            ),
            p.chunk({"index": 0, "delta": {}, "finish_reason": "tool_calls"}),
            *p.tail(),
        ),
        protocols=(CHAT,),
    ),
]

CASES = [*FRAMING, *PAYLOADS, *ENDINGS, *ERRORS, *COUNTS]
