"""SGLang's own protocol (0.5.11 to 0.5.23): /generate, token ids, and how such a server is started.

Every event of a stream repeats all of the output so far, unless the server runs with --incremental-streaming-output.
What it carried itself is the difference of `completion_tokens`, never one: events hold several tokens with
speculation, a stream interval, or bytes held back until a character is whole. An error is an event with status 200
before `[DONE]`; a request that the server gave up, or turned away from a full queue, ends with a finish reason of type
`abort`. Neither the model's name nor a seed can be said, nor whether the prompt may come from the radix cache.

A token id beyond the vocabulary kills the server: prompts must stay below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from backends.identity import PATHS, read_as, settings_of
from backends.launch import (
    GRAPH_BATCH,
    WITHOUT_P2P,
    Adapter,
    Failure,
    Invocation,
    Profiler,
    ServerSettings,
    check_memory_ratio,
)
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
from backends.replies import GIVEN_UP, Count, WholeReply, error_message, error_text, given_up
from backends.sse import EventReply
from backends.untrusted import UNDECODABLE, printable

_ONE_TOKEN = (TOKEN,)
_encode = msgspec.json.Encoder().encode


class _Finish(msgspec.Struct, gc=False):
    type: str
    message: str | None = None


class _Meta(msgspec.Struct, gc=False):
    completion_tokens: Count
    finish_reason: _Finish | None = None
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    num_retractions: Count | None = None
    total_retractions: Count | None = None  # its name in 0.5.11
    e2e_latency: float | None = None  # seconds, as all that follow
    queue_time: float | None = None
    first_token_latency: float | None = None
    forward_entry_time: float | None = None
    prefill_finished_time: float | None = None
    spec_num_proposed_drafts: Count | None = None
    spec_num_correct_drafts: Count | None = None


class _Event(msgspec.Struct, gc=False):
    """One event of a stream, or a whole reply, without what it says. A server without a tokenizer has no text."""

    meta_info: _Meta | None = None
    error: Any = None


class _Said(_Event, gc=False):
    text: str | None = None
    output_ids: list[Count] | None = None


_decode = msgspec.json.Decoder(_Event).decode
_decode_all = msgspec.json.Decoder(_Said).decode


class _Stream(EventReply):
    ends_with_done = True

    def __init__(self, kept: Kept | None) -> None:
        super().__init__()
        self._kept = kept
        self._decode = _decode if kept is None else _decode_all
        self._count = 0  # output tokens so far
        self._text = ""  # as the last event had it

    def read(self, data: bytes) -> Sequence[Delta]:
        try:
            event = self._decode(data)
        except UNDECODABLE as error:
            return self.unreadable(data, error)
        meta = event.meta_info
        if event.error or meta is None:
            if not event.error:
                raise ProtocolError(f"neither an output nor an error: {error_text(data)}")
            self.failed = True
            return (Delta(error=error_text(data)),)
        n_tokens = meta.completion_tokens - self._count
        if n_tokens < 0:
            raise ProtocolError(f"completion_tokens went back from {self._count} to {meta.completion_tokens}")
        if isinstance(event, _Said):
            self._keep(event, n_tokens)
        self._count = meta.completion_tokens
        if meta.finish_reason is None:
            return _ONE_TOKEN if n_tokens == 1 else (Delta(n_tokens=n_tokens),) if n_tokens else ()
        self.complete = True
        last = _last_delta(n_tokens, meta)
        self.failed = self.failed or last.error is not None
        return (last,)

    def _keep(self, event: _Said, n_tokens: int) -> None:
        """Adds what is new. Where an event has more ids than came with it, it repeats what came before."""
        assert self._kept is not None
        ids, text = event.output_ids or [], event.text or ""
        repeats = len(ids) > n_tokens
        self._kept.texts.append(text[len(self._text) :] if repeats else text)
        self._kept.token_ids += ids[len(ids) - n_tokens :] if repeats else ids
        self._text = text


def _last_delta(n_tokens: int, meta: _Meta) -> Delta:
    finish = meta.finish_reason
    error = None
    if finish is not None and finish.type in GIVEN_UP:
        error = printable(finish.message) if finish.message else given_up(finish.type)
    retractions = meta.total_retractions if meta.num_retractions is None else meta.num_retractions
    return Delta(
        n_tokens=n_tokens,
        finish=finish.type if finish is not None else None,
        prompt_tokens=meta.prompt_tokens,
        output_tokens=meta.completion_tokens,
        cached_tokens=meta.cached_tokens,
        error=error,
        server=ServerRecord(
            queue_us=_us(meta.queue_time or None),  # 0 where its HTTP process does not know it
            prefill_us=_us(_between(meta.forward_entry_time, meta.prefill_finished_time)),
            ttft_us=_us(meta.first_token_latency),
            e2el_us=_us(meta.e2e_latency),
            retractions=retractions,
            drafted_tokens=meta.spec_num_proposed_drafts,
            accepted_tokens=meta.spec_num_correct_drafts,
        ),
    )


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else end_s - begin_s


def _us(seconds: float | None) -> int | None:
    return round(1e6 * seconds) if seconds is not None and 0 <= seconds < 1e9 else None


def _read_whole(kept: Kept | None, body: bytes) -> Delta:
    reply = _decode_all(body)
    if reply.error or reply.meta_info is None:
        if not reply.error:
            raise ProtocolError(f"neither an output nor an error: {error_text(body)}")
        return Delta(error=error_text(body))
    if kept is not None:
        kept.texts.append(reply.text or "")
        kept.token_ids += reply.output_ids or ()
    return _last_delta(reply.meta_info.completion_tokens, reply.meta_info)


def decoder(stream: bool, kept: Kept | None = None) -> Decoder:
    return _Stream(kept) if stream else WholeReply(partial(_read_whole, kept))


def encode(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    """Token ids where the prompt has them, else its text. A key of `sampling_params` that a version does not know ends
    the reply without a word, so there are none but those that all of them know."""
    parameters = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "ignore_eos": sampling.ignore_eos,
    }
    inputs = {"text": prompt.text} if prompt.token_ids is None else {"input_ids": prompt.token_ids}
    return HttpRequest(
        "POST", "/generate", _encode({**inputs, "sampling_params": parameters, "stream": sampling.stream})
    )


_SHOWN = (
    "tp_size", "dp_size", "pp_size", "dtype", "quantization", "kv_cache_dtype", "load_format", "mem_fraction_static",
    "chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "schedule_policy",
    "schedule_conservativeness", "page_size", "disable_radix_cache", "disable_overlap_schedule", "enable_mixed_chunk",
    "attention_backend", "stream_interval", "incremental_streaming_output", "skip_tokenizer_init",
    "disable_custom_all_reduce",
)  # fmt: skip


class _Info(msgspec.Struct):
    """The part of /server_info that is read; it has every argument of the server, as it was settled."""

    version: str | None = None
    max_total_num_tokens: Count | None = None  # of the first replica
    dp_size: Count | None = None


def read_account(path: str, body: bytes) -> Account:
    try:
        info = msgspec.json.decode(body, type=_Info)
        fields = msgspec.json.decode(body, type=dict[str, object])
    except UNDECODABLE:
        return Account()
    tokens = info.max_total_num_tokens
    return Account(
        version=printable(info.version, 60) if info.version else None,
        kv_cache_tokens=None if tokens is None else tokens * max(1, info.dp_size or 1),
        settings=settings_of({name: fields[name] for name in _SHOWN if fields.get(name) is not None}),
    )


_SERVER = ("-m", "sglang.launch_server")
_NEW_GRAPH_FLAGS = (0, 5, 17)
_NO_GRPC_UNASKED = (0, 5, 16)


def invoke(settings: ServerSettings) -> Invocation:
    """Arguments of `python -m sglang.launch_server`. Raises LaunchError.

    Sampling defaults from the model's directory are off: they would change the work between runs. Its own /health is a
    request to the model unless it is told otherwise, and /metrics and the count of cached tokens must be asked for.
    """
    check_memory_ratio("sglang", settings, 0.9)
    old = settings.version is not None and settings.version < _NEW_GRAPH_FLAGS
    arguments = [
        "--model-path", settings.model,
        "--served-model-name", settings.served_name,
        "--tp-size", str(settings.tp),
        "--dtype", settings.dtype,
        "--context-length", str(settings.max_model_len),
        "--max-running-requests", str(settings.max_running),
        "--mem-fraction-static", f"{settings.memory_ratio:g}",
        "--cuda-graph-max-bs" if old else "--cuda-graph-max-bs-decode", str(min(settings.max_running, GRAPH_BATCH)),
        "--sampling-defaults", "openai",
        "--random-seed", str(settings.seed),
        "--enable-metrics",
        "--enable-cache-report",
        "--host", settings.host,
        "--port", str(settings.port),
    ]  # fmt: skip
    if settings.by_priority:
        arguments.append("--enable-priority-scheduling")
    if settings.dp > 1:
        arguments += ["--dp-size", str(settings.dp)]
    if not settings.prefix_caching:
        arguments.append("--disable-radix-cache")
    if settings.dummy_weights:
        arguments += ["--load-format", "dummy"]
    if settings.quantization is not None:
        arguments += ["--quantization", settings.quantization]
    if settings.kv_cache_dtype is not None:
        arguments += ["--kv-cache-dtype", settings.kv_cache_dtype]
    if settings.max_batched_tokens is not None:
        arguments += ["--chunked-prefill-size", str(settings.max_batched_tokens)]
    env = {"SGLANG_TIMEOUT_KEEP_ALIVE": "300", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    grpc = settings.version is not None and settings.version < _NO_GRPC_UNASKED
    if grpc and settings.port + 10_000 > 65_535:  # it refuses to start with such a port for gRPC, which it never opens
        env["SGLANG_GRPC_PORT"] = str(settings.port - 10_000)  # newer ones open a port that is named
    if settings.trace_dir is not None:
        env |= {"SGLANG_TORCH_PROFILER_DIR": settings.trace_dir, "SGLANG_PROFILE_RECORD_SHAPES": "false"}
        env["SGLANG_PROFILE_WITH_STACK"] = "false"  # costs more than the steps that it would explain
    if not settings.p2p:  # two of its ways to reduce read peers' memory and do not look at NCCL's variables
        env |= WITHOUT_P2P
        arguments += ["--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"]
    return Invocation(arguments=(*arguments, *settings.extra), env=env)


ADAPTER = Adapter(
    image="lmsysorg/sglang:v0.5.23",
    image_command=("python3", *_SERVER),  # the image has no entry point
    process_command=("{python}", *_SERVER),
    port=30000,
    cache_dir="/root/.cache/huggingface",
    caches={name: f"/root/.cache/{name}" for name in ("flashinfer", "tvm-ffi", "triton")},  # kernels, built at start
    ready_paths=("/ready", "/health"),
    dummy_weights=True,
    quantizations={"fp8": "fp8"},
    kv_cache_dtypes={"fp8": "fp8_e4m3"},
    takes=("dp",),
    invoke=invoke,
    profiler=Profiler(start=("POST", "/start_profile"), stop=("POST", "/stop_profile")),
    capacity=r"max_total_num_tokens=(\d+)",
    failures=(
        Failure(
            pattern=r"Not enough memory\. Please try to increase --mem-fraction-static",
            reason="the weights leave no room for the KV cache",
            advice="use more GPUs (--tp), raise --memory-ratio, or lower --max-model-len",
        ),
        Failure(
            pattern=r"User-specified context_length \((\d+)\) is greater than the derived context_length \((\d+)\)",
            reason="the model ends before {0} tokens",
            advice="use --max-model-len {1} or less, and shorter prompts and outputs",
        ),
        Failure(
            pattern=r"(\S+) is installed with version (\S+), which is less than the minimum required version (\S+)",
            reason="{0} {1} is too old for it",
            advice="install {0} {2} or newer beside it",
        ),
    ),
)

BACKEND = Backend(
    name="sglang",
    adapter_field="lora_path",
    prompt_kind="token_ids",
    encode=encode,
    decoder=decoder,
    keeper=decoder,
    error_message=error_message,
    info_paths=(*PATHS, "/get_model_info"),
    read_info=read_as("sglang"),
    account_paths=("/server_info",),
    read_account=read_account,
    server_metrics={
        "ttft_seconds": "sglang:time_to_first_token_seconds",
        "itl_seconds": "sglang:inter_token_latency_seconds",
        "e2el_seconds": "sglang:e2e_request_latency_seconds",
        "running": "sglang:num_running_reqs",
        "waiting": "sglang:num_queue_reqs",
        "paused": "sglang:num_retracted_reqs",
        "kv_cache_usage_ratio": "sglang:token_usage",
        "prompt_tokens": "sglang:prompt_tokens_total",
        "generation_tokens": "sglang:generation_tokens_total",
        "prefix_cache_hits": "sglang:cached_tokens_total",
        "prefix_cache_queries": "sglang:prompt_tokens_total",
        "preemptions": "sglang:num_retracted_requests_total",
        "adapters_loaded": "sglang:lora_pool_slots_used",
    },
    stale_gauges=True,
    adapter=ADAPTER,
    seen="0.5.11 on H200s, 2026-11-30",
)
