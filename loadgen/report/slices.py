"""A run by parts: by phase of its load, by length of its prompts, by what the server says of its requests. Pure: the
table in, numbers out.

A request belongs to the phase in which it was due. Its prompt's length is what was asked; where nothing was (a text of
a dataset without a tokenizer), the server's count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backends.protocol import ServerRecord
from loadgen.report import metrics
from loadgen.report.metrics import Column, Convention, Summary
from loadgen.report.schema import Lengths, PhaseStats, PromptQuartile, ServerRequests, Window
from loadgen.rundir import Manifest, Phase
from loadgen.rundir.records import Table
from loadgen.steady import flows
from loadgen.steady import window as steady
from loadgen.steady.changes import Change

# Prompts differ in length when there are many lengths or the longest is a tenth longer than the shortest: a token or
# two of a template or of drawn words says nothing about ttft.
MANY_LENGTHS, LENGTHS_RATIO = 10, 1.1
PHASE_METRICS = ("ttft_ms", "tpot_ms", "e2el_ms")
_TIMES = ("queue", "prefill", "ttft", "e2el", "load")  # of a ServerRecord
_COUNTS = ("retractions", "drafted_tokens", "accepted_tokens")
_ALWAYS = ("mean", "p50")  # others only where the window holds enough to bound them
STATISTICS = {"mean": None, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}  # of percentiles their shares


def by_phase(measured: Table, phases: Iterable[Phase], rules: Convention) -> list[PhaseStats]:
    """The numbers of each phase, in the order of `phases`. One without an end lasts to the last reply; a phase that has
    no length has no rates, and is left out."""
    last_s = float(measured.done_ns.max(initial=0)) / 1e9
    ends = [(phase, last_s if phase.end_s is None else phase.end_s) for phase in phases]
    return [_phase(measured, phase, end_s, rules) for phase, end_s in ends if end_s > phase.start_s]


def _phase(measured: Table, phase: Phase, end_s: float, rules: Convention) -> PhaseStats:
    start_ns, seconds = phase.start_s * 1e9, end_s - phase.start_s
    end_ns = math.inf if phase.end_s is None else phase.end_s * 1e9
    due = (measured.scheduled_ns >= start_ns) & (measured.scheduled_ns < end_ns)
    done_ns = measured.done_ns[measured.ok]
    columns = {name: metrics.fair_column(measured, name, rules)[due & measured.ok] for name in PHASE_METRICS}
    return PhaseStats(
        name=phase.name,
        start_s=phase.start_s,
        end_s=end_s,
        requests=int(due.sum()),
        offered_requests_per_s=int(due.sum()) / seconds,
        finished_requests_per_s=int(((done_ns >= start_ns) & (done_ns < end_ns)).sum()) / seconds,
        metrics={name: metrics.summary(metrics.defined(values), rules.percentile) for name, values in columns.items()},
    )


def window(
    measured: Table, manifest: Manifest, rules: Convention, change: Change | None = None
) -> tuple[Window | None, str]:
    """The steady state of a run, or why it has none. change: of the server's pace."""
    if flows.changes(manifest.arrival):
        return None, "the load itself changes"
    if change is not None and change.kind != "slow_start":
        return None, "the server changed its pace"
    seen = flows.stamps(measured, manifest)
    span, why = steady.find(seen, 0.0 if change is None or change.at_s is None else change.at_s)
    if span is None:
        return None, why
    inside = (seen.sent_s >= span.from_s) & (seen.sent_s <= span.to_s)
    throughput = {"requests_per_s": steady.rate(seen.done_s, span)}
    if (measured.output_tokens[seen.rows] >= 0).all():
        last_s, tokens = flows.cut(seen, measured, span.to_s)
        throughput["output_tokens_per_s"] = steady.spread_rate(seen.first_s, last_s, tokens, span)
    replies = steady.of_whole_replies(seen, span)
    found: dict[str, dict[str, steady.Estimate]] = {}
    for name in PHASE_METRICS:
        values = metrics.column(measured, name, rules)[seen.rows]
        estimates = {
            statistic: steady.of_sent(values, seen.sent_s, span if name == "ttft_ms" else replies, share)
            for statistic, share in STATISTICS.items()
        }
        found[name] = {
            statistic: each
            for statistic, each in estimates.items()
            if each is not None and (statistic in _ALWAYS or each.low is not None)
        }
    return Window(
        from_s=span.from_s, to_s=span.to_s, requests=int(inside.sum()), throughput=throughput, metrics=found
    ), ""


