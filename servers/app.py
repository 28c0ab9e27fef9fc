"""The embedded server as a command: `python -m servers`, and `loadgen serve`.

It prints one JSON line on stdout once it listens, `{"url": ..., "dialect": ..., "emulated": true}`, and nothing after
that. SIGINT and SIGTERM end it with exit code 0.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import msgspec
from cyclopts import App, CycloptsError, Parameter

from loadgen.option_types import Whole
from loadgen.rundir.emulation import Emulation
from servers.dialects.lightllm import LightLLM
from servers.dialects.openai import OpenAI
from servers.dialects.tgi import TGI
from servers.serve import faults
from servers.serve.modelled_timing import SimulatedTiming
from servers.serve.server import Server
from servers.serve.stamps import Stamps
from servers.serve.timing import FixedTiming, Timing
from servers.serve.wire import Dialect, Settings
from servers.simulator.build import EmulationError, emulate
from servers.simulator.hardware import HardwareError
from servers.simulator.options import Hardware

DialectName = Literal["vllm", "openai", "tgi", "lightllm"]
DIALECTS: dict[DialectName, Callable[[Settings], Dialect]] = {
    "vllm": lambda settings: OpenAI("vllm", settings),
    "openai": lambda settings: OpenAI("openai", settings),
    "tgi": TGI,
    "lightllm": LightLLM,
}
EXIT_BAD_OPTION = 2
EXIT_NOT_LISTENING = 3


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The line on stdout once it listens. emulation: of modelled hardware; None where times are fixed."""

    url: str
    dialect: str
    emulated: bool = True
    emulation: Emulation | None


def serve(
    *,
    dialect: DialectName = "vllm",
    host: str = "127.0.0.1",
    port: Whole = 8000,
    model: str = "llama-2-7b",
    max_model_len: Whole = 4096,
    ttft_ms: float = 200.0,
    itl_ms: float = 40.0,
    jitter_ratio: float = 0.0,
    hardware: Annotated[Hardware | None, Parameter(name="*")] = None,
    seed: Whole = 0,
    fault: Annotated[Sequence[str], Parameter(negative="")] = (),
    stamps: Path | None = None,
    exit_with_stdin: Annotated[bool, Parameter(negative="")] = False,
    api_key_env: str | None = None,
) -> None:
    """Serve an emulated LLM server: the real wire, no model; fixed and known times, or those of modelled GPUs (--gpu).

    Prompts are counted as token ids, or as text one token a word. Every reply carries the header
    `Server: llm-dissect (emulated)`.

    Parameters
    ----------
    dialect
        Which server to stand for.
    host
        Address to listen on.
    port
        Port to listen on; 0 takes any free one. The URL is printed on stdout once it listens.
    model
        Name of the model that it serves.
    max_model_len
        Most tokens that a prompt and its output may hold together.
    ttft_ms
        Milliseconds from a request's last byte to its first token.
    itl_ms
        Milliseconds between one token and the next.
    jitter_ratio
        Multiply each of these times by a factor drawn uniformly from 1 - J to 1 + J.
    seed
        Seed of the jitter and of faults that strike a share; it and a request's number fix what a request meets.
    fault
        KIND:WHEN, may be repeated: break requests on purpose. WHEN: N (every N-th), P% (that share of them, drawn from
        the seed) or @N (the N-th alone). Kinds: reset, truncate, stall, http_error:STATUS, stream_error, short, merge,
        coalesce, no_done, refuse, cached, wrong_prompt_tokens, garbage, die (the process ends with exit code 1). Of the
        whole server: slow_start:SECONDS (503 until then), and with --gpu kv_exhaustion:SHARE% (the KV cache keeps that
        share, and preemptions storm) and slow_rank:FACTOR (one of the GPUs is that much slower, and all wait for it).
        Or a script: FILE.json, a list of {"request": N, "kind": KIND}.
    stamps
        File (.npz) to write at exit with the time at which each token was sent.
    exit_with_stdin
        End when standard input ends, as it does when the process that started this one dies.
    api_key_env
        Environment variable that holds the API key to ask for.
    """
    problem = _problem(port, max_model_len, ttft_ms, itl_ms, jitter_ratio)
    if problem:
        _fail(EXIT_BAD_OPTION, problem)
    parsed = _faults(fault, dialect, seed)
    api_key = _api_key(api_key_env)
    stamps_file = _stamps(stamps)
    _raise_file_limit()
    wire = DIALECTS[dialect](Settings(model, max_model_len))
    timing: Timing = FixedTiming(round(ttft_ms * 1e6), round(itl_ms * 1e6), jitter_ratio, seed)
    if hardware is not None and hardware.gpu is not None:
        timing = _simulated(dialect, model, max_model_len, hardware, parsed)
    elif hardware is not None and (given := hardware.given()):
        _fail(EXIT_BAD_OPTION, f"--{given[0]} is for modelled hardware; name the GPU to model with --gpu.")
    elif needing := parsed.modelled():
        _fail(EXIT_BAD_OPTION, f"fault {needing[0]} needs modelled hardware; name it, such as --gpu h200.")
    try:
        server = Server(wire, timing, host, port, parsed, stamps_file, api_key)
    except (OSError, UnicodeError) as error:  # the latter: no name of a host can be so long
        why = error.strerror if isinstance(error, OSError) else "no such name"
        message = f"cannot listen on {host} port {port}: {why}; choose another --port or --host."
        _fail(EXIT_NOT_LISTENING, message)
    _run(server, exit_with_stdin)


