"""Records on their way from another machine: whole, hashed, with the run's own start, and moved where clocks drift."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from loadgen.cluster import records_home
from loadgen.rundir import records
from loadgen.rundir.records import RecordsFile
from tests.loadgen.tables import facts, request


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another machine's directory, with a file of three records, the second due first."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    directory = records_home.place("r-1-0")
    file = RecordsFile(directory / "requests.4.jsonl", "r", "1", 77)
    for number, scheduled in ((2, 30.0), (0, 10.0), (1, 20.0)):
        file.write(request(number, scheduled=scheduled, sent=scheduled + 0.5))
    file.close(facts())
    return directory


def home(there: Path, out: Path) -> Path:
    (written,) = records_home.written(there)

    async def read(name: str, offset: int) -> bytes:
        return records_home.chunk(there, name, offset)

    asyncio.run(records_home.bring(written, read, out))
    return out


def test_a_file_comes_home_with_the_runs_own_start(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_home, "CHUNK_BYTES", 100)
    came = home(there, tmp_path / "x.home")
    before = came.read_bytes()
    out = tmp_path / "requests.4.jsonl"
    assert records_home.settle(came, out, 999, None) == 500_000
    assert not came.exists()
    assert out.read_bytes().split(b"\n", 1)[1] == before.split(b"\n", 1)[1]  # records as they were, to the byte
    assert records.read_header(tmp_path).t0_monotonic_ns == 999
    records_home.remove(there)
    assert records_home.written(there) == []


def test_records_are_moved_whole(there: Path, tmp_path: Path) -> None:
    came = home(there, tmp_path / "x.home")
    rows = {row["id"]: row for row in map(json.loads, came.read_text().splitlines()) if "id" in row}
    lag_ns = records_home.settle(came, tmp_path / "requests.4.jsonl", 0, lambda since_ns: since_ns // 100)
    table, _ = records.read(tmp_path)
    for place in range(3):
        row = rows[int(table.id[place])]
        shift = row["scheduled_ns"] // 100
        for name in ("scheduled_ns", "sent_ns", "first_token_ns", "done_ns"):
            assert getattr(table, name)[place] == row[name] + shift
    assert lag_ns == 500_000 + 100_000  # the first one, by the driver's clock


def test_what_was_cut_off_keeps_its_whole_lines(there: Path, tmp_path: Path) -> None:
    came = home(there, tmp_path / "x.home")
    came.write_bytes(came.read_bytes()[:-900])
    records_home.settle(came, tmp_path / "requests.4.jsonl", 0, None)
    assert 0 < len(records.read(tmp_path)[0]) < 3
    came.write_bytes(b'{"schema": "load')
    assert records_home.settle(came, tmp_path / "requests.5.jsonl", 0, None) is None
    assert not (tmp_path / "requests.5.jsonl").exists()


def test_other_bytes_than_were_sent_are_refused(there: Path, tmp_path: Path) -> None:
    (written,) = records_home.written(there)

    async def other(name: str, offset: int) -> bytes:
        return bytes(written.size_bytes - offset)

    async def short(name: str, offset: int) -> bytes:
        return b"x" * 10 if not offset else b""

    for read, said in ((other, "other bytes"), (short, "ended after 10 of")):
        with pytest.raises(records_home.HomeError, match=said):
            asyncio.run(records_home.bring(written, read, tmp_path / "out"))


def test_nothing_but_our_own_directories_is_read_or_removed(there: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "requests.jsonl").write_text("x")
    for directory in (precious, there / ".." / ".." / ".." / "precious", there / "..", Path("/")):
        for act in (records_home.written, records_home.remove, lambda d: records_home.chunk(d, "requests.jsonl", 0)):
            with pytest.raises(PermissionError):
                act(directory)
    assert (precious / "requests.jsonl").read_text() == "x"
