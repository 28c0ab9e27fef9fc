"""Stalls: known ones in made-up runs, in real runs those that were seen, and all that are put into those."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.report import build, metrics, stalls
from loadgen.report.schema import Stall
from loadgen.rundir import records
from loadgen.rundir.records import Record, RequestTable, table
from tests.data import unpacked
from tests.loadgen.tables import facts, failure, manifest, request

REAL = {  # how often all streams stopped; the mixture's server stopped for 1.4 to 1.6 s now and then
    "frozen/measured/mixtral_8x7b_poisson4": 3,
    "frozen/measured/mixtral_8x7b_closed16": 1,
    "frozen/measured/sessions": 0,
    "frozen/measured/h100_prompts2048_poisson4": 0,
    "h200/serving/7b_tp4_o64": 0,
    "h200/serving/7b_lightllm_o64": 0,
    "h200/serving/7b_poisson16_o128": 0,
}


def lockstep(*steps_ms: float, streams: int = 8) -> RequestTable:
    """Streams that all begin 100 ms after they were sent at once, and get a token at the end of each step."""
    return table(request(at, first=100, gaps=steps_ms) for at in range(streams))


def found(records: RequestTable, lag_ms: float | None = 0.0) -> list[tuple[float, float]]:
    return [(stall.start_s, stall.end_s) for stall in stalls.find(records, lag_ms)]


def test_a_stall_among_steps_is_found_exactly() -> None:
    assert found(lockstep(*[20] * 100)) == []
    assert found(lockstep(*[20] * 100, 3000, *[20] * 100)) == [(2.1, 5.1)]
    assert found(lockstep(1500, *[20] * 100, 3000)) == [(0.1, 1.6), (3.6, 6.6)]


def test_a_stall_is_longer_than_a_second_and_the_clients_own_lag() -> None:
    def long(stall_ms: float, lag_ms: float | None) -> bool:
        return bool(found(lockstep(*[20] * 50, stall_ms, *[20] * 50), lag_ms))

    assert [long(stall_ms, 0.0) for stall_ms in (999, 1001)] == [False, True]
    assert [long(stall_ms, 500.0) for stall_ms in (1001, 1499, 1501)] == [False, False, True]
    assert not long(9000, None)  # a client that was killed: nobody knows how late it was


def test_a_slow_server_has_slow_steps() -> None:
    assert found(lockstep(*[1500] * 20)) == []
    assert found(lockstep(*[1500] * 10, 5900, *[1500] * 10)) == []
    assert len(found(lockstep(*[1500] * 10, 6100, *[1500] * 10))) == 1


def test_steps_are_seen_through_many_stalls_and_through_events_that_dribble() -> None:
    stalled = lockstep(*([20] * 50 + [3000]) * 10)  # three quarters of the run
    assert len(found(stalled)) == 10
    # A step of 1.2 s whose events come in eight groups, 15 ms apart: the short silences are many, and no steps.
    dribbled = table(request(at, first=100 + 15 * at, gaps=(1200,) * 30) for at in range(8))
    assert found(dribbled) == []


def test_waiting_is_no_stall() -> None:
    queue = [request(at, first=100 + 5000 * at, gaps=(20,) * 10) for at in range(9)]  # one after the other
    assert found(table(queue)) == []
    idle = [request(at, scheduled=5000 * at, sent=5000 * at, first=5000 * at + 50) for at in range(9)]
    assert found(table(idle)) == []
    whole = [request(at, first=9000, gaps=(), first_token_ns=None, last_token_ns=None, events=0) for at in range(9)]
    assert found(table(whole)) == found(table([])) == found(table([failure()])) == []
    alone = request(0, first=100, gaps=(*[20] * 50, 4000, *[20] * 50))
    assert len(found(table([alone]))) == 1  # one reply that is under way is enough
    assert len(found(table([alone, request(1, sent=550, first=650, gaps=(20,) * 300)]))) == 0


def prefilled_alone(*prompts: tuple[int, float]) -> RequestTable:
    """A server that decodes one long reply, 20 ms a token, and stops for each prompt: (tokens, ms)."""
    steps_ms = [step for _, prefill_ms in prompts for step in (*[20] * 20, prefill_ms)] + [20] * 20
    at_ms = list(accumulate(steps_ms, initial=100))
    rows: list[Record] = [request(0, first=100, gaps=tuple(steps_ms))]
    for number, (tokens, _) in enumerate(prompts):
        first = at_ms[21 * (number + 1)] + 1
        rows.append(request(number + 1, sent=1, first=first, gaps=(), prompt_tokens=tokens, asked_prompt_tokens=tokens))
    return table(rows)


def test_a_prompt_that_is_computed_alone_is_a_step() -> None:
    assert found(prefilled_alone(*[(8000, 2000)] * 5)) == []
    assert found(prefilled_alone(*[(1000, 250)] * 5, (8000, 2000), (32_000, 9000))) == []
    assert len(found(prefilled_alone(*[(1000, 250)] * 5, (1000, 5000)))) == 1
    # What begins next may be computed in pieces, of which only the last ends with its first token: this excuses the
    # second silence of 2 s, which the 16,000 tokens follow, and not the first.
    pieces = prefilled_alone(*[(1000, 250)] * 12, (40, 2000), (40, 2000), (16_000, 4000))
    assert found(pieces) == [(8.3, 10.3)]
    chunked = replace(pieces, prompt_tokens=np.where(pieces.prompt_tokens == 40, 16_000, pieces.prompt_tokens))
    assert found(chunked) == []


@st.composite
def some_runs(draw: st.DrawFn) -> RequestTable:
    gap_ms = st.sampled_from([0, 0.4, 3, 9.999, 10, 10.001, 11, 19, 25, 80, 700, 2500])
    return table(
        request(at, first=draw(st.integers(0, 3000)), gaps=tuple(draw(st.lists(gap_ms, max_size=12))))
        for at in range(draw(st.integers(1, 5)))
    )


@given(some_runs())
def test_every_silence_longer_than_a_cell_is_seen(run: RequestTable) -> None:
    events_us = np.sort(np.concatenate([run.arrivals_ns(row) // 1000 for row in range(len(run))]))
    first_us, last_us = run.first_token_ns // 1000, run.last_token_ns // 1000
    expected = [
        (begin, end)
        for begin, end in zip(events_us[:-1].tolist(), events_us[1:].tolist(), strict=True)
        if end - begin > stalls.CELL_US and ((first_us <= begin) & (last_us >= end)).any()
    ]
    begin_us, end_us, _ = stalls.under_way(stalls.silences_of(run), run)
    seen = list(zip(begin_us.tolist(), end_us.tolist(), strict=True))
    assert [silence for silence in seen if silence[1] - silence[0] > stalls.CELL_US] == expected


@cache
def real(name: str) -> tuple[RequestTable, float]:
    rows, clients = records.read(unpacked(name))
    return rows.measured(), max(client.loop_lag_max_ms for client in clients)


def with_stall(run: RequestTable, at_s: float, seconds: float) -> RequestTable:
    """The run with everything after `at_s` later by so much."""
    at_ns, late_ns = round(at_s * 1e9), round(seconds * 1e9)
    later = {
        name: np.where(getattr(run, name) > at_ns, getattr(run, name) + late_ns, getattr(run, name))
        for name in ("sent_ns", "headers_ns", "first_token_ns", "last_token_ns", "done_ns")
    }
    gaps = run.itl_us.copy()
    for row in np.flatnonzero((run.first_token_ns <= at_ns) & (run.last_token_ns > at_ns)).tolist():
        crossing = int(np.searchsorted(run.arrivals_ns(row), at_ns, side="right")) - 1
        gaps[run.itl_offsets[row] + min(crossing, run.events[row] - 2)] += late_ns // 1000
    return replace(run, **later, itl_us=gaps)


@pytest.mark.parametrize(("name", "times"), REAL.items())
def test_no_real_run_is_called_stalled_but_those_in_which_all_streams_stopped(name: str, times: int) -> None:
    assert len(stalls.find(*real(name))) == times


def test_nothing_is_said_of_a_run_whose_gaps_were_not_kept() -> None:
    run, lag_ms = real("frozen/measured/mixtral_8x7b_poisson4")
    without = replace(run, itl_us=run.itl_us[:0], itl_offsets=np.zeros_like(run.itl_offsets))
    assert stalls.find(without, lag_ms) == []


# A third of a run must be far longer than its longest step, which frozen runs are too short for.
@pytest.mark.parametrize("name", [name for name in REAL if name.startswith("h200/")])
def test_a_stall_in_a_real_run_is_found(name: str) -> None:
    run, lag_ms = real(name)
    # Stalls in the first third, as of a server that compiles its kernels when it first needs them, that make the run
    # half as long again.
    begin_s = run.first_token_ns[run.first_token_ns != -1].min() / 1e9
    last_s = run.last_token_ns.max() / 1e9
    at_s = [begin_s + share * (last_s - begin_s) for share in (0.1, 0.2, 0.3)]
    seconds = (last_s - begin_s) / 2 / len(at_s)
    stalled = run
    for number, moment_s in enumerate(at_s):
        stalled = with_stall(stalled, moment_s + number * seconds, seconds)
    listed = stalls.find(stalled, lag_ms)
    assert len(listed) == len(at_s)
    for number, (stall, moment_s) in enumerate(zip(listed, at_s, strict=True)):
        assert stall.start_s <= moment_s + number * seconds <= stall.end_s
        assert stall.end_s - stall.start_s >= seconds


def test_a_million_events_take_no_more_memory_than_their_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells grow with the run: a month of silence needs as many as a day."""
    monkeypatch.setattr(stalls, "MOST_CELLS", 64)
    run = lockstep(*[20] * 500, 60_000, *[20] * 500)  # 80 s: cells of over a second
    assert found(run) == [(10.1, 70.1)]


