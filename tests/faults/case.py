"""A case of the truth table: what the server does to one request, and what the client must make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.faults.protocols import ALL, OUTPUT_TOKENS, Protocol
from tests.faults.server import Script

Outcome = Literal["ok", "http_error", "refused", "reset", "timeout", "truncated", "protocol_error", "stream_error"]
Limit = Literal["", "first byte", "idle", "total"]
Way = Literal["", "fresh", "refusing", "resetting"]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the record of the struck request must hold.

    tokens: the server's own count. events: those with output; None: not fixed. error: a part of the message. tries:
    how often the server saw the request. findings: of a report on this request alone.
    """

    outcome: Outcome
    tokens: int | None = None
    events: int | None = None
    error: str = ""
    tries: int = 1
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    findings: tuple[str, ...] = ()


OK = Expected(outcome="ok", tokens=OUTPUT_TOKENS, events=OUTPUT_TOKENS)


@dataclass(frozen=True, kw_only=True)
class Case:
    """script: of the first try; again: of every further one. limit: the timeout that is short; the others are beyond
    the end of the case. way: `fresh` opens a connection for each request; `refusing` does not listen for a while, and
    `resetting` resets a connection that it has accepted, both with fresh connections. aiohttp: where that library can
    tell less; why: what it cannot tell."""

    name: str
    does: str
    expected: Expected
    script: Callable[[Protocol], Script] = lambda protocol: ()
    again: Callable[[Protocol], Script] | None = None
    protocols: tuple[Protocol, ...] = ALL
    limit: Limit = ""
    way: Way = ""
    whole: bool = False
    aiohttp: Expected | None = None
    why: str = ""
