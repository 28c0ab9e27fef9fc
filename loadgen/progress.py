"""What a person sees of a run while it goes on, where no terminal shows the live view: a quiet line at times."""

from __future__ import annotations

import statistics
import time

from loadgen.client.engine import LiveCounters
from loadgen.steady.live import words
from loadgen.terminal import note

QUIET_EVERY_S = 10.0


class ProgressLine:
    """Takes the snapshots of all client processes once a second, and writes a line to standard error at times."""

    def __init__(self) -> None:
        self._written_s = time.monotonic()
        self._written = (0.0, 0)  # s since t = 0, and the events until then

    def __call__(self, snapshots: list[LiveCounters], drawn: bool, falling_per_s: float | None = None) -> None:
        """drawn: the live view shows it all. falling_per_s: where the server falls behind."""
        events, elapsed_s = sum(each.events for each in snapshots), max(each.elapsed_s for each in snapshots)
        if not drawn and time.monotonic() - self._written_s >= QUIET_EVERY_S:
            since_s, before = self._written
            shown = line(snapshots, (events - before) / max(elapsed_s - since_s, 1e-3))
            note(shown + ("" if falling_per_s is None else f"; {words(falling_per_s)}"))
            self._written_s, self._written = time.monotonic(), (elapsed_s, events)


def line(snapshots: list[LiveCounters], events_per_s: float) -> str:
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
