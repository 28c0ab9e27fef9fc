"""`loadgen plan`: which GPUs, how many and how joined, would serve a load within limits, cheapest first. Predictions.

One server is tried in virtual time at Poisson rates until the highest is found at which it keeps the limits and works
off what comes. A load that is split at random over n servers is Poisson again, at 1/n of the rate: so many are needed.
What cannot do it stands below with the reason; no candidate is left out.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Group, Parameter

from backends import catalog
from backends.decoder import ModelSpec
from backends.untrusted import escaped, read_json
from loadgen import exit_codes, models, terminal
from loadgen.config import (
    LOAD,
    SERVER,
    SETTINGS,
    Config,
    ConfigError,
    DtypeOption,
    KvCacheDtypeOption,
    MemoryRatioOption,
    ProfileOption,
    QuantizationOption,
    SchedulerOption,
)
from loadgen.load.load import Load
from loadgen.option_types import NumberOrText, Whole, WholeOrText, option
from loadgen.report import text
from loadgen.server import embedded
from servers.plan.sizing import METRICS, STRETCH, Demand, Limits, NotMet, SizedServer, Trial, trace_rate
from servers.simulator import hardware
from servers.simulator.build import Emulated, EmulationError, Profile, Setup, emulate, profiles, read_profile
from servers.simulator.hardware import HardwareError
from servers.simulator.options import Hardware

LARGEST_TP = 8  # a host of eight GPUs
MOST_RATE = 1e9
GPUS = Group("GPUs and prices", sort_key=3)


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars an hour for one GPU, by the names of `servers/data/gpus.json`; the user's to edit."""

    usd_per_gpu_hour: dict[str, float]
    source: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """`tp` GPUs of one kind as one server. `gpu` as the user names it."""

    gpu: str
    tp: int
    max_running: int = 1024

    def text(self, with_running: bool) -> str:
        return f"{self.tp} x {self.gpu}" + (f", max-running {self.max_running}" if with_running else "")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What would do. server_rate: the highest that one server keeps up with, requests/s; bound: by which limit.
    trial: one server's share of the load."""

    candidate: Candidate
    emulated: Emulated
    servers: int
    usd_per_hour: float | None
    server_rate: float
    bound: str
    trial: Trial

    @property
    def gpus(self) -> int:
        return self.servers * self.candidate.tp


@dataclass(frozen=True, kw_only=True)
class Unmet:
    candidate: Candidate
    reason: str


def parse_slo(slo: str, percentile: float = 99.0) -> Limits:
    """'ttft_ms=500,tpot_ms=50'. Raises ConfigError."""
    seconds: dict[str, float] = {}
    for item in slo.split(","):
        name, _, limit = item.strip().partition("=")
        metric = name.removesuffix("_ms")
        try:
            milliseconds = float(limit)
        except ValueError:
            milliseconds = math.nan
        if metric not in METRICS or not name.endswith("_ms") or not 0 < milliseconds < math.inf:
            raise ConfigError(
                f"--slo '{item.strip()}' is not understood; use ttft_ms=500,tpot_ms=50 (or e2el_ms), above 0."
            )
        if metric in seconds:
            raise ConfigError(f"--slo limits {name} twice; give each once.")
        seconds[metric] = milliseconds / 1e3
    if not 0 < percentile < 100:
        raise ConfigError(f"--percentile is {percentile:g}; it must be between 0 and 100.")
    return Limits(seconds=seconds, percentile=percentile)


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


