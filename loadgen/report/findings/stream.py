"""Whether the stream of a reply shows when its tokens were made: what holds events back between server and client, puts
several into one read, or hides tokens. Pure, as `findings`, whose thresholds these are with their reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.document.content import number
from loadgen.report import metrics
from loadgen.report.finding import Finding, share
from loadgen.report.findings.client import TTFT_LAG_WARNING_RATIO
from loadgen.report.schema import Numbers
from loadgen.rundir import groups, pace
from loadgen.rundir.records import RequestTable

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


def find(numbers: Numbers, measured: RequestTable) -> list[Finding]:
    acks = list(_delayed_acks(numbers, measured))
    return [*acks, *_events(numbers, measured, waited_for_acks(acks))]


def waited_for_acks(found: list[Finding]) -> bool:
    """Whether delayed ACKs made the numbers invalid: what else the stream shows follows from them."""
    return any(finding.code == "DELAYED_ACK" and finding.severity == "invalid" for finding in found)


def is_delivery(measured: RequestTable) -> bool:
    """Whether ttft is the time of a delivery: most replies, or their beginnings, came in too few reads to show their
    first token, or on a clock."""
    few_reads = metrics.bent(measured) | metrics.held(measured)
    return _are_deliveries(int(few_reads.sum()), measured) or groups.clock_us(measured) is not None


def _are_deliveries(bent: int, measured: RequestTable) -> bool:
    return bent > BUFFERED_INVALID_RATIO * _replies(measured)


def _events(numbers: Numbers, measured: RequestTable, waited: bool) -> Iterator[Finding]:
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


def _was_late(numbers: Numbers, measured: RequestTable, bent: NDArray[np.bool_]) -> bool:
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


def _replies(measured: RequestTable) -> int:
    return int((measured.ok & (measured.events > 0)).sum())


def _left_out(metric: str, those: int, measured: RequestTable) -> str:
    if those > metrics.UNKNOWN_RATIO * _replies(measured):
        return f"{metric} cannot be known"
    return f"{metric} leaves them out"


def _buffered(measured: RequestTable, bent: int, waited: bool) -> Iterator[Finding]:
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


def _held(measured: RequestTable) -> Iterator[Finding]:
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


def _clocked(measured: RequestTable) -> Iterator[Finding]:
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


def _hidden(measured: RequestTable, hidden: NDArray[np.bool_]) -> Iterator[Finding]:
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


def _extra(measured: RequestTable) -> Iterator[Finding]:
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


def _delayed_acks(numbers: Numbers, measured: RequestTable) -> Iterator[Finding]:
    """The server, or a proxy, waits with small writes for the client's ACK, which its kernel delays."""
    wire, ttft_ms = numbers.wire, numbers.metrics["ttft_ms"].p50 or 0.0
    changes = wire is None or wire.events_per_read - wire.events_per_read_quick > QUICK_CHANGES_EVENTS
    waited, replies = _waited_for_acks(measured) if changes else 0, _replies(measured)
    lag_ms = numbers.client.loop_lag_p99_ms if numbers.client is not None else None
    if wire is not None and wire.waits:
        added_ms = wire.ttft_ms - wire.ttft_quick_ms
        what = f"The wire adds {added_ms:.0f} ms to the time of the first token: {wire.ttft_ms:.0f} ms, and "
        what += f"{wire.ttft_quick_ms:.0f} ms with quick ACKs ({wire.n} requests each, one at a time)"
        invalid = not numbers.quick_acks and added_ms > TTFT_LAG_WARNING_RATIO * ttft_ms
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


def _waited_for_acks(measured: RequestTable) -> int:
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


def _reads(numbers: Numbers, measured: RequestTable, few_reads: int) -> Iterator[Finding]:
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


def _groups_matter(numbers: Numbers, measured: RequestTable, shortest_us: float) -> bool:
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
    gaps, replies, ttft_ms = len(measured.itl_us), _replies(measured), numbers.metrics["ttft_ms"].p50
    if (
        short < pace.BENT_RATIO * gaps
        or several < pace.SEVERAL_RATIO * began
        or short == gaps
        or not (ttft_ms and replies)
    ):
        return False
    waited_ms = (pauses_us / (gaps - short) - float(measured.itl_us.mean())) / 1000
    in_group, in_reply = (gaps + replies) / began, gaps / replies
    return waited_ms > GROUPED_INVALID_RATIO * ttft_ms or in_group - 1 > GROUP_INVALID_RATIO * in_reply


def _merged(measured: RequestTable) -> Iterator[Finding]:
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
