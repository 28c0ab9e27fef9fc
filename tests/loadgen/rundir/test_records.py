"""The records file: what is written is what is read, damage is named, and a merge changes nothing."""

from __future__ import annotations

import gzip
import lzma
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.rundir import parts, records
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.records import COLUMNS, PHASES, Record, RecordsError, RecordsFile
from tests.loadgen.tables import facts, failure, request

moments = st.integers(0, records.MOST_NS)
stamps = st.none() | moments
tokens = st.just((None, None)) | st.tuples(moments, moments).map(sorted)
counts = st.none() | st.integers(0, 2**31)
turns = st.just((msgspec.UNSET, msgspec.UNSET)) | st.tuples(st.integers(0, 2**40), st.integers(1, 2**31))


@st.composite
def any_record(draw: st.DrawFn) -> Record:
    gaps = draw(st.lists(st.integers(0, 2**32 - 1), max_size=6))
    first, last = draw(tokens)
    session, turn = draw(turns)
    return Record(
        id=draw(st.integers(0, 40)),
        scheduled_ns=draw(st.integers(-(2**40), records.MOST_NS)),
        sent_ns=draw(stamps),
        headers_ns=draw(stamps),
        first_token_ns=first,
        last_token_ns=last,
        done_ns=draw(stamps),
        prompt_tokens=draw(counts),
        output_tokens=draw(counts),
        asked_prompt_tokens=draw(st.integers(0, 2**31)),
        asked_tokens=draw(st.integers(0, 2**31)),
        cached_tokens=draw(counts),
        shared_tokens=draw(st.just(msgspec.UNSET) | st.integers(1, 2**31)),
        session=session,
        turn=turn,
        events=len(gaps) + 1,
        status=draw(st.none() | st.integers(100, 599)),
        outcome=draw(st.sampled_from(OUTCOMES)),
        phase=draw(st.sampled_from(PHASES)),
        error=draw(st.none() | st.text(min_size=1, max_size=20)),
        model=draw(st.just(msgspec.UNSET) | st.sampled_from(["small", "large"])),
        itl_us=gaps,
    )


many_records = st.lists(any_record(), max_size=25, unique_by=lambda record: (record.phase, record.id))


def rows_of(table: records.RequestTable) -> list[Record]:
    """The table as records again."""
    rows = []
    for at in range(len(table)):
        values = {name: int(getattr(table, name)[at]) for name in COLUMNS}
        plain = {name: None if value == -1 else value for name, value in values.items()}
        measured = values["phase"] == PHASES.index("measured")
        plain |= {"outcome": OUTCOMES[values["outcome"]], "phase": PHASES[values["phase"]]}
        plain |= {"scheduled_ns": values["scheduled_ns"], "shared_tokens": values["shared_tokens"] or msgspec.UNSET}
        plain |= {
            "session": msgspec.UNSET if values["session"] == -1 else values["session"],
            "turn": values["turn"] or msgspec.UNSET,
        }
        plain |= {} if table.tells_pace else {"first_tokens": msgspec.UNSET}
        plain |= {"model": table.models.get(values["id"], msgspec.UNSET) if measured else msgspec.UNSET}
        plain |= {"answer_ns": table.answers_ns.get(values["id"], msgspec.UNSET) if measured else msgspec.UNSET}
        gaps = table.itl_us[table.itl_offsets[at] : table.itl_offsets[at + 1]].tolist()
        rows.append(Record(**plain, itl_us=gaps, error=table.errors.get(values["id"]) if measured else None))  # type: ignore[arg-type]
    return rows


def expected(given_records: list[Record]) -> list[Record]:
    kept = [
        record if record.phase == "measured" else msgspec.structs.replace(record, error=None, model=msgspec.UNSET)
        for record in given_records
    ]
    return sorted(kept, key=lambda record: (record.phase != "warmup", record.id))


def write_file(path: Path, given_records: list[Record], complete: bool = True) -> None:
    file = RecordsFile(path, "run", "0.1.0", 123)
    for record in given_records:
        file.write(record)
    if complete:
        file.close(facts())


@given(many_records)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_what_is_read(given_records: list[Record]) -> None:
    with TemporaryDirectory() as name:
        write_file(Path(name) / "requests.jsonl", given_records)
        table, clients = records.read(Path(name))
        assert rows_of(table) == expected(given_records)
        assert clients == [facts()]
        assert records.read_header(Path(name)) == records.Header(run_id="run", version="0.1.0", t0_monotonic_ns=123)


