"""What `loadgen list` and `loadgen show` say of a directory of runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from loadgen import cli
from loadgen.rundir import listing

REPORT = {
    "backend": "vllm", "model": "m", "arrival": "burst", "verdict": {"valid": False, "findings": []},
    "throughput": {"output_tokens_per_s": 250.0}, "metrics": {"ttft_ms": {"p50": 12.5}, "tpot_ms": {"p50": None}},
}  # fmt: skip
SWEEP = {"backend": "sglang", "model": "m", "runs": [{"valid": True}, {"valid": False}]}
REPEAT = {"runs": [{"valid": True}], "metrics": {"ttft_p50": {"mean": 7}, "output_tokens_per_s": {"mean": 90.0}}}


def kept(directory: Path, file: str, content: object, at_s: int) -> None:
    directory.mkdir()
    path = directory / file
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    os.utime(path, (at_s, at_s))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    kept(tmp_path / "a", "report.json", REPORT, 3)
    kept(tmp_path / "b", "sweep.json", SWEEP, 4)
    kept(tmp_path / "c", "repeat.json", REPEAT, 2)
    kept(tmp_path / "broken", "report.json", "{", 1)
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    return tmp_path


def test_the_newest_is_first_with_its_verdict_and_numbers(runs: Path) -> None:
    found = listing.runs(runs)
    assert [(each.directory.name, each.kind, each.valid) for each in found] == [
        ("b", "sweep", False), ("a", "run", False), ("c", "repeat", True), ("broken", "run", None),
    ]  # fmt: skip
    assert found[1].numbers == (250.0, 12.5, None) and found[1].what == "vllm m burst"
    assert found[2].numbers == (90.0, 7.0, None)


def test_the_table_has_a_line_a_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["list", str(runs)]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["run", "written", "kind", "verdict", "tokens/s", "ttft", "tpot", "of"]
    assert [line.split()[0] for line in lines] == ["b", "a", "c", "broken"] and "INVALID" in lines[0]


def test_a_run_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["show", "no-such-run"]) == 2
    assert "`loadgen list` lists those" in capsys.readouterr().err
