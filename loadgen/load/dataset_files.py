"""Files of --dataset: what they hold, by how they begin, and a stamp under which what was read of them is kept.

A file is read once a process, although several steps of a run ask for it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from backends.untrusted import UNDECODABLE, escaped
from loadgen.load.lengths import WorkloadError

BOM = b"\xef\xbb\xbf"  # editors of Windows begin a file of UTF-8 with it


class Stamp(msgspec.Struct, frozen=True):
    """Which file it is, and whether it is still the same: what was read of it is kept under this."""

    path: Path
    size_bytes: int
    modified_ns: int


def stamp(path: Path) -> Stamp:
    """Raises WorkloadError for a file that is not there."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # a name that holds a NUL
        raise unreadable(path, error) from None
    return Stamp(path, found.st_size, found.st_mtime_ns)


def unreadable(path: Path, error: OSError | ValueError) -> WorkloadError:
    why = getattr(error, "strerror", None) or error
    return WorkloadError(f"cannot read the dataset {escaped(str(path))}: {why}; name another --dataset.")


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def holds_conversations(path: Path) -> bool:
    """Whether a file begins as one of conversations does: a JSON list, or a line that has `conversations` or `messages`
    and no `prompt`. A file that cannot be read does not."""
    with contextlib.suppress(OSError, ValueError):
        return path.is_file() and _begins_conversations(path)
    return False


def _begins_conversations(path: Path) -> bool:
    with path.open("rb") as file:
        if file.read(4096).removeprefix(BOM).lstrip().startswith(b"["):
            return True
        file.seek(0)
        first = next((text for line in file if (text := line.removeprefix(BOM).strip())), b"")
        try:
            keys = msgspec.json.decode(first, type=dict[str, msgspec.Raw]).keys()
        except UNDECODABLE:  # of which kind the mistake is
            return b'"conversations"' in first or b'"messages"' in first
        return "prompt" not in keys and not keys.isdisjoint(("conversations", "messages"))
