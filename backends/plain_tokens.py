"""Plain tokens, recognised in a read without parsing HTTP or JSON.

Nearly every read of a stream is one HTTP chunk with one event that equals the event before it but for its text. The
size of the read fixes the chunk's size line, so a look at both ends of the read and at the text between is enough:
printable ASCII without quote and backslash cannot end the JSON string that it stands in, and the decoder would find the
same as in the event before. A read that differs in anything else is parsed. A recogniser belongs to one reply.

Measured: 0.9 us of CPU from the bytes of an event's read to its stamp, 1.8 us where every read is parsed (2 shared
cores, CPython 3.11; results:scripts/plain_tokens.json, by fe0b30b:benchmarks/plain_tokens.py).
"""

from __future__ import annotations

import re

_is_text = re.compile(rb"[ !#-\[\]-~]+").fullmatch  # ASCII that a JSON string holds as it is: no escape, no end
_TEXT_BEGINS = (b'"text":"', b'"content":"')
_LESSONS = 64  # a server whose events differ in more than the text is parsed, not learned again for every event


class PlainTokens:
    """`count`: output tokens of the reply that were taken for one an event, recognised or parsed. `lessons`: how often
    `learn_event` may still be called."""

    __slots__ = ("_by_size", "_head", "_tail", "count", "lessons")

    def __init__(self) -> None:
        self.count = 0
        self.lessons = _LESSONS
        # Of an event that was one token: what comes before its text, and after it. Empty: there was none.
        self._head = self._tail = b""
        # Size of a read that is a chunk with one plain token -> its head and tail, where its text begins and ends.
        self._by_size: dict[int, tuple[bytes, bytes, int, int]] = {}

    def recognises(self, data: bytes) -> bool:
        """Whether a read is one chunk with one more plain token, which is then counted and needs no parsing."""
        expected = self._by_size.get(len(data))
        if expected is not None:
            head, tail, begin, end = expected
            if data.startswith(head) and data.endswith(tail) and _is_text(data, begin, end):
                self.count += 1
                return True
        return False

    def learn_event(self, event: bytes) -> None:
        """Keeps what surrounds the text of an event that the decoder took for a plain token."""
        if self._head and event.startswith(self._head) and event.endswith(self._tail):
            return
        for begins in _TEXT_BEGINS:
            text = event.find(begins) + len(begins)
            end = event.find(b'"', text)
            if text >= len(begins) and _is_text(event, text, end):
                self._head, self._tail = event[:text], event[end:]
                self._by_size.clear()
                self.lessons -= 1
                return

    def learn_read(self, data: bytes, body_bytes: int) -> None:
        """Prepares to recognise the next read of the size of `data`, whose last piece of a body had `body_bytes`. Only
        after a read that was exactly one chunk and ended an event does the next one begin with a chunk and an event."""
        size_line_bytes = data.find(b"\r\n", 0, 16) + 2
        if body_bytes != len(data) - size_line_bytes - 2 or not data.endswith(b"\n\n\r\n"):
            self._by_size.clear()
        elif self._head and data.startswith(self._head, size_line_bytes):
            head, tail = data[:size_line_bytes] + self._head, self._tail + b"\r\n"
            self._by_size[len(data)] = (head, tail, len(head), len(data) - len(tail))

    def stop(self) -> None:
        """Nothing of this reply is a plain token any more."""
        self.lessons = 0
        self._head = b""
        self._by_size.clear()
