"""What comes from others, taken as plain data: text with nothing in it that a terminal, a page or YAML obeys, names
that are typed wrong, JSON that may be anything, keys that a server sends back. A leaf without a codec of any server:
client and emulated servers both stand on it."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import difflib
import functools
import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from backends import foreign_files

T = TypeVar("T")

MAX_LINE_CHARS = 300
# What decoding JSON may raise: not JSON or not of the type asked for, no UTF-8, nested without end.
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

MOST_KNOWN = 1000
NEAR_RATIO = 0.65  # difflib's: `rnu` is near to `run` (0.67), and `nope` not to `openai` (0.6)


def escaped(text: str) -> str:
    """`text` with an escape such as \\x1b in place of each character that does not print: control characters, direction
    and format marks, lone surrogates, white space other than the space. It has no line breaks then."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable(text: str, max_chars: int = MAX_LINE_CHARS) -> str:
    """`text` as one line of at most `max_chars` characters: runs of white space become one space, what does not print
    becomes an escape, as `escaped` has it, and secrets of this process are masked."""
    line = escaped(" ".join(masked(text[: 8 * max_chars]).split())[: max_chars + 1])
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


def nearest(typed: str, known: Iterable[str]) -> str | None:
    """The name that `typed` was probably meant to be; None where none is near. A server may list names without end."""
    names = itertools.islice(known, MOST_KNOWN)
    return next(iter(difflib.get_close_matches(typed, list(names), n=1, cutoff=NEAR_RATIO)), None)


def reason(error: Exception) -> str:
    """Why decoding JSON failed, with the name of the key in front: "output_tokens: expected int, got str"."""
    text = escaped(str(error)).replace("`", "").rstrip(".")
    match = re.fullmatch(r"(.*) - at (?:key in )?\$\.?(.*)", text, re.DOTALL)
    if match is None:
        return text
    why, key = match[1], match[2].replace("[...]", "")  # msgspec's word for any place of a list or mapping
    return f"{key}: {why[:1].lower()}{why[1:]}" if key else why


def read_json(
    path: Path | str,
    kind: type[T],
    error: Callable[[str], Exception],
    wrong: str,
    advice: str = "",
    directory: Path | None = None,
) -> T:
    """What a file of JSON holds, as a `kind`. directory: which may be another's, and which the file must lie in; None:
    the command line names the file. Raises `error` of one sentence: the file cannot be read, or PATH `wrong` (such as
    "is no list of prices"), with the reason and then the advice."""
    try:
        named = directory is None
        data = foreign_files.read_named(path) if named else foreign_files.read_bytes(Path(path), directory)
        return msgspec.json.decode(data, type=kind)
    except OSError as unreadable:
        raise error(f"cannot read {path}: {unreadable.strerror or unreadable}.") from None
    except UNDECODABLE as undecodable:
        raise error(f"{path} {wrong}: {reason(undecodable)}{advice}.") from None


def is_cut(path: Path) -> bool:
    """Whether a file of lines ends within one, because its writer was killed. Raises OSError."""
    with foreign_files.opened(path) as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - 1))
        return file.read() not in (b"", b"\n")


def read_json_lines(
    path: Path,
    kind: type[T],
    error: Callable[[str], Exception],
    wrong: str,
    advice: str = "",
    doubt: Callable[[T], str] = lambda _: "",
) -> list[T]:
    """The lines of a file of a directory that may be another's, each JSON of a `kind`, without empty ones and a last
    one that a kill cut. doubt: why one makes no sense, a clause, empty where it does. Raises `error` of one sentence:
    the file cannot be read, with the advice, or line N of PATH `wrong`, with the reason."""
    decode = msgspec.json.Decoder(kind).decode
    found: list[T] = []
    try:
        for number, line in enumerate(foreign_files.lines(path), 1):
            try:
                if line != b"\n":
                    found.append(decode(line))
                    if why := doubt(found[-1]):
                        raise error(f"line {number} of {path} {wrong}: {why}.")
            except UNDECODABLE as undecodable:
                if line.endswith(b"\n"):  # else it is the last, and its writer was killed
                    raise error(f"line {number} of {path} {wrong}: {reason(undecodable)}.") from None
    except OSError as unreadable:
        raise error(f"cannot read {path}: {unreadable.strerror or unreadable}{advice}.") from None
    return found


