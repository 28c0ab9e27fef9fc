"""OpenAI's `/v1/responses`, as vLLM, SGLang and others stream it: events by name, the last with the whole response.

An event of a text's delta counts as a token; how many there were in all says the usage of the last event. Deltas of
reasoning are told apart from those of the answer; what opens or repeats parts of a response carries nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from backends.identity import PATHS, read_any
from backends.protocol import (
    HELD_BACK,
    REASONING,
    TOKEN,
    Backend,
    Decoder,
    Delta,
    HttpRequest,
    Kept,
    Prompt,
    ProtocolError,
    Sampling,
)
from backends.replies import Count, WholeReply, error_message, error_text, is_ping
from backends.sse import EventReply
from backends.untrusted import UNDECODABLE

_ANSWERS = frozenset(
    f"response.{what}.delta"
    for what in ("output_text", "refusal", "function_call_arguments", "custom_tool_call_input", "mcp_call_arguments")
)
_REASONS = frozenset(("response.reasoning_text.delta", "response.reasoning_summary_text.delta"))
_ENDS = frozenset(("response.completed", "response.incomplete"))
_encode = msgspec.json.Encoder().encode


class _Details(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None
    reasoning_tokens: Count | None = None


class _Usage(msgspec.Struct, gc=False):
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Part(msgspec.Struct, gc=False):
    text: str | None = None


class _Item(msgspec.Struct, gc=False):
    type: str = ""
    content: list[_Part] | None = None


class _Response(msgspec.Struct, gc=False):
    status: str | None = None
    output: list[_Item] | None = None
    usage: _Usage | None = None
    error: Any = None

    def last(self) -> Delta:
        """What the whole response says."""
        usage = self.usage or _Usage()
        read, made = usage.input_tokens_details or _Details(), usage.output_tokens_details or _Details()
        return Delta(
            finish="length" if self.status == "incomplete" else "stop",
            prompt_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cached_tokens=read.cached_tokens,
            reasoning_tokens=made.reasoning_tokens,
        )

    def keep(self, kept: Kept | None) -> None:
        """Its answer, as a client would send it back: no reasoning."""
        if kept is not None:
            parts = (part for item in self.output or () if item.type == "message" for part in item.content or ())
            kept.texts += (part.text for part in parts if part.text)


class _Event(msgspec.Struct, gc=False):
    type: str = ""
    delta: Any = None
    response: _Response | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode
_decode_whole = msgspec.json.Decoder(_Response).decode


class _Stream(EventReply):
    ends_with_done = True  # some add it

    def __init__(self, kept: Kept | None) -> None:
        super().__init__()
        self._kept = kept

    def read(self, data: bytes) -> Sequence[Delta]:
        try:
            event = _decode(data)
        except UNDECODABLE as error:
            return self.unreadable(data, error)
        if event.type in _ANSWERS:
            return (TOKEN if event.delta else HELD_BACK,)
        if event.type in _REASONS:
            return (REASONING,)
        if event.type in _ENDS and event.response is not None:
            self.end()
            event.response.keep(self._kept)
            return (event.response.last(),)
        if event.error or event.type in ("error", "response.failed"):
            self.failed = True
            failed = event.response is not None and event.response.error
            return (Delta(error=error_text(_encode({"error": failed}) if failed else data)),)
        if not event.type.startswith("response.") and not is_ping(data):
            raise ProtocolError(f"no event of a response: {error_text(data)}")
        return ()


def _read_whole(kept: Kept | None, body: bytes) -> Delta:
    response = _decode_whole(body)
    if response.error:
        return Delta(error=error_text(body))
    if response.status is None or response.output is None:
        raise ProtocolError(f"no response: {error_text(body)}")
    response.keep(kept)
    last = response.last()
    return msgspec.structs.replace(last, n_tokens=last.output_tokens or int(bool(response.output)))


def decoder(stream: bool, kept: Kept | None = None) -> Decoder:
    return _Stream(kept) if stream else WholeReply(partial(_read_whole, kept))


def encode(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    """`seed` is no field of these requests, and `ignore_eos` none of OpenAI's: it is sent when asked for. The server is
    not to keep the response."""
    asked: object = prompt.text
    if prompt.messages:
        asked = [{"role": role, "content": content} for role, content in prompt.messages]
    elif prompt.images:
        text = {"type": "input_text", "text": prompt.text}
        images = [{"type": "input_image", "image_url": url} for url in prompt.images]
        asked = [{"role": "user", "content": [text, *images]}]
    fields = {"model": model, "input": asked, "max_output_tokens": sampling.max_tokens, "store": False}
    fields["temperature"] = sampling.temperature
    if sampling.ignore_eos:
        fields["ignore_eos"] = True
    if sampling.stream:
        fields["stream"] = True
    return HttpRequest("POST", "/v1/responses", _encode(fields))


BACKEND = Backend(
    name="openai-responses",
    prompt_kind="text",
    any_server=True,
    encode=encode,
    decoder=decoder,
    keeper=decoder,
    error_message=error_message,
    info_paths=PATHS,
    read_info=read_any,
    server_metrics={},
    native=False,
    takes_images=True,
)
