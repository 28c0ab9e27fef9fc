"""How often are the words of loadgen/steady wrong? On servers in virtual time whose truth is known. Prints tables for
docs/accuracy.md.

    python -m benchmarks.keeping_up [kept_up | window | start | changes | pairs] [--runs 200]

kept_up: how often is a server that keeps up said to fall behind, and one that falls behind not? Our rule and two others
on the same runs. A server of 8 slots serves 10 requests/s. Poisson arrivals of 0.5 to 2.5 times that, replies of three
length laws, 300 and 3000 requests. In percent of the runs. The others' rules are in our own words:

    guidellm    requests in flight and ttft both rise: the slopes of straight lines through them, less their margins of
                error (1.96 standard errors), are above 0; not in the first 30 s, nor while ttft is under 2.5 s (0.8.1)
    BLIS        the peak of what is in flight, over the time in which it was reached, holds where a server does not keep
                up and falls where it does: from half of the time to all of it, to no less than 0.8 of it

window: is the steady window that of a long run, and how often does its 95 % interval hold the truth? Closed loops at a
server of batches (tests/loadgen/steady/queues.py), whose truth is the middle of runs of 50 requests a slot.

start: how far off is a short closed loop at that server that begins with a burst and ends with a drain, and how far one
that takes its slots over from a warm-up of as many requests? In percent, of throughput in tokens and of ttft p99.

changes: is a server that changes its pace named, rightly, and one that does not never? The same server for 5 minutes.

pairs: how often are two runs of equal servers said to differ, and of two of which one is 10 % slower? Each of 200 runs
beside ten others, since as many pairs again say what chance is in them. In percent of the
pairs: those with an interval (a dash: in fewer than a twentieth), and of these those whose interval leaves 0 out.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np

from loadgen.config import Config
from loadgen.load.lengths import residual
from loadgen.report.contrast import SAME, of_estimates
from loadgen.steady import blocks
from loadgen.steady import changes as detector
from loadgen.steady import window as steady
from loadgen.steady.keeping_up import Flow, judge
from loadgen.steady.window import Estimate, Stamps
from servers.simulator.build import emulate
from servers.simulator.options import Hardware
from servers.simulator.virtual import ArrivingRequest, simulate_sessions
from tests.loadgen.steady import queues

RHOS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.5)
PER_S = 10.0  # what the server serves
LOOKS = 20  # of guidellm's rule, over the time of arrivals


def in_flight(flow: Flow, at_s: queues.Floats) -> queues.Floats:
    """At each of `at_s` (k,)."""
    ended = np.searchsorted(np.sort(flow.done_s), at_s, side="right")
    count: queues.Floats = np.searchsorted(flow.arrived_s, at_s, side="right") - ended
    return count


def rises(at_s: queues.Floats, values: queues.Floats) -> bool:
    away = at_s - at_s.mean()
    slope = float((away * values).sum() / (away**2).sum())
    rest = values - values.mean() - slope * away
    return slope - 1.96 * float(np.sqrt((rest**2).sum() / max(1, len(values) - 2) / (away**2).sum())) > 0


def guidellm(flow: Flow) -> bool:
    for now_s in np.linspace(30.0, max(30.0, float(flow.arrived_s[-1])), LOOKS):
        known = flow.first_s <= now_s
        ttft_s = (flow.first_s - flow.arrived_s)[known]
        if now_s > flow.arrived_s[-1] or len(ttft_s) < 20 or np.median(ttft_s[-20:]) < 2.5:
            continue
        at_s = np.linspace(0, now_s, 100)
        if rises(at_s, in_flight(flow, at_s)) and rises(flow.first_s[known], ttft_s):
            return True
    return False


def blis(flow: Flow) -> bool:
    end_s = float(flow.arrived_s[-1])
    at_s = np.linspace(0, end_s, 2000)
    count = in_flight(flow, at_s)
    return bool(count.max() / end_s >= 0.8 * count[: len(at_s) // 2].max() / (end_s / 2))


def faster(flow: Flow) -> Flow:
    """The same run at a server that serves PER_S requests a second."""
    rate = None if flow.rate_per_s is None else flow.rate_per_s * PER_S
    times = (each / PER_S for each in (flow.arrived_s, flow.first_s, flow.done_s))
    return Flow(*times, flow.tokens, rate, flow.mean_tokens)


RULES: dict[str, Callable[[Flow], str]] = {
    "llm-dissect": lambda flow: judge(flow).word,
    "as a trace": lambda flow: judge(flow._replace(rate_per_s=None, mean_tokens=None)).word,
    "guidellm": lambda flow: "fell_behind" if guidellm(flow) else "",
    "BLIS": lambda flow: "fell_behind" if blis(flow) else "",
}


def rows(n: int, runs: int) -> Iterator[str]:
    """A line for each rho: in percent of the runs, of each length law in turn."""
    for rho in RHOS:
        said: dict[str, list[Counter[str]]] = {name: [] for name in RULES}
        for law in queues.LAWS:
            flows = [faster(flow) for flow in queues.flows(rho, law, n, runs)]
            for name, rule in RULES.items():
                said[name].append(Counter(rule(flow) for flow in flows))
        cells = [share([words["near_limit"] for words in said["llm-dissect"]], runs)]
        cells += [share([words["fell_behind"] for words in laws], runs) for laws in said.values()]
        yield f"| {n} | {rho:g} | {cells[1]} | {cells[0]} | {' | '.join(cells[2:])} |"


def share(counts: list[int], runs: int) -> str:
    return ", ".join(f"{100 * count / runs:g}" for count in counts) if any(counts) else "0"


def kept_up(runs: int) -> None:
    ours, *others = RULES
    print(f"| requests | rho | {ours}: fell behind | near its limit | {' | '.join(others)} |")
    print("|---:|---:|" + "---:|" * (len(RULES) + 1))
    for n in (300, 3000):
        for row in rows(n, runs):
            print(row, flush=True)


def noisy(seed: int, change: queues.Step | None = None) -> queues.Step:
    """Steps that scatter by 3 %."""
    rng = np.random.default_rng(seed)

    def step(now_s: queues.Floats, takes_s: queues.Floats) -> queues.Floats:
        changed_s = takes_s if change is None else change(now_s, takes_s)
        scattered: queues.Floats = changed_s * np.exp(0.03 * rng.standard_normal(len(now_s)))
        return scattered

    return step


def estimates(loop: queues.Batches, run: int, seen: Stamps) -> dict[str, Estimate]:
    """What a report tells of the steady window; nothing where there is none."""
    span, _ = steady.find(seen)
    if span is None:
        return {}
    last_s, tokens = loop.cut(run, seen, span.to_s)
    waits_s = seen.first_s - seen.sent_s
    return {
        "tokens/s": steady.spread_rate(seen.first_s, last_s, tokens, span),
        "requests/s": steady.law_rate(seen, last_s, tokens, span),
        **steady.bounded(steady.of_sent(waits_s, seen.sent_s, span, {"ttft p50": 0.5, "ttft p99": 0.99})),
    }


def truth(loop: queues.Batches) -> dict[str, float]:
    """Of the middle of all runs."""
    lasts_s = float(np.mean(loop.done_s.max(axis=1)))
    edges_s = np.array([0.3, 0.85]) * lasts_s
    seconds = float(np.diff(edges_s)[0])
    within = (loop.sent_s > edges_s[0]) & (loop.sent_s < edges_s[1])
    waits_s = (loop.first_s - loop.sent_s)[within]
    rates = [steady.spread(each.first_s, each.last_s, each.tokens, edges_s)[0] for each in loop.stamps()]
    ended = ((loop.done_s > edges_s[0]) & (loop.done_s < edges_s[1])).sum() / len(loop.done_s)
    p50, p99 = np.quantile(waits_s, (0.5, 0.99))
    return {
        "tokens/s": float(np.mean(rates)) / seconds,
        "requests/s": float(ended) / seconds,
        "ttft p50": float(p50),
        "ttft p99": float(p99),
    }


def window(runs: int) -> None:
    print("| slots | requests a slot | windows | tokens/s | requests/s | ttft p50 | ttft p99 |")
    print("|---:|---:|---:|---|---|---|---|")
    for slots in (8, 64, 256):
        true: dict[str, float] = {}
        for each in (50, 10, 5):
            rng = np.random.default_rng((slots, each))
            loop = queues.batches(queues.drawn_tokens((runs, slots * each), rng), slots, None, noisy(slots))
            true = true or truth(loop)
            found = [estimates(loop, run, seen) for run, seen in enumerate(loop.stamps())]
            print(f"| {slots} | {each} | {100 * sum(map(bool, found)) / runs:g} | {columns(found, true)} |", flush=True)


def columns(found: list[dict[str, Estimate]], true: dict[str, float]) -> str:
    """Of each number: how far off in the mean and at worst, and how often its interval holds the truth."""
    cells = []
    for name, value in true.items():
        known = [each for one in found if (each := one.get(name)) is not None and each.low is not None]
        if len(known) < len(found) / 10:
            cells.append("-")
            continue
        off = np.array([each.value / value - 1 for each in known])
        held = np.mean([(each.low or 0.0) <= value <= (each.high or 0.0) for each in known])
        cells.append(f"{100 * off.mean():+.1f} ({100 * abs(off).max():.1f}), {100 * held:.1f}")
    return " | ".join(cells)


def start(runs: int) -> None:
    print("| slots | requests a slot | whole run: tokens/s | ttft p99 | slots handed over: tokens/s | ttft p99 |")
    print("|---:|---:|---|---|---|---|")
    for slots in (8, 64, 256):
        rng = np.random.default_rng((slots, 50))
        true = truth(queues.batches(queues.drawn_tokens((runs, slots * 50), rng), slots, None, noisy(slots)))
        for each in (2, 5, 10):
            rng = np.random.default_rng((slots, each))
            tokens = queues.drawn_tokens((runs, slots * (1 + each)), rng)
            burst = queues.batches(tokens[:, slots:], slots, None, noisy(slots))
            tokens[:, :slots] = [residual(row) for row in tokens[:, :slots].tolist()]
            handed = queues.batches(tokens, slots, None, noisy(slots), warms_up=slots)
            cells = []
            for loop, measured in ((burst, 0), (handed, slots)):
                found = np.array([whole(loop, run, seen, measured) for run, seen in enumerate(loop.stamps())])
                for name, values in zip(("tokens/s", "ttft p99"), found.T, strict=True):
                    cells.append(f"{100 * (values.mean() / true[name] - 1):+.1f}")
            print(f"| {slots} | {each} | {' | '.join(cells)} |", flush=True)


def whole(loop: queues.Batches, run: int, seen: Stamps, measured: int) -> tuple[float, float]:
    """Throughput and ttft p99 of the requests from number `measured` on, the others being a warm-up's."""
    waits_s = (loop.first_s - loop.sent_s)[run, measured:]
    p99_s = float(np.quantile(waits_s, 0.99))
    if not measured:
        return float(loop.tokens[run].sum() / loop.done_s[run].max()), p99_s
    span = steady.TimeSpan(float(loop.sent_s[run, measured]), float(loop.sent_s[run, -1]), 0)
    last_s, tokens = loop.cut(run, seen, span.to_s)
    return steady.spread_rate(seen.first_s, last_s, tokens, span).value, p99_s


