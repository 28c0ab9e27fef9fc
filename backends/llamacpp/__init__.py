"""llama.cpp's own protocol (`llama-server` of 2026): /completion, token ids, and how such a server is started.

One event a token, each with the number of output tokens so far: what it carried is the difference to the one before,
which is more than one where the server held bytes back until a character was whole. The event with `stop: true` is the
last and there is no [DONE]; a silent server sends comments. That event has `timings`, the server's own account of the
request: to compute the prompt, and from the first token to the last. Of the prompt it takes from a slot's cache what it
finds there, unless the request forbids it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from backends.identity import PATHS, read_as, settings_of
from backends.launch import Adapter, Failure, Invocation, LaunchError, ServerSettings
from backends.llamacpp.gguf_model import write_random
from backends.protocol import (
    TOKEN,
    Account,
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
from backends.replies import Count, WholeReply, error_message, error_text
from backends.sse import EventReply
from backends.untrusted import UNDECODABLE, printable

_ONE_TOKEN = (TOKEN,)
_FINISH = {"limit": "length", "eos": "stop", "word": "stop"}
MOST_SLOTS = 256  # LLAMA_MAX_SEQ
_encode = msgspec.json.Encoder().encode


class _Timings(msgspec.Struct, gc=False):
    cache_n: Count | None = None
    prompt_ms: float | None = None
    predicted_ms: float | None = None
    draft_n: Count | None = None
    draft_n_accepted: Count | None = None


class _Event(msgspec.Struct, gc=False):
    """One event of a stream, or a whole reply."""

    content: str | None = None
    tokens: list[Count] = []
    stop: bool = False
    tokens_predicted: Count | None = None
    tokens_evaluated: Count | None = None
    stop_type: str | None = None
    timings: _Timings | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class _Stream(EventReply):
    def __init__(self, kept: Kept | None) -> None:
        super().__init__()
        self._kept = kept
        self._count = 0  # output tokens so far

    def read(self, data: bytes) -> Sequence[Delta]:
        try:
            event = _decode(data)
        except UNDECODABLE as error:
            return self.unreadable(data, error)
        if event.content is None:
            if not event.error:
                raise ProtocolError(f"neither a token nor an error: {error_text(data)}")
            self.failed = True
            return (Delta(error=error_text(data)),)
        _keep(self._kept, event)
        count = self._count + (not event.stop) if event.tokens_predicted is None else event.tokens_predicted
        n_tokens = count - self._count
        if n_tokens < 0:
            raise ProtocolError(f"tokens_predicted went back from {self._count} to {count}")
        self._count = count
        if not event.stop:
            return _ONE_TOKEN if n_tokens == 1 else (Delta(n_tokens=n_tokens),) if n_tokens else ()
        self.end()
        return (_last_delta(n_tokens, event),)


def _keep(kept: Kept | None, event: _Event) -> None:
    if kept is not None:
        kept.texts.append(event.content or "")
        kept.token_ids += event.tokens


def _last_delta(n_tokens: int, event: _Event) -> Delta:
    timings = event.timings
    return Delta(
        n_tokens=n_tokens,
        finish=_FINISH.get(event.stop_type or "", event.stop_type),
        prompt_tokens=event.tokens_evaluated,
        output_tokens=event.tokens_predicted,
        cached_tokens=timings.cache_n if timings is not None else None,
        server=None if timings is None else ServerRecord(
            prefill_us=_us(timings.prompt_ms),
            decode_us=_us(timings.predicted_ms),
            drafted_tokens=timings.draft_n,
            accepted_tokens=timings.draft_n_accepted,
        ),
    )  # fmt: skip


def _us(ms: float | None) -> int | None:
    return round(1000 * ms) if ms is not None and 0 <= ms < 1e12 else None


def _read_whole(kept: Kept | None, body: bytes) -> Delta:
    reply = _decode(body)
    if reply.content is None:
        if not reply.error:
            raise ProtocolError(f"neither a text nor an error: {error_text(body)}")
        return Delta(error=error_text(body))
    _keep(kept, reply)
    counted = reply.tokens_predicted
    return _last_delta((1 if reply.content else 0) if counted is None else counted, reply)


def decoder(stream: bool, kept: Kept | None = None) -> Decoder:
    return _Stream(kept) if stream else WholeReply(partial(_read_whole, kept))


def encode(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    """Token ids where the prompt has them, else its text. The server has one model and takes no name."""
    fields: dict[str, object] = {
        "prompt": prompt.text if prompt.token_ids is None else prompt.token_ids,
        "n_predict": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "stream": sampling.stream,
        "cache_prompt": sampling.prefix_caching,
    }
    if sampling.returns_token_ids:
        fields["return_tokens"] = True
    return HttpRequest("POST", "/completion", _encode(fields))


class _Defaults(msgspec.Struct):
    n_ctx: Count | None = None


class _Props(msgspec.Struct):
    """The part of /props that tells how the server runs."""

    total_slots: Count | None = None
    model_ftype: str | None = None
    build_info: str | None = None
    default_generation_settings: _Defaults | None = None


def read_account(path: str, body: bytes) -> Account:
    """Reads /props. Slots that share a KV cache each name all of it, so what it holds is not known from here."""
    try:
        props = msgspec.json.decode(body, type=_Props)
    except UNDECODABLE:
        return Account()
    defaults = props.default_generation_settings
    settings = {
        "total_slots": props.total_slots,
        "n_ctx": None if defaults is None else defaults.n_ctx,
        "model_ftype": props.model_ftype,
    }
    build = props.build_info or ""
    version = printable(build, 60) if build and not build.startswith("b0-") else None  # built outside of its repository
    known = {name: value for name, value in settings.items() if value is not None}
    return Account(version=version, settings=settings_of(known))


_CACHE_TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


def invoke(settings: ServerSettings) -> Invocation:
    """Arguments of `llama-server`. Raises LaunchError.

    Each slot has a KV cache of the full length, so that no request can run out of it. Its HTTP server takes a thread
    for each connection, those that wait for a slot included, and /metrics needs one more.
    """
    slots = settings.max_running
    if slots > MOST_SLOTS:
        raise LaunchError(f"llamacpp takes at most {MOST_SLOTS} requests in a batch; lower --max-running.")
    kind = _CACHE_TYPES[settings.dtype]
    arguments = [
        "--model", settings.model,
        "--alias", settings.served_name,
        "--host", settings.host,
        "--port", str(settings.port),
        "--ctx-size", str(settings.max_model_len * slots),
        "--parallel", str(slots),
        "--no-kv-unified",
        "--cache-type-k", kind,
        "--cache-type-v", kind,
        "--threads-http", str(settings.max_requests + 8),
        "--seed", str(settings.seed),
        "--metrics",
        "--slots",
        "--no-webui",
    ]  # fmt: skip
    if not settings.prefix_caching:
        arguments += ["--no-cache-prompt", "--cache-ram", "0"]
    if settings.max_batched_tokens is not None:
        arguments += ["--batch-size", str(settings.max_batched_tokens)]
    if settings.tp > 1:
        arguments += ["--split-mode", "row"]
    env = {"GGML_CUDA_P2P": "1"} if settings.p2p and settings.tp > 1 else {}  # off unless it is set
    return Invocation(arguments=(*arguments, *settings.extra), env=env)


ADAPTER = Adapter(
    image="ghcr.io/ggml-org/llama.cpp:server-cuda",
    process_command=("llama-server",),
    package=("xllamacpp", Path(__file__).with_name("server.py")),
    port=8080,
    cache_dir="/root/.cache/huggingface",
    loads_from_hub=False,
    needs_gpu=False,
    model_file=".gguf",
    random_weights=write_random,
    dummy_weights=True,
    usual_running=4,
    invoke=invoke,
    failures=(
        Failure(
            pattern=r"key not found in model: (\S+)|missing tensor '([^']*)'|tensor '([^']*)' not found",
            reason="the GGUF file lacks what its architecture needs ({0}{1}{2})",
            advice="make the file again with the converter of this llama.cpp, or name another",
        ),
        Failure(
            pattern=r"tensor '([^']*)' has wrong shape",
            reason="the GGUF file's tensor {0} has another shape than the file itself says",
            advice="make the file again with the converter of this llama.cpp, or name another",
        ),
        Failure(
            pattern=r"unknown model architecture: '([^']*)'",
            reason="it does not know the architecture '{0}' of the GGUF file",
            advice="take a newer llama.cpp, or another model",
        ),
        Failure(
            pattern=r"failed to open GGUF file|invalid magic|failed to read magic|not within the file bounds|"
            r"gguf_init_from_\w+: failed",
            reason="the file is no GGUF, or is cut off",
            advice="download it again, or name another with --model",
        ),
        Failure(
            pattern=r"GGML_ASSERT\((.*)\) failed",
            reason="it cannot compute a model of this shape ({0} does not hold)",
            advice="name another model, or take a newer llama.cpp",
        ),
        Failure(
            pattern=r"failed to (?:allocate buffer for kv cache|initialize the context|create context)",
            reason="its memory has no room for the KV cache of all slots",
            advice="lower --max-running or --max-model-len",
        ),
        Failure(
            pattern=r"unable to allocate \S+ buffer|failed to load model",
            reason="the model could not be loaded",
            advice="read its log for the first error",
            hint=True,
        ),
    ),
)

BACKEND = Backend(
    name="llamacpp",
    adapter_field="",
    priority_field="",
    prompt_kind="token_ids",
    encode=encode,
    decoder=decoder,
    keeper=decoder,
    error_message=error_message,
    info_paths=PATHS,
    read_info=read_as("llamacpp"),
    account_paths=("/props",),
    read_account=read_account,
    server_metrics={
        "running": "llamacpp:requests_processing",
        "waiting": "llamacpp:requests_deferred",
        "prompt_tokens": "llamacpp:prompt_tokens_total",
        "generation_tokens": "llamacpp:tokens_predicted_total",
        "prefix_cache_hits": "llamacpp:prompt_tokens_cached_total",
    },
    adapter=ADAPTER,
    seen="b11549 on CPUs, in CI",
)
