"""What the CPU takes to launch a step of vLLM kernel by kernel, by model and number format.

    python benchmarks/launches.py OUT_DIR [NAME ...]     # beside a GPU and an installed vLLM 0.25

Steps of more tokens than a CUDA graph holds, alone and beside 24 rows that decode, in the engine's own process. The GPU
is waited for before each step and after it, so nothing hides behind another step. OUT_DIR/launches.jsonl has a line a
step: tokens, rows, the milliseconds until execute_model came back (the CPU has launched all by then) and until the GPU
was done. OUT_DIR/NAME.txt has PyTorch's profile of one step: the operators that the CPU spent its time in.
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

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {  # name: the model's shape, and vLLM's arguments
    "16 bit": ("mistral-7b-shape", {}),
    "fp8": ("mistral-7b-shape", {"quantization": "fp8"}),
    "fp8, KV cache in fp8": ("mistral-7b-shape", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "16 bit, KV cache in fp8": ("mistral-7b-shape", {"kv_cache_dtype": "fp8"}),
    "mixture": ("qwen3-30b-a3b-shape", {}),
}
TOKENS = (600, 1000, 1500, 2000)
REPEATS = 12
ROWS = 24


class Steps:
    """The steps of an engine in this process, timed."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        import torch
        from vllm import LLM

        Worker = import_module("vllm.v1.worker.gpu_worker").Worker

        self._wait: Callable[[], None] = torch.cuda.synchronize
        self.last: tuple[float, float] = 0.0, 0.0
        execute = Worker.execute_model

        def timed(worker: Any, scheduled: Any) -> Any:
            self._wait()
            begun = time.perf_counter()
            result = execute(worker, scheduled)
            launched = time.perf_counter()
            self._wait()
            self.last = 1e3 * (launched - begun), 1e3 * (time.perf_counter() - begun)
            return result

        Worker.execute_model = timed
        self.engine = LLM(
            model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enable_prefix_caching=False,
            max_model_len=frozen.MAX_MODEL_LEN, max_num_seqs=frozen.MAX_RUNNING, max_num_batched_tokens=8192,
            gpu_memory_utilization=0.85, async_scheduling=False, **arguments,
        ).llm_engine  # fmt: skip
        self._sent = 0

    def add(self, tokens: int, outputs: int) -> None:
        from vllm import SamplingParams

        self._sent += 1
        prompt = [(self._sent * 7919 + index * 104729) % 31000 + 500 for index in range(tokens)]
        sampling = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False)
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


def profile(steps: Steps) -> str:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    steps.add(1000, 1)
    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as taken:
        steps.engine.step()
    averages = taken.key_averages()
    return "\n\n".join(
        averages.table(sort_by=by, row_limit=30, max_name_column_width=70)
        for by in ("self_cpu_time_total", "self_device_time_total")
    )


def one(out: Path, name: str) -> None:
    shape, arguments = SETTINGS[name]
    with tempfile.TemporaryDirectory() as directory:
        steps = Steps(str(frozen.model_in(Path(directory), shape)), arguments)
        lines = measured(steps, 0) + measured(steps, ROWS)
        with (out / "launches.jsonl").open("a") as file:
            file.writelines(json.dumps({"setting": name, **line}) + "\n" for line in lines)
        while steps.engine.has_unfinished_requests():
            steps.engine.step()
        (out / f"{name}.txt").write_text(profile(steps))


def main() -> None:
    out, *names = sys.argv[1:]
    if out == "--one":
        one(Path(names[0]), names[1])
        return
    Path(out).mkdir(parents=True, exist_ok=True)
    for name in names or SETTINGS:
        alone = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with (Path(out) / f"{name}.log").open("wb") as log:
            command = [sys.executable, __file__, "--one", out, name]
            done = subprocess.run(command, env=alone, stdout=log, stderr=subprocess.STDOUT)
        print(f"{name}: ended with {done.returncode}", flush=True)
    table(Path(out) / "launches.jsonl")


def table(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    print("| setting | tokens | of them rows that decode | launched after ms | GPU done after ms |")
    print("|---|---:|---:|---:|---:|")
    for key in dict.fromkeys((line["setting"], line["tokens"], line["rows"]) for line in lines):
        chosen = [line for line in lines if (line["setting"], line["tokens"], line["rows"]) == key]
        launched_ms, done_ms = (statistics.median(line[name] for line in chosen) for name in ("launched_ms", "done_ms"))
        setting, tokens, rows = key
        print(f"| {setting} | {tokens} | {rows} | {launched_ms:.1f} | {done_ms:.1f} |")


if __name__ == "__main__":
    main()
