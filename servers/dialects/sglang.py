"""The wire of SGLang 0.5.11: `/generate`, whose every event repeats all of the output so far, text and ids.

What was seen of a real one: status 200 and headers before anything is known of the request, so that a stream tells of
errors in an event, followed by `[DONE]`; the last event adds the server's own times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from backends.untrusted import UNDECODABLE
from servers.serve import wire
from servers.serve.telemetry import Distribution, Sample, Series, labels_of
from servers.serve.wire import Finish, Page, Refusal, Settings, Wire

_VERSION = "0.5.11"
_DEFAULT_NEW_TOKENS = 128
_MESSAGES = {429: "The request queue is full.", 503: "The request queue is full.", 401: "Unauthorized"}
_SSE = Wire.content_type


class Sampling(msgspec.Struct):
    """The parameters that matter here; others are accepted and ignored."""

    max_new_tokens: int | None = None


class Body(msgspec.Struct):
    input_ids: list[wire.TokenId] | None = None
    text: str | None = None
    sampling_params: Sampling = msgspec.field(default_factory=Sampling)
    stream: bool = False


_decode_body = msgspec.json.Decoder(Body).decode


class SGLang:
    """The dialect."""

    name = "sglang"
    media_type_error: Page | None = None
    metrics_content_type: str | None = None
    answers: Mapping[str, Callable[[bytes], Page]] = {}
    open_pages = False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        started_s = int(time.time())
        info = wire.json_page(200, {"version": _VERSION, "context_length": settings.max_model_len,
                                    "disable_radix_cache": not settings.prefix_caching})  # fmt: skip
        model = wire.json_page(200, {"model_path": settings.model, "is_generation": True})
        healthy = Page(200, b"")
        models = wire.models_page(
            settings, started_s, "sglang", root=settings.model, max_model_len=settings.max_model_len
        )
        self.pages: Mapping[str, Callable[[], Page]] = {
            "/": lambda: wire.json_page(200, "SGLang is running"),
            "/health": lambda: healthy,
            "/ready": lambda: healthy,
            "/server_info": lambda: info,
            "/get_server_info": lambda: info,
            "/model_info": lambda: model,
            "/get_model_info": lambda: model,
            "/v1/models": lambda: models,
        }
        self.generations: Mapping[str, Callable[[bytes, str], Sequence[Wire]]] = {"/generate": self._generate}
        self.series: Sequence[Series] = series()
        self.labels = labels_of(engine_type="unified", model_name=settings.model)

    def error(self, status: int, message: str | None = None) -> Page:
        if status in (404, 405):  # FastAPI's own
            return wire.json_page(status, {"detail": "Not Found" if status == 404 else "Method Not Allowed"})
        text = message or _MESSAGES.get(status, "Internal Server Error")
        if status == 401:
            return wire.json_page(status, {"error": text})
        return wire.json_page(status, {"error": {"message": text}})

    def _generate(self, raw: bytes, request_id: str) -> Sequence[Wire]:
        try:
            body = _decode_body(raw)
        except UNDECODABLE as error:
            flat = {"object": "error", "message": f"1 validation error:\n  {error}", "type": "Bad Request"}
            raise Refusal(wire.json_page(400, {**flat, "param": None, "code": 400})) from None
        prompt = body.text if body.input_ids is None else body.input_ids
        if prompt is None:
            raise self._refusal(body.stream, "Either text, input_ids or input_embeds should be provided.")
        n_prompt, limit = wire.count_tokens(prompt), self._settings.max_model_len
        asked = body.sampling_params.max_new_tokens
        asked = _DEFAULT_NEW_TOKENS if asked is None else asked
        if asked < 0:
            raise self._refusal(body.stream, f"max_new_tokens must be at least 0, got {asked}.")
        if n_prompt >= limit:
            raise self._refusal(
                body.stream,
                f"The input ({n_prompt} tokens) is longer than the model's context length ({limit} tokens).",
            )
        if n_prompt + asked > limit:
            raise self._refusal(
                body.stream,
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
                f"total of {n_prompt + asked} tokens: {n_prompt} tokens from the input messages and {asked} tokens for "
                "the completion. Please reduce the number of tokens in the input messages or the completion to fit "
                "within the limit.",
            )
        reply = SGLangWire(body.stream, n_prompt, max(1, asked), request_id.encode())
        reply.segments = wire.segments(self._settings, prompt, 1)
        return [reply]

    def _refusal(self, streaming: bool, message: str) -> Refusal:
        page = self.error(400, message)
        if streaming:
            page = Page(200, b"data: " + page.body + b"\n\ndata: [DONE]\n\n", content_type=_SSE)
        return Refusal(page)


class SGLangWire(Wire):
    """One reply."""

    done = b"data: [DONE]\n\n"

    def __init__(self, streaming: bool, prompt_tokens: int, output_tokens: int, request_id: bytes) -> None:
        super().__init__(streaming, prompt_tokens, output_tokens)
        self._id = request_id
        self._began_s = time.monotonic()
        self._text = b""  # what was said so far, in JSON, without its quotation marks
        self._ids = b""
        self._count = 0

    def token(self, count: int) -> bytes:
        return b"data: " + self._event(count, None) + b"\n\n"

    def event(self, count: int, n_tokens: int, finish: Finish | None) -> bytes:
        return b"data: " + self._event(count, finish) + b"\n\n"

    def _event(self, count: int, finish: Finish | None) -> bytes:
        for each in range(self._count + 1, count + 1):
            self._text += wire.WORDS_JSON[(each - 1) % wire.N_WORDS][1:-1]
            self._ids += b"%s%d" % (b"," if each > 1 else b"", wire.token_id(each))
        self._count = count
        return _EVENT % (
            self._text, self._ids, self._id, self._finish(finish), self.prompt_tokens, count, self.cached_tokens,
            b"" if finish is None else b',"e2e_latency":%.6f' % (time.monotonic() - self._began_s),
        )  # fmt: skip

    def _finish(self, finish: Finish | None) -> bytes:
        if finish is None:
            return b"null"
        if finish == "length":
            return b'{"type":"length","length":%d}' % self.output_tokens
        return b'{"type":"stop","matched":2}'

    def tail(self, count: int, done: bool = True) -> bytes:
        return self.done if done else b""

    def failure(self) -> bytes:
        return b'data: {"error":{"message":"Internal Server Error"}}\n\n' + self.done

    def refused(self, page: Page) -> Page:
        """From a full queue: an ordinary event, whose reason to end is an abort."""
        if not self.streaming:
            return page
        abort = b'{"type":"abort","message":"The request queue is full.","status_code":503}'
        event = _EVENT % (b"", b"", self._id, abort, self.prompt_tokens, 0, 0, b"")
        return Page(200, b"data: " + event + b"\n\n" + self.done, content_type=self.content_type)

    def whole(self, count: int, finish: Finish, seconds: float) -> Page:
        return Page(200, self._event(count, finish))


_EVENT = (
    b'{"text":"%b","output_ids":[%b],"meta_info":{"id":"%b","finish_reason":%b,"prompt_tokens":%d,'
    b'"weight_version":"default","total_retractions":0,"queue_time":0.0,"prefill_waiting_latency":null,'
    b'"prefill_launch_latency":null,"reasoning_tokens":0,"completion_tokens":%d,"cached_tokens":%d,'
    b'"cached_tokens_details":null,"dp_rank":null%b}}'
)
_TTFT_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0)
_ITL_S = (0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.100, 0.200,
          0.400, 0.600, 0.800, 1.0, 2.0, 4.0, 6.0, 8.0)  # fmt: skip
_E2E_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0, 600.0,
          1200.0, 1800.0, 2400.0)  # fmt: skip


def series() -> list[Series]:
    """SGLang's families, as far as there is something true to say. They are always fresh here, the real ones not."""
    return [
        Sample("sglang:num_running_reqs", "gauge", "The number of running requests", lambda t: {"": t.n_running}),
        Sample("sglang:num_queue_reqs", "gauge", "The number of requests in the waiting queue",
               lambda t: {"": t.n_waiting}),
        Sample("sglang:token_usage", "gauge", "The token usage", lambda t: {"": t.kv_usage_ratio}),
        Sample("sglang:prompt_tokens_total", "counter", "Prompt tokens", lambda t: {"": t.prompt_tokens}),
        Sample("sglang:generation_tokens_total", "counter", "Generation tokens", lambda t: {"": t.output_tokens}),
        Sample("sglang:cached_tokens_total", "counter", "Cached prompt tokens", lambda t: {"": t.cached_tokens}),
        Sample("sglang:num_requests_total", "counter", "Number of requests", lambda t: {"": t.requests}),
        Sample("sglang:num_retracted_requests_total", "counter", "Retracted requests", lambda t: {"": t.preemptions}),
        Distribution("sglang:time_to_first_token_seconds", "Time to first token", "ttft", _TTFT_S),
        Distribution("sglang:inter_token_latency_seconds", "Inter-token latency", "itl", _ITL_S),
        Distribution("sglang:e2e_request_latency_seconds", "End-to-end latency", "e2e", _E2E_S),
        Distribution("sglang:queue_time_seconds", "Queueing time", "queue", _E2E_S),
    ]  # fmt: skip
