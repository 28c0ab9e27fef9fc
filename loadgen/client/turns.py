"""Turns of sessions after the first: built when the reply before them has ended, sent when people have thought."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from backends.protocol import HttpRequest, Kept, Prompt
from loadgen.client.exchange import Exchange
from loadgen.clock import Alarm, now_ns

Send = Callable[[Exchange, bytes | HttpRequest], None]
NO_IDS = (
    "the reply before it came without the ids of its tokens, which this backend's prompts are made of; measure a "
    "server that returns them (vLLM 0.10.2 and later, streamed LightLLM), or take --backend openai, whose sessions are "
    "text"
)


class Waiting:
    """Turns that are due later, each with its request. Rings on time, as all requests are sent."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        self._send = send
        self._alarm = Alarm(loop, self._ring)
        self._turns: list[tuple[int, int, Exchange, bytes | HttpRequest]] = []

    def add(self, exchange: Exchange, prepared: bytes | HttpRequest) -> None:
        """`exchange` is sent when it is due."""
        heapq.heappush(self._turns, (exchange.scheduled_ns, exchange.id, exchange, prepared))
        if self._turns[0][2] is exchange:
            self._alarm.set(exchange.scheduled_ns)

    def close(self) -> None:
        self._alarm.close()
        self._turns.clear()

    def _ring(self) -> None:
        while self._turns:
            due_ns, _, exchange, prepared = self._turns[0]
            if due_ns > now_ns():
                self._alarm.set(due_ns)
                return
            heapq.heappop(self._turns)
            self._send(exchange, prepared)


def why_over(exchange: Exchange, repeated: bool) -> str | None:
    """Why no turn can follow this one, whose reply some turn repeats or none does; None where one can."""
    if exchange.outcome != "ok":
        return f"turn {exchange.turn} of its session failed ({exchange.outcome})"
    prompt, kept = exchange.prompt, exchange.kept
    if not repeated or prompt is None or prompt.token_ids is None or kept is None:
        return None
    return NO_IDS if len(kept.token_ids) != (exchange.output_tokens or len(exchange.times)) else None


def next_prompt(prompt: Prompt, kept: Kept | None, new: Prompt) -> Prompt:
    """All that was said, without a reply where none is kept, and what is new. Of text the length is not known: only the
    server knows where its tokens begin."""
    if prompt.token_ids is not None and new.token_ids is not None:
        ids = [*prompt.token_ids, *(() if kept is None else kept.token_ids), *new.token_ids]
        return Prompt(n_tokens=len(ids), token_ids=ids)
    text, reply = new.text or "", "" if kept is None else "".join(kept.texts)
    earlier = prompt.messages or (("user", prompt.text or ""),)
    answered = () if kept is None else (("assistant", reply),)
    return Prompt(
        n_tokens=0,
        text=f"{prompt.text}{reply}\n{text}",
        messages=(*earlier, *answered, *(new.messages or (("user", text),))),
    )
