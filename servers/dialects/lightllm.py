"""The wire of LightLLM 1.2: `/generate`, `/generate_stream` and `/`, which takes either way by `"stream"`.

Frames are `data:{...}` without a space, written by ujson, which escapes slashes; `finished` is true on the last and
nothing follows it. Prompts are token ids, counted as they are, or text, a token a word. The fields that every version
since 1.0 sends are sent, and no others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from backends.untrusted import UNDECODABLE
from servers.serve import wire
from servers.serve.telemetry import Buckets, Sample, Series, labels_of
from servers.serve.wire import DialectSettings, Finish, Page, Refusal, Wire

_TYPES = {400: "BadRequestError", 401: "AuthenticationError", 417: "ExpectationFailedError", 429: "RateLimitError"}
_MESSAGES = {429: "Server is busy, please try again later.", 503: "Server is busy, please try again later."}


class LightLLMParameters(msgspec.Struct):
    """The parameters that matter here; others are accepted and ignored."""

    max_new_tokens: int = 65535


class LightLLMBody(msgspec.Struct):
    inputs: str | list[wire.TokenId]
    parameters: LightLLMParameters
    stream: bool = False


_decode_body = msgspec.json.Decoder(LightLLMBody).decode


class LightLLM:
    """The dialect."""

    name = "lightllm"
    media_type_error: Page | None = None  # the body is read whatever it is called
    metrics_content_type: str | None = None
    answers: Mapping[str, Callable[[bytes], Page]] = {}
    open_pages = False

    def __init__(self, settings: DialectSettings) -> None:
        self._settings = settings
        started_s = int(time.time())
        healthy = wire.json_page(200, {"message": "Ok"})
        alive = wire.json_page(200, {"status": "ok"})
        self.pages: Mapping[str, Callable[[], Page]] = {
            "/health": lambda: healthy,
            "/healthz": lambda: healthy,
            "/liveness": lambda: alive,
            "/readiness": lambda: alive,
            "/get_model_name": lambda: wire.json_page(200, {"model_name": settings.model}),
            "/v1/models": lambda: wire.models_page(
                settings, started_s, "lightllm", max_model_len=settings.max_model_len
            ),
        }
        self.generations: Mapping[str, Callable[[bytes, str], Sequence[Wire]]] = {
            "/generate": lambda raw, _: self._generate(raw, False),
            "/generate_stream": lambda raw, _: self._generate(raw, True),
            "/": lambda raw, _: self._generate(raw, None),
        }
        self.series: Sequence[Series] = series(settings.max_model_len)
        self.labels = labels_of(model_name=settings.model)

    def error(self, status: int, message: str | None = None) -> Page:
        if status in (404, 405):  # FastAPI's own
            return wire.json_page(status, {"detail": "Not Found" if status == 404 else "Method Not Allowed"})
        text = message or _MESSAGES.get(status, "Internal Server Error")
        kind = _TYPES.get(status, "InternalServerError")
        return wire.json_page(status, wire.error_body(status, text, kind))

    def _generate(self, raw: bytes, streaming: bool | None) -> Sequence[Wire]:
        try:
            body = _decode_body(raw)
        except msgspec.ValidationError as error:
            raise Refusal(self.error(417, _missing(raw) or str(error))) from None
        except UNDECODABLE as error:
            raise Refusal(self.error(400, str(error))) from None
        n_prompt = wire.count_tokens(body.inputs)
        max_new_tokens, limit = body.parameters.max_new_tokens, self._settings.max_model_len
        if max_new_tokens < 1:
            raise Refusal(self.error(400, f"max_new_tokens must be at least 1 , got {max_new_tokens}."))
        if n_prompt == 0:
            raise Refusal(self.error(400, "prompt_ids is empty"))
        if n_prompt + max_new_tokens > limit:
            message = f"the input prompt token len {n_prompt} + max_new_tokens {max_new_tokens} > {limit}"
            raise Refusal(self.error(400, message))
        reply = LightLLMWire(body.stream if streaming is None else streaming, n_prompt, max_new_tokens)
        reply.segments = wire.segments(self._settings, body.inputs, 1)
        return [reply]


def _missing(raw: bytes) -> str:
    """The first required key that the body lacks, as Python prints a KeyError; "" when none is missing or the body is
    no JSON behind what was wrong first."""
    try:
        body = msgspec.json.decode(raw)
    except UNDECODABLE:
        return ""
    if not isinstance(body, dict):
        return ""
    return next((repr(key) for key in ("inputs", "parameters") if key not in body), "")


class CountedToken(wire.Token, kw_only=True):
    count_output_tokens: int
    prompt_tokens: int


class LightLLMStreamEvent(msgspec.Struct, kw_only=True):
    token: CountedToken
    generated_text: None = None
    finished: bool
    finish_reason: Finish | None
    details: None = None


class LightLLMWholeReply(msgspec.Struct):
    generated_text: list[str]
    count_output_tokens: int
    finish_reason: Finish
    prompt_tokens: int


class LightLLMWire(Wire):
    """One reply."""

    def token(self, count: int) -> bytes:
        index = count % wire.N_WORDS
        return _PLAIN % (wire.FIRST_ID + index, _ESCAPED[index], count, self.prompt_tokens)

    def event(self, count: int, n_tokens: int, finish: Finish | None) -> bytes:
        token = CountedToken(
            wire.token_id(count),
            wire.span(count, n_tokens),
            count_output_tokens=count,
            prompt_tokens=self.prompt_tokens,
        )
        event = LightLLMStreamEvent(token=token, finished=finish is not None, finish_reason=finish)
        return b"data:" + _ujson(event) + b"\n\n"

    def failure(self) -> bytes:
        error = {"message": "the inference process has failed", "type": "invalid_request_error"}
        return b"data: " + _ujson({"error": error}) + b"\n\n"

    def whole(self, count: int, finish: Finish, seconds: float) -> Page:
        reply = LightLLMWholeReply([wire.output_text(count)], count, finish, self.prompt_tokens)
        return Page(200, _ujson(reply), content_type=None)


def _ujson(value: object) -> bytes:
    """JSON as ujson writes it: a slash, which occurs in strings alone, is escaped."""
    return wire.encode_json(value).replace(b"/", b"\\/")


_ESCAPED = tuple(word.replace(b"/", b"\\/") for word in wire.WORDS_JSON)
_PLAIN = (
    b'data:{"token":{"id":%d,"text":%b,"logprob":-0.6,"special":false,"count_output_tokens":%d,"prompt_tokens":%d},'
    b'"generated_text":null,"finished":false,"finish_reason":null,"details":null}\n\n'
)


def series(max_req_total_len: int) -> list[Series]:
    """LightLLM's families, as far as there is something true to say: there is no batch and no queue here."""
    seconds = [0.001 * 1.5**power for power in range(1, 36)]
    tokens = [max_req_total_len / 100 * step for step in range(101)]
    return [
        Sample("lightllm_request_count_total", "counter", "The total number of requests", lambda t: {"": t.requests}),
        Sample("lightllm_request_success_total", "counter", "The number of successful requests",
               lambda t: {"": t.finished.total()}),
        Sample("lightllm_request_failure_total", "counter", "The number of failed requests",
               lambda t: {"": t.failed.total()}),
        Sample("lightllm_prompt_tokens_total", "counter", "Prompt tokens", lambda t: {"": t.prompt_tokens}),
        Sample("lightllm_generation_tokens_total", "counter", "Tokens generated", lambda t: {"": t.output_tokens}),
        Sample("lightllm_queue_size", "gauge", "Queue size", lambda t: {"": t.n_waiting}),
        Sample("lightllm_batch_current_size", "gauge", "Current batch size", lambda t: {"": t.n_running}),
        Sample("lightllm_num_running_reqs", "gauge", "Running requests", lambda t: {"": t.n_running}),
        Buckets("lightllm_request_first_token_duration", "First token time of the request", "ttft", seconds),
        Buckets("lightllm_request_mean_time_per_token_duration", "Per token time of the request", "mean", seconds),
        Buckets("lightllm_request_inference_duration", "Inference time of the request", "e2e", seconds),
        Buckets("lightllm_request_queue_duration_bucket", "Queue duration of requests", "queue", seconds),
        Buckets("lightllm_request_input_length", "Length of the input tokens", "prompt_tokens", tokens),
        Buckets("lightllm_cache_length", "Tokens found in the prompt cache", "cached_tokens", tokens),
        Buckets("lightllm_request_generated_tokens", "Number of generated tokens", "output_tokens", tokens),
        Buckets("lightllm_request_max_new_tokens", "Max new token", "max_tokens", tokens),
    ]  # fmt: skip
