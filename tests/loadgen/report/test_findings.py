"""Every finding: a run that has it, by how much, and a run that does not. The clean run has none at all."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.protocol import ServerRecord
from loadgen import rundir
from loadgen.monitor.server_view import GpuPeak, GpuStats, ReplicaStats, ServerStats, ServerView
from loadgen.report import build, findings, text
from loadgen.report.metrics import CONVENTIONS
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.records import ClientFacts, RequestTable, table
from loadgen.steady import flows
from tests.loadgen.tables import facts, failure, manifest, request

CLEAN = 4000  # enough for p99.9


@cache
def clean() -> RequestTable:
    """4000 ok requests, one every 10 ms, ttft 100 ms, tpot 20 ms, sent 0.1 ms late."""
    return table(
        request(at, scheduled=10 * at, sent=10 * at + 0.1, first=10 * at + 100.1, gaps=(20, 20, 20))
        for at in range(CLEAN)
    )


def small(n: int) -> RequestTable:
    return clean().rows(0, n)


def with_outcome(outcome: str, n: int, base: RequestTable | None = None) -> RequestTable:
    """The clean run with its last n requests ended otherwise."""
    base = base or clean()
    outcomes = base.outcome.copy()
    outcomes[len(outcomes) - n :] = OUTCOMES.index(outcome)
    return replace(base, outcome=outcomes)


def ceiling(**changes: Any) -> rundir.Ceiling:
    values: dict[str, Any] = {
        "events_per_s_per_core": 100_000.0,
        "cpu_us_per_event": 6.0,
        "requests": 1000,
        "output_tokens": 128,
    }
    return rundir.Ceiling(**{**values, **changes})


def severities(
    records: RequestTable | None = None,
    clients: list[ClientFacts] | None = None,
    run: rundir.Manifest | None = None,
    server: ServerStats | None = None,
) -> dict[str, str]:
    """code -> severity, worst first, as the report has them."""
    records = clean() if records is None else records
    seen = ServerView(server=server)
    built = build.build(run or manifest(), records, [facts()] if clients is None else clients, seen=seen)
    listed = built.verdict.findings
    codes = [finding.code for finding in listed]
    assert len(set(codes)) == len(codes), "one finding a code"
    assert built.verdict.valid == all(finding.severity != "invalid" for finding in listed)
    severity = [finding.severity for finding in listed]
    assert severity == sorted(severity, key=["invalid", "warning", "info"].index)
    for finding in listed:
        assert finding.message.endswith(".") and finding.advice.endswith(".")
    return dict(zip(codes, severity, strict=True))


def test_a_clean_run_has_no_findings() -> None:
    assert severities() == {}
    assert severities(run=manifest(requests_planned=CLEAN, ceiling=ceiling(event_error_p99_ms=1.0))) == {}


@pytest.mark.parametrize(
    ("percentile", "thousandths", "least"),
    [("p90", 900, 36), ("p95", 950, 72), ("p99", 990, 368), ("p99_9", 999, 3688)],
)
def test_samples_that_a_percentile_needs(percentile: str, thousandths: int, least: int) -> None:
    assert findings.min_samples(thousandths) == least
    share = thousandths / 1000
    assert share**least <= 0.025 < share ** (least - 1)


def test_few_samples() -> None:
    assert severities(small(3688)) == {}
    assert severities(small(3687)) == {"FEW_SAMPLES": "info"}
    assert severities(small(368)) == {"FEW_SAMPLES": "info"}
    assert severities(small(367)) == {"FEW_SAMPLES": "warning"}
    listed = build.build(manifest(), small(40), [facts()]).verdict.findings
    assert "too few for p95, p99, p99.9" in listed[0].message
    assert "72 requests for p95, 368 requests for p99, 3688 requests for p99.9" in listed[0].advice


def lagging(lag_ms: float, share: float = 0.05) -> RequestTable:
    """The clean run with a share of its requests sent late, everything after them as late."""
    late = np.zeros(CLEAN, np.int64)
    late[: int(share * CLEAN)] = round(lag_ms * 1e6)
    moved = {name: getattr(clean(), name) + late for name in ("sent_ns", "first_token_ns", "last_token_ns", "done_ns")}
    return replace(clean(), **moved)


def test_send_lag_is_measured_against_ttft_or_the_time_between_arrivals() -> None:
    assert severities(lagging(9.0)) == {}  # ttft p50 is 100 ms, arrivals are 10 ms apart
    assert severities(lagging(11.0)) == {"SEND_LAG": "warning"}
    assert severities(lagging(49.0)) == {"SEND_LAG": "warning"}
    assert severities(lagging(51.0)) == {"SEND_LAG": "invalid"}
    assert severities(lagging(51.0, share=0.005)) == {}  # p99 does not see it
    sparse = replace(lagging(51.0), scheduled_ns=clean().scheduled_ns * 100)  # arrivals a second apart
    moved = {
        name: getattr(lagging(51.0), name) + clean().scheduled_ns * 99
        for name in ("sent_ns", "first_token_ns", "last_token_ns", "done_ns")
    }
    assert severities(replace(sparse, **moved)) == {}


def test_send_lag_below_the_grain_of_timers_is_nothing() -> None:
    fast = replace(lagging(1.8), first_token_ns=lagging(1.8).sent_ns + 1_000_000)
    packed = replace(fast, scheduled_ns=clean().scheduled_ns // 100)
    moved = {
        name: getattr(fast, name) - clean().scheduled_ns + clean().scheduled_ns // 100
        for name in ("sent_ns", "first_token_ns", "last_token_ns", "done_ns")
    }
    assert "SEND_LAG" not in severities(replace(packed, **moved))


@pytest.mark.parametrize(
    ("machine", "told", "advice"),
    [
        ({}, "", "Use --workers 2, or"),
        (
            {"busy_cores": 1.1, "cores": 4},
            "used 0.5 of this machine's 4 cores, other programs 0.6.",
            "Use --workers 2, or",
        ),
        ({"busy_cores": 1.9, "cores": 2}, "2 cores, other programs 1.4.", "another machine, or one with more cores"),
        (
            {"busy_cores": 1.9, "cores": 2, "steal_ratio": 0.03},
            "other programs 1.4, and the host took 3.0%.",
            "whose host gives its CPU to nobody else",
        ),
    ],
)
def test_the_advice_to_a_late_client_fits_its_machine(machine: dict[str, Any], told: str, advice: str) -> None:
    late = facts(loop_lag_p99_ms=11.0, loop_lag_max_ms=60.0, wall_s=10.0, cpu_s=5.0, **machine)
    found = {each.code: each for each in build.build(manifest(), clean(), [late]).verdict.findings}
    assert told in found["LOOP_LAG"].message and advice in found["LOOP_LAG"].advice


def test_a_run_too_hot_for_its_clients_says_how_many_it_would_have_taken() -> None:
    """The clean run has 400 events in its busiest second."""
    hot = build.build(manifest(ceiling=ceiling(events_per_s_per_core=150.0)), clean(), [facts()])
    assert {each.code: each.advice for each in hot.verdict.findings}["HEADROOM"].startswith("Use --workers 6, or")


@pytest.mark.parametrize(("code", "field"), [("LOOP_LAG", "loop_lag_p99_ms"), ("RECEIVE_LAG", "receive_lag_p99_ms")])
def test_lags_are_measured_against_ttft_and_tpot(code: str, field: str) -> None:
    def late(lag_ms: float) -> ClientFacts:
        return facts(**{"loop_lag_max_ms": 60.0, field: lag_ms})

    assert severities(clients=[late(2.0)]) == {}
    assert severities(clients=[late(9.0)]) == {}
    assert severities(clients=[late(11.0)]) == {code: "warning"}  # tenth of ttft 100, half of tpot 20
    assert severities(clients=[late(21.0)]) == {code: "invalid"}  # more than a tpot
    uncounted = replace(clean(), output_tokens=np.full(CLEAN, -1))  # tpot unknown
    assert severities(uncounted, [late(21.0)])[code] == "warning"
    assert severities(uncounted, [late(51.0)])[code] == "invalid"
    assert severities(clients=[facts(), late(11.0)]) == {code: "warning"}  # the worst process counts


def test_client_cpu() -> None:
    assert severities(clients=[facts(cpu_peak_ratio=0.89)]) == {}
    assert severities(clients=[facts(cpu_peak_ratio=0.9)]) == {"CLIENT_CPU": "warning"}
    assert severities(clients=[facts(cpu_peak_ratio=1.0, cpu_s=9.0, wall_s=10.0)]) == {"CLIENT_CPU": "invalid"}


def test_merged_reads() -> None:
    def merged(share: float) -> RequestTable:
        gaps = clean().itl_us.copy()
        gaps[: int(share * len(gaps))] = 0
        return replace(clean(), itl_us=gaps)

    assert severities(merged(0.005)) == {}
    assert severities(merged(0.006)) == {"MERGED_READS": "info"}
    assert severities(merged(0.06)) == {"MERGED_READS": "warning"}


def test_grouped_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.rundir.records.ROWS_A_BLOCK", 7)

    def grouped(share: float, gap_us: int) -> RequestTable:
        gaps = clean().itl_us.copy()
        gaps[: int(share * len(gaps))] = gap_us
        return replace(clean(), itl_us=gaps)

    assert severities(grouped(0.1, 37)) == {}
    assert severities(grouped(0.11, 37)) == {"GROUPED_EVENTS": "warning"}
    assert severities(grouped(0.5, 1499)) == {"GROUPED_EVENTS": "warning"}
    assert severities(grouped(0.5, 1600)) == {}
    assert severities(grouped(0.5, 0)) == {"MERGED_READS": "warning"}  # and not both
    nothing_came = replace(grouped(0.95, 37), events=np.zeros_like(clean().events))  # gaps of events that are denied
    assert severities(nothing_came)["GROUPED_EVENTS"] == "warning"
    quick = replace(clean(), itl_us=np.full_like(clean().itl_us, 300))
    assert severities(quick) == {}  # a token may take that long


def test_merged_events() -> None:
    assert severities(replace(clean(), events=clean().events - (clean().id < 150))) == {}  # 1 in 107
    two_in_one = severities(replace(clean(), events=clean().events - 2))
    assert two_in_one == {"MERGED_EVENTS": "info"}
    not_streamed = replace(
        clean(),
        events=np.zeros(CLEAN, np.int64),
        first_token_ns=np.full(CLEAN, -1),
        last_token_ns=np.full(CLEAN, -1),
        itl_us=np.empty(0, np.uint32),
        itl_offsets=np.zeros(CLEAN + 1, np.int64),
    )
    assert severities(not_streamed) == {}


def hidden(tokens: int) -> RequestTable:
    """The clean run, whose server counts so many more tokens than there are events."""
    return table(
        request(at, scheduled=10 * at, sent=10 * at + 0.1, first=10 * at + 100.1, output_tokens=4 + tokens,
                asked_tokens=4 + tokens)
        for at in range(CLEAN)
    )  # fmt: skip


def test_hidden_tokens() -> None:
    assert severities(hidden(12)) == {"HIDDEN_TOKENS": "warning", "MERGED_EVENTS": "info"}
    report = build.build(manifest(), hidden(12), [facts()], slos={"tpot": 50})
    assert report.metrics["tpot_ms"].n == 0 and report.metrics["itl_ms"].p50 == 20
    assert report.goodput is not None and report.goodput.request_goodput is None
    assert "GOODPUT" in {finding.code for finding in report.verdict.findings}
    assert build.build(manifest(), hidden(12), [facts()], slos={"e2el": 500}).goodput.good == CLEAN  # type: ignore[union-attr]


def test_extra_events() -> None:
    assert severities(hidden(-1)) == {"EXTRA_EVENTS": "invalid"}


def wire(ttft_ms: float, waits: bool, events_per_read: float = 1) -> rundir.Manifest:
    seen = rundir.WireFacts(
        ttft_ms=ttft_ms, ttft_quick_ms=10, n=5, waits=waits, events_per_read=events_per_read, events_per_read_quick=1
    )
    return manifest(wire=seen)


def test_delayed_acks() -> None:
    assert severities(run=wire(10, waits=False)) == {}
    assert severities(run=wire(19, waits=True)) == {"DELAYED_ACK": "warning"}  # ttft p50 is 100 ms
    assert severities(run=wire(42, waits=True)) == {"DELAYED_ACK": "invalid"}
    quick = msgspec.structs.replace(wire(42, waits=True), config={"requests": 10_000, "seed": 0, "quick_acks": True})
    assert severities(run=quick) == {"DELAYED_ACK": "info"}


def waited(pause: float, replies: int) -> RequestTable:
    """So many replies whose first tokens came so long after the headers, and in one read."""
    held = {"first": pause + 50.0, "headers_ns": 50 * 1_000_000, "gaps": (0, 0, 0, *[4] * 8)}
    return table(
        request(at, **(held if at < replies else {"first": 51.0, "headers_ns": 50 * 1_000_000, "gaps": [4] * 11}))
        for at in range(1000)
    )


def test_delayed_acks_show_where_nothing_was_measured() -> None:
    assert severities(waited(41, 400))["DELAYED_ACK"] == "invalid"
    assert "DELAYED_ACK" not in severities(waited(41, 200))
    assert "DELAYED_ACK" not in severities(waited(30, 1000))  # so late by itself, and a client that read late
    assert "DELAYED_ACK" not in severities(waited(41, 400), [facts(loop_lag_p99_ms=25.0)])


def test_one_cause_is_named_for_beginnings_that_were_held_back() -> None:
    codes = {"DELAYED_ACK", "BUFFERED"}
    assert severities(waited(41, 1000)).keys() & codes == {"DELAYED_ACK"}
    assert severities(waited(41, 1000), run=wire(42, waits=False, events_per_read=2)).keys() & codes == {"DELAYED_ACK"}
    assert severities(waited(41, 1000), run=wire(42, waits=False)).keys() & codes == {"BUFFERED"}  # quick ACKs end none


def test_a_client_that_was_late_by_more_than_a_token_is_no_proxy() -> None:
    """Replies in three reads of four events each, among such as show their tokens' pace of 2 ms."""
    merged = table(request(at, gaps=[0, 0, 0, 8] * 3 if at < 50 else [2] * 12) for at in range(1000))
    told = severities(merged, [facts(loop_lag_p99_ms=1.0)])
    assert told["BUFFERED"] == "warning" and told["MERGED_READS"] == "info"
    told = severities(merged, [facts(loop_lag_p99_ms=4.0)])
    assert "BUFFERED" not in told and told["MERGED_READS"] == "warning"
    pieces = [0] * 9 + [60] + [0] * 9 + [60] + [0] * 9  # one replica of twenty is behind a proxy: 4 ms explain no 60
    lumps = table(request(at, gaps=pieces if at < 50 else [2] * 29) for at in range(1000))
    assert severities(lumps, [facts(loop_lag_p99_ms=4.0)])["BUFFERED"] == "warning"
    whole = table(request(at, gaps=[0] * 12) for at in range(1000))
    assert severities(whole, [facts(loop_lag_p99_ms=4.0)])["BUFFERED"] == "invalid"  # of all of them it is a delivery


