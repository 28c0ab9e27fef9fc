"""vLLM's server (0.32): driven by token ids, on /v1/completions or on its own token-in token-out route, and started.

Token ids reach the model as they are, so a prompt has exactly the length asked for. `ignore_eos` alone fixes the
length of the output; `min_tokens` would add work to every step. vLLM shortens `max_tokens` without a word when prompt
and output do not fit its `max_model_len`: the usage at the end of every reply tells.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import msgspec

from backends.identity import PATHS, read_as, settings_of
from backends.launch import WITHOUT_P2P, Adapter, Failure, Invocation, LaunchError, Profiler, ServerSettings
from backends.openai import decoder, request
from backends.protocol import Account, Backend, HttpRequest, Prompt, Sampling
from backends.replies import error_message
from backends.untrusted import UNDECODABLE, printable


def encode(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    """Token ids where the prompt has them, else its text."""
    if prompt.token_ids is None:
        return request("/v1/completions", model, sampling, prompt=prompt.text)
    more = {"return_token_ids": True} if sampling.returns_token_ids else {}
    return request("/v1/completions", model, sampling, prompt=prompt.token_ids, **more)


def encode_tokens(model: str, prompt: Prompt, sampling: Sampling) -> HttpRequest:
    """Token ids in and out, which nobody turns into text; a prompt of text goes to /v1/completions."""
    if prompt.token_ids is None:
        return encode(model, prompt, sampling)
    parameters = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "detokenize": False,
    }
    fields: dict[str, object] = {"model": model, "token_ids": prompt.token_ids, "sampling_params": parameters}
    if sampling.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return HttpRequest("POST", TOKENS_ROUTE, _encode(fields))


def tokens_error(status: int, body: bytes) -> str:
    message = error_message(status, body)
    if status != 404 or b"does not exist" in body:  # else it is the model's name
        return message
    return f"{message}: vLLM streams {TOKENS_ROUTE} from 0.20 on, and from 0.30 on only with --enable-scale-out"


def invoke_tokens(settings: ServerSettings) -> Invocation:
    """Raises LaunchError."""
    if settings.version is not None and settings.version < TOKENS_SINCE:
        raise LaunchError(
            f"vLLM streams {TOKENS_ROUTE} from 0.20 on, and this is {'.'.join(map(str, settings.version))}; take a "
            "newer one, or --backend vllm."
        )
    invocation = invoke(settings)
    if settings.version is not None and settings.version < TOKENS_ASKED_SINCE:
        return invocation
    return msgspec.structs.replace(invocation, arguments=("--enable-scale-out", *invocation.arguments))


def invoke(settings: ServerSettings) -> Invocation:
    """Arguments of `vllm serve`, which `python -m vllm.entrypoints.openai.api_server` takes as well.

    Sampling defaults from the model's directory are off: they would change the work between runs. `--model` rather than
    the positional, because images before 0.9 know nothing else. CUDA graphs are its own choice, up to a batch of 512
    (1024 on a data centre's Blackwell): ending them earlier would make it slower, and only where it chooses does it add
    the largest batch to the sizes. Raises LaunchError.
    """
    arguments = [
        "--model", settings.model,
        "--served-model-name", settings.served_name,
        "--tensor-parallel-size", str(settings.tp),
        "--dtype", settings.dtype,
        "--max-model-len", str(settings.max_model_len),
        "--max-num-seqs", str(settings.max_running),
        "--gpu-memory-utilization", f"{settings.memory_ratio:g}",
        "--enable-prefix-caching" if settings.prefix_caching else "--no-enable-prefix-caching",
        "--generation-config", "vllm",
        "--seed", str(settings.seed),
        "--disable-uvicorn-access-log",
        "--host", settings.host,
        "--port", str(settings.port),
    ]  # fmt: skip
    several = _several(settings)
    arguments += several
    if settings.version is not None and settings.version < (0, 12):
        arguments.append("--disable-log-requests")  # on by default then; later versions refuse the flag
    elif settings.version is None or settings.version >= (0, 25):
        arguments.append("--enable-per-request-metrics")
    if settings.dummy_weights:
        arguments += ["--load-format", "dummy"]
    if settings.quantization is not None:
        arguments += ["--quantization", settings.quantization]
    if settings.kv_cache_dtype is not None:
        arguments += ["--kv-cache-dtype", settings.kv_cache_dtype]
    if settings.by_priority:
        arguments += ["--scheduling-policy", "priority"]
    if settings.max_batched_tokens is not None:
        arguments += ["--max-num-batched-tokens", str(settings.max_batched_tokens)]
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300"}  # 5 s: shorter than a wait for a token
    if not settings.p2p:
        # its other ways to reduce read peers' memory too, and do not look at NCCL's variable
        env |= WITHOUT_P2P | {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
        arguments.append("--disable-custom-all-reduce")
        if settings.version is None or settings.version >= (0, 13):  # FlashInfer's, fused with norms: on by default
            arguments.append("--compilation-config.pass_config.fuse_allreduce_rms=false")
    if settings.trace_dir is not None and settings.version is not None and settings.version < (0, 13):
        env |= {"VLLM_TORCH_PROFILER_DIR": settings.trace_dir, "VLLM_TORCH_PROFILER_WITH_STACK": "0"}
        env["VLLM_RPC_TIMEOUT"] = "600000"  # ms: stopping writes the trace
    elif settings.trace_dir is not None:
        profiler = {
            "profiler": "torch",
            "torch_profiler_dir": settings.trace_dir,
            "torch_profiler_with_stack": False,  # costs more than the steps that it would explain
            "torch_profiler_dump_cuda_time_total": False,
            "ignore_frontend": True,
        }
        arguments += ["--profiler-config", json.dumps(profiler)]
    return Invocation(arguments=(*arguments, *settings.extra), module=SERVE if several else (), env=env)


def _several(settings: ServerSettings) -> list[str]:
    """Its flags for replicas of the model and for several API servers. Raises LaunchError."""
    if settings.dp == 1 and settings.api_servers is None:
        return []
    if settings.version is not None and settings.version < SERVE_SINCE:
        raise LaunchError(
            f"vLLM {'.'.join(map(str, settings.version))} is too old for --dp and --api-servers; take 0.20 or newer."
        )
    servers = [] if settings.api_servers is None else ["--api-server-count", str(settings.api_servers)]
    return ["--data-parallel-size", str(settings.dp), *servers]


def read_account(path: str, body: bytes) -> Account:
    """Reads /version, and the metric whose labels are the KV cache's settings, one a data-parallel engine."""
    if path == "/version":
        try:
            return Account(version=printable(msgspec.json.decode(body, type=_Version).version, 60))
        except UNDECODABLE:
            return Account()
    engines = [dict(_LABEL.findall(line)) for line in _CACHE_CONFIG.findall(body.decode(errors="replace"))]
    if not engines:
        return Account()
    sizes = [(labels.get("num_gpu_blocks", ""), labels.get("block_size", "")) for labels in engines]
    known = all(re.fullmatch(r"\d{1,12}", size) for pair in sizes for size in pair)
    return Account(
        kv_cache_tokens=sum(int(blocks) * int(tokens) for blocks, tokens in sizes) if known else None,
        settings=settings_of({name: value for name, value in engines[0].items() if name != "engine"}),
    )


class _Version(msgspec.Struct):
    version: str


_encode = msgspec.json.Encoder().encode
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{([^\n]*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

ADAPTER = Adapter(
    image="vllm/vllm-openai:v0.32.0",
    process_command=("{python}", "-m", "vllm.entrypoints.openai.api_server"),
    port=8000,
    cache_dir="/root/.cache/huggingface",
    caches={"vllm": "/root/.cache/vllm"},  # compiled graphs: minutes of every start
    dummy_weights=True,
    quantizations={"fp8": "fp8"},
    kv_cache_dtypes={"fp8": "fp8"},
    takes=("dp", "api_servers"),
    invoke=invoke,
    capacity=r"[CG]PU KV cache size: ([\d,]+) tokens",
    profiler=Profiler(start=("POST", "/start_profile"), stop=("POST", "/stop_profile")),
    failures=(
        Failure(
            pattern=r"Free memory on device .*?\(([\d.]+)/([\d.]+) GiB\) on startup is less than",
            reason="the GPU is already in use ({0} of {1} GiB are free)",
            advice="stop what uses it, choose other --gpus, or lower --memory-ratio",
        ),
        Failure(
            pattern=r"max_num_batched_tokens \((\d+)\) must be greater than or equal to max_num_seqs \((\d+)\)",
            reason="its batch of {1} requests is larger than the {0} tokens that it takes in a step",
            advice="lower --max-running to {0}, or add --server-arg=--max-num-batched-tokens={1}",
        ),
        Failure(
            pattern=r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len "
            r"\(\w+=(\d+)",
            reason="the model ends before {0} tokens",
            advice="use --max-model-len {1} or less, and shorter prompts and outputs",
        ),
        Failure(
            pattern=r"No available memory for the cache blocks",
            reason="the weights leave no room for the KV cache",
            advice="use more GPUs (--tp), raise --memory-ratio, or lower --max-model-len",
        ),
        Failure(
            pattern=r"To serve at least one request with the model's max seq len \((\d+)\).*"
            r"estimated maximum model length is (\d+)",
            reason="the KV cache has no room for one sequence of {0} tokens",
            advice="use --max-model-len {1} or less, or more GPUs (--tp)",
        ),
        Failure(
            pattern=r"Insufficient space in /dev/shm for .*?: (\S+ \w+) required, (\S+ \w+) free",
            reason="shared memory is too small (it needs {0}, {1} are free)",
            advice="remove what dead servers left in /dev/shm, or make it larger",
        ),
        Failure(
            pattern=r"Failed to import from vllm\._C\w*: ImportError\('(?:\S*/)?([\w.+-]+\.so[\w.]*): ",
            reason="it cannot load {0}",
            advice="install that library (on Debian, libnuma.so.1 is in libnuma1), or choose an --image that has it",
            hint=True,
        ),
        Failure(
            pattern=r"World size \((\d+)\) is larger than the number of available GPUs",
            reason="it sees fewer than {0} GPUs",
            advice="lower --tp, or give it more --gpus",
        ),
    ),
)

TOKENS_ROUTE = "/inference/v1/generate"
TOKENS_SINCE, TOKENS_ASKED_SINCE = (0, 20), (0, 30)
SERVE_SINCE = (0, 20)  # the oldest of which it is known that its image runs `vllm serve`
SERVE = ("-m", "vllm.entrypoints.cli.main", "serve")  # the module of `process_command` has one API server

BACKEND = Backend(
    name="vllm",
    prompt_kind="token_ids",
    encode=encode,
    decoder=decoder,
    keeper=decoder,
    error_message=error_message,
    info_paths=PATHS,
    read_info=read_as("vllm"),
    account_paths=("/version", "/metrics"),
    read_account=read_account,
    server_metrics={
        "ttft_seconds": "vllm:time_to_first_token_seconds",
        "itl_seconds": "vllm:inter_token_latency_seconds vllm:time_per_output_token_seconds",
        "e2el_seconds": "vllm:e2e_request_latency_seconds",
        "queue_seconds": "vllm:request_queue_time_seconds",
        "prefill_seconds": "vllm:request_prefill_time_seconds",
        "tpot_seconds": "vllm:request_time_per_output_token_seconds",
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "kv_cache_usage_ratio": "vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc",
        "prompt_tokens": "vllm:prompt_tokens_total",
        "generation_tokens": "vllm:generation_tokens_total",
        "prefix_cache_hits": "vllm:prefix_cache_hits_total vllm:gpu_prefix_cache_hits_total",
        "prefix_cache_queries": "vllm:prefix_cache_queries_total vllm:gpu_prefix_cache_queries_total",
        "preemptions": "vllm:num_preemptions_total",
        "adapters_running": "vllm:lora_requests_info{running_lora_adapters}",
        "adapters_waiting": "vllm:lora_requests_info{waiting_lora_adapters}",
    },
    adapter=ADAPTER,
    native=False,
    seen="0.25.1 on H200s and H100s, 2026-11-30; 0.32.0 on CPUs, in CI",
)

TOKENS = replace(
    BACKEND,
    name="vllm-generate",
    encode=encode_tokens,
    error_message=tokens_error,
    adapter=replace(ADAPTER, invoke=invoke_tokens),
    native=True,
    may_lack_route=True,
    seen="0.32.0 on a CPU, 2026-11-30",
)
