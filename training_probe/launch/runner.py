"""Processes with torch, of a cell or of a micro-benchmark: started, watched through the files that they write, ended.

Whatever they do, out of memory, a crash, a hang, nothing of it reaches the program that started them, and none of them
outlives it: they hang on the supervisor of backends/process.py. `run_trial` is one run of one cell; `run_processes`,
which blocks until all processes are gone, is what it shares with micro-benchmarks. Also here: the lines that start
torchrun, the environment of the processes, and what processes that were killed leave behind for the next ones.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

import loadgen.child_env
from backends import exit_codes, process
from backends.exit_codes import FailedError, Stopped
from backends.gpus import GpuProbe
from backends.launch import LaunchError, Running, ServerSpec
from backends.untrusted import UNDECODABLE
from loadgen.cluster.link import NodeLost
from loadgen.event_loop import StopSignals
from loadgen.monitor.tail import Tail
from loadgen.rundir import usable_cpus
from training_probe.launch.outcome import Ended, Evidence, ProcessOutcome, judge, oom_kills
from training_probe.protocol import LOG_FILE, STEPS_FILE, TRIAL_FILE, RankReport, Step, Trial, write_atomically
from training_probe.results import RunResult, run_result

POLL_S = 0.1
STOP_S = 5.0  # a rank that hangs in NCCL heeds no SIGTERM
TEARDOWN_S = 15.0  # from the last result to the end of the processes: whatever hangs then has been measured already
LOG_LINES = 4000
PROCESSES_A_CORE = 4  # on the CPU: two share one well enough for a tiny model; hundreds end a machine
PORTABLE_PYTHON = "python"  # in scripts: of the environment that they are started from
THREADS, ONE_QUEUE, INTERPRETED = "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "TRITON_INTERPRET"
LOCK = "lock"  # torch.utils.cpp_extension: <root>/<extension>/lock, by default <root>/<Python, CUDA>/<extension>/lock
GPU_MEMORY_WAIT_S, GPU_MEMORY_POLL_S = 60.0, 0.2
GPU_MEMORY_SLACK_BYTES = 300 << 20
_STEP = msgspec.json.Decoder(Step)
_REPORT = msgspec.json.Decoder(RankReport)
_TRIAL = msgspec.json.Decoder(Trial)


class RunnerError(FailedError):
    """No process can be started here. One sentence."""


@dataclass(frozen=True, kw_only=True)
class NodeRank:
    """Which of the nodes of a run a machine is, and where the first of them answers."""

    rank: int | str = 0  # a shell's variable in a script
    nodes: int = 1
    master: str = "127.0.0.1"


ALONE = NodeRank()


class Command(Protocol):
    """The command line that starts the processes of a run on one node: `processes` of them."""

    def __call__(
        self, *, python: str, processes: int, port: int, directory: Path, node: NodeRank = ALONE
    ) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class Job:
    """Processes to be started, wherever that is. directory: here; what it holds is all that they read. ranks: on all
    nodes together. gpu_ids: NVML indices, one a rank; none: no process sees a GPU. env: besides `environment`."""

    directory: Path
    ranks: int
    command: Command
    python: str = sys.executable
    gpu_ids: Sequence[int] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class Place(Protocol):
    """Where processes run. What they write appears in the job's directory, wherever that is."""

    def start(self, job: Job, cancelled: threading.Event) -> Running:
        """Raises LaunchError; this and `poll` of what is started raise NodeLost."""

    def oom_kills(self) -> int | None:
        """How many processes the kernels there have killed for want of memory; None: not known."""