def test_failed_requests() -> None:
    assert severities(with_outcome("http_error", 1))["FAILED_REQUESTS"] == "warning"
    assert severities(with_outcome("timeout", 40))["FAILED_REQUESTS"] == "warning"  # 1 %
    assert severities(with_outcome("reset", 41))["FAILED_REQUESTS"] == "invalid"
    assert "FAILED_REQUESTS" not in severities(with_outcome("cancelled", 41))


def test_no_success() -> None:
    assert severities(with_outcome("refused", CLEAN)) == {"NO_SUCCESS": "invalid", "FAILED_REQUESTS": "invalid"}
    assert severities(small(0)) == {"NO_SUCCESS": "invalid"}


def test_dropped() -> None:
    assert severities(with_outcome("dropped", 1))["DROPPED"] == "warning"
    assert severities(with_outcome("dropped", 41))["DROPPED"] == "invalid"


def test_survivors() -> None:
    assert "SURVIVORS" not in severities(with_outcome("reset", 20))  # all latencies are alike: p99 does not move
    assert severities(with_outcome("reset", 41))["SURVIVORS"] == "invalid"
    assert severities(with_outcome("cancelled", 41))["SURVIVORS"] == "invalid"  # the slowest are those still in flight
    slow = clean().done_ns.copy()
    slow[:100] += 10**9 * np.arange(1, 101)  # a long tail: where p99 lies matters
    assert severities(with_outcome("reset", 20, replace(clean(), done_ns=slow)))["SURVIVORS"] == "warning"
    messages = [
        finding.message
        for finding in build.build(manifest(), with_outcome("reset", 41), [facts()]).verdict.findings
        if finding.code == "SURVIVORS"
    ]
    assert messages == [
        "41 of 4000 requests have no latency; "
        "p99 of e2el is 160 ms without them and endless when they count as slowest."
    ]


