"""What the files of a run say that cannot be, since no run leaves such: they were changed, mixed up, or written by a
program that was wrong. Pure."""

from __future__ import annotations

import calendar
import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.rundir import Manifest
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.records import DAY_NS, SLACK_NS, ClientFacts, Header, RequestTable

# A client begins to look at itself before t = 0, and ends a little after the last reply.
CLOCK_SLACK_S, CLOCK_SLACK_RATIO = 2.0, 0.01
WAITED_S = 60.0  # for machines of a cluster, and for what was never sent
# A second may be cut anywhere, so the mean may be a little above the busiest.
CPU_SLACK_RATIO = 0.1
_STARTED, _WHEN = re.compile(r"([0-9]{8}-[0-9]{6})-[0-9a-f]{6}"), "%Y%m%d-%H%M%S"  # as `rundir.new_run_id` has it


def of_files(manifest: Manifest, header: Header) -> list[str]:
    """Clauses: what the manifest and the first line of the records say of each other."""
    clauses = []
    if header.run_id != manifest.run_id:
        clauses.append(f"the manifest is of run {manifest.run_id}, and the records are of run {header.run_id}")
    if header.model and header.model != manifest.model:
        clauses.append(f"the manifest names the model {manifest.model}, and the records {header.model}")
    if header.t0_monotonic_ns < 0:
        clauses.append("the run began before its machine's clock did")
    if header.version != manifest.version:
        clauses.append(f"the manifest is of version {manifest.version}, and the records of {header.version}")
    asked = manifest.config.get("backend")
    if isinstance(asked, str) and asked != manifest.backend:
        clauses.append(f"the manifest is of a run with --backend {asked}, and names the backend {manifest.backend}")
    modelled = manifest.emulation is not None or manifest.timetable is not None
    if not manifest.emulated and (modelled or manifest.config.get("launch") == "embedded"):
        clauses.append("the manifest says that nothing was emulated, and what was true of an emulated server")
    started = _STARTED.fullmatch(manifest.run_id)
    with contextlib.suppress(ValueError):  # digits that are no time
        named_s = calendar.timegm(time.strptime(started[1], _WHEN)) if started else manifest.started_unix_s
        if not abs(manifest.started_unix_s - named_s) < DAY_NS / 1e9:  # NaN too
            clauses.append("the manifest says another day than the run's name")
    return clauses


def of_records(
    table: RequestTable, measured: RequestTable, facts: Sequence[ClientFacts], manifest: Manifest
) -> list[str]:
    """Clauses. measured: the part of `table` that counts."""
    warmed = len(table) - len(measured)
    return [
        *_numbers(measured, warmed, facts, manifest), *_clients(facts, manifest.machine.cpu_count),
        *_counted(measured, facts, manifest), *_load(measured, manifest), *_turns(measured), *_outcomes(table),
        *_tokens(measured, manifest), *_orders(table),
    ]  # fmt: skip


def _numbers(measured: RequestTable, warmed: int, facts: Sequence[ClientFacts], manifest: Manifest) -> Iterator[str]:
    planned, clients = manifest.requests_planned, manifest.client_processes
    if planned is not None and len(measured) > planned:
        yield f"{len(measured)} requests are recorded and {planned} were planned"
    if clients is not None and len(facts) > clients:
        yield f"{len(facts)} client processes wrote their last line and {clients} were started"
    warmup = manifest.config.get("warmup")
    if type(warmup) is int and warmed > warmup:
        yield f"{warmed} requests of the warm-up are recorded and {warmup} were asked for"


