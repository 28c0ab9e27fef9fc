"""The wire of TGI 3.3: `/generate`, `/generate_stream`, `/` and `/invocations`, which take either way by `"stream"`,
and OpenAI's `/v1/completions` and `/v1/chat/completions`.

Frames are `data: {...}`. Of its own routes nothing ends them: the last event carries `generated_text`, and `details`
when asked for. Prompts are text, a token a word and one more for the BOS that TGI adds and counts. A streaming route
answers 200 and reports whatever is wrong with the request in its only event; only a body that cannot be read gets a
status of its own.
"""

from __future__ import annotations

import random
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from backends.untrusted import UNDECODABLE
from servers.schedulers.tgi import PIECE_TOKENS, reply_tokens
from servers.serve import wire
from servers.serve.telemetry import Buckets, Sample, Series
from servers.serve.wire import DialectSettings, Finish, Page, Refusal, Wire

VERSION = "3.3.7"
BOS_TOKENS = 1
MOST_BODY_BYTES = 2_000_000
MOST_BEST_OF, MOST_STOPS, MOST_PROMPTS = 2, 4, 4

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
_UNKNOWN_BODY = "Failed to deserialize the JSON body into the target type: "
_DONE = b"data: [DONE]\n\n"

T = TypeVar("T")
U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class TGIParameters(msgspec.Struct):
    """The parameters that matter here; others are accepted and ignored."""

    best_of: U32 | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: U32 | None = None
    return_full_text: bool | None = None
    stop: list[str] = []
    details: bool = False
    decoder_input_details: bool = False
    seed: int | None = None
    top_n_tokens: U32 | None = None

    @property
    def samples(self) -> bool:
        return self.do_sample or (self.temperature, self.top_k, self.top_p, self.typical_p) != (None,) * 4


class TGIBody(msgspec.Struct):
    inputs: str
    parameters: TGIParameters = msgspec.field(default_factory=TGIParameters)
    stream: bool = False


class TGIStreamOptions(msgspec.Struct):
    include_usage: bool = False


class TGIOpenAIBody(msgspec.Struct, kw_only=True):
    """What both routes of OpenAI's have. The model's name is not looked at: any other would be an adapter's."""

    max_tokens: U32 | None = None
    stream: bool = False
    stream_options: TGIStreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: list[str] | str | None = None

    def parameters(self) -> TGIParameters:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        temperature = self.temperature or None  # 0 is greedy on these routes
        return TGIParameters(max_new_tokens=self.max_tokens, temperature=temperature, top_p=self.top_p, stop=stop)


class TGICompletionBody(TGIOpenAIBody, kw_only=True):
    prompt: str | list[str]


class TextPart(msgspec.Struct):
    text: str = ""


class TGIMessage(msgspec.Struct):
    content: str | list[TextPart] | None = None


class TGIChatBody(TGIOpenAIBody, kw_only=True):
    messages: list[TGIMessage]
    max_completion_tokens: U32 | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None


class Inputs(msgspec.Struct):
    inputs: str


