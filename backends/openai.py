"""The OpenAI protocol, completions and chat, as vLLM, LightLLM, TGI, SGLang, llama.cpp and others speak it.

https://platform.openai.com/docs/api-reference/completions and .../chat. One decoder reads both: a chunk says itself
which it is. An event is not a token: servers merge tokens that wait for a slow reader, hold bytes back until a
character is whole (an empty text, still a token), and open a chat with a role that carries nothing. How many tokens
an event carried is known where it has `token_ids` (vLLM's /inference/v1/generate has nothing else), or where every
event so far has had `usage`; else it counts as one. The total of the reply is the `usage` of its last event, which
every request here asks for. Nothing after a finish reason is a token, whatever its choices look like.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from backends.identity import PATHS, read_any
from backends.plain_tokens import PlainTokens
from backends.protocol import (
    HELD_BACK,
    REASONING,
    TOKEN,
    Backend,
    Decoder,
    Delta,
    HttpRequest,
    Kept,
    Prompt,
    ProtocolError,
    Sampling,
    ServerRecord,
)
from backends.replies import (
    GIVEN_UP,
    Count,
    WholeReply,
    error_in,
    error_message,
    error_text,
    given_up,
    is_ping,
    reply_identity,
)
from backends.sse import PLAIN, EventReply
from backends.untrusted import UNDECODABLE

_MOST_UNIDENTIFIED = 3
_ONE_TOKEN = (TOKEN,)
_HELD_BACK = (HELD_BACK,)
_REASONING = (REASONING,)
_encode = msgspec.json.Encoder().encode


class _CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None


class _ReasoningTokens(msgspec.Struct, gc=False):
    reasoning_tokens: Count | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _CachedTokens | None = None
    completion_tokens_details: _ReasoningTokens | None = None


class _Speculation(msgspec.Struct, gc=False):
    num_draft_tokens: Count | None = None
    num_accepted_draft_tokens: Count | None = None


class _Times(msgspec.Struct, gc=False):
    """What vLLM says of a request beside its usage (--enable-per-request-metrics): waiting, then computing the prompt
    and the first token, then the others."""

    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    speculative_decoding: _Speculation | None = None

    def record(self) -> ServerRecord:
        queue, prefill, decode = (
            None if ms is None or not 0 <= ms < 1e12 else round(1000 * ms)
            for ms in (self.queue_time_ms, self.time_to_first_token_ms, self.generation_time_ms)
        )
        ttft = None if queue is None or prefill is None else queue + prefill
        guesses = self.speculative_decoding or _Speculation()
        return ServerRecord(
            queue_us=queue,
            prefill_us=prefill,
            ttft_us=ttft,
            decode_us=decode,
            e2el_us=None if ttft is None or decode is None else ttft + decode,
            drafted_tokens=guesses.num_draft_tokens,
            accepted_tokens=guesses.num_accepted_draft_tokens,
        )


class _Message(msgspec.Struct, gc=False):
    """A chat's `delta` in a chunk, its `message` in a whole reply."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    reasoning_details: list[Any] | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None

    @property
    def reasons(self) -> bool:
        return bool(self.reasoning_content or self.reasoning or self.thinking or self.reasoning_details)

    @property
    def answers(self) -> bool:
        return bool(self.content or self.refusal or self.tool_calls or self.function_call or self.audio)

    @property
    def says_something(self) -> bool:
        return self.answers or self.reasons

    @property
    def only_reasons(self) -> bool:
        return self.reasons and not self.answers

    @property
    def holds_back(self) -> bool:
        """It has a text, and the text is empty."""
        return "" in (self.content, self.reasoning_content, self.reasoning)


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    token_ids: list[Count] | None = None

    @property
    def ends(self) -> bool:
        return self.finish_reason not in (None, "", "null")

    @property
    def says_something(self) -> bool:
        return bool(self.text) if self.delta is None else self.delta.says_something

    def keep(self, kept: Kept) -> None:
        """Adds what it says. Of a chat that is what a client would send back: no reasoning."""
        message = self.delta or self.message
        content = self.text if message is None else message.content
        if isinstance(content, str):
            kept.texts.append(content)
        kept.token_ids += self.token_ids or ()


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    metrics: Any = None

    def server(self) -> ServerRecord | None:
        """What it says of the request's times; None where it does not, or says something else under that name."""
        if self.metrics is None:
            return None
        with contextlib.suppress(msgspec.ValidationError):
            record = msgspec.convert(self.metrics, _Times).record()
            return None if record == ServerRecord() else record
        return None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Part(msgspec.Struct):
    """One part of a content in parts. One that is neither text nor thought says something by being there."""

    type: str = ""
    text: str = ""
    thinking: str | list[_Part] = ""

    @property
    def said(self) -> str:
        return self.text or ("" if self.type in ("text", "thinking") else self.type)

    @property
    def thought(self) -> str:
        parts = self.thinking
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


