"""Runs the coverage-guided fuzzer (atheris, which is libFuzzer) over every target for some seconds of CPU:
`make fuzz SECONDS=60`, or `python -m tests.fuzz.run SECONDS [TARGET ...]` for some of them. Parts add up: each goes on
with the inputs that earlier parts found (build/fuzz/, which git ignores) under another seed, and its counts are added
to the target's line in results.jsonl here. What crashes is kept in crashes/ here, and the exit code is then 1.

Each part runs in a process of its own, as many at a time as there are cores; a target named twice gets two parts.
JOBS=1 in the environment runs one at a time. Executions, bytes and CPU seconds are counted in it; `coverage` and
`features` are libFuzzer's own count of edges, and of edges with how often they were taken.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import msgspec

HERE = Path(__file__).parent
CORPUS, CRASHES, RESULTS = HERE / "corpus", HERE / "crashes", HERE / "results.jsonl"
FOUND = HERE.parents[1] / "build" / "fuzz"
MOST_INPUT_BYTES = 4096
MOST_MEMORY_MB = 2048
MOST_SECONDS = 60  # for one input, on a machine that may be busy
PACKAGES = ["backends", "loadgen", "servers", "prometheus_client"]


class Result(msgspec.Struct, kw_only=True):
    """What one target was given in all parts. corpus: inputs that each reach something of their own; crashes: the files
    that it failed on."""

    target: str
    parts: int = 0
    executions: int = 0
    bytes: int = 0
    cpu_s: float = 0.0
    coverage: int = 0
    features: int = 0
    corpus: int = 0
    crashes: list[str] = []
    python: str = ""
    atheris: str = ""


def within(name: str, seconds: float, report: Path) -> None:
    """Fuzzes in the process of a target, and writes executions, bytes and CPU seconds to `report` at its end."""
    import atheris

    with atheris.instrument_imports(include=PACKAGES):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    executions = given = 0
    begun_s = time.process_time()

    def one(data: bytes) -> None:
        nonlocal executions, given
        executions += 1
        given += len(data)
        try:
            target(data)
        finally:
            used_s = time.process_time() - begun_s
            if used_s >= seconds or sys.exc_info()[0] is not None:
                report.write_text(f"{executions} {given} {used_s}")
        if used_s >= seconds:
            os._exit(0)

    atheris.Setup(sys.argv[:1] + sys.argv[4:], one)
    atheris.Fuzz()


def fuzz(name: str, seconds: float, seed: int) -> Result:
    """Runs one part and returns its own counts."""
    import importlib.metadata

    with tempfile.TemporaryDirectory(prefix="llm-dissect-fuzz-") as scratch:
        found = FOUND / name
        found.mkdir(parents=True, exist_ok=True)
        report = Path(scratch, "report")
        CRASHES.mkdir(exist_ok=True)
        options = [f"-max_len={MOST_INPUT_BYTES}", "-len_control=0", f"-rss_limit_mb={MOST_MEMORY_MB}"]
        options += [
            f"-timeout={MOST_SECONDS}",
            f"-report_slow_units={MOST_SECONDS}",
            f"-artifact_prefix={CRASHES}/{name}-",
            "-reduce_inputs=0",
        ]
        options += [f"-seed={seed}", str(found), str(CORPUS / name)]
        process = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.run", f"--within={name}", str(seconds), str(report), *options],
            cwd=HERE.parents[1], env={**os.environ, "TMPDIR": scratch}, capture_output=True, text=True,
            errors="replace",
        )  # fmt: skip
        executions, given, used_s = report.read_text().split() if report.exists() else (0, 0, 0)
        crashes = sorted(path.name for path in CRASHES.glob(f"{name}-*"))
        if process.returncode:
            print(process.stdout[-3000:] + process.stderr[-5000:], file=sys.stderr)
            crashes = crashes or [f"exit code {process.returncode}"]
        seen = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", process.stderr) or [("0", "0", "0")]
        coverage, features, kept = map(int, seen[-1])
        return Result(
            target=name, parts=1, executions=int(executions), bytes=int(given), cpu_s=float(used_s),
            coverage=coverage, features=features, corpus=kept, crashes=crashes, python=sys.version.split()[0],
            atheris=importlib.metadata.version("atheris"),
        )  # fmt: skip


def added(before: Result, part: Result) -> Result:
    """Returns the counts of both; what the fuzzer reached is the part's, which went on with what was found before."""
    return msgspec.structs.replace(
        part, parts=before.parts + part.parts, executions=before.executions + part.executions,
        bytes=before.bytes + part.bytes, cpu_s=round(before.cpu_s + part.cpu_s, 1),
    )  # fmt: skip


def main() -> int:
    if sys.argv[1].startswith("--within="):
        within(sys.argv[1].partition("=")[2], float(sys.argv[2]), Path(sys.argv[3]))
    seconds, failed = float(sys.argv[1]), False
    known = sorted(path.name for path in CORPUS.iterdir())
    names = sys.argv[2:] or known
    if unknown := sorted(set(names) - set(known)):
        sys.exit(f"No target is called {', '.join(map(repr, unknown))}: name some of {', '.join(known)}.")
    seeds = {name: result.parts for name, result in results().items()}
    parts = []
    with ThreadPoolExecutor(int(os.environ.get("JOBS") or os.cpu_count() or 1)) as pool:
        for name in names:
            seeds[name] = seeds.get(name, 0) + 1
            parts.append(pool.submit(fuzz, name, seconds, seeds[name]))
        for part in as_completed(parts):
            result = part.result()
            failed = failed or bool(result.crashes)
            print(msgspec.json.encode(result).decode(), flush=True)
            kept = results()
            kept[result.target] = added(kept.get(result.target, Result(target=result.target)), result)
            RESULTS.write_bytes(b"".join(msgspec.json.encode(kept[name]) + b"\n" for name in sorted(kept)))
    with contextlib.suppress(OSError):
        CRASHES.rmdir()  # where it is empty
    return failed


def results() -> dict[str, Result]:
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    return {each.target: each for each in (msgspec.json.decode(line, type=Result) for line in lines)}


if __name__ == "__main__":
    sys.exit(main())
