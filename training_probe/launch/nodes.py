"""Several nodes as one place for the processes of a run: as many ranks on each, the first node with rank 0.

What the processes write there is copied into the run's directory here while they run, so that nothing that judges or
reports a run knows where it ran.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from backends.launch import Exit, LaunchError, Running
from loadgen.cluster.link import NodeLost
from training_probe.launch.node import (
    AwaitFreeMemory,
    Facts,
    Inspect,
    Order,
    Poll,
    Reply,
    StartRanks,
    Status,
    StopRanks,
)
from training_probe.launch.runner import GPU_MEMORY_WAIT_S, STOP_S, Job, NodeRank
from training_probe.protocol import LOG_FILE

ASK_S = 30.0  # a node that does not answer for so long is lost
END_S = ASK_S + STOP_S + 10.0  # a killed process may take that long to vanish
OTHERS_S = 5.0  # from the first failure to the end of the other nodes, which may wait for the dead rank for ever
TAIL_BYTES = 256 * 1024

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class NodeLink(Protocol):
    """A way to a node process. host: its address in the cluster."""

    host: str

    def ask(self, order: Order, limit_s: float) -> Reply:
        """Raises NodeLost."""


class _Watched:
    """A link, which is asked no more once its node was lost. lost: how, a clause that names the node."""

    def __init__(self, link: NodeLink) -> None:
        self.host, self.lost = link.host, ""
        self._link = link

    def ask(self, order: Order, limit_s: float) -> Reply:
        if not self.lost:
            try:
                return self._link.ask(order, limit_s)
            except NodeLost as lost:
                self.lost = f"node {self.host} was lost: {lost}"
        raise NodeLost(self.lost)


class Nodes:
    """The nodes that one cell, or one micro-benchmark, has to itself."""

    def __init__(self, links: Sequence[NodeLink]) -> None:
        self.links = [_Watched(link) for link in links]

    @property
    def lost(self) -> set[str]:
        """The hosts of those that are gone."""
        return {link.host for link in self.links if link.lost}

    @property
    def hosts(self) -> list[str]:
        return [link.host for link in self.links]

    def look(self, packages: tuple[str, ...] = ()) -> list[Facts]:
        """Raises NodeLost."""
        return [_facts(reply) for reply in self._ask_all(Inspect(packages=packages), ASK_S)]

    def start(self, job: Job, cancelled: threading.Event) -> Running:
        """Raises LaunchError and NodeLost."""
        if cancelled.is_set():
            raise LaunchError("stopped before the processes were started.")
        facts, count = self.look(), len(self.links)
        ranks = job.ranks // count
        files = {path.name: path.read_bytes() for path in job.directory.iterdir() if path.is_file()}
        running = _OnNodes(self.links, job.directory)
        try:
            for number, (link, known) in enumerate(zip(self.links, facts, strict=True)):
                node = NodeRank(rank=number, nodes=count, master=self.links[0].host if count > 1 else "127.0.0.1")
                directory = Path(known.root) / job.directory.name
                argv = job.command(
                    python=known.python, processes=ranks, port=facts[0].port, directory=directory, node=node
                )
                gpu_ids = tuple(map(str, known.gpu_ids[:ranks])) if job.gpu_ids else ()
                begin = StartRanks(
                    name=job.directory.name, files=files, argv=argv, env=dict(job.env), ranks=ranks, gpu_ids=gpu_ids,
                    port=0 if number else known.port,
                )  # fmt: skip
                if (problem := _status(link.ask(begin, ASK_S)).problem) is not None:
                    raise LaunchError(f"on {link.host}: {problem}")
        except BaseException:
            running.stop()
            raise
        return running

    def oom_kills(self) -> int | None:
        """Kills for memory on all nodes; None where one does not say."""
        try:
            counts = [facts.oom_kills for facts in self.look()]
        except NodeLost:
            return None
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def wait(self, cancelled: threading.Event) -> str | None:
        """As MemoryReturn does, on every node."""
        try:
            replies = self._ask_all(AwaitFreeMemory(), ASK_S + GPU_MEMORY_WAIT_S)
        except NodeLost:
            return None  # the run itself will tell
        pairs = zip(self.links, replies, strict=True)
        taken = [f"{link.host}: {problem}" for link, reply in pairs if (problem := _status(reply).problem)]
        return "; ".join(taken) or None

    def _ask_all(self, order: Order, limit_s: float) -> list[Reply]:
        """Raises NodeLost."""
        return map_concurrently(lambda link: link.ask(order, limit_s), self.links)


class _OnNodes:
    """Started processes, as backends.launch.Running has it; what they write is kept in a directory."""

    urls: Sequence[str] = ()
    facts: Mapping[str, Any] = {}

    def __init__(self, links: Sequence[NodeLink], directory: Path) -> None:
        self.links, self._directory = links, directory
        self._codes: dict[int, int] = {}  # in the order in which they ended
        self._failed_at: float | None = None
        self._exit: Exit | None = None

    def poll(self) -> Exit | None:
        """Raises NodeLost."""
        if self._exit is not None:
            return self._exit
        for number, link in enumerate(self.links):
            if number not in self._codes:
                self._take(number, _status(link.ask(Poll(), ASK_S)))
        now = time.monotonic()
        if self._failed_at is None and any(self._codes.values()):
            self._failed_at = now
        if len(self._codes) == len(self.links) or (self._failed_at is not None and now - self._failed_at > OTHERS_S):
            self.stop()
        return self._exit

    def stop(self) -> None:
        if self._exit is not None:
            return
        self._exit = Exit(next((code for code in self._codes.values() if code), 0))

        def end(number: int) -> None:
            with contextlib.suppress(NodeLost):
                self._take(number, _status(self.links[number].ask(StopRanks(), END_S)))

        map_concurrently(end, range(len(self.links)))
        if self._exit.code == 0:
            self._exit = Exit(next((code for code in self._codes.values() if code), 0))

    def log_tail(self, lines: int = 200) -> str:
        """The logs' ends of all nodes, one after another."""
        tails = []
        for number in range(len(self.links)):
            with contextlib.suppress(OSError):
                text = (self._directory / log_name(number)).read_bytes()[-TAIL_BYTES:].decode(errors="replace")
                tails += text.splitlines()[-lines:]
        return "\n".join(tails)

    def _take(self, number: int, status: Status) -> None:
        for name, added in status.grown.items():
            with (self._directory / Path(name).name).open("ab") as file:
                file.write(added)
        for name, content in status.files.items():
            (self._directory / (log_name(number) if name == LOG_FILE else Path(name).name)).write_bytes(content)
        if status.code is not None:
            self._codes.setdefault(number, status.code)


def log_name(number: int) -> str:
    """The name of a node's log in the run's directory."""
    stem, _, suffix = LOG_FILE.rpartition(".")
    return f"{stem}-node{number}.{suffix}" if number else LOG_FILE


def map_concurrently(call: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """Calls `call` on every item in parallel; the results in order. Raises the first error once all calls have
    ended."""
    with ThreadPoolExecutor(max_workers=max(1, len(items))) as pool:
        return list(pool.map(call, items))


def _facts(reply: Reply) -> Facts:
    assert isinstance(reply, Facts)
    return reply


def _status(reply: Reply) -> Status:
    assert isinstance(reply, Status)
    return reply
