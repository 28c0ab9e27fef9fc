"""Sessions in the records: how many are open and thinking, how think times were kept, the numbers of each turn, and why
turns were never sent. Pure: the table in, numbers and findings out.

A session is open from when its first turn is due to when its last turn has ended or failed. It thinks from the end of a
reply to when the next turn is due.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.report import metrics
from loadgen.report.finding import Finding
from loadgen.report.metrics import Convention
from loadgen.report.schema import SessionStats, TurnStats
from loadgen.rundir import Manifest
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.records import RequestTable

EACH_TURN = 4  # turns that have a row of their own; from the next on, 4 turns share one, then 8, and so on
MOST_REASON_CHARACTERS = 300
# Of the tokens said before: what an end of a turn that is not sent back, and a text that is cut anew, may take away.
HISTORY_SLACK_TOKENS, HISTORY_SLACK_RATIO = 2, 0.02
TURN_METRICS = ("ttft_ms", "tpot_ms", "e2el_ms")


class Spans(NamedTuple):
    """From when to when, in ns of the run: (n,) each."""

    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]


class _Pairs(NamedTuple):
    """Rows of the table (p,): a turn, and the one after it in its session, which waited for it alone."""

    earlier: NDArray[np.int64]
    later: NDArray[np.int64]


class _Ready(NamedTuple):
    """Rows of the table (t,): turns, and when the last of those that they waited for had ended, -1 where one did
    not."""

    rows: NDArray[np.int64]
    at_ns: NDArray[np.int64]


def _ordered(measured: RequestTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows of turns (m,), session by session and in order; and where in them each session begins (s,)."""
    rows = np.flatnonzero(measured.turn > 0)
    rows = rows[np.lexsort((measured.turn[rows], measured.session[rows]))]
    return rows, np.flatnonzero(np.diff(measured.session[rows], prepend=-1))


def _pairs(measured: RequestTable) -> _Pairs:
    rows, _ = _ordered(measured)
    earlier, later = rows[:-1], rows[1:]
    follows = (measured.session[earlier] == measured.session[later]) & (
        measured.turn[earlier] + 1 == measured.turn[later]
    )
    if measured.afters:
        follows &= ~np.isin(measured.id[later], list(measured.afters))
    return _Pairs(earlier[follows], later[follows])


def _ready(measured: RequestTable) -> _Ready:
    earlier, later = _pairs(measured)
    rows, at_ns = later.tolist(), measured.done_ns[earlier].tolist()
    if measured.afters:
        chosen = np.flatnonzero(measured.turn > 0)
        places = zip(measured.session[chosen].tolist(), measured.turn[chosen].tolist(), strict=True)
        row_of = dict(zip(places, chosen.tolist(), strict=True))
        for (session, _), row in row_of.items():
            after = [row_of.get((session, turn)) for turn in measured.afters.get(int(measured.id[row]), ())]
            if after and None not in after:
                ends_ns = [int(measured.done_ns[each]) for each in after]
                rows.append(row)
                at_ns.append(-1 if -1 in ends_ns else max(ends_ns))
    return _Ready(np.array(rows, np.int64), np.array(at_ns, np.int64))


def opened(measured: RequestTable) -> Spans:
    """When each session was open; shapes (sessions,)."""
    rows, first = _ordered(measured)
    begin_ns = measured.scheduled_ns[rows[first]]
    if not len(first):
        return Spans(begin_ns, begin_ns)
    return Spans(begin_ns, np.maximum(begin_ns, np.maximum.reduceat(measured.done_ns[rows], first)))


def thinking(measured: RequestTable) -> Spans:
    """When sessions were thinking, or tools ran: a span before each turn but the first that came to be due."""
    rows, begin_ns = _ready(measured)
    end_ns = measured.scheduled_ns[rows]
    known = (begin_ns != -1) & (begin_ns < end_ns)
    return Spans(begin_ns[known], end_ns[known])


def added_tokens(measured: RequestTable) -> NDArray[np.int64]:
    """The prompt tokens that were asked of each request (n,); of a session's later turns, those that the turn adds to
    what was said before; 0 where that is not known."""
    asked_tokens = measured.asked_prompt_tokens
    return np.where(measured.turn > 1, np.maximum(asked_tokens - measured.shared_tokens, 0), asked_tokens)


def build(
    measured: RequestTable, rules: Convention, offered_per_s: float | None, complete: bool
) -> SessionStats | None:
    """None for a load without sessions. offered_per_s: the rate at which they were due to begin. complete: whether each
    turn that was planned has its record."""
    rows, first = _ordered(measured)
    if not len(first):
        return None
    whole = np.logical_and.reduceat(measured.ok[rows], first)
    begin_ns, end_ns = opened(measured)
    ready = _ready(measured)
    sent = (measured.sent_ns[ready.rows] != -1) & (ready.at_ns != -1)
    later, ready_ns = ready.rows[sent], ready.at_ns[sent]
    took_ns, waited_ns = (end_ns - begin_ns)[whole], _waited_ns(measured, rows, first)[whole]
    return SessionStats(
        begun=len(first),
        ended=int(whole.sum()) if complete else None,
        failed=int((~whole).sum()),
        turns=len(rows),
        open_max=_most(Spans(begin_ns, end_ns)),
        thinking_max=_most(thinking(measured)),
        offered_sessions_per_s=offered_per_s,
        think_time_ms=metrics.summary_of((measured.scheduled_ns[later] - ready_ns) / 1e6, rules),
        turn_lag_ms=metrics.summary_of((measured.sent_ns[later] - measured.scheduled_ns[later]) / 1e6, rules),
        task_ms=metrics.summary_of(took_ns / 1e6, rules),
        tokens_wait_ms=metrics.summary_of(waited_ns / 1e6, rules),
        tools_ms=metrics.summary_of((took_ns - waited_ns) / 1e6, rules),
    )


