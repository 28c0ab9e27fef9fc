"""What a server looks like from outside: the types that every dialect fills in.

A dialect knows routes, bodies, frames and error texts; it knows nothing of sockets, clocks or of when a token is due.
Everything here is written from the servers' documentation. It must never import the client's codecs: an error made on
both sides would cancel out.
"""

from __future__ import annotations

import base64
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import msgspec

from servers.serve.telemetry import Series

Finish = Literal["length", "stop"]  # in the words of OpenAI; a dialect has its own

# The text of the output tokens: they repeat, so that a reply can be checked by its text.
WORDS: tuple[str, ...] = (
    " the", " of", " and", " to", " in", " is", " that", " for", " model", " token", " layer", " batch",
    " input/output", " naïve", " gradient", " attention",
)  # fmt: skip
N_WORDS = len(WORDS)
LOGPROB = -0.6  # of every one
FIRST_ID = 1000  # of the tokens' ids, for servers that send them
OTHER_WORDS = 30_000  # ids for all other words
UNREFUSED = 1 << 20  # requests at once
MARK = "llm-dissect-emulated"  # in what a server says of itself: a proxy passes it on, but not always the Server header
CHAT_TEMPLATE_TOKENS = 5  # what a chat template adds to the words of the messages
IMAGE_PATCH = 28  # pixels a side of what a token stands for, as Qwen's models have it

Segments = tuple[tuple[int, int], ...]
Headers = tuple[tuple[str, str], ...]

encode_json = msgspec.json.Encoder().encode


class Page(msgspec.Struct, frozen=True):
    """One whole HTTP reply: everything that is not a stream."""

    status: int
    body: bytes
    content_type: str | None = "application/json"
    headers: Headers = ()


class Refusal(Exception):
    """The request cannot be served; `page` is what the real server replies."""

    def __init__(self, page: Page) -> None:
        super().__init__(page.status)
        self.page = page


@dataclass(frozen=True)
class DialectSettings:
    """What is served: the model's name and the most tokens that prompt and output may hold together. prefix_caching:
    whether prompts are compared, for a modelled prefix cache. max_requests: that it holds at once before it refuses
    more. in_pieces: whether long replies come in whole pieces (TGI 3). per_request_metrics: whether replies tell their
    times (vLLM). adapters: of the model, by their names."""

    model: str
    max_model_len: int
    prefix_caching: bool = False
    max_requests: int = UNREFUSED
    in_pieces: bool = True
    per_request_metrics: bool = False
    adapters: tuple[str, ...] = ()


class RequestFields(msgspec.Struct, kw_only=True):
    """What bodies say of a request beside what it is for."""

    model: str | None = None
    priority: int | None = 0


def nothing_compared(reply_tokens: int) -> Segments:
    return ()


class Wire(ABC):
    """One accepted request, or one sequence of a request for several, and its reply as the server writes it.

    `output_tokens` is what will be generated, limits applied; `prompt_tokens` and `cached_tokens` are what the reply
    reports. The three may be changed before the first call below. Tokens are counted from 1. `headers`: of a stream.
    `segments`: what the prompt and a reply of so many tokens are made of, as of servers.schedulers.Sequence. `took_ns`:
    to the first token, and from there to the last, for `tail` and `whole`.
    """

    content_type = "text/event-stream; charset=utf-8"
    failure_before_output = False  # an error inside the stream comes instead of output, not midway
    done = b""  # the event that ends a stream and carries nothing
    headers: Headers = ()
    took_ns = (0, 0)
    adapter = ""  # of the model, that the request is for
    priority = 0  # of the request, the lower the earlier

    def __init__(self, streaming: bool, prompt_tokens: int, output_tokens: int) -> None:
        self.streaming = streaming
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.output_tokens = output_tokens
        self.segments: Callable[[int], Segments] = nothing_compared

    @abstractmethod
    def token(self, count: int) -> bytes:
        """The event of one token, the `count`-th, neither first nor last: called once per streamed token."""

    @abstractmethod
    def event(self, count: int, n_tokens: int, finish: Finish | None) -> bytes:
        """The event that brings the output to `count` tokens by `n_tokens` more; `finish` on the last."""

    def ends(self, count: int, finish: Finish) -> None:  # noqa: B027
        """All tokens are there: what the last sequence of the request must say of this one is kept."""

    def tail(self, count: int, done: bool = True) -> bytes:
        """What follows the last token of the request's last sequence: usage, `[DONE]` (left out unless `done`), or
        nothing."""
        return b""

    @abstractmethod
    def failure(self) -> bytes:
        """The server's error event inside a stream that began with status 200, and what follows it."""

    def refused(self, page: Page) -> Page:
        """The answer to this request where the scheduler refuses it; `page` is the dialect's error."""
        return page

    @abstractmethod
    def whole(self, count: int, finish: Finish, seconds: float) -> Page:
        """The reply in one piece, for a request that did not ask for a stream; it took `seconds`. Asked of the
        request's last sequence."""


