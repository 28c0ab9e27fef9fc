"""The wire of SGLang 0.5.11: `/generate`, whose every event repeats all of the output so far, text and ids; OpenAI's
routes are in sglang_openai.py.

As a real one was seen: a stream begins with status 200 before anything is known of the request, so that it tells of
errors in an event, followed by `[DONE]`; the last event adds the server's own time. How often a request was retracted
is left out, for it is not known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from backends.untrusted import UNDECODABLE
from servers.dialects.sglang_openai import (
    SGLangChatBody,
    SGLangCompletionBody,
    SGLangOpenAIWire,
    decode_chat,
    decode_completion,
)
from servers.serve import wire
from servers.serve.telemetry import Buckets, Sample, Series, labels_of
from servers.serve.wire import DialectSettings, Finish, Page, Refusal, Wire

_VERSION = "0.5.11"
_DEFAULT_NEW_TOKENS, _DEFAULT_COMPLETION_TOKENS = 128, 16
_FULL = "The request queue is full."
_SSE = Wire.content_type


class SGLangSamplingParams(msgspec.Struct):
    """The parameters that matter here; others are accepted and ignored."""

    max_new_tokens: int | None = None
    temperature: float | None = None


class SGLangBody(msgspec.Struct):
    input_ids: list[wire.TokenId] | None = None
    text: str | None = None
    sampling_params: SGLangSamplingParams = msgspec.field(default_factory=SGLangSamplingParams)
    stream: bool = False


_decode_body = msgspec.json.Decoder(SGLangBody).decode


class SGLang:
    """The dialect."""

    name = "sglang"
    media_type_error: Page | None = None
    metrics_content_type: str | None = None
    answers: Mapping[str, Callable[[bytes], Page]] = {}
    open_pages = False

    def __init__(self, settings: DialectSettings) -> None:
        self._settings = settings
        info = {"model_path": settings.model, "served_model_name": settings.model, "weight_version": wire.MARK}
        server = {**info, "context_length": settings.max_model_len, "version": _VERSION,
                  "disable_radix_cache": not settings.prefix_caching}  # fmt: skip
        pages = {
            "/": wire.json_page(200, "SGLang is running"),
            "/health": Page(200, b""),
            "/ping": Page(200, b""),
            "/server_info": wire.json_page(200, server),
            "/get_server_info": wire.json_page(200, server),
            "/model_info": wire.json_page(200, {**info, "is_generation": True}),
            "/get_model_info": wire.json_page(200, {**info, "is_generation": True}),
            "/v1/models": wire.models_page(
                settings, int(time.time()), "sglang", root=settings.model, max_model_len=settings.max_model_len
            ),
        }
        self.pages: Mapping[str, Callable[[], Page]] = {path: partial(_same, page) for path, page in pages.items()}
        self.generations: Mapping[str, Callable[[bytes, str], Sequence[Wire]]] = {
            "/generate": self._generate,
            "/v1/completions": partial(self._openai, decode_completion),
            "/v1/chat/completions": partial(self._openai, decode_chat),
        }
        self.series: Sequence[Series] = series()
        self.labels = labels_of(engine_type="unified", model_name=settings.model)

    def error(self, status: int, message: str | None = None) -> Page:
        if status in (404, 405):  # FastAPI's own
            return wire.json_page(status, {"detail": "Not Found" if status == 404 else "Method Not Allowed"})
        if status == 401:
            return wire.json_page(status, {"error": "Unauthorized"})
        if status == 400:
            return wire.json_page(status, {"error": {"message": message or "Bad Request"}})
        full = status in (429, 503)
        return wire.json_page(status, _flat(status, _FULL if full else message or "Internal Server Error", str(status)))

    def _generate(self, raw: bytes, request_id: str) -> Sequence[Wire]:
        try:
            body = _decode_body(raw)
        except UNDECODABLE as error:
            raise Refusal(wire.json_page(400, _flat(400, f"1 validation error:\n  {error}", "Bad Request"))) from None
        sampling = body.sampling_params
        asked = _DEFAULT_NEW_TOKENS if sampling.max_new_tokens is None else sampling.max_new_tokens
        prompt = body.text if body.input_ids is None else body.input_ids
        n_prompt = wire.count_tokens(prompt or "")
        if prompt is None:
            wrong: str | None = "Either text, input_ids or input_embeds should be provided."
        elif asked < 0 and n_prompt:
            wrong = f"max_new_tokens must be at least 0, got {asked}."
        else:
            wrong = self._wrong(n_prompt, asked, sampling.temperature)
        if wrong is None:
            reply = SGLangWire(body.stream, n_prompt, max(1, asked), request_id)
            reply.segments = wire.segments(self._settings, prompt or "", 1)
            return [reply]
        page = self.error(400, wrong)
        raise Refusal(_in_a_stream(page) if body.stream else page)

    def _openai(
        self, decode: Callable[[bytes], SGLangCompletionBody | SGLangChatBody], raw: bytes, request_id: str
    ) -> Sequence[Wire]:
        """Refused before anything is streamed, unlike its own route."""
        try:
            body = decode(raw)
        except UNDECODABLE as error:
            raise Refusal(wire.json_page(400, _flat(400, f"1 validation error:\n  {error}", "Bad Request"))) from None
        before, asked = 0, body.max_tokens
        if isinstance(body, SGLangCompletionBody):
            prompt: str | list[int] = body.prompt
            asked = _DEFAULT_COMPLETION_TOKENS if asked is None else asked
        else:
            prompt, before = body.text(), wire.CHAT_TEMPLATE_TOKENS
            asked = body.max_completion_tokens if asked is None else asked
        n_prompt = before + wire.count_tokens(prompt)
        if asked is None:
            asked = max(1, self._settings.max_model_len - n_prompt)
        if asked < 1:
            wrong = "1 validation error:\n  max_tokens must be positive"
            raise Refusal(wire.json_page(400, _flat(400, wrong, "Bad Request")))
        if (refused := self._wrong(n_prompt, asked, body.temperature)) is not None:
            raise Refusal(wire.json_page(400, _flat(400, refused, "BadRequestError")))
        reply = SGLangOpenAIWire(body, n_prompt, asked, request_id)
        reply.segments = wire.segments(self._settings, prompt, 1, before)
        return [reply]

    def _wrong(self, n_prompt: int, asked: int, temperature: float | None) -> str | None:
        """Why it takes no such request, whichever the route."""
        limit = self._settings.max_model_len
        if n_prompt == 0:
            return "Prompt cannot be empty"
        if temperature is not None and temperature < 0:
            return f"temperature must be non-negative, got {temperature:g}."
        if n_prompt >= limit:
            return f"The input ({n_prompt} tokens) is longer than the model's context length ({limit} tokens)."
        if n_prompt + asked <= limit:
            return None
        return (
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
            f"total of {n_prompt + asked} tokens: {n_prompt} tokens from the input messages and {asked} tokens for the "
            "completion. Please reduce the number of tokens in the input messages or the completion to fit within the "
            "limit."
        )


def _same(page: Page) -> Page:
    return page


def _flat(status: int, message: str, kind: str) -> dict[str, object]:
    """The body of errors that no route makes itself."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def _in_a_stream(page: Page) -> Page:
    return Page(200, b"data: " + page.body + b"\n\n" + SGLangWire.done, content_type=_SSE)


