"""Whole runs that a person watches: the live view on a terminal, the screen at the end, and the terminal afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadgen.live_view import MAX_LINES
from loadgen.summary import SCREEN_LINES
from tests.loadgen.screen import LOADGEN, Terminal
from tests.loadgen.test_run import FAST, serving, wait_for_rows

pytestmark = pytest.mark.processes
LOAD = ("--output-tokens", "4", "--arrival", "constant:40", *FAST)
SHORT, ENDLESS = ("--requests", "40"), ("--requests", "100000")  # a second; until Ctrl-C
STOPPED = 128 + signal.SIGINT
HOSTILE = "evil\x1b[2J\x1b]0;owned\x07[red]x[/red]\u202e"
ESCAPES = re.compile(rb"\x1b\[[^A-Za-z]*[A-Za-z]")
Run = Callable[..., Terminal]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    started: list[Terminal] = []

    def start(*options: str, columns: int = 80, **env: str) -> Terminal:
        argv = (*LOADGEN, "run", *LOAD, *options, "--out", "out")
        started.append(Terminal(argv, columns, tmp_path, env))
        return started[-1]

    yield start
    for terminal in started:
        terminal.close()


def drawn(text: str) -> bool:
    """Whether the view is there, as far as a run of some seconds has one."""
    return "in flight" in text and "server  " in text


def view(text: str) -> list[str]:
    """Its lines, with all that is below them."""
    lines = [line for line in text.splitlines() if line]
    return lines[next(at for at, line in enumerate(lines) if re.match(r"(stopping, .*)?EMULATED \w", line)) :]


def assert_over(terminal: Terminal, *verdicts: str) -> None:
    """The screen at the end, alone; the machine may have made the client late."""
    assert "tokens/s  " not in terminal.text and "━" not in terminal.text, terminal.text
    lines = [line for line in terminal.lines if line]
    first = next(at for at, line in enumerate(lines) if line.split(":")[0] in verdicts)
    assert len(lines[first:]) <= SCREEN_LINES
    text = "\n".join(lines[first:])
    assert "EMULATED" in text and "latency, ms" in text and "report.md" in text and not re.search(r'\{"schema', text)
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert re.search(rf"^{name}( +[\d.,-]+){{5}}$", text, re.MULTILINE), text
    assert terminal.restored


@pytest.mark.parametrize(("columns", "resized"), [(60, 100), (100, 60)])
def test_a_run_is_watched_at_any_width(run: Run, columns: int, resized: int) -> None:
    terminal = run(*ENDLESS, columns=columns)
    for width in (columns, resized):
        terminal.resize(width)
        lines = view(terminal.until(lambda text: drawn(text) and fitted(text, width)))  # noqa: B023
        assert len(lines) <= MAX_LINES and max(map(len, lines)) < width
        assert sum("in flight" in line for line in lines) == 1, "\n".join(lines)  # nothing of an earlier one is left
        assert lines[-1].startswith("server")
    terminal.type("\x03")
    assert terminal.ended() == STOPPED
    assert_over(terminal, "INVALID")


def fitted(text: str, width: int) -> bool:
    """Whether all of it is drawn for this width: a frame is read in pieces, the bar first."""
    bar = next((len(line) for line in text.splitlines() if line.endswith(("gone", "left"))), 0)
    return bar == width - 1 and max(map(len, view(text))) < width


def test_a_server_with_a_hostile_name_and_no_colours(run: Run) -> None:
    with serving("--model", HOSTILE) as url:
        terminal = run(*ENDLESS, "--url", url, columns=72, NO_COLOR="1")
        shown = terminal.until(drawn)
        terminal.type("\x03")
        assert terminal.ended() == STOPPED
    for text in (shown, terminal.text):
        assert "evil\\x1b[2J\\x1b]0;owned\\x07[red]x[/red]\\u202e" in text, text
    assert b"\x1b[2J" not in terminal.written and b"\x1b]" not in terminal.written
    styles = [each[2:-1] for each in ESCAPES.findall(terminal.written) if each.endswith(b"m")]
    assert styles and all(len(code) <= 1 for style in styles for code in style.split(b";"))  # bold and dim
    assert_over(terminal, "INVALID")


def test_a_dumb_terminal_is_sent_text_alone(run: Run) -> None:
    terminal = run(*SHORT, TERM="dumb")
    assert terminal.ended() in (0, 4)
    assert b"\x1b" not in terminal.written and "━" not in terminal.written.decode()
    assert_over(terminal, "VALID", "INVALID")


def test_a_program_that_reads_has_lines_and_the_whole_text(tmp_path: Path) -> None:
    argv = [*LOADGEN, "run", *LOAD, *SHORT, "--out", "out"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (0, 4) and "\x1b" not in done.stderr + done.stdout and "\r" not in done.stderr
    assert "Throughput: " in done.stderr and "Verdict: " in done.stderr and done.stdout.count("\n") == 1


def test_ctrl_c_is_seen_while_replies_are_awaited(run: Run) -> None:
    with serving("--ttft-ms", "2500") as url:
        terminal = run(*ENDLESS, "--url", url)
        terminal.until(drawn)
        terminal.type("\x03")
        terminal.until(lambda text: "stopping, waits for replies" in text)
        assert terminal.ended() == STOPPED
    assert_over(terminal, "INVALID")
    assert "INTERRUPTED" in terminal.text and "Traceback" not in terminal.text


def test_a_view_that_is_killed_stops_nothing(run: Run, tmp_path: Path) -> None:
    terminal = run(*ENDLESS)
    terminal.until(drawn)
    os.kill(sidecar_of(terminal.process.pid), signal.SIGKILL)
    wait_for_rows(tmp_path / "out", len((tmp_path / "out/requests.jsonl").read_bytes().splitlines()) + 40)
    terminal.type("\x03")
    assert terminal.ended() == STOPPED
    assert "died of signal 9" in terminal.text and "latency, ms" in terminal.text
    assert terminal.restored


def sidecar_of(pid: int) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            status, words = (process / "stat").read_text(), (process / "cmdline").read_bytes().split(b"\0")
            if int(status.rsplit(")", 1)[1].split()[1]) == pid and b"loadgen.monitor" in words:
                return int(process.name)
    raise AssertionError("no process draws")


def test_a_run_that_is_killed_leaves_a_terminal_that_works(run: Run) -> None:
    terminal = run(*ENDLESS)
    terminal.until(drawn)
    terminal.process.kill()
    assert terminal.ended() == -signal.SIGKILL
    assert terminal.restored and terminal.screen.cursor.x == 0
    assert terminal.lines[terminal.screen.cursor.y - 1].startswith("server")