@given(many_records)
@settings(max_examples=60, deadline=None)
def test_small_blocks_make_the_same_table(given_records: list[Record]) -> None:
    whole = records.table(given_records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "GAPS_A_BLOCK", 3)
        patch.setattr(records, "ROWS_A_BLOCK", 2)
        assert rows_of(records.table(given_records)) == rows_of(whole)
        assert [row for block in whole.blocks() for row in rows_of(block)] == rows_of(whole)


@given(many_records, st.data())
@settings(max_examples=60, deadline=None)
def test_selected_rows_are_those_rows(given_records: list[Record], data: st.DataObject) -> None:
    table = records.table(given_records)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(table), max_size=len(table))), np.bool_)
    measured = [row for row in rows_of(table) if row.phase == "measured"]
    assert rows_of(table.select(mask)) == [row for row, kept in zip(rows_of(table), mask, strict=True) if kept]
    assert rows_of(table.measured()) == measured


@given(many_records)
@settings(max_examples=60, deadline=None)
def test_a_table_is_written_as_its_records_are(given_records: list[Record]) -> None:
    table = records.table(given_records)
    assert [msgspec.convert(msgspec.to_builtins(row), Record) for row in table.written()] == rows_of(table)
    with TemporaryDirectory() as one, TemporaryDirectory() as other, pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "WRITTEN_TOGETHER", 3)
        patch.setattr(parts, "PART_BYTES", 1500)
        write_file(Path(one) / "requests.jsonl", rows_of(table.measured()))
        file = RecordsFile(Path(other) / "requests.jsonl", "run", "0.1.0", 123)
        file.write_table(table.measured())
        file.close(facts())
        written = [{path.name: path.read_bytes() for path in Path(name).iterdir()} for name in (one, other)]
        assert written[0] == written[1]


def test_a_request_that_was_sent_twice_is_written_so() -> None:
    table = records.table([request(1), request(2, retried=True)])
    assert [record.retried for record in table.written()] == [msgspec.UNSET, True]


def test_rows_that_follow_each_other_are_not_copied() -> None:
    table = records.table(request(number) for number in range(6))
    assert np.shares_memory(table.select(table.id >= 2).itl_us, table.itl_us)
    assert not np.shares_memory(table.select(table.id % 2 == 0).itl_us, table.itl_us)
    assert len(table.select(table.id > 9)) == 0


@given(many_records, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_merged_parts_are_one_file(given_records: list[Record], parts: int) -> None:
    with TemporaryDirectory() as one, TemporaryDirectory() as several:
        write_file(Path(one) / "requests.jsonl", given_records)
        for part in range(parts):
            write_file(Path(several) / f"requests.{part}.jsonl", given_records[part::parts])
        before, clients = records.read(Path(several))
        records.merge(Path(several))
        assert [path.name for path in Path(several).iterdir()] == ["requests.jsonl"]
        after, merged_clients = records.read(Path(several))
        assert rows_of(before) == rows_of(after) == rows_of(records.read(Path(one))[0])
        assert clients == merged_clients == [facts()] * parts


def test_a_cut_last_line_is_left_out_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    write_file(path, [request(0), request(1)], complete=False)
    whole = path.read_bytes()
    first_end = len(whole) - len(whole.splitlines(keepends=True)[-1])
    for cut in range(first_end, len(whole)):
        path.write_bytes(whole[:cut])
        table, clients = records.read(tmp_path)
        assert table.id.tolist() == [0] and clients == []


@given(many_records, st.integers(1, 3), st.integers(1, 900))
@settings(max_examples=40, deadline=None)
def test_files_that_are_full_are_followed_by_others_and_read_as_one(
    given_records: list[Record], workers: int, part_bytes: int
) -> None:
    with TemporaryDirectory() as one, TemporaryDirectory() as several, pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_BYTES", part_bytes)
        write_file(Path(one) / "requests.jsonl", given_records)
        for worker in range(workers):
            write_file(Path(several) / f"requests.{worker}.jsonl", given_records[worker::workers])
        records.merge(Path(several))  # more than one file holds: they stay
        for directory, writers in ((one, 1), (several, workers)):
            table, clients = records.read(Path(directory))
            assert rows_of(table) == expected(given_records) and len(clients) == writers
            assert not list(Path(directory).glob("*.part"))
        sizes = [part.path.stat().st_size for part in parts.find(Path(one))]
        longest = max(len(line) for path in Path(one).iterdir() for line in path.read_bytes().splitlines(True))
        assert max(sizes) < part_bytes + 3 * longest  # the header, the last record, the footer


def three_parts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(parts, "PART_BYTES", 1000)
    write_file(directory / "requests.jsonl", [request(number) for number in range(9)])
    found = [part.path for part in parts.find(directory)]
    assert [path.name for path in found[:2]] == ["requests.jsonl", "requests-2.jsonl"] and len(found) >= 3
    return found


def test_a_missing_or_cut_file_among_several_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_, last = three_parts(tmp_path, monkeypatch)
    for missing, named in ((first, "requests-2"), (second, "requests-3")):
        content = missing.read_bytes()
        missing.unlink()
        with pytest.raises(RecordsError, match=rf"{named}\.jsonl is there and the file before it is not"):
            records.read(tmp_path)
        missing.write_bytes(content[:-5])
        with pytest.raises(RecordsError, match=rf"{missing.name} ends within line \d+ and another file follows"):
            records.read(tmp_path)
        missing.write_bytes(content)
    last.unlink()
    table, clients = records.read(tmp_path)  # as a kill would leave it
    assert 0 < len(table) < 9 and clients == []


def test_of_several_files_any_may_be_packed_and_a_plain_one_comes_before_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = three_parts(tmp_path, monkeypatch)
    plain = rows_of(records.read(tmp_path)[0])
    for path in found[1:]:
        path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        assert rows_of(records.read(tmp_path)[0]) == plain
        path.unlink()
        assert rows_of(records.read(tmp_path)[0]) == plain


def test_a_kill_while_the_next_file_is_begun_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    file = RecordsFile(tmp_path / "requests.jsonl", "run", "0.1.0", 0)
    monkeypatch.setattr(Path, "replace", lambda self, target: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        file.write(request(0))
    assert len(records.read(tmp_path)[0]) == 0


@pytest.mark.parametrize("packed", [gzip, lzma], ids=["gz", "xz"])
def test_a_packed_file_is_read_as_it_was(tmp_path: Path, packed: ModuleType) -> None:
    path = tmp_path / "requests.jsonl"
    write_file(path, [request(at) for at in range(300)])
    plain, clients = records.read(tmp_path)
    kept = path.with_suffix(".jsonl.gz" if packed is gzip else ".jsonl.xz")
    kept.write_bytes(packed.compress(path.read_bytes()))
    path.unlink()
    again, same_clients = records.read(tmp_path)
    assert rows_of(again) == rows_of(plain) and same_clients == clients
    with pytest.raises(RecordsError, match="there already; nothing was merged"):
        records.merge(tmp_path)
    whole = kept.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:40] + b"\xff" * 20 + whole[60:]):
        kept.write_bytes(damaged)
        with pytest.raises(RecordsError, match=f"{kept.name} cannot be unpacked"):
            records.read(tmp_path)
    kept.write_bytes(b"no")
    with pytest.raises(RecordsError, match=kept.name):
        records.read(tmp_path)