class SGLangWire(Wire):
    """One reply."""

    done = b"data: [DONE]\n\n"

    def __init__(self, streaming: bool, prompt_tokens: int, output_tokens: int, request_id: str) -> None:
        super().__init__(streaming, prompt_tokens, output_tokens)
        self._id = wire.encode_json(request_id)
        self._began_s = time.monotonic()

    def token(self, count: int) -> bytes:
        return b"data: " + self._output(count, b"null") + b"\n\n"

    def event(self, count: int, n_tokens: int, finish: Finish | None) -> bytes:
        if finish is None:
            return self.token(count)
        return b"data: " + self._last(count, finish) + b"\n\n"

    def _last(self, count: int, finish: Finish) -> bytes:
        reason = b'{"type":"length","length":%d}' % count if finish == "length" else b'{"type":"stop","matched":2}'
        return self._output(count, reason, b',"e2e_latency":%.6f' % (time.monotonic() - self._began_s))

    def _output(self, count: int, reason: bytes, more: bytes = b"") -> bytes:
        """All of the first `count` tokens."""
        return _EVENT % (
            wire.encode_json(wire.output_text(count)), _ids(count), self._id, reason, self.prompt_tokens, _MARK, count,
            self.cached_tokens, more,
        )  # fmt: skip

    def tail(self, count: int, done: bool = True) -> bytes:
        return self.done if done else b""

    def failure(self) -> bytes:
        return b'data: {"error":{"message":"Internal Server Error"}}\n\n' + self.done

    def refused(self, page: Page) -> Page:
        """Where the queue is full, an ordinary event, whose reason to end is an abort."""
        if not self.streaming:
            return page
        if page.status == 400:
            return _in_a_stream(page)
        return _in_a_stream(Page(200, _ABORT % (self._id, _FULL.encode(), _MARK)))

    def whole(self, count: int, finish: Finish, seconds: float) -> Page:
        return Page(200, self._last(count, finish))


