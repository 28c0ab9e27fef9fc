"""Sessions against a server whose every word is known: what each turn repeats, when it is due, and how sessions end."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.protocol import Sampling
from loadgen.client.engine import build_client, run_here
from loadgen.client.workers import run_in_workers
from loadgen.clock import now_ns
from loadgen.event_loop import run_loop
from loadgen.plan import ClientJob, ClientPlan, PromptSource, Timeouts
from loadgen.rundir import records
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.target import Target
from tests.loadgen.load.loads import load
from tests.loadgen.scripted import CLOSE, DONE, END, STREAM_HEAD, Script, Scripted, chunk, scripted, usage

OUTPUT = 3
OF_THE_LOAD = {"sessions": 6, "turns": "uniform:1:4", "think_time": "uniform:0.01:0.05", "input_tokens": "uniform:4:9"}


def ids(number: int) -> list[int]:
    """Of the tokens that the server's `number`-th reply has: no other reply has them."""
    return [10_000 + 10 * number + place for place in range(OUTPUT)]


def reply(number: int, *, with_ids: bool = True) -> Script:
    def event(place: int) -> bytes:
        choice = {"text": f" r{number}.{place}", "finish_reason": "length" if place == OUTPUT - 1 else None}
        return (
            b"data: "
            + json.dumps({"choices": [choice | ({"token_ids": [ids(number)[place]]} if with_ids else {})]}).encode()
            + b"\n\n"
        )

    return [STREAM_HEAD, *(chunk(event(place)) for place in range(OUTPUT)), chunk(usage(5, OUTPUT)), chunk(DONE), END]


def chat_reply(number: int) -> Script:
    def event(delta: dict[str, str], finish: str | None) -> bytes:
        return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"

    deltas = [{"role": "assistant", "content": ""}, *({"content": f" r{number}.{place}"} for place in range(OUTPUT))]
    events = [event(delta, "length" if place == OUTPUT else None) for place, delta in enumerate(deltas)]
    return [STREAM_HEAD, *map(chunk, events), chunk(usage(5, OUTPUT)), chunk(DONE), END]


def tgi_reply(number: int) -> Script:
    def event(place: int) -> bytes:
        fields: dict[str, Any] = {"token": {"id": 1, "text": f" r{number}.{place}"}}
        if place == OUTPUT - 1:
            fields |= {
                "generated_text": "-",
                "details": {"finish_reason": "length", "generated_tokens": OUTPUT, "input_length": 5},
            }
        return b"data:" + json.dumps(fields).encode() + b"\n\n"

    return [STREAM_HEAD, *(chunk(event(place)) for place in range(OUTPUT)), END]


def lightllm_reply(number: int) -> Script:
    def event(place: int) -> bytes:
        token = {
            "id": ids(number)[place],
            "text": f" r{number}.{place}",
            "count_output_tokens": place + 1,
            "prompt_tokens": 5,
        }
        ended = place == OUTPUT - 1
        fields = {"token": token, "finished": ended, "finish_reason": "length" if ended else None}
        return b"data:" + json.dumps(fields).encode() + b"\n\n"

    return [STREAM_HEAD, *(chunk(event(place)) for place in range(OUTPUT)), END]


def plan(url: str, backend: str = "vllm", session_header: str | None = None, **options: Any) -> ClientPlan:
    drawn = load(**(OF_THE_LOAD | {"output_tokens": OUTPUT, "seed": 3} | options))
    job = ClientJob(
        run_id="r", version="0", model="m", sampling=Sampling(OUTPUT, returns_token_ids=True), load=drawn, warmup=0,
        timeouts=Timeouts(2.0, 2.0, 2.0, 5.0), session_header=session_header,
    )  # fmt: skip
    return ClientPlan(
        job=job, backend=backend, target=Target(url), transport="fast", fresh=False, kernel_timestamps=False,
        prompts=PromptSource(),
    )  # fmt: skip


