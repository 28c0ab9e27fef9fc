"""Waits of tests for what other processes do, and ports for them."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.request
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0  # a loaded machine is slow to start and to end processes


def until(
    true: Callable[[], Any],
    what: str = "it",
    timeout_s: float = PATIENCE_S,
    over: Callable[[], str | None] = lambda: None,
) -> Any:
    """The first true value of `true`. Fails after the timeout, and at once when `over` says why it can never come. An
    OSError of `true` is a server that does not answer yet."""
    give_up = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):
            if value := true():
                return value
        assert (reason := over()) is None, f"{what}: {reason}"
        assert time.monotonic() < give_up, f"{what} did not come within {timeout_s:g} s"
        time.sleep(0.02)


def free_ports(count: int) -> list[int]:
    """Different ones: all are held until all are found."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def healthy(url: str) -> bool:
    """Whether a server says at /health that it is ready."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False
