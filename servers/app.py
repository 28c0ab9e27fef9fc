"""The embedded server as a command: `python -m servers`, and `loadgen serve`.

It prints one JSON line on stdout once it listens, `{"url": ..., "dialect": ..., "emulated": true}`, and nothing after
that. SIGINT, SIGTERM and SIGHUP, which are its only end, end it with exit code 0; SIGHUP does not under nohup.
"""

from __future__ import annotations

import gc
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import App, CycloptsError, Group, Parameter

from backends import exit_codes
from backends.exit_codes import UserError
from backends.launch import LaunchError
from backends.untrusted import escaped
from loadgen.config import ConfigError, from_environment
from loadgen.option_types import Whole, check_listen, mistake, option
from loadgen.rundir.emulation import Emulation
from loadgen.terminal import open_standard_streams, say
from servers.dialects.lightllm import LightLLM
from servers.dialects.openai import OpenAI
from servers.dialects.sglang import SGLang
from servers.dialects.tgi import TGI
from servers.serve import between, faults
from servers.serve.modelled_timing import SimulatedTiming
from servers.serve.server import Server
from servers.serve.stamps import StampsFile
from servers.serve.timing import FixedTiming, Timing
from servers.serve.wire import UNREFUSED, Dialect, DialectSettings
from servers.simulator.build import emulate
from servers.simulator.options import Hardware

PROGRAM = "servers"  # in front of what `python -m servers` refuses
DialectName = Literal["vllm", "openai", "tgi", "lightllm", "sglang"]
DIALECTS: dict[DialectName, Callable[[DialectSettings], Dialect]] = {
    "vllm": lambda settings: OpenAI("vllm", settings),
    "openai": lambda settings: OpenAI("openai", settings),
    "tgi": TGI,
    "lightllm": LightLLM,
    "sglang": SGLang,
}
FAULT_HELP = (
    "KIND:WHEN, may be repeated: break requests on purpose. WHEN: N (every N-th), P% (that share of them, drawn from "
    f"the seed) or @N (the N-th alone). Kinds: {'; '.join(f'{kind} ({what})' for kind, what in faults.KINDS.items())}. "
    "Of the whole server: slow_start:SECONDS (503 until then), and with --gpu kv_exhaustion:SHARE% (the KV cache keeps "
    "that share, and preemptions storm) and slow_rank:FACTOR (one of the GPUs is that much slower, and all wait for "
    'it). Or a script: FILE.json, a list of {"request": N, "kind": KIND}.'
)

WIRE = Group("The server", sort_key=1)
TIMES = Group("Times, where no hardware is modelled", sort_key=2)
TESTING = Group("To test clients", sort_key=3)

_wire, _times, _testing = (partial(option, group) for group in (WIRE, TIMES, TESTING))


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Everything but the modelled hardware."""

    dialect: Annotated[DialectName, _wire("Protocol to speak.", name=("--dialect", "--backend"))] = "vllm"
    host: Annotated[str, _wire("Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        Whole,
        _wire("Port to listen on; 0 takes any free one. The URL is printed on stdout once it listens."),
    ] = 8000
    model: Annotated[str, _wire("Name of the model that it serves.")] = "llama-2-7b"
    adapter: Annotated[
        tuple[str, ...], _wire("Name of a LoRA adapter of the model, repeatable (vllm and openai, in the field model).")
    ] = ()
    max_model_len: Annotated[Whole, _wire("Most tokens that a prompt and its output may hold together.")] = 4096
    ttft_ms: Annotated[float, _times("Milliseconds from a request's last byte to its first token.")] = 200.0
    itl_ms: Annotated[float, _times("Milliseconds between one token and the next.")] = 40.0
    per_request_metrics: Annotated[
        bool, _times("Tell each request's times at its end, as vLLM does with --enable-per-request-metrics.")
    ] = False
    jitter_ratio: Annotated[
        float, _times("Multiply each of these times by a factor drawn uniformly from 1 - J to 1 + J.")
    ] = 0.0
    seed: Annotated[
        Whole,
        _testing(
            "Seed of the jitter and of faults that strike a share; it and a request's number fix what a request meets."
        ),
    ] = 0
    fault: Annotated[tuple[str, ...], _testing(FAULT_HELP)] = ()
    wire: Annotated[str, _testing(f"What lies between it and its clients: {between.HELP}.")] = "clean"
    stamps: Annotated[
        Path | None, _testing("File (.npz) to write at exit with the time at which each token was sent.")
    ] = None
    exit_with_stdin: Annotated[
        bool,
        _testing("End when standard input ends, as it does when the process that started this one dies."),
    ] = False
    api_key_env: Annotated[str | None, _wire("Environment variable that holds the API key to ask for.")] = None

    def check(self) -> None:
        """Raises ValueError for numbers that cannot be. NaN is wrong everywhere."""
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port {self.port} is no port; it must be from 0 to 65535.")
        if self.max_model_len < 2:
            raise ValueError(
                f"--max-model-len {self.max_model_len} leaves no room for a prompt and a token; it must be at least 2."
            )
        if self.adapter and self.dialect not in ("vllm", "openai"):
            raise ValueError(f"--adapter is for requests that name a model, as those to {self.dialect} do not.")
        check_listen(self.host)
        for name, value in (("--ttft-ms", self.ttft_ms), ("--itl-ms", self.itl_ms)):
            if not 0 <= value <= 86_400_000:
                raise ValueError(f"{name} {value:g} is out of range; it must be from 0 to 86400000 (a day).")
        if self.per_request_metrics and self.dialect != "vllm":
            raise ValueError("--per-request-metrics is vLLM's; take --dialect vllm, or leave it out.")
        between.read(self.wire)
        if not 0 <= self.jitter_ratio < 1:
            raise ValueError(
                f"--jitter-ratio {self.jitter_ratio:g} is out of range; it must be at least 0 and below 1."
            )


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The line on stdout once it listens. emulation: of modelled hardware; None where times are fixed."""

    url: str
    dialect: str
    emulated: bool = True
    emulation: Emulation | None