LASTS_S, BATCH_PER_S = 300.0, 13.7  # what the server of batches serves with 64 in its batch
CHANGES: dict[str, queues.Step] = {
    "none": lambda now_s, takes_s: takes_s,
    "half the pace from 150 s on": lambda now_s, takes_s: takes_s * np.where(now_s >= 150, 2.0, 1.0),
    "a third of the pace for 10 s": lambda now_s, takes_s: takes_s * np.where(now_s < 10, 3.0, 1.0),
    "2 % a minute": lambda now_s, takes_s: takes_s * (1 + 0.02 * now_s / 60),
    "a pause of 8 s": lambda now_s, takes_s: takes_s + 8 * ((now_s < 140) & (now_s + takes_s >= 140)),
}
LOADS = {"closed loop of 8": 8, "closed loop of 64": 64, "0.45 of capacity": 0.45, "0.8 of capacity": 0.8}


def changing(load: float, change: queues.Step, runs: int) -> queues.Batches:
    """Five minutes of a server that changes so. load: requests in flight, or a share of its capacity."""
    rng = np.random.default_rng(round(100 * load))
    if load < 1:
        n = round(load * BATCH_PER_S * LASTS_S)
        arrived_s = queues.arrivals(load * BATCH_PER_S, (runs, n), rng)
        return queues.batches(queues.drawn_tokens((runs, n), rng), 128, arrived_s, noisy(n, change))
    n = round({8: 4.8, 64: 13.0}[round(load)] * LASTS_S)
    return queues.batches(queues.drawn_tokens((runs, n), rng), round(load), None, noisy(n, change))