def test_prompt_length() -> None:
    def prompts(given: int | np.ndarray[Any, Any]) -> RequestTable:
        return replace(clean(), prompt_tokens=np.full(CLEAN, 100) + given, asked_prompt_tokens=np.full(CLEAN, 100))

    assert severities(prompts(0)) == {}
    assert severities(prompts(1)) == {"PROMPT_LENGTH": "info"}  # BOS
    assert severities(prompts(2)) == {"PROMPT_LENGTH": "warning"}
    assert severities(prompts(50)) == {"PROMPT_LENGTH": "warning"}  # longer is harder, not easier
    assert severities(prompts(-10)) == {"PROMPT_LENGTH": "warning"}
    assert severities(prompts(-11)) == {"PROMPT_LENGTH": "invalid"}
    opposite = np.where(np.arange(CLEAN) % 2 == 0, 20, -20)
    assert severities(prompts(opposite)) == {"PROMPT_LENGTH": "warning"}  # errors do not cancel
    assert severities(replace(clean(), prompt_tokens=np.full(CLEAN, -1))) == {"NO_PROMPT_COUNT": "warning"}
    assert severities(replace(clean(), asked_prompt_tokens=np.zeros(CLEAN, np.int64))) == {}  # nothing was asked


def test_output_length() -> None:
    short = clean().output_tokens.copy()
    short[:100] = 3
    assert severities(replace(clean(), output_tokens=short, events=short)) == {"OUTPUT_LENGTH": "info"}
    short[:] = 3
    assert severities(replace(clean(), output_tokens=short, events=short)) == {"OUTPUT_LENGTH": "invalid"}


