"""A run by parts: by phase of its load, by length of its prompts, by what the server says of its requests. Pure: the
table in, numbers out.

A request belongs to the phase in which it was due. Its prompt's length is what was asked; where nothing was (a text of
a dataset without a tokenizer), the server's count.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backends.protocol import ServerRecord
from loadgen.load.images import parse
from loadgen.monitor.server_view import ServerStats
from loadgen.report import metrics
from loadgen.report.finding import Finding
from loadgen.report.metrics import Column, Convention, Summary
from loadgen.report.schema import (
    AskedStats,
    ImageStats,
    ItemStats,
    LengthStats,
    Numbers,
    PhaseStats,
    PromptQuartile,
    RequestStage,
    ServerRequests,
    SteadyWindow,
)
from loadgen.rundir import Manifest, Phase
from loadgen.rundir.records import RequestTable
from loadgen.steady import flows
from loadgen.steady import window as steady
from loadgen.steady.changes import Change

# Prompts differ in length when there are many lengths or the longest is a tenth longer than the shortest: a token or
# two of a template or of drawn words says nothing about ttft.
MANY_LENGTHS, LENGTHS_RATIO = 10, 1.1
PHASE_METRICS = ("ttft_ms", "tpot_ms", "e2el_ms")
MOST_ASKED = 20  # adapters that have a row each
_TIMES = ("queue", "prefill", "ttft", "e2el", "load")  # of a ServerRecord
_COUNTS = ("retractions", "drafted_tokens", "accepted_tokens")
REPLIES, METRICS = "its replies", "its /metrics"
# What a client times too, by the same definition. The others are parts of it that a server alone can see; a server's
# time a token may count the prompt's time as well.
ALIKE = ("ttft", "tpot", "itl", "e2el")
# Both are means of thousands of stamps; below this lie what HTTP takes on a busy machine, and milliseconds in whole
# numbers (TGI's headers).
RESOLUTION_MS, RESOLUTION_RATIO = 5.0, 0.1
# Of the requests: a histogram that counts more of them, or fewer, is of other requests too.
OTHERS_RATIO = 0.02
UNIT_RATIO = 100.0  # a mean that is so many times the client's is in another unit, and so are the server's others
STATISTICS = {"mean": None, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}  # of percentiles their shares


class FullSlots(NamedTuple):
    """From the first measured request sent to the last, when all slots of a closed loop were busy: how long that was,
    and what ended and came in it a second."""

    seconds: float
    rates: dict[str, float]


def by_phase(measured: RequestTable, phases: Iterable[Phase], rules: Convention) -> list[PhaseStats]:
    """The numbers of each phase, in the order of `phases`. One without an end lasts to the last reply; a phase that has
    no length has no rates, and is left out."""
    last_s = float(measured.done_ns.max(initial=0)) / 1e9
    ends = [(phase, last_s if phase.end_s is None else phase.end_s) for phase in phases]
    return [_phase(measured, phase, end_s, rules) for phase, end_s in ends if end_s > phase.start_s]


def _phase(measured: RequestTable, phase: Phase, end_s: float, rules: Convention) -> PhaseStats:
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
        metrics={name: metrics.summary_of(values, rules) for name, values in columns.items()},
    )


def window(
    kept: RequestTable, manifest: Manifest, rules: Convention, change: Change | None = None
) -> tuple[SteadyWindow | None, str]:
    """The steady state of a run, or why it has none. kept: as `flows.kept` has it. change: of the server's pace."""
    if flows.changes(manifest.arrival):
        return None, "the load itself changes"
    if change is not None and change.kind != "slow_start":
        return None, "the server changed its pace"
    seen = flows.stamps(kept, manifest)
    span, why = steady.find(seen, 0.0 if change is None or change.at_s is None else change.at_s)
    if span is None:
        return None, why
    inside = (seen.sent_s >= span.from_s) & (seen.sent_s <= span.to_s)
    replies = steady.of_whole_replies(seen, span)
    found: dict[str, dict[str, steady.Estimate]] = {}
    for name in PHASE_METRICS:
        values = metrics.column(kept, name, rules)[seen.rows]
        estimate = steady.of_sent(values, seen.sent_s, span if name == "ttft_ms" else replies, STATISTICS)
        found[name] = estimate if seen.slots is None else steady.bounded(estimate)
    return SteadyWindow(
        from_s=span.from_s,
        to_s=span.to_s,
        replies_to_s=replies.to_s,
        requests=int(inside.sum()),
        throughput=_rates(kept, seen, span),
        metrics=found,
    ), ""


