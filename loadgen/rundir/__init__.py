"""A run directory: its files, the manifest that says what was run before the first request is sent, and the snapshot of
what a run that goes on has measured so far, for whoever exports it."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec

from backends import foreign_files
from backends.exit_codes import UserError
from backends.untrusted import UNDECODABLE, reason, without_secrets
from loadgen.rundir.cluster_facts import ClusterFacts
from loadgen.rundir.emulation import Emulation, Timetable
from loadgen.rundir.launch_facts import LaunchFacts

MANIFEST_SCHEMA = "loadgen.manifest/1"
SNAPSHOT_SCHEMA = "llm_dissect.snapshot/1"
SNAPSHOT_FILE = "snapshot.json"
OWNER_ONLY = 0o700
MOST_PHASES = 1000


class RunError(UserError):
    """A run directory that cannot be used. The message says which and what to do."""


class WriteError(Exception):
    """Nothing more can be kept in a run directory. A clause: why."""


class Ceiling(msgspec.Struct, kw_only=True):
    """What this client can take on this machine, measured on the embedded server with the run's own shape.
    measured_unix_s: up to an hour before the run; None in runs of earlier versions, which measured right before."""

    events_per_s_per_core: Annotated[float, msgspec.Meta(ge=1)]
    cpu_us_per_event: float
    event_error_p50_ms: float | None = None  # arrival as recorded minus the server's stamp before it sent
    event_error_p99_ms: float | None = None
    requests: int
    output_tokens: int
    measured_unix_s: float | None = None


# Below half of what it can take, a client process has room for the bursts within a second.
HEADROOM_RATIO = 2.0
USUAL_EVENTS_PER_S = 50_000.0  # that a core takes wherever it was tried


def processes_for(events_per_s: float, ceiling: Ceiling | None) -> int:
    """How many client processes have room for a busiest second. ceiling: None where it was not measured."""
    each = USUAL_EVENTS_PER_S if ceiling is None else ceiling.events_per_s_per_core
    return max(1, math.ceil(HEADROOM_RATIO * events_per_s / each))


class Phase(msgspec.Struct, frozen=True):
    """A part of a load that is reported by itself; seconds since t = 0. end_s: None for the last, which has no end."""

    name: str
    start_s: float
    end_s: float | None


class Machine(msgspec.Struct, kw_only=True):
    platform: str
    python: str
    cpu_count: int
    hostname: str


class WireFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the wire adds to ttft, by requests that were sent one at a time before the load: medians of `n` with
    ordinary ACKs and of as many with quick ones. waits: those with ordinary ones waited for a delayed ACK."""

    ttft_ms: float
    ttft_quick_ms: float
    n: int
    waits: bool
    events_per_read: float
    events_per_read_quick: float


class ForeignTool(msgspec.Struct, kw_only=True):
    """Which other load generator sent a load, and what it did not keep, a clause."""

    tool: str
    lacks: str


class Manifest(msgspec.Struct, kw_only=True):
    """What was measured on what. Secrets never get here: the API key is named by its environment variable only."""

    schema: str = MANIFEST_SCHEMA
    run_id: str
    version: str
    started_unix_s: float
    argv: list[str]
    config: dict[str, Any]
    backend: str
    model: str
    url: str
    emulated: bool
    server_version: str | None = None
    kv_cache_tokens: int | None = None  # as the server says, also one that was not started for the run
    server_settings: dict[str, str] = {}  # likewise, by its own names
    requests_planned: int | None = None  # None: as many as the duration holds
    client_processes: int | None = None  # None: of a version that did not write it, or of no load
    arrival: str
    max_total_tokens: int | None = None
    machine: Machine
    left_out: str = ""  # what of a trace or of conversations was not sent, and why, as a clause
    # parts of the load that are reported by themselves
    phases: Annotated[tuple[Phase, ...], msgspec.Meta(max_length=MOST_PHASES)] = ()
    dataset_prompts: int | None = None  # of a dataset whose prompts may be sent again: how many it has
    ceiling: Ceiling | None = None
    wire: WireFacts | None = None
    hands_over: bool = False  # the warm-up left its slots of a closed loop to measured requests, without a drain
    emulation: Emulation | None = None  # what was modelled where no real server ran
    timetable: Timetable | None = None  # what is true of an emulated server's times
    launch: LaunchFacts | None = None  # the server that was started for the run
    stopped_overloaded: bool = False  # it was ended early, since the server was seen to fall behind
    cluster: ClusterFacts | None = None  # the machines that sent it, where they are several
    imported: ForeignTool | None = None  # another tool's results, which `loadgen import` read


class MetricSample(msgspec.Struct, frozen=True):
    """One value of a family; labels tell it from the others."""

    value: float
    labels: dict[str, str] = {}


class Histogram(msgspec.Struct, frozen=True):
    """counts[i]: values up to bounds[i] and above the bound before; the last count is of all above. exemplars: bucket
    -> a request that fell into it, and its value."""

    bounds: list[float]
    counts: list[int]
    sum: float
    labels: dict[str, str] = {}
    exemplars: dict[int, tuple[str, float]] = {}


