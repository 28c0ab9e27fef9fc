"""Runs the coverage-guided fuzzer (atheris, which is libFuzzer) over every target until it was given 10 million bytes:
`make fuzz`, or `python -m tests.fuzz.run [TARGET ...]` for some of them. Each target's line in results.jsonl here is
replaced when it is done; what crashes is kept in crashes/ here, and the exit code is then 1.

Each target runs in a process of its own, beginning with its corpus. Executions and bytes are counted in it; `coverage`
and `features` are libFuzzer's own count of edges, and of edges with how often they were taken.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

HERE = Path(__file__).parent
CORPUS, CRASHES, RESULTS = HERE / "corpus", HERE / "crashes", HERE / "results.jsonl"
BYTES = 10_000_000  # for each target
MOST_INPUT_BYTES = 4096
MOST_MEMORY_MB = 2048
MOST_SECONDS = 60  # for one input, on a machine that may be busy
PACKAGES = ["backends", "loadgen", "servers", "prometheus_client"]


class Result(msgspec.Struct, kw_only=True):
    """What one target was given. crashes: the files that it failed on."""

    target: str
    executions: int
    bytes: int
    seconds: float
    coverage: int
    features: int
    corpus: int
    crashes: list[str]
    python: str
    atheris: str


def within(name: str, report: Path) -> None:
    """In the process of a target: fuzzes, and writes executions and bytes to `report`, once it has had all bytes."""
    import atheris

    with atheris.instrument_imports(include=PACKAGES):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    executions = given = 0

    def one(data: bytes) -> None:
        nonlocal executions, given
        executions += 1
        given += len(data)
        try:
            target(data)
        finally:
            if given >= BYTES or sys.exc_info()[0] is not None:
                report.write_text(f"{executions} {given}")
        if given >= BYTES:
            os._exit(0)

    atheris.Setup(sys.argv[:1] + sys.argv[3:], one)
    atheris.Fuzz()


def fuzz(name: str) -> Result:
    import importlib.metadata

    with tempfile.TemporaryDirectory(prefix="llm-dissect-fuzz-") as scratch:
        corpus = shutil.copytree(CORPUS / name, Path(scratch, "corpus"))
        report = Path(scratch, "report")
        CRASHES.mkdir(exist_ok=True)
        begun = time.monotonic()
        options = [f"-max_len={MOST_INPUT_BYTES}", "-len_control=0", f"-rss_limit_mb={MOST_MEMORY_MB}", "-seed=1"]
        options += [f"-timeout={MOST_SECONDS}", f"-artifact_prefix={CRASHES}/{name}-", "-reduce_inputs=0"]
        process = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.run", f"--within={name}", str(report), *options, str(corpus)],
            cwd=HERE.parents[1], env={**os.environ, "TMPDIR": scratch}, capture_output=True, text=True,
            errors="replace",
        )  # fmt: skip
        executions, given = map(int, report.read_text().split()) if report.exists() else (0, 0)
        crashes = sorted(path.name for path in CRASHES.glob(f"{name}-*"))
        if process.returncode:
            print(process.stdout[-3000:] + process.stderr[-5000:], file=sys.stderr)
            crashes = crashes or [f"exit code {process.returncode}"]
        seen = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", process.stderr) or [("0", "0", "0")]
        coverage, features, kept = map(int, seen[-1])
        return Result(
            target=name, executions=executions, bytes=given, seconds=round(time.monotonic() - begun, 1),
            coverage=coverage, features=features, corpus=kept, crashes=crashes,
            python=sys.version.split()[0], atheris=importlib.metadata.version("atheris"),
        )  # fmt: skip


def main() -> int:
    if sys.argv[1:] and sys.argv[1].startswith("--within="):
        within(sys.argv[1].partition("=")[2], Path(sys.argv[2]))
    failed = False
    for name in sys.argv[1:] or sorted(path.name for path in CORPUS.iterdir()):
        result = fuzz(name)
        failed = failed or bool(result.crashes)
        print(msgspec.json.encode(result).decode(), flush=True)
        keep(result)
    with contextlib.suppress(OSError):
        CRASHES.rmdir()  # where it is empty
    return failed


def keep(result: Result) -> None:
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    results = {each.target: each for each in (msgspec.json.decode(line, type=Result) for line in lines)}
    results[result.target] = result
    RESULTS.write_bytes(b"".join(msgspec.json.encode(results[name]) + b"\n" for name in sorted(results)))


if __name__ == "__main__":
    sys.exit(main())
