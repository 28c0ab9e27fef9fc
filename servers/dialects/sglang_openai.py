"""The wire of SGLang 0.5.11 on OpenAI's routes, `/v1/completions` and `/v1/chat/completions`, as a real one was seen.

Chunks have `matched_stop` and say nothing of token ids. A completion's last token has the finish reason, a chat's comes
in an event of its own, without content; its role comes together with the first token. The model's name is not looked
at, and comes back as it was asked for.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from servers.dialects.responses import Message
from servers.dialects.tokens import StreamOptions
from servers.serve import wire
from servers.serve.wire import Finish, Page, Wire


class SGLangOpenAIBody(msgspec.Struct, kw_only=True):
    """The fields of either route that matter here; others are accepted and ignored."""

    model: str = "default"
    max_tokens: int | None = None
    temperature: float | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None


class SGLangCompletionBody(SGLangOpenAIBody, kw_only=True):
    prompt: str | list[wire.TokenId]


class SGLangChatBody(SGLangOpenAIBody, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None

    def text(self) -> str:
        return " ".join(text for message in self.messages for text in message.texts())


decode_completion = msgspec.json.Decoder(SGLangCompletionBody).decode
decode_chat = msgspec.json.Decoder(SGLangChatBody).decode


class SGLangOpenAIWire(Wire):
    """One reply of either route."""

    done = b"data: [DONE]\n\n"

    def __init__(self, body: SGLangOpenAIBody, prompt_tokens: int, output_tokens: int, request_id: str) -> None:
        super().__init__(bool(body.stream), prompt_tokens, output_tokens)
        options = body.stream_options or StreamOptions()
        self._is_chat = isinstance(body, SGLangChatBody)
        self._usage_last = bool(options.include_usage)
        self._usage_always = bool(options.include_usage and options.continuous_usage_stats)
        self._head = {"id": request_id, "object": "", "created": int(time.time()), "model": body.model}

    def token(self, count: int) -> bytes:
        return self.event(count, 1, None)

    def event(self, count: int, n_tokens: int, finish: Finish | None) -> bytes:
        text = wire.span(count, n_tokens)
        if not self._is_chat:
            return self._chunk(count, [_choice(finish, text=text)])
        events = [self._chunk(count, [_delta(None, content=text)])]
        if count == n_tokens:
            events.insert(0, self._chunk(0, [_delta(None, role="assistant", content="")]))
        if finish is not None:
            events.append(self._chunk(count, [_delta(finish)]))
        return b"".join(events)

    def tail(self, count: int, done: bool = True) -> bytes:
        return self._total(count) + (self.done if done else b"")

    def failure(self) -> bytes:
        return _error(500, "Internal Server Error", "InternalServerError") + self.done

    def refused(self, page: Page) -> Page:
        """Where the queue is full, an error in a stream, and a count of nothing behind it."""
        if not self.streaming or page.status == 400:
            return page
        self.prompt_tokens = 0
        full = _error(503, "The request queue is full.", "SERVICE_UNAVAILABLE") + self._total(0) + self.done
        return Page(200, full, content_type=Wire.content_type)

    def whole(self, count: int, finish: Finish, seconds: float) -> Page:
        text = wire.output_text(count)
        choice = _choice(finish, text=text)
        if self._is_chat:
            message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
            choice = _choice(finish, message=message)
        kind = "chat.completion" if self._is_chat else "text_completion"
        fields = {**self._head, "object": kind, "choices": [choice], "usage": self._usage(count, kept=True)}
        return wire.json_page(200, fields | {"metadata": {"weight_version": wire.MARK}})

    def _chunk(self, count: int, choices: list[dict[str, Any]]) -> bytes:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        fields = {**self._head, "object": kind, "choices": choices}
        if self._usage_always:
            fields["usage"] = self._usage(count, kept=True)
        elif not self._is_chat:
            fields["usage"] = None
        return b"data: " + wire.encode_json(fields) + b"\n\n"

    def _total(self, count: int) -> bytes:
        if not self._usage_last:
            return b""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        fields = {**self._head, "object": kind, "choices": [], "usage": self._usage(count, kept=self._is_chat)}
        return b"data: " + wire.encode_json(fields) + b"\n\n"

    def _usage(self, count: int, *, kept: bool) -> dict[str, Any]:
        """kept: that there are no cached tokens is said as null, and not left out."""
        cached = {"cached_tokens": self.cached_tokens} if self.cached_tokens else None
        details = {"prompt_tokens_details": cached} if cached or kept else {}
        return {
            "prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens + count, "completion_tokens": count,
            **details, "reasoning_tokens": 0,
        }  # fmt: skip


def _choice(finish: Finish | None, **fields: Any) -> dict[str, Any]:
    return {"index": 0, **fields, "logprobs": None, "finish_reason": finish, "matched_stop": None}


def _delta(finish: Finish | None, **fields: str) -> dict[str, Any]:
    return _choice(finish, delta={"reasoning_content": None, **fields})


def _error(code: int, message: str, kind: str) -> bytes:
    error = {"object": "error", "message": message, "type": kind, "param": None, "code": code}
    return b"data: " + wire.encode_json({"error": error}) + b"\n\n"