def _rates(kept: RequestTable, seen: steady.Stamps, span: steady.TimeSpan) -> dict[str, steady.Estimate]:
    """What ended and what came in the span, a second."""
    found = {"requests_per_s": steady.rate(seen.done_s, span)}
    if (items := metrics.items(kept)) is not None:
        for name, column in ((metrics.ITEMS, items), ("total_tokens_per_s", kept.prompt_tokens)):
            if (weights := column[seen.rows]).min(initial=0) >= 0:  # all of a request counts when it is done
                nothing = np.zeros(len(weights))
                found[name] = steady.spread_rate(seen.done_s, seen.done_s, nothing, span, weights.astype(np.float64))
    elif (kept.output_tokens[seen.rows] >= 0).all():
        last_s, tokens = flows.cut(seen, kept, span.to_s)
        found["requests_per_s"] = steady.law_rate(seen, last_s, tokens, span)
        found["output_tokens_per_s"] = steady.spread_rate(seen.first_s, last_s, tokens, span)
        if (prompt_tokens := kept.prompt_tokens[seen.rows]).min(initial=0) >= 0:  # a prompt counts when it is done
            found["total_tokens_per_s"] = steady.spread_rate(
                seen.first_s, last_s, tokens, span, prompt_tokens.astype(np.float64)
            )
    return found


def full_slots(kept: RequestTable, manifest: Manifest) -> FullSlots | None:
    """None of a run whose warm-up handed no slots over."""
    sent_ns = kept.measured().sent_ns
    sent_ns = sent_ns[sent_ns != -1]
    if not manifest.hands_over or len(sent_ns) < 2 or sent_ns.max() == sent_ns.min():
        return None
    span = steady.TimeSpan(float(sent_ns.min()) / 1e9, float(sent_ns.max()) / 1e9, 0)
    as_they_ended = flows.stamps(kept, manifest)._replace(mean_tokens=None)
    rates = _rates(kept, as_they_ended, span)
    return FullSlots(span.to_s - span.from_s, {name: each.value for name, each in rates.items()})


def lengths(asked_tokens: NDArray[np.int64], law: object = None) -> LengthStats | None:
    """Of the lengths that were asked (n,), 0 being none; None where they are all one. law: of the options."""
    known = asked_tokens[asked_tokens > 0]
    if len(known) == 0 or known.min() == known.max():
        return None
    p10, p50, p90, p99 = (float(value) for value in np.percentile(known, (10, 50, 90, 99)))
    text = law if isinstance(law, str) else ""
    return LengthStats(law=text, mean=float(known.mean()), p10=p10, p50=p50, p90=p90, p99=p99, max=int(known.max()))


class Prompts(NamedTuple):
    """Requests by their rows of the table, the length of each prompt in tokens and its ttft in ms: (n,) each."""

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    ttft_ms: NDArray[np.float64]


def prompts(measured: RequestTable, rules: Convention) -> Prompts | None:
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


def ttft_by_prompt(measured: RequestTable, rules: Convention) -> list[PromptQuartile]:
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
            ttft_ms=metrics.summary_of(ttft_ms[quarter == number], rules),
        )
        for number in np.unique(quarter)
    ]


def items(measured: RequestTable) -> ItemStats | None:
    """None of replies that are texts."""
    of_texts, ok = metrics.items(measured), measured.ok
    if of_texts is None or not ok.any():
        return None
    batch, tokens = of_texts[ok], metrics.total(measured.prompt_tokens[ok])
    return ItemStats(
        items=int(batch.sum()),
        batch_mean=float(batch.mean()),
        batch_max=int(batch.max()),
        tokens_mean=None if tokens is None else tokens / max(1, int(batch.sum())),
    )


def images(measured: RequestTable, asked: object) -> ImageStats | None:
    """asked: of the options. None without images."""
    with contextlib.suppress(ValueError):
        if isinstance(asked, str):
            shown = parse(asked)
            known = measured.ok & (measured.prompt_tokens >= 0)
            beyond = measured.prompt_tokens[known] - measured.asked_prompt_tokens[known]
            tokens_mean = float(beyond.mean()) / shown.count if len(beyond) else None
            return ImageStats(count=shown.count, size=shown.size, tokens_mean=tokens_mean)
    return None


def by_adapter(measured: RequestTable, rules: Convention) -> list[AskedStats]:
    """The adapters that most requests asked for, and the model itself; empty for a load without any."""
    if not measured.adapters:
        return []
    return _by(measured, [measured.adapters.get(number, "") for number in measured.id.tolist()], rules)


def by_priority(measured: RequestTable, rules: Convention) -> list[AskedStats]:
    """In ascending order; empty for a load without any."""
    if not measured.priorities:
        return []
    asked = [str(measured.priorities.get(number, 0)) for number in measured.id.tolist()]
    return sorted(_by(measured, asked, rules), key=lambda each: int(each.name))


def _by(measured: RequestTable, names_asked: Sequence[str], rules: Convention) -> list[AskedStats]:
    """Summarizes the requests of each name that most of them asked for."""
    asked = np.array(names_asked)
    columns = {name: metrics.fair_column(measured, name, rules) for name in PHASE_METRICS}
    names, counts = np.unique(asked, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:MOST_ASKED]
    stats = []
    for name in names[most].tolist():
        of_it = asked == name
        ok = of_it & measured.ok
        stats.append(
            AskedStats(
                name=name,
                requests=int(of_it.sum()),
                ok=int(ok.sum()),
                metrics={metric: metrics.summary_of(values[ok], rules) for metric, values in columns.items()},
            )
        )
    return stats


