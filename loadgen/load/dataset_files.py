"""Files of --dataset: what they hold, by how they begin, and a stamp under which what was read of them is kept.

A file is read once a process, although several steps of a run ask for it.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from backends.files import opened
from backends.foreign_files import named_lines, named_list
from backends.untrusted import UNDECODABLE, escaped, reason
from loadgen.load.lengths import WorkloadError

_HEAD_BYTES = 1 << 20  # of a list, which show what its first item is


class FileStamp(msgspec.Struct, frozen=True):
    """Which file it is, and whether it is still the same: what was read of it is kept under this."""

    path: Path
    size_bytes: int
    modified_ns: int


def stamp(path: Path) -> FileStamp:
    """Raises WorkloadError for a file that is not there."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # a name that holds a NUL
        raise unreadable(path, error) from None
    return FileStamp(path, found.st_size, found.st_mtime_ns)


def unreadable(path: Path, error: OSError | ValueError) -> WorkloadError:
    why = getattr(error, "strerror", None) or error
    return WorkloadError(f"cannot read the dataset {escaped(str(path))}: {why}; name another --dataset.")


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class Item(NamedTuple):
    """One of a JSON list, or else of a file with one a line, with its number there."""

    in_list: bool
    number: int
    encoded: bytes | msgspec.Raw


def items(path: Path, what: str) -> Iterator[Item]:
    """Each item of a file. A list is not decoded as a whole, so that not all of it lies in memory twice, and a mistake
    has its number. what: the items. Raises WorkloadError."""
    try:
        with opened(path) as file:
            if not _begins_list(file):
                for number, line in enumerate(named_lines(file, path), 1):
                    if text := line.strip():
                        yield Item(False, number, text)
                return
            encoded = named_list(file, path)
    except OSError as error:
        raise unreadable(path, error) from None
    decoded: Sequence[bytes | msgspec.Raw] | None
    try:
        decoded = msgspec.json.decode(encoded, type=list[msgspec.Raw])
    except UNDECODABLE as error:
        decoded = respelled(encoded)
        if decoded is None:
            raise WorkloadError(
                f"{path} is no list of {what}: {reason(error)}; mend it, or give one JSON object a line."
            ) from None
    for number, each in enumerate(decoded, 1):
        yield Item(True, number, each)


def respelled(encoded: bytes | msgspec.Raw) -> list[bytes] | None:
    """JSON that is none for its characters, in ASCII; of a list its items. Raw control characters become escapes, and
    so does what is no UTF-8: then as half of a surrogate pair, which decoders refuse. None for what is no JSON even
    so."""
    try:
        decoded = json.loads(bytes(encoded).decode(errors="surrogateescape"), strict=False)
    except (ValueError, RecursionError):
        return None
    return [json.dumps(each).encode() for each in (decoded if isinstance(decoded, list) else [decoded])]


def holds_conversations(path: Path) -> bool:
    """Whether a file begins as one of conversations does: a JSON list whose first item is no prompt, or a line that has
    `conversations`, `messages` or `conversation_id` and no prompt. A file that cannot be read does not."""
    with contextlib.suppress(OSError, ValueError):
        return path.is_file() and _begins_conversations(path)
    return False


def _begins_list(file: BinaryIO) -> bool:
    """Leaves the file at its beginning."""
    assert isinstance(file, io.BufferedReader)
    return file.peek(1 << 12).lstrip().startswith(b"[")


def _begins_conversations(path: Path) -> bool:
    with opened(path) as file:
        if _begins_list(file):
            return _list_begins_conversations(file.read(_HEAD_BYTES).lstrip()[1:].lstrip())
        first = next((text for line in named_lines(file, path) if (text := line.strip())), b"")
    try:
        keys = msgspec.json.decode(first, type=dict[str, msgspec.Raw]).keys()
    except UNDECODABLE:  # of which kind the mistake is
        return b'"conversations"' in first or b'"messages"' in first
    return keys.isdisjoint(("prompt", "text")) and not keys.isdisjoint(("conversations", "messages", "conversation_id"))


def _list_begins_conversations(head: bytes) -> bool:
    """Whether a list holds conversations, by what follows its bracket: it does not where that begins a prompt."""
    try:
        first, _ = json.JSONDecoder(strict=False).raw_decode(head.decode(errors="replace"))
    except (ValueError, RecursionError):
        return not head.startswith(b'"') and b'"prompt"' not in head[:200]
    return not isinstance(first, str) and not (isinstance(first, dict) and ("prompt" in first or "text" in first))
