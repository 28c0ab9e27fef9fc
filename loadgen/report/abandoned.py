"""Requests that the client gave up on purpose, and those that it sent again: numbers, and what they say of the server.

Whether a server stops its work for a client that has left, nobody else need believe its word for: where requests wait,
a reply that ends lets the next one begin. A reply that is given up must do so as soon; if the server goes on with it,
the next one begins when that reply would have ended. Pure: the table in, numbers and findings out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from loadgen.document.content import number
from loadgen.report import metrics
from loadgen.report.finding import Finding
from loadgen.report.metrics import Convention
from loadgen.report.schema import Abandoned, Numbers, Resent
from loadgen.rundir.records import RequestTable

LEAST = 10  # of each kind, before their medians are compared
APART = 3.0  # times what a slot takes to be filled must a held one take, or the two cannot be told apart
# A request that has had no token for so many times the shortest wait of all waits for a slot, not for its prompt.
WAITS = 2.0
# Of the most replies under way, or so many fewer: with less, something else than slots is what others wait for.
FULL_RATIO, FULL_BUT = 0.9, 2


def build(measured: RequestTable, rules: Convention) -> Abandoned | None:
    """None where no request was given up."""
    gone = measured.abandoned
    if not gone.any():
        return None
    begun = (measured.first_token_ns != -1) & (measured.done_ns != -1)
    refilled_ms, rows = _refilled(measured, np.flatnonzero(begun))
    seen = rows[~np.isnan(refilled_ms)]
    refilled_ms = refilled_ms[~np.isnan(refilled_ms)]
    left = np.maximum(measured.asked_tokens - measured.events, 0)
    tpot_ms = metrics.summary(metrics.sample(measured, "tpot_ms", rules), rules.percentile).p50
    held_ms = (left * (np.nan if tpot_ms is None else tpot_ms))[seen[gone[seen]]]
    found = Abandoned(
        requests=int(gone.sum()),
        events=int(measured.events[gone].sum()),
        slots="unknown",
        refilled_abandoned_ms=metrics.summary_of(refilled_ms[gone[seen]], rules),
        refilled_ended_ms=metrics.summary_of(refilled_ms[~gone[seen]], rules),
        held_ms=metrics.summary_of(held_ms, rules),
    )
    return _judged(found)


def _judged(found: Abandoned) -> Abandoned:
    """By which of the two the median is nearer to, as a ratio."""
    given_up, ended, held = (each.p50 for each in (found.refilled_abandoned_ms, found.refilled_ended_ms, found.held_ms))
    enough = min(found.refilled_abandoned_ms.n, found.refilled_ended_ms.n) >= LEAST
    if given_up is None or ended is None or held is None or not enough or held < APART * ended:
        return found
    freed = given_up**2 <= max(ended, 1e-3) * held
    return Abandoned(**{name: getattr(found, name) for name in found.__struct_fields__} | {"slots": _WORD[freed]})


_WORD = {True: "freed", False: "held"}


def _refilled(measured: RequestTable, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """For each reply of `rows`, in the order in which they ended: how long until as many were under way as just before,
    in ms; NaN where nobody waited then, or where that never came."""
    rows = rows[np.argsort(measured.done_ns[rows], kind="stable")]
    begin_ns, end_ns = np.sort(measured.first_token_ns[rows]), measured.done_ns[rows]
    at_ns = np.concatenate((begin_ns, end_ns))
    change = np.concatenate((np.ones(len(begin_ns), np.int64), -np.ones(len(end_ns), np.int64)))
    order = np.argsort(at_ns, kind="stable")
    level, place = np.cumsum(change[order]), np.empty_like(order)
    place[order] = np.arange(len(order))
    back = _next_at_least(level)[place[len(begin_ns) :]]
    found = np.where(back >= 0, (at_ns[order][np.maximum(back, 0)] - end_ns) / 1e6, np.nan)
    before = level[place[len(begin_ns) :]] + 1
    most = int(level.max(initial=0))
    found[~_waits(measured, end_ns) | (before < min(FULL_RATIO * most, most - FULL_BUT))] = np.nan
    return found, rows


def _next_at_least(level: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each place of a fall, the next place at which `level` is what it was before it; -1: none. (n,)"""
    found = np.full(len(level), -1)
    open_at: list[tuple[int, int]] = []  # what level to come back to, and the place of the fall
    for place, value in enumerate(level.tolist()):
        while open_at and open_at[-1][0] <= value:
            found[open_at.pop()[1]] = place
        if place and value < level[place - 1]:
            open_at.append((value + 1, place))
    return found


def _waits(measured: RequestTable, at_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a request waited for a slot then (n,): it had been sent long before, and had no token."""
    begun = (measured.first_token_ns != -1) & (measured.sent_ns != -1)
    wait_ns = (measured.first_token_ns - measured.sent_ns)[begun]
    if not len(wait_ns):
        return np.zeros(len(at_ns), np.bool_)
    waits_from = np.sort((measured.sent_ns + WAITS * wait_ns.min())[begun][wait_ns > WAITS * wait_ns.min()])
    waits_to = np.sort(measured.first_token_ns[begun][wait_ns > WAITS * wait_ns.min()])
    waiting: NDArray[np.bool_] = np.searchsorted(waits_from, at_ns, "right") > np.searchsorted(waits_to, at_ns, "right")
    return waiting


def resent(measured: RequestTable, rules: Convention) -> Resent | None:
    """None where no request was sent again."""
    if not measured.resent_ns:
        return None
    rows = np.flatnonzero(np.isin(measured.id, list(measured.resent_ns)))
    last_ns = np.array([measured.resent_ns[id][-1] for id in measured.id[rows].tolist()])
    return Resent(
        requests=len(rows),
        ok=int(measured.ok[rows].sum()),
        sent=len(rows) + sum(map(len, measured.resent_ns.values())),
        waited_ms=metrics.summary_of((last_ns - measured.sent_ns[rows]) / 1e6, rules),
    )


def lines(report: Numbers) -> Iterator[str]:
    """What the client gave up, and what it sent again, in a sentence each."""
    if (gone := report.abandoned) is not None:
        requests, events = number(gone.requests), number(gone.events)
        yield f"Given up by the client: {requests} requests, after {events} events. {_slots(gone)}"
    if (again := report.resent) is not None:
        yield (
            f"Sent again after 429 or 503: {number(again.requests)} requests, {number(again.sent)} times in all, of "
            f"which {number(again.ok)} ended ok; from the first time to the last {number(again.waited_ms.p50)} ms "
            f"(p50), {number(again.waited_ms.p99)} ms (p99), which their ttft and e2el hold."
        )


def _slots(gone: Abandoned) -> str:
    if gone.slots == "unknown":
        return "Whether the server freed their slots does not show: too few others waited for one."
    return (
        f"Their slots were {gone.slots}: others that waited took one over {number(gone.refilled_abandoned_ms.p50)} ms "
        f"later (p50), after replies that ended {number(gone.refilled_ended_ms.p50)} ms; the rest of their replies "
        f"would have taken {number(gone.held_ms.p50)} ms."
    )


def find(numbers: Numbers) -> Iterator[Finding]:
    """Whether the server works for clients that have left."""
    if numbers.abandoned is not None and numbers.abandoned.slots == "held":
        yield Finding(
            code="SLOTS_HELD",
            severity="warning",
            message=f"The server went on with replies whose clients had left. {_slots(numbers.abandoned)}",
            advice="Let the server end what its client has given up; a proxy before it must pass on that a connection "
            "has ended.",
        )