def _decode_any(data: bytes) -> _Chunk:
    """A chunk in the shapes that few servers send: a content in parts, whole numbers written as 40.0. Raises one of
    UNDECODABLE."""
    fields = msgspec.json.decode(data, type=dict[str, Any])
    usage = fields.get("usage")
    if isinstance(usage, dict):
        fields["usage"] = {name: int(value) if _is_whole(value) else value for name, value in usage.items()}
    choices = fields.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        for message in (choice.get("delta"), choice.get("message")) if isinstance(choice, dict) else ():
            if isinstance(message, dict) and isinstance(message.get("content"), list):
                parts = msgspec.convert(message["content"], list[_Part])
                message["content"] = "".join(part.said for part in parts) if parts else None
                message["thinking"] = "".join(part.thought for part in parts)
    return msgspec.convert(fields, _Chunk)


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53


class _Stream(EventReply):
    ends_with_done = True

    def __init__(self, kept: Kept | None) -> None:
        self._plain = PlainTokens()
        super().__init__(self._plain if kept is None else None)  # what is recognised is not read
        self._kept = kept
        self._counted = 0  # output tokens so far that the server has counted
        self._grown = 0  # how often that count has grown
        self._unidentified = 0  # events that were looked at in vain for who the reply is
        self._silent_end = False  # the event with the finish reason was taken for none
        self._running: tuple[_Usage, int] | None = None  # the last count before the end, and the tokens seen by then

    def read(self, data: bytes) -> Sequence[Delta]:
        try:
            chunk = _decode(data)
        except UNDECODABLE as error:
            try:
                chunk = _decode_any(data)
            except UNDECODABLE:
                return self.unreadable(data, error)
        choices = chunk.choices
        if choices and self._kept is not None:
            choices[0].keep(self._kept)
        if choices and chunk.usage is None and chunk.error is None:
            choice = choices[0]
            if choice.finish_reason is None and choice.token_ids is None and not self.complete:
                delta = choice.delta
                if choice.text if delta is None else delta.content:
                    self._plain.count += 1
                    return PLAIN
        return self._read_rare(chunk, data)

    def _read_rare(self, chunk: _Chunk, data: bytes) -> Sequence[Delta]:
        """All but a plain token. Of the choices there is never more than the one that was asked for."""
        if (
            self.identity is None and self._unidentified < _MOST_UNIDENTIFIED
        ):  # the first, which a filter's verdict may precede
            self.identity = reply_identity(data)
            self._unidentified += self.identity is None
        if failure := _failure(chunk, data):
            self.failed = True
            return (Delta(error=failure),)
        if not chunk.choices or self.complete:
            return (self._total(chunk.usage, chunk.server()),) if chunk.usage is not None else ()
        choice = chunk.choices[0]
        n_tokens = self._count(choice, chunk.usage)
        if not choice.ends:
            if chunk.usage is not None and not self._plain.count:  # not the last word, unless nothing follows
                self._running = (chunk.usage, self._seen)
            return _event(choice, n_tokens, chunk.usage)
        self.complete = True
        self._plain.stop()
        self._silent_end = n_tokens == 0
        self.failed = self.failed or choice.finish_reason in GIVEN_UP
        return (_last_delta(n_tokens, choice.finish_reason, chunk.usage, chunk.server()),)

    def _total(self, usage: _Usage, server: ServerRecord | None = None) -> Delta:
        """The event after the last choice. Where it counts one token more than were seen, the end without text was that
        token: vLLM ends so when the last bytes are no whole character, and sends both events at once."""
        missing = (usage.completion_tokens or 0) - self._seen
        late = self._silent_end and missing == 1
        self._silent_end, self._running = False, None
        return _last_delta(1 if late else 0, None, usage, server)

    def eof(self) -> Sequence[Delta]:
        deltas = super().eof()
        if self._running is None or self.failed or self._running[1] != self._seen:
            return deltas
        return (*deltas, self._total(self._running[0]))

    @property
    def _seen(self) -> int:
        return self._counted + self._plain.count

    def _count(self, choice: _Choice, usage: _Usage | None) -> int:
        """Output tokens that one event carried."""
        total = usage.completion_tokens if usage is not None else None
        if total is not None and not self._plain.count and not self._stands_still(choice, total):
            n_tokens = max(0, total - self._counted)
            self._counted += n_tokens
            self._grown += n_tokens > 0
        elif choice.token_ids is not None:
            n_tokens = len(choice.token_ids)
            self._counted += n_tokens
        else:
            n_tokens = 1 if self._carries_output(choice) else 0
            if total is not None and total == self._seen + 1:
                n_tokens = 1  # an end without text is a token if the server counts just one more than were seen
            self._plain.count += n_tokens
        return n_tokens

    def _stands_still(self, choice: _Choice, total: int) -> bool:
        """Whether a usage that each event has is no running count: some servers send 0, 1 or the whole reply's."""
        return self._grown < 2 and total <= self._counted and not choice.ends and choice.says_something

    def _carries_output(self, choice: _Choice) -> bool:
        goes_on = not choice.ends
        if choice.delta is None:
            return bool(choice.text) or (choice.text is not None and goes_on)
        opens = choice.delta.role is not None and not self._seen
        return choice.delta.says_something or (choice.delta.holds_back and goes_on and not opens)


