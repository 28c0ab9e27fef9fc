"""Whether the client itself was late or busy, and what that does to the numbers. Pure: reported numbers and facts in,
findings out.

Every threshold is a constant with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loadgen.report.finding import Finding, Severity, share
from loadgen.report.schema import CeilingUse, Numbers
from loadgen.rundir import HEADROOM_RATIO, processes_for
from loadgen.rundir.records import ClientFacts

# Lateness of the client below this is the grain of timers and schedulers, whatever it is compared with.
LAG_FLOOR_MS = 2.0
# The arrival pattern is what was asked as long as p99 lateness is small against what the server's queue can notice:
# the longer of its time to a first token and the mean time between arrivals.
SEND_LAG_WARNING_RATIO = 0.1
SEND_LAG_INVALID_RATIO = 0.5
# A stamp is late by at most the lag. A tenth of a typical ttft is more than most comparisons want to resolve; at half
# of it the client is a large part of what is measured.
TTFT_LAG_WARNING_RATIO = 0.1
TTFT_LAG_INVALID_RATIO = 0.5
# Gaps are differences of stamps, so a steady lag cancels; half a token time does not, and beyond a whole one the
# gaps show the rhythm of the client.
TPOT_LAG_WARNING_RATIO = 0.5
TPOT_LAG_INVALID_RATIO = 1.0
# In a second this busy, replies waited in the kernel for the client. One such second delays some stamps (LOOP_LAG says
# by how much), so it warns; when the whole run is this busy, throughput is the client's own.
CPU_SATURATED_RATIO = 0.9
# Each such request waited for a dead connection first. A server that closes one idle connection in a thousand at the
# wrong moment is usual; more of them show in p99 of the _from_schedule metrics.
RETRIED_RATIO = 0.001
STALLS_NAMED = 3
STEAL_RATIO = 0.01  # a hundredth: p99 may be made of it
BUSY_RATIO = 0.85  # of a machine's cores in the mean: a further client process would only wait for one


def find(numbers: Numbers, facts: Sequence[ClientFacts]) -> Iterator[Finding]:
    """What the client's own lateness and CPU do to `numbers`; `facts`: one of each of its processes."""
    ttft_ms, tpot_ms = numbers.metrics["ttft_ms"].p50, numbers.metrics["tpot_ms"].p50
    machine = _Machine.of(facts)
    remedy = machine.remedy(_processes(numbers, facts))
    yield from _send_lag(numbers, remedy)
    yield from _retried(numbers)
    yield from _stalls(numbers)
    if facts:
        yield from _lags(facts, ttft_ms, tpot_ms, machine, remedy)
        yield from _cpu(facts, machine, remedy)
        yield from _steal(machine)
    if numbers.ceiling is not None:
        yield from _ceiling(numbers.ceiling, ttft_ms, tpot_ms, remedy)


class _Machine(NamedTuple):
    """What else its CPUs did while the clients sent. others: cores that other programs used; None: nobody tells."""

    steal_ratio: float
    cores: int
    ours: float
    others: float | None

    @classmethod
    def of(cls, facts: Sequence[ClientFacts]) -> _Machine:
        steal_ratio = max((fact.steal_ratio or 0.0 for fact in facts), default=0.0)
        ours = sum(fact.cpu_s / fact.wall_s for fact in facts if fact.wall_s > 0)
        busy = max((fact.busy_cores for fact in facts if fact.busy_cores is not None), default=None)
        cores = max((fact.cores or 0 for fact in facts), default=0)
        return cls(steal_ratio, cores, ours, None if busy is None else max(0.0, busy - ours))

    @property
    def is_full(self) -> bool:
        return self.others is not None and self.ours + self.others >= BUSY_RATIO * self.cores

    def usage(self) -> str:
        """As the end of a sentence on what the client did; empty where nothing is known."""
        if self.others is None:
            return ""
        others = f"other programs {self.others:.1f}"
        used = f"; meanwhile the client used {self.ours:.1f} of this machine's {self.cores} cores, {others}"
        return used + (f", and the host took {self.steal_ratio:.1%}" if self.steal_ratio > STEAL_RATIO else "")

    def remedy(self, processes: int) -> str:
        """What would help a client that is late; processes: that would have had room."""
        if self.steal_ratio > STEAL_RATIO:
            return "Run the client on a machine whose host gives its CPU to nobody else"
        if self.is_full:
            return (
                "Run the client on another machine, or one with more cores, or keep it and the server apart with "
                "`taskset -c`"
            )
        return f"Use --workers {processes}, or run the client on a faster machine"


