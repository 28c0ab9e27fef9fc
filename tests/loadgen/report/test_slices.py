"""A run by phase of its load and by prompt length: numbers by hand, and what is left out where it says nothing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.document import markdown
from loadgen.monitor.server_view import ServerStats, ServerView
from loadgen.report import build, slices
from loadgen.report import text as texts
from loadgen.report.metrics import CONVENTIONS, Summary
from loadgen.report.pages import charts
from loadgen.report.schema import LengthStats, Report, ServerRequests
from loadgen.rundir import Phase
from loadgen.rundir.records import Record, table
from loadgen.steady import flows
from tests.loadgen.tables import facts, failure, manifest, request, write_run

OURS = CONVENTIONS["loadgen"]
NEW = {"asked_prompt_tokens", "asked_output_tokens", "ttft_by_prompt", "phases", "stalls"}


def due(at_ms: float, ttft_ms: float = 50, id: int = 0, **changes: Any) -> Record:
    return request(id, scheduled=at_ms, sent=at_ms, first=at_ms + ttft_ms, **changes)


def test_a_request_belongs_to_the_phase_in_which_it_was_due() -> None:
    rows = [due(0, 100, 0), due(999, 300, 1), due(1000, 500, 2), due(2500, 700, 3), failure(4, scheduled_ns=10**9)]
    slow, fast = slices.by_phase(table(rows), [Phase("slow", 0.0, 1.0), Phase("fast", 1.0, 3.0)], OURS)
    assert (slow.name, slow.requests, fast.name, fast.requests) == ("slow", 2, "fast", 3)
    assert (slow.offered_requests_per_s, fast.offered_requests_per_s) == (2.0, 1.5)
    # Replies end 60 ms after their first token: at 0.16, 1.359, 1.56 and 3.26 s, the last after both phases.
    assert (slow.finished_requests_per_s, fast.finished_requests_per_s) == (1.0, 1.0)
    assert (slow.metrics["ttft_ms"].p50, fast.metrics["ttft_ms"].p50) == (200.0, 600.0)
    assert list(fast.metrics) == ["ttft_ms", "tpot_ms", "e2el_ms"] and fast.metrics["tpot_ms"].p99 == 20.0


def test_phases_in_texts_and_in_json_and_nothing_without_them(tmp_path: Path) -> None:
    rows = [due(10 * at, id=at) for at in range(400)]
    run = write_run(tmp_path / "run", rows, manifest(), facts())
    without = build.build(manifest(), table(rows), [facts()])
    hostile = Phase("to 8/s | \x1b[31m<b>", 2.0, 4.0)
    built = build.build(manifest(phases=(Phase("4/s", 0.0, 2.0), hostile)), table(rows), [facts()])
    assert not NEW & msgspec.to_builtins(without).keys() and msgspec.to_builtins(built)["phases"][1]["requests"] == 200
    assert msgspec.json.decode(msgspec.json.encode(built), type=Report) == built
    terminal, page = texts.render(built), markdown.render(texts.summary(built))
    assert "phase" not in texts.render(without) + markdown.render(texts.summary(without))
    assert "By phase" in terminal and "| phase, latency ms | from s | to s |" in page and "\x1b" not in terminal + page
    head, row = (
        next(line for line in page.splitlines() if line.startswith(start)) for start in ("| phase", "| to 8/s")
    )
    assert "<b>" not in row and row.replace("\\|", "").count("|") == head.count("|")
    build.write(run, built, table(rows), figures=True)
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_an_empty_phase_has_rates_and_no_latency() -> None:
    (empty,) = slices.by_phase(table([]), [Phase("none", 0.0, 2.0), Phase("no length", 2.0, 2.0)], OURS)
    assert empty.offered_requests_per_s == 0 and empty.metrics["ttft_ms"].n == 0
    built = build.build(manifest(phases=(Phase("none", 0.0, 2.0), Phase("after", 2.0, None))), table([]), [])
    assert "none" in texts.render(built) and "after" not in texts.render(built)  # it never began


def test_the_last_phase_lasts_to_the_last_reply() -> None:
    rows = [due(0, 100, 0), due(1000, 500, 1), due(2500, 700, 2)]
    first, last = slices.by_phase(table(rows), [Phase("ramp", 0.0, 1.0), Phase("after", 1.0, None)], OURS)
    assert (first.requests, last.requests) == (1, 2)
    assert (last.start_s, last.end_s) == (1.0, 3.26)  # 700 ms and three gaps of 20 ms after 2.5 s
    assert last.offered_requests_per_s == last.finished_requests_per_s == pytest.approx(2 / 2.26)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.lists(st.floats(0, 100), max_size=4))
def test_phases_that_meet_share_out_the_requests(due_s: list[float], cuts: list[float]) -> None:
    rows = table(due(1000 * at_s, id=number) for number, at_s in enumerate(due_s))
    edges = sorted({0.0, *cuts, 101.0})
    phases = [Phase(str(start), start, end) for start, end in pairwise(edges)]
    assert sum(phase.requests for phase in slices.by_phase(rows, phases, OURS)) == len(due_s)


def test_asked_lengths() -> None:
    assert slices.lengths(np.full(9, 512)) is None and slices.lengths(np.zeros(9, np.int64)) is None
    assert slices.lengths(np.array([], np.int64)) is None
    drawn = slices.lengths(np.arange(1, 102))
    assert drawn == LengthStats(mean=51.0, p10=11.0, p50=51.0, p90=91.0, p99=100.0, max=101)
    built = build.build(manifest(), table(lengths_of(range(1, 102))), [facts()])
    line = "Asked prompt tokens: mean 51.00, p10 11.00, p50 51.00, p90 91.00, p99 100.0, max 101."
    assert (
        line in texts.render(built)
        and line in markdown.render(texts.summary(built))
        and built.asked_output_tokens is None
    )


def lengths_of(prompts: Any, *, asked: bool = True) -> list[Record]:
    """Requests whose ttft is their prompt's length in ms."""
    return [
        due(10 * at, length, at, prompt_tokens=length, asked_prompt_tokens=length if asked else 0)
        for at, length in enumerate(prompts)
    ]


