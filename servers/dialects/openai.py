"""The wire of vLLM 0.32 and of OpenAI-compatible servers: `/v1/completions`, `/v1/chat/completions` and, in
responses.py, `/v1/responses`, in tokens.py vLLM's `/inference/v1/generate`, in pooling.py embeddings and ranks; vLLM's
`/tokenize`.

Frames are `data: {...}` with compact JSON, ended by `data: [DONE]`. `max_tokens` is silently cut to what the context
leaves. Prompts are token ids, counted as they are, or text, a token a word; a chat template adds a fixed number. A list
of prompts, and `n`, ask for several sequences, each a choice of the reply.
`return_token_ids` adds the ids of the prompt, once, and of each event's tokens.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.client import responses
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from backends.untrusted import UNDECODABLE
from servers.dialects.pooling import PooledBody, PooledReply, PooledWire, decode_embeddings, decode_rerank, decode_score
from servers.dialects.responses import Message, ResponseWire, decode_response
from servers.dialects.tokens import StreamOptions, TokensWire, decode_tokens
from servers.serve import wire
from servers.serve.telemetry import Buckets, Sample, Series, labels_of
from servers.serve.wire import DialectSettings, Finish, Page, Refusal, Wire

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-emulated"

T = TypeVar("T")

_MESSAGES = {
    429: "Rate limit reached.",
    500: "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    503: "The engine is currently busy and cannot accept new requests. "
    "Please try again later or on a different instance.",
}
_TYPES = {400: "BadRequestError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


class OpenAIBody(wire.RequestFields, kw_only=True):
    """The fields of either route that matter here. Others are accepted and ignored, as vLLM does."""

    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    n: int | None = 1
    temperature: float | None = None


class CompletionOptions(OpenAIBody, kw_only=True):
    logprobs: int | None = None
    echo: bool | None = False


class CompletionBody(CompletionOptions, kw_only=True):
    prompt: str | list[wire.TokenId]


class PromptListBody(CompletionOptions, kw_only=True):
    prompt: list[str | list[wire.TokenId]]


class TokenizeBody(msgspec.Struct):
    prompt: str | None = None
    messages: list[Message] | None = None
    return_token_strs: bool | None = False


class ChatBody(OpenAIBody):
    messages: list[Message]
    max_completion_tokens: int | None = None
    thinking_token_budget: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None

    def texts(self) -> list[str]:
        return [text for message in self.messages for text in message.texts()]


_decode_completion = msgspec.json.Decoder(CompletionBody).decode
BLOCK_TOKENS = 16  # of vLLM's prefix cache
MOST_SEQUENCES = 1024  # of one request
MOST_LOGPROBS = 20

_decode_prompt_list = msgspec.json.Decoder(PromptListBody).decode
_decode_chat = msgspec.json.Decoder(ChatBody).decode
_decode_tokenize = msgspec.json.Decoder(TokenizeBody).decode


class OpenAI:
    """The dialect. `owned_by` is how `/v1/models` names the server; None keeps the context length to itself."""

    metrics_content_type: str | None = "text/plain; version=0.0.4; charset=utf-8"
    open_pages = False

    def __init__(self, name: str, settings: DialectSettings) -> None:
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
        self.generations: Mapping[str, Callable[[bytes, str], Sequence[Wire]]] = {
            "/v1/completions": self._completion,
            "/v1/chat/completions": self._chat,
            "/v1/responses": self._response,
            "/v1/embeddings": partial(self._pooled, decode_embeddings),
        }
        if name == "vllm":
            rerank, score = (partial(self._pooled, decode) for decode in (decode_rerank, decode_score))
            self.generations = {
                **self.generations,
                "/inference/v1/generate": self._tokens,
                **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank),
                **dict.fromkeys(("/score", "/v1/score"), score),
            }
        self.answers: Mapping[str, Callable[[bytes], Page]] = {"/tokenize": self._tokenize} if name == "vllm" else {}
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

    def _served(self, asked: str | None) -> str:
        """The model, or its adapter, that a request names."""
        return asked or self._settings.model

    def _is_for(self, reply: Wire, asked: wire.RequestFields) -> None:
        served = self._served(asked.model)
        reply.adapter = "" if served == self._settings.model else served
        reply.priority = asked.priority or 0

    def _completion(self, raw: bytes, request_id: str) -> Sequence[Wire]:
        try:
            body: CompletionOptions = (one := _decode_completion(raw))
            prompts = [one.prompt]
        except msgspec.ValidationError as error:
            body, prompts = self._prompt_list(raw, error)
        except UNDECODABLE as error:
            raise Refusal(self.error(400, f"JSON decode error: {error}")) from None
        if body.echo:
            raise Refusal(self.error(400, "the emulated server does not echo prompts.", "echo"))
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        n_choices, shared = self._n_choices(body, len(prompts)), JointReply()
        replies = []
        for index in range(len(prompts) * n_choices):
            prompt = prompts[index // n_choices]
            n_prompt = wire.count_tokens(prompt)
            n_output = self._admitted(body, n_prompt, max_tokens)
            reply = OpenAIWire(COMPLETION, body, n_prompt, n_output, self._served(body.model), request_id)
            self._is_for(reply, body)
            reply.is_choice(index, shared, index % n_choices == 0)
            reply.tells_times = self._settings.per_request_metrics
            reply.logprobs = self._n_logprobs(body.logprobs, "logprobs")
            if body.return_token_ids:
                reply.prompt_ids = wire.prompt_ids(prompt)
            reply.segments = wire.segments(self._settings, prompt, BLOCK_TOKENS)
            replies.append(reply)
        return replies

    def _prompt_list(
        self, raw: bytes, error: msgspec.ValidationError
    ) -> tuple[CompletionOptions, list[str | list[int]]]:
        try:
            body = _decode_prompt_list(raw)
        except UNDECODABLE:
            raise Refusal(self.error(400, str(error))) from None
        if not body.prompt:
            raise Refusal(self.error(400, "The decoder prompt cannot be empty", "prompt"))
        return body, body.prompt

    def _chat(self, raw: bytes, request_id: str) -> Sequence[Wire]:
        body = self._decoded(raw, _decode_chat)
        texts = body.texts()
        n_prompt = self._chat_tokens(body.messages, texts)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        max_tokens = self._settings.max_model_len - n_prompt if max_tokens is None else max_tokens
        n_output = self._admitted(body, n_prompt, max_tokens)
        n_choices, shared = self._n_choices(body, 1), JointReply()
        # as if the template stood in front: in the real one its tokens lie around every message
        text = " ".join(texts)
        replies = []
        for index in range(n_choices):
            reply = OpenAIWire(CHAT, body, n_prompt, n_output, self._served(body.model), request_id)
            self._is_for(reply, body)
            reply.thinking_tokens = min(n_output, max(0, body.thinking_token_budget or 0))
            reply.is_choice(index, shared, index == 0)
            reply.tells_times = self._settings.per_request_metrics
            if body.logprobs:
                reply.logprobs = self._n_logprobs(body.top_logprobs or 0, "top_logprobs")
            if body.return_token_ids:
                reply.prompt_ids = [*range(1, wire.CHAT_TEMPLATE_TOKENS + 1), *wire.prompt_ids(text)]
            reply.segments = wire.segments(self._settings, text, 1, wire.CHAT_TEMPLATE_TOKENS)
            replies.append(reply)
        return replies

    def _chat_tokens(self, messages: Sequence[Message], texts: Sequence[str]) -> int:
        """Counts the tokens of texts, and of the images of their messages. Raises Refusal for what is no image."""
        try:
            images = sum(wire.image_tokens(url) for message in messages for url in message.images())
        except ValueError as error:
            raise Refusal(self.error(400, str(error))) from None
        return wire.CHAT_TEMPLATE_TOKENS + sum(map(wire.count_tokens, texts)) + images

    def _response(self, raw: bytes, request_id: str) -> Sequence[Wire]:
        body = self._decoded(raw, decode_response)
        texts = body.texts()
        n_prompt = self._chat_tokens(body.messages, texts)
        left = self._settings.max_model_len - n_prompt
        asked = OpenAIBody(model=body.model)
        n_output = self._admitted(asked, n_prompt, left if body.max_output_tokens is None else body.max_output_tokens)
        reply = ResponseWire(body, n_prompt, n_output, self._served(body.model), request_id)
        self._is_for(reply, body)
        reply.segments = wire.segments(self._settings, " ".join(texts), 1, wire.CHAT_TEMPLATE_TOKENS)
        return [reply]

    def _tokens(self, raw: bytes, request_id: str) -> Sequence[Wire]:
        body = self._decoded(raw, decode_tokens)
        n_prompt, asked = len(body.token_ids), body.sampling_params.max_tokens
        left = self._settings.max_model_len - n_prompt
        n_output = self._admitted(OpenAIBody(model=body.model), n_prompt, left if asked is None else asked)
        failure = wire.encode_json(wire.error_body(500, _MESSAGES[500], _TYPES[500]))
        reply = TokensWire(body, n_output, self._served(body.model), request_id, failure)
        self._is_for(reply, body)
        reply.segments = wire.segments(self._settings, body.token_ids, BLOCK_TOKENS)
        return [reply]

    def _pooled(self, decode: Callable[[bytes], PooledBody], raw: bytes, request_id: str) -> Sequence[Wire]:
        body = self._decoded(raw, decode)
        prompts = body.prompts()
        if not prompts:
            raise Refusal(self.error(400, "The input must have at least one text."))
        reply = PooledReply(body, self._served(body.model), request_id)
        for prompt in prompts:
            n_prompt = wire.count_tokens(prompt)
            self._admitted(OpenAIBody(model=body.model), n_prompt, 1)
            each = PooledWire(reply, n_prompt)
            self._is_for(each, body)
            each.segments = wire.segments(self._settings, prompt, BLOCK_TOKENS)
        return reply.wires

    def _tokenize(self, raw: bytes) -> Page:
        """Of a chat without the words of its template, which has none here."""
        body = self._decoded(raw, _decode_tokenize)
        if body.prompt is None and body.messages is None:
            raise Refusal(self.error(400, "Object missing required field `prompt`"))
        template = [*range(1, wire.CHAT_TEMPLATE_TOKENS + 1)] if body.messages is not None else []
        text = body.prompt or " ".join(text for message in body.messages or () for text in message.texts())
        ids = [*template, *wire.prompt_ids(text)]
        words = ["" for _ in template] + re.findall(r"\s?\S+", text)
        reply = {"count": len(ids), "max_model_len": self._settings.max_model_len, "tokens": ids}
        return wire.json_page(200, reply | {"token_strs": words if body.return_token_strs else None})

    def _decoded(self, raw: bytes, decode: Callable[[bytes], T]) -> T:
        try:
            return decode(raw)
        except msgspec.ValidationError as error:
            raise Refusal(self.error(400, str(error))) from None
        except UNDECODABLE as error:
            raise Refusal(self.error(400, f"JSON decode error: {error}")) from None

    def _n_choices(self, body: OpenAIBody, n_prompts: int) -> int:
        """Of each prompt. Raises Refusal."""
        n = 1 if body.n is None else body.n
        if n < 1:
            raise Refusal(self.error(400, f"n must be at least 1, got {n}.", "n"))
        if n > 1 and body.temperature == 0:
            raise Refusal(self.error(400, f"n must be 1 when using greedy sampling, got {n}.", "n"))
        if n * n_prompts > MOST_SEQUENCES:
            message = f"the emulated server makes at most {MOST_SEQUENCES} sequences a request, not {n * n_prompts}."
            raise Refusal(self.error(400, message, "n"))
        return n

    def _n_logprobs(self, asked: int | None, name: str) -> int | None:
        if asked is not None and not 0 <= asked <= MOST_LOGPROBS:
            message = f"{name} must be from 0 to {MOST_LOGPROBS}, got {asked}."
            raise Refusal(self.error(400, message, name))
        return asked

    def _admitted(self, body: OpenAIBody, n_prompt: int, max_tokens: int) -> int:
        """How many tokens will be generated. Raises Refusal where vLLM refuses."""
        limit = self._settings.max_model_len
        if body.model not in (None, self._settings.model, *self._settings.adapters):
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
        return min(max_tokens, limit - n_prompt)


Ids = list[int] | None
Logprobs = dict[str, Any] | None


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    text: str
    logprobs: Logprobs = None
    finish_reason: Finish | None
    stop_reason: None = None
    prompt_token_ids: Ids = None
    token_ids: Ids = None


class WholeCompletionChoice(CompletionChoice, kw_only=True):
    prompt_logprobs: None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    delta: ChatDelta
    logprobs: Logprobs = None
    finish_reason: Finish | None
    stop_reason: UnsetType | None = UNSET
    token_ids: UnsetType | Ids = None


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None
    tool_calls: tuple[str, ...] = ()
    reasoning: str | None = None


class WholeChatChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    message: AssistantMessage
    logprobs: Logprobs = None
    finish_reason: Finish
    stop_reason: None = None
    token_ids: Ids = None


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int


class PerRequestMetrics(msgspec.Struct, kw_only=True):
    """What `--enable-per-request-metrics` tells of a request; milliseconds."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float = 0.0  # there is no queue here
    mean_itl_ms: float | UnsetType = UNSET
    tokens_per_second: float


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType | None = UNSET
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


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
    metrics: PerRequestMetrics | UnsetType = UNSET  # in the last event of all


