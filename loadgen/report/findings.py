"""The ways a number can be wrong, and whether this run is. Pure: reported numbers, records and facts in, findings out.

Every threshold is a constant with its reason. `invalid` means that the numbers do not describe the server under the
load that was asked for (exit code 4); `warning` that a reader must know it to read them; `info` that it explains them.
A finding must never change a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

import backends
from backends.untrusted import printable
from loadgen.document.content import number
from loadgen.monitor.server_view import ServerStats
from loadgen.report import abandoned, client_findings, cluster, metrics, sessions, sharing, slices
from loadgen.report.finding import THERMAL_RATIO, Finding, Severity, share, throttled, worst_first
from loadgen.report.metrics import PERCENTILES
from loadgen.report.schema import Numbers, Window
from loadgen.rundir import Manifest, contradictions, groups, pace
from loadgen.rundir.launch_facts import LaunchFacts
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.records import ClientFacts, Table
from loadgen.steady import flows, keeping_up

# Gaps of exactly zero shared one read of the socket. The aim is below half a percent; above five, the low percentiles
# and the spread of itl are made by reading, not by the server.
MERGED_READS_INFO_RATIO = 0.005
MERGED_READS_WARNING_RATIO = 0.05
GROUPED_RATIO = 0.1  # of the gaps, those within groups
# A server may hold back a token of an unfinished character now and then; more than this is merging.
MERGED_EVENTS_RATIO = 0.01
# A client that was late may have read a reply at once; when half of all replies are like that, it is the wire.
BUFFERED_INVALID_RATIO = 0.5
PASS_ON = (
    "Measure the server itself, or let the proxy pass events on as they come: nginx `proxy_buffering off`, HAProxy "
    "`option http-no-delay`, lighttpd `server.stream-response-body = 1`; a compressing proxy must not compress "
    "text/event-stream."
)
# Few servers make 700 tokens a second for one reader, none makes 4,000, and few after ten times as long a silence.
REPLAYED_MS, REPLAYED_INVALID_MS, REPLAYED_RATIO = 1.5, 0.25, 0.1
# Of ttft, what waiting for a group adds to it; of a reply's tokens, what of them came with its first group.
GROUPED_INVALID_RATIO, GROUP_INVALID_RATIO = 0.1, 0.05
# Of the replies: fewer change no p99.
FEW_RATIO = 0.01
LATE_PAUSES = 2.0  # times its lag (p99) are the longest pauses that a late client makes as a rule
# Linux delays an ACK by 40 ms (TCP_DELACK_MIN), its timers count in up to 4 ms, and a busy machine reads later.
DELAYED_US = (38_000, 50_000)
# Of the replies: a client that was late for other reasons has few pauses of just that length; one whose loop is late by
# LATE_MS (p99) has pauses of any length.
WAITED_RATIO, LATE_MS = 0.3, 20.0
# Of events per read: quick ACKs that change less end no delay, and a pause of that length is another's.
QUICK_CHANGES_EVENTS = 0.25
NO_DELAY = {
    "tgi": "TGI's router does not, and has no option for it; a proxy before it that does not buffer takes the delay "
    "away (nginx: proxy_buffering off, tcp_nodelay on)",
    "": "HAProxy `option http-no-delay`, nginx `tcp_nodelay on`, a server in Rust at its listener "
    "(axum: `tcp_nodelay(true)`), in Python by its framework",
}
# p99 is a statement about the slowest hundredth. When more than a hundredth of the requests have no latency at all, the
# p99 of the rest is not the p99 of the load.
LOST_INVALID_RATIO = 0.01
# Counting failures as endless moves p99 by more than this: worth showing.
SURVIVORS_SHIFT_RATIO = 0.01
# A token or two of template or BOS changes little; a workload shorter by a tenth is another workload, and flatters.
LENGTH_WARNING_RATIO = 0.01
SHORTER_INVALID_RATIO = 0.1
# A preempted request computes its prompt again: when more than a hundredth are, p99 of ttft and tpot is theirs.
PREEMPTIONS_WARNING_RATIO = 0.01
# A server under load may miss a sample now and then; beyond a tenth, its largest values may have been missed.
SAMPLES_FAILED_RATIO = 0.1
STALLS_NAMED = MODELS_NAMED = 3
_DATE = re.compile(r"[-@:](latest|[0-9]{4}(-?[0-9]{2}){0,2})$")
# A router that takes turns splits a hundred requests far better than this.
IMBALANCE_RATIO = 1.5
POWER_RATIO = 0.1  # of the time, from which on the power limit is worth a word
COLD_LOAD_US = 100_000  # longer, and a model was read from a disk
# Of a rate that a server was seen to serve at its limit: one that it keeps up with.
LOWER_RATIO = 0.9
# Failures after the last reply: so many, and so unlikely beside those before, are a server that has ended.
DIED_LEAST, DIED_CHANCE = 10, 1e-6
_NOT_FAILED = ("abandoned", "cancelled", "dropped", "node_lost")
# By how much start and end of a run may move its numbers before a reader must know.
TRANSIENT_THROUGHPUT_RATIO, TRANSIENT_P99_RATIO = 0.03, 0.1
# Chance that all of n samples lie below the true percentile; half of 5 %, as in a two-sided 95 % interval.
PERCENTILE_MISS_PROBABILITY = 0.025


def find(
    numbers: Numbers,
    table: Table,
    measured: Table,
    facts: Sequence[ClientFacts],
    manifest: Manifest,
    doubts: Sequence[str] = (),
) -> list[Finding]:
    """Everything that a reader of `numbers` must know, worst first. measured: the part of `table` that counts. doubts:
    what contradicts itself in the run's directory besides its records, as clauses."""
    acks = list(_delayed_acks(numbers, measured))
    waited = any(finding.severity == "invalid" for finding in acks)
    listed = [
        *_imported(manifest),
        *_contradictions(doubts, contradictions.of_records(table, measured, facts, manifest)),
        *_server_ended(numbers.launch, measured),
        *_cluster(numbers),
        *_completeness(manifest, measured, facts),
        *_dropped(measured),
        *_warm_up(table, len(table) - len(measured)),
        *_failures(measured),
        *client_findings.find(numbers, facts),
        *acks,
        *_events(numbers, measured, waited),
        *_goodput(numbers),
        *_other_models(numbers, measured),
        *_lengths(measured, numbers.backend),
        *_counts(measured),
        *abandoned.find(numbers),
        *sessions.find(measured),
        *_repeated(measured, manifest),
        *sharing.find(measured, numbers, manifest),
        *_cold(measured),
        *_stalls(numbers),
        *_keeping_up(numbers),
        *_speculation(numbers, manifest),
        *(() if waited else _unsteady(numbers)),  # the kernel acknowledges a connection's first packets at once
        *_transient(numbers),
        *_server(numbers),
        *_gpus(numbers),
        *slices.apart(numbers),
        *_insecure(manifest),
        *_samples(numbers),
    ]
    return worst_first(listed)


