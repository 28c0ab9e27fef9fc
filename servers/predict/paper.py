"""Section VI of arXiv 2311.03687 in virtual time: the paper's burst on its platforms, models and servers, and what it
states of them beside what is predicted, misses included.

What the paper states, and what is assumed where it states nothing, stand in `servers/data/paper.json`. A run is named
PLATFORM/MODEL/SERVER, in a check `*` stands for one of `ranks`. Nothing here was measured: every output states that.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends import catalog
from servers.schedulers import Rejected, Sequence, Step
from servers.simulator.build import Emulated, EmulationError, Setup, emulate
from servers.simulator.cost import Overheads
from servers.simulator.hardware import DATA


@dataclass(frozen=True)
class Result:
    """One run, or why there is none. latencies_s: ascending, of the requests that were served."""

    reason: str = ""
    emulated: Emulated | None = None
    latencies_s: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    output_tokens: int = 0
    refused: int = 0
    preemptions: int = 0

    def measure(self, name: str) -> float:
        """`throughput` in output tokens a second, or `p60_s`; NaN where nothing was served."""
        if not len(self.latencies_s):
            return math.nan
        if name == "throughput":
            return self.output_tokens / float(self.latencies_s[-1])
        return float(np.percentile(self.latencies_s, int(name.removeprefix("p").removesuffix("_s"))))

    def step_s(self, step: Step) -> float:
        """Its kernels alone."""
        return math.nan if self.emulated is None else self.emulated.cost.with_overheads(Overheads())(step)


Results = Mapping[str, Result]


class Value(msgspec.Struct, frozen=True, tag_field="kind", tag="value"):
    measure: str
    run: str
    paper: float
    within: float

    @property
    def criterion(self) -> str:
        return f"within {self.within:.0%} of {self.paper:g}"

    def check(self, results: Results) -> tuple[str, bool]:
        value = results[self.run].measure(self.measure)
        return f"{value:.0f}", abs(value / self.paper - 1) <= self.within


class Ratio(msgspec.Struct, frozen=True, tag_field="kind", tag="ratio"):
    """`of` over the largest of `over`."""

    measure: str
    of: str
    over: tuple[str, ...]
    low: float
    high: float

    @property
    def criterion(self) -> str:
        return f"{self.low:g} to {self.high:g} times" if self.high < 1000 else f"at least {self.low:g} times"

    def check(self, results: Results) -> tuple[str, bool]:
        ratio = results[self.of].measure(self.measure) / max(results[run].measure(self.measure) for run in self.over)
        return f"{ratio:.1f} times", self.low <= ratio <= self.high


class Order(msgspec.Struct, frozen=True, tag_field="kind", tag="order"):
    """In at least the share `least` of the places `at` the `ranks` come in this order, the lowest (or `highest`) first;
    `rest_free`: the first before all others is enough. What did not run is left out; one alone has no order."""

    measure: str
    ranks: tuple[str, ...]
    at: tuple[str, ...]
    highest: bool = False
    rest_free: bool = False
    least: float = 1.0

    @property
    def criterion(self) -> str:
        return f"in {'all' if self.least == 1 else f'at least {self.least:.0%}'} of {len(self.at)} cases"

    def check(self, results: Results) -> tuple[str, bool]:
        held, leaders = 0, []
        for place in self.at:
            values = _values(results, place, self.ranks, self.measure)
            order = sorted(values, key=lambda rank: values[rank], reverse=self.highest)
            expected = [rank for rank in self.ranks if rank in values]
            held += len(order) > 1 and (order[:1] == expected[:1] if self.rest_free else order == expected)
            leaders.append(order[0] if self.rest_free and order else (" > " if self.highest else " < ").join(order))
        counts = ", ".join(f"{leaders.count(name)} x {name}" for name in dict.fromkeys(leaders))
        return f"in {held} of {len(self.at)} ({counts})", held >= self.least * len(self.at)


class Spread(msgspec.Struct, frozen=True, tag_field="kind", tag="spread"):
    """At each place the largest is at most `most` times the smallest."""

    measure: str
    ranks: tuple[str, ...]
    at: tuple[str, ...]
    most: float

    @property
    def criterion(self) -> str:
        return f"largest over smallest at most {self.most:g}"

    def check(self, results: Results) -> tuple[str, bool]:
        spreads = []
        for place in self.at:
            values = _values(results, place, self.ranks, self.measure).values()
            spreads.append(max(values) / min(values) if values else math.nan)
        return ", ".join(f"{spread:.1f}" for spread in spreads), all(spread <= self.most for spread in spreads)


class Fits(msgspec.Struct, frozen=True, tag_field="kind", tag="fits"):
    runs: tuple[str, ...]
    fits: bool

    @property
    def criterion(self) -> str:
        return "fits everywhere" if self.fits else "fits nowhere"

    def check(self, results: Results) -> tuple[str, bool]:
        fitting = [not results[run].reason for run in self.runs]
        return f"{sum(fitting)} of {len(fitting)} fit", all(fit == self.fits for fit in fitting)


class StepTime(msgspec.Struct, frozen=True, tag_field="kind", tag="step"):
    """Milliseconds of kernels of one decode step."""

    run: str
    rows: int
    context: int
    paper: float
    within: float

    @property
    def criterion(self) -> str:
        return f"within {self.within:.0%} of {self.paper:g} ms"

    def check(self, results: Results) -> tuple[str, bool]:
        rows = [Sequence(number, self.context, 1) for number in range(self.rows)]
        value = 1e3 * results[self.run].step_s(Step(rows, self.rows, self.rows * self.context))
        return f"{value:.1f} ms", abs(value / self.paper - 1) <= self.within


class Fact(msgspec.Struct, frozen=True):
    """`fitted`: the model was fitted to it, so that it proves nothing."""

    place: str
    statement: str = msgspec.field(name="said")
    check: Value | Ratio | Order | Spread | Fits | StepTime
    fitted: bool = False


class Variant(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run under another assumption."""

    why: str
    run: str
    kv_tokens: int | None = None
    max_requests: int = 1 << 20
    detokenize_us: float = 0.0