def _clients(facts: Sequence[ClientFacts], cpus: int) -> Iterator[str]:
    for fact in facts:
        lags_ms = (fact.loop_lag_p50_ms, fact.loop_lag_p99_ms, fact.loop_lag_max_ms)
        stolen, busy = fact.steal_ratio or 0.0, fact.busy_cores or 0.0
        counts = (fact.events, fact.connections, fact.peak_rss_bytes, fact.cpu_peak_ratio)
        connects_ms = [each for each in (fact.connect_p50_ms, fact.connect_max_ms) if each is not None]
        received = (fact.receive_lag_p50_ms, fact.receive_lag_p99_ms, fact.receive_lag_max_ms)
        received_ms = [each + SLACK_NS / 1e6 for each in received if each is not None]  # of the kernel's clock and ours
        if min(*lags_ms, fact.wall_s, fact.cpu_s, *counts, stolen, busy, *connects_ms, *received_ms) < 0:
            yield "a client process says numbers below zero of itself"
        elif fact.state not in ("complete", "interrupted"):
            yield "a client process neither came to its end nor was interrupted"
        elif stolen > 1 or busy > (fact.cores or 0):
            yield "a client process saw others use, or was robbed of, more CPU time than there was"
        elif any(begin > end or end > fact.wall_s + CLOCK_SLACK_S for begin, end in fact.stalls):
            yield "a client process stood still after its end"
        elif any(list(each) != sorted(each) for each in (lags_ms, connects_ms, received_ms)):
            yield "a client process was late by more at its median than at its worst"
        elif max(lags_ms) > 1e3 * (fact.wall_s + CLOCK_SLACK_S):
            yield "a client process was late by more than the time that it ran"
        elif fact.cpu_s > max(1, cpus) * fact.wall_s + CLOCK_SLACK_S:
            yield f"a client process used {fact.cpu_s:g} s of CPU time within {fact.wall_s:g} s"
        elif fact.cpu_s > (fact.cpu_peak_ratio + CPU_SLACK_RATIO) * fact.wall_s + CLOCK_SLACK_S:
            yield "a client process used more CPU time on average than in its busiest second"
        else:
            continue
        return


def _counted(measured: RequestTable, facts: Sequence[ClientFacts], manifest: Manifest) -> Iterator[str]:
    """What the client processes say of the requests beside the records, where all of them say it."""
    if not facts or len(facts) != manifest.client_processes or _lost(measured, manifest):
        return
    counted, events = sum(fact.events for fact in facts), int(measured.events.sum())
    if manifest.config.get("stream") is True and counted != events:
        yield f"the client processes counted {counted} events, and the records hold {events}"
    wall_s, last_s = max(fact.wall_s for fact in facts), float(measured.done_ns.max(initial=0)) / 1e9
    if last_s > (1 + CLOCK_SLACK_RATIO) * wall_s + CLOCK_SLACK_S or wall_s > 2 * last_s + WAITED_S:
        yield f"the last request ended {last_s:.6g} s after the start, and the run took {wall_s:.6g} s"
    connections, peak = sum(fact.connections for fact in facts), _peak(measured)
    if 0 < connections < peak:
        yield f"{peak} requests were in flight at once, over {connections} connections"


def _lost(measured: RequestTable, manifest: Manifest) -> bool:
    lost = manifest.cluster is not None and bool(manifest.cluster.lost)
    return lost or bool((measured.outcome == OUTCOMES.index("node_lost")).any())


def _load(measured: RequestTable, manifest: Manifest) -> Iterator[str]:
    """What was sent, beside what was to be sent."""
    due_s = measured.scheduled_ns / 1e9
    if len(due_s) and due_s.min() < -CLOCK_SLACK_S:
        yield f"{_of(measured, due_s < -CLOCK_SLACK_S)} was due before the start"
    duration_s, loop = manifest.config.get("duration"), manifest.arrival.partition("concurrency:")[2]
    streams = [each for each in map(_streams, (manifest.config.get("concurrency"), loop)) if each is not None]
    if isinstance(duration_s, int | float) and (late := due_s > duration_s + CLOCK_SLACK_S).any():
        yield f"{_of(measured, late)} was due after the {duration_s:g} s in which requests begin"
    if streams and (peak := _peak(measured)) > min(streams):
        yield f"{peak} requests were in flight at once, of {min(streams)} at most"
    requests, own = manifest.config.get("requests"), manifest.config
    if type(requests) is int and own.get("sessions") is None and len(measured) > requests:
        yield f"{len(measured)} requests are recorded and the manifest asks for {requests}"
    if own.get("dataset") is None and own.get("trace") is None:
        yield from _lengths(measured, own)


def _lengths(measured: RequestTable, config: Mapping[str, object]) -> Iterator[str]:
    columns = {} if config.get("thinking_tokens") is not None else {"output_tokens": measured.asked_tokens}
    if all(config.get(name) in (None, 1) for name in ("sessions", "prefix", "batch_size")):  # which make prompts longer
        columns["input_tokens"] = measured.asked_prompt_tokens
    for name, column in columns.items():
        asked = config.get(name)
        if type(asked) is int and (others := column != asked).any():
            yield f"{_of(measured, others)} asked for other {name.replace('_', ' ')} than the {asked} of the manifest"


