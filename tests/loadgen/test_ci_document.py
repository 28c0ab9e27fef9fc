"""The GitHub Actions job of docs/ci.md: its very commands are run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.loadgen.test_run import LOADGEN

DOCUMENT = Path(__file__).parents[2] / "docs" / "ci.md"


@pytest.mark.processes
def test_the_job_runs(tmp_path: Path) -> None:
    commands = re.findall(r"^ +run: loadgen (.*)$", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["run", "run", "compare"]
    summary = tmp_path / "summary.md"
    ended = []
    for command in commands:
        line = command.replace("$GITHUB_STEP_SUMMARY", str(summary))
        done = subprocess.run(
            [*LOADGEN, *shlex.split(line)], cwd=tmp_path, capture_output=True, text=True, timeout=240, env=os.environ
        )
        ended.append(done.returncode)
        assert done.returncode in (0, 4), done.stderr  # 4: other tests made the client late
    cases = list(ElementTree.parse(tmp_path / "gate.xml").getroot().iter("testcase"))
    assert len(cases) == 2 * 5 + 2
    assert "# loadgen compare" in summary.read_text()
    if ended[:2] == [0, 0]:
        assert ended[2] == 0 and not [case for case in cases if case.find("failure") is not None]
