"""When a server is idle: the rule, and what a server's own metrics say while a request runs."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadgen.config import Config
from loadgen.run import LoadRun, Served
from loadgen.rundir import new_run_id
from loadgen.search import idle
from loadgen.target import Target
from tests.loadgen.test_run import serving


class Scripted:
    """Says one thing after another, the last for ever."""

    by: idle.By = "metrics"

    def __init__(self, *said: str) -> None:
        self._said = said
        self.asked = 0

    async def busy(self) -> str:
        self.asked += 1
        return self._said[min(self.asked, len(self._said)) - 1]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "POLL_S", 0.001)


@pytest.mark.parametrize(
    ("said", "asked"), [((""), 2), (("3 running", ""), 3), (("", "1 waiting", "", ""), 4), (("x", "", "x", "", ""), 5)]
)
def test_idle_is_nothing_to_do_twice_in_a_row(said: tuple[str, ...], asked: int) -> None:
    look = Scripted(*(said or ("",)))
    wait = asyncio.run(idle.idle(look))
    assert (wait.idle, wait.by, wait.detail, look.asked) == (True, "metrics", "", asked)


def test_the_wait_has_an_end() -> None:
    wait = asyncio.run(idle.idle(Scripted("7 running"), limit_s=0.05))
    assert (wait.idle, wait.detail) == (False, "7 running") and wait.waited_s > 0.05


class Probed(idle._ByProbe):
    """With times that are given."""

    def __init__(self, *took_ms: float | None) -> None:
        self._times: Iterator[float | None] = iter(took_ms)
        self._limit_ms = 0.0

    async def _probe(self) -> float | None:
        return next(self._times)


def test_a_probe_as_fast_as_at_the_start() -> None:
    async def said() -> list[str]:
        look = Probed(10, 30, None, 50, 50.1, None)  # the slowest of the first three, times 1.5, and 5 ms
        await look.measure()
        return [await look.busy() for _ in range(3)]

    assert asyncio.run(said()) == ["", "a probe took 50 ms, over 50 ms", "a probe failed"]


@pytest.mark.processes
@pytest.mark.parametrize(("backend", "by"), [("vllm", "metrics"), ("tgi", "metrics"), ("openai", "probe")])
def test_of_a_real_server(backend: str, by: str, tmp_path: Path) -> None:
    async def looked(url: str) -> tuple[str, list[str]]:
        target = Target(url)
        run = LoadRun(Config(backend=backend, url=url), tmp_path, new_run_id(), lambda _: None)
        look = await idle.looking_at(run, Served(target))
        return look.by, [await look.busy()]

    with serving("--dialect", backend, "--ttft-ms", "20") as url:
        assert asyncio.run(looked(url)) == (by, [""])


@pytest.mark.processes
def test_a_request_that_runs_is_seen(tmp_path: Path) -> None:
    async def looked(url: str) -> list[str]:
        run = LoadRun(Config(url=url), tmp_path, new_run_id(), lambda _: None)
        look = await idle.looking_at(run, Served(Target(url)))
        body = b'{"model": "llama-2-7b", "prompt": [1, 2, 3], "max_tokens": 30, "stream": true, "ignore_eos": true}'
        request: Any = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            reply.read(1)
            said = [await look.busy()]
            rest = threading.Thread(target=reply.read)
            rest.start()
            await asyncio.to_thread(rest.join)
        return [*said, await look.busy()]

    with serving("--itl-ms", "50") as url:
        assert asyncio.run(looked(url)) == ["1 running", ""]
