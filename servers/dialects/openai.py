"""The wire of vLLM 0.32 and of OpenAI-compatible servers: `/v1/completions` and `/v1/chat/completions`.

Frames are `data: {...}` with compact JSON, ended by `data: [DONE]`. `max_tokens` is silently cut to what the context
leaves. Prompts are token ids, counted as they are, or text, a token a word; a chat template adds a fixed number.
`return_token_ids` adds the ids of the prompt, once, and of each event's tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import responses

import msgspec
from msgspec import UNSET, UnsetType

from backends.untrusted import UNDECODABLE
from servers.serve import wire
from servers.serve.telemetry import Distribution, Sample, Series, labels_of
from servers.serve.wire import Finish, Page, Refusal, Settings, Wire

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-emulated"

_MESSAGES = {
    429: "Rate limit reached.",
    500: "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    503: "The engine is currently busy and cannot accept new requests. "
    "Please try again later or on a different instance.",
}
_TYPES = {400: "BadRequestError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Body(msgspec.Struct, kw_only=True):
    """The fields of either route that matter here. Others are accepted and ignored, as vLLM does."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    n: int | None = 1


class CompletionBody(Body):
    prompt: str | list[wire.TokenId]


class PromptListBody(Body):
    prompt: list[str | list[wire.TokenId]]


class Part(msgspec.Struct):
    text: str = ""


class Message(msgspec.Struct):
    content: str | list[Part] | None = None


class ChatBody(Body):
    messages: list[Message]
    max_completion_tokens: int | None = None


_decode_completion = msgspec.json.Decoder(CompletionBody).decode
BLOCK_TOKENS = 16  # of vLLM's prefix cache

_decode_prompt_list = msgspec.json.Decoder(PromptListBody).decode
_decode_chat = msgspec.json.Decoder(ChatBody).decode


