"""What one exchange keeps of what the transport tells it. No socket, no clock: stamps are given."""

from __future__ import annotations

from collections.abc import Sequence

from backends.protocol import TOKEN, Delta, ProtocolError, Truncated
from loadgen.client.exchange import Exchange
from loadgen.rundir.records import table


class ScriptedDecoder:
    """A decoder that reads one digit a delta: t a token, u the counts, e an error, x garbage."""

    plain = None
    identity = None

    def __init__(self, end: Exception | None = None) -> None:
        self.end = end

    def feed(self, data: bytes) -> Sequence[Delta]:
        if b"x" in data:
            raise ProtocolError("garbage")
        known = {
            "t": TOKEN,
            "2": Delta(n_tokens=2),
            "u": Delta(finish="length", prompt_tokens=5, output_tokens=3, cached_tokens=1),
            "e": Delta(error="died"),
        }
        return [known[chr(byte)] for byte in data]

    def eof(self) -> Sequence[Delta]:
        if self.end is not None:
            raise self.end
        return ()


def message(status: int, body: bytes) -> str:
    return f"{status}: {body.decode()}"


def exchange(end: Exception | None = None) -> tuple[Exchange, list[Exchange]]:
    done: list[Exchange] = []
    made = Exchange(4, "measured", 1000, 5, 3, ScriptedDecoder(end), done.append)
    made.sent_ns = 2_000
    return made, done


def test_record_of_a_whole_reply() -> None:
    one, done = exchange()
    one.headers(200, 10_500)
    one.body(b"t", 10_500)
    one.body(b"t2", 2_010_999)
    one.body(b"u", 2_011_000)
    one.eof(2_012_000, message)
    assert done == [one]
    record = one.record(500, streamed=True)
    assert (record.scheduled_ns, record.sent_ns, record.headers_ns) == (500, 1_500, 10_000)
    assert (record.first_token_ns, record.last_token_ns, record.done_ns) == (10_000, 2_010_499, 2_011_500)
    assert (record.events, record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 5, 3, 1)
    assert record.itl_us == [2_000, 0]
    assert (record.outcome, record.status, record.error) == ("ok", 200, None)


def test_gaps_add_up_without_drift() -> None:
    one, _ = exchange()
    one.headers(200, 0)
    for stamp in range(0, 1_000_000_000, 1_234_567):
        one.body(b"t", stamp)
    one.eof(1_000_000_000, message)
    record = one.record(0, streamed=True)
    assert record.first_token_ns is not None and record.last_token_ns is not None
    stamps = range(0, 1_000_000_000, 1_234_567)
    assert table([record]).arrivals_ns(0).tolist() == [stamp // 1000 * 1000 for stamp in stamps]
    assert sum(record.itl_us) == record.last_token_ns // 1000 - record.first_token_ns // 1000


def test_outcomes() -> None:
    stories = {
        "truncated": lambda one: one.eof(9, message),
        "reset": lambda one: one.fail("reset", "broke", 9),
    }
    for outcome, tell in stories.items():
        one, done = exchange(Truncated("half"))
        one.headers(200, 5)
        tell(one)
        assert (one.outcome, len(done)) == (outcome, 1)
    one, done = exchange()
    one.headers(200, 5)
    assert one.body(b"te", 6)
    one.eof(9, message)
    assert (one.outcome, one.error) == ("stream_error", "died")
    one, done = exchange()
    one.headers(200, 5)
    assert not one.body(b"x", 6)
    assert (one.outcome, len(done)) == ("protocol_error", 1)
    one, done = exchange()
    one.headers(429, 5)
    one.body(b"x" * 10, 6)
    one.eof(9, message)
    assert (one.outcome, one.error) == ("http_error", "429: xxxxxxxxxx")


def test_only_the_first_end_counts() -> None:
    one, done = exchange()
    one.headers(200, 5)
    one.fail("timeout", "late", 8)
    one.fail("reset", "broke", 9)
    one.eof(10, message)
    assert (one.outcome, one.done_ns, len(done)) == ("timeout", 8, 1)


def test_error_bodies_are_bounded() -> None:
    one, _ = exchange()
    one.headers(500, 5)
    for _ in range(1000):
        one.body(b"t" * 1000, 6)
    assert len(one.error_body) < 70_000


def test_ok_needs_output_or_a_count_of_none_where_none_was_asked() -> None:
    for asked, counted, outcome in ((3, None, "truncated"), (3, 0, "truncated"), (0, 0, "ok"), (0, None, "truncated")):
        one, _ = exchange()
        one.asked_tokens = asked
        one.headers(200, 5)
        one.output_tokens = counted
        one.eof(9, message)
        assert one.outcome == outcome


def test_the_servers_error_comes_before_what_follows_it() -> None:
    for outcome in ("reset", "timeout", "cancelled"):
        one, _ = exchange()
        one.headers(200, 5)
        one.body(b"te", 6)
        one.fail(outcome, "after it", 9)
        assert (one.outcome, one.error) == ("stream_error", "died")
