"""Steps of vLLM's engine, rebuilt from the times of tokens in the records of frozen runs, measured and predicted.

    python benchmarks/frozen_steps.py DIR     # DIR has `predicted` and `measured`, as benchmarks/frozen.py makes them

The oldest request that runs gets its token first in each step, so its tokens are a clock of the steps. While the CPU
launches a step with prefills, the tokens of the step before wait: their gap is the launch, where it is longer than
the step. On several GPUs workers launch, and no token waits: there the launch is from the tokens of the step before
the one before to the step's own, where that is longer than the GPUs take (not of graphs). Of steps with prefills
after two without, each as measured and predicted:

graph, eager  ms that a launch takes, 10th percentile, mean, 90th: of steps of at most 512 tokens, and of longer ones
extra         ms by which it, the step before and the step after are longer than decode steps, in the mean: eager steps
idle          ms by which the decode step after is longer than others, in the median: after eager steps of at most 760
              tokens, whose launch took over 18 ms, and which the GPU had done before
seen          ms from when a request is sent to when the scheduler sees it, and a token's way to the client: where the
              fewest requests are on the wrong side, if that is less than a quarter
decode        ms by which pure decode steps are longer than predicted, in the mean, at like rows and contexts

Then the eager launches of each server with a dense model on one GPU, as for 32 layers: their mean, and how unlike each
other those of a load are (standard deviation of the logarithm, over the loads); and both in the mean of the servers.
Then how long their front ends took to hand a token out, at most: the gap of decode steps over their rows, while all of
a burst's requests run. Where the GPU takes longer, it is the GPU's; steps of over 90 us a row are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from frozen import GROUPS, MODELS, Group  # noqa: E402

from loadgen.rundir import records  # noqa: E402

Floats = NDArray[np.float64]
GRAPH_TOKENS = 512
SLOWEST_US = 90.0  # a row of a step that a front end may hold up; no front end was seen to take longer
BEGUN_MS = 1500.0  # requests sent before are those that a closed loop begins with


class Steps(NamedTuple):
    """Of n steps, (n,) each: when the first token came, ms; rows that decode, their context, tokens of prompts. And of
    each, when the requests were sent whose first tokens it gave."""

    at_ms: Floats
    rows: Floats
    context: Floats
    prompt_tokens: Floats
    sent_ms: list[list[float]]

    def after_decodes(self, last: int) -> list[int]:
        """Steps with prefills beside decodes after two of decodes alone, and before `last` of them."""
        busy, pure = self.rows > 0, (self.rows > 0) & (self.prompt_tokens == 0)
        return [
            k
            for k in range(3, len(self.rows) - last)
            if busy[k] and not pure[k] and pure[k - 2 : k].all() and pure[k + 1 : k + 1 + last].all()
        ]

    def decodes(self) -> NDArray[np.bool_]:
        """Steps that have no prefill near (n - 1,): those from one step's token to the next's."""
        far = self.rows[1:] > 0
        for k in np.flatnonzero(self.prompt_tokens):
            far[max(k - 3, 0) : k + 3] = False
        return far


def rebuilt(directory: Path) -> Steps:
    table = records.read(directory)[0]
    table = table.select(table.ok)
    tokens: list[tuple[float, int, int]] = []
    for index in range(len(table.id)):
        tokens += [(at_ns / 1e6, index, place) for place, at_ns in enumerate(table.arrivals_ns(index).tolist())]
    steps: list[list[tuple[float, int, int]]] = [[]]
    seen: set[int] = set()
    for token in sorted(tokens):
        at_ms, index, place = token
        late_ms = 3 + 1e-3 * table.prompt_tokens[index] + 0.1 * len(seen)  # after an idle server's pause
        if index in seen or (seen and place == 0 and at_ms - steps[-1][-1][0] > late_ms):
            steps.append([])
            seen = set()
        seen.add(index)
        steps[-1].append(token)
    prompts, cached, sent_ms = table.prompt_tokens, np.maximum(table.cached_tokens, 0), table.sent_ns / 1e6
    rows = [[prompts[index] + place for _, index, place in step if place] for step in steps]
    first = [[index for _, index, place in step if not place] for step in steps]
    return Steps(
        np.array([step[0][0] for step in steps]),
        np.array([float(len(each)) for each in rows]),
        np.array([float(sum(each)) for each in rows]),
        np.array([float(sum(prompts[each] - cached[each])) for each in first]),
        [sent_ms[each].tolist() for each in first],
    )


def launches(steps: Steps, *, tokens_wait: bool) -> tuple[Floats, Floats]:
    """Milliseconds, of graphs and of eager steps. tokens_wait: whether those of the step before wait for a launch."""
    back = 1 if tokens_wait else 0
    taken: tuple[list[float], list[float]] = ([], [])
    for k in steps.after_decodes(0):
        eager = steps.rows[k] + steps.prompt_tokens[k] > GRAPH_TOKENS
        taken[int(eager)].append(steps.at_ms[k - back] - steps.at_ms[k - 2])
    return np.array(taken[0]), np.array(taken[1])


def fitted(steps: Steps) -> Floats:
    """ms of a decode step: constant, for a row and for a token of context."""
    terms, gaps_ms, far = _terms(steps), np.diff(steps.at_ms), steps.decodes()
    rough = np.linalg.lstsq(terms[far], gaps_ms[far], rcond=None)[0]
    usual = far & (np.abs(gaps_ms - terms @ rough) < 1)
    return np.asarray(np.linalg.lstsq(terms[usual], gaps_ms[usual], rcond=None)[0])


def decodes_ms(steps: Steps) -> Floats:
    """What decode steps of like rows and contexts take, of the gap after each step but the last."""
    return _terms(steps) @ fitted(steps)


def extra_ms(steps: Steps) -> float:
    usual_ms, at_ms = decodes_ms(steps), steps.at_ms
    longer = [
        at_ms[k + 1] - at_ms[k - 2] - usual_ms[k - 2 : k + 1].sum()
        for k in steps.after_decodes(1)
        if steps.rows[k] + steps.prompt_tokens[k] > GRAPH_TOKENS
    ]
    return float(np.mean(longer)) if len(longer) > 3 else np.nan


def idle_ms(steps: Steps) -> Floats:
    usual_ms = decodes_ms(steps)
    at_ms, tokens = steps.at_ms, steps.rows + steps.prompt_tokens
    return np.array([
        at_ms[k + 1] - at_ms[k - 1] - usual_ms[k]
        for k in steps.after_decodes(2)
        if GRAPH_TOKENS < tokens[k] < 760 and at_ms[k - 1] - at_ms[k - 2] > 18 and at_ms[k] - at_ms[k - 1] < 6
    ])  # fmt: skip


def seen_ms(steps: Steps) -> float:
    """A request whose first token came with step k was seen when those of k - 2 came, and not when those of k - 3."""
    by, after = [], []
    for k in range(3, len(steps.rows)):
        for sent_ms in steps.sent_ms[k] if steps.rows[k] > 1 else ():
            waited = k - int(np.searchsorted(steps.at_ms, sent_ms))
            if sent_ms > BEGUN_MS and 2 <= waited <= 4:
                by.append(steps.at_ms[k - 2] - sent_ms)
                after.append(steps.at_ms[k - 3] - sent_ms)
    limits = np.arange(0, 25, 0.1)
    wrong = [(np.array(by) < each).sum() + (np.array(after) > each).sum() for each in limits]
    clear = len(by) >= 20 and min(wrong) < len(by) / 4 and wrong[0] > min(wrong)
    return float(limits[int(np.argmin(wrong))]) if clear else np.nan


def _terms(steps: Steps) -> Floats:
    return np.stack([np.ones(len(steps.rows) - 1), steps.rows[1:], steps.context[1:]], 1)


def main(directory: Path) -> None:
    pairs = [title for each in ("graph", "eager", "extra", "idle", "seen") for title in (each, "predicted")]
    print("| server | load | rows | " + " | ".join(pairs) + " | decode |")
    print("|---|---|---:|---|---:|---|---:|" + "---:|" * 7)
    eager_ms: dict[str, list[Floats]] = {group: [] for group in GROUPS}
    for group, name, tp in ((group, name, of.tp) for group, of in GROUPS.items() for name in of.loads):
        if "burst" in name or not (directory / "measured" / name).is_dir():
            continue
        real, model = (rebuilt(directory / kind / name) for kind in ("measured", "predicted"))
        cells = [f"{real.rows[real.rows > 0].mean():.0f}"]
        predictions = launches(model, tokens_wait=True)  # in the model they do on several GPUs too
        taken_ms = launches(real, tokens_wait=tp == 1)
        eager_ms[group].append(taken_ms[1])
        for taken, predicted in zip(taken_ms, predictions, strict=True):
            low, high = np.percentile(taken, [10, 90]) if len(taken) > 3 else (np.nan, np.nan)
            cells += [f"{low:.1f}, {taken.mean():.1f}, {high:.1f}" if len(taken) > 3 else ""]
            cells += [f"{predicted.mean():.1f}" if len(taken) > 3 and len(predicted) else ""]
        cells += ["" if np.isnan(extra := extra_ms(steps)) else f"{extra:.1f}" for steps in (real, model)]
        for each in (idle_ms(real), idle_ms(model)):
            cells += [f"{np.median(each):.1f}" if len(each) > 2 else ""]
        cells += ["" if np.isnan(seen := seen_ms(steps)) else f"{seen:.1f}" for steps in (real, model)]
        gaps_ms, far = np.diff(real.at_ms), real.decodes()
        longer = (gaps_ms - _terms(real) @ fitted(model))[far]
        cells += [f"{longer[np.abs(longer) < 5].mean():+.2f}"]
        print(f"| {group} | {name} | " + " | ".join(cells) + " |")
    print_launches(eager_ms)
    print_fronts(directory / "measured")


def dense_alone(of: Group) -> bool:
    """Whether its model has no experts and one GPU."""
    return of.tp == 1 and not {"moe_intermediate_size", "num_local_experts"} & MODELS[of.model].keys()


def print_launches(eager_ms: dict[str, list[Floats]]) -> None:
    """By group: how long the eager launches of each of its loads took."""
    print("\n| server | eager launches | mean ms | spread |\n|---|---:|---:|---:|")
    servers: list[tuple[float, float]] = []
    for group, taken_ms in eager_ms.items():
        of = GROUPS[group]
        loads = [taken for taken in taken_ms if len(taken) > 3]
        if loads and dense_alone(of):
            every = np.concatenate(loads) * 32 / int(str(MODELS[of.model]["num_hidden_layers"]))
            spread = np.concatenate([np.log(taken / taken.mean()) for taken in loads]).std()
            servers.append((float(every.mean()), float(spread)))
            print(f"| {group} | {len(every)} | {every.mean():.1f} | {spread:.2f} |")
    mean_ms, spread = np.mean(servers, axis=0)
    print(f"| {len(servers)} servers | | {mean_ms:.1f} | {spread:.2f} |")


def print_fronts(measured: Path) -> None:
    """By burst: what decode steps with all its rows take; by server, in the mean."""
    print("\n| server | burst | rows | decode step ms, 10th percentile, mean, 90th | us a row |")
    print("|---|---|---:|---|---:|")
    servers: list[float] = []
    for group, of in GROUPS.items():
        paces: list[float] = []
        for name in of.fitted | of.loads:
            if "burst" not in name or not dense_alone(of) or not (measured / name).is_dir():
                continue
            steps = rebuilt(measured / name)
            rows = steps.rows.max()
            full = steps.decodes() & (steps.rows[1:] == rows)
            gaps_ms = np.diff(steps.at_ms)[full]
            pace_us = 1e3 * gaps_ms.mean() / rows
            if pace_us < SLOWEST_US:
                paces.append(pace_us)
                low, high = np.percentile(gaps_ms, [10, 90])
                each_ms = f"{low:.1f}, {gaps_ms.mean():.1f}, {high:.1f}"
                print(f"| {group} | {name} | {rows:.0f} | {each_ms} | {pace_us:.1f} |")
        if paces:
            servers.append(float(np.mean(paces)))
    print(f"| {len(servers)} servers | | | | {np.mean(servers):.1f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
