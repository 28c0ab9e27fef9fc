"""What is compared: GPUs, how many as one server, in which number format, for which model; and what each would need.

A Poisson load that is split at random over n servers is Poisson again, at 1/n of the rate: one server at that rate
stands for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from backends.decoder import ModelSpec
from backends.untrusted import read_json
from loadgen.config import ConfigError
from loadgen.search.highest import HighestLoad
from servers.plan.sizing import THROUGHPUT, Demand, LatencyLimits, LoadTrial, NotMet, SizedServer
from servers.plan.sure import surest
from servers.simulator import formats, hardware
from servers.simulator.build import Emulated, EmulationError
from servers.simulator.hardware import HardwareError

MOST_SURE = 3  # rows whose rate is searched for again
ANY, NONE = "any", "none"  # of --quantization: every format that makes sense; the weights as they come


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars an hour for one GPU, by the names of `servers/data/gpus.json`; the user's to edit."""

    usd_per_gpu_hour: dict[str, float]
    source: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """`tp` GPUs of one kind as one server. `gpu` and `model` as the user names them. quantization: that is asked for;
    None: the weights as they come."""

    gpu: str
    tp: int
    max_running: int = 1024
    model: str = "7b"
    quantization: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """What would do. server_rate: the highest that one server keeps up with, requests/s; bound: by which limit; answer:
    that rate with its interval, where it was searched for again. highest: one server at that rate; trial: at its share
    of the load."""

    candidate: Candidate
    server: SizedServer
    servers: int
    usd_per_hour: float | None
    server_rate: float
    bound: str
    highest: LoadTrial
    trial: LoadTrial
    answer: HighestLoad | None = None

    @property
    def emulated(self) -> Emulated:
        return self.server.emulated

    @property
    def gpus(self) -> int:
        return self.servers * self.candidate.tp


@dataclass(frozen=True, kw_only=True)
class Unmet:
    candidate: Candidate
    reason: str


def read_prices(path: Path | None) -> Prices:
    """The user's, or those that come with this package. Raises ConfigError."""
    example = hardware.DATA / "prices.json"
    path = path or example
    prices = read_json(path, Prices, ConfigError, "is no list of prices", f"; copy {example}")
    wrong = [name for name, price in prices.usd_per_gpu_hour.items() if not 0 <= price < math.inf]
    if wrong:
        raise ConfigError(f"{path}: the price of {wrong[0]} is below 0.")
    return prices


def price(prices: Prices, gpu: str) -> float | None:
    """Dollars an hour for one, by any name of that GPU; None when the list has none. Raises HardwareError."""
    card = hardware.find(gpu)
    names = {gpu.lower(), card.name.lower(), *card.aliases}
    names |= {key for key, known in hardware.known().items() if known is card}
    return next((each for name, each in prices.usd_per_gpu_hour.items() if name.lower() in names), None)


def quantizations(formats_wanted: Sequence[str], gpu: str, model: ModelSpec) -> list[str | None]:
    """Which of `formats_wanted` to try on that GPU: of `any` the weights as they come and, where these are not
    quantized already, every format that makes sense there. Raises HardwareError."""
    formats_of_gpu = [] if model.quantization else formats.choices(hardware.find(gpu).name)
    tried: dict[str | None, None] = {}
    for each in formats_wanted or (NONE,):
        names = [NONE, *formats_of_gpu] if each == ANY else [each]
        tried |= dict.fromkeys(None if name == NONE else name for name in names)
    return list(tried)


