"""A server warmed up with the run's own load: until its steps settle, with prompts that nobody sends again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loadgen import warmup
from loadgen.client.engine import run_here
from loadgen.event_loop import run_loop
from tests.loadgen.client.test_engine import plan
from tests.loadgen.scripted import STREAM_HEAD, scripted, tokens


def played(slow: int, **options: Any) -> tuple[list[str], list[tuple[int, ...]]]:
    """What was shown, and the prompts that were sent, of a server whose first `slow` replies take 80 ms a token."""
    lines: list[str] = []
    prompts: list[tuple[int, ...]] = []

    def script(number: int) -> list[Any]:
        wait_s = 0.08 if number < slow else 0.01
        return [STREAM_HEAD, *(part for token in tokens(3)[1:] for part in (wait_s, token))]

    async def story() -> None:
        async with scripted(script) as world:
            await warmup.play(plan(world.url, **options), run_here, lines.append)
            prompts.extend(tuple(msgspec.json.decode(body)["prompt"]) for _, _, body in world.requests)

    run_loop(story())
    return lines, prompts


def test_it_ends_when_steps_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "SETTLED_RATIO", 0.5)
    lines, prompts = played(20, requests=20)
    assert 3 <= len(lines) < warmup.MOST_PLAYS  # one is slow, and two fast ones agree
    assert len(prompts) == 20 * len(lines)
    assert len(set(prompts)) == len(prompts)  # no prompt twice: a prefix cache finds nothing


def test_it_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "SETTLED_RATIO", -1.0)
    monkeypatch.setattr(warmup, "MOST_PLAYS", 3)
    lines, prompts = played(0, requests=4)
    assert lines[-1].startswith("note: step times did not settle") and len(prompts) == 12


@pytest.mark.processes
def test_a_lasting_load_is_played_for_its_first_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "PLAY_S", 0.5)
    monkeypatch.setattr(warmup, "SETTLED_RATIO", 9.0)
    _, prompts = played(0, arrival="constant:20", requests=400)
    assert len(prompts) == 20  # two plays of half a second
    _, prompts = played(0, concurrency=1, requests=100_000)
    assert 10 < len(prompts) < 60
