"""What it takes to start a server, as values: a backend says what its server needs, a launcher starts it.

Nothing here touches a process, a container or a file. The two launchers (docker.py and process.py) take
a `ServerSpec` and give a `Running`; the adapters in the backend files turn `ServerSettings`, the same words for every
server, into arguments.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from backends.decoder import ModelSpec
from backends.exit_codes import FailedError
from backends.untrusted import escaped

LOG_TAIL_LINES = 20
MAX_ERROR_CHARS = 300
# Up to which batch LightLLM and TGI capture CUDA graphs. It is LightLLM's default, which keeps the logits of each size
# that it captures: up to 512 they would take gigabytes, which the memory ratio does not leave on a small card. TGI's
# own is 32. vLLM goes further by itself.
GRAPH_BATCH = 256
# NCCL without P2P. Reductions in the NVLink switch are no P2P to it: among more than two Hopper GPUs they would go on.
WITHOUT_P2P = {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}

_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*[a-z]\w*(?=:|$)")  # the line behind the frames: a class, perhaps a message
_LAST_WORDS = re.compile(r"exception: $")  # as SGLang's processes begin the traceback that ends them, on the same line
_RESULT = re.compile(r"EOFError$|RuntimeError: Rank \d+ scheduler died")  # says only that another process is gone
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_OTHER_PROCESS = re.compile(r"\([\w.-]+ pid=\d+\) ")  # as vLLM begins the lines of its processes


class LaunchError(FailedError):
    """The server was not started, or died. One sentence that says why and what to do; `log` is the end of its log."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a server is to run, in the same words for all, so that runs on different servers are comparable.

    model: where the server finds it, a Hugging Face id or a directory as the server sees it. served_name: the name that
    requests use. max_model_len: prompt plus output, tokens. max_running: requests in one batch at most. max_requests:
    how many must be accepted at once, running or waiting. memory_ratio: part of a GPU's memory that it may use, 0..1.
    p2p: whether GPUs may read each other's memory. config_dir: where it sees the files of its Invocation. version: the
    server's, as far as it is known; None stands for the newest that the adapter knows. trace_dir: where its profiler is
    to leave traces, as the server sees it; None: it runs without its profiler. dp: replicas of the model in it, of
    `tp` GPUs and such a batch each. by_priority: requests have one, which decides on their order. api_servers: its HTTP
    front end has so many processes; None: its own choice.
    """

    model: str
    served_name: str
    tp: int
    dtype: str  # float16, bfloat16 or float32
    max_model_len: int
    max_running: int
    max_requests: int
    memory_ratio: float
    quantization: str | None = None  # in the server's words: how it quantizes 16-bit weights as it loads them
    kv_cache_dtype: str | None = None  # in the server's words; None: as dtype
    max_batched_tokens: int | None = None  # that a step computes, of prompts at least; None: its own choice
    seed: int = 0
    dummy_weights: bool = False
    p2p: bool = True
    prefix_caching: bool = False  # whether the KV of a prompt is kept for later ones that begin alike
    host: str
    port: int
    config_dir: str
    extra: tuple[str, ...] = ()
    version: tuple[int, ...] | None = None
    trace_dir: str | None = None
    dp: int = 1
    by_priority: bool = False
    api_servers: int | None = None


def check_memory_ratio(name: str, settings: ServerSettings, instead: float) -> None:
    """For a server that needs memory of the GPU besides its share. Raises LaunchError where it is to take all of it."""
    if settings.memory_ratio >= 1:
        raise LaunchError(f"{name} takes no --memory-ratio of 1; give less, such as {instead:g}.")


class Invocation(msgspec.Struct, frozen=True, kw_only=True):
    """What an adapter makes of ServerSettings: arguments and environment of its server, and files for `config_dir`.
    module: of an installed server, what its interpreter is given in place of the rest of `process_command`."""

    arguments: tuple[str, ...]
    module: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    files: Mapping[str, str] = {}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A line that a server logs when it fails, what that means, and what to do. `pattern`: a regular expression whose
    groups may be named in `reason` and `advice` as {0}, {1}. hint: servers that live log it too, or it is what another
    failure leads to, so that it explains an end only where nothing else does. hangs: a server that logs it is never
    ready and does not end by itself. of_gpus: no reason for a server that was given none."""

    pattern: str
    reason: str
    advice: str
    hint: bool = False
    hangs: bool = False
    of_gpus: bool = False


