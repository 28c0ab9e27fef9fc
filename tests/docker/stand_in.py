"""Runs inside the test images: takes a real server's command line as strictly as that server does, says what it was
given, and then is the embedded server in that server's dialect.

It prints one line `RECORDED {json}`: `argv` without the program, `env` without secrets, `secrets` (name -> length and
the begin of its SHA-256), `limits` and `somaxconn` as the process has them. STAND_IN in the environment makes it fail:

    exit:CODE         ends at once             say:TEXT    prints TEXT, ends with 1     hang        never listens
    die:SECONDS:CODE  serves, then ends        stubborn    serves, ignores SIGTERM      tell        prints the secret
    hungry            takes memory without end, once it gets SIGUSR1

Needs nothing outside the image but `python`; the flags are those of vLLM 0.32, LightLLM 1.2 and TGI 3.3.7.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
TEXT, WHOLE, PART, SWITCH = str, int, float, None

# Flag -> the type of its value, the values that there are, or SWITCH for one that takes none.
Flags = dict[str, Callable[[str], Any] | tuple[str, ...] | None]

VLLM: Flags = {
    "--model": TEXT, "--tokenizer": TEXT, "--tokenizer-mode": TEXT, "--skip-tokenizer-init": SWITCH,
    "--tensor-parallel-size": WHOLE, "--pipeline-parallel-size": WHOLE, "--max-model-len": WHOLE,
    "--dtype": ("auto", "half", "float16", "bfloat16", "float", "float32"), "--max-num-seqs": WHOLE,
    "--max-num-batched-tokens": WHOLE, "--gpu-memory-utilization": PART, "--kv-cache-memory-bytes": WHOLE,
    "--kv-cache-dtype": TEXT, "--quantization": TEXT, "--enable-prefix-caching": SWITCH,
    "--no-enable-prefix-caching": SWITCH, "--enable-chunked-prefill": SWITCH, "--no-enable-chunked-prefill": SWITCH,
    "--load-format": TEXT, "--enforce-eager": SWITCH, "--max-cudagraph-capture-size": WHOLE,
    "--generation-config": TEXT, "--host": TEXT, "--port": WHOLE, "--disable-custom-all-reduce": SWITCH,
    "--distributed-executor-backend": ("mp", "ray", "uni", "external_launcher"), "--master-port": WHOLE,
    "--disable-log-stats": SWITCH, "--enable-log-requests": SWITCH, "--disable-uvicorn-access-log": SWITCH,
    "--disable-access-log-for-endpoints": TEXT, "--uvicorn-log-level":
    ("critical", "error", "warning", "info", "debug", "trace"), "--stream-interval": WHOLE,
    "--max-num-queued-reqs": WHOLE, "--max-num-queued-tokens": WHOLE, "--api-server-count": WHOLE, "--seed": WHOLE,
    "--enable-per-request-metrics": SWITCH, "--data-parallel-size": WHOLE,
    "--served-model-name": TEXT, "--trust-remote-code": SWITCH, "--api-key": TEXT, "--shutdown-timeout": WHOLE,
    "--optimization-level": TEXT, "--performance-mode": TEXT, "--download-dir": TEXT, "--revision": TEXT,
}  # fmt: skip
LIGHTLLM: Flags = {
    "--model_dir": TEXT, "--model_name": TEXT, "--tokenizer_mode": ("fast", "slow", "auto"),
    "--trust_remote_code": SWITCH, "--data_type": ("fp16", "float16", "bf16", "bfloat16", "fp32", "float32"),
    "--eos_id": WHOLE, "--host": TEXT, "--port": WHOLE, "--httpserver_workers": WHOLE, "--hypercorn_config": TEXT,
    "--tp": WHOLE, "--nccl_host": TEXT, "--nccl_port": WHOLE, "--mem_fraction": PART, "--max_total_token_num": WHOLE,
    "--max_req_total_len": WHOLE, "--batch_max_tokens": WHOLE, "--running_max_req_size": WHOLE,
    "--chunked_prefill_size": WHOLE, "--disable_chunked_prefill": SWITCH, "--disable_dynamic_prompt_cache": SWITCH,
    "--llm_kv_type": ("None", "int8kv", "int4kv", "fp8kv_sph", "fp8kv_spt", "fp8kv_dsa"),
    "--llm_kv_quant_group_size": WHOLE, "--quant_type": TEXT, "--disable_cudagraph": SWITCH,
    "--graph_max_batch_size": WHOLE, "--graph_max_len_in_batch": WHOLE, "--enable_prefill_cudagraph": SWITCH,
    "--router_token_ratio": PART, "--router_max_wait_tokens": WHOLE, "--disable_symm_mem_allreduce": SWITCH,
    "--disable_flashinfer_allreduce": SWITCH, "--use_tgi_api": SWITCH, "--detail_log": SWITCH,
    "--health_monitor": SWITCH, "--disable_shm_warning": SWITCH,
}  # fmt: skip
TGI: Flags = {
    "--model-id": TEXT, "--revision": TEXT, "--num-shard": WHOLE, "--sharded": ("true", "false"),
    "--dtype": ("float16", "bfloat16"), "--quantize": TEXT, "--kv-cache-dtype": ("fp8_e4m3fn", "fp8_e5m2"),
    "--trust-remote-code": SWITCH, "--max-concurrent-requests": WHOLE, "--max-input-tokens": WHOLE,
    "--max-total-tokens": WHOLE, "--max-batch-prefill-tokens": WHOLE, "--max-batch-total-tokens": WHOLE,
    "--max-batch-size": WHOLE, "--waiting-served-ratio": PART, "--max-waiting-tokens": WHOLE, "--cuda-graphs": TEXT,
    "--cuda-memory-fraction": PART, "--hostname": TEXT, "--port": WHOLE, "--prometheus-port": WHOLE,
    "--master-port": WHOLE, "--shard-uds-path": TEXT, "--validation-workers": WHOLE,
    "--max-client-batch-size": WHOLE, "--payload-limit": WHOLE, "--disable-grammar-support": SWITCH,
    "--usage-stats": ("on", "off", "no-stack"), "--json-output": SWITCH, "--graceful-termination-timeout": WHOLE,
    "--max-best-of": WHOLE, "--enable-prefill-logprobs": SWITCH, "--disable-custom-kernels": SWITCH,
    "--max-stop-sequences": WHOLE, "--max-top-n-tokens": WHOLE,
}  # fmt: skip


class _Argparse(argparse.ArgumentParser):
    """vLLM's and LightLLM's way to refuse: usage and one line, exit code 2."""


class _Clap(argparse.ArgumentParser):
    """TGI's way, which is written in Rust."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(f"unexpected argument '{unknown[0]}' found")
        return found

    def error(self, message: str) -> NoReturn:
        self._refuse(message)

    def _refuse(self, message: str) -> NoReturn:
        print(f"error: {message}\n\nUsage: {self.prog} [OPTIONS]\n\nFor more information, try '--help'.",
              file=sys.stderr)  # fmt: skip
        raise SystemExit(2)


