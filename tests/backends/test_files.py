"""Files as people have them: whatever packs them and whatever mark they begin with, the same bytes come out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.files import opened
from backends.foreign_files import read_named
from tests import packers

PACKERS: dict[str, Callable[[bytes], bytes]] = {"plain": bytes, **packers.PACKERS}


@given(st.text(max_size=40).filter(lambda text: not text.startswith("\ufeff")), st.sampled_from(list(PACKERS)))
def test_what_was_packed_and_marked_comes_back(
    tmp_path_factory: pytest.TempPathFactory, text: str, packer: str
) -> None:
    path = tmp_path_factory.mktemp("file") / "file"
    for encoding in ("utf-8-sig", "utf-16"):
        path.write_bytes(PACKERS[packer](text.encode(encoding)))
        assert read_named(path).decode() == text


@pytest.mark.parametrize("packer", PACKERS)
def test_lines_of_a_file_of_several_parts(tmp_path: Path, packer: str) -> None:
    """Logs are appended to packed; gzip, xz and zstd allow one part after the other."""
    lines = [b"%d\n" % number for number in range(100_000)]
    path = tmp_path / "file"
    path.write_bytes(PACKERS[packer](b"".join(lines[:60_000])) + PACKERS[packer](b"".join(lines[60_000:])))
    with opened(path) as file:
        assert list(file) == lines


@pytest.mark.parametrize("packer", packers.PACKERS)
def test_a_damaged_file_is_an_os_error(tmp_path: Path, packer: str) -> None:
    path = tmp_path / "file"
    packed = PACKERS[packer](bytes(range(256)) * 1000)
    for damaged in (packed[:-3], packed[: len(packed) // 2], packed[:12] + b"abcdefgh" * 4 + packed[44:]):
        path.write_bytes(damaged)
        with pytest.raises(OSError, match="it cannot be unpacked: "):
            read_named(path)


def test_what_is_no_text_and_no_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xff\xfea")
    with pytest.raises(OSError, match="begins as UTF-16 and is none"):
        read_named(path)
    path.write_bytes(b"\xffa")
    assert read_named(path) == b"\xffa"
    with pytest.raises(IsADirectoryError):
        read_named(tmp_path)