class TGI:
    """The dialect. `max_input_tokens` is one less than the whole, as TGI sets it by default."""

    name = "tgi"
    labels = ""
    metrics_content_type: str | None = "text/plain; charset=utf-8"
    open_pages = True

    def __init__(self, settings: DialectSettings) -> None:
        self._settings = settings
        self.media_type_error: Page | None = _text(415, "Expected request with `Content-Type: application/json`")
        healthy = Page(200, b"", content_type=None)
        self.pages: Mapping[str, Callable[[], Page]] = {
            "/health": lambda: healthy,
            "/ping": lambda: healthy,
            "/": lambda: healthy,
            "/info": self._info,
            "/v1/models": lambda: wire.models_page(settings, 0, settings.model),
        }
        self.generations: Mapping[str, Callable[[bytes, str], Sequence[Wire]]] = {
            "/generate": lambda raw, _: self._generate(raw, False),
            "/generate_stream": lambda raw, _: self._generate(raw, True),
            "/": lambda raw, _: self._generate(raw, None),
            "/invocations": lambda raw, _: self._generate(raw, None),
            "/v1/completions": lambda raw, _: self._completion(raw),
            "/v1/chat/completions": lambda raw, _: self._chat(raw),
        }
        self.answers: Mapping[str, Callable[[bytes], Page]] = {"/tokenize": _tokenize}
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
            "max_best_of": MOST_BEST_OF, "max_stop_sequences": MOST_STOPS, "max_input_tokens": limit - 1,
            "max_total_tokens": limit, "validation_workers": 2,
            "max_client_batch_size": MOST_PROMPTS,
        }  # fmt: skip
        router = {"router": "text-generation-router", "version": VERSION, "sha": None, "docker_label": wire.MARK}
        return wire.json_page(200, info | limits | router)

    def _generate(self, raw: bytes, streaming: bool | None) -> Sequence[Wire]:
        """streaming: None on the routes that take either way, which answer a list and repeat the prompt."""
        body = _read(raw, TGIBody)
        parameters, either = body.parameters, streaming is None
        streaming = body.stream if streaming is None else streaming
        n_prompt = wire.count_tokens(body.inputs) + BOS_TOKENS
        n_output = self._admitted(body.inputs, n_prompt, parameters, streaming)
        reply = TGIWire(parameters, streaming, n_prompt, n_output)
        reply.in_list = either
        reply.repeats = body.inputs if (either if (full := parameters.return_full_text) is None else full) else ""
        return [self._for(reply, body.inputs, len(body.inputs))]

    def _completion(self, raw: bytes) -> Sequence[Wire]:
        body = _read(raw, TGICompletionBody)
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not prompts:
            raise Refusal(self.error(422, "Input validation error: `inputs` cannot be empty"))
        if len(prompts) > MOST_PROMPTS:
            message = f"Number of prompts exceeds the maximum allowed batch size of {MOST_PROMPTS}"
            raise Refusal(self.error(422, f"Input validation error: {message}"))
        replies, ended = [], EndedSequences()
        for index, prompt in enumerate(prompts):
            n_prompt = wire.count_tokens(prompt) + BOS_TOKENS
            n_output = self._admitted(prompt, n_prompt, body.parameters(), body.stream, openai=True)
            reply = CompletionWire(body, n_prompt, n_output, self._settings.model, (index, ended))
            replies.append(self._for(reply, prompt, sum(map(len, prompts))))
        return replies

    def _chat(self, raw: bytes) -> Sequence[Wire]:
        body = _read(raw, TGIChatBody)
        if body.max_tokens is None:
            body.max_tokens = body.max_completion_tokens
        text = " ".join(
            part.text
            for message in body.messages
            for part in (message.content if isinstance(message.content, list) else [TextPart(message.content or "")])
        )
        n_prompt = wire.count_tokens(text) + wire.CHAT_TEMPLATE_TOKENS
        # the template is never empty
        n_output = self._admitted(text or "template", n_prompt, body.parameters(), body.stream, openai=True)
        return [self._for(ChatWire(body, n_prompt, n_output, self._settings.model), text, len(text))]

    def _for(self, reply: TGIReply, inputs: str, n_characters: int) -> Wire:
        """n_characters: of all prompts of the request."""
        reply.computed = (("x-compute-type", "emulated"), ("x-compute-characters", str(n_characters)))
        reply.headers = (("cache-control", "no-cache"), *reply.computed, ("x-accel-buffering", "no"))
        reply.segments = wire.segments(self._settings, inputs, 1, BOS_TOKENS)
        return reply

    def _admitted(
        self, inputs: str, n_prompt: int, parameters: TGIParameters, streaming: bool, openai: bool = False
    ) -> int:
        """How many tokens will be generated. Raises Refusal."""
        in_stream = _wrong_in_stream(parameters) if streaming else None
        if wrong := in_stream or _wrong(parameters) or self._too_long(inputs, n_prompt, parameters.max_new_tokens):
            page = self.error(422, f"Input validation error: {wrong}")
            raise Refusal(_as_event(page, openai) if streaming else page)
        return self._output_tokens(n_prompt, parameters.max_new_tokens)

    def _too_long(self, inputs: str, n_prompt: int, max_new_tokens: int | None) -> str:
        limit = self._settings.max_model_len
        if max_new_tokens is not None and self._settings.in_pieces:
            max_new_tokens = min(max_new_tokens, PIECE_TOKENS)  # the first piece alone is looked at
        if not inputs:
            return "`inputs` cannot be empty"
        if max_new_tokens is not None and n_prompt + max_new_tokens > limit:
            given = f"Given: {n_prompt} `inputs` tokens and {max_new_tokens} `max_new_tokens`"
            return f"`inputs` tokens + `max_new_tokens` must be <= {limit}. {given}"
        return f"`inputs` must have less than {limit - 1} tokens. Given: {n_prompt}" if n_prompt > limit - 1 else ""

    def _output_tokens(self, n_prompt: int, max_new_tokens: int | None) -> int:
        limit = self._settings.max_model_len
        if max_new_tokens is None:
            return limit - n_prompt
        return reply_tokens(n_prompt, max_new_tokens, limit) if self._settings.in_pieces else max_new_tokens


