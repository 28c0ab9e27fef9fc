"""vLLM's OpenAI server (0.32), driven by token ids on /v1/completions.

Token ids reach the model as they are, so a prompt has exactly the length asked for. `ignore_eos` alone fixes the
length of the output; `min_tokens` would add work to every step. vLLM shortens `max_tokens` without a word when prompt
and output do not fit its `max_model_len`: the usage at the end of every reply tells.
"""

from __future__ import annotations

from backends.identity import PATHS, read_as
from backends.openai import decoder, request
from backends.protocol import Backend, HttpRequest, Prompt, Sampling
from backends.replies import error_message


def encode(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    """Token ids where the prompt has them, else its text."""
    ids_or_text = prompt.text if prompt.token_ids is None else prompt.token_ids
    return request("/v1/completions", model, sampling, prompt=ids_or_text)


BACKEND = Backend(
    name="vllm",
    prompt_kind="token_ids",
    encode=encode,
    decoder=decoder,
    error_message=error_message,
    info_paths=PATHS,
    read_info=read_as("vllm"),
    server_metrics={
        "ttft_seconds": "vllm:time_to_first_token_seconds",
        "itl_seconds": "vllm:inter_token_latency_seconds",
        "e2el_seconds": "vllm:e2e_request_latency_seconds",
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
        "prompt_tokens": "vllm:prompt_tokens_total",
        "generation_tokens": "vllm:generation_tokens_total",
        "prefix_cache_hits": "vllm:prefix_cache_hits_total",
        "prefix_cache_queries": "vllm:prefix_cache_queries_total",
        "preemptions": "vllm:num_preemptions_total",
    },
)
