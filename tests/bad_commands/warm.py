"""Command lines in processes of their own that do not start cold: an interpreter that has imported what the commands
import forks one process for each. That process has its own working directory, standard streams, CPU time and exit code,
and ends as every interpreter ends.

    python -m tests.bad_commands.warm     reads a Line as JSON from each line of its input, and answers with an Ended
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

STREAMS = ("out", "err")  # files below Line.streams


class Line(msgspec.Struct):
    """A command line, where it runs, and the directory for what it says. It is killed after `timeout_s`."""

    program: str
    words: list[str]
    place: str
    streams: str
    timeout_s: float


class Ended(msgspec.Struct):
    """As subprocess has it: the exit code, or less than 0 the signal. cpu_s: of the process, of those it waited for,
    and what the interpreter took to import the program, as if the process had done so itself."""

    exit_code: int
    cpu_s: float


class Interpreter:
    """The warm interpreter as tests see it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )  # fmt: skip

    def run(self, line: Line) -> tuple[Ended, str, str]:
        """How it ended, and what it wrote to standard output and standard error."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(line) + b"\n")
        self._process.stdin.flush()
        ended = msgspec.json.decode(self._process.stdout.readline(), type=Ended)
        out, err = ((Path(line.streams) / name).read_text(encoding="utf-8") for name in STREAMS)
        return ended, out, err

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@contextlib.contextmanager
def interpreter(environment: dict[str, str]) -> Iterator[Interpreter]:
    warm = Interpreter(environment)
    try:
        yield warm
    finally:
        warm.end()


def _become(line: Line) -> None:
    """Makes this process, which was just forked, one whose interpreter runs a command line."""
    os.chdir(line.place)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, name in enumerate(STREAMS, 1):
        with (Path(line.streams) / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.argv = ["-c", *line.words]


def _watched(pid: int, timeout_s: float, own_s: float) -> Ended:
    timer = threading.Timer(timeout_s, os.kill, (pid, signal.SIGKILL))
    timer.start()
    _, status, usage = os.wait4(pid, 0)
    timer.cancel()
    timer.join()  # no fork beside a thread
    return Ended(os.waitstatus_to_exitcode(status), own_s + usage.ru_utime + usage.ru_stime)


def _warm(program: Any) -> None:
    """Each command refuses an option that no command has, and has imported what it needs for that."""
    with Path(os.devnull).open("w") as nobody, contextlib.redirect_stderr(nobody):
        for command in program.build_app():
            if not command.startswith("-"):
                program.invoke([command, "--nosuch"])


def main() -> None:
    programs = {name: importlib.import_module(f"{name}.cli") for name in ("loadgen", "training_probe")}
    own_s = sum(os.times()[:2])
    for program in programs.values():
        _warm(program)
    gc.collect()
    gc.freeze()  # else the end of each fork would look at, and so copy, all that there is
    for text in sys.stdin.buffer:
        line = msgspec.json.decode(text, type=Line)
        pid = os.fork()
        if pid == 0:
            _become(line)
            programs[line.program].main()
        os.write(1, msgspec.json.encode(_watched(pid, line.timeout_s, own_s)) + b"\n")


if __name__ == "__main__":
    main()
