"""A process beside a search that reads a probe's records as they are written, and says when the probe has shown enough.

`python -m loadgen.search.watch`: one order a line on standard input, one reply to each on standard output; it ends with
its input. So the client's hot path does nothing for it: it neither judges nor reads.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.clock import now_ns
from loadgen.load.load import Load
from loadgen.monitor.tail import RecordTail
from loadgen.monitor.totals import CountedRecord
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.records import RequestTable
from loadgen.search.highest import Goal, ProbeTimes, judge
from loadgen.search.objective import Times, lateness

PERIOD_S = 0.5
BLOCK_BYTES = 1 << 16


class WatchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order: which run directory, what is sent, and what is asked of it. requests: counted ones, at the most."""

    directory: str
    load: Load
    limits_ms: dict[str, float]
    attain: float
    requests: int


class Enough(msgspec.Struct, frozen=True):
    """The reply: the probe in that directory may end."""

    directory: str


class Follower:
    """One probe's records so far."""

    def __init__(self, watch: WatchOrder) -> None:
        self._watch = watch
        self._due_ns = watch.load.due_ns() if watch.load.streams is None else None
        self._records = RecordTail(Path(watch.directory))
        self._t0_ns: int | None = None
        self._rows: list[tuple[int, ...]] = []

    def enough(self) -> bool:
        """Whether the probe has shown what it can show."""
        for record in self._records.records():
            self._take(record)
        if self._t0_ns is None or not self._rows:
            return False
        rows = np.asarray(self._rows, np.int64)
        _, sent_ns, first_ns, last_ns, done_ns, tokens, first_tokens, ended = rows.T
        times = Times(sent_ns, first_ns, last_ns, done_ns, tokens, first_tokens, ended == 1)
        over = ended >= 0
        late = worst(lateness(self._watch.limits_ms, times))
        elapsed_ns = now_ns() - self._t0_ns
        seen = assemble(self._due_ns, rows[over, 0], times.sent_ns[over], times.done_ns[over], late[over], elapsed_ns)
        return judge(Goal(attain=self._watch.attain), seen, self._watch.requests) is not None

    def _take(self, line: CountedRecord) -> None:
        if line.t0_monotonic_ns is not None:
            self._t0_ns = line.t0_monotonic_ns
        elif line.id is not None and line.phase == "measured":
            stamps = (line.sent_ns, line.first_token_ns, line.last_token_ns, line.done_ns)
            tokens = (line.output_tokens, line.first_tokens)
            ended = {"ok": 1, "cancelled": -1, "abandoned": -1}.get(line.outcome, 0)
            self._rows.append((line.id, *(each if isinstance(each, int) else -1 for each in (*stamps, *tokens)), ended))


def worst(late: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """For each request, its worst metric as a multiple of the limit; shape (n,)."""
    latest: NDArray[np.float64] = np.stack(list(late.values())).max(axis=0)
    return latest


def assemble(
    due_ns: NDArray[np.int64] | None,
    ids: NDArray[np.int64],
    sent_ns: NDArray[np.int64],
    done_ns: NDArray[np.int64],
    late: NDArray[np.float64],
    elapsed_ns: int,
) -> ProbeTimes:
    """The requests of a probe in the order in which they were sent, from those that are over (n,); due_ns: when each
    was due, of a closed loop None. A request that was due and is not over is under way."""
    known = ids < (len(due_ns) if due_ns is not None else int(ids.max(initial=-1)) + 1)
    ids, sent_ns, done_ns, late = ids[known], sent_ns[known], done_ns[known], late[known]
    if due_ns is not None:
        count = max(int(np.searchsorted(due_ns, elapsed_ns, "right")), int(ids.max(initial=-1)) + 1)
        sent_s = due_ns[:count] / 1e9
    else:
        count = int(ids.max(initial=-1)) + 1
        sent_s = np.zeros(count)
    done_s, lateness_ratio = np.full(count, np.inf), np.zeros(count)
    sent_s[ids] = np.where(sent_ns >= 0, sent_ns / 1e9, sent_s[ids])
    done_s[ids], lateness_ratio[ids] = np.maximum(done_ns / 1e9, sent_s[ids]), late
    return ProbeTimes(
        sent_s=np.maximum.accumulate(sent_s), done_s=done_s, late=lateness_ratio, elapsed_s=elapsed_ns / 1e9,
        open_loop=due_ns is not None,
    )  # fmt: skip


def times_of(table: RequestTable) -> Times:
    return Times(
        table.sent_ns, table.first_token_ns, table.last_token_ns, table.done_ns, table.output_tokens,
        table.first_tokens, table.ok,
    )  # fmt: skip


def seen_of(table: RequestTable, load: Load, limits_ms: Mapping[str, float], stopped_ns: int) -> ProbeTimes:
    """A probe that is over, from its measured requests. stopped_ns: when its last request was sent."""
    kept = (table.outcome != OUTCOMES.index("cancelled")) & ~table.abandoned
    late = worst(lateness(limits_ms, times_of(table)))
    due_ns = load.due_ns() if load.streams is None else None
    if due_ns is not None:
        due_ns = due_ns[: len(table)]
    return assemble(due_ns, table.id[kept], table.sent_ns[kept], table.done_ns[kept], late[kept], stopped_ns)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the search; its end closes our standard input
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(10)
    follower, directory, rest = None, "", b""
    while True:
        ready, _, _ = select.select([0], [], [], None if follower is None else PERIOD_S)
        if ready:
            if not (read := os.read(0, BLOCK_BYTES)):
                return
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                watch = msgspec.json.decode(line, type=WatchOrder)
                follower, directory = Follower(watch), watch.directory
        elif follower is not None and follower.enough():
            follower = None
            sys.stdout.buffer.write(msgspec.json.encode(Enough(directory)) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
