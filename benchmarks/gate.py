"""How often `loadgen compare --fail-if` fails on two measurements of one server, and on a server that is 10 % slower.

    python benchmarks/gate.py [--pairs 200] [--out benchmarks/gate.json]

Runs are of a vLLM modelled on an H200, in virtual time: a closed loop of 16 requests in flight, of drawn lengths, each
run with a seed of its own. Every time of a run is multiplied by that run's own factor, lognormal with a
standard deviation of 1 %, as the noise between runs, and on the slower server by 1 / 0.9 too: in a closed loop a server
that is so much slower at everything gives exactly that. Each side has 5 runs of 200 requests, or a single one of 1000.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from loadgen.config import Config
from loadgen.report import compare, gate, limits
from loadgen.server import embedded
from servers.predict import command
from servers.simulator.build import emulate
from servers.simulator.options import Hardware
from servers.simulator.virtual import Outcome, simulate

REPEATS, NOISE_RATIO, SLOWER = 5, 0.01, 1 / 0.9
LIMITS = ("ttft_p99>+5%", "ttft_mean>+5%", "tpot_mean>+5%", "e2el_p50>+5%", "output_tokens_per_s<-3%")
ISSUE = ("ttft_p99>+5%", "output_tokens_per_s<-3%")  # one gate with both
LOAD = Config(
    gpu="h200", model="7b", concurrency=16, requests=200, input_tokens="uniform:100:900",
    output_tokens="lognormal:60:0.5:8:300", warmup=0,
)  # fmt: skip


def side(directory: Path, first_seed: int, slower: float, repeats: int = REPEATS) -> Path:
    """A directory of repeats; of one alone, with as many requests as they have together."""
    for number in range(1, repeats + 1):
        seed = first_seed + number - 1
        config = replace(LOAD, seed=seed, requests=200 * REPEATS // repeats)
        load, shapes = command.drawn(config)
        sent = command.requests(load, shapes)
        setup = Hardware(**embedded.modelled(config)).setup(config.kind, "llama-2-7b", 4096)
        emulated = emulate(setup)
        factor = slower * float(np.random.default_rng(seed).lognormal(0, NOISE_RATIO))
        outcomes = [_stretched(each, factor) for each in simulate(emulated, sent, load.streams)]
        run = directory / str(number)
        run.mkdir(parents=True)
        manifest = command.manifest(config, load, emulated, f"seed-{seed}", len(outcomes), None)
        command.write(run, manifest, outcomes, shapes, None)
    return directory


def _stretched(outcome: Outcome, factor: float) -> Outcome:
    times_s = array("d", (factor * at_s for at_s in outcome.times_s))
    return replace(outcome, sent_s=factor * outcome.sent_s, times_s=times_s)


def codes(a: Path, b: Path) -> dict[str, int]:
    """The exit code of a gate with each limit, and of one with those of ISSUE."""
    compared = compare.compare(a, b)
    by_limit = {
        text: gate.exit_code(compare.judged(compared, limits.parse([text], compare.LIMITED))) for text in LIMITS
    }
    both = compare.judged(compared, limits.parse(ISSUE, compare.LIMITED))
    return {**by_limit, " and ".join(ISSUE): gate.exit_code(both)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pairs", type=int, default=200)
    options.add_argument("--out", type=Path, default=Path("benchmarks/gate.json"))
    given = options.parse_args()
    failed: dict[str, Counter[str]] = {}
    for pair in range(given.pairs):
        with tempfile.TemporaryDirectory() as name:
            at = Path(name)
            seed = 2 * REPEATS * pair
            a, lone_a = side(at / "a", seed, 1.0), side(at / "lone a", seed, 1.0, 1) / "1"
            for server, slower in (("the same server", 1.0), ("10 % slower", SLOWER)):
                b = side(at / f"b {slower}", seed + REPEATS, slower)
                lone_b = side(at / f"lone b {slower}", seed + REPEATS, slower, 1) / "1"
                for how, of_a, of_b in ((f"{REPEATS} repeats", a, b), ("single runs", lone_a, lone_b)):
                    counts = failed.setdefault(f"{server}, {how}", Counter())
                    for limit, code in codes(of_a, of_b).items():
                        assert code in (0, 5), (limit, code)
                        counts[limit] += code == 5
        print(f"{pair + 1} of {given.pairs} pairs", end="\r", flush=True)
    ratios = {what: {limit: n / given.pairs for limit, n in counts.items()} for what, counts in failed.items()}
    result = {"pairs": given.pairs, "failed_ratio": ratios}
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