def changes(runs: int) -> None:
    print("| load | what changed | runs | named | at, s | a token took, times |")
    print("|---|---|---:|---|---|---|")
    for name, load in LOADS.items():
        for what, step in CHANGES.items():
            count = runs if what == "none" else runs // 2
            pauses = [(140.0, 148.0)] if "pause" in what else []
            found = [detector.find(seen, pauses) for seen in changing(load, step, count).stamps()]
            words = Counter(each.kind.replace("_", " ") for each in found if each is not None)
            told = ", ".join(f"{word} {n}" for word, n in words.items()) or "0"
            at_s = [each.at_s for each in found if each is not None and each.at_s is not None]
            times = [each.ratio for each in found if each is not None]
            print(f"| {name} | {what} | {count} | {told} | {reach(at_s, 0)} | {reach(times, 2)} |", flush=True)


def reach(values: list[float], decimals: int) -> str:
    return f"{min(values):.{decimals}f} to {max(values):.{decimals}f}" if values else "-"


SHARES = {"mean": None, "p50": 0.5, "p95": 0.95, "p99": 0.99}
PARTNERS = 10  # runs that each is compared with
Row = dict[str, Estimate]


def values(loop: queues.Batches, run: int, n: int, session_s: float = 0.0) -> Row:
    """Mean and percentiles of ttft and e2el of a run's first n requests, with intervals as a report has them. As in
    their windows, closed loops are without their first wave, and sessions without the time of the first of them."""
    skip, closed = loop.slots or 0, loop.slots is not None
    skip += int(np.searchsorted(loop.sent_s[run], loop.sent_s[run, 0] + session_s)) if session_s else 0
    sent_s, first_s, done_s = (each[run, skip:n] for each in (loop.sent_s, loop.first_s, loop.done_s))
    life_s = float(np.median(done_s - sent_s))
    lasts_s = float(sent_s[-1] - sent_s[0])
    count = blocks.count(lasts_s, life_s, closed=closed, session_s=session_s)
    tail = blocks.tail_moments(lasts_s, life_s, closed=closed, session_s=session_s)
    block = np.searchsorted(np.linspace(sent_s[0], sent_s[-1], count + 1)[1:-1], sent_s, side="right")
    counts = np.bincount(block, minlength=count).astype(np.float64)
    found: Row = {}
    for name, times in (("ttft", first_s - sent_s), ("e2el", done_s - sent_s)):
        for statistic, share in SHARES.items():
            value, bounds = float(times.mean() if share is None else np.quantile(times, share)), None
            if count and share is None:
                reach = blocks.mean_reach(np.bincount(block, weights=times, minlength=count) / counts) or 0.0
                bounds = value - reach, value + reach
            elif count and share is not None and blocks.reaches(share, tail):
                within = np.bincount(block, weights=times <= value, minlength=count).astype(np.float64)
                bounds = blocks.of_percentile(np.sort(times), share, counts, within)
            found[f"{name} {statistic}"] = Estimate(value, *bounds, count) if bounds else Estimate(value)
    return found


