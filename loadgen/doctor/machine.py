"""What the client needs of this machine, whatever server it measures: one check a question, each with what was found.

"problem": the run would fail. "warning": it would work, but what it measures may be worse than it must be.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from loadgen.client.limits import OPEN_FILES_BESIDES, ephemeral_ports
from loadgen.config import DEFAULT_REQUESTS, Config
from loadgen.rundir import this_machine

State = Literal["ok", "warning", "problem"]

ENOUGH_BACKLOG = 4096  # what containers get, and more than the servers ask for
COARSE_CLOCK_NS = 1000
STEADY_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")  # read without a system call
CPUS = Path("/sys/devices/system/cpu")


class Observation(NamedTuple):
    """What a check found. `seen`: a clause. `advice`: what to do, or empty."""

    state: State
    seen: str
    advice: str = ""


class DoctorCheck(NamedTuple):
    """A question, by its name, and the answer."""

    name: str
    state: State
    seen: str
    advice: str = ""


def guarded(name: str, check: Callable[[], Observation]) -> DoctorCheck:
    """The check's answer; that it could not be made is one as well, because the others are wanted all the same."""
    try:
        return DoctorCheck(name, *check())
    except Exception as error:
        return DoctorCheck(name, "warning", f"cannot be checked: {error or type(error).__name__}")


def client_checks(config: Config) -> Iterator[DoctorCheck]:
    """What the client needs, for the load that these options ask for."""
    load = config.load
    burst = (load.requests or DEFAULT_REQUESTS) if load.streams is None else load.streams.most
    yield guarded("open files", lambda: _open_files(burst + OPEN_FILES_BESIDES))
    if config.where != "url":  # the backlog that counts is that of the server's machine
        yield guarded("listen backlog", lambda: _backlog(burst))
    yield guarded("local ports", lambda: _ports(burst))
    yield guarded("clock", _clock)
    yield guarded("cores", _cores)
    yield guarded("CPU governor", governor)


def _open_files(needed: int) -> Observation:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        allowed = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard} allowed"
        return Observation("ok", f"{allowed}, {needed} needed")
    return Observation(
        "problem",
        f"{hard} allowed, {needed} needed",
        f"raise the hard limit (ulimit -Hn {needed}, or nofile in /etc/security/limits.conf), or lower the load",
    )


def _backlog(burst: int) -> Observation:
    size = int(text_of("/proc/sys/net/core/somaxconn"))
    seen = f"net.core.somaxconn is {size}"
    if size >= min(burst, ENOUGH_BACKLOG):
        return Observation("ok", seen)
    return Observation(
        "warning",
        f"{seen}, below a burst of {burst}: some connections would be dropped and tried again after a second",
        f"sudo sysctl -w net.core.somaxconn={ENOUGH_BACKLOG}",
    )


def _ports(burst: int) -> Observation:
    count = ephemeral_ports()
    seen = f"{count} for connections to one address"
    if count >= burst:
        return Observation("ok", seen)
    return Observation(
        "problem",
        f"{seen}, {burst} needed",
        "sudo sysctl -w net.ipv4.ip_local_port_range='10240 65535', or lower the load",
    )


def _clock() -> Observation:
    reads = [time.monotonic_ns() for _ in range(1000)]
    step_ns = min((b - a for a, b in pairwise(reads) if b > a), default=0)
    try:
        source = text_of("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    except OSError:
        source = ""
    seen = f"CLOCK_MONOTONIC tells {step_ns} ns apart" + (f", from {source}" if source else "")
    if not 0 < step_ns <= COARSE_CLOCK_NS:
        return Observation("warning", seen, "measure from a machine with a finer clock")
    if source and source not in STEADY_CLOCKS:
        return Observation(
            "warning",
            f"{seen}: each look at it is a system call",
            "see /sys/devices/system/clocksource/clocksource0/available_clocksource for tsc or kvm-clock",
        )
    return Observation("ok", seen)


def _cores() -> Observation:
    count = this_machine().cpu_count
    if count >= 2:
        return Observation("ok", f"{count} for us")
    return Observation("warning", f"{count} for us", "the client shares it with all else; give it a second one")


def governor() -> Observation:
    governors = {path.read_text().strip() for path in CPUS.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    if "powersave" in governors:
        return Observation(
            "warning",
            "powersave: a core may be slow to wake when a token arrives",
            "sudo cpupower frequency-set -g performance",
        )
    return Observation("ok", ", ".join(sorted(governors)) or "none: the frequency is not ours to set")


def text_of(path: str) -> str:
    return Path(path).read_text(encoding="ascii").strip()
