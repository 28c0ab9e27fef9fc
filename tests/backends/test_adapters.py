"""What each server is started with: the same settings in its own words, and what its log says when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import backends
from backends.launch import Adapter, Exit, LaunchError, ServerSettings, died, excerpt, explain, first_error, version_in
from backends.untrusted import UNDECODABLE

STARTED = [name for name in backends.available() if backends.get(name).adapter is not None]


def adapter(name: str) -> Adapter:
    found = backends.get(name).adapter
    assert found is not None
    return found


def settings(**more: Any) -> ServerSettings:
    return ServerSettings(
        **{
            "model": "/models/m", "served_name": "m", "tp": 2, "dtype": "float16", "max_model_len": 4096,
            "max_running": 1024, "max_requests": 1500, "memory_ratio": 0.9, "host": "0.0.0.0", "port": 8000,
            "config_dir": "/cfg", **more,
        }
    )  # fmt: skip


def words(name: str, **more: Any) -> dict[str, str | None]:
    """Flag -> value of the arguments; None for a flag without one."""
    arguments = adapter(name).invoke(settings(**more)).arguments
    found: dict[str, str | None] = {}
    for index, word in enumerate(arguments):
        if word.startswith("--"):
            following = arguments[index + 1] if index + 1 < len(arguments) else "--"
            assert word not in found, f"{word} twice"
            found[word] = None if following.startswith("--") else following
    return found


# The same things under four names. (vLLM, LightLLM, TGI, SGLang)
SAME = {
    "model": ("--model", "--model_dir", "--model-id", "--model-path"),
    "tp": ("--tensor-parallel-size", "--tp", "--num-shard", "--tp-size"),
    "dtype": ("--dtype", "--data_type", "--dtype", "--dtype"),
    "max_model_len": ("--max-model-len", "--max_req_total_len", "--max-total-tokens", "--context-length"),
    "max_running": ("--max-num-seqs", "--running_max_req_size", "--max-batch-size", "--max-running-requests"),
    "host": ("--host", "--host", "--hostname", "--host"),
    "port": ("--port", "--port", "--port", "--port"),
}


@pytest.mark.parametrize("setting", SAME)
@pytest.mark.parametrize("column", [0, 1, 2, 3], ids=["vllm", "lightllm", "tgi", "sglang"])
def test_the_same_settings_for_all(setting: str, column: int) -> None:
    name = ("vllm", "lightllm", "tgi", "sglang")[column]
    assert words(name)[SAME[setting][column]] == str(getattr(settings(), setting))


def test_replicas_and_api_servers_within_one_server() -> None:
    """The module that starts one API server gives way to `vllm serve`, and images run that."""
    plain, several = (adapter("vllm").invoke(settings(**more)) for more in ({}, {"dp": 2, "api_servers": 3}))
    assert plain.module == () and "--data-parallel-size" not in plain.arguments
    assert several.module == ("-m", "vllm.entrypoints.cli.main", "serve")
    asked = words("vllm", dp=2, api_servers=3)
    assert (asked["--data-parallel-size"], asked["--api-server-count"]) == ("2", "3")
    assert "--api-server-count" not in words("vllm", dp=2) and words("vllm", api_servers=4)["--api-server-count"] == "4"
    assert words("sglang", dp=2)["--dp-size"] == "2" and "--dp-size" not in words("sglang")
    with pytest.raises(LaunchError, match=r"vLLM 0\.11\.0 is too old for --dp and --api-servers; take 0\.20 or newer"):
        adapter("vllm").invoke(settings(dp=2, version=(0, 11, 0)))


def test_token_ids_on_both_sides_by_version() -> None:
    """vLLM streams them from 0.20 on, and from 0.30 on has to be asked."""
    invoke = adapter("vllm-generate").invoke
    assert "--enable-scale-out" in invoke(settings(version=(0, 30, 0))).arguments
    assert "--enable-scale-out" in invoke(settings()).arguments
    assert "--enable-scale-out" not in invoke(settings(version=(0, 29, 0))).arguments
    assert "--enable-scale-out" not in words("vllm")
    with pytest.raises(
        LaunchError, match=r"from 0\.20 on, and this is 0\.19\.1; take a newer one, or --backend vllm\."
    ):
        invoke(settings(version=(0, 19, 1)))


def test_times_of_each_request_where_vllm_can_tell_them() -> None:
    assert "--enable-per-request-metrics" in words("vllm") and "--enable-per-request-metrics" in words(
        "vllm", version=(0, 25, 0)
    )
    assert "--enable-per-request-metrics" not in words("vllm", version=(0, 24, 0))


def test_the_same_memory_for_all() -> None:
    """TGI's KV cache gets the product of two numbers, of which one has a default of 0.9."""
    assert words("vllm")["--gpu-memory-utilization"] == words("lightllm")["--mem_fraction"] == "0.9"
    assert words("tgi")["--cuda-memory-fraction"] == "1"
    assert adapter("tgi").invoke(settings()).env["TGI_WIGGLE_ROOM"] == "0.9"


