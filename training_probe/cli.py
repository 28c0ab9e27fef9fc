"""The command line: `sweep`, `breakdown` and `micro` measure; `plan` and `memory` predict; `report` and `compare` read
results.

Exit codes: 0 ok, 2 bad options, 3 a cell or point crashed or hung, 4 a cell's losses make its speed meaningless, or a
collective gave a wrong result, 5 a limit of `compare --fail-if` is broken, 129, 130, 143 stopped by SIGHUP, Ctrl-C,
SIGTERM, 141 standard output was not read to its end. Out of memory is a result, and so is a cell that is unsupported or
predicted not to fit. A user's mistake is one sentence on standard error. Only what a command needs is imported; torch
never is: it belongs to the processes that measure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from loadgen import exit_codes, terminal
from loadgen.option_types import JunitOption, SummaryOption, Whole, option
from loadgen.terminal import say, width
from training_probe.micro import cli
from training_probe.options import CELLS, OUTPUT, Grid, Measuring, OnCluster, PredictedGrid, TracedGrid, Tracing

if TYPE_CHECKING:
    from training_probe.grid import Cell, Device, Model
    from training_probe.memory.text import Described


def sweep(
    grid: Annotated[Grid | None, Parameter(name="*")] = None,
    measuring: Annotated[Measuring | None, Parameter(name="*")] = None,
    where: Annotated[OnCluster | None, Parameter(name="*")] = None,
    *,
    out: Annotated[Path | None, option(OUTPUT, "Directory of the sweep; by default runs/ and its time.")] = None,
    metrics_port: Annotated[
        Whole | None,
        option(
            OUTPUT,
            "Serve the sweep's metrics for Prometheus on this port of 127.0.0.1 while it lasts; "
            "loadgen export does so at any time.",
        ),
    ] = None,
    resume: Annotated[
        Path | None, option(OUTPUT, "Go on with the sweep in this directory; what it measures stands in its manifest.")
    ] = None,
    dry_run: Annotated[
        bool,
        option(
            OUTPUT,
            "Print commands, DeepSpeed's configurations and predicted memory; start nothing.",
            show_default=False,
        ),
    ] = False,
) -> int:
    """Measure how fast and in how much memory this machine trains, method by method, and print the paper's tables with
    this machine's column beside the paper's.

    Without cells it is the laptop preset: a tiny model through three real engines, in minutes, also without a GPU. Each
    cell runs in processes of its own; what fails becomes a row with its reason. Where standard output is no
    terminal, its last line is the report as JSON.

    For example: training_probe sweep --model 7b --method F+Z3 F+R+Z3 --micro-batch 1 max
    """
    from training_probe.grid import GridError

    if metrics_port is not None and not 0 < metrics_port < 1 << 16:
        raise GridError(f"--metrics-port is {metrics_port}; it must be from 1 to 65535.")
    grid, measuring, where = grid or Grid(), measuring or Measuring(), where or OnCluster()
    if resume is not None:
        asked = (grid, measuring, where) != (Grid(), Measuring(), OnCluster())
        if asked or out is not None or dry_run:
            raise GridError("--resume goes on with what was asked for before; leave all other options out.")
        from training_probe.sweep.run import resume as go_on

        _serve_metrics(resume, metrics_port)
        return _report(resume, go_on(resume, say))
    where.check()
    if where.on is not None:
        return _sweep_on_cluster(grid, measuring, where, out, metrics_port, dry_run)
    return _sweep(grid, measuring, out, metrics_port, dry_run)


def _sweep_on_cluster(
    grid: Grid, measuring: Measuring, where: OnCluster, out: Path | None, metrics_port: int | None, dry_run: bool
) -> int:
    from loadgen import rundir
    from training_probe import on_cluster
    from training_probe.grid import GridError

    directory = out or Path("runs") / rundir.new_run_id()
    if where.on == "slurm":
        if metrics_port is not None:
            raise GridError("--on slurm starts nothing that has metrics; leave --metrics-port out.")
        print(on_cluster.scripts(grid, measuring, where, sys.argv[1:], directory), end="")
        say("nothing was started; save each script and submit it with sbatch")
        return exit_codes.OK
    if dry_run:
        raise GridError("--dry-run shows what one machine would start; leave --on out, or name --on slurm.")
    code = on_cluster.sweep(
        grid, measuring, where, sys.argv[1:], directory, lambda: _serve_metrics(directory, metrics_port)
    )
    return _report(directory, code)


def _sweep(grid: Grid, measuring: Measuring, out: Path | None, metrics_port: int | None, dry_run: bool) -> int:
    """A new one."""
    from dataclasses import replace

    from loadgen import rundir
    from training_probe.sweep import run as sweeps

    if grid == Grid(device=grid.device, gpus=grid.gpus):
        grid = replace(grid, preset="laptop")
    cells, known, gpu_ids, here = _chosen(grid)
    settings = measuring.settings(grid.preset, known, gpu_ids, sys.argv[1:])
    directory = out or Path("runs") / rundir.new_run_id()
    if dry_run:
        print(sweeps.dry_run(cells, settings, directory), end="")
        say(f"{len(cells)} cell{'' if len(cells) == 1 else 's'}; nothing was started")
        return exit_codes.OK
    from training_probe.options import check_large, check_machine

    if grid.device is None:
        check_large(cells, known)
    check_machine(cells, here)
    _serve_metrics(directory, metrics_port)
    return _report(directory, sweeps.sweep(cells, settings, directory, say))


def breakdown(
    grid: Annotated[TracedGrid | None, Parameter(name="*")] = None,
    tracing: Annotated[Tracing | None, Parameter(name="*")] = None,
    *,
    out: Annotated[Path | None, option(OUTPUT, "Directory of what is traced; by default runs/ and its time.")] = None,
) -> int:
    """Trace training steps and say where their time goes: forward, backward and optimizer; embedding, QKV, RoPE and the
    other parts of the model; GEMM, attention, element-wise, communication, memory copies; and what is idle.

    Without cells it is Naive, F and R of the default model. Traces are kept, for Perfetto. The last line of standard
    output is the report as JSON.

    For example: training_probe breakdown --model 7b --method Naive F --micro-batch 2
    """
    from dataclasses import replace

    from loadgen import rundir
    from training_probe.breakdown import run as traced
    from training_probe.options import check_large, check_machine

    grid, tracing = grid or TracedGrid(), tracing or Tracing()
    if grid == TracedGrid(device=grid.device, gpus=grid.gpus):
        grid = replace(grid, method=("Naive", "F", "R"))
    cells, known, gpu_ids, here = _chosen(grid)
    traced.check(cells)
    settings = tracing.settings(grid.preset, known, gpu_ids, sys.argv[1:])
    if grid.device is None:
        check_large(cells, known)
    check_machine(cells, here)
    directory = out or Path("runs") / rundir.new_run_id()
    return _report(directory, traced.breakdown(cells, settings, directory, say))


def _serve_metrics(directory: Path, port: int | None) -> None:
    if port is not None:
        from loadgen.monitor.exporter import in_background

        in_background(directory, port)


def _chosen(grid: Grid) -> tuple[list[Cell], dict[str, Model], tuple[int, ...], int]:
    """Cells, their models, the GPUs that may be used, and how many those are."""
    from backends import gpus
    from training_probe.options import known_models, visible_gpus

    gpu_ids: tuple[int, ...] = ()
    if grid.device != "cpu":
        gpu_ids = visible_gpus(gpus.read())
    device: Device = grid.device or ("cuda" if gpu_ids else "cpu")
    cells = grid.cells(device, len(gpu_ids))
    return cells, known_models(cells), gpu_ids, len(gpu_ids)


def _report(directory: Path, code: int) -> int:
    """Prints what there is so far, and writes its report."""
    from training_probe import results
    from training_probe.report import build as reports

    if (directory / results.BREAKDOWN_FILE).exists():
        return _report_breakdown(directory, code)
    if not (directory / results.RESULTS_FILE).exists():
        return code
    measured = results.read(directory)
    page = reports.page(measured, reports.read_manifest(directory))
    say("\n" + page.text(width(sys.stderr)))
    return cli.finished(directory, page, {result.state for result in measured}, code)


def _report_breakdown(directory: Path, code: int) -> int:
    from training_probe.breakdown import report as reports
    from training_probe.breakdown.run import read
    from training_probe.report.build import read_manifest

    traced = read(directory)
    say("\n" + reports.text(traced, width(sys.stderr)))
    page = reports.page(traced, read_manifest(directory))
    return cli.finished(directory, page, {each.outcome for each in traced}, code)


def plan(
    grid: Annotated[PredictedGrid | None, Parameter(name="*")] = None,
    *,
    gpu_memory_gb: Annotated[
        float | None, option(CELLS, "Memory of each GPU, GiB; by default that of the GPUs here.")
    ] = None,
) -> int:
    """Predict the memory of each cell, term by term, and which are certain not to fit. Needs no GPU, starts nothing.

    Without cells it is the preset paper-table3. A preset without GPUs here is for as many as the paper had.

    For example: training_probe plan --preset paper-table3 --gpus 8 --gpu-memory-gb 80
    """
    from training_probe.memory import text

    grid = grid or PredictedGrid()
    if grid == PredictedGrid(gpus=grid.gpus):
        grid = PredictedGrid(preset="paper-table3", gpus=grid.gpus)
    cells, known, device_bytes = _hypothetical(grid, gpu_memory_gb)
    print(text.plan(cells, known, device_bytes), end="")
    return exit_codes.OK


def memory(
    grid: Annotated[PredictedGrid | None, Parameter(name="*")] = None,
    *,
    gpu_memory_gb: Annotated[
        float | None, option(CELLS, "Memory of each GPU, GiB; by default the answer is for the usual cards.")
    ] = None,
) -> int:
    """Predict the memory of a cell at each moment of a step, with the arithmetic, and on which cards it fits.

    For example: training_probe memory --model 70b --method F+R+Z3+O --gpus 8
    """
    from training_probe.memory import text

    cells, known, device_bytes = _hypothetical(grid or PredictedGrid(), gpu_memory_gb)
    print("\n".join(text.explained(cell, known, device_bytes if gpu_memory_gb else None) for cell in cells), end="")
    return exit_codes.OK


def _hypothetical(
    grid: PredictedGrid, gpu_memory_gb: float | None
) -> tuple[list[Cell], dict[str, Described], int | None]:
    """Cells on GPUs, however many there are here, and how much memory each of those has."""
    from dataclasses import replace

    from backends import gpus
    from training_probe import paper
    from training_probe.grid import GridError
    from training_probe.options import check_above_0, described_models, visible_gpus

    check_above_0("--gpu-memory-gb", gpu_memory_gb)
    if grid.device == "cpu":
        raise GridError("memory is predicted for GPUs; leave --device cpu out.")
    inventory = gpus.read()
    visible = visible_gpus(inventory)
    count = len(visible) or (paper.GPUS if grid.preset else 1)
    cells = replace(grid, device="cuda").cells("cuda", count)
    here = [gpu.memory_bytes for gpu in inventory.gpus if gpu.index in visible and gpu.memory_bytes]
    given = None if gpu_memory_gb is None else int(gpu_memory_gb * (1 << 30))
    return cells, described_models(cells), given or min(here, default=None)


def report(directory: Annotated[Path, Parameter(help="Directory of a sweep, a breakdown or a micro.")], /) -> int:
    """Make the tables and figures of a measurement anew from its results, also of one that was killed."""
    from training_probe.micro import run
    from training_probe.results import BREAKDOWN_FILE, RESULTS_FILE, ResultsError

    if (directory / run.RESULTS_FILE).is_file():
        return cli.reported(directory, exit_codes.OK)
    if not any((directory / name).is_file() for name in (RESULTS_FILE, BREAKDOWN_FILE)):
        raise ResultsError(f"{directory} holds no results; name the directory of a sweep, a breakdown or a micro.")
    return _report(directory, exit_codes.OK)


def compare(
    a: Annotated[Path, Parameter(help="Directory of a sweep, a breakdown or a micro.")],
    b: Annotated[Path, Parameter(help="Directory to compare with it.")],
    /,
    *,
    fail_if: Annotated[
        tuple[str, ...],
        Parameter(
            help="Limit on how much worse any cell or point of B may be, repeatable: 'tokens_per_s<-3%', "
            "'mfu_ratio<-3%', 'peak_memory_gb>+0.5GiB'; of a micro 'median_ms>+5%', of a breakdown 'step_ms>+5%'.",
            negative=(),
        ),
    ] = (),
    junit: JunitOption = None,
    summary: SummaryOption = None,
) -> int:
    """Print how B differs from A, cell by cell, or point by point of micro-benchmarks.

    With --fail-if it is a gate. The exit code is 5 where a cell of B is worse than a limit by more than the interval
    explains, or failed that did not in A; 4 where a cell is invalid or a limit cannot be judged; and 0 otherwise.
    """
    from loadgen.report import gate
    from training_probe.compare import compare as compared

    gate.check_options(fail_if, junit, summary)
    comparison = compared(a, b, width(sys.stdout))
    checks = comparison.judged(fail_if) if fail_if else []
    print(comparison.text)
    if not checks:
        return exit_codes.OK
    print(gate.render(checks, comparison.warnings), end="", flush=True)
    return gate.finish(checks, comparison.warnings, "training_probe", junit, summary)


def letters() -> int:
    """List the letters of a method and what each means."""
    from training_probe.grid import LETTERS, NAIVE

    for letter, meaning in {NAIVE: "none of these", **LETTERS}.items():
        print(f"{letter:<6} {meaning}")
    return exit_codes.OK


def build_app() -> App:
    from loadgen.rundir import package_version

    app = App(
        name="training_probe",
        help="Measures how fast and in how much memory large language models are trained and fine-tuned here.",
        version=package_version,
        result_action="return_value",
    )
    for command in (sweep, breakdown, plan, memory, report, compare, letters):
        app.command(command)
    app.command(cli.build_app())
    return app


def _exit_code_of(error: Exception) -> int | None:
    """Of a mistake of the user or a failed start; None: of a defect. Imported late, since most commands never fail."""
    from backends.gpus import GpuError
    from loadgen.config import ConfigError
    from loadgen.rundir import RunError
    from loadgen.target import TransportError
    from training_probe.grid import GridError
    from training_probe.launch.runner import RunnerError
    from training_probe.points import MicroError
    from training_probe.report.page import ReportError
    from training_probe.results import ResultsError

    if isinstance(error, (GridError, ConfigError, RunError, GpuError, MicroError, ReportError, ResultsError)):
        return exit_codes.BAD_OPTIONS
    return exit_codes.FAILED if isinstance(error, (RunnerError, TransportError)) else None


def invoke(tokens: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    return terminal.invoke(
        "training_probe", lambda: build_app()(list(tokens), exit_on_error=False, print_error=False), _exit_code_of
    )


def main() -> None:
    terminal.main(invoke)