def judge(
    candidate: Candidate, emulation: Callable[[Candidate], Emulated], demand: Demand, limits: Limits, prices: Prices,
    max_gpus: int,
) -> Row | Unmet:  # fmt: skip
    """What one kind of server needs for the whole load. `emulation` raises EmulationError or HardwareError for what
    cannot be."""
    try:
        emulated = emulation(candidate)
        server = SizedServer(emulated, demand, limits)
        highest, bound = server.highest()
        servers = math.ceil(demand.rate / highest)
        while True:
            if servers * candidate.tp > max_gpus:
                raise NotMet(
                    f"needs {servers} servers of {highest:.3g} {demand.what} (limited by {bound}), "
                    f"{servers * candidate.tp} GPUs; --max-gpus is {max_gpus}"
                )
            share = server.at(demand.rate / servers)
            if share.missed is None:
                break
            servers += 1  # missed at less than the highest: rare, where a percentile hangs on a few requests
    except (EmulationError, HardwareError, NotMet) as reason:
        return Unmet(candidate=candidate, reason=str(reason))
    each = price(prices, candidate.gpu)
    return Row(
        candidate=candidate,
        emulated=emulated,
        servers=servers,
        usd_per_hour=None if each is None else each * servers * candidate.tp,
        server_rate=highest,
        bound=bound,
        trial=share,
    )


def ranked(judged: Iterable[Row | Unmet]) -> tuple[list[Row], list[Unmet]]:
    """Those that do, cheapest first (then the fewest GPUs, then the most to spare; without a price last), and those
    that do not."""

    def order(row: Row) -> tuple[float, int, float]:
        return math.inf if row.usd_per_hour is None else row.usd_per_hour, row.gpus, -row.servers * row.server_rate

    candidates = list(judged)
    rows = sorted((each for each in candidates if isinstance(each, Row)), key=order)
    return rows, [each for each in candidates if isinstance(each, Unmet)]


def _each(what: str) -> str:
    """The heading of one server's rate."""
    return f"{what.replace('requests', 'req')} each"


