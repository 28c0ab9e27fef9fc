"""How much one server can take: the highest rate at which it keeps its limits and works off what comes.

In virtual time. Every rate and every server meets the same arrivals, faster or slower, so that two answers differ by
what differs between the servers: Poisson arrivals of requests or of sessions, or those of a trace.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.load.lengths import fixed
from loadgen.load.load import Arrival as ArrivalLaw
from loadgen.load.load import Load, draw_arrivals
from loadgen.load.turns import Turns
from loadgen.rundir.emulation import kind_of_load
from loadgen.search.objective import METRICS
from loadgen.steady.keeping_up import Flow, KeepingUp, judge
from servers.schedulers import Rejected, Sequence
from servers.simulator.build import Emulated
from servers.simulator.engine import Engine, place_s
from servers.simulator.virtual import ArrivingRequest, Outcome, bounds, simulate, simulate_sessions, uncollected

BURST = 512  # most requests of the burst that shows how fast a server can work off what it has
STABLE_RATIO = 0.95  # of that rate; beyond it, queues grow for longer than a short run can show
LIVES = 8  # a run lasts at least so many times as long as a request
STRETCH = 10  # and at most so many times the requests of the option
TOLERANCE = 1.1  # the highest rate is found within this factor
THROUGHPUT = "throughput"  # what limits where no latency does
BEYOND = 10  # requests beyond a percentile that it takes to say where the percentile is
LONELY = 0.1  # requests under way on average: below this a server is not crowded, and a lower rate will not help it


class NotMet(Exception):
    """A candidate that will not do. One phrase."""


class _Missed(Exception):
    """The limit that more requests have missed than may."""


@dataclass(frozen=True, kw_only=True)
class LatencyLimits:
    """Seconds by metric; `percentile` percent of the requests keep all of them."""

    seconds: dict[str, float]
    percentile: float = 99.0

    def lateness(self, took_s: Several[float]) -> dict[str, float]:
        """How many times its limit each limited metric of a request is, from its METRICS in seconds; 0 where its reply
        has no such metric."""
        late = {name: took_s[METRICS.index(name)] / limit_s for name, limit_s in self.seconds.items()}
        return {name: 0.0 if math.isnan(ratio) else ratio for name, ratio in late.items()}

    def missed_most(self, took_s: Several[float]) -> str | None:
        """The limit that a request exceeds by the largest factor; None: it keeps all."""
        late = self.lateness(took_s)
        worst = max(late, key=lambda name: late[name])
        return worst if late[worst] > 1 else None

    @property
    def least_requests(self) -> int:
        """Judged requests of which BEYOND lie beyond the percentile: 1000 for 99, 100 for 90. With fewer the percentile
        is one of the slowest few, and moves from run to run."""
        return math.ceil(round(BEYOND / (1 - self.percentile / 100), 6))


@dataclass(frozen=True, kw_only=True)
class Demand:
    """A load that comes `rate` requests a second, or sessions. `requests`: how many a run has at least, turns of
    sessions counted each."""

    rate: float
    load: Load
    requests: int = 400

    @functools.cached_property
    def arrivals(self) -> list[ArrivingRequest]:
        """The load's requests, one a second in the mean: every rate and every server meets the same, faster or slower.
        Of a trace its first ones. Raises WorkloadError."""
        most = STRETCH * self.requests
        if self.load.trace is None:
            at_s = _poisson_s(most)
        else:
            at_s = self.load.due_ns()[:most] / 1e9 * trace_rate(self.load)
        shapes = self.load.shapes()
        return [ArrivingRequest(seconds, *shapes.shape(number)[:3]) for number, seconds in enumerate(at_s.tolist())]

    @functools.cached_property
    def kind(self) -> str:
        """The kind of its load, as errors of predictions are told by."""
        return kind_of_load("open", float(np.mean([arrival.prompt for arrival in self.sample])))

    @property
    def sample(self) -> list[ArrivingRequest]:
        """Requests of the load; where it has sessions, their turns."""
        return self.arrivals if self.load.sessions is None else self.sessions(self.requests)[0]

    @property
    def what(self) -> str:
        """What its rate counts."""
        return "requests/s" if self.load.sessions is None else "sessions/s"

    @functools.cached_property
    def turns_each(self) -> float:
        """Turns of a session in the mean; 1 without sessions."""
        turns = self.load.turns()
        return 1.0 if turns is None else turns.total / (self.load.requests or 1)

    def sessions(self, count: int, *, thinking: bool = True) -> tuple[list[ArrivingRequest], Turns]:
        """So many sessions, one beginning a second in the mean; or all at once, and with nobody who thinks."""
        assert self.load.sessions is not None
        sessions = self.load.sessions
        if not thinking:
            sessions = msgspec.structs.replace(sessions, think_time=fixed(0))
        turns = msgspec.structs.replace(self.load, requests=count, sessions=sessions).turns()
        assert turns is not None
        bound = 1 << count.bit_length()
        if bound not in self._drawn_sessions:
            self._drawn_sessions[bound] = self._turns_of(bound)
        first = self._drawn_sessions[bound][: turns.total]
        return first if thinking else [each._replace(at_s=0.0) for each in first], turns

    @functools.cached_property
    def _drawn_sessions(self) -> dict[int, list[ArrivingRequest]]:
        """The turns of so many sessions: fewer sessions are the first of them."""
        return {}

    def _turns_of(self, sessions: int) -> list[ArrivingRequest]:
        load = msgspec.structs.replace(self.load, requests=sessions)
        turns, shapes, at_s = load.turns(), load.shapes(), _poisson_s(sessions).tolist()
        assert turns is not None
        begin_s = [at_s[session] for session in range(sessions) for _ in range(turns.count(session))]
        return [ArrivingRequest(seconds, *shapes.shape(number)[:3]) for number, seconds in enumerate(begin_s)]


def _poisson_s(count: int) -> NDArray[np.float64]:
    return draw_arrivals(ArrivalLaw("poisson", 1.0), count, None, 0) / 1e9


def trace_rate(load: Load) -> float:
    """Requests a second of the load's trace in the mean; 0 where it has no length."""
    due_ns = load.due_ns()
    span_s = float(due_ns[-1] - due_ns[0]) / 1e9 if len(due_ns) > 1 else 0.0
    return (len(due_ns) - 1) / span_s if span_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class LoadTrial:
    """One run. missed: the limit that it did not keep; THROUGHPUT where the server fell behind, as the report of a run
    judges it. percentiles: seconds by metric, NaN where there are none. in_flight: most at once. keeping_up: of a run
    that missed no limit."""

    missed: str | None
    percentiles: dict[str, float]
    in_flight: int
    keeping_up: KeepingUp | None = None