def _simulated(
    dialect: str, model: str, max_model_len: int, hardware: Hardware, parsed: faults.Faults
) -> SimulatedTiming:
    try:
        emulated = emulate(hardware.setup(dialect, model, max_model_len))
        emulated = emulated.degraded(parsed.amount("kv_exhaustion", 1.0), parsed.amount("slow_rank", 1.0))
        for note in emulated.facts.notes:
            print(f"note: {note}", file=sys.stderr)
        emulated = msgspec.structs.replace(
            emulated, facts=msgspec.structs.replace(emulated.facts, speed=hardware.speed)
        )
        return SimulatedTiming(emulated, hardware.speed)
    except (EmulationError, HardwareError) as error:
        _fail(EXIT_BAD_OPTION, str(error))


def main() -> None:
    """The command line of `python -m servers`."""
    app = App(name="python -m servers", result_action="return_value", version_flags=())
    app.default(serve)
    try:
        app(exit_on_error=False, print_error=False)
    except CycloptsError as error:
        _fail(EXIT_BAD_OPTION, " ".join(str(error).split()))


def _run(server: Server, exit_with_stdin: bool) -> None:
    """Says that it listens, and serves until it is told to end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    if exit_with_stdin:
        try:
            server.stop_at_end_of(sys.stdin.fileno())
        except (OSError, ValueError):
            _fail(EXIT_BAD_OPTION, "--exit-with-stdin needs a pipe or a terminal as standard input.")
    ready = Ready(url=server.url, dialect=server.dialect.name, emulation=server.emulation)
    print(msgspec.json.encode(ready).decode(), flush=True)
    # Nothing here makes cycles while it serves, and a collection would make every stream late.
    gc.collect()
    gc.freeze()
    gc.disable()
    server.run()


def _faults(texts: Sequence[str], dialect: str, seed: int) -> faults.Faults:
    try:
        return faults.read(texts, dialect, seed)
    except ValueError as error:
        _fail(EXIT_BAD_OPTION, str(error))


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    api_key = os.environ.get(variable)
    if not api_key:
        _fail(EXIT_BAD_OPTION, f"the environment variable {variable} holds no API key; set it first.")
    return api_key


def _stamps(path: Path | None) -> Stamps | None:
    try:
        return Stamps(path) if path is not None else None
    except OSError as error:
        _fail(EXIT_BAD_OPTION, f"cannot write {path}: {error.strerror}; name another file for --stamps.")


def _problem(port: int, max_model_len: int, ttft_ms: float, itl_ms: float, jitter_ratio: float) -> str:
    """What is wrong with the numbers, or "". NaN is wrong everywhere."""
    if not 0 <= port <= 65535:
        return f"--port {port} is no port; it must be from 0 to 65535."
    if max_model_len < 2:
        return f"--max-model-len {max_model_len} leaves no room for a prompt and a token; it must be at least 2."
    for name, value in (("--ttft-ms", ttft_ms), ("--itl-ms", itl_ms)):
        if not 0 <= value <= 86_400_000:
            return f"{name} {value:g} is out of range; it must be from 0 to 86400000 (a day)."
    if not 0 <= jitter_ratio < 1:
        return f"--jitter-ratio {jitter_ratio:g} is out of range; it must be at least 0 and below 1."
    return ""


def _raise_file_limit() -> None:
    """As many connections as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _fail(code: int, sentence: str) -> NoReturn:
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(code)
