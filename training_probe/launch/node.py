"""On a node of a cluster: a process that starts the processes of a run there, tells of the files that they write, and
ends them.

    python -m training_probe.launch.node HOST

It reads one Order a line from its standard input and answers each with a line. When the input ends, because whoever
asks is gone, however that came about, the run's processes end with it: they hang on the supervisor of
backends/process.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec

from backends import gpus, process
from backends.launch import LaunchError, Running, ServerSpec
from loadgen.rundir import package_version
from training_probe.launch.outcome import oom_kills
from training_probe.launch.runner import STOP_S, MemoryReturn, cores, environment, remove_forsaken_locks
from training_probe.protocol import LOG_FILE

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915
MOST_BYTES = 64 << 20  # of a file: of a longer one, which is a log, the end is told


class Inspect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What is there? packages: which of these modules are missing?"""

    packages: tuple[str, ...] = ()


class StartRanks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start processes in the directory `name`, which holds these files. ranks: on this node; port: of the first node, 0
    on the others."""

    name: str
    files: dict[str, bytes]
    argv: tuple[str, ...]
    env: dict[str, str]
    ranks: int
    gpu_ids: tuple[str, ...]
    port: int


class Poll(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What have the processes written since?"""


class StopRanks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the processes and tell the rest: their log, and whatever else they wrote."""


class AwaitFreeMemory(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Wait until the GPUs' memory has come back."""


Order = Inspect | StartRanks | Poll | StopRanks | AwaitFreeMemory


class Facts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To Inspect. root: where directories of runs are made. port: one that is free. gpu_ids: NVML indices of the
    GPUs that this process may use. cores: that it may keep busy. lacking: the modules that are missing."""

    version: str
    python: str
    root: str
    port: int
    inventory: gpus.Inventory
    gpu_ids: tuple[int, ...] = ()
    cores: int = 0
    lacking: tuple[str, ...] = ()
    oom_kills: int | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To all else. grown: what was added to the end of files; files: new ones, whole. code: how the processes ended,
    None while they run. problem: why they cannot be started, a sentence, or what memory is still taken, a clause."""

    grown: dict[str, bytes] = {}
    files: dict[str, bytes] = {}
    code: int | None = None
    problem: str | None = None


Reply = Facts | Status


class Node:
    """One of a cell. host: its address in the cluster; root: a directory of its own."""

    def __init__(self, host: str, root: Path) -> None:
        self.root = root
        self._host, self._directory = host, root
        self._running: Running | None = None
        self._memory: MemoryReturn | None = None
        self._told: dict[str, int] = {}  # by file: bytes of one that grows, the time of change of another, ns

    def answer(self, order: Order) -> Reply:
        if isinstance(order, Inspect):
            return self._inspect(order)
        if isinstance(order, StartRanks):
            return self._start(order)
        if isinstance(order, AwaitFreeMemory):
            return self._await_memory()
        return self._poll() if isinstance(order, Poll) else self._stop()

    def close(self) -> None:
        """Ends what runs."""
        if self._running is not None:
            self._running.stop()
        if self._memory is not None:
            self._memory.close()

    def _inspect(self, order: Inspect) -> Facts:
        inventory = gpus.read()
        return Facts(
            version=package_version(),
            python=sys.executable,
            root=str(self.root),
            port=process.free_port(""),  # the other nodes come to it
            inventory=inventory,
            gpu_ids=_visible(inventory),
            cores=cores(),
            lacking=tuple(name for name in order.packages if not installed(name)),
            oom_kills=oom_kills(),
        )

    def _start(self, order: StartRanks) -> Status:
        self._directory, self._told = self.root / order.name, {}
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir()
        for name, content in order.files.items():
            path = self._directory / name
            path.write_bytes(content)
            self._told[name] = path.stat().st_mtime_ns
        if order.gpu_ids:
            remove_forsaken_locks()
        start = ServerSpec(
            run_id=order.name, backend="training_probe", argv=order.argv,
            env={**_network(self._host), **environment(os.environ, order.ranks), **order.env}, port=order.port,
            log=self._directory / LOG_FILE, gpu_ids=order.gpu_ids, stop_s=STOP_S,
        )  # fmt: skip
        try:
            self._running = process.start(start, lambda _: None, threading.Event())
        except LaunchError as error:
            return Status(problem=str(error))
        return Status()

    def _poll(self) -> Status:
        exit = None if self._running is None else self._running.poll()  # before the files: they are complete then
        grown, files = self._written(over=False)
        return Status(grown=grown, files=files, code=None if exit is None else exit.code)

    def _stop(self) -> Status:
        if self._running is None:
            return Status()
        self._running.stop()
        exit = self._running.poll()
        grown, files = self._written(over=True)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._running = None
        return Status(grown=grown, files=files, code=None if exit is None else exit.code)

    def _written(self, over: bool) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """What is new in files that grow, and other files that are new. The log is one of those that are told when all
        is over: secrets in it are masked only then."""
        grown, files = {}, {}
        for path in sorted(self._directory.iterdir()):
            if path.suffix == ".part" or not path.is_file():
                continue
            if path.suffix == ".jsonl":
                if added := _from(path, self._told.get(path.name, 0)):
                    grown[path.name] = added
                    self._told[path.name] = self._told.get(path.name, 0) + len(added)
            elif over or path.suffix == ".json":
                changed_ns = path.stat().st_mtime_ns
                if self._told.get(path.name) != changed_ns:
                    files[path.name] = _from(path, max(0, path.stat().st_size - MOST_BYTES))
                    self._told[path.name] = changed_ns
        return grown, files

    def _await_memory(self) -> Status:
        if self._memory is None:
            self._memory = MemoryReturn(gpus.GpuProbe, _visible(gpus.read()))
        return Status(problem=self._memory.wait(threading.Event()))


def _visible(inventory: gpus.Inventory) -> tuple[int, ...]:
    """The GPUs that Ray or the user has given to this process, by CUDA_VISIBLE_DEVICES; none where it names what is
    not there."""
    try:
        return gpus.choose(inventory, None)
    except gpus.GpuError:
        return ()


def _from(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()


def installed(module: str) -> bool:
    """Whether a module is there, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _network(host: str) -> dict[str, str]:
    """gloo takes the address that the machine's name has, often 127.0.1.1; it is to take the one of the cluster."""
    interface = _interface(host)
    return {GLOO_INTERFACE: interface} if interface is not None and GLOO_INTERFACE not in os.environ else {}


def _interface(host: str) -> str | None:
    """The network interface that has this address; None where none is found."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == host:
                    return name
    return None


@contextlib.contextmanager
def here(host: str) -> Iterator[Node]:
    """This process's own, in a directory that vanishes with it."""
    with tempfile.TemporaryDirectory(prefix="training-") as root, contextlib.closing(Node(host, Path(root))) as node:
        yield node


def main(host: str) -> None:
    orders, encode = msgspec.json.Decoder(Order), msgspec.json.Encoder().encode
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed here is no reply
    with here(host) as node:
        for line in sys.stdin.buffer:
            replies.write(encode(node.answer(orders.decode(line))) + b"\n")
            replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])