class OpenAI:
    """The dialect. `owned_by` is how `/v1/models` names the server; None keeps the context length to itself."""

    metrics_content_type: str | None = "text/plain; version=0.0.4; charset=utf-8"
    answers: Mapping[str, Callable[[bytes], Page]] = {}
    open_pages = False

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.media_type_error: Page | None = self.error(
            400, "Unsupported Media Type: Only 'application/json' is allowed"
        )
        self._settings = settings
        self._started_s = int(time.time())
        empty = Page(200, b"", content_type=None)
        self.pages: Mapping[str, Callable[[], Page]] = {
            "/health": lambda: empty,
            "/ping": lambda: empty,
            "/version": lambda: wire.json_page(200, {"version": VERSION}),
            "/v1/models": self._models,
        }
        self.generations: Mapping[str, Callable[[bytes, str], Wire]] = {
            "/v1/completions": self._completion,
            "/v1/chat/completions": self._chat,
        }
        self.series: Sequence[Series] = series(settings.max_model_len)
        self.labels = labels_of(model_name=settings.model, engine="0")

    def error(self, status: int, message: str | None = None, param: str | None = None) -> Page:
        if status == 401:
            return wire.json_page(401, {"error": "Unauthorized"})
        phrase = responses.get(status, "Error")
        kind = "NotFoundError" if param == "model" else _TYPES.get(status, phrase)
        return wire.json_page(status, wire.error_body(status, message or _MESSAGES.get(status, phrase), kind, param))

    def _models(self) -> Page:
        settings = self._settings
        if self.name != "vllm":
            return wire.models_page(settings, self._started_s, "organization-owner")
        more = {"root": settings.model, "parent": None, "max_model_len": settings.max_model_len, "permission": ()}
        return wire.models_page(settings, self._started_s, "vllm", **more)

    def _completion(self, raw: bytes, request_id: str) -> Wire:
        try:
            body: Body = (decoded := _decode_completion(raw))
            prompt = decoded.prompt
        except msgspec.ValidationError as error:
            body, prompt = self._one_of_list(raw, error)
        except UNDECODABLE as error:
            raise Refusal(self.error(400, f"JSON decode error: {error}")) from None
        n_prompt = wire.count_tokens(prompt)
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        n_output = self._admitted(body, n_prompt, max_tokens)
        reply = OpenAIWire(COMPLETION, body, n_prompt, n_output, self._settings.model, request_id)
        if body.return_token_ids:
            reply.prompt_ids = wire.prompt_ids(prompt)
        reply.segments = wire.segments(self._settings, prompt, BLOCK_TOKENS)
        return reply

    def _one_of_list(self, raw: bytes, error: msgspec.ValidationError) -> tuple[Body, str | list[int]]:
        try:
            body = _decode_prompt_list(raw)
        except UNDECODABLE:
            raise Refusal(self.error(400, str(error))) from None
        if len(body.prompt) != 1:
            raise Refusal(self.error(400, "the emulated server takes one prompt a request.", "prompt"))
        return body, body.prompt[0]

    def _chat(self, raw: bytes, request_id: str) -> Wire:
        try:
            body = _decode_chat(raw)
        except msgspec.ValidationError as error:
            raise Refusal(self.error(400, str(error))) from None
        except UNDECODABLE as error:
            raise Refusal(self.error(400, f"JSON decode error: {error}")) from None
        texts = []
        for message in body.messages:
            parts = message.content if isinstance(message.content, list) else [Part(message.content or "")]
            texts += [part.text for part in parts]
        n_prompt = wire.CHAT_TEMPLATE_TOKENS + sum(map(wire.count_tokens, texts))
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        max_tokens = self._settings.max_model_len - n_prompt if max_tokens is None else max_tokens
        n_output = self._admitted(body, n_prompt, max_tokens)
        reply = OpenAIWire(CHAT, body, n_prompt, n_output, self._settings.model, request_id)
        # as if the template stood in front: in the real one its tokens lie around every message
        text = " ".join(texts)
        if body.return_token_ids:
            reply.prompt_ids = [*range(1, wire.CHAT_TEMPLATE_TOKENS + 1), *wire.prompt_ids(text)]
        reply.segments = wire.segments(self._settings, text, 1, wire.CHAT_TEMPLATE_TOKENS)
        return reply

    def _admitted(self, body: Body, n_prompt: int, max_tokens: int) -> int:
        """How many tokens will be generated. Raises Refusal where vLLM refuses."""
        limit = self._settings.max_model_len
        if body.model not in (None, self._settings.model):
            raise Refusal(self.error(404, f"The model `{body.model}` does not exist.", "model"))
        if n_prompt == 0:
            raise Refusal(self.error(400, "The decoder prompt cannot be empty", "prompt"))
        if n_prompt >= limit:
            requested = max(max_tokens, 0)
            message = (
                f"This model's maximum context length is {limit} tokens. However, you requested {requested} output "
                f"tokens and your prompt contains {n_prompt} input tokens, for a total of {n_prompt + requested} "
                "tokens. Please reduce the length of the input prompt or the number of requested output tokens."
            )
            raise Refusal(self.error(400, message, "input_tokens"))
        if max_tokens < 1:
            raise Refusal(self.error(400, f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens"))
        if max_tokens > limit:
            message = f"max_tokens={max_tokens} is greater than max_model_len={limit}."
            raise Refusal(self.error(400, message, "max_tokens"))
        if body.n not in (None, 1):
            raise Refusal(self.error(400, "the emulated server makes one choice a request.", "n"))
        return min(max_tokens, limit - n_prompt)


Ids = list[int] | None


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: Finish | None
    stop_reason: None = None
    prompt_token_ids: Ids = None
    token_ids: Ids = None


class WholeCompletionChoice(CompletionChoice, kw_only=True):
    prompt_logprobs: None = None


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    delta: Delta
    logprobs: None = None
    finish_reason: Finish | None
    stop_reason: UnsetType | None = UNSET
    token_ids: UnsetType | Ids = None


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None
    tool_calls: tuple[str, ...] = ()
    reasoning: None = None


class WholeChatChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    message: AssistantMessage
    logprobs: None = None
    finish_reason: Finish
    stop_reason: None = None
    token_ids: Ids = None


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType | None = UNSET


class Chunk(msgspec.Struct, kw_only=True):
    """An event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[CompletionChoice | ChatChoice]
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: UnsetType | Ids = UNSET  # these two in the first event of a chat
    prompt_text: UnsetType | None = UNSET


class WholeReply(msgspec.Struct, kw_only=True):
    """A reply that is not streamed."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[WholeCompletionChoice | WholeChatChoice]
    service_tier: None = None
    system_fingerprint: str = FINGERPRINT
    usage: Usage
    prompt_token_ids: UnsetType | Ids = UNSET  # of chat


@dataclass(frozen=True)
class Shape:
    """What differs between the two routes."""

    id_prefix: str
    chunk_object: str
    whole_object: str
    choice: Callable[[str, Finish | None, Ids], CompletionChoice | ChatChoice]
    whole_choice: Callable[[str, Finish, Ids], WholeCompletionChoice | WholeChatChoice]
    opening_choice: ChatChoice | None = None  # an event of its own, written together with the first token's


COMPLETION = Shape(
    "cmpl-",
    "text_completion",
    "text_completion",
    lambda text, finish, ids: CompletionChoice(text=text, finish_reason=finish, token_ids=ids),
    lambda text, finish, ids: WholeCompletionChoice(text=text, finish_reason=finish, token_ids=ids),
)
CHAT = Shape(
    "chatcmpl-",
    "chat.completion.chunk",
    "chat.completion",
    lambda text, finish, ids: ChatChoice(
        delta=Delta(content=text), finish_reason=finish, stop_reason=None if finish else UNSET, token_ids=ids
    ),
    lambda text, finish, ids: WholeChatChoice(
        message=AssistantMessage(content=text), finish_reason=finish, token_ids=ids
    ),
    opening_choice=ChatChoice(delta=Delta(role="assistant", content=""), finish_reason=None, token_ids=UNSET),
)


class OpenAIWire(Wire):
    """One reply of either route. The frame of a plain token is made once and only its text changes."""

    done = b"data: [DONE]\n\n"

    def __init__(
        self, shape: Shape, body: Body, prompt_tokens: int, output_tokens: int, model: str, request_id: str
    ) -> None:
        super().__init__(bool(body.stream), prompt_tokens, output_tokens)
        self._shape = shape
        options = body.stream_options or StreamOptions()
        self._usage_last = bool(options.include_usage)
        self._usage_always = bool(options.include_usage and options.continuous_usage_stats)
        self._id = shape.id_prefix + request_id
        self._created_s = int(time.time())
        self._model = model
        self.prompt_ids: Ids = None  # with them those of the output are sent too
        self._prefix, _, self._suffix = self._chunk([shape.choice("@", None, None)]).rpartition(b'"@"')

    def token(self, count: int) -> bytes:
        if self._usage_always or self.prompt_ids is not None:
            return self.event(count, 1, None)
        return self._prefix + wire.WORDS_JSON[count % wire.N_WORDS] + self._suffix

    def event(self, count: int, n_tokens: int, finish: Finish | None) -> bytes:
        choice = self._shape.choice(wire.span(count, n_tokens), finish, self._ids(count, n_tokens))
        opening = b""
        if count == n_tokens:
            if self._shape.opening_choice:
                usage = self._usage(0) if self._usage_always else UNSET
                opening = self._chunk([self._shape.opening_choice], usage, opens_chat=True)
            elif isinstance(choice, CompletionChoice):
                choice.prompt_token_ids = self.prompt_ids
        return opening + self._chunk([choice], self._usage(count) if self._usage_always else UNSET)

    def tail(self, count: int, done: bool = True) -> bytes:
        usage = self._chunk([], self._usage(count), FINGERPRINT) if self._usage_last else b""
        return usage + (self.done if done else b"")

    def failure(self) -> bytes:
        return b"data: " + wire.encode_json(wire.error_body(500, _MESSAGES[500], _TYPES[500])) + b"\n\n" + self.done

    def whole(self, count: int, finish: Finish, seconds: float) -> Page:
        usage = self._usage(count)
        if usage.prompt_tokens_details is UNSET:
            usage.prompt_tokens_details = None
        choice = self._shape.whole_choice(wire.output_text(count), finish, self._ids(count, count))
        reply = WholeReply(
            id=self._id, object=self._shape.whole_object, created=self._created_s, model=self._model,
            choices=[choice], usage=usage,
        )  # fmt: skip
        if isinstance(choice, WholeCompletionChoice):
            choice.prompt_token_ids = self.prompt_ids
        else:
            reply.prompt_token_ids = self.prompt_ids
        return wire.json_page(200, reply)

    def _ids(self, count: int, n_tokens: int) -> Ids:
        """Of the `n_tokens` output tokens that end with the `count`-th, where they were asked for."""
        if self.prompt_ids is None:
            return None
        return [wire.token_id(each) for each in range(count - n_tokens + 1, count + 1)]

    def _chunk(
        self,
        choices: Sequence[CompletionChoice | ChatChoice],
        usage: Usage | UnsetType = UNSET,
        fingerprint: str | UnsetType = UNSET,
        opens_chat: bool = False,
    ) -> bytes:
        chunk = Chunk(
            id=self._id, object=self._shape.chunk_object, created=self._created_s, model=self._model, choices=choices,
            usage=usage, system_fingerprint=fingerprint, prompt_token_ids=self.prompt_ids if opens_chat else UNSET,
            prompt_text=None if opens_chat else UNSET,
        )  # fmt: skip
        return b"data: " + wire.encode_json(chunk) + b"\n\n"

    def _usage(self, count: int) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            total_tokens=self.prompt_tokens + count,
            completion_tokens=count,
            prompt_tokens_details=CachedTokens(self.cached_tokens) if self.cached_tokens else UNSET,
        )


def _one_two_five(limit: int) -> list[float]:
    """Bounds 1, 2, 5, 10, ... up to `limit`, as vLLM draws them for token counts."""
    bounds = (float(step * 10**power) for power in range(8) for step in (1, 2, 5))
    return [bound for bound in bounds if bound <= limit]


_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
           160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
              960.0, 1920.0, 7680.0)  # fmt: skip