@uncollected()
def trial(emulated: Emulated, demand: Demand, limits: LatencyLimits, rate: float, settled_s: float) -> LoadTrial:
    """One server at `rate` requests/s. It ends early when more have missed a limit than may. Those that come before
    `settled_s` are served and not judged: the server is not yet as full as it will be."""
    sent_s: list[float] = []
    times_s: dict[int, tuple[float, float]] = {}
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    may_miss = 1 - limits.percentile / 100
    judged = ended = missed_any = most = 0
    lives_s = 0.0

    def miss(name: str) -> None:
        nonlocal missed_any
        missed_any += 1
        if missed_any > may_miss * max(judged, demand.requests) + 1e-9:
            raise _Missed(name)

    def end(sequence: Sequence, first_s: float, last_s: float) -> None:
        nonlocal ended, lives_s
        sent = sent_s[sequence.index]
        times_s[sequence.index] = first_s, last_s
        ended += 1
        lives_s += last_s - sent
        if sent < settled_s:
            return
        took = took_s(sent, first_s, last_s, sequence.output)
        for name, value in zip(METRICS, took, strict=True):
            values[name].append(value)
        worst = limits.missed_most(took)
        if worst is not None:
            miss(worst)

    engine = replying(emulated, end)
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
                    miss(next(iter(limits.seconds)))
            most = max(most, index + 1 - ended)
        engine.advance(math.inf)
    except _Missed as reason:
        missed = str(reason)
    flow = Flow(*np.asarray([(sent_s[number], *times_s[number]) for number in sorted(times_s)]).reshape(-1, 3).T)
    percentiles = {name: _percentile(each, limits.percentile) for name, each in values.items()}
    return _kept_up(LoadTrial(missed=missed, percentiles=percentiles, in_flight=most), flow, demand, rate)


