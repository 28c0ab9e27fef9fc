"""What a person sees while a run goes on: one line kept up to date on a terminal, a quiet line at times elsewhere."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time

from loadgen.client.engine import Snapshot

QUIET_EVERY_S = 10.0


class ProgressLine:
    """Takes the snapshots of all client processes once a second and writes to standard error."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last = (time.monotonic(), 0)
        self._written_s = time.monotonic()

    def __call__(self, snapshots: list[Snapshot]) -> None:
        if not snapshots:
            return
        now = time.monotonic()
        events = sum(snapshot.events for snapshot in snapshots)
        if events < self._last[1]:  # another run of the same command has begun
            self._last = (self._last[0], 0)
        rate = (events - self._last[1]) / max(now - self._last[0], 1e-3)
        text = line(snapshots, rate)
        if self._live:
            _write(f"\r\x1b[2K{text}")
        elif now - self._written_s >= QUIET_EVERY_S:
            _write(text + "\n")
            self._written_s = now
        self._last = (now, events)

    def end(self) -> None:
        if self._live:
            _write("\r\x1b[2K")


def _write(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone, and the run goes on
        sys.stderr.write(text)
        sys.stderr.flush()


def line(snapshots: list[Snapshot], events_per_s: float) -> str:
    """Done of planned, failed, in flight, tokens/s (an event taken for one), the median TTFT of the latest replies."""
    done, failed, in_flight = (sum(getattr(s, key) for s in snapshots) for key in ("done", "failed", "in_flight"))
    plans = [snapshot.planned for snapshot in snapshots]
    of = "" if None in plans else f"/{sum(plan or 0 for plan in plans)}"
    recent = [value for snapshot in snapshots for value in snapshot.ttft_ms]
    ttft = f", TTFT p50 {statistics.median(recent):.0f} ms" if recent else ""
    elapsed = max(snapshot.elapsed_s for snapshot in snapshots)
    return (
        f"{elapsed:4.0f} s  {done}{of} done, {failed} failed, {in_flight} in flight, {events_per_s:,.0f} tokens/s{ttft}"
    )