@pytest.mark.parametrize(("backend", "advice"), [("tgi", "whole pieces of 1024"), ("vllm", "its context is long")])
def test_a_long_reply_of_another_length_is_told_by_the_server(backend: str, advice: str) -> None:
    records = clean()
    records = replace(records, asked_tokens=records.asked_tokens + 1500)
    found = build.build(msgspec.structs.replace(manifest(), backend=backend), records, [facts()]).verdict.findings
    assert [finding.code for finding in found] == ["OUTPUT_LENGTH"] and advice in found[0].advice


def test_no_token_count() -> None:
    counts = clean().output_tokens.copy()
    counts[0] = -1
    assert severities(replace(clean(), output_tokens=counts)) == {"NO_TOKEN_COUNT": "warning"}


def test_prompts_that_were_sent_again() -> None:
    def repeated(prompts: int | None, warmup: int) -> dict[str, str]:
        return severities(run=manifest(dataset_prompts=prompts, config={"dataset": "d.jsonl", "warmup": warmup}))

    assert repeated(None, 8) == repeated(CLEAN, 0) == repeated(CLEAN + 8, 8) == {}
    assert repeated(CLEAN, 1) == repeated(3, 0) == {"REPEATED_PROMPTS": "warning"}


def test_cached_tokens() -> None:
    def cached(share: float) -> RequestTable:
        return replace(clean(), prompt_tokens=np.full(CLEAN, 1000), asked_prompt_tokens=np.full(CLEAN, 1000),
                       cached_tokens=np.full(CLEAN, int(1000 * share)))  # fmt: skip

    own_prompts = manifest(config={"dataset": "prompts.jsonl"})
    assert severities(cached(0)) == {}
    assert severities(cached(0.01)) == {}
    assert severities(cached(0.02)) == {"CACHED_TOKENS": "warning"}
    assert severities(cached(0.11)) == {"CACHED_TOKENS": "invalid"}
    assert severities(cached(0.11), run=own_prompts) == {"CACHED_TOKENS": "warning"}
    assert severities(cached(0.11), run=manifest(config={"dataset": None})) == {"CACHED_TOKENS": "invalid"}


def test_interrupted() -> None:
    stopped = facts(state="interrupted")
    assert severities(clients=[facts(), stopped], run=manifest(requests_planned=5000)) == {"INTERRUPTED": "invalid"}


def test_a_run_that_was_ended_as_its_server_fell_behind() -> None:
    stopped, run = facts(state="interrupted"), manifest(requests_planned=5000, stopped_overloaded=True)
    assert severities(clients=[stopped], run=run) == {"STOPPED_OVERLOADED": "invalid"}


def test_killed() -> None:
    assert severities(clients=[]) == {"KILLED": "invalid"}
    assert severities(run=manifest(requests_planned=CLEAN + 1)) == {"KILLED": "invalid"}  # one of several workers
    assert severities(run=manifest(requests_planned=CLEAN)) == {}
    of_two = manifest(requests_planned=None, client_processes=2)
    assert severities(clients=[facts()], run=of_two) == {"KILLED": "invalid"}  # how many it was to send nobody knows
    half = facts(events=2 * CLEAN, wall_s=50.0)
    assert severities(clients=[half, half], run=of_two) == {}


def test_headroom() -> None:
    # 100 requests a second of 4 events each: 400 events in the busiest second
    def limited(events_per_s: float) -> rundir.Manifest:
        return manifest(ceiling=ceiling(events_per_s_per_core=events_per_s))

    assert severities(run=limited(801.0)) == {}
    assert severities(run=limited(799.0)) == {"HEADROOM": "warning"}
    assert severities(clients=[facts(), facts()], run=limited(401.0)) == {}  # two processes
    message = build.build(limited(600.0), clean(), [facts()]).verdict.findings[0].message
    assert (
        message
        == "The busiest second had 400 events; this client can take about 600 a second here (1.5 times as many)."
    )


def test_event_error() -> None:
    assert severities(run=manifest(ceiling=ceiling(event_error_p99_ms=9.0))) == {}
    assert severities(run=manifest(ceiling=ceiling(event_error_p99_ms=11.0))) == {"EVENT_ERROR": "warning"}
    assert severities(run=manifest(ceiling=ceiling(event_error_p99_ms=500.0))) == {"EVENT_ERROR": "warning"}


