"""What the drivers of both schedulers are given: ours in the test, vLLM's own in an environment of its own."""

from __future__ import annotations

from typing import NamedTuple, TypedDict


class Request(NamedTuple):
    """`comes`, `leaves`: steps that are scheduled before it comes, before it is aborted. `segments`: as of
    servers.schedulers.Sequence."""

    prompt: int
    output: int
    comes: int = 0
    leaves: int | None = None
    segments: tuple[tuple[int, int], ...] = ()


class Workload(TypedDict):
    """`requests` are those above, as lists once they have been JSON. `most_tokens`: of a prompt in a step, vLLM's
    long_prefill_token_threshold."""

    name: str
    asynchronous: bool
    blocks: int
    max_running: int
    budget_tokens: int
    most_tokens: int
    caching: bool
    requests: list[Request]
