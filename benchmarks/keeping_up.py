"""How often is a server that keeps up said to fall behind, and one that falls behind not? Our rule and two others on
the same runs: queues in virtual time whose capacity is known.

    python -m benchmarks.keeping_up [--runs 200]

A server of 8 slots serves 10 requests/s. Poisson arrivals of 0.5 to 2.5 times that, replies of three length laws, 300
and 3000 requests. Prints a table for docs/accuracy.md, in percent of the runs. The others' rules are in our own words:

    guidellm    requests in flight and ttft both rise: the slopes of straight lines through them, less their margins of
                error (1.96 standard errors), are above 0; not in the first 30 s, nor while ttft is under 2.5 s (0.8.1)
    BLIS        the peak of what is in flight, over the time in which it was reached, holds where a server does not keep
                up and falls where it does: from half of the time to all of it, to no less than 0.8 of it
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from loadgen.steady.keeping_up import Flow, judge
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    runs = parser.parse_args().runs
    ours, *others = RULES
    print(f"| requests | rho | {ours}: fell behind | near its limit | {' | '.join(others)} |")
    print("|---:|---:|" + "---:|" * (len(RULES) + 1))
    for n in (300, 3000):
        for row in rows(n, runs):
            print(row, flush=True)


if __name__ == "__main__":
    main()
