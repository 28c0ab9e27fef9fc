"""A plan as a table for people, with how far to trust it, and as one JSON object. Numbers come from virtual time."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from backends import catalog
from backends.decoder import ModelSpec
from backends.untrusted import escaped
from loadgen import models
from loadgen.document import terminal
from loadgen.document.content import Column, Table, number
from loadgen.document.terminal import WIDEST
from loadgen.load.load import Load
from loadgen.report import text
from loadgen.rundir.emulation import HeldOut
from loadgen.search.objective import METRICS
from servers.plan.candidates import Candidate, PlanRow, Prices, Unmet
from servers.plan.sizing import BEYOND, Demand, LatencyLimits, trace_rate
from servers.simulator import hardware
from servers.simulator.build import ServerProfile

SCHEMA = "loadgen.plan/1"


@dataclass(frozen=True, kw_only=True)
class DeploymentPlan:
    """What was asked, and what came of it: rows cheapest first, and what would not do."""

    rows: list[PlanRow]
    unmet: list[Unmet]
    demand: Demand
    limits: LatencyLimits
    prices: Prices
    profile: ServerProfile

    @property
    def candidates(self) -> list[Candidate]:
        return [*(row.candidate for row in self.rows), *(each.candidate for each in self.unmet)]

    @property
    def several_models(self) -> bool:
        return len({each.model for each in self.candidates}) > 1

    @property
    def several_formats(self) -> bool:
        return any(each.quantization is not None for each in self.candidates)

    @property
    def several_running(self) -> bool:
        return len({each.max_running for each in self.candidates}) > 1

    def held_out(self, row: PlanRow) -> tuple[HeldOut, ...]:
        """The real runs like the row's that the profile was not fitted to: of such a load on its GPU, of models of its
        class with weights in its format."""
        return text.of_load(row.emulated.facts.held_out, self.demand.kind)


def render(plan: DeploymentPlan) -> str:
    """For people: the table, what will not do, and how far to trust it."""
    demand, limits, rows = plan.demand, plan.limits, plan.rows
    wanted = ", ".join(f"{name} <= {1e3 * limit_s:g} ms" for name, limit_s in limits.seconds.items())
    lines = [
        "PREDICTIONS: emulated, computed by a model of the hardware; nothing was measured.",
        f"{demand.rate:g} {demand.what} ({_arriving(demand.load)}); "
        f"{limits.percentile:g} % of the requests within {wanted}.",
        "",
    ]
    if rows:
        lines += [*_table(plan), "", _legend(plan), *_commands(rows[0], demand, limits)]
        if any(row.emulated.facts.topology == "pcie" for row in rows):
            lines.append(
                "pcie: the cards reach each other directly (P2P), which the drivers of GeForce cards do not allow; "
                "--p2p off sends everything through host memory."
            )
    else:
        lines.append("Nothing that was looked at would do.")
    if plan.unmet:
        names = [_name(each.candidate, plan) for each in plan.unmet]
        reasons = [f"{each.reason.rstrip('.')}." for each in plan.unmet]
        unmet = terminal.aligned([*zip(names, reasons, strict=True)])
        lines += ["", "Would not do:", *(f"  {line}" for line in unmet)]
    lines += ["", *_reliability(plan), f"Prices: {plan.prices.source} ({plan.prices.date}). Yours: --prices FILE."]
    return "\n".join(map(escaped, lines))


def to_json(plan: DeploymentPlan) -> str:
    """One line of ASCII. Rates are of one server, per second; latencies of one server at its share of the load."""
    demand, limits = plan.demand, plan.limits
    return json.dumps(
        {
            "schema": SCHEMA,
            "emulated": True,
            "scheduler": plan.profile.scheduler,
            "rate_per_s": demand.rate,
            "rate_of": demand.what.partition("/")[0],
            "percentile": limits.percentile,
            "limits_ms": {name: 1e3 * limit_s for name, limit_s in limits.seconds.items()},
            "least_requests": demand.requests,
            "rows": [_row(row, plan) for row in plan.rows],
            "unmet": [_choice(each.candidate) | {"reason": each.reason} for each in plan.unmet],
        }
    )


def _choice(candidate: Candidate) -> dict[str, object]:
    return {
        "model": candidate.model, "gpu": candidate.gpu, "tp": candidate.tp, "quantization": candidate.quantization,
        "max_running": candidate.max_running,
    }  # fmt: skip


def _row(row: PlanRow, plan: DeploymentPlan) -> dict[str, object]:
    facts, held_out = row.emulated.facts, plan.held_out(row)
    off = {what: text.off_by(held_out, name) for name, what in text.HELD_OUT.items()} if held_out else {}
    percentiles = {name: None if math.isnan(each) else 1e3 * each for name, each in row.trial.percentiles.items()}
    return _choice(row.candidate) | {
        "quantization": facts.quantization,
        "topology": facts.topology,
        "servers": row.servers,
        "gpus": row.gpus,
        "usd_per_hour": row.usd_per_hour,
        "rate_per_s": row.server_rate,
        "rate_interval_per_s": _interval(row),
        "bound": row.bound,
        "in_flight": row.highest.in_flight,
        "share_per_s": plan.demand.rate / row.servers,
        "share_percentiles_ms": percentiles,
        "share_in_flight": row.trial.in_flight,
        "share_keeping_up": None if row.trial.keeping_up is None else row.trial.keeping_up.word,
        "held_out_runs": len(held_out),
        "held_out_off_percent": {what: {"median": usual, "worst": worst} for what, (usual, worst) in off.items()},
        "notes": list(facts.notes),
    }


def _interval(row: PlanRow) -> list[float | None] | None:
    """Where 95 % of such searches have the rate; None on a side that nothing bounds."""
    if row.answer is None or row.answer.value is None:
        return None
    return [row.answer.low or None, row.answer.high if math.isfinite(row.answer.high) else None]


def _name(candidate: Candidate, plan: DeploymentPlan) -> str:
    """As far as candidates differ."""
    words = [f"{candidate.tp} x {candidate.gpu}"]
    words += [candidate.model] if plan.several_models else []
    words += [candidate.quantization or "as it comes"] if plan.several_formats else []
    words += [f"max-running {candidate.max_running}"] if plan.several_running else []
    return ", ".join(words)


def _table(plan: DeploymentPlan) -> list[str]:
    percentile = plan.limits.percentile
    heads = [
        "$/hour", "GPUs", "servers", "each on", "joined by", "model", "weights", "max-running",
        _each(plan.demand.what), "95 % between", "limited by", *(f"p{percentile:g} {name} ms" for name in METRICS),
        "in flight", "e2el was off by",
    ]  # fmt: skip
    sure = any(_interval(row) is not None for row in plan.rows)
    hidden = {"model": not plan.several_models, "weights": not plan.several_formats, "95 % between": not sure}
    words = {"each on", "joined by", "model", "weights", "95 % between", "limited by", "e2el was off by"}
    columns = [Column(head, left=head in words) for head in heads]
    table = Table(columns, [_cells(row, plan) for row in plan.rows])
    shown = table.keeping([at for at, head in enumerate(heads) if not hidden.get(head)])
    return [*terminal.table(shown, WIDEST)][:-1]


def _cells(row: PlanRow, plan: DeploymentPlan) -> list[str]:
    candidate, facts, held_out = row.candidate, row.emulated.facts, plan.held_out(row)
    seen = (row.trial.percentiles[name] for name in METRICS)
    return [
        "no price" if row.usd_per_hour is None else f"{row.usd_per_hour:.2f}", str(row.gpus), str(row.servers),
        f"{candidate.tp} x {candidate.gpu}", "-" if candidate.tp == 1 else facts.topology, candidate.model,
        facts.quantization or facts.dtype, str(candidate.max_running), number(row.server_rate),
        _between(row), row.bound,
        *(number(None if math.isnan(value_s) else 1e3 * value_s) for value_s in seen),
        str(row.trial.in_flight),
        f"{text.off_by(held_out, 'e2el_w1')[0]:.1f} % ({len(held_out)} runs)" if held_out else "none measured",
    ]  # fmt: skip


def _between(row: PlanRow) -> str:
    low, high = _interval(row) or (None, None)
    if low is None and high is None:
        return "-"
    return f"{number(low or 0.0)} and {'?' if high is None else number(high)}"


def _each(what: str) -> str:
    """The heading of one server's rate."""
    return f"{what.replace('requests', 'req')} each"


