"""Files of --dataset: what they hold, by how they begin, and a stamp under which what was read of them is kept.

A file is read once a process, although several steps of a run ask for it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from backends.untrusted import UNDECODABLE
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
    except OSError as error:
        raise unreadable(path, error) from None
    return Stamp(path, found.st_size, found.st_mtime_ns)


def unreadable(path: Path, error: OSError) -> WorkloadError:
    return WorkloadError(f"cannot read the dataset {path}: {error.strerror or error}; name another --dataset.")


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def holds_conversations(path: Path) -> bool:
    """Whether a file begins as one of conversations does: a JSON list, or a line that has `conversations` or `messages`
    and no `prompt`. A file that cannot be read does not."""
    if not path.is_file():
        return False
    with contextlib.suppress(OSError, *UNDECODABLE), path.open("rb") as file:
        if file.read(4096).removeprefix(BOM).lstrip().startswith(b"["):
            return True
        file.seek(0)
        first = next((text for line in file if (text := line.removeprefix(BOM).strip())), b"")
        keys = msgspec.json.decode(first, type=dict[str, msgspec.Raw]).keys()
        return "prompt" not in keys and not keys.isdisjoint(("conversations", "messages"))
    return False
