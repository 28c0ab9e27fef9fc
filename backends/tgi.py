"""Text Generation Inference's own protocol (3.3, back to 2.0): /generate_stream and /generate, text prompts.

One event a token. The last one has `generated_text`, and `details` with the server's counts because the request asks
for them; there is no [DONE]. An overloaded server answers a stream with status 200 and an event `{"error",
"error_type"}`. TGI takes neither token ids nor `ignore_eos`: a reply may be shorter than asked unless the server's
model has had its end-of-sequence token taken away, and the BOS that it puts before every prompt counts as a prompt
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from backends.identity import PATHS, read_as
from backends.protocol import TOKEN, Backend, Decoder, Delta, HttpRequest, Prompt, ProtocolError, Sampling
from backends.replies import UNDECODABLE, Count, WholeReply, error_message, error_text
from backends.sse import EventReply

_ONE_TOKEN = (TOKEN,)
_encode = msgspec.json.Encoder().encode


class _Token(msgspec.Struct, gc=False):
    """Nothing of it is needed but that it is there."""


class _Details(msgspec.Struct, gc=False):
    finish_reason: str | None = None
    generated_tokens: Count | None = None
    input_length: Count | None = None  # of a stream only


class _Reply(msgspec.Struct, gc=False):
    """One event of a stream, or a whole reply (which has no `token`)."""

    token: _Token | None = None
    generated_text: str | None = None
    details: _Details | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Reply).decode


class _Stream(EventReply):
    def read(self, data: bytes) -> Sequence[Delta]:
        try:
            event = _decode(data)
        except UNDECODABLE as error:
            return self.unreadable(data, error)
        if event.token is None:
            if not event.error:
                raise ProtocolError(f"neither a token nor an error: {error_text(data)}")
            self.failed = True
            return (Delta(error=error_text(data)),)
        if event.generated_text is None and event.details is None:
            return _ONE_TOKEN
        self.complete = True
        return (_last_delta(1, event.details),)


def _last_delta(n_tokens: int, details: _Details | None) -> Delta:
    if details is None:
        return Delta(n_tokens=n_tokens)
    return Delta(
        n_tokens=n_tokens,
        finish=details.finish_reason,
        prompt_tokens=details.input_length,
        output_tokens=details.generated_tokens,
    )


def _read_whole(body: bytes) -> Delta:
    reply = _decode(body)
    if reply.generated_text is None:
        if not reply.error:
            raise ProtocolError(f"neither a text nor an error: {error_text(body)}")
        return Delta(error=error_text(body))
    counted = reply.details.generated_tokens if reply.details is not None else None
    return _last_delta(1 if counted is None else counted, reply.details)


def decoder(stream: bool) -> Decoder:
    return _Stream() if stream else WholeReply(_read_whole)


def encode(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    """The request for a text prompt. TGI serves one model and takes no name; it refuses a temperature of 0."""
    parameters: dict[str, object] = {
        "max_new_tokens": sampling.max_tokens,
        "do_sample": sampling.temperature > 0,
        "details": True,
        "seed": sampling.seed,
    }
    if sampling.temperature > 0:
        parameters["temperature"] = sampling.temperature
    path = "/generate_stream" if sampling.stream else "/generate"
    return HttpRequest("POST", path, _encode({"inputs": prompt.text, "parameters": parameters}))


BACKEND = Backend(
    name="tgi",
    prompt_kind="text",
    encode=encode,
    decoder=decoder,
    error_message=error_message,
    info_paths=("/info", *(path for path in PATHS if path != "/info")),  # says most, and every TGI has it
    read_info=read_as("tgi"),
    server_metrics={
        "e2el_seconds": "tgi_request_duration",
        "running": "tgi_batch_current_size",
        "waiting": "tgi_queue_size",
        "prompt_tokens": "tgi_request_input_length_sum",
        "generation_tokens": "tgi_request_generated_tokens_sum",
    },
)
