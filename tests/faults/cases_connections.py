"""The truth about connections that end, and about servers that are silent or slow."""

from __future__ import annotations

from tests.faults.case import OK, Case, Expected
from tests.faults.protocols import HEAD, OPENAI, OTHERS, TGI, VLLM, chunk
from tests.faults.server import Act

RETRIED = Expected(outcome="ok", tokens=8, events=8, tries=2)
RESET = Expected(outcome="reset", events=0)
MIDWAY = 4  # events

ENDS = [
    Case(
        name="closed at the request",
        does="closes the reused connection before any byte; answers the second try",
        expected=RETRIED,
        script=lambda p: [Act.CLOSE],
        again=lambda p: p.good(),
    ),
    Case(
        name="reset at the request",
        does="resets the reused connection before any byte; answers the second try",
        expected=RETRIED,
        script=lambda p: [Act.RESET],
        again=lambda p: p.good(),
    ),
    Case(
        name="closed at both tries",
        does="closes before any byte, at the second try, too",
        expected=Expected(outcome="reset", events=0, tries=2),
        script=lambda p: [Act.CLOSE],
        again=lambda p: [Act.CLOSE],
    ),
    Case(
        name="reset at the second try",
        does="closes before any byte, and resets the second try",
        expected=Expected(outcome="reset", events=0, tries=2),
        script=lambda p: [Act.CLOSE],
        again=lambda p: [Act.RESET],
        protocols=(VLLM, TGI),
    ),
    Case(
        name="error at the second try",
        does="closes before any byte, and answers the second try midway only",
        expected=Expected(outcome="truncated", events=MIDWAY, tries=2),
        script=lambda p: [Act.CLOSE],
        again=lambda p: [HEAD, *map(chunk, p.begin()), Act.CLOSE],
        protocols=(VLLM, TGI),
    ),
    Case(
        name="closed at a fresh connection",
        does="closes a fresh connection before any byte",
        expected=RESET,
        script=lambda p: [Act.CLOSE],
        way="fresh",
    ),
    Case(
        name="reset at a fresh connection",
        does="resets a fresh connection before any byte",
        expected=RESET,
        script=lambda p: [Act.RESET],
        way="fresh",
    ),
    Case(
        name="closed within the status line",
        does="closes after six bytes of the status line",
        expected=RESET,
        script=lambda p: [b"HTTP/1", 0.05, Act.CLOSE],
    ),
    Case(
        name="reset within the headers",
        does="resets within the headers",
        expected=RESET,
        script=lambda p: [HEAD[:30], 0.05, Act.RESET],
    ),
    Case(
        name="closed within the headers",
        does="closes within the headers",
        expected=RESET,
        script=lambda p: [HEAD[:30], 0.05, Act.CLOSE],
    ),
    Case(
        name="closed after 100",
        does="sends 100 Continue and closes",
        expected=RESET,
        script=lambda p: [b"HTTP/1.1 100 Continue\r\n\r\n", 0.05, Act.CLOSE],
        protocols=(VLLM, TGI),
    ),
    Case(
        name="closed after the headers",
        does="closes after the headers",
        expected=Expected(outcome="truncated", events=0),
        script=lambda p: [HEAD, 0.05, Act.CLOSE],
    ),
    Case(
        name="reset after the headers",
        does="resets after the headers",
        expected=RESET,
        script=lambda p: [HEAD, 0.05, Act.RESET],
    ),
    Case(
        name="closed midway",
        does="closes after half of the tokens",
        expected=Expected(outcome="truncated", events=MIDWAY),
        script=lambda p: [HEAD, *map(chunk, p.begin()), Act.CLOSE],
    ),
    Case(
        name="reset midway",
        does="resets after half of the tokens",
        expected=Expected(outcome="reset", events=MIDWAY),
        script=lambda p: [HEAD, *map(chunk, p.begin()), 0.05, Act.RESET],
    ),
    Case(
        name="ended midway",
        does="ends the chunks in good order after half of the tokens",
        expected=Expected(outcome="truncated", events=MIDWAY),
        script=lambda p: [HEAD, *map(chunk, p.begin()), chunk(b"")],
    ),
    Case(
        name="half closed midway",
        does="closes its direction of the connection after half of the tokens",
        expected=Expected(outcome="truncated", events=MIDWAY),
        script=lambda p: [HEAD, *map(chunk, p.begin()), Act.END_WRITING, Act.HOLD],
    ),
    Case(
        name="reset before the last chunk",
        does="resets after the last event, without the last chunk",
        expected=Expected(outcome="reset", events=8),
        script=lambda p: [*p.good()[:-1], 0.05, Act.RESET],
    ),
    Case(
        name="reset within an event",
        does="resets in the middle of an event",
        expected=Expected(outcome="reset", events=MIDWAY),
        script=lambda p: [HEAD, *map(chunk, p.begin()), chunk(p.token(5))[:20], 0.05, Act.RESET],
        protocols=(VLLM, TGI),
    ),
    Case(
        name="closed while idle",
        does="closes the idle connection after a right reply",
        expected=OK,
        script=lambda p: [*p.good(), Act.WHEN_IDLE, Act.CLOSE],
    ),
    Case(
        name="closed behind the reply",
        does="closes right behind the last chunk, unannounced",
        expected=OK,
        script=lambda p: [b"".join(p.good()), Act.CLOSE],
    ),
    Case(
        name="reset while idle",
        does="resets the idle connection after a right reply",
        expected=OK,
        script=lambda p: [*p.good(), Act.WHEN_IDLE, Act.RESET],
    ),
    Case(
        name="not listening",
        does="listens no more; with a fresh connection for each request",
        expected=Expected(outcome="refused", events=0, tries=0),
        way="refusing",
    ),
    Case(
        name="reset at accept",
        does="resets a connection that it has just accepted",
        expected=Expected(outcome="reset", events=0, tries=0),
        way="resetting",
    ),
]