# What any server built on torch, NCCL, CUDA and the Hugging Face hub may say. A server's own come first.
COMMON_FAILURES = (
    Failure(
        pattern=r"Cannot access gated repo|gated repo|401 Client Error|403 Client Error",
        reason="the model is gated and the hub refused access",
        advice="accept its licence on huggingface.co and set HF_TOKEN, or give a local directory with --model",
    ),
    Failure(
        pattern=r"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation",
        reason="CUDA out of memory",
        advice="use more GPUs (--tp), lower --max-running or --max-model-len, or stop what else uses the GPUs",
    ),
    Failure(
        pattern=r"NCCL error|ncclUnhandledCudaError|ncclSystemError|ncclInternalError",
        reason="an NCCL error: the GPUs could not talk to each other",
        advice="try --p2p off, and see that /dev/shm is large enough",
        hint=True,  # also where one of the processes is gone
    ),
    Failure(
        # TGI's launcher logs it on every machine without a GPU, also before it serves
        pattern=r"(?<!compute capability: RuntimeError: Found )[Nn]o NVIDIA driver|"
        r"libcuda\.so\.1: cannot open|CUDA driver version is insufficient|"
        r"nvidia-container-cli: initialization error",
        reason="there is no NVIDIA driver, or one too old for the image",
        advice="install or update the driver (nvidia-smi must work), or choose an older --image",
        of_gpus=True,
    ),
    Failure(
        pattern=r"no kernel image is available for execution",
        reason="the server was not built for this kind of GPU",
        advice="choose an --image for it",
    ),
    Failure(
        pattern=r"No space left on device",
        reason="the disk is full",
        advice="make room in the model cache or in Docker's own storage",
    ),
    Failure(
        pattern=r"error: (unrecognized arguments?: .*|unexpected argument .*)",
        reason="it does not know an argument ({0})",
        advice="this version of the server needs other flags: see --image and --server-arg",
    ),
    Failure(
        pattern=r"error: (argument .*|invalid value .*|the following .*arguments (?:are|were not) .*)",
        reason="it refuses its arguments ({0})",
        advice="change the option or the --server-arg behind it",
    ),
    Failure(
        pattern=r"[Aa]ddress already in use",
        reason="its port is taken",
        advice="stop what listens there, or name another --port",
    ),
)


