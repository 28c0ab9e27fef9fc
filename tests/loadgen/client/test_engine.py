"""The engine against a scripted server: what was sent, when it was due, and what is on disk afterwards."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.protocol import Sampling
from loadgen.client import engine
from loadgen.client.connection import Connection
from loadgen.client.engine import Client, ClientJob, build_client, run_here
from loadgen.client.workers import run_in_workers
from loadgen.clock import now_ns
from loadgen.event_loop import run_loop
from loadgen.plan import ClientPlan, PromptSource, Timeouts
from loadgen.rundir import WriteError, records
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.records import ClientFacts, RequestTable
from loadgen.target import Target, TransportError
from tests.loadgen.load.loads import load
from tests.loadgen.scripted import CLOSE, STREAM_HEAD, Scripted, chunk, event, scripted, tokens

OF_THE_LOAD = ("requests", "duration", "concurrency", "input_tokens", "output_tokens", "prefix", "cancel", "seed")


def plan(url: str, arrival: str = "burst", **options: Any) -> ClientPlan:
    """Some options are of the load, as on the command line; the others of the job."""
    described = {"requests": 20, "input_tokens": 4, "output_tokens": 3, "seed": 1}
    described |= {name: options.pop(name) for name in OF_THE_LOAD if name in options}
    if described.get("concurrency") is None:
        described["arrival"] = arrival
    values = ClientJob(
        run_id="r", version="0", model="m", sampling=Sampling(3), load=load(**described), warmup=0,
        timeouts=Timeouts(2.0, 2.0, 2.0, 5.0),
    )  # fmt: skip
    return ClientPlan(
        job=msgspec.structs.replace(values, **options),
        backend="vllm",
        target=Target(url),
        transport="fast",
        fresh=False,
        kernel_timestamps=False,
        prompts=PromptSource(),
    )


def ran(world_script, tmp_path: Path, workers: int = 1, transport: str = "fast", **options):  # type: ignore[no-untyped-def]
    async def story() -> Scripted:
        async with scripted(world_script) as world:
            the_plan = msgspec.structs.replace(plan(world.url, **options), transport=transport)
            if workers == 1:
                await run_here(the_plan, tmp_path, lambda snapshots: None)
            else:
                await run_in_workers(the_plan, workers, tmp_path, lambda snapshots: None)
                records.merge(tmp_path)
            return world

    world = run_loop(story())
    table, facts = records.read(tmp_path)
    return world, table, facts


def outcomes(table: RequestTable) -> Counter[str]:
    return Counter(OUTCOMES[code] for code in table.outcome)


def ids(world: Scripted) -> set[str]:
    return {head["x-request-id"] for _, head, _ in world.requests}


@pytest.mark.parametrize("transport", ["fast", "aiohttp"])
@pytest.mark.parametrize(
    "options",
    [{}, {"arrival": "constant:200"}, {"arrival": "poisson:300"}, {"arrival": "gamma:300:2"}, {"concurrency": 3}],
)
def test_every_request_is_sent_once_and_recorded(tmp_path: Path, transport: str, options: dict[str, object]) -> None:
    world, table, facts = ran(lambda n: tokens(3), tmp_path, transport=transport, **options)
    assert outcomes(table) == {"ok": 20}
    assert table.id.tolist() == list(range(20))
    assert ids(world) == {f"r-{n}" for n in range(20)}
    assert len({body for _, _, body in world.requests}) == 20
    assert (table.events == 3).all() and (table.output_tokens == 3).all()
    assert (table.sent_ns >= table.scheduled_ns).all()
    assert (table.scheduled_ns <= table.done_ns).all()
    assert [fact.state for fact in facts] == ["complete"]
    assert facts[0].events == 60


def test_open_loop_does_not_wait_for_replies(tmp_path: Path) -> None:
    """Ten requests 10 ms apart to a server that takes 200 ms: all are sent before the first reply."""
    slow = [STREAM_HEAD, 0.2, *tokens(2)[1:]]
    _, table, facts = ran(lambda n: slow, tmp_path, arrival="constant:100", requests=10)
    assert facts[0].connections == 10  # all opened before
    assert table.sent_ns.max() < table.first_token_ns.min()
    assert table.scheduled_ns.tolist() == [n * 10_000_000 for n in range(10)]


def test_closed_loop_keeps_its_concurrency(tmp_path: Path) -> None:
    _, table, _ = ran(lambda n: [STREAM_HEAD, 0.01, *tokens(2)[1:]], tmp_path, concurrency=4, requests=30)
    starts, ends = np.sort(table.sent_ns), np.sort(table.done_ns)
    in_flight = [int((starts <= at).sum() - (ends < at).sum()) for at in starts]
    assert max(in_flight) == 4
    assert (table.scheduled_ns[:4] == 0).all()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("drains", [False, True])
def test_a_warm_up_hands_its_slots_over(tmp_path: Path, workers: int, drains: bool) -> None:
    """Replies of 0.3 to 1.2 s: the first slot is free long before the last, and a measured request takes it then."""
    asked = {"concurrency": 4, "requests": 12, "warmup": 4, "drain_warmup": drains}
    first, *rest = tokens(3)[1:]
    _, table, facts = ran(lambda n: [STREAM_HEAD, first, 0.3 * (1 + n % 4), *rest], tmp_path, workers, **asked)
    measured = table.measured()
    assert len(measured) == 12 and outcomes(table) == {"ok": 16}
    assert sum(fact.events for fact in facts) == 36  # the warm-up's count nowhere
    starts, ends = np.sort(table.sent_ns), np.sort(table.done_ns)
    assert max(int((starts <= at).sum() - (ends < at).sum()) for at in starts) == 4
    warm_up = table.rows(0, 4)
    handed = int((warm_up.done_ns > measured.sent_ns.min()).sum())
    assert (measured.scheduled_ns == 0).sum() == 4 - handed
    assert handed == 0 if drains else handed >= 1
    assert warm_up.sent_ns.max() < measured.sent_ns.min()


@pytest.mark.parametrize("changes", [{"warmup": 3}, {"requests": 7}, {"concurrency": "2:4:1"}])
def test_a_warm_up_drains_where_it_has_no_request_for_each_slot(changes: dict[str, object]) -> None:
    asked = {"concurrency": 4, "requests": 12, "warmup": 4, "drain_warmup": False}
    assert plan("", **asked).job.hands_over and not plan("", **{**asked, **changes}).job.hands_over


def test_a_server_that_refuses_all_of_a_warm_up_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="every warm-up request failed"):
        ran(lambda n: [CLOSE], tmp_path, concurrency=2, requests=12, warmup=4, drain_warmup=False)


def test_duration_ends_sending_not_replies(tmp_path: Path) -> None:
    _, table, _ = ran(
        lambda n: [STREAM_HEAD, 0.15, *tokens(2)[1:]], tmp_path, concurrency=2, requests=None, duration=0.4
    )
    assert set(outcomes(table)) == {"ok"}
    assert 2 <= len(table) <= 8
    assert table.sent_ns.max() < 400_000_000 < table.done_ns.max() + 150_000_000


def test_warmup_is_apart(tmp_path: Path) -> None:
    world, table, _ = ran(lambda n: tokens(3), tmp_path, warmup=5, requests=7)
    assert len(table) == 12 and len(table.measured()) == 7
    assert len(ids(world)) == 12
    assert len({body for _, _, body in world.requests}) == 12
    assert (table.done_ns[table.phase == 0] < 0).all()  # before t = 0


@pytest.mark.processes
def test_workers_send_the_same_load(tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    world_one, table_one, _ = ran(lambda n: tokens(3), one, arrival="poisson:200", warmup=3)
    world_many, table_many, facts = ran(lambda n: tokens(3), many, workers=3, arrival="poisson:200", warmup=3)
    bodies = [sorted((head["x-request-id"], body) for _, head, body in w.requests) for w in (world_one, world_many)]
    assert bodies[0] == bodies[1]
    measured = [table.measured().scheduled_ns.tolist() for table in (table_one, table_many)]
    assert measured[0] == measured[1]
    assert len(facts) == 3
    assert sorted(path.name for path in many.iterdir()) == ["requests.jsonl"]


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [
        {"input_tokens": "lognormal:60:0.5:30:200", "output_tokens": "uniform:1:9", "prefix": "3:16:zipf=1"},
        {"input_tokens": "normal:60:20:1:99", "arrival": "steps:200@0.1,400@0.1", "requests": None},
        {"input_tokens": "uniform:20:60", "prefix": "2:8", "concurrency": 3},
    ],
)
def test_workers_send_the_same_drawn_lengths_and_prefixes(tmp_path: Path, options: dict[str, Any]) -> None:
    """Byte by byte, by the request's id; the warm-up's too."""
    sent, measured = [], []
    for workers in (1, 2):
        directory = tmp_path / str(workers)
        directory.mkdir()
        world, table, _ = ran(lambda n: tokens(3), directory, workers=workers, warmup=3, **options)
        sent.append({head["x-request-id"]: body for _, head, body in world.requests})
        measured.append(table.measured())
    assert sent[0] == sent[1] and len(sent[0]) == 3 + len(measured[0])
    for name in ("id", "asked_prompt_tokens", "asked_tokens"):
        assert getattr(measured[0], name).tolist() == getattr(measured[1], name).tolist()
    assert len(set(measured[0].asked_prompt_tokens.tolist())) > 5
    if "concurrency" not in options:
        assert measured[0].scheduled_ns.tolist() == measured[1].scheduled_ns.tolist()


@pytest.mark.parametrize(("streams", "workers"), [(1, 1), (3, 2), (4, 3)])
def test_workers_share_the_streams_of_a_closed_loop(tmp_path: Path, streams: int, workers: int) -> None:
    world, table, _ = ran(lambda n: tokens(3), tmp_path, workers=workers, concurrency=streams, requests=17, warmup=5)
    assert outcomes(table.measured()) == {"ok": 17}
    assert table.measured().id.tolist() == list(range(17))
    assert len(ids(world)) == 22


@pytest.mark.parametrize("workers", [1, 2])
def test_a_closed_loop_grows_along_its_ramp(tmp_path: Path, workers: int) -> None:
    """Replies take 50 ms: what is in flight follows the straight line from 2 to 8 in 0.6 s."""
    slow = [STREAM_HEAD, 0.05, *tokens(3)[1:]]
    _, table, _ = ran(lambda n: slow, tmp_path, workers=workers, concurrency="2:8:0.6", requests=None, duration=0.9)
    starts = sorted(table.scheduled_ns.tolist())
    line = [0, 0, *(int(1e8 * stream) for stream in range(1, 7))]
    assert set(line) <= set(starts)  # the first request of each stream is due when the line passes its number
    for at_ns in range(50_000_000, 900_000_000, 50_000_000):
        in_flight = int(((table.sent_ns <= at_ns) & (table.done_ns > at_ns)).sum())
        assert in_flight <= min(8, 2 + at_ns // 100_000_000)


def test_a_closed_loop_shrinks_along_its_ramp(tmp_path: Path) -> None:
    slow = [STREAM_HEAD, 0.05, *tokens(3)[1:]]
    _, table, _ = ran(lambda n: slow, tmp_path, concurrency="6:1:0.4", requests=None, duration=0.8)
    after = table.scheduled_ns > 400_000_000
    assert table.scheduled_ns[~after].tolist()[:6] == [0] * 6
    order = np.argsort(table.sent_ns[after])
    sent, done = table.sent_ns[after][order], table.done_ns[after][order]
    assert len(sent) >= 3 and (sent[1:] >= done[:-1]).all()  # one at a time


def test_lengths_and_shared_prefixes_are_recorded(tmp_path: Path) -> None:
    options = {"input_tokens": "uniform:20:40", "output_tokens": "uniform:1:9", "prefix": "2:8"}
    world, table, _ = ran(lambda n: tokens(3), tmp_path, requests=50, **options)
    shapes = load(seed=1, requests=50, **options).shapes()
    drawn = [shapes.shape(number) for number in range(50)]
    assert table.asked_prompt_tokens.tolist() == [shape.prompt_tokens for shape in drawn]
    assert table.asked_tokens.tolist() == [shape.output_tokens for shape in drawn]
    bodies = [msgspec.json.decode(body) for _, _, body in world.requests]
    assert sorted(len(body["prompt"]) for body in bodies) == sorted(shape.prompt_tokens for shape in drawn)
    assert len({tuple(body["prompt"][:8]) for body in bodies}) == 2
    assert {line["id"]: line.get("shared_tokens", 0) for line in lines_of(tmp_path)} == {
        number: shape.shared_tokens for number, shape in enumerate(drawn)
    }


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in (directory / "requests.jsonl").read_bytes().splitlines()[1:-1]]


def test_fresh_connections_are_opened_inside(tmp_path: Path) -> None:
    async def story() -> tuple[int, int]:
        async with scripted(lambda n: tokens(3)) as world:
            one = plan(world.url, requests=20)
            for fresh in (False, True):
                directory = tmp_path / str(fresh)
                directory.mkdir()
                before = world.connections
                await run_here(msgspec.structs.replace(one, fresh=fresh), directory, lambda snapshots: None)
                opened = world.connections - before
                (fact,) = records.read(directory)[1]
                assert opened >= fact.connections >= 20
            return opened, fact.connections

    run_loop(story())


@pytest.mark.parametrize("stamped", [False, True])
def test_closed_connections_are_freed_while_the_garbage_collector_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stamped: bool
) -> None:
    opened: weakref.WeakSet[Connection] = weakref.WeakSet()
    begin, most = Connection.__init__, 0

    def counted(self: Connection, owner: Any, sock: Any) -> None:
        nonlocal most
        opened.add(self)
        most = max(most, len(opened))
        begin(self, owner, sock)

    monkeypatch.setattr(Connection, "__init__", counted)

    async def story() -> None:
        async with scripted(lambda n: tokens(3)) as world:
            one = plan(world.url, requests=200, concurrency=2)
            client = build_client(msgspec.structs.replace(one, fresh=True, kernel_timestamps=stamped))
            await client.prepare()
            await client.run(now_ns(), tmp_path / "requests.jsonl")
            await client.transport.close()

    run_loop(story())
    assert 0 < most < 20  # of 200


def test_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    async def story() -> None:
        async with scripted(lambda n: tokens(3)) as world:
            client = build_client(plan(world.url, "constant:100", requests=500))
            await client.prepare()
            try:
                await client.run(now_ns(), _full(client, tmp_path))
            finally:
                await client.transport.close()

    with pytest.raises(WriteError, match=r"^No space left on device$"):
        run_loop(story())


@pytest.mark.processes
def test_records_that_somebody_removes_end_the_run(tmp_path: Path) -> None:
    async def story() -> Scripted:
        async with scripted(lambda n: tokens(3)) as world:
            remove = (tmp_path / "requests.jsonl").unlink
            with pytest.raises(WriteError, match=r"^it was removed$"):
                # after a second, when the first snapshots come
                await run_here(plan(world.url, "constant:100", requests=2000), tmp_path, lambda _: remove(True))
            return world

    assert len(run_loop(story()).requests) < 1500


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_whose_warm_up_fails_does_not_begin(tmp_path: Path, workers: int) -> None:
    with pytest.raises(TransportError) as raised:
        ran(lambda n: [CLOSE], tmp_path, workers=workers, warmup=4)
    message = str(raised.value)
    assert message.startswith("the run did not begin, because every warm-up request failed (4); the first: ")
    assert not list(tmp_path.iterdir())


def test_a_warm_up_that_fails_in_part_is_kept_with_its_first_error(tmp_path: Path) -> None:
    """Each worker has two of the four requests. That all of one worker's fail is no reason not to begin."""
    refused = b"HTTP/1.1 500 No\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\noops"
    seen: list[int] = []

    def script(number: int) -> list[object]:
        seen.append(number)
        return [refused] if len(seen) <= 2 else tokens(3)

    _, table, _ = ran(script, tmp_path, workers=2, warmup=4)
    warm_up = table.rows(0, len(table) - len(table.measured()))
    assert outcomes(warm_up) == {"ok": 2, "http_error": 2} and outcomes(table.measured()) == {"ok": 20}
    assert table.warmup_error is not None and table.warmup_error.startswith("http_error, ")