def min_samples(thousandths: int) -> int:
    """Samples that a percentile needs: 72 for p95, 368 for p99, 3688 for p99.9.

    With fewer, the largest of them is below the true percentile with a probability above 2.5 %: p ** n > 0.025.
    """
    return math.ceil(math.log(PERCENTILE_MISS_PROBABILITY) / math.log(thousandths / 1000))


def too_few(samples: int, percentiles: Mapping[str, int] = PERCENTILES) -> dict[str, int]:
    """The percentiles (by name, in thousandths) for which these are too few, and how many each needs; none without
    samples."""
    needs = {name: min_samples(thousandths) for name, thousandths in percentiles.items()}
    return {name: least for name, least in needs.items() if 0 < samples < least}


def _contradictions(*clauses: Sequence[str]) -> Iterator[Finding]:
    listed = [clause for each in clauses for clause in each]
    if listed:
        yield Finding(
            code="CONTRADICTION",
            severity="invalid",
            message=f"The files of the run contradict themselves: {'; '.join(listed)}.",
            advice="Do not use these numbers: files were changed, or are of several runs; copy the directory again.",
        )


def is_delivery(measured: Table) -> bool:
    """Whether ttft is the time of a delivery: most replies, or their beginnings, came in too few reads to show their
    first token, or on a clock."""
    few_reads = metrics.bent(measured) | metrics.held(measured)
    return _are_deliveries(int(few_reads.sum()), measured) or groups.clock_us(measured) is not None


def _are_deliveries(bent: int, measured: Table) -> bool:
    return bent > BUFFERED_INVALID_RATIO * _replies(measured)


def _server_ended(launch: LaunchFacts | None, measured: Table) -> Iterator[Finding]:
    ended, since = UNSET if launch is None else launch.ended, _silent_since(measured)
    if ended is UNSET and since is None:
        return
    said = "" if ended is UNSET else f"The server did not live to the end of the run: {ended}"
    if since is not None:
        silent = f"From {number(since[0])} s on it answered nothing: all {since[1]} requests that ended later failed."
        said = f"{said} {silent}" if said else silent.replace("it", "the server", 1)
    yield Finding(
        code="SERVER_ENDED",
        severity="invalid",
        message=said,
        advice="Read the server's log; mend that and run again.",
    )


def _silent_since(measured: Table) -> tuple[float, int] | None:
    """When the last request ended ok, seconds of the run, and how many failed after it, where chance alone would not
    have let all of them fail."""
    ok, failed = measured.ok, ~measured.ok & ~np.isin(measured.outcome, [OUTCOMES.index(each) for each in _NOT_FAILED])
    if not ok.any():
        return None
    last_ns = int(measured.done_ns[ok].max())
    later = failed & (measured.done_ns > last_ns)
    before, n = int((failed & ~later).sum()), int(later.sum())
    if n < DIED_LEAST or n * math.log((before + 1) / (before + int(ok.sum()) + 2)) > math.log(DIED_CHANCE):
        return None
    return last_ns / 1e9, n


def _cluster(numbers: Numbers) -> Iterator[Finding]:
    if numbers.cluster is not None:
        yield from cluster.find(numbers.cluster, numbers.metrics["ttft_ms"].p50)


def _lost_processes(manifest: Manifest) -> int:
    """Client processes whose machine was lost, which another finding tells."""
    return 0 if manifest.cluster is None else sum(node.client_processes for node in manifest.cluster.lost)


def _cold(measured: Table) -> Iterator[Finding]:
    """Requests that met a server without its model."""
    cold = sum((record.load_us or 0) > COLD_LOAD_US for record in measured.server.values())
    if cold:
        yield Finding(
            code="COLD_LOAD",
            severity="warning",
            message=f"The server loaded the model first for {cold} of the requests, by its own account.",
            advice="Raise --warmup, or have the server keep its model; ttft holds the load's time.",
        )


def _insecure(manifest: Manifest) -> Iterator[Finding]:
    if manifest.config.get("insecure"):
        yield Finding(
            code="INSECURE",
            severity="warning",
            message="The server's certificate was not checked (--insecure): whoever answered was measured.",
            advice="Name the file of the certificate's authority with --ca.",
        )


def _count(measured: Table, *outcomes: str) -> int:
    return int(np.isin(measured.outcome, [OUTCOMES.index(outcome) for outcome in outcomes]).sum())


def _imported(manifest: Manifest) -> Iterator[Finding]:
    """Another tool measured it, and what it did not keep cannot be judged."""
    if manifest.imported is not None:
        yield Finding(
            code="IMPORTED",
            severity="warning",
            message=f"{manifest.imported.tool} measured this, and whether its client kept up cannot be told: "
            f"{manifest.imported.lacks}.",
            advice="Measure with loadgen run for numbers whose client, wire and load are judged.",
        )


