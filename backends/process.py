"""An installed server, started on this machine as a process group that cannot outlive loadgen.

Between the two stands a small supervisor: this same file, run as a program with the standard library alone. Its stdin
is a pipe that only loadgen holds. When the pipe closes, because `stop` closed it or because loadgen is gone, however
that came about, the supervisor ends every process that descends from the server and then itself. So nobody has to
remember to clean up. What the server gets, secrets included, comes through the pipe and never stands on a command line.

On the wire, one line of JSON each: an _Order to the supervisor, a _Message from it at the start and one at the end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ != "__main__":  # the supervisor has the standard library only
    from backends.launch import Exit, LaunchError, Running, ServerSpec
    from backends.untrusted import writings

NAME = "process"
STOP_S = 20.0  # from SIGTERM to SIGKILL, when we end the server
REST_S = 2.0  # the same for what a server that ended by itself left running
KILL_S = 10.0  # how long a killed process may take to vanish: freeing GPUs takes time, a stuck driver takes forever
TAIL_BYTES = 256 * 1024

_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # they are about our Python, not the server's
# Variables that decide how CUDA, NCCL, threads and servers work.
_GPU_VARIABLES = (
    "NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "CUBLAS_", "OMP_", "MKL_", "KMP_", "GLOO_", "DS_", "NVTE_", "VLLM_",
    "FLASHINFER_", "TRITON_", "LIGHTLLM_",
)  # fmt: skip
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS", re.IGNORECASE)
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # inherited with the rest, and masked even where nobody asked for them
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago, on all addresses where this is empty."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def place(start: ServerSpec) -> str:
    """Where the server is to run, for a person."""
    return "a process"


def environment() -> dict[str, str]:
    """The variables that a server inherits and that decide how it runs on GPUs; no secrets."""
    return gpu_variables(inherited())


def command_line(start: ServerSpec) -> list[str]:
    """What to type to start the same server by hand; secrets are left to the environment."""
    added = (f"{name}={value}" for name, value in _added(start).items() if name not in start.secrets)
    return ["env", *added, *start.argv]


def start(start: ServerSpec, say: Callable[[str], None], cancelled: threading.Event) -> Running:
    """Starts the server; it listens on `start.port` by what its argv says. Raises LaunchError.

    It gets our environment and `start.env`, and sees the GPUs of `start.gpu_ids` and no other. Returns as soon as the
    process exists.
    """
    if sys.platform != "linux":
        raise LaunchError("--launch process needs Linux; start the server yourself and name it with --url.")
    if cancelled.is_set():
        raise LaunchError("stopped before the server was started.")
    _check_port(start.port)
    try:  # for our eyes only: until it is masked at the end, it may hold a secret that the server prints
        # and never through a link, nor into a pipe, that another has put into a directory that is gone on with
        log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise LaunchError(f"cannot write {start.log}: {error.strerror}; name another --out.") from None
    try:
        running = _Supervised(start, log)
    except LaunchError:
        with contextlib.suppress(OSError):
            if start.log.stat().st_size == 0:
                start.log.unlink()
        raise
    finally:
        os.close(log)
    say(f"started {start.argv[0]} as process {running.facts['pid']}, its output goes to {start.log}")
    return running


def _added(start: ServerSpec) -> dict[str, str]:
    """What the server's environment has besides ours."""
    return dict(start.env) | ({} if start.gpu_ids is None else visible(start.gpu_ids))


def visible(gpu_ids: Sequence[str]) -> dict[str, str]:
    """Variables with which CUDA sees these GPUs, and without any none. NVML counts GPUs by their place on the bus; CUDA
    does not unless told to."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpu_ids)}


def inherited() -> dict[str, str]:
    """What a server has of our environment."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}