def test_all_of_the_memory() -> None:
    assert words("vllm", memory_ratio=1.0)["--gpu-memory-utilization"] == "1"
    for name in ("lightllm", "tgi", "sglang", "trtllm", "lmdeploy"):
        with pytest.raises(LaunchError, match=f"^{name} takes no --memory-ratio of 1; .*\\.$"):
            adapter(name).invoke(settings(memory_ratio=1.0))


@pytest.mark.parametrize(
    ("name", "flag", "word"),
    [("vllm", "--quantization", "fp8"), ("lightllm", "--quant_type", "fp8w8a8"), ("tgi", "--quantize", "fp8")],
)
def test_quantization_in_each_servers_words(name: str, flag: str, word: str) -> None:
    assert flag not in words(name)
    assert adapter(name).quantizations["fp8"] == word
    asked = words(name, quantization=word)
    assert asked[flag] == word
    assert ("--dtype" in asked) is (name == "vllm")  # TGI takes one of the two; LightLLM's is --data_type


def test_the_kv_cache_in_8_bit_where_a_server_needs_no_file_for_it() -> None:
    assert words("vllm", kv_cache_dtype=adapter("vllm").kv_cache_dtypes["fp8"])["--kv-cache-dtype"] == "fp8"
    assert words("tgi", kv_cache_dtype=adapter("tgi").kv_cache_dtypes["fp8"])["--kv-cache-dtype"] == "fp8_e4m3fn"
    assert not adapter("lightllm").kv_cache_dtypes  # its fp8 cache wants scales


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("vllm", "--max-num-batched-tokens"), ("lightllm", "--batch_max_tokens"), ("tgi", "--max-batch-prefill-tokens"),
    ],
)  # fmt: skip
def test_tokens_of_a_step(name: str, flag: str) -> None:
    assert flag not in words(name)
    assert words(name, max_batched_tokens=3000)[flag] == "3000"


def test_every_start_leaves_out_the_prefix_cache() -> None:
    assert "--no-enable-prefix-caching" in words("vllm")
    assert "--disable_dynamic_prompt_cache" in words("lightllm")
    assert adapter("tgi").invoke(settings()).env["PREFIX_CACHING"] == "0"


def test_none_refuses_a_burst() -> None:
    assert words("tgi")["--max-concurrent-requests"] == "1500"
    assert int(words("lightllm")["--running_max_req_size"] or 0) >= 1000
    assert words("lightllm")["--hypercorn_config"] == "/cfg/hypercorn.toml"
    assert "backlog = 4096" in adapter("lightllm").invoke(settings()).files["hypercorn.toml"]
    assert words("tgi")["--max-input-tokens"] == "4095"  # TGI wants it below the total