def by_the_server(measured: RequestTable, rules: Convention) -> ServerRequests | None:
    """What the server says of the requests that ended ok, by its own clock, beside what the client saw of them; None
    where it tells nothing. What lies between the two clocks is network and HTTP, and for ttft its front end."""
    with_times = measured.select(measured.ok & np.isin(measured.id, list(measured.server)))
    if not len(with_times):
        return None
    records = [measured.server[number] for number in with_times.id.tolist()]
    columns = {f"{name}_ms": _column(records, f"{name}_us") / 1e3 for name in _TIMES}
    steps = with_times.output_tokens - 1
    columns["tpot_ms"] = np.where(steps > 0, _column(records, "decode_us") / 1e3 / np.maximum(steps, 1), np.nan)
    known = {name: column for name, column in columns.items() if not np.isnan(column).all()}
    counts = {name: _sum(records, name) for name in _COUNTS}
    return ServerRequests(
        requests=len(with_times),
        metrics={name: metrics.summary_of(column, rules) for name, column in known.items()},
        client={
            name: metrics.summary_of(metrics.column(with_times, name, rules), rules)
            for name in ("ttft_ms", "tpot_ms", "e2el_ms") if name in known
        },
        **counts,
    )  # fmt: skip


def _column(records: list[ServerRecord], name: str) -> Column:
    values = (getattr(record, name) for record in records)
    return np.fromiter((np.nan if value is None else value for value in values), np.float64, len(records))


def _sum(records: list[ServerRecord], name: str) -> int | None:
    values = [value for record in records if (value := getattr(record, name)) is not None]
    return sum(values) if values else None


def stamps(requests: ServerRequests | None, server: ServerStats | None, seen: dict[str, Summary]) -> list[RequestStage]:
    """What the server's own clock says of requests, beside the client's, in the mean: by its replies where they tell,
    else by the histograms of `/metrics`, which hold all requests that it answered meanwhile, those of others too. seen:
    the client's metrics of all requests that it saw meanwhile."""
    found: dict[str, RequestStage] = {}
    if requests is not None:
        for name, own in requests.metrics.items():
            if own.mean is not None:
                client = requests.client.get(name)
                named = name.removesuffix("_ms")
                found[named] = RequestStage(
                    named, own.mean, None if client is None else client.mean, own.n, REPLIES, own.n
                )
    shown = dict(_of_metrics(server))
    client_ms = {name: seen[f"{name}_ms"].mean for name in shown if name in ALIKE}
    if any(own_ms > UNIT_RATIO * (client_ms.get(name) or math.inf) for name, own_ms in shown.items()):
        shown = {}
    for name, own_ms in shown.items():
        ended = (server and server.ended) or 0
        found.setdefault(name, RequestStage(name, own_ms, client_ms.get(name), ended, METRICS, seen["e2el_ms"].n))
    return list(found.values())


def _of_metrics(server: ServerStats | None) -> Iterator[tuple[str, float]]:
    if server is None:
        return
    yield from (server.parts_ms or {}).items()
    for name in ("ttft", "itl", "e2el"):
        mean_ms: float | None = getattr(server, f"{name}_mean_ms")
        if mean_ms is not None:
            yield name, mean_ms


def apart(numbers: Numbers) -> Iterator[Finding]:
    """Where the two clocks part by more than they resolve."""
    lag_ms = 0.0 if numbers.client is None else numbers.client.loop_lag_p99_ms or 0.0
    listed = [stamp for stamp in numbers.stamps if _part(stamp, lag_ms)]
    if listed:
        each = "; ".join(f"{s.name} {s.server_ms:.1f} ms, by the client {s.client_ms or 0:.1f}" for s in listed)
        later = sum(stamp.between_ms or 0 for stamp in listed) > 0
        yield Finding(
            code="STAMPS_PART",
            severity="info",
            message=f"The server's own clock and the client's part in the mean: {each}.",
            advice="What lies between is network, proxies and the server's HTTP process: look there before its engine."
            if later
            else "The server counts more than the client saw: others may use it, or its times are of another kind.",
        )


def _part(stamp: RequestStage, lag_ms: float) -> bool:
    """Of histograms only where they hold these requests and no others, whose number is known."""
    if stamp.between_ms is None or (
        stamp.by == METRICS and abs(stamp.n - stamp.client_n) > OTHERS_RATIO * stamp.client_n
    ):
        return False
    return abs(stamp.between_ms) > max(RESOLUTION_MS, lag_ms, RESOLUTION_RATIO * (stamp.client_ms or 0.0))
