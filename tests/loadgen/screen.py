"""A command on a terminal: what it wrote, and what stood on the screen while it ran."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pyte

LOADGEN = (sys.executable, "-c", "from loadgen.cli import main; main()")
HEIGHT = 40


class Terminal:
    """Runs a command with its three streams on a terminal of that many columns; the terminal is its own."""

    def __init__(self, argv: tuple[str, ...], columns: int, cwd: Path, env: Mapping[str, str] | None = None) -> None:
        ours, theirs = pty.openpty()
        self._fd = ours
        self._sized(columns)
        self.screen = pyte.Screen(columns, HEIGHT)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self.pictures: list[list[str]] = []  # the screen whenever something was written
        environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLORTERM")}
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd,
            env={**environment, "TERM": "xterm-256color", **(env or {})}, preexec_fn=_own_terminal,
        )  # fmt: skip
        self.settings = termios.tcgetattr(theirs)
        self._theirs = theirs

    def _sized(self, columns: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, columns, 0, 0))

    def resize(self, columns: int) -> None:
        self._sized(columns)
        self.screen.resize(HEIGHT, columns)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def until(self, seen: Callable[[str], bool], timeout_s: float = 60.0) -> str:
        """Reads until the screen is so; what stands on it then."""
        deadline = time.monotonic() + timeout_s
        while not seen(self.text):
            assert time.monotonic() < deadline and self._read(), self.text
        return self.text

    def ended(self, timeout_s: float = 60.0) -> int:
        """Reads until the command is over; its exit code."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            self._read(0.05)
        while select.select([self._fd], [], [], 0.05)[0] and self._read(0.05):
            pass
        return self.process.returncode

    @property
    def restored(self) -> bool:
        """Whether the terminal is as it was: its settings, a cursor that shows, no colour left on."""
        attributes = self.screen.cursor.attrs
        plain = (attributes.fg, attributes.bold, attributes.reverse) == ("default", False, False)
        return termios.tcgetattr(self._theirs) == self.settings and not self.screen.cursor.hidden and plain

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._fd)
        os.close(self._theirs)

    def _read(self, timeout_s: float = 60.0) -> bool:
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return False
        data = os.read(self._fd, 1 << 16)
        self.written += data
        self._stream.feed(data)
        self.pictures.append(self.lines)
        return bool(data)


def _own_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
