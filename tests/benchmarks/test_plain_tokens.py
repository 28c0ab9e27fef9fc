"""The benchmark of the recogniser of plain tokens runs, and what was kept of it shows a gain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_it_prints_what_was_kept() -> None:
    argv = [sys.executable, str(BENCHMARKS / "plain_tokens.py"), "--rounds", "2"]
    report = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120).stdout)
    kept = json.loads((BENCHMARKS / "plain_tokens.json").read_text())
    assert report.keys() == kept.keys()
    assert kept["without_over_with"] > 1
