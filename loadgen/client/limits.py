"""What this machine can hold for a load: open files, and local ports for connections to one address."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import NamedTuple

from loadgen import rundir
from loadgen.config import Config, ConfigError
from loadgen.plan import ClientPlan
from loadgen.rundir import HEADROOM_RATIO, USUAL_EVENTS_PER_S, Ceiling, processes_for
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


def named_workers(config: Config, plan: ClientPlan) -> int | None:
    """Client processes as --workers names them, no more than a closed loop has streams; None for auto."""
    if config.workers == "auto":
        return None
    streams = plan.job.load.streams
    return int(config.workers) if streams is None else min(int(config.workers), streams.most)


class Sized(NamedTuple):
    """How many client processes send a load. note: why that is more or less than one might think; empty: it is not."""

    processes: int
    note: str = ""


def sized(plan: ClientPlan, ceiling: Ceiling | None, pace_ms: float | None, *, server_is_here: bool) -> Sized:
    """As many as have room for the busiest second that the load brings, and as this machine has cores for. ceiling and
    pace_ms: None where they were not measured. Raises WorkloadError."""
    load = plan.job.load
    offered = load.events_per_s(pace_ms, streamed=plan.job.sampling.stream)
    needed = processes_for(offered, ceiling)
    if load.streams is not None:
        needed = min(needed, load.streams.most)
    cpus = len(rundir.usable_cpus())
    processes = max(min(needed, max(1, cpus - server_is_here)), min(cpus, _by_files(load.at_once)))
    if needed == processes == 1:
        return Sized(1)
    each = (USUAL_EVENTS_PER_S if ceiling is None else ceiling.events_per_s_per_core) / HEADROOM_RATIO
    several = f"{processes} client process{'es send' if processes > 1 else ' sends'}"
    note = f"{several}: the load brings up to {offered:,.0f} events/s, and one has room for {each:,.0f}"
    if processes < needed:
        shared = ", which the server shares" if server_is_here else ""
        note += f"; {needed} would do, and this machine has {cpus} core{'s' if cpus > 1 else ''}{shared}"
    return Sized(processes, note)


def _by_files(streams: int) -> int:
    """Processes that together may open files for so many connections."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 if hard == resource.RLIM_INFINITY else max(1, -(-streams // max(1, hard - OPEN_FILES_BESIDES)))


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


def make_room(plan: ClientPlan, workers: int | None) -> None:
    """Raises the limit on open files, or TransportError when this machine cannot hold the streams. workers: client
    processes; None: as many as it takes."""
    streams = plan.job.load.at_once
    if streams > ephemeral_ports():
        raise TransportError(
            f"{streams} connections to one address need as many local ports and this machine has {ephemeral_ports()}; "
            "lower the load or widen net.ipv4.ip_local_port_range."
        )
    raise_fd_limit(-(-streams // (workers or min(len(rundir.usable_cpus()), _by_files(streams)))) + OPEN_FILES_BESIDES)