def test_the_finding_says_when_how_long_and_what_to_do() -> None:
    run = lockstep(*[20] * 100, 3000, *[20] * 50, 2000, *[20] * 50, 4000, *[20] * 50, 1500, *[20] * 50)
    built = build.build(manifest(), run, [facts()])
    assert built.stalls[0] == Stall(2.1, 5.1) and len(built.stalls) == 4
    finding = next(finding for finding in built.verdict.findings if finding.code == "SERVER_STALL")
    assert finding.severity == "warning" and "--warmup-load" in finding.advice
    assert finding.message == (
        "No stream got anything for 3.0 s at 2.1 s, 2.0 s at 6.1 s and 4.0 s at 9.1 s (the first 3 of 4 times), far "
        "longer than a step, though replies were under way: 10.5 s in all, 63.3 % of the run."
    )
    late = build.build(manifest(), run, [facts(), facts(loop_lag_max_ms=9000.0)])
    assert late.stalls == [] and "SERVER_STALL" not in [finding.code for finding in late.verdict.findings]


def test_times_of_events_are_those_of_each_reply() -> None:
    run = table([request(0, first=100, gaps=(20, 30)), failure(1), request(2, first=70, gaps=())])
    assert sorted(metrics.event_times_us(run).tolist()) == [70_000, 100_000, 120_000, 150_000]
    assert sorted(metrics.event_times_us(run, since_ns=70_000_000).tolist()) == [0, 30_000, 50_000, 80_000]