def _completeness(manifest: Manifest, measured: Table, facts: Sequence[ClientFacts]) -> Iterator[Finding]:
    if manifest.imported is not None:
        return
    planned, interrupted = manifest.requests_planned, any(fact.state == "interrupted" for fact in facts)
    missing = 0 if interrupted or planned is None else max(0, planned - len(measured))
    if len(facts) + _lost_processes(manifest) < (manifest.client_processes or 1) or missing:
        lost = f"{missing} of {planned} planned requests left no record" if missing else "how many it lost is unknown"
        yield Finding(
            code="KILLED",
            severity="invalid",
            message=f"A client process ended without its last line; {lost}, and its lag and CPU are unknown.",
            advice="Take what finished as a hint and run again; stop a run with Ctrl-C, which completes its records.",
        )
    recorded = f"{len(measured)} requests recorded" + (f" of {planned} planned" if planned is not None else "")
    if manifest.stopped_overloaded:
        yield Finding(
            code="STOPPED_OVERLOADED",
            severity="invalid",
            message="The run was stopped once the server was seen to fall behind (--stop-when-overloaded): "
            f"{recorded}.",
            advice="Throughput is the server's limit; lower the rate to measure latencies.",
        )
    elif interrupted:
        yield Finding(
            code="INTERRUPTED",
            severity="invalid",
            message=f"The run was stopped early: {recorded}.",
            advice="The numbers describe what finished; run to the end for numbers to publish.",
        )


def _dropped(measured: Table) -> Iterator[Finding]:
    dropped = _count(measured, "dropped")
    if not dropped:
        return
    turns, why = sessions.never_sent(measured)
    of_sessions = f" {turns} of them are turns of {why.rstrip('.')}." if turns else ""
    advice = ["Find in the errors what ended those sessions: their later turns need its reply."] if turns else []
    if dropped > turns:
        advice.append("Lower the rate, raise the limit on open files, or add --workers.")
    yield Finding(
        code="DROPPED",
        severity="invalid" if dropped > LOST_INVALID_RATIO * len(measured) else "warning",
        message=f"{dropped} of {len(measured)} requests were due but never sent; the load was lighter than asked."
        + of_sessions,
        advice=" ".join(advice),
    )


def _warm_up(table: Table, sent: int) -> Iterator[Finding]:
    """sent: how many of the first rows are the warm-up's."""
    failed = sent - int(table.ok[:sent].sum()) - _count(table.rows(0, sent), "cancelled")  # with the run
    if failed:
        first = f"; the first: {table.warmup_error}" if table.warmup_error else ""
        yield Finding(
            code="WARMUP",
            severity="warning",
            message=f"{failed} of {sent} warm-up requests failed{first}.",
            advice="Read the error and the server's log; what failed in the warm-up may fail in the load.",
        )


def _failures(measured: Table) -> Iterator[Finding]:
    if measured.abandoned.any():
        measured = measured.select(~measured.abandoned)
    ok = int(measured.ok.sum())
    failed = len(measured) - ok - _count(measured, "cancelled", "dropped")
    if ok == 0:
        yield Finding(
            code="NO_SUCCESS",
            severity="invalid",
            message=f"None of {len(measured)} measured requests succeeded.",
            advice="Read the errors; check the address, the model name and the server's log.",
        )
    if failed:
        yield Finding(
            code="FAILED_REQUESTS",
            severity="invalid" if failed > LOST_INVALID_RATIO * len(measured) else "warning",
            message=f"{failed} of {len(measured)} requests failed ({share(failed, len(measured))}).",
            advice="Read the errors and the server's log; lower the load until none fails, or report the failures.",
        )
    lost = len(measured) - ok
    if lost and ok:
        yield from _survivors(measured, lost)


def _survivors(measured: Table, lost: int) -> Iterator[Finding]:
    """Latencies cover requests that ended ok; what if the others count as endless?"""
    latencies = np.sort((measured.done_ns - measured.sent_ns)[measured.ok]) / 1e6
    rank = math.ceil(0.99 * len(measured)) - 1  # nearest rank among all requests, the lost ones last
    endless = rank >= len(latencies)
    shown, adjusted = float(np.percentile(latencies, 99)), math.inf if endless else float(latencies[rank])
    if adjusted <= shown * (1 + SURVIVORS_SHIFT_RATIO):
        return
    yield Finding(
        code="SURVIVORS",
        severity="invalid" if lost > LOST_INVALID_RATIO * len(measured) else "warning",
        message=f"{lost} of {len(measured)} requests have no latency; p99 of e2el is {shown:.0f} ms without them and "
        + ("endless" if endless else f"{adjusted:.0f} ms")
        + " when they count as slowest.",
        advice="Do not compare these percentiles with a run in which all requests succeeded.",
    )


def _events(numbers: Numbers, measured: Table, waited: bool) -> Iterator[Finding]:
    """waited: for ACKs, which is then why beginnings were held back."""
    bent = metrics.bent(measured)
    few_reads = int(bent.sum())
    late = _was_late(numbers, measured, bent) and not _are_deliveries(few_reads, measured)
    if not late:
        yield from _buffered(measured, few_reads, waited)
    if not waited:
        yield from _held(measured)
        if not _are_deliveries(few_reads, measured):
            yield from _clocked(measured)
    yield from _at_once(numbers)
    yield from _hidden(measured, metrics.paceless(measured) & ~bent)
    yield from _extra(measured)
    yield from _reads(numbers, measured, few_reads if late else 0)
    yield from _merged(measured)


def _was_late(numbers: Numbers, measured: Table, bent: NDArray[np.bool_]) -> bool:
    """Whether the client's own lag explains the pauses between the reads of the replies that are `bent` (n,); where
    they have none, whether it was late by more than a token takes."""
    lag_ms = None if numbers.client is None else numbers.client.loop_lag_p99_ms
    if lag_ms is None:
        return False
    gaps_us = measured.itl_us[np.repeat(bent, np.diff(measured.itl_offsets))]
    pauses_us = gaps_us[gaps_us > 0]
    if len(pauses_us):
        return float(np.median(pauses_us)) / 1000 <= LATE_PAUSES * lag_ms
    token_ms = numbers.metrics["tpot_ms"].p50
    return token_ms is not None and lag_ms > token_ms


def _replies(measured: Table) -> int:
    return int((measured.ok & (measured.events > 0)).sum())


def _left_out(metric: str, those: int, measured: Table) -> str:
    if those > metrics.UNKNOWN_RATIO * _replies(measured):
        return f"{metric} cannot be known"
    return f"{metric} leaves them out"