def test_llamacpp_has_a_cache_of_the_full_length_for_each_slot() -> None:
    asked = words("llamacpp", max_running=8, tp=1)
    assert (asked["--parallel"], asked["--ctx-size"]) == ("8", str(8 * 4096))
    assert int(asked["--threads-http"] or 0) > 1500  # each waiting connection has a thread
    assert "--no-cache-prompt" in asked and asked["--cache-ram"] == "0"
    assert "--no-cache-prompt" not in words("llamacpp", max_running=8, prefix_caching=True)
    assert words("llamacpp", max_running=8, max_batched_tokens=512)["--batch-size"] == "512"
    with pytest.raises(LaunchError, match="at most 256 requests in a batch; lower --max-running"):
        words("llamacpp", max_running=257)


def test_nobody_has_fewer_graphs_than_it_would_have_alone() -> None:
    """vLLM ends at 512, LightLLM at 256, TGI at 32; of those beyond the batch LightLLM and TGI have no use."""
    assert words("tgi")["--cuda-graphs"] == "1,2,4,8,16,32,64,128,256"
    assert words("lightllm")["--graph_max_batch_size"] == "256"
    assert not any("graph" in word for word in words("vllm"))
    assert words("tgi", max_running=6)["--cuda-graphs"] == "1,2,4,6"
    assert words("lightllm", max_running=6)["--graph_max_batch_size"] == "6"


def trtllm_options(**more: Any) -> Any:
    """What stands in the file that trtllm-serve is started with."""
    asked = adapter("trtllm").invoke(settings(**more))
    assert asked.arguments[0] == "/models/m" and words("trtllm", **more)["--config"] == "/cfg/trtllm.json"
    return json.loads(asked.files["trtllm.json"])


def test_trtllm_in_its_own_words() -> None:
    asked = words("trtllm", max_batched_tokens=3000)
    sizes = {"--tp_size": "2", "--max_batch_size": "1024", "--max_seq_len": "4096", "--max_num_tokens": "3000"}
    assert sizes.items() <= asked.items()
    plain = trtllm_options()
    assert plain["kv_cache_config"] == {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.9}
    assert plain["dtype"] == "float16" and plain["return_perf_metrics"]
    assert "load_format" not in plain and "allreduce_strategy" not in plain
    other = trtllm_options(dummy_weights=True, p2p=False, prefix_caching=True, kv_cache_dtype="fp8")
    assert (other["load_format"], other["allreduce_strategy"]) == ("dummy", "NCCL")
    assert other["kv_cache_config"]["enable_block_reuse"] and other["kv_cache_config"]["dtype"] == "fp8"
    assert adapter("trtllm").image_command == ("trtllm-serve",)


def test_lmdeploy_in_its_own_words() -> None:
    asked = words("lmdeploy", max_batched_tokens=3000, prefix_caching=True)
    said = {"--server-name": "0.0.0.0", "--server-port": "8000", "--session-len": "4096", "--max-batch-size": "1024",
            "--cache-max-entry-count": "0.9", "--max-prefill-token-num": "3000", "--model-name": "m"}  # fmt: skip
    assert said.items() <= asked.items() and "--enable-prefix-caching" in asked
    assert "--enable-prefix-caching" not in words("lmdeploy")


def test_sglang_in_its_own_words() -> None:
    asked = words("sglang", dummy_weights=True, max_batched_tokens=4096, kv_cache_dtype="fp8_e4m3", quantization="fp8")
    assert (asked["--load-format"], asked["--chunked-prefill-size"]) == ("dummy", "4096")
    assert (asked["--kv-cache-dtype"], asked["--quantization"]) == ("fp8_e4m3", "fp8")
    assert asked["--mem-fraction-static"] == "0.9" and asked["--sampling-defaults"] == "openai"
    assert "--disable-radix-cache" in asked and "--disable-radix-cache" not in words("sglang", prefix_caching=True)
    assert {"--enable-metrics", "--enable-cache-report"} <= asked.keys()
    assert asked["--cuda-graph-max-bs-decode"] == "256"
    assert words("sglang", version=(0, 5, 11), max_running=6)["--cuda-graph-max-bs"] == "6"
    env = adapter("sglang").invoke(settings()).env
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"  # a health check would be a request to the model
    assert adapter("sglang").ready_paths == ("/ready", "/health")
    assert adapter("sglang").image_command[0] == "python3"


