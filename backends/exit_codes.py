"""How loadgen, training_probe and the embedded server end, and the errors that end them: a mistake of the user, a
package that is not installed. Scripts depend on these numbers: no meaning changes."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

OK = 0
DOES_NOT_FIT = 1  # of `training_probe memory --check`
BAD_OPTIONS = 2  # a mistake of the user
FAILED = 3  # the server, a cell or a micro-benchmark failed
INVALID = 4  # measured, but the numbers cannot be trusted
BEYOND_LIMIT = 5  # of `compare --fail-if`: B is worse than A by more than a limit allows
SIGNALLED = 128  # and the signal's number: stopped by the user, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM
STOPPED = 130  # by Ctrl-C
UNREAD = 141  # nobody read the output; as the shell says of a program that wrote into a closed pipe

# Packages that some commands alone need, by the module that is imported: the package, the extra that brings it
_EXTRAS = {
    "docker": ("docker", "docker"),
    "gguf": ("gguf", "llamacpp"),
    "pynvml": ("nvidia-ml-py", "gpu"),
    "ray": ("ray", "ray"),
    "scipy": ("scipy", "predict"),
    "tokenizers": ("tokenizers", "tokenizer"),
    "torch": ("torch", "train"),
    "yaml": ("pyyaml", "docker"),
    "zstandard": ("zstandard", "zstd"),
}


class UserError(Exception):
    """A mistake of the user. Its text is one sentence that says what is wrong and what to do; the program prints it
    without a traceback and ends with `exit_code`."""

    exit_code: int = BAD_OPTIONS


class FailedError(UserError):
    """Nothing was wrong with the options, but a server, Docker or a GPU failed."""

    exit_code = FAILED


class Stopped(UserError):
    """A signal ended a measurement, and nothing is known of what went on. exit_code: as a shell has it."""

    def __init__(self, sentence: str = "stopped.", exit_code: int | None = None) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code or STOPPED


def check_least(error: type[UserError], least: int, **values: object) -> None:
    """Raises `error` for a whole number below `least`, by the name of its option; other values, such as laws, pass."""
    for name, value in values.items():
        if isinstance(value, int) and value < least:
            raise error(f"--{name.replace('_', '-')} is {value}; it must be at least {least}.")


def lacking(module: str) -> str | None:
    """Says that the package is not installed and how to install it, as a clause; None where it is installed."""
    if sys.modules.get(module) is not None or find_spec(module) is not None:
        return None
    package, extra = _EXTRAS[module]
    return f"the Python package {package} is not installed; {install_command(extra)}"


def install_command(extras: str) -> str:
    """The command that brings one or several extras, parted by commas: of the checkout that this runs from, or of the
    package."""
    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}[{extras}]'"
    return f"pip install 'llm-dissect[{extras}]'"
