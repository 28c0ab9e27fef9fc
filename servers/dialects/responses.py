"""The wire of OpenAI's `/v1/responses`, which vLLM has too: one message of text. Each event has a name, its JSON a
number, and the stream ends with the whole response."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from servers.serve import wire
from servers.serve.wire import Finish, Page, Wire


class Image(msgspec.Struct):
    url: str


class ContentPart(msgspec.Struct):
    text: str = ""
    image_url: Image | str | None = None  # as a chat has it, and as responses do


class Message(msgspec.Struct):
    content: str | list[ContentPart] | None = None

    def texts(self) -> list[str]:
        parts = self.content if isinstance(self.content, list) else [ContentPart(self.content or "")]
        return [part.text for part in parts]

    def images(self) -> list[str]:
        """As URLs."""
        shown = [part.image_url for part in self.content or () if isinstance(part, ContentPart) and part.image_url]
        return [image if isinstance(image, str) else image.url for image in shown]


class ResponseBody(wire.RequestFields, kw_only=True):
    """The fields that matter here; others are accepted and ignored."""

    input: str | list[Message]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = False

    @property
    def messages(self) -> list[Message]:
        return [Message(self.input)] if isinstance(self.input, str) else self.input

    def texts(self) -> list[str]:
        return [self.instructions or "", *(text for message in self.messages for text in message.texts())]


decode_response = msgspec.json.Decoder(ResponseBody).decode


class ResponseWire(Wire):
    """One response."""

    def __init__(self, body: ResponseBody, prompt_tokens: int, output_tokens: int, model: str, request_id: str) -> None:
        super().__init__(bool(body.stream), prompt_tokens, output_tokens)
        self._body = body
        self._model = model
        self._id, self._item_id = f"resp_{request_id}", f"msg_{request_id}"
        self._created_s = int(time.time())
        self._finish: Finish = "length"
        self._number = 0  # of the next event

    def token(self, count: int) -> bytes:
        return self._delta(wire.word(count))

    def event(self, count: int, n_tokens: int, finish: Finish | None) -> bytes:
        opening = self._opening() if count == n_tokens else b""
        return opening + self._delta(wire.span(count, n_tokens))

    def ends(self, count: int, finish: Finish) -> None:
        self._finish = finish

    def tail(self, count: int, done: bool = True) -> bytes:
        text = wire.output_text(count)
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        ended = self._event("output_text.done", place | {"text": text, "logprobs": []})
        ended += self._event("content_part.done", place | {"part": _part(text)})
        ended += self._event("output_item.done", {"output_index": 0, "item": self._item(text)})
        return ended + (self._event("completed", {"response": self._response(count)}) if done else b"")

    def failure(self) -> bytes:
        error = {"code": "server_error", "message": "the inference process has failed", "param": None}
        return self._event("error", error, "")

    def whole(self, count: int, finish: Finish, seconds: float) -> Page:
        return wire.json_page(200, self._response(count))

    def _opening(self) -> bytes:
        response = self._response(0)
        item = self._item("") | {"status": "in_progress", "content": []}
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return b"".join(
            (
                self._event("created", {"response": response}),
                self._event("in_progress", {"response": response}),
                self._event("output_item.added", {"output_index": 0, "item": item}),
                self._event("content_part.added", place | {"part": _part("")}),
            )
        )

    def _delta(self, text: str) -> bytes:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event("output_text.delta", place | {"delta": text, "logprobs": []})

    def _event(self, name: str, fields: dict[str, Any], prefix: str = "response.") -> bytes:
        kind = prefix + name
        data = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + wire.encode_json(data) + b"\n\n"

    def _item(self, text: str) -> dict[str, Any]:
        return {
            "id": self._item_id, "type": "message", "role": "assistant", "status": "completed",
            "content": [_part(text)],
        }  # fmt: skip

    def _response(self, count: int) -> dict[str, Any]:
        """As far as `count` tokens: none yet, or all."""
        cut = self._finish == "length"
        status = "in_progress" if not count else "incomplete" if cut else "completed"
        return {
            "id": self._id, "object": "response", "created_at": self._created_s, "status": status,
            "background": False, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if count and cut else None,
            "instructions": self._body.instructions, "max_output_tokens": self.output_tokens, "model": self._model,
            "output": [self._item(wire.output_text(count))] if count else [],
            "parallel_tool_calls": True, "previous_response_id": None, "temperature": 1.0, "top_p": 1.0,
            "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "truncation": "disabled",
            "usage": self._usage(count) if count else None, "metadata": {"server": wire.MARK},
        }  # fmt: skip

    def _usage(self, count: int) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens, "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": count, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + count,
        }  # fmt: skip


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
