"""llama.cpp's own server on this machine, with a tiny Llama of random weights."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import backends
from backends import catalog
from backends.llamacpp.gguf_model import write_random
from backends.process import free_port
from loadgen import cli
from tests.support.waiting import healthy

SLOTS, LENGTH = 2, 512
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 3000, "max_position_embeddings": 2048,
}  # fmt: skip


@dataclass(frozen=True)
class Done:
    """One command: its exit code, and what it wrote."""

    code: int
    out: str
    err: str

    def result(self) -> dict[str, Any]:
        """What it printed last. A run on a busy machine may be invalid for its times."""
        assert self.code in (0, 4), self.out[-3000:] + self.err[-3000:]
        printed: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return printed


Loadgen = Callable[..., Done]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its directory: a config.json alone."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture
def loadgen(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Loadgen:
    """Runs one command in this process, whose imports it spares."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))

    def run(*words: str | Path) -> Done:
        code = cli.invoke([str(word) for word in words])
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with SLOTS slots of LENGTH tokens that keeps prompts in its cache unless a request forbids it."""
    directory = tmp_path_factory.mktemp("server")
    write_random(catalog.from_config("tiny", CONFIG), "float32", directory / "tiny.gguf")
    with serving(directory / "tiny.gguf") as address:
        yield address


@contextlib.contextmanager
def serving(file: Path, *more: str) -> Iterator[str]:
    """That server of a file, while the block lasts."""
    directory, port = file.parent, free_port()
    adapter = backends.get("llamacpp").adapter
    assert adapter is not None and adapter.package is not None
    words = [
        "--model", file, "--alias", "tiny", "--port", port, "--ctx-size", SLOTS * LENGTH, "--parallel", SLOTS,
        "--threads", 1, "--threads-http", 128, "--cache-ram", 0, "--metrics", *more,
    ]  # fmt: skip
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, adapter.package[1], *map(str, words)], stdout=log, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not healthy(address):
            assert process.poll() is None and time.monotonic() < deadline, (directory / "server.log").read_text()
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait(20)


def completion(address: str, **fields: object) -> dict[str, Any]:
    """A whole reply of its own protocol."""
    body = json.dumps(fields).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{address}/completion", body), timeout=20) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer
