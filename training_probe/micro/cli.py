"""The commands `training_probe micro gemm`, `memcpy` and `collectives`.

Exit codes: those of training_probe.cli; 3 where processes crashed or hung, or nothing was measured at all, 4 where a
collective gave a wrong result.
What cannot be measured here, or runs out of memory, is a result.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import App, Group, Parameter

from backends import exit_codes
from backends.exit_codes import lacking
from loadgen.option_types import option
from loadgen.terminal import say
from training_probe import options
from training_probe.grid import Device
from training_probe.micro import presets
from training_probe.micro.presets import CollectivePreset, CopyPreset, GemmPreset
from training_probe.options import WHERE, SeveralNodes, whole
from training_probe.points import Dtype, Kind, MicroError, Name, Point, Task

if TYPE_CHECKING:
    from backends.gpus import Gpu, Inventory
    from training_probe.launch.nodes import Nodes
    from training_probe.report.document import TrainingReport

SAMPLES = 50
BUDGET_S: dict[Device, float] = {"cuda": 0.5, "cpu": 0.1}  # of a point, where no number of samples is named
# Of a product on a GPU: a power limit slows it and lets go of it again for tenths of a second at a time.
PRODUCT_SAMPLES, PRODUCT_BUDGET_S = 150, 1.5
CPU_RANKS, MAX_RANKS, MAX_SAMPLES = 2, 64, 100_000


POINTS = Group("What is measured: every combination of what is named", sort_key=1)
MEASURED = Group("How it is measured", sort_key=2)

_points, _measured, _where = partial(option, POINTS), partial(option, MEASURED), partial(option, WHERE)
_list = partial(_points, consume_multiple=1, show_default=False)


def _sizes(kind: Any, tokens: Sequence[Any]) -> tuple[int, ...]:
    """Raises ValueError, whose sentence cyclopts prints."""
    return tuple(presets.size(token.value) for token in tokens)


@dataclass(frozen=True, kw_only=True)
class MicroOptions:
    """How points are measured."""

    device: Annotated[Device | None, _measured("By default cuda where there is a GPU.")] = None
    samples: Annotated[
        int | None,
        _measured(
            f"Measurements of each point; by default {SAMPLES}, of products on a GPU {PRODUCT_SAMPLES}, fewer "
            "where they take long, more where they vary, Table XII: 320.",
            converter=whole,
        ),
    ] = None
    timeout: Annotated[float, _measured("Seconds without a new point after which the processes are ended.")] = 300.0
    out: Annotated[Path | None, _measured("Directory of the results; by default runs/ and its time.")] = None

    def check(self) -> None:
        """Raises MicroError."""
        if self.samples is not None and not 2 <= self.samples <= MAX_SAMPLES:
            raise MicroError(f"--samples is {self.samples}; it must be from 2 to {MAX_SAMPLES}.")
        options.check_above_0("--timeout", self.timeout)


@dataclass(frozen=True, kw_only=True)
class MicroPlacement(SeveralNodes):
    """Where the ranks are."""

    on: Annotated[
        str | None,
        _where("ray: on nodes of the Ray cluster that this machine is part of; ray:HOST:PORT: of that one."),
    ] = None
    nodes: Annotated[
        int | None, _where("Nodes that share the ranks; by default all of the cluster.", converter=whole)
    ] = None

    def check(self, gpus: int | None) -> None:
        """Raises MicroError, GridError and ConfigError."""
        self.check_nodes(self.on, () if gpus is None else (gpus,))
        if self.on is None and self.nodes is not None:
            raise MicroError("--nodes is for the nodes of a cluster; name it with --on ray, or leave it out.")
        if self.on is not None:
            from loadgen.config import ray_address

            ray_address(self.on)
        if self.nodes is not None and not 1 <= self.nodes <= options.MAX_NODES:
            raise MicroError(f"--nodes is {self.nodes}; it must be from 1 to {options.MAX_NODES}.")


def gemm(
    *,
    m: Annotated[tuple[int, ...], _list("Rows of the activations (tokens).", converter=whole)] = (),
    n: Annotated[tuple[int, ...], _list("Outputs of the layer.", converter=whole)] = (),
    k: Annotated[tuple[int, ...], _list("Inputs of the layer.", converter=whole)] = (),
    dtype: Annotated[tuple[Dtype, ...], _list("bf16 fp16 fp32 tf32 int8 fp8; by default bf16, CPU: fp32 bf16.")] = (),
    preset: Annotated[GemmPreset | None, _points("The paper's shapes; --dtype chooses among types.")] = None,
    measuring: Annotated[MicroOptions | None, Parameter(name="*")] = None,
) -> int:
    """Time matrix products, every combination of M, N and K, as shares of the GPU's peak: the data sheet's, and that of
    the fastest product of the same run.

    For example: training_probe micro gemm --m 666 10624 --n 11008 --k 4096 --dtype bf16 fp8
    """
    measuring = measuring or MicroOptions()
    machine = _machine(measuring, preset)
    points = presets.gemms(machine.device, m=m, n=n, k=k, dtypes=dtype, preset=preset)
    return _run("gemm", preset, points, measuring, machine.using(1))


def memcpy(
    *,
    sizes: Annotated[tuple[int, ...], _list("Such as 4K 64M 1G; by default 1 KiB to 1 GiB.", converter=_sizes)] = (),
    preset: Annotated[CopyPreset | None, _points("Figure 12: host to device and back.")] = None,
    measuring: Annotated[MicroOptions | None, Parameter(name="*")] = None,
) -> int:
    """Time copies from host to device and back, pageable and pinned, and within the device; without a GPU within the
    host.

    For example: training_probe micro memcpy --sizes 1K 1M 1G
    """
    measuring = measuring or MicroOptions()
    machine = _machine(measuring, preset)
    points = presets.copies(machine.device, sizes=sizes, preset=preset)
    return _run("memcpy", preset, points, measuring, machine.using(1))


def collectives(
    *,
    op: Annotated[tuple[Name, ...], _list("By default all: " + " ".join(presets.COLLECTIVES) + ".")] = (),
    sizes: Annotated[
        tuple[int, ...],
        _list("As nccl-tests counts them; by default 1 KiB to 1 GiB, CPU: to 64 MiB.", converter=_sizes),
    ] = (),
    p2p: Annotated[
        tuple[Literal["on", "off"], ...], _list("Whether NCCL may use P2P (NCCL_P2P_DISABLE); by default both in turn.")
    ] = (),
    gpus: Annotated[
        int | None, _points("Ranks, one a GPU; by default all GPUs here, without any 2.", converter=whole)
    ] = None,
    preset: Annotated[CollectivePreset | None, _points("The collectives of the paper's Figures 13 to 15.")] = None,
    where: Annotated[MicroPlacement | None, Parameter(name="*")] = None,
    measuring: Annotated[MicroOptions | None, Parameter(name="*")] = None,
) -> int:
    """Time collectives over NCCL, with P2P and without, or over gloo on the CPU, within this machine or between
    several: nodes of a Ray cluster, or those on which the same command is started; each result is checked once.

    For example: training_probe micro collectives --op allreduce allgather --sizes 1M 64M 1G
    """
    measuring, where = measuring or MicroOptions(), where or MicroPlacement()
    where.check(gpus)
    ways = [way == "on" for way in p2p]
    if where.on is not None or where.nnodes > 1:
        measuring.check()
        asked = (op, sizes, p2p, gpus, preset, replace(measuring, out=None))
        if where.node_rank:
            from training_probe.launch import rendezvous

            return rendezvous.follow(where.meeting(asked), say)
        with _nodes(measuring, where, gpus) if where.on else _met(measuring, where, gpus, asked) as (machine, place):
            points = presets.collectives(machine.device, machine.ranks, names=op, sizes=sizes, p2p=ways, preset=preset)
            return _run("collectives", preset, points, measuring, machine, place)
    machine = _machine(measuring, preset)
    ranks = _ranks(gpus, machine.device, len(machine.gpu_ids))
    points = presets.collectives(machine.device, ranks, names=op, sizes=sizes, p2p=ways, preset=preset)
    return _run("collectives", preset, points, measuring, machine.using(ranks))


@contextlib.contextmanager
def _nodes(measuring: MicroOptions, where: MicroPlacement, gpus: int | None) -> Iterator[tuple[MicroMachine, Nodes]]:
    """Nodes of a cluster, and what they are together. Raises MicroError, ConfigError and ClusterError."""
    from loadgen.cluster.link import NodeLost
    from loadgen.cluster.ray_cluster import ClusterError
    from loadgen.config import ray_address
    from training_probe.launch import cluster

    assert where.on is not None
    with cluster.joined(ray_address(where.on), where.nodes or 1, "--nodes") as joined:
        nodes = joined.nodes_per_cell = where.nodes or len(joined.machines)
        device: Device = measuring.device or ("cuda" if joined.gpus() else "cpu")
        ranks = _ranks_of(nodes, gpus, device, joined.gpus(), chosen=True)
        joined.check(("torch",))
        each = ranks // nodes if device == "cuda" else 0
        chosen = cluster.choose(joined.machines, nodes, each)
        assert chosen is not None
        try:
            with cluster.ray_nodes_placed(chosen, each) as placed:
                yield _together(device, cluster.gpus_of(placed.look(), each), ranks), placed
        except NodeLost as lost:
            raise ClusterError(f"{lost}.") from None


@contextlib.contextmanager
def _met(
    measuring: MicroOptions, where: MicroPlacement, gpus: int | None, asked: object
) -> Iterator[tuple[MicroMachine, Nodes]]:
    """The same of nodes that meet. asked: the options that must be equal on all of them. Raises MicroError, GridError,
    ConfigError and ClusterError."""
    from training_probe.launch import rendezvous

    with rendezvous.gathered(where.meeting(asked), say) as fleet:
        device: Device = measuring.device or ("cuda" if fleet.gpus() else "cpu")
        ranks = _ranks_of(where.nnodes, gpus, device, fleet.gpus(), chosen=False)
        fleet.check_ranks(ranks, on_cpu=device == "cpu")
        fleet.check(("torch",))
        yield _together(device, fleet.gpus_of(ranks) if device == "cuda" else [], ranks), fleet.nodes


def _ranks_of(nodes: int, gpus: int | None, device: Device, here: int, *, chosen: bool) -> int:
    """How many ranks so many nodes share, which have so many GPUs for them. chosen: whether they are some of a
    cluster. Raises MicroError."""
    most = here if device == "cuda" else MAX_RANKS * nodes
    ranks = gpus if gpus is not None else most if device == "cuda" else max(nodes, CPU_RANKS)
    if ranks % nodes or not CPU_RANKS <= ranks <= most:
        raise MicroError(
            f"{nodes} node{'' if nodes == 1 else 's'}{' of the cluster' if chosen else ''} cannot share {ranks} ranks; "
            f"name --gpus as a multiple of {nodes}, from {CPU_RANKS} to {most}"
            f"{', and --nodes as how many share them' if chosen else ''}."
        )
    return ranks


def _together(device: Device, found: Sequence[Gpu], ranks: int) -> MicroMachine:
    """What nodes are as one machine, with the GPUs of the ranks."""
    from backends.gpus import Inventory

    numbered = tuple(msgspec.structs.replace(gpu, index=rank) for rank, gpu in enumerate(found))
    return MicroMachine(device, Inventory(gpus=numbered), tuple(range(len(found))), ranks)


def _ranks(gpus: int | None, device: Device, here: int) -> int:
    """Raises MicroError."""
    ranks = gpus if gpus is not None else here if device == "cuda" else CPU_RANKS
    if ranks < 2:
        why = "this machine has one GPU that can be used" if gpus is None else f"--gpus is {gpus}"
        how = " (with --device cpu they run over gloo)" if device == "cuda" else ""
        raise MicroError(f"{why}; collectives need at least 2{how}.")
    if device == "cuda" and ranks > here:
        raise MicroError(f"--gpus is {ranks} and this machine has {here} that can be used.")
    if ranks > MAX_RANKS:
        raise MicroError(f"--gpus is {ranks}; at most {MAX_RANKS} ranks are started on one machine.")
    if device == "cpu":
        options.check_processes(ranks)
    return ranks


@dataclass(frozen=True)
class MicroMachine:
    """gpu_ids: NVML indices of the GPUs that may be used; ranks: how many processes."""

    device: Device
    inventory: Inventory
    gpu_ids: tuple[int, ...]
    ranks: int = 1

    def using(self, ranks: int) -> MicroMachine:
        """With so many processes, and no more GPUs than these take."""
        return replace(self, gpu_ids=self.gpu_ids[:ranks], ranks=ranks)

    @property
    def device_name(self) -> str:
        """For tables."""
        names = {gpu.index: gpu.name for gpu in self.inventory.gpus}
        return ", ".join(dict.fromkeys(names.get(index, "unknown GPU") for index in self.gpu_ids)) or "CPU"


def _machine(measuring: MicroOptions, preset: str | None) -> MicroMachine:
    """Raises MicroError, GpuError."""
    from backends import gpus

    measuring.check()
    inventory = gpus.Inventory() if measuring.device == "cpu" else gpus.read()
    gpu_ids = options.visible_gpus(inventory)
    device: Device = measuring.device or ("cuda" if gpu_ids else "cpu")
    if device == "cuda" and not gpu_ids:
        raise MicroError(f"this machine has no GPU that can be used ({inventory.problem or 'none is visible'}).")
    if preset is not None and measuring.device is None and device == "cpu":
        raise MicroError(f"--preset {preset} is for GPUs and this machine has none; --device cpu runs it all the same.")
    return MicroMachine(device, inventory, gpu_ids)


def _sampling(measuring: MicroOptions, kind: Kind, preset: str | None, device: Device) -> tuple[int, float | None]:
    """Samples of a point, and seconds that they may take; None: as many as are named."""
    if measuring.samples is not None:
        return measuring.samples, None
    if preset == "paper-table12":
        return presets.TABLE_12_SAMPLES, None
    if kind == "gemm" and device == "cuda":
        return PRODUCT_SAMPLES, PRODUCT_BUDGET_S
    return SAMPLES, BUDGET_S[device]


def _run(
    kind: Kind,
    preset: str | None,
    points: Sequence[Point],
    measuring: MicroOptions,
    machine: MicroMachine,
    nodes: Nodes | None = None,
) -> int:
    import time

    from backends import gpus, process
    from loadgen import rundir
    from training_probe.launch.runner import HERE
    from training_probe.micro import run

    if nodes is None and (why := lacking("torch")) is not None:
        raise MicroError(f"{why}.")
    device = machine.device
    samples, budget_s = _sampling(measuring, kind, preset, device)
    between = kind == "collectives" and device == "cuda" and nodes is None
    manifest = run.MicroManifest(
        run_id=rundir.new_run_id(),
        started_unix_s=time.time(),
        version=rundir.package_version(),
        kind=kind,
        preset=preset,
        device=device,
        device_name=machine.device_name,
        gpu_ids=machine.gpu_ids,
        ranks=machine.ranks,
        nodes=nodes.hosts if nodes is not None else [],
        p2p=gpus.decide_p2p("auto", machine.inventory, machine.gpu_ids).reason if between else "",
        driver=machine.inventory.driver,
        task=Task(device=device, points=list(points), samples=samples, budget_s=budget_s),
        timeout_s=measuring.timeout,
        argv=tuple(sys.argv[1:]),
        environment=process.gpu_variables(os.environ),
    )
    directory = measuring.out or Path("runs") / manifest.run_id
    return reported(directory, run.measure(manifest, directory, say, place=nodes or HERE))


def reported(directory: Path, code: int) -> int:
    """Reports what there is so far; the exit code."""
    from training_probe.micro import report, run
    from training_probe.report.build import unread

    results = run.read_results(directory)
    notes = unread(directory / run.RESULTS_FILE)
    document = report.document(results, run.read_manifest(directory), run.read_about(directory), notes)
    return published(directory, document, {result.outcome for result in results}, code)


def published(directory: Path, report: TrainingReport, outcomes: Set[str], code: int) -> int:
    """Prints the report and writes its files; the exit code, where `code` is not one yet."""
    from training_probe.report.build import ran_nothing

    report.publish(directory)
    outcomes = {*outcomes, "invalid"} if report.invalid else outcomes
    if code == exit_codes.OK and ran_nothing(outcomes):
        return exit_codes.FAILED
    if code != exit_codes.OK or outcomes.isdisjoint(("crashed", "timeout", "wrong", "invalid")):
        return code
    return exit_codes.INVALID if outcomes.isdisjoint(("crashed", "timeout")) else exit_codes.FAILED


def build_app() -> App:
    app = App(name="micro", help="Measure what training is made of: matrix products, memory copies, collectives.")
    for command in (gemm, memcpy, collectives):
        app.command(command)
    return app
