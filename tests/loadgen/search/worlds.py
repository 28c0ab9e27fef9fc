"""How right `loadgen search` is where the answer is known: many simulated searches in worlds whose capacity is known.

    python -m tests.loadgen.search.worlds DIR [WORLD ...]

writes DIR/WORLD.json. The constants of highest.py were chosen with other seeds in view than those used here.

Worlds: an M/D/1 queue; c slots of a fixed service time (M/D/c; both by Franx' formula, 2001); and vLLM on a modelled
H200 in virtual time, whose highest rate is that of a virtual run of 40,000 requests. Beside each search stands a plain
bisection: it doubles or halves its load to a bracket and halves that (in logarithms) until it is as wide as the
search's interval in the median; every probe has n requests, n being the least power of two at which its bracket holds
the truth as often as the search's interval does (or, less sure than that, at which it takes most_ratio times the
search's requests: it would take more still). The guess at the start is wrong by 25 % (a standard deviation of its
logarithm).
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.search.highest import Goal, NextProbe, Prior, Probe, ProbeTimes, highest, watched

Floats = NDArray[np.float64]
SEARCHES, FIRST_SEED, GUESS_SD, START_RATIO = 200, 3000, 0.25, 0.1


@dataclass(frozen=True)
class World:
    """send: (load, requests, generator) -> when each was sent and was over (n,), and how many times its limit it
    took."""

    name: str
    attain: float
    truth: float
    send: Callable[[float, int, np.random.Generator], tuple[Floats, Floats, Floats]]
    capacity: float | None  # in closed form
    precision_ratio: float = 0.05
    searches: int = SEARCHES
    most_ratio: float = 4.0  # of a bisection's requests to those of a search


def wait_s(rate: float, slots: int, count: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Poisson arrivals (n,) and how long each waits for one of `slots` that take a second, first come, first served. As
    the service time is fixed, request k takes the slot of request k - slots."""
    at_s = np.cumsum(rng.exponential(1 / rate, count))
    lanes = np.concatenate((at_s, np.full(-count % slots, at_s[-1] + 1e6))).reshape(-1, slots)
    ahead_s = np.arange(len(lanes))[:, None]
    begin_s = np.maximum.accumulate(lanes - ahead_s, axis=0) + ahead_s
    return at_s, (begin_s - lanes).ravel()[:count]


def waits_within(rate: float, slots: int, limit_s: float, places: int = 400) -> float:
    """P(wait <= limit_s) in M/D/c with a service time of a second (Franx, 2001), from the stationary number of requests
    a second apart."""
    number = np.arange(places)
    log_poisson = number * math.log(rate) - rate - np.array([math.lgamma(n + 1) for n in number])
    spectrum = np.fft.rfft(np.exp(log_poisson), 2 * places)
    state = np.zeros(places)
    state[0] = 1.0
    for _ in range(50_000):
        left = np.concatenate(([state[: slots + 1].sum()], state[slots + 1 :], np.zeros(slots)))
        following = np.fft.irfft(np.fft.rfft(left, 2 * places) * spectrum)[:places]
        following /= following.sum()
        if np.abs(following - state).max() < 1e-13:
            break
        state = following
    queued = np.cumsum(state)[slots:]  # P(at most m wait)
    whole = int(limit_s) + 1
    rest_s = whole - limit_s
    terms = np.arange(whole * slots)
    ahead = np.exp(-rate * rest_s + terms * math.log(rate * rest_s) - [math.lgamma(t + 1) for t in terms])
    return float((queued[whole * slots - 1 - terms] * ahead).sum())


def crossing(share: Callable[[float], float], attain: float, low: float, high: float, steps: int) -> float:
    """The load at which a falling share is `attain`, by bisection."""
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if share(middle) >= attain else (low, middle)
    return math.sqrt(low * high)


def queue(name: str, slots: int, limit_s: float, attain: float) -> World:
    def send(rate: float, count: int, rng: np.random.Generator) -> tuple[Floats, Floats, Floats]:
        at_s, waited_s = wait_s(rate, slots, count, rng)
        return at_s, at_s + waited_s + 1, waited_s / limit_s

    truth = crossing(lambda rate: waits_within(rate, slots, limit_s), attain, 0.3 * slots, 0.99 * slots, 40)
    return World(name, attain, truth, send, float(slots))


def modelled_vllm(searches: int) -> World:
    """vLLM with a 7B on a modelled H200, prompts of 512 tokens, replies of 8: ttft within 100 ms."""
    from servers.simulator.build import emulate
    from servers.simulator.options import Hardware
    from servers.simulator.virtual import simulate

    emulated = emulate(Hardware(gpu="h200", gpus=1).setup("vllm", "7b", 4096))

    def send(rate: float, count: int, rng: np.random.Generator) -> tuple[Floats, Floats, Floats]:
        at_s = np.cumsum(rng.exponential(1 / rate, count))
        outcomes = simulate(emulated, [(at, 512, 8) for at in at_s.tolist()])
        first_s = np.asarray([each.times_s[0] for each in outcomes])
        return at_s, np.asarray([each.times_s[-1] for each in outcomes]), (first_s - at_s) / 0.1

    def share(rate: float) -> float:
        return float((send(rate, 40_000, np.random.default_rng(99))[2][4000:] <= 1).mean())

    truth = crossing(share, 0.95, 5.0, 200.0, 11)
    return World("vLLM 7B on a modelled H200", 0.95, truth, send, None, searches=searches, most_ratio=2.0)


