"""Sessions in a report: their numbers by hand, what the texts and the figure say, and what a verdict makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.client.turns import NO_IDS
from loadgen.document import markdown
from loadgen.load.load import Load
from loadgen.monitor.server_view import ServerStats, ServerView
from loadgen.report import build, sessions, text
from loadgen.report.finding import Finding
from loadgen.report.metrics import CONVENTIONS, under_way
from loadgen.report.pages import charts
from loadgen.report.pages.charts import Shown
from loadgen.report.schema import Report
from loadgen.rundir.records import Record, table
from tests.loadgen.load.loads import load
from tests.loadgen.tables import facts, failure, manifest, request, write_run

OURS = CONVENTIONS["loadgen"]
GONE = "turn 1 of its session failed (reset)"


def turn(id: int, session: int, number: int, due: float, lag: float = 1, ttft: float = 100, **changes: Any) -> Record:
    """A turn of 4 tokens 20 ms apart: its reply ends 60 ms after its first token."""
    sent = due + lag
    return request(id, session=session, turn=number, scheduled=due, sent=sent, first=sent + ttft, **changes)


def hand() -> list[Record]:
    """Three sessions, ms.

    0: due 0, sent 1, ended 161; thinks 100; due 261, sent 263, ended 423; thinks 40; due 463, sent 467, ended 627
    1: due 50, sent 51, reset at 200; its turns 2 and 3 were never sent
    2: due 400, sent 401, ended 561
    """
    return [
        turn(0, 0, 1, 0, prompt_tokens=10),
        turn(1, 0, 2, 261, lag=2, prompt_tokens=40, asked_prompt_tokens=0, shared_tokens=14),
        turn(2, 0, 3, 463, lag=4, prompt_tokens=70, asked_prompt_tokens=0, shared_tokens=44),
        failure(3, "reset", sent=51, done=200, session=1, turn=1, scheduled_ns=50_000_000),
        never_sent(4, 1, 2),
        never_sent(5, 1, 3),
        turn(6, 2, 1, 400, prompt_tokens=20, asked_prompt_tokens=20),
    ]


def never_sent(id: int, session: int, number: int, error: str = GONE, at: float = 200) -> Record:
    at_ns = round(at * 1e6)
    return failure(
        id, "dropped", sent=None, session=session, turn=number, scheduled_ns=at_ns, done_ns=at_ns, error=error,
        asked_prompt_tokens=0,
    )  # fmt: skip


def report(records: list[Record], hits: int | None = None, **changes: Any) -> Report:
    seen = None if hits is None else ServerView(server=ServerStats(prefix_cache_hits=hits, covered=True))
    return build.build(manifest(**changes), table(records), [facts()], seen=seen)


def findings_of(built: Report) -> dict[str, Finding]:
    return {finding.code: finding for finding in built.verdict.findings}


def test_numbers_by_hand() -> None:
    found = report(hand()).sessions
    assert found is not None
    assert (found.begun, found.ended, found.failed, found.turns) == (3, 2, 1, 7)
    assert (found.open_max, found.thinking_max) == (2, 1)  # 0 and 1 until 200 ms; 0 and 2 from 400 ms on
    assert (found.think_time_ms.n, found.think_time_ms.mean) == (2, 70.0)
    assert (found.turn_lag_ms.n, found.turn_lag_ms.min, found.turn_lag_ms.max) == (2, 2.0, 4.0)
    assert found.offered_sessions_per_s is None
    assert report(hand(), requests_planned=7).sessions == found
    cut = report(hand()[:-1], requests_planned=7).sessions  # nobody knows how many turns session 2 had
    assert cut is not None and (cut.begun, cut.ended, cut.failed) == (2, None, 1)


def test_when_sessions_are_open_and_thinking() -> None:
    opened, thinking = sessions.opened(table(hand())), sessions.thinking(table(hand()))
    assert [each.tolist() for each in (opened.begin_ns // 10**6, opened.end_ns // 10**6)] == [
        [0, 50, 400],
        [627, 200, 561],
    ]
    assert [each.tolist() for each in (thinking.begin_ns // 10**6, thinking.end_ns // 10**6)] == [
        [161, 423],
        [261, 463],
    ]
    at_s, count = under_way(*opened)
    assert at_s.tolist() == [0.0, 0.05, 0.2, 0.4, 0.561, 0.627] and count.tolist() == [1, 2, 1, 2, 1, 0]


def test_a_session_without_a_think_time_never_thinks() -> None:
    found = report([turn(0, 0, 1, 0), turn(1, 0, 2, 161)]).sessions
    assert found is not None and (found.thinking_max, found.think_time_ms.mean) == (0, 0.0)


def test_rows_in_any_order_and_missing_turns() -> None:
    backwards = [msgspec.structs.replace(row, id=9 - row.id) for row in hand()]  # as of several datasets, or a hand
    assert report(backwards).sessions == report(hand()).sessions
    hole = [turn(0, 0, 1, 0), turn(2, 0, 3, 900)]  # of damaged records: nobody knows what came between
    found = report(hole).sessions
    assert found is not None and found.think_time_ms.n == found.thinking_max == 0


def test_by_turn_by_hand() -> None:
    first, second, third = sessions.by_turn(table(hand()), OURS)
    assert [(each.from_turn, each.to_turn, each.requests, each.ok) for each in (first, second, third)] == [
        (1, 1, 3, 2), (2, 2, 2, 1), (3, 3, 2, 1),
    ]  # fmt: skip
    assert [each.prompt_tokens_mean for each in (first, second, third)] == [15.0, 40.0, 70.0]
    assert first.cached_tokens_mean is None and list(first.metrics) == ["ttft_ms", "tpot_ms", "e2el_ms"]
    assert (second.metrics["ttft_ms"].n, second.metrics["ttft_ms"].p50) == (1, 100.0)
    assert second.metrics["tpot_ms"].p50 == 20.0 and second.metrics["e2el_ms"].p50 == 160.0
    slow = sessions.by_turn(table(hand()), CONVENTIONS["mlperf"])[1]
    assert slow.metrics["ttft_ms"].p50 == 102.0  # from when it was due


def test_cached_tokens_by_turn_count_a_reply_without_them_as_0() -> None:
    rows = [turn(0, 0, 1, 0), turn(1, 0, 2, 200, cached_tokens=48), turn(2, 1, 1, 0), turn(3, 1, 2, 200)]
    first, second = sessions.by_turn(table(rows), OURS)
    assert (first.cached_tokens_mean, second.cached_tokens_mean) == (0.0, 24.0)


def test_late_turns_share_a_row() -> None:
    rows = [turn(at, 0, at + 1, 200 * at) for at in range(21)]
    found = sessions.by_turn(table(rows), OURS)
    spans = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 8), (9, 16), (17, 21)]
    assert [(each.from_turn, each.to_turn) for each in found] == spans
    assert [each.requests for each in found] == [last - first + 1 for first, last in spans]
    assert sessions.by_turn(table([turn(0, 0, 1, 0), turn(1, 1, 1, 0)]), OURS) == []  # nothing to compare
    assert [each.to_turn for each in sessions.by_turn(table([turn(0, 0, 2**31, 0)]), OURS)] == [2**31]


@given(st.lists(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=9), max_size=8))
def test_open_sessions_are_thinking_or_have_a_turn_due(drawn: list[list[tuple[int, int]]]) -> None:
    rows: list[Record] = []
    for session, of_it in enumerate(drawn):
        due = 0
        for number, (think, lag) in enumerate(of_it, start=1):
            due += think
            rows.append(turn(len(rows), session, number, due, lag=lag))
            due += lag + 160
    records = table(rows)
    assert sum(each.requests for each in sessions.by_turn(records, OURS)) in (0, len(rows))
    going = {at: int(np.sum(spans.end_ns - spans.begin_ns)) for at, spans in
             (("open", sessions.opened(records)), ("thinking", sessions.thinking(records)))}  # fmt: skip
    assert going["open"] == going["thinking"] + int((records.done_ns - records.scheduled_ns).sum())
    found = report(rows).sessions
    assert (found is None) is (not rows)
    if found is not None:
        assert found.ended == found.begun == len(drawn) and found.think_time_ms.n == len(rows) - len(drawn)


def test_what_a_turn_adds() -> None:
    ids = [
        turn(0, 0, 1, 0, asked_prompt_tokens=30, shared_tokens=8),  # begins with the prefix of its group
        turn(1, 0, 2, 200, asked_prompt_tokens=54, shared_tokens=34),  # 30 and a reply of 4, and 20 new ones
        turn(2, 0, 3, 400, asked_prompt_tokens=0, shared_tokens=58),  # as text: only the server knows
    ]
    assert sessions.added_tokens(table(ids)).tolist() == [30, 20, 0]
    built = report(ids, config={"input_tokens": "uniform:10:40"})
    assert built.asked_prompt_tokens is not None and built.asked_prompt_tokens.mean == 25.0
    assert "\nPrompt tokens that a turn adds, drawn from uniform:10:40: mean 25.00," in text.render(built)


def test_what_the_texts_say(tmp_path: Path) -> None:
    built = report(hand())
    assert msgspec.json.decode(msgspec.json.encode(built), type=Report) == built
    line = "Sessions: 3 begun, 2 ended, 1 failed; 7 turns; at most 2 open and 1 thinking at once."
    think = "Think time: 0.070 s in the mean; the next turn left 3.00 ms (p50), 3.98 ms (p99) after it was due."
    for shown in (text.render(built), markdown.render(text.summary(built))):
        assert line in shown and think in shown and "Offered" not in shown
    row = ["2", "1", "40.00", "-", "100.0", "100.0", "20.00", "20.00", "160.0", "160.0"]
    assert f"| turn 2 | {' | '.join(row)} |" in markdown.render(text.summary(built))
    (shown,) = (line for line in text.render(built).splitlines() if line.startswith("turn 2 "))
    assert shown.split() == ["turn", "2", *row]
    cut = text.render(report(hand()[:-1], requests_planned=7))
    assert "2 begun, an unknown number ended, 1 failed" in cut
    single = text.render(report([turn(0, 0, 1, 0), turn(1, 1, 1, 0)]))
    assert "Sessions: 2 begun, 2 ended; 2 turns" in single and "Think time" not in single and "by turn" not in single
    without = report([request(0)])
    assert not {"sessions", "turns"} & msgspec.to_builtins(without).keys() and "ession" not in text.render(without)


def test_the_rate_of_sessions_is_none_of_requests() -> None:
    rows = [turn(2 * at + late, at, late + 1, 100 * at + 300 * late) for at in range(11) for late in (0, 1)]
    built = report(rows, arrival="poisson:8")
    assert built.offered_requests_per_s is None and built.sessions is not None
    assert built.sessions.offered_sessions_per_s == pytest.approx(10.0)
    assert "Offered: 10.00 sessions/s in the mean" in text.render(
        built
    ) and " requests/s in the mean" not in text.render(built)


def phases(**options: Any) -> list[str]:
    drawn_load: Load = load(sessions=4, turns="2", think_time="1", **options)
    return [phase.name for phase in drawn_load.phases()]


def test_phases_are_of_sessions_where_sessions_arrive() -> None:
    assert phases(arrival="steps:2@5,8@5") == ["2 sessions/s", "8 sessions/s"]
    assert phases(concurrency="2:4:10")[-1] == "4 sessions"


def test_sessions_that_never_come_to_be_due_are_not_planned() -> None:
    """A report would call the run killed."""
    few: Load = load(sessions=50, turns="3", arrival="steps:2@5")
    assert few.planned == 3 * len(few.due_ns()) < 3 * 50
    for options in ({}, {"arrival": "poisson:2"}, {"concurrency": "1:4:5"}):
        assert load(sessions=50, turns="3", **options).planned == 150


def test_turns_that_were_never_sent_have_their_cause() -> None:
    found = findings_of(report(hand()))["DROPPED"]
    assert found.severity == "invalid"
    assert found.message.endswith(f"2 of them are turns of 1 session that could not go on: {GONE}.")
    assert "errors" in found.advice and "rate" not in found.advice
    rows = [*hand(), failure(7, "dropped", sent=None, error="no connection: too many open files")]
    mixed = findings_of(report(rows))["DROPPED"]
    assert mixed.message.startswith("3 of 8 requests") and "2 of them are turns" in mixed.message
    assert "Lower the rate" in mixed.advice
    without_ids = [
        turn(0, 0, 1, 0),
        never_sent(1, 0, 2, NO_IDS, 161),
        never_sent(2, 1, 2, GONE),
        never_sent(3, 0, 3, NO_IDS),
    ]
    found = findings_of(report(without_ids))["DROPPED"]
    assert f"turns of 2 sessions that could not go on (most often, 2 times): {NO_IDS}." in found.message
    plain = findings_of(report([request(0), failure(1, "dropped", sent=None)]))["DROPPED"]
    assert "session" not in plain.message + plain.advice


def test_a_hostile_reason_is_escaped() -> None:
    rows = [turn(0, 0, 1, 0), never_sent(1, 0, 2, "\x1b[31m" + 1000 * "x")]
    shown = text.render(report(rows))
    assert "\x1b" not in shown and 400 * "x" not in shown


def test_turns_of_text_have_no_length_that_was_asked() -> None:
    assert "PROMPT_LENGTH" not in findings_of(report(hand()))


def test_a_cache_that_holds_what_was_said_is_explained_once() -> None:
    first = turn(0, 0, 1, 0, prompt_tokens=100, asked_prompt_tokens=100)
    told = {"prompt_tokens": 100, "asked_prompt_tokens": 100, "shared_tokens": 80, "cached_tokens": 64}
    rows = [first, turn(1, 0, 2, 200, **told), turn(2, 0, 3, 400, **told)]
    found = findings_of(report(rows, hits=128))
    assert found["CACHED_TOKENS"].severity == "info" and "PREFIX_CACHE" not in found
    assert "took 128 of the 160 prompt tokens" in found["CACHED_TOKENS"].message
    assert findings_of(report(rows, hits=176))["PREFIX_CACHE"].severity == "invalid"  # another's prompts as well
    silent = [msgspec.structs.replace(row, cached_tokens=None) for row in rows]
    assert findings_of(report(silent, hits=128))["PREFIX_CACHE"].severity == "info"


def test_what_nobody_counted_may_have_been_shared() -> None:
    """A server that counts no tokens: how much of a turn it has seen before is not known."""
    rows = [turn(at, 0, at + 1, 200 * at, prompt_tokens=None, asked_prompt_tokens=0) for at in range(3)]
    assert findings_of(report(rows, hits=128))["PREFIX_CACHE"].severity == "warning"


def test_conversations_are_repeated_when_there_are_more_sessions_than_conversations() -> None:
    repeats = {"dataset_prompts": 3, "config": {"dataset": "d.jsonl", "warmup": 0}}
    assert "REPEATED_PROMPTS" not in findings_of(report(hand(), **repeats))  # 7 turns of 3 sessions
    assert "REPEATED_PROMPTS" in findings_of(report([*hand(), turn(9, 3, 1, 400)], **repeats))


def test_a_think_time_that_was_not_kept_is_send_lag() -> None:
    def kept_within(lag: float) -> list[Record]:
        return [
            turn(2 * at + session, session, at + 1, 1000 * at, lag=lag if at else 1)
            for session in (0, 1) for at in range(9)
        ]  # fmt: skip

    found = findings_of(report(kept_within(80)))["SEND_LAG"]
    assert found.severity == "invalid" and "80.0 ms after they were due" in found.message
    assert "SEND_LAG" not in findings_of(report(kept_within(5)))


def test_the_charts_have_open_and_thinking_sessions() -> None:
    (rate, flying, *_), _ = charts.over_time([Shown("run", report(hand()), manifest(), table(hand()))])
    lines = {series.name: series for series in flying.series}
    assert list(lines) == ["requests in flight", "sessions open", "sessions thinking"]
    assert [*zip(lines["sessions open"].x, lines["sessions open"].y, strict=True)] == [
        (0.0, 1), (0.05, 2), (0.2, 1), (0.4, 2), (0.561, 1), (0.627, 0),
    ]  # fmt: skip
    assert lines["sessions thinking"].y == [1, 0, 1, 0]
    assert [series.name for series in rate.series] == ["due", "finished", "failed"]


def test_a_report_is_the_same_from_its_directory(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", hand(), manifest(requests_planned=7), facts())
    built, rows = build.from_directory(run)
    assert built == report(hand(), requests_planned=7)
    build.write(run, built, rows)
    kept = json.loads((run / "report.json").read_text())
    assert kept["sessions"]["begun"] == 3 and [each["to_turn"] for each in kept["turns"]] == [1, 2, 3]
    assert "| turn 3 |" in (run / "report.md").read_text()