def serve(
    options: Annotated[ServeOptions | None, Parameter(name="*")] = None,
    hardware: Annotated[Hardware | None, Parameter(name="*")] = None,
) -> None:
    """Serve an emulated LLM server: the real wire, no model; fixed and known times, or those of modelled GPUs (--gpu).

    Prompts are counted as token ids, or as text one token a word. Every reply carries the header
    `Server: llm-dissect (emulated)`.
    """
    options = options or ServeOptions()
    timing, struck = settled(options, hardware)
    try:
        variable = options.api_key_env
        api_key = None if variable is None else from_environment(variable, "--api-key-env")
        stamps_file = _stamps(options.stamps)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _raise_file_limit()
    caching = timing.facts is not None and timing.facts.prefix_caching
    wire = DIALECTS[options.dialect](
        DialectSettings(
            _served_name(options.model),
            options.max_model_len,
            caching,
            UNREFUSED if hardware is None or hardware.gpu is None else hardware.max_requests,
            hardware is None or hardware.scheduler != "tgi@1",
            options.per_request_metrics,
            options.adapter,
        )
    )
    try:
        address = (options.host, options.port)
        server = Server(wire, timing, address, struck, stamps_file, api_key, between.read(options.wire))
    except OSError as error:
        raise LaunchError(
            f"cannot listen on {options.host} port {options.port}: {error.strerror}; choose another --port or --host."
        ) from None
    for note in server.emulation.notes if server.emulation is not None else ():
        say(f"note: {note}")
    _run(server, options.exit_with_stdin)


def _served_name(model: str) -> str:
    """What requests call it: a directory's own name."""
    path = Path(model)
    return path.name if path.is_dir() else model


def settled(
    options: Annotated[ServeOptions | None, Parameter(name="*")] = None,
    hardware: Annotated[Hardware | None, Parameter(name="*")] = None,
) -> tuple[Timing, faults.Faults]:
    """How the server of these options answers, and what breaks. Raises UserError."""
    options, hardware = options or ServeOptions(), hardware or Hardware()
    try:
        options.check()
        struck = faults.read(options.fault, options.dialect, options.seed)
        return _timing(options, hardware, struck), struck
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check(flags: Sequence[str]) -> None:
    """What `serve` refuses of these flags, found before a process is started for it. Raises ConfigError."""
    app = App(result_action="return_value", version_flags=())
    app.default(settled)
    try:
        app(list(flags), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise ConfigError(mistake(error)) from None


def _timing(options: ServeOptions, hardware: Hardware, struck: faults.Faults) -> Timing:
    """Raises ValueError, EmulationError or HardwareError."""
    if hardware.gpu is not None and options.per_request_metrics:
        raise ValueError("--per-request-metrics is for times that are fixed; leave it out with --gpu.")
    if hardware.gpu is not None:
        return _simulated(options, hardware, struck)
    if given := hardware.given():
        raise ValueError(f"--{given[0]} is for modelled hardware; name the GPU to model with --gpu.")
    if needing := struck.modelled():
        raise ValueError(f"fault {needing[0]} needs modelled hardware; name it, such as --gpu h200.")
    return FixedTiming(round(options.ttft_ms * 1e6), round(options.itl_ms * 1e6), options.jitter_ratio, options.seed)


def _simulated(options: ServeOptions, hardware: Hardware, struck: faults.Faults) -> SimulatedTiming:
    emulated = emulate(hardware.setup(options.dialect, options.model, options.max_model_len))
    emulated = emulated.degraded(struck.amount("kv_exhaustion", 1.0), struck.amount("slow_rank", 1.0))
    facts = msgspec.structs.replace(emulated.facts, speed=hardware.speed)
    return SimulatedTiming(msgspec.structs.replace(emulated, facts=facts), hardware.speed)


def main() -> None:
    """The command line of `python -m servers`."""
    open_standard_streams()
    app = App(name="python -m servers", result_action="return_value", version_flags=())
    app.default(serve)
    try:
        app(exit_on_error=False, print_error=False)
        return
    except CycloptsError as error:
        code, sentence = exit_codes.BAD_OPTIONS, mistake(error)
    except UserError as error:
        code, sentence = error.exit_code, str(error)
    print(f"{PROGRAM}: {escaped(sentence)}", file=sys.stderr)
    raise SystemExit(code)


def _run(server: Server, exit_with_stdin: bool) -> None:
    """Prints that it listens, and serves until a signal or the end of standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: server.stop())
    if exit_with_stdin:
        try:
            server.stop_at_end_of(sys.stdin.fileno())
        except (OSError, ValueError):
            raise ConfigError("--exit-with-stdin needs a pipe or a terminal as standard input.") from None
    ready = Ready(url=server.url, dialect=server.dialect.name, emulation=server.emulation)
    print(msgspec.json.encode(ready).decode(), flush=True)
    # Nothing here makes cycles while it serves, and a collection would make every stream late.
    gc.collect()
    gc.freeze()
    gc.disable()
    server.run()


def _stamps(path: Path | None) -> StampsFile | None:
    try:
        return StampsFile(path) if path is not None else None
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; name another file for --stamps.") from None


def _raise_file_limit() -> None:
    """As many connections as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