def played(
    script: Callable[[int], Script], out: Path, backend: str = "vllm", workers: int = 1, **options: Any
) -> tuple[ClientPlan, Scripted, list[dict[str, Any]]]:
    """The plan, what the server saw, and the records in the order of their ids."""

    async def story() -> tuple[ClientPlan, Scripted]:
        async with scripted(script) as world:
            the_plan = plan(world.url, backend, **options)
            if workers == 1:
                await run_here(the_plan, out, lambda snapshots: None)
            else:
                await run_in_workers(the_plan, workers, out, lambda snapshots: None)
                records.merge(out)
            return the_plan, world

    the_plan, world = run_loop(story())
    lines = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    rows = sorted((line for line in lines if "scheduled_ns" in line), key=lambda row: int(row["id"]))
    return the_plan, world, rows


def by_number(world: Scripted) -> dict[int, tuple[int, dict[str, Any]]]:
    """Of each request: which reply the server gave, and the body that it got."""
    return {
        int(head["x-request-id"].removeprefix("r-")): (place, json.loads(body))
        for place, (_, head, body) in enumerate(world.requests)
    }


def sessions_of(rows: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    grouped = defaultdict(list)
    for row in rows:
        grouped[row["session"]].append(row)
    return dict(grouped)


@pytest.mark.parametrize("arrival", [{}, {"arrival": "poisson:100"}, {"concurrency": 2}])
def test_turns_follow_each_other(arrival: dict[str, Any], tmp_path: Path) -> None:
    """Every turn is due exactly its think time after the reply before it, and is never sent earlier."""
    the_plan, world, rows = played(reply, tmp_path, **arrival)
    turns = the_plan.job.load.turns()
    assert turns is not None and [row["id"] for row in rows] == list(range(turns.total))
    assert {row["outcome"] for row in rows} == {"ok"} and len(world.requests) == turns.total > 10
    for session, of_it in sessions_of(rows).items():
        assert [row["turn"] for row in of_it] == list(range(1, turns.count(session) + 1))
        for earlier, later in itertools.pairwise(of_it):
            think_ns = turns.think_ns(later["id"])
            assert 10_000_000 <= think_ns <= 50_000_000
            assert later["scheduled_ns"] == earlier["done_ns"] + think_ns <= later["sent_ns"]


@pytest.mark.parametrize(("every_ms", "waits"), [(20, True), (300, False)])
def test_users_come_back_at_their_own_pace_but_never_before_their_reply(
    every_ms: int, waits: bool, tmp_path: Path
) -> None:
    """Replies take 60 ms or a little more."""

    def slowly(number: int) -> Script:
        head, *rest = reply(number)
        return [head, 0.06, *rest]

    _, _, rows = played(slowly, tmp_path, think_time=f"every:{every_ms / 1000}", turns=3)
    for of_it in sessions_of(rows).values():
        for earlier, later in itertools.pairwise(of_it):
            own_ns = earlier["scheduled_ns"] + every_ms * 1_000_000
            assert later["scheduled_ns"] == (earlier["done_ns"] if waits else own_ns) <= later["sent_ns"]
            assert later["sent_ns"] >= earlier["done_ns"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_header_names_the_conversation(workers: int, tmp_path: Path) -> None:
    """All turns of a session carry one name, in whichever process, and no two sessions the same."""
    _, world, rows = played(reply, tmp_path, workers=workers, session_header="X-Session-ID")
    names: dict[int, set[str]] = defaultdict(set)
    session_of = {row["id"]: row["session"] for row in rows}
    for _, head, _ in world.requests:
        names[session_of[int(head["x-request-id"].removeprefix("r-"))]].add(head["x-session-id"])
    assert names == {session: {f"r-s{session}"} for session in sessions_of(rows)}


def test_without_the_header_nothing_names_it(tmp_path: Path) -> None:
    _, world, _ = played(reply, tmp_path)
    assert not any("x-session-id" in head for _, head, _ in world.requests)


@pytest.mark.parametrize(("backend", "server"), [("vllm", reply), ("lightllm", lightllm_reply)])
def test_a_prompt_of_ids_repeats_all_that_was_said(
    backend: str, server: Callable[[int], Script], tmp_path: Path
) -> None:
    the_plan, world, rows = played(server, tmp_path, backend)
    bodies = by_number(world)
    shapes = the_plan.job.load.shapes()
    prompt = "prompt" if backend == "vllm" else "inputs"
    if backend == "vllm":
        assert all(body["return_token_ids"] for _, body in bodies.values())
    repeated = 0
    for row in rows:
        said = bodies[row["id"]][1][prompt]
        assert len(said) == row["asked_prompt_tokens"] == shapes.shape(row["id"]).prompt_tokens
        if row["turn"] > 1:
            answered, before = bodies[row["id"] - 1]
            history = before[prompt] + ids(answered)
            assert said[: len(history)] == history
            assert row["shared_tokens"] == len(history) == shapes.shape(row["id"]).shared_tokens
            repeated += 1
        else:
            assert "shared_tokens" not in row
    assert repeated > 3


@pytest.mark.parametrize(("backend", "server"), [("openai", reply), ("tgi", tgi_reply), ("openai-chat", chat_reply)])
def test_a_prompt_of_text_repeats_the_real_reply(backend: str, server: Callable[[int], Script], tmp_path: Path) -> None:
    _, world, rows = played(server, tmp_path, backend)
    bodies = by_number(world)
    assert len(rows) > 10
    for row in rows:
        if row["turn"] == 1:
            continue
        (answered, before), (_, body) = bodies[row["id"] - 1], bodies[row["id"]]
        real = "".join(f" r{answered}.{place}" for place in range(OUTPUT))
        assert row["asked_prompt_tokens"] == 0  # only the server knows
        if backend == "openai-chat":
            *history, last, new = body["messages"]
            assert history == before["messages"] and last == {"role": "assistant", "content": real}
            assert new["role"] == "user" and len(new["content"].split()) >= 4
        else:
            field = "inputs" if backend == "tgi" else "prompt"
            assert (
                body[field].startswith(before[field] + real + "\n") and len(body[field]) > len(before[field] + real) + 8
            )


def test_a_closed_loop_keeps_so_many_sessions_going(tmp_path: Path) -> None:
    """A session that thinks is one of them."""
    _, _, rows = played(reply, tmp_path, sessions=8, turns=3, think_time=0.03, concurrency=2)
    spans = [(of_it[0]["scheduled_ns"], of_it[-1]["done_ns"]) for of_it in sessions_of(rows).values()]
    going = [sum(begin <= at < end for begin, end in spans) for at, _ in spans]
    assert max(going) == 2 and going.count(2) >= 6
    assert sorted(begin for begin, _ in spans)[:2] == [0, 0]


def test_a_failed_turn_ends_its_session_and_no_other(tmp_path: Path) -> None:
    broken: Script = [STREAM_HEAD, chunk(b'data: {"choices":[{"text":" a","token_ids":[7]}]}\n\n'), CLOSE]
    _, world, rows = played(
        lambda n: broken if n == 4 else reply(n), tmp_path, sessions=4, turns=4, think_time=0.01, concurrency=1
    )
    first, second, *others = ([row["outcome"] for row in of_it] for _, of_it in sorted(sessions_of(rows).items()))
    assert first == ["ok"] * 4 and second == ["truncated", "dropped", "dropped", "dropped"]
    assert others == [["ok"] * 4] * 2 and len(world.requests) == 13
    dropped = [row for row in rows if row["outcome"] == "dropped"]
    assert [row["turn"] for row in dropped] == [2, 3, 4] and {row["session"] for row in dropped} == {1}
    assert {row["error"] for row in dropped} == {"turn 1 of its session failed (truncated)"}
    assert all(row["sent_ns"] is None for row in dropped)


def test_ids_that_do_not_come_end_the_session(tmp_path: Path) -> None:
    _, world, rows = played(lambda n: reply(n, with_ids=False), tmp_path, sessions=2, turns=3)
    assert [row["outcome"] for row in rows] == ["ok", "dropped", "dropped"] * 2 and len(world.requests) == 2
    assert "came without the ids of its tokens" in rows[1]["error"]


def test_more_processes_play_the_same_sessions(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    of_one, of_two = (
        played(reply, tmp_path / name, "openai", workers, sessions=7)[1:] for name, workers in (("one", 1), ("two", 2))
    )
    kept = ("id", "session", "turn", "asked_tokens", "outcome")
    assert [[row[key] for key in kept] for row in of_one[1]] == [[row[key] for key in kept] for row in of_two[1]]
    first = [
        {number: body["prompt"] for number, (_, body) in by_number(world).items()} for world, _ in (of_one, of_two)
    ]
    starts = [row["id"] for row in of_one[1] if row["turn"] == 1]
    assert [first[0][number] for number in starts] == [first[1][number] for number in starts]


def test_a_stopped_run_sends_no_more_turns(tmp_path: Path) -> None:
    """What has ended is kept; a session that thinks is not waited for."""

    async def story() -> None:
        async with scripted(reply) as world:
            client = build_client(plan(world.url, sessions=3, turns=5, think_time=30))
            await client.prepare()

            asyncio.get_running_loop().call_later(0.5, client.stop, 1.0)
            await client.run(now_ns(), tmp_path / "requests.jsonl")
            await client.transport.close()

    run_loop(story())
    table, facts = records.read(tmp_path)
    assert [OUTCOMES[code] for code in table.outcome] == ["ok"] * 3 and facts[0].state == "interrupted"
    assert np.array_equal(table.id, [0, 5, 10])


def test_sessions_draw_their_turns_by_their_laws() -> None:
    drawn = load(sessions=4000, turns="uniform:1:5", think_time="lognormal:2:0.5", input_tokens=7, output_tokens=2)
    turns = drawn.turns()
    assert turns is not None and drawn.planned == turns.total
    counts = np.array([turns.count(session) for session in range(4000)])
    assert np.all(np.abs(np.bincount(counts, minlength=6)[1:] - 800) < 4 * np.sqrt(800 * 0.8))  # four sigma of 800
    think_s = np.array([turns.think_ns(number) for number in range(turns.total)]) / 1e9
    assert abs(np.log(np.median(think_s)) - np.log(2)) < 0.02 and abs(np.log(think_s).std() - 0.5) < 0.02
    for number in (0, 1, turns.total // 2, turns.total - 1):
        session, turn = turns.place(number)
        assert turns.begin(session) + turn == number and turns.is_last(number) == (turn + 1 == turns.count(session))
    longest = max(drawn.shapes().shape(turns.begin(session + 1) - 1).prompt_tokens for session in range(4000))
    assert drawn.longest_tokens() == longest + 2 == 5 * 7 + 5 * 2
    same = msgspec.msgpack.decode(msgspec.msgpack.encode(drawn), type=type(drawn)).turns()  # as a worker gets it
    assert same is not None and np.array_equal(same.first, turns.first)


def test_sessions_share_a_prefix_at_their_first_turn_alone() -> None:
    drawn = load(sessions=30, turns=3, prefix="2:10", input_tokens=20, output_tokens=4)
    shapes, turns = drawn.shapes(), drawn.turns()
    assert turns is not None
    groups = {shapes.shape(turns.begin(session)).segments[0] for session in range(30)}
    assert len(groups) == 2 and {tokens for _, tokens in groups} == {10}
    shared = [shapes.shape(turns.begin(session)).shared_tokens for session in range(30)]
    assert sorted(set(shared)) == [0, 10] and shared.count(0) == 2
    assert [shapes.shape(number).shared_tokens for number in range(1, 3)] == [24, 48]
    assert [shapes.shape(number).prompt_tokens for number in range(3)] == [20, 44, 68]


@pytest.mark.parametrize("backend", ["vllm", "openai"])
def test_a_warm_up_may_have_more_requests_than_there_are_turns(backend: str, tmp_path: Path) -> None:
    async def story() -> list[tuple[bytes, dict[str, str], bytes]]:
        async with scripted(reply) as world:
            drawn = plan(world.url, backend, sessions=2, turns=2, prefix="2:3")
            warm = msgspec.structs.replace(drawn, job=msgspec.structs.replace(drawn.job, warmup=9))
            await run_here(warm, tmp_path, lambda snapshots: None)
            return world.requests

    warm_ups = [body for _, head, body in run_loop(story()) if head["x-request-id"].startswith("r-w")]
    assert len(warm_ups) == len(set(warm_ups)) == 9
    assert len(records.read(tmp_path)[0].measured()) == 4