def _event(choice: _Choice, n_tokens: int, usage: _Usage | None) -> Sequence[Delta]:
    """What an event before the last one is."""
    delta = choice.delta
    if n_tokens == 0:
        return ()
    if n_tokens > 1:
        return (Delta(n_tokens=n_tokens),)
    if delta is not None and delta.only_reasons:
        return _REASONING
    return _ONE_TOKEN if choice.says_something or choice.token_ids is not None or usage is not None else _HELD_BACK


def _failure(chunk: _Chunk, data: bytes) -> str | None:
    """The error that a chunk or reply is instead of output. Raises ProtocolError when it is neither."""
    if chunk.error:
        return error_text(data)
    if chunk.choices is not None or chunk.usage is not None:
        return None
    if error := error_in(data):
        return error
    if is_ping(data):
        return None
    raise ProtocolError(f"neither choices nor usage nor an error: {error_text(data)}")


def _last_delta(n_tokens: int, finish: str | None, usage: _Usage | None, server: ServerRecord | None = None) -> Delta:
    details = usage.prompt_tokens_details if usage is not None else None
    output_details = usage.completion_tokens_details if usage is not None else None
    return Delta(
        n_tokens=n_tokens,
        finish=finish,
        prompt_tokens=usage.prompt_tokens if usage is not None else None,
        output_tokens=usage.completion_tokens if usage is not None else None,
        cached_tokens=details.cached_tokens if details is not None else None,
        reasoning_tokens=output_details.reasoning_tokens if output_details is not None else None,
        error=given_up(finish) if finish in GIVEN_UP else None,
        server=server,
    )


def _read_whole(kept: Kept | None, body: bytes) -> Delta:
    try:
        reply = _decode(body)
    except msgspec.ValidationError:
        reply = _decode_any(body)
    if reply.choices and kept is not None:
        reply.choices[0].keep(kept)
    if failure := _failure(reply, body):
        return Delta(error=failure)
    finish = reply.choices[0].finish_reason if reply.choices else None
    counted = reply.usage.completion_tokens if reply.usage is not None else None
    if counted is None and reply.choices:
        choice = reply.choices[0]
        counted = len(choice.token_ids) if choice.token_ids is not None else _has_output(choice)
    return _last_delta(counted or 0, finish, reply.usage, reply.server())


def _has_output(choice: _Choice) -> bool:
    return bool(choice.text) or (choice.message is not None and choice.message.says_something)


def decoder(stream: bool, kept: Kept | None = None) -> Decoder:
    return _Stream(kept) if stream else WholeReply(partial(_read_whole, kept))


def request(path: str, model: str, sampling: Sampling, **input: object) -> HttpRequest:
    """The request for `input` (`prompt` or `messages`).

    The length is asked for as `max_tokens`, which every server here knows. `max_completion_tokens`, which OpenAI's
    newest models want instead, is unknown to older servers, which would ignore it and write on to a limit of their
    own. `ignore_eos` is no field of OpenAI's, so it is sent only when asked for.
    """
    fields = {"model": model, **input, "max_tokens": sampling.max_tokens}
    fields |= {"temperature": sampling.temperature, "seed": sampling.seed}
    if sampling.ignore_eos:
        fields["ignore_eos"] = True
    if sampling.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return HttpRequest("POST", path, _encode(fields))


def encode_completion(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    return request("/v1/completions", model, sampling, prompt=prompt.text)


def encode_chat(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    messages: list[dict[str, object]]
    if prompt.images:
        images = [{"type": "image_url", "image_url": {"url": url}} for url in prompt.images]
        messages = [{"role": "user", "content": [{"type": "text", "text": prompt.text}, *images]}]
    else:
        messages = [{"role": role, "content": content} for role, content in prompt.messages or (("user", prompt.text),)]
    budget = {} if sampling.thinking_tokens is None else {"thinking_token_budget": sampling.thinking_tokens}
    return request("/v1/chat/completions", model, sampling, messages=messages, **budget)


COMPLETIONS = Backend(
    name="openai",
    prompt_kind="text",
    any_server=True,
    encode=encode_completion,
    decoder=decoder,
    keeper=decoder,
    error_message=error_message,
    info_paths=PATHS,
    read_info=read_any,
    server_metrics={},
    native=False,
    seen="vLLM 0.32.0 on CPUs, in CI",
)

CHAT = Backend(
    name="openai-chat",
    prompt_kind="text",
    any_server=True,
    encode=encode_chat,
    decoder=decoder,
    keeper=decoder,
    error_message=error_message,
    info_paths=PATHS,
    read_info=read_any,
    server_metrics={},
    native=False,
    takes_images=True,
    limits_thinking=True,
    seen="vLLM 0.32.0 on CPUs, in CI",
)