# Any processes.


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long processes may go without a new line of output, their start included, and how long all of it may take;
    None: for ever."""

    timeout_s: float
    limit_s: float | None = None


class ProcessOutput(Protocol):
    """What processes write while they run. line_of: what a line of `path` is about, for sentences."""

    path: Path
    line_of: str

    def take_in(self, lines: Iterable[bytes]) -> bool:
        """Keeps the new lines; whether there was any that is one of its own."""

    def is_complete(self) -> bool:
        """Whether all has been written that ever will be: the processes' end is then not waited for any longer than
        `TEARDOWN_S`."""


class LocalMachine:
    """This machine."""

    def start(self, job: Job, cancelled: threading.Event) -> Running:
        return process.start(start_here(job, process.free_port()), lambda _: None, cancelled)

    def oom_kills(self) -> int | None:
        return oom_kills()


HERE = LocalMachine()


def until_stopped(directory: Path, say: Callable[[str], None], work: Callable[[threading.Event], None]) -> int:
    """Does the work of a measurement, which a signal ends by the event that it is given; the exit code."""
    cancelled, stop = threading.Event(), StopSignals()
    try:
        with stop:
            stop.on_signal(cancelled.set)
            work(cancelled)
    except Stopped:
        say(f"stopped; what was measured is in {directory}")
        return stop.exit_code or exit_codes.STOPPED
    return exit_codes.OK


def start_here(job: Job, port: int) -> ServerSpec:
    """The start of a job on this machine alone."""
    directory = job.directory.absolute()
    return ServerSpec(
        run_id=directory.name,
        backend="training_probe",
        argv=job.command(python=job.python, processes=job.ranks, port=port, directory=directory),
        env={**environment(os.environ, job.ranks), **job.env},
        port=port,
        log=directory / LOG_FILE,
        gpu_ids=tuple(map(str, job.gpu_ids)),
        stop_s=STOP_S,
    )


def run_processes(
    job: Job, output: ProcessOutput, limits: Limits, cancelled: threading.Event, place: Place = HERE
) -> Ended:
    """Starts processes, watches their output and ends them. Raises Stopped, LaunchError."""
    kills = place.oom_kills()
    try:
        running = place.start(job, cancelled)
    except NodeLost as lost:
        return Ended(lost=str(lost))
    except LaunchError:
        if cancelled.is_set():
            raise Stopped from None
        raise
    given_up = lost_node = None
    with contextlib.closing(Tail(output.path)) as tail:
        try:
            given_up = _watch(running, output, tail, limits, cancelled)
        except NodeLost as lost:
            lost_node = str(lost)
        finally:
            running.stop()
            output.take_in(tail.lines())
    kills_after, exit = place.oom_kills(), running.poll()
    return Ended(
        exit_code=0 if exit is None else exit.code,
        given_up=given_up,
        lost=lost_node,
        log=running.log_tail(LOG_LINES),
        oom_killed=kills is not None and kills_after is not None and kills_after > kills,
    )


def _watch(
    running: Running, output: ProcessOutput, tail: Tail, limits: Limits, cancelled: threading.Event
) -> str | None:
    """Until the processes are over or need no longer run; why they are given up, a clause. Raises Stopped and
    NodeLost."""
    began = moved = time.monotonic()
    completed: float | None = None
    while running.poll() is None:
        now = time.monotonic()
        if output.take_in(tail.lines()):
            moved = now
        if completed is None and output.is_complete():
            completed = now
        if completed is not None and now - completed > TEARDOWN_S:
            return None
        given_up = _why_to_give_up(output, limits, now - moved, now - began) if completed is None else None
        if given_up is not None:
            return given_up
        if cancelled.wait(POLL_S):
            raise Stopped
    return None


def _why_to_give_up(output: ProcessOutput, limits: Limits, quiet_s: float, age_s: float) -> str | None:
    if quiet_s > limits.timeout_s:
        return f"no {output.line_of} in {limits.timeout_s:g} s"
    if limits.limit_s is not None and age_s > limits.limit_s:
        return f"beyond its limit of {limits.limit_s:.0f} s"
    return None


def torchrun(
    *, python: str, processes: int, port: int, module: str, directory: Path, node: NodeRank = ALONE
) -> tuple[str, ...]:
    """The command line of a node's `processes` ranks of `python -m MODULE DIRECTORY`."""
    several = ("--nnodes", str(node.nodes), "--node-rank", str(node.rank)) if node.nodes > 1 else ()
    return (
        python, "-m", "torch.distributed.run", *several, "--nproc-per-node", str(processes),
        "--master-addr", node.master, "--master-port", str(port), "-m", module, str(directory),
    )  # fmt: skip


