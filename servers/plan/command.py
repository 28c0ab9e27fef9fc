"""`loadgen plan`: which GPUs, how many and how joined, would serve a load within limits, cheapest first. Predictions.

One server is tried in virtual time at Poisson rates until the highest is found at which it keeps the limits and works
off what comes. What cannot do it stands below with the reason; no candidate is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Group, Parameter

from backends import exit_codes
from backends.decoder import ModelSpec
from backends.exit_codes import check_least
from backends.untrusted import escaped
from loadgen import models, terminal
from loadgen.config import (
    LOAD,
    SERVER,
    SETTINGS,
    Config,
    ConfigError,
    DtypeOption,
    ExpertImbalanceOption,
    KvCacheDtypeOption,
    MemoryRatioOption,
    ProfileOption,
    SchedulerOption,
)
from loadgen.load.load import Load
from loadgen.option_types import NumberOrText, Whole, WholeOrText, option
from loadgen.search import objective
from loadgen.server import embedded
from servers.plan.candidates import (
    ANY,
    NONE,
    Candidate,
    Requirements,
    candidates,
    judge,
    made_sure,
    ranked,
    read_prices,
)
from servers.plan.sizing import BEYOND, STRETCH, Demand, LatencyLimits, trace_rate
from servers.plan.table import DeploymentPlan, render, to_json
from servers.simulator import hardware
from servers.simulator.build import Setup, emulate, profiles, read_profile, routed
from servers.simulator.options import Hardware

LARGEST_TP = 8  # a host of eight GPUs
MOST_RATE = 1e9
MOST_REQUESTS = 100_000  # judged in a virtual run
GPUS = Group("GPUs and prices", sort_key=3)


def parse_slo(slo: str, percentile: float | None = None) -> LatencyLimits:
    """'ttft_ms=500,tpot_ms=50' or 'ttft_p99<500ms'. Raises ConfigError."""
    seconds = {name: limit_ms / 1e3 for name, limit_ms in objective.parse(slo).items()}
    share = objective.share(slo, "--percentile", None if percentile is None else percentile / 100)
    percentile = 99.0 if share is None else 100 * share
    if not 0 < percentile < 100:
        raise ConfigError(f"--percentile is {percentile:g}; it must be between 0 and 100.")
    return LatencyLimits(seconds=seconds, percentile=percentile)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The load, its limits, and which servers may take it. Units: tokens, requests per second."""

    slo: Annotated[str, option(LOAD, "Limits: ttft_ms=500,tpot_ms=50 and e2el_ms, or 'ttft_p99<500ms'.")]
    rate: Annotated[
        float | None, option(LOAD, "Requests, or sessions, per second over all servers (default: a trace's own).")
    ] = None
    model: Annotated[
        tuple[str, ...],
        option(
            SERVER,
            "Model: 7b, 13b, 70b, ..., a Hugging Face id that is known, a directory; several: each is tried.",
            consume_multiple=1,
        ),
    ] = ("7b",)
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
        Literal["mooncake", "azure", "burstgpt", "bailian", "weka"] | None, option(LOAD, "The trace's format.")
    ] = None
    trace_speed: Annotated[float, option(LOAD, "The trace so many times as fast.")] = 1.0
    trace_limit: Annotated[Whole | None, option(LOAD, "At most this many of its requests.")] = None
    trace_from: Annotated[float, option(LOAD, "From so many seconds after its first request on.")] = 0.0
    trace_block_tokens: Annotated[Whole | None, option(LOAD, "Tokens of each of its hash_ids.")] = None
    percentile: Annotated[
        float | None, option(LOAD, "How many percent of the requests keep every limit (default 99).")
    ] = None
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
    quantization: Annotated[
        tuple[Literal["any", "none", "fp8", "int8", "awq", "gptq", "nvfp4"], ...],
        option(
            SETTINGS,
            "Quantized weights; several: each is tried. none: as the weights come; any: none, and each format that the "
            "GPU has.",
            consume_multiple=1,
        ),
    ] = ()
    kv_cache_dtype: KvCacheDtypeOption = "auto"
    memory_ratio: MemoryRatioOption = 0.9
    p2p: Annotated[Literal["auto", "off"], option(GPUS, "off: GPUs reach each other through host memory only.")] = (
        "auto"
    )
    scheduler: SchedulerOption = None
    expert_imbalance: ExpertImbalanceOption = 1.0
    profile: ProfileOption = None
    prices: Annotated[Path | None, option(GPUS, "Your prices, in the form of servers/data/prices.json.")] = None
    requests: Annotated[
        Whole, option(LOAD, "Least requests of each virtual run; at least so many that 10 are beyond the percentile.")
    ] = 400
    json: Annotated[bool, option(GPUS, "Print one JSON object, and the table on standard error.")] = False

    def check(self) -> None:
        """Raises ConfigError."""
        if self.sessions is not None and self.requests != PlanOptions.requests:
            raise ConfigError(
                "--requests does not go with --sessions, which say how long a virtual run is; leave it out."
            )
        if self.rate is None and self.trace is None:
            raise ConfigError("--rate is missing; say how many requests, or sessions, come in a second.")
        check_least(
            ConfigError, 1, input_tokens=self.input_tokens, output_tokens=self.output_tokens, requests=self.requests,
            max_gpus=self.max_gpus, max_running=min(self.max_running, default=None),
        )  # fmt: skip

    def models(self) -> dict[str, ModelSpec]:
        """By the user's names. Raises ConfigError."""
        specs = {name: models.find(name).described() for name in self.model}
        for spec in specs.values():
            routed(spec, self.expert_imbalance)
            for name in self.quantization:
                spec.precision(self.dtype, None if name in (ANY, NONE) else name, self.kv_cache_dtype)
        return specs

    def demand(self, longest: int, limits: LatencyLimits) -> Demand:
        """longest: tokens of a request that every model takes. Raises ConfigError."""
        least = max(self.requests, limits.least_requests)
        if least > MOST_REQUESTS:
            raise ConfigError(
                f"a p{limits.percentile:.12g} needs {least} requests, of which {BEYOND} are beyond it, and plan "
                f"computes {MOST_REQUESTS}; lower --percentile or --requests."
            )
        single = self.sessions is None and self.trace is None
        config = Config(
            input_tokens=self.input_tokens, output_tokens=self.output_tokens, prefix=self.prefix,
            requests=STRETCH * least if single else None, sessions=self.sessions, turns=self.turns,
            think_time=self.think_time, trace=self.trace, trace_format=self.trace_format,
            trace_speed=self.trace_speed, trace_limit=self.trace_limit, trace_from=self.trace_from,
            trace_block_tokens=self.trace_block_tokens,
        )  # fmt: skip
        load = config.load
        if load.trace is not None:
            load = load.within(longest)
            if load.in_sessions:
                raise ConfigError(
                    "plan sizes for requests that arrive by themselves; leave a trace of agents to predict."
                )
            if load.left_out:
                terminal.say(f"note: of the trace these are left out: {load.left_out}.")
            for note in load.notes:
                terminal.say(f"note: of the trace: {note}.")
            if not trace_rate(load):
                raise ConfigError("the trace has no length in time; plan needs a rate, so name another --trace.")
        rate = trace_rate(load) if self.rate is None else self.rate
        demand = Demand(rate=rate, load=load, requests=least)
        if self.sessions is None:
            return demand
        return dataclasses.replace(demand, requests=max(least, round(self.sessions * demand.turns_each)))

    def setup(self, candidate: Candidate, load: Load) -> Setup:
        """Raises EmulationError."""
        hardware = Hardware(
            gpu=candidate.gpu, gpus=candidate.tp, tp=candidate.tp, p2p=False if self.p2p == "off" else None,
            scheduler=self.scheduler, dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype, max_running=candidate.max_running,
            max_requests=embedded.UNREFUSED, memory_ratio=self.memory_ratio, profile=self.profile,
            expert_imbalance=self.expert_imbalance,
            prefix_caching="on" if load.shares else "off",
        )  # fmt: skip
        setup = hardware.setup(self.backend, candidate.model, max(4096, load.longest_tokens()))
        return msgspec.structs.replace(setup, quantization=candidate.quantization)


