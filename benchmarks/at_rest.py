"""One request at rest on vLLM, taken apart: where the time from its first byte to its first token goes.

    python benchmarks/at_rest.py OUT.json            # 7B with 8 KV heads, random weights, on this machine's GPU
    python benchmarks/at_rest.py OUT.json --tiny     # a rehearsal with a model of two small layers

Starts a vLLM of its own (it must be installed for the python that runs this), with a plugin that stamps a few functions
of vLLM's processes as they begin and end: one monotonic clock for all processes of a machine. What the GPU does is
stamped with CUDA events, whose times are moved to that clock when the server rests. A stamp costs about a microsecond.
Requests come one by one, each after a rest. OUT.json holds every stamp of every request, in nanoseconds after its
first byte was sent; the medians are printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

PROMPTS = (64, 512, 1024, 2048)
REPEATS = 12
OUTPUT_TOKENS = 24
REST_S = 0.4
STAMPS = "AT_REST_STAMPS"  # the directory of the stamps: that it is set makes the plugin stamp
MARKS = {  # name: (module, function, whether it runs on the GPU)
    "http": ("uvicorn.protocols.http.httptools_impl", "HttpToolsProtocol.data_received", False),
    "handler": ("vllm.entrypoints.openai.completion.serving", "OpenAIServingCompletion.create_completion", False),
    "inputs": ("vllm.v1.engine.input_processor", "InputProcessor.process_inputs", False),
    "to_engine": ("vllm.v1.engine.core_client", "AsyncMPClient.add_request_async", False),
    "in_engine": ("vllm.v1.engine.core", "EngineCore.preprocess_add_request", False),
    "add": ("vllm.v1.engine.core", "EngineCore.add_request", False),
    "schedule": ("vllm.v1.core.sched.scheduler", "Scheduler.schedule", False),
    "execute": ("vllm.v1.worker.gpu_worker", "Worker.execute_model", True),
    "sample": ("vllm.v1.worker.gpu_worker", "Worker.sample_tokens", True),
    "update": ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", False),
    "outputs": ("vllm.v1.engine.output_processor", "OutputProcessor.process_outputs", False),
    "send": ("uvicorn.protocols.http.httptools_impl", "RequestResponseCycle.send", False),
}
MODEL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
    "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "sliding_window": None, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}  # fmt: skip
TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


class Stamps:
    """The stamps of one process of the server, written to a file of its own while the process rests."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{os.getpid()}.jsonl"
        self._stamps: list[tuple[str, int]] = []
        self._events: list[tuple[str, Any]] = []
        self._last = time.monotonic_ns()
        threading.Thread(target=self._write, daemon=True).start()

    def wrap(self, name: str, function: Callable[..., Any], gpu: bool) -> Callable[..., Any]:
        """A coroutine ends as soon as it is made, so only its beginning means anything."""

        @wraps(function)
        def stamped(*args: Any, **kwargs: Any) -> Any:
            self._stamp(f"{name}.begins")
            if gpu:
                self._on_gpu(f"{name}.gpu_begins")
            try:
                return function(*args, **kwargs)
            finally:
                if gpu:
                    self._on_gpu(f"{name}.gpu_ends")
                self._stamp(f"{name}.ends")

        return stamped

    def _stamp(self, name: str) -> None:
        self._last = time.monotonic_ns()
        self._stamps.append((name, self._last))

    def _on_gpu(self, name: str) -> None:
        torch = sys.modules["torch"]
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((name, event))

    def _write(self) -> None:
        with self._path.open("w") as file:
            while True:
                time.sleep(REST_S / 8)
                if time.monotonic_ns() - self._last < REST_S / 2 * 1e9:
                    continue
                stamps, self._stamps = self._stamps, []
                events, self._events = self._events, []
                if events:
                    torch = sys.modules["torch"]
                    now = torch.cuda.Event(enable_timing=True)
                    now.record()
                    now.synchronize()
                    now_ns = time.monotonic_ns()
                    stamps += [(name, now_ns - int(event.elapsed_time(now) * 1e6)) for name, event in events]
                for stamp in stamps:
                    file.write(json.dumps(stamp) + "\n")
                file.flush()


def plugin() -> None:
    """vLLM calls this in each of its processes."""
    if STAMPS not in os.environ or getattr(plugin, "stamps", None):
        return
    plugin.stamps = stamps = Stamps(Path(os.environ[STAMPS]))  # type: ignore[attr-defined]
    for name, (module, where, gpu) in MARKS.items():
        try:
            of, function = where.split(".")
            owner = getattr(importlib.import_module(module), of)
            setattr(owner, function, stamps.wrap(name, getattr(owner, function), gpu))
        except (ImportError, AttributeError) as error:
            print(f"at_rest: {name} is not stamped, {error}", file=sys.stderr)


def prepare(directory: Path, tiny: bool) -> Path:
    """The model's directory. Beside it, a distribution that tells vLLM of the plugin."""
    from tokenizers import Tokenizer, models

    about = directory / "at_rest-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: at-rest\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nat_rest = at_rest:plugin\n")
    model = directory / "model"
    model.mkdir()
    config = MODEL | (TINY if tiny else {})
    (model / "config.json").write_text(json.dumps(config))
    words = {f"w{index}": index for index in range(int(str(config["vocab_size"])))}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(model / "tokenizer.json"))
    about_tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2"}
    (model / "tokenizer_config.json").write_text(json.dumps(about_tokenizer))
    return model


