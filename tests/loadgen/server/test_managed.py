"""A started server's life: ready, late, dead, stopped while it starts; always ended."""

from __future__ import annotations

import asyncio
import json
import os
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
from loadgen import cli
from loadgen.config import Config
from loadgen.server.launch import Launch, plan_launch
from loadgen.server.managed import ManagedServer, managed
from tests.loadgen.test_run import serving


class Fake:
    """A launcher and what it runs."""

    def __init__(
        self, urls: list[str], log: str = "", exit: Exit | None = None, start_s: float = 0.0, polls: int = 0
    ) -> None:
        """`exit`: how it has ended, as seen after the first `polls` looks at it."""
        self.urls, self.log, self.exit, self.start_s, self.polls = urls, log, exit, start_s, polls
        self.NAME = "docker"
        self.facts = {"image_digest": "sha256:1"}
        self.stopped = 0
        self.starts = 0
        self.hurried = True  # whether it heeds `cancelled`
        self.cancelled: threading.Event | None = None

    def place(self, start: Any) -> str:
        return "a test"

    def environment(self) -> dict[str, str]:
        return {}

    def start(self, start: Any, say: Callable[[str], None], cancelled: threading.Event) -> Fake:
        self.starts += 1
        self.cancelled = cancelled
        if self.hurried:
            cancelled.wait(self.start_s)
        else:
            time.sleep(self.start_s)
        return self

    def command_line(self, start: Any) -> list[str]:
        return ["run", *start.argv]

    def poll(self) -> Exit | None:
        self.polls -= 1
        return self.exit if self.polls < 0 else None

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
    def make(fake: Fake, tp: int = 1, backend: str = "vllm") -> Launch:
        monkeypatch.setattr("loadgen.server.launch.docker", fake)
        config = Config(backend=backend, model="7b", gpus="none", tp=str(tp), dry_run=True)
        return plan_launch(config, tmp_path / "run", "id", Inventory(problem="none"))

    return make


def host(launch: Launch, ready_timeout_s: float = 30.0) -> tuple[ManagedServer, list[str]]:
    said: list[str] = []

    async def main() -> ManagedServer:
        async with managed(launch, ready_timeout_s, said.append) as hosted:
            return hosted

    return asyncio.run(main()), said


DEAD = "http://127.0.0.1:9"


def test_ready_at_the_first_address_that_answers(server: Any, launch: Callable[[Fake], Launch]) -> None:
    fake = Fake([DEAD, server.url], "INFO GPU KV cache size: 1,234 tokens, Maximum")
    hosted, _ = host(launch(fake))
    assert hosted.url == server.url
    assert hosted.facts.kv_cache_tokens == 1234
    assert hosted.facts.image_digest == "sha256:1" and hosted.facts.command.startswith("run --model")
    assert fake.stopped == 1
    assert asyncio.run(hosted.ended()) is None
    fake.exit = Exit(137, oom_killed=True)
    assert "host memory" in str(asyncio.run(hosted.ended()))


def test_the_token_of_a_login_is_there_when_it_starts(
    server: Any, launch: Callable[[Fake], Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")  # so that it is taken back
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text("hf_secret")
    host(launch(Fake([server.url])))
    assert os.environ["HF_TOKEN"] == "hf_secret"


def test_it_waits_for_health(server: Any, launch: Callable[[Fake], Launch]) -> None:
    server.status = 503
    threading.Timer(0.2, lambda: setattr(server, "status", 200)).start()
    hosted, _ = host(launch(Fake([server.url])))
    assert hosted.ready_s >= 0.2 - 0.05


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


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("FileNotFoundError: [Errno 2] No such file: 'hypercorn'", ".*hypercorn.*--server-python"),
        ("init func start_router_process : out of memory", "start_router_process failed to start; read its log.*"),
    ],
)
def test_one_that_hangs_after_a_failure_is_not_waited_for(
    last: str, said: str, server: Any, launch: Callable[..., Launch]
) -> None:
    """LightLLM without hypercorn, or whose router fails: its other processes live on, and nobody listens."""
    server.status = 503
    fake = Fake([server.url], f"init ok\nTraceback (most recent call last):\n{last}\n")
    with pytest.raises(LaunchError, match=rf"^lightllm will never be ready: {said}\.$") as caught:
        host(launch(fake, backend="lightllm"), ready_timeout_s=30.0)
    assert fake.stopped == 1 and last in caught.value.log