def _table(rows: list[Row], limits: Limits, what: str) -> list[str]:
    cells = [
        (
            "$/hour", "GPUs", "servers", "each on", "joined by", "max-running", _each(what), "limited by",
            *(f"p{limits.percentile:g} {name} ms" for name in METRICS), "in flight",
        )
    ]  # fmt: skip
    for row in rows:
        tp = row.candidate.tp
        seen = (row.trial.percentiles[name] for name in METRICS)
        cells.append(
            (
                "no price" if row.usd_per_hour is None else f"{row.usd_per_hour:.2f}", str(row.gpus), str(row.servers),
                f"{tp} x {row.candidate.gpu}", "-" if tp == 1 else row.emulated.facts.topology,
                str(row.candidate.max_running), text.number(row.server_rate), row.bound,
                *(text.number(None if math.isnan(value_s) else 1e3 * value_s) for value_s in seen),
                str(row.trial.in_flight),
            )
        )  # fmt: skip
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    words = (3, 4, 7)
    return [
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _commands(row: Row, demand: Demand, limits: Limits) -> Iterator[str]:
    """What looks closer at one server's share of the load, and what starts such a server."""
    setup = row.emulated.setup
    words = ["--backend", setup.scheduler.partition("@")[0], "--model", _place(setup.model)]
    words += ["--tp", str(row.candidate.tp), "--dtype", setup.dtype]
    words += [] if setup.quantization is None else ["--quantization", setup.quantization]
    words += [] if setup.kv_cache_dtype == "auto" else ["--kv-cache-dtype", setup.kv_cache_dtype]
    words += ["--max-running", str(setup.max_running), "--memory-ratio"]
    words += [f"{setup.memory_ratio:g}", *([] if setup.p2p else ["--p2p", "off"])]
    modelled = ["--gpu", row.candidate.gpu, "--gpus", str(row.candidate.tp), "--scheduler", setup.scheduler]
    modelled += [] if setup.profile is None else ["--profile", str(setup.profile)]
    load = demand.load
    load_flags = [*_load_flags(load, demand.rate / row.servers), "--goodput"]
    load_flags += [f"{name}:{1e3 * limit_s:g}" for name, limit_s in limits.seconds.items()]
    yield f"Look closer at the first: {shlex.join(['loadgen', 'predict', *words, *modelled, *load_flags])}"
    yield f"Start one of its servers: {shlex.join(['loadgen', 'compose', *words])}"


def _load_flags(load: Load, rate: float) -> list[str]:
    """Of a load that comes at such a rate."""
    if load.trace is not None:
        trace = load.trace
        flags = ["--trace", trace.path, "--trace-speed", f"{trace.speed * rate / trace_rate(load):.4f}"]
        flags += [] if trace.format is None else ["--trace-format", trace.format]
        flags += [] if trace.limit is None else ["--trace-limit", str(trace.limit)]
        return flags + ([] if trace.from_s == 0 else ["--trace-from", f"{trace.from_s:g}"])
    flags = ["--arrival", f"poisson:{rate:.4f}", "--input-tokens", str(load.input_tokens)]
    flags += ["--output-tokens", str(load.output_tokens)]
    flags += [] if load.prefix is None else ["--prefix", str(load.prefix)]
    if load.sessions is not None:
        flags += ["--sessions", str(load.requests), "--turns", str(load.sessions.turns)]
        flags += ["--think-time", str(load.sessions.think_time)]
    return flags


def _place(model: ModelSpec) -> str:
    """What finds it again: its name, its id or its directory."""
    return model.hf_id if catalog.find(model.name) is None else model.name


def _reliability(profile: Profile, gpus: Iterable[str]) -> Iterator[str]:
    """How far these numbers may be off: a server's software and the operators of each GPU."""
    yield from text.held_out_lines(profile.held_out)
    yield "A high percentile near its limit is harder to predict than that: measure one server before renting many."
    where = f"; on {profile.gpu}, assumed elsewhere" if profile.gpu else ""
    yield f"Software: {profile.source or profile.scheduler + ', as calibrated'}{where}."
    for gpu in gpus:
        yield f"Operators of {gpu}, how far off: {hardware.find(gpu).error}."


def _arriving(load: Load) -> str:
    if load.trace is not None:
        return f"as in {load.trace.path}, faster or slower"
    shared = "" if load.prefix is None else f", prompts of a group alike: {load.prefix}"
    lengths = f"Poisson, {load.input_tokens} tokens in, {load.output_tokens} out{shared}"
    if load.sessions is None:
        return lengths
    return f"{lengths}, {load.sessions.turns} turns each, {load.sessions.think_time} s to think"


def render(
    rows: list[Row], unmet: list[Unmet], demand: Demand, limits: Limits, prices: Prices, profile: Profile
) -> str:
    """For people: the table, what will not do, and how far to trust it."""
    candidates: list[Row | Unmet] = [*rows, *unmet]
    wanted = ", ".join(f"{name} <= {1e3 * limit_s:g} ms" for name, limit_s in limits.seconds.items())
    lines = [
        "PREDICTIONS: emulated, computed by a model of the hardware; nothing was measured.",
        f"{demand.rate:g} {demand.what} ({_arriving(demand.load)}); "
        f"{limits.percentile:g} % of the requests within {wanted}.",
        "",
    ]
    if rows:
        lines += [
            *_table(rows, limits, demand.what),
            "",
            f"{_each(demand.what)}: the highest rate at which one server keeps the limits (found within 10 %), and "
            "what is in the way of more. Latencies and requests in flight: predicted at one server's share of the "
            "load.",
            *_commands(rows[0], demand, limits),
        ]
        if any(row.emulated.facts.topology == "pcie" for row in rows):
            lines.append(
                "pcie: the cards reach each other directly (P2P), which the drivers of GeForce cards do not allow; "
                "--p2p off sends everything through host memory."
            )
    else:
        lines.append("Nothing that was looked at would do.")
    if unmet:
        lines += ["", "Would not do:"]
        several = len({each.candidate.max_running for each in candidates}) > 1
        names = [each.candidate.text(several) for each in unmet]
        width = max(map(len, names))
        lines += [f"  {name:{width}s}  {each.reason.rstrip('.')}." for name, each in zip(names, unmet, strict=True)]
    gpus = dict.fromkeys(each.candidate.gpu for each in candidates)
    lines += ["", *_reliability(profile, gpus), f"Prices: {prices.source} ({prices.date}). Yours: --prices FILE."]
    return "\n".join(map(escaped, lines))


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The load, its limits, and which servers may take it. Units: tokens, requests per second."""

    slo: Annotated[str, option(LOAD, "Limits in ms: ttft_ms=500,tpot_ms=50 and e2el_ms; at least one.")]
    rate: Annotated[
        float | None, option(LOAD, "Requests, or sessions, per second over all servers (default: a trace's own).")
    ] = None
    model: Annotated[str, option(SERVER, "Model: 7b, 13b, 70b, ..., a Hugging Face id that is known, a directory.")] = (
        "7b"
    )
    backend: Annotated[str, option(SERVER, "Kind of server: vllm, tgi or lightllm.")] = "vllm"
    input_tokens: Annotated[WholeOrText, option(LOAD, "Length of every prompt, or a law, as of run.")] = 512
    output_tokens: Annotated[WholeOrText, option(LOAD, "Length of every reply, or a law.")] = 128
    prefix: Annotated[str | None, option(LOAD, "Prompts of a group begin alike, as of run: GROUPS:TOKENS.")] = None
    sessions: Annotated[
        Whole | None, option(LOAD, "Conversations instead of single requests: about so many in a virtual run.")
    ] = None
    turns: Annotated[WholeOrText | None, option(LOAD, "Turns of each session, as of run.")] = None
    think_time: Annotated[NumberOrText | None, option(LOAD, "Seconds until the next turn, as of run.")] = None
    trace: Annotated[Path | None, option(LOAD, "Arrivals and lengths of real traffic, as of run.")] = None
    trace_format: Annotated[
        Literal["mooncake", "azure", "burstgpt", "bailian"] | None, option(LOAD, "The trace's format.")
    ] = None
    trace_speed: Annotated[float, option(LOAD, "The trace so many times as fast.")] = 1.0
    trace_limit: Annotated[Whole | None, option(LOAD, "At most this many of its requests.")] = None
    trace_from: Annotated[float, option(LOAD, "From so many seconds after its first request on.")] = 0.0
    percentile: Annotated[float, option(LOAD, "How many percent of the requests keep each limit.")] = 99.0
    gpu: Annotated[
        tuple[str, ...],
        option(
            GPUS,
            "GPUs to look at, by name or JSON file (default: all that are known).",
            consume_multiple=1,
            show_default=False,
        ),
    ] = ()
    max_gpus: Annotated[Whole, option(GPUS, "Most GPUs in all.")] = 64
    max_running: Annotated[
        tuple[Whole, ...],
        option(SETTINGS, "Most requests in a batch; several: each is tried.", consume_multiple=1),
    ] = (1024,)
    dtype: DtypeOption = "float16"
    quantization: QuantizationOption = None
    kv_cache_dtype: KvCacheDtypeOption = "auto"
    memory_ratio: MemoryRatioOption = 0.9
    p2p: Annotated[Literal["auto", "off"], option(GPUS, "off: GPUs reach each other through host memory only.")] = (
        "auto"
    )
    scheduler: SchedulerOption = None
    profile: ProfileOption = None
    prices: Annotated[Path | None, option(GPUS, "Your prices, in the form of servers/data/prices.json.")] = None
    requests: Annotated[Whole, option(LOAD, "Least requests of each virtual run.")] = 400

    def check(self) -> None:
        """Raises ConfigError."""
        if self.sessions is not None and self.requests != PlanOptions.requests:
            raise ConfigError(
                "--requests does not go with --sessions, which say how long a virtual run is; leave it out."
            )
        if self.rate is None and self.trace is None:
            raise ConfigError("--rate is missing; say how many requests, or sessions, come in a second.")
        for name, value in (
            ("--input-tokens", self.input_tokens), ("--output-tokens", self.output_tokens),
            ("--requests", self.requests), ("--max-gpus", self.max_gpus),
            *(("--max-running", each) for each in self.max_running),
        ):  # fmt: skip
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")

    def demand(self) -> Demand:
        """Raises ConfigError."""
        single = self.sessions is None and self.trace is None
        config = Config(
            input_tokens=self.input_tokens, output_tokens=self.output_tokens, prefix=self.prefix,
            requests=STRETCH * self.requests if single else None, sessions=self.sessions, turns=self.turns,
            think_time=self.think_time, trace=self.trace, trace_format=self.trace_format,
            trace_speed=self.trace_speed, trace_limit=self.trace_limit, trace_from=self.trace_from,
        )  # fmt: skip
        load = config.load
        if load.trace is not None:
            load = load.within(models.find(self.model).max_position)
            if load.left_out:
                terminal.say(f"note: of the trace these are left out: {load.left_out}.")
            if not trace_rate(load):
                raise ConfigError("the trace has no length in time; plan needs a rate, so name another --trace.")
        rate = trace_rate(load) if self.rate is None else self.rate
        demand = Demand(rate=rate, load=load, requests=self.requests)
        if self.sessions is None:
            return demand
        return dataclasses.replace(demand, requests=round(self.sessions * demand.turns_each))

    def setup(self, candidate: Candidate, load: Load) -> Setup:
        """Raises EmulationError."""
        hardware = Hardware(
            gpu=candidate.gpu, gpus=candidate.tp, tp=candidate.tp, p2p=False if self.p2p == "off" else None,
            scheduler=self.scheduler, dtype=self.dtype, quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype, max_running=candidate.max_running,
            max_requests=embedded.UNREFUSED, memory_ratio=self.memory_ratio, profile=self.profile,
            prefix_caching="on" if load.shares else "off",
        )  # fmt: skip
        return hardware.setup(self.backend, self.model, max(4096, load.longest_tokens()))


def command(options: Annotated[PlanOptions, Parameter(name="*")]) -> int:
    """List which GPUs would serve a load within limits, cheapest first. Predictions: nothing is measured.

    For each GPU and tensor parallel size (1, 2, 4, 8): the highest rate that one server keeps up with, how many servers
    the load needs, and dollars an hour. What will not do is listed too, with the reason.
    """
    limits = parse_slo(options.slo, options.percentile)
    options.check()
    demand = options.demand()
    _check(demand, limits, models.find(options.model).described())
    prices = read_prices(options.prices)
    kinds = options.gpu or tuple(hardware.known())
    try:  # what is wrong with every candidate is the user's mistake and no reason against one
        for kind in kinds:
            hardware.find(kind)
        scheduler = options.setup(Candidate(gpu=kinds[0], tp=1), demand.load).scheduler
        profile = profiles()[scheduler] if options.profile is None else read_profile(options.profile, scheduler)
    except (EmulationError, HardwareError) as error:
        raise ConfigError(str(error)) from None
    rows, unmet = ranked([
        judge(
            candidate, lambda each: emulate(options.setup(each, demand.load)), demand, limits, prices,
            options.max_gpus,
        )
        for candidate in _candidates(kinds, min(LARGEST_TP, options.max_gpus), options.max_running)
    ])  # fmt: skip
    print(render(rows, unmet, demand, limits, prices, profile))
    return exit_codes.OK


def _check(demand: Demand, limits: Limits, spec: ModelSpec) -> None:
    """Raises ConfigError for a load that no server could take."""
    if not 0 < demand.rate <= MOST_RATE:
        raise ConfigError(f"--rate is {demand.rate:g}; it must be above 0 and at most {MOST_RATE:g}.")
    if "tpot" in limits.seconds and demand.load.output_tokens.most == 1:
        raise ConfigError("--slo limits tpot_ms and replies of one token have none; leave it out.")
    tokens = demand.load.longest_tokens()
    if tokens > spec.max_position:
        raise ConfigError(
            f"{spec.name} takes {spec.max_position} tokens in all; --input-tokens and --output-tokens make {tokens}."
        )


def _candidates(kinds: Sequence[str], largest_tp: int, max_running: Sequence[int]) -> Iterator[Candidate]:
    """Says which GPU it is at."""
    for kind in dict.fromkeys(kinds):
        terminal.say(f"looking at {escaped(kind)}")
        for tp in (1 << power for power in range(largest_tp.bit_length())):
            for running in dict.fromkeys(max_running):
                yield Candidate(gpu=kind, tp=tp, max_running=running)
