"""What this machine can hold for a load: open files, and local ports for connections to one address."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from loadgen import rundir
from loadgen.config import ConfigError
from loadgen.plan import Plan
from loadgen.target import TransportError

ENOUGH_FILES = 65_536  # where the machine sets no limit
OPEN_FILES_BESIDES = 64
WORKERS_PER_CPU = 4  # more client processes only wait for each other
WORKER_BYTES = 100 << 20  # a client process takes 60 to 100 MB
WORKER_FILES = 4  # of the process that starts the workers, for each of them


def raise_fd_limit(needed: int) -> None:
    """As many open files as the machine allows. Raises TransportError when those are fewer than `needed`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise TransportError(
            f"the run needs {needed} open files and this machine allows {hard}; "
            "raise it with `ulimit -Hn`, lower the load, or spread it with --workers."
        )
    wanted = hard if hard != resource.RLIM_INFINITY else max(needed, ENOUGH_FILES)
    if soft not in (resource.RLIM_INFINITY, wanted):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def ephemeral_ports() -> int:
    """How many connections to one address this machine can hold open."""
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        return high - low + 1
    return 16_384


def check_workers(workers: int) -> None:
    """Raises ConfigError for more client processes than this machine can hold."""
    cpus, memory, files = len(rundir.usable_cpus()), memory_bytes(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = [(max(2, WORKERS_PER_CPU * cpus), f"{WORKERS_PER_CPU} for each of its {cpus} usable CPUs, at least 2")]
    if memory is not None:
        limits.append((max(1, memory // WORKER_BYTES), f"{WORKER_BYTES >> 20} MiB for each in {memory >> 20} MiB"))
    if files != resource.RLIM_INFINITY:
        limits.append((max(1, (files - OPEN_FILES_BESIDES) // WORKER_FILES), f"{files} open files, by `ulimit -Hn`"))
    most, why = min(limits)
    if workers > most:
        raise ConfigError(f"--workers is {workers} and this machine holds at most {most} ({why}); name fewer.")


def memory_bytes() -> int | None:
    """Memory that is free for new processes; None where the system does not show it."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10
    return None


def make_room(plan: Plan, workers: int) -> None:
    """Raises the limit on open files, or TransportError when this machine cannot hold the streams."""
    streams = plan.job.load.at_once
    if streams > ephemeral_ports():
        raise TransportError(
            f"{streams} connections to one address need as many local ports and this machine has {ephemeral_ports()}; "
            "lower the load or widen net.ipv4.ip_local_port_range."
        )
    raise_fd_limit(-(-streams // workers) + OPEN_FILES_BESIDES)
