"""Comparing two runs: differences by hand, intervals that cover the truth as often as they claim, honest words."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadgen import rundir
from loadgen.document import terminal
from loadgen.report import compare
from loadgen.report.contrast import of_estimates
from loadgen.report.metrics import METRICS
from loadgen.report.pages import compare as page
from loadgen.report.pages import parts
from loadgen.rundir.records import RequestTable, table
from loadgen.steady.window import Estimate
from tests.loadgen.report.test_metrics import HAND
from tests.loadgen.tables import failure, manifest, request

STAMPS = ("headers", "first_token", "last_token", "done")


def columns(ttft_ms: np.ndarray[Any, Any], gaps_us: np.ndarray[Any, Any]) -> RequestTable:
    """Ok requests, ten a second, with these times to a first token (n,) and gaps (n, k)."""
    n, k = gaps_us.shape
    sent = 1_000_000 + np.arange(n) * 100_000_000
    first = sent + (ttft_ms * 1e6).astype(np.int64)
    last = first + gaps_us.sum(axis=1) * 1000
    one = table([request()])
    repeated = {name: np.repeat(getattr(one, name), n) for name in ("outcome", "phase", "status")}
    tokens = {name: np.full(n, k + 1) for name in ("output_tokens", "asked_tokens", "events")}
    return replace(
        one,
        **repeated,
        **tokens,
        id=np.arange(n),
        scheduled_ns=sent,
        sent_ns=sent,
        headers_ns=first,
        first_token_ns=first,
        last_token_ns=last,
        done_ns=last,
        prompt_tokens=np.full(n, 10),
        first_tokens=np.ones(n, np.int64),
        asked_prompt_tokens=np.full(n, 10),
        cached_tokens=np.full(n, -1),
        shared_tokens=np.zeros(n, np.int64),
        session=np.full(n, -1),
        turn=np.zeros(n, np.int64),
        itl_us=gaps_us.astype(np.uint32).ravel(),
        itl_offsets=np.arange(n + 1) * k,
    )


def drawn(seed: int, n: int = 1000, scale: float = 100.0, failed: int = 0) -> RequestTable:
    """n requests with exponential ttft and gaps around each request's own pace."""
    rng = np.random.default_rng(seed)
    pace_us = rng.uniform(15_000, 25_000, (n, 1))
    made = columns(rng.exponential(scale, n), rng.normal(pace_us, 1000, (n, 20)).astype(np.int64))
    outcome = made.outcome.copy()
    outcome[:failed] = 1
    return replace(made, outcome=outcome)


def test_a_run_does_not_differ_from_itself() -> None:
    one = drawn(1)
    compared = compare.build(manifest(), one, manifest(), one)
    lines = [line for row in compared.metrics.values() for line in row.values()]
    assert len(lines) == 5 * len(METRICS)
    bounded = [line for line in lines if line.difference_ci is not None]
    assert len(bounded) >= 4 * len(METRICS)
    for line in [*bounded, compared.failure_ratio]:
        assert line.difference == 0
        assert line.difference_ci is not None and line.difference_ci[0] <= 0 <= line.difference_ci[1]
        assert line.shows == "no difference shown"
    for name in METRICS:
        assert compared.metrics[name]["mean"].ratio == (None if name == "send_lag_ms" else 1)
    assert compared.configuration == {}


def test_a_difference_is_b_minus_a_and_its_interval_holds_it() -> None:
    fast, slow = drawn(1), drawn(2, scale=150)
    compared = compare.build(manifest(), fast, manifest(), slow)
    line = compared.metrics["ttft_ms"]["mean"]
    assert line.difference == line.b - line.a == pytest.approx(50, abs=15)
    assert line.ratio == line.b / line.a
    assert line.difference_ci[0] < line.difference < line.difference_ci[1]
    assert line.ratio_ci[0] < line.ratio < line.ratio_ci[1]
    assert line.shows == "B is higher"
    back = compare.build(manifest(), slow, manifest(), fast).metrics["ttft_ms"]["mean"]
    assert back.difference == -line.difference
    assert back.shows == "B is lower"
    assert compared.metrics["itl_ms"]["mean"].shows == "no difference shown"