def start(directory: Path, model: Path, port: int, extra: list[str]) -> subprocess.Popen[bytes]:
    paths = [str(directory), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    (directory / "stamps").mkdir()
    arguments = [
        "--model", str(model), "--served-model-name", "m", "--load-format", "dummy", "--dtype", "bfloat16",
        "--max-model-len", "4096", "--no-enable-prefix-caching", "--port", str(port), "--host", "127.0.0.1",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments, *extra],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), STAMPS: str(directory / "stamps")},
        stdout=(directory / "server.log").open("wb"),
        stderr=subprocess.STDOUT,
    )


def wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    while True:
        if server.poll() is not None:
            sys.exit(f"vLLM ended with {server.returncode}; its log ends with:\n{log.read_text()[-4000:]}")
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: at-rest\r\nConnection: close\r\n\r\n")
                if b"200" in connection.recv(100):
                    return
        except OSError:
            time.sleep(0.5)


def request(connection: socket.socket, prompt_tokens: int, number: int) -> tuple[int, list[int]]:
    """When its first byte was sent, and when each read came that held an event of the reply."""
    prompt = [(number * 7919 + index * 104729) % 31000 + 500 for index in range(prompt_tokens)]
    body = json.dumps(
        {
            "model": "m",
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: at-rest",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    message = "\r\n".join((*head, "", "")).encode() + body
    sent_ns = time.monotonic_ns()
    connection.sendall(message)
    reads, everything = [], b""
    while not everything.endswith(b"0\r\n\r\n"):
        read = connection.recv(1 << 16)
        now_ns = time.monotonic_ns()
        if not read:
            sys.exit(f"vLLM closed the connection: {everything[-500:].decode(errors='replace')}")
        everything += read
        if b"data: {" in read:
            reads.append(now_ns)
    if b" 200 " not in everything[:20]:
        sys.exit(f"vLLM refused the request: {everything[-500:].decode(errors='replace')}")
    return sent_ns, reads


def measured(port: int, directory: Path) -> list[dict[str, Any]]:
    """One line a request. The first of each length does not count."""
    requests = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for prompt_tokens in PROMPTS:
            for number in range(REPEATS + 1):
                time.sleep(REST_S)
                sent_ns, reads = request(connection, prompt_tokens, number)
                if number:
                    requests.append({"prompt_tokens": prompt_tokens, "sent_ns": sent_ns, "reads_ns": reads})
    time.sleep(3 * REST_S)
    stamps = [json.loads(line) for path in (directory / "stamps").iterdir() for line in path.read_text().splitlines()]
    for each in requests:
        sent_ns, end_ns = each["sent_ns"], each["reads_ns"][-1]
        each["reads_ns"] = [at - sent_ns for at in each["reads_ns"]]
        within = sorted((at - sent_ns, name) for name, at in stamps if sent_ns <= at <= end_ns)
        each["stamps_ns"] = [[name, at] for at, name in within]
        del each["sent_ns"]
    return requests


def summary(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By length of prompt, in milliseconds after the first byte: the median of each stamp's first time, until the first
    token was read; the first token, and the mean time of those after it."""
    lines = []
    for prompt_tokens in sorted({each["prompt_tokens"] for each in requests}):
        chosen = [each for each in requests if each["prompt_tokens"] == prompt_tokens]
        first: dict[str, list[int]] = {}
        for each in chosen:
            seen: set[str] = set()
            for name, at in each["stamps_ns"]:
                if name not in seen and at <= each["reads_ns"][0]:
                    seen.add(name)
                    first.setdefault(name, []).append(at)
        steps = {name: statistics.median(times) / 1e6 for name, times in first.items() if len(times) > len(chosen) / 2}
        tpot = [(each["reads_ns"][-1] - each["reads_ns"][0]) / (OUTPUT_TOKENS - 1) for each in chosen]
        lines.append({
            "prompt_tokens": prompt_tokens,
            "ttft_ms": statistics.median(each["reads_ns"][0] for each in chosen) / 1e6,
            "tpot_ms": statistics.median(tpot) / 1e6,
            "first_ms": dict(sorted(steps.items(), key=lambda step: step[1])),
        })  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--port", type=int, default=8765)
    chosen, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = prepare(directory, chosen.tiny)
        begun = time.monotonic()
        server = start(directory, model, chosen.port, extra)
        try:
            wait(server, chosen.port, directory / "server.log")
            print(f"vLLM answers after {time.monotonic() - begun:.0f} s", file=sys.stderr)
            requests = measured(chosen.port, directory)
        finally:
            server.terminate()
            server.wait()
        log = (directory / "server.log").read_text(errors="replace")
        lines = summary(requests)
        chosen.out.write_text(json.dumps({"summary": lines, "requests": requests, "server_log": log[-20000:]}))
    for line in lines:
        print(f"{line['prompt_tokens']} prompt tokens: ttft {line['ttft_ms']:.2f} ms, tpot {line['tpot_ms']:.3f} ms")
        for step, at_ms in line["first_ms"].items():
            print(f"  {at_ms:8.3f} ms  {step}")


if __name__ == "__main__":
    main()