def test_a_finding_is_plain_data() -> None:
    finding = findings.Finding(code="X", severity="info", message="m.", advice="a.")
    assert msgspec.to_builtins(finding) == {"code": "X", "severity": "info", "message": "m.", "advice": "a."}


def own_view(**changes: Any) -> ServerStats:
    """The view of a server that had nothing to complain of in the clean run."""
    values = {"samples": 100, "covered": True, "preemptions": 0, "prefix_cache_hits": 0, "prefix_cache_queries": 40_000}
    return ServerStats(**{**values, **changes})


def test_a_server_that_saw_nothing_wrong() -> None:
    assert severities(server=own_view()) == {}
    assert severities(server=own_view(preemptions=None, prefix_cache_hits=None, prefix_cache_queries=None)) == {}


def test_a_prefix_cache_that_found_anything() -> None:
    dataset = manifest(config={"dataset": "prompts.jsonl"})
    uncounted = own_view(prefix_cache_hits=CLEAN + 1, prefix_cache_queries=None)
    assert severities(server=uncounted) == {"PREFIX_CACHE": "invalid"}
    assert severities(server=own_view(prefix_cache_hits=30_000), run=dataset) == {"PREFIX_CACHE": "warning"}
    seen = ServerView(server=own_view(prefix_cache_hits=10_000))
    built = build.build(manifest(), clean(), [facts()], seen=seen)
    assert "10000 prompt tokens found in its prefix cache (25.0 % of those" in built.verdict.findings[0].message
    assert built.verdict.valid is False


@pytest.mark.parametrize(
    ("hits", "severity", "words"),
    [
        (1, "info", "every prompt is meant to be new; fewer than a block move no number."),  # two drawn alike
        (15, "info", "fewer than a block"),
        (16, "warning", "one a prompt may be a token that all begin with."),  # a block, or sixteen such tokens
        (CLEAN, "warning", "one a prompt"),
        (CLEAN + 1, "invalid", "although every prompt is meant to be new."),
    ],
)
def test_single_tokens_are_no_warm_cache(hits: int, severity: str, words: str) -> None:
    seen = ServerView(server=own_view(prefix_cache_hits=hits))
    (found,) = build.build(manifest(), clean(), [facts()], seen=seen).verdict.findings
    assert (found.code, found.severity) == ("PREFIX_CACHE", severity) and words in found.message


def shared(tokens: int, cached: int | None = None) -> RequestTable:
    """The clean run with prompts of 1000 tokens: the second half of the requests shares so many of theirs, and took so
    many from the cache by its replies. Those of the first half tell nothing, as vLLM's do where that is 0."""
    half = np.arange(CLEAN) >= CLEAN // 2
    thousand = np.full(CLEAN, 1000)
    return replace(
        clean(), prompt_tokens=thousand, asked_prompt_tokens=thousand, shared_tokens=np.where(half, tokens, 0),
        cached_tokens=np.full(CLEAN, -1) if cached is None else np.where(half, cached, -1),
    )  # fmt: skip


def test_hits_that_the_load_allows_explain_and_others_count_as_ever() -> None:
    # 2000 requests share 500 of 1000 tokens: a million; 1 % of all prompt tokens are 40,000, and 10 % are 400,000
    assert severities(shared(500)) == {}  # nobody tells
    assert severities(shared(500, cached=500)) == {"CACHED_TOKENS": "info"}
    assert severities(shared(500, cached=0)) == {"CACHED_TOKENS": "info"}
    assert severities(shared(500, cached=520)) == {"CACHED_TOKENS": "info"}
    assert severities(shared(500, cached=521)) == {"CACHED_TOKENS": "warning"}
    assert severities(shared(500, cached=700)) == {"CACHED_TOKENS": "warning"}
    assert severities(shared(500, cached=701)) == {"CACHED_TOKENS": "invalid"}
    for hits, severity in (
        (0, "info"),
        (16, "info"),
        (1_000_015, "info"),
        (1_000_016, "warning"),
        (1_004_001, "invalid"),
    ):
        assert severities(shared(500), server=own_view(prefix_cache_hits=hits)) == {"PREFIX_CACHE": severity}
    assert severities(shared(500), server=own_view(prefix_cache_hits=None)) == {}
    unseen = own_view(covered=False)  # the hits may have come where nobody looked
    assert severities(shared(500), server=unseen) == {"SERVER_METRICS": "info"}


def test_what_a_shared_load_says() -> None:
    def first(records: RequestTable, hits: int | None = None) -> findings.Finding:
        seen = ServerView(server=own_view(prefix_cache_hits=hits))
        return build.build(manifest(), records, [facts()], seen=seen).verdict.findings[0]

    took = "The server took 960000 of the 1000000 prompt tokens that could be shared from its prefix cache (96.0 %)."
    assert first(shared(500, cached=480)).message == took == first(shared(500), 960_000).message
    none = "The server found none of the 1000000 prompt tokens that could be shared in its prefix cache."
    assert first(shared(500, cached=0)).message == none == first(shared(500), 0).message
    assert "off or too small" in first(shared(500), 0).advice
    assert "40.0 % of the prompt tokens from its prefix cache, of which the load shares 25.0 %" in (
        first(shared(500, cached=800)).message
    )
    assert "although no more than 1000000 could be shared." in first(shared(500), 1_004_001).message


def test_what_was_not_sent_could_not_be_shared() -> None:
    sent = clean().sent_ns.copy()
    sent[-1] = -1
    records = replace(with_outcome("dropped", 1, shared(500)), sent_ns=sent)
    for hits, severity in ((999_500, "info"), (999_515, "info"), (999_516, "warning"), (1_003_500, "invalid")):
        assert severities(records, server=own_view(prefix_cache_hits=hits))["PREFIX_CACHE"] == severity


