"""What the wire between adds to the time of a first token: measured before the load, with quick ACKs and without.

A server, or a proxy, that does not set TCP_NODELAY waits with small writes for the client's ACK (Nagle's algorithm).
The client's kernel delays that by 40 ms on a connection that was used before (Linux: TCP_DELACK_MIN). TCP_QUICKACK on
the client's socket takes this delay away, and nothing else: requests go one at a time over two kept connections in
turns, one with it and one without, and the difference is the wire's. Replies of a few tokens show it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import msgspec

import backends
from backends.protocol import Backend, Prompt
from loadgen.client.connection import Transport
from loadgen.client.engine import build_transport
from loadgen.client.exchange import Exchange
from loadgen.load.prompts import FIRST_ID, UNKNOWN_VOCABULARY, WORDS
from loadgen.plan import ClientPlan
from loadgen.rundir import WireFacts
from loadgen.target import TransportError

TOKENS = 4  # of a reply: what is held back shows at the first ones
PROMPT_TOKENS = 16
LEAST_PAIRS, MOST_PAIRS = 3, 5
# Of a turn: an ordinary one that is not counted, an ordinary one, and a quick one. Linux delays the ACKs of a
# connection on which a request followed the reply before within 40 ms, and after a delayed one it forgets that.
REQUESTS = 3
BUDGET_S = 2.0
# A delayed ACK, less the grain of the kernel's timers. Without it the token must have been there sooner, by more than a
# busy machine moves a median.
DELAYED_MS, LEAST_MS = 38.0, 5.0


class ObservedWire(NamedTuple):
    """What single requests showed. facts: None where that cannot be told, or would take too long. pace_ms: between two
    events of a reply that the server sends alone, the shortest time that they will have."""

    facts: WireFacts | None = None
    pace_ms: float | None = None


async def measure(plan: ClientPlan, say: Callable[[str], None]) -> ObservedWire:
    """Never raises: a run needs none of it."""
    if sys.platform != "linux" or plan.transport != "fast" or plan.fresh or not plan.job.sampling.stream:
        return ObservedWire()
    backend = backends.get(plan.backend)
    kinds = [
        build_transport(msgspec.structs.replace(plan, quick_acks=quick, kernel_timestamps=False), backend)
        for quick in (False, True)
    ]
    try:
        async with asyncio.timeout(2 * BUDGET_S):
            return await _measure(plan, backend, kinds, say)
    except (TransportError, TimeoutError):
        return ObservedWire()
    finally:
        for transport in kinds:
            await transport.close()


async def _measure(
    plan: ClientPlan, backend: Backend, kinds: list[Transport], say: Callable[[str], None]
) -> ObservedWire:
    number = 0

    async def ask(transport: Transport) -> Exchange | None:
        nonlocal number
        number += 1
        return await _ask(plan, backend, transport, number)

    for transport in kinds:
        await transport.open(1)
    first = await ask(kinds[0])  # a new connection has quick ACKs of its own
    if first is None:
        return ObservedWire()
    reply_s = (first.done_ns - first.sent_ns) / 1e9
    pairs = min(MOST_PAIRS, int((BUDGET_S - 2 * reply_s) / max(REQUESTS * reply_s, 1e-3)))
    if pairs < LEAST_PAIRS:
        say(f"note: what the wire adds was not measured: a reply of {TOKENS} tokens takes {reply_s:.1f} s.")
        return ObservedWire(None, _pace_ms([first]))
    seen: tuple[list[Exchange], list[Exchange]] = ([], [])
    await ask(kinds[1])
    for _ in range(pairs):
        await ask(kinds[0])
        for transport, exchanges in zip(kinds, seen, strict=True):
            exchange = await ask(transport)
            if exchange is None:
                return ObservedWire()
            exchanges.append(exchange)
    return ObservedWire(_facts(*seen), _pace_ms(seen[1]))


async def _ask(plan: ClientPlan, backend: Backend, transport: Transport, number: int) -> Exchange | None:
    """None for a request that failed, or whose reply has no first token."""
    done: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
    sampling = msgspec.structs.replace(plan.job.sampling, max_tokens=TOKENS)
    exchange = Exchange(0, "warmup", 0, PROMPT_TOKENS, TOKENS, backend.decoder(True), done.set_result)
    request = backend.encode(plan.job.model, _prompt(plan, backend, number), sampling)
    transport.send(exchange, transport.prepare(request, f"{plan.job.run_id}-wire{number}"))
    await done
    return exchange if exchange.outcome == "ok" and exchange.times else None


def _prompt(plan: ClientPlan, backend: Backend, number: int) -> Prompt:
    """No two begin alike, so that none is in a prefix cache."""
    places = [(plan.job.load.seed + 1) * 7919 + number * 31 + place * 17 for place in range(PROMPT_TOKENS)]
    if backend.prompt_kind == "text":
        return Prompt(PROMPT_TOKENS, text=" ".join(WORDS[place % len(WORDS)] for place in places))
    highest = plan.prompts.vocab_size or UNKNOWN_VOCABULARY
    lowest = min(FIRST_ID, highest // 2)
    return Prompt(PROMPT_TOKENS, token_ids=[lowest + place % (highest - lowest) for place in places])


def _after_headers_ms(exchange: Exchange) -> float:
    return (exchange.times[0] - exchange.headers_ns) / 1e6


def _pace_ms(exchanges: list[Exchange]) -> float | None:
    """None where whole replies came in one read."""
    gaps_ms = [(each.times[-1] - each.times[0]) / 1e6 / max(1, len(each.times) - 1) for each in exchanges]
    return median(gaps_ms) or None


def _facts(plain: list[Exchange], quick: list[Exchange]) -> WireFacts:
    def ttft_ms(exchanges: list[Exchange]) -> list[float]:
        return [(each.times[0] - each.sent_ns) / 1e6 for each in exchanges]

    def events_per_read(exchanges: list[Exchange]) -> float:
        return sum(len(each.times) for each in exchanges) / sum(len(set(each.times)) for each in exchanges)

    return WireFacts(
        ttft_ms=median(ttft_ms(plain)),
        ttft_quick_ms=median(ttft_ms(quick)),
        n=len(plain),
        waits=median(map(_after_headers_ms, plain)) >= DELAYED_MS
        and median(map(_after_headers_ms, quick)) < DELAYED_MS - LEAST_MS
        and median(ttft_ms(plain)) - median(ttft_ms(quick)) > LEAST_MS,
        events_per_read=events_per_read(plain),
        events_per_read_quick=events_per_read(quick),
    )
