"""Replies that come as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Nearly every call of `feed` gets exactly one event, `data: {...}` and an empty line: that has a short way. The long
way takes all that the standard allows: LF, CRLF and CR line ends, a byte order mark, comments (keep-alives),
`event:`, `id:` and `retry:` lines, data over several lines, and cuts between reads anywhere. It is stricter than the
standard in three ways, because a measurement must notice: a line with any other field is an error, because then this
is no stream of events; so is an event after the end of the reply; so is an event that the end of the body cuts off. A
body that is no stream but a JSON document with an error is that error; a whole reply in place of a stream is told apart
from other documents. An event that is named as a sign of life (`event: ping`) is passed over with its data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from backends.plain_tokens import PlainTokens
from backends.protocol import TOKEN, Delta, ProtocolError, ReplyIdentity, Truncated
from backends.replies import MAX_BYTES, PINGS, WholeReply, is_whole_reply, quoted

_BOM = b"\xef\xbb\xbf"
_CR = 0x0D
_TOO_LONG = f"an event is longer than {MAX_BYTES} bytes"
_DONE = b"[DONE]"
_IGNORED_FIELDS = (b"", b"event", b"id", b"retry")  # a comment has an empty name
_FIELDS = (b"data", *_IGNORED_FIELDS)

PLAIN = (TOKEN,)  # for `read` to return, itself, when nothing of the event but that there is some text made it a token


class EventReply(ABC):
    """Decoder of one streamed reply. A protocol says in `read` what one event means.

    `complete`: the server has said that the reply is whole. `failed`: it has sent an error and owes nothing more.
    `ended`: no event may follow. `ends_with_done`: the protocol's last event is `[DONE]`, which others do not have.
    plain: as Decoder has it, for a protocol whose `read` returns PLAIN.
    """

    ends_with_done = False

    def __init__(self, plain: PlainTokens | None = None) -> None:
        self.plain = plain
        self.identity: ReplyIdentity | None = None
        self.complete = False
        self.failed = False
        self.ended = False
        self._between_events = False  # nothing is pending (False at first, when a byte order mark may come)
        self._first_line = True
        self._after_cr = False  # a LF that comes next ends the same line
        self._line = bytearray()  # of the line that is not ended yet
        self._data = bytearray()  # of the event that is not ended yet, each line with its end
        self._ping = False  # that event is named as a sign of life
        self._document: WholeReply | None = None  # a body that begins as JSON instead
        self._broken: ProtocolError | None = None

    @abstractmethod
    def read(self, data: bytes) -> Sequence[Delta]:
        """The deltas of an event with this data (it may begin with a space). Raises ProtocolError and nothing else."""

    def feed(self, data: bytes) -> Sequence[Delta]:
        """Deltas completed by `data`, in order. Raises ProtocolError.

        What came before a breach of the protocol counts: the breach is then raised by the next call, so that it makes
        no difference how the body was cut into reads.
        """
        if self._between_events:
            line, _, rest = data.partition(b"\n")
            event = line.removeprefix(b"data:")
            if rest == b"\n" and event is not line and _CR not in event:
                deltas_of_event = self.read(event)
                if deltas_of_event is PLAIN and (plain := self.plain) is not None and plain.lessons:
                    plain.learn_event(data)
                return deltas_of_event
        if self._broken is not None:
            raise self._broken
        deltas: list[Delta] = []
        try:
            self._take(data, deltas)
        except ProtocolError as error:
            self._broken = error
            self._between_events = False
            if self.plain is not None:
                self.plain.stop()
            if not deltas:
                raise
        return deltas

    def eof(self) -> Sequence[Delta]:
        """The body has ended. Raises Truncated for a reply that is neither complete nor an error."""
        if self._broken is not None:
            raise self._broken
        if self._document is not None:
            return self._document.eof()
        line = b"" if self._line.startswith(b":") else bytes(self._line)  # nothing is lost with half a comment
        left = (bytes(self._data) + line).strip()
        if left.removeprefix(b"data:").lstrip() == _DONE:  # some servers leave the last line ends out
            self._read(_DONE)
            left = b""
        if self.failed:
            return ()
        name = line.removeprefix(_BOM).partition(b":")[0]
        if not any(field.startswith(name) for field in _FIELDS) and not (self._first_line and _BOM.startswith(line)):
            raise ProtocolError(f"the reply is not a stream of events: {quoted(line)}")
        if left:
            raise Truncated(f"the reply ended inside an event: {quoted(left)}")
        if not self.complete:
            raise Truncated("the reply ended before the server had said that it is complete")
        return ()

    def unreadable(self, data: bytes, error: Exception) -> Sequence[Delta]:
        """For `read`, when `data` is not the JSON of the protocol: its end or a keep-alive, else a ProtocolError."""
        text = data.strip()
        if text == _DONE and self.ends_with_done:
            self.end()
        elif text:
            raise ProtocolError(f"an event is not of this protocol: {quoted(text)}") from error
        return ()

    def end(self) -> None:
        """For `read`, at the protocol's last event: the reply is complete, and an event after it is a breach."""
        self.complete = self.ended = True
        self._between_events = False  # from here on the long way, which looks at `ended`
        if self.plain is not None:
            self.plain.stop()

    def _read(self, data: bytes) -> Sequence[Delta]:
        """The deltas of an event on the long way. Nothing but a keep-alive, or `[DONE]` once more, follows the end."""
        if not self.ended:
            return self.read(data)
        text = data.strip()
        if text and not (text == _DONE and self.ends_with_done):
            raise ProtocolError(f"an event came after the end of the reply: {quoted(text)}")
        return ()

    def _take(self, data: bytes, deltas: list[Delta]) -> None:
        """Adds the deltas completed by `data` and keeps what is left over."""
        if self._document is None and self._first_line and not self._line.strip():
            begun = (bytes(self._line) + data).lstrip()
            if begun.startswith(b"{"):
                self._document, data = WholeReply(_no_event), begun
                self._line.clear()
        if self._document is not None:
            self._document.feed(data)
            return
        *ended, rest = self._lines(data)
        for line in ended:
            if len(line) + len(self._data) > MAX_BYTES:
                raise ProtocolError(_TOO_LONG)
            if self._first_line:
                if not line.strip():
                    continue
                self._first_line = False
                line = line.removeprefix(_BOM)
            if not line:
                if self._data:
                    event = bytes(self._data[:-1])
                    self._data.clear()
                    if not self._ping:
                        deltas += self._read(event)
                self._ping = False
                continue
            value = line.removeprefix(b"data:")
            if value is not line or line == b"data":
                self._data += (value if value is not line else b"") + b"\n"
            elif (field := line.partition(b":"))[0] not in _IGNORED_FIELDS:
                raise ProtocolError(f"the reply is not a stream of events: {quoted(line)}")
            elif field[0] == b"event":
                self._ping = field[2].strip().decode("latin-1") in PINGS
        self._line += rest
        if len(self._line) + len(self._data) > MAX_BYTES:
            raise ProtocolError(_TOO_LONG)
        self._between_events = not (self._line or self._data or self._ping or self._first_line or self.ended)

    def _lines(self, data: bytes) -> list[bytes]:
        """The lines that `data` ends, without their ends, and last the beginning of the next one."""
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        if _CR in data:
            self._after_cr = data[-1] == _CR
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = data.split(b"\n")
        if self._line and len(lines) > 1:
            lines[0] = bytes(self._line) + lines[0]
            self._line.clear()
        return lines


def _no_event(body: bytes) -> Delta:
    """For a whole reply in place of a stream: only an error may come so. Raises ProtocolError or one of UNDECODABLE."""
    msgspec.json.decode(body)
    if is_whole_reply(body):
        raise ProtocolError(
            "the server answered with a whole reply although a stream was asked for; measure it with --no-stream"
        )
    raise ProtocolError(f"the reply is not a stream of events: {quoted(body)}")