def test_preemptions_against_the_requests() -> None:
    assert severities(server=own_view(preemptions=1)) == {"PREEMPTIONS": "info"}
    assert severities(server=own_view(preemptions=40)) == {"PREEMPTIONS": "info"}  # 1 % of 4000
    assert severities(server=own_view(preemptions=41)) == {"PREEMPTIONS": "warning"}
    assert severities(server=own_view(preemptions=None, paused_max=0)) == {}
    assert severities(server=own_view(preemptions=None, paused_max=1)) == {"PREEMPTIONS": "info"}
    assert severities(server=own_view(preemptions=None, paused_max=41)) == {"PREEMPTIONS": "warning"}


def test_replicas_of_which_one_does_more_than_its_share() -> None:
    def split(*tokens: int) -> ServerStats:
        replicas = [
            ReplicaStats(url=f"http://{n}/metrics", silent=0, generation_tokens=t) for n, t in enumerate(tokens)
        ]
        return own_view(replicas=replicas)

    assert severities(server=split(100, 120, 80)) == {}
    assert severities(server=split(100)) == {} == severities(server=split(0, 0))
    assert severities(server=split(100, 30, 50)) == {"IMBALANCE": "warning"}
    assert severities(server=split(100, 100, 100, 0)) == {"IMBALANCE": "warning"}  # one did nothing
    built = build.build(manifest(), clean(), [facts()], seen=ServerView(server=split(100, 30, 50)))
    assert "the busiest generated 1.67 times the mean of their output tokens, and the idlest 0.50" in text.render(built)
    assert "output tokens of each of 3: http://0/metrics 100" in text.render(built)


def test_a_replica_that_is_lost() -> None:
    """It is told as that, and neither as an uneven split nor as gaps in what was sampled."""
    left = [ReplicaStats(url=f"http://{n}/metrics", silent=0, generation_tokens=100) for n in range(2)]
    lost = ReplicaStats(url="http://dead/metrics", silent=3, lost_s=1.25, generation_tokens=7)
    view = own_view(replicas=[*left, lost], samples=5, failed=3, failure="replica 3: no connection")
    assert severities(server=view) == {"REPLICA_LOST": "warning"}
    built = build.build(manifest(), clean(), [facts()], seen=ServerView(server=view))
    assert "Of 3 replicas, http://dead/metrics answered last 1.25 s into the run: requests" in text.render(built)
    never = ReplicaStats(url="http://dead/metrics", silent=5, lost_s=None)
    view = own_view(replicas=[left[0], never], samples=5, failed=5, failure="replica 2: no connection")
    built = build.build(manifest(), clean(), [facts()], seen=ServerView(server=view))
    assert "Of 2 replicas, http://dead/metrics answered not once: requests" in text.render(built)
    gaps = own_view(replicas=left, samples=5, failed=5, failure="GET /metrics answers 503")
    assert severities(server=gaps) == {"SERVER_METRICS": "info"}


def test_gpus_that_were_held_back_or_shared() -> None:
    """By NVML, and by NVIDIA's exporter; the run takes 40 s."""

    def found(**seen: Any) -> dict[str, str]:
        peak = GpuPeak(index=3, name="H200", memory_peak_bytes=None, **seen)
        stats = GpuStats(each=[peak], memory_peak_bytes=None, power_mean_w=None, energy_j=None, energy_from=None)
        built = build.build(manifest(), clean(), [facts()], seen=ServerView(server=own_view(), gpus=stats))
        return {finding.code: f"{finding.severity} {finding.message}" for finding in built.verdict.findings}

    assert found() == {} == found(thermal_ratio=0.01, power_ratio=0.1, processes=1)
    capped = found(power_ratio=0.8)
    assert capped == {"THROTTLED": "info The power limit held a GPU's clocks back: GPU 3 80.0 % of the time."}
    heat = found(thermal_ratio=0.2, slowdowns=["hw_thermal_slowdown"])
    assert heat == {"THROTTLED": "warning Heat held a GPU's clocks back for a while: GPU 3 20.0 % of the time."}
    slowed = found(slowdowns=["hw_power_brake_slowdown"])["THROTTLED"]
    assert slowed == "warning The driver reported slowed clocks of a GPU: GPU 3 hw_power_brake_slowdown."
    assert found(processes=2, others=1)["GPU_SHARED"].startswith("warning 1 process came to GPU 3 or left it")
    assert found(processes=2)["GPU_SHARED"].startswith("warning 2 processes were on GPU 3")
    assert severities(server=own_view(gpu_thermal_s=0.3)) == {}
    assert severities(server=own_view(gpu_thermal_s=0.5)) == {"THROTTLED": "warning"}


def test_samples_that_failed() -> None:
    assert severities(server=own_view(failed=10, failure="busy")) == {}
    assert severities(server=own_view(failed=11, failure="busy")) == {"SERVER_METRICS": "info"}
    assert severities(server=own_view(covered=False)) == {"SERVER_METRICS": "info"}
    assert severities(server=own_view(problem="there is no GPU 9 here")) == {"SERVER_METRICS": "info"}
    without_metrics = ServerView(server=ServerStats(problem="it has no metrics"))
    built = build.build(manifest(), clean(), [facts()], seen=without_metrics)
    assert [one.message for one in built.verdict.findings] == ["The server's own view has gaps: it has no metrics."]
    both = ServerStats(samples=9, failed=1, failure="\x1b[31mbusy")
    built = build.build(manifest(), clean(), [facts()], seen=ServerView(server=both))
    assert "1 of 9 samples failed (\\x1b[31mbusy); the samples do not reach" in text.render(built)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_send_lag_of_replies_in_one_piece(convention: str) -> None:
    """They have no first or last token, by which some tools would time them."""
    none = np.full(CLEAN, -1)
    whole = replace(lagging(51.0), first_token_ns=none, last_token_ns=none)
    built = build.build(manifest(), whole, [facts()], convention=convention)
    assert built.metrics["ttft_ms"].p50 is None
    assert "SEND_LAG" in [finding.code for finding in built.verdict.findings]


