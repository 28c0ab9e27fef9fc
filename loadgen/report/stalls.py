"""When the server stalled: no event of any reply arrived for far longer than its steps take, while replies were under
way. Pure: the stamps of the records in, stalls out.

A reply is under way from its first event to its last. A silence is the time between two neighbouring events of all
replies together, at a time when at least one reply was under way; waiting for a first token alone is a queue, no
silence. It is a stall when it is longer than `FLOOR_US` and than `STALL_RATIO` times what this run's own steps take:

    step      the silence that halves the time under way: half of it is in longer ones. The events of one step come with
              short silences among them, which are many and no steps. A silence counts for at most `FLOOR_US` of that
              time, so that few long stalls are not taken for the steps
    prefill   the upper quartile of the silences, from a step on, that ended with first tokens: a step that computes
              prompts is longer, and a server that computes whole prompts alone makes every other stream wait. In
              proportion to the tokens of the prompts that began at its end, or next, where they were more than usual

and longer still by the client's own worst lag, since a late client hears nothing either. A stall is never known without
that lag. Of silences within a cell of `CELL_US` only the sum is known: memory is bounded by the cells, not the events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.report import metrics
from loadgen.report.metrics import METRICS, PERCENTILES, Convention, event_times_us
from loadgen.report.schema import ClientStall, Stall
from loadgen.rundir.records import TICK_NS, ClientFacts, RequestTable

CELL_US, MOST_CELLS = 10_000, 1 << 20  # wider cells from three hours on
# A kernel that is compiled takes a second or more. Of 20 runs of real servers (results:h200/serving, results:vllm_cpu)
# the longest silence was 1.6 s, a step of that server; of those that are well over a step, it was 0.7 s.
FLOOR_US = 1_000_000
# In the same runs no silence of half a second was over 2.9 times as long as expected, and none of a second over 1.1.
STALL_RATIO = 4
# What came in while the client stood still is stamped when it has read it all, a little after it goes on.
CATCH_UP_S, CATCH_UP_RATIO = 0.005, 0.1
MOVED_RATIO, MOVED_MS = 0.05, 1.0  # a statistic that is larger by more than this with the touched requests than without
PREFILL_PERCENT = 75  # a quarter of the silent prefills may be stalls themselves


class _Silences(NamedTuple):
    """Silences between cells in order: from when to when, in microseconds of the run (n,); the time within cells."""

    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    short_us: int


def find(measured: RequestTable, lag_ms: float | None) -> list[Stall]:
    """The stalls of a run in order. lag_ms: how late its client was at worst; None when nobody knows: then none."""
    begun = (measured.first_token_ns != -1).any()
    if lag_ms is None or not begun or not len(measured.itl_us):  # no gap is known: none is there, or none was kept
        return []
    silences = under_way(silences_of(measured), measured)
    length_us = silences.end_us - silences.begin_us
    if not len(length_us):
        return []
    limit_us = np.maximum(FLOOR_US, STALL_RATIO * _expected_us(silences, measured)) + 1000 * lag_ms
    stalled = length_us > limit_us
    begin_s, end_s = silences.begin_us[stalled] / 1e6, silences.end_us[stalled] / 1e6
    return [Stall(begin, end) for begin, end in zip(begin_s.tolist(), end_s.tolist(), strict=True)]


def of_client(measured: RequestTable, facts: Sequence[ClientFacts], rules: Convention) -> dict[str, Any]:
    """The fields of a report about stalls of the client: nothing where they move no statistic, by what it is without
    the requests that they touched."""
    touched, paused, stalls = np.zeros(len(measured), np.bool_), np.zeros(len(measured), np.bool_), []
    stamps = (measured.first_token_ns, measured.last_token_ns, measured.done_ns)
    for start_s, end_s in sorted(stall for fact in facts for stall in fact.stalls):
        late_ns = 1e9 * (end_s + CATCH_UP_S + CATCH_UP_RATIO * (end_s - start_s))
        within = [(stamp >= start_s * 1e9) & (stamp <= late_ns) & (stamp != -1) for stamp in stamps]
        due = (measured.scheduled_ns >= start_s * 1e9 - TICK_NS) & (measured.scheduled_ns <= end_s * 1e9)
        these = np.logical_or.reduce([due, *within])
        touched |= these
        over = (stamps[0] != -1) & (stamps[0] < start_s * 1e9) & (stamps[1] > late_ns)  # caught up with later
        paused |= over
        stalls.append(ClientStall(start_s, end_s, int((these | over).sum())))
    if not (touched | paused).any():
        return {}
    others, streams, moved = measured.select(~touched), measured.select(~(touched | paused)), {}
    for name in METRICS:
        whole, rest = (
            metrics.summary(metrics.sample(each, name, rules), rules.percentile)
            for each in (measured, streams if name == "itl_ms" else others)
        )
        pairs = {each: (getattr(whole, each), getattr(rest, each)) for each in (*PERCENTILES, "max")}
        late = [each for each, (with_it, without) in pairs.items() if with_it is not None and _moved(with_it, without)]
        if late:
            moved[name] = late
    return {"client_stalls": stalls, "late_statistics": moved} if moved else {}


def _moved(with_it: float, without: float | None) -> bool:
    return without is None or with_it > (1 + MOVED_RATIO) * without + MOVED_MS


def _expected_us(silences: _Silences, measured: RequestTable) -> NDArray[np.float64]:
    """How long each silence (n >= 1,) may be if it is a step, by this run's own steps."""
    length_us = silences.end_us - silences.begin_us
    step_us = _step_us(length_us, silences.short_us)
    rows = np.flatnonzero(measured.first_token_ns != -1)
    rows = rows[np.argsort(measured.first_token_ns[rows], kind="stable")]
    first_us, sent_us = measured.first_token_ns[rows] // 1000, measured.sent_ns[rows] // 1000
    counted_tokens, asked_tokens = measured.prompt_tokens[rows], measured.asked_prompt_tokens[rows]
    prompt_tokens = np.maximum(np.where(counted_tokens >= 0, counted_tokens, asked_tokens), 0)
    walked = np.concatenate(([0], np.cumsum(prompt_tokens)))
    begins = np.searchsorted(first_us, silences.end_us, side="left")
    within_us = round(step_us / 2)  # the events of one step come one after another, but before those of the next
    ends = np.searchsorted(first_us, silences.end_us + within_us, side="right")
    prefilled = walked[ends] - walked[begins]
    prefills = (prefilled > 0) & (length_us >= step_us)
    if not prefills.any():
        return np.full(len(length_us), step_us)
    usual_us = float(np.percentile(length_us[prefills], PREFILL_PERCENT))
    usual_tokens = float(np.percentile(prefilled[prefills], PREFILL_PERCENT))
    # The prompt that begins next may be computed in pieces, of which this silence is one.
    following = np.minimum(ends, len(rows) - 1)
    in_hand = (ends < len(rows)) & (sent_us[following] < silences.end_us)
    prefilled = np.where(in_hand, walked[following + 1], walked[ends]) - walked[begins]
    return np.maximum(step_us, usual_us * np.maximum(1.0, prefilled / usual_tokens))


