"""The wires of `loadgen serve --wire`, and what a report says of a run over each: known from how each wire is built."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.loadgen.screen import LOADGEN

OF_WIRES = {"DELAYED_ACK", "BUFFERED", "GROUPED_EVENTS"}
REQUESTS, TOKENS = 12, 24


@dataclass(frozen=True, kw_only=True)
class Told:
    """finding: which makes the run invalid, and with which ttft is said to be the time of a delivery; empty: none of
    OF_WIRES. paced: tpot and itl are known. quick: `--quick-acks` ends it."""

    wire: str  # as played
    finding: str = ""
    paced: bool = True
    quick: bool = True


EXPECTED = {
    "clean": Told(wire="clean"),
    "nagle": Told(wire="nagle", finding="DELAYED_ACK"),
    "whole": Told(wire="whole", finding="BUFFERED", paced=False, quick=False),
    "lumps:MS": Told(wire="lumps:40", finding="BUFFERED", paced=False, quick=False),
}


def report(url: str, backend: str, out: Path, *more: str) -> Any:
    """Of a whole run, one request at a time."""
    words = ["run", "--backend", backend, "--url", url, "--requests", str(REQUESTS), "--concurrency", "1"]
    words += ["--input-tokens", "8", "--output-tokens", str(TOKENS), "--warmup", "1", "--no-calibrate"]
    words += ["--goodput", "tpot:50", "--out", str(out), *more]
    done = subprocess.run([*LOADGEN, *words], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 4), done.stderr
    return json.loads((out / "report.json").read_text())


def severities(report: Any) -> dict[str, str]:
    """How bad each finding is, by its code."""
    return {each["code"]: each["severity"] for each in report["verdict"]["findings"]}
