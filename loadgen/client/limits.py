"""What this machine can hold for a load: open files, and local ports for connections to one address."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from loadgen.plan import Plan
from loadgen.target import TransportError

ENOUGH_FILES = 65_536  # where the machine sets no limit
OPEN_FILES_BESIDES = 64


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


def make_room(plan: Plan, workers: int) -> None:
    """Raises the limit on open files, or TransportError when this machine cannot hold the streams."""
    streams = plan.streams_at_once
    if streams > ephemeral_ports():
        raise TransportError(
            f"{streams} connections to one address need as many local ports and this machine has {ephemeral_ports()}; "
            "lower the load or widen net.ipv4.ip_local_port_range."
        )
    raise_fd_limit(-(-streams // workers) + OPEN_FILES_BESIDES)
