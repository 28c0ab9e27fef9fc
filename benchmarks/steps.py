"""Steps of vLLM taken apart, kernel by kernel, beside what the model has for them.

    python benchmarks/steps.py measure OUT_DIR MODEL_DIR...    # beside a GPU and an installed vLLM 0.25; 2 minutes
    python benchmarks/steps.py table OUT_DIR                   # measured beside modelled

MODEL_DIR holds a config.json; weights are random, and layers are left out (LAYERS are kept), since all of a kind are
alike. Each model's engine runs in a process of its own; they start together and measure one after the other. A step is
timed with the GPU waited for before and after it: until the CPU has launched it, until the GPU is done, and in all. Two
more of its kind run under torch's profiler. OUT_DIR/NAME.jsonl has a line for each kind of step: `rows` that decode at
`context`, `prompts`, the times in milliseconds, and by kernel how often a step runs it and its microseconds.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LAYERS = 12  # Gemma's pattern of windows has six
TIMED, PROFILED = 5, 2
MAX_MODEL_LEN, MAX_TOKENS = 8192, 8192
# (rows, their context) and prompts of a step
DECODES = ((1, 1000), (16, 1000), (48, 1000), (120, 300), (256, 100))
PROMPTS = ([64], [256], [512], [600], [1024], [2048], [3000], [4096], [1024] * 8, [3000, 3000, 2192], [300] * 8)
BESIDE = ([64], [256], [400], [600], [1024], [2048], [8000])  # of 48 rows
STREAK = 60  # prompts of 3000 in a row: what a GPU does at its power limit
Line = dict[str, Any]


class Steps:
    """The steps of an engine in this process, timed."""

    def __init__(self, model: str) -> None:
        import torch

        self._torch = torch
        worker = import_module("vllm.v1.worker.gpu_worker").Worker
        execute = worker.execute_model
        self._launched = 0.0

        def timed(worker: Any, scheduled: Any) -> Any:
            result = execute(worker, scheduled)
            self._launched = time.perf_counter()
            return result

        worker.execute_model = timed
        self.engine = import_module("vllm").LLM(
            model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enable_prefix_caching=False,
            max_model_len=MAX_MODEL_LEN, max_num_seqs=1024, max_num_batched_tokens=MAX_TOKENS,
            gpu_memory_utilization=0.15, kv_cache_memory_bytes=8 << 30, async_scheduling=False,
        ).llm_engine  # fmt: skip
        self._sent = 0

    def add(self, tokens: int, outputs: int) -> str:
        self._sent += 1
        prompt = [(self._sent * 7919 + index * 104729) % 31000 + 500 for index in range(tokens)]
        sampling = import_module("vllm").SamplingParams(
            temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False
        )
        self.engine.add_request(str(self._sent), {"prompt_token_ids": prompt}, sampling)
        return str(self._sent)

    def timed(self) -> tuple[float, float, float]:
        """Milliseconds of one step: until it was launched, until the engine has its tokens, until the GPU is done."""
        self._torch.cuda.synchronize()
        begun = time.perf_counter()
        self.engine.step()
        over = time.perf_counter()
        self._torch.cuda.synchronize()
        return tuple(1e3 * (at - begun) for at in (self._launched, over, time.perf_counter()))  # type: ignore

    def profiled(self, prepare: Any) -> tuple[dict[str, list[float]], float]:
        """By kernel how often a step runs it, and its microseconds; and the milliseconds from first to last."""
        profile = self._torch.profiler
        with profile.profile(activities=[profile.ProfilerActivity.CUDA]) as recorded:
            for _ in range(PROFILED):
                prepare()
                self.engine.step()
            self._torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            recorded.export_chrome_trace(str(path))
            events = json.loads(path.read_bytes())["traceEvents"]
        spans = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        counts: Counter[str] = Counter()
        took: Counter[str] = Counter()
        for each in spans:
            counts[each["name"][:180]] += 1
            took[each["name"][:180]] += each["dur"]
        busy = sum(took.values()) / PROFILED / 1e3
        return {name: [counts[name] / PROFILED, round(took[name] / PROFILED, 2)] for name in counts}, busy


def measured(steps: Steps) -> list[Line]:
    lines: list[Line] = []

    def kind(rows: int, context: int, prompts: list[int]) -> None:
        def prepare() -> None:
            for tokens in prompts:
                steps.add(tokens, 1)

        times = []
        for number in range(TIMED + 2):
            prepare()
            took = steps.timed()
            times += [took] if number >= 2 else []
        kernels, busy_ms = steps.profiled(prepare)
        launched, over, done = (statistics.median(each) for each in zip(*times, strict=True))
        lines.append({
            "rows": rows, "context": context, "prompts": prompts, "launched_ms": launched, "over_ms": over,
            "done_ms": done, "busy_ms": busy_ms, "kernels": kernels,
        })  # fmt: skip
        print(
            rows,
            context,
            prompts[:3],
            len(prompts),
            [round(each, 2) for each in (launched, over, done, busy_ms)],
            flush=True,
        )

    for prompts in PROMPTS:
        kind(0, 0, list(prompts))
    lines.append(streak(steps))
    for rows, context in DECODES:
        steps_each = TIMED + 2 + PROFILED
        wanted = steps_each * (1 + len(BESIDE) if rows == 48 else 1)
        for _ in range(rows):
            steps.add(context, wanted + 40)
        for _ in range(-(-rows * context // MAX_TOKENS) + 2):
            steps.engine.step()
        kind(rows, context, [])
        for prompts in BESIDE if rows == 48 else ():
            kind(rows, context, list(prompts))
        while steps.engine.has_unfinished_requests():
            steps.engine.step()
    return lines


def streak(steps: Steps) -> Line:
    """Full steps one after the other, each timed."""
    for _ in range(STREAK):
        steps.add(3000, 1)
    took = []
    begun = time.perf_counter()
    while steps.engine.has_unfinished_requests():
        steps.engine.step()
        took.append(round(1e3 * (time.perf_counter() - begun), 2))
    return {"streak_ms": took, "prompts": [3000] * STREAK}


def one(out: Path, directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["num_hidden_layers"] = LAYERS
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:LAYERS]
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_text(json.dumps(config))
        begun = time.monotonic()
        steps = Steps(made)
        print(f"ready after {time.monotonic() - begun:.0f} s", flush=True)
        with (out / "alone").open("w") as lock:  # one model measures at a time
            fcntl.flock(lock, fcntl.LOCK_EX)
            lines = measured(steps)
    lines = [{"model": directory.name, "layers": LAYERS, **line} for line in lines]
    (out / f"{directory.name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def measure(out: Path, directories: list[Path]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    running = []
    for number, directory in enumerate(directories):
        # each compiles into a folder of its own; threads of all of them share the cores
        alone = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CACHE_ROOT": f"/tmp/vllm-cache-{number}"}
        log = (out / f"{directory.name}.log").open("wb")
        command = [sys.executable, __file__, "one", str(out), str(directory)]
        running.append(subprocess.Popen(command, env=alone, stdout=log, stderr=subprocess.STDOUT))
    for directory, process in zip(directories, running, strict=True):
        print(f"{directory.name}: ended with {process.wait()}", flush=True)


def table(out: Path) -> None:
    """Milliseconds by kind of work, measured beside modelled, for each kind of step."""
    kernels = import_module("loadgen.breakdown.kernels")
    for path in sorted(out.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            if "kernels" not in line:
                continue
            by: Counter[str] = Counter()
            for name, (_, us) in line["kernels"].items():
                by[kernels.of_kernel(name)] += us / 1e3
            count = sum(number for number, _ in line["kernels"].values())
            words = ", ".join(f"{name} {ms:.2f}" for name, ms in by.most_common())
            print(
                f"{line['model']} {line['rows']} rows + {sum(line['prompts'])}: launched {line['launched_ms']:.1f}, "
                f"done {line['done_ms']:.1f}, busy {line['busy_ms']:.2f} ms, {count:.0f} kernels: {words}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["measure", "one", "table"])
    parser.add_argument("out", type=Path)
    parser.add_argument("models", type=Path, nargs="*")
    chosen = parser.parse_args()
    if chosen.step == "measure":
        measure(chosen.out, chosen.models)
    elif chosen.step == "one":
        one(chosen.out, chosen.models[0])
    else:
        table(chosen.out)


if __name__ == "__main__":
    main()