def _waited_ns(measured: RequestTable, rows: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.int64]:
    """How long each session (s,) waited for a reply at least: what its requests, from when they were due to their end,
    cover together. rows, first: of `_ordered`."""
    lengths = np.diff(np.append(first, len(rows)))
    session = np.repeat(np.arange(len(first)), lengths)
    begin_ns = measured.scheduled_ns[rows]
    end_ns = np.maximum(begin_ns, measured.done_ns[rows])
    order = np.lexsort((begin_ns, session))
    begin_ns, end_ns = begin_ns[order], end_ns[order]
    # the latest end so far in the same session, by ranks, which sessions can be kept apart by
    ends_ns, rank = np.unique(end_ns, return_inverse=True)
    latest = np.maximum.accumulate(session * len(ends_ns) + rank) - session * len(ends_ns)
    before_ns = np.concatenate([begin_ns[:1], ends_ns[latest[:-1]]])
    before_ns[first] = begin_ns[first]
    waited: NDArray[np.int64] = np.add.reduceat(np.maximum(0, end_ns - np.maximum(begin_ns, before_ns)), first)
    return waited


def _most(spans: Spans) -> int:
    return int(metrics.under_way(*spans)[1].max(initial=0))


def by_turn(measured: RequestTable, rules: Convention) -> list[TurnStats]:
    """The numbers of the turns 1, 2, 3, 4, 5 to 8, 9 to 16 and so on, as far as there are any; empty where no session
    has more than one."""
    if measured.turn.max(initial=0) < 2:
        return []
    # Whether replies count at all; vLLM leaves the count out of a reply where it is 0.
    replies_count = bool((measured.cached_tokens[measured.ok] != -1).any())
    highest = np.where(measured.turn > EACH_TURN, 2 ** np.ceil(np.log2(np.maximum(measured.turn, 1))), measured.turn)
    columns = {name: metrics.fair_column(measured, name, rules) for name in TURN_METRICS}
    stats = []
    for last in np.unique(highest[measured.turn > 0]).astype(np.int64).tolist():
        chosen = highest == last
        ok = chosen & measured.ok
        prompt = measured.prompt_tokens[ok]
        stats.append(
            TurnStats(
                from_turn=last if last <= EACH_TURN else last // 2 + 1,
                to_turn=int(measured.turn[chosen].max()),
                requests=int(chosen.sum()),
                ok=int(ok.sum()),
                prompt_tokens_mean=_mean(prompt[prompt != -1]),
                cached_tokens_mean=_mean(np.maximum(measured.cached_tokens[ok], 0)) if replies_count else None,
                metrics={name: metrics.summary_of(values[ok], rules) for name, values in columns.items()},
            )
        )
    return stats


def find(measured: RequestTable, manifest: Manifest) -> Iterator[Finding]:
    """Whether the server kept what was said before: by its own counts a turn's prompt holds what the turn repeats.
    Templates, and texts that are cut into tokens anew, may differ by a little. A prompt of a trace is the trace's own:
    it repeats its shared blocks and no reply."""
    earlier, later = _pairs(measured)
    sent = measured.ok[earlier] & measured.ok[later]
    earlier, later = earlier[sent], later[sent]
    counts = (measured.prompt_tokens[earlier], measured.output_tokens[earlier], measured.prompt_tokens[later])
    known = np.logical_and.reduce([count != -1 for count in counts]) if len(earlier) else sent[:0]
    before, reply, after = (count[known] for count in counts)
    # as in records of older versions
    untold = manifest.config.get("trace") is None and not measured.shared_tokens.any() and not measured.afters
    history = before + reply if untold else measured.shared_tokens[later][known]
    dropped = after < history - HISTORY_SLACK_TOKENS - HISTORY_SLACK_RATIO * history
    if dropped.any():
        yield Finding(
            code="HISTORY_DROPPED",
            severity="invalid",
            message=f"In {int(dropped.sum())} of {len(history)} later turns the server counted fewer prompt tokens "
            f"than were said before ({int(after[dropped].sum())}, and {int(history[dropped].sum())} were said): it did "
            "not do the work that was sent.",
            advice="Let the server take whole conversations, or send single requests. Where it counts reasoning that "
            "it does not get back, turn reasoning off.",
        )
    elif unknown := int((~known).sum()):
        yield Finding(
            code="HISTORY_UNKNOWN",
            severity="warning",
            message=f"In {unknown} of {len(known)} later turns the server did not count its tokens: whether it took "
            "what was said before is unknown.",
            advice="Stream the replies, or use a backend or a server version that reports usage.",
        )


def _mean(counts: NDArray[np.int64]) -> float | None:
    return float(counts.mean()) if len(counts) else None


def never_sent(measured: RequestTable) -> tuple[int, str]:
    """How many later turns were never sent, because their sessions could not go on; and, as a clause, of how many
    sessions and the most frequent reason."""
    dropped = (measured.turn > 1) & (measured.outcome == OUTCOMES.index("dropped"))
    count = int(dropped.sum())
    if not count:
        return 0, ""
    sessions = len(np.unique(measured.session[dropped]))
    reasons = Counter(measured.errors.get(id, "unknown") for id in measured.id[dropped].tolist())
    reason, times = reasons.most_common(1)[0]
    often = "" if len(reasons) == 1 else f" (most often, {times} times)"
    which = "session" if sessions == 1 else "sessions"
    return count, f"{sessions} {which} that could not go on{often}: {reason[:MOST_REASON_CHARACTERS]}"
