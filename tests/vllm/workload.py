"""What the drivers of both schedulers are given: ours in the test, vLLM's own in an environment of its own."""

from __future__ import annotations

from typing import NamedTuple, TypedDict


class Request(NamedTuple):
    """`comes`, `leaves`: steps that are scheduled before it comes, before it is aborted. `segments`: as of
    servers.schedulers.Sequence. `adapter`: its number; 0: none.
    `priority`: the lower, the earlier."""

    prompt: int
    output: int
    comes: int = 0
    leaves: int | None = None
    segments: tuple[tuple[int, int], ...] = ()
    adapter: int = 0
    priority: int = 0


class Workload(TypedDict):
    """`requests` are those above, as lists once they have been JSON. `most_tokens`: of a prompt in a step, vLLM's
    long_prefill_token_threshold. `max_loras`: adapters that may run together; 0: there are none.
    `by_priority`: the policy."""

    name: str
    asynchronous: bool
    blocks: int
    max_running: int
    budget_tokens: int
    most_tokens: int
    caching: bool
    max_loras: int
    by_priority: bool
    requests: list[Request]