def test_retried_connections_and_an_unchecked_certificate() -> None:
    for retried, found in ((1, False), (2, True)):
        records = [request(number, retried=True) if number < retried else request(number) for number in range(1000)]
        report = build.build(manifest(config={"insecure": True}), table(records), [facts()])
        codes = {finding.code: finding for finding in report.verdict.findings}
        assert report.retried_connections == retried
        assert ("RETRIED_CONNECTIONS" in codes) is found
        assert "INSECURE" in codes
    assert "--connect fresh" in codes["RETRIED_CONNECTIONS"].advice


def queued(per_s: float, n: int = 400, serves_per_s: float = 10.0) -> RequestTable:
    """Requests that come evenly at a server that serves one after another."""
    begin_ms, rows = 0.0, []
    for at in range(n):
        sent_ms = 1000 * at / per_s
        begin_ms = max(begin_ms, sent_ms)
        end_ms = begin_ms + 1000 / serves_per_s
        rows.append(request(at, scheduled=sent_ms, sent=sent_ms, first=begin_ms + 1, gaps=(1, 1, 1), done=end_ms))
        begin_ms = end_ms
    return table(rows)


def test_a_server_that_falls_behind() -> None:
    """A rate of 15 requests/s at a server that serves 10; told as it was, and what still holds."""
    run = manifest(arrival="constant:15", requests_planned=400)
    assert severities(queued(15), run=run)["OVERLOADED"] == "invalid"
    built = build.build(run, queued(15), [facts()])
    assert built.steady is not None and built.steady.keeping_up is not None
    seen = built.steady.keeping_up
    assert seen.word == "fell_behind"
    assert seen.offered_per_s == pytest.approx(15, rel=0.01)
    assert seen.served_per_s == pytest.approx(10, rel=0.01)
    assert seen.growth_per_s == pytest.approx(5, rel=0.02)
    (finding,) = [each for each in built.verdict.findings if each.code == "OVERLOADED"]
    assert "15.00 requests/s arrived and 10.00 were answered, so 5.00 more a second waited" in finding.message
    assert finding.advice.startswith("Offer less than 9.00 requests/s")
    assert "The server fell behind: from " in text.render(built)


def test_a_server_that_keeps_up_or_is_not_asked() -> None:
    kept = build.build(manifest(arrival="constant:9", requests_planned=400), queued(9), [facts()])
    assert "OVERLOADED" not in {each.code for each in kept.verdict.findings}
    assert "The server kept up: from " in text.render(kept)
    for arrival in ("burst",):
        assert build.build(manifest(arrival=arrival), queued(15), [facts()]).steady is None
    few = build.build(manifest(arrival="constant:15"), queued(15, 19), [facts()])
    assert "Whether the server kept up cannot be told: fewer than 20 requests were answered." in text.render(few)
    assert "OVERLOADED" not in {each.code for each in few.verdict.findings}
    failed = build.build(manifest(arrival="constant:15"), with_outcome("http_error", 400, queued(15)), [facts()])
    assert "cannot be told" in text.render(failed)


def test_a_killed_client_is_judged_up_to_the_kill() -> None:
    """A real server that was offered 54 requests/s and serves 33: what was under way at the kill left no record."""
    kept = json.loads((Path(__file__).parents[2] / "data/steady_h200/poisson-54-40.json").read_text())
    columns = zip(kept["sent_ms"], kept["first_ms"], kept["done_ms"], kept["output_tokens"], strict=True)
    rows = [
        request(at, scheduled=sent, sent=sent, first=first, gaps=(done - first,), output_tokens=n, asked_tokens=n)
        for at, (sent, first, done, n) in enumerate(columns)
    ]
    law = {"output_tokens": "uniform:50:350"}
    run = manifest(arrival="poisson:54", requests_planned=len(rows), config=law)
    for killed_s in (40, 60):
        left = table([row for row in rows if (row.done_ns or 0) < killed_s * 1e9])
        built = build.build(run, left, [])
        assert "KILLED" in {each.code for each in built.verdict.findings}
        assert built.steady is not None and built.steady.keeping_up is not None
        assert built.steady.keeping_up.word == "fell_behind"
        assert built.steady.keeping_up.served_per_s == pytest.approx(33.3, rel=0.15)
    answered = table([*rows[:300], *(failure(at) for at in range(300, 400))])
    flow = flows.of_requests(answered, msgspec.structs.replace(run, requests_planned=500))
    assert flow is not None and len(flow.arrived_s) == 300  # what failed left a record


