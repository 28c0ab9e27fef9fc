"""Records between the machine that wrote them and the run directory: where they lie, and how they come home, hashed.

A file comes in chunks. On the driver its header gets the driver's t = 0; its records are moved only where the clocks
went apart by more than MOVED_NS while the load went on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from backends import foreign_files
from backends.untrusted import UNDECODABLE
from loadgen import rundir
from loadgen.rundir import parts
from loadgen.rundir.records import Header, Record

CHUNK_BYTES = 8 << 20
MOVED_NS = 100_000
_STAMPS = ("scheduled_ns", "sent_ns", "headers_ns", "first_token_ns", "last_token_ns", "done_ns")


class Written(NamedTuple):
    """A file of records on the machine that wrote it."""

    name: str
    size_bytes: int
    sha256: str


Read = Callable[[str, int], Awaitable[bytes]]  # name and offset -> a chunk; empty at the end


class HomeError(Exception):
    """Records that did not come home whole. A clause: why."""


# On the machine that writes.


def place(name: str) -> Path:
    """The directory for the records of one play: for this user alone, made anew. Raises OSError."""
    root = _root()
    root.mkdir(mode=rundir.OWNER_ONLY, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} is another user's")
    directory = root / name
    directory.mkdir(mode=rundir.OWNER_ONLY)
    return directory


def _root() -> Path:
    return Path(tempfile.gettempdir()) / f"llm-dissect-{os.getuid()}"


def ours(directory: Path) -> Path:
    """The directory, if `place` made it; a manifest may be another's. Raises PermissionError."""
    if directory.parent != _root() or directory.name in ("", ".", ".."):
        raise PermissionError(f"{directory} is no directory of this user's records")
    return directory


def written(directory: Path) -> list[Written]:
    """The files of records in a directory, hashed; none where there is no such directory. Raises OSError."""
    found = []
    ours(directory)
    for part in parts.find(directory):
        with part.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        found.append(Written(part.path.name, part.path.stat().st_size, digest.hexdigest()))
    return found


def chunk(directory: Path, name: str, offset: int) -> bytes:
    """At most CHUNK_BYTES of a file. Raises OSError."""
    with (ours(directory) / Path(name).name).open("rb") as file:
        file.seek(offset)
        return file.read(CHUNK_BYTES)


def remove(directory: Path) -> None:
    """Takes the directory of one play away, once its records are home. Raises OSError for one that is not ours."""
    shutil.rmtree(ours(directory), ignore_errors=True)


# On the driver.


async def bring(file: Written, read: Read, out: Path) -> None:
    """Copies one file into `out`, as it is. What came stays where the rest does not come. Raises HomeError, and OSError
    of `out`."""
    digest, size = hashlib.sha256(), 0
    out.unlink(missing_ok=True)  # it may be a link
    with out.open("xb") as home:
        while size < file.size_bytes:
            data = await read(file.name, size)
            if not data:
                raise HomeError(f"{file.name} ended after {size} of {file.size_bytes} bytes")
            home.write(data)
            digest.update(data)
            size += len(data)
    if digest.hexdigest() != file.sha256:
        raise HomeError(f"{file.name} came home with other bytes than were sent")


def settle(came: Path, out: Path, t0_ns: int, shift_ns: Callable[[int], int] | None) -> int | None:
    """Makes the file that `came` from another machine one of this run's, `out`, and removes it; a last line that was
    cut in two is left out. shift_ns: what to add to a stamp at so many nanoseconds after t = 0; None: nothing.

    Returns how long after it was due its first request left (ns), the earliest of them; None: none left."""
    first: tuple[int, int] | None = None
    read, encode = msgspec.json.Decoder(Record).decode, msgspec.json.Encoder().encode
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(foreign_files.opened(came))
        header = _header(file.readline())
        if header is None:  # nothing of it came
            came.unlink()
            return None
        home = stack.enter_context(rundir.replacing(out))
        home.write(encode(msgspec.structs.replace(header, t0_monotonic_ns=t0_ns)) + b"\n")
        for line in file:
            if not line.endswith(b"\n"):
                break
            if line.startswith(b'{"client":'):
                home.write(line)
                continue
            record = read(line)
            shift = 0 if shift_ns is None else shift_ns(record.scheduled_ns)
            if record.phase == "measured" and record.sent_ns is not None:
                start = (record.scheduled_ns, record.sent_ns - record.scheduled_ns + shift)
                first = start if first is None else min(first, start)
            home.write(line if shift_ns is None else encode(_moved(record, shift)) + b"\n")
    came.unlink()
    return None if first is None else first[1]


def _header(line: bytes) -> Header | None:
    try:
        return msgspec.json.decode(line, type=Header)
    except UNDECODABLE:
        return None


def _moved(record: Record, shift_ns: int) -> Record:
    """All stamps of a record, its due time too: what it waited is a difference on one clock, and stays."""
    stamps = {name: value + shift_ns for name in _STAMPS if (value := getattr(record, name)) is not None}
    return msgspec.structs.replace(record, **stamps)
