"""A server that was started for a run: made ready, and ended whatever happens.

Starting may take many minutes, so it can be stopped at any point: no container and no process is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from backends.launch import LaunchError, Running, died, excerpt, explain, last_lines
from backends.untrusted import printable
from loadgen import models
from loadgen.client.limits import raise_fd_limit
from loadgen.server.launch import Launch, write_files
from loadgen.target import Target, TransportError, get

POLL_S = 0.5
SAY_EVERY_S = 15.0
HEALTH_TIMEOUT_S = 5.0
END_WAIT_S = 6.0  # vLLM's API server outlives its engine by up to 5 s
WHOLE_LOG_LINES = 5000

Say = Callable[[str], None]


class ManagedServer:
    """A ready server. `facts` is what the manifest holds of it."""

    def __init__(self, launch: Launch, running: Running, url: str, ready_s: float) -> None:
        self.launch = launch
        self.running = running
        self.url = url
        self.ready_s = ready_s
        self._on_gpus = bool(launch.gpu_indices)
        self.kv_cache_tokens = _capacity(launch, running.log_tail(WHOLE_LOG_LINES))
        self.facts = msgspec.structs.replace(
            launch.facts(),
            **running.facts,
            ready_s=ready_s,
            kv_cache_tokens=self.kv_cache_tokens,
            log=launch.start.log.name,
        )

    async def ended(self, wait_s: float = 0.0) -> LaunchError | None:
        """Why it is no longer there, with the end of its log; None while it runs, for `wait_s` seconds from now."""
        give_up = time.monotonic() + wait_s
        while True:
            try:
                exit = await asyncio.to_thread(self.running.poll)
            except LaunchError as error:  # the Docker engine went away
                return error
            if exit is not None:
                log = await asyncio.to_thread(self.running.log_tail, WHOLE_LOG_LINES)
                return died(self.launch.backend.name, exit, log, self.launch.adapter.failures, gpus=self._on_gpus)
            if time.monotonic() >= give_up:
                return None
            await asyncio.sleep(POLL_S)

    async def trouble(self) -> str | None:
        """The failure that the log of a running server shows, as one sentence; None where no known one is in it."""
        log = await asyncio.to_thread(self.running.log_tail, WHOLE_LOG_LINES)
        explanation = explain(log, self.launch.adapter.failures, gpus=self._on_gpus)
        if explanation is None:
            return None
        return f"{self.launch.backend.name} still runs, but its log tells: {explanation[0]}; {explanation[1]}."


@contextlib.asynccontextmanager
async def managed(launch: Launch, ready_timeout_s: float, say: Say) -> AsyncIterator[ManagedServer]:
    """Starts the server, waits until it answers, and ends it with the block. Raises LaunchError."""
    await asyncio.to_thread(write_files, launch, say)
    raise_fd_limit(0)  # a process inherits it
    if "HF_TOKEN" in launch.start.secrets:
        models.lend_token()
    cancelled = threading.Event()
    starting = asyncio.ensure_future(asyncio.to_thread(launch.launcher.start, launch.start, say, cancelled))
    try:
        running: Running = await asyncio.shield(starting)
    except asyncio.CancelledError:
        cancelled.set()
        await _over(starting)
        if starting.exception() is None:
            await _over(asyncio.ensure_future(asyncio.to_thread(starting.result().stop)))
        raise
    try:
        began = time.monotonic()
        url = await _ready(launch, running, ready_timeout_s, say)
        yield ManagedServer(launch, running, url, time.monotonic() - began)
    finally:
        stopping = asyncio.ensure_future(asyncio.to_thread(running.stop))
        try:
            say(f"stopping {launch.backend.name}")
        finally:  # say may fail: its terminal may be gone
            cancelled_again = await _over(stopping)
        stopping.result()
        if cancelled_again:
            raise asyncio.CancelledError


async def _over(future: asyncio.Future[Any]) -> bool:
    """Waits for its end, whatever that is, however often we are cancelled meanwhile; whether we were."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


def quoted(log: str) -> str:
    """Lines of a server's log, as they are shown to a person."""
    return "\n".join(f"  | {printable(line, 400)}" for line in log.splitlines())


async def _ready(launch: Launch, running: Running, timeout_s: float, say: Say) -> str:
    """The first of its addresses that answers for its health. Raises LaunchError when it dies or takes too long."""
    name, failures, gpus = launch.backend.name, launch.adapter.failures, bool(launch.gpu_indices)
    began = last_message = time.monotonic()
    while True:
        exit = await asyncio.to_thread(running.poll)
        if exit is not None:
            raise died(name, exit, running.log_tail(WHOLE_LOG_LINES), failures, gpus=gpus)
        for url in running.urls:
            if await asyncio.to_thread(_healthy, url, launch.adapter.ready_paths):
                return url
        if (stuck := await asyncio.to_thread(_stuck, launch, running)) is not None:
            raise stuck
        now = time.monotonic()
        if now - began > timeout_s:
            log = running.log_tail(WHOLE_LOG_LINES)
            reason, advice = explain(log, failures, gpus=gpus) or _never_ready(launch, log)
            raise LaunchError(f"{name} was not ready within {timeout_s:g} s: {reason}; {advice}.", excerpt(log))
        if now - last_message > SAY_EVERY_S:
            last_message = now
            last = last_lines(running.log_tail(20), 1)
            say(f"{name} is not ready after {now - began:.0f} s; its log: {printable(last, 160) or 'empty'}")
        await asyncio.sleep(POLL_S)


def _stuck(launch: Launch, running: Running) -> LaunchError | None:
    """The error for a server that lives, but will never be ready, by its own log."""
    patterns = [failure.pattern for failure in launch.adapter.failures if failure.hangs]
    log = running.log_tail() if patterns else ""
    hangs = any(re.search(pattern, log) for pattern in patterns)
    explanation = explain(log, launch.adapter.failures, gpus=bool(launch.gpu_indices)) if hangs else None
    if explanation is None:
        return None
    reason, advice = explanation
    return LaunchError(f"{launch.backend.name} will never be ready: {reason}; {advice}.", excerpt(log))


def _never_ready(launch: Launch, log: str) -> tuple[str, str]:
    """What to think of a server whose log names no failure. A hang in NCCL leaves no line of its own, but before a
    server knows how many tokens its KV cache holds, its GPUs have loaded the model and run it together."""
    longer = "read the end of its log, or give it longer with --ready-timeout"
    if launch.settings.tp > 1 and _capacity(launch, log) is None:
        return f"its {launch.settings.tp} GPUs still load the model, or hang in NCCL", f"{longer}, or try --p2p off"
    return "its log tells no reason", longer


def _healthy(url: str, paths: tuple[str, ...]) -> bool:
    """Whether it can serve, by the first path that it knows. A published port takes connections before the server
    listens: any failure is `not yet`."""
    try:
        for path in paths:
            status, _, _ = get(Target(url), path, HEALTH_TIMEOUT_S)
            if status != 404:
                return status == 200
    except TransportError:
        pass
    return False


def _capacity(launch: Launch, log: str) -> int | None:
    """How many tokens its KV cache holds, by its own log."""
    match = re.search(launch.adapter.capacity, log) if launch.adapter.capacity else None
    return int(match.group(1).replace(",", "")) if match else None