def _step_us(length_us: NDArray[np.int64], short_us: int) -> float:
    ascending = np.sort(length_us)
    silent_us = short_us + np.cumsum(np.minimum(ascending, FLOOR_US))
    return float(ascending[np.searchsorted(silent_us, silent_us[-1] / 2)])


def silences_of(measured: RequestTable) -> _Silences:
    """Between the last event of a cell of time and the first of the next cell that has any: every silence longer than
    a cell is one of these, exactly."""
    started = measured.first_token_ns != -1
    origin_us = int(measured.first_token_ns[started].min()) // 1000
    span_us = max(0, int(measured.last_token_ns.max()) // 1000 - origin_us)
    width_us = max(CELL_US, -(-(span_us + 1) // MOST_CELLS))
    cells = span_us // width_us + 1
    earliest_us, latest_us = np.full(cells, span_us + 1), np.full(cells, -1)
    for part in measured.blocks():
        times_us = np.clip(event_times_us(part) - origin_us, 0, span_us)
        cell = times_us // width_us
        np.minimum.at(earliest_us, cell, times_us)
        np.maximum.at(latest_us, cell, times_us)
    filled = np.flatnonzero(latest_us >= 0)
    short_us = int((latest_us[filled] - earliest_us[filled]).sum())
    return _Silences(latest_us[filled[:-1]] + origin_us, earliest_us[filled[1:]] + origin_us, short_us)


def under_way(silences: _Silences, measured: RequestTable) -> _Silences:
    """The silences within a reply."""
    begun = measured.first_token_ns != -1
    first_us, last_us = np.sort(measured.first_token_ns[begun]) // 1000, np.sort(measured.last_token_ns[begun]) // 1000
    before = np.searchsorted(first_us, silences.begin_us, side="right")
    over = np.searchsorted(last_us, silences.end_us, side="left")
    within = before > over  # no reply begins or ends in a silence
    return _Silences(silences.begin_us[within], silences.end_us[within], silences.short_us)