def lengths(asked_tokens: NDArray[np.int64], law: object = None) -> Lengths | None:
    """Of the lengths that were asked (n,), 0 being none; None where they are all one. law: of the options."""
    known = asked_tokens[asked_tokens > 0]
    if len(known) == 0 or known.min() == known.max():
        return None
    p10, p50, p90, p99 = (float(value) for value in np.percentile(known, (10, 50, 90, 99)))
    text = law if isinstance(law, str) else ""
    return Lengths(law=text, mean=float(known.mean()), p10=p10, p50=p50, p90=p90, p99=p99, max=int(known.max()))


class Prompts(NamedTuple):
    """Requests by their rows of the table, the length of each prompt in tokens and its ttft in ms: (n,) each."""

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    ttft_ms: NDArray[np.float64]


def prompts(measured: Table, rules: Convention) -> Prompts | None:
    """Of the requests that ended ok and have both, where their lengths differ (`MANY_LENGTHS`, `LENGTHS_RATIO`); else
    None."""
    tokens = np.where(measured.asked_prompt_tokens > 0, measured.asked_prompt_tokens, measured.prompt_tokens)
    ttft_ms = metrics.column(measured, "ttft_ms", rules)
    known = np.flatnonzero(measured.ok & (tokens > 0) & ~np.isnan(ttft_ms))
    tokens, ttft_ms = tokens[known], ttft_ms[known]
    if len(tokens) == 0:
        return None
    differ = len(np.unique(tokens)) >= MANY_LENGTHS or tokens.max() > LENGTHS_RATIO * tokens.min()
    return Prompts(known, tokens, ttft_ms) if differ else None


def ttft_by_prompt(measured: Table, rules: Convention) -> list[PromptQuartile]:
    """ttft by quartile of prompt length, shortest first; fewer than four where many prompts share a length. Empty
    where prompts do not differ."""
    found = prompts(measured, rules)
    if found is None:
        return []
    _, tokens, ttft_ms = found
    quarter = np.searchsorted(np.percentile(tokens, (25, 50, 75)), tokens, side="left")
    return [
        PromptQuartile(
            from_tokens=int(tokens[quarter == number].min()),
            to_tokens=int(tokens[quarter == number].max()),
            ttft_ms=metrics.summary(metrics.defined(ttft_ms[quarter == number]), rules.percentile),
        )
        for number in np.unique(quarter)
    ]


def by_the_server(measured: Table, rules: Convention) -> ServerRequests | None:
    """What the server says of the requests that ended ok, by its own clock, beside what the client saw of them; None
    where it tells nothing. What lies between the two clocks is network and HTTP, and for ttft its front end."""
    told = measured.select(measured.ok & np.isin(measured.id, list(measured.server)))
    if not len(told):
        return None
    records = [measured.server[number] for number in told.id.tolist()]
    columns = {f"{name}_ms": _told(records, f"{name}_us") / 1e3 for name in _TIMES}
    steps = told.output_tokens - 1
    columns["tpot_ms"] = np.where(steps > 0, _told(records, "decode_us") / 1e3 / np.maximum(steps, 1), np.nan)
    known = {name: column for name, column in columns.items() if not np.isnan(column).all()}
    counts = {name: _sum_told(records, name) for name in _COUNTS}
    return ServerRequests(
        requests=len(told),
        metrics={name: _summary(column, rules) for name, column in known.items()},
        client={
            name: _summary(metrics.column(told, name, rules), rules)
            for name in ("ttft_ms", "tpot_ms", "e2el_ms") if name in known
        },
        **counts,
    )  # fmt: skip


def _told(records: list[ServerRecord], name: str) -> Column:
    values = (getattr(record, name) for record in records)
    return np.fromiter((np.nan if value is None else value for value in values), np.float64, len(records))


def _sum_told(records: list[ServerRecord], name: str) -> int | None:
    values = [value for record in records if (value := getattr(record, name)) is not None]
    return sum(values) if values else None


def _summary(column: Column, rules: Convention) -> Summary:
    return metrics.summary(metrics.defined(column), rules.percentile)
