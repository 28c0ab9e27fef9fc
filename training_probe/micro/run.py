"""One measurement of `training_probe micro`: its processes are started, watched through their files, and ended.

    DIR/manifest.json   what was asked, written first
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from backends import process
from backends.launch import WITHOUT_P2P, LaunchError, Running, Start
from backends.untrusted import UNDECODABLE, read_json
from loadgen import exit_codes, rundir
from loadgen.monitor.tail import Tail, whole_lines
from loadgen.rundir import Machine, this_machine
from training_probe.launch import torchrun
from training_probe.launch.runner import POLL_S, STOP_S, TEARDOWN_S, RunnerError
from training_probe.micro.points import (
    ABOUT_FILE,
    LOG_FILE,
    POINTS_FILE,
    TASK_FILE,
    About,
    Collective,
    Kind,
    Measured,
    MicroError,
    Outcome,
    Point,
    Task,
)  # fmt: skip
from training_probe.protocol import write_atomically

MANIFEST_FILE, RESULTS_FILE, RUNS = "manifest.json", "micro.jsonl", "runs"
SCHEMA = "training_probe.micro_manifest/1"
MODULE = "training_probe.worker.micro"
P2P_DISABLE = "NCCL_P2P_DISABLE"
LOG_LINES = 400
TELL_S = 5.0  # a line of progress at most so often
EXIT_FINISHED, EXIT_STOPPED = exit_codes.OK, exit_codes.STOPPED
_MEASURED = msgspec.json.Decoder(Measured)

Say = Callable[[str], None]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked. gpu_ids: NVML indices, a rank on each of collectives; p2p: what NVML says of it, a clause."""

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
    p2p: str = ""
    driver: str | None = None
    task: Task
    timeout_s: float
    argv: tuple[str, ...] = ()
    environment: dict[str, str] = {}  # what of it decides how processes run
    machine: Machine = msgspec.field(default_factory=this_machine)


class Command:
    """The command lines of the processes; another in tests."""

    def __call__(self, *, python: str, processes: int, port: int, directory: Path) -> tuple[str, ...]:
        if processes == 1:
            return (python, "-m", MODULE, str(directory))
        return torchrun.command(python=python, processes=processes, port=port, module=MODULE, directory=directory)


@dataclass(frozen=True)
class _Launch:
    """The points that one start of processes measures, and what their environment has besides ours."""

    name: str
    points: list[Point]
    env: Mapping[str, str]


def measure(manifest: Manifest, directory: Path, say: Say, command: Command | None = None) -> int:
    """Measures into a new directory; the exit code, 130 when it was stopped. Raises RunError, RunnerError."""
    if sys.platform != "linux":
        raise RunnerError("measurements are started on Linux only; use a Linux machine.")
    rundir.create(directory)
    say(f"{len(manifest.task.points)} points on {manifest.device_name}; results go to {directory}/")
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (directory / MANIFEST_FILE).write_bytes(text + b"\n")
    cancelled = threading.Event()
    (directory / RESULTS_FILE).touch()
    with torchrun.stopped_by_signals(cancelled), (directory / RESULTS_FILE).open("ab", buffering=0) as results:

        def keep(result: Measured) -> None:
            results.write(msgspec.json.encode(result) + b"\n")

        for launch in _launches(manifest.task.points, os.environ):
            if not _Run(manifest, launch, directory / RUNS / launch.name, say, keep).whole(
                cancelled, command or Command()
            ):
                say(f"stopped; what was measured is in {directory}")
                return EXIT_STOPPED
    return EXIT_FINISHED


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