def test_a_killed_workers_cut_line_does_not_spoil_the_merge(tmp_path: Path) -> None:
    write_file(tmp_path / "requests.0.jsonl", [request(0), request(2)], complete=False)
    whole = (tmp_path / "requests.0.jsonl").read_bytes()
    (tmp_path / "requests.0.jsonl").write_bytes(whole[:-30])
    write_file(tmp_path / "requests.1.jsonl", [request(1)])
    records.merge(tmp_path)
    table, clients = records.read(tmp_path)
    assert table.id.tolist() == [0, 1] and len(clients) == 1


def test_a_merge_killed_before_its_last_step_doubles_nothing(tmp_path: Path) -> None:
    for part in range(2):
        write_file(tmp_path / f"requests.{part}.jsonl", [request(part)])
    left_over = {path: path.read_bytes() for path in tmp_path.iterdir()}
    records.merge(tmp_path)
    for path, content in left_over.items():
        path.write_bytes(content)
    assert records.read(tmp_path)[0].id.tolist() == [0, 1]


@pytest.mark.parametrize(
    "damage",
    [
        b"{}", b"not json", b"\xff\xfe", b'{"id":1', b"", b'{"client":{}}', b'{"id":1e99}',
        msgspec.json.encode(request(9, shared_tokens=-1)),
        msgspec.json.encode(request(9, session=3)),
        msgspec.json.encode(request(9, turn=2)),
        msgspec.json.encode(request(9, session=3, turn=0)),
        msgspec.json.encode(request(9, session=-1, turn=1)),
        *(msgspec.json.encode(request(9, **{name: -1})) for name in ("prompt_tokens", "cached_tokens", "status")),
        msgspec.json.encode(request(-1)),
        pytest.param(b'{"unknown":' + b"[" * 100_000, id="nested without end"),
    ],
)  # fmt: skip
def test_damage_is_named_by_its_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "requests.jsonl"
    write_file(path, [request(0), request(1)])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage + b"\n", *lines[2:]]))
    with pytest.raises(RecordsError, match=r"requests\.jsonl line 3 is not a record"):
        records.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"outcome": "fine"}, "unknown outcome 'fine'"),
        ({"phase": "later"}, "unknown phase 'later'"),
        ({"itl_us": [-1]}, "out of range"),
        ({"itl_us": [2**32]}, "out of range"),
    ],
)
def test_values_outside_the_closed_lists_are_refused(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    bad = msgspec.structs.replace(request(1), **changes)
    with pytest.raises(ValueError, match=says):
        records.table([bad])
    write_file(tmp_path / "requests.jsonl", [request(0), bad])
    with pytest.raises(RecordsError, match=f"line 3 .*{says}"):
        records.read(tmp_path)


def test_a_request_recorded_twice_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "requests.jsonl", [request(4), failure(4)])
    with pytest.raises(RecordsError, match="request 4 is recorded twice"):
        records.read(tmp_path)
    assert len(records.table([request(4), request(4, phase="warmup")])) == 2


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match=r"holds no requests\.jsonl"):
        records.read(tmp_path)
    path = tmp_path / "requests.jsonl"
    for content in (b"", b"\n", b'{"schema":"loadgen.requests/1"', b'{"id":1}\n'):
        path.write_bytes(content)
        with pytest.raises(RecordsError, match=r"does not begin with a loadgen\.requests/1 header"):
            records.read(tmp_path)
    path.write_bytes(b'{"schema":"loadgen.requests/9","run_id":"x","version":"1","t0_monotonic_ns":0}\n')
    with pytest.raises(RecordsError, match=r"has schema .loadgen\.requests/9."):
        records.read(tmp_path)


