"""Text from others as plain text: nothing in it that a terminal, a page or YAML obeys."""

from __future__ import annotations


def escaped(text: str) -> str:
    """`text` with an escape such as \\x1b in place of each character that does not print: control characters, direction
    and format marks, lone surrogates, white space other than the space. It has no line breaks then."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