def differ(a: list[Row], b: list[Row], name: str) -> str:
    partners = itertools.product(range(PARTNERS), range(len(a)))
    found = [of_estimates(a[one][name], b[(one + at) % len(b)][name]) for at, one in partners]
    bounded = [each for each in found if each.difference_ci is not None]
    if len(bounded) < len(found) / 20:
        return "-"
    said = sum(each.shows != SAME for each in bounded)
    return f"{100 * len(bounded) / len(found):.0f}: {100 * said / len(bounded):.1f}"


TURNS, THINK_S = 4, 2.0


def pairs(runs: int) -> None:
    names = [f"{name} {statistic}" for name in ("ttft", "e2el") for statistic in SHARES]
    print(f"| load | requests | slower by | {' | '.join(names)} |")
    print("|---|---:|---:|" + "---|" * len(names))
    for load, sizes in ((0.45, (300, 600, 3000)), (0.8, (300, 600, 3000)), (0.9, (300, 600, 3000)), (16, (300, 3000))):
        made = [paired(load, sizes[-1], 2 * runs, 1.0), paired(load, sizes[-1], runs, 1.1)]
        compared(f"{load:g} of capacity" if load < 1 else "closed loop of 16", made, sizes)
    made, lives_s = [conversations(2 * runs, 1.0), conversations(runs, 1.1)], TURNS * 0.4 + (TURNS - 1) * THINK_S
    compared(f"sessions of {TURNS} turns", made, (300, 600, 3000), lives_s)