def _buffered(measured: Table, bent: int, waited: bool) -> Iterator[Finding]:
    """Something between kept replies, or parts of them, and sent them on in one piece."""
    why, end = "a proxy holds the stream back, or the server sends it in pieces", PASS_ON
    if waited:
        why, end = "they waited for delayed ACKs", "End what DELAYED_ACK names."
    replies = _replies(measured)
    if bent <= FEW_RATIO * replies:
        return
    invalid = _are_deliveries(bent, measured)
    gaps_us = measured.itl_us[measured.itl_us > 0]
    lumps = f", with pauses of {float(np.median(gaps_us)) / 1000:.0f} ms between them" if len(gaps_us) else ""
    yield Finding(
        code="BUFFERED",
        severity="invalid" if invalid else "warning",
        message=f"{share(bent, replies)} of the replies came in too few reads to show the pace of their tokens{lumps}: "
        + (f"{why}. " if invalid else "")
        + ("ttft is the time of a delivery, and " if invalid else "")
        + _left_out("tpot and itl", bent, measured)
        + ".",
        advice=f"{end} Where replies are wanted whole, --no-stream measures e2el alone. LOOP_LAG tells whether the "
        "client was late.",
    )


def _held(measured: Table) -> Iterator[Finding]:
    """Something between held the beginning of replies back, and passed the rest on."""
    held, replies = int(metrics.held(measured).sum()), _replies(measured)
    if _are_deliveries(held, measured):
        yield Finding(
            code="BUFFERED",
            severity="invalid",
            message=f"{share(held, replies)} of the replies began with {metrics.HELD_EVENTS} events or more in one "
            "read, which took their server a good part of ttft: a proxy holds the beginning of the stream back. ttft "
            "is the time of a delivery; tpot is right.",
            advice=f"{PASS_ON} LOOP_LAG tells whether the client was late.",
        )


def _clocked(measured: Table) -> Iterator[Finding]:
    """Something between let go of events on a timer, whatever had come."""
    period_us = groups.clock_us(measured)
    if period_us is not None:
        yield Finding(
            code="BUFFERED",
            severity="invalid",
            message=f"Reads came {period_us / 1000:.3g} ms apart, whether they brought one event or several: a proxy "
            "or the server lets go of events on a timer. ttft is the time of a delivery, late by up to a period; itl "
            "cannot be known; tpot is wrong by a period over a reply at most.",
            advice=PASS_ON,
        )


def _at_once(numbers: Numbers) -> Iterator[Finding]:
    """Replies after a long silence, faster than nearly all servers: as a proxy replays what it has kept."""
    ttft_ms, tpot_ms, e2el_ms = (numbers.metrics[name].p50 for name in ("ttft_ms", "tpot_ms", "e2el_ms"))
    if ttft_ms and tpot_ms and e2el_ms and tpot_ms < REPLAYED_MS and e2el_ms - ttft_ms < REPLAYED_RATIO * ttft_ms:
        yield Finding(
            code="BUFFERED",
            severity="invalid" if tpot_ms < REPLAYED_INVALID_MS else "warning",
            message=f"Replies began after {number(ttft_ms)} ms and then took {number(tpot_ms)} ms a token: few servers "
            "are so fast. A proxy that keeps a reply until it is whole, and replays it then, looks like this.",
            advice="Look at the stream (curl -N), or measure the server itself; if it is so fast, all is well.",
        )


def _hidden(measured: Table, hidden: NDArray[np.bool_]) -> Iterator[Finding]:
    """The server counts more tokens than the events show."""
    hidden &= measured.output_tokens > measured.events
    count, replies = int(hidden.sum()), _replies(measured)
    if count <= FEW_RATIO * replies:
        return
    tokens, events = int(measured.output_tokens[hidden].sum()), int(measured.events[hidden].sum())
    yield Finding(
        code="HIDDEN_TOKENS",
        severity="warning",
        message=f"In {share(count, replies)} of the replies {events} events came of {tokens} tokens by the server's "
        "count, and do not tell how many each carried: how many were made before the first one (hidden reasoning, "
        f"speculation, a parser that holds text back) is unknown, so {_left_out('tpot', count, measured)}.",
        advice="Let the server tell: running usage in each event (vLLM: stream_options continuous_usage_stats), token "
        "ids, or reasoning tokens in its usage; or turn off what merges or hides them. ttft is that of the first "
        "event; e2el and throughput are right.",
    )


def _extra(measured: Table) -> Iterator[Finding]:
    """More events than tokens: some of them were no token, and one of these may have been the first."""
    counted = measured.ok & (measured.output_tokens >= 0)
    extra = counted & (measured.events > measured.output_tokens * (1 + pace.AGREE_RATIO))
    count, replies = int(extra.sum()), _replies(measured)
    if count <= FEW_RATIO * replies:
        return
    events, tokens = int(measured.events[extra].sum()), int(measured.output_tokens[extra].sum())
    yield Finding(
        code="EXTRA_EVENTS",
        severity="invalid" if count > metrics.UNKNOWN_RATIO * replies else "warning",
        message=f"{share(count, replies)} of the replies have more events than tokens ({events} and {tokens} by the "
        "server's count): an event may be a sign of life or a part of a token, so ttft may be that of no token; "
        + _left_out("tpot", count, measured)
        + ".",
        advice="Look at the stream (curl -N): a gateway's keep-alives must be comments, and the server's usage must "
        "count all that it sends, reasoning too.",
    )