class Token(msgspec.Struct):
    """An output token as the servers write it that send ids."""

    id: int
    text: str
    logprob: float = LOGPROB
    special: bool = False


class Dialect(Protocol):
    """One kind of server. `pages`: the whole replies to GET, by path; `generations`: by path, what reads the body of a
    POST (and the request's id) and gives the sequences asked for, or raises Refusal; `answers`: by path, what answers a
    POST at once, or raises Refusal. `open_pages`: they need no API key."""

    name: str
    media_type_error: Page | None  # the reply to a body that is not declared as JSON; None: it is read all the same
    pages: Mapping[str, Callable[[], Page]]
    generations: Mapping[str, Callable[[bytes, str], Sequence[Wire]]]
    answers: Mapping[str, Callable[[bytes], Page]]
    open_pages: bool
    series: Sequence[Series]
    labels: str  # on every sample of `/metrics`
    metrics_content_type: str | None

    def error(self, status: int, message: str | None = None) -> Page:
        """The server's own body for `status`, with its usual message unless one is given."""


def json_page(status: int, value: object, headers: Headers = ()) -> Page:
    return Page(status, encode_json(value), headers=headers)


def error_body(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """As OpenAI's API has it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def models_page(settings: DialectSettings, created_s: int, owned_by: str, **more: object) -> Page:
    """As OpenAI's API lists models; the one that is served, with what else a server says of it."""
    model = {"id": settings.model, "object": "model", "created": created_s, "owned_by": owned_by} | more
    adapters = [model | {"id": name, "root": name, "parent": settings.model} for name in settings.adapters]
    return json_page(200, {"object": "list", "data": [model, *adapters], "system_fingerprint": MARK})


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]  # four times the largest vocabulary that there is


def count_tokens(prompt: str | list[int]) -> int:
    """Of token ids, or of text: the embedded servers' tokenizer takes a word between spaces for a token."""
    return len(prompt.split() if isinstance(prompt, str) else prompt)


def image_tokens(url: str) -> int:
    """Counts a PNG in a data: URL: a token for each patch of its pixels, the last of a row or column cut. Raises
    ValueError."""
    encoded = url.removeprefix("data:image/png;base64,")
    try:
        head = base64.b64decode(encoded[:32])
    except ValueError:
        head = b""
    if encoded is url or len(head) < 24 or head[12:16] != b"IHDR":
        raise ValueError("Failed to load the image: it is no PNG in a data: URL, as the emulated server takes them.")
    width, height = (int.from_bytes(head[at : at + 4]) for at in (16, 20))
    return -(-width // IMAGE_PATCH) * -(-height // IMAGE_PATCH)


def segments(
    settings: DialectSettings, prompt: str | list[int], block_tokens: int, before: int = 0
) -> Callable[[int], Segments]:
    """Prompt and reply in pieces of `block_tokens`, behind `before` tokens that every prompt begins with; a piece's key
    stands for its tokens. By the length of the reply. Empty where nobody compares prompts."""
    if not settings.prefix_caching:
        return nothing_compared

    def pieces(reply_tokens: int) -> Segments:
        counts = range(1, reply_tokens + 1)
        tokens: list[str] | list[int]
        if isinstance(prompt, str):
            tokens = [*prompt.split(), *(word(count).strip() for count in counts)]
        else:
            tokens = [*prompt, *map(token_id, counts)]
        each = (tuple(tokens[at : at + block_tokens]) for at in range(0, len(tokens), block_tokens))
        keyed = tuple((hash(piece) & (1 << 60) - 1, len(piece)) for piece in each)
        return ((0, before), *keyed) if before else keyed

    return pieces


def prompt_ids(prompt: str | list[int]) -> list[int]:
    """Token ids as they are, or one for each word of a text: the same for the same word, that of an output token if it
    is one."""
    if not isinstance(prompt, str):
        return prompt
    known = {text.strip(): token_id(count) for count, text in enumerate(WORDS, 1)}
    words = ((text, zlib.crc32(text.encode(errors="surrogatepass"))) for text in prompt.split())
    return [known.get(text, FIRST_ID + N_WORDS + checksum % OTHER_WORDS) for text, checksum in words]


def token_id(count: int) -> int:
    """The id of the `count`-th output token."""
    return FIRST_ID + count % N_WORDS


def output_text(count: int) -> str:
    """The text of `count` output tokens."""
    whole, rest = divmod(count, N_WORDS)
    return "".join(WORDS) * whole + "".join(WORDS[:rest])


def word(count: int) -> str:
    """The text of the `count`-th output token."""
    return WORDS[(count - 1) % N_WORDS]


# The same as JSON strings, for frames that are put together by hand; `WORDS_JSON[count % N_WORDS]`.
WORDS_JSON: tuple[bytes, ...] = tuple(encode_json(word(count)) for count in range(N_WORDS))


def span(count: int, n_tokens: int) -> str:
    """The text of the `n_tokens` output tokens that end with the `count`-th."""
    return "".join(word(k) for k in range(count - n_tokens + 1, count + 1))
