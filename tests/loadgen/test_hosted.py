"""A started server's life: ready, late, dead, stopped while it starts; always ended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends.gpus import Inventory
from backends.launch import Exit, LaunchError
from loadgen.config import Config
from loadgen.hosted import Hosted, hosting
from loadgen.launch import Launch, plan_launch


class Fake:
    """A launcher and what it runs."""

    def __init__(self, urls: list[str], log: str = "", exit: Exit | None = None, start_s: float = 0.0) -> None:
        self.urls, self.log, self.exit, self.start_s = urls, log, exit, start_s
        self.facts = {"image_digest": "sha256:1"}
        self.stopped = 0
        self.starts = 0
        self.cancelled: threading.Event | None = None

    def start(self, start: Any, say: Callable[[str], None], cancelled: threading.Event) -> Fake:
        self.starts += 1
        self.cancelled = cancelled
        cancelled.wait(self.start_s)
        return self

    def command_line(self, start: Any) -> list[str]:
        return ["run", *start.argv]

    def poll(self) -> Exit | None:
        return self.exit

    def log_tail(self, lines: int = 200) -> str:
        return self.log

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def server() -> Iterator[SimpleNamespace]:
    """Answers /health with `status`."""
    state = SimpleNamespace(status=200)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(state.status if self.path == "/health" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    yield state
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launch]:
    def make(fake: Fake, tp: int = 1) -> Launch:
        monkeypatch.setattr(Launch, "launcher", property(lambda _: fake))
        config = Config(backend="vllm", model="7b", gpus="none", tp=str(tp), dry_run=True)
        return plan_launch(config, tmp_path / "run", "id", Inventory(problem="none"))

    return make


def host(launch: Launch, ready_timeout_s: float = 30.0) -> tuple[Hosted, list[str]]:
    said: list[str] = []

    async def main() -> Hosted:
        async with hosting(launch, ready_timeout_s, said.append) as hosted:
            return hosted

    return asyncio.run(main()), said


DEAD = "http://127.0.0.1:9"


def test_ready_at_the_first_address_that_answers(server: Any, launch: Callable[[Fake], Launch]) -> None:
    fake = Fake([DEAD, server.url], "INFO GPU KV cache size: 1,234 tokens, Maximum")
    hosted, _ = host(launch(fake))
    assert hosted.url == server.url
    assert hosted.facts["kv_cache_tokens"] == 1234
    assert hosted.facts["image_digest"] == "sha256:1" and hosted.facts["command"].startswith("run --model")
    assert fake.stopped == 1
    assert hosted.ended() is None
    fake.exit = Exit(137, oom_killed=True)
    assert "host memory" in (hosted.ended() or "")


def test_it_waits_for_health(server: Any, launch: Callable[[Fake], Launch]) -> None:
    server.status = 503
    threading.Timer(0.2, lambda: setattr(server, "status", 200)).start()
    hosted, _ = host(launch(Fake([server.url])))
    assert hosted.facts["ready_s"] >= 0.2 - 0.05


def test_it_dies_while_starting(launch: Callable[[Fake], Launch]) -> None:
    fake = Fake([DEAD], "x\nNo available memory for the cache blocks\n", Exit(1))
    with pytest.raises(LaunchError, match="exit code 1: the weights leave no room") as caught:
        host(launch(fake))
    assert caught.value.log.startswith("x\n")
    assert fake.stopped == 1


@pytest.mark.parametrize(
    ("tp", "log", "reason"),
    [
        (1, "INFO loading", "its log tells no reason"),
        (4, "INFO vLLM is using nccl==2.27.5", "its 4 GPUs still load the model, or hang in NCCL; .* or try --p2p off"),
        (4, "INFO GPU KV cache size: 1,234 tokens", "its log tells no reason"),
        (4, "RuntimeError: NCCL error: unhandled system error", "an NCCL error"),
    ],
)
def test_it_is_never_ready(tp: int, log: str, reason: str, server: Any, launch: Callable[..., Launch]) -> None:
    server.status = 503
    fake = Fake([server.url], log)
    with pytest.raises(LaunchError, match=rf"not ready within 0\.2 s: {reason}"):
        host(launch(fake, tp=tp), ready_timeout_s=0.2)
    assert fake.stopped == 1


@pytest.mark.parametrize("start_s", [0.0, 30.0])
def test_cancelled_while_it_starts(start_s: float, server: Any, launch: Callable[[Fake], Launch]) -> None:
    """In the launcher's thread (a pull, say), or while waiting for health: what was started is ended."""
    server.status = 503
    fake = Fake([server.url], start_s=start_s)
    prepared = launch(fake)

    async def main() -> None:
        async def hosted() -> None:
            async with hosting(prepared, 60.0, lambda _: None):
                raise AssertionError("never ready")

        task = asyncio.create_task(hosted())
        deadline = time.monotonic() + 10
        while not fake.starts and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert fake.stopped == 1