def command(options: Annotated[PlanOptions, Parameter(name="*")]) -> int:
    """List which GPUs would serve a load within limits, cheapest first. Predictions: nothing is measured.

    For each GPU and tensor parallel size (1, 2, 4, 8): the highest rate that one server keeps up with, how many servers
    the load needs, and dollars an hour. What will not do is listed too, with the reason.
    """
    limits = parse_slo(options.slo, options.percentile)
    options.check()
    specs = options.models()
    demand = options.demand(min(spec.max_position for spec in specs.values()), limits)
    for spec in specs.values():
        _check(demand, limits, spec)
    prices = read_prices(options.prices)
    kinds = options.gpu or tuple(hardware.known())
    # what is wrong with every candidate is the user's mistake and no reason against one
    for kind in kinds:
        hardware.find(kind)
    scheduler = options.setup(Candidate(gpu=kinds[0], tp=1, model=options.model[0]), demand.load).scheduler
    profile = profiles()[scheduler] if options.profile is None else read_profile(options.profile, scheduler)
    largest_tp = min(LARGEST_TP, options.max_gpus)
    wanted = Requirements(
        emulation=lambda each: emulate(options.setup(each, demand.load)), demand=demand, limits=limits, prices=prices,
        max_gpus=options.max_gpus,
    )  # fmt: skip
    looked_at = _shown(candidates(specs, kinds, options.quantization, largest_tp, options.max_running))
    rows, unmet = ranked([judge(candidate, wanted) for candidate in looked_at])
    rows, unmet = made_sure(rows, unmet, wanted)
    plan = DeploymentPlan(rows=rows, unmet=unmet, demand=demand, limits=limits, prices=prices, profile=profile)
    if options.json:
        terminal.say(render(plan))
        print(to_json(plan))
    else:
        print(render(plan))
    return exit_codes.OK


def _shown(looked_at: Iterable[Candidate]) -> Iterator[Candidate]:
    """Says which GPU it is at."""
    gpu = None
    for candidate in looked_at:
        if candidate.gpu != gpu:
            gpu = candidate.gpu
            terminal.say(f"looking at {escaped(gpu)}")
        yield candidate


def _check(demand: Demand, limits: LatencyLimits, spec: ModelSpec) -> None:
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
