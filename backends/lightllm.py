"""LightLLM's own protocol (1.2, and 1.1 as far as it goes): /generate_stream and /generate, token ids.

One event a token, `data:` without a space, no [DONE]: the event with `finished: true` is the last. Every event
carries the number of output tokens so far; what it carried itself is the difference to the one before.
`input_usage` tells text from image tokens and nothing about the prefix cache, so there are no cached tokens here; the
request keeps its prompt out of that cache instead, unless the load shares prompts (servers before 1.2 ignore the
field).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from backends.identity import PATHS, read_as
from backends.launch import (
    GRAPH_BATCH,
    WITHOUT_P2P,
    Adapter,
    Failure,
    Invocation,
    LaunchError,
    Profiler,
    ServerSettings,
    check_memory_ratio,
)
from backends.protocol import TOKEN, Backend, Decoder, Delta, HttpRequest, Kept, Prompt, ProtocolError, Sampling
from backends.replies import GIVEN_UP, Count, WholeReply, error_message, error_text, given_up
from backends.sse import EventReply
from backends.untrusted import UNDECODABLE

_ONE_TOKEN = (TOKEN,)
_encode = msgspec.json.Encoder().encode


class _Token(msgspec.Struct, gc=False):
    id: Count | None = None
    text: str | None = None  # decoded because bytes that are no text are a breach
    count_output_tokens: Count = 0
    prompt_tokens: Count | None = None


class _Event(msgspec.Struct, gc=False):
    token: _Token | None = None
    finished: bool = False
    finish_reason: str | None = None
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
        token = event.token
        if token is None:
            if not event.error:
                raise ProtocolError(f"neither a token nor an error: {error_text(data)}")
            self.failed = True
            return (Delta(error=error_text(data)),)
        if self._kept is not None:
            self._kept.texts.append(token.text or "")
            if token.id is not None:
                self._kept.token_ids.append(token.id)
        count = token.count_output_tokens or self._count + 1  # 0: this version does not count
        n_tokens = count - self._count
        if n_tokens < 0:
            raise ProtocolError(f"count_output_tokens went back from {self._count} to {count}")
        self._count = count
        if not event.finished:
            return _ONE_TOKEN if n_tokens == 1 else (Delta(n_tokens=n_tokens),) if n_tokens else ()
        self.end()
        self.failed = self.failed or event.finish_reason in GIVEN_UP
        return (_last_delta(n_tokens, event.finish_reason, token.prompt_tokens, count),)


def _last_delta(n_tokens: int, finish: str | None, prompt_tokens: int | None, output_tokens: int) -> Delta:
    return Delta(
        n_tokens=n_tokens,
        finish=finish,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        error=given_up(finish) if finish in GIVEN_UP else None,
    )


class _Whole(msgspec.Struct):
    generated_text: list[str] | str | None = None
    count_output_tokens: Count | None = None
    finish_reason: str | None = None
    prompt_tokens: Count | None = None
    error: Any = None


def _read_whole(kept: Kept | None, body: bytes) -> Delta:
    reply = msgspec.json.decode(body, type=_Whole)
    if reply.count_output_tokens is None:
        if not reply.error:
            raise ProtocolError(f"neither an output nor an error: {error_text(body)}")
        return Delta(error=error_text(body))
    if kept is not None and reply.generated_text is not None:
        kept.texts += [reply.generated_text] if isinstance(reply.generated_text, str) else reply.generated_text
    count = reply.count_output_tokens
    return _last_delta(count, reply.finish_reason, reply.prompt_tokens, count)


def decoder(stream: bool, kept: Kept | None = None) -> Decoder:
    """Without a stream there are no token ids, which the next prompt of a session of token ids needs."""
    return _Stream(kept) if stream else WholeReply(partial(_read_whole, kept))


def encode(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    """Token ids where the prompt has them, else its text. Neither the model's name nor a seed can be said."""
    parameters: dict[str, object] = {
        "max_new_tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "do_sample": sampling.temperature > 0,
        "add_special_tokens": False,
        "disable_prompt_cache": not sampling.prefix_caching,
    }
    if sampling.temperature > 0:
        parameters["temperature"] = sampling.temperature
    inputs = prompt.text if prompt.token_ids is None else prompt.token_ids
    path = "/generate_stream" if sampling.stream else "/generate"
    return HttpRequest("POST", path, _encode({"inputs": inputs, "parameters": parameters, "multimodal_params": {}}))


# Its HTTP server's own defaults are a listen backlog of 100 and 1000 requests a connection.
_HYPERCORN = """\
backlog = 4096
keep_alive_timeout = 3600
keep_alive_max_requests = 2147483647
h2_max_concurrent_streams = 2147483647
"""


_NEWEST = (1, 2)