def _delayed_acks(numbers: Numbers, measured: Table) -> Iterator[Finding]:
    """The server, or a proxy, waits with small writes for the client's ACK, which its kernel delays."""
    wire, ttft_ms = numbers.wire, numbers.metrics["ttft_ms"].p50 or 0.0
    changes = wire is None or wire.events_per_read - wire.events_per_read_quick > QUICK_CHANGES_EVENTS
    waited, replies = _waited_for_acks(measured) if changes else 0, _replies(measured)
    lag_ms = numbers.client.loop_lag_p99_ms if numbers.client is not None else None
    if wire is not None and wire.waits:
        added_ms = wire.ttft_ms - wire.ttft_quick_ms
        what = f"The wire adds {added_ms:.0f} ms to the time of the first token: {wire.ttft_ms:.0f} ms, and "
        what += f"{wire.ttft_quick_ms:.0f} ms with quick ACKs ({wire.n} requests each, one at a time)"
        invalid = not numbers.quick_acks and added_ms > client_findings.TTFT_LAG_WARNING_RATIO * ttft_ms
    elif waited > WAITED_RATIO * replies and (lag_ms or 0.0) < LATE_MS:
        what = f"In {share(waited, replies)} of the replies several events came in one read after a pause of 38 to 50 "
        what += "ms, the time of a delayed ACK"
        invalid = True
    else:
        return
    yield Finding(
        code="DELAYED_ACK",
        severity="invalid" if invalid else "warning" if not numbers.quick_acks else "info",
        message=f"{what}: the server or a proxy does not set TCP_NODELAY, and waits with small writes until the client "
        "acknowledges the one before, as its kernel does after 40 ms. Other clients meet the same.",
        advice=f"Set TCP_NODELAY where the stream is written: {NO_DELAY.get(numbers.backend, NO_DELAY[''])}. To "
        "measure the server itself, use --quick-acks.",
    )


def _waited_for_acks(measured: Table) -> int:
    """Replies in which several events came in one read, a delayed ACK's time after the headers, or after the read
    before where reads are usually closer together."""
    gaps_us = measured.itl_us
    if not len(gaps_us) or not (reads_us := gaps_us[gaps_us > 0]).size:
        return 0
    usual_us = float(np.median(reads_us))
    waited = np.zeros(len(measured), np.bool_)
    begins, ends = measured.itl_offsets[:-1], measured.itl_offsets[1:]
    some = np.flatnonzero(measured.ok & (ends > begins))
    first_us = (measured.first_token_ns - measured.headers_ns)[some] // 1000
    waited[some] = (gaps_us[begins[some]] == 0) & _is_delayed(first_us)
    if 2 * usual_us < DELAYED_US[0]:
        places = np.flatnonzero(_is_delayed(gaps_us[:-1]) & (gaps_us[1:] == 0))
        rows = np.searchsorted(measured.itl_offsets, places, side="right") - 1
        waited[rows[places + 1 < ends[rows]]] = True
    return int((waited & measured.ok).sum())


def _is_delayed(pauses_us: NDArray[Any]) -> NDArray[np.bool_]:
    delayed: NDArray[np.bool_] = (pauses_us >= DELAYED_US[0]) & (pauses_us <= DELAYED_US[1])
    return delayed


def _reads(numbers: Numbers, measured: Table, few_reads: int) -> Iterator[Finding]:
    """few_reads: how many replies a late client read in too few reads to show their pace."""
    gaps = len(measured.itl_us)
    zero = gaps - int(np.count_nonzero(measured.itl_us))
    if gaps and zero > MERGED_READS_INFO_RATIO * gaps:
        left_out = few_reads > FEW_RATIO * _replies(measured)
        yield Finding(
            code="MERGED_READS",
            severity="warning" if left_out or zero > MERGED_READS_WARNING_RATIO * gaps else "info",
            message=f"{share(zero, gaps)} of the gaps are exactly 0: those events came in one read of the socket"
            + (
                f"; tpot and itl leave out {few_reads} replies, which a late client read in too few."
                if left_out
                else "."
            ),
            advice="The server sent them together or the client was late (LOOP_LAG tells); prefer tpot over itl here.",
        )
    if gaps:
        shortest_us = groups.short_us(measured)
        grouped = sum(int(np.count_nonzero(part.itl_us < shortest_us)) for part in measured.blocks()) - zero
        if grouped > GROUPED_RATIO * gaps:
            bad = _groups_matter(numbers, measured, shortest_us)
            yield Finding(
                code="GROUPED_EVENTS",
                severity="invalid" if bad else "warning",
                message=f"{share(grouped, gaps)} of the gaps are shorter than {shortest_us / 1000:.2g} ms: events came "
                "in groups, and itl's percentiles are not the time of a token"
                + ("; ttft and tpot are those of groups." if bad else "."),
                advice=PASS_ON
                if bad
                else "Read tpot. Unless the client was late (LOOP_LAG tells), the server was slow to send them.",
            )


def _groups_matter(numbers: Numbers, measured: Table, shortest_us: float) -> bool:
    """Whether nearly all events came in groups that move ttft, or tpot, by more than is allowed."""
    short = began = several = 0
    pauses_us = 0.0
    for part in measured.blocks():
        is_short = part.itl_us < shortest_us
        after_short = np.concatenate(([False], is_short[:-1]))
        begins = part.itl_offsets[:-1]
        after_short[begins[begins < len(is_short)]] = False
        short += int(is_short.sum())
        began += len(is_short) - int(is_short.sum()) + int((part.events > 0).sum())
        several += int((is_short & ~after_short).sum())
        pauses_us += float(part.itl_us[~is_short].sum())
    gaps, ttft_ms = len(measured.itl_us), numbers.metrics["ttft_ms"].p50
    if short < pace.BENT_RATIO * gaps or several < pace.SEVERAL_RATIO * began or short == gaps or not ttft_ms:
        return False
    waited_ms = (pauses_us / (gaps - short) - float(measured.itl_us.mean())) / 1000
    in_group, in_reply = (gaps + _replies(measured)) / began, gaps / _replies(measured)
    return waited_ms > GROUPED_INVALID_RATIO * ttft_ms or in_group - 1 > GROUP_INVALID_RATIO * in_reply


def _merged(measured: Table) -> Iterator[Finding]:
    counted = measured.ok & (measured.events > 0) & (measured.output_tokens > 0)
    events, tokens = int(measured.events[counted].sum()), int(measured.output_tokens[counted].sum())
    if events < (1 - MERGED_EVENTS_RATIO) * tokens:
        yield Finding(
            code="MERGED_EVENTS",
            severity="info",
            message=f"The server put {tokens / events:.2f} tokens into an event on average; itl is the time between "
            "events.",
            advice="Read tpot for the time a token takes, where it is known (HIDDEN_TOKENS).",
        )