def environment(ours: Mapping[str, str], ranks: int) -> dict[str, str]:
    """What to add to the environment `ours` of the parent for each of `ranks` processes on this machine: our own
    code's path, and, where the user has not set it, its share of the cores. torchrun would make that one core of all:
    an optimizer that is offloaded to the CPU would then compute on one."""
    threads = {} if ours.get(THREADS) else {THREADS: str(max(1, cores() // ranks))}
    return loadgen.child_env.environment(ours) | threads


def cores(root: Path = Path("/")) -> int:
    """How many this process may keep busy: physical ones, of which hyperthreads are no more, and at most what its
    cgroups allow, as with `docker run --cpus`."""
    topology = "sys/devices/system/cpu/cpu{}/topology/core_cpus_list"
    physical = len({_text(root / topology.format(cpu)) or cpu for cpu in usable_cpus()})
    own = _text(root / "proc/self/cgroup").rpartition("0::/")[2].partition("\n")[0]
    place = root / "sys/fs/cgroup"
    for at in (place, *(place / path for path in (Path(own), *Path(own).parents))):
        quota, _, period = _text(at / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            physical = min(physical, max(1, int(quota) // int(period)))
    return physical


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# One run of one cell.


def worker_command(
    *, python: str, processes: int, port: int, directory: Path, node: NodeRank = ALONE
) -> tuple[str, ...]:
    """The real one."""
    return torchrun(
        python=python, processes=processes, port=port, module="training_probe.worker", directory=directory, node=node
    )


@dataclass(frozen=True, kw_only=True)
class Launching:
    """How the processes of a run are started. gpu_ids: NVML indices, of which a cell takes as many as it needs from the
    front; none: no process sees a GPU."""

    python: str = sys.executable
    gpu_ids: Sequence[int] = ()
    command: Command = worker_command
    place: Place = HERE


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """How a run ended, and what of it was measured, also when it failed."""

    outcome: ProcessOutcome
    reason: str
    measured: RunResult
    log: Path


def job_of(trial: Trial, directory: Path, how: Launching) -> Job:
    """A run in `directory`: one process a GPU of the cell."""
    cell = trial.cell
    env = {}
    if cell.engine == "megatron" and cell.tp > 1 and ONE_QUEUE not in os.environ:
        env[ONE_QUEUE] = "1"  # its backward pass relies on it: an all-reduce runs ahead of the weights' gradients
    if cell.loss == "liger" and cell.device == "cpu":
        env[INTERPRETED] = "1"  # read when Triton is imported: its kernels are then operations of the CPU, one by one
    return Job(
        directory=directory.absolute(), ranks=cell.gpus, command=how.command, python=how.python,
        gpu_ids=tuple(how.gpu_ids[: cell.gpus]), env=env,
    )  # fmt: skip


def files_of(trial: Trial, directory: Path) -> Iterator[str]:
    """Lines of a script that make what a run's processes read."""
    yield f"mkdir --parents {shlex.quote(str(directory))}"
    text = msgspec.json.encode(trial).decode()
    yield f"printf '%s\\n' {shlex.quote(text)} > {shlex.quote(str(directory / TRIAL_FILE))}"


def command_of(trial: Trial, directory: Path, how: Launching, port: int, node: NodeRank = ALONE) -> str:
    """The line of a script that starts a run's processes. Where GPUs are missing here it is for a machine that has
    them, of which the environment knows nothing. node: one of several; a rank that is a shell's word stays one."""
    cell, job = trial.cell, job_of(trial, directory, how)
    env, ranks = dict(job.env), job.ranks // node.nodes
    if cell.device == "cpu" or len(job.gpu_ids) == cell.gpus:
        env |= {name: value for name, value in environment(os.environ, ranks).items() if name == THREADS}
        env |= process.visible(tuple(map(str, job.gpu_ids)))
    argv = how.command(python=PORTABLE_PYTHON, processes=ranks, port=port, directory=directory, node=node)
    words = ["env", *(f"{name}={value}" for name, value in env.items())] if env else []
    return " ".join(word if word == node.rank else shlex.quote(word) for word in (*words, *argv))


def ended_before(trial: Trial, directory: Path) -> TrialOutcome | None:
    """How a run of this trial ended in `directory` earlier. None, so that the trial is run again, unless every rank
    reported success, or a rank reported that memory ran out: other ends may not come again."""
    output = _TrialFiles(trial, directory, lambda _: None)
    try:
        if _TRIAL.decode((directory / TRIAL_FILE).read_bytes()) != trial:
            return None
        with contextlib.suppress(FileNotFoundError):  # memory ran out before the first step was over
            output.take_in(output.path.read_bytes().splitlines())
    except (OSError, *UNDECODABLE):
        return None
    ended = _outcome(trial, directory, output, output.evidence(Ended()))
    return ended if ended.outcome in ("ok", "oom") else None


def run_trial(
    trial: Trial,
    directory: Path,
    how: Launching,
    limits: Limits,
    *,
    on_step: Callable[[Step], None] = lambda _: None,
    cancelled: threading.Event,
) -> TrialOutcome:
    """Runs a trial in `directory`, which is emptied before. on_step is called in this thread for every step. Raises
    Stopped, RunnerError."""
    if sys.platform != "linux":
        raise RunnerError("training runs are started on Linux only; use a Linux machine.")
    if trial.cell.device == "cuda" and how.place is HERE:  # on the CPU nothing is compiled
        remove_forsaken_locks()
    for last_try in (False, True):
        if cancelled.is_set():
            raise Stopped
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_atomically(directory / TRIAL_FILE, trial)
        output = _TrialFiles(trial, directory, on_step)
        try:
            ended = run_processes(job_of(trial, directory, how), output, limits, cancelled, how.place)
        except LaunchError as error:
            raise RunnerError(f"no training process can be started: {error}") from None
        evidence = output.evidence(ended)
        if last_try or not evidence.port_was_taken:
            break
    return _outcome(trial, directory, output, evidence)


def _outcome(trial: Trial, directory: Path, output: _TrialFiles, evidence: Evidence) -> TrialOutcome:
    outcome, reason = judge(evidence)
    measured = run_result(trial.cell, evidence.reports, output.steps)
    return TrialOutcome(outcome=outcome, reason=reason, measured=measured, log=directory.absolute() / LOG_FILE)


class _TrialFiles:
    """What the processes of a trial write."""

    line_of = "new step"

    def __init__(self, trial: Trial, directory: Path, on_step: Callable[[Step], None]) -> None:
        self.path = directory / STEPS_FILE
        self.steps: list[Step] = []
        self._trial, self._directory, self._on_step = trial, directory, on_step

    def take_in(self, lines: Iterable[bytes]) -> bool:
        """A line that is no step is left out."""
        before = len(self.steps)
        for line in lines:
            with contextlib.suppress(*UNDECODABLE):
                self.steps.append(_STEP.decode(line))
        for step in self.steps[before:]:
            self._on_step(step)
        return len(self.steps) > before

    def is_complete(self) -> bool:
        """Whether every rank has reported, or one a failure: the others will not get any further then."""
        reports, unreadable = self._reports()
        return len(reports) + len(unreadable) == self._trial.cell.gpus or any(
            report.outcome != "ok" for report in reports.values()
        )

    def evidence(self, ended: Ended) -> Evidence:
        """All that there is to know, after the end."""
        reports, unreadable = self._reports()
        return Evidence(
            ranks=self._trial.cell.gpus,
            timed=not self._trial.timeline,
            reports=reports,
            unreadable=unreadable,
            ended=ended,
            steps=self._trial.warmup_steps + self._trial.steps,
            steps_done=len(self.steps),
        )

    def _reports(self) -> tuple[dict[int, RankReport], dict[int, str]]:
        reports: dict[int, RankReport] = {}
        unreadable: dict[int, str] = {}
        for rank in range(self._trial.cell.gpus):
            with contextlib.suppress(FileNotFoundError):
                try:
                    reports[rank] = _REPORT.decode((self._directory / f"rank{rank}.json").read_bytes())
                except UNDECODABLE as error:
                    unreadable[rank] = str(error)
        return reports, unreadable


# What killed processes leave behind.


def extension_roots(environ: Mapping[str, str]) -> list[Path]:
    """Where torch puts what it compiles, as DeepSpeed's optimizers are at their first use."""
    if own := environ.get("TORCH_EXTENSIONS_DIR"):
        return [Path(own)]
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    return [path for path in cache.glob("*") if path.is_dir()]


def remove_forsaken_locks(environ: Mapping[str, str] = os.environ, proc: Path = Path("/proc")) -> list[Path]:
    """Removes our own locks of torch's compilations that no process of this machine has open; the removed ones.

    Whoever comes later waits for such a lock for ever: one cell that was ended while it compiled would make every other
    DeepSpeed cell a timeout. torch keeps the file open while it compiles, so a lock that no process has open is
    nobody's.
    """
    locks = [path.resolve() for root in extension_roots(environ) for path in root.glob(f"*/{LOCK}")]
    if not locks:
        return []
    held = set()
    for link in proc.glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it is over, or another user's
            held.add(str(link.readlink()))
    removed = []
    for path in locks:
        with contextlib.suppress(OSError):
            if str(path) not in held and path.stat().st_uid == os.getuid():
                path.unlink()
                removed.append(path)
    return removed


class MemoryReturn:
    """Whether the memory of GPUs (NVML indices) has come back after a run: what is still taken would make the next one
    run out of memory. Holds what they used before the first run."""

    def __init__(self, probe: Callable[[Sequence[int]], GpuProbe], gpu_ids: Sequence[int]) -> None:
        self._probe = probe(gpu_ids)
        self._before = self._used()

    def wait(self, cancelled: threading.Event) -> str | None:
        """Waits a while until no more is used than before; what is still taken then, a clause. A GPU that does not
        report its memory is taken to be free."""
        give_up = time.monotonic() + GPU_MEMORY_WAIT_S
        while taken := self._still_taken():
            if time.monotonic() > give_up or cancelled.wait(GPU_MEMORY_POLL_S):
                return taken
        return None

    def close(self) -> None:
        self._probe.close()

    def _still_taken(self) -> str | None:
        for (index, before), (_, now) in zip(self._before, self._used(), strict=True):
            if before is not None and now is not None and now > before + GPU_MEMORY_SLACK_BYTES:
                return (
                    f"GPU {index} had {(now - before) / 2**20:.0f} MiB more in use before a run than before the sweep"
                )
        return None

    def _used(self) -> list[tuple[int, int | None]]:
        return [(sample.index, sample.memory_used_bytes) for sample in self._probe.sample()]
