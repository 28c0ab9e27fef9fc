"""The commands `training_probe micro gemm`, `memcpy` and `collectives`.

Exit codes: those of training_probe.cli; 3 where processes crashed or hung, 4 where a collective gave a wrong result.
What cannot be measured here, or runs out of memory, is a result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from loadgen.terminal import say, width
from training_probe import options
from training_probe.micro import presets
from training_probe.micro.points import Dtype, Kind, MicroError, Name, Point, Task
from training_probe.micro.presets import CollectivePreset, CopyPreset, Device, GemmPreset
from training_probe.options import whole

if TYPE_CHECKING:
    from backends.gpus import Inventory

SAMPLES = 50
BUDGET_S: dict[Device, float] = {"cuda": 0.5, "cpu": 0.1}  # of a point, where nobody asked for a number of samples
# Of a product on a GPU: a power limit slows it and lets go of it again for tenths of a second at a time.
PRODUCT_SAMPLES, PRODUCT_BUDGET_S = 150, 1.5
CPU_RANKS, MAX_RANKS, MAX_SAMPLES = 2, 64, 100_000


def _list(help: str, **more: Any) -> Parameter:
    return Parameter(help=help, negative=(), consume_multiple=1, show_default=False, **more)


def _sizes(kind: Any, tokens: Sequence[Any]) -> tuple[int, ...]:
    """Raises ValueError, which cyclopts tells the user."""
    return tuple(presets.size(token.value) for token in tokens)


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How points are measured."""

    device: Annotated[Device | None, Parameter(help="By default cuda where there is a GPU.")] = None
    samples: Annotated[
        int | None,
        Parameter(
            help=f"Measurements of each point; by default {SAMPLES}, of products on a GPU {PRODUCT_SAMPLES}, fewer "
            "where they take long, Table XII: 320.",
            converter=whole,
        ),
    ] = None
    timeout: Annotated[float, Parameter(help="Seconds without a new point after which the processes are ended.")] = (
        300.0
    )
    out: Annotated[Path | None, Parameter(help="Directory of the results; by default runs/ and its time.")] = None

    def check(self) -> None:
        """Raises MicroError."""
        if self.samples is not None and not 2 <= self.samples <= MAX_SAMPLES:
            raise MicroError(f"--samples is {self.samples}; it must be from 2 to {MAX_SAMPLES}.")
        options.check_above_0("--timeout", self.timeout)


def gemm(
    *,
    m: Annotated[tuple[int, ...], _list("Rows of the activations (tokens).", converter=whole)] = (),
    n: Annotated[tuple[int, ...], _list("Outputs of the layer.", converter=whole)] = (),
    k: Annotated[tuple[int, ...], _list("Inputs of the layer.", converter=whole)] = (),
    dtype: Annotated[tuple[Dtype, ...], _list("bf16 fp16 fp32 tf32 int8 fp8; by default bf16, CPU: fp32 bf16.")] = (),
    preset: Annotated[GemmPreset | None, Parameter(help="The paper's shapes; --dtype chooses among types.")] = None,
    measuring: Annotated[Measuring | None, Parameter(name="*")] = None,
) -> int:
    """Time matrix products, every combination of M, N and K, as shares of the GPU's peak: the data sheet's, and that of
    the fastest product of the same run.

    For example: training_probe micro gemm --m 666 10624 --n 11008 --k 4096 --dtype bf16 fp8
    """
    measuring = measuring or Measuring()
    device, inventory, gpu_ids = _machine(measuring, preset)
    points = presets.gemms(device, m=m, n=n, k=k, dtypes=dtype, preset=preset)
    return _run("gemm", preset, points, measuring, device, inventory, gpu_ids[:1])


def memcpy(
    *,
    sizes: Annotated[tuple[int, ...], _list("Such as 4K 64M 1G; by default 1 KiB to 1 GiB.", converter=_sizes)] = (),
    preset: Annotated[CopyPreset | None, Parameter(help="Figure 12: host to device and back.")] = None,
    measuring: Annotated[Measuring | None, Parameter(name="*")] = None,
) -> int:
    """Time copies from host to device and back, pageable and pinned, and within the device; without a GPU within the
    host.

    For example: training_probe micro memcpy --sizes 1K 1M 1G
    """
    measuring = measuring or Measuring()
    device, inventory, gpu_ids = _machine(measuring, preset)
    points = presets.copies(device, sizes=sizes, preset=preset)
    return _run("memcpy", preset, points, measuring, device, inventory, gpu_ids[:1])


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
        int | None, Parameter(help="Ranks, one a GPU; by default all GPUs here, without any 2.", converter=whole)
    ] = None,
    preset: Annotated[
        CollectivePreset | None, Parameter(help="The collectives of the paper's Figures 13 to 15.")
    ] = None,
    measuring: Annotated[Measuring | None, Parameter(name="*")] = None,
) -> int:
    """Time collectives over NCCL, with P2P and without, or over gloo on the CPU; each result is checked once.

    For example: training_probe micro collectives --op allreduce allgather --sizes 1M 64M 1G
    """
    measuring = measuring or Measuring()
    device, inventory, gpu_ids = _machine(measuring, preset)
    ranks = _ranks(gpus, device, len(gpu_ids))
    ways = [way == "on" for way in p2p]
    points = presets.collectives(device, ranks, names=op, sizes=sizes, p2p=ways, preset=preset)
    return _run("collectives", preset, points, measuring, device, inventory, gpu_ids[:ranks], ranks=ranks)