def test_parts_of_different_runs_are_refused(tmp_path: Path) -> None:
    RecordsFile(tmp_path / "requests.0.jsonl", "run", "0.1.0", 1).close(facts())
    RecordsFile(tmp_path / "requests.1.jsonl", "run", "0.1.0", 2).close(facts())
    for read in (records.read, records.read_header, records.merge):
        with pytest.raises(RecordsError, match="are of different runs"):
            read(tmp_path)  # type: ignore[operator]
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write_file(tmp_path / "requests.jsonl", [request(0)])
    with pytest.raises(FileExistsError):
        RecordsFile(tmp_path / "requests.jsonl", "run", "0.1.0", 0)
    with pytest.raises(RecordsError, match="nothing was merged"):
        records.merge(tmp_path)
    assert records.read(tmp_path)[0].id.tolist() == [0]


KILLED_WRITER = """
import os, sys
from pathlib import Path
from loadgen.rundir.records import RecordsFile
from tests.loadgen.tables import request
file = RecordsFile(Path(sys.argv[1]), "run", "0.1.0", 0)
for number in range(50):
    file.write(request(number))
os.kill(os.getpid(), 9)
"""


def test_kill_nine_loses_no_finished_request(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", KILLED_WRITER, str(tmp_path / "requests.jsonl")]
    assert subprocess.run(command, env=environment).returncode == -9
    assert records.read(tmp_path)[0].id.tolist() == list(range(50))


def test_records_without_sessions_are_no_turns(tmp_path: Path) -> None:
    line = msgspec.json.encode(request(1))
    assert b"session" not in line and b"turn" not in line
    write_file(tmp_path / "requests.jsonl", [request(0, session=7, turn=2), request(1)])
    table, _ = records.read(tmp_path)
    assert (table.session.tolist(), table.turn.tolist()) == ([7, -1], [2, 0])


def test_memory_is_234_bytes_a_request_and_eight_a_token(tmp_path: Path) -> None:
    requests, tokens = 4000, 100
    write_file(tmp_path / "requests.jsonl", [request(number, gaps=(20,) * (tokens - 1)) for number in range(requests)])
    records.read(tmp_path)  # caches of the interpreter are warm
    tracemalloc.start()
    table, _ = records.read(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(table) == requests
    assert peak < requests * (234 + 8 * tokens) + 4096  # what does not grow


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"first_token_ns": 5, "last_token_ns": 4}, "do not come in that order"),
        ({"first_token_ns": 5, "last_token_ns": None}, "do not come in that order"),
        ({"last_token_ns": 9_000_000_000_000_000_000}, "more than 30 days"),
        ({"sent_ns": -9_000_000_000_000_000_000}, "more than 30 days"),
    ],
)
def test_times_that_no_request_has_are_refused(changes: dict[str, int | None], reason: str) -> None:
    """A report counts events by the second: such a time took 67 GB."""
    with pytest.raises(ValueError, match=reason):
        records.table([request(**changes)])


def test_a_packed_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_LINE_BYTES", 1000)
    with gzip.open(tmp_path / "requests.jsonl.gz", "wb") as file:
        file.write(b" " * 100_000)
    with pytest.raises(records.RecordsError, match=r"requests\.jsonl\.gz has a line of over"):
        records.read(tmp_path)