class OpenAIWholeReply(msgspec.Struct, kw_only=True):
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
    metrics: PerRequestMetrics | UnsetType = UNSET


@dataclass(frozen=True)
class RouteFormat:
    """What differs between the two routes."""

    id_prefix: str
    chunk_object: str
    whole_object: str
    choice: Callable[[str, Finish | None, Ids], CompletionChoice | ChatChoice]
    whole_choice: Callable[[str, Finish, Ids], WholeCompletionChoice | WholeChatChoice]
    logprobs: Callable[[range, int], dict[str, Any]]  # of the tokens of these numbers, with so many candidates each
    opening_choice: ChatChoice | None = None  # an event of its own, written together with the first token's


def _candidates(count: int, n: int) -> list[tuple[str, float]]:
    """What the `count`-th output token could have been, the likeliest first."""
    return [(wire.word(count + k), wire.LOGPROB - k) for k in range(min(n, wire.N_WORDS))]


def _completion_logprobs(counts: range, n: int) -> dict[str, Any]:
    return {
        "text_offset": [len(wire.output_text(count - 1)) for count in counts],
        "token_logprobs": [wire.LOGPROB for _ in counts],
        "tokens": [wire.word(count) for count in counts],
        "top_logprobs": [dict(_candidates(count, max(n, 1))) for count in counts],
    }


