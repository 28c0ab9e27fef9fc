"""Many cells, one after another: each becomes one line of results, whatever happens to it.

    DIR/manifest.json, results.jsonl, snapshot.json
    DIR/trials/<cell>/search-<micro batch>/, run-<k>/: trial.json, log.txt, rank<N>.json, steps.jsonl

A cell that makes no sense or is certain not to fit is not run; its result has the reason. A sweep that was stopped, or
killed, goes on where it was: the cells that stand in results.jsonl are done, and so are the launches of the next one
that had ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from backends import exit_codes, process
from backends.gpus import UNKNOWN, Gpu, Inventory
from backends.untrusted import escaped
from loadgen import rundir
from loadgen.cluster.link import NodeLost
from loadgen.config import ray_address
from loadgen.rundir.series import MeasurementSeries
from training_probe import own_deepspeed, results
from training_probe.grid import Cell
from training_probe.launch.cluster import Placed, joined
from training_probe.launch.runner import (
    ALONE,
    THREADS,
    MemoryReturn,
    NodeRank,
    command_of,
    files_of,
    until_stopped,
)  # fmt: skip
from training_probe.protocol import write_atomically
from training_probe.refusals import impossible
from training_probe.results import GIB, CellResult, Outcome, of_cell
from training_probe.sweep.cell import (
    MANIFEST_FILE,
    CellRun,
    Context,
    Dependencies,
    GpuMemory,
    Predicted,
    Settings,
    SweepManifest,
    device_memory_bytes,
    one_name_each,
    read_manifest,
    sized,
    unpredicted,
    utilization,
)
from training_probe.sweep.progress import Progress

NODE_RANK = '"${NODE_RANK:?}"'  # in a script for each of several nodes
DRY_RUN_PORT = 29500  # torchrun's own; a real run takes one that is free
Say = Callable[[str], None]


def sweep(
    cells: Sequence[Cell], settings: Settings, directory: Path, say: Say, around: Dependencies | None = None
) -> int:
    """Measures the cells into a new directory; the exit code. Raises RunError, RunnerError."""
    around = around or Dependencies()
    with begun(cells, settings, directory, around) as manifest:
        return _measure(directory, manifest, [], _series(manifest, []), say, around)


@contextlib.contextmanager
def begun(cells: Sequence[Cell], settings: Settings, directory: Path, around: Dependencies) -> Iterator[SweepManifest]:
    """Makes the directory, with the manifest in it, which is its own for the block. Raises RunError."""
    cells = one_name_each(cells)
    inventory = around.inventory()
    devices = _devices(settings, around, inventory)
    names = _names(devices)
    platform = settings.platform or ", ".join(dict.fromkeys(names)) or "CPU"
    manifest = SweepManifest(
        run_id=rundir.new_run_id(),
        started_unix_s=time.time(),
        version=rundir.package_version(),
        device_names=names,
        device_memory_bytes=[device.memory_bytes if device else None for device in devices],
        driver=inventory.driver,
        cells=cells,
        environment=process.gpu_variables(os.environ),
        **{**msgspec.structs.asdict(settings), "platform": platform},
    )
    with rundir.measuring(directory):
        write_atomically(directory / MANIFEST_FILE, manifest, indent=2)
        yield manifest


def _devices(settings: Settings, around: Dependencies, inventory: Inventory) -> Sequence[Gpu | None]:
    """Those that the sweep is on; None where nothing is known of one."""
    if around.cluster is not None:
        return around.cluster.devices()
    known = {gpu.index: gpu for gpu in inventory.gpus}
    return [known.get(index) for index in settings.gpu_ids]


def _names(devices: Sequence[Gpu | None]) -> list[str]:
    return [device.name if device else UNKNOWN for device in devices]


def resume(directory: Path, say: Say, around: Dependencies | None = None, on: str | None = None) -> int:
    """Goes on with a sweep, as its manifest has it. on: the cluster as it is typed, which must be the sweep's. Raises
    RunError, ResultsError, RunnerError."""
    manifest = read_manifest(directory)
    if manifest.python != sys.executable:
        raise rundir.RunError(
            f"{directory} was measured by {escaped(manifest.python)}, and it may be another's: go on with the "
            "training_probe of that Python if it is yours, or begin another sweep with --out."
        )
    if around is None and manifest.on != on:
        was = "on this machine alone; leave --on out" if manifest.on is None else f"on a cluster: --on {manifest.on}"
        raise rundir.RunError(f"{directory} may be another's, and only its owner's word names a cluster: it was {was}.")
    if (directory / results.BREAKDOWN_FILE).exists():
        raise rundir.RunError(f"{directory} holds a breakdown, which cannot be gone on with; trace its cells anew.")
    with rundir.measuring(directory, resumed=True):
        done = results.read(directory) if os.path.lexists(directory / results.RESULTS_FILE) else []  # also a link
        results.mend(directory)
        series = _series(manifest, done)
        say(series.resumed)
        with _again(manifest, around or Dependencies()) as there:
            if series.waiting:
                _check_place(manifest, there, say)
            return _measure(directory, manifest, done, series, say, there)


@contextlib.contextmanager
def _again(manifest: SweepManifest, around: Dependencies) -> Iterator[Dependencies]:
    """With the cluster that the sweep was on. Raises ConfigError, ClusterError and RunError."""
    if around.cluster is None and manifest.on is None:
        check_nodes(manifest, 1)
    if around.cluster is not None or manifest.on is None:
        yield around
        return
    with joined(ray_address(manifest.on), manifest.nodes_per_cell, "--nodes-per-cell") as cluster:
        cluster.check(())
        yield replace(around, cluster=cluster)


def _check_place(manifest: SweepManifest, around: Dependencies, say: Say) -> None:
    """That it goes on on GPUs of the same kinds; says so where the machine is another. Raises RunError."""
    here = _names(_devices(manifest, around, around.inventory()))
    kinds = [set(names) - {UNKNOWN} for names in (manifest.device_names, here)]
    if all(kinds) and kinds[0] != kinds[1]:
        was, now = (", ".join(sorted(each)) for each in kinds)
        raise rundir.RunError(
            f"this sweep was on {was}, and here is {now}; go on where it was, or begin another with --out."
        )
    began, host = manifest.machine.hostname, rundir.this_machine().hostname
    if began != host:
        say(f"this sweep began on {began} and goes on on {host}; two machines differ in speed.")


def check_nodes(manifest: SweepManifest, nodes: int) -> None:
    """That a sweep goes on with as many nodes as it had. Raises RunError."""
    if manifest.on is None and manifest.nodes_per_cell != nodes:
        raise rundir.RunError(
            f"this sweep was on {manifest.nodes_per_cell} node{'' if manifest.nodes_per_cell == 1 else 's'}; name "
            f"--nnodes {manifest.nodes_per_cell}, --node-rank and --rdzv-endpoint beside --resume, on each of them."
            if manifest.nodes_per_cell > 1
            else "this sweep was on one node; leave --nnodes out."
        )
    if manifest.on is not None and nodes > 1:
        raise rundir.RunError(f"this sweep was on {manifest.on}, where it goes on; leave --nnodes out.")


def _series(manifest: SweepManifest, done: Sequence[CellResult]) -> MeasurementSeries:
    return MeasurementSeries("cell", [cell.name for cell in manifest.cells], [result.cell for result in done])


def _measure(
    directory: Path,
    manifest: SweepManifest,
    done: Sequence[CellResult],
    series: MeasurementSeries,
    say: Say,
    around: Dependencies,
) -> int:
    """Measures the cells that have no result yet."""
    labels = {"platform": manifest.platform, "version": manifest.version, "preset": manifest.preset or ""}
    progress = Progress(
        directory, manifest.run_id, labels, series, done, say, lambda cell, speed: utilization(cell, manifest, speed)
    )
    measuring = _Measuring(directory, manifest, around, progress, series)
    code = exit_codes.FAILED
    try:
        code = until_stopped(directory, progress.say, measuring.all)
    except NodeLost as lost:
        progress.say(f"{lost}; what is done is in {directory}, and --resume goes on once all nodes are there")
    finally:
        progress.end("finished" if code == exit_codes.OK else "stopped")
    if code not in (exit_codes.OK, exit_codes.FAILED):
        say(series.remainder("training_probe sweep", directory))
    return code


class _Measuring:
    """The cells of a sweep, as they are measured; on a cluster several at a time."""

    def __init__(
        self,
        directory: Path,
        manifest: SweepManifest,
        around: Dependencies,
        progress: Progress,
        series: MeasurementSeries,
    ) -> None:
        self._cancelled = threading.Event()
        waiting = set(series.waiting)
        self._cells = [cell for cell in manifest.cells if cell.name in waiting]
        self._directory, self._manifest, self._around, self._progress = directory, manifest, around, progress
        self._lock = threading.Lock()
        if around.cluster is None:
            series.instant.update(cell.name for cell in self._cells if self._refusal(cell, manifest) is not None)

    def all(self, cancelled: threading.Event) -> None:
        """One after another, or on a cluster. Raises Stopped and NodeLost."""
        self._cancelled = cancelled
        if self._around.cluster is not None:
            self._around.cluster.each(self._cells, self.on_nodes, cancelled)
            return
        with contextlib.closing(MemoryReturn(self._around.probe, self._manifest.gpu_ids)) as memory:
            for cell in self._cells:
                self._cell(cell, self._manifest, self._around, memory)

    def on_nodes(self, cell: Cell, placed: Placed | str) -> None:
        """One, on nodes that it has to itself; or why there are none."""
        if isinstance(placed, str):
            self._over(cell, "crashed", placed)
            return
        found = placed.gpus
        manifest = msgspec.structs.replace(
            self._manifest,
            gpu_ids=tuple(range(len(found))),
            device_names=[gpu.name for gpu in found],
            device_memory_bytes=[gpu.memory_bytes for gpu in found],
        )
        self._cell(cell, manifest, replace(self._around, place=placed.nodes), placed.nodes, placed.nodes.hosts)

    def _cell(
        self, cell: Cell, manifest: SweepManifest, around: Dependencies, memory: GpuMemory, nodes: Sequence[str] = ()
    ) -> None:
        """Raises Stopped."""
        why = self._refusal(cell, manifest)
        if why is not None:
            self._over(cell, *why)
            return
        predicted = around.predicted_fields(cell, manifest)
        progress = self._progress.begin(cell, predicted.get("predicted_memory_gb"))
        context = Context(
            directory=self._directory, manifest=manifest, around=around, progress=progress, memory=memory,
            cancelled=self._cancelled, nodes=nodes,
        )  # fmt: skip
        result = CellRun(context, cell).result()
        with self._lock:
            results.append(self._directory, result)
            progress.over(result)

    def _refusal(self, cell: Cell, manifest: SweepManifest) -> tuple[Outcome, str] | None:
        return self._around.refusal(cell, manifest, device_memory_bytes(cell, manifest))

    def _over(self, cell: Cell, outcome: Outcome, reason: str) -> None:
        """A cell that is not run."""
        shutil.rmtree(self._directory / "trials" / cell.name, ignore_errors=True)
        predicted: Predicted = {} if outcome == "unsupported" else self._around.predicted_fields(cell, self._manifest)
        result = of_cell(cell, platform=self._manifest.platform, outcome=outcome, reason=reason,
                         started_unix_s=time.time(), deepspeed=self._manifest.trial(cell).deepspeed,
                         **predicted)  # fmt: skip
        with self._lock:
            results.append(self._directory, result)
            self._progress.over(result)


def dry_run(
    cells: Sequence[Cell],
    settings: Settings,
    directory: Path,
    around: Dependencies | None = None,
    rendezvous: tuple[str, int] | None = None,
) -> str:
    """A script, for this machine or another one, that does the first run of each cell; beside it as comments
    DeepSpeed's configuration and the predicted memory, or why a cell would not be run. rendezvous: where the nodes of
    several meet; the script is the same for each, and has its rank from a variable. Nothing is started, nothing
    written."""
    around, node, port = around or Dependencies(), ALONE, DRY_RUN_PORT
    lines = []
    if rendezvous is not None:
        nodes = settings.nodes_per_cell
        node, port = NodeRank(rank=NODE_RANK, nodes=nodes, master=rendezvous[0]), rendezvous[1]
        lines = [f"# on each of {nodes} nodes at the same time: NODE_RANK=<0 to {nodes - 1}> bash THIS_SCRIPT"]
    for cell in cells:
        lines += ["", *_dry_lines(cell, settings, directory, around, (node, port))]
    return "\n".join(lines if rendezvous else lines[1:]) + "\n"


def _dry_lines(
    cell: Cell, settings: Settings, directory: Path, around: Dependencies, at: tuple[NodeRank, int]
) -> Iterator[str]:
    yield f"# {cell.name}"
    model = settings.model(cell)
    why = impossible(cell, model.decoder, model.unknown)
    if why is not None:
        yield f"# unsupported: {why}"
        return
    how, trial = around.launching(cell, settings), settings.trial(sized(cell))
    if cell.device == "cuda" and cell.gpus > len(settings.gpu_ids):
        each = cell.gpus // at[0].nodes
        gpus = "GPU" if each == 1 else f"{each} GPUs"
        yield f"# for a machine with its {gpus}; a sweep there sets {THREADS} to a process's share of the cores"
    if cell.micro_batch is None:
        yield f"# micro batch: searched, up to {settings.max_micro_batch}; what follows is for 1"
    run_directory = directory / "trials" / cell.name / "run-1"
    yield from files_of(trial, run_directory)
    node, port = at
    yield command_of(trial, run_directory, how, port, node)
    if cell.engine == "deepspeed":
        config = own_deepspeed.merged(trial.cell, trial.deepspeed)
        yield from (f"# {line}" for line in json.dumps(config, indent=2).splitlines())
    prediction = around.predict(cell, settings)
    if prediction is not None:
        terms = ", ".join(f"{name} {size / GIB:.2f}" for name, size in prediction.terms_bytes.items())
        yield f"# predicted memory: {prediction.peak_bytes / GIB:.2f} GiB ({terms})"
    elif note := unpredicted(cell, settings):
        yield f"# {note}"