class Platform(msgspec.Struct, frozen=True):
    name: str
    gpu: str
    topology: str


class PaperServer(msgspec.Struct, frozen=True):
    name: str
    scheduler: str
    max_running: int


class Paper(msgspec.Struct, frozen=True):
    source: str
    requests: int
    input_tokens: int
    gpus: int
    max_new_tokens: int
    early_stop_share: float
    early_stop_mean_tokens: float
    assumptions: tuple[str, ...]
    platforms: dict[str, Platform]
    models: dict[str, str]
    servers: dict[str, PaperServer]
    facts: tuple[Fact, ...]
    variants: tuple[Variant, ...]

    def runs(self) -> list[str]:
        """All combinations, by platform, model and server."""
        return [f"{p}/{model}/{server}" for p in self.platforms for model in self.models for server in self.servers]

    def name(self, run: str) -> str:
        platform, model, server = run.split("/")
        return f"{self.platforms[platform].name}, {model.upper()}, {self.servers[server].name}"

    def lengths(self, seed: int) -> list[int]:
        """The length of every reply, in tokens."""
        draw = random.Random(seed)
        early = 1 / self.early_stop_mean_tokens
        return [
            min(self.max_new_tokens, 1 + int(draw.expovariate(early)))
            if draw.random() < self.early_stop_share
            else self.max_new_tokens
            for _ in range(self.requests)
        ]


class FactResult(msgspec.Struct, frozen=True, kw_only=True):
    """A statement of the paper beside what is predicted; criterion: what counts as met."""

    place: str
    statement: str = msgspec.field(name="said")
    predicted: str
    criterion: str = msgspec.field(name="counts")
    met: bool
    fitted: bool


class RunNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """What one run came to; throughput in output tokens a second."""

    kv_tokens: int
    throughput: float
    p50_s: float
    p60_s: float
    p100_s: float
    served: int
    refused: int
    preemptions: int


class DoesNotFit(msgspec.Struct, frozen=True):
    reason: str


@dataclass(frozen=True)
class VariantResult:
    variant: Variant
    base: RunNumbers | DoesNotFit
    changed: RunNumbers | DoesNotFit

    def as_json(self) -> dict[str, object]:
        """One object, the base's keys with a prefix."""
        base = {f"base_{name}": value for name, value in msgspec.structs.asdict(self.base).items()}
        return {**msgspec.to_builtins(self.variant), **base, **msgspec.structs.asdict(self.changed)}


