"""How processes with torch ended, judged by what they left behind: the reports of ranks first, then the log, the exit
code and the kernel's count of processes that were killed for want of memory.

The ranks come first because they know best: a process may abort while it is torn down although all was measured, and
one that ran out of memory takes the others with it, each with an error of its own. The processes of a micro-benchmark
write no reports: they are judged by the rest. `judge` is pure.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Literal

from training_probe.protocol import CANNOT_GO_ON, OOM_EXIT, OUT_OF_MEMORY, RankReport

ProcessOutcome = Literal["ok", "oom", "unsupported", "timeout", "crashed"]
REASON_CHARACTERS = 400
LAST_LINES = 3

_COMPILER_KILLED = re.compile(r"Killed signal terminated program")  # gcc's words, of an extension that is compiled
_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout.*")
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
# How torchrun reports each process that ended, the first of them under "Root Cause".
_FAILED_RANK = re.compile(r"^ *rank *: (\d+) .*\n *exitcode *: (-?\d+) ", re.MULTILINE)
_CANNOT_GO_ON = re.compile(rf"^(?:\[rank\d+\]: ?)?{CANNOT_GO_ON}(.+)$", re.MULTILINE)
_ROOT_CAUSE = "Root Cause (first observed failure)"
# torchrun's own words, which say nothing about the cause.
_LAUNCHER = re.compile(r"torch/distributed/elastic/")
_NOISE = re.compile(r"^[\s*^~]*$|^Setting OMP_NUM_THREADS ")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How processes ended. exit_code: of the first of them, negative for a signal. given_up: why they were ended, a
    clause; None: they ended by themselves, or had written everything. oom_killed: whether the kernel killed a process
    for want of memory meanwhile. lost: which of the nodes that they ran on is gone, a clause."""

    exit_code: int = 0
    given_up: str | None = None
    lost: str | None = None
    log: str = ""
    oom_killed: bool = False


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What processes left, and how they ended. ranks: how many of them report, 0 where none does. timed: whether good
    reports have times. unreadable: reports that are none, by rank. steps: planned, warm-up included; steps_done: by
    rank 0."""

    ended: Ended
    ranks: int = 0
    timed: bool = True
    reports: Mapping[int, RankReport] = field(default_factory=dict)
    unreadable: Mapping[int, str] = field(default_factory=dict)
    steps: int = 0
    steps_done: int = 0

    @property
    def port_was_taken(self) -> bool:
        """Whether the processes never met because somebody took their port between our look and their start."""
        return not self.reports and not self.steps_done and _PORT_TAKEN.search(self.ended.log) is not None

    @property
    def progress(self) -> str:
        """A clause; empty where no steps were planned."""
        return f"{self.steps_done} of {self.steps} steps were done" if self.steps else ""


def judge(evidence: Evidence) -> tuple[ProcessOutcome, str]:
    """The outcome and why; the reason of a good one is empty. Without ranks that report it is never good."""
    reports = evidence.reports
    if evidence.ranks and all(rank in reports and reports[rank].outcome == "ok" for rank in range(evidence.ranks)):
        doubt = _not_timed(reports) if evidence.timed else None
        return ("crashed", doubt) if doubt else ("ok", "")
    return (
        _from_reports(evidence)
        or _lost(evidence)
        or _out_of_memory(evidence)
        or _hung(evidence)
        or ("crashed", _crash(evidence))
    )


def _not_timed(reports: Mapping[int, RankReport]) -> str | None:
    """Why nothing can be computed from reports that all say ok."""
    for rank, report in sorted(reports.items()):
        if report.steps < 1 or report.seconds is None or not isfinite(report.seconds) or report.seconds <= 0:
            return f"rank {rank} reports success, but {report.steps} timed steps in {report.seconds} s"
    steps = {report.steps for report in reports.values()}
    return None if len(steps) == 1 else f"the ranks report different numbers of steps: {min(steps)} to {max(steps)}"


def _from_reports(evidence: Evidence) -> tuple[ProcessOutcome, str] | None:
    """What some rank reports of itself; running out of memory explains the other ranks' errors, and not the reverse."""
    reports = sorted(evidence.reports.items())
    for rank, report in reports:
        if report.outcome == "oom" or (report.outcome == "crashed" and OUT_OF_MEMORY.search(report.reason)):
            return "oom", one_line(f"rank {rank}: {report.reason or 'out of memory'}")
    for rank, report in reports:
        if report.outcome == "unsupported":
            return "unsupported", one_line(report.reason or f"rank {rank} cannot run it")
    return None


def _lost(evidence: Evidence) -> tuple[ProcessOutcome, str] | None:
    """A node that is gone explains all that the others say of it."""
    if evidence.ended.lost is None:
        return None
    return "crashed", one_line("; ".join(filter(None, (evidence.ended.lost, evidence.progress))))