def _goodput(numbers: Numbers) -> Iterator[Finding]:
    if numbers.goodput is not None and numbers.goodput.good is None:
        yield Finding(
            code="GOODPUT",
            severity="warning",
            message="Goodput is not given: whether requests keep its limits on ttft or tpot cannot be known.",
            advice="End what hides their tokens (HIDDEN_TOKENS, BUFFERED), or limit e2el instead.",
        )


def _other_models(numbers: Numbers, measured: Table) -> Iterator[Finding]:
    """Replies that name another model: a gateway's fallback, a router's alias, or a name with its date."""
    others = len(measured.models)
    if not others:
        return
    listed = list(numbers.reply_models.items())
    named = ", ".join(f"{printable(name)} ({count})" for name, count in listed[:MODELS_NAMED])
    more = f" and {len(listed) - MODELS_NAMED} more" if len(listed) > MODELS_NAMED else ""
    same = all(_is_same(numbers.model, name) for name in numbers.reply_models)
    yield Finding(
        code="OTHER_MODEL",
        severity="info" if same else "warning" if others == len(measured) and len(listed) == 1 else "invalid",
        message=f"{others} of {len(measured)} replies name another model than {printable(numbers.model)}, which was "
        f"asked for: {named}{more}.",
        advice="It is the same one under its whole name."
        if same
        else "A gateway may have fallen back to another model, or the name is an alias: look at its configuration, and "
        "ask for the model by its own name.",
    )


def _is_same(asked: str, named: str) -> bool:
    """Whether two names of a model are one but for its owner and its date."""
    ours, theirs = (_DATE.sub("", name.lower().rpartition("/")[2]) for name in (asked, named))
    return ours == theirs


def _piece_tokens(backend: str) -> int | None:
    """Its `Backend.piece_tokens`; None also for one that is not installed here."""
    return backends.get(backend).piece_tokens if backend in backends.available() else None


def _lengths(measured: Table, backend: str) -> Iterator[Finding]:
    for code, counted, requested, noun in (
        ("PROMPT_LENGTH", measured.prompt_tokens, measured.asked_prompt_tokens, "prompt"),
        ("OUTPUT_LENGTH", measured.output_tokens, measured.asked_tokens, "output"),
    ):
        known = measured.ok & (counted != -1) & (requested > 0)
        wrong = int((counted[known] != requested[known]).sum())
        if not wrong:
            continue
        got, wanted = int(counted[known].sum()), int(requested[known].sum())
        deviation = float(np.abs(counted[known] - requested[known]).sum()) / wanted
        shorter = (wanted - got) / wanted
        severity: Severity = "info" if deviation <= LENGTH_WARNING_RATIO else "warning"
        piece = _piece_tokens(backend)
        yield Finding(
            code=code,
            severity="invalid" if shorter > SHORTER_INVALID_RATIO else severity,
            message=f"{wrong} of {int(known.sum())} replies had another {noun} length than asked: {got} {noun} tokens "
            f"by the server's count, {wanted} asked.",
            advice="Give --tokenizer, or token ids, for exact prompts; chat templates and BOS tokens add to a prompt."
            if noun == "prompt"
            else f"This server generates over {piece} tokens in whole pieces of {piece}, and ends before one that does "
            f"not fit its limit: ask for at most {piece}, or for a multiple of it that fits."
            if piece is not None and (requested[known] > piece).any()
            else "Check that the server can force the length and that its context is long enough for it.",
        )


def _counts(measured: Table) -> Iterator[Finding]:
    ok = int(measured.ok.sum())
    missing = int((measured.output_tokens[measured.ok] == -1).sum())
    if missing:
        yield Finding(
            code="NO_TOKEN_COUNT",
            severity="warning",
            message=f"The server gave no output token count for {missing} of {ok} replies: their tpot is undefined and "
            "token throughput leaves them out.",
            advice="Events are not counted as tokens; use a backend or a server version that reports usage.",
        )
    unchecked = int((measured.prompt_tokens[measured.ok] == -1).sum())
    if unchecked:
        yield Finding(
            code="NO_PROMPT_COUNT",
            severity="warning",
            message=f"The server gave no prompt token count for {unchecked} of {ok} replies: whether prompts had "
            "the length asked for is unknown.",
            advice="Stream the replies, or use a backend or a server version that reports usage.",
        )


def _repeated(measured: Table, manifest: Manifest) -> Iterator[Finding]:
    prompts, of_sessions = manifest.dataset_prompts, len(np.unique(measured.session[measured.turn > 0]))
    sent = (of_sessions or len(measured)) + int(manifest.config.get("warmup", 0))
    if prompts and sent > prompts:
        yield Finding(
            code="REPEATED_PROMPTS",
            severity="warning",
            message=f"The {prompts} prompts of the dataset were sent {sent / prompts:.1f} times each, the warm-up "
            "included; a server with a prefix cache computes a prompt once.",
            advice="Turn the server's prefix cache off, or give a prompt for each request; else quote ttft as that of "
            "a warm cache.",
        )


def _stalls(numbers: Numbers) -> Iterator[Finding]:
    """What a stall is stands in stalls.py."""
    if not numbers.stalls:
        return
    count, total_s = len(numbers.stalls), sum(stall.end_s - stall.start_s for stall in numbers.stalls)
    named = [f"{stall.end_s - stall.start_s:.1f} s at {stall.start_s:.1f} s" for stall in numbers.stalls[:STALLS_NAMED]]
    times = f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]
    run = f", {share(total_s, numbers.duration_s)} of the run" if numbers.duration_s else ""
    yield Finding(
        code="SERVER_STALL",
        severity="warning",
        message=f"No stream got anything for {times}"
        + (f" (the first {STALLS_NAMED} of {count} times)" if count > STALLS_NAMED else "")
        + f", far longer than a step, though replies were under way: {total_s:.1f} s in all{run}.",
        advice="A server that compiles kernels does this in its first seconds: let the same load warm it up first "
        "with --warmup-load. Where the stall comes back, read the server's log.",
    )