def _full(client: Client, tmp_path: Path) -> Path:
    """Breaks the records file once it is open, as a full disk would."""

    def break_it() -> None:
        assert client.records_file is not None
        client.records_file.file = open("/dev/full", "wb")  # noqa: PTH123, SIM115

    asyncio.get_running_loop().call_later(0.1, break_it)
    return tmp_path / "requests.jsonl"


def test_timeouts(tmp_path: Path) -> None:
    def script(n: int):  # type: ignore[no-untyped-def]
        return [[3.0], [STREAM_HEAD, chunk(event()), 3.0], [STREAM_HEAD, *[0.2, chunk(event())] * 20]][n % 3]

    limits = Timeouts(connect_s=1.0, first_byte_s=0.3, idle_s=0.4, total_s=1.0)
    _, table, _ = ran(script, tmp_path, arrival="constant:20", requests=3, timeouts=limits)
    assert outcomes(table) == {"timeout": 3}
    assert [text.split(" for")[0].split(" within")[0] for _, text in sorted(table.errors.items())] == [
        "no first byte", "silent", "no complete reply",
    ]  # fmt: skip


def test_failures_are_rows(tmp_path: Path) -> None:
    def script(n: int):  # type: ignore[no-untyped-def]
        return [STREAM_HEAD, CLOSE] if n % 2 else tokens(3)

    _, table, _ = ran(script, tmp_path, requests=20, arrival="constant:500")
    assert outcomes(table) == {"ok": 10, "truncated": 10}
    assert len(table.errors) == 10


