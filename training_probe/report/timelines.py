"""Memory over the first steps of cells, as their trials wrote it, and which of its samples are shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends import foreign_files
from backends.untrusted import UNDECODABLE
from training_probe.protocol import TIMELINE_FILE, Timeline

Array = NDArray[np.float64]


def read(directory: Path) -> Iterator[tuple[str, Timeline]]:
    """The timeline of each cell of a sweep that recorded one, with the cell's name. A file that was cut by a kill or
    that cannot be read gives none."""
    for path in sorted(directory.glob(f"trials/*/*/{TIMELINE_FILE}")):
        try:
            recorded = msgspec.json.decode(foreign_files.read_bytes(path, directory), type=Timeline)
        except (OSError, *UNDECODABLE):
            continue
        if recorded.time_s and all(len(each) == len(recorded.time_s) for each in recorded.bytes):
            yield path.parent.parent.name, recorded  # trials/<cell>/timeline/


def extremes(total: Array, most: int) -> NDArray[np.int64]:
    """Which samples are shown, ascending: the first, the last, and the highest and the lowest of each of `most`
    stretches."""
    stretches = np.array_split(np.arange(len(total)), min(len(total), most))
    ends = [part[end] for part in stretches for end in (np.argmax(total[part]), np.argmin(total[part]))]
    return np.unique(np.array([0, *ends, len(total) - 1]))