@pytest.mark.parametrize(
    ("version", "port", "told"),
    [
        ((0, 5, 11), 59911, "49911"),
        ((0, 5, 15), 65535, "55535"),
        ((0, 5, 11), 55536, "45536"),
        ((0, 5, 11), 55535, None),
        ((0, 5, 16), 59911, None),  # from here on a port of gRPC is what starts that server
        (None, 59911, None),
    ],
)
def test_an_old_sglang_is_told_a_grpc_port_where_its_own_would_be_none(
    version: tuple[int, ...] | None, port: int, told: str | None
) -> None:
    assert adapter("sglang").invoke(settings(version=version, port=port)).env.get("SGLANG_GRPC_PORT") == told


def test_llamacpp_reads_peers_only_where_it_is_told_to() -> None:
    invoke = adapter("llamacpp").invoke
    assert invoke(settings(max_running=4)).env == {"GGML_CUDA_P2P": "1"}
    assert invoke(settings(max_running=4, p2p=False)).env == invoke(settings(max_running=4, tp=1)).env == {}


@pytest.mark.parametrize("name", [name for name in STARTED if name not in ("llamacpp", "vllm-generate")])
def test_p2p_off(name: str) -> None:
    on, off = adapter(name).invoke(settings()), adapter(name).invoke(settings(p2p=False))
    assert "NCCL_P2P_DISABLE" not in on.env
    own = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"} if name == "vllm" else {}
    assert off.env == {**on.env, "NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", **own}
    more = set(off.arguments) - set(on.arguments)
    assert (
        more
        == {
            "vllm": {
                "--disable-custom-all-reduce",
                "--compilation-config.pass_config.fuse_allreduce_rms=false",
            },
            "lightllm": {"--disable_symm_mem_allreduce", "--disable_flashinfer_allreduce"},
            "tgi": set(),
            "sglang": {"--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"},
            "lmdeploy": set(),
            "trtllm": set(),  # its file says it
        }[name]
    )


@pytest.mark.parametrize("name", STARTED)
def test_extra_arguments_come_last_and_none_holds_a_space(name: str) -> None:
    arguments = adapter(name).invoke(settings(extra=("--x", "y"), max_running=4)).arguments
    assert arguments[-2:] == ("--x", "y")
    assert not any(" " in word for word in arguments)


def test_older_versions() -> None:
    assert "--disable-log-requests" in words("vllm", version=(0, 11, 0))
    assert "--disable-log-requests" not in words("vllm", version=(0, 32, 0))
    old = words("lightllm", version=(1, 1, 0), p2p=False)
    assert {"--disable_dynamic_prompt_cache", "--disable_custom_allreduce"} <= set(old)
    unknown = {"--hypercorn_config", "--disable_symm_mem_allreduce", "--disable_chunked_prefill"}
    assert not unknown & set(old)
    oldest = words("lightllm", version=(1, 0, 1), p2p=False)
    assert not (unknown | {"--disable_dynamic_prompt_cache"}) & set(oldest)
    assert adapter("lightllm").invoke(settings(version=(1, 1, 0))).files == {}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("vllm/vllm-openai:v0.32.0", (0, 32, 0)), ("localhost:5000/lightllm:v1.1", (1, 1, 0)),
        ("0.32.0+cpu", (0, 32, 0)),
        ("repo/image:latest", None), ("repo/image", None), ("", None), ("repo/im@sha256:0a1", None),
        ("ghcr.io/modeltc/lightllm:v1.1.0@sha256:0a12.3", (1, 1, 0)), ("10.0.0.5/vllm/vllm-openai", None),
        ("10.0.0.5:5000/vllm/vllm-openai", None), ("10.0.0.5:5000/vllm:v0.32.0-cu130", (0, 32, 0)),
        ("im:cuda12.4", None), ("0.33\n", (0, 33, 0)), ("im:", None),
    ],
)  # fmt: skip
def test_version_in(text: str, version: tuple[int, ...] | None) -> None:
    assert version_in(text) == version


