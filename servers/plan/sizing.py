"""How much one server can take: the highest Poisson rate at which it keeps its limits and works off what comes.

In virtual time. Every rate and every server meets the same arrivals, faster or slower, so that two answers differ by
what differs between the servers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from loadgen.load import arrivals as schedule
from loadgen.load.load import Load
from servers.schedulers import Rejected, Sequence
from servers.simulator.build import Emulated
from servers.simulator.virtual import Arrival, bounds, simulate

METRICS = ("ttft", "tpot", "e2el")
BURST = 512  # most requests of the burst that shows how fast a server can work off what it has
STABLE_RATIO = 0.95  # of that rate; beyond it, queues grow for longer than a short run can show
LIVES = 8  # a run lasts at least so many times as long as a request
STRETCH = 10  # and at most so many times the requests of the option
TOLERANCE = 1.1  # the highest rate is found within this factor
LONELY = 0.1  # requests under way on average: below this a server is not crowded, and a lower rate will not help it


class NotMet(Exception):
    """A candidate that will not do. One phrase."""


class _Missed(Exception):
    """The limit that more requests have missed than may."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds by metric; `percentile` percent of the requests keep each of them."""

    seconds: dict[str, float]
    percentile: float = 99.0


@dataclass(frozen=True, kw_only=True)
class Demand:
    """A load that comes at random, `rate` requests a second. `requests`: how many a run has at least."""

    rate: float
    load: Load
    requests: int = 400

    @functools.cached_property
    def arrivals(self) -> list[Arrival]:
        """Poisson arrivals of one a second: every rate and every server meets the same, faster or slower. Raises
        WorkloadError."""
        drawn = schedule.draw(schedule.Arrival("poisson", 1.0), STRETCH * self.requests, None, 0)
        shapes = self.load.shapes()
        return [Arrival(float(at_ns) / 1e9, *shapes.shape(number)[:3]) for number, at_ns in enumerate(drawn)]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run. missed: the limit that it did not keep. percentiles: seconds by metric, NaN where there are none.
    in_flight: most at once."""

    missed: str | None
    percentiles: dict[str, float]
    in_flight: int


def trial(emulated: Emulated, demand: Demand, limits: Limits, rate: float, settled_s: float) -> Trial:
    """One server at `rate` requests/s. It ends early when more have missed a limit than may. Those that come before
    `settled_s` are served and not judged: the server is not yet as full as it will be."""
    first_s: dict[int, float] = {}
    sent_s: list[float] = []
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    misses = dict.fromkeys(limits.seconds, 0)
    may_miss = 1 - limits.percentile / 100
    judged = ended = most = 0
    lives_s = 0.0

    def miss(name: str) -> None:
        misses[name] += 1
        if misses[name] > may_miss * max(judged, demand.requests) + 1e-9:
            raise _Missed(name)

    def end(index: int, output: int, at_s: float) -> None:
        nonlocal ended, lives_s
        sent, first = sent_s[index], first_s.pop(index)
        ended += 1
        lives_s += at_s - sent
        if sent < settled_s:
            return
        took = (first - sent, (at_s - first) / (output - 1) if output > 1 else math.nan, at_s - sent)
        for name, value in zip(METRICS, took, strict=True):
            values[name].append(value)
            if value > limits.seconds.get(name, math.inf):
                miss(name)

    def deliver(emits: list[Sequence], at_s: float, gap_s: float) -> None:
        for sequence in emits:
            if sequence.emitted == 1:
                first_s[sequence.index] = at_s
            if sequence.emitted == sequence.output:
                end(sequence.index, sequence.output, at_s)
            at_s += gap_s

    engine = emulated.engine(deliver)
    missed = None
    try:
        for index, arrival in enumerate(demand.arrivals):
            at_s = arrival.at_s / rate
            if judged >= demand.requests and ended and at_s >= LIVES * lives_s / ended:
                break
            sent_s.append(at_s)
            judged += at_s >= settled_s
            try:
                engine.submit(Sequence(index, *arrival[1:]), at_s)
            except Rejected:
                ended += 1
                if at_s >= settled_s:
                    for name in limits.seconds:
                        miss(name)
            most = max(most, index + 1 - ended)
        engine.advance(math.inf)
    except _Missed as reason:
        missed = str(reason)
    percentiles = {name: _percentile(each, limits.percentile) for name, each in values.items()}
    return Trial(missed=missed, percentiles=percentiles, in_flight=most)


def _percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent, method="inverted_cdf")) if values else math.nan


class SizedServer:
    """One server's limits. Raises NotMet where the longest request, or one of usual length, is too much for it."""

    def __init__(self, emulated: Emulated, demand: Demand, limits: Limits) -> None:
        self._emulated = emulated
        self._demand = demand
        self._limits = limits
        longest = max(demand.arrivals, key=lambda each: each.prompt + each.output)
        if simulate(emulated, [longest])[0].status != 200:
            raise NotMet(f"refuses a request of this length (KV cache of {emulated.kv_tokens} tokens)")
        prompt, output = demand.load.typical_tokens()
        alone = simulate(emulated, [(0.0, prompt, output)])[0]
        first_s, last_s = alone.times_s[0], alone.times_s[-1]
        self._alone_s = last_s
        took = (first_s, (last_s - first_s) / max(output - 1, 1), last_s)
        for name, value in zip(METRICS, took, strict=True):
            if value > limits.seconds.get(name, math.inf):
                raise NotMet(f"{name} is {1e3 * value:.3g} ms for a request that is alone")
        burst = min(BURST, emulated.setup.max_running, max(1, emulated.kv_tokens // (prompt + output)))
        together = [each._replace(at_s=0.0) for each in demand.arrivals[:burst]]
        served = list(bounds(simulate(emulated, together)))
        self.capacity = len(served) / max(last_s for _, _, last_s in served)  # requests/s

    def at(self, rate: float) -> Trial:
        return trial(self._emulated, self._demand, self._limits, rate, 2 * self._alone_s)

    def highest(self) -> tuple[float, str]:
        """The highest rate, requests/s, within the limits, and what is in the way of a higher one. Raises NotMet."""
        low = high = STABLE_RATIO * self.capacity
        bound = "throughput"
        while (missed := self.at(low).missed) is not None:
            high, bound = low, missed
            if low * self._alone_s < LONELY:
                raise NotMet(f"{bound} is missed even at {low:.2g} requests/s, where most requests are alone")
            low /= 2
        while high / low > TOLERANCE:
            middle = math.sqrt(low * high)
            missed = self.at(middle).missed
            if missed is None:
                low = middle
            else:
                high, bound = middle, missed
        return low, bound
