"""Clients that leave, in virtual time: what the server frees, and how the report tells a server that does from one that
does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.client.engine import run_here
from loadgen.config import Config
from loadgen.event_loop import run_loop
from loadgen.load.choices import Cancels
from loadgen.report import abandoned, build, text
from loadgen.report.metrics import CONVENTIONS
from loadgen.report.schema import Abandoned
from loadgen.rundir import records
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.records import RequestTable
from servers.predict import command as predict
from servers.serve.modelled_timing import SimulatedTiming
from servers.simulator.build import SCHEDULERS, Emulated, emulate
from servers.simulator.options import Hardware
from servers.simulator.virtual import Outcome, simulate
from tests.loadgen.client.test_engine import plan
from tests.loadgen.tables import manifest
from tests.servers.reader import serving

RULES = CONVENTIONS["loadgen"]


def emulated(scheduler: str = "vllm@v1", **options: Any) -> Emulated:
    return emulate(Hardware(gpu="h200", scheduler=scheduler, **options).setup(scheduler.partition("@")[0], "7b", 4096))


def played(server: Emulated, *, cancels: bool = True, **options: Any) -> tuple[list[Outcome], RequestTable]:
    load, shapes = predict.drawn(Config(gpu="h200", **options))
    sent = predict.requests(load, shapes)
    outcomes = predict.play(server, load, sent) if cancels else simulate(server, sent, load.streams)
    return outcomes, predict.record_table(list(outcomes), shapes, None)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@given(seed=st.integers(0, 3), closed=st.booleans())
@settings(max_examples=4, deadline=None)
def test_looking_at_each_token_changes_no_time(scheduler: str, seed: int, closed: bool) -> None:
    """The way with cancellations, of which none is drawn, beside the quick one."""
    load, shapes = predict.drawn(
        Config(gpu="h200", requests=40, input_tokens="uniform:10:300", output_tokens="uniform:2:40", seed=seed,
               **({"concurrency": 9} if closed else {"arrival": "poisson:30"}))
    )  # fmt: skip
    sent = list(predict.requests(load, shapes))
    plain = simulate(emulated(scheduler), sent, load.streams)
    watched = simulate(emulated(scheduler), sent, load.streams, cancels=Cancels(1e-12, seed))
    for one, other in zip(watched, plain, strict=True):
        assert not one.abandoned and np.allclose(one.times_s, other.times_s, rtol=0, atol=1e-9)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("load", [{"concurrency": 12}, {"arrival": "poisson:60"}])
def test_just_the_drawn_are_given_up_at_their_token_and_all_others_are_whole(
    scheduler: str, load: dict[str, Any]
) -> None:
    outcomes, table = played(
        emulated(scheduler), requests=120, input_tokens=64, output_tokens="uniform:2:60", cancel=0.3, seed=2, **load
    )
    cancels = Cancels(0.3, 2)
    for each in outcomes:
        token = cancels.token(each.index, each.output)
        assert each.abandoned == (token is not None)
        assert len(each.times_s) == (each.output if token is None else token)
    gone = table.abandoned
    assert 20 < gone.sum() < 60 and set(table.outcome.tolist()) == {OUTCOMES.index("ok"), OUTCOMES.index("abandoned")}
    assert (table.output_tokens[gone] == -1).all() and (table.events[gone] > 0).all()


CROWDED = {
    "requests": 600,
    "input_tokens": 64,
    "output_tokens": 200,
    "cancel": 0.1,
    "arrival": "poisson:100",
    "seed": 4,
}


def judged(table: RequestTable) -> Abandoned:
    found = abandoned.build(table, RULES)
    assert found is not None
    return found


@pytest.mark.parametrize("scheduler", ["vllm@v1", "sglang@0.5.23", "lightllm@1.2"])
def test_a_server_that_frees_slots_and_one_that_holds_them_are_told_apart(scheduler: str) -> None:
    """The one that holds them: the same load without cancellation, whose clients alone have left."""
    server = emulated(scheduler, max_running=16)
    _, freed = played(server, **CROWDED)
    whole, _ = played(server, cancels=False, **CROWDED)
    cancels = Cancels(0.1, 4)
    for each in whole:
        if (token := cancels.token(each.index, each.output)) is not None:
            del each.times_s[token:]
            each.abandoned = True
    _, shapes = predict.drawn(Config(gpu="h200", **CROWDED))
    held = predict.record_table(whole, shapes, None)
    assert (judged(freed).slots, judged(held).slots) == ("freed", "held")
    tpot_ms = np.median((held.last_token_ns - held.first_token_ns)[held.ok] / 199e6)
    left_ms = [(200 - token) * tpot_ms for number in range(600) if (token := cancels.token(number, 200)) is not None]
    assert np.quantile(left_ms, 0.25) < (judged(held).held_ms.p50 or 0) < np.quantile(left_ms, 0.75)


def test_where_nobody_waits_nothing_is_claimed() -> None:
    _, table = played(emulated(), **{**CROWDED, "arrival": "poisson:2"})
    assert judged(table).slots == "unknown" and judged(table).requests == int(table.abandoned.sum()) > 30


def test_of_a_load_without_cancellation_nothing_is_said() -> None:
    _, table = played(emulated(), requests=20)
    assert abandoned.build(table, RULES) is None


def test_where_others_wait_for_no_slot_nothing_is_claimed() -> None:
    """TGI 3 lets any number run, and has those that come wait for a good moment."""
    _, table = played(emulated("tgi@3"), **CROWDED)
    assert judged(table).slots == "unknown"


@pytest.mark.parametrize(("fault", "slots"), [((), "freed"), (("unnoticed:1",), "held")])
def test_over_the_wire_the_embedded_server_frees_slots_unless_a_fault_holds_them(
    fault: tuple[str, ...], slots: str, tmp_path: Path
) -> None:
    timing = SimulatedTiming(emulated(max_running=8))
    with serving(tmp_path, timing, "vllm", *fault) as server:
        the_plan = plan(
            f"http://127.0.0.1:{server.port}", requests=160, concurrency=16, input_tokens=16, output_tokens=50,
            cancel=0.2, seed=4,
        )  # fmt: skip
        run_loop(run_here(the_plan, tmp_path, lambda snapshots: None))
    table, client = records.read(tmp_path)
    cancels = Cancels(0.2, 4)
    expected = {n: token for n in range(160) if (token := cancels.token(n, 50)) is not None}
    gone = table.select(table.abandoned)
    assert dict(zip(gone.id.tolist(), gone.events.tolist(), strict=True)) == expected
    report = build.build(manifest(arrival="concurrency:16", requests_planned=160), table, client)
    assert report.requests.failed == 0 and report.requests.ok == 160 - len(expected)
    assert judged(table).slots == slots
    assert ("SLOTS_HELD" in [each.code for each in report.verdict.findings]) == (slots == "held")
    assert f"Their slots were {slots}" in text.render(report)