def test_other_known_failures_in_the_log_end_no_wait(server: Any, launch: Callable[..., Launch]) -> None:
    """A server may survive them, as vLLM does a failed capture of a graph."""
    server.status = 503
    threading.Timer(0.2, lambda: setattr(server, "status", 200)).start()
    host(launch(Fake([server.url], "CUDA out of memory\ncheck max len infer fail"), backend="lightllm"))


@pytest.mark.parametrize("cancels", [1, 2, 3])
@pytest.mark.parametrize(("start_s", "hurried"), [(0.0, True), (30.0, True), (0.4, False)])
def test_cancelled_while_it_starts(
    start_s: float, hurried: bool, cancels: int, server: Any, launch: Callable[[Fake], Launch]
) -> None:
    """In the launcher's thread (a pull, say), or while waiting for health: what was started is ended, however often
    somebody presses Ctrl-C."""
    server.status = 503
    fake = Fake([server.url], start_s=start_s)
    fake.hurried = hurried
    prepared = launch(fake)

    async def main() -> None:
        async def hosted() -> None:
            async with managed(prepared, 60.0, lambda _: None):
                raise AssertionError("never ready")

        task = asyncio.create_task(hosted())
        deadline = time.monotonic() + 10
        while not fake.starts and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0.02)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fake.stopped == 1  # not only when the loop ends

    asyncio.run(main())
    assert fake.stopped == 1


def test_nobody_hears_what_is_said(server: Any, launch: Callable[[Fake], Launch]) -> None:
    fake = Fake([server.url])

    def say(_: str) -> None:
        raise BrokenPipeError

    async def main() -> None:
        async with managed(launch(fake), 30.0, say):
            pass

    with pytest.raises(BrokenPipeError):
        asyncio.run(main())
    assert fake.stopped == 1


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`loadgen run` with a launcher that starts nothing: exit code, report, and what was said."""

    def run(fake: Fake, expect: int | tuple[int, ...]) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr("loadgen.server.launch.docker", fake)
        code = cli.invoke(
            ["run", "--backend", "vllm", "--model", "org/m", "--gpus", "none", "--requests", "4", "--output-tokens",
             "2", "--warmup", "0", "--no-calibrate", "--out", str(tmp_path / "run")]
        )  # fmt: skip
        captured = capsys.readouterr()
        assert code in (expect if isinstance(expect, tuple) else (expect,)), captured.err
        return (json.loads(captured.out) if captured.out else {}), captured.err

    return run


def test_it_dies_before_the_first_request(server: Any, run: Callable[..., Any]) -> None:
    """Ready, and then it answers nothing that makes sense, since it is about to end."""
    fake = Fake([server.url], "x\nRuntimeError: NCCL error: unhandled system error\n", Exit(1), polls=2)
    _, said = run(fake, 3)
    assert said.splitlines()[-1].startswith("loadgen: vllm ended with exit code 1: an NCCL error")
    assert "  | RuntimeError: NCCL error" in said and fake.stopped == 1


def test_a_server_of_another_kind_that_lives(
    server: Any, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadgen.server.managed.END_WAIT_S", 0.0)
    _, said = run(Fake([server.url]), 3)
    assert "a first request failed (http_error): POST http://" in said.splitlines()[-1]


LOG = "INFO up\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"


@pytest.mark.processes
def test_failed_requests_give_it_time_to_die(run: Callable[..., Any]) -> None:
    with serving("--model", "org/m", "--fault", "http_error:503:2") as url:
        report, said = run(Fake([url], LOG, Exit(1), polls=2), 4)
    assert report["requests"]["failed"] == 2
    found = report["verdict"]["findings"][0]
    assert found["code"] == "SERVER_ENDED" and "CUDA out of memory" in found["message"]
    assert "  | torch.OutOfMemoryError: CUDA out of memory." in said


@pytest.mark.processes
def test_one_that_lives_on_after_failures_may_say_why(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.server.managed.END_WAIT_S", 0.0)
    with serving("--model", "org/m", "--fault", "http_error:503:2") as url:
        report, said = run(Fake([url], LOG), 4)
    assert "SERVER_ENDED" not in {found["code"] for found in report["verdict"]["findings"]}
    assert "vllm still runs, but its log tells: CUDA out of memory" in said


@pytest.mark.processes
def test_one_that_fails_nothing_is_not_watched_for_its_end(run: Callable[..., Any]) -> None:
    with serving("--model", "org/m") as url:
        report, said = run(Fake([url], LOG, Exit(1), polls=2), (0, 4))
    assert report["requests"]["ok"] == 4
    assert "SERVER_ENDED" not in {found["code"] for found in report["verdict"]["findings"]} and "log tells" not in said
