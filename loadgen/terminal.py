"""How a program talks on standard error and ends, also when nobody reads what it writes any more; how wide its tables
may be."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TextIO

from backends.replies import printable

EXIT_UNREAD = 141  # as the shell says of a program that wrote into a closed pipe
MAX_ERROR_CHARS = 2000
MIN_WIDTH, PLAIN_WIDTH = 80, 160


def say(text: str) -> None:
    """To whoever listens: with nobody left (a closed pipe, a terminal that is gone) the work goes on all the same."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def say_error(program: str, error: object) -> None:
    """One line: parts of it may come from a server, so nothing in it may command the terminal."""
    say(f"{program}: {printable(str(error), MAX_ERROR_CHARS)}")


def width(stream: TextIO) -> int:
    """Columns of a terminal; of anything else enough for every table."""
    return max(MIN_WIDTH, shutil.get_terminal_size().columns) if stream.isatty() else PLAIN_WIDTH


def main(invoke: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs this process's command line; its exit code is what `invoke` returns, or EXIT_UNREAD."""
    try:
        code = invoke(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        code = EXIT_UNREAD
    sys.exit(code)


def _discard(stream: TextIO) -> None:
    """Nobody reads it: what is still in its buffer must not fail at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