class _Run:
    """One launch."""

    def __init__(
        self, manifest: Manifest, launch: _Launch, directory: Path, say: Say, keep: Callable[[Measured], None]
    ) -> None:
        self._manifest, self._launch, self._say, self._keep = manifest, launch, say, keep
        self._directory = directory.absolute()
        self._tail, self._done = Tail(self._directory / POINTS_FILE), 0
        self._told = time.monotonic()

    def whole(self, cancelled: threading.Event, command: Command) -> bool:
        """Measures all points; False when it was stopped. Raises RunnerError."""
        self._directory.mkdir(parents=True)
        task = msgspec.structs.replace(self._manifest.task, points=self._launch.points)
        write_atomically(self._directory / TASK_FILE, task)
        start = self._start(command)
        try:
            running = process.start(start, lambda _: None, cancelled)
        except LaunchError as error:
            if cancelled.is_set():
                return False
            raise RunnerError(f"no measuring process can be started: {error}") from None
        with contextlib.closing(self._tail):
            try:
                ended = self._watch(running, cancelled)
            finally:
                running.stop()
            self._take_in()
        if ended is None:
            return False
        self._rest(*ended, running)
        return True

    def _start(self, command: Command) -> Start:
        port = process.free_port()
        ranks = self._manifest.ranks
        return Start(
            run_id=self._launch.name,
            backend="training_probe",
            argv=command(python=sys.executable, processes=ranks, port=port, directory=self._directory),
            env={**torchrun.environment(os.environ, ranks), **self._launch.env},
            port=port,
            log=self._directory / LOG_FILE,
            gpu_ids=tuple(map(str, self._manifest.gpu_ids[:ranks])),
            stop_s=STOP_S,
        )

    def _watch(self, running: Running, cancelled: threading.Event) -> tuple[Outcome, str] | None:
        """How the points that are not measured then ended; None when it was stopped."""
        moved = time.monotonic()
        while running.poll() is None:
            if self._take_in():
                moved = time.monotonic()
            waited_s = time.monotonic() - moved
            if self._done == len(self._launch.points) and waited_s > TEARDOWN_S:
                break
            if waited_s > self._manifest.timeout_s:
                return "timeout", f"no result in {self._manifest.timeout_s:g} s"
            if cancelled.wait(POLL_S):
                return None
        return "crashed", ""

    def _take_in(self) -> bool:
        """What was appended since; whether there was any."""
        before = self._done
        for line in self._tail.lines():
            self._keep(_MEASURED.decode(line))
            self._done += 1
        now, all_done = time.monotonic(), self._done == len(self._launch.points)
        if self._done > before and (all_done or now - self._told > TELL_S):
            self._say(f"{self._launch.name}: {self._done} of {len(self._launch.points)} points")
            self._told = now
        return self._done > before

    def _rest(self, outcome: Outcome, reason: str, running: Running) -> None:
        """The points that are missing: the first of them is where it ended."""
        rest = self._launch.points[self._done :]
        if not rest:
            return
        why = reason or _last_words(running)
        log = f"{RUNS}/{self._launch.name}/{LOG_FILE}"
        self._say(f"{self._launch.name}: ended at point {self._done + 1}: {why} ({log})")
        for number, point in enumerate(rest):
            said = why if number == 0 else f"not reached: the point before it ended so: {why}"
            self._keep(Measured(point=point, outcome=outcome, reason=said))


def _last_words(running: Running) -> str:
    """Why the processes ended by themselves, as far as their log tells."""
    lines = running.log_tail(LOG_LINES).splitlines()
    for sign in ("cannot go on: ", "Error: "):
        for line in reversed(lines):
            if sign in line and "ChildFailedError" not in line:
                return " ".join(line.removeprefix("cannot go on: ").split())[:300]
    exit = running.poll()
    return f"the process ended with exit code {exit.code}" if exit else "the process ended"


# Reading.


def read_manifest(directory: Path) -> Manifest:
    """Raises MicroError."""
    path = directory / MANIFEST_FILE
    return read_json(path, Manifest, MicroError, "is not a manifest of this version")


def read_results(directory: Path) -> list[Measured]:
    """In the order of measuring; a last line that was cut by a kill is left out. Raises MicroError."""
    path = directory / RESULTS_FILE
    try:
        lines = whole_lines(path)
    except OSError as error:
        raise MicroError(f"cannot read {path}: {error.strerror or error}.") from None
    try:
        return [_MEASURED.decode(line) for line in lines]
    except UNDECODABLE as error:
        raise MicroError(f"{path} holds a line that is no result of this version: {error}.") from None


def read_about(directory: Path) -> About | None:
    """What the processes said of where they ran; None when none came that far."""
    for path in sorted((directory / RUNS).glob(f"*/{ABOUT_FILE}")):
        with contextlib.suppress(OSError, *UNDECODABLE):
            return msgspec.json.decode(path.read_bytes(), type=About)
    return None
