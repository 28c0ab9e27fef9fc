"""Whether a server falls behind while a run lasts, from a few counts at each look. Pure, and cheap at any rate.

The requests of each of the last three quarters of the time so far took in the mean W = N / X (Little's law): N of them
were in flight, and X ended a second. A server falls behind where W has grown from quarter to quarter, of late at least
half as much as before, and where that growth times the rate of arrivals is beyond what `keeping_up` lets a stable queue
hold and a queue at its limit wander. The lives of an empty server that fills do not grow, nor does a load that changes
by itself make them. It looks again and again, so it asks more than the verdict after the run.
"""

from __future__ import annotations

import math

import numpy as np

from loadgen.load.load import parse_arrival
from loadgen.steady.flows import JUDGED
from loadgen.steady.keeping_up import LEAST, STABLE_ALONE

LEAST_S, EVERY_S = 8.0, 0.5
LEAST_ENDED = 2 * LEAST
WANDERS = 3.0  # times sqrt(v n)
LENGTHS = 1.0  # what lengths may add to v, the sum of squared coefficients of variation
MOST_LOOKS = 512  # then every other one is forgotten


class Falling:
    """Of one run, or of nothing where no requests arrive by themselves."""

    def __init__(self, arrival: str) -> None:
        self._judged = arrival.partition(":")[0] in JUDGED
        self._variation = LENGTHS + _gaps(arrival)
        self._looks: list[tuple[float, int, int]] = [(0.0, 0, 0)]

    def look(self, elapsed_s: float, sent: int, ended: int) -> float | None:
        """By how many requests a second more arrive than leave, where the server falls behind."""
        if not self._judged or elapsed_s - self._looks[-1][0] < EVERY_S:
            return None
        self._looks.append((elapsed_s, sent, ended))
        if len(self._looks) > MOST_LOOKS:
            self._looks = self._looks[::2]
        return self._growth() if elapsed_s >= LEAST_S and ended >= LEAST_ENDED else None

    def _growth(self) -> float | None:
        at_s, sent, ended = (np.asarray(column, np.float64) for column in zip(*self._looks, strict=True))
        edges_s = np.linspace(0, at_s[-1], 5)[1:]
        sent_at, ended_at = np.interp(edges_s, at_s, sent), np.interp(edges_s, at_s, ended)
        arrived_per_s, ended_per_s = (np.diff(each) / np.diff(edges_s) for each in (sent_at, ended_at))
        if ended_per_s.min() <= 0:
            return None
        quarter = np.searchsorted(edges_s[1:-1], at_s, side="left")
        within = at_s > edges_s[0]
        if np.bincount(quarter[within], minlength=3).min() == 0:
            return None
        lives_s = [float((sent - ended)[within & (quarter == each)].mean() / ended_per_s[each]) for each in range(3)]
        before_s, late_s = lives_s[1] - lives_s[0], lives_s[2] - lives_s[1]
        n = float(sent_at[-1] - sent_at[0])
        beyond = max(STABLE_ALONE * self._variation, WANDERS * math.sqrt(self._variation * n))
        grew = float(arrived_per_s[2]) * (late_s + before_s)
        growth = float(arrived_per_s[2] - ended_per_s[2])
        return growth if before_s > 0 and late_s >= before_s / 2 and grew > beyond and growth > 0 else None


def _gaps(arrival: str) -> float:
    """The squared coefficient of variation of the gaps between arrivals, by their law."""
    kind = arrival.partition(":")[0]
    if kind == "constant":
        return 0.0
    try:
        return float(parse_arrival(arrival).cv ** 2) if kind == "gamma" else 1.0
    except ValueError:
        return 1.0


def words(growth_per_s: float) -> str:
    shown = f"{growth_per_s:.0f}" if growth_per_s >= 10 else f"{growth_per_s:.1f}"
    return f"falling behind: {shown} requests/s more arrive than leave"
