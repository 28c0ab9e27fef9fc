"""Text from servers becomes one harmless line, and what a person must know is found in every shape of error."""

from __future__ import annotations

from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import replies
from backends.protocol import Delta, ProtocolError, Truncated
from backends.replies import WholeReply, error_in, error_message, error_text
from backends.untrusted import printable

LONG = "This model's maximum context length is 4096 tokens. However, your prompt contains 9000 input tokens."


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"%s","type":"BadRequestError","param":null,"code":400}}' % LONG.encode(), LONG),
        (b'{"object":"error","message":"no such model","type":"NotFoundError","code":404}', "no such model"),
        (b'{"error":"Input validation error: `inputs` must be short","error_type":"validation"}',
         "Input validation error: `inputs` must be short"),
        (b'{"error":"","error_type":"overloaded"}', "overloaded"),
        (b'{"message":"\'parameters\'"}', "'parameters'"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"type":"missing","loc":["body","model"],"msg":"Field required"},{"loc":["body",3],"msg":"no"}]}',
         "body.model: Field required; body.3: no"),
        (b'{"error":{"code":500}}', '{"error":{"code":500}}'),
        (b'{"detail":[1,2]}', '{"detail":[1,2]}'),
        (b"Failed to parse the request body as JSON", "Failed to parse the request body as JSON"),
        (b"<html>\r\n<title>502 Bad Gateway</title>\r\n", "<html> <title>502 Bad Gateway</title>"),
        (b'{"error":{"message":"cut o', '{"error":{"message":"cut o'),
        (b'"just a string"', "just a string"),
        ('{"error":"日本\\u001b[31m\\u202e"}'.encode(), "日本\\x1b[31m\\u202e"),
        (b"\xff\x00\x1b]0;x\x07", "\ufffd\\x00\\x1b]0;x\\x07"),
        (b"7" * 5000, "7" * 299 + "…"),
        (b"[" * 5000, "[" * 299 + "…"),
        (b"", ""),
    ],
)  # fmt: skip
def test_error_text(body: bytes, text: str) -> None:
    assert error_text(body) == text


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (400, b'{"error":{"message":"bad\\n  request"}}', "HTTP 400 Bad Request: bad request"),
        (417, b'{"message":"\'parameters\'"}', "HTTP 417 Expectation Failed: 'parameters'"),
        (422, b'{"error":"Input validation error","error_type":"validation"}',
         f"HTTP 422 {HTTPStatus(422).phrase}: Input validation error"),  # the phrase changed in Python 3.13
        (424, b'{"error":"Request failed during generation: x","error_type":"generation"}',
         "HTTP 424 Failed Dependency: Request failed during generation: x"),
        (429, b'{"error":"Model is overloaded","error_type":"overloaded"}',
         "HTTP 429 Too Many Requests: Model is overloaded"),
        (503, b"", "HTTP 503 Service Unavailable: no message"),
        (499, b" \n", "HTTP 499: no message"),
        (200, b"x", "HTTP 200 OK: x"),
    ],
)  # fmt: skip
def test_error_message(status: int, body: bytes, line: str) -> None:
    assert error_message(status, body) == line


@given(status=st.integers(-5, 10**6), body=st.binary(max_size=2000))
def test_error_message_is_one_printable_line_of_anything(status: int, body: bytes) -> None:
    line = error_message(status, body)
    assert line.isprintable()
    assert 0 < len(line) <= 300


@given(st.text(max_size=1000))
def test_printable(text: str) -> None:
    line = printable(text)
    assert line.isprintable() and len(line) <= 300
    if text.isprintable() and len(text) <= 300 and text == text.strip() and "  " not in text:
        assert line == text


def test_an_error_without_end_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "MAX_ERROR_BYTES", 30)
    assert error_text(b'{"error": "not too long"}') == "not too long"
    assert error_text(b'{"error": "a", "values": [[], []]}') == '{"error": "a", "values": [[], []]}'
    assert error_in(b'{"error": "not too long"}') == "not too long"
    assert error_in(b'{"error": "a", "values": [[], []]}') is None


def test_lone_surrogates_can_be_written() -> None:
    assert printable("a\ud800b").encode() == b"a\\ud800b"


class TestWholeReply:
    def test_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(WholeReply, "most_bytes", 100)
        reply = WholeReply(lambda body: Delta(n_tokens=len(body)))
        assert list(reply.feed(b"a" * 100)) == []
        assert list(reply.eof()) == [Delta(n_tokens=100)]
        with pytest.raises(ProtocolError, match="longer than 100 bytes"):
            reply.feed(b"a")

    def test_empty(self) -> None:
        with pytest.raises(Truncated, match="no body"):
            WholeReply(lambda body: Delta()).eof()
