"""What became of a run, from what it left behind: the reports of its ranks first, then its log, its exit code and the
kernel's count of processes that were killed for want of memory.

The ranks come first because they know best: a process may abort while it is torn down although all was measured, and
one that ran out of memory takes the others with it, each with an error of its own. `judge` is pure.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from training_probe.protocol import RankReport, Trial
from training_probe.results import Outcome

OOM_EXIT = 77  # a rank that has reported that it ran out of memory ends with this
REASON_CHARACTERS = 400
LAST_LINES = 3

# What torch, CUDA, Triton, NCCL and the C library say, in an exception or in the log.
OUT_OF_MEMORY = re.compile(
    r"\b(?i:cuda|hip)\b.{0,40}out of memory|(?i:nccl).*out of memory|Failed to CUDA (?:calloc|malloc|host alloc)"
    r"|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|MemoryError\b|std::bad_alloc|Cannot allocate memory"
)
_COMPILER_KILLED = re.compile(r"Killed signal terminated program")  # gcc's words, of an extension that is compiled
_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout.*")
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
# How torchrun reports each process that ended, the first of them under "Root Cause".
_FAILED_RANK = re.compile(r"^ *rank *: (\d+) .*\n *exitcode *: (-?\d+) ", re.MULTILINE)
_ROOT_CAUSE = "Root Cause (first observed failure)"
# torchrun's own words, which say nothing about the cause.
_LAUNCHER = re.compile(r"torch/distributed/elastic/")
_NOISE = re.compile(r"^[\s*^~]*$|^Setting OMP_NUM_THREADS ")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a run left. unreadable: reports that are none, by rank. exit_code: of the launcher, negative for a signal.
    given_up: why we ended it, a clause; None when it ended by itself. oom_killed: whether the kernel killed for want
    of memory meanwhile. steps_done: by rank 0, warm-up included."""

    reports: Mapping[int, RankReport] = field(default_factory=dict)
    unreadable: Mapping[int, str] = field(default_factory=dict)
    exit_code: int = 0
    given_up: str | None = None
    log: str = ""
    oom_killed: bool = False
    steps_done: int = 0

    @property
    def port_was_taken(self) -> bool:
        """Whether the processes never met because somebody took their port between our look and their start."""
        return not self.reports and not self.steps_done and _PORT_TAKEN.search(self.log) is not None


def judge(trial: Trial, found: Evidence) -> tuple[Outcome, str]:
    """The outcome and why; the reason of a good one is empty."""
    ranks = range(trial.cell.gpus)
    if all(rank in found.reports and found.reports[rank].outcome == "ok" for rank in ranks):
        doubt = None if trial.timeline else _not_timed(found.reports)
        return ("crashed", doubt) if doubt else ("ok", "")
    return _from_reports(found) or _out_of_memory(found) or _hung(trial, found) or ("crashed", _crash(trial, found))


def _not_timed(reports: Mapping[int, RankReport]) -> str | None:
    """Why nothing can be computed from reports that all say ok."""
    for rank, report in sorted(reports.items()):
        if report.steps < 1 or report.seconds is None or not isfinite(report.seconds) or report.seconds <= 0:
            return f"rank {rank} reports success, but {report.steps} timed steps in {report.seconds} s"
    steps = {report.steps for report in reports.values()}
    return None if len(steps) == 1 else f"the ranks report different numbers of steps: {min(steps)} to {max(steps)}"


def _from_reports(found: Evidence) -> tuple[Outcome, str] | None:
    """What some rank says of itself; running out of memory explains the other ranks' errors, and not the reverse."""
    said = sorted(found.reports.items())
    for rank, report in said:
        if report.outcome == "oom" or (report.outcome == "crashed" and OUT_OF_MEMORY.search(report.reason)):
            return "oom", one_line(f"rank {rank}: {report.reason or 'out of memory'}")
    for rank, report in said:
        if report.outcome == "unsupported":
            return "unsupported", one_line(report.reason or f"rank {rank} cannot run it")
    return None


