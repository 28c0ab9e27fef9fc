"""What the four protocols look like on the wire, written by hand from the servers' own replies.

Nothing here may import the client, its codecs or the embedded server: the suite would then share their errors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

PROMPT_TOKENS, OUTPUT_TOKENS = 4, 8  # of every request of the suite
HTTP_OK = b"HTTP/1.1 200 OK\r\n"
EVENT_STREAM = b"Content-Type: text/event-stream\r\n"
HEAD = HTTP_OK + EVENT_STREAM + b"Transfer-Encoding: chunked\r\n\r\n"
JSON_HEAD = HTTP_OK + b"Content-Type: application/json\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
ID = b'"x-1"'  # of replies of the OpenAI protocols that a script makes
MESSAGE = "the engine is dead"  # of every error that a server sends here


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream(*events: bytes) -> list[bytes]:
    """The writes of a whole streamed reply: the head, a chunk an event, the last chunk."""
    return [HEAD, *map(chunk, events), END]


def sized(body: bytes, head: bytes = HTTP_OK + EVENT_STREAM) -> bytes:
    """A whole reply with its Content-Length."""
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def frame(value: Any, prefix: bytes = b"data: ") -> bytes:
    return prefix + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def usage(output: Any = OUTPUT_TOKENS, prompt: Any = PROMPT_TOKENS, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": 12} | more


def id_of(number: int) -> bytes:
    """The id of the right reply to a request, as long as ID."""
    return b'"x-%d"' % (4 + number)


@dataclass(frozen=True)
class Protocol:
    """One kind of server. `backend`: the option `--backend` that measures it."""

    backend: str
    name: str

    @property
    def openai(self) -> bool:
        return self.backend in ("vllm", "openai-chat")

    def token(self, number: int, text: str | None = None, finish: str | None = None, of: int = OUTPUT_TOKENS) -> bytes:
        """The event of the `number`-th output token, counted from 1; the last one has a finish reason."""
        text = f" t{number}" if text is None else text
        if self.backend == "vllm":
            return self.chunk(
                {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
            )
        if self.backend == "openai-chat":
            return self.chunk({"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish})
        token: dict[str, Any] = {"id": 1000 + number, "text": text, "logprob": -0.5, "special": False}
        if self.backend == "tgi":
            details = {"finish_reason": finish, "generated_tokens": of, "seed": 0, "input_length": PROMPT_TOKENS}
            last = {"generated_text": " all of it" if finish else None, "details": details if finish else None}
            return frame({"index": number, "token": token} | last)
        token |= {"count_output_tokens": number, "prompt_tokens": PROMPT_TOKENS}
        last = {"generated_text": None, "finished": finish is not None, "finish_reason": finish, "details": None}
        return frame({"token": token} | last, b"data:")

    def chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        """An event of OpenAI's with these choices."""
        kind = "chat.completion.chunk" if self.backend == "openai-chat" else "text_completion"
        return frame({"id": "x-1", "object": kind, "created": 1, "model": "m", "choices": list(choices)} | more)

    def tokens(self, count: int = OUTPUT_TOKENS, finish: str = "length") -> list[bytes]:
        """The events of `count` tokens, the last with its finish reason."""
        opening = [self.opening()] if self.backend == "openai-chat" else []
        plain = [self.token(number) for number in range(1, count)]
        return [*opening, *plain, self.token(count, finish=finish, of=count)]

    def opening(self) -> bytes:
        """Of a chat: the role, which is no token."""
        return self.chunk({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def begin(self, count: int = OUTPUT_TOKENS // 2) -> list[bytes]:
        """The events of the first `count` tokens of a longer reply."""
        return self.tokens(OUTPUT_TOKENS)[: count + (self.backend == "openai-chat")]

    def tail(self, output: Any = OUTPUT_TOKENS, prompt: Any = PROMPT_TOKENS, **more: Any) -> list[bytes]:
        """What follows the last token: usage and [DONE], where the protocol has them."""
        return [self.chunk(usage=usage(output, prompt, **more)), DONE] if self.openai else []

    def reply(self, count: int = OUTPUT_TOKENS, finish: str = "length") -> list[bytes]:
        """The events of a right reply of `count` tokens."""
        return [*self.tokens(count, finish), *self.tail(count)]

    def good(self) -> list[bytes]:
        """The writes of a right reply."""
        return stream(*self.reply())

    def error(self, message: str = MESSAGE) -> dict[str, Any]:
        """The body of an error, as this server sends it."""
        if self.backend == "tgi":
            return {"error": message, "error_type": "generation"}
        return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}

    def error_event(self, message: str = MESSAGE) -> bytes:
        return frame(self.error(message))

    def whole(self, output: int = OUTPUT_TOKENS) -> bytes:
        """The body of a right reply that is not streamed."""
        if self.backend == "tgi":
            details = {"finish_reason": "length", "generated_tokens": output, "seed": 0, "prefill": [], "tokens": []}
            return json.dumps({"generated_text": " t" * output, "details": details}).encode()
        if self.backend == "lightllm":
            counts = {"count_output_tokens": output, "finish_reason": "length", "prompt_tokens": PROMPT_TOKENS}
            return json.dumps({"generated_text": [" t" * output]} | counts).encode()
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
        text = " t" * output
        choice |= {"text": text} if self.backend == "vllm" else {"message": {"role": "assistant", "content": text}}
        return json.dumps(
            {"id": "x-1", "created": 1, "model": "m", "choices": [choice], "usage": usage(output)}
        ).encode()


VLLM = Protocol("vllm", "vLLM")
CHAT = Protocol("openai-chat", "OpenAI chat")
TGI = Protocol("tgi", "TGI")
LIGHTLLM = Protocol("lightllm", "LightLLM")
ALL = (VLLM, CHAT, TGI, LIGHTLLM)
OPENAI = (VLLM, CHAT)
OTHERS = (TGI, LIGHTLLM)