def probing(world: World, goal: Goal, rng: np.random.Generator, spent: list[int]) -> Callable[[NextProbe], Probe]:
    def probe(order: NextProbe) -> Probe:
        at_s, done_s, late = world.send(order.load, max(400, int(1.6 * order.requests)), rng)

        def seen(until_s: float) -> ProbeTimes:
            count = int(np.searchsorted(at_s, until_s, "right"))
            over_s = np.where(done_s[:count] <= until_s, done_s[:count], np.inf)
            return ProbeTimes(sent_s=at_s[:count], done_s=over_s, late=late[:count], elapsed_s=until_s)

        looks = np.unique((100 * 1.3 ** np.arange(50)).astype(int))
        made = watched(goal, order, seen, [float(at_s[look]) for look in looks if look < len(at_s)])
        spent.append(made.requests)
        return made

    return probe


def searched(world: World, seed: int) -> dict[str, Any]:
    """One search of our own."""
    rng = np.random.default_rng(seed)
    goal, spent = Goal(attain=world.attain, precision_ratio=world.precision_ratio), list[int]()
    guess = Prior(load=world.truth * math.exp(GUESS_SD * rng.normal()))
    found, probes, ended = highest(probing(world, goal, rng, spent), goal, guess)
    return {"value": found.value, "low": found.low, "high": found.high, "requests": sum(spent),
            "probes": len(probes), "ended": ended.code}  # fmt: skip


def bisected(world: World, seed: int, count: int, width: float) -> tuple[bool, int]:
    """One plain bisection with probes of `count` requests, to a bracket of `width` (a logarithm): whether it holds the
    truth, and the requests it took."""
    rng = np.random.default_rng(seed)
    load, low, high, spent = world.truth * math.exp(GUESS_SD * rng.normal()), 0.0, math.inf, 0
    while low == 0 or math.isinf(high) or math.log(high / low) > width:
        late = world.send(load, count, rng)[2][int(START_RATIO * count) :]
        spent += count
        low, high = (load, high) if (late <= 1).mean() >= world.attain else (low, load)
        load = 2 * low if math.isinf(high) else high / 2 if low == 0 else math.sqrt(low * high)
    return low <= world.truth <= high, spent


def each_of(world: World, task: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
    """task(world, ...) for each of them, on all cores. The processes are forked with the world: it cannot be sent."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(mp_context=context, initializer=_live_in, initargs=(world,)) as processes:
        return list(processes.map(_here, itertools.repeat(task), arguments))


def _live_in(world: World) -> None:
    global _world
    _world = world


def _here(task: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return task(_world, *arguments)


def bisections(world: World, width: float, share: float, most: float) -> Iterator[dict[str, Any]]:
    """From few requests a probe on, until the bracket holds the truth as often as `share` or `most` requests are
    spent."""
    for bits in itertools.count(9):
        each = each_of(world, bisected, ((10_000 + seed, 1 << bits, width) for seed in range(world.searches)))
        held, spent = float(np.mean([inside for inside, _ in each])), float(np.median([used for _, used in each]))
        yield {"requests_a_probe": 1 << bits, "holds_truth_ratio": held, "requests": spent}
        if held >= share or spent >= most:
            return


def measure(world: World) -> dict[str, Any]:
    each = each_of(world, searched, ((FIRST_SEED + seed,) for seed in range(world.searches)))
    values, lows, highs = (np.asarray([one[name] for one in each], float) for name in ("value", "low", "high"))
    held = float(np.mean((lows <= world.truth) & (world.truth <= highs)))
    width, spent = float(np.median(np.log(highs / lows))), float(np.median([one["requests"] for one in each]))
    print(world.name, world.truth, held, float(np.median(np.abs(values / world.truth - 1))), spent, width, flush=True)
    plain = list(bisections(world, width, min(held, 0.95), world.most_ratio * spent))
    print(json.dumps(plain[-1]), spent / plain[-1]["requests"], flush=True)
    return {
        "world": world.name, "attain": world.attain, "truth": world.truth, "capacity": world.capacity,
        "searches": world.searches, "holds_truth_ratio": held, "interval_width_ratio": width,
        "error_median_ratio": float(np.median(np.abs(values / world.truth - 1))),
        "bias_ratio": float(np.mean(values / world.truth - 1)), "requests_median": spent,
        "bisection": plain, "of_bisection_ratio": spent / plain[-1]["requests"], "each": each,
    }  # fmt: skip


WORLDS: dict[str, Callable[[], World]] = {
    "md1": lambda: queue("M/D/1, wait within 9 services", 1, 9.0, 0.99),
    "slots": lambda: queue("4 slots, wait within 2 services", 4, 2.0, 0.95),
    "short": lambda: queue("M/D/1, wait within 3 services", 1, 3.0, 0.9),
    "vllm": lambda: modelled_vllm(100),
}


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(exist_ok=True)
    for name in sys.argv[2:] or WORLDS:
        result = measure(WORLDS[name]())
        (directory / f"{name}.json").write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