def _read(raw: bytes, kind: type[T]) -> T:
    """A body. Raises Refusal."""
    if len(raw) > MOST_BODY_BYTES:
        raise Refusal(_text(413, "Failed to buffer the request body: length limit exceeded"))
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise Refusal(_text(422, f"{_UNKNOWN_BODY}{error}")) from None
    except UNDECODABLE as error:
        raise Refusal(_text(400, f"Failed to parse the request body as JSON: {error}")) from None


def _wrong_in_stream(parameters: TGIParameters) -> str:
    if (parameters.best_of or 1) != 1:
        return "`best_of` != 1 is not supported when streaming tokens"
    if parameters.decoder_input_details:
        return "`decoder_input_details` == true is not supported when streaming tokens"
    return ""


def _wrong(parameters: TGIParameters) -> str:
    """What the router refuses before it looks at the prompt; empty for nothing."""
    best_of = 1 if parameters.best_of is None else parameters.best_of
    shares = (("top_p", parameters.top_p), ("typical_p", parameters.typical_p))
    if not 0 < best_of <= MOST_BEST_OF:
        return f"`best_of` must be > 0 and <= {MOST_BEST_OF}. Given: {best_of}"
    if best_of > 1 and not parameters.samples:
        return "you must use sampling when `best_of` is > 1"
    if parameters.temperature is not None and parameters.temperature <= 0:
        return "`temperature` must be strictly positive"
    for name, value in shares:
        if value is not None and not 0 < value < 1:
            return f"`{name}` must be > 0.0 and < 1.0"
    if parameters.top_k is not None and parameters.top_k <= 0:
        return "`top_k` must be strictly positive"
    if parameters.max_new_tokens == 0:
        return "`max_new_tokens` must be strictly positive"
    if len(parameters.stop) > MOST_STOPS:
        return f"`stop` supports up to {MOST_STOPS} stop sequences. Given: {len(parameters.stop)}"
    return ""


def _tokenize(raw: bytes) -> Page:
    """The tokens of a text, each a word with the blank before it. Raises Refusal."""
    inputs = _read(raw, Inputs).inputs
    spans = [(match.group(), match.start(), match.end()) for match in re.finditer(r"\s?\S+", inputs)]
    tokens = zip(wire.prompt_ids(inputs), spans, strict=True)
    listed = [{"id": number, "text": text, "start": start, "stop": stop} for number, (text, start, stop) in tokens]
    return wire.json_page(200, [{"id": 1, "text": "", "start": 0, "stop": 0}, *listed])


def _as_event(page: Page, openai: bool) -> Page:
    """A refusal as the only event of a stream."""
    body = _frame(page.body)
    if openai:
        message = msgspec.json.decode(page.body, type=dict[str, str])["error"]
        body = _frame(wire.encode_json({"error": {"message": message, "http_status_code": 422}})) + _DONE
    return Page(200, body, content_type=_EVENT_STREAM)


class Details(msgspec.Struct):
    finish_reason: str
    generated_tokens: int
    seed: int | None


class StreamDetails(Details):
    input_length: int


class WholeDetails(Details, kw_only=True):
    prefill: tuple[wire.Token, ...] = ()
    tokens: list[wire.Token]
    top_tokens: list[list[wire.Token]] | msgspec.UnsetType = msgspec.UNSET
    best_of_sequences: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class TGIWholeReply(msgspec.Struct):
    generated_text: str
    details: WholeDetails | msgspec.UnsetType = msgspec.UNSET


