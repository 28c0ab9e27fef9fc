"""Reads on somebody's clock: known answers, and properties of what lies between a server and its client."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.report import build
from loadgen.report.schema import Report
from loadgen.rundir import groups
from loadgen.rundir.records import RequestTable, table
from tests.loadgen.tables import facts, manifest, request

ITL_MS, TTFT_MS, TOKENS, REPLIES = 20.0, 100.0, 64, 24
Made = list[float]  # when each token of a reply is made, ms
Wire = Callable[[Made, random.Random], Made]  # when each of its events is read


def run(wire: Wire, jitter: float = 0.0, stalls: float = 0.0, tokens: int = TOKENS) -> RequestTable:
    """A server of `ITL_MS` a token, with its prefills of others in the share `stalls` of its steps."""
    drawn, records = random.Random(7), []
    for number in range(REPLIES):
        at, made = 300.0 * number + TTFT_MS, list[float]()
        for _ in range(tokens):
            made.append(at)
            at += ITL_MS * drawn.uniform(1 - jitter, 1 + jitter)
            at += drawn.uniform(40, 80) if drawn.random() < stalls else 0
        read = wire(made, drawn)
        gaps = tuple(after - before for before, after in itertools.pairwise(read))
        records.append(request(number, scheduled=300.0 * number, sent=300.0 * number, first=read[0], gaps=gaps))
    return table(records)


def report_of(measured: RequestTable) -> Report:
    return build.build(manifest(), measured, [facts()])


def timer(period_ms: float, apart_ms: float = 0.0) -> Wire:
    """A proxy that lets go of what it has every `period_ms`, from a moment of its own on."""

    def read(made: Made, drawn: random.Random) -> Made:
        phase, at = drawn.uniform(0, period_ms), list[float]()
        for token in made:
            tick = phase + period_ms * math.ceil((token - phase) / period_ms)
            at.append(max(tick, at[-1] + apart_ms) if at and tick <= at[-1] else tick)
        return [each + drawn.uniform(0, 0.1) * (not apart_ms and each != before)
                for before, each in zip([math.nan, *at], at, strict=False)] if apart_ms else at  # fmt: skip

    return read


def at_once(made: Made, drawn: random.Random) -> Made:
    return made


def late(share: float) -> Wire:
    """A client that stands still now and then."""

    def read(made: Made, drawn: random.Random) -> Made:
        until, at = 0.0, list[float]()
        for token in made:
            if drawn.random() < share and token > until:
                until = token + drawn.uniform(10, 40)
            at.append(max(token, until))
        return at

    return read


def guessing(acceptance: float) -> Wire:
    """A server whose steps bring a second token, in an event of its own, where it was guessed right."""

    def read(made: Made, drawn: random.Random) -> Made:
        return [step for step in made for _ in range(2 if drawn.random() < acceptance else 1)][: len(made)]

    return read


@pytest.mark.parametrize("apart_ms", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("periods", [1.1, 1.2, 1.3, 1.5, 1.6])
@pytest.mark.parametrize(("jitter", "stalls"), [(0, 0), (0.1, 0), (0, 0.1)])
def test_a_proxy_with_a_timer_is_named(periods: float, apart_ms: float, jitter: float, stalls: float) -> None:
    measured = run(timer(periods * ITL_MS, apart_ms), jitter, stalls)
    assert groups.clock_us(measured) == pytest.approx(1000 * periods * ITL_MS, rel=0.01)
    report = report_of(measured)
    assert not report.verdict.valid and report.ttft_of_delivery
    assert "BUFFERED" in {finding.code for finding in report.verdict.findings if finding.severity == "invalid"}
    assert report.metrics["itl_ms"].p50 is None
    if not stalls:
        assert report.metrics["tpot_ms"].p50 == pytest.approx(ITL_MS, rel=0.05)


@pytest.mark.parametrize(("jitter", "stalls"), [(0, 0), (0.1, 0), (0.02, 0.1), (0, 0.4)])
@pytest.mark.parametrize("wire", [at_once, late(0.05), late(0.2), guessing(0.05), guessing(0.3), guessing(0.4)])
def test_servers_and_late_clients_are_no_clock(wire: Wire, jitter: float, stalls: float) -> None:
    measured = run(wire, jitter, stalls)
    assert groups.clock_us(measured) is None
    assert report_of(measured).verdict.valid


@given(st.floats(1.02, 1.7), st.floats(0, 0.15), st.integers(16, 100))
@settings(max_examples=60, deadline=None)
def test_no_valid_run_behind_a_timer_hides_it(periods: float, jitter: float, tokens: int) -> None:
    """What is not seen is little: few events came together, or there are few groups; that many share a read is told."""
    measured = run(timer(periods * ITL_MS), jitter, tokens=tokens)
    report = report_of(measured)
    if report.verdict.valid:
        together = float((measured.itl_us == 0).mean())
        assert together < 0.1 or tokens < 40
        assert together < 0.005 or "MERGED_READS" in {finding.code for finding in report.verdict.findings}
    else:
        assert report.metrics["itl_ms"].p50 is None


def test_a_period_no_longer_than_a_token_is_not_to_be_told() -> None:
    """As the document says: every read brings one token, as those of a server with steps of two lengths do."""
    assert groups.clock_us(run(timer(ITL_MS))) is None
    assert groups.clock_us(run(timer(0.7 * ITL_MS))) is None


def test_of_nothing() -> None:
    assert groups.clock_us(table([])) is None
    assert groups.clock_us(table([request(gaps=())])) is None
    assert groups.clock_us(table([request(number, gaps=(0, 20, 0)) for number in range(30)])) is None