@pytest.mark.processes
def test_closed_loop_survives_a_server_that_only_fails(tmp_path: Path) -> None:
    _, table, _ = ran(lambda n: [CLOSE], tmp_path, requests=300, concurrency=8)
    assert outcomes(table) == {"reset": 300}


def test_stop_drains_and_completes_the_records(tmp_path: Path) -> None:
    async def story() -> ClientFacts:
        def script(n: int):  # type: ignore[no-untyped-def]
            return [5.0] if n == 3 else [STREAM_HEAD, 0.2, *tokens(3)[1:]]

        async with scripted(script) as world:
            client = build_client(plan(world.url, "constant:20", requests=100))
            await client.prepare()
            loop = asyncio.get_running_loop()
            loop.call_later(0.42, client.stop, 0.5)
            facts = await client.run(now_ns(), tmp_path / "requests.jsonl")
            await client.transport.close()
            return facts

    facts = run_loop(story())
    table, _ = records.read(tmp_path)
    assert facts.state == "interrupted"
    seen = outcomes(table)
    assert seen["cancelled"] == 1 and seen["ok"] == len(table) - 1
    assert 3 < len(table) < 20


def test_finished_requests_are_on_disk_before_the_end(tmp_path: Path) -> None:
    """What kill -9 would leave: read while the run goes on."""

    async def story() -> int:
        async with scripted(lambda n: tokens(3)) as world:
            client = build_client(plan(world.url, "constant:100", requests=60))
            await client.prepare()
            task = asyncio.create_task(client.run(now_ns(), tmp_path / "requests.jsonl"))
            await asyncio.sleep(0.3)
            table, facts = records.read(tmp_path)
            assert facts == []
            done = client.done
            await task
            await client.transport.close()
            assert len(table) >= done - 5  # those of the last 20 ms wait for the next flush
            return len(table)

    assert run_loop(story()) > 10


