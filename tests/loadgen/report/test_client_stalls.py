"""A client that stood still: what it touched is told, and what it made larger is marked."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec

from loadgen.client.engine import STALL_NS, Health
from loadgen.document.content import Table as PageTable
from loadgen.report import build
from loadgen.report.pages import run
from loadgen.report.schema import Report
from loadgen.rundir.records import Record, table
from tests.loadgen.report.pages.contents import every_block
from tests.loadgen.tables import facts, manifest, request, write_run

RATE_MS = 10.0


def records(late: dict[int, float]) -> list[Record]:
    """A request each 10 ms, whose first token takes 30 ms, or later by so many."""
    made = []
    for each in range(1000):
        due = RATE_MS * each
        made.append(request(each, scheduled=due, sent=due + 1, first=due + 31 + late.get(each, 0.0)))
    return made


def reported(late: dict[int, float], **changes: Any) -> Report:
    return build.build(manifest(requests_planned=1000), table(records(late)), [facts(**changes)])


def codes(report: Report) -> dict[str, str]:
    return {finding.code: finding.message for finding in report.verdict.findings}


def test_a_stall_that_makes_the_largest_latencies() -> None:
    """From 5.00 to 5.90 s: those whose first token came meanwhile have it at the end."""
    frozen = {each: 5900 - (RATE_MS * each + 31) for each in range(497, 500)}
    report = reported(frozen, stalls=((5.0, 5.9),))
    assert report.late_statistics["ttft_ms"] == ["p99_9", "max"]
    (stall,) = report.client_stalls
    assert (stall.start_s, stall.end_s) == (5.0, 5.9) and stall.requests >= 90
    message = codes(report)["CLIENT_STALL"]
    assert "900 ms at 5.0 s" in message and "p99.9" in message
    assert report.verdict.valid


def test_the_request_that_was_due_as_it_began_is_touched() -> None:
    """The stall is seen to begin when the client would have looked next, which is up to 10 ms later."""
    rows = records({})
    rows[500] = request(500, scheduled=5000, sent=5900, first=5930)
    report = build.build(manifest(requests_planned=1000), table(rows), [facts(stalls=((5.009, 5.9),))])
    assert "max" in report.late_statistics["send_lag_ms"]


def test_streams_that_went_on_afterwards_are_touched() -> None:
    """Their gaps are larger, and neither their first token nor their end fell into it."""
    rows = [request(each, scheduled=10 * each, sent=10 * each, first=10 * each + 30, gaps=(20,) * 49,
                    output_tokens=50, asked_tokens=50) for each in range(1000)]  # fmt: skip
    late = [request(each, scheduled=10 * each, sent=10 * each, first=10 * each + 30, gaps=(20,) * 20 + (320,) +
                    (20,) * 13 + (2,) * 15, output_tokens=50, asked_tokens=50) for each in range(460, 480)]  # fmt: skip
    rows[460:480] = late
    report = build.build(manifest(requests_planned=1000), table(rows), [facts(stalls=((5.03, 5.35),))])
    assert report.late_statistics["itl_ms"] == ["max"]
    assert report.client_stalls[0].requests >= 60


def test_a_stall_that_nobody_sees_is_not_told() -> None:
    report = reported({}, stalls=((500.0, 500.9),))
    assert "CLIENT_STALL" not in codes(report) and not report.client_stalls
    assert b"client_stalls" not in msgspec.json.encode(report)


def test_the_servers_own_latencies_are_not_the_clients() -> None:
    slow = dict.fromkeys(range(100, 103), 900.0)
    report = reported(slow, stalls=((5.0, 5.06),))
    assert "ttft_ms" not in report.late_statistics


def test_the_page_marks_them(tmp_path: Path) -> None:
    frozen = {each: 5900 - (RATE_MS * each + 31) for each in range(497, 500)}
    rows = records(frozen)
    path = write_run(tmp_path / "run", rows, manifest(requests_planned=1000), facts(stalls=((5.0, 5.9),)))
    built, measured = build.from_directory(path)
    page = run.page(build.shown_run(path, built, measured))
    latency = next(each for each in every_block(page) if isinstance(each, PageTable) and each.caption == "Latency")
    assert latency.headers[-1] == "made by the client's stalls"
    assert {str(row[0]): str(row[-1]) for row in latency.rows}["ttft"] == "p99.9, max"


def test_steal_of_the_host() -> None:
    assert "STEAL" in codes(reported({}, steal_ratio=0.02))
    assert "STEAL" not in codes(reported({}, steal_ratio=0.001))
    assert "STEAL" not in codes(reported({}, steal_ratio=None))


def test_the_clients_loop_keeps_when_it_stood_still() -> None:
    async def stand_still() -> list[tuple[int, int]]:
        health = Health()
        health.start(asyncio.get_running_loop())
        await asyncio.sleep(0.05)
        time.sleep(4 * STALL_NS / 1e9)
        await asyncio.sleep(0.05)
        health.alarm.close()
        return health.stalls

    stalls = asyncio.run(stand_still())
    assert any(end - begin >= 3 * STALL_NS for begin, end in stalls)