@pytest.mark.parametrize("asked", [True, False])
def test_ttft_by_quartile_of_prompt_length(asked: bool, tmp_path: Path) -> None:
    rows = lengths_of(range(100, 500), asked=asked)
    quarters = slices.ttft_by_prompt(table(rows), OURS)
    assert [(each.from_tokens, each.to_tokens) for each in quarters] == [(100, 199), (200, 299), (300, 399), (400, 499)]
    assert [each.ttft_ms.n for each in quarters] == [100] * 4
    assert [each.ttft_ms.p50 for each in quarters] == [149.5, 249.5, 349.5, 449.5]
    run = write_run(tmp_path / "run", rows, manifest(), facts())
    built, kept = build.from_directory(run)
    build.write(run, built, kept, figures=True)
    assert (run / "ttft_by_prompt.png").read_bytes().startswith(b"\x89PNG")
    assert "| 200 to 299 | 100 | 249.5 |" in (run / "report.md").read_text()
    assert "![Prompt length](ttft_by_prompt.png)" in (run / "report.md").read_text()


@pytest.mark.parametrize(
    ("prompts", "groups"),
    [
        ([512] * 40, 0),  # one length
        ([512, 513, 514] * 9, 0),  # as of a template: under ten lengths, under a tenth apart
        (range(1000, 1009), 0),
        (range(1000, 1010), 4),  # ten of them
        ([100, 110] * 9, 0),
        ([100, 111] * 9, 2),  # over a tenth apart, and no more groups than lengths
        ([100] * 97 + [9000] * 3, 2),
    ],
)
def test_prompts_that_differ(prompts: Any, groups: int) -> None:
    quarters = slices.ttft_by_prompt(table(lengths_of(prompts)), OURS)
    assert len(quarters) == groups and sum(each.ttft_ms.n for each in quarters) == (len(prompts) if groups else 0)


def test_what_the_server_adds_to_a_prompt_is_no_length_that_was_drawn() -> None:
    rows = [due(10 * at, id=at, prompt_tokens=500 + 10 * at) for at in range(40)]  # asked 10, as tables.request does
    assert slices.ttft_by_prompt(table(rows), OURS) == []


def test_a_prompt_length_without_a_ttft_is_left_out() -> None:
    rows = lengths_of(range(100, 140))
    rows[0] = failure(0, asked_prompt_tokens=9000)
    rows[1] = msgspec.structs.replace(rows[1], first_token_ns=None, last_token_ns=None, itl_us=[], events=0)
    found = slices.prompts(table(rows), OURS)
    assert found is not None and found.tokens.tolist() == list(range(102, 140)) == found.ttft_ms.tolist()


def seen(**mean_ms: float) -> dict[str, Summary]:
    return {f"{name}_ms": Summary(n=100, mean=mean_ms.get(name)) for name in ("ttft", "tpot", "itl", "e2el")}


def test_stamps_of_replies_go_before_those_of_histograms() -> None:
    told = ServerRequests(
        requests=90, metrics={"e2el_ms": Summary(n=90, mean=100.0)}, client={"e2el_ms": Summary(n=90, mean=103.0)}
    )
    server = ServerStats(e2el_mean_ms=99.0, ttft_mean_ms=10.0, parts_ms={"queue": 2.0}, ended=100)
    listed = {each.name: each for each in slices.stamps(told, server, seen(ttft=12.0, e2el=102.0))}
    assert (listed["e2el"].server_ms, listed["e2el"].between_ms, listed["e2el"].n) == (100.0, 3.0, 90)
    assert (listed["ttft"].server_ms, listed["ttft"].client_ms, listed["ttft"].n) == (10.0, 12.0, 100)
    assert listed["queue"].client_ms is None and listed["queue"].between_ms is None
    assert slices.stamps(None, None, seen()) == []


