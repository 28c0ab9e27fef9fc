"""A real vLLM on the CPU, serving the tiny random Llama of tiny_model.py on 127.0.0.1.

    python tests/vllm/serve.py [PORT]      until Ctrl-C; its log is in build/vllm/server.log

Needs .venv-vllm (install.sh). Prefix caching is off, so that every prompt token is really computed, unless a test is of
the cache; then replies tell too what came from it. vLLM takes every
core there is, so it runs at a lower priority: a client beside it would measure its own wait for a core otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".venv-vllm/bin/python"
START_TIMEOUT_S = 300
BLOCK_TOKENS = 32  # of the cache, where it is on: the least that vLLM's attention on CPUs takes (16 on GPUs)
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmError(Exception):
    """vLLM is not there or does not start. One sentence, and the end of its log."""


def steps_of(driver: Path, workloads: Sequence[dict[str, Any]], *arguments: str) -> dict[str, list[dict[str, Any]]]:
    """What a real scheduler does with each workload, step by step, by the workload's name: a driver runs it in
    .venv-vllm, which holds vLLM's classes and SGLang's."""
    if not (PYTHON.parent.parent / "installed").exists():
        raise VllmError(f"{driver.name} needs .venv-vllm, which is not installed; run tests/vllm/install.sh.")
    done = subprocess.run(
        [str(PYTHON), str(driver), *arguments], input=json.dumps(workloads), env={**os.environ, **ENVIRONMENT},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    steps: dict[str, list[dict[str, Any]]] = {workload["name"]: [] for workload in workloads}
    for line in done.stdout.splitlines():
        step = json.loads(line)
        steps[step.pop("workload")].append(step)
    return steps


def log_end(directory: Path) -> str:
    return (directory / "server.log").read_text(errors="replace")[-4000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def real_vllm(directory: Path, port: int = 0, *, prefix_caching: bool = False) -> Iterator[str]:
    """Serves while the block lasts; gives the URL. The model is left in `directory`/tiny, the log beside it."""
    if not (PYTHON.parent.parent / "installed").exists():
        raise VllmError("vLLM is not installed; run tests/vllm/install.sh.")
    tiny_model.write(directory / "tiny")
    url = f"http://127.0.0.1:{port or free_port()}"
    caching = ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--block-size", str(BLOCK_TOKENS)]
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "nice", "-n", "10", str(PYTHON), "-m", "vllm.entrypoints.openai.api_server",
                "--model", str(directory / "tiny"), "--served-model-name", "tiny", "--load-format", "dummy",
                "--dtype", "bfloat16", "--disable-uvicorn-access-log",
                "--max-model-len", str(tiny_model.MAX_MODEL_LEN), "--max-num-seqs", "256",
                "--host", "127.0.0.1", "--port", url.rpartition(":")[2],
                "--enforce-eager", *(caching if prefix_caching else ["--no-enable-prefix-caching"]),
            ],
            env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=subprocess.STDOUT, cwd=directory,
            start_new_session=True,  # Ctrl-C is for the parent, which then ends it in good order
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise VllmError(f"vLLM did not start (exit code {process.poll()}):\n{log_end(directory)}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that vLLM is ended too
    try:
        with real_vllm(ROOT / "build/vllm", int(sys.argv[1]) if len(sys.argv) > 1 else 0) as listening:
            print(listening, flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600)
    except VllmError as error:
        sys.exit(f"serve.py: {error}")