def candidates(
    models: dict[str, ModelSpec], kinds: Iterable[str], formats_wanted: Sequence[str], largest_tp: int,
    max_running: Iterable[int],
) -> Iterator[Candidate]:  # fmt: skip
    """All that is looked at, one GPU after another. models: by the user's name for each."""
    running = list(dict.fromkeys(max_running))
    for gpu in dict.fromkeys(kinds):
        for model, spec in models.items():
            for tp in (1 << power for power in range(largest_tp.bit_length())):
                for quantization in quantizations(formats_wanted, gpu, spec):
                    for most in running:
                        yield Candidate(gpu=gpu, tp=tp, max_running=most, model=model, quantization=quantization)


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What every candidate is asked. `emulation` raises EmulationError or HardwareError for what cannot be."""

    emulation: Callable[[Candidate], Emulated]
    demand: Demand
    limits: LatencyLimits
    prices: Prices
    max_gpus: int


def judge(candidate: Candidate, wanted: Requirements) -> PlanRow | Unmet:
    """What one kind of server needs for the whole load."""
    demand = wanted.demand
    try:
        server = SizedServer(wanted.emulation(candidate), demand, wanted.limits)
        rate, bound = server.highest(demand.rate / max(1, wanted.max_gpus // candidate.tp))
        return _row(candidate, server, rate, bound, wanted)
    except (EmulationError, HardwareError, NotMet) as reason:
        return Unmet(candidate=candidate, reason=str(reason))


def _row(candidate: Candidate, server: SizedServer, rate: float, bound: str, wanted: Requirements) -> PlanRow:
    """At that highest rate of one server. Raises NotMet and EmulationError."""
    demand, servers = wanted.demand, math.ceil(wanted.demand.rate / rate)
    while True:
        if servers * candidate.tp > wanted.max_gpus:
            raise NotMet(
                f"needs {servers} servers of {rate:.3g} {demand.what} (limited by {bound}), "
                f"{servers * candidate.tp} GPUs; --max-gpus is {wanted.max_gpus}"
            )
        share = server.at(demand.rate / servers)
        if share.missed is None:
            break
        servers += 1  # missed at less than the highest: rare, where a percentile hangs on a few requests
    each = price(wanted.prices, candidate.gpu)
    return PlanRow(
        candidate=candidate,
        server=server,
        servers=servers,
        usd_per_hour=None if each is None else each * servers * candidate.tp,
        server_rate=rate,
        bound=bound,
        highest=server.at(rate),
        trial=share,
    )


def made_sure(rows: list[PlanRow], unmet: list[Unmet], wanted: Requirements) -> tuple[list[PlanRow], list[Unmet]]:
    """Searches for the rate of the first row again, as `loadgen search` does, until the first needs it no more: it has
    its interval, or its limit is what the server works off, which hangs on no single requests. Another row may come
    first by that. Only loads of single requests can be drawn again."""
    load = wanted.demand.load
    if load.sessions is not None or load.trace is not None:
        return rows, unmet
    for _ in range(MOST_SURE):
        if not rows or rows[0].answer is not None or rows[0].bound == THROUGHPUT:
            break
        rows, unmet = ranked([_sure(rows[0], wanted), *rows[1:], *unmet])
    return rows, unmet


def _sure(row: PlanRow, wanted: Requirements) -> PlanRow | Unmet:
    try:
        answer = surest(row.emulated, wanted.demand, wanted.limits, row.server_rate)
        rate = row.server_rate if answer.value is None else answer.value
        return replace(_row(row.candidate, row.server, rate, row.bound, wanted), answer=answer)
    except (EmulationError, NotMet) as reason:
        return Unmet(candidate=row.candidate, reason=str(reason))


def ranked(judged: Iterable[PlanRow | Unmet]) -> tuple[list[PlanRow], list[Unmet]]:
    """Those that do, cheapest first (then the fewest GPUs, then the most to spare; without a price last), and those
    that do not."""

    def order(row: PlanRow) -> tuple[float, int, float]:
        return math.inf if row.usd_per_hour is None else row.usd_per_hour, row.gpus, -row.servers * row.server_rate

    both = list(judged)
    rows = sorted((each for each in both if isinstance(each, PlanRow)), key=order)
    return rows, [each for each in both if isinstance(each, Unmet)]
