"""Programs that serve HTTP, each until its block ends."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence

from tests.support.waiting import free_ports, until


@contextlib.contextmanager
def program(words: Sequence[str], url: str, path: str, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """A server of that address, once it answers."""

    def ended() -> str | None:
        return None if started.poll() is None else f"{words[0]} ended with code {started.returncode}"

    started = subprocess.Popen(
        words, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        until(lambda: urllib.request.urlopen(url + path, timeout=1).status, words[0], over=ended)
        yield url
    finally:
        started.terminate()
        started.wait()


def summed_samples(url: str, line: str, timeout_s: float = 30) -> dict[str, float]:
    """Samples of a page of metrics by their names, label sets added up. line: the pattern of a sample's line, with its
    name and its value as groups."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=timeout_s) as reply:
        text = reply.read().decode()
    found: dict[str, float] = {}
    for name, value in re.findall(line, text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


@contextlib.contextmanager
def embedded(dialect: str, ttft_ms: float, itl_ms: float, *more: str) -> Iterator[str]:
    """The embedded server, in a process of its own."""
    (port,) = free_ports(1)
    words = [sys.executable, "-m", "loadgen", "serve", "--dialect", dialect, "--port", str(port)]
    words += ["--ttft-ms", str(ttft_ms), "--itl-ms", str(itl_ms), *more]
    with program(words, f"http://127.0.0.1:{port}", "/health") as url:
        yield url
