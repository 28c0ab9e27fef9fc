"""What drips and what has no end is given up, in one sentence, by a limit over all of it."""

from __future__ import annotations

import contextlib
import gzip
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends import foreign_files
from backends.foreign_files import named_lines, read_named
from loadgen import cli
from loadgen.document import figure
from loadgen.load.dataset_files import holds_conversations
from loadgen.models import _read_config
from loadgen.report import build
from loadgen.target import Target, TransportError, get
from tests.loadgen.tables import facts, manifest, request, write_run
from training_probe import cli as training_cli

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"


@contextlib.contextmanager
def dripping(begin: bytes, drop: bytes) -> Iterator[Target]:
    """A server that begins so, and then sends a drop now and then for ever."""
    ended = threading.Event()

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(begin)
                while not ended.wait(0.02):
                    sock.sendall(drop)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield Target(f"http://127.0.0.1:{listener.getsockname()[1]}")
        ended.set()
    thread.join()


@pytest.mark.parametrize(
    ("begin", "drop"),
    [(HEAD, b"a"), (b"HTTP/1.1 200 OK\r\n", b"X-A: a\r\n"), (b"HTTP/1.1 200 OK\r\nX: ", b"a"), (b"", b"H")],
)
def test_a_reply_that_drips_is_given_up(begin: bytes, drop: bytes) -> None:
    with dripping(begin, drop) as target, pytest.raises(TransportError):
        get(target, "/v1/models", timeout_s=0.3)


def test_a_reply_in_time_is_whole() -> None:
    with dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"") as target:
        assert get(target, "/v1/models", timeout_s=30)[2] == b"abc"


def pipe_of(path: Path, block: bytes) -> Path:
    """A pipe that gives the block for ever."""
    os.mkfifo(path)

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), path.open("wb", buffering=0) as file:
            while True:
                file.write(block)

    threading.Thread(target=write, daemon=True).start()
    return path


ENDLESS: dict[str, Callable[[Path], Path]] = {
    "zeros": lambda path: Path("/dev/zero"),
    "lines": lambda path: pipe_of(path, b'{"prompt": "a"}\n' * 4096),
    "numbers": lambda path: pipe_of(path, b"1 1\n" * 4096),
    "a list": lambda path: pipe_of(path, b"[" * 65536),
    "nothing": lambda path: pipe_of(path, b"\n" * 65536),
}


@pytest.mark.parametrize("flag", ["--dataset", "--config", "--input-tokens", "--profile"])
@pytest.mark.parametrize("kind", ENDLESS)
def test_files_without_end(
    kind: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_files.named_lines, "__defaults__", (1 << 20,))
    monkeypatch.setattr(foreign_files.named_list, "__defaults__", (1 << 20,))
    monkeypatch.setattr(foreign_files.read_named, "__defaults__", (1 << 20,))
    path = ENDLESS[kind](tmp_path / "pipe")
    lengths = flag == "--input-tokens"
    more = ["--gpu", "h200", "--gpus", "1", "--model", "13b"] if flag == "--profile" else []
    value = f"file:{path}" if lengths else str(path)
    argv = ["run", flag, value, *(["--output-tokens", value] if lengths else []), *more, "--out", str(tmp_path / "out")]
    assert cli.invoke(argv) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "Traceback" not in told


def test_a_packed_trace_of_empty_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * 1_100_000))
    assert cli.invoke(["run", "--trace", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "empty lines in a row" in capsys.readouterr().err


def test_lines_of_a_named_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\r\n\n" + b"b" * 30 + b"\nc")
    with path.open("rb") as file:
        assert list(named_lines(file, path)) == [b"a\r\n", b"\n", b"b" * 30 + b"\n", b"c"]
    with path.open("rb") as file, pytest.raises(OSError, match="a line of it"):
        list(named_lines(file, path, 20))
    assert read_named(path, 36) == path.read_bytes()


def sparse(path: Path, begin: bytes = b"") -> Path:
    path.write_bytes(begin)
    os.truncate(path, 1 << 40)
    return path


@pytest.mark.parametrize("begin", [b"", b"\xff\xfe", b"[", b"\n"])
def test_large_files_of_nothing(begin: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(foreign_files, "MOST_LIST_BYTES", 1 << 20)
    path = sparse(tmp_path / "large", begin)
    out = ["--out", str(tmp_path / "out")]
    for flags in (["--dataset", str(path)], ["--config", str(path)]):
        assert cli.invoke(["run", *flags, *out]) == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1 and "Traceback" not in printed
    directory = write_run(tmp_path / "run", [request()], manifest(requests_planned=1), facts())
    sparse(directory / "manifest.json", begin)
    assert cli.invoke(["report", str(directory)]) == 2
    assert "manifest.json: it is larger than 64 MiB" in capsys.readouterr().err


def test_a_models_config_without_end(tmp_path: Path) -> None:
    sparse(tmp_path / "config.json")
    assert "it is larger than 64 MiB" in _read_config(tmp_path)[1]


def test_a_dataset_of_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * 9_000_000 + b'{"messages": []}'))
    assert not holds_conversations(path)


@pytest.mark.parametrize("invoke", [cli.invoke, training_cli.invoke])
def test_names_that_are_no_text(invoke: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    command = "run" if invoke is cli.invoke else "sweep"
    assert invoke([command, "--out", os.fsdecode(b"a\xff")]) == 2
    told = capsys.readouterr().err
    assert "no UTF-8" in told and told.count("\n") == 1


@pytest.mark.parametrize("error", [MemoryError(), ImportError("failed to map segment")])
def test_a_report_without_memory_for_its_figures(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(*_: object) -> None:
        raise error

    monkeypatch.setattr(figure, "draw", draw)
    directory = write_run(tmp_path / "run", [request()], manifest(requests_planned=1), facts())
    assert cli.invoke(["report", str(directory), "--figures"]) == 0
    assert "the figures are not drawn" in capsys.readouterr().err
    assert build.from_directory(directory)[0].verdict.valid and (directory / "report.html").exists()
