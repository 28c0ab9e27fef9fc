"""Directories that others sent: what reads them follows no link out of them, waits for nothing, and takes no more than
its limits, file by file."""

from __future__ import annotations

import gzip
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from backends import foreign_files
from loadgen import cli, rundir
from loadgen.load.load import parse_arrival
from loadgen.monitor import server_view
from loadgen.monitor.exporter import Exporter
from loadgen.report import repeats, sweeps
from loadgen.rundir import Phase, Snapshot
from tests.loadgen.tables import facts, manifest, request, write_run
from training_probe import cli as training_cli

HANG_S = 60
CANARY = b"of somebody else\n"


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """A test that waits for a pipe fails."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(HANG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    path = tmp_path / "canary"
    path.write_bytes(CANARY)
    return path


def one_run(directory: Path, **changes: Any) -> Path:
    records = [
        request(each, prompt_tokens=tokens, asked_prompt_tokens=tokens) for each, tokens in enumerate((9, 20, 30, 40))
    ]
    return write_run(directory, records, manifest(requests_planned=4, **changes), facts())


def link_out(path: Path, outside: Path) -> None:
    kept = outside.parent / f"kept-{path.name}"
    if path.exists():
        path.rename(kept)
    path.symlink_to(kept if kept.exists() else outside)


def endless(path: Path, outside: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def pipe(path: Path, outside: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def sparse(path: Path, outside: Path) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(1 << 40)


def circle(path: Path, outside: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


Spoil = Callable[[Path, Path], None]
SPOILS = [link_out, endless, pipe, sparse, circle]


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("name", ["manifest.json", "requests.jsonl"])
@pytest.mark.parametrize("command", ["report", "compare", "collect"])
def test_a_run_that_cannot_be_read_is_one_sentence(
    command: str, name: str, spoil: Spoil, tmp_path: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = one_run(tmp_path / "run")
    spoil(directory / name, canary)
    others = [str(directory)] if command == "compare" else []
    assert cli.invoke([command, str(directory), *others]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "Traceback" not in told
    if command != "collect" or name == "manifest.json":  # it has nothing to collect, whatever its records are
        assert name in told


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_a_report_can_do_without_is_left_out(
    spoil: Spoil, tmp_path: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = one_run(tmp_path / "run")
    for name in ("server.jsonl", "report.json", "snapshot.json"):
        spoil(directory / name, canary)
    assert cli.invoke(["report", str(directory)]) == 0
    assert "server.jsonl cannot be read: " in capsys.readouterr().err
    assert canary.read_bytes() == CANARY


@pytest.mark.parametrize("spoil", [each for each in SPOILS if each is not circle])
def test_packed_samples_that_cannot_be_read_are_a_problem(spoil: Spoil, tmp_path: Path, canary: Path) -> None:
    spoil(tmp_path / "server.jsonl.gz", canary)
    seen = server_view.read(tmp_path, "r", 0, 1)
    assert seen is not None and seen.server is not None and seen.server.problem
    assert server_view.samples(tmp_path, "r") == []


@pytest.mark.parametrize("end", ["", ".part"])
def test_a_report_is_never_written_through_a_link(
    end: str, tmp_path: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = one_run(tmp_path / "run")
    pictures = ("cdf.png", "cdf.svg", "timeline.png", "ttft_by_prompt.png")
    written = ("report.json", "report.md", "report.html", *pictures)
    for name in written:
        (directory / f"{name}{end}").symlink_to(canary)
    assert cli.invoke(["report", str(directory), "--figures"]) == 0
    assert canary.read_bytes() == CANARY
    assert not any(path.is_symlink() for path in directory.iterdir())
    assert {path.name for path in directory.iterdir()} >= set(written)


def test_links_within_a_directory_are_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = one_run(tmp_path / "run")
    (directory / "requests.jsonl").rename(directory / "kept.jsonl")
    (directory / "requests.jsonl").symlink_to("kept.jsonl")
    (tmp_path / "named").symlink_to(directory)  # the command line's own word
    assert cli.invoke(["report", str(tmp_path / "named")]) == 0


def test_runs_elsewhere_are_no_repeats_and_no_points(tmp_path: Path) -> None:
    outside = one_run(tmp_path / "outside")
    whole = tmp_path / "whole"
    whole.mkdir()
    one_run(whole / "1")
    (whole / "2").symlink_to(outside)
    assert repeats.directories(whole) == [whole / "1"]
    assert sweeps.state_of(whole / "2") == ("unfinished", None)


@pytest.mark.parametrize("spoil", SPOILS)
def test_the_exporter_shows_the_others(spoil: Spoil, tmp_path: Path, canary: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("good", "bad"):
        (runs / name).mkdir(parents=True)
        rundir.write_snapshot(runs / name, Snapshot(run_id=name, program="loadgen", state="finished"))
    spoil(runs / "bad" / "snapshot.json", canary)
    page = Exporter(runs).page()[0].decode()
    assert 'run_id="good"' in page and 'run_id="bad"' not in page and CANARY.decode().strip() not in page


def test_a_run_directory_that_is_a_link_is_shown_by_no_exporter(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    rundir.write_snapshot(tmp_path / "outside", Snapshot(run_id="r", program="loadgen", state="finished"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    page = Exporter(tmp_path / "runs").page()[0].decode()
    assert 'run_id="r"' not in page and "llm_dissect_exporter_broken_snapshots 1.0" in page


def test_a_thousand_phases_and_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    phases = [Phase(str(each), each / 1000, (each + 1) / 1000) for each in range(1001)]
    assert cli.invoke(["report", str(one_run(tmp_path / "most", phases=tuple(phases[:1000])))]) == 0
    capsys.readouterr()
    assert cli.invoke(["report", str(one_run(tmp_path / "more", phases=tuple(phases)))]) == 2
    assert "phases" in capsys.readouterr().err
    assert len(parse_arrival("steps:" + ",".join(["1@1"] * 1000)).phases()) == 1000
    with pytest.raises(ValueError, match="1001 steps"):
        parse_arrival("steps:" + ",".join(["1@1"] * 1001))


def test_samples_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_view, "MOST_SAMPLES", 10)
    header = server_view.SamplesHeader(run_id="r", series=["running"], gpus=[])
    sample = server_view.ServerSample(at_ns=1, took_ms=1.0, metrics={"running": 1.0})
    with gzip.open(tmp_path / "server.jsonl.gz", "wb") as file:
        file.write(b"\n".join(map(msgspec.json.encode, [header, *[sample] * 20])) + b"\n")
    seen = server_view.read(tmp_path, "r", 0, 1)
    assert seen is not None and seen.server is not None and "over 10 samples" in (seen.server.problem or "")


def test_large_files_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 10 + b"\n" + b"b" * 20)
    assert foreign_files.read_bytes(path, most_bytes=31) == path.read_bytes()
    with pytest.raises(OSError, match="larger than 30 bytes"):
        foreign_files.read_bytes(path, most_bytes=30)
    assert list(foreign_files.lines(path, most_bytes=20)) == [b"a" * 10 + b"\n", b"b" * 20]
    with pytest.raises(OSError, match="a line of it is larger than 19 bytes"):
        list(foreign_files.lines(path, most_bytes=19))
    assert len(foreign_files.read_named(path)) == 31


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_sweep_of_training_that_cannot_be_read_is_one_sentence(
    spoil: Spoil, tmp_path: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep").mkdir()
    spoil(tmp_path / "sweep" / "results.jsonl", canary)
    for command in (["report"], ["compare", str(tmp_path / "sweep")]):
        assert training_cli.invoke([*command, str(tmp_path / "sweep")]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and "results" in told
