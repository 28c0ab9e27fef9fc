"""Ollama's own protocol (https://docs.ollama.com/api): text on /api/generate, replies as a JSON object a line.

Never seen running by this project; written by its sources of November 2026 (`api/types.go`, `server/routes.go`). It
takes no token ids and has no way to go on after an end token, so replies may be shorter than asked for; the last line
counts their tokens, since a line is a token as a rule and not always. A model that nobody used for a while is loaded by
the next request: the last line says how long that took.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from backends.identity import PATHS, read_unlike
from backends.plain_tokens import PlainTokens
from backends.protocol import (
    REASONING,
    TOKEN,
    Backend,
    Count,
    Decoder,
    Delta,
    HttpRequest,
    Kept,
    OtherServer,
    Prompt,
    ProtocolError,
    ReplyIdentity,
    Sampling,
    ServerInfo,
    ServerRecord,
    Truncated,
)
from backends.replies import MAX_BYTES, error_in, error_message, quoted
from backends.untrusted import UNDECODABLE, printable


class _Line(msgspec.Struct, gc=False):
    """One object of a reply; the last one has `done` and the counts. Durations are nanoseconds, and none is a 0."""

    done: bool
    model: str = ""
    response: str = ""
    thinking: str = ""
    done_reason: str | None = None
    total_duration: Count = 0
    load_duration: Count = 0
    prompt_eval_count: Count | None = None
    prompt_eval_duration: Count = 0
    eval_count: Count | None = None
    eval_duration: Count = 0


_decode = msgspec.json.Decoder(_Line).decode
_TOKEN, _REASONING = (TOKEN,), (REASONING,)


def encode(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    """The text as it is, without the model's template, so that the prompt has the length asked for."""
    options = {"num_predict": sampling.max_tokens, "temperature": sampling.temperature, "seed": sampling.seed}
    fields = {"model": model, "prompt": prompt.text, "raw": True, "stream": sampling.stream, "options": options}
    return HttpRequest("POST", "/api/generate", msgspec.json.encode(fields))


def _last(line: _Line, seen: int) -> Delta:
    """seen: tokens that lines before it carried. The last line carries the one that is missing, where it has a text."""
    return Delta(
        n_tokens=1 if line.response or line.thinking else 0,
        finish=line.done_reason or "stop",
        prompt_tokens=line.prompt_eval_count,
        output_tokens=line.eval_count if line.eval_count is not None else seen or None,
        server=ServerRecord(
            prefill_us=line.prompt_eval_duration // 1000 or None,
            decode_us=line.eval_duration // 1000 or None,
            e2el_us=line.total_duration // 1000 or None,
            load_us=line.load_duration // 1000 or None,
        ),
    )


class _Lines:
    """Decoder of a reply that comes as lines, or whole as one line."""

    def __init__(self, kept: Kept | None) -> None:
        self.plain: PlainTokens | None = None
        self.identity: ReplyIdentity | None = None
        self._kept = kept
        self._rest = bytearray()
        self._seen = 0
        self._ended = False
        self._broken: ProtocolError | None = None

    def feed(self, data: bytes) -> Sequence[Delta]:
        if self._broken is not None:
            raise self._broken
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        deltas: list[Delta] = []
        try:
            if len(self._rest) > MAX_BYTES:
                raise ProtocolError(f"a line is longer than {MAX_BYTES} bytes")
            for line in lines:
                deltas += self._read(line)
        except ProtocolError as error:  # what came before it counts, however the body was cut into reads
            self._broken = error
            if not deltas:
                raise
        return deltas

    def eof(self) -> Sequence[Delta]:
        if self._broken is not None:
            raise self._broken
        left, self._rest = bytes(self._rest), bytearray()
        deltas = self._read(left, cut=True)
        if not self._ended:
            raise Truncated("the reply ended before the server had said that it is complete")
        return deltas

    def _read(self, data: bytes, cut: bool = False) -> Sequence[Delta]:
        """cut: nothing ended the line but the end of the body."""
        if not data.strip():
            return ()
        if self._ended:
            raise ProtocolError(f"a line came after the end of the reply: {quoted(data)}")
        try:
            line = _decode(data)
        except UNDECODABLE as error:
            if (message := error_in(data)) is not None:
                self._ended = True
                return (Delta(error=message),)
            if cut and data.lstrip().startswith(b"{") and str(error).startswith("Input data was truncated"):
                raise Truncated(f"the reply ended inside a line: {quoted(data)}") from error
            raise ProtocolError(f"a line is not of this protocol: {quoted(data)}") from error
        if self.identity is None and line.model:
            self.identity = ReplyIdentity(model=line.model)
        if self._kept is not None:
            self._kept.texts.append(line.response)
        if line.done:
            self._ended = True
            return (_last(line, self._seen),)
        if not (line.response or line.thinking):
            return ()
        self._seen += 1
        return _TOKEN if line.response else _REASONING


def decoder(stream: bool, kept: Kept | None = None) -> Decoder:
    """A whole reply is a stream of one line."""
    return _Lines(kept)


_TAGS_PATH = "/api/tags"
_read_other = read_unlike("Ollama")


class _Tag(msgspec.Struct):
    name: str


class _Tags(msgspec.Struct):
    models: list[_Tag]


def read_info(path: str, body: bytes) -> ServerInfo:
    """The models that it has. Another server, which has no such list, is told by its own. Raises ProtocolError."""
    if path != _TAGS_PATH:
        _read_other(path, body)
        raise OtherServer(
            f"this is not an Ollama server ({path} is answered, {_TAGS_PATH} is not); use --backend openai"
        )
    try:
        names = tuple(printable(tag.name) for tag in msgspec.json.decode(body, type=_Tags).models)
    except UNDECODABLE:
        raise OtherServer(
            f"this is not an Ollama server ({path} answers {quoted(body)}); use --backend openai"
        ) from None
    return ServerInfo(names[0]) if len(names) == 1 else ServerInfo(models=names)


BACKEND = Backend(
    name="ollama",
    prompt_kind="text",
    encode=encode,
    decoder=decoder,
    keeper=decoder,
    error_message=error_message,
    info_paths=(_TAGS_PATH, *PATHS),
    read_info=read_info,
    server_metrics={},
    priority_field="",
)
