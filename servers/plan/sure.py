"""How sure a planned rate is: the search of `loadgen.search.highest`, each probe of it played in virtual time.

Screening (sizing.py) plays the same short run to every candidate, which ranks them; the rate it finds hangs on the
requests of that run. Here every probe draws its own, until the interval is narrow or MOST_REQUESTS are spent.
"""

from __future__ import annotations

import math

import numpy as np

from loadgen.search.highest import Goal, HighestLoad, NextProbe, Prior, Probe, ProbeTimes, highest, watched
from servers.plan.sizing import Demand, LatencyLimits, replying, took_s
from servers.schedulers import Rejected, Sequence
from servers.simulator.build import Emulated
from servers.simulator.virtual import uncollected

MOST_REQUESTS = 30_000  # of all probes: seconds of computing
GUESS_SPREAD = 0.1  # of the rate that screening found, as a logarithm
MARGIN = 1.6  # requests of a probe over those that count: its start does not
LOOK_GROWTH = 1.3  # each look at a probe has so many times the requests of the one before
FIRST_LOOK = 100  # requests


def surest(emulated: Emulated, demand: Demand, limits: LatencyLimits, rate: float) -> HighestLoad:
    """The highest rate (requests/s) of one server, near `rate`, at which the limits' share of the requests keep every
    limit, with its interval. demand: single requests, of which there are more when they are drawn again."""
    goal = Goal(attain=limits.percentile / 100, budget_s=MOST_REQUESTS / rate)
    probes = _Probes(emulated, demand, limits)
    found, _, _ = highest(lambda order: probes.play(goal, order), goal, Prior(load=rate, spread=GUESS_SPREAD))
    return found


class _Probes:
    """Probes of one server, each with Poisson arrivals of its own."""

    def __init__(self, emulated: Emulated, demand: Demand, limits: LatencyLimits) -> None:
        self._emulated = emulated
        self._limits = limits
        self._shapes = [each[1:] for each in demand.arrivals]
        self._random = np.random.default_rng(demand.load.seed)

    @uncollected()
    def play(self, goal: Goal, order: NextProbe) -> Probe:
        """One probe, as far as it takes to be sure."""
        most = int(min(MARGIN * order.requests, order.seconds * order.load))
        sent_s = np.cumsum(self._random.exponential(1 / order.load, max(2 * FIRST_LOOK, most)))
        count = len(sent_s)
        done_s, late = np.full(count, np.inf), np.zeros(count)

        def end(sequence: Sequence, first_s: float, last_s: float) -> None:
            index = sequence.index
            done_s[index] = last_s
            late[index] = max(self._limits.lateness(took_s(sent_s[index], first_s, last_s, sequence.output)).values())

        engine, submitted = replying(self._emulated, end), 0

        def seen(until_s: float) -> ProbeTimes:
            nonlocal submitted
            so_far = int(np.searchsorted(sent_s, until_s, "right"))
            for index in range(submitted, so_far):
                at_s = float(sent_s[index])
                try:
                    engine.submit(Sequence(index, *self._shapes[index % len(self._shapes)]), at_s)
                except Rejected:
                    done_s[index], late[index] = at_s, math.inf
            submitted = so_far
            over_s = np.where(done_s[:so_far] <= until_s, done_s[:so_far], np.inf)
            return ProbeTimes(sent_s=sent_s[:so_far], done_s=over_s, late=late[:so_far], elapsed_s=until_s)

        looks = np.unique((FIRST_LOOK * LOOK_GROWTH ** np.arange(50)).astype(int))
        return watched(goal, order, seen, [float(sent_s[look]) for look in (*looks[looks < count - 1], count - 1)])
