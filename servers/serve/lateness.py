"""How late a server sends the tokens of its timetable: what its machine adds to the truth."""

from __future__ import annotations

import math

from loadgen.rundir.emulation import Timetable

STEP_NS = 20_000  # the resolution of what is counted
MOST_STEPS = 50_000  # a second; what is later counts as that


class Lateness:
    """Counts tokens by how long after they were due they were sent."""

    def __init__(self) -> None:
        self._counts = [0] * (MOST_STEPS + 1)
        self._most_ns = 0

    def count(self, late_ns: int) -> None:
        self._counts[min(late_ns // STEP_NS, MOST_STEPS)] += 1
        if late_ns > self._most_ns:
            self._most_ns = late_ns

    def timetable(self, fixed: tuple[float, float, float] | None) -> Timetable:
        """fixed: ttft, the time of each further token and the jitter of both, where they are fixed."""
        tokens = sum(self._counts)
        ttft_ms, tpot_ms, jitter_ratio = fixed or (None, None, 0.0)
        return Timetable(
            ttft_ms=ttft_ms, tpot_ms=tpot_ms, jitter_ratio=jitter_ratio, tokens=tokens,
            late_p50_ms=self._quantile_ms(0.5, tokens), late_p99_ms=self._quantile_ms(0.99, tokens),
            late_max_ms=self._most_ns / 1e6 if tokens else None,
        )  # fmt: skip

    def _quantile_ms(self, part: float, tokens: int) -> float | None:
        """The upper end of the step that holds it."""
        rank, before = math.ceil(part * tokens), 0
        for step, count in enumerate(self._counts):
            before += count
            if count and before >= rank:
                return min((step + 1) * STEP_NS, self._most_ns) / 1e6
        return None