def _chat_logprobs(counts: range, n: int) -> dict[str, Any]:
    def said(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}

    return {
        "content": [
            said(wire.word(count), wire.LOGPROB) | {"top_logprobs": [said(*each) for each in _candidates(count, n)]}
            for count in counts
        ]
    }


COMPLETION = RouteFormat(
    "cmpl-",
    "text_completion",
    "text_completion",
    lambda text, finish, ids: CompletionChoice(text=text, finish_reason=finish, token_ids=ids),
    lambda text, finish, ids: WholeCompletionChoice(text=text, finish_reason=finish, token_ids=ids),
    _completion_logprobs,
)
CHAT = RouteFormat(
    "chatcmpl-",
    "chat.completion.chunk",
    "chat.completion",
    lambda text, finish, ids: ChatChoice(
        delta=ChatDelta(content=text), finish_reason=finish, stop_reason=None if finish else UNSET, token_ids=ids
    ),
    lambda text, finish, ids: WholeChatChoice(
        message=AssistantMessage(content=text), finish_reason=finish, token_ids=ids
    ),
    _chat_logprobs,
    opening_choice=ChatChoice(delta=ChatDelta(role="assistant", content=""), finish_reason=None, token_ids=UNSET),
)


@dataclass
class JointReply:
    """What the sequences of one request say together, as far as they have ended."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    choices: list[WholeCompletionChoice | WholeChatChoice] = field(default_factory=list)


class OpenAIWire(Wire):
    """One choice of a reply of either route. The frame of a plain token is made once and only its text changes.
    logprobs: how many candidates are named beside each token; None: nothing is said of probabilities. thinking_tokens:
    so many of a chat's reply come before its answer."""

    done = b"data: [DONE]\n\n"

    def __init__(
        self, shape: RouteFormat, body: OpenAIBody, prompt_tokens: int, output_tokens: int, model: str, request_id: str
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
        self.logprobs: int | None = None
        self.thinking_tokens = 0
        self.tells_times = False

    def is_choice(self, index: int, shared: JointReply, counts_prompt: bool) -> None:
        """counts_prompt: the choices of one prompt count it once."""
        self._index, self._shared, self._counts_prompt = index, shared, counts_prompt
        self._prefix, _, self._suffix = self._chunk([self._choice("@")]).rpartition(b'"@"')

    def token(self, count: int) -> bytes:
        special = self._usage_always or self.prompt_ids is not None or self.logprobs is not None
        if special or count <= self.thinking_tokens:
            return self.event(count, 1, None)
        return self._prefix + wire.WORDS_JSON[count % wire.N_WORDS] + self._suffix

    def event(self, count: int, n_tokens: int, finish: Finish | None) -> bytes:
        choice = self._choice(wire.span(count, n_tokens), finish, self._ids(count, n_tokens))
        if count <= self.thinking_tokens and isinstance(choice, ChatChoice):
            choice.delta = ChatDelta(reasoning=wire.span(count, n_tokens))
        choice.logprobs = self._logprobs_of(count, n_tokens)
        opening = b""
        if count == n_tokens:
            if self._shape.opening_choice:
                usage = self._usage(0) if self._usage_always else UNSET
                first = msgspec.structs.replace(self._shape.opening_choice, index=self._index)
                opening = self._chunk([first], usage, opens_chat=True)
            elif isinstance(choice, CompletionChoice):
                choice.prompt_token_ids = self.prompt_ids
        return opening + self._chunk([choice], self._usage(count) if self._usage_always else UNSET)

    def ends(self, count: int, finish: Finish) -> None:
        shared = self._shared
        shared.output_tokens += count
        if self._counts_prompt:
            shared.prompt_tokens += self.prompt_tokens
            shared.cached_tokens += self.cached_tokens
        if self.streaming:
            return
        choice = self._shape.whole_choice(wire.output_text(count), finish, self._ids(count, count))
        if (thought := min(count, self.thinking_tokens)) and isinstance(choice, WholeChatChoice):
            choice.message = AssistantMessage(
                content=wire.span(count, count - thought), reasoning=wire.output_text(thought)
            )
        choice.index, choice.logprobs = self._index, self._logprobs_of(count, count)
        if isinstance(choice, WholeCompletionChoice):
            choice.prompt_token_ids = self.prompt_ids
        shared.choices.append(choice)

    def tail(self, count: int, done: bool = True) -> bytes:
        usage = b""
        if self._usage_last:
            usage = self._chunk([], self._usage_of_all(), FINGERPRINT, metrics=self._times(count))
        return usage + (self.done if done else b"")

    def failure(self) -> bytes:
        return b"data: " + wire.encode_json(wire.error_body(500, _MESSAGES[500], _TYPES[500])) + b"\n\n" + self.done

    def whole(self, count: int, finish: Finish, seconds: float) -> Page:
        usage = self._usage_of_all()
        if usage.prompt_tokens_details is UNSET:
            usage.prompt_tokens_details = None
        reply = OpenAIWholeReply(
            id=self._id, object=self._shape.whole_object, created=self._created_s, model=self._model,
            choices=sorted(self._shared.choices, key=lambda choice: choice.index), usage=usage,
        )  # fmt: skip
        if self._shape.opening_choice:
            reply.prompt_token_ids = self.prompt_ids
        reply.metrics = self._times(count)
        return wire.json_page(200, reply)

    def _times(self, count: int) -> PerRequestMetrics | UnsetType:
        """Of a request for one sequence, where the server is to tell them."""
        if not self.tells_times or self._shared.output_tokens != count:
            return UNSET
        first_ms, rest_ms = (ns / 1e6 for ns in self.took_ns)
        return PerRequestMetrics(
            time_to_first_token_ms=first_ms,
            generation_time_ms=rest_ms,
            mean_itl_ms=rest_ms / (count - 1) if count > 1 else UNSET,
            tokens_per_second=1000 * count / max(first_ms + rest_ms, 1e-3),
        )

    def _choice(self, text: str, finish: Finish | None = None, ids: Ids = None) -> CompletionChoice | ChatChoice:
        choice = self._shape.choice(text, finish, ids)
        choice.index = self._index
        return choice

    def _logprobs_of(self, count: int, n_tokens: int) -> Logprobs:
        """Of the `n_tokens` output tokens that end with the `count`-th, where they were asked for."""
        if self.logprobs is None:
            return None
        return self._shape.logprobs(range(count - n_tokens + 1, count + 1), self.logprobs)

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
        metrics: PerRequestMetrics | UnsetType = UNSET,
    ) -> bytes:
        chunk = Chunk(
            id=self._id, object=self._shape.chunk_object, created=self._created_s, model=self._model, choices=choices,
            usage=usage, system_fingerprint=fingerprint, prompt_token_ids=self.prompt_ids if opens_chat else UNSET,
            prompt_text=None if opens_chat else UNSET, metrics=metrics,
        )  # fmt: skip
        return b"data: " + wire.encode_json(chunk) + b"\n\n"

    def _usage(self, count: int) -> Usage:
        return _usage(self.prompt_tokens, count, self.cached_tokens)

    def _usage_of_all(self) -> Usage:
        usage = _usage(self._shared.prompt_tokens, self._shared.output_tokens, self._shared.cached_tokens)
        if self.thinking_tokens:
            usage.completion_tokens_details = ReasoningTokens(min(self.thinking_tokens, usage.completion_tokens))
        return usage


