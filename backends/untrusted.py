"""What comes from others, taken as plain data: text with nothing in it that a terminal, a page or YAML obeys, and JSON
that may be anything. A leaf without a codec of any server: client and emulated servers both stand on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

# What decoding JSON may raise: not JSON or not of the type asked for, no UTF-8, nested without end.
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def escaped(text: str) -> str:
    """`text` with an escape such as \\x1b in place of each character that does not print: control characters, direction
    and format marks, lone surrogates, white space other than the space. It has no line breaks then."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def read_json(path: Path | str, kind: type[T], error: Callable[[str], Exception], wrong: str, advice: str = "") -> T:
    """What a file of JSON holds, as a `kind`. Raises `error` of one sentence: the file cannot be read, or PATH `wrong`
    (such as "is no list of prices"), with the reason and then the advice."""
    decode = msgspec.json.Decoder(kind).decode
    return _read(path, decode, error, wrong, advice)


def read_json_lines(path: Path, kind: type[T], error: Callable[[str], Exception], wrong: str) -> list[T]:
    """The lines of a file, each JSON of a `kind`; a last line that a kill cut is left out. Raises `error` as read_json
    does."""
    decode = msgspec.json.Decoder(kind).decode
    return _read(path, lambda data: [decode(line) for line in data.split(b"\n")[:-1]], error, wrong)


def _read(
    path: Path | str, decode: Callable[[bytes], T], error: Callable[[str], Exception], wrong: str, advice: str = ""
) -> T:
    try:
        return decode(Path(path).read_bytes())
    except OSError as reason:
        raise error(f"cannot read {path}: {reason.strerror or reason}.") from None
    except UNDECODABLE as reason:
        raise error(f"{path} {wrong}: {escaped(str(reason))}{advice}.") from None
