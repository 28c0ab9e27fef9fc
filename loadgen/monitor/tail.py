"""Lines of a file that another process writes, and the records of a run that goes on: each whole one once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import msgspec

from backends.untrusted import UNDECODABLE
from loadgen.monitor.totals import CountedRecord
from loadgen.rundir import parts
from loadgen.rundir.parts import OF_THE_RUN, RecordsPart

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


class RecordTail:
    """The records in a run's directory, each once: of the run's own files, or of the workers' before these are
    joined."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tails: dict[RecordsPart, Tail | None] = {}  # None: read to its end
        self._decode = msgspec.json.Decoder(CountedRecord).decode

    @property
    def writers(self) -> set[int]:
        """The workers whose files are followed, or OF_THE_RUN."""
        return {part.worker for part in self._tails}

    def records(self) -> Iterator[CountedRecord]:
        """Those that are new."""
        found = [part for part in parts.find(self._directory) if not part.packed]
        followed = [part for part in found if part.worker != OF_THE_RUN]
        if self.writers <= {OF_THE_RUN} and len(followed) < len(found):
            followed = [part for part in found if part.worker == OF_THE_RUN]
        for part in followed:
            self._tails.setdefault(part, Tail(part.path))
        full = {(part.worker, part.number - 1) for part in found}
        for part, tail in self._tails.items():
            if tail is None:
                continue
            for line in tail.lines():
                with contextlib.suppress(*UNDECODABLE):
                    yield self._decode(line)
            if (part.worker, part.number) in full:  # before these lines were read
                tail.close()
                self._tails[part] = None