def _processes(numbers: Numbers, facts: Sequence[ClientFacts]) -> int:
    """Client processes that would have had room for this run, at least one more than there were."""
    ceiling = numbers.ceiling
    peak_events_per_s = None if ceiling is None else ceiling.peak_events_per_s
    return max(len(facts) + 1, 2, processes_for(peak_events_per_s or 0.0, ceiling))


def _lag_severity(lag_ms: float, ttft_ms: float | None, tpot_ms: float | None) -> tuple[Severity, str] | None:
    """How bad it is that stamps may be late by `lag_ms`, and against what."""
    if lag_ms <= LAG_FLOOR_MS:
        return None
    scales = (
        ("ttft", ttft_ms, TTFT_LAG_WARNING_RATIO, TTFT_LAG_INVALID_RATIO),
        ("tpot", tpot_ms, TPOT_LAG_WARNING_RATIO, TPOT_LAG_INVALID_RATIO),
    )
    worst: tuple[Severity, str] | None = None
    for name, scale_ms, warning, invalid in scales:
        if scale_ms is None or lag_ms <= warning * scale_ms:
            continue
        if lag_ms > invalid * scale_ms:
            return "invalid", f"{name} p50 is {scale_ms:.1f} ms"
        worst = worst or ("warning", f"{name} p50 is {scale_ms:.1f} ms")
    return worst


def _lags(
    facts: Sequence[ClientFacts], ttft_ms: float | None, tpot_ms: float | None, machine: _Machine, remedy: str
) -> Iterator[Finding]:
    lags = (
        ("LOOP_LAG", "The client's event loop", max(fact.loop_lag_p99_ms for fact in facts)),
        ("RECEIVE_LAG", "Reading after the kernel had the data", max(fact.receive_lag_p99_ms or 0.0 for fact in facts)),
    )
    for code, what, lag_ms in lags:
        verdict = _lag_severity(lag_ms, ttft_ms, tpot_ms)
        if verdict is not None:
            yield Finding(
                code=code,
                severity=verdict[0],
                message=f"{what} was late by {lag_ms:.1f} ms (p99) where {verdict[1]}{machine.usage()}.",
                advice=f"{remedy}.",
            )


def _cpu(facts: Sequence[ClientFacts], machine: _Machine, remedy: str) -> Iterator[Finding]:
    busiest = max(fact.cpu_peak_ratio for fact in facts)
    mean = max(fact.cpu_s / fact.wall_s if fact.wall_s > 0 else 0.0 for fact in facts)
    if busiest >= CPU_SATURATED_RATIO:
        whole = mean >= CPU_SATURATED_RATIO
        yield Finding(
            code="CLIENT_CPU",
            severity="invalid" if whole else "warning",
            message=f"A client process used {busiest:.2f} of a core in its busiest second and {mean:.2f} on average"
            + (", so throughput is the client's own limit" if whole else "")
            + f"{machine.usage()}.",
            advice=f"{remedy}.",
        )


