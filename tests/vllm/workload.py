"""What the drivers of both schedulers are given: ours in the test, vLLM's own in an environment of its own."""

from __future__ import annotations

from typing import TypedDict


class Workload(TypedDict):
    """`requests` are (prompt tokens, output tokens, steps that are scheduled before it comes, before it is aborted)."""

    name: str
    asynchronous: bool
    blocks: int
    max_running: int
    budget_tokens: int
    requests: list[tuple[int, int, int, int | None]]