_MARK = wire.encode_json(wire.MARK)
_EVENT = (
    b'{"text":%b,"output_ids":[%b],"meta_info":{"id":%b,"finish_reason":%b,"prompt_tokens":%d,'
    b'"weight_version":%b,"queue_time":0.0,"prefill_waiting_latency":null,"prefill_launch_latency":null,'
    b'"reasoning_tokens":0,"completion_tokens":%d,"cached_tokens":%d,"cached_tokens_details":null,"dp_rank":null%b}}'
)
_ABORT = (
    b'{"text":"","output_ids":[],"meta_info":{"id":%b,"finish_reason":{"type":"abort","status_code":503,'
    b'"message":"%b"},"weight_version":%b,"completion_tokens":0}}'
)
_SOME_IDS = b"".join(b",%d" % wire.token_id(count) for count in range(1, wire.N_WORDS + 1))
_ID_BYTES = len(_SOME_IDS) // wire.N_WORDS


def _ids(count: int) -> bytes:
    """Those of the first `count` tokens, as a list has them."""
    whole, rest = divmod(count, wire.N_WORDS)
    return (_SOME_IDS * whole + _SOME_IDS[: rest * _ID_BYTES])[1:]


_TTFT_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0)
_ITL_S = (0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.100, 0.200,
          0.400, 0.600, 0.800, 1.0, 2.0, 4.0, 6.0, 8.0)  # fmt: skip
_E2E_S = (*_TTFT_S, 600.0, 1200.0, 1800.0, 2400.0)
_QUEUE_S = (0.0, 0.1, 0.2, 0.5, *range(1, 6), *range(10, 21, 5), *range(30, 101, 10), *range(200, 1001, 100),
            *range(1200, 2001, 200), 2500, 3000)  # fmt: skip


def series() -> list[Series]:
    """SGLang's families, as far as there is something true to say. They are always fresh here, the real ones not."""
    return [
        Sample("sglang:num_running_reqs", "gauge", "The number of running requests", lambda t: {"": t.n_running}),
        Sample("sglang:num_queue_reqs", "gauge", "The number of requests in the waiting queue",
               lambda t: {"": t.n_waiting}),
        Sample("sglang:token_usage", "gauge", "The token usage", lambda t: {"": t.kv_usage_ratio}),
        Sample("sglang:prompt_tokens_total", "counter", "Prompt tokens", lambda t: {"": t.prompt_tokens}),
        Sample("sglang:generation_tokens_total", "counter", "Generation tokens", lambda t: {"": t.output_tokens}),
        Sample("sglang:cached_tokens_total", "counter", "Cached prompt tokens",
               lambda t: {"device": t.cached_tokens}, label="cache_source"),
        Sample("sglang:num_requests_total", "counter", "Number of requests", lambda t: {"": t.requests}),
        Sample("sglang:num_retracted_requests_total", "counter", "Retracted requests", lambda t: {"": t.preemptions}),
        Buckets("sglang:time_to_first_token_seconds", "Time to first token", "ttft", _TTFT_S),
        Buckets("sglang:inter_token_latency_seconds", "Inter-token latency", "itl", _ITL_S),
        Buckets("sglang:e2e_request_latency_seconds", "End-to-end latency", "e2e", _E2E_S),
        Buckets("sglang:queue_time_seconds", "Queueing time", "queue", _QUEUE_S),
    ]  # fmt: skip