# Secrets of this process, which a server may send back: in all that is kept and shown they are masked.

MASK = "***"
LEAST_CHARS = 6  # anything shorter is no secret, and to mask it would shred texts
LEAST_IN_LOGS = 4
_UNCHANGED = re.compile("[A-Za-z0-9_.~-]+")

hidden: set[str] = set()  # every writing of each secret of this process


def hide(secrets: Iterable[str]) -> None:
    """From now on these are masked, whatever shows them: values of headers, keys. One that is too short is none."""
    hidden.update(form for secret in secrets for form in _forms(secret) if len(form) >= LEAST_CHARS)


def masked(text: str) -> str:
    """`text` with MASK in place of each secret. One that a cut ends within, at the end of the text, is masked, too."""
    if not hidden:
        return text
    text = _pattern(frozenset(hidden)).sub(MASK, text)
    lower = text.lower()  # as some gateways write headers
    for secret in hidden:
        for length in range(min(len(secret) - 1, len(text)), LEAST_CHARS - 1, -1):
            if lower.endswith(secret[:length].lower()):
                return text[:-length] + MASK
    return text


def writings(secrets: Iterable[str]) -> list[tuple[str, str]]:
    """For a log, which is masked where nothing but the standard library is: every writing of these secrets as a
    pattern, the longest first, each after a part of it that no writing changes."""
    forms = {form for secret in secrets for form in _forms(secret) if len(form) >= LEAST_IN_LOGS}
    return [
        (max(_UNCHANGED.findall(form), key=len, default=""), "".join(map(_character, form)))
        for form in sorted(forms, key=len, reverse=True)
    ]


def without_secrets(value: T) -> T:
    """A value of plain data with its texts, keys of mappings included, masked. Its bounds are not checked again."""
    return cast("T", _walked(value)) if hidden else value


def _walked(value: Any) -> Any:
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {_walked(key): _walked(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        walked = [_walked(each) for each in value]
        return walked if isinstance(value, list) else tuple(walked)
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(
            value, **{name: _walked(getattr(value, name)) for name in value.__struct_fields__}
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value))
        return dataclasses.replace(value, **{name: _walked(getattr(value, name)) for name in fields})
    return value


def _forms(secret: str) -> set[str]:
    """A secret and what stands for it: without its scheme, as base64, and what a Basic header holds."""
    scheme, _, credentials = secret.rpartition(" ")
    plain = {secret, credentials}
    if scheme.strip().lower() == "basic":
        try:
            pair = base64.b64decode(credentials, validate=True).decode()
        except (binascii.Error, ValueError):
            pair = ""
        plain |= {pair, pair.partition(":")[2]}
    packed = {base64.b64encode(each.encode("utf-8", "surrogateescape")).decode() for each in plain if each}
    urlsafe = {each.translate(str.maketrans("+/", "-_")) for each in packed}
    return plain | {each.rstrip("=") for each in packed | urlsafe}


@functools.lru_cache(maxsize=4)
def _pattern(secrets: frozenset[str]) -> re.Pattern[str]:
    longest_first = sorted(secrets, key=len, reverse=True)  # one may hold another
    return re.compile("|".join("".join(map(_character, secret)) for secret in longest_first), re.IGNORECASE)


@functools.cache
def _character(char: str) -> str:
    """A pattern of one character: as it is, or as JSON, HTML or a URL has it."""
    if char.isascii() and (char.isalnum() or char in "-_.~"):  # which no writing changes
        return re.escape(char)
    percent = "".join(rf"%{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))
    escapes = [rf"\\u{ord(char):04x}", percent, f"&#{ord(char)};", f"&#x{ord(char):x};"]
    written = [rf"\\{re.escape(char)}"] if char in '"\\/' else ["[+]"] if char == " " else []
    named = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&apos;"}.get(char)
    any_case = "|".join(escapes)
    return "(?:" + "|".join([re.escape(char), *written, *([named] if named else []), f"(?i:{any_case})"]) + ")"
