"""What a server is to the instrument: how to ask it, how to read its answer, how to recognise it.

Everything here is sans-io: bytes in, values out, no clock, no socket, no await. A backend is one file that ends in
`BACKEND = Backend(...)` and is found through the entry-point group `llm_dissect.backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import msgspec

from backends.plain_tokens import PlainTokens

if TYPE_CHECKING:  # the sidecar of a run starts no server
    from backends.launch import Adapter

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # what does not fit a column is no count


class ProtocolError(Exception):
    """The server sent bytes that its protocol does not allow."""


class OtherServer(ProtocolError):
    """The server says what it is, and that is another kind than the backend's."""


class Truncated(ProtocolError):
    """The body ended before the server had said that the reply is complete."""


class Prompt(msgspec.Struct, frozen=True):
    """One prompt: `token_ids` for servers that take them, else `text`, which tokenizes to `n_tokens` (0: not known).
    messages: the same text as (role, content), for a chat; empty: it is one message of the user's. items: of a request
    for several texts each of them, with `n_tokens` together. images: as data: URLs, beside the text."""

    n_tokens: int
    token_ids: Sequence[int] | None = None
    text: str | None = None
    messages: tuple[tuple[str, str], ...] = ()
    items: tuple[str, ...] = ()
    images: tuple[str, ...] = ()


class Kept(msgspec.Struct):
    """What a reply has said, for a later prompt that repeats it: its text in pieces, and token ids where they came."""

    texts: list[str] = []
    token_ids: list[int] = []


class Sampling(msgspec.Struct, frozen=True):
    """How the output is drawn. `ignore_eos` asks for exactly `max_tokens` tokens where the server can do that.
    `prefix_caching`: whether the prompt may be taken from the server's prefix cache, where a request can say that.
    `returns_token_ids`: asks for the reply's token ids too, where the server can give them. `thinking_tokens`: how many
    of `max_tokens` it may think at the most."""

    max_tokens: int
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    stream: bool = True
    prefix_caching: bool = False
    returns_token_ids: bool = False
    thinking_tokens: int | None = None


class HttpRequest(msgspec.Struct, frozen=True):
    """One request, ready to be written. `headers` holds only what the backend needs beyond Host and length."""

    method: str
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the server itself says of one request; None: it does not say. Microseconds by its own clock. queue: from its
    arrival to its first step; prefill: to compute the prompt; ttft: from its arrival to its first token; decode: from
    its first token to its last; e2el: from its arrival to its end; load: to load the model first. retractions: how
    often it lost its KV cache and began again; drafted and accepted: tokens of speculation."""

    queue_us: Count | None = None
    prefill_us: Count | None = None
    ttft_us: Count | None = None
    decode_us: Count | None = None
    e2el_us: Count | None = None
    load_us: Count | None = None
    retractions: Count | None = None
    drafted_tokens: Count | None = None
    accepted_tokens: Count | None = None


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What one event of a reply says.

    n_tokens: output tokens that this event carried, as far as the event itself tells (1 when it carries output
    and does not tell how much, 0 when it carries none). The counts are the server's own and final; reasoning_tokens is
    a part of output_tokens. server: what it says of the whole request, at its end. items: how many of its texts a reply
    answers that is no text itself.
    """

    n_tokens: int = 0
    finish: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    error: str | None = None
    server: ServerRecord | None = None
    items: int | None = None


class ReplyIdentity(msgspec.Struct, frozen=True):
    """Who a reply says that it is, and which model made it; empty where it does not say."""

    id: str = ""
    model: str = ""


TOKEN = Delta(n_tokens=1)  # by far the most common event: one shared value, nothing allocated
# Two more shared values of one token, to be known by `is`. The text of one is empty and nothing counts it, so it is a
# token whose bytes are held back, or a keep-alive; the other is no part of the answer.
HELD_BACK, REASONING = Delta(n_tokens=1), Delta(n_tokens=1)


class Decoder(Protocol):
    """Reads one reply body with status 200. Any split of the body into `feed` calls gives the same deltas.

    plain: what it recognises need not be fed; None: every event must be read. identity: known when the last delta is
    out, and final; None: the reply does not say. One that has a method `head` is given the reply's headers before its
    body, as they came, with whatever was read behind them.
    """

    plain: PlainTokens | None
    identity: ReplyIdentity | None

    def feed(self, data: bytes) -> Sequence[Delta]:
        """Deltas completed by `data`, in order. Raises ProtocolError and nothing else."""

    def eof(self) -> Sequence[Delta]:
        """The body has ended: what is left. Raises Truncated when the reply is not complete (an error reply is)."""