def _keeping_up(numbers: Numbers) -> Iterator[Finding]:
    """Words and thresholds stand in loadgen/steady/keeping_up.py."""
    if numbers.steady is None or numbers.steady.keeping_up is None:
        return
    unit, seen = numbers.steady.unit, numbers.steady.keeping_up
    lower = f"Offer less than {number(LOWER_RATIO * (seen.served_per_s or 0.0))} {unit}/s"
    rates = f"{number(seen.offered_per_s)} {unit}/s arrived and {number(seen.served_per_s)} were answered"
    if seen.word == "fell_behind":
        yield Finding(
            code="OVERLOADED",
            severity="invalid",
            message=f"The server fell behind: from {number(seen.from_s)} s on {rates}, so {number(seen.growth_per_s)} "
            f"more a second waited. Latencies tell how long the run was. Throughput holds: it is the server's limit "
            "under this load.",
            advice=f"{lower} to measure latencies; loadgen search finds the highest rate that meets an objective.",
        )
    elif seen.word == "near_limit":
        yield Finding(
            code="NEAR_LIMIT",
            severity="warning",
            message=f"The server was near its limit, and this run is too short to settle whether it keeps up: {rates}.",
            advice=f"{lower}, or send for several times as long; latencies may be those of a queue that still grew.",
        )


def _speculation(numbers: Numbers, manifest: Manifest) -> Iterator[Finding]:
    """Drafts that were guessed of drawn words: how many were accepted says nothing about users' text."""
    told = numbers.server_requests
    if told is None or not told.drafted_tokens or manifest.config.get("dataset"):
        return
    accepted = told.accepted_tokens or 0
    yield Finding(
        code="SPECULATION",
        severity="warning",
        message=f"The server accepted {accepted:,} of {told.drafted_tokens:,} drafted tokens "
        f"({share(accepted, told.drafted_tokens)}) of prompts whose words were drawn: how many it accepts of users' "
        "text, and so its pace, may be quite another.",
        advice="Send users' own prompts (--dataset), or measure without speculative decoding.",
    )


def _unsteady(numbers: Numbers) -> Iterator[Finding]:
    """How the server's pace changed; what a change is stands in loadgen/steady/changes.py."""
    change = None if numbers.steady is None else numbers.steady.change
    if change is None:
        return
    if change.kind == "slow_start":
        message = f"The server was slow for its first {number(change.at_s)} s: a token took {1 / change.ratio:.2f} "
        message, advice = f"{message}times as long as later.", "Let the same load warm it up first with --warmup-load."
    elif change.kind == "level_shift":
        message = f"The server changed its pace at {number(change.at_s)} s: from then on a token took "
        message += f"{change.ratio:.2f} times as long as before."
        advice = "Find in its log what happened then (a worker lost, another job on its machine); repeat the run."
    else:
        message = (
            f"The server's pace drifted: a token took {100 * (change.per_minute or 0.0):+.1f} % longer from minute "
        )
        message += f"to minute, {100 * (change.ratio - 1):+.0f} % in all."
        advice = "GPUs that grow warm do this; let the server run under load until it has settled (--warmup-load)."
    yield Finding(code="UNSTEADY", severity="warning", message=message, advice=advice)


def _transient(numbers: Numbers) -> Iterator[Finding]:
    """What of the numbers is the start or the end of the run, not its steady state."""
    steady = numbers.steady
    if steady is None or (steady.change is not None and steady.window is None):
        return
    seen, sentences = steady.keeping_up, None
    asked = flows.slots(numbers.arrival)
    if seen is not None and seen.why == keeping_up.UNMET:
        sentences = (
            f"The server never saw its load: {seen.why}.",
            f"Send for several times as long as {steady.unit} take; fewer are in flight until then.",
        )
    elif asked is not None and numbers.sessions is None and steady.peak is not None and 0 < steady.peak < asked:
        sentences = (
            f"The concurrency of {asked} was never reached: at most {steady.peak} requests were in flight.",
            f"Send at least {10 * asked} requests, ten for each of those in flight.",
        )
    elif asked is not None and steady.window is None and numbers.requests.ok and not flows.changes(numbers.arrival):
        sentences = (
            f"No part of this run is a steady state: {steady.why}. Its start, when all came at once, and its end, when "
            "fewer were in flight, are in all numbers.",
            f"Send more: ten requests for each of the {asked} in flight, or better 50"
            + (f"; --warmup {asked} begins with full slots." if numbers.full_slots_s is None else "."),
        )
    elif steady.window is not None:
        sentences = _beside_window(numbers, steady.window)
    if sentences is not None:
        yield Finding(code="TRANSIENT", severity="warning", message=sentences[0], advice=sentences[1])


def _beside_window(numbers: Numbers, window: Window) -> tuple[str, str] | None:
    """By what the whole run differs from its steady state, beyond chance."""
    name = "output_tokens_per_s" if "output_tokens_per_s" in window.throughput else "requests_per_s"
    pairs = {
        "throughput": (getattr(numbers.throughput, name), window.throughput[name], TRANSIENT_THROUGHPUT_RATIO),
        "ttft p99": (numbers.metrics["ttft_ms"].p99, window.metrics["ttft_ms"].get("p99"), TRANSIENT_P99_RATIO),
    }
    differences, worst = [], 0.0
    for what, (whole, steady, limit) in pairs.items():
        if whole is None or steady is None or not steady.value or steady.low is None or steady.high is None:
            continue
        off = whole / steady.value - 1
        if abs(off) > limit and not steady.low <= whole <= steady.high:
            differences.append(f"{what} by {100 * off:+.1f} %")
            worst = max(worst, abs(off) / limit if what == "throughput" else 1.0)
    if not differences:
        return None
    enough = math.ceil(worst * (numbers.requests.ok + numbers.requests.failed) / 100) * 100
    more = (
        f"about {enough:,} requests would bring throughput within 3 %" if worst > 1 else "a longer run has less of it"
    )
    return (
        f"The whole run differs from its steady state (from {number(window.from_s)} to {number(window.to_s)} s) in "
        f"{' and '.join(differences)}: its start and its end are in all numbers.",
        f"Quote the steady state's numbers; {more}.",
    )


