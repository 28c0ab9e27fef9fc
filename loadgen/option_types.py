"""How options are declared, for every command line: whole numbers, groups of the help, and what each command offers."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_type_hints

from cyclopts import CycloptsError, Group, Parameter, UnknownOptionError, UnusedCliTokensError

from backends.untrusted import nearest, printable

if TYPE_CHECKING:
    from cyclopts import Token

Options = TypeVar("Options")


def whole_number(text: str) -> int:
    """The number as it is typed, also 1e6; no fraction is rounded in silence. Raises ValueError."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        number = float(text)
        if number.is_integer():
            return int(number)
    raise ValueError(f"'{text}' is not a whole number.")


def _whole(kind: Any, tokens: Sequence[Token]) -> int:
    (token,) = tokens
    return whole_number(token.value)


def _whole_or_text(kind: Any, tokens: Sequence[Token]) -> int | str:
    """A whole number where a number was typed, else the text, for laws such as uniform:1:9. Raises ValueError."""
    try:
        float(tokens[0].value)
    except ValueError:
        return tokens[0].value
    return whole_number(tokens[0].value)


def _number_or_text(kind: Any, tokens: Sequence[Token]) -> float | str:
    """A number where one was typed, else the text."""
    try:
        return float(tokens[0].value)
    except ValueError:
        return tokens[0].value


Whole = Annotated[int, Parameter(converter=_whole)]
WholeOrText = Annotated[int | str, Parameter(converter=_whole_or_text)]
NumberOrText = Annotated[float | str, Parameter(converter=_number_or_text)]

_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


def is_host(text: str) -> bool:
    """Whether it can be the host of an address: an IP address (of IPv6 without brackets), or a name of labels as DNS
    has them, in ASCII. What Python makes of other names differs between its versions."""
    if ":" in text:
        try:
            return bool(ipaddress.IPv6Address(text))
        except ValueError:
            return False
    return len(text.removesuffix(".")) <= 253 and _HOST_NAME.fullmatch(text) is not None


def check_listen(host: str) -> None:
    """What --host is for a server of ours. An empty one, as an unset variable gives it, would be every address of this
    machine. Raises ValueError."""
    if not is_host(host):
        given = f"'{printable(host, 80)}', which is no host name" if host else "empty"
        raise ValueError(f"--host is {given}; name an address to listen on, or leave it out for 127.0.0.1.")


# Of both programs' `compare --fail-if`.
JunitOption = Annotated[Path | None, Parameter(help="Write what came of each limit as JUnit XML.")]
SummaryOption = Annotated[
    Path | None, Parameter(help="Add what came of each limit to this Markdown file, as to $GITHUB_STEP_SUMMARY.")
]


class LatencyLimit(NamedTuple):
    """At most so many ms of ttft, tpot or e2el. percentile: for which it was written; None: for each request."""

    metric: str
    limit_ms: float
    percentile: float | None


_LIMIT = re.compile(
    r"(?P<metric>ttft|tpot|e2el)(?P<ms>_ms)?(?:_p(?P<percentile>\d{1,2}(?:\.\d+)?))?\s*(?P<sign>:|=|<=?)\s*"
    r"(?P<number>[\d.]+(?:e[+-]?\d+)?)\s*(?P<unit>ms|s)?"
)


def latency_limit(text: str) -> LatencyLimit | None:
    """What `ttft<500ms`, `ttft_p99<0.5s`, `ttft_ms=500` or `ttft:500` says; None: nothing, or nothing above 0. Without
    a unit only the last is in ms: `ttft=0.5` may be meant in seconds."""
    found = _LIMIT.fullmatch(text.strip())
    if found is None or (found["ms"] and found["unit"] == "s"):
        return None
    if found["sign"] != ":" and not found["ms"] and not found["unit"]:
        return None
    try:
        limit_ms = float(found["number"]) * (1000 if found["unit"] == "s" else 1)
    except ValueError:
        return None
    percentile = None if found["percentile"] is None else float(found["percentile"])
    if not 0 < limit_ms < math.inf or percentile == 0:
        return None
    return LatencyLimit(found["metric"], limit_ms, percentile)


def mistake(error: CycloptsError) -> str:
    """What cyclopts refuses, on one line. Of its suggestions only those are kept that are near to what was typed."""
    if isinstance(error, UnusedCliTokensError):
        surplus = " ".join(error.unused_tokens or ())
        return f"'{surplus}' belongs to no option; options begin with --, and --help lists them."
    text = " ".join(str(error).split())
    typed = re.search(r'--?[^\s=".]+|(?<=")[^"]*(?=")', text)

    def kept(suggestion: re.Match[str]) -> str:
        near = typed is not None and nearest(typed[0].lstrip("-"), [suggestion[1].lstrip("-")])
        return suggestion[0] if near else ""

    text = re.sub(r' Did you mean "?([^\s"?]+)"?\?', kept, text)
    unhelped = isinstance(error, UnknownOptionError) and text.endswith(".")
    return f"{text[:-1]}; --help lists those that there are." if unhelped else text


def option(group: Group, help: str, **more: Any) -> Parameter:
    """An option in a group of the help; of a switch, `negative` is the flag that turns it off (default: none does)."""
    return Parameter(group=group, help=help, **({"negative": ()} | more))


OUTPUT = Group("The results", sort_key=3)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShownOptions:
    """What a command shows; no part of what it measures."""

    json: Annotated[bool, option(OUTPUT, "Print the result on standard output as one line of JSON.")] = False
    quiet: Annotated[
        bool, option(OUTPUT, "Show no progress and no notes, the result alone; with --json as JSON alone.")
    ] = False
    figures: Annotated[
        bool, option(OUTPUT, "Draw the page's charts as files too: cdf.png, cdf.svg, timeline.png and others.")
    ] = False


def names(options: type) -> tuple[str, ...]:
    """The names of a dataclass's options, in order."""
    return tuple(field.name for field in dataclasses.fields(options))


def offers(*offered: str) -> Callable[[type[Options]], type[Options]]:
    """Of the options that a class inherits, a command's help shows these alone. The command understands the others as
    well: a --config file for `run` serves it too, and an option that makes no sense is refused in a sentence that says
    what to do."""

    def hide_others(options: type[Options]) -> type[Options]:
        types = get_type_hints(options, include_extras=True)
        others, hidden = [name for name in names(options) if name not in offered], Parameter(show=False)
        options.__annotations__ = {name: Annotated[types[name], hidden] for name in others}
        return options

    return hide_others
