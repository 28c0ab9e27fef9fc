"""The highest load at which a server meets an objective, and how sure that is. Pure: no server, no clock, no file.

What is asked: the load (requests/s, or requests in flight) at which the share of requests that meet the objective, in
steady state, is exactly the share that is wanted. A search is a list of probes, each at one load. All follows from the
probes so far: the next one (`next_probe`), when a probe has shown enough (`judge`), and what all of them say
(`highest_load`). So a search that was killed goes on from its probes.

Within a probe, requests count in the order in which they were sent, up to the first that is not over: later ones that
are over already are the quick ones. Left out is the start: what was sent in the first two mean lives of a request, in
the first tenth of the time, and three times as many requests as the dispersion below, a third of all at the most.
Whether the share is above or below what is wanted is tested each time that a quarter more requests have come (look
k = 1, 2, ...), with Wilson's interval at an error of ERROR * 6 / (pi k)^2, which add up to ERROR over any number of
looks. Misses come in clusters, since a full queue makes many requests late: n requests are worth n / dispersion
independent ones, the dispersion being an integrated autocorrelation time.

Over the probes, the share that meets the objective is modelled as logistic in the logarithm of the load,

    logit share(load) = logit wanted - slope * (ln load - ln highest),

and (ln highest, slope) get a posterior on a grid: the likelihood of every probe's count to the power of 1 / dispersion,
probes far from the answer weighing less (the model is local), times a prior that is wide around the guess. The
likelihood does not mind that probes stop when they are sure; of one that stopped before it was in a steady state only
that its share is no higher than seen counts. The answer is the median, the interval the 2.5 and 97.5 % quantiles. A
server that falls behind bounds the answer by the rate at which it ended requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.steady import keeping_up
from loadgen.steady.blocks import wilson

ERROR = 0.05  # chance that a probe's verdict is wrong, over all of its looks
LOOK_GROWTH = 1.25  # each look has so many times the requests of the one before
FIRST_LOOK = 100  # counted requests
LIVES, START_RATIO, START_MEMORIES = 2.0, 0.1, 3.0  # what of a probe is its start
LOWER_LEVEL = 0.9  # part of the requests below the level at which clusters are looked at
BEHIND_Z = 3.0  # growth of the requests under way beyond chance, in standard deviations of a balanced queue's
BEHIND_LEAST = 64  # requests in half of a probe, before that is said
SETTLED = 30  # times its dispersion is a probe long that has come to its steady state
FAR = 0.5  # of its limits: where no request comes nearer, the tail beyond what was seen is thought about
WELL_KNOWN = 16  # times its dispersion is a probe long whose dispersion is known well
AT_KNEE_MISSES = 10  # clusters of misses that a probe at the highest load is long enough to have, on average
OFFSETS = (1.2, -0.8, 0.4)  # of probes around the answer, in logits
NEAR = 1.5  # logits from what is wanted within which a probe weighs about in full
SLOPE, SLOPE_SPREAD = 16.0, 1.2  # median of the prior of the slope, and standard deviation of its logarithm
PRIOR_DISPERSION = 4.0  # what the dispersion is taken for where nothing can be seen of it
LEAST_LONG = 2  # probes that must have come to a steady state, for the answer to be sure
UNSURE_DISPERSION = 2.5  # by which each dispersion may be too low, being an estimate itself
LONELY = 0.1  # requests under way on average: where a load as low misses the objective, no lower one will meet it
CONFIDENCE = 0.95
LEAST_RATIO = 1e-4  # of the guess: the lowest load that is tried

Floats = NDArray[np.float64]
VerdictName = Literal["met", "missed", "falls_behind", "unsure"]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """attain: share of the requests that is to meet the objective. precision_ratio: half the interval over the answer
    at which a search ends. budget_s: seconds for all probes. whole: loads are whole numbers, of requests in flight."""

    attain: float = 0.99
    precision_ratio: float = 0.05
    budget_s: float = math.inf
    most_probes: int = 40
    whole: bool = False

    @property
    def logit(self) -> float:
        return math.log(self.attain / (1 - self.attain))

    @property
    def least_requests(self) -> int:
        """Fewest counted requests, all of which meet the objective, that can make a probe sure."""
        z = NormalDist().inv_cdf(1 - ERROR / 2)
        return math.ceil(z * z * self.attain / (1 - self.attain))


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Where a search starts. spread: scale of the guess's error, as a logarithm; its tails are long."""

    load: float
    spread: float = 0.3


