"""A command line's mistakes: one sentence each, and the exit code of its kind."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from subprocess import PIPE, STDOUT
from typing import NoReturn

import pytest
from cyclopts import App

from backends import exit_codes
from backends.exit_codes import FailedError, UserError
from loadgen.terminal import UNASKED_JSON, invoke


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def command() -> NoReturn:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UserError("name another."), 2, "name another."),
        (FailedError("it is gone."), 3, "it is gone."),
        (FileNotFoundError(2, "No such file", "x.json"), 2, "x.json: No such file"),
        (OSError("full"), 2, "input or output: full"),
    ],
)
def test_a_mistake_is_one_sentence(
    error: Exception, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke("program", raising(error)) == code
    assert capsys.readouterr().err == f"program: {sentence}\n"


def test_what_cyclopts_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    app = App(result_action="return_value")

    @app.default
    def command(*, count: int = 1) -> int:
        return count

    def run(*tokens: str) -> int:
        return invoke("program", lambda: app(tokens, exit_on_error=False, print_error=False))

    assert run("--count", "4") == 4
    assert run("--count", "x") == exit_codes.BAD_OPTIONS
    assert "--count" in capsys.readouterr().err


def test_how_it_ends_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("program", raising(KeyboardInterrupt())) == exit_codes.STOPPED
    assert invoke("program", lambda: None) == exit_codes.OK
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [BrokenPipeError(), ZeroDivisionError()])
def test_a_defect_and_a_closed_pipe_are_not_hidden(error: Exception) -> None:
    with pytest.raises(type(error)):
        invoke("program", raising(error))


PROGRAMS = {name: f"from {name}.cli import main; main()" for name in ("loadgen", "training_probe")}
QUICK = [
    ("loadgen", "--help"), ("loadgen", "backends"), ("loadgen", "doctor"),
    ("training_probe", "letters"), ("training_probe", "sweep", "--dry-run"),
]  # fmt: skip
CLOSED = [(0,), (1,), (2,), (0, 1, 2)]


def closing(*fds: int) -> Callable[[], None]:
    def close() -> None:
        for fd in fds:
            os.close(fd)

    return close


def ended(program: str, *argv: str, closed: tuple[int, ...] = (), stdout: int = subprocess.PIPE) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS[program], *argv], stdin=subprocess.DEVNULL, stdout=stdout,
        stderr=subprocess.PIPE, text=True, timeout=120, preexec_fn=closing(*closed),
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("command", QUICK, ids=" ".join)
def test_standard_streams_that_are_closed(command: tuple[str, ...]) -> None:
    code, _ = ended(*command)
    assert [ended(*command, closed=closed)[0] for closed in CLOSED] == [code] * len(CLOSED)


@pytest.mark.parametrize("command", QUICK, ids=" ".join)
def test_output_that_nobody_reads(command: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ended(*command, stdout=writer)[0] == exit_codes.UNREAD
    finally:
        os.close(writer)


def test_output_that_cannot_be_written() -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        code, said = ended("loadgen", "backends", stdout=full.fileno())
    assert code == exit_codes.BAD_OPTIONS and said.endswith("No space left on device\n")


RESULT = "from loadgen.terminal import result_line, say; say('the text'); result_line('{}')"


def test_scripts_that_do_not_ask_have_the_line_of_json_and_a_warning() -> None:
    ended = subprocess.run([sys.executable, "-c", RESULT], capture_output=True, text=True, check=True)
    assert ended.stdout == "{}\n" and ended.stderr == f"the text\n{UNASKED_JSON}\n"


def test_where_both_streams_go_to_one_place_there_is_no_json() -> None:
    merged = subprocess.run([sys.executable, "-c", RESULT], stdout=PIPE, stderr=STDOUT, text=True, check=True)
    assert merged.stdout == "the text\n"


@pytest.mark.parametrize("quiet", [False, True])
def test_json_that_is_asked_for_comes_also_where_a_person_reads(quiet: bool) -> None:
    asked = "from loadgen.terminal import *; from loadgen.option_types import ShownOptions; "
    asked += f"use(ShownOptions(json=True, quiet={quiet}))"
    asked += "; note('a note'); result('the text'); result_line('{}')"
    merged = subprocess.run([sys.executable, "-c", asked], stdout=PIPE, stderr=STDOUT, text=True, check=True)
    assert merged.stdout == ("{}\n" if quiet else "a note\nthe text\n{}\n")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252", "utf-8"])
def test_no_name_fails_in_any_encoding(encoding: str) -> None:
    """The line of JSON stays JSON, and the text has escapes for what a stream cannot hold."""
    name = "组织/é\U0001f600"
    written = f"import sys; from loadgen.terminal import *; open_standard_streams(); say({name!r}); print({name!r}); "
    written += f"result_line({json.dumps([name], ensure_ascii=False)!r}, unasked='')"
    ended = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", written], capture_output=True, check=True,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )  # fmt: skip
    shown, line = ended.stdout.splitlines()
    assert json.loads(line.decode(encoding)) == [name]
    expected = name.encode(encoding, "backslashreplace")
    assert shown == expected and ended.stderr.rstrip() == expected


def test_a_terminal_has_the_text_alone() -> None:
    ours, terminal = pty.openpty()
    try:
        subprocess.run([sys.executable, "-c", RESULT], stdout=terminal, stderr=terminal, check=True)
        assert os.read(ours, 1000) == b"the text\r\n"
    finally:
        os.close(ours)
        os.close(terminal)
