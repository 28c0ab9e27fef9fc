"""Files that somebody else may have put there: how they are opened, so that reading one ends, stays within its
directory, and takes no more memory than what it may hold, unpacked. A leaf without a format."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from backends import files

MOST_BYTES = 1 << 26  # of a file of JSON, and of a line
MOST_EMPTY_LINES = 1_000_000  # in a row: a packed file may hold them without end
MOST_LIST_BYTES = 4 << 30  # of a dataset that is one list, in a regular file
_BLOCK_BYTES = 1 << 20


def is_inside(path: Path, directory: Path) -> bool:
    """Whether `path` lies in `directory` once links are followed."""
    return _real(path).is_relative_to(_real(directory))


def _real(path: Path) -> Path:
    """Links followed, as `Path.resolve` does, which raises RuntimeError for those that lead in a circle."""
    return Path(os.path.realpath(path))


def opened(path: Path, directory: Path | None = None) -> BinaryIO:
    """A file of `directory` (where it is none, the file's own), to be read. Raises OSError, also for a link that leads
    out of the directory and for what is no regular file: a pipe is never waited for, and no device is read."""
    if not is_inside(path, directory or path.parent):
        raise OSError(errno.ELOOP, "it is a link that leads out of its directory")
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(_real(path), flags)
    except OSError as error:  # with the name that was asked for
        raise OSError(error.errno, error.strerror, str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "it is no regular file")


def read_bytes(path: Path, directory: Path | None = None, most_bytes: int = MOST_BYTES) -> bytes:
    """All of such a file. Raises OSError, also for one that is larger."""
    with files.unpacked(path, opened(path, directory)) as file:
        return _up_to(file, most_bytes)


def read_named(path: Path | str, most_bytes: int = MOST_BYTES) -> bytes:
    """All of a file that the command line names, be it a link or a pipe. Raises OSError, also for one that holds
    more."""
    with files.opened(Path(path)) as file:
        return _up_to(file, most_bytes)


def named_lines(file: BinaryIO, path: Path, most_bytes: int = MOST_BYTES) -> Iterator[bytes]:
    """The lines of an open file that the command line names. Raises OSError for a longer line, for so many bytes of
    what is no regular file, which may have no end, and for a million empty lines in a row."""
    left, empty = None if path.is_file() else most_bytes, 0
    while line := file.readline(most_bytes + 1):
        if len(line) > most_bytes:
            raise _too_large("a line of it", most_bytes)
        if left is not None and (left := left - len(line)) < 0:
            raise _too_large("it", most_bytes)
        empty = 0 if line.strip() else empty + 1
        if empty > MOST_EMPTY_LINES:
            raise OSError(errno.EFBIG, f"it has over {MOST_EMPTY_LINES} empty lines in a row")
        yield line


def named_list(file: BinaryIO, path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The rest of such a file; so many bytes of what is no regular file. Raises OSError."""
    return _up_to(file, MOST_LIST_BYTES if path.is_file() else most_bytes)


def lines(path: Path, directory: Path | None = None, most_bytes: int = MOST_BYTES) -> Iterator[bytes]:
    """The lines of such a file, each with its end, which the last may lack. Raises OSError, also for a longer line."""
    with files.unpacked(path, opened(path, directory)) as file:
        while line := file.readline(most_bytes + 1):
            if len(line) > most_bytes:
                raise _too_large("a line of it", most_bytes)
            yield line


def _up_to(file: BinaryIO, most_bytes: int) -> bytes:
    blocks, left = [], most_bytes + 1
    while left and (block := file.read(min(_BLOCK_BYTES, left))):
        blocks.append(block)
        left -= len(block)
    if not left:
        raise _too_large("it", most_bytes)
    return b"".join(blocks)


def _too_large(what: str, most_bytes: int) -> OSError:
    size = f"{most_bytes >> 20} MiB" if most_bytes >= 1 << 20 else f"{most_bytes} bytes"
    return OSError(errno.EFBIG, f"{what} is larger than {size}")