def invoke(settings: ServerSettings) -> Invocation:
    """Arguments of `python -m lightllm.server.api_server`.

    `running_max_req_size` bounds the batch and the requests that are let in: what is beyond it waits in a loop of
    sleeps, which shows in ttft. CUDA graphs are captured up to its own default, which TGI gets as well. Before 1.1 the
    prompt cache is off unless asked for. Raises LaunchError.
    """
    check_memory_ratio("lightllm", settings, 0.95)
    version = settings.version or _NEWEST
    old = version < (1, 2)
    arguments = [
        "--model_dir", settings.model,
        "--model_name", settings.served_name,
        "--tp", str(settings.tp),
        "--data_type", settings.dtype,
        "--max_req_total_len", str(settings.max_model_len),
        "--running_max_req_size", str(settings.max_running),
        "--graph_max_batch_size", str(min(settings.max_running, GRAPH_BATCH)),
        "--mem_fraction", f"{settings.memory_ratio:g}",
        "--host", settings.host,
        "--port", str(settings.port),
    ]  # fmt: skip
    if version >= (1, 1) and not settings.prefix_caching:
        arguments.append("--disable_dynamic_prompt_cache")
    if version < (1, 1) and settings.prefix_caching:
        arguments.append("--use_dynamic_prompt_cache")
    if settings.quantization is not None:
        arguments += ["--quant_type", settings.quantization]
    if settings.max_batched_tokens is not None:
        arguments += ["--batch_max_tokens", str(settings.max_batched_tokens)]
    files = {}
    if not old:
        files["hypercorn.toml"] = _HYPERCORN
        arguments += ["--hypercorn_config", f"{settings.config_dir}/hypercorn.toml"]
    env = {}
    if settings.trace_dir is not None:
        if old:
            raise LaunchError("lightllm has a profiler from 1.2 on; choose a newer --image or --server-python.")
        arguments += ["--enable_profiling", "torch_profiler"]
        env["LIGHTLLM_TRACE_DIR"] = settings.trace_dir
    if not settings.p2p:
        env |= WITHOUT_P2P
        arguments += (
            ["--disable_custom_allreduce"]
            if old
            else ["--disable_symm_mem_allreduce", "--disable_flashinfer_allreduce"]
        )
    return Invocation(arguments=(*arguments, *settings.extra), env=env, files=files)


_SERVER = ("-m", "lightllm.server.api_server")

ADAPTER = Adapter(
    image="ghcr.io/modeltc/lightllm:v1.2.0",
    image_command=("python", *_SERVER),  # the image has no entry point
    process_command=("{python}", *_SERVER),
    port=8080,
    cache_dir="/root/.cache/huggingface",
    loads_from_hub=False,
    quantizations={"fp8": "fp8w8a8", "int8": "w8a8"},
    invoke=invoke,
    capacity=r"(\d+) is the profiled max_total_token_num",
    profiler=Profiler(
        start=("GET", "/profiler_start"),
        stop=("GET", "/profiler_stop"),
        note="lightllm takes its profiler's commands on a port of its own without asking who sends them: profile it "
        "only where nobody else can reach this machine's ports.",
    ),
    failures=(
        Failure(
            pattern=r"check max len infer fail",
            reason="a sequence of the full length does not fit into its memory",
            advice="lower --max-model-len or --memory-ratio, or use more GPUs (--tp)",
        ),
        Failure(
            pattern=r"FileNotFoundError: .*'hypercorn'",  # it waits for its other processes then
            reason="its HTTP server, the program hypercorn, is not on the PATH",
            advice="install hypercorn beside the interpreter of --server-python",
            hangs=True,
        ),
        Failure(
            pattern=r"Insufficient shared memory",
            reason="shared memory is too small for so many requests",
            advice="lower --max-running, or enlarge /dev/shm",
            hint=True,  # a warning, repeated every two minutes
        ),
        Failure(
            pattern=r"Critical LightLLM submodule exited unexpectedly: name=(\S+)",
            reason="its {0} process died",
            advice="read its log for the first error",
            hint=True,
        ),
        Failure(
            pattern=r"init func (\w+) : (?!init ok|$)(.*)",  # it then waits for the processes that it started before
            reason="{0} failed to start",
            advice="read its log for the first error",
            hint=True,
            hangs=True,
        ),
    ),
)

BACKEND = Backend(
    name="lightllm",
    adapter_field="",
    priority_field="",
    prompt_kind="token_ids",
    encode=encode,
    decoder=decoder,
    keeper=decoder,
    error_message=error_message,
    info_paths=PATHS,
    read_info=read_as("lightllm"),
    server_metrics={
        "ttft_seconds": "lightllm_request_first_token_duration",
        "e2el_seconds": "lightllm_request_inference_duration",
        "running": "lightllm_batch_current_size",
        "waiting": "lightllm_queue_size",
        "paused": "lightllm_batch_pause_size",
        "kv_reserved_tokens": "lightllm_batch_current_max_tokens",
        "prompt_tokens": "lightllm_prompt_tokens_total lightllm_request_input_length_sum",
        "generation_tokens": "lightllm_generation_tokens_total lightllm_request_generated_tokens_sum",
        "prefix_cache_hits": "lightllm_cache_length_sum",
        "prefix_cache_queries": "lightllm_request_input_length_sum",
    },
    adapter=ADAPTER,
    seen="1.2.0 on H200s, 2026-11-27",
)