class Profiler(msgspec.Struct, frozen=True, kw_only=True):
    """How a server's own torch.profiler is started and stopped while it serves: method and path. It leaves one Chrome
    trace a GPU in `ServerSettings.trace_dir`. note: what its user should know, one sentence."""

    start: tuple[str, str]
    stop: tuple[str, str]
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """How one kind of server is started.

    image_command precedes the arguments in a container: empty where the image's entry point is the server itself.
    process_command does the same for an installed server; "{python}" stands for the interpreter. port, cache_dir (the
    Hugging Face cache), caches (name -> directory worth keeping between runs) are the image's. loads_from_hub: takes a
    Hugging Face id, not only a directory. overlays: file of the model's directory -> what the server must see instead,
    from its content (None: there is none). capacity: a line that tells how many tokens its KV cache holds, in group 1.
    quantizations, kv_cache_dtypes: its own words for those that it makes as it loads weights of 16 bit, or keeps KV in.
    profiler: None where the server has none. package: a Python module that holds the same server, and a program that
    serves it with the same arguments: run where `process_command` is not on the PATH, or an interpreter is named.
    needs_gpu: it does not run on a CPU. model_file: a model is one file whose name ends so. random_weights: writes such
    a file for --dummy-weights. ready_paths: the first of them that the server knows answers 200 when it can serve.
    usual_running: its own --max-running, where the option's default does not suit it. takes: those of dp and
    api_servers that it can be told.
    """

    image: str
    image_command: tuple[str, ...] = ()
    process_command: tuple[str, ...]
    port: int
    cache_dir: str
    caches: Mapping[str, str] = field(default_factory=dict)
    ready_paths: tuple[str, ...] = ("/health",)
    loads_from_hub: bool = True
    dummy_weights: bool = False
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
    quantizations: Mapping[str, str] = field(default_factory=dict)
    kv_cache_dtypes: Mapping[str, str] = field(default_factory=dict)
    overlays: Mapping[str, Callable[[bytes | None], bytes]] = field(default_factory=dict)
    invoke: Callable[[ServerSettings], Invocation]
    failures: tuple[Failure, ...] = ()
    capacity: str | None = None
    profiler: Profiler | None = None
    package: tuple[str, Path] | None = None
    needs_gpu: bool = True
    model_file: str = ""
    random_weights: Callable[[ModelSpec, str, Path], None] | None = None
    usual_running: int | None = None
    takes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mount:
    """A file or directory of this host, as the container sees it."""

    source: Path
    target: str
    read_only: bool = True


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """One server to be started, in full. `port` is the server's own; a container's is published on 127.0.0.1 at
    `host_port` (None: any free one). `gpu_ids`: NVML indices as strings; empty: none; None: not known. `secrets`:
    names of variables of our environment whose values the server gets, never written or logged. `log`: where its output
    is to be kept.
    `stop_s`: how long it may take to end when it is asked to, before it is killed; None: as long as servers may. A
    container has its own."""

    run_id: str
    backend: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    log: Path
    image: str | None = None
    host_port: int | None = None
    gpu_ids: tuple[str, ...] | None = ()
    mounts: tuple[Mount, ...] = ()
    secrets: tuple[str, ...] = ()
    stop_s: float | None = None


@dataclass(frozen=True)
class Exit:
    """How a server ended. `code`: exit code, negative for a signal."""

    code: int
    oom_killed: bool = False
    error: str = ""


class Running(Protocol):
    """A started server. `facts`: what there is to say about it in a manifest (image digest, container id, pid)."""

    urls: Sequence[str]  # where it can be reached, best first
    facts: Mapping[str, Any]

    def poll(self) -> Exit | None:
        """How it ended; None while it runs."""

    def log_tail(self, lines: int = 200) -> str:
        """The end of what it has written."""

    def stop(self) -> None:
        """Ends it, waits for that, keeps its log, and leaves nothing behind. May be called again."""


class Launcher(Protocol):
    """One way to start servers: the modules `backends.docker` and `backends.process`. NAME: as `--launch` has it."""

    NAME: str

    def place(self, start: ServerSpec, /) -> str:
        """Where the server is to run, for a person."""

    def environment(self) -> dict[str, str]:
        """The server's share of our own environment that decides how it runs on GPUs, for a manifest; no secrets."""

    def command_line(self, start: ServerSpec, /) -> list[str]:
        """The command that starts the same server by hand; secrets appear by name only."""

    def start(self, start: ServerSpec, say: Callable[[str], None], cancelled: threading.Event, /) -> Running:
        """Starts the server and returns before it can serve; `say` gets a sentence for a person now and then. Raises
        LaunchError, with nothing left behind, also when `cancelled` is set meanwhile."""


def version_in(text: str) -> tuple[int, ...] | None:
    """The version that an image's tag or a package's own version begins with: "repo/image:v0.32.0" is (0, 32, 0).

    A registry's port or address and a digest are no version; None where there is no other.
    """
    name, _, tag = text.partition("@")[0].rpartition("/")[2].partition(":")
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", tag if tag or "/" in text else name.strip())
    return tuple(int(part) for part in match.groups(default="0")) if match else None


