"""Directories that say what cannot be: the report says so, and is invalid."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadgen import cli, rundir
from loadgen.report import build, repeats
from loadgen.report.finding import Finding
from loadgen.rundir.records import ClientFacts, Record, table
from tests.loadgen.report.test_sessions import turn
from tests.loadgen.tables import facts, failure, manifest, request, write_run

MS = 1_000_000


def found(records: list[Record], code: str, clients: int = 1, **changes: Any) -> Finding | None:
    report = build.build(manifest(**changes), table(records), [facts()] * clients)
    listed = [finding for finding in report.verdict.findings if finding.code == code]
    assert not any(finding.severity == "invalid" for finding in listed) or not report.verdict.valid
    return listed[0] if listed else None


BAD: dict[str, tuple[Record, str]] = {
    "ok with status 500": (request(status=500), "ended ok with status 500"),
    "ok and never sent": (request(sent_ns=None), "was never sent"),
    "ok and never done": (request(done_ns=None), "never ended"),
    "done before sent": (request(done_ns=-5 * MS), "'done' before its"),
    "first token before sent": (request(sent_ns=50 * MS, first_token_ns=20 * MS), "'first token' before its 'sent'"),
    "sent before due": (request(scheduled_ns=40 * MS), "'sent' before its 'due'"),
    "done before its last token": (request(done_ns=2 * MS), "'done' before its 'last token'"),
    "gaps that do not add up": (request(itl_us=[1000, 1000, 1000]), "has gaps that do not add up"),
    "more gaps than events": (request(events=3), "more or fewer gaps than its events"),
    "headers before it was sent": (request(headers_ns=-10_000 * MS), "its headers before it was sent"),
    "events and no first token": (request(first_token_ns=-1), "has events, and no first token"),
    "headers after the first token": (request(headers_ns=150 * MS), "its headers after its first token"),
    "an answer before the first token": (request(answer_ns=50 * MS), "an answer that does not begin between"),
    "an answer after the last token": (request(answer_ns=500 * MS), "an answer that does not begin between"),
    "all tokens and more in the first read": (request(first_tokens=9), "more tokens in its first read than in all"),
    "no token in the first read": (request(first_tokens=0), "more tokens in its first read than in all"),
    "ok with an error": (request(error="boom"), "ended ok and has an error"),
    "failed before it was sent": (failure(0, "reset", sent=50, done=20), "'done' before its 'sent'"),
}


@pytest.mark.parametrize(("record", "why"), BAD.values(), ids=BAD.keys())
def test_records_that_cannot_be(record: Record, why: str) -> None:
    finding = found([record, request(1)], "CONTRADICTION")
    assert finding is not None and finding.severity == "invalid" and why in finding.message
    assert "request 0" in finding.message


@pytest.mark.parametrize("phase", ["measured", "warmup"])
def test_what_can_be(phase: str) -> None:
    records = [request(0, phase=phase), request(1), failure(2, "refused", sent=None, done=5), failure(3, "reset")]
    assert found(records, "CONTRADICTION", requests_planned=4) is None
    late = request(0, first=0.5)  # of the kernel's clock, half a millisecond before ours
    assert found([late], "CONTRADICTION", requests_planned=1) is None


def test_more_than_there_was() -> None:
    more = found([request(each) for each in range(3)], "CONTRADICTION", requests_planned=2)
    assert more is not None and "3 requests are recorded and 2 were planned" in more.message
    twice = found([request()], "CONTRADICTION", clients=2, requests_planned=1, client_processes=1)
    assert twice is not None and "2 client processes wrote their last line and 1 were started" in twice.message


def test_a_warm_up_that_is_larger_than_was_asked_for() -> None:
    records = [*(request(each, phase="warmup") for each in range(3)), request()]
    more = found(records, "CONTRADICTION", config={"warmup": 2}, requests_planned=1)
    assert more is not None and "3 requests of the warm-up are recorded and 2 were asked for" in more.message
    assert found(records, "CONTRADICTION", config={"warmup": 3}, requests_planned=1) is None


def test_streamed_replies_without_events() -> None:
    silent = request(first_token_ns=None, last_token_ns=None, events=0, itl_us=[])
    streamed = found([silent], "CONTRADICTION", config={"stream": True})
    assert streamed is not None and "was streamed, and has no event" in streamed.message
    assert found([silent], "CONTRADICTION", config={"stream": False}) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"loop_lag_p50_ms": -1.0}, "numbers below zero"),
        ({"connect_p50_ms": -1.0}, "numbers below zero"),
        ({"cpu_peak_ratio": -1.0}, "numbers below zero"),
        ({"receive_lag_p99_ms": -9.0}, "numbers below zero"),
        ({"connect_p50_ms": 3.0}, "more at its median"),
        ({"receive_lag_p50_ms": 2.0, "receive_lag_p99_ms": 1.0}, "more at its median"),
        ({"loop_lag_max_ms": 1e9}, "by more than the time that it ran"),
        ({"state": "x"}, "neither came to its end nor was interrupted"),
    ],
)
def test_a_client_that_says_what_cannot_be(changes: dict[str, Any], why: str) -> None:
    finding = found([request()], "CONTRADICTION", requests_planned=1)
    assert finding is None
    report = build.build(manifest(), table([request()]), [facts(**changes)])
    assert not report.verdict.valid and why in report.verdict.findings[0].message
    near = facts(receive_lag_p50_ms=-0.01, receive_lag_p99_ms=0.2, receive_lag_max_ms=0.3)  # clocks differ
    assert build.build(manifest(requests_planned=1), table([request()]), [near]).verdict.valid


def test_a_turn_that_is_there_twice() -> None:
    turns = [turn(0, 0, 1, 0), turn(1, 0, 2, 200), turn(2, 1, 1, 0)]
    assert found(turns, "CONTRADICTION", requests_planned=4) is None
    twice = found([*turns, turn(3, 0, 2, 400)], "CONTRADICTION", requests_planned=4)
    assert twice is not None and "request 3 is a turn that another is too" in twice.message


def test_a_warm_up_of_no_number(tmp_path: Path) -> None:
    for warmup in (None, "x", [], 1.5, True):
        config = {"warmup": warmup, "dataset": "d"}
        assert build.build(manifest(config=config, dataset_prompts=9), table([request()]), [facts()]).requests.ok == 1


HONEST = {"requests_planned": 3, "client_processes": 1, "config": {"stream": True, "concurrency": 2, "duration": 5.0,
          "output_tokens": 4, "input_tokens": 10}}  # fmt: skip


def loop(**changes: Any) -> list[Record]:
    """A closed loop of two, 160 ms a request."""
    times = ((0, 1), (0, 1), (161.1, 161.1))
    return [request(number, scheduled=due, sent=sent, first=sent + 100, **changes)
            for number, (due, sent) in enumerate(times)]  # fmt: skip


def told(records: list[Record], client: ClientFacts, **changes: Any) -> str:
    report = build.build(manifest(**{**HONEST, **changes}), table(records), [client])
    listed = [finding for finding in report.verdict.findings if finding.code == "CONTRADICTION"]
    assert not listed or not report.verdict.valid
    return listed[0].message if listed else ""


def test_an_honest_loop_contradicts_nothing() -> None:
    assert told(loop(), facts(events=12)) == ""
    touching = [request(number, sent=161 * number, first=161 * number + 100) for number in range(3)]
    assert told(touching, facts(events=12), config={**HONEST["config"], "concurrency": 1}) == ""
    assert told(loop(), facts(events=12), config={**HONEST["config"], "concurrency": "1:2:10"}) == ""
    unstreamed = loop(first_token_ns=None, last_token_ns=None, events=0, itl_us=[])
    assert told(unstreamed, facts(events=3), config={**HONEST["config"], "stream": False}) == ""
    lost = [*loop()[:2], failure(2, "node_lost", sent=200, done=210)]  # its client's last line says more than came home
    assert told(lost, facts(events=20)) == ""


FOOTERS = {
    "other events": ({"events": 13}, "counted 13 events, and the records hold 12"),
    "too short": ({"wall_s": 0.1, "cpu_s": 0.01}, ""),  # within what is allowed
    "CPU seconds of a year": ({"cpu_s": 3e7, "cpu_peak_ratio": 3e6}, "3e+07 s of CPU time within 10 s"),
    "a mean above the busiest second": ({"cpu_s": 9.0, "cpu_peak_ratio": 0.2}, "more CPU time on average"),
    "time that nobody was there": ({"wall_s": 9e5}, "the last request ended 0.3211 s after the start"),
    "fewer connections than requests at once": ({"connections": 1}, "2 requests were in flight at once, over 1"),
    "stood still later": ({"stalls": ((100.0, 101.0),)}, "stood still after its end"),
    "steal without end": ({"steal_ratio": 5.0}, "more CPU time than there was"),
    "steal below zero": ({"steal_ratio": -0.5}, "numbers below zero"),
    "more cores than there are": ({"busy_cores": 9.0, "cores": 8}, "more CPU time than there was"),
    "memory below zero": ({"peak_rss_bytes": -4}, "numbers below zero"),
    "lags out of order": ({"loop_lag_p50_ms": 5.0}, "late by more at its median"),
    "no number": ({"cpu_s": -1.0}, "numbers below zero"),
}


@pytest.mark.parametrize(("changes", "why"), FOOTERS.values(), ids=FOOTERS.keys())
def test_last_lines_that_differ_from_the_records(changes: dict[str, Any], why: str) -> None:
    message = told(loop(), facts(**{"events": 12, **changes}))
    assert why in message and bool(why) == bool(message)


def test_more_in_flight_than_the_loop_holds() -> None:
    at_once = [request(number, sent=1 + number) for number in range(3)]
    assert "3 requests were in flight at once, of 2 at most" in told(at_once, facts(events=12))
    assert told(at_once, facts(events=12), config={**HONEST["config"], "concurrency": "1:3:10"}) == ""


DAY_MS = 86_400_000.0


@pytest.mark.parametrize(
    ("by_ms", "why"), [(3 * DAY_MS, "the last request ended 259201 s after"), (-3 * DAY_MS, "was due before the start")]
)
def test_times_that_were_shifted(by_ms: float, why: str) -> None:
    shifted = [request(n, scheduled=by_ms, sent=by_ms + 1 + 200 * n, first=by_ms + 101 + 200 * n) for n in range(3)]
    assert why in told(shifted, facts(events=12))


def test_requests_beyond_what_was_asked() -> None:
    late = [*loop()[:2], request(2, scheduled=9000, sent=9001, first=9101)]
    assert "was due after the 5 s in which requests begin" in told(late, facts(events=12))
    longer = [*loop()[:2], request(2, sent=161.1, first=261, asked_tokens=8)]
    assert "other output tokens than the 4 of the manifest" in told(longer, facts(events=12))
    more = [*loop()[:2], request(2, sent=161.1, first=261, asked_prompt_tokens=11)]
    assert "other input tokens than the 10 of the manifest" in told(more, facts(events=12))
    assert told(more, facts(events=12), config={**HONEST["config"], "prefix": "1:4"}) == ""
    fewer = {**HONEST["config"], "requests": 2}
    assert "3 requests are recorded and the manifest asks for 2" in told(loop(), facts(events=12), config=fewer)
    whole = {**HONEST["config"], "stream": False}
    assert "was not streamed, and has events" in told(loop(), facts(events=12), config=whole)
    named = loop(model="llama-2-7b")
    assert "names llama-2-7b as another model than was asked for" in told(named, facts(events=12))
    other = {**HONEST["config"], "dataset": "prompts.jsonl"}  # its lines say how long replies may be
    assert told(longer, facts(events=12), config=other) == ""


def a_run(directory: Path, **changes: Any) -> Path:
    return write_run(directory, [request()], manifest(requests_planned=1, **changes), facts(events=4))


def other_manifest(directory: Path) -> None:
    rundir.write_manifest(directory, manifest(run_id="another", requests_planned=1))


def last_line_twice(directory: Path) -> None:
    path = directory / "requests.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[-1]]))


def other_model(directory: Path) -> None:
    rundir.write_manifest(directory, manifest(model="gpt-5", requests_planned=1, client_processes=1))


def another_day(directory: Path) -> None:
    rundir.write_manifest(directory, manifest(started_unix_s=1795262400.0 - 3 * 86400, requests_planned=1))


def another_version(directory: Path) -> None:
    rundir.write_manifest(directory, manifest(version="9.9", requests_planned=1, client_processes=1))


def another_backend(directory: Path) -> None:
    asked = {"backend": "vllm"}
    rundir.write_manifest(directory, manifest(backend="sglang", config=asked, requests_planned=1, client_processes=1))


def no_emulation(directory: Path) -> None:
    embedded = {"launch": "embedded"}
    rundir.write_manifest(directory, manifest(config=embedded, requests_planned=1, client_processes=1))


def before_the_clock(directory: Path) -> None:
    path = directory / "requests.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"t0_monotonic_ns":0', b'"t0_monotonic_ns":-5'))


@pytest.mark.parametrize(
    "spoil",
    [
        other_manifest,
        last_line_twice,
        other_model,
        another_day,
        another_version,
        before_the_clock,
        another_backend,
        no_emulation,
    ],
)
def test_a_directory_that_was_put_together(
    spoil: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = a_run(tmp_path / "run", client_processes=1)
    assert build.from_directory(directory)[0].verdict.valid
    spoil(directory)
    assert cli.invoke(["report", str(directory)]) == 4
    assert "CONTRADICTION" in capsys.readouterr().err


def test_one_run_three_times_is_no_three_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    a_run(whole / "1", run_id="a")
    shutil.copytree(whole / "1", whole / "2")
    (whole / "3").symlink_to("1")
    a_run(whole / "4", run_id="b")
    runs = repeats.read(whole).runs
    assert [run.valid for run in runs] == [True, False, False, True]
    assert all("run a again" in run.reasons[-1] for run in runs if not run.valid)


# Sessions whose history does not reach the server.


def session(*counts: tuple[int | None, int | None]) -> list[Record]:
    """A session of turns with the server's counts of prompt and reply, in tokens."""
    return [
        turn(at, 0, at + 1, 500 * at, prompt_tokens=prompt, output_tokens=reply, asked_prompt_tokens=0)
        for at, (prompt, reply) in enumerate(counts)
    ]