def options(parser: argparse.ArgumentParser, flags: Flags, argv: Sequence[str]) -> dict[str, Any]:
    """The values given, by flag name without dashes in front and with "_" inside. Exits with 2 like the server."""
    for flag, kind in flags.items():
        if kind is SWITCH:
            parser.add_argument(flag, action="store_true")
        elif isinstance(kind, tuple):
            parser.add_argument(flag, choices=kind)
        else:
            parser.add_argument(flag, type=kind)
    return {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}


def record(argv: Sequence[str]) -> None:
    secrets = {
        name: {"length": len(value), "sha256": hashlib.sha256(value.encode()).hexdigest()[:12]}
        for name in SECRETS
        if (value := os.environ.get(name)) is not None
    }
    limits = {
        name: resource.getrlimit(number)
        for name, number in (
            ("memlock", resource.RLIMIT_MEMLOCK),
            ("stack", resource.RLIMIT_STACK),
            ("nofile", resource.RLIMIT_NOFILE),
        )
    }
    somaxconn = int(Path("/proc/sys/net/core/somaxconn").read_text())
    env = {name: value for name, value in os.environ.items() if name not in SECRETS}
    facts = {"argv": list(argv), "env": env, "secrets": secrets, "limits": limits, "somaxconn": somaxconn}
    print("RECORDED " + json.dumps(facts), flush=True)


def fail(behaviour: str) -> None:
    """The behaviours that never serve."""
    kind, _, rest = behaviour.partition(":")
    if kind == "exit":
        raise SystemExit(int(rest))
    if kind == "say":
        print(rest, file=sys.stderr)
        raise SystemExit(1)
    if kind == "hang":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
        print("it hangs", flush=True)
        while True:
            time.sleep(3600)
    if kind == "hungry":  # once told: the test sets the limit first
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        print("it waits", flush=True)
        signal.sigwait({signal.SIGUSR1})
        taken = []
        while True:
            taken.append(b"x" * (1 << 20))
    if kind == "tell":
        print(f"the token is {os.environ.get('HF_TOKEN')}", flush=True)


def serve(behaviour: str, dialect: str, host: str, port: int, model: str, max_model_len: int) -> NoReturn:
    command = [sys.executable, "-m", "servers", "--dialect", dialect, "--host", host, "--port", str(port),
               "--model", model, "--max-model-len", str(max_model_len),
               "--ttft-ms", "100", "--itl-ms", "20"]  # fmt: skip
    kind, _, rest = behaviour.partition(":")
    if kind == "die":
        after_s, _, code = rest.partition(":")
        threading.Timer(float(after_s), lambda: os._exit(int(code or 1))).start()
    elif kind == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        os.execv(command[0], command)  # gets the signals itself, as the real servers do
    raise SystemExit(subprocess.run(command).returncode)


def main(kind: str, argv: Sequence[str]) -> NoReturn:
    record(argv)
    behaviour = os.environ.get("STAND_IN", "")
    if kind == "vllm":
        parser = _Argparse(prog="vllm", allow_abbrev=False)
        parser.add_argument("model_tag", nargs="?")
        given = options(parser, VLLM, argv)
        model = given.get("model", given.get("model_tag", "Qwen/Qwen3-0.6B"))
        name, length = given.get("served_model_name", model), given.get("max_model_len", 4096)
        host, port = given.get("host", "0.0.0.0"), given.get("port", 8000)
        capacity = f"GPU KV cache size: 123,456 tokens, Maximum concurrency for {length:,} tokens per request: 30.14x"
    elif kind == "lightllm":
        given = options(_Argparse(prog="api_server.py", allow_abbrev=False), LIGHTLLM, argv)
        name, length = given.get("model_name", "default_model_name"), given.get("max_req_total_len", 16384)
        host, port = given.get("host", "127.0.0.1"), given.get("port", 8000)
        fraction = given.get("mem_fraction", 0.8)
        capacity = f"123456 is the profiled max_total_token_num with the mem_fraction {fraction}"
    else:
        given = options(_Clap(prog="text-generation-launcher", allow_abbrev=False), TGI, argv)
        name, length = given.get("model_id", "bigscience/bloom-560m"), given.get("max_total_tokens", 4096)
        host = given.get("hostname", "0.0.0.0")
        port = given.get("port", int(os.environ.get("PORT", "3000")))
        capacity = "Setting max batch total tokens to 123456"
    fail(behaviour)
    print(capacity, flush=True)
    serve(behaviour, kind, host, port, name, length)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
