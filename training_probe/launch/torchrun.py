"""What the processes that training_probe starts have in common: torchrun, their environment, and the signals that end
them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import loadgen.child_env
from loadgen.rundir import usable_cpus

THREADS = "OMP_NUM_THREADS"


def command(*, python: str, processes: int, port: int, module: str, directory: Path) -> tuple[str, ...]:
    """The command line of `processes` ranks of `python -m MODULE DIRECTORY` on this machine."""
    return (
        python, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr", "127.0.0.1",
        "--master-port", str(port), "-m", module, str(directory),
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


@contextlib.contextmanager
def stopped_by_signals(cancelled: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM end the present run in good order; more of them do not hurry it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: cancelled.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