SILENCE = [
    Case(
        name="no reply",
        does="takes the request and sends nothing",
        expected=Expected(outcome="timeout", error="no first byte", events=0),
        limit="first byte",
        script=lambda p: [Act.HOLD],
    ),
    Case(
        name="half a status line",
        does="sends half a status line and nothing more",
        expected=Expected(outcome="timeout", error="no first byte", events=0),
        limit="first byte",
        script=lambda p: [b"HTTP/1.1 20", Act.HOLD],
    ),
    Case(
        name="silent after 100",
        does="sends 100 Continue and nothing more",
        expected=Expected(outcome="timeout", error="no first byte", events=0),
        limit="first byte",
        script=lambda p: [b"HTTP/1.1 100 Continue\r\n\r\n", Act.HOLD],
        protocols=(VLLM, TGI),
    ),
    Case(
        name="silent after the headers",
        does="sends the headers and nothing more",
        expected=Expected(outcome="timeout", error="silent", events=0),
        limit="idle",
        script=lambda p: [HEAD, Act.HOLD],
    ),
    Case(
        name="silent midway",
        does="falls silent after half of the tokens",
        expected=Expected(outcome="timeout", error="silent", events=MIDWAY),
        limit="idle",
        script=lambda p: [HEAD, *map(chunk, p.begin()), Act.HOLD],
    ),
    Case(
        name="no last chunk",
        does="sends every event, but not the last chunk",
        expected=Expected(outcome="timeout", error="silent", events=8),
        limit="idle",
        script=lambda p: [*p.good()[:-1], Act.HOLD],
    ),
    Case(
        name="silent after [DONE]",
        does="leaves out the last chunk and sends comments without end",
        expected=Expected(outcome="timeout", error="no complete reply", events=8),
        limit="total",
        script=lambda p: [*p.good()[:-1], *[chunk(b": still here\n\n"), 0.05] * 100],
        protocols=OPENAI,
    ),
    Case(
        name="comments without end",
        does="sends a comment every 50 ms and no token",
        expected=Expected(outcome="timeout", error="no complete reply", events=0),
        limit="total",
        script=lambda p: [HEAD, *[chunk(b": still here\n\n"), 0.05] * 100],
    ),
    Case(
        name="tokens without end",
        does="sends a token every 50 ms, without end",
        expected=Expected(outcome="timeout", error="no complete reply"),
        limit="total",
        script=lambda p: [HEAD, *(step for number in range(1, 100) for step in (chunk(p.token(number)), 0.05))],
    ),
    Case(
        name="a byte at a time",
        does="sends a byte of the headers every 50 ms",
        expected=Expected(outcome="timeout", error="no complete reply", events=0),
        limit="total",
        script=lambda p: [HTTP_BYTES, *[b"x", 0.05] * 100],
        protocols=OTHERS,
    ),
    Case(
        name="slow",
        does="sends a token every 20 ms",
        expected=OK,
        script=lambda p: [step for write in p.good() for step in (write, 0.02)],
    ),
    Case(
        name="error, then silence",
        does="sends an error event midway and falls silent",
        expected=Expected(outcome="stream_error", error="the engine is dead", events=MIDWAY),
        limit="idle",
        script=lambda p: [HEAD, *map(chunk, p.begin()), chunk(p.error_event()), Act.HOLD],
    ),
]

HTTP_BYTES = b"HTTP/1.1 200 OK\r\nX-Slow: "

CASES = [*ENDS, *SILENCE]