def explain(log: str, failures: Sequence[Failure], *, gpus: bool = True) -> tuple[str, str] | None:
    """Reason and advice by the lines of the log that some pattern knows: a server's own pattern before one that any
    server has, and of these the last line, after which it ended. A hint counts where there is nothing else. gpus:
    whether the server was given any."""
    known = [
        ((failure.hint, common, -matches[-1].start()), matches[-1], failure)
        for common, each in enumerate((failures, COMMON_FAILURES))
        for failure in each
        if (gpus or not failure.of_gpus) and (matches := [*re.finditer(failure.pattern, _plain(log))])
    ]
    if not known:
        return None
    _, match, failure = min(known, key=lambda each: each[0])
    groups = [" ".join((group or "").split()) for group in match.groups()]
    return failure.reason.format(*groups), failure.advice.format(*groups)


def _plain(log: str) -> str:
    """Without the colours of a terminal."""
    return _COLOUR.sub("", log)


def died(what: str, exit: Exit, log: str, failures: Sequence[Failure], *, gpus: bool = True) -> LaunchError:
    """The error for a server that ended by itself: exit code, reason if one is recognised, what to do. gpus: whether it
    was given any."""
    how = f"ended with exit code {exit.code}" if exit.code >= 0 else f"was killed by signal {-exit.code}"
    if exit.oom_killed:
        reason, advice = (
            "the kernel killed it for want of host memory",
            "free memory on the host or use a smaller model",
        )
    else:
        reason, advice = explain(log, failures, gpus=gpus) or (first_error(log), "read its log")
    cause = f": {reason}" if reason else f" ({exit.error})" if exit.error else ""
    return LaunchError(f"{what} {how}{cause}; {advice}.", excerpt(log))


def last_lines(log: str, count: int = LOG_TAIL_LINES) -> str:
    return "\n".join(_plain(log).rstrip().splitlines()[-count:])


def first_error(log: str) -> str:
    """The exception of the traceback that tells why, on one line; empty: there is none."""
    words = escaped(" ".join(" ".join(_telling_traceback(_plain(log).splitlines()).error).split())).rstrip(".")
    return words if len(words) <= MAX_ERROR_CHARS else words[: MAX_ERROR_CHARS - 3] + "..."


def excerpt(log: str, count: int = LOG_TAIL_LINES) -> str:
    """What of a dead server's log a person should see, `count` lines: its end, and before it the end of the
    traceback that tells why where that is further up."""
    lines = _plain(log).rstrip().splitlines()
    traceback = _telling_traceback(lines)
    if not traceback.error or traceback.end > len(lines) - count:
        return last_lines(log, count)
    half = count // 2
    first = [*traceback.frames, *traceback.error[: half - 1]][-half:]
    return "\n".join([*first, "...", *lines[-half:]])


class _Traceback(NamedTuple):
    """One traceback without what a logger puts before each line. end: the number of the log's line behind it."""

    frames: list[str]
    error: list[str]  # the exception, with the lines of its message
    end: int


def _telling_traceback(lines: Sequence[str]) -> _Traceback:
    """The first one: where a server is a tree of processes, the innermost fails first. One that says only that another
    process is gone counts where there is nothing else, the last before the first. Empty: there is none."""
    found = list(_tracebacks(lines))
    telling = (each for each in found if not _RESULT.match(each.error[0]))
    return next(telling, found[-1] if found else _Traceback([], [], 0))


def _tracebacks(lines: Sequence[str]) -> Iterator[_Traceback]:
    """The whole ones, in order. Lines of other processes in between do not count."""
    for start, line in enumerate(lines):
        prefix, mark, _ = line.partition(_TRACEBACK)
        if not mark:
            continue
        if _LAST_WORDS.search(prefix):  # a message of several lines, of which a logger marks the first only
            prefix = ""
        frames, error, end = [mark], list[str](), start + 1
        for number, other in enumerate(lines[start + 1 :], start + 1):
            text = other.removeprefix(prefix)
            if not other.startswith(prefix) or _OTHER_PROCESS.match(text):
                continue
            if error and (not text.startswith(" ") or len(error) > LOG_TAIL_LINES):
                break
            if error or _EXCEPTION.match(text):
                error.append(text)
            else:
                frames.append(text)
            end = number + 1
        if error:
            yield _Traceback(frames, error, end)
