"""How long predictions take on one core: a burst, a trace, a plan.

python benchmarks/predictions.py burst                       # the simulation alone, and the command less its imports
python benchmarks/predictions.py plan --model 7b             # `loadgen plan` over all GPUs of the catalog
python benchmarks/predictions.py trace --requests 100000     # `loadgen predict --trace` of a synthetic trace

Each run prints one JSON line: seconds of CPU time of this process (`cpu_s`), of wall time (`wall_s`), the largest
resident set (`peak_mb`), and beside them how long this machine takes at that moment for a loop that never changes
(`loop_s`; the same before and after), for other programs may be running.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOP = 3_000_000


def loop_s() -> float:
    """Seconds of CPU for additions that are always the same."""
    began, total = time.process_time(), 0
    for number in range(LOOP):
        total += number
    return time.process_time() - began


def timed(what: str, work: Callable[[], object], **facts: Any) -> None:
    """Prints what one run of `work` took."""
    before = loop_s()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seen = {"cpu_s": cpu_s, "wall_s": wall_s, "loop_s": (before + loop_s()) / 2, "peak_mb": peak_mb}
    print(json.dumps({"what": what, **facts, **{name: round(value, 3) for name, value in seen.items()}}), flush=True)


def command(words: list[str]) -> None:
    """One command line in this process; what it prints is dropped."""
    from loadgen import cli

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = cli.invoke(words)
    if code not in (0, 4):  # 4: too few requests for a percentile, or the like
        raise SystemExit(f"loadgen {' '.join(words)} ended with {code}: {errors.getvalue()}")


def burst(model: str, repeats: int) -> None:
    """1000 requests of 512 tokens in and 128 out at t = 0."""
    from servers.simulator.build import emulate
    from servers.simulator.options import Hardware
    from servers.simulator.virtual import simulate

    emulated = emulate(Hardware(gpu="h200", gpus=4).setup("vllm", model, 4096))
    for _ in range(repeats):
        timed("burst, simulation", lambda: simulate(emulated, [(0.0, 512, 128)] * 1000), model=model)
    with tempfile.TemporaryDirectory() as directory:
        for number in range(repeats + 1):  # the first also imports
            words = ["predict", "--gpu", "h200", "--gpus", "4", "--model", model, "--out", f"{directory}/{number}"]
            what = "burst, command" if number else "burst, command and its imports"
            timed(what, lambda words=words: command(words), model=model)  # type: ignore[misc]


def trace(requests: int, path: Path | None) -> None:
    """Requests of some 900 tokens in and 100 out, 20 a second, on one H200."""
    with tempfile.TemporaryDirectory() as directory:
        if path is None:
            import random

            path, rng, at_ms, blocks = Path(directory, "trace.jsonl"), random.Random(0), 0.0, 0
            with path.open("w") as file:
                for _ in range(requests):
                    at_ms += rng.expovariate(20) * 1e3
                    input_tokens = min(max(1, round(rng.lognormvariate(6.5, 0.8))), 8000)
                    output_tokens = max(1, round(rng.lognormvariate(4.4, 0.6)))
                    own = list(range(blocks, blocks + -(-input_tokens // 512)))  # nothing is shared
                    blocks += len(own)
                    line = {"timestamp": round(at_ms), "input_length": input_tokens,
                            "output_length": min(output_tokens, 1000), "hash_ids": own}  # fmt: skip
                    file.write(json.dumps(line) + "\n")
        words = ["predict", "--gpu", "h200", "--model", "llama-3-8b", "--trace", str(path), "--max-model-len", "9216"]
        timed("trace", lambda: command([*words, "--out", f"{directory}/run"]), requests=requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("burst", "plan", "trace"))
    parser.add_argument("--model", default="7b")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--trace", type=Path)
    options, more = parser.parse_known_args()
    if options.what == "burst":
        burst(options.model, options.repeats)
    elif options.what == "trace":
        trace(options.requests, options.trace)
    else:
        words = ["plan", "--model", options.model, "--slo", "ttft_ms=500,tpot_ms=50", "--rate", "20", *more]
        timed("plan", lambda: command(words), model=options.model, options=" ".join(more))


if __name__ == "__main__":
    main()