@pytest.mark.parametrize("arrival", ["poisson:15", "ramp:1:20:30", "concurrency:8", "trace:mooncake"])
def test_strange_records_are_judged_without_a_number_that_is_none(arrival: str) -> None:
    """Nothing, one session, all at once, replies that take no time, a clock that steps by an hour there and back."""

    def stepped(by_ms: float) -> RequestTable:
        at_ms = [60.0 * at + (by_ms if at >= 200 else 0) + 3.6e6 for at in range(400)]
        return table(
            request(at, scheduled=each, sent=each, first=60 * at + 3.6e6 + 100 + (by_ms if at > 197 else 0))
            for at, each in enumerate(at_ms)
        )

    turns = [request(at, sent=300 * at, first=300 * at + 100, session=0, turn=at + 1) for at in range(60)]
    strange = {
        "nothing": table([]),
        "one session": table(turns),
        "all at once": table(request(at, sent=0, first=100 + at) for at in range(400)),
        "no time": table(request(at, scheduled=10 * at, sent=10 * at, first=10 * at, gaps=()) for at in range(400)),
        "never sent": table(failure(at, "dropped", sent=None) for at in range(100)),
        "an hour ahead": stepped(3.6e6),
        "an hour back": stepped(-3.6e6),
    }
    for name, records in strange.items():
        with np.errstate(all="raise"):
            built = build.build(manifest(arrival=arrival, requests_planned=len(records)), records, [facts()])
            shown = text.render(built)
        assert "nan" not in shown.split() and "inf" not in shown.split(), name
        assert "OVERLOADED" not in {each.code for each in built.verdict.findings}, name
        beyond = arrival == "concurrency:8" and name == "all at once"  # 400 are more than 8
        told = "CONTRADICTION" in {each.code for each in built.verdict.findings}
        assert told == (beyond or name == "an hour back"), name
    if arrival != "concurrency:8":
        said = text.render(build.build(manifest(arrival=arrival), strange["one session"], [facts()]))
        assert "cannot be told: fewer than 20 sessions were answered." in said


def test_a_load_that_the_server_never_saw() -> None:
    """8 requests/s for 5 s, of which each takes 10 s."""
    records = table(
        request(at, sent=125 * at, scheduled=125 * at, first=125 * at + 100, gaps=(9900,)) for at in range(40)
    )
    found = severities(records, run=manifest(arrival="constant:8", requests_planned=40))
    assert found["TRANSIENT"] == "warning"


def test_a_server_that_died_in_the_middle() -> None:
    """A closed loop whose requests fail from 49 s on; a server that fails now and then has not ended."""
    answered = [request(at, scheduled=at * 100, sent=at * 100, first=at * 100 + 700) for at in range(490)]
    refused = [failure(at, "http_error", sent=at * 100, done=at * 100 + 1200) for at in range(490, 900)]
    (finding, *_) = build.build(
        manifest(arrival="concurrency:16"), table([*answered, *refused]), [facts()]
    ).verdict.findings
    assert (finding.code, finding.severity) == ("SERVER_ENDED", "invalid")
    assert "From 49.66 s on the server answered nothing: all 410 requests" in finding.message
    some = [*answered[:-9], *refused[:9]]
    assert "SERVER_ENDED" not in severities(table(some), run=manifest(arrival="concurrency:16"))


def test_a_server_that_changed_its_pace() -> None:
    """One request at a time: a token takes 20 ms, and from the middle on 40."""

    def one_at_a_time(slower: float) -> RequestTable:
        rows, at_ms = [], 0.0
        for number in range(400):
            gap_ms = 20.0 * (slower if number >= 200 else 1) * (1 + number % 7 / 100)
            rows.append(request(number, scheduled=at_ms, sent=at_ms, first=at_ms + 50, gaps=(gap_ms,) * 9))
            at_ms += 50 + 9 * gap_ms
        return table(rows)

    run = manifest(arrival="concurrency:1")
    built = build.build(run, one_at_a_time(2.0), [facts()])
    (finding,) = [each for each in built.verdict.findings if each.code == "UNSTEADY"]
    assert finding.severity == "warning" and "at 47.90 s: from then on a token took 1.98" in finding.message
    assert (
        built.steady is not None and built.steady.window is None and built.steady.why == "the server changed its pace"
    )
    assert "TRANSIENT" not in severities(one_at_a_time(2.0), run=run)
    assert "UNSTEADY" not in severities(one_at_a_time(1.0), run=run)


def test_speculation_on_drawn_words() -> None:
    told = {at: ServerRecord(drafted_tokens=30, accepted_tokens=3) for at in range(40)}
    drawn = replace(small(40), server=told)
    (finding,) = [
        each for each in build.build(manifest(), drawn, [facts()]).verdict.findings if each.code == "SPECULATION"
    ]
    assert "accepted 120 of 1,200 drafted tokens (10" in finding.message and finding.severity == "warning"
    assert "SPECULATION" not in severities(drawn, run=manifest(config={"dataset": "users.jsonl"}))
    assert "SPECULATION" not in severities(small(40))


def test_large_numbers_do_not_touch() -> None:
    """12,031 requests whose latencies are hours."""
    records = table(request(at, scheduled=at, sent=at, first=at + 1_830_571, gaps=(52_013,)) for at in range(12_031))
    (line,) = [
        line for line in text.render(build.build(manifest(), records, [facts()])).splitlines() if line[:5] == "ttft "
    ]
    assert line.split() == ["ttft", "12,031", *["1,830,571"] * 7]


@pytest.mark.parametrize(
    ("asked", "named", "severity"),
    [
        ("m", ["small"] * CLEAN, "warning"),
        ("m", ["small"], "invalid"),  # some of the replies
        ("m", ["small"] * (CLEAN - 1) + ["large"], "invalid"),
        ("gpt-4o", ["gpt-4o-2024-08-06"] * CLEAN, "info"),
        ("openai/gpt-4o", ["gpt-4o"] * CLEAN, "info"),
        ("gpt-4o", ["gpt-4o-mini-2024-07-18"] * CLEAN, "warning"),
        ("qwen3", ["qwen3:latest"] * CLEAN, "info"),
    ],
)
def test_other_models(asked: str, named: list[str], severity: str) -> None:
    records = replace(clean(), models=dict(enumerate(named)))
    report = build.build(msgspec.structs.replace(manifest(), model=asked), records, [facts()])
    (found,) = [finding for finding in report.verdict.findings if finding.code == "OTHER_MODEL"]
    assert found.severity == severity and f"{named[0]} ({named.count(named[0])})" in found.message
    assert report.reply_models == {name: named.count(name) for name in named}