class TGIStreamEvent(msgspec.Struct, kw_only=True):
    index: int
    token: wire.Token
    top_tokens: list[wire.Token] | msgspec.UnsetType = msgspec.UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class TGIReply(Wire):
    """One reply on any of its routes. openai: on one of OpenAI's. computed: what the headers of every reply say."""

    content_type = _EVENT_STREAM
    failure_before_output = True  # what TGI sends in a stream with status 200: it is overloaded
    openai = False
    computed: wire.Headers = ()

    def refused(self, page: Page) -> Page:
        return _as_event(page, self.openai) if self.streaming else page

    def failure(self) -> bytes:
        kind, message = _ERRORS[429]
        return _as_event(wire.json_page(429, {"error": message, "error_type": kind}), self.openai).body

    def _whole_page(self, value: object, count: int, seconds: float) -> Page:
        total_ms = str(round(seconds * 1000))
        headers = (
            *self.computed, ("x-compute-time", f"{seconds:.9f}"), ("x-total-time", total_ms),
            ("x-validation-time", "0"), ("x-queue-time", "0"), ("x-inference-time", total_ms),
            ("x-time-per-token", str(round(seconds * 1000 / count))), ("x-prompt-tokens", str(self.prompt_tokens)),
            ("x-generated-tokens", str(count)),
        )  # fmt: skip
        return wire.json_page(200, value, headers)


class TGIWire(TGIReply):
    """One reply in TGI's own words. in_list: a whole one is the only item of a list; repeats: the prompt in front of
    its text."""

    in_list = False
    repeats = ""

    def __init__(self, parameters: TGIParameters, streaming: bool, prompt_tokens: int, output_tokens: int) -> None:
        super().__init__(streaming, prompt_tokens, output_tokens)
        self._details = parameters.details or parameters.decoder_input_details
        drawn = random.getrandbits(64) if parameters.seed is None else parameters.seed
        self._seed = drawn if parameters.samples else None
        self._top, self._best_of = parameters.top_n_tokens or 0, parameters.best_of or 1

    def token(self, count: int) -> bytes:
        if self._top:
            return self.event(count, 1, None)
        index = count % wire.N_WORDS
        return _PLAIN % (count, index + wire.FIRST_ID, wire.WORDS_JSON[index])

    def event(self, count: int, n_tokens: int, finish: Finish | None) -> bytes:
        token = wire.Token(wire.token_id(count), wire.span(count, n_tokens))
        event = TGIStreamEvent(index=count, token=token)
        if self._top:
            event.top_tokens = [token] * self._top
        if finish:
            event.generated_text = self.repeats + wire.output_text(count)
            if self._details:
                event.details = StreamDetails(_FINISH[finish], count, self._seed, self.prompt_tokens)
        return _frame(wire.encode_json(event))

    def whole(self, count: int, finish: Finish, seconds: float) -> Page:
        reply = TGIWholeReply(self.repeats + wire.output_text(count))
        if self._details:
            tokens = [wire.Token(wire.token_id(each), wire.word(each)) for each in range(1, count + 1)]
            reply.details = details = WholeDetails(_FINISH[finish], count, self._seed, tokens=tokens)
            if self._top:
                details.top_tokens = [[token] * self._top for token in tokens]
            if self._best_of > 1:
                details.best_of_sequences = [msgspec.to_builtins(details) | {"generated_text": wire.output_text(count)}]
        return self._whole_page([reply] if self.in_list else reply, count, seconds)


class TGIOpenAIReply(TGIReply):
    """What both routes of OpenAI's have in common. The frame of a plain token is made once, and only its text
    changes."""

    openai = True
    done = _DONE

    def __init__(self, kind: str, body: TGIOpenAIBody, prompt_tokens: int, output_tokens: int, model: str) -> None:
        super().__init__(body.stream, prompt_tokens, output_tokens)
        self._usage_last = body.stream_options is not None and body.stream_options.include_usage
        self._begin = {"object": kind, "id": "", "created": int(time.time())}
        self._maker = {"model": model, "system_fingerprint": f"{VERSION}-{wire.MARK}"}  # version and Docker label
        self._prefix, _, self._suffix = self._chunk("@", None, 0).rpartition(b'"@"')

    def token(self, count: int) -> bytes:
        return self._prefix + wire.WORDS_JSON[count % wire.N_WORDS] + self._suffix

    def event(self, count: int, n_tokens: int, finish: Finish | None) -> bytes:
        return self._chunk(wire.span(count, n_tokens), finish, count)

    def tail(self, count: int, done: bool = True) -> bytes:
        return self.done if done else b""

    @abstractmethod
    def _chunk(self, text: str, finish: Finish | None, count: int) -> bytes:
        """An event with that text; on the last, `count` tokens are there."""

    def _usage(self, count: int) -> dict[str, int]:
        total = self.prompt_tokens + count
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": count, "total_tokens": total}