def _stalls(numbers: Numbers) -> Iterator[Finding]:
    if not numbers.late_statistics:
        return
    longest = sorted(numbers.client_stalls, key=lambda stall: stall.start_s - stall.end_s)[:STALLS_NAMED]
    times = "; ".join(
        f"{1000 * (stall.end_s - stall.start_s):.0f} ms at {stall.start_s:.1f} s, {stall.requests} requests"
        for stall in longest
    )
    late = {name.removesuffix("_ms"): each for name, each in numbers.late_statistics.items()}
    moved = "; ".join(f"{name} {', '.join(each).replace('_', '.')}" for name, each in late.items())
    count = len(numbers.client_stalls)
    yield Finding(
        code="CLIENT_STALL",
        severity="warning",
        message=f"The client itself stood still {count} time{'' if count == 1 else 's'}, at worst {times}. These are "
        f"larger for it: {moved}.",
        advice="Do not quote these statistics as the server's; free the machine, or run again. Was it suspended?",
    )


def _steal(machine: _Machine) -> Iterator[Finding]:
    ratio = machine.steal_ratio
    if ratio > STEAL_RATIO:
        yield Finding(
            code="STEAL",
            severity="warning",
            message=f"The host of this virtual machine gave {ratio:.1%} of its CPU time to others during the run.",
            advice="Run the client on a machine, or a virtual one, that has its cores for itself.",
        )


def _send_lag(numbers: Numbers, remedy: str) -> Iterator[Finding]:
    metrics = numbers.metrics
    lag_ms = metrics["send_lag_ms"].p99
    if lag_ms is None or lag_ms <= LAG_FLOOR_MS:
        return
    duration_s, ok = numbers.duration_s, numbers.requests.ok
    interarrival_ms = 1000 * duration_s / ok if duration_s and numbers.burst is None else 0.0
    scale_ms = max(metrics["ttft_ms"].p50 or metrics["e2el_ms"].p50 or 0.0, interarrival_ms)
    if lag_ms <= SEND_LAG_WARNING_RATIO * scale_ms:
        return
    yield Finding(
        code="SEND_LAG",
        severity="invalid" if lag_ms > SEND_LAG_INVALID_RATIO * scale_ms else "warning",
        message=f"Requests left {lag_ms:.1f} ms after they were due (p99), where ttft or the time between arrivals is "
        f"{scale_ms:.1f} ms: the load was smoother than asked.",
        advice=f"{remedy}; the _from_schedule metrics include this wait.",
    )


def _retried(numbers: Numbers) -> Iterator[Finding]:
    retried, requests = numbers.retried_connections, numbers.requests.ok + numbers.requests.failed
    if retried > RETRIED_RATIO * requests:
        yield Finding(
            code="RETRIED_CONNECTIONS",
            severity="warning",
            message=f"{retried} of {requests} requests ({share(retried, requests)}) were sent twice: the server had "
            "closed the kept connection that they met; it may have seen them twice.",
            advice="Use --connect fresh, or raise the server's keep-alive timeout.",
        )


def _ceiling(ceiling: CeilingUse, ttft_ms: float | None, tpot_ms: float | None, remedy: str) -> Iterator[Finding]:
    ratio, peak_events_per_s = ceiling.headroom_ratio, ceiling.peak_events_per_s
    if ratio is not None and peak_events_per_s is not None and ratio < HEADROOM_RATIO:
        yield Finding(
            code="HEADROOM",
            severity="warning",
            message=f"The busiest second had {peak_events_per_s:.0f} events; this client can take about "
            f"{peak_events_per_s * ratio:.0f} a second here ({ratio:.1f} times as many).",
            advice=f"{remedy}.",
        )
    error_ms = ceiling.event_error_p99_ms
    verdict = _lag_severity(error_ms or 0.0, ttft_ms, tpot_ms)
    if verdict is not None:
        yield Finding(
            code="EVENT_ERROR",
            severity="warning",  # of the calibration; what the client did in the run itself is in its lags
            message=f"Before the run this client stamped events {error_ms:.1f} ms late (p99), by the embedded server's "
            f"own send times, where {verdict[1]}.",
            advice=f"{remedy}.",
        )
