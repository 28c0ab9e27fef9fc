"""What else went on while something was measured: other processes on its cores, a hypervisor that took them away, a GPU
held back by heat or its power limit.

Known from /proc and NVML; what neither has is None. Shares are of the span that was measured, by counters that are
read before it and after it, so nothing is read meanwhile. Not every driver has the counters of heat and power; the
reasons of a low clock are those of the two moments alone. Without torch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from backends import gpus

STEAL = 7  # /proc/stat, from 0: user nice system idle iowait irq softirq steal
BUSY = (0, 1, 2, 5, 6)
PARENT, USER, SYSTEM = 1, 11, 12  # /proc/PID/stat, from 0, after the name: state ppid ... utime stime


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions on a machine, or the worst of several spans. cores: that the processes may use. others_ratio:
    share of their time that other processes took, by rounding below 0 in short spans; idle_ratio: that nobody took;
    steal_ratio: that a hypervisor gave to other machines. load_1min: the kernel's average, ours included.
    sm_clock_ratio: of the GPU's highest clock, at the end. thermal_ratio, power_ratio: share of the span in which heat,
    or the power limit, held its clocks back. clock_reasons: why they were lower than they could be, by NVML's names, at
    the beginning and at the end."""

    seconds: float
    cores: int
    others_ratio: float | None = None
    idle_ratio: float | None = None
    steal_ratio: float | None = None
    load_1min: float | None = None
    sm_clock_ratio: float | None = None
    thermal_ratio: float | None = None
    power_ratio: float | None = None
    clock_reasons: tuple[str, ...] = ()


def worst(spans: Sequence[Conditions]) -> Conditions | None:
    """The span of which others took most, with the worst of all where that does not belong to it; None without any."""
    if not spans:
        return None

    def most(name: str) -> float | None:
        return max((value for span in spans if (value := getattr(span, name)) is not None), default=None)

    return msgspec.structs.replace(
        max(spans, key=lambda span: -2.0 if span.others_ratio is None else span.others_ratio),
        sm_clock_ratio=min((span.sm_clock_ratio for span in spans if span.sm_clock_ratio is not None), default=None),
        clock_reasons=all_reasons(spans),
        **{name: most(name) for name in ("steal_ratio", "load_1min", "thermal_ratio", "power_ratio")},
    )


def all_reasons(spans: Iterable[Conditions]) -> tuple[str, ...]:
    return tuple(sorted({reason for span in spans for reason in span.clock_reasons}))


class Ticks(NamedTuple):
    """CPU time since the start, in ticks: of the cores, all of it, what was busy, what was stolen; of our processes."""

    whole: int
    busy: int
    stolen: int
    own: int


class Shares(NamedTuple):
    """Shares of the cores' time. None where no tick has passed."""

    others: float | None = None
    idle: float | None = None
    stolen: float | None = None


def between(before: Ticks, after: Ticks) -> Shares:
    whole = after.whole - before.whole
    if whole <= 0:
        return Shares()
    busy, stolen = after.busy - before.busy, after.stolen - before.stolen
    others = busy - (after.own - before.own)
    # others below 0, too: what is rounded one way in one span is rounded the other way in the next
    return Shares(
        others=max(-1.0, min(1.0, others / whole)),
        idle=min(1.0, max(0, whole - busy - stolen) / whole),
        stolen=min(1.0, max(0, stolen) / whole),
    )


def ticks(cpus: Sequence[int], proc: Path = Path("/proc")) -> Ticks | None:
    """Now, of these CPUs. Ours are the processes with our parent: the ranks of this machine. None without /proc."""
    try:
        lines = [line.split() for line in (proc / "stat").read_text().splitlines()]
    except OSError:
        return None
    names = {f"cpu{cpu}" for cpu in cpus}
    counts = [[int(count) for count in line[1 : STEAL + 2]] for line in lines if line and line[0] in names]
    if not counts:
        return None
    own = 0
    for path in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[PARENT]) == os.getppid():
                own += int(fields[USER]) + int(fields[SYSTEM])
    return Ticks(
        whole=sum(map(sum, counts)),
        busy=sum(each[at] for each in counts for at in BUSY),
        stolen=sum(each[STEAL] for each in counts),
        own=own,
    )


class Watch:
    """From `start` to `stop`. gpu: NVML's handle of the GPU that is measured; None: no GPU, or no NVML."""

    def __init__(self, gpu: Any = None) -> None:
        self._gpu, self._cpus = gpu, sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.start()

    def start(self) -> None:
        self._before, self._clocks = ticks(self._cpus), self._clocks_now()
        self._began_s = time.monotonic()

    def stop(self) -> Conditions:
        seconds = time.monotonic() - self._began_s
        clocks, after = self._clocks_now(), ticks(self._cpus)
        shares = between(self._before, after) if self._before and after else Shares()
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        thermal, power = (
            None if a is None or b is None or seconds <= 0 else min(1.0, max(0, b - a) / 1e9 / seconds)
            for a, b in zip(self._clocks[:2], clocks[:2], strict=True)
        )
        return Conditions(
            seconds=seconds, cores=len(self._cpus), others_ratio=shares.others, idle_ratio=shares.idle,
            steal_ratio=shares.stolen, load_1min=load, sm_clock_ratio=clocks.sm_ratio, thermal_ratio=thermal,
            power_ratio=power, clock_reasons=gpus.reason_names(self._clocks.reasons | clocks.reasons),
        )  # fmt: skip

    def _clocks_now(self) -> gpus.Clocks:
        return gpus.Clocks() if self._gpu is None else gpus.clocks(self._gpu)
