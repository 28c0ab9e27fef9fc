"""A command line's mistakes: one sentence each, and the exit code of its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
from cyclopts import App

from loadgen import exit_codes
from loadgen.terminal import invoke


class Mistake(Exception):
    pass


class Failure(Exception):
    pass


def exit_code_of(error: Exception) -> int | None:
    if isinstance(error, Mistake):
        return exit_codes.BAD_OPTIONS
    return exit_codes.FAILED if isinstance(error, Failure) else None


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def command() -> NoReturn:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (Mistake("name another."), 2, "name another."),
        (Failure("it is gone."), 3, "it is gone."),
        (FileNotFoundError(2, "No such file", "x.json"), 2, "x.json: No such file"),
        (OSError("full"), 2, "input or output: full"),
    ],
)
def test_a_mistake_is_one_sentence(
    error: Exception, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke("program", raising(error), exit_code_of) == code
    assert capsys.readouterr().err == f"program: {sentence}\n"


def test_what_cyclopts_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    app = App(result_action="return_value")

    @app.default
    def command(*, count: int = 1) -> int:
        return count

    def run(*tokens: str) -> int:
        return invoke("program", lambda: app(tokens, exit_on_error=False, print_error=False), exit_code_of)

    assert run("--count", "4") == 4
    assert run("--count", "x") == exit_codes.BAD_OPTIONS
    assert "--count" in capsys.readouterr().err


def test_how_it_ends_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("program", raising(KeyboardInterrupt()), exit_code_of) == exit_codes.STOPPED
    assert invoke("program", lambda: None, exit_code_of) == exit_codes.OK
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [BrokenPipeError(), ZeroDivisionError()])
def test_a_defect_and_a_closed_pipe_are_not_hidden(error: Exception) -> None:
    with pytest.raises(type(error)):
        invoke("program", raising(error), exit_code_of)
