"""One program at a time in a directory: each command that writes into one says that another does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen import cli, rundir
from loadgen.search.results import SearchOptions, SearchResult
from tests.loadgen.tables import facts, manifest, request, write_run
from training_probe import cli as training_cli

HOLD = "import sys, pathlib, loadgen.rundir as r\nwith r.alone(pathlib.Path(sys.argv[1])): print(flush=True); input()"


@pytest.fixture
def taken(tmp_path: Path) -> Iterator[Path]:
    """The directory of a run in which another program works."""
    directory = write_run(tmp_path / "run", [request()], manifest(requests_planned=1), facts())
    held = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert held.stdout is not None and held.stdout.readline()
    yield directory
    held.kill()
    held.communicate()


def refused(told: str) -> bool:
    return "is still being measured by another process; wait for its end." in told and told.count("\n") == 1


@pytest.mark.parametrize("command", ["report", "collect"])
def test_what_reads_and_writes(command: str, taken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name for path in taken.iterdir()}
    assert cli.invoke([command, str(taken)]) == 2
    assert refused(capsys.readouterr().err)
    assert {path.name for path in taken.iterdir()} == before


def test_a_report_of_training(taken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert training_cli.invoke(["report", str(taken)]) == 2
    assert refused(capsys.readouterr().err)


def test_a_search_that_goes_on_removes_no_probe_of_another(taken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = SearchOptions(slo_ms={"ttft": 1000.0}, attain=0.9, axis="rate", budget_s=60.0, config={})
    rundir.write_json(taken / "search.json", SearchResult(version="1", options=options))
    write_run(taken / "1", [request()], manifest(), None)
    assert cli.invoke(["search", "--resume", str(taken)]) == 2
    assert refused(capsys.readouterr().err)
    assert (taken / "1" / "requests.jsonl").exists()


def test_the_second_takes_nothing_of_the_first_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It found the directory empty, and the first has written its plan since."""
    monkeypatch.setattr(rundir, "create", lambda directory, private: None)
    with rundir.measuring(tmp_path, plan="plan.json"):
        (tmp_path / "plan.json").touch()
        with pytest.raises(rundir.RunError), rundir.measuring(tmp_path, plan="plan.json"):
            pass
        assert (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("command", ["report", "collect", "compare"])
def test_a_pipe_is_no_directory(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    held = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)  # so that a mistake ends
    assert cli.invoke([command, *[str(tmp_path / "pipe")] * (1 + (command == "compare"))]) == 2
    os.close(held)
    assert "Not a directory" in capsys.readouterr().err


def test_a_comparison_only_reads(taken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["compare", str(taken), str(taken)]) == 0


def test_a_directory_is_free_when_its_program_is_dead(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=-1, stdout=-1) as held:
        assert held.stdout is not None and held.stdout.readline()
        with pytest.raises(rundir.RunError), rundir.alone(tmp_path):
            pass
        held.kill()
    with rundir.alone(tmp_path):
        pass


def test_a_run_of_several_lies_within_their_directory(tmp_path: Path) -> None:
    assert rundir.within(tmp_path, "1") == tmp_path / "1"
    (tmp_path / "2").symlink_to("/tmp")
    with pytest.raises(rundir.RunError, match="leads out of"):
        rundir.within(tmp_path, "2")