class MetricFamily(msgspec.Struct, frozen=True):
    """One metric, as Prometheus knows them; the unit is the end of the name, a counter's `_total` left out."""

    name: str
    type: Literal["gauge", "counter", "histogram"]
    help: str
    samples: list[MetricSample] = []
    histograms: list[Histogram] = []


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a program has measured up to now; `labels` say what was run."""

    schema: str = SNAPSHOT_SCHEMA
    run_id: str
    program: str
    state: Literal["running", "finished", "stopped"]
    labels: dict[str, str] = {}
    families: list[MetricFamily] = []


def package_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("llm-dissect")
    except PackageNotFoundError:  # run from a checkout that is on the path and not installed
        return "not installed"


def new_run_id() -> str:
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + uuid.uuid4().hex[:6]


def usable_cpus() -> set[int]:
    """The logical CPUs that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def machine_memory_bytes() -> int | None:
    """All memory of this machine; None where the system does not tell it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def this_machine() -> Machine:
    return Machine(
        platform=platform.platform(),
        python=sys.version.split()[0],
        cpu_count=len(usable_cpus()),
        hostname=platform.node(),
    )


def create(directory: Path, *, private: bool = False) -> Path | None:
    """Makes the run directory and proves that it can be written. `private`: for its owner alone, as where prompts of a
    dataset may get into it. Returns the first directory of its path that was not there; None where all were. Raises
    RunError; never overwrites a run."""
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(mode=OWNER_ONLY if private else 0o777, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise RunError(f"{directory} exists and is not empty; name another --out, nothing was overwritten.")
        if private:
            directory.chmod(OWNER_ONLY)  # it may have been there, empty
        probe = directory / ".write"
        probe.touch()
        probe.unlink()
        return missing[-1] if missing else None
    except OSError as error:
        raise RunError(f"cannot write to {directory}: {error.strerror or error}; name another --out.") from None


def within(directory: Path, name: str) -> Path:
    """The directory of one run of several in `directory`. Raises RunError where it is a link that leads out of it."""
    if not foreign_files.is_inside(directory / name, directory):
        raise RunError(f"{directory / name} is a link that leads out of {directory}; remove it.")
    return directory / name


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Keeps every other command that writes out of a directory, until the block is over or this process is dead; where
    there is no such directory, or no locks, it does nothing. Raises RunError."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with contextlib.ExitStack() as stack:
        try:
            file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{directory} is still being measured by another process; wait for its end.") from None
        except OSError:
            pass
        yield


@contextlib.contextmanager
def measuring(directory: Path, *, private: bool = False, resumed: bool = False, plan: str = "") -> Iterator[None]:
    """Makes the directory of a measurement, or takes that of one that is `resumed`, and keeps every other command that
    writes out of it. A new one goes again where nothing came into it but the file `plan`. Raises RunError."""
    made = None if resumed else create(directory, private=private)
    with alone(directory):
        try:
            yield
        finally:
            if not resumed:
                _remove_if_empty(directory, made, plan)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Raises RunError."""
    write_json(directory / "manifest.json", manifest)


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Replaces a file of a run's or a search's directory, indented, without secrets. Raises RunError."""
    try:
        replace(path, msgspec.json.format(msgspec.json.encode(without_secrets(value)), indent=2) + b"\n")
    except OSError as error:
        raise RunError(f"cannot write to {path.parent}: {error.strerror or error}; name another --out.") from None


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a run directory. Raises RunError."""
    path = directory / "manifest.json"
    try:
        data = foreign_files.read_bytes(path)
    except FileNotFoundError:
        raise RunError(f"{directory} holds no manifest.json; is it a run directory?") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}; name a run directory.") from None
    try:
        return msgspec.json.decode(data, type=Manifest)
    except UNDECODABLE as error:
        with contextlib.suppress(*UNDECODABLE):
            if msgspec.json.decode(data, type=_Marked).schema.startswith("training_probe."):
                raise RunError(
                    f"{directory} is a directory of training_probe; read it with `training_probe report {directory}`."
                ) from None
        raise RunError(f"{path} is not a manifest of this version: {reason(error)}.") from None


class _Marked(msgspec.Struct):
    schema: str


def write_snapshot(directory: Path, snapshot: Snapshot) -> None:
    """Replaces the snapshot of a run directory. Raises OSError."""
    replace(directory / SNAPSHOT_FILE, msgspec.json.encode(snapshot) + b"\n")


def replace(path: Path, content: bytes, mode: int | None = None) -> None:
    """Writes a file at once, as `replacing` does, with these permissions. Raises OSError."""
    with replacing(path) as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to be written; a reader finds the old one or the new one, never a part, whenever the process dies. Nothing
    is written through a link that lies there. Raises OSError, also for one in its block, and then the old one stays."""
    part = path.with_name(path.name + ".part")
    try:
        part.unlink(missing_ok=True)
        with part.open("xb") as file:
            yield file
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _remove_if_empty(directory: Path, made: Path | None, plan: str) -> None:
    """Takes back a directory in which nothing was written but `plan`, since nothing was measured: it and its parents up
    to `made`, as `create` returned it."""
    with contextlib.suppress(OSError):
        if [path.name for path in directory.iterdir()] == [plan]:
            (directory / plan).unlink()
        for path in (directory, *directory.parents) if made is not None else ():
            path.rmdir()
            if path == made:
                return
