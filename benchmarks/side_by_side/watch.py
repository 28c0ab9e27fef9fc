"""Runs a program and watches what its process tree costs, from outside: CPU time and resident memory every 10 ms.

CPU time is read from each process's own CPU clock (all its threads, nanoseconds; clock_getcpuclockid(3)), not from the
10 ms ticks of /proc/PID/stat. A process that ends between two looks loses at most one interval. Resident memory is the
sum over the tree, so pages that forked processes share count once for each. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

INTERVAL_S = 0.01
SEARCH_EVERY = 10  # intervals between two searches for new child processes and two looks at the core
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Watched:
    """A finished program. Arrays (n,) are samples: monotonic ns; of the tree, CPU ns so far and resident bytes."""

    exit_code: int
    started_ns: int
    at_ns: NDArray[np.int64]
    cpu_ns: NDArray[np.int64]
    rss_bytes: NDArray[np.int64]
    life_cpu_ns: int
    core_busy_ns: NDArray[np.int64]  # (m, 2): monotonic ns, and the time that anything has run on the core so far

    def cpu_between_ns(self, first_ns: int, last_ns: int) -> float:
        """CPU time of the tree within a window, interpolated between samples."""
        at_ends = np.interp([first_ns, last_ns], self.at_ns, self.cpu_ns)
        return float(at_ends[1] - at_ends[0])

    def others_ratio(self, first_ns: int, last_ns: int) -> float:
        """The part of a window that the core spent on anything else, other machines of the host included."""
        busy = np.interp([first_ns, last_ns], self.core_busy_ns[:, 0], self.core_busy_ns[:, 1])
        return max(0.0, float(busy[1] - busy[0]) - self.cpu_between_ns(first_ns, last_ns)) / (last_ns - first_ns)

    def peak_rss_bytes(self, first_ns: int = 0, last_ns: int = 2**63 - 1) -> int:
        inside = self.rss_bytes[(self.at_ns >= first_ns) & (self.at_ns <= last_ns)]
        return int(inside.max()) if len(inside) else 0


class Tree:
    """A process and its descendants, also those that moved to a session of their own."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.cpu_ns: dict[int, int] = {root: 0}  # every member ever seen
        self.alive = {root}
        self._strangers: set[int] = set()

    def search(self) -> None:
        """Finds members started since the last search. A child's pid is above its parent's until pids wrap around."""
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):  # noqa: PTH208 (hot)
            if pid in self.cpu_ns or pid in self._strangers:
                continue
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) in self.cpu_ns or int(fields[3]) == self.root:
                    self.cpu_ns[pid] = 0
                    self.alive.add(pid)
                else:
                    self._strangers.add(pid)

    def sample(self) -> tuple[int, int]:
        """CPU ns so far and resident bytes now."""
        rss_bytes = 0
        for pid in tuple(self.alive):
            try:
                self.cpu_ns[pid] = time.clock_gettime_ns((~pid << 3) | 2)  # the process's scheduler clock
                with open(f"/proc/{pid}/statm", "rb") as statm:  # noqa: PTH123 (hot)
                    rss_bytes += int(statm.read().split()[1]) * PAGE_BYTES
            except (OSError, IndexError):
                self.alive.discard(pid)
        return sum(self.cpu_ns.values()), rss_bytes


def core_busy(core: int) -> tuple[int, int]:
    """Now, and the time that processes have run on the core or another machine has stolen it (proc(5), /proc/stat)."""
    line = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} "))
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = (int(word) for word in line.split()[1:9])
    return time.monotonic_ns(), (user + nice + system + steal) * TICK_NS


def watch(command: Sequence[str], core: int, log: Path, env: Mapping[str, str], timeout_s: float) -> Watched:
    """Runs `command` pinned to one core until it ends, its output in `log`. Killed with its tree after `timeout_s`. It
    may keep its bytecode: without, a Python program compiles all that it imports at every start."""
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with log.open("wb") as output:
        started_ns = time.monotonic_ns()
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**ours, **env},
            start_new_session=True,
        )
    tree = Tree(process.pid)
    samples = [(started_ns, 0, 0)]
    core_samples = []
    turn = 0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        if turn % SEARCH_EVERY == 0:
            tree.search()
            core_samples.append(core_busy(core))
        samples.append((time.monotonic_ns(), *tree.sample()))
        if samples[-1][0] - started_ns > timeout_s * 1e9:
            for member in tree.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
        turn += 1
        time.sleep(INTERVAL_S)
    process.returncode = os.waitstatus_to_exitcode(status)
    core_samples.append(core_busy(core))
    columns = np.array(samples, dtype=np.int64)
    life_cpu_ns = max(int(columns[-1, 1]), int((usage.ru_utime + usage.ru_stime) * 1e9))
    at_ns, cpu_ns, rss_bytes = columns.T
    return Watched(process.returncode, started_ns, at_ns, cpu_ns, rss_bytes, life_cpu_ns, np.array(core_samples))