def test_the_same_two_runs_give_the_same_numbers() -> None:
    pairs = [compare.build(manifest(), drawn(1, 200), manifest(), drawn(2, 200)) for _ in range(2)]
    assert pairs[0] == pairs[1]


def test_failures_and_throughput_by_hand() -> None:
    others = [*HAND[:3], *(failure(at, done=506) for at in range(3, 30))]
    compared = compare.build(manifest(), table(HAND), manifest(), table(others))
    assert (compared.a.requests, compared.a.ok) == (4, 3)
    assert compared.failure_ratio.a == 0.25
    assert compared.failure_ratio.b == pytest.approx(0.9)
    assert compared.failure_ratio.shows == "B is higher"
    rates = compared.throughput
    assert rates["requests_per_s"].a == rates["requests_per_s"].b == 3 / 0.505
    assert rates["output_tokens_per_s"].a == 7 / 0.505
    assert rates["total_tokens_per_s"].a == 37 / 0.505
    assert rates["output_tokens_per_s"].shows is None  # of three requests nothing is known
    assert "A and B held too few independent moments" in " ".join(compared.notes)


def test_nothing_to_compare_is_no_error() -> None:
    for empty in (table([]), table([failure(0)])):
        compared = compare.build(manifest(), empty, manifest(), table(HAND))
        assert compared.metrics["ttft_ms"]["mean"].difference is None
        terminal.render(page.of(compared), 160)
    page.of(compare.build(manifest(), table([request(0)]), manifest(), table([request(0, gaps=())])))


def test_what_was_set_differently_is_listed() -> None:
    a = manifest(config={"requests": 1000, "seed": 0, "out": "a"}, server_version="0.32")
    b = manifest(config={"requests": 1000, "seed": 1, "out": "b", "workers": "2"}, arrival="poisson:5")
    assert parts.differing([a, b]) == {
        "arrival": ["burst", "poisson:5"],
        "config.seed": [0, 1],
        "config.workers": [None, "2"],
        "server_version": ["0.32", None],
    }
    elsewhere = manifest(machine=rundir.Machine(platform="Linux", python="3.11", cpu_count=64, hostname="there"))
    assert parts.differing([manifest(), elsewhere]) == {
        "machine.cpu_count": [2, 64],
        "machine.hostname": ["here", "there"],
    }


def test_the_text_is_honest_and_safe() -> None:
    manifests = [
        manifest(emulated=True),
        manifest(model="\x1b[2Jx", config={"requests": 1, "seed": 0, "note": "\x1b]0;hi\x07"}),
    ]
    compared = compare.build(manifests[0], drawn(1, 100), manifests[1], drawn(2, 100))
    text = terminal.render(page.of(compared), 400)
    assert all(character == "\n" or character.isprintable() for character in text)
    assert "EMULATED" in text
    assert "no difference shown" in text
    assert "not the noise from run to run" in text
    assert "config.note -" in " ".join(text.split()) and "\\x1b]0;hi\\x07" in text


def test_percentiles_of_few_requests_are_named() -> None:
    few, some, many = (drawn(1, n) for n in (71, 72, 368))
    assert "71 requests are too few for p95, p99: even" in compare.build(manifest(), many, manifest(), few).notes[-1]
    assert "p99 take 368." in compare.build(manifest(), some, manifest(), many).notes[-1]
    assert compare.build(manifest(), many, manifest(), many).notes == compare.NOTES


# Throughput of one run: the number in flight as it was, and what the requests gave over their latencies.