def _out_of_memory(evidence: Evidence) -> tuple[ProcessOutcome, str] | None:
    log = evidence.ended.log
    if match := OUT_OF_MEMORY.search(log):
        start, end = log.rfind("\n", 0, match.start()) + 1, log.find("\n", match.end())
        return "oom", one_line(_RANK_PREFIX.sub("", log[start : end if end >= 0 else None]))
    codes = [evidence.ended.exit_code, *(code for _, code in _failed_ranks(log))]
    if OOM_EXIT in codes:
        return "oom", f"a rank ended with exit code {OOM_EXIT}: out of memory"
    if evidence.ended.oom_killed and (-signal.SIGKILL in codes or _COMPILER_KILLED.search(log)):
        return "oom", "the kernel's OOM killer ended it: host memory"
    return None


def _hung(evidence: Evidence) -> tuple[ProcessOutcome, str] | None:
    watchdog = _WATCHDOG.search(evidence.ended.log)
    if evidence.ended.given_up is None and watchdog is None:
        return None
    clauses = [evidence.ended.given_up or "a collective operation hung", evidence.progress]
    clauses += [watchdog.group()] if watchdog else []
    return "timeout", one_line("; ".join(filter(None, clauses)))


def _crash(evidence: Evidence) -> str:
    """Who ended how, and the end of its log."""
    if not evidence.ranks and (stopped := _CANNOT_GO_ON.findall(evidence.ended.log)):
        return one_line(stopped[-1])
    failed = _failed_ranks(evidence.ended.log)
    # A rank's own signal explains more than the errors of those that it left alone; SIGTERM and SIGKILL are torchrun's.
    ended = (signal.SIGTERM, signal.SIGKILL)
    own = [(rank, code) for rank, code in failed if code < 0 and -code not in ended] or failed
    rank, code = own[0] if own else (None, evidence.ended.exit_code)
    crashed = {number: report.reason for number, report in evidence.reports.items() if report.outcome == "crashed"}
    who = f"rank {rank}" if rank is not None else "its launcher" if evidence.ranks else "the process"
    if crashed and (code >= 0 or rank is None):
        rank = rank if rank in crashed else min(crashed)
        return one_line(f"rank {rank}: {crashed[rank] or 'it does not say why'}")
    if evidence.unreadable:
        rank = min(evidence.unreadable)
        how = f"rank {rank} left a report that cannot be read ({evidence.unreadable[rank]})"
    elif code < 0:
        how = f"{who} was killed by {signal_name(-code)}"
    elif code or not evidence.ranks:
        how = f"{who} ended with exit code {code}"
    else:
        missing = [str(number) for number in range(evidence.ranks) if number not in evidence.reports]
        how = f"it ended without an error and without a report of rank {', '.join(missing)}"
    last = _last_lines(evidence.ended.log, rank)
    return one_line("; ".join(filter(None, (how, evidence.progress, last and f"it said: {last}"))))


def _failed_ranks(log: str) -> list[tuple[int, int]]:
    """Rank and exit code of each process that torchrun saw end, the one that it takes for the cause first."""
    others, _, cause = log.rpartition(_ROOT_CAUSE)
    return [(int(rank), int(code)) for part in (cause, others) for rank, code in _FAILED_RANK.findall(part)]


def _last_lines(log: str, rank: int | None) -> str:
    launcher = _LAUNCHER.search(log)
    before = log[: log.rfind("\n", 0, launcher.start()) + 1] if launcher else log
    lines = [line for line in before.splitlines() if not _NOISE.match(_RANK_PREFIX.sub("", line))]
    own_lines = [line for line in lines if line.startswith(f"[rank{rank}]:")]
    nobodys = [line for line in lines if rank is None or not _RANK_PREFIX.match(line)]  # torch marks exceptions only
    return " | ".join(_RANK_PREFIX.sub("", line).strip() for line in (own_lines or nobodys)[-LAST_LINES:])


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def one_line(text: str) -> str:
    """Printable, without line breaks; the middle of a very long one is left out."""
    plain = "".join(char if char.isprintable() else " " for char in _ESCAPES.sub("", text))
    plain = " ".join(plain.split())
    half = REASON_CHARACTERS // 2
    return plain if len(plain) <= REASON_CHARACTERS else f"{plain[: half - 3]} ... {plain[-half + 2 :]}"


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many processes the kernel has killed for want of memory: in our cgroup where it counts them, else on this
    machine; None where neither is known."""
    places = []
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                places.append(cgroups / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                places.append(cgroups / "memory" / path.lstrip("/") / "memory.oom_control")
    for place in (*places, proc / "vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in place.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None