def _legend(plan: DeploymentPlan) -> str:
    demand, percentile = plan.demand, plan.limits.percentile
    fewest = demand.requests
    if demand.load.trace is not None:
        fewest = min(fewest, len(demand.arrivals))
    beyond = math.floor(fewest * (1 - percentile / 100) + 1e-9)
    few = "" if beyond >= BEYOND else f", too few: a p{percentile:g} that means something has {BEYOND} beyond it"
    return (
        f"{_each(demand.what)}: the highest rate at which one server keeps the limits, and what is in the way of "
        f"more{_sureness(plan)}. Latencies and requests in flight: predicted at one server's share of the load; each "
        f"p{percentile:g} is of at least {fewest} requests, {beyond} of them beyond it{few}. e2el was off by: median "
        "of the real runs on that GPU, with weights in that format, that were kept aside. Limited by throughput: at a "
        "higher rate the server falls behind."
    )


def _sureness(plan: DeploymentPlan) -> str:
    """How far to trust a rate as an answer of the model, whose own errors come on top."""
    rough = "from one short run, within 10 % of what keeps them there"
    if not plan.rows or _interval(plan.rows[0]) is None:
        return f" ({rough})"
    return f" (the first row's searched for as loadgen search does, with its interval; others {rough})"


def _commands(row: PlanRow, demand: Demand, limits: LatencyLimits) -> Iterator[str]:
    """What looks closer at one server's share of the load, and what starts such a server."""
    setup = row.emulated.setup
    words = ["--backend", setup.scheduler.partition("@")[0], "--model", _place(setup.model)]
    words += ["--tp", str(row.candidate.tp), "--dtype", setup.dtype]
    words += [] if setup.quantization is None else ["--quantization", setup.quantization]
    words += [] if setup.kv_cache_dtype == "auto" else ["--kv-cache-dtype", setup.kv_cache_dtype]
    words += ["--max-running", str(setup.max_running), "--memory-ratio"]
    words += [f"{setup.memory_ratio:g}", *([] if setup.p2p else ["--p2p", "off"])]
    modelled = ["--gpu", row.candidate.gpu, "--gpus", str(row.candidate.tp), "--scheduler", setup.scheduler]
    modelled += [] if setup.expert_imbalance == 1 else ["--expert-imbalance", f"{setup.expert_imbalance:g}"]
    modelled += [] if setup.profile is None else ["--profile", str(setup.profile)]
    load = demand.load
    load_flags = [*_load_flags(load, demand.rate / row.servers), "--goodput"]
    load_flags += [f"{name}:{1e3 * limit_s:g}" for name, limit_s in limits.seconds.items()]
    yield f"Look closer at the first: {shlex.join(['loadgen', 'predict', *words, *modelled, *load_flags])}"
    yield f"Start one of its servers: {shlex.join(['loadgen', 'compose', *words])}"