@dataclass(frozen=True, kw_only=True)
class ProbeTimes:
    """A probe so far, in the order in which requests were sent. Shapes (n,). sent_s, done_s: seconds since the probe
    began; done_s is infinite while a request is under way. late: how many times its limit the worst of a request's
    metrics is: above 1 where it misses the objective, infinite where it failed, anything while it is under way.
    open_loop: requests come whether or not others have ended."""

    sent_s: Floats
    done_s: Floats
    late: Floats
    elapsed_s: float
    open_loop: bool = True


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What one probe showed. counted: requests of its steady state; met: how many of them met the objective.
    dispersion: for how many of them a count is worth one. ended_per_s: where the server fell behind, the rate at which
    it ended requests. life_s: mean life of a request. seconds: what the probe took of the search's time."""

    load: float
    verdict: VerdictName
    counted: int
    met: int
    dispersion: float
    requests: int
    seconds: float
    life_s: float
    ended_per_s: float | None = None
    settled: bool = True

    @property
    def share(self) -> float | None:
        """The share of counted requests that met the objective; None where none counts."""
        return self.met / self.counted if self.counted else None


@dataclass(frozen=True, kw_only=True)
class NextProbe:
    """The next probe: at which load, and how many seconds of sending, and counted requests, at the most."""

    load: float
    seconds: float
    requests: int


@dataclass(frozen=True, kw_only=True)
class EndReason:
    """Why no further probe is needed, one clause. code: for programs."""

    code: Literal["sure", "budget", "probes", "none", "unknown", "stopped"]
    reason: str


@dataclass(frozen=True, kw_only=True)
class HighestLoad:
    """The highest load, with its interval of 95 %, and the share that meets the objective at it, with its interval.
    value is None where no load meets the objective; high is infinite, or low 0, where no probe bounds it."""

    value: float | None
    low: float
    high: float
    attained: float | None
    attained_low: float | None
    attained_high: float | None


# One probe.


def judge(goal: Goal, seen: ProbeTimes, most: float = math.inf) -> Probe | None:
    """What a probe has shown once its answer is sure, or once `most` requests count; None: it must go on."""
    return _judged(goal, seen, 0.0, most, over=False)


def conclude(goal: Goal, seen: ProbeTimes, load: float, behind_per_s: float | None = None) -> Probe:
    """What a probe has shown that is over. behind_per_s: the rate at which a server that was seen to fall behind ended
    requests, where the probe was stopped for that."""
    probe = _judged(goal, seen, load, math.inf, over=True, behind_per_s=behind_per_s)
    assert probe is not None
    return probe


def _judged(
    goal: Goal, seen: ProbeTimes, load: float, most: float, *, over: bool, behind_per_s: float | None = None
) -> Probe | None:
    ended_per_s = _ended_per_s(seen) if behind_per_s is None else behind_per_s
    first, last, life_s = _steady(seen, goal.attain)
    late = seen.late[first:last]
    count = len(late)
    look = 0 if count < FIRST_LOOK else 1 + int(math.log(count / FIRST_LOOK) / math.log(LOOK_GROWTH))
    settled = _is_settled(seen, first, last)
    verdict: VerdictName = "unsure"
    if ended_per_s is not None:
        verdict = "falls_behind"
    elif look:
        looked = first + min(count, int(FIRST_LOOK * LOOK_GROWTH ** (look - 1)))
        verdict = _tested(goal, seen.late[first:looked], look)
        if verdict == "met" and (not settled or count < SETTLED * dispersion(late, goal.attain)):
            verdict = "unsure"
    if not over and verdict == "unsure" and count < most:
        return None
    return Probe(
        load=load,
        verdict=verdict,
        counted=count,
        met=int((late <= 1).sum()),
        dispersion=dispersion(late, goal.attain),
        requests=len(seen.sent_s),
        seconds=float(seen.sent_s[-1]) if len(seen.sent_s) else 0.0,
        life_s=life_s,
        ended_per_s=ended_per_s,
        settled=settled,
    )