def _kept_up(seen: LoadTrial, flow: Flow, demand: Demand, rate: float) -> LoadTrial:
    """A run that missed no limit, with whether its server kept up with the arrivals."""
    if seen.missed is not None:
        return seen
    found = judge(flow if demand.load.trace is not None else flow._replace(rate_per_s=rate))
    missed = THROUGHPUT if found.word == "fell_behind" else None
    return replace(seen, missed=missed, keeping_up=found)


def replying(emulated: Emulated, end: Callable[[Sequence, float, float], None]) -> Engine:
    """A server that begins. `end(request, first_s, last_s)` is called when a reply is over: when its first and its last
    token came."""
    first_s: dict[int, float] = {}

    def deliver(emits: list[Sequence], begin_s: float, gap_s: float) -> None:
        for place in engine.turning:
            sequence, at_s = emits[place], place_s(begin_s, gap_s, place)
            if sequence.emitted == 1:
                first_s[sequence.index] = at_s
            if sequence.emitted == sequence.output:
                end(sequence, first_s.pop(sequence.index), at_s)

    engine = emulated.engine(deliver)
    return engine


@uncollected()
def session_trial(
    emulated: Emulated, demand: Demand, limits: LatencyLimits, rate: float, settled_s: float
) -> LoadTrial:
    """One server at `rate` sessions/s. Turns that are sent before `settled_s`, or after the last session has begun, are
    served and not judged: the server is not as full as it will be, or not any more."""
    count = math.ceil(rate * settled_s + demand.requests / demand.turns_each)
    drawn, turns = demand.sessions(count)
    arrivals = [each._replace(at_s=each.at_s / rate) for each in drawn]
    outcomes = simulate_sessions(emulated, arrivals, turns)
    judged = [each for each in outcomes if settled_s <= each.sent_s <= arrivals[-1].at_s]
    took = [_took(each) for each in judged]  # what was refused has no time: endless
    values = {name: [each[place] for each in took] for place, name in enumerate(METRICS)}
    worst = [name for each in took if (name := limits.missed_most(each)) is not None]
    too_many = len(worst) > (1 - limits.percentile / 100) * len(judged) + 1e-9
    missed = max(limits.seconds, key=worst.count) if too_many else None
    served = {name: [value for value in each if value < math.inf] for name, each in values.items()}
    percentiles = {name: _percentile(each, limits.percentile) for name, each in served.items()}
    ends = sorted((at_s, change) for each in bounds(outcomes) for at_s, change in ((each[0], 1), (each[2], -1)))
    in_flight = np.cumsum([change for _, change in ends]).max(initial=0)
    ends_s = np.zeros(count)
    np.maximum.at(
        ends_s,
        [turns.place(each.index)[0] for each in outcomes],
        [each.times_s[-1] if each.times_s else each.sent_s for each in outcomes],
    )
    begins_s = np.asarray([arrivals[int(first)].at_s for first in turns.first[:-1]])
    seen = LoadTrial(missed=missed, percentiles=percentiles, in_flight=int(in_flight))
    return _kept_up(seen, Flow(begins_s, begins_s, np.maximum(ends_s, begins_s)), demand, rate)


def _took(outcome: Outcome) -> tuple[float, float, float]:
    """Its METRICS in seconds; endless where there was no reply."""
    times_s = outcome.times_s
    if not times_s:
        return math.inf, math.inf, math.inf
    return took_s(outcome.sent_s, times_s[0], times_s[-1], len(times_s))