class EndedSequences(msgspec.Struct):
    """The sequences of a request that have ended."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    choices: list[dict[str, Any]] = []


class CompletionWire(TGIOpenAIReply):
    """The reply to one prompt. Its usage comes with the last text, asked for or not. place: its number among the
    prompts, and what they share."""

    def __init__(
        self,
        body: TGICompletionBody,
        prompt_tokens: int,
        output_tokens: int,
        model: str,
        place: tuple[int, EndedSequences],
    ) -> None:
        self._index, self._ended = place
        super().__init__("text_completion", body, prompt_tokens, output_tokens, model)

    def ends(self, count: int, finish: Finish) -> None:
        ended = self._ended
        ended.prompt_tokens += self.prompt_tokens
        ended.output_tokens += count
        choice = {"index": self._index, "text": wire.output_text(count), "logprobs": None, "finish_reason": finish}
        ended.choices.append(choice)

    def _chunk(self, text: str, finish: Finish | None, count: int) -> bytes:
        choices = [{"index": self._index, "text": text, "logprobs": None, "finish_reason": finish or ""}]
        if finish is None:
            return _frame(wire.encode_json({**self._begin, "choices": choices, **self._maker}))
        return _frame(wire.encode_json({**self._begin, **self._maker, "choices": choices, "usage": self._usage(count)}))

    def whole(self, count: int, finish: Finish, seconds: float) -> Page:
        n_prompt, n_output = self._ended.prompt_tokens, self._ended.output_tokens
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_output, "total_tokens": n_prompt + n_output}
        choices = sorted(self._ended.choices, key=lambda choice: int(choice["index"]))
        head = {**self._begin, **self._maker, "choices": choices, "usage": usage}
        return self._whole_page(head, count, seconds)


class ChatWire(TGIOpenAIReply):
    """Its usage comes behind the last text, where it was asked for."""

    def __init__(self, body: TGIChatBody, prompt_tokens: int, output_tokens: int, model: str) -> None:
        self._candidates = (body.top_logprobs or 0) if body.logprobs else None
        super().__init__("chat.completion.chunk", body, prompt_tokens, output_tokens, model)

    def token(self, count: int) -> bytes:
        return super().token(count) if self._candidates is None else self.event(count, 1, None)

    def tail(self, count: int, done: bool = True) -> bytes:
        usage = {**self._begin, **self._maker, "choices": [], "usage": self._usage(count)}
        return (_frame(wire.encode_json(usage)) if self._usage_last else b"") + super().tail(count, done)

    def _chunk(self, text: str, finish: Finish | None, count: int) -> bytes:
        delta = {"role": "assistant", "content": text}
        logprobs = self._logprobs(text.split(" ")[1:]) if text else None
        choices = [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]
        return _frame(wire.encode_json({**self._begin, **self._maker, "choices": choices, "usage": None}))

    def whole(self, count: int, finish: Finish, seconds: float) -> Page:
        message = {"role": "assistant", "content": wire.output_text(count)}
        logprobs = self._logprobs(message["content"].split(" ")[1:])
        choices = [{"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish}]
        head = {**self._begin, "object": "chat.completion", **self._maker, "choices": choices}
        return self._whole_page({**head, "usage": self._usage(count)}, count, seconds)

    def _logprobs(self, words: list[str]) -> dict[str, Any] | None:
        """Of these output tokens, where they were asked for."""
        if self._candidates is None:
            return None
        logprobs = [{"token": f" {each}", "logprob": wire.LOGPROB} for each in words]
        return {"content": [each | {"top_logprobs": [each] * self._candidates} for each in logprobs]}


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
        Buckets("tgi_request_duration", "Request duration", "e2e", seconds),
        Buckets("tgi_request_validation_duration", "Request validation duration", "queue", seconds),
        Buckets("tgi_request_queue_duration", "Request queue duration", "queue", seconds),
        Buckets("tgi_request_inference_duration", "Request inference duration", "e2e", seconds),
        Buckets("tgi_request_mean_time_per_token_duration", "Mean time per token per request", "mean", seconds),
        Buckets("tgi_request_generated_tokens", "Generated tokens per request", "output_tokens", total),
        Buckets("tgi_request_input_length", "Input token length per request", "prompt_tokens", inputs),
        Buckets("tgi_request_max_new_tokens", "Maximum new tokens per request", "max_tokens", total),
    ]  # fmt: skip
