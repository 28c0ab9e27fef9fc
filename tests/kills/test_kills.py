"""A hundred kills (`kill -9`) at random times: of runs, of runs with several client processes, of sweeps of loads, of
training sweeps.

After each, nothing that was recorded is lost or there twice, what is left says rightly how it ended, and no process
lives on. The times are drawn from KILLS_SEED, which a failure names. Servers in Docker are killed in tests/docker.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loadgen.report import build
from loadgen.rundir import RunError, records
from loadgen.rundir.records import RecordsError
from training_probe import results
from training_probe.sweep import cell as sweep_cell

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="a process' own and its children are found in /proc"),
]

SEED = int(os.environ.get("KILLS_SEED", "20"))
KILLS = {"one client": 35, "two clients": 35, "sessions": 20, "sweep": 30, "sweep of loads": 8}
PLANNED, TURNS = 60, 3
SINGLE = ["--requests", str(PLANNED), "--arrival", "constant:60"]
SESSIONS = ["--backend", "openai", "--sessions", str(PLANNED // TURNS), "--turns", str(TURNS), "--think-time",
            "uniform:0:0.2", "--arrival", "constant:30"]  # fmt: skip
MARK = "LLM_DISSECT_KILLED_IN_A_TEST"  # in the environment of all that a killed command started
GONE_S = 30.0  # a loaded machine is slow to end processes
ROOT = str(Path(sweep_cell.__file__).resolve().parents[2])
SWEEP = """
import sys
from pathlib import Path
from tests.training_probe.sweep.test_run import AROUND, cell, settings
from training_probe.sweep.run import resume, sweep
directory = Path(sys.argv[1])
if (directory / "manifest.json").exists():
    sys.exit(resume(directory, print, AROUND))
cells = [cell(name, seq_len=length) for length in (10, 20, 30) for name in ("ok", "oom", "rising")]
sys.exit(sweep(cells, settings(runs=1), directory, print, AROUND))
"""
CELLS = 9


def start(mark: str, *argv: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": ROOT, MARK: mark}
    return subprocess.Popen(
        [sys.executable, *argv], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def marked(mark: str) -> dict[int, str]:
    """The processes that a command left, by their ids: their command lines."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
        except OSError:  # it is over
            pass
    return found


def killed(after_s: float, argv: list[str], begun: Path | None = None) -> tuple[str, int | None]:
    """Kills the command so many seconds after its start, or after there is a record in the directory `begun`; when,
    and its exit code where it had ended before."""
    mark = uuid.uuid4().hex
    process = start(mark, *argv)
    while begun is not None and process.poll() is None and not lines(begun)[0]:
        time.sleep(0.01)
    try:
        code: int | None = process.wait(after_s)
    except subprocess.TimeoutExpired:
        code = None
        process.kill()
        process.wait()
    until = time.monotonic() + GONE_S
    while left := marked(mark):
        assert time.monotonic() < until, f"KILLS_SEED={SEED}: {left} live after a kill at {after_s:.3f} s of {argv}"
        time.sleep(0.05)
    where = "its start" if begun is None else "its first record"
    return f"KILLS_SEED={SEED}, killed {after_s:.3f} s after {where}", code


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "servers", "--port", "0", "--exit-with-stdin", "--ttft-ms", "20", "--itl-ms", "5"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    yield str(json.loads(process.stdout.readline())["url"])
    process.communicate(timeout=60)


def run_of(server: str, workers: int, out: Path, load: list[str] = SINGLE) -> list[str]:
    return [
        "-c", "from loadgen.cli import main; main()", "run", "--url", server, "--no-calibrate", "--warmup", "0",
        "--no-server-metrics", "--output-tokens", "4", "--workers", str(workers), "--out", str(out), *load,
    ]  # fmt: skip