def _steady(seen: ProbeTimes, attain: float) -> tuple[int, int, float]:
    """The requests that count, from the first to the one after the last, and the mean life of those that are over."""
    under_way = np.flatnonzero(~np.isfinite(seen.done_s))
    last = int(under_way[0]) if len(under_way) else len(seen.sent_s)
    if last == 0:
        return 0, 0, 0.0
    life_s = float(np.mean(seen.done_s[:last] - seen.sent_s[:last]))
    start_s = max(LIVES * life_s, START_RATIO * float(seen.sent_s[last - 1]))
    memory = min(START_MEMORIES * dispersion(seen.late[:last], attain), last / 3)
    return min(max(int(np.searchsorted(seen.sent_s, start_s)), int(memory)), last), last, life_s


def _under_way(seen: ProbeTimes, at_s: float) -> int:
    return int(np.searchsorted(seen.sent_s, at_s, "right") - np.count_nonzero(seen.done_s <= at_s))


def _ended_per_s(seen: ProbeTimes) -> float | None:
    """The rate at which a server that falls behind ends requests; None where it keeps up, or that cannot be said yet.

    `keeping_up` says it, of which a search asks more, since it looks again and again: where arrivals equal departures
    in the mean, requests under way are at most a random walk, and over n arrivals they grow by about sqrt(2 n)."""
    if not seen.open_loop or len(seen.sent_s) < 2 * BEHIND_LEAST:
        return None
    found = keeping_up.judge(keeping_up.Flow(seen.sent_s, seen.sent_s, seen.done_s))
    if found.word != "fell_behind" or (found.backlog or 0.0) <= BEHIND_Z * math.sqrt(2 * len(seen.sent_s)):
        return None
    return found.served_per_s


def _is_settled(seen: ProbeTimes, first: int, last: int) -> bool:
    """Whether as many requests end as come: what is under way does not grow over the counted time beyond chance."""
    if not seen.open_loop or last - first < FIRST_LOOK:
        return True
    from_s, to_s = float(seen.sent_s[first]), float(seen.sent_s[last - 1])
    growth = _under_way(seen, to_s) - _under_way(seen, from_s)
    return growth <= 2.0 * math.sqrt(2 * (last - first))


def _tested(goal: Goal, late: Floats, look: int) -> VerdictName:
    """Whether the share is above or below what is wanted, as sure as look `look` may be."""
    level = ERROR * 6 / (math.pi * look) ** 2
    z = NormalDist().inv_cdf(1 - level / 2)
    low, high = wilson(float((late <= 1).mean()), len(late) / dispersion(late, goal.attain), z)
    return "met" if low > goal.attain else "missed" if high < goal.attain else "unsure"