def test_non_streaming_has_no_first_token(tmp_path: Path) -> None:
    body = json.dumps(
        {"choices": [{"text": "a b", "finish_reason": "length"}], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}
    ).encode()
    whole = [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body), body]
    _, table, _ = ran(lambda n: whole, tmp_path, sampling=Sampling(3, stream=False))
    assert outcomes(table) == {"ok": 20}
    assert (table.first_token_ns == -1).all() and (table.output_tokens == 3).all() and (table.done_ns > 0).all()


def test_a_stall_counts_for_every_tick_that_it_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample of it would be lost among those of the time between stalls: with 0.3 s in every 2 s it was, at p99."""
    now_ms = 0

    class Silent:
        def __init__(self, *_: object) -> None: ...
        def set(self, at_ns: int) -> None: ...

    monkeypatch.setattr(engine, "now_ns", lambda: now_ms * 1_000_000)
    monkeypatch.setattr(engine, "Alarm", Silent)
    health = engine.Health()
    health.start(None)  # type: ignore[arg-type]
    for _ in range(10):
        for _ in range(170):
            now_ms += 10
            health.tick()
        now_ms += 300
        health.tick()
    lag_ms = np.array(health.lag_ns) / 1e6
    assert len(lag_ms) == 2000 and (lag_ms > 0).sum() == 10 * 29
    assert lag_ms.max() == 290 and np.percentile(lag_ms, 99) >= 250
