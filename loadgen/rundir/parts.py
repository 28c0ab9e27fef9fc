"""The files that hold a run's records: `requests.jsonl`, then `requests-2.jsonl` and so on once one is full.

Worker process 0 writes `requests.0.jsonl`, `requests.0-2.jsonl` and so on. The workers' files are joined at the end,
unless they are more than one file holds: then they stay, and are the records. Whoever keeps runs may pack any of them
with gzip or xz.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PART_BYTES = 1 << 30  # a full file: an hour of a thousand short requests a second is two of them
JOINED = "requests.jsonl"
OF_THE_RUN = -1  # in place of a worker's number

_NAME = re.compile(r"requests(?:\.(\d+))?(?:-(\d+))?\.jsonl(\.gz|\.xz)?")


class RecordsPart(NamedTuple):
    """One file of records; `number` counts from 1."""

    worker: int
    number: int
    path: Path

    @property
    def packed(self) -> bool:
        return self.path.suffix != ".jsonl"


def find(directory: Path) -> list[RecordsPart]:
    """Every file of records in a directory, the run's own first, each writer's in order; a plain file before its packed
    copy."""
    named = [(_NAME.fullmatch(path.name), path) for path in directory.glob("requests*")]
    parts = [RecordsPart(int(match[1] or OF_THE_RUN), int(match[2] or 1), path) for match, path in named if match]
    return sorted(parts)


def is_name(name: str) -> bool:
    """Whether a file of records is called so."""
    return _NAME.fullmatch(name) is not None


def following(path: Path, number: int) -> Path:
    """The name of part `number` of the records that begin with the file `path`."""
    return path.with_name(f"{path.stem}-{number}{path.suffix}")