def _server(numbers: Numbers) -> Iterator[Finding]:
    server, requests = numbers.server, numbers.requests
    if server is None:
        return
    preemptions = server.preemptions
    preempted = preemptions or server.paused_max
    if preempted:
        many = preempted > PREEMPTIONS_WARNING_RATIO * (requests.ok + requests.failed)
        counted = f"preempted {preemptions} times" if preemptions else f"had {preempted} requests preempted at once"
        yield Finding(
            code="PREEMPTIONS",
            severity="warning" if many else "info",
            message=f"The server {counted}: its KV cache was too small for the load, so ttft, tpot "
            "and itl include work that was done twice.",
            advice="Lower the load or the lengths, or give the server more memory for its KV cache.",
        )
    yield from _lost(server)
    yield from _imbalance(server)
    gaps = [server.problem] if server.problem else []
    lost = sum(each.silent for each in server.replicas or () if each.lost_s is not UNSET)
    if server.failed - lost > SAMPLES_FAILED_RATIO * server.samples:
        gaps.append(f"{server.failed} of {server.samples} samples failed ({server.failure})")
    if not server.covered and not server.problem:
        gaps.append("the samples do not reach from before the first request to after the last reply")
    if gaps:
        yield Finding(
            code="SERVER_METRICS",
            severity="info",
            message=f"The server's own view has gaps: {'; '.join(gaps)}.",
            advice="Latencies and throughput do not depend on it; see that GET /metrics works where the client runs.",
        )


def _gpus(numbers: Numbers) -> Iterator[Finding]:
    """What slowed the server's GPUs besides the load, by their driver and by NVIDIA's exporter."""
    each = [] if numbers.gpus is None else numbers.gpus.each
    slowed = [f"GPU {gpu.index} {', '.join(gpu.slowdowns)}" for gpu in each if gpu.slowdowns]
    if (heat := _held_back(numbers, "thermal", THERMAL_RATIO)) or slowed:
        yield throttled("", "; ".join(heat or slowed), counted=bool(heat))
    elif power := _held_back(numbers, "power", POWER_RATIO):
        yield Finding(
            code="THROTTLED",
            severity="info",
            message=f"The power limit held a GPU's clocks back: {'; '.join(power)}.",
            advice="It does so at large products. Name the limit beside the numbers, and compare runs under the same.",
        )
    shared = max(each, key=lambda gpu: (gpu.others, gpu.processes or 0), default=None)
    if shared is not None and (shared.others or (shared.processes or 0) > 1):
        several = "1 process" if shared.others == 1 else f"{shared.others or shared.processes} processes"
        came = f"{several} came to GPU {shared.index} or left it during the run, as a server's do not."
        yield Finding(
            code="GPU_SHARED",
            severity="warning",
            message=came if shared.others else f"{several} were on GPU {shared.index}; of most servers it is one.",
            advice="See with nvidia-smi whose they are, and measure when the server has its GPUs to itself.",
        )


def _held_back(numbers: Numbers, by: str, most_ratio: float) -> list[str]:
    """The GPUs whose clocks were held back for more than that share of the time, and for how long."""
    each = [] if numbers.gpus is None else numbers.gpus.each
    ratios = [(gpu.index, getattr(gpu, f"{by}_ratio") or 0.0) for gpu in each]
    held = [f"GPU {index} {share(ratio, 1)} of the time" for index, ratio in ratios if ratio > most_ratio]
    seconds = UNSET if numbers.server is None else getattr(numbers.server, f"gpu_{by}_s")
    if seconds is not UNSET and seconds > most_ratio * (numbers.duration_s or 0.0):
        held.append(f"{number(seconds)} s of the GPUs that --metrics-url shows")
    return held


def _lost(server: ServerStats) -> Iterator[Finding]:
    """Replicas that no longer answered at the end."""
    replicas = server.replicas or []
    lost = [each for each in replicas if each.lost_s is not UNSET]
    if lost and len(replicas) > 1:
        seen = (f"last {number(each.lost_s)} s into the run" if each.lost_s else "not once" for each in lost)
        told = [f"{each.url} answered {when}" for each, when in zip(lost, seen, strict=True)]
        yield Finding(
            code="REPLICA_LOST",
            severity="warning",
            message=f"Of {len(replicas)} replicas, {', and '.join(told)}: requests that were there failed, or the "
            "router sent them again, which is part of their latency.",
            advice="Look at its log; throughput is that of the others.",
        )


def _imbalance(server: ServerStats) -> Iterator[Finding]:
    """Replicas of which one did far more than its share, or nothing, among those that ran to the end."""
    tokens = [each.generation_tokens or 0 for each in server.replicas or () if each.lost_s is UNSET]
    mean = sum(tokens) / max(1, len(tokens))
    if len(tokens) > 1 and (max(tokens) > IMBALANCE_RATIO * mean or (mean and not min(tokens))):
        yield Finding(
            code="IMBALANCE",
            severity="warning",
            message=f"Of {len(tokens)} replicas, the busiest generated {max(tokens) / mean:.2f} times the mean of "
            f"their output tokens, and the idlest {min(tokens) / mean:.2f} times.",
            advice="Look at the router's policy, --session-header and --prefix: these numbers are of that split.",
        )


def _samples(numbers: Numbers) -> Iterator[Finding]:
    """Percentiles for which there are too few requests; or enough, and too few moments of the steady state."""
    n = numbers.requests.ok
    short, window = too_few(n), None if numbers.steady is None else numbers.steady.window
    known = {} if window is None else window.metrics["ttft_ms"]
    unbounded = [each for each in ("p90", "p95", "p99") if each in known and known[each].low is None]
    alike = ", ".join(each for each in unbounded if each not in short)
    said, advice = [], []
    if short:
        said.append(f"{n} requests are too few for {', '.join(short)}: even the slowest may be below the true value.")
        advice.append("Send at least " + ", ".join(f"{least} requests for {name}" for name, least in short.items()))
    if alike:
        said.append(f"The steady state holds too few independent moments to bound {alike} of ttft.")
        advice.append("Let the run last longer, or repeat it (--repeat 5)")
    if said:
        yield Finding(
            code="FEW_SAMPLES",
            severity="info" if list(short) in ([], ["p99_9"]) else "warning",
            message=" ".join(said).replace("p99_9", "p99.9"),
            advice=". ".join(advice).replace("p99_9", "p99.9") + ".",
        )
