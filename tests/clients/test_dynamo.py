"""A real Dynamo: its frontend, and two workers behind it that are its mock engine of vLLM, or of SGLang, without GPUs.
Its own counters are the second opinion on what the client counted."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import program, summed_samples
from tests.support.waiting import free_ports, until
from tests.vllm.tiny_model import write as write_tiny_model

PYTHON = Path(__file__).parents[2] / ".venv-dynamo" / "bin" / "python"
REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 40, 64, 16
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


@contextlib.contextmanager
def dynamo(engine: str, directory: Path) -> Iterator[str]:
    """The frontend's address, once it lists the model. Everything it opens is on this machine alone."""
    write_tiny_model(directory / "tiny")
    (directory / "discovery").mkdir()
    local = ("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST")
    env = {"DYN_FILE_KV": str(directory / "discovery"), "HF_HUB_OFFLINE": "1", **dict.fromkeys(local, "127.0.0.1")}
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    front = [str(PYTHON), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    workers = [str(PYTHON), "-m", "dynamo.mocker", "--model-path", str(directory / "tiny"), "--model-name", "tiny"]
    workers += ["--engine-type", engine, "--num-workers", "2", "--num-gpu-blocks-override", "4096", *PLANES]
    with contextlib.ExitStack() as started:
        started.enter_context(program([*front, "--router-mode", "round-robin", *PLANES], url, "/live", env))
        started.enter_context(program(workers, url, "/live", env))
        until(lambda: b"tiny" in urllib.request.urlopen(f"{url}/v1/models", timeout=5).read(), "Dynamo's worker")
        yield url


def counted(url: str) -> dict[str, float]:
    """Samples of the frontend's metrics by their names, label sets added up."""
    return summed_samples(url, r"^dynamo_frontend_(\w+?)(?:\{[^}]*\})? (\S+)$", timeout_s=10)


def run(url: str, out: Path, *more: str, backend: str = "dynamo") -> dict[str, Any]:
    words = [sys.executable, "-m", "loadgen", "run", "--url", url, "--backend", backend, "--no-calibrate"]
    words += ["--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS), "--out", str(out), *more]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 4), done.stderr[-3000:]  # 4: Dynamo delays ACKs, and so may this machine the client
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


@pytest.mark.clients
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_dynamo_counts_what_the_client_counts(engine: str, tmp_path: Path) -> None:
    with dynamo(engine, tmp_path) as url:
        before = counted(url)
        report = run(url, tmp_path / "loop", "--requests", str(REQUESTS), "--concurrency", "4", "--warmup", "0")
        after = counted(url)
        sessions = run(url, tmp_path / "sessions", "--sessions", "5", "--turns", "3", "--concurrency", "2", "--warmup",
                       "0", "--think-time", "0.01", "--session-header", "x-dynamo-session-id",
                       backend="openai")  # fmt: skip
        code = subprocess.run(
            [sys.executable, "-m", "loadgen", "run", "--url", url, "--backend", "vllm", "--out", str(tmp_path / "no")],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert report["requests"]["ok"] == REQUESTS
    assert report["tokens"] == {"prompt": REQUESTS * INPUT_TOKENS, "output": REQUESTS * OUTPUT_TOKENS}
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["output_tokens_total"] == REQUESTS * OUTPUT_TOKENS + 1  # and a first request of one token
    assert grown["input_sequence_tokens_sum"] == REQUESTS * INPUT_TOKENS + 4
    assert report["server"]["generation_tokens"] >= REQUESTS * OUTPUT_TOKENS
    # its clock begins when the request has come, and ends before the reply is on the wire
    assert report["metrics"]["e2el_ms"]["mean"] >= report["server"]["e2el_mean_ms"] - 5
    assert sessions["requests"]["ok"] == 15  # as text: it returns no ids of which a next prompt could be made
    assert code.returncode == 3 and "use --backend openai" in code.stderr