class ServerInfo(msgspec.Struct, frozen=True):
    """What a server says of itself before a run. `max_total_tokens` is prompt plus output; None: it does not say.

    `models` are its names where there are several, or where they are patterns (`openai/*`); it is then not for us to
    choose, and `model` is None. `vocab_size`: token ids end below it. `max_requests`: more at once are refused.
    `adapters`: those of the model that it names; None: it does not say.
    """

    model: str | None = None
    max_total_tokens: int | None = None
    version: str | None = None
    models: tuple[str, ...] = ()
    vocab_size: int | None = None
    max_requests: int | None = None
    adapters: tuple[str, ...] | None = None


class Account(msgspec.Struct, frozen=True):
    """What a server says of how it runs. kv_cache_tokens: that its KV cache holds. settings: by its own names."""

    version: str | None = None
    kv_cache_tokens: int | None = None
    settings: Mapping[str, str] = {}


@dataclass(frozen=True)
class Backend:
    """One kind of server.

    encode(model, prompt, sampling) builds the request; decoder(stream) reads a 200 reply; keeper(stream, kept) reads it
    into `kept` as well, for sessions (None: this server cannot be sent any); error_message(status, body) makes one line
    of any other reply (never raises). `info_paths` are tried in order and the first that answers 200 is
    read: read_info(path, body) returns what it says, or raises ProtocolError when another kind of server answered.
    Of `account_paths` all that answer 200 are read: read_account(path, body) never raises.
    server_metrics maps a neutral name to the server's Prometheus series, for those that the server has; where versions
    differ, to several, newest first, with a space between; NAME{LABEL} is how many names its latest LABEL lists.
    Histograms ttft_seconds, itl_seconds, e2el_seconds, and of a request's parts queue_seconds, validation_seconds,
    prefill_seconds, inference_seconds, tpot_seconds (of the tokens after the first) and time_per_token_seconds (of
    all), without _sum, _count, _bucket; gauges running, waiting, paused (requests; paused: preempted and waiting to go
    on), kv_cache_usage_ratio, kv_reserved_tokens (what the running batch may come to need), adapters_running,
    adapters_waiting (that requests which run, or wait, are for), adapters_loaded; counters prompt_tokens,
    generation_tokens, prefix_cache_hits, prefix_cache_queries (tokens), preemptions. adapter: how such a server is
    started; None: it can only be measured where it runs. stale_gauges: they may keep their values when nothing runs any
    more. native: it is asked in its own protocol, not in OpenAI's. seen: which versions were measured for real, on what
    and when ("VERSION on WHAT, WHEN; ...", WHEN the last day or "in CI"); empty: none was. any_server: it takes
    whatever server answers on its routes, also routers, which need not say what they are or list every name that they
    take. piece_tokens: a longer reply is generated in whole pieces of so many tokens, the last not cut, and ends before
    one that does not fit. requests_flag: how such a server is told to hold more requests at once.
    may_lack_route: servers of this kind may not have the route of its requests, which a first one tells.
    returns_token_ids: its replies can have the ids of their tokens, of which the next prompt of a session is made where
    prompts are token ids.
    limits_thinking: a request can say how long it may think.
    adapter_field: of the body, which names a LoRA adapter, within an object after a dot; "": a request cannot say it.
    priority_field: likewise, with a request's priority.
    pooled: a request has texts, and its reply, never streamed, is no text but a vector or a score for each of them.
    takes_images: beside a text.
    """

    name: str
    prompt_kind: Literal["token_ids", "text"]
    encode: Callable[[str, Prompt, Sampling], HttpRequest]
    decoder: Callable[[bool], Decoder]
    error_message: Callable[[int, bytes], str]
    info_paths: tuple[str, ...]
    read_info: Callable[[str, bytes], ServerInfo]
    server_metrics: Mapping[str, str]
    metrics_path: str = "/metrics"
    adapter: Adapter | None = None
    any_server: bool = False
    keeper: Callable[[bool, Kept], Decoder] | None = None
    account_paths: tuple[str, ...] = ()
    read_account: Callable[[str, bytes], Account] = lambda path, body: Account()
    stale_gauges: bool = False
    native: bool = True
    seen: str = ""
    piece_tokens: int | None = None
    requests_flag: str = ""
    may_lack_route: bool = False
    returns_token_ids: bool = True
    adapter_field: str = "model"
    priority_field: str = "priority"
    limits_thinking: bool = False
    pooled: bool = False
    takes_images: bool = False