def dispersion(late: Floats, attain: float) -> float:
    """How many times as much as of independent requests the count of misses scatters, at least 1: the integrated
    autocorrelation time of the series (n,) in requests, cut off as Geyer (1992) does.

    Misses may be too few to show their clusters, so what is looked at is which requests are among the latest: those
    that miss the objective, or the latest tenth where fewer miss it; clusters over a lower level are no shorter."""
    if len(late) < 8:
        return PRIOR_DISPERSION
    level = min(1.0, float(np.quantile(late, min(attain, LOWER_LEVEL), method="inverted_cdf")))
    hits = (late > level).astype(float)
    hits -= hits.mean()
    size = 1 << (2 * len(hits) - 1).bit_length()
    covariance = np.fft.irfft(np.abs(np.fft.rfft(hits, size)) ** 2, size)[: len(hits)]
    if covariance[0] <= 1e-9:  # nothing varies
        return PRIOR_DISPERSION if late[0] <= 1 else max(PRIOR_DISPERSION, len(late) / 4)
    pairs = covariance[: len(hits) // 2 * 2].reshape(-1, 2).sum(axis=1) / covariance[0]
    ends = np.flatnonzero(pairs <= 0)
    last = int(ends[0]) if len(ends) else len(pairs)
    seen = max(1.0, 2 * float(np.minimum.accumulate(pairs[:last]).sum()) - 1)
    scatter = seen * (1 + 2 * seen / len(hits)) if seen < len(hits) / 4 else len(hits) / 2
    if len(hits) < WELL_KNOWN * scatter or late.max() > FAR:
        return scatter
    return min(scatter, max(1.0, len(hits) * _beyond(late, level, scatter)))


def _beyond(late: Floats, level: float, scatter: float) -> float:
    """Where all requests met the objective by far: an upper estimate of the share that misses it. Above `level` the
    tail is taken for exponential; the latest request, one in n / scatter, says how steep it is, of which a quarter is
    believed. 1 where a request missed it."""
    latest, top = float(late.max()), 1 - LOWER_LEVEL
    if latest >= 1 or latest <= level:
        return 1.0 if latest >= 1 else 0.0
    last = min(top, scatter / len(late))
    return last * math.pow(last / top, (1 - latest) / (latest - level) / 4)


# All probes.


@dataclass(frozen=True)
class Posterior:
    """On a grid: u (a,) logarithms of the highest load, slopes (b,), weight (a, b) that adds up to 1."""

    u: Floats
    slopes: Floats
    weight: Floats

    def quantile(self, part: float) -> float:
        """A quantile of the logarithm of the highest load."""
        below = np.cumsum(self.weight.sum(axis=1))
        return float(
            np.interp(part, np.concatenate(([0.0], below)), np.append(self.u - self._half, self.u[-1] + self._half))
        )

    @property
    def _half(self) -> float:
        return float(self.u[1] - self.u[0]) / 2

    @property
    def slope(self) -> float:
        """The mean of its logarithm, as a slope."""
        return float(np.exp((self.weight.sum(axis=0) * np.log(self.slopes)).sum()))

    @property
    def sd(self) -> float:
        marginal = self.weight.sum(axis=1)
        mean = float((marginal * self.u).sum())
        return math.sqrt(float((marginal * (self.u - mean) ** 2).sum()))


def fit(goal: Goal, guess: Prior, probes: Sequence[Probe]) -> Posterior:
    """What all probes say of the highest load."""
    centre = math.log(guess.load)
    middle, reach, steps = centre, 9.0, 361
    slopes = np.exp(np.linspace(math.log(SLOPE) - 3 * SLOPE_SPREAD, math.log(SLOPE) + 3 * SLOPE_SPREAD, 41))
    near = np.ones(len(probes))
    posterior = None
    for _ in range(5):
        u = np.linspace(middle - reach, middle + reach, steps)
        posterior = _posterior(goal, (centre, guess.spread), probes, (u, slopes), near)
        middle, sd = posterior.quantile(0.5), posterior.sd
        reach, steps = min(reach, max(8 * sd, 0.02)), 241
        away = posterior.slope * (np.log([probe.load for probe in probes]) - middle)  # logits
        near = np.exp(-0.5 * (np.maximum(0.0, np.abs(away) - NEAR) / NEAR) ** 2)
    assert posterior is not None
    return posterior


def _dispersions(probes: Sequence[Probe]) -> Floats:
    """The dispersion of each probe, as all of them have it: the busier a server, the longer it remembers, so the
    logarithm is fitted as a function of the load that never falls (pool adjacent violators, weighed by requests). A
    short probe has seen too little of a cluster to know its length, and one that met few misses by luck would count for
    too much."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, probes
    order = sorted(range(len(probes)), key=lambda number: probes[number].load)
    for number in order:
        mean, weight, count = math.log(probes[number].dispersion), probes[number].counted + 1.0, 1
        while pools and pools[-1][0] >= mean:
            before, heavy, several = pools.pop()
            mean = (before * heavy + mean * weight) / (heavy + weight)
            weight, count = weight + heavy, count + several
        pools.append((mean, weight, count))
    fitted = np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])
    dispersions = np.empty(len(probes))
    dispersions[order] = np.exp(fitted)
    return dispersions


def _posterior(
    goal: Goal, prior: tuple[float, float], probes: Sequence[Probe], grid: tuple[Floats, Floats], nearness: Floats
) -> Posterior:
    """grid: u (a,) and slopes (b,). nearness (probes,): 1 to 0, how much each probe says."""
    u, slopes = grid
    centre, spread = prior
    log = -np.log1p(((u - centre) / spread) ** 2)[:, None]  # Cauchy's
    log = log - 0.5 * ((np.log(slopes) - math.log(SLOPE)) / SLOPE_SPREAD)[None, :] ** 2
    for probe, near, dispersion in zip(probes, nearness.tolist(), _dispersions(probes).tolist(), strict=True):
        at = math.log(probe.load)
        if probe.ended_per_s is not None:
            log = log + _bound(u, math.log(max(probe.ended_per_s, LEAST_RATIO * probe.load)), probe)[:, None]
            continue
        logit = goal.logit - slopes[None, :] * (at - u)[:, None]
        # A probe far from the answer weighs little, but still says on which side of it the answer is.
        weight = max(near, 0.02) / (UNSURE_DISPERSION * dispersion)
        if probe.verdict == "missed" and probe.counted < SETTLED * dispersion:
            odds = (probe.met + 0.5) / (probe.counted - probe.met + 0.5)
            logit = np.maximum(logit, math.log(odds))  # its share had further to fall
        log = log - weight * (
            probe.met * np.logaddexp(0, -logit) + (probe.counted - probe.met) * np.logaddexp(0, logit)
        )
    raised = np.exp(log - log.max())
    return Posterior(u, slopes, raised / raised.sum())


def _bound(u: Floats, most: float, probe: Probe) -> Floats:
    """Log likelihood of ln highest `u` where a server that fell behind ended so many a second (`most`, a logarithm)."""
    spread = max(0.01, 1 / math.sqrt(max(1.0, probe.requests / 2)))
    return -np.logaddexp(0, (u - most) * 1.7 / spread)  # a logistic curve is within 0.01 of the normal one


def next_probe(goal: Goal, guess: Prior, probes: Sequence[Probe]) -> NextProbe | EndReason:
    """The probe that tells most, or why there is no need of one."""
    if not probes:
        return _order(goal, guess.load, probes)
    least = min(probes, key=lambda probe: probe.load)
    if least.verdict == "missed" and least.load * least.life_s < LONELY and not goal.whole:
        return EndReason(code="none", reason="requests miss the objective even where most of them are alone")
    if goal.whole and least.load <= 1 and least.verdict == "missed":
        return EndReason(code="none", reason="requests miss the objective even one at a time")
    posterior = fit(goal, guess, probes)
    half = (posterior.quantile(0.975) - posterior.quantile(0.025)) / 2
    if half <= goal.precision_ratio and _bracketed(goal, probes):
        return EndReason(code="sure", reason=f"the interval is within {100 * goal.precision_ratio:g} % of the answer")
    if len(probes) >= goal.most_probes:
        return EndReason(code="probes", reason=f"{goal.most_probes} probes were made")
    middle = posterior.quantile(0.5)
    if posterior.sd < 0.15:  # the answer is between known loads: around it
        reach = min(OFFSETS[len(probes) % len(OFFSETS)] / posterior.slope, 0.1)
        middle += reach
    if _is_blind(probes[-1]):
        middle = min(middle, math.log(probes[-1].load / 2))
    return _order(goal, math.exp(middle), probes)


def _is_blind(probe: Probe) -> bool:
    """Whether it was over before anything of it counted: too short for the lives that its load makes."""
    return not probe.counted and probe.ended_per_s is None


def _bracketed(goal: Goal, probes: Sequence[Probe]) -> bool:
    """Whether something was seen on either side of what is wanted."""
    shares = [probe.share for probe in probes if probe.share is not None and probe.ended_per_s is None]
    above = any(share >= goal.attain for share in shares)
    long = sum(
        probe.counted >= SETTLED / 2 * dispersion
        for probe, dispersion in zip(probes, _dispersions(probes), strict=True)
    )
    below = any(share < goal.attain for share in shares) or any(probe.ended_per_s for probe in probes)
    return above and below and long >= LEAST_LONG


def _order(goal: Goal, load: float, probes: Sequence[Probe]) -> NextProbe | EndReason:
    left_s = goal.budget_s - sum(probe.seconds + probe.life_s for probe in probes)
    most_s = min(left_s, goal.budget_s / 4)
    if goal.budget_s < math.inf and left_s <= 0.02 * goal.budget_s:
        return EndReason(code="budget", reason="the time is over")
    load = max(1, round(load)) if goal.whole else load
    scatter = max(PRIOR_DISPERSION, float(np.median(_dispersions(probes)))) if probes else PRIOR_DISPERSION
    requests = max(AT_KNEE_MISSES / (1 - goal.attain), SETTLED) * scatter * 2 ** min(10, sum(map(_is_blind, probes)))
    return NextProbe(load=load, seconds=most_s, requests=math.ceil(requests))


def highest_load(goal: Goal, guess: Prior, probes: Sequence[Probe], ended: EndReason | None = None) -> HighestLoad:
    """What all probes say; also of a search that was stopped."""
    none = ended is not None and ended.code in ("none", "unknown")
    if none or not any(probe.counted or probe.ended_per_s for probe in probes):
        return HighestLoad(value=None, low=0.0, high=math.inf if not probes else probes[-1].load, attained=None,
                      attained_low=None, attained_high=None)  # fmt: skip
    posterior = fit(goal, guess, probes)
    value, low, high = (math.exp(posterior.quantile(part)) for part in (0.5, 0.025, 0.975))
    below = [probe.load for probe in probes if probe.share is not None and probe.share >= goal.attain]
    above = [probe for probe in probes if probe.ended_per_s or (probe.share is not None and probe.share < goal.attain)]
    logit = goal.logit - posterior.slopes[None, :] * (math.log(value) - posterior.u)[:, None]
    shares = 1 / (1 + np.exp(-np.clip(logit, -700, 700)))
    order = np.argsort(shares, axis=None)
    sums = np.cumsum(posterior.weight.ravel()[order])
    at = np.minimum(np.searchsorted(sums, (0.5, 0.025, 0.975)), len(sums) - 1)
    attained, attained_low, attained_high = (float(each) for each in shares.ravel()[order][at])
    return HighestLoad(
        value=value, low=low if below else 0.0, high=high if above else math.inf,
        attained=attained, attained_low=attained_low, attained_high=attained_high,
    )  # fmt: skip


Probing = Callable[[NextProbe], Probe]


def highest(probing: Probing, goal: Goal, guess: Prior) -> tuple[HighestLoad, list[Probe], EndReason]:
    """The whole search, where a probe can be made by a call."""
    probes: list[Probe] = []
    while isinstance(order := next_probe(goal, guess, probes), NextProbe):
        probes.append(probing(order))
    return highest_load(goal, guess, probes, order), probes, order


def watched(goal: Goal, order: NextProbe, seen: Callable[[float], ProbeTimes], looks_s: Sequence[float]) -> Probe:
    """A probe of a world in virtual time: `seen(s)` is what has been seen s seconds after its begin."""
    for at_s in looks_s:
        if (probe := judge(goal, seen(at_s), order.requests)) is not None:
            return msgspec.structs.replace(probe, load=order.load)
    return conclude(goal, seen(looks_s[-1]), order.load)