def _usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        total_tokens=prompt_tokens + output_tokens,
        completion_tokens=output_tokens,
        prompt_tokens_details=CachedTokens(cached_tokens) if cached_tokens else UNSET,
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
        Buckets("vllm:time_to_first_token_seconds", "Time to the first token.", "ttft", _TTFT_S),
        Buckets("vllm:inter_token_latency_seconds", "Time between tokens.", "itl", _TOKEN_S),
        Buckets("vllm:request_time_per_output_token_seconds", "Mean time a token.", "tpot", _TOKEN_S),
        Buckets("vllm:e2e_request_latency_seconds", "Time of the whole request.", "e2e", _REQUEST_S),
        Buckets("vllm:request_queue_time_seconds", "Time waiting.", "queue", _REQUEST_S),
        Buckets("vllm:request_prefill_time_seconds", "Time computing the prompt.", "ttft", _REQUEST_S),
        Buckets("vllm:request_decode_time_seconds", "Time decoding.", "decode", _REQUEST_S),
        Buckets("vllm:request_prompt_tokens", "Prompt tokens a request.", "prompt_tokens", tokens),
        Buckets("vllm:request_generation_tokens", "Output tokens a request.", "output_tokens", tokens),
        Buckets("vllm:request_params_max_tokens", "max_tokens as asked.", "max_tokens", tokens),
    ]  # fmt: skip
