"""TensorRT-LLM, LMDeploy and NVIDIA Dynamo: OpenAI's routes driven by token ids, each with its own names and ways.

None of the three was seen running by this project. What is written here was read in their sources of November 2026:
TensorRT-LLM 1.3.0rc (`commands/serve.py`, `openai_protocol.py`, `metrics/collector.py`), LMDeploy 0.18
(`cli/serve.py`, `serve/openai`), Dynamo 1.6 (`prometheus_names.py`; its frontend with mock engines).
"""

from __future__ import annotations

import json
from functools import partial

from backends.identity import PATHS, read_unlike
from backends.launch import WITHOUT_P2P, Adapter, Failure, Invocation, ServerSettings, check_memory_ratio
from backends.openai import decoder, request
from backends.protocol import Backend, HttpRequest, Prompt, Sampling
from backends.replies import error_message

OPTIONS_FILE = "trtllm.json"  # JSON is YAML, which it reads


def encode(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    """Token ids where the prompt has them, else its text; nothing that OpenAI's servers do not share, since
    TensorRT-LLM refuses fields that it does not know."""
    asked = prompt.text if prompt.token_ids is None else prompt.token_ids
    return request("/v1/completions", model, sampling, prompt=asked)


def invoke_trtllm(settings: ServerSettings) -> Invocation:
    """Arguments of `trtllm-serve`, and the file with what has no flag. Raises LaunchError.

    Its memory ratio is of what is free once the weights are loaded, not of the whole GPU as with the others, so the KV
    cache is smaller by that part of the weights. A request begins when the KV cache has room for all of its tokens.
    """
    check_memory_ratio("trtllm", settings, 0.9)
    cache: dict[str, object] = {
        "enable_block_reuse": settings.prefix_caching,
        "free_gpu_memory_fraction": settings.memory_ratio,
    }
    if settings.kv_cache_dtype is not None:
        cache["dtype"] = settings.kv_cache_dtype
    options: dict[str, object] = {
        "dtype": settings.dtype,
        "kv_cache_config": cache,
        "cuda_graph_config": {"max_batch_size": settings.max_running, "enable_padding": True},
        "return_perf_metrics": True,  # else its Prometheus route has nothing
    }
    if settings.dummy_weights:
        options["load_format"] = "dummy"
    if not settings.p2p:
        options["allreduce_strategy"] = "NCCL"
    arguments = [
        settings.model,
        "--host", settings.host,
        "--port", str(settings.port),
        "--tp_size", str(settings.tp),
        "--max_batch_size", str(settings.max_running),
        "--max_seq_len", str(settings.max_model_len),
        "--config", f"{settings.config_dir}/{OPTIONS_FILE}",
    ]  # fmt: skip
    if settings.max_batched_tokens is not None:
        arguments += ["--max_num_tokens", str(settings.max_batched_tokens)]
    return Invocation(
        arguments=(*arguments, *settings.extra),
        env={} if settings.p2p else WITHOUT_P2P,
        files={OPTIONS_FILE: json.dumps(options, indent=2) + "\n"},
    )


def invoke_lmdeploy(settings: ServerSettings) -> Invocation:
    """Arguments of `lmdeploy serve api_server`. Its memory ratio is of what is free once the weights are loaded."""
    check_memory_ratio("lmdeploy", settings, 0.9)
    arguments = [
        settings.model,
        "--model-name", settings.served_name,
        "--server-name", settings.host,
        "--server-port", str(settings.port),
        "--tp", str(settings.tp),
        "--dtype", settings.dtype,
        "--session-len", str(settings.max_model_len),
        "--max-batch-size", str(settings.max_running),
        "--cache-max-entry-count", f"{settings.memory_ratio:g}",
    ]  # fmt: skip
    if settings.prefix_caching:
        arguments.append("--enable-prefix-caching")
    if settings.max_batched_tokens is not None:
        arguments += ["--max-prefill-token-num", str(settings.max_batched_tokens)]
    return Invocation(arguments=(*arguments, *settings.extra), env={} if settings.p2p else WITHOUT_P2P)


# None names an owner of its models that others have not. TensorRT-LLM calls a local one by the end of its path; Dynamo
# lists none until a worker registers, and its chunk of a token may have no text: its usage counts them.
_backend = partial(
    Backend, prompt_kind="token_ids", any_server=True, encode=encode, decoder=decoder, keeper=decoder,
    error_message=error_message, info_paths=PATHS, native=False, returns_token_ids=False, priority_field="",
)  # fmt: skip

TRTLLM = _backend(
    name="trtllm",
    read_info=read_unlike("TensorRT-LLM"),
    metrics_path="/prometheus/metrics",  # its /metrics is JSON, and empties what it shows
    server_metrics={
        "ttft_seconds": "trtllm_time_to_first_token_seconds",
        "itl_seconds": "trtllm_time_per_output_token_seconds",
        "e2el_seconds": "trtllm_e2e_request_latency_seconds",
        "running": "trtllm_num_requests_running",
        "waiting": "trtllm_num_requests_waiting",
        "paused": "trtllm_num_paused_requests",
        "kv_cache_usage_ratio": "trtllm_kv_cache_utilization",
        "prompt_tokens": "trtllm_prompt_tokens_total",
        "generation_tokens": "trtllm_generation_tokens_total",
        "prefix_cache_hits": "trtllm_prompt_cached_tokens_total",
        "prefix_cache_queries": "trtllm_prompt_tokens_total",
    },
    adapter=Adapter(
        image="nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc29",
        image_command=("trtllm-serve",),
        process_command=("trtllm-serve",),
        port=8000,
        cache_dir="/root/.cache/huggingface",
        dummy_weights=True,
        kv_cache_dtypes={"fp8": "fp8"},
        invoke=invoke_trtllm,
        failures=(
            Failure(
                pattern=r"Executor creation failed due to insufficient GPU memory",
                reason="the weights leave no room for the KV cache",
                advice="use more GPUs (--tp), raise --memory-ratio, or lower --max-model-len",
            ),
        ),
    ),
)

LMDEPLOY = _backend(
    name="lmdeploy",
    read_info=read_unlike("LMDeploy"),
    server_metrics={
        "ttft_seconds": "lmdeploy:time_to_first_token_seconds",
        "itl_seconds": "lmdeploy:time_per_output_token_seconds",
        "e2el_seconds": "lmdeploy:e2e_request_latency_seconds",
        "running": "lmdeploy:num_requests_running",
        "waiting": "lmdeploy:num_requests_waiting",
        "kv_cache_usage_ratio": "lmdeploy:gpu_cache_usage_perc",
        "prompt_tokens": "lmdeploy:prompt_tokens_total",
        "generation_tokens": "lmdeploy:generation_tokens_total",
        "prefix_cache_hits": "lmdeploy:cached_tokens_total",
        "prefix_cache_queries": "lmdeploy:prompt_tokens_total",
    },
    adapter=Adapter(
        image="openmmlab/lmdeploy:v0.18.0",
        image_command=("lmdeploy", "serve", "api_server"),
        process_command=("lmdeploy", "serve", "api_server"),
        port=23333,
        cache_dir="/root/.cache/huggingface",
        dtypes=("float16", "bfloat16"),
        invoke=invoke_lmdeploy,
    ),
)

DYNAMO = _backend(
    name="dynamo",
    read_info=read_unlike("Dynamo"),
    server_metrics={
        "ttft_seconds": "dynamo_frontend_time_to_first_token_seconds",
        "itl_seconds": "dynamo_frontend_inter_token_latency_seconds",
        "e2el_seconds": "dynamo_frontend_request_duration_seconds",
        "running": "dynamo_frontend_active_requests dynamo_frontend_inflight_requests",
        "waiting": "dynamo_frontend_queued_requests",
        "generation_tokens": "dynamo_frontend_output_tokens_total",
    },
    seen="1.6.1 with its mock engines on CPUs, in CI",
)
