"""Which turns wait for which, as they are drawn and as traces have them; and that under any order of replies none is
released before what it waits for."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load import traces
from loadgen.load.agent_traces import Pending, WaitsForItself, planned
from loadgen.load.lengths import WorkloadError
from loadgen.load.sessions import SessionShapes
from loadgen.load.turns import ActiveSessions, Base, TurnDelay, Turns
from tests.loadgen.load.loads import load

FORK = (  # 0 begins 1 and 2, then 3 and 4 beside each other; 5 waits for all of them
    Pending(0, ()), Pending(1, ((0, 0, False),)), Pending(2, ((1, 5, False),)), Pending(3, ((0, 0, False),)),
    Pending(4, ((3, 7, False),)), Pending(5, ((0, 90, False), (2, 0, False), (4, 0, False))),
)  # fmt: skip


def drawn_turns(**options: Any) -> Turns:
    turns = load(sessions=20, turns="uniform:1:6", **options).turns()
    assert turns is not None
    return turns


@st.composite
def graphs(draw: st.DrawFn) -> list[list[Pending]]:
    """Sessions in which each turn but the first waits for one or more earlier ones."""
    row, sessions = 0, []
    for _ in range(draw(st.integers(1, 4))):
        begin, session = row, []
        for place in range(draw(st.integers(1, 8))):
            waits = draw(st.sets(st.integers(begin, row - 1), min_size=1, max_size=3)) if place else set[int]()
            session.append(
                Pending(row, tuple((each, draw(st.integers(0, 50)), draw(st.booleans())) for each in sorted(waits)))
            )
            row += 1
        sessions.append(session)
    return sessions


@given(graphs(), st.data())
def test_under_any_order_of_replies_no_turn_is_sent_before_what_it_waits_for(
    sessions: list[list[Pending]], data: st.DataObject
) -> None:
    """And each is due exactly when its last wait is over; those behind a failure are lost, and no other."""
    rows, turns = planned(sessions)
    assert sorted(rows) == list(range(turns.total))
    going = ActiveSessions(turns)
    under_way = {turns.begin(session): 0.0 for session in range(len(sessions))}
    for session in range(len(sessions)):
        going.begin(session)
    ended: dict[int, tuple[float, float]] = {}
    failed: set[int] = set()
    lost: set[int] = set()
    now = 0.0
    while under_way:
        number = data.draw(st.sampled_from(sorted(under_way)))
        due = under_way.pop(number)
        now = max(now, due) + data.draw(st.integers(0, 20))
        if data.draw(st.integers(0, 9)) == 0:
            failed.add(number)
            lost.update(found := going.failed(number))
            assert found == sorted(set(found)) and not set(found) & (ended.keys() | under_way.keys())
            continue
        ended[number] = (due, now)
        for later, at in going.ended(number, due, now):
            over = [
                max(
                    (ended[wait.turn][0] if wait.from_due else ended[wait.turn][1]) + wait.delay_ns, ended[wait.turn][1]
                )
                for wait in turns.waits(later)
            ]
            assert at == max(over) >= max(ended[wait.turn][1] for wait in turns.waits(later))
            under_way[later] = at
    assert len(going) == 0
    assert ended.keys() | failed | lost == set(range(turns.total)) and not ended.keys() & (failed | lost)
    for number in lost:
        assert any(wait.turn in failed | lost for wait in turns.waits(number))


@given(graphs())
def test_followers_are_those_that_wait(sessions: list[list[Pending]]) -> None:
    _, turns = planned(sessions)
    for number in range(turns.total):
        assert all(number in (wait.turn for wait in turns.waits(later)) for later in turns.followers(number))
    assert sum(len(turns.followers(each)) for each in range(turns.total)) == sum(
        len(turns.waits(each)) for each in range(turns.total)
    )


def test_agents_beside_each_other_by_hand() -> None:
    _, turns = planned([FORK])
    going = ActiveSessions(turns)
    going.begin(0)
    assert going.ended(0, 0, 100) == [(1, 100), (3, 100)]
    assert going.ended(1, 100, 150) == [(2, 155)] and going.ended(3, 100, 110) == [(4, 117)]
    assert going.ended(4, 117, 130) == []
    assert going.ended(2, 155, 180) == [(5, 190)]  # 90 after the first, and later than both agents
    assert len(going) == 1 and going.ended(5, 190, 191) == [] and len(going) == 0
    assert turns.after(5) == (1, 3, 5) and turns.after(1) == () and turns.after(3) == (1,)


def test_when_an_agent_fails_the_other_goes_on_and_the_join_is_lost() -> None:
    _, turns = planned([FORK])
    going = ActiveSessions(turns)
    going.begin(0)
    going.ended(0, 0, 100)
    assert going.failed(1) == [2, 5]
    assert going.ended(3, 100, 110) == [(4, 117)] and 0 in going
    assert going.ended(4, 117, 130) == [] and 0 not in going


@pytest.mark.parametrize("own", [((0, 0, False),), ((1, 0, False),)])
def test_what_waits_for_itself_is_found(own: tuple[tuple[int, int, bool], ...]) -> None:
    with pytest.raises(WaitsForItself):
        planned([[Pending(0, own), Pending(1, ((0, 0, False),))]])


def test_sub_agents_begin_with_a_reply_and_are_waited_for() -> None:
    turns = drawn_turns(subagents="0.4:2:3", think_time="uniform:0.01:0.05", seed=4)
    plain = drawn_turns(think_time="uniform:0.01:0.05", seed=4)
    joins = [number for number in range(turns.total) if len(turns.waits(number)) > 1]
    assert turns.total == plain.total + 6 * len(joins) and len(joins) > 5
    for join in joins:
        agent, *others = turns.waits(join)
        assert agent.turn == join - 7 and turns.base(join) == Base(join - 7)
        assert [each.turn for each in others] == [join - 4, join - 1] and agent.delay_ns > 0
        for first in (join - 6, join - 3):
            assert turns.waits(first) == (TurnDelay(join - 7, 0),) and turns.base(first) is None
            assert turns.base(first + 1) == Base(first) and turns.waits(first + 1)[0].turn == first
        assert turns.repeated_by(join - 7) == [join] and set(turns.followers(join - 7)) == {join - 6, join - 3, join}


def test_a_context_is_cut_back_to_the_first_prompt() -> None:
    options: dict[str, Any] = {"input_tokens": 30, "first_tokens": 100, "output_tokens": 10, "prefix": "1:64"}
    of_the_load = load(sessions=2, turns=6, context_tokens=220, **options)
    turns, shapes = of_the_load.turns(), of_the_load.shapes()
    assert turns is not None and isinstance(shapes, SessionShapes)
    prompts = [shapes.shape(number).prompt_tokens for number in range(6)]
    # 100; 140; 180; 220 with a reply of 10 is too much, so 100 + 30; then 170, 210 is one with 10 of reply
    assert prompts == [100, 140, 180, 130, 170, 210]
    assert turns.base(3) == Base(0, reply=False) and turns.base(4) == Base(3)
    cut, before = shapes.shape(3), shapes.shape(2)
    assert cut.shared_tokens == 100 and cut.segments[:2] == before.segments[:2] != cut.segments[1:3]
    assert of_the_load.longest_tokens() == 220 == max(sum(shapes.shape(number)[:2]) for number in range(12))
    assert shapes.shape(0).shared_tokens == 0 and shapes.shape(6).shared_tokens == 64


@given(st.integers(0, 5))
def test_the_longest_is_that_of_all_shapes(seed: int) -> None:
    of_the_load = load(
        sessions=6, turns="uniform:1:5", subagents="0.5:2:2", first_tokens="uniform:50:90", input_tokens="uniform:5:20",
        output_tokens="uniform:1:20", context_tokens=160, seed=seed,
    )  # fmt: skip
    turns, shapes = of_the_load.turns(), of_the_load.shapes()
    assert turns is not None
    assert of_the_load.longest_tokens() == max(sum(shapes.shape(each)[:2]) for each in range(turns.total))
    for number in range(turns.total):
        shape = shapes.shape(number)
        assert sum(tokens for _, tokens in shape.segments) == shape.prompt_tokens + shape.output_tokens


def mooncake(directory: Path, *rows: dict[str, Any]) -> Path:
    path = directory / "trace.jsonl"
    lengths = {"input_length": 100, "output_length": 5}
    path.write_text("".join(json.dumps(lengths | row) + "\n" for row in rows))
    return path


def test_turns_with_a_delay_wait_for_their_replies(tmp_path: Path) -> None:
    path = mooncake(
        tmp_path, {"timestamp": 500, "session_id": "b"}, {"timestamp": 0, "session_id": "a", "input_length": 7},
        {"session_id": "b", "delay": 40}, {"timestamp": 600, "input_length": 9}, {"session_id": "a", "delay": 4},
        {"timestamp": 900, "session_id": "b"},
    )  # fmt: skip
    trace = traces.read(path, speed=2)
    assert trace.turns is not None and trace.turns.first.tolist() == [0, 2, 5, 6]
    assert trace.line.tolist() == [1, 4, 0, 2, 5, 3] and trace.input_tokens.tolist() == [7, 100, 100, 100, 100, 9]
    assert trace.due_ns[trace.turns.first[:-1]].tolist() == [0, 250_000_000, 300_000_000]
    waits = [trace.turns.waits(number) for number in range(6)]
    assert waits[1] == (TurnDelay(0, 2_000_000),) and waits[3] == (TurnDelay(2, 20_000_000),)
    assert waits[4] == (TurnDelay(3, 180_000_000, True),)  # at its own time, or with the reply before it
    assert not any(waits[first] for first in (0, 2, 5))


def test_turns_may_wait_for_several(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"timestamp": 0, "session_id": "s", "turn": "plan"},
        {"session_id": "s", "turn": "left", "after": ["plan"], "delay": 10},
        {"session_id": "s", "turn": "right", "after": ["plan"]},
        {"session_id": "s", "after": ["left", "right", "left"], "delay": 3},
    ]
    turns = traces.read(mooncake(tmp_path, *rows)).turns
    assert turns is not None
    assert turns.waits(3) == (TurnDelay(1, 3_000_000), TurnDelay(2, 3_000_000)) and turns.after(3) == (2, 3)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([{"turn": 1, "after": [2]}, {"turn": 2, "after": [1]}], "line 1 waits for itself, through what"),
        ([{"turn": 1}, {"turn": 2, "after": [2]}], "line 2 waits for itself"),
        ([{"turn": 1}, {"turn": 2, "after": [3]}], "line 2 waits for the turn '3', which is not among those of its"),
        ([{"turn": 1}, {"turn": 2, "after": []}], "line 2 waits for no turn, which only the first of a session may"),
        ([{"turn": 1}, {"turn": 2, "after": 1}], "line 2 is no request in format mooncake: after:"),
        ([{"turn": 1}, {"delay": -1}], "line 2 is no request in format mooncake: delay:"),
    ],
)
def test_what_cannot_be_played_is_told(rows: list[dict[str, Any]], why: str, tmp_path: Path) -> None:
    path = mooncake(tmp_path, *({"timestamp": 0, "session_id": "s"} | row for row in rows))
    with pytest.raises(WorkloadError, match=why):
        traces.read(path)


def call(t: float, tokens: int, **changes: Any) -> dict[str, Any]:
    ids = list(range(-(-tokens // 64)))
    return {"t": t, "type": "s", "model": "m", "in": tokens, "out": 5, "hash_ids": ids, "api_time": 1.0} | changes


def weka(*calls: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"id": "a", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": calls, **changes}


AGENT = weka(
    call(0, 200),
    call(3.5, 330, think_time=9.0),
    {"t": 5.0, "type": "subagent", "agent_id": "x", "duration_ms": 6000, "requests": [call(5, 64), call(7, 128)]},
    {"t": 5.0, "type": "subagent", "agent_id": "y", "requests": [call(0.5, 64), call(8.5, 128)]},
    call(16.5, 400),
)


@pytest.mark.parametrize("form", ["file", "pretty", "lines", "directory"])
def test_a_trace_of_agents(form: str, tmp_path: Path) -> None:
    """The first waits 2.5 s from reply to request; of two sub-agents, one tells its times from its own beginning."""
    path = tmp_path / "trace.json"
    if form == "directory":
        path.mkdir()
        (path / "1.json").write_text(json.dumps(AGENT, indent=1))
        (path / "2.json").write_text(json.dumps(weka(call(0, 64))))
    elif form == "lines":
        path.write_text(json.dumps(AGENT) + "\n\n" + json.dumps(weka(call(0, 64))) + "\n")
    else:
        path.write_text(json.dumps(AGENT, indent=1 if form == "pretty" else None))
    trace = traces.read(path)
    turns = trace.turns
    assert turns is not None and turns.first.tolist() == ([0, 7] if form in ("file", "pretty") else [0, 7, 8])
    assert (trace.format, trace.block_tokens, trace.notes) == ("weka", 64, ())
    assert trace.input_tokens.tolist()[:7] == [200, 330, 64, 128, 64, 128, 400]
    seconds = [[(each.turn, each.delay_ns / 1e9) for each in turns.waits(number)] for number in range(7)]
    assert seconds == [
        [], [(0, 2.5)], [(1, 0.5)], [(2, 1.0)], [(1, 1.0)], [(4, 7.0)], [(1, 2.0), (3, 2.0), (5, 2.0)],
    ]  # fmt: skip
    assert turns.base(6) is None and trace.shared_tokens()[1] == 256
    if len(trace) == 8:  # sessions share nothing, though their ids are the same
        assert trace.shared_tokens()[7] == 0 and turns.waits(7) == ()
    assert traces.read(path, limit=1).turns is not None and len(traces.read(path, limit=1)) == 7


def test_without_the_time_of_replies_the_think_time_counts(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(weka(call(0, 64, api_time=None), call(9, 64, think_time=2.0))))
    turns = traces.read(tmp_path / "t.json", speed=4).turns
    assert turns is not None and turns.waits(1) == (TurnDelay(0, 500_000_000),)


def test_what_is_odd_in_a_trace_of_agents_is_noted(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(weka(call(0, 64, out=0), call(0.5, 640))))
    trace = traces.read(tmp_path / "t.json")
    assert trace.output_tokens.tolist() == [1, 5] and trace.turns is not None
    assert trace.turns.waits(1) == (TurnDelay(0, 0),)
    assert [note.partition(" of its")[0] for note in trace.notes] == ["1", "1"]


def test_a_session_with_a_request_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    sessions = [weka(call(0, 64), call(2, 640)), AGENT, weka(call(0, 64), call(2, 128))]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(each) + "\n" for each in sessions))
    trace = traces.read(tmp_path / "t.jsonl").up_to(500)
    assert trace.turns is not None and trace.turns.first.tolist() == [0, 7, 9] and len(trace) == 9
    whole = traces.read(tmp_path / "t.jsonl").turns
    assert whole is not None
    moved = [tuple(wait._replace(turn=wait.turn - 2) for wait in whole.waits(number)) for number in range(2, 11)]
    assert [trace.turns.waits(number) for number in range(9)] == moved
    assert "2 longer than the model takes" in str(trace.left_out)
    with pytest.raises(WorkloadError, match="every session of the trace has a request of more than the 70 tokens"):
        traces.read(tmp_path / "t.jsonl").up_to(70)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (json.dumps(weka(call(-1, 64))), "line 1 is no session of agents: requests.0..t:"),
        ('{"id": "a", "block_size": 64, "requests": 5}', "line 1 is no session of agents: requests:"),
        (
            json.dumps(weka(call(0, 64))) + "\n" + json.dumps(weka(call(0, 64), block_size=16)),
            "line 2 has a block_size",
        ),
        (json.dumps(weka()), "holds no requests"),
        ('{\n"id": "a", "requests": [', "line 1 is no session of agents"),
    ],
)
def test_a_trace_of_agents_that_cannot_be_read_is_told(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(WorkloadError, match=why):
        traces.read(tmp_path / "t.json")


def test_named_agents_have_their_published_laws() -> None:
    of_the_load = load(workload="agentic", sessions=400)
    turns, shapes = of_the_load.turns(), of_the_load.shapes()
    assert turns is not None and isinstance(shapes, SessionShapes)
    own = [turns.count(session) for session in range(400)]
    firsts = [shapes.own(turns.begin(session)) for session in range(400)]
    assert 12_000 < np.median([first.prompt_tokens for first in firsts]) < 12_800
    assert 10 <= np.median(own) <= 25 and all(first.segments == ((0, 11_000),) for first in firsts)
    outputs = [shapes.own(number).output_tokens for number in range(turns.total)]
    assert np.mean(outputs) == pytest.approx(523, rel=0.2)
    joins = [number for number in range(turns.total) if len(turns.waits(number)) > 1]
    assert joins and all(len(turns.waits(number)) == 3 for number in joins)
    for earlier, later in itertools.pairwise(range(turns.total)):
        assert turns.place(later)[0] - turns.place(earlier)[0] in (0, 1)
