"""Plays a case: the whole client of a run, from the plan to the records on disk, against the misbehaving server."""

from __future__ import annotations

import asyncio
import functools
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

import backends
from backends.protocol import HttpRequest, Sampling
from loadgen.client.connection import Transport
from loadgen.client.engine import build_client
from loadgen.client.exchange import Exchange
from loadgen.clock import now_ns
from loadgen.event_loop import run_loop
from loadgen.plan import ClientJob, ClientPlan, PromptSource, Timeouts
from loadgen.rundir.records import Record
from loadgen.target import Target
from tests.faults.case import Case
from tests.faults.protocols import OUTPUT_TOKENS, PROMPT_TOKENS, Protocol
from tests.faults.server import BESIDE, LAST, STRUCK, Server, Stage, serving
from tests.loadgen.load.loads import load

TRANSPORTS = ("fast", "aiohttp")
PATIENT_S, SHORT_S = 30.0, 2.5  # a timeout that a case is not about, and the one that it is about
AT_ONCE = 16  # cases that are played together; so few that neighbours keep the short timeouts on a busy machine


@dataclass(frozen=True)
class Seen:
    """What came of a case: a record a request, and how often the server saw the one that was struck."""

    records: dict[int, Record]
    tries: int


class Paced:
    """The client's transport, with requests held back until it is their turn: two before the one that is struck, one
    beside it, two after it. Where the connection itself fails, the one beside comes after it, too."""

    def __init__(self, inner: Transport, server: Server, stage: Stage, case: Case) -> None:
        self._inner = inner
        self._server = server
        self._stage = stage
        self._case = case
        self._over = {number: asyncio.Event() for number in range(LAST + 1)} | {STRUCK: stage.done}
        self._tasks: list[asyncio.Task[None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, exchange: Exchange, prepared: bytes | HttpRequest) -> None:
        on_done, over = exchange.on_done, self._over[exchange.id]

        def done(exchange: Exchange) -> None:
            on_done(exchange)
            over.set()

        exchange.on_done = done
        if exchange.id < STRUCK:
            self._inner.send(exchange, prepared)
        else:
            self._tasks.append(asyncio.ensure_future(self._send_in_turn(exchange, prepared)))

    async def _send_in_turn(self, exchange: Exchange, prepared: bytes | HttpRequest) -> None:
        for number in range(STRUCK):
            await self._over[number].wait()
        if exchange.id == STRUCK:
            self._strike_connection()
        elif exchange.id > BESIDE or self._case.way in ("refusing", "resetting"):
            await self._stage.done.wait()
            if self._case.way == "refusing":
                await self._server.listen()
            await self._stage.played.wait()
            await asyncio.sleep(0.02)  # the client reads what the server has left on an idle connection
        self._inner.send(exchange, prepared)

    def _strike_connection(self) -> None:
        if self._case.way == "refusing":
            self._server.close()
            self._stage.played.set()
        elif self._case.way == "resetting":
            self._server.reset_next_connection()


async def play(case: Case, protocol: Protocol, transport: str, directory: Path) -> Seen:
    stage = Stage()
    async with serving(protocol, stage, case.whole) as server:
        server.scripts = [list(script(protocol)) for script in (case.script, case.again) if script is not None]
        client = build_client(_plan(case, protocol, transport, server.url))
        client.transport = Paced(client.transport, server, stage, case)
        path = directory / "requests.jsonl"
        try:
            await client.prepare()
            await client.run(now_ns(), path)
        finally:
            await client.transport.close()
    lines = path.read_bytes().splitlines()[1:-1]
    records = [msgspec.json.decode(line, type=Record) for line in lines]
    return Seen({record.id: record for record in records}, server.tries.count(STRUCK))


def _plan(case: Case, protocol: Protocol, transport: str, url: str) -> ClientPlan:
    limits = [SHORT_S if case.limit == name else PATIENT_S for name in ("first byte", "idle", "total")]
    job = ClientJob(
        run_id="case", version="0", model="m", sampling=Sampling(OUTPUT_TOKENS, stream=not case.whole),
        load=load(requests=LAST + 1, concurrency=2, seed=1, input_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS),
        warmup=0, timeouts=Timeouts(PATIENT_S, *limits),
    )  # fmt: skip
    return ClientPlan(
        job=job,
        backend=protocol.backend,
        target=Target(url),
        transport=transport,
        fresh=bool(case.way),
        kernel_timestamps=False,
        prompts=PromptSource(),
    )


Key = tuple[str, str, str]  # case, backend, transport


def play_all(plays: list[tuple[Case, Protocol, str]], directory: Path) -> dict[Key, Seen | BaseException]:
    """Plays the cases side by side. A play that fails has its exception instead."""

    plays = sorted(plays, key=lambda each: each[0].limit != "")  # those that wait for a timeout apart from busy ones

    async def story() -> list[Seen | BaseException]:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(number: int, case: Case, protocol: Protocol, transport: str) -> Seen:
            async with room, asyncio.timeout(2 * PATIENT_S):
                own = directory / str(number)
                own.mkdir()
                return await play(case, protocol, transport, own)

        coroutines = [one(number, *each) for number, each in enumerate(plays)]
        return await asyncio.gather(*coroutines, return_exceptions=True)

    keys = [(case.name, protocol.backend, transport) for case, protocol, transport in plays]
    # What a run does once, before its clock starts, would cost more here than all else.
    found = mock.patch("backends.get", functools.cache(backends.get))
    trusted = mock.patch("ssl.create_default_context", functools.cache(ssl.create_default_context))
    with found, trusted, mock.patch("loadgen.client.engine.gc"):
        seen: list[Seen | BaseException] = run_loop(story())
    return dict(zip(keys, seen, strict=True))
