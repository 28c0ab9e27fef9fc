"""Secrets of this process, taken out of all that it keeps and shows: a server may send back what it was sent, such as
the key in the message that refuses it, as it is or in the writing of JSON, HTML, URLs or base64. A leaf."""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

MASK = "***"
LEAST_CHARS = 6  # anything shorter is no secret, and to mask it would shred texts

_hidden: set[str] = set()


def hide(secrets: Iterable[str]) -> None:
    """From now on these are masked, whatever shows them: values of headers, keys. One that is too short is none."""
    _hidden.update(form for secret in secrets for form in _forms(secret) if len(form) >= LEAST_CHARS)


def masked(text: str) -> str:
    """`text` with MASK in place of each secret. One that a cut ends within, at the end of the text, is masked, too."""
    if not _hidden:
        return text
    text = _pattern(frozenset(_hidden)).sub(MASK, text)
    for secret in _hidden:
        for length in range(min(len(secret) - 1, len(text)), LEAST_CHARS - 1, -1):
            if text.endswith(secret[:length]):
                return text[:-length] + MASK
    return text


def without_secrets(value: T) -> T:
    """A value of plain data with its texts, keys of mappings included, masked."""
    return msgspec.convert(_walked(msgspec.to_builtins(value)), type(value)) if _hidden else value


def _walked(value: Any) -> Any:
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {_walked(key): _walked(each) for key, each in value.items()}
    return [_walked(each) for each in value] if isinstance(value, list | tuple) else value


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
    packed = {base64.b64encode(each.encode()).decode() for each in plain if each}
    urlsafe = {each.translate(str.maketrans("+/", "-_")) for each in packed}
    return plain | {each.rstrip("=") for each in packed | urlsafe}


@functools.lru_cache(maxsize=4)
def _pattern(secrets: frozenset[str]) -> re.Pattern[str]:
    longest_first = sorted(secrets, key=len, reverse=True)  # one may hold another
    return re.compile("|".join("".join(map(_character, secret)) for secret in longest_first))


@functools.cache
def _character(char: str) -> str:
    """A pattern of one character: as it is, or as JSON, HTML or a URL has it."""
    if char.isascii() and (char.isalnum() or char in "-_.~"):  # which no writing changes
        return re.escape(char)
    percent = "".join(rf"%{byte:02x}" for byte in char.encode())
    escapes = [rf"\\u{ord(char):04x}", percent, f"&#{ord(char)};", f"&#x{ord(char):x};"]
    written = [rf"\\{re.escape(char)}"] if char in '"\\/' else ["[+]"] if char == " " else []
    named = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&apos;"}.get(char)
    any_case = "|".join(escapes)
    return "(?:" + "|".join([re.escape(char), *written, *([named] if named else []), f"(?i:{any_case})"]) + ")"