def test_dummy_weights() -> None:
    assert words("vllm", dummy_weights=True)["--load-format"] == "dummy"
    assert [name for name in STARTED if adapter(name).dummy_weights] == [
        "llamacpp",
        "sglang",
        "trtllm",
        "vllm",
        "vllm-generate",
    ]


@pytest.mark.parametrize("before", [None, b"{}", b'{"eos_token_id": 2, "top_p": 0.9}', b'{"eos_token_id": [2, 3]}'])
def test_tgi_without_an_end_token(before: bytes | None) -> None:
    after = json.loads(adapter("tgi").overlays["generation_config.json"](before))
    assert after == {**json.loads(before or b"{}"), "eos_token_id": [-1]}


@pytest.mark.parametrize(
    "broken", [b"[]", b"{", b"\xff", pytest.param(b'{"a": ' + b"[" * 100_000, id="nested without end")]
)
def test_a_broken_generation_config(broken: bytes) -> None:
    with pytest.raises(UNDECODABLE):
        adapter("tgi").overlays["generation_config.json"](broken)


# Lines as the servers write them (their own wording, cut to what identifies them), and what must be recognised.
LOGS = [
    ("vllm", "ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate\nEngineCore failed to start",
     "CUDA out of memory"),
    ("vllm", "ValueError: Free memory on device cuda:0 (3.1/23.6 GiB) on startup is less than desired GPU memory "
     "utilization (0.9, 21.3 GiB).", "already in use (3.1 of 23.6 GiB are free)"),
    ("vllm", "ValueError: max_num_batched_tokens (2048) must be greater than or equal to max_num_seqs (4096).",
     "lower --max-running to 2048"),
    ("vllm", "ValueError: User-specified max_model_len (4096) is greater than the derived max_model_len "
     "(max_position_embeddings=2048.0 or model_max_length=None in model's config.json).", "--max-model-len 2048 or"),
    ("vllm", "vllm: error: argument --max-num-seqs: invalid int value: 'x'",
     "refuses its arguments (argument --max-num-seqs: invalid int value: 'x')"),
    ("vllm", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
     "no room for the KV cache"),
    ("vllm", "ValueError: To serve at least one request with the model's max seq len (4096), (2.00 GiB KV cache is "
     "needed, which is larger than ... the estimated maximum model length is 3072.", "--max-model-len 3072"),
    ("vllm", "ValueError: World size (4) is larger than the number of available GPUs (2)", "fewer than 4 GPUs"),
    ("vllm", "RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 160 MiB required, 64 MiB "
     "free. Increase /dev/shm (e.g. --shm-size or --ipc=host).", "needs 160 MiB, 64 MiB are free"),
    ("vllm", "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "--p2p off"),
    ("vllm", "ERROR torch.OutOfMemoryError: CUDA out of memory.\nRuntimeError: NCCL error: remote process exited",
     "CUDA out of memory"),
    ("vllm", "usage: vllm serve\nvllm: error: unrecognized arguments: --frobnicate",
     "does not know an argument (unrecognized arguments: --frobnicate)"),
    ("vllm", "OSError: You are trying to access a gated repo.\n401 Client Error. Cannot access gated repo", "HF_TOKEN"),
    ("vllm", "RuntimeError: Found no NVIDIA driver on your system.", "no NVIDIA driver"),
    ("vllm", "OSError: [Errno 98] Address already in use", "--port"),
    ("lightllm", "FileNotFoundError: [Errno 2] No such file or directory: 'hypercorn'", "hypercorn, is not on"),
    ("lightllm", "check max len infer fail, you can try: 1.set --mem_fraction", "full length does not fit"),
    ("lightllm", "torch.OutOfMemoryError: CUDA out of memory.\nRuntimeError: Critical LightLLM submodule exited "
     "unexpectedly: name=router pid=9", "CUDA out of memory"),
    ("lightllm", "Critical LightLLM submodule exited unexpectedly: name=router pid=9 exitcode=1", "router"),
    ("lightllm", "WARNING Insufficient shared memory (SHM) available.Required: 2.1G\ntorch.OutOfMemoryError: CUDA out "
     "of memory.", "CUDA out of memory"),
    ("lightllm", "WARNING Insufficient shared memory (SHM) available.Required: 2.1G", "shared memory is too small"),
    ("lightllm", "init func start_router_process : init ok\ninit func start_detoken : boom", "start_detoken failed"),
    ("tgi", "RuntimeError: Not enough memory to handle 4146 prefill tokens. You need to decrease", "4146 prefill"),
    ("tgi", "Error: NotEnoughCUDADevices(\"`sharded` is true but only found 1 CUDA devices\")", "only found 1"),
    ("tgi", "Shard process was signaled to shutdown with signal 9", "host memory"),
    ("tgi", "error: unexpected argument '--frobnicate' found\n\nUsage: text-generation-launcher",
     "does not know an argument (unexpected argument '--frobnicate' found)"),
    ("tgi", "error: invalid value 'float32' for '--dtype <DTYPE>'\n  [possible values: float16, bfloat16]",
     "refuses its arguments (invalid value 'float32' for '--dtype <DTYPE>')"),
    ("llamacpp", "E llama_model_load: error loading model: check_tensor_dims: tensor 'blk.2.attn_norm.weight' not "
     "found\nE llama_model_load_from_file_impl: failed to load model", "lacks what its architecture needs (blk.2.attn"),
    ("llamacpp", "E llama_model_load: error loading model: check_tensor_dims: tensor 'blk.0.attn_k.weight' has wrong "
     "shape; expected     64,     64, got     64,     32,      1,      1", "tensor blk.0.attn_k.weight has another"),
    ("llamacpp", "ggml/src/ggml-cpu/ops.cpp:6355: GGML_ASSERT(n_dims % 2 == 0) failed",
     "cannot compute a model of this shape (n_dims % 2 == 0 does not hold)"),
    ("tgi", "WARN Not enough VRAM to run the model: Available: 20GB\nCUDA out of memory", "CUDA out of memory"),
    ("tgi", "Error: ArgumentValidation(\"`max_input_tokens` must be < `max_total_tokens`\")", "`max_input_tokens`"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "log", "told"), LOGS)
def test_failures_are_recognised(name: str, log: str, told: str) -> None:
    error = died(name, Exit(1), f"starting\n{log}\nmore lines\n", adapter(name).failures)
    assert told in str(error), str(error)
    assert str(error).startswith(f"{name} ended with exit code 1: ") and str(error).endswith(".")
    assert error.log.endswith("more lines")


# What the launcher of Text Generation Inference 3.3.6-dev0 (db931fcf), built from source, logged on a machine of two
# cores without a GPU, 2026-11-29; cut: without its arguments and what frames its tracebacks.
TGI_LOGS = Path(__file__).with_name("tgi_logs")


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("unknown_argument", "it does not know an argument (unexpected argument '--bogus' found)"),
        ("prefill_below_input",
         "it refuses its arguments: `max_batch_prefill_tokens` must be >= `max_input_tokens`. Given: 10 and 2047"),
        ("unknown_model_type", "there are no weights in /data/runs/f3/model"),
        ("not_on_the_hub", "the hub has no weights of nobody/nothing, or was not reached"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("gpus", [True, False])
def test_a_real_log_gives_its_true_cause(log: str, told: str, gpus: bool) -> None:
    text = (TGI_LOGS / f"{log}.log").read_text()
    error = died("tgi", Exit(1), text, adapter("tgi").failures, gpus=gpus)
    assert str(error).startswith(f"tgi ended with exit code 1: {told}; "), str(error)
    assert "\x1b" not in error.log


# vLLM 0.32 for the CPU, 2026-11-30; cut: without its routes and what followed its end.
READY = Path(__file__).with_name("vllm_ready.log")


@pytest.mark.parametrize(
    ("backend", "log", "warns"),
    [
        ("tgi", TGI_LOGS / "ready.log", "no NVIDIA driver"),
        ("tgi", TGI_LOGS / "tp2.log", "no NVIDIA driver"),
        ("vllm", READY, "Triton is not installed"),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else "",
)
def test_a_good_start_has_no_cause(backend: str, log: Path, warns: str) -> None:
    text = log.read_text()
    assert warns in text and "\x1b" not in excerpt(text)
    assert explain(text, adapter(backend).failures) is None


def test_a_warning_of_a_good_start_hides_no_cause() -> None:
    """Where the server fails later, what it also says when it lives is not why."""
    text = READY.read_text() + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    told = explain(text, adapter("vllm").failures)
    assert told is not None and told[0] == "CUDA out of memory"


def test_a_driver_is_no_reason_without_gpus() -> None:
    log = "RuntimeError: Found no NVIDIA driver on your system."
    assert explain(log, ()) is not None and explain(log, (), gpus=False) is None


# vLLM 0.32 for the CPU with an empty libnuma.so.1, cut: the lines in between told of no failure.
NESTED = Path(__file__).with_name("vllm_without_libnuma.log").read_text()


def test_the_innermost_process_tells_why_a_server_died() -> None:
    error = died("vllm", Exit(1), NESTED, ())
    told = "AttributeError: '_OpNamespace' '_C' object has no attribute 'init_cpu_memory_env'"
    assert str(error) == f"vllm ended with exit code 1: {told}; read its log."
    first, _, end = error.log.partition("\n...\n")
    assert first.splitlines()[-1] == told
    assert "torch.ops._C.init_cpu_memory_env([memory_node])" in first and "EngineCore" not in first
    assert end.splitlines()[-1].startswith("RuntimeError: Engine core initialization failed.")
    assert len(error.log.splitlines()) <= 21


def test_a_library_that_vllm_lacks() -> None:
    error = died("vllm", Exit(1), NESTED, adapter("vllm").failures)
    assert "it cannot load libnuma.so.1; install that library (on Debian, libnuma.so.1 is in libnuma1)" in str(error)
    assert "init_cpu_memory_env" in error.log


TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    main()\n'


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("", ""),
        ("no error\nat all", ""),
        (TRACEBACK, ""),  # cut off
        (f"start\n{TRACEBACK}KeyError: 'x'\nmore", "KeyError: 'x'"),
        (f"{TRACEBACK}KeyboardInterrupt\n", "KeyboardInterrupt"),
        (f"{TRACEBACK}a.b.OddError: it\n  goes on\n\n  here\nINFO later", "a.b.OddError: it goes on"),
        (f"{TRACEBACK}ValueError: first\n{TRACEBACK}RuntimeError: second\n", "ValueError: first"),
        ("(W pid=2) Traceback (most recent call last):\n(E pid=1) OSError: other\n(W pid=2)   File\n(W pid=2) Own: it.",
         "Own: it"),
        (f"{TRACEBACK}(E pid=1) OSError: other\nINFO:     up\nTypeError: mine", "TypeError: mine"),
        (f"{TRACEBACK}ValueError: \x1b[31mred \x1b[0m\x1b]", "ValueError: red \\x1b]"),
        (f"{TRACEBACK}ValueError: {'x' * 1000}", f"ValueError: {'x' * 285}..."),
    ],
)  # fmt: skip
def test_first_error(log: str, told: str) -> None:
    assert first_error(log) == told


def test_a_log_that_ends_with_its_first_error_is_shown_from_its_end() -> None:
    lines = [f"line {number}" for number in range(30)]
    log = "\n".join([*lines, TRACEBACK + "KeyError: 'x'"])
    assert excerpt(log) == "\n".join(log.splitlines()[-20:])
    assert excerpt("\n".join(lines)) == "\n".join(lines[-20:])  # there is none


def test_nothing_recognised() -> None:
    assert explain("all is well", ()) is None
    assert str(died("vllm", Exit(7), "", ())) == "vllm ended with exit code 7; read its log."
    assert "signal 9" in str(died("vllm", Exit(-9), "", ()))
    assert "host memory" in str(died("vllm", Exit(137, oom_killed=True), "", ()))


# Made up, in the shape of SGLang 0.5.11's logs: a traceback that the server lived through, the scheduler's own, and
# what the main process says of its end.
LIVED = """[2026-11-30 01:14:07] Can not initialize Responses, error: Traceback (most recent call last):
  File "http_server.py", line 366, in lifespan
ModuleNotFoundError: No module named 'harmony'

"""
SCHEDULER = """[2026-11-30 01:14:08 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 3906, in run_scheduler_process
    scheduler = Scheduler(
                ^^^^^^^^^^
NotImplementedError: no kernel for torch.float16

[2026-11-30 01:14:08] Received sigquit from a child process.
"""
GONE = """Traceback (most recent call last):
  File "engine.py", line 1241, in _wait_for_scheduler_ready
    data = scheduler_pipe_readers[i].recv()
EOFError

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "launch_server.py", line 60, in <module>
RuntimeError: Rank 0 scheduler died during initialization (exit code: 1). See `dmesg`.
"""


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (SCHEDULER + GONE, "NotImplementedError: no kernel for torch.float16"),
        (LIVED + SCHEDULER, "NotImplementedError: no kernel for torch.float16"),
        (LIVED + GONE, "RuntimeError: Rank 0 scheduler died during initialization (exit code: 1). See `dmesg`"),
        (f"{TRACEBACK}ImportError: x\n{GONE}", "ImportError: x"),  # as multiprocessing tells of a child
        (f"{GONE}{TRACEBACK}OSError: later", "OSError: later"),
        (LIVED, ""),
    ],
)
def test_the_end_of_a_scheduler_tells_more_than_that_it_is_gone(log: str, told: str) -> None:
    error = died("sglang", Exit(1), log, adapter("sglang").failures)
    assert str(error) == f"sglang ended with exit code 1{told and ': '}{told}; read its log."