def test_histograms_in_another_unit_are_left_out() -> None:
    """One is enough to tell: a part of a request has nothing of the client's beside it."""
    server = ServerStats(e2el_mean_ms=100_000.0, parts_ms={"time_per_token": 4000.0}, ended=100)
    assert slices.stamps(None, server, seen(e2el=102.0)) == []


@pytest.mark.parametrize(
    ("own_ms", "counted", "codes"),
    [
        (100.0, 100, {"STAMPS_PART"}),  # 40 of 140 ms lie between
        (139.0, 100, set()),
        (100.0, 150, set()),  # of others too
        (140_000.0, 100, set()),  # in another unit: left out
    ],
)
def test_where_the_clocks_part(own_ms: float, counted: int, codes: set[str]) -> None:
    stamps = slices.stamps(None, ServerStats(e2el_mean_ms=own_ms, ended=counted), seen(e2el=140.0))
    built = build.build(manifest(), table([request(number) for number in range(100)]), [facts()])
    numbers = msgspec.structs.replace(built, stamps=stamps)
    assert {finding.code for finding in slices.apart(numbers)} == codes


@pytest.mark.parametrize(("own_ms", "codes"), [(80.0, {"STAMPS_PART"}), (110.0, set())])
def test_histograms_hold_the_replies_of_a_warm_up_that_handed_over(own_ms: float, codes: set[str]) -> None:
    """A measured reply takes 100 ms, and one of the warm-up that ends beside each of them 130."""
    rows = [request(at, sent=-50, first=-30, gaps=(110,), phase="warmup") for at in range(50)]
    rows += [request(at, scheduled=at, sent=at, first=at + 20, gaps=(80,)) for at in range(100)]
    run, server = manifest(arrival="concurrency:50", hands_over=True), ServerStats(e2el_mean_ms=own_ms, ended=150)
    built = build.build(run, table(rows), [facts()], seen=ServerView(server=server))
    (stamp,) = built.stamps
    assert stamp.client_ms == pytest.approx((50 * 130 + 100 * 100) / 150) and stamp.client_n == stamp.n == 150
    assert {finding.code for finding in slices.apart(built)} == codes
    others = msgspec.structs.replace(server, ended=180)
    assert not [*slices.apart(build.build(run, table(rows), [facts()], seen=ServerView(server=others)))]


def test_throughput_of_full_slots_counts_what_came_while_all_were_busy() -> None:
    """One slot, a token each 20 ms: a warm-up reply of 10 tokens until 100 ms, then measured ones of 5 tokens sent at
    100, 200, 300 and 400 ms. From 100 to 400 ms three replies ended, and a token came each 20 ms."""
    rows = [request(0, sent=-100, first=-80, gaps=(20,) * 9, phase="warmup")]
    rows += [
        request(at, scheduled=100 * (1 + at), sent=100 * (1 + at), first=120 + 100 * at, gaps=(20,) * 4)
        for at in range(4)
    ]
    run = manifest(arrival="concurrency:1", hands_over=True)
    built = build.build(run, table(rows), [facts()])
    assert built.full_slots_s == pytest.approx(0.3)
    assert built.throughput.requests_per_s == pytest.approx(3 / 0.3)
    assert built.throughput.output_tokens_per_s == pytest.approx(50, rel=0.05)
    assert "in the 0.300 s of full slots" in texts.render(built)
    drained = build.build(msgspec.structs.replace(run, hands_over=False), table(rows), [facts()])
    assert drained.full_slots_s is None and drained.throughput.requests_per_s == pytest.approx(4 / 0.4)
    assert built.requests.ok == drained.requests.ok == 4 and built.metrics == drained.metrics


def test_requests_of_a_warm_up_that_handed_over_are_in_flight_beside_the_measured() -> None:
    """Two slots: a warm-up reply ends 60 ms after the first measured request was sent."""
    rows = table(
        [
            request(0, sent=0, first=20, gaps=(20,) * 7, phase="warmup"),
            request(0, scheduled=100, sent=100, first=120, gaps=(20,) * 4),
            request(1, scheduled=180, sent=180, first=200, gaps=(20,) * 4),
        ]
    )
    run = manifest(arrival="concurrency:2", hands_over=True)
    built = build.build(run, rows, [facts()])
    shown = charts.Shown("run", built, run, rows.measured(), under_way=flows.kept(rows, run))
    (_, flying, *_), _ = charts.over_time([shown])
    (line,) = flying.series
    assert [*zip(line.x, line.y, strict=True)] == [(0.0, 1), (0.1, 2), (0.16, 1), (0.18, 2), (0.2, 1), (0.28, 0)]
