"""How a program runs its command line, writes to standard error and ends, also when its standard streams are closed or
its output is no longer read; what may be drawn there, and how wide."""

from __future__ import annotations

import gc
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from json import dumps
from typing import TYPE_CHECKING, NoReturn, TextIO

from backends import exit_codes
from backends.exit_codes import UserError
from backends.untrusted import masked, printable

if TYPE_CHECKING:  # it takes 40 ms to load
    from rich.text import Text

    from loadgen.option_types import ShownOptions

MAX_ERROR_CHARS = 2000
MIN_WIDTH, PLAIN_WIDTH = 80, 160
UNBROKEN = 10_000  # columns: no line is broken here
UNASKED_JSON = (
    "note: the next version prints the result as JSON on standard output only where --json asks for it; add --json."
)


@dataclass
class Output:
    """What the user wants to see. json: the result on standard output. quiet: the result alone. figures: the charts of
    pages as files, too."""

    json: bool = False
    quiet: bool = False
    figures: bool = False


OUTPUT = Output()  # of this process, as its standard streams are


def say(text: str) -> None:
    """Writes a line to standard error. A closed pipe or a terminal that is gone stops nothing."""
    try:
        sys.stderr.write(masked(text) + "\n")
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def use(shown: ShownOptions | None) -> None:
    """Results are shown so from now on."""
    OUTPUT.json, OUTPUT.quiet, OUTPUT.figures = (
        (False, False, False) if shown is None else (shown.json, shown.quiet, shown.figures)
    )


def note(text: str) -> None:
    """A line about how it goes, which --quiet does without."""
    if not OUTPUT.quiet:
        say(text)


def result(text: str) -> None:
    """The result for a person: on standard error, unless only JSON is wanted."""
    if not (OUTPUT.quiet and OUTPUT.json):
        say(text)


def result_line(json: str, unasked: str = UNASKED_JSON) -> None:
    """The result as one line of JSON, the last of standard output, where it was asked for, and, with the warning
    `unasked`, where a script may read it all the same. Where the locale's encoding lacks some of its characters they
    are JSON's own escapes."""
    if not OUTPUT.json:
        if not _is_a_scripts(sys.stdout):
            return
        if unasked:
            say(unasked)
    try:
        json.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        json = re.sub(r"[^\x00-\x7f]", lambda match: dumps(match[0])[1:-1], json)
    print(json, flush=True)


def _is_a_scripts(stream: TextIO) -> bool:
    """Whether a program or a file has standard output for itself: no terminal, no /dev/null, and not what standard
    error goes to as well, which a person reads."""
    try:
        its, of_errors = os.fstat(stream.fileno()), os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # no file at all, as within tests
        return not stream.isatty()
    return not stat.S_ISCHR(its.st_mode) and not os.path.samestat(its, of_errors)


def say_error(program: str, error: object) -> None:
    """One line: parts of it may come from a server, so nothing in it may command the terminal."""
    say(f"{program}: {printable(str(error), MAX_ERROR_CHARS)}")


def width(stream: TextIO) -> int:
    """Columns of a terminal; of anything else enough for every table."""
    return max(MIN_WIDTH, shutil.get_terminal_size().columns) if stream.isatty() else PLAIN_WIDTH


def columns(stream: TextIO) -> int:
    """Of a terminal, as it is now."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or MIN_WIDTH
    except OSError:
        return MIN_WIDTH


def styled(lines: Sequence[Text]) -> list[str]:
    """Lines for a terminal, with what TERM and NO_COLOR allow of their colours."""
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, width=UNBROKEN, highlight=False)
    with console.capture() as capture:
        for line in lines:
            console.print(line, no_wrap=True, overflow="ignore", crop=False)
    return capture.get().split("\n")[:-1]


def show(lines: Sequence[Text]) -> None:
    """Shows a result as lines on standard error, which is a terminal."""
    result("\n".join(styled(lines)))


def is_watched() -> bool:
    """Whether a person sees standard error at once; otherwise it is a file or a program's."""
    return sys.stderr.isatty()


def draws(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which a picture can be kept up to date."""
    dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown")
    return stream.isatty() and not OUTPUT.quiet and not dumb and stream.encoding.lower().replace("-", "") == "utf8"


def in_foreground(fd: int) -> bool:
    """Whether this program has the terminal; one that a shell runs in the background does not."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # a terminal without a shell
        return True


def invoke(program: str, command: Callable[[], object]) -> int:
    """Runs one command line and returns its exit code. A mistake of the user becomes one sentence: what cyclopts
    refuses, a file that cannot be used, and each `UserError`; other errors are raised."""
    from cyclopts import CycloptsError

    from loadgen.option_types import mistake

    use(None)
    try:
        code = command()
    except CycloptsError as error:
        cause = error.__cause__  # of several options together; cyclopts quotes a ValueError of one option itself
        own = isinstance(cause, UserError) and not isinstance(cause, ValueError)
        say_error(program, cause if own else mistake(error))
        return exit_codes.BAD_OPTIONS
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a file that may not be read
        say_error(program, f"{error.filename or 'input or output'}: {error.strerror or error}")
        return exit_codes.BAD_OPTIONS
    except KeyboardInterrupt:
        return exit_codes.STOPPED
    except UserError as error:
        say_error(program, error)
        return error.exit_code
    return code if isinstance(code, int) else exit_codes.OK


def main(program: str, invoke: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs this process's command line; its exit code is what `invoke` returns, UNREAD where nobody reads the output,
    or BAD_OPTIONS where it cannot be written, as on a full disk."""
    open_standard_streams()
    try:
        code = invoke(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        code = exit_codes.UNREAD
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # of rich, which prints help pages
            raise
        code = exit_codes.UNREAD
    except OSError as error:
        _discard(sys.stdout)
        say_error(program, f"standard output cannot be written: {error.strerror or error}.")
        code = exit_codes.BAD_OPTIONS
    gc.freeze()  # nobody looks for cycles in what ends with the process
    sys.exit(code)


def open_standard_streams() -> None:
    """Opens /dev/null in place of the standard streams that are closed. Otherwise the next file or socket would take
    such a number, and what is meant for a stream would go there. Child processes inherit them."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115  of the process, for all its life
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # servers' names have characters that a locale's encoding may lack
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard(stream: TextIO) -> None:
    """Nobody reads it: what is still in its buffer must not fail at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