@dataclass(frozen=True)
class PaperSummary:
    """Everything but the figures."""

    paper: Paper
    seed: int
    output_tokens_mean: float
    facts: list[FactResult]
    runs: dict[str, RunNumbers | DoesNotFit]
    variants: list[VariantResult]

    def as_json(self) -> bytes:
        """As `paper.json` holds it."""
        return msgspec.json.encode(
            {
                "emulated": True,
                "source": self.paper.source,
                "seed": self.seed,
                "output_tokens_mean": self.output_tokens_mean,
                "assumptions": self.paper.assumptions,
                "facts": self.facts,
                "runs": self.runs,
                "variants": [each.as_json() for each in self.variants],
            }
        )


@functools.cache
def load() -> Paper:
    return msgspec.json.decode((DATA / "paper.json").read_bytes(), type=Paper)


def predict(run: Variant, lengths: list[int]) -> Result:
    """The burst on one platform, model and server. A server knows how much each request may generate, not when it will
    stop: the request leaves when it does."""
    paper = load()
    platform, model, server = run.run.split("/")
    spec = catalog.find(paper.models[model])
    assert spec is not None
    try:
        emulated = emulate(
            Setup(
                scheduler=paper.servers[server].scheduler, model=spec, gpu=paper.platforms[platform].gpu,
                gpus=paper.gpus, tp=paper.gpus, topology=paper.platforms[platform].topology, kv_tokens=run.kv_tokens,
                max_running=paper.servers[server].max_running, max_requests=run.max_requests,
            )
        )  # fmt: skip
    except EmulationError as error:
        return Result(reason=str(error))
    done_s: dict[int, float] = {}
    free_s = 0.0

    def deliver(emits: list[Sequence], at_s: float, gap_s: float) -> None:
        nonlocal free_s
        for sequence in emits:
            free_s = max(free_s, at_s) + run.detokenize_us * 1e-6
            if sequence.index not in done_s and sequence.emitted == lengths[sequence.index]:
                done_s[sequence.index] = free_s
                if not sequence.done:
                    engine.cancel(sequence)
            at_s += gap_s

    engine = emulated.engine(deliver)
    refused = 0
    for index in range(len(lengths)):
        try:
            engine.submit(Sequence(index, paper.input_tokens, paper.max_new_tokens), 0.0)
        except Rejected:
            refused += 1
    engine.advance(math.inf)
    return Result(
        emulated=emulated,
        latencies_s=np.sort(np.array(list(done_s.values()))),
        output_tokens=sum(lengths[index] for index in done_s),
        refused=refused,
        preemptions=engine.scheduler.preemptions,
    )


def predict_all(seed: int = 0) -> dict[str, Result]:
    lengths = load().lengths(seed)
    return {run: predict(Variant("", run), lengths) for run in load().runs()}


def summary(results: Results, seed: int = 0) -> PaperSummary:
    paper = load()
    lengths = paper.lengths(seed)
    facts = []
    for fact in paper.facts:
        predicted, met = fact.check.check(results)
        facts.append(
            FactResult(
                place=fact.place, statement=fact.statement, predicted=predicted, criterion=fact.check.criterion,
                met=met, fitted=fact.fitted,
            )
        )  # fmt: skip
    return PaperSummary(
        paper=paper,
        seed=seed,
        output_tokens_mean=sum(lengths) / len(lengths),
        facts=facts,
        runs={run: _numbers(result) for run, result in results.items()},
        variants=[
            VariantResult(each, _numbers(results[each.run]), _numbers(predict(each, lengths)))
            for each in paper.variants
        ],
    )


def _values(results: Results, place: str, ranks: Iterable[str], measure: str) -> dict[str, float]:
    """The measure of those that ran."""
    values = {rank: results[place.replace("*", rank)].measure(measure) for rank in ranks}
    return {rank: value for rank, value in values.items() if not math.isnan(value)}


def _numbers(result: Result) -> RunNumbers | DoesNotFit:
    if result.emulated is None:
        return DoesNotFit(result.reason)
    return RunNumbers(
        kv_tokens=result.emulated.kv_tokens,
        throughput=result.measure("throughput"),
        p50_s=result.measure("p50_s"),
        p60_s=result.measure("p60_s"),
        p100_s=result.measure("p100_s"),
        served=len(result.latencies_s),
        refused=result.refused,
        preemptions=result.preemptions,
    )


def verdict(fact: FactResult) -> str:
    return ("fitted" if fact.fitted else "met") if fact.met else "MISS"


def stated(fact: FactResult) -> tuple[str, str, str, str]:
    return fact.place, fact.statement, fact.predicted, fact.criterion