def _out_of_memory(found: Evidence) -> tuple[Outcome, str] | None:
    match = OUT_OF_MEMORY.search(found.log)
    if match:
        start, end = found.log.rfind("\n", 0, match.start()) + 1, found.log.find("\n", match.end())
        return "oom", one_line(_RANK_PREFIX.sub("", found.log[start : end if end >= 0 else None]))
    if found.exit_code == OOM_EXIT or any(code == OOM_EXIT for _, code in _failed_ranks(found.log)):
        return "oom", f"a rank ended with exit code {OOM_EXIT}: out of memory"
    killed = found.exit_code == -signal.SIGKILL or any(code == -signal.SIGKILL for _, code in _failed_ranks(found.log))
    if found.oom_killed and (killed or _COMPILER_KILLED.search(found.log)):
        return "oom", "the kernel's OOM killer ended it: host memory"
    return None


def _hung(trial: Trial, found: Evidence) -> tuple[Outcome, str] | None:
    watchdog = _WATCHDOG.search(found.log)
    if found.given_up is None and watchdog is None:
        return None
    said = [found.given_up or "a collective operation hung", _progress(trial, found)]
    return "timeout", one_line("; ".join([*said, *([watchdog.group()] if watchdog else [])]))


def _crash(trial: Trial, found: Evidence) -> str:
    """Who ended how, and the last that it said."""
    failed = _failed_ranks(found.log)
    # A rank's own signal tells more than the errors of those that it left alone; SIGTERM and SIGKILL are torchrun's.
    ended = (signal.SIGTERM, signal.SIGKILL)
    own = [(rank, code) for rank, code in failed if code < 0 and -code not in ended] or failed
    rank, code = own[0] if own else (None, found.exit_code)
    crashed = {number: report.reason for number, report in found.reports.items() if report.outcome == "crashed"}
    who = "its launcher" if rank is None else f"rank {rank}"
    if crashed and (code >= 0 or rank is None):
        rank = rank if rank in crashed else min(crashed)
        return one_line(f"rank {rank}: {crashed[rank] or 'it does not say why'}")
    if found.unreadable:
        rank = min(found.unreadable)
        how = f"rank {rank} left a report that cannot be read ({found.unreadable[rank]})"
    elif code < 0:
        how = f"{who} was killed by {signal_name(-code)}"
    elif code:
        how = f"{who} ended with exit code {code}"
    else:
        missing = [str(number) for number in range(trial.cell.gpus) if number not in found.reports]
        how = f"it ended without an error and without a report of rank {', '.join(missing)}"
    last = _last_words(found.log, rank)
    return one_line(f"{how}; {_progress(trial, found)}" + (f"; it said: {last}" if last else ""))


def _failed_ranks(log: str) -> list[tuple[int, int]]:
    """Rank and exit code of each process that torchrun saw end, the one that it takes for the cause first."""
    others, _, cause = log.rpartition(_ROOT_CAUSE)
    return [(int(rank), int(code)) for part in (cause, others) for rank, code in _FAILED_RANK.findall(part)]


def _last_words(log: str, rank: int | None) -> str:
    launcher = _LAUNCHER.search(log)
    before = log[: log.rfind("\n", 0, launcher.start()) + 1] if launcher else log
    lines = [line for line in before.splitlines() if not _NOISE.match(_RANK_PREFIX.sub("", line))]
    own_lines = [line for line in lines if line.startswith(f"[rank{rank}]:")]
    nobodys = [line for line in lines if rank is None or not _RANK_PREFIX.match(line)]  # torch marks exceptions only
    return " | ".join(_RANK_PREFIX.sub("", line).strip() for line in (own_lines or nobodys)[-LAST_LINES:])


def _progress(trial: Trial, found: Evidence) -> str:
    return f"{found.steps_done} of {trial.warmup_steps + trial.steps} steps were done"


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
    machine; None where neither is told."""
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