def _load_flags(load: Load, rate: float) -> list[str]:
    """The options of a load that comes at such a rate."""
    if load.trace is not None:
        trace = load.trace
        flags = ["--trace", trace.path, "--trace-speed", f"{trace.speed * rate / trace_rate(load):.4f}"]
        flags += [] if trace.format is None else ["--trace-format", trace.format]
        flags += [] if trace.limit is None else ["--trace-limit", str(trace.limit)]
        flags += [] if trace.block_tokens is None else ["--trace-block-tokens", str(trace.block_tokens)]
        return flags + ([] if trace.from_s == 0 else ["--trace-from", f"{trace.from_s:g}"])
    flags = ["--arrival", f"poisson:{rate:.4f}", "--input-tokens", str(load.input_tokens)]
    flags += ["--output-tokens", str(load.output_tokens)]
    flags += [] if load.prefix is None else ["--prefix", str(load.prefix)]
    if load.sessions is not None:
        flags += ["--sessions", str(load.requests), "--turns", str(load.sessions.turns)]
        flags += ["--think-time", load.sessions.pause]
    return flags


def _place(model: ModelSpec) -> str:
    """What finds it again: its name, its id or its directory."""
    return model.hf_id if catalog.find(model.name) is None else model.name


def _reliability(plan: DeploymentPlan) -> Iterator[str]:
    """How far these numbers may be off: a server's software and the operators of each GPU."""
    profile = plan.profile
    gpus = list(dict.fromkeys(each.gpu for each in plan.candidates))
    yield from _held_out_lines(plan)
    yield "A high percentile near its limit is harder to predict than that: measure one server before renting many."
    where = f"; on {profile.gpu}, assumed elsewhere" if profile.gpu else ""
    yield f"Software: {profile.source or profile.scheduler + ', as calibrated'}{where}."
    for gpu in gpus:
        yield f"Operators of {gpu}, how far off: {hardware.find(gpu).error}."
    yield from _near_limits(plan)
    yield from _notes(plan.rows)


