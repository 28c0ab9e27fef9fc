"""Conversations of a file against a server whose every word is known: the history that each turn repeats is the real
one, and no word of the file's assistant is in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backends
from backends.protocol import ServerInfo
from loadgen.client.engine import run_here
from loadgen.client.workers import run_in_workers
from loadgen.config import Config
from loadgen.event_loop import run_loop
from loadgen.plan import plan_run
from loadgen.rundir import records
from loadgen.target import Target
from tests.loadgen.client.test_sessions import OUTPUT, by_number, chat_reply, reply, tgi_reply
from tests.loadgen.scripted import Script, Scripted, scripted

USER = [["one two", "three", "four"], ["five"], ["six", "seven"]]  # of each conversation
SHARE_GPT = [
    {
        "conversations": [
            *([{"from": "system", "value": "Be brief."}] if number == 0 else []),
            *(
                each
                for text in turns
                for each in ({"from": "human", "value": text}, {"from": "gpt", "value": "NEVER SENT"})
            ),
        ]
    }
    for number, turns in enumerate([*USER, ["warm up", "never sent"]])
]
NAMES = {"human": "user", "gpt": "assistant", "system": "system"}
OPEN_AI = [
    {"messages": [{"role": NAMES[each["from"]], "content": each["value"]} for each in row["conversations"]]}
    for row in SHARE_GPT
]


def played(
    rows: list[Any], script: Callable[[int], Script], out: Path, backend: str, workers: int = 1
) -> tuple[Scripted, list[dict[str, Any]]]:
    """What the server saw, and the records in the order of their ids."""
    path = out / "conversations.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    async def story() -> Scripted:
        async with scripted(script) as world:
            config = Config(
                url=world.url, backend=backend, dataset=path, warmup=1, think_time=0.01, output_tokens=OUTPUT
            )
            plan = plan_run(config, backends.get(backend), Target(world.url), ServerInfo("m"), "r")
            if workers == 1:
                await run_here(plan, out, lambda snapshots: None)
            else:
                await run_in_workers(plan, workers, out, lambda snapshots: None)
                records.merge(out)
            return world

    world = run_loop(story())
    lines = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines if line.get("phase") == "warmup"] == [0]
    measured = [line for line in lines if line.get("phase") == "measured"]
    warm_ups = [place for place, (_, head, _) in enumerate(world.requests) if head["x-request-id"] == "r-w0"]
    assert len(warm_ups) == 1 and b"warm up" in world.requests[warm_ups[0]][2]
    world.requests[warm_ups[0]] = (b"", {"x-request-id": "r--1"}, b"{}")
    return world, sorted(measured, key=lambda row: int(row["id"]))


def real(number: int) -> str:
    """What the server's `number`-th reply said."""
    return "".join(f" r{number}.{place}" for place in range(OUTPUT))


@pytest.mark.parametrize("rows", [SHARE_GPT, OPEN_AI], ids=["ShareGPT", "OpenAI"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_chat_repeats_the_real_replies(rows: list[Any], workers: int, tmp_path: Path) -> None:
    world, records_of_all = played(rows, chat_reply, tmp_path, "openai-chat", workers)
    bodies = by_number(world)
    assert {row["outcome"] for row in records_of_all} == {"ok"} and len(records_of_all) == 6
    number = 0
    for session, turns in enumerate(USER):
        expected = [{"role": "system", "content": "Be brief."}] if session == 0 else []
        for turn, text in enumerate(turns):
            answered, body = bodies[number]
            expected.append({"role": "user", "content": text})
            assert body["messages"] == expected and body["max_tokens"] == OUTPUT
            expected.append({"role": "assistant", "content": real(answered)})
            assert (records_of_all[number]["session"], records_of_all[number]["turn"]) == (session, turn + 1)
            number += 1


@pytest.mark.parametrize("rows", [SHARE_GPT, OPEN_AI], ids=["ShareGPT", "OpenAI"])
@pytest.mark.parametrize(("backend", "script"), [("openai", reply), ("vllm", reply), ("tgi", tgi_reply)])
def test_a_text_repeats_the_real_replies(
    rows: list[Any], backend: str, script: Callable[[int], Script], tmp_path: Path
) -> None:
    world, records_of_all = played(rows, script, tmp_path, backend)
    bodies = by_number(world)
    assert [row["asked_prompt_tokens"] for row in records_of_all] == [0] * 6  # only the server knows
    number = 0
    for session, turns in enumerate(USER):
        expected = "Be brief.\n" if session == 0 else ""
        for turn, text in enumerate(turns):
            answered, body = bodies[number]
            expected += ("\n" if turn else "") + text
            assert body["inputs" if backend == "tgi" else "prompt"] == expected
            expected += real(answered)
            number += 1
