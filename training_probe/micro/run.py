"""One measurement of `training_probe micro`: its processes are started, watched through their files, and ended.

    DIR/manifest.json   what is measured, written first
    DIR/micro.jsonl     one line a point (Measured), as each ends
    DIR/runs/NAME/      task.json, about.json, points.jsonl and log.txt of one launch

Collectives with P2P on and off are two launches, because NCCL asks its environment once. A point that the processes
did not come to, because they crashed or hung, is a line too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from backends import foreign_files
from backends.launch import WITHOUT_P2P, LaunchError
from backends.untrusted import UNDECODABLE, read_json, read_json_lines
from loadgen import rundir
from loadgen.rundir import Machine, this_machine
from training_probe.launch import runner
from training_probe.launch.outcome import Evidence, judge
from training_probe.launch.runner import ALONE, HERE, Job, Limits, NodeRank, Place, RunnerError
from training_probe.points import (
    ABOUT_FILE,
    LOG_FILE,
    POINTS_FILE,
    TASK_FILE,
    About,
    Collective,
    Kind,
    Measured,
    MicroError,
    Point,
    PointOutcome,
    Task,
)  # fmt: skip
from training_probe.protocol import write_atomically

MANIFEST_FILE, RESULTS_FILE, RUNS = "manifest.json", "micro.jsonl", "runs"
SCHEMA = "training_probe.micro_manifest/1"
MODULE = "training_probe.worker.micro"
P2P_DISABLE = "NCCL_P2P_DISABLE"
PROGRESS_S = 5.0  # a line of progress at most so often
_MEASURED = msgspec.json.Decoder(Measured)

Say = Callable[[str], None]


class MicroManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, and on what. gpu_ids: NVML indices, a rank on each of collectives; p2p: NVML's account of it, a
    clause."""

    schema: str = SCHEMA
    run_id: str
    started_unix_s: float
    version: str
    kind: Kind
    preset: str | None = None
    device: str
    device_name: str
    gpu_ids: tuple[int, ...] = ()
    ranks: int = 1
    nodes: list[str] = []  # hosts of a cluster, where it was measured on one
    p2p: str = ""
    driver: str | None = None
    task: Task
    timeout_s: float
    argv: tuple[str, ...] = ()
    environment: dict[str, str] = {}  # what of it decides how processes run
    machine: Machine = msgspec.field(default_factory=this_machine)


class MicroCommand:
    """The command lines of the processes; another in tests."""

    def __call__(
        self, *, python: str, processes: int, port: int, directory: Path, node: NodeRank = ALONE
    ) -> tuple[str, ...]:
        if processes == node.nodes == 1:
            return (python, "-m", MODULE, str(directory))
        return runner.torchrun(
            python=python, processes=processes, port=port, module=MODULE, directory=directory, node=node
        )


@dataclass(frozen=True)
class _Launch:
    """The points that one start of processes measures, and what their environment has besides ours."""

    name: str
    points: list[Point]
    env: Mapping[str, str]


def measure(
    manifest: MicroManifest, directory: Path, say: Say, command: MicroCommand | None = None, place: Place = HERE
) -> int:
    """Measures into a new directory; the exit code. Raises RunError, RunnerError."""
    if sys.platform != "linux":
        raise RunnerError("measurements are started on Linux only; use a Linux machine.")
    with rundir.measuring(directory), (directory / RESULTS_FILE).open("ab", buffering=0) as results:
        say(f"{len(manifest.task.points)} points on {manifest.device_name}; results go to {directory}/")
        write_atomically(directory / MANIFEST_FILE, manifest, indent=2)

        def keep(result: Measured) -> None:
            results.write(msgspec.json.encode(result) + b"\n")

        def measure_all(cancelled: threading.Event) -> None:
            for launch in _launches(manifest.task.points, os.environ):
                points = _PointFile(launch, directory / RUNS / launch.name, say, keep)
                _run(manifest, points, command or MicroCommand(), place, cancelled)

        return runner.until_stopped(directory, say, measure_all)