def lines(directory: Path) -> tuple[Counter[int], list[str], int]:
    """Of the files of a run as they lie there, read without loadgen: how often each request is recorded, the state in
    each client's last line, and how many files there are."""
    ids: Counter[int] = Counter()
    states: list[str] = []
    joined = directory / "requests.jsonl"
    paths = [joined] if joined.exists() else sorted(directory.glob("requests.*.jsonl"))
    for path in paths:
        for line in path.read_bytes().split(b"\n")[1:-1]:  # the header before, what a kill cut after
            value = json.loads(line)
            if "client" in value:
                states.append(value["client"]["state"])
            else:
                ids[value["id"]] += 1
    return ids, states, len(paths)


def check_run(directory: Path, workers: int, code: int | None, when: str) -> str:
    """What a killed run left; how it ended."""
    ids, states, _ = lines(directory) if directory.exists() else (Counter[int](), [], 0)
    assert set(ids.values()) <= {1}, f"{when}: recorded twice"
    if code is not None:
        assert code in (0, 4), when  # 4: this machine was busy
    try:
        report, table = build.from_directory(directory)
    except (RunError, RecordsError):  # it was killed before its load began
        assert not ids and code is None, when
        return "not begun"
    assert set(table.id.tolist()) == set(ids), f"{when}: the report lost a request"
    codes = {finding.code for finding in report.verdict.findings}
    whole = states == ["complete"] * workers and len(ids) == PLANNED
    assert "INTERRUPTED" not in codes and ("KILLED" in codes) != whole, f"{when}: {codes}, {states}"
    assert whole or not report.verdict.valid, when
    snapshot = json.loads((directory / "snapshot.json").read_bytes())
    assert snapshot["state"] == ("finished" if whole else "stopped"), when
    if (directory / "report.json").exists():
        assert json.loads((directory / "report.json").read_bytes())["requests"]["ok"] == len(ids), when
    return "whole" if whole else "killed"


def check_turns(directory: Path, when: str) -> None:
    """Every turn that ended is there: none is missing before one that is."""
    ids = set(lines(directory)[0]) if directory.exists() else set()
    assert all(number % TURNS == 0 or number - 1 in ids for number in ids), f"{when}: {sorted(ids)}"


