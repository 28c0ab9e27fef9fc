"""Text Generation Inference's own protocol (3.3, back to 2.0): /generate_stream and /generate, text prompts.

One event a token. The last one has `generated_text`, and `details` with the server's counts because the request asks
for them; there is no [DONE]. An overloaded server answers a stream with status 200 and an event `{"error",
"error_type"}`. TGI takes neither token ids nor `ignore_eos`: a reply may be shorter than asked unless the server's
model has had its end-of-sequence token taken away, and the BOS that it puts before every prompt counts as a prompt
token.
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
)
from backends.replies import Count, HeadedReply, error_message, error_text
from backends.sse import EventReply
from backends.untrusted import UNDECODABLE, printable

PIECE_TOKENS = 1024  # of a reply: after each the text so far queues again as a prompt

_ONE_TOKEN = (TOKEN,)
_encode = msgspec.json.Encoder().encode


class _Token(msgspec.Struct, gc=False):
    text: str | None = None  # decoded because bytes that are no text are a breach


class _Details(msgspec.Struct, gc=False):
    finish_reason: str | None = None
    generated_tokens: Count | None = None
    input_length: Count | None = None  # of a stream only


class _Reply(msgspec.Struct, gc=False):
    """One event of a stream, or a whole reply (which has no `token`)."""

    token: _Token | None = None
    generated_text: str | None = None
    details: _Details | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Reply).decode


class _Stream(EventReply):
    def __init__(self, kept: Kept | None) -> None:
        super().__init__()
        self._kept = kept

    def read(self, data: bytes) -> Sequence[Delta]:
        try:
            event = _decode(data)
        except UNDECODABLE as error:
            return self.unreadable(data, error)
        if event.token is None:
            if not event.error:
                raise ProtocolError(f"neither a token nor an error: {error_text(data)}")
            self.failed = True
            return (Delta(error=error_text(data)),)
        if self._kept is not None:
            self._kept.texts.append(event.token.text or "")
        if event.generated_text is None and event.details is None:
            return _ONE_TOKEN
        self.end()
        return (_last_delta(1, event.details),)


def _last_delta(n_tokens: int, details: _Details | None) -> Delta:
    if details is None:
        return Delta(n_tokens=n_tokens)
    return Delta(
        n_tokens=n_tokens,
        finish=details.finish_reason,
        prompt_tokens=details.input_length,
        output_tokens=details.generated_tokens,
    )


def _read_whole(kept: Kept | None, body: bytes) -> Delta:
    reply = _decode(body)
    if reply.generated_text is None:
        if not reply.error:
            raise ProtocolError(f"neither a text nor an error: {error_text(body)}")
        return Delta(error=error_text(body))
    if kept is not None:
        kept.texts.append(reply.generated_text)
    counted = reply.details.generated_tokens if reply.details is not None else None
    return _last_delta((1 if reply.generated_text else 0) if counted is None else counted, reply.details)


def decoder(stream: bool, kept: Kept | None = None) -> Decoder:
    return _Stream(kept) if stream else HeadedReply(partial(_read_whole, kept))


def encode(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    """The request for a text prompt. TGI serves one model and takes no name; it refuses a temperature of 0."""
    parameters: dict[str, object] = {
        "max_new_tokens": sampling.max_tokens,
        "do_sample": sampling.temperature > 0,
        "details": True,
        "seed": sampling.seed,
    }
    if sampling.temperature > 0:
        parameters["temperature"] = sampling.temperature
    path = "/generate_stream" if sampling.stream else "/generate"
    return HttpRequest("POST", path, _encode({"inputs": prompt.text, "parameters": parameters}))


def endless(generation_config: bytes | None) -> bytes:
    """The model's generation_config.json with an end token that no token equals, so that replies have full length.

    TGI has no `ignore_eos` over HTTP. It takes the end tokens from here when they are a list (a single number is
    overruled by the tokenizer's). Raises one of UNDECODABLE when the file is not a JSON object.
    """
    config = msgspec.json.decode(generation_config, type=dict[str, Any]) if generation_config else {}
    return msgspec.json.format(_encode({**config, "eos_token_id": [-1]}), indent=2)


def _graph_batches(largest: int) -> str:
    """Powers of two, and the largest: a batch beyond it runs without a graph, one between two is padded."""
    return ",".join(map(str, sorted({2**power for power in range(largest.bit_length())} | {largest})))


def invoke(settings: ServerSettings) -> Invocation:
    """Arguments of `text-generation-launcher`.

    `--num-shard` always: else it takes every GPU it sees. `--max-concurrent-requests` (128) refuses what is beyond it.
    CUDA graphs end at a batch of 32 unless told otherwise. No argument may hold a space: the image's entry point splits
    them again. The KV cache takes what is free within --cuda-memory-fraction times TGI_WIGGLE_ROOM, which is 0.9 unless
    told otherwise, and the fraction is a hard limit for CUDA graphs too, which it does without, and without a word,
    where they find no room: so the fraction stays 1, and the other is the ratio. Raises LaunchError.
    """
    check_memory_ratio("tgi", settings, 0.95)
    arguments = [
        "--model-id", settings.model,
        "--num-shard", str(settings.tp),
        # they exclude each other
        *(["--dtype", settings.dtype] if settings.quantization is None else ["--quantize", settings.quantization]),
        "--max-input-tokens", str(settings.max_model_len - 1),
        "--max-total-tokens", str(settings.max_model_len),
        "--max-concurrent-requests", str(max(settings.max_requests, settings.max_running)),
        "--max-batch-size", str(settings.max_running),
        "--cuda-graphs", _graph_batches(min(settings.max_running, GRAPH_BATCH)),
        "--cuda-memory-fraction", "1",
        "--usage-stats", "off",
        "--hostname", settings.host,
        "--port", str(settings.port),
    ]  # fmt: skip
    if settings.kv_cache_dtype is not None:
        arguments += ["--kv-cache-dtype", settings.kv_cache_dtype]
    if settings.max_batched_tokens is not None:
        arguments += ["--max-batch-prefill-tokens", str(settings.max_batched_tokens)]
    env = {"PREFIX_CACHING": str(int(settings.prefix_caching)), "TGI_WIGGLE_ROOM": f"{settings.memory_ratio:g}"}
    if not settings.p2p:
        env |= WITHOUT_P2P
    return Invocation(arguments=(*arguments, *settings.extra), env=env)


def read_account(path: str, body: bytes) -> Account:
    """All that /info has. A router 2 that knows it says how many tokens a batch may hold: those of its KV cache."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except UNDECODABLE:
        return Account()
    capacity, version = fields.get("max_batch_total_tokens"), fields.get("version")
    return Account(
        version=printable(version, 60) if isinstance(version, str) else None,
        kv_cache_tokens=capacity if type(capacity) is int and 0 < capacity < 1 << 40 else None,
        settings=settings_of({name: value for name, value in fields.items() if isinstance(value, (str, int, float))}),
    )


ADAPTER = Adapter(
    image="ghcr.io/huggingface/text-generation-inference:3.3.7",
    process_command=("text-generation-launcher",),
    port=80,
    cache_dir="/data",
    dtypes=("float16", "bfloat16"),
    quantizations={"fp8": "fp8"},
    kv_cache_dtypes={"fp8": "fp8_e4m3fn"},
    overlays={"generation_config.json": endless},
    invoke=invoke,
    capacity=r"Setting max batch total tokens to (\d+)",
    failures=(
        Failure(
            pattern=r"Not enough memory to handle (\d+) prefill tokens",
            reason="the weights leave no room for {0} prefill tokens",
            advice="use more GPUs (--tp), lower --max-model-len, or add --server-arg=--max-batch-prefill-tokens=2048",
        ),
        Failure(
            pattern=r"Not enough memory to handle `max_total_tokens=(\d+)`",
            reason="its memory has no room for one sequence of full length",
            advice="use more GPUs (--tp) or lower --max-model-len",
        ),
        Failure(
            pattern=r"Not enough VRAM to run the model",
            reason="the weights do not fit into its memory",
            advice="use more GPUs (--tp) or a smaller model",
            hint=True,  # its guess before it loads anything
        ),
        Failure(
            pattern=r"NotEnoughCUDADevices\(\"?([^\")]*)",
            reason="it sees too few GPUs ({0})",
            advice="lower --tp, or give it more --gpus",
        ),
        Failure(
            pattern=r"Shard process was signaled to shutdown with signal 9",
            reason="the kernel killed a shard for want of host memory",
            advice="free some, or use a smaller model",
        ),
        Failure(
            pattern=r"ArgumentValidation\(\"([^\"]*)",
            reason="it refuses its arguments: {0}",
            advice="change the option that it names",
        ),
        Failure(
            pattern=r"FileNotFoundError: No local weights found in (\S+)",
            reason="there are no weights in {0}",
            advice="give a directory with a model's weights as --model",
        ),
        Failure(
            pattern=r"EntryNotFoundError: No \S+ weights found for model (\S+)",
            reason="the hub has no weights of {0}, or was not reached",
            advice="look at the name, see that the host reaches huggingface.co, or give a local directory with --model",
        ),
        Failure(
            pattern=r"Download encountered an error",
            reason="the model could not be downloaded",
            advice="see that the host reaches huggingface.co, or give a local directory with --model",
            hint=True,
        ),
    ),
)

BACKEND = Backend(
    name="tgi",
    adapter_field="parameters.adapter_id",
    priority_field="",
    prompt_kind="text",
    encode=encode,
    decoder=decoder,
    keeper=decoder,
    error_message=error_message,
    info_paths=("/info", *(path for path in PATHS if path != "/info")),  # says most, and every TGI has it
    read_info=read_as("tgi"),
    account_paths=("/info",),
    read_account=read_account,
    server_metrics={
        "e2el_seconds": "tgi_request_duration",
        "queue_seconds": "tgi_request_queue_duration",
        "validation_seconds": "tgi_request_validation_duration",
        "inference_seconds": "tgi_request_inference_duration",
        "time_per_token_seconds": "tgi_request_mean_time_per_token_duration",
        "running": "tgi_batch_current_size",
        "waiting": "tgi_queue_size",
        "kv_reserved_tokens": "tgi_batch_current_max_tokens",
        "prompt_tokens": "tgi_request_input_length_sum",
        "generation_tokens": "tgi_request_generated_tokens_sum",
    },
    adapter=ADAPTER,
    seen="3.3.6-dev0 on a CPU, 2026-11-29",
    piece_tokens=PIECE_TOKENS,
    requests_flag="--max-concurrent-requests",
)