def _launches(points: Sequence[Point], ours: Mapping[str, str]) -> Iterator[_Launch]:
    ways: dict[bool | None, list[Point]] = {}
    for point in points:
        ways.setdefault(point.p2p if isinstance(point, Collective) else None, []).append(point)
    for p2p, part in ways.items():
        if p2p is None:
            yield _Launch("all", part, {})
        elif p2p:
            yield _Launch("p2p-on", part, {P2P_DISABLE: "0"} if P2P_DISABLE in ours else {})
        else:
            yield _Launch("p2p-off", part, WITHOUT_P2P)


def _run(
    manifest: MicroManifest, points: _PointFile, command: MicroCommand, place: Place, cancelled: threading.Event
) -> None:
    """One launch: measures all its points. Raises Stopped, RunnerError."""
    directory, launch, ranks = points.directory, points.launch, manifest.ranks
    directory.mkdir(parents=True)
    write_atomically(directory / TASK_FILE, msgspec.structs.replace(manifest.task, points=launch.points))
    job = Job(directory=directory, ranks=ranks, command=command, gpu_ids=manifest.gpu_ids[:ranks], env=launch.env)
    try:
        ended = runner.run_processes(job, points, Limits(timeout_s=manifest.timeout_s), cancelled, place)
    except LaunchError as error:
        raise RunnerError(f"no measuring process can be started: {error}") from None
    if not points.is_complete():
        points.add_missing(*judge(Evidence(ended=ended)))


class _PointFile:
    """What the processes of a launch write."""

    line_of = "result"

    def __init__(self, launch: _Launch, directory: Path, say: Say, keep: Callable[[Measured], None]) -> None:
        self.launch, self.directory = launch, directory.absolute()
        self.path = self.directory / POINTS_FILE
        self._say, self._keep, self._done = say, keep, 0
        self._shown_at = time.monotonic()

    def take_in(self, lines: Iterable[bytes]) -> bool:
        before = self._done
        for line in lines:
            self._keep(_MEASURED.decode(line))
            self._done += 1
        now = time.monotonic()
        if self._done > before and (self.is_complete() or now - self._shown_at > PROGRESS_S):
            self._say(f"{self.launch.name}: {self._done} of {len(self.launch.points)} points")
            self._shown_at = now
        return self._done > before

    def is_complete(self) -> bool:
        return self._done == len(self.launch.points)

    def add_missing(self, outcome: PointOutcome, why: str) -> None:
        """The points that were not measured: the first of them is where the processes ended."""
        log = f"{RUNS}/{self.launch.name}/{LOG_FILE}"
        self._say(f"{self.launch.name}: ended at point {self._done + 1}: {why} ({log})")
        for number, point in enumerate(self.launch.points[self._done :]):
            reason = why if number == 0 else f"not reached: the point before it ended so: {why}"
            self._keep(Measured(point=point, outcome=outcome, reason=reason))


# Reading.


def read_manifest(directory: Path) -> MicroManifest:
    """Raises MicroError."""
    path = directory / MANIFEST_FILE
    return read_json(path, MicroManifest, MicroError, "is not a manifest of this version", directory=directory)


def read_results(directory: Path) -> list[Measured]:
    """In the order of measuring; a last line that was cut by a kill is left out. Raises MicroError."""
    path, wrong = directory / RESULTS_FILE, "is no result of this version"
    return read_json_lines(path, Measured, MicroError, wrong, doubt=_doubt)


def _doubt(result: Measured) -> str:
    return "it is ok and has no median_s" if result.outcome == "ok" and not result.median_s else ""


def read_about(directory: Path) -> About | None:
    """What the processes wrote of where they ran; None when none came that far."""
    for path in sorted((directory / RUNS).glob(f"*/{ABOUT_FILE}")):
        with contextlib.suppress(OSError, *UNDECODABLE):
            return msgspec.json.decode(foreign_files.read_bytes(path, directory), type=About)
    return None
