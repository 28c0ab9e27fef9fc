"""Lines of a file that grows: each whole one once, however its writer cut it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from loadgen.monitor.tail import Tail


@given(st.lists(st.binary(max_size=6), max_size=8))
def test_every_whole_line_comes_once(parts: list[bytes]) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "lines"
        tail, lines = Tail(path), []
        assert list(tail.lines()) == []  # the file comes later
        with path.open("wb", buffering=0) as file:
            for part in parts:
                file.write(part)
                lines += tail.lines()
        assert lines == b"".join(parts).split(b"\n")[:-1]
        path.unlink()
        assert list(tail.lines()) == []
        tail.close()


def test_what_was_written_before_the_removal_is_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a\nb")
    tail = Tail(path)
    assert list(tail.lines()) == [b"a"]
    with path.open("ab") as file:
        path.unlink()
        file.write(b"c\n")
    assert list(tail.lines()) == [b"bc"]
    tail.close()