def compared(what: str, made: list[queues.Batches], sizes: tuple[int, ...], session_s: float = 0.0) -> None:
    """made: twice as many runs of the usual server as of one that is 10 % slower."""
    names = [f"{name} {statistic}" for name in ("ttft", "e2el") for statistic in SHARES]
    for n in sizes:
        equal, slower = ([values(loop, run, n, session_s) for run in range(len(loop.tokens))] for loop in made)
        runs = len(slower)
        for others, by in ((equal[runs:], 0), (slower, 10)):
            cells = " | ".join(differ(equal[:runs], others, name) for name in names)
            print(f"| {what} | {n} | {by} % | {cells} |", flush=True)


def conversations(runs: int, slower: float) -> queues.Batches:
    """Sessions at a modelled vLLM that caches prefixes and has 16 slots, 2 s between their turns; about three in four
    slots are busy. A server that takes so many times as long for every step is the usual one by a slower clock."""
    with ProcessPoolExecutor() as processes:
        rows = list(processes.map(partial(conversation, slower), range(runs)))
    tokens, *times_s = np.asarray(rows).transpose(2, 0, 1)
    return queues.Batches(tokens.astype(np.int64), *(slower * each for each in times_s), np.empty((runs, 0)), None)


def conversation(slower: float, run: int) -> list[tuple[int, float, float, float]]:
    """Tokens of each turn, and when it was sent, had its first token and ended."""
    emulated = emulate(Hardware(gpu="h200", prefix_caching="on", max_running=16).setup("vllm", "7b", 4096))
    seed, count, per_s = run + round(10_000 * slower), 750, 6.5
    load = Config(
        sessions=count, turns=TURNS, think_time=THINK_S / slower, input_tokens=200, output_tokens="uniform:16:112",
        seed=seed,
    ).load  # fmt: skip
    turns, shapes, gaps_s = load.turns(), load.shapes(), np.random.default_rng(seed).exponential(1 / per_s, count)
    assert turns is not None
    begins_s = np.repeat(np.cumsum(gaps_s) / slower, TURNS).tolist()
    arrivals = [ArrivingRequest(at_s, *shapes.shape(number)[:3]) for number, at_s in enumerate(begins_s)]
    ended = sorted(simulate_sessions(emulated, arrivals, turns), key=lambda each: each.sent_s)
    return [(len(each.times_s), each.sent_s, each.times_s[0], each.times_s[-1]) for each in ended]


def paired(load: float, n: int, runs: int, slower: float) -> queues.Batches:
    rng = np.random.default_rng((round(100 * load), round(100 * slower)))
    tokens = queues.drawn_tokens((runs, n), rng)
    step = noisy(n, lambda _, takes_s: slower * takes_s)
    if load >= 1:
        return queues.batches(tokens, round(load), None, step)
    return queues.batches(tokens, 64, queues.arrivals(load * BATCH_PER_S, (runs, n), rng), step)


TABLES = {"kept_up": kept_up, "window": window, "start": start, "changes": changes, "pairs": pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", default="kept_up", choices=tuple(TABLES))
    parser.add_argument("--runs", type=int, default=200)
    options = parser.parse_args()
    TABLES[options.what](options.runs)


if __name__ == "__main__":
    main()