def series(max_model_len: int) -> list[Series]:
    """vLLM's families, as far as there is something true to say: there is no KV cache here, and no queue."""
    tokens = _one_two_five(max_model_len)
    return [
        Sample("vllm:num_requests_running", "gauge", "Requests running.", lambda t: {"": t.n_running}),
        Sample("vllm:num_requests_waiting", "gauge", "Requests waiting.", lambda t: {"": t.n_waiting}),
        Sample("vllm:kv_cache_usage_perc", "gauge", "1 means 100 percent usage.", lambda t: {"": t.kv_usage_ratio}),
        Sample("vllm:prompt_tokens_total", "counter", "Prompt tokens processed.", lambda t: {"": t.prompt_tokens}),
        Sample("vllm:generation_tokens_total", "counter", "Tokens generated.", lambda t: {"": t.output_tokens}),
        Sample("vllm:prefix_cache_queries_total", "counter", "Tokens looked up.", lambda t: {"": t.prompt_tokens}),
        Sample("vllm:prefix_cache_hits_total", "counter", "Tokens found cached.", lambda t: {"": t.cached_tokens}),
        Sample("vllm:num_preemptions_total", "counter", "Preemptions.", lambda t: {"": t.preemptions}),
        Sample("vllm:request_success_total", "counter", "Requests finished.",
               lambda t: {reason: t.finished[reason] for reason in ("stop", "length")} | {"abort": t.failed.total()},
               label="finished_reason"),
        Distribution("vllm:time_to_first_token_seconds", "Time to the first token.", "ttft", _TTFT_S),
        Distribution("vllm:inter_token_latency_seconds", "Time between tokens.", "itl", _TOKEN_S),
        Distribution("vllm:request_time_per_output_token_seconds", "Mean time a token.", "tpot", _TOKEN_S),
        Distribution("vllm:e2e_request_latency_seconds", "Time of the whole request.", "e2e", _REQUEST_S),
        Distribution("vllm:request_queue_time_seconds", "Time waiting.", "queue", _REQUEST_S),
        Distribution("vllm:request_prefill_time_seconds", "Time computing the prompt.", "ttft", _REQUEST_S),
        Distribution("vllm:request_decode_time_seconds", "Time decoding.", "decode", _REQUEST_S),
        Distribution("vllm:request_prompt_tokens", "Prompt tokens a request.", "prompt_tokens", tokens),
        Distribution("vllm:request_generation_tokens", "Output tokens a request.", "output_tokens", tokens),
        Distribution("vllm:request_params_max_tokens", "max_tokens as asked.", "max_tokens", tokens),
    ]  # fmt: skip
