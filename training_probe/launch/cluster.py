"""Which cells of a sweep run on which nodes of a Ray cluster: at most one on a node at a time, in the order of the
sweep."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from backends.exit_codes import Stopped
from backends.gpus import Gpu
from loadgen.cluster import ray_cluster
from loadgen.cluster.link import NodeLost
from loadgen.cluster.ray_cluster import ClusterError, RayMachine
from loadgen.config import ConfigError
from loadgen.rundir import package_version
from training_probe.grid import Cell, GridError
from training_probe.launch.node import Facts
from training_probe.launch.nodes import Nodes, map_concurrently

WAIT_S = 0.2


@dataclass(frozen=True)
class Placed:
    """The nodes that a cell has to itself, and the GPUs that its ranks get there, in the order of ranks."""

    nodes: Nodes
    gpus: list[Gpu]


# Runs a cell on its nodes, or says why it has none.
RunCell = Callable[[Cell, Placed | str], None]


def choose(free: Sequence[RayMachine], nodes: int, gpus_each: int) -> list[RayMachine] | None:
    """The nodes of a cell: those that have enough GPUs and the fewest beyond that, else in the order of `free`; None
    while too few are free."""
    enough = [machine for machine in free if machine.gpus >= gpus_each]
    return sorted(enough, key=lambda machine: machine.gpus)[:nodes] if len(enough) >= nodes else None


def gpus_each(cell: Cell, nodes: int) -> int:
    """That a cell takes on each of its nodes."""
    return cell.gpus // nodes if cell.device == "cuda" else 0


def check_able(host: str, facts: Facts) -> None:
    """That a node can run cells: the same version, and all modules. Raises ConfigError."""
    if facts.version != package_version():
        raise ConfigError(
            f"node {host} has llm-dissect {facts.version} and this machine {package_version()}; "
            "install the same version on both."
        )
    if facts.lacking:
        names = ", ".join(name.partition(".")[0] for name in facts.lacking)
        raise ConfigError(f"node {host} lacks {names}; install it there with pip install 'llm-dissect[train]'.")


class NodePool(Protocol):
    """Nodes for the cells of a sweep: a Cluster, or those that met without one. nodes_per_cell: how many each cell runs
    on."""

    nodes_per_cell: int

    def gpus(self) -> int: ...
    def devices(self) -> list[Gpu]: ...
    def check(self, packages: tuple[str, ...], /) -> None: ...
    def check_cells(self, cells: Sequence[Cell], /) -> None: ...
    def each(self, cells: Sequence[Cell], run: RunCell, cancelled: threading.Event, /) -> None: ...


@dataclass
class Cluster:
    """A Ray cluster that this process has joined. nodes_per_cell: how many each cell runs on. known: what each node
    said of itself, by its id."""

    machines: list[RayMachine]
    nodes_per_cell: int = 1
    known: dict[str, Facts] = field(default_factory=dict)

    def gpus(self) -> int:
        """The most that a cell may have: on each of its nodes as many as on the poorest of the richest."""
        richest = sorted((int(machine.gpus) for machine in self.machines), reverse=True)
        return self.nodes_per_cell * richest[self.nodes_per_cell - 1]

    def devices(self) -> list[Gpu]:
        """All GPUs that Ray has, node by node."""
        return [
            gpu for m in self.machines if m.id in self.known for gpu in self.known[m.id].inventory.gpus[: int(m.gpus)]
        ]

    def check(self, packages: tuple[str, ...]) -> None:
        """That every node can run cells: the same version, and these modules. Raises ConfigError and ClusterError."""

        def look(machine: RayMachine) -> Facts:
            with ray_nodes_placed([machine], 0) as nodes:
                return nodes.look(packages)[0]

        try:
            found = map_concurrently(look, self.machines)
        except NodeLost as lost:
            raise ClusterError(f"{lost}.") from None
        for machine, facts in zip(self.machines, found, strict=True):
            check_able(machine.host, facts)
            self.known[machine.id] = facts

    def check_cells(self, cells: Sequence[Cell]) -> None:
        """That the cluster has the GPUs that each cell needs. Raises GridError."""
        for cell in cells:
            each = gpus_each(cell, self.nodes_per_cell)
            if choose(self.machines, self.nodes_per_cell, each) is None:
                such = "no node" if self.nodes_per_cell == 1 else f"no {self.nodes_per_cell} nodes"
                raise GridError(
                    f"{such} of the cluster can give {each} GPU{'' if each == 1 else 's'} to a cell; name fewer --gpus"
                    " (--device cpu needs none)."
                )

    def each(self, cells: Sequence[Cell], run: RunCell, cancelled: threading.Event) -> None:
        """Runs all cells, each in a thread of its own as soon as it is its turn and nodes are free for it. Raises
        Stopped when cancelled, and what `run` raises; nothing runs any more then."""
        _Queue(self, run, cancelled).work(cells)


class _Queue:
    def __init__(self, cluster: Cluster, run: RunCell, cancelled: threading.Event) -> None:
        self._cluster, self._run, self._cancelled = cluster, run, cancelled
        self._changed = threading.Condition()
        self._busy: set[str] = set()
        self._lost: set[str] = set()
        self._error: BaseException | None = None

    def work(self, cells: Sequence[Cell]) -> None:
        threads: list[threading.Thread] = []
        try:
            for cell in cells:
                chosen = self._wait(cell)
                if chosen is None:
                    self._run(cell, f"the cluster has no {self._cluster.nodes_per_cell} nodes left that can run it")
                    continue
                thread = threading.Thread(target=self._cell, args=(cell, chosen))
                threads.append(thread)
                thread.start()
        except BaseException:
            self._cancelled.set()
            raise
        finally:
            for thread in threads:
                while thread.is_alive():  # in pieces: a signal is to be heard meanwhile
                    thread.join(WAIT_S)
        if self._error is not None:
            raise self._error

    def _wait(self, cell: Cell) -> list[RayMachine] | None:
        """Until nodes are free for the cell, which are its own then; None where there are too few left."""
        nodes = self._cluster.nodes_per_cell
        while True:
            alive = [machine for machine in ray_cluster.machines() if machine.id not in self._lost]
            with self._changed:
                if self._error is not None or self._cancelled.is_set():
                    raise self._error or Stopped
                need = gpus_each(cell, nodes)
                chosen = choose([machine for machine in alive if machine.id not in self._busy], nodes, need)
                if chosen is not None:
                    self._busy.update(machine.id for machine in chosen)
                    return chosen
                if choose(alive, nodes, need) is None and not self._busy:
                    return None
                self._changed.wait(WAIT_S)

    def _cell(self, cell: Cell, chosen: list[RayMachine]) -> None:
        each, lost = gpus_each(cell, self._cluster.nodes_per_cell), set[str]()
        try:
            try:
                with ray_nodes_placed(chosen, each) as nodes:
                    self._run(cell, Placed(nodes, gpus_of(nodes.look(), each)))
                    lost = nodes.lost
            except (ClusterError, NodeLost) as error:
                self._run(cell, str(error).rstrip("."))
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
            self._cancelled.set()
        finally:
            with self._changed:
                self._lost.update(machine.id for machine in chosen if machine.host in lost)
                self._busy.difference_update(machine.id for machine in chosen)
                self._changed.notify_all()


def gpus_of(found: Sequence[Facts], each: int) -> list[Gpu]:
    """The GPUs that `each` ranks a node get, in the order of ranks."""
    chosen = []
    for facts in found:
        by_index = {gpu.index: gpu for gpu in facts.inventory.gpus}
        chosen += [by_index[index] for index in facts.gpu_ids[:each] if index in by_index]
    return chosen


def ray_nodes_placed(chosen: Sequence[RayMachine], each: int) -> contextlib.AbstractContextManager[Nodes]:
    """Those of ray_nodes.py; another in tests."""
    from training_probe.launch import ray_nodes

    return ray_nodes.placed(chosen, each)


@contextlib.contextmanager
def joined(address: str | None, nodes: int, flag: str) -> Iterator[Cluster]:
    """The cluster at an address, HOST:PORT, None: the one that this machine is part of; `nodes` of it, as `flag` asks,
    for each cell. Raises ConfigError and ClusterError."""
    with ray_cluster.connected(address):
        machines = ray_cluster.machines()
        if nodes > len(machines):
            there = f"{len(machines)} node{'' if len(machines) == 1 else 's'}"
            raise ConfigError(f"{flag} is {nodes} and the cluster has {there}; name fewer, or start Ray on more.")
        yield Cluster(machines, nodes)