def gpu_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What of an environment decides how a process runs on GPUs, for a manifest; nothing that may be a secret."""
    return {
        name: value for name, value in sorted(environ.items())
        if name.startswith(_GPU_VARIABLES) and not _SECRET.search(name)
    }  # fmt: skip


def _environment(start: ServerSpec) -> dict[str, str]:
    """All of the server's environment. What is installed beside its interpreter comes first on the PATH, as after the
    activation of a virtual environment: LightLLM starts its HTTP server by name."""
    env = inherited() | _added(start)
    beside = os.path.dirname(start.argv[0])  # noqa: PTH120  a bare name has none; Path would say "."
    return env | {"PATH": f"{beside}{os.pathsep}{env.get('PATH', os.defpath)}"} if beside else env


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections do not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(f"port {port} is taken; stop what listens there, or name another --port.") from None
            raise LaunchError(f"port {port} cannot be used: {error.strerror}; name another --port.") from None


class _Order(NamedTuple):
    """To the supervisor, once: what to start. `log` is masked of `secrets` at the end."""

    argv: tuple[str, ...]
    env: dict[str, str]
    log: str
    secrets: list[tuple[str, str]]
    stop_s: float


class _Message(NamedTuple):
    """From the supervisor: the server's pid, or the errno for which there is none; at the end its exit code, and which
    of its processes cannot be killed. All None: the supervisor is gone."""

    pid: int | None = None
    errno: int | None = None
    code: int | None = None
    stuck: Sequence[int] = ()

    def line(self) -> bytes:
        return json.dumps({name: value for name, value in self._asdict().items() if value is not None}).encode() + b"\n"


class _Supervised:
    """A server and its supervisor, seen from loadgen. An Exit means that all its processes are gone and its log is
    masked."""

    urls: Sequence[str]
    facts: Mapping[str, Any]

    def __init__(self, start: ServerSpec, log: int) -> None:
        env = _environment(start)
        self.log = start.log
        self._secrets = writings(env[name] for name in (*start.secrets, *_TOKENS) if env.get(name))
        stop_s = STOP_S if start.stop_s is None else start.stop_s
        self._patience_s = stop_s + KILL_S + 5.0
        self._exit: Exit | None = None
        self._lock = threading.Lock()
        # a session of its own: a Ctrl-C in the terminal is for loadgen to act on
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
        assert self._supervisor.stdin is not None and self._supervisor.stdout is not None
        self._pipe, self._messages = self._supervisor.stdin, self._supervisor.stdout
        try:
            self._send(_Order(start.argv, env, str(start.log.absolute()), self._secrets, stop_s))
            message = self._receive()
            if message.errno is not None:
                raise LaunchError(_why_not(start.argv[0], message.errno))
            if message.pid is None:
                code = self._supervisor.wait()
                raise LaunchError(f"the supervisor of the server ended with exit code {code}; see {start.log}.")
        except BaseException:
            self._close()
            self._messages.close()
            raise
        self._pid = message.pid
        self.urls = (f"http://127.0.0.1:{start.port}",)
        self.facts = {"pid": self._pid}

    def poll(self) -> Exit | None:
        with self._lock:
            if self._exit is None and self._supervisor.poll() is not None:
                self._exit = self._ended()
            return self._exit

    def log_tail(self, lines: int = 200) -> str:
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - TAIL_BYTES))
                tail = log.read(TAIL_BYTES)
        except OSError:
            return ""
        kept = tail.splitlines()
        if size > TAIL_BYTES:
            del kept[:1]  # it is cut, perhaps within a secret that would not be recognised
        return masked_log(b"\n".join(kept[-lines:]), self._secrets).decode(errors="replace")

    def stop(self) -> None:
        self._close()
        self.poll()

    def _send(self, order: _Order) -> None:
        with contextlib.suppress(BrokenPipeError):  # then there is no message either
            self._pipe.write(json.dumps(order._asdict()).encode() + b"\n")
            self._pipe.flush()

    def _receive(self) -> _Message:
        line = self._messages.readline()
        return _Message(**json.loads(line)) if line.endswith(b"\n") else _Message()

    def _close(self) -> None:
        """Closes the pipe and waits until the supervisor has ended everything."""
        with contextlib.suppress(OSError):
            self._pipe.close()
        try:
            self._supervisor.wait(self._patience_s)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()

    def _ended(self) -> Exit:
        last = self._receive()
        self._messages.close()
        if last.code is not None:
            stuck = ", ".join(map(str, last.stuck))
            return Exit(last.code, error=f"these of its processes cannot be killed: {stuck}" if stuck else "")
        # Somebody killed the supervisor. The kernel has killed the server with it; the rest of its group is left to us.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        mask_file(self.log, self._secrets)
        return Exit(-signal.SIGKILL, error="its supervisor was killed")


def _why_not(program: str, number: int) -> str:
    if number in (errno.ENOENT, errno.ENOTDIR):
        return f"there is no program {program}; install the server on this machine, or use --launch docker."
    return f"{program} cannot be started: {os.strerror(number)}; check that it is a program for this machine."


def masked_log(text: bytes, secrets: Iterable[tuple[str, str]]) -> bytes:
    """secrets: as `untrusted.writings` has them."""
    for part, pattern in secrets:
        if os.fsencode(part) in text:
            text = re.sub(pattern, "***", text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    return text


def mask_file(path: Path, secrets: Sequence[tuple[str, str]]) -> None:
    """Masks secrets in place. What is written is never longer than what was read, so it cannot overtake the reading."""
    if not secrets:
        return
    with contextlib.suppress(OSError), path.open("rb") as before, path.open("r+b") as after:
        for line in before:
            after.write(masked_log(line, secrets))
        after.truncate()


# -- the supervisor ----------------------------------------------------------------------------------------------------


class _Tree:
    """The server and all that descends from it, whatever sessions and groups it has made: orphans come to us."""

    def __init__(self, leader: int, woken: int) -> None:
        self.leader = leader
        self.code: int | None = None  # of the leader
        self._woken = woken  # readable when a child has ended

    def reap(self) -> bool:
        """Collects the dead; whether any process lives."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.leader:
                self.code = os.waitstatus_to_exitcode(status)

    def watch(self, pipe: int) -> None:
        """Until the leader has ended or the pipe is closed."""
        while self.reap() and self.code is None:
            if pipe in self._select(pipe, timeout_s=None) and not os.read(pipe, 4096):
                return

    def end(self, grace_s: float) -> list[int]:
        """SIGTERM, time to obey, SIGKILL until nothing is left; the processes that cannot be killed."""
        _signal_all(signal.SIGTERM)
        self._wait(grace_s)
        give_up = time.monotonic() + KILL_S
        while self.reap():
            if time.monotonic() > give_up:
                return _descendants()
            _signal_all(signal.SIGKILL)  # again and again: one may have been born since we looked
            self._wait(0.05)
        return []

    def _wait(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while self.reap() and (left_s := until - time.monotonic()) > 0:
            self._select(timeout_s=left_s)

    def _select(self, *others: int, timeout_s: float | None) -> list[int]:
        ready, _, _ = select.select([self._woken, *others], [], [], timeout_s)
        if self._woken in ready:
            os.read(self._woken, 4096)
        return ready


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_bytes()
                parent = int(stat.rpartition(b")")[2].split()[1])  # the name before it may hold anything
                children.setdefault(parent, []).append(int(entry.name))
    pids = [os.getpid()]
    for pid in pids:
        pids += children.get(pid, ())
    return pids[1:]


def _signal_all(number: int) -> None:
    for pid in _descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _report(message: _Message) -> None:
    with contextlib.suppress(OSError):  # loadgen is gone, which is why we are here
        os.write(1, message.line())


def _supervise() -> None:
    import ctypes

    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # what is ignored with SIG_IGN stays so in the server
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return
    order = _Order(**json.loads(line))

    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    killed = ctypes.c_ulong(signal.SIGKILL)
    try:
        server = subprocess.Popen(
            order.argv, env=order.env, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.STDOUT,
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, killed),  # should we be killed, the server dies with us
        )  # fmt: skip
    except OSError as error:
        _report(_Message(errno=error.errno))
        return
    _report(_Message(pid=server.pid))

    tree = _Tree(server.pid, woken)
    tree.watch(0)
    stuck = tree.end(order.stop_s if tree.code is None else REST_S)
    mask_file(Path(order.log), order.secrets)
    _report(_Message(code=-signal.SIGKILL if tree.code is None else tree.code, stuck=stuck))


if __name__ == "__main__":
    _supervise()
