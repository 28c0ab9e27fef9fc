"""What comes from others, taken as plain data: text with nothing in it that a terminal, a page or YAML obeys, and JSON
that may be anything. A leaf without a codec of any server: client and emulated servers both stand on it."""

from __future__ import annotations

import msgspec

# What decoding JSON may raise: not JSON or not of the type asked for, no UTF-8, nested without end.
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def escaped(text: str) -> str:
    """`text` with an escape such as \\x1b in place of each character that does not print: control characters, direction
    and format marks, lone surrogates, white space other than the space. It has no line breaks then."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