def took_s(sent_s: float, first_s: float, last_s: float, output: int) -> tuple[float, float, float]:
    """METRICS of a reply of `output` tokens, in seconds; NaN where it has no such time."""
    tpot_s = (last_s - first_s) / (output - 1) if output > 1 else math.nan
    return first_s - sent_s, tpot_s, last_s - sent_s


def _percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent, method="inverted_cdf")) if values else math.nan


class SizedServer:
    """One server's limits. Raises NotMet where the longest request, or one of usual length, is too much for it."""

    def __init__(self, emulated: Emulated, demand: Demand, limits: LatencyLimits) -> None:
        self.emulated = emulated
        self._demand = demand
        self._limits = limits
        longest = max(demand.sample, key=lambda each: each.prompt + each.output)
        if simulate(emulated, [longest._replace(at_s=0.0)])[0].status != 200:
            raise NotMet(f"refuses a request of this length (KV cache of {emulated.kv_tokens} tokens)")
        prompt, output = demand.load.typical_tokens()
        alone = simulate(emulated, [(0.0, prompt, output)])[0]
        self._alone_s = alone.times_s[-1]
        for name, value in zip(METRICS, _took(alone), strict=True):
            if value > limits.seconds.get(name, math.inf):
                raise NotMet(f"{name} is {1e3 * value:.3g} ms for a request that is alone")
        burst = min(BURST, emulated.setup.max_running, max(1, emulated.kv_tokens // (prompt + output)))
        if demand.load.sessions is None:
            together = [each._replace(at_s=0.0) for each in demand.arrivals[:burst]]
            served = list(bounds(simulate(emulated, together)))
        else:  # all at once and without a pause: turns find what was said before in the prefix cache, as they will
            served = list(bounds(simulate_sessions(emulated, *demand.sessions(burst, thinking=False))))
        works_off = len(served) / max(last_s for _, _, last_s in served)  # requests/s
        self.capacity = works_off / demand.turns_each  # requests/s, or sessions/s
        self._trials: dict[float, LoadTrial] = {}

    def at(self, rate: float) -> LoadTrial:
        """One run at that rate; the same rate is run once."""
        if rate not in self._trials:
            self._trials[rate] = self._run(rate)
        return self._trials[rate]

    def _run(self, rate: float) -> LoadTrial:
        if self._demand.load.sessions is None:
            return trial(self.emulated, self._demand, self._limits, rate, 2 * self._alone_s)
        return session_trial(self.emulated, self._demand, self._limits, rate, self._session_s)

    @functools.cached_property
    def _session_s(self) -> float:
        """How long a session lasts on a server that is not in its way, and as long again for every reply."""
        count = self._demand.requests
        _, turns = self._demand.sessions(count)
        think_s = sum(turns.think_ns(number) for number in range(turns.total) if turns.place(number)[1]) / 1e9
        return 2 * self._alone_s * self._demand.turns_each + think_s / count

    def highest(self, least: float = 0.0) -> tuple[float, str]:
        """The highest rate, requests/s or sessions/s, within the limits, and what is in the way of a higher one. Raises
        NotMet, also where it is below `least`, at which nobody asks by how much."""
        low = high = STABLE_RATIO * self.capacity
        bound, what = THROUGHPUT, self._demand.what
        while high >= least and (missed := self.at(low).missed) is not None:
            high, bound = low, missed
            if low * self._demand.turns_each * self._alone_s < LONELY:
                why = "it falls behind" if bound == THROUGHPUT else f"{bound} is missed"
                raise NotMet(f"{why} even at {low:.2g} {what}, where most requests are alone")
            low /= 2
        if high < least:
            raise NotMet(
                f"takes less than {high:.3g} {what} (limited by {bound}), and --max-gpus asks {least:.3g} of each"
            )
        while high / low > TOLERANCE:
            middle = math.sqrt(low * high)
            missed = self.at(middle).missed
            if missed is None:
                low = middle
            else:
                high, bound = middle, missed
        return low, bound
