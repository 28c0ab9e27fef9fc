"""What the CPU takes to launch a step of vLLM kernel by kernel, by model and number format.

    python benchmarks/launches.py OUT_DIR [NAME ...]     # beside a GPU and an installed vLLM 0.25

Steps of more tokens than a CUDA graph holds, alone and beside 24 rows that decode, in the engine's own process. The GPU
is waited for before each step and after it, so nothing hides behind another step. OUT_DIR/launches.jsonl has a line a
step: tokens, rows, the milliseconds until execute_model came back (the CPU has launched all by then) and until the GPU
was done. The table has their medians, and what an H200 is predicted to take: without a CPU, and at the clock of its
tables. `--table OUT_DIR` prints the table alone.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import frozen
import numpy as np

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {  # name: the model's shape, and vLLM's arguments
    "bf16": ("mistral-7b-shape", {}),
    "fp8": ("mistral-7b-shape", {"quantization": "fp8"}),
    "fp8_cache": ("mistral-7b-shape", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "cache": ("mistral-7b-shape", {"kv_cache_dtype": "fp8"}),
    "mixture": ("qwen3-30b-a3b-shape", {}),
}
TOKENS = (600, 1000, 1500, 2000)
REPEATS = 12
ROWS = 24
CONTEXT = 600  # tokens of each of these rows, about: they begin with 512 and take one in each of up to 224 steps


class Steps:
    """The steps of an engine in this process, timed."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        import torch

        worker_type = import_module("vllm.v1.worker.gpu_worker").Worker
        self._wait: Callable[[], None] = torch.cuda.synchronize
        self.last: tuple[float, float] = 0.0, 0.0
        execute = worker_type.execute_model

        def timed(worker: Any, scheduled: Any) -> Any:
            self._wait()
            begun = time.perf_counter()
            result = execute(worker, scheduled)
            launched = time.perf_counter()
            self._wait()
            self.last = 1e3 * (launched - begun), 1e3 * (time.perf_counter() - begun)
            return result

        worker_type.execute_model = timed
        self.engine = import_module("vllm").LLM(
            model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enable_prefix_caching=False,
            max_model_len=frozen.MAX_MODEL_LEN, max_num_seqs=frozen.MAX_RUNNING, max_num_batched_tokens=8192,
            gpu_memory_utilization=0.85, async_scheduling=False, **arguments,
        ).llm_engine  # fmt: skip
        self._sent = 0

    def add(self, tokens: int, outputs: int) -> None:
        self._sent += 1
        prompt = [(self._sent * 7919 + index * 104729) % 31000 + 500 for index in range(tokens)]
        sampling = import_module("vllm").SamplingParams(
            temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False
        )
        self.engine.add_request(str(self._sent), {"prompt_token_ids": prompt}, sampling)


def measured(steps: Steps, rows: int) -> list[dict[str, Any]]:
    """Each size of step, again and again. The first two of a size do not count."""
    lines = []
    for _ in range(rows):
        steps.add(512, 4 * len(TOKENS) * (REPEATS + 2))
    for _ in range(3 if rows else 0):  # two steps for their prompts, and one more
        steps.engine.step()
    for tokens in TOKENS:
        for number in range(REPEATS + 2):
            steps.add(tokens, 1)
            steps.engine.step()
            launched_ms, done_ms = steps.last
            if number >= 2:
                lines.append({"tokens": tokens + rows, "rows": rows, "launched_ms": launched_ms, "done_ms": done_ms})
            if rows:
                steps.engine.step()
    return lines


def one(out: Path, name: str) -> None:
    shape, arguments = SETTINGS[name]
    with tempfile.TemporaryDirectory() as directory:
        steps = Steps(str(frozen.model_in(Path(directory), shape)), arguments)
        lines = measured(steps, 0) + measured(steps, ROWS)
        with (out / "launches.jsonl").open("a") as file:
            file.writelines(json.dumps({"setting": name, **line}) + "\n" for line in lines)


def main() -> None:
    out, *names = sys.argv[1:]
    if out == "--one":
        one(Path(names[0]), names[1])
    elif out == "--table":
        table(Path(names[0]))
    else:
        Path(out).mkdir(parents=True, exist_ok=True)
        for name in names or SETTINGS:
            alone = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            with (Path(out) / f"{name}.log").open("wb") as log:
                command = [sys.executable, __file__, "--one", out, name]
                done = subprocess.run(command, env=alone, stdout=log, stderr=subprocess.STDOUT)
            print(f"{name}: ended with {done.returncode}", flush=True)
        table(Path(out))


def table(out: Path) -> None:
    lines = [json.loads(line) for line in (out / "launches.jsonl").read_text().splitlines()]
    print("| setting | tokens | of them rows that decode | launched after ms | GPU done after ms | GPU, predicted ms |")
    print("|---|---:|---:|---|---:|---:|")
    with tempfile.TemporaryDirectory() as directory:
        costs = {name: cost(Path(directory), name) for name in SETTINGS}
    for key in dict.fromkeys((line["setting"], line["tokens"], line["rows"]) for line in lines):
        chosen = [line for line in lines if (line["setting"], line["tokens"], line["rows"]) == key]
        setting, tokens, rows = key
        low, launched_ms, high = np.percentile([line["launched_ms"] for line in chosen], (10, 50, 90))
        done_ms = statistics.median(line["done_ms"] for line in chosen)
        predicted_ms = 1e3 * costs[setting](step(rows, tokens - rows))
        print(
            f"| {setting} | {tokens} | {rows} | {low:.1f}, {launched_ms:.1f}, {high:.1f} | {done_ms:.1f} | "
            f"{predicted_ms:.1f} |"
        )


def cost(directory: Path, name: str) -> Callable[[Any], float]:
    """What a step of this setting is predicted to take on an H200, in seconds."""
    build, models = import_module("servers.simulator.build"), import_module("loadgen.models")
    shape, arguments = SETTINGS[name]
    model = models.find(str(frozen.model_in(directory, shape))).described()
    setup = build.Setup(
        scheduler="vllm@v1", model=model, gpu="h200", dtype="bfloat16", max_model_len=frozen.MAX_MODEL_LEN, **arguments
    )
    priced: Callable[[Any], float] = build.emulate(setup).cost
    return priced


def step(rows: int, prompt_tokens: int) -> Any:
    schedulers = import_module("servers.schedulers")
    requests = [schedulers.Sequence(number, CONTEXT, 9) for number in range(rows + 1)]
    return schedulers.Step(requests, rows, CONTEXT * rows, 1, prompt_tokens, prompt_tokens**2 / 2)


if __name__ == "__main__":
    main()
