"""The wire of TGI 3.3: `/generate`, `/generate_stream` and `/`, which takes either way by `"stream"`.

Frames are `data: {...}` and nothing ends them: the last event carries `generated_text`, and `details` when asked for.
Prompts are text, a token a word and one more for the BOS that TGI adds and counts. A streaming route answers 200 and
reports whatever is wrong with the request in its only event; only a body that cannot be read gets a status of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from backends.untrusted import UNDECODABLE
from servers.serve import wire
from servers.serve.telemetry import Distribution, Sample, Series
from servers.serve.wire import Finish, Page, Refusal, Settings, Wire

VERSION = "3.3.7"
BOS_TOKENS = 1
PIECE_TOKENS = 1024  # that the router generates of a reply before the text so far queues again as a prompt

_EVENT_STREAM = "text/event-stream"
_FINISH = {"length": "length", "stop": "eos_token"}
# status -> error_type, message
_ERRORS = {
    422: ("validation", "Input validation error: the request is invalid"),
    424: ("generation", "Request failed during generation: Server error: CANCELLED"),
    429: ("overloaded", "Model is overloaded"),
    500: ("incomplete_generation", "Incomplete generation"),
    503: ("healthcheck", "unhealthy"),
}


class Parameters(msgspec.Struct):
    """The parameters that matter here; others are accepted and ignored."""

    max_new_tokens: int | None = None
    details: bool = False
    decoder_input_details: bool = False
    seed: int | None = None


class Body(msgspec.Struct):
    inputs: str
    parameters: Parameters = msgspec.field(default_factory=Parameters)
    stream: bool = False


_decode_body = msgspec.json.Decoder(Body).decode


class TGI:
    """The dialect. `max_input_tokens` is one less than the whole, as TGI sets it by default."""

    name = "tgi"
    labels = ""
    metrics_content_type: str | None = "text/plain; charset=utf-8"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.media_type_error: Page | None = _text(415, "Expected request with `Content-Type: application/json`")
        healthy = Page(200, b"", content_type=None)
        self.pages: Mapping[str, Callable[[], Page]] = {
            "/health": lambda: healthy,
            "/ping": lambda: healthy,
            "/": lambda: healthy,
            "/info": self._info,
        }
        self.generations: Mapping[str, Callable[[bytes, str], Wire]] = {
            "/generate": lambda raw, _: self._generate(raw, False),
            "/generate_stream": lambda raw, _: self._generate(raw, True),
            "/": lambda raw, _: self._generate(raw, None),
        }
        self.series: Sequence[Series] = series(settings.max_model_len)

    def error(self, status: int, message: str | None = None) -> Page:
        if status in (401, 404, 405):
            return Page(status, b"", content_type=None)
        kind, usual = _ERRORS.get(status, ("generation", "Request failed during generation"))
        return wire.json_page(status, {"error": message or usual, "error_type": kind})

    def _info(self) -> Page:
        limit = self._settings.max_model_len
        info = {"model_id": self._settings.model, "model_sha": None, "model_pipeline_tag": "text-generation"}
        limits = {
            "max_concurrent_requests": self._settings.max_requests,
            "max_best_of": 2, "max_stop_sequences": 4, "max_input_tokens": limit - 1,
            "max_total_tokens": limit, "validation_workers": 2, "max_client_batch_size": 4,
        }  # fmt: skip
        router = {"router": "text-generation-router", "version": VERSION, "sha": None, "docker_label": None}
        return wire.json_page(200, info | limits | router)

    def _generate(self, raw: bytes, streaming: bool | None) -> Wire:
        try:
            body = _decode_body(raw)
        except msgspec.ValidationError as error:
            text = f"Failed to deserialize the JSON body into the target type: {error}"
            raise Refusal(_text(422, text)) from None
        except UNDECODABLE as error:
            raise Refusal(_text(400, f"Failed to parse the request body as JSON: {error}")) from None
        streaming = body.stream if streaming is None else streaming
        n_prompt = wire.count_tokens(body.inputs) + BOS_TOKENS
        limit = self._settings.max_model_len
        max_new_tokens = body.parameters.max_new_tokens
        asked = max_new_tokens
        if asked is not None and self._settings.in_pieces:
            asked = min(asked, PIECE_TOKENS)  # the first piece alone is looked at
        wrong = ""
        if not body.inputs:
            wrong = "`inputs` cannot be empty"
        elif max_new_tokens is not None and max_new_tokens < 1:
            wrong = "`max_new_tokens` must be strictly positive"
        elif asked is not None and n_prompt + asked > limit:
            wrong = f"`inputs` tokens + `max_new_tokens` must be <= {limit}. "
            wrong += f"Given: {n_prompt} `inputs` tokens and {asked} `max_new_tokens`"
        elif n_prompt > limit - 1:
            wrong = f"`inputs` must have less than {limit - 1} tokens. Given: {n_prompt}"
        if wrong:
            page = self.error(422, f"Input validation error: {wrong}")
            raise Refusal(Page(200, _frame(page.body), content_type=_EVENT_STREAM) if streaming else page)
        reply = TGIWire(body.parameters, streaming, n_prompt, self._output_tokens(n_prompt, max_new_tokens))
        reply.segments = wire.segments(self._settings, body.inputs, 1, BOS_TOKENS)
        return reply

    def _output_tokens(self, n_prompt: int, max_new_tokens: int | None) -> int:
        """What a reply has: of a long one whole pieces, until what was asked for is there or the next does not fit."""
        room = self._settings.max_model_len - n_prompt
        if max_new_tokens is None:
            return room
        if max_new_tokens <= PIECE_TOKENS or not self._settings.in_pieces:
            return max_new_tokens
        return min(-(-max_new_tokens // PIECE_TOKENS), room // PIECE_TOKENS) * PIECE_TOKENS


class Details(msgspec.Struct):
    finish_reason: str
    generated_tokens: int
    seed: int | None


class StreamDetails(Details):
    input_length: int


class WholeDetails(Details, kw_only=True):
    prefill: tuple[wire.Token, ...] = ()
    tokens: list[wire.Token]


class StreamEvent(msgspec.Struct, kw_only=True):
    index: int
    token: wire.Token
    generated_text: str | None = None
    details: StreamDetails | None = None


class TGIWire(Wire):
    """One reply."""

    content_type = _EVENT_STREAM
    failure_before_output = True  # what TGI sends in a stream with status 200: it is overloaded

    def __init__(self, parameters: Parameters, streaming: bool, prompt_tokens: int, output_tokens: int) -> None:
        super().__init__(streaming, prompt_tokens, output_tokens)
        self._details = parameters.details or parameters.decoder_input_details
        self._seed = parameters.seed

    def token(self, count: int) -> bytes:
        index = count % wire.N_WORDS
        return _PLAIN % (count, index + wire.FIRST_ID, wire.WORDS_JSON[index])

    def event(self, count: int, n_tokens: int, finish: Finish | None) -> bytes:
        event = StreamEvent(index=count, token=wire.Token(wire.token_id(count), wire.span(count, n_tokens)))
        if finish:
            event.generated_text = wire.output_text(count)
            if self._details:
                event.details = StreamDetails(_FINISH[finish], count, self._seed, self.prompt_tokens)
        return _frame(wire.encode_json(event))

    def failure(self) -> bytes:
        kind, message = _ERRORS[429]
        return _frame(wire.encode_json({"error": message, "error_type": kind}))

    def whole(self, count: int, finish: Finish, seconds: float) -> Page:
        details = None
        if self._details:
            tokens = [wire.Token(wire.token_id(each), wire.word(each)) for each in range(1, count + 1)]
            details = WholeDetails(_FINISH[finish], count, self._seed, tokens=tokens)
        total_ms = str(round(seconds * 1000))
        headers = (
            ("x-compute-type", "emulated"), ("x-compute-time", f"{seconds:.9f}"), ("x-total-time", total_ms),
            ("x-validation-time", "0"), ("x-queue-time", "0"), ("x-inference-time", total_ms),
            ("x-time-per-token", str(round(seconds * 1000 / count))), ("x-prompt-tokens", str(self.prompt_tokens)),
            ("x-generated-tokens", str(count)),
        )  # fmt: skip
        return wire.json_page(200, {"generated_text": wire.output_text(count), "details": details}, headers)


_PLAIN = (
    b'data: {"index":%d,"token":{"id":%d,"text":%b,"logprob":-0.6,"special":false},'
    b'"generated_text":null,"details":null}\n\n'
)


def _frame(json: bytes) -> bytes:
    return b"data: " + json + b"\n\n"


def _text(status: int, text: str) -> Page:
    return Page(status, text.encode(), content_type="text/plain; charset=utf-8")


def series(max_total_tokens: int) -> list[Series]:
    """TGI's families, as far as there is something true to say: there is no batch and no queue here."""
    seconds = [0.0001 * 1.5**power for power in range(1, 36)]
    total = [max_total_tokens / 100 * step for step in range(1, 101)]
    inputs = [(max_total_tokens - 1) / 100 * step for step in range(1, 101)]
    return [
        Sample("tgi_request_count", "counter", "Total number of requests", lambda t: {"": t.requests}),
        Sample("tgi_request_success", "counter", "Number of successful requests",
               lambda t: {"": t.finished.total()}),
        Sample("tgi_request_failure", "counter", "Number of failed requests",
               lambda t: dict(t.failed), label="err"),
        Sample("tgi_queue_size", "gauge", "Current queue size", lambda t: {"": t.n_waiting}),
        Sample("tgi_batch_current_size", "gauge", "Current batch size", lambda t: {"": t.n_running}),
        Distribution("tgi_request_duration", "Request duration", "e2e", seconds),
        Distribution("tgi_request_validation_duration", "Request validation duration", "queue", seconds),
        Distribution("tgi_request_queue_duration", "Request queue duration", "queue", seconds),
        Distribution("tgi_request_inference_duration", "Request inference duration", "e2e", seconds),
        Distribution("tgi_request_mean_time_per_token_duration", "Mean time per token per request", "mean", seconds),
        Distribution("tgi_request_generated_tokens", "Generated tokens per request", "output_tokens", total),
        Distribution("tgi_request_input_length", "Input token length per request", "prompt_tokens", inputs),
        Distribution("tgi_request_max_new_tokens", "Maximum new tokens per request", "max_tokens", total),
    ]  # fmt: skip