def _ranks(asked: int | None, device: Device, here: int) -> int:
    """Raises MicroError."""
    ranks = asked if asked is not None else here if device == "cuda" else CPU_RANKS
    if ranks < 2:
        why = "this machine has one GPU that can be used" if asked is None else f"--gpus is {asked}"
        how = " (with --device cpu they run over gloo)" if device == "cuda" else ""
        raise MicroError(f"{why}; collectives need at least 2{how}.")
    if device == "cuda" and ranks > here:
        raise MicroError(f"--gpus is {ranks} and this machine has {here} that can be used.")
    if ranks > MAX_RANKS:
        raise MicroError(f"--gpus is {ranks}; at most {MAX_RANKS} ranks are started on one machine.")
    return ranks


def _machine(measuring: Measuring, preset: str | None) -> tuple[Device, Inventory, tuple[int, ...]]:
    """The device, what GPUs there are and which may be used. Raises MicroError, GpuError."""
    from backends import gpus

    measuring.check()
    inventory = gpus.Inventory() if measuring.device == "cpu" else gpus.read()
    gpu_ids = options.visible_gpus(inventory)
    device: Device = measuring.device or ("cuda" if gpu_ids else "cpu")
    if device == "cuda" and not gpu_ids:
        raise MicroError(f"this machine has no GPU that can be used ({inventory.problem or 'none is visible'}).")
    if preset is not None and measuring.device is None and device == "cpu":
        raise MicroError(f"--preset {preset} is for GPUs and this machine has none; --device cpu runs it all the same.")
    if find_spec("torch") is None:
        raise MicroError("torch is not installed; pip install 'llm-dissect[train]'.")
    return device, inventory, gpu_ids


def _sampling(measuring: Measuring, kind: Kind, preset: str | None, device: Device) -> tuple[int, float | None]:
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
    measuring: Measuring,
    device: Device,
    inventory: Inventory,
    gpu_ids: tuple[int, ...],
    *,
    ranks: int = 1,
) -> int:
    import time

    from backends import gpus, process
    from loadgen import rundir
    from training_probe.micro import run

    samples, budget_s = _sampling(measuring, kind, preset, device)
    names = {gpu.index: gpu.name for gpu in inventory.gpus}
    device_names = dict.fromkeys(names.get(index, "unknown GPU") for index in gpu_ids)
    between = kind == "collectives" and device == "cuda"
    manifest = run.Manifest(
        run_id=rundir.new_run_id(),
        started_unix_s=time.time(),
        version=rundir.package_version(),
        kind=kind,
        preset=preset,
        device=device,
        device_name=", ".join(device_names) or "CPU",
        gpu_ids=gpu_ids,
        ranks=ranks,
        p2p=gpus.decide_p2p("auto", inventory, gpu_ids).reason if between else "",
        driver=inventory.driver,
        task=Task(device=device, points=list(points), samples=samples, budget_s=budget_s),
        timeout_s=measuring.timeout,
        argv=tuple(sys.argv[1:]),
        environment=process.gpu_variables(os.environ),
    )
    directory = measuring.out or Path("runs") / manifest.run_id
    return reported(directory, run.measure(manifest, directory, say))


def reported(directory: Path, code: int) -> int:
    """Prints what there is so far, and writes its report; the exit code."""
    import json

    from training_probe.micro import report as micro_report

    found, report = micro_report.redo(directory)
    say("\n" + micro_report.text(found, report, width(sys.stderr)))
    say(f"{directory}/: " + ", ".join(sorted(path.name for path in directory.iterdir())))
    print(json.dumps(report))
    outcomes = {result.outcome for result in found}
    if code != 0 or outcomes.isdisjoint(("crashed", "timeout", "wrong")):
        return code
    return 4 if outcomes.isdisjoint(("crashed", "timeout")) else 3


def build_app() -> App:
    app = App(name="micro", help="Measure what training is made of: matrix products, memory copies, collectives.")
    for command in (gemm, memcpy, collectives):
        app.command(command)
    return app