@pytest.mark.parametrize(
    ("kind", "workers", "load"),
    [("one client", 1, SINGLE), ("two clients", 2, SINGLE), ("sessions", 1, SESSIONS)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kills_of_a_run(kind: str, workers: int, load: list[str], server: str, tmp_path: Path) -> None:
    """The first run is not killed: it shows how long a run takes here, so that every part of one is met. Two of three
    are killed in the load or soon after it."""
    rng = random.Random(SEED + list(KILLS).index(kind))
    began = time.monotonic()
    assert start("none", *run_of(server, workers, tmp_path / "whole", load)).wait(120) in (0, 4)
    within_s = time.monotonic() - began

    def one(number: int, share: float) -> str:
        directory = tmp_path / str(number)
        early = number % 3 == 0
        after_s = share * (within_s if early else 1.5)
        when, code = killed(after_s, run_of(server, workers, directory, load), None if early else directory)
        if load is SESSIONS:
            check_turns(directory, when)
        return check_run(directory, workers, code, when)

    count = KILLS[kind]
    with ThreadPoolExecutor(2) as pool:
        ends = Counter(pool.map(one, range(count), [rng.random() for _ in range(count)]))
    print(f"KILLS_SEED={SEED}, {kind}, within {within_s:.1f} s: {dict(ends)}")


def test_nothing_that_was_on_disk_before_a_kill_is_lost(server: str, tmp_path: Path) -> None:
    """What others have seen in the files of a run stays there."""
    for workers in (1, 2):
        directory, mark = tmp_path / str(workers), uuid.uuid4().hex
        process = start(mark, *run_of(server, workers, directory))
        until = time.monotonic() + 120
        while sum((before := lines(directory)[0]).values()) < PLANNED // 4:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.wait()
        while marked(mark):
            assert time.monotonic() < until
            time.sleep(0.02)
        assert set(before) <= set(records.read(directory)[0].id.tolist())


def test_kills_of_a_sweep(tmp_path: Path) -> None:
    """Each sweep is killed and resumed until it is done, and then the next one begins."""
    rng = random.Random(SEED)
    began = time.monotonic()
    assert start("none", "-c", SWEEP, str(tmp_path / "whole")).wait(120) == 0
    within_s = time.monotonic() - began
    sweeps, resumed, directory, before = 0, 0, tmp_path / "0", b""
    for _ in range(KILLS["sweep"]):
        when, code = killed(rng.uniform(0, within_s), ["-c", SWEEP, str(directory)])
        path = directory / "results.jsonl"
        after = path.read_bytes() if path.exists() else b""
        kept = before[: before.rfind(b"\n") + 1]  # a line that a kill cut in two is mended
        assert after.startswith(kept), f"{when}: a result was lost"
        names = [result.cell for result in results.read(directory)] if after else []
        assert len(set(names)) == len(names) and (code is None or len(names) == CELLS), when
        resumed += bool(kept)
        before = after
        if code is not None:
            assert code == 0, when
            state = json.loads((directory / "snapshot.json").read_bytes())["state"]
            assert state == "finished", when
            sweeps, before = sweeps + 1, b""
            directory = tmp_path / str(sweeps)
    print(f"KILLS_SEED={SEED}, within {within_s:.1f} s: {sweeps} sweeps ended, {resumed} times resumed")


POINTS = {f"rate-{rate}-run{number}" for rate in (40, 80) for number in (1, 2)}


def sweep_of_loads(server: str, out: Path) -> list[str]:
    program = ["-c", "from loadgen.cli import main; main()", "sweep"]
    if (out / "sweep.json").exists():
        return [*program, "--resume", str(out), "--url", server]
    return [
        *program, "--url", server, "--no-calibrate", "--warmup", "1", "--output-tokens", "4", "--rates", "40", "80",
        "--repeat", "2", "--requests", "20", "--seed", "3", "--out", str(out),
    ]  # fmt: skip


def whole_runs(directory: Path) -> dict[str, bytes]:
    """The records of the runs that have come to their end, as the files have them."""
    ended = {}
    for name in POINTS:
        if (directory / name).exists():
            ids, states, _ = lines(directory / name)
            if states == ["complete"] and len(ids) == 20:
                ended[name] = (directory / name / "requests.jsonl").read_bytes()
    return ended


def test_kills_of_a_sweep_of_loads(server: str, tmp_path: Path) -> None:
    """Each sweep is killed and resumed until it is done, and then the next one begins. A run that has come to its end
    is never done again, none is missing, and what others held is kept aside."""
    rng = random.Random(SEED + len(KILLS))
    began = time.monotonic()
    assert start("none", *sweep_of_loads(server, tmp_path / "whole")).wait(120) in (0, 4)
    within_s = time.monotonic() - began
    sweeps, resumed, directory = 0, 0, tmp_path / "0"
    before: dict[str, bytes] = {}
    for _ in range(KILLS["sweep of loads"]):
        when, code = killed(rng.uniform(0, within_s), sweep_of_loads(server, directory))
        after = whole_runs(directory)
        assert before.items() <= after.items(), f"{when}: a run was done again"
        names = {path.name for path in directory.glob("rate-*")}
        assert names <= POINTS, when
        resumed += bool(before)
        before = after
        if code is not None:
            assert code in (0, 4) and set(after) == POINTS, when
            swept = json.loads((directory / "sweep.json").read_bytes())
            assert swept["complete"] and {run["directory"] for run in swept["runs"]} == POINTS, when
            assert len({run["run_id"] for run in swept["runs"]}) == len(POINTS), when
            assert [len(point["runs"]) for point in swept["points"]] == [2, 2], when
            assert all((directory / name / "report.html").exists() for name in POINTS), when
            sweeps, before = sweeps + 1, {}
            directory = tmp_path / str(sweeps)
    print(f"KILLS_SEED={SEED}, within {within_s:.1f} s: {sweeps} sweeps ended, {resumed} times resumed")