def test_a_person_sees_the_schedulers_own_traceback() -> None:
    shown = excerpt(SCHEDULER + "more\n" * 30 + GONE).splitlines()
    assert shown[0] == "Traceback (most recent call last):" and shown[4].startswith("NotImplementedError")
    assert shown[5] == "..." and shown[-1].startswith("RuntimeError: Rank 0")


@pytest.mark.parametrize(
    "name", [name for name in STARTED if adapter(name).capacity is not None and name != "vllm-generate"]
)
def test_capacity_lines(name: str) -> None:
    import re

    line = {
        "vllm": "INFO GPU KV cache size: 123,456 tokens, Maximum concurrency for 4,096 tokens per request: 30.14x",
        "lightllm": "INFO 123456 is the profiled max_total_token_num with the mem_fraction 0.9",
        "sglang": "max_total_num_tokens=123456, chunked_prefill_size=8192, max_prefill_tokens=16384, context_len=8192",
        "tgi": "INFO text_generation_router: Setting max batch total tokens to 123456",
    }[name]
    found = re.search(adapter(name).capacity or "", line)
    assert found is not None and found.group(1).replace(",", "") == "123456"


def test_vllm_with_its_profiler() -> None:
    told = json.loads(words("vllm", trace_dir="/t")["--profiler-config"] or "")
    assert told["profiler"] == "torch" and told["torch_profiler_dir"] == "/t" and told["ignore_frontend"]
    old = adapter("vllm").invoke(settings(trace_dir="/t", version=(0, 12, 0)))
    assert old.env["VLLM_TORCH_PROFILER_DIR"] == "/t" and "--profiler-config" not in old.arguments
    assert "--profiler-config" not in words("vllm")


def test_lightllm_and_sglang_with_their_profilers() -> None:
    traced = adapter("sglang").invoke(settings(trace_dir="/t")).env
    assert (traced["SGLANG_TORCH_PROFILER_DIR"], traced["SGLANG_PROFILE_WITH_STACK"]) == ("/t", "false")
    assert words("lightllm", trace_dir="/t")["--enable_profiling"] == "torch_profiler"
    assert adapter("lightllm").invoke(settings(trace_dir="/t")).env["LIGHTLLM_TRACE_DIR"] == "/t"
    with pytest.raises(LaunchError, match="newer --image"):
        adapter("lightllm").invoke(settings(trace_dir="/t", version=(1, 1, 0)))
