"""Measurements that tests read, packed as benchmarks/kept.py packs them."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from benchmarks import kept

PACKED = kept.packed_files(Path(__file__).parent)


@cache
def _scratch() -> Path:
    place = Path(tempfile.mkdtemp(prefix="tests-data-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


@cache
def unpacked(name: str) -> Path:
    """The directory of that name, with all below it. Tests share it, so they leave it as it is."""
    place = _scratch() / name
    found = list(kept.under(PACKED, name))
    assert found, f"tests/data has no {name}"
    for one in found:
        kept.unpack(one, place / one["name"].removeprefix(name).strip("/"))
    return place
