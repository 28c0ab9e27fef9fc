"""Lines of a file that another process writes: those that are whole, once each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

BLOCK_BYTES = 1 << 16  # of 1 MiB, each left a hole in the heap: the sidecar of a long run grew by megabytes


class Tail:
    """New whole lines, each time it is asked. The file may come later; it stays open, so what was written is read also
    after its removal."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, b""
        self._file: FileIO | None = None

    def lines(self) -> Iterator[bytes]:
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = FileIO(self._path)
            while read := self._file.read(BLOCK_BYTES):
                *lines, self._part = (self._part + read).split(b"\n")
                yield from lines

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