@pytest.mark.parametrize(
    "counts",
    [
        [(10, 4), (10, 4), (10, 4)],  # the last message alone
        [(10, 4), (0, 4)], [(0, 4), (0, 4)],  # none is counted
        [(1000, 400), (1010, 400)],  # what the user said, without the replies
        [(100, 4), (115, 4), (20, 4)],  # from some turn on
    ],
)  # fmt: skip
def test_a_history_that_is_dropped(counts: list[tuple[int | None, int | None]]) -> None:
    finding = found(session(*counts), "HISTORY_DROPPED")
    assert finding is not None and finding.severity == "invalid"


@pytest.mark.parametrize(
    "counts", [[(10, 4), (24, 4), (38, 4)], [(10, 4), (14, 4)], [(10, 4), (13, 4)], [(1000, 400), (1390, 5)], [(9, 4)]]
)
def test_a_history_that_is_kept(counts: list[tuple[int | None, int | None]]) -> None:
    """Also where the end of a turn is not sent back, and where a text is cut into tokens anew."""
    assert found(session(*counts), "HISTORY_DROPPED") is None
    assert found(session(*counts), "HISTORY_UNKNOWN") is None


def test_an_agent_that_begins_anew_repeats_nothing() -> None:
    """Its first turn follows that of the agent that began it, and has a prompt of its own."""
    main, again, sub = session((400, 16), (416, 16), (128, 16))
    again.shared_tokens = 416
    assert found([main, again, sub], "HISTORY_DROPPED") is None
    again.prompt_tokens = 40
    assert found([main, again, sub], "HISTORY_DROPPED") is not None


def test_a_turn_of_a_trace_has_the_prompt_that_the_trace_names() -> None:
    records = session((400, 8), (100, 8))
    assert found(records, "HISTORY_DROPPED", config={"trace": "trace.jsonl"}) is None
    assert found(records, "HISTORY_DROPPED") is not None
    records[1].shared_tokens = 300
    assert found(records, "HISTORY_DROPPED", config={"trace": "trace.jsonl"}) is not None


def test_a_history_that_nobody_counts() -> None:
    finding = found(session((10, 4), (None, 4), (38, 4)), "HISTORY_UNKNOWN")
    assert finding is not None and "2 of 2 later turns" in finding.message


def test_a_turn_that_failed_says_nothing_of_the_history() -> None:
    failed = failure(1, "reset", sent=600, done=700, session=0, turn=2, scheduled_ns=500 * MS)
    assert found([*session((10, 4)), failed], "HISTORY_DROPPED") is None
