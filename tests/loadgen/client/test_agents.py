"""Agents against a server whose every word is known: what each turn waits for and goes on with, and what a report says
of the time that tools took."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.client.engine import run_here
from loadgen.event_loop import run_loop
from loadgen.report import sessions
from loadgen.report.metrics import CONVENTIONS
from loadgen.rundir import records
from tests.loadgen.client.test_sessions import (
    by_number,
    chat_reply,
    ids,
    plan,
    played,
    reply,
    sessions_of,
)
from tests.loadgen.load.loads import load
from tests.loadgen.scripted import CLOSE, STREAM_HEAD, Script, Scripted, chunk, scripted

AGENTS: dict[str, Any] = {
    "sessions": 3, "turns": 3, "subagents": "0.7:2:2", "think_time": "uniform:0.01:0.03", "first_tokens": "20",
    "prefix": "1:12",
}  # fmt: skip


def slowly(delays_ms: Sequence[int]) -> Callable[[int], Script]:
    """Replies that begin after so long each, in turn."""

    def script(number: int) -> Script:
        head, *rest = reply(number)
        return [head, delays_ms[number % len(delays_ms)] / 1000, *rest]

    return script


def replayed(
    rows: Sequence[dict[str, Any]], directory: Path, script: Callable[[int], Script] = reply, **options: Any
) -> tuple[Scripted, list[dict[str, Any]]]:
    """A trace of agents, played: what the server saw, and the records."""
    path = directory / "trace.jsonl"
    path.write_text("".join(json.dumps({"input_length": 40, "output_length": 3} | row) + "\n" for row in rows))

    async def story() -> Scripted:
        async with scripted(script) as world:
            the_plan = plan(world.url)
            of_trace = load(trace=path, **options).within(None)
            job = msgspec.structs.replace(the_plan.job, load=of_trace)
            await run_here(msgspec.structs.replace(the_plan, job=job), directory, lambda snapshots: None)
            return world

    world = run_loop(story())
    lines = [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]
    return world, [line for line in lines if "scheduled_ns" in line]


def check_waits(
    rows: Sequence[dict[str, Any]], waits: Callable[[int], Any], number: Callable[[dict[str, Any]], int]
) -> None:
    """Each was due exactly when the last of its waits was over, and never sent earlier."""
    by_place = {number(row): row for row in rows}
    for place, row in by_place.items():
        over = [by_place[wait.turn]["done_ns"] + wait.delay_ns for wait in waits(place)]
        assert row["scheduled_ns"] == max(over, default=row["scheduled_ns"]) <= row["sent_ns"]


@settings(max_examples=8, deadline=None)
@given(delays_ms=st.lists(st.integers(0, 25), min_size=3, max_size=7), seed=st.integers(0, 99))
def test_no_turn_is_sent_before_what_it_waits_for_in_whatever_order_replies_end(
    delays_ms: list[int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    the_plan, _, rows = played(slowly(delays_ms), tmp_path_factory.mktemp("run"), **AGENTS, seed=seed)
    turns = the_plan.job.load.turns()
    assert turns is not None and len(rows) == turns.total and {row["outcome"] for row in rows} == {"ok"}
    check_waits(rows, turns.waits, lambda row: int(row["id"]))


def test_what_each_agent_repeats(tmp_path: Path) -> None:
    """An agent goes on with its own conversation, whatever the others say beside it; all begin alike."""
    the_plan, world, rows = played(slowly([0, 20, 5]), tmp_path, **AGENTS)
    bodies, turns, shapes = by_number(world), the_plan.job.load.turns(), the_plan.job.load.shapes()
    assert turns is not None
    joins = 0
    for row in rows:
        base, said = turns.base(row["id"]), bodies[row["id"]][1]["prompt"]
        assert len(said) == row["asked_prompt_tokens"] == shapes.shape(row["id"]).prompt_tokens
        assert row.get("shared_tokens", 0) == shapes.shape(row["id"]).shared_tokens
        assert said[:12] == bodies[0][1]["prompt"][:12]
        if base is not None:
            answered, before = bodies[base.turn]
            history = before["prompt"] + ids(answered)
            assert said[: len(history)] == history
        if len(row.get("after", [])) > 1:
            first = turns.begin(row["session"])
            assert [first + turn - 1 for turn in row["after"]] == [wait.turn for wait in turns.waits(row["id"])]
            joins += 1
    assert joins >= 2


def test_a_history_that_is_cut_back_is_the_first_message(tmp_path: Path) -> None:
    cut = {"sessions": 1, "turns": 4, "input_tokens": 10, "think_time": 0, "context_tokens": 39}
    _, world, rows = played(chat_reply, tmp_path, "openai-chat", **cut)
    said = [body["messages"] for _, (_, body) in sorted(by_number(world).items())]
    assert [len(messages) for messages in said] == [1, 3, 5, 2]  # 10, 23, 36 and a reply of 3; 49 is too much
    assert said[3][0] == said[0][0] and {row["outcome"] for row in rows} == {"ok"}


def test_when_one_agent_fails_the_others_go_on_and_nobody_goes_on_for_all(tmp_path: Path) -> None:
    broken: Script = [STREAM_HEAD, chunk(b'data: {"choices":[{"text":" a","token_ids":[7]}]}\n\n'), CLOSE]
    agents = AGENTS | {"sessions": 2, "turns": 2, "subagents": "1:2:2", "concurrency": 1}
    _, world, rows = played(lambda n: broken if n == 1 else reply(n), tmp_path, **agents)
    first, second = ([row["outcome"] for row in of_it] for _, of_it in sorted(sessions_of(rows).items()))
    assert sorted(first[1:5]) == ["dropped", "ok", "ok", "truncated"] and first[5] == "dropped"
    assert second == ["ok"] * 6 and len(world.requests) == 10


def test_a_closed_loop_counts_sessions_not_agents(tmp_path: Path) -> None:
    agents = AGENTS | {"sessions": 6, "subagents": "1:3:2", "concurrency": 2}
    _, _, rows = played(slowly([8]), tmp_path, **agents)
    spans = [
        (min(row["scheduled_ns"] for row in of_it), max(row["done_ns"] for row in of_it))
        for of_it in sessions_of(rows).values()
    ]
    going = [sum(begin <= at < end for begin, end in spans) for at, _ in spans]
    assert len(spans) == 6 and max(going) == 2 and going.count(2) >= 4
    sent = sorted([(row["sent_ns"], 1) for row in rows] + [(row["done_ns"], -1) for row in rows])
    assert max(itertools.accumulate(change for _, change in sent)) > 2


TOOLS_MS = [(30, 12), (45,)]


@pytest.mark.parametrize("concurrency", [None, 1])
def test_scripted_tool_times_are_recovered_exactly(concurrency: int | None, tmp_path: Path) -> None:
    rows = []
    for session, tools in enumerate(TOOLS_MS):
        rows.append({"timestamp": 0, "session_id": session})
        rows += [{"session_id": session, "delay": delay} for delay in tools]
    _, seen = replayed(rows, tmp_path, slowly([5, 9]), concurrency=concurrency)
    assert {row["outcome"] for row in seen} == {"ok"} and len(seen) == 5
    table = records.read(tmp_path)[0].measured()
    found = sessions.build(table, CONVENTIONS["loadgen"], None, True)
    assert found is not None and found.tools_ms is not None and found.tokens_wait_ms is not None
    assert found.task_ms is not None
    assert (found.tools_ms.min, found.tools_ms.max) == (42.0, 45.0)
    waited_ms = sum((row["done_ns"] - row["scheduled_ns"]) / 1e6 for row in seen)
    assert found.tokens_wait_ms.mean == pytest.approx(waited_ms / 2)
    assert found.task_ms.mean == pytest.approx(found.tokens_wait_ms.mean + found.tools_ms.mean)
    assert found.think_time_ms.mean == pytest.approx((30 + 12 + 45) / 3)


def test_a_tool_beside_agents_takes_time_where_nobody_waits_for_tokens(tmp_path: Path) -> None:
    """The tool takes 60 ms; the two agents beside it, of whom one uses a tool of 10 ms, are done long before."""
    names = [
        {"timestamp": 0, "session_id": "s", "turn": 0},
        {"session_id": "s", "turn": 1, "after": [0], "delay": 10},
        {"session_id": "s", "turn": 2, "after": [0]},
        {"session_id": "s", "turn": 3, "after": [1, 2], "delay": 60},
    ]
    _, seen = replayed(names, tmp_path)
    turn = {row["turn"]: row for row in seen}
    last_ns = max(turn[2]["done_ns"], turn[3]["done_ns"])
    assert turn[4]["scheduled_ns"] == last_ns + 60_000_000 and turn[4]["after"] == [2, 3]
    found = sessions.build(records.read(tmp_path)[0].measured(), CONVENTIONS["loadgen"], None, True)
    assert found is not None and found.tools_ms is not None and found.tools_ms.mean is not None
    alone_ms = max(0, turn[2]["scheduled_ns"] - turn[3]["done_ns"]) / 1e6  # if the second agent was done before
    assert found.tools_ms.mean == pytest.approx(60 + alone_ms, abs=1e-3)
