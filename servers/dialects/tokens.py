"""The wire of vLLM's `/inference/v1/generate` (0.32): token ids in, token ids out, and no text at all."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from servers.serve import wire
from servers.serve.wire import Finish, Page, Wire


class SamplingParams(msgspec.Struct):
    """The parameters that matter here; others are accepted and ignored, as vLLM does. max_tokens: as far as the context
    goes where it is not given."""

    max_tokens: int | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class TokensBody(wire.RequestFields, kw_only=True):
    token_ids: list[wire.TokenId]
    sampling_params: SamplingParams
    stream: bool | None = False
    stream_options: StreamOptions | None = None


decode_tokens = msgspec.json.Decoder(TokensBody).decode


class TokensWire(Wire):
    """One reply."""

    done = b"data: [DONE]\n\n"

    def __init__(self, body: TokensBody, output_tokens: int, model: str, request_id: str, failure: bytes) -> None:
        super().__init__(bool(body.stream), len(body.token_ids), output_tokens)
        options = body.stream_options or StreamOptions()
        self._usage_last = bool(options.include_usage)
        self._usage_always = bool(options.include_usage and options.continuous_usage_stats)
        self._model = model
        self._id = f"generate-tokens-{request_id}"
        self._created_s = int(time.time())
        self._failure = failure

    def token(self, count: int) -> bytes:
        return self.event(count, 1, None)

    def event(self, count: int, n_tokens: int, finish: Finish | None) -> bytes:
        usage = self._usage(count) if self._usage_always else None
        return self._chunk({"usage": usage}, [_choice(range(count - n_tokens + 1, count + 1), finish, count)])

    def tail(self, count: int, done: bool = True) -> bytes:
        usage = self._chunk({"usage": self._usage(count)}, []) if self._usage_last else b""
        return usage + (self.done if done else b"")

    def failure(self) -> bytes:
        return b"data: " + self._failure + b"\n\n" + self.done

    def whole(self, count: int, finish: Finish, seconds: float) -> Page:
        body = {
            "request_id": self._id, "model": self._model, "created": self._created_s, "usage": self._usage(count),
            "prompt_logprobs": None, "prompt_token_ids": None, "metrics": None, "kv_transfer_params": None,
            "output_mode": "tokens", "choices": [_choice(range(1, count + 1), finish, count)],
        }  # fmt: skip
        return wire.json_page(200, body)

    def _chunk(self, more: dict[str, Any], choices: list[dict[str, Any]]) -> bytes:
        fields = {"request_id": self._id, **more, "output_mode": "tokens", "choices": choices}
        return b"data: " + wire.encode_json(fields) + b"\n\n"

    def _usage(self, count: int) -> dict[str, Any]:
        usage = {
            "prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens + count, "completion_tokens": count,
        }  # fmt: skip
        return usage | ({"prompt_tokens_details": {"cached_tokens": self.cached_tokens}} if self.cached_tokens else {})


def _choice(counts: range, finish: Finish | None, all_tokens: int) -> dict[str, Any]:
    versions = [{"version": "default", "start": 0, "end": all_tokens}] if finish else None
    return {
        "index": 0, "finish_reason": finish, "stop_reason": None, "token_ids": [wire.token_id(each) for each in counts],
        "routed_experts": None, "sampling_mask": None, "weight_versions": versions, "logprobs": None,
    }  # fmt: skip
