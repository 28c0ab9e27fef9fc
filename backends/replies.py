"""What the replies of all servers have in common: errors as text, and replies that are one JSON document.

A reply is untrusted input and its text ends in terminals, logs and HTML: everything that leaves here as text is one
printable line of bounded length. Nothing here raises anything but ProtocolError, and the error texts not even that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from http import HTTPStatus

import msgspec

from backends.plain_tokens import PlainTokens
from backends.protocol import Count as Count
from backends.protocol import Delta, ProtocolError, ReplyIdentity, ServerRecord, Truncated
from backends.untrusted import MAX_LINE_CHARS, UNDECODABLE, printable

MAX_BYTES = 4 << 20  # of one event, or of one whole reply: more is not a reply (1e5 tokens are half a MB of text)
MAX_ERROR_BYTES = 65_536  # of an error that is parsed: JSON may take fifty times its bytes as values of Python

# Names of events by which gateways and proxies keep a connection open; no protocol here has an event of that name.
PINGS = frozenset(("ping", "keepalive", "keep-alive", "keep_alive", "heartbeat"))

# Finish reasons by which a server says that it gave the reply up: the output is not what was asked for.
GIVEN_UP = frozenset(("abort", "error"))


def quoted(data: bytes) -> str:
    """The beginning of bytes that could not be read, to show in a message."""
    return f"'{printable(data[:200].decode('utf-8', 'replace'), 100)}'"


def error_text(body: bytes) -> str:
    """One line for an error in any of the shapes that servers send; never raises.

    `{"error": {"message"}}` (vLLM, OpenAI, LightLLM), `{"error": "...", "error_type"}` (TGI), `{"message"}` (LightLLM
    before 1.2, SGLang), `{"detail": "..."}` and `{"detail": [{"loc", "msg"}]}` (FastAPI); else the body as it is.
    """
    try:
        text = _message(msgspec.json.decode(body)) if len(body) <= MAX_ERROR_BYTES else ""
    except UNDECODABLE:  # a proxy's HTML, plain text, or JSON that was cut off
        text = ""
    return printable(text or body[: 8 * MAX_LINE_CHARS].decode("utf-8", "replace"))


def error_in(body: bytes) -> str | None:
    """One line for a body that is JSON with an error in one of those shapes, else None; never raises. A body of more
    than MAX_ERROR_BYTES is not looked into and gives None."""
    if len(body) > MAX_ERROR_BYTES:
        return None
    try:
        fields = msgspec.json.decode(body, type=dict[str, object])
    except UNDECODABLE:
        return None
    return error_text(body) if any(fields.get(key) for key in ("error", "message", "detail")) else None


def _message(value: object) -> str:
    while isinstance(value, dict):
        value = next((value[key] for key in ("error", "message", "detail", "error_type", "type") if value.get(key)), "")
    if isinstance(value, list):
        parts = msgspec.convert(value, list[_Invalid])
        return "; ".join(f"{'.'.join(map(str, part.loc))}: {part.msg}" for part in parts)
    return value if isinstance(value, str) else ""


class _Invalid(msgspec.Struct):
    msg: str
    loc: list[str | Count] = []


def error_message(status: int, body: bytes) -> str:
    """One line for a reply whose status is not 200: the status and what the server says. Never raises."""
    try:
        phrase = f" {HTTPStatus(status).phrase}"
    except ValueError:
        phrase = ""
    return printable(f"HTTP {status}{phrase}: {error_text(body) or 'no message'}")


class _Named(msgspec.Struct):
    type: str


def reply_identity(data: bytes) -> ReplyIdentity | None:
    """Who a reply says that it is, in a chunk of it or in all of it; None where it does not say."""
    try:
        identity = msgspec.json.decode(data, type=ReplyIdentity)
    except UNDECODABLE:
        return None
    return identity if identity.id or identity.model else None


def is_ping(data: bytes) -> bool:
    """Whether an event's data says that it is nothing but a sign of life, such as {"type": "ping"}."""
    try:
        return msgspec.json.decode(data, type=_Named).type in PINGS
    except UNDECODABLE:
        return False


class _Whole(msgspec.Struct):
    """What replies in one piece have, of any server here."""

    choices: list[object] = []
    generated_text: object = None


def is_whole_reply(body: bytes) -> bool:
    """Whether a document is a reply, as it comes without streaming."""
    try:
        reply = msgspec.json.decode(body, type=_Whole)
    except UNDECODABLE:
        return False
    return bool(reply.choices) or reply.generated_text is not None


def given_up(finish: str) -> str:
    return printable(f"the server gave the reply up (finish_reason '{finish}')")


class WholeReply:
    """Decoder of a reply that is one JSON document. `read` makes its Delta, or raises ProtocolError or UNDECODABLE."""

    most_bytes = MAX_BYTES

    def __init__(self, read: Callable[[bytes], Delta]) -> None:
        self.plain: PlainTokens | None = None
        self.identity: ReplyIdentity | None = None
        self._read = read
        self._body = bytearray()

    def feed(self, data: bytes) -> Sequence[Delta]:
        self._body += data
        if len(self._body) > self.most_bytes:
            raise ProtocolError(f"the reply is longer than {self.most_bytes} bytes")
        return ()

    def eof(self) -> Sequence[Delta]:
        body = bytes(self._body)
        if not body.strip():
            raise Truncated("the reply has no body")
        self.identity = reply_identity(body)
        try:
            return (self._read(body),)
        except (ProtocolError, *UNDECODABLE) as error:
            if (message := error_in(body)) is not None:
                return (Delta(error=message),)
            if isinstance(error, ProtocolError):
                raise
            cut_off = str(error).startswith("Input data was truncated")  # as msgspec words it
            kind = Truncated if cut_off else ProtocolError
            raise kind(f"the reply is {'cut off' if cut_off else 'not what was asked for'}: {quoted(body)}") from error


_HEADERS = re.compile(
    rb"^x-(prompt-tokens|compute-tokens|queue-time|total-time): *(\d{1,12})\r?$", re.IGNORECASE | re.MULTILINE
)


class HeadedReply(WholeReply):
    """One whose headers may say how long the prompt was, and what it took in milliseconds, as those of Hugging Face's
    servers do."""

    def __init__(self, read: Callable[[bytes], Delta]) -> None:
        super().__init__(read)
        self._header_fields: dict[bytes, int] = {}

    def head(self, head: bytes) -> None:
        fields = _HEADERS.findall(head.partition(b"\r\n\r\n")[0])
        self._header_fields = {name.lower(): int(value) for name, value in fields}

    def eof(self) -> Sequence[Delta]:
        (delta,) = super().eof()
        if delta.error is not None or not self._header_fields:
            return (delta,)
        times_us = {name: 1000 * value for name, value in self._header_fields.items()}
        tokens = self._header_fields.get(
            b"prompt-tokens", self._header_fields.get(b"compute-tokens", delta.prompt_tokens)
        )
        server = ServerRecord(queue_us=times_us.get(b"queue-time"), e2el_us=times_us.get(b"total-time"))
        return (msgspec.structs.replace(delta, prompt_tokens=tokens, server=server),)