def closed_loop(seed: int, slower: float = 1.0, n: int = 400, slots: int = 16) -> RequestTable:
    """A server on which `slots` requests are always in flight; each request's pace is its own."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(20, 200, n)
    e2el_ns = (slower * rng.normal(1, 0.15, n).clip(0.5) * (100 + 10 * tokens) * 1e6).astype(np.int64)
    free, sent = [0] * slots, []
    for lasts_ns in e2el_ns.tolist():
        at = heapq.heappop(free)
        sent.append(at)
        heapq.heappush(free, at + lasts_ns)
    began = np.array(sent, np.int64)
    made = columns(e2el_ns / 1e6, np.zeros((n, 0), np.int64))
    return replace(
        made, scheduled_ns=began, sent_ns=began, first_token_ns=began + 100, last_token_ns=began + e2el_ns,
        done_ns=began + e2el_ns, output_tokens=tokens,
    )  # fmt: skip


def rate(a: RequestTable, b: RequestTable) -> compare.Contrast:
    return compare.build(manifest(), a, manifest(), b).throughput["output_tokens_per_s"]


def test_the_interval_of_a_closed_loops_throughput_covers_the_truth() -> None:
    hits, wide = [], []
    for pair in range(60):
        change = rate(closed_loop(2 * pair), closed_loop(2 * pair + 1, 1 / 0.9))
        assert change.ratio_ci is not None
        hits.append(change.ratio_ci[0] <= 0.9 <= change.ratio_ci[1])
        wide.append(change.ratio_ci[1] - change.ratio_ci[0])
    assert np.mean(hits) >= 0.9
    assert np.mean(wide) < 0.1  # and is no wider than helps: a loss of 10 % shows


def test_the_interval_of_a_rates_difference_is_as_wide_as_that_of_its_ratio() -> None:
    """Latencies that drift within a run move its parts apart, and so both intervals."""
    drifting = [columns(np.linspace(50, 400, 400) + seed, np.full((400, 20), 20_000)) for seed in (0, 1)]
    sent = np.arange(400) * 50_000_000
    moved = [
        replace(each, **{f"{name}_ns": getattr(each, f"{name}_ns") + sent for name in ("scheduled", "sent", *STAMPS)})
        for each in drifting
    ]
    change = rate(*moved)
    assert change.difference_ci is not None and change.ratio_ci is not None and change.a is not None
    of_difference = (change.difference_ci[1] - change.difference_ci[0]) / change.a
    of_ratio = np.log(change.ratio_ci[1] / change.ratio_ci[0])
    assert of_ratio > 0.2
    assert of_difference == pytest.approx(of_ratio, rel=0.1)


def test_throughput_of_a_run_that_gave_nothing_has_no_interval() -> None:
    change = rate(closed_loop(1), replace(closed_loop(2), output_tokens=np.full(400, -1)))
    assert (change.b, change.difference_ci) == (None, None)


def test_two_intervals_of_few_blocks_have_the_freedom_of_both() -> None:
    """Four blocks each, standard errors of 1: Student's t of six degrees of freedom, and of three where one side is all
    of the noise; and the normal distribution where the sides are shares of many."""
    t_3, t_6 = 3.182, 2.447
    even = of_estimates(Estimate(10, 10 - t_3, 10 + t_3, 4), Estimate(20, 20 - t_3, 20 + t_3, 4))
    assert even.difference_ci == pytest.approx((10 - t_6 * 2**0.5, 10 + t_6 * 2**0.5))
    one_sided = of_estimates(Estimate(10, 10, 10, 4), Estimate(20, 20 - t_3, 20 + t_3, 4))
    assert one_sided.difference_ci == pytest.approx((10 - t_3, 10 + t_3))
    many = of_estimates(Estimate(10, 7, 13), Estimate(20, 16, 24))
    assert many.difference_ci == pytest.approx((5, 15))
    skewed = of_estimates(Estimate(10, 8, 18), Estimate(20, 14, 21))
    assert skewed.difference_ci == pytest.approx((0, 10 + 5**0.5)) and skewed.ratio_ci is not None
    assert of_estimates(Estimate(10), Estimate(20, 19, 21, 4)).shows is None