def _streams(concurrency: object) -> int | None:
    """The most requests in flight that a closed loop may have; None for other loads."""
    if type(concurrency) is int:
        return concurrency
    first, _, rest = concurrency.partition(":") if isinstance(concurrency, str) else ("", "", "")
    last = rest.partition(":")[0] or first
    return max(int(first), int(last)) if first.isdecimal() and last.isdecimal() else None


def _peak(measured: RequestTable) -> int:
    """The most requests that were in flight at once, for longer than clocks differ."""
    there = (measured.sent_ns != -1) & (measured.done_ns != -1)
    begin_ns = measured.sent_ns[there]
    end_ns = np.maximum(begin_ns, measured.done_ns[there] - SLACK_NS)
    change = np.repeat(np.array([-1, 1]), len(begin_ns))  # what ends as another begins is not beside it
    order = np.argsort(np.concatenate((end_ns, begin_ns)), kind="stable")
    return int(np.cumsum(change[order]).max(initial=0))


def _turns(measured: RequestTable) -> Iterator[str]:
    """A turn is sent once."""
    at = np.flatnonzero(measured.turn > 0)
    at = at[np.lexsort((measured.turn[at], measured.session[at]))]
    twice = (np.diff(measured.session[at]) == 0) & (np.diff(measured.turn[at]) == 0)
    if twice.any():
        yield f"{_subject(int(measured.id[at[1:][twice][0]]), int(twice.sum()))} is a turn that another is too"


def _outcomes(table: RequestTable) -> Iterator[str]:
    bad_status = table.ok & (table.status != -1) & (table.status != 200)
    if bad_status.any():
        yield f"{_of(table, bad_status)} ended ok with status {int(table.status[bad_status][0])}"
    unsent = table.ok & ((table.sent_ns == -1) | (table.done_ns == -1))
    if unsent.any():
        yield f"{_of(table, unsent)} ended ok and was never sent, or never ended"


def _tokens(measured: RequestTable, manifest: Manifest) -> Iterator[str]:
    yield from (f"{_subject(*those)} {odd}" for odd, those in measured.odd.items())
    failed = np.isin(measured.id, list(measured.errors)) & measured.ok
    if failed.any():
        yield f"{_of(measured, failed)} ended ok and has an error"
    first, output = measured.first_tokens, measured.output_tokens
    beyond = (first != -1) & ((first < 1) | ((output != -1) & (first >= np.maximum(output, 2))))
    if beyond.any():
        yield f"{_of(measured, beyond)} had more tokens in its first read than in all"
    unseen = measured.ok & (measured.events == 0) & (output > 0) & (measured.asked_tokens > 0)
    if manifest.config.get("stream") is True and unseen.any():
        yield f"{_of(measured, unseen)} ended ok, was streamed, and has no event"
    blind = measured.ok & (measured.events > 0) & (measured.first_token_ns == -1)
    if blind.any():
        yield f"{_of(measured, blind)} has events, and no first token"
    if manifest.config.get("stream") is False and (streamed := measured.events > 0).any():
        yield f"{_of(measured, streamed)} was not streamed, and has events"
    same = [number for number, name in measured.models.items() if name == manifest.model]
    if same:
        yield f"{_subject(same[0], len(same))} names {manifest.model} as another model than was asked for"


def _orders(table: RequestTable) -> Iterator[str]:
    """A request's stamps come in their order, as far as there are any."""
    stamps = (
        ("due", table.scheduled_ns), ("sent", table.sent_ns), ("first token", table.first_token_ns),
        ("last token", table.last_token_ns), ("done", table.done_ns),
    )  # fmt: skip
    latest, named = table.scheduled_ns.copy(), np.zeros(len(table), np.int8)
    for place, (name, at_ns) in enumerate(stamps):
        there = (at_ns != -1) | (place == 0)
        early = there & (at_ns < latest - SLACK_NS)
        if early.any():
            before = stamps[int(named[np.flatnonzero(early)[0]])][0]
            yield f"{_of(table, early)} has its '{name}' before its '{before}'"
        later = there & ~early
        latest, named = np.where(later, at_ns, latest), np.where(later, place, named)


def _of(table: RequestTable, chosen: NDArray[np.bool_]) -> str:
    """The requests, as a subject."""
    return _subject(int(table.id[chosen][0]), int(chosen.sum()))


def _subject(first: int, count: int) -> str:
    return f"request {first}" if count == 1 else f"each of {count} requests, such as {first},"