def _held_out_lines(plan: DeploymentPlan) -> Iterator[str]:
    """A line for each GPU, format and class of models: of the rows, or where there is none of all that was asked."""
    seen = [(row.emulated.facts.architecture, row.candidate.gpu, row.emulated.facts.quantization) for row in plan.rows]
    asked = [
        (models.find(each.model).described().architecture, each.gpu, each.quantization) for each in plan.candidates
    ]
    load, profile = plan.demand.kind, plan.profile
    for architecture, gpu, quantization in dict.fromkeys(seen or asked):
        held_out = text.of_load(profile.held_out_on(gpu, quantization, architecture), load)
        yield text.held_out_line(held_out, text.like(architecture, load, gpu, quantization), len(profile.held_out))


def _near_limits(plan: DeploymentPlan) -> Iterator[str]:
    """Rows of which a short run cannot settle whether their servers keep up."""
    near = [row for row in plan.rows if row.trial.keeping_up is not None and row.trial.keeping_up.word == "near_limit"]
    if near:
        names = "; ".join(_name(row.candidate, plan) for row in near)
        yield f"Near its limit, not settled in this run: {names}. A longer run (--requests) settles it."


def _notes(rows: list[PlanRow]) -> Iterator[str]:
    """What a user should know about rows, once for all the GPUs of which it is said."""
    places: dict[str, dict[str, str]] = {}
    for row in rows:
        facts = row.emulated.facts
        for note in facts.notes:
            places.setdefault(note.replace(facts.gpu, "\0"), {})[row.candidate.gpu] = note
    for notes in places.values():
        (gpu, note), *others = notes.items()
        likewise = f" So on {', '.join(other for other, _ in others)}." if others else ""
        yield f"On {gpu}: {note.rstrip('.')}.{likewise}"


def _arriving(load: Load) -> str:
    if load.trace is not None:
        return f"as in {load.trace.path}, faster or slower"
    shared = "" if load.prefix is None else f", prompts of a group alike: {load.prefix}"
    lengths = f"Poisson, {load.input_tokens} tokens in, {load.output_tokens} out{shared}"
    if load.sessions is None:
        return lengths
    return f"{lengths}, {load.sessions.turns} turns each, {load.sessions.pause} s to think"
