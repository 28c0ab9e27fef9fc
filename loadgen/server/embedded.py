"""The embedded server as a process of its own: started for a run, and to measure the client's own ceiling before one.

loadgen knows it only by its command line and its wire; nothing of `servers` is imported by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec

import backends
from backends import exit_codes
from backends.exit_codes import FailedError
from loadgen import child_env, models
from loadgen.config import Config, ConfigError
from loadgen.rundir.emulation import Emulation
from loadgen.terminal import say

START_TIMEOUT_S, STOP_TIMEOUT_S = 20.0, 5.0
DIALECTS = {
    "vllm": "vllm",
    "vllm-generate": "vllm",
    "openai": "openai",
    "openai-chat": "openai",
    "openai-responses": "openai",
    "embeddings": "vllm",
    "rerank": "vllm",
    "score": "vllm",
    "lightllm": "lightllm",
    "tgi": "tgi",
    "sglang": "sglang",
}
# of these, whose schedulers it has for modelled GPUs
MODELLED = ("vllm", "vllm-generate", "embeddings", "rerank", "score", "lightllm", "tgi", "sglang")
MODEL_LEN = 4096  # its --max-model-len, unless it is named
EMULATED_MARK = "emulated"  # in the Server header of every reply
EMULATED_BODY = b"llm-dissect-emulated"  # in what the server says of itself, which a proxy passes on

# A run for its own sake meets the server's usual times with some spread: a burst of 1000 is 25,000 events a second,
# which also a slow machine with two cores takes.
RUN_TIMING = ("--jitter-ratio", "0.1")


def model_name(config: Config) -> str:
    """The name of the model to emulate. Raises ConfigError for an unknown one."""
    return models.find(config.model or "7b").name


def model_place(config: Config) -> str:
    """What the embedded server and the predictions find that model by: its name, or its directory. Raises
    ConfigError."""
    model = models.find(config.model or "7b")
    return model.name if model.hf_id is not None else str(model.directory)


def dialect(backend: str) -> str:
    """What it speaks to that backend. Raises ConfigError for a backend that it cannot stand for."""
    if backend not in DIALECTS:
        raise ConfigError(f"the embedded server does not speak '{backend}'; give --url.")
    return DIALECTS[backend]


def check(config: Config) -> None:
    """Whether it would take its flags for this run. Raises ConfigError with its own sentence."""
    flags = options(config, dialect(config.kind), model_place(config))
    for entry in backends.installed("llm_dissect.embedded").select(name="check"):
        entry.load()(flags)


def options(config: Config, dialect: str, model: str) -> list[str]:
    """The embedded server's flags for a run: fixed times, or those of modelled GPUs."""
    chosen = ["--dialect", dialect, "--model", model, "--seed", str(config.seed)]
    chosen += ["--max-model-len", str(model_len(config))]
    adapters = config.load.adapters
    chosen += [word for name in (adapters.own if adapters is not None else ()) for word in ("--adapter", name)]
    if config.gpu is None:
        return [*chosen, *RUN_TIMING]
    flags = modelled(config)
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            chosen.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            several = value if isinstance(value, tuple) else () if value is None else (value,)
            chosen += [word for each in several for word in (f"--{flag}", str(each))]
    return chosen


def model_len(config: Config) -> int:
    """Its --max-model-len: what the options say, or what is usual, or what the load needs where the model takes that.
    Raises ConfigError or WorkloadError."""
    if config.max_model_len is not None:
        return config.max_model_len
    most = models.find(config.model or "7b").max_position
    if most is None or config.dataset is not None:
        return MODEL_LEN
    return max(MODEL_LEN, min(most, config.longest_tokens()))


def modelled(config: Config) -> dict[str, Any]:
    """The options of modelled hardware, as the embedded server and the predictions name them."""
    gpus = None if config.gpus is None else int(config.gpus)
    return {
        "gpu": config.gpu,
        "gpus": gpus,
        "tp": gpus if config.tp == "all" else None if config.tp is None else int(config.tp),
        "topology": config.topology,
        "p2p": {"auto": None, "on": True, "off": False}[config.p2p],
        "scheduler": config.scheduler,
        "scheduler_arg": config.scheduler_arg,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "kv_tokens": config.kv_tokens,
        "max_running": config.max_running,
        "max_batched_tokens": config.max_batched_tokens,
        "max_requests": UNREFUSED,
        "memory_ratio": config.memory_ratio,
        "prefix_caching": "on" if config.caches_prefixes else "off",
        "expert_imbalance": config.expert_imbalance,
        "dummy_weights": config.dummy_weights,
        "profile": config.profile,
        "speed": config.speed,
    }


UNREFUSED = 1 << 20  # requests at once: as in a server started for the run, none is turned away


class Serving(msgspec.Struct, frozen=True):
    """What the server says when it listens. `emulation`: of modelled hardware; None with fixed times."""

    url: str
    emulation: Emulation | None = None


class EmbeddedError(FailedError):
    """The embedded server did not start. One sentence."""


@contextlib.asynccontextmanager
async def serving(*options: str) -> AsyncIterator[Serving]:
    """Runs `python -m servers` on a free port while the block lasts. It dies with this process. Raises EmbeddedError,
    or ConfigError with its own sentence when it refuses its options."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "servers", "--port", "0", "--exit-with-stdin", *options,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        start_new_session=True, env=os.environ | child_env.environment(os.environ),
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    lines_before: list[str] = []
    listening = False

    async def relay_errors(stderr: asyncio.StreamReader) -> None:
        async for line in stderr:
            text = line.decode(errors="replace").rstrip()
            if listening:
                say(text)
            else:
                lines_before.append(text)

    relay = asyncio.ensure_future(relay_errors(process.stderr))
    try:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            raise EmbeddedError(f"the embedded server did not listen within {START_TIMEOUT_S:g} s.") from None
        if not line:
            code = await process.wait()
            await relay
            if code == exit_codes.BAD_OPTIONS and lines_before:
                raise ConfigError(lines_before[-1].removeprefix("servers: "))
            last = f": {lines_before[-1]}" if lines_before else "."
            raise EmbeddedError(f"the embedded server ended with exit code {code} before it listened{last}")
        listening = True
        yield msgspec.json.decode(line, type=Serving)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await child_env.ended(process, STOP_TIMEOUT_S)
        relay.cancel()
