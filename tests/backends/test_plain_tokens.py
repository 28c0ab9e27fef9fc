"""The recogniser alone; that it changes nothing of what is recorded is in tests/loadgen/client/test_connection.py."""

from __future__ import annotations

import pytest

from backends.plain_tokens import _LESSONS, PlainTokens
from tests.loadgen.scripted import chunk, event


def learned(text: str = "one") -> PlainTokens:
    plain = PlainTokens()
    plain.learn_event(event(text))
    plain.learn_read(chunk(event(text)), len(event(text)))
    return plain


def test_another_text_of_the_same_size_is_recognised_and_counted() -> None:
    plain = learned()
    assert plain.recognises(chunk(event("two"))) and plain.recognises(chunk(event("~ !")))
    assert plain.count == 2


@pytest.mark.parametrize(
    "read",
    [
        chunk(event("three")),  # of a size that was not seen
        chunk(event('\\"a')),
        chunk(event("a\x01b")),
        chunk(event("é.")),
        chunk(event("two"))[:-2] + b"\n\n",
        chunk(event("two")).replace(b"two", b'o"}'),
        chunk(event("two"))[1:] + b"x",
    ],
)
def test_anything_else_is_not(read: bytes) -> None:
    plain = learned()
    assert not plain.recognises(read)
    assert plain.count == 0


def test_nothing_is_recognised_before_an_event_and_a_read_were_seen() -> None:
    plain = PlainTokens()
    read = chunk(event("one"))
    assert not plain.recognises(read)
    plain.learn_read(read, len(event("one")))
    assert not plain.recognises(read)
    plain.learn_event(event("one"))
    assert not plain.recognises(read)
    plain.learn_read(read, len(event("one")))
    assert plain.recognises(read)


@pytest.mark.parametrize("cut", [slice(None, -1), slice(None, 20), slice(20, None)])
def test_a_read_that_is_no_whole_chunk_ends_it(cut: slice) -> None:
    plain = learned()
    read = chunk(event("two"))
    plain.learn_read(read[cut], len(event("two")))
    assert not plain.recognises(read)


def test_other_surroundings_end_it() -> None:
    plain = learned()
    plain.learn_event(event("two").replace(b"data: ", b"data:"))
    assert not plain.recognises(chunk(event("two")))


def test_lessons_end() -> None:
    plain = PlainTokens()
    for number in range(_LESSONS):
        assert plain.lessons
        plain.learn_event(b'data: {"number":%d,"text":"a"}\n\n' % number)
    assert not plain.lessons


def test_after_stop_there_is_none() -> None:
    plain = learned()
    plain.stop()
    plain.learn_read(chunk(event("two")), len(event("two")))
    assert not plain.recognises(chunk(event("two"))) and not plain.lessons
