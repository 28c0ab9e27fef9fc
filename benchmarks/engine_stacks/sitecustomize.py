"""What the thread that launches vLLM's steps waits for: samples of its stack, on a server whose path this folder is on.

    VLLM_WORKER_MULTIPROCESSING_METHOD=spawn VLLM_PATH=benchmarks/engine_stacks:$PYTHONPATH \\
        python benchmarks/frozen.py measure DIR --groups GROUP     # beside a GPU; writes /tmp/engine_stacks.PID.json

Python imports a `sitecustomize` when it starts. In the engine's process, `calls` has each call that launches a step
([what, tokens of the step, ms]), and `waits` each line that held it for over 15 ms ([tokens, ms, stack]). Made for
vLLM 0.25.1. Sampling takes the interpreter's lock, so launches are a little longer than without it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

RUNNER = "vllm.v1.worker.gpu.model_runner"
LAUNCHES = ("execute_model", "sample_tokens")
EVERY_S, LONG_S, IDLE_S, STARTS_WITHIN_S, DEEPEST = 3e-4, 0.015, 0.4, 400.0, 12

calls: list[tuple[str, int, float]] = []
waits: list[tuple[int, float, list[str]]] = []
launching: list[int] = []  # tokens of the step that is being launched; empty between launches
ended_s, step_tokens = 0.0, 0  # of the last launch


def timed(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        global ended_s, step_tokens
        given = arguments[0] if arguments else named.get("scheduler_output")
        step_tokens = getattr(given, "total_num_scheduled_tokens", step_tokens)
        launching.append(step_tokens)
        begun_s = time.perf_counter()
        try:
            return launch(self, *arguments, **named)
        finally:
            ended_s = time.perf_counter()
            calls.append((name, launching.pop(), 1e3 * (ended_s - begun_s)))

    return call


def stack(frame: FrameType | None) -> list[str]:
    """From where the thread is out to the call that launches."""
    lines: list[str] = []
    while frame is not None and len(lines) < DEEPEST:
        code = frame.f_code
        lines.append(f"{'/'.join(code.co_filename.split('/')[-2:])}:{frame.f_lineno} {code.co_name}")
        if code.co_name in LAUNCHES:
            break
        frame = frame.f_back
    return lines


def sample() -> None:
    until_s = time.monotonic() + STARTS_WITHIN_S
    while (runner := sys.modules.get(RUNNER)) is None or not hasattr(runner, "GPUModelRunner"):
        if time.monotonic() > until_s:
            return  # another of the server's processes
        time.sleep(0.2)
    for name in LAUNCHES:
        setattr(runner.GPUModelRunner, name, timed(name, getattr(runner.GPUModelRunner, name)))
    out, main, written = Path(f"/tmp/engine_stacks.{os.getpid()}.json"), threading.main_thread().ident or 0, 0
    held: list[str] = []
    tokens, since_s = 0, 0.0
    while True:
        now_s = time.perf_counter()
        at = stack(sys._current_frames().get(main)) if launching else []
        if at != held:
            if held and now_s - since_s > LONG_S:
                waits.append((tokens, 1e3 * (now_s - since_s), held))
            held, tokens, since_s = at, launching[0] if launching else 0, now_s
        if not launching and len(calls) != written and now_s - ended_s > IDLE_S:
            written = len(calls)
            out.write_text(json.dumps({"calls": calls, "waits": waits}))
        time.sleep(EVERY_S)


if "multiprocessing" in " ".join(sys.orig_argv):
    threading.Thread(target=sample, daemon=True).start()
