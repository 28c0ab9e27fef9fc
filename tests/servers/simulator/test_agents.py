"""Agents in virtual time: when turns of sub-agents and of traces are sent, and what they find in the prefix cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.load.turns import Turns
from servers.simulator.virtual import Outcome, simulate_sessions
from tests.servers.simulator.test_sessions import drawn, emulated


def check_waits(outcomes: list[Outcome], turns: Turns) -> None:
    assert [each.index for each in outcomes] == list(range(turns.total))
    for number, outcome in enumerate(outcomes):
        over = [outcomes[wait.turn].times_s[-1] + wait.delay_ns / 1e9 for wait in turns.waits(number)]
        assert outcome.sent_s == max(over, default=outcome.sent_s) and len(outcome.times_s) == outcome.output


@settings(max_examples=15, deadline=None)
@given(
    subagents=st.sampled_from(["1:2:3", "0.5:3:1", "0.3:1:2"]),
    concurrency=st.sampled_from([None, "1", "3"]),
    seed=st.integers(0, 1000),
)
def test_turns_are_sent_when_what_they_wait_for_is_over(subagents: str, concurrency: str | None, seed: int) -> None:
    load, _, sent, turns = drawn(
        sessions=4, turns="uniform:1:4", think_time="uniform:0:0.5", concurrency=concurrency, seed=seed,
        subagents=subagents, first_tokens="uniform:70:90", prefix="1:64", input_tokens="uniform:4:60",
        output_tokens="uniform:1:20",
    )  # fmt: skip
    outcomes = simulate_sessions(emulated("vllm@v1"), sent, turns, load.streams)
    check_waits(outcomes, turns)
    for number, outcome in enumerate(outcomes):
        if (base := turns.base(number)) is not None:
            before = outcomes[base.turn]
            said = before.prompt + before.output
            assert outcome.cached_tokens == (said - 1) // 16 * 16  # whole blocks of what is computed
        elif turns.place(number)[1]:
            assert outcome.cached_tokens >= 64  # the beginning that all agents share


def weka(path: Path, *calls: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"id": "a", "block_size": 16, "requests": calls}))
    return path


def call(t: float, tokens: int, out: int = 8) -> dict[str, Any]:
    return {"t": t, "type": "s", "in": tokens, "out": out, "api_time": 1.0, "hash_ids": list(range(-(-tokens // 16)))}


@pytest.mark.parametrize("scheduler", ["vllm@v1", "sglang@0.5.23"])
def test_a_trace_of_agents_in_virtual_time(scheduler: str, tmp_path: Path) -> None:
    agent = {"t": 2.0, "type": "subagent", "requests": [call(2.0, 64), call(4.0, 128)]}
    path = weka(tmp_path / "t.json", call(0, 160), agent, agent, call(6.0, 320))
    load, _, sent, turns = drawn(trace=path)
    assert load.in_sessions and load.planned == 6 and load.requests == 1
    outcomes = simulate_sessions(emulated(scheduler), sent, turns, load.streams)
    check_waits(outcomes, turns)
    assert [len(turns.waits(number)) for number in range(6)] == [0, 1, 1, 1, 1, 3]
    assert outcomes[-1].cached_tokens == 160  # the recorded prompt repeats the first one, and no reply of this run
