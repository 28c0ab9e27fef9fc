"""A backend of a server that nobody has: all that a new one takes is this file and its entry point. A request is `N`,
and a reply is N lines `tick` and a line `done`."""

from __future__ import annotations

from collections.abc import Sequence

from backends.protocol import (
    TOKEN,
    Backend,
    Delta,
    HttpRequest,
    OtherServer,
    Prompt,
    ProtocolError,
    Sampling,
    ServerInfo,
    Truncated,
)


def encode(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    return HttpRequest("POST", "/ticks", f"{sampling.max_tokens} {prompt.text}".encode())


class Ticks:
    plain = identity = None

    def __init__(self, stream: bool) -> None:
        self._rest, self._seen, self._ended = b"", 0, False

    def feed(self, data: bytes) -> Sequence[Delta]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        deltas = []
        for line in lines:
            if self._ended or line not in (b"tick", b"done"):
                raise ProtocolError("a line is no tick")
            self._ended = line == b"done"
            self._seen += not self._ended
            deltas.append(Delta(finish="length", output_tokens=self._seen, prompt_tokens=1) if self._ended else TOKEN)
        return deltas

    def eof(self) -> Sequence[Delta]:
        if not self._ended:
            raise Truncated("the reply ended before it was done")
        return ()


def read_info(path: str, body: bytes) -> ServerInfo:
    if not body.startswith(b"ticking "):
        raise OtherServer("this is no ticking server")
    return ServerInfo("a-clock", version=body.split()[1].decode())


BACKEND = Backend(
    name="ticking",
    prompt_kind="text",
    encode=encode,
    decoder=Ticks,
    error_message=lambda status, body: f"status {status}",
    info_paths=("/who",),
    read_info=read_info,
    server_metrics={},
)
