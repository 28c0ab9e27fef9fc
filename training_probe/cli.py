"""The command line: `sweep`, `breakdown` and `micro` measure; `plan` and `memory` predict; `report` and `compare` read
results.

Exit codes: 0 ok, 1 `memory --check`: a cell does not fit, 2 bad options, 3 a cell or point crashed or hung, or none
was run at all, 4 numbers are no measurement: by a cell's losses, a wrong collective or noise
(training_probe.findings), 5 a limit of `compare --fail-if` is broken, 129, 130, 143 stopped by SIGHUP, Ctrl-C,
SIGTERM, 141 standard output was not read to its end. Out of memory is a result, and so is a cell that is unsupported
or predicted not to fit. A user's mistake is one sentence on standard error. Only what a command needs is imported;
torch never is: it belongs to the processes that measure.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from backends import exit_codes
from loadgen import terminal
from loadgen.option_types import JunitOption, SummaryOption, Whole, option
from loadgen.terminal import say, width
from training_probe.micro import cli
from training_probe.options import CELLS, OUTPUT, Grid, Measuring, OnCluster, PredictedGrid, TracedGrid, Tracing

if TYPE_CHECKING:
    from training_probe.grid import Cell, Device, Model
    from training_probe.memory.text import Capacity, Described


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
    where.check(grid.gpus, ranked=not dry_run)
    if resume is not None:
        if (grid, measuring, out, dry_run) != (Grid(), Measuring(), None, False):
            raise GridError("--resume goes on with what was asked for before; leave all other options out.")
        return _resume(where, resume, metrics_port)
    if where.on is not None:
        return _sweep_on_cluster(grid, measuring, where, out, metrics_port, dry_run)
    if where.nnodes > 1:
        return _sweep_on_nodes(grid, measuring, where, out, metrics_port, dry_run)
    return _sweep(grid, measuring, out, metrics_port, dry_run)


def _resume(where: OnCluster, directory: Path, metrics_port: int | None) -> int:
    from training_probe import on_cluster
    from training_probe.sweep import run as sweeps

    if where.node_rank:
        return on_cluster.follow(Grid(), Measuring(), where, resumed=True)
    _serve_metrics(directory, metrics_port)
    if where.nnodes > 1:
        return _report(directory, on_cluster.resume_on_nodes(where, directory))
    return _report(directory, sweeps.resume(directory, say, on=where.on))


def _sweep_on_nodes(
    grid: Grid, measuring: Measuring, where: OnCluster, out: Path | None, metrics_port: int | None, dry_run: bool
) -> int:
    from loadgen import rundir
    from training_probe import on_cluster

    directory = out or Path("runs") / rundir.new_run_id()
    if dry_run:
        print(on_cluster.dry_run(grid, measuring, where, sys.argv[1:], directory), end="")
        say("nothing was started")
        return exit_codes.OK
    if where.node_rank:
        return on_cluster.follow(grid, measuring, where, resumed=False)
    code = on_cluster.sweep_on_nodes(
        grid, measuring, where, sys.argv[1:], directory, lambda: _serve_metrics(directory, metrics_port)
    )
    return _report(directory, code)


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
    from training_probe import own_deepspeed
    from training_probe.options import check_checkpoints
    from training_probe.sweep import run as sweeps

    if grid == Grid(device=grid.device, gpus=grid.gpus):
        grid = replace(grid, preset="laptop")
    cells, known, gpu_ids = _chosen(grid, elsewhere=dry_run)
    settings = measuring.settings(grid.preset, known, gpu_ids, sys.argv[1:])
    for clause in own_deepspeed.check(cells, settings.deepspeed):
        say(f"{clause}.")
    directory = out or Path("runs") / rundir.new_run_id()
    if dry_run:
        print(sweeps.dry_run(cells, settings, directory), end="")
        say(f"{len(cells)} cell{'' if len(cells) == 1 else 's'}; nothing was started")
        return exit_codes.OK
    if settings.checkpoint_io:
        check_checkpoints(cells, settings, directory)
    _check_here(grid, cells, known, gpu_ids)
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
    from training_probe import own_deepspeed
    from training_probe.breakdown import run as traced

    grid, tracing = grid or TracedGrid(), tracing or Tracing()
    if grid == TracedGrid(device=grid.device, gpus=grid.gpus):
        grid = replace(grid, method=("Naive", "F", "R"))
    cells, known, gpu_ids = _chosen(grid)
    traced.check(cells)
    settings = tracing.settings(grid.preset, known, gpu_ids, sys.argv[1:])
    for clause in own_deepspeed.check(cells, settings.deepspeed):
        say(f"{clause}.")
    _check_here(grid, cells, known, gpu_ids)
    directory = out or Path("runs") / rundir.new_run_id()
    return _report(directory, traced.breakdown(cells, settings, directory, say))


def _check_here(grid: Grid, cells: Sequence[Cell], known: Mapping[str, Model], gpu_ids: Sequence[int]) -> None:
    """That this machine can run the cells. Raises GridError."""
    from training_probe.options import check_built, check_large, check_machine

    if grid.device is None:
        check_large(cells, known)
    check_machine(cells, len(gpu_ids))
    check_built(known)


def _serve_metrics(directory: Path, port: int | None) -> None:
    if port is not None:
        from loadgen.monitor.exporter import in_background

        in_background(directory, port)


def _chosen(grid: Grid, elsewhere: bool = False) -> tuple[list[Cell], dict[str, Model], tuple[int, ...]]:
    """Cells, their models and the GPUs that may be used. elsewhere: the cells may be another machine's: those that are
    for GPUs, without any here, then are for as many as `plan` takes."""
    from backends import gpus
    from training_probe import paper
    from training_probe.grid import GridError
    from training_probe.options import check_large, check_possible, known_models, text_alone, visible_gpus

    gpu_ids: tuple[int, ...] = ()
    if grid.device != "cpu":
        gpu_ids = visible_gpus(gpus.read())
    device: Device = grid.device or ("cuda" if gpu_ids else "cpu")
    there = paper.GPUS if grid.preset else 1
    count = len(gpu_ids) or (there if elsewhere and device == "cuda" else 0)
    cells = grid.cells(device, count)
    known = known_models(cells)
    if elsewhere and grid.device is None and device == "cpu":
        try:
            check_large(cells, known)
        except GridError:
            cells = grid.cells("cuda", there)
    check_possible(cells, known)
    for sentence in [*(f"{clause}." for clause in grid.idle(device, count)), *text_alone(cells)]:
        say(sentence)
    return cells, known, gpu_ids


def _report(directory: Path, code: int) -> int:
    """Prints what there is so far, and writes its report."""
    from training_probe import results
    from training_probe.report import build as reports

    if (directory / results.BREAKDOWN_FILE).exists():
        return _report_breakdown(directory, code)
    if not (directory / results.RESULTS_FILE).exists():
        return code
    measured = results.read(directory)
    notes = reports.unread(directory / results.RESULTS_FILE)
    document = reports.document(measured, reports.read_manifest(directory), notes)
    return cli.published(directory, document, {result.state for result in measured}, code)


def _report_breakdown(directory: Path, code: int) -> int:
    from training_probe.breakdown import report as reports
    from training_probe.breakdown.run import read
    from training_probe.report.build import read_manifest, unread
    from training_probe.results import BREAKDOWN_FILE

    traced = read(directory)
    document = reports.document(traced, read_manifest(directory), unread(directory / BREAKDOWN_FILE))
    return cli.published(directory, document, {each.outcome for each in traced}, code)


GpuMemory = Annotated[
    float | None,
    option(CELLS, "Memory of each GPU, GiB (2**30 bytes), as on its box; by default that of the GPUs here."),
]
NodeMemory = Annotated[
    float | None,
    option(CELLS, "Memory of each node for what is offloaded, GiB; by default this machine's, where it has GPUs."),
]
Verbose = Annotated[
    bool, option(OUTPUT, "Show every moment of a step, and every term with its formula.", show_default=False)
]
AsJson = Annotated[bool, option(OUTPUT, "Print JSON, all terms included.", show_default=False)]
Check = Annotated[
    bool, option(OUTPUT, "End with exit code 1 where a cell does not fit, or cannot be judged.", show_default=False)
]


def plan(
    grid: Annotated[PredictedGrid | None, Parameter(name="*")] = None,
    *,
    gpu_memory_gb: GpuMemory = None,
    node_memory_gb: NodeMemory = None,
    verbose: Verbose = False,
    json: AsJson = False,
) -> int:
    """Predict the memory of each cell of a table of the paper, and which fit. It is the command memory, with the preset
    paper-table3 where no cells are named. A preset without GPUs here is for as many as the paper had.

    For example: training_probe plan --preset paper-table3 --gpus 8 --gpu-memory-gb 80
    """
    grid = grid or PredictedGrid()
    if grid == PredictedGrid(gpus=grid.gpus):
        grid = PredictedGrid(preset="paper-table3", gpus=grid.gpus)
    return memory(grid, gpu_memory_gb=gpu_memory_gb, node_memory_gb=node_memory_gb, verbose=verbose, json=json)


def memory(
    grid: Annotated[PredictedGrid | None, Parameter(name="*")] = None,
    *,
    gpu_memory_gb: GpuMemory = None,
    node_memory_gb: NodeMemory = None,
    verbose: Verbose = False,
    json: AsJson = False,
    check: Check = False,
) -> int:
    """Predict how much memory each cell takes and whether it fits, is tight or does not fit. Needs no GPU, starts
    nothing.

    For example: training_probe memory --model 70b --method F+R+Z3+O --gpus 8 --gpu-memory-gb 80 --verbose
    """
    from loadgen.document import files
    from training_probe.grid import GridError
    from training_probe.memory import text

    cells, known, capacity = _hypothetical(grid or PredictedGrid(), gpu_memory_gb, node_memory_gb)
    if check and capacity.gpu_bytes is None:
        raise GridError("--check compares with the memory of a GPU, and none is here; name it with --gpu-memory-gb.")
    predicted = text.predict_cells(cells, known, capacity)
    print(files.json_text(predicted) if json else text.text(predicted, verbose=verbose), end="")
    for line in text.hints(cells, known):
        say(line)
    return exit_codes.DOES_NOT_FIT if check and not text.all_fit(predicted) else exit_codes.OK


def _hypothetical(
    grid: PredictedGrid, gpu_memory_gb: float | None, node_memory_gb: float | None
) -> tuple[list[Cell], dict[str, Described], Capacity]:
    """Cells on GPUs, however many there are here, and how much memory each of those and their node has."""
    from dataclasses import replace

    from backends import gpus
    from loadgen.rundir import machine_memory_bytes
    from training_probe import paper
    from training_probe.grid import GridError
    from training_probe.memory.text import Capacity
    from training_probe.options import check_above_0, described_models, text_alone, visible_gpus
    from training_probe.results import GIB

    check_above_0("--gpu-memory-gb", gpu_memory_gb)
    check_above_0("--node-memory-gb", node_memory_gb)
    if grid.device == "cpu":
        raise GridError("memory is predicted for GPUs; leave --device cpu out.")
    inventory = gpus.read()
    visible = visible_gpus(inventory)
    count = len(visible) or (paper.GPUS if grid.preset else 1)
    grid = replace(grid, device="cuda")
    cells = grid.cells("cuda", count)
    if own := next((cell.engine for cell in cells if cell.own), None):
        raise GridError(f"what {own} keeps in memory is not known; name one of the engines that are built in.")
    for sentence in [*(f"{clause}." for clause in grid.idle("cuda", count)), *text_alone(cells)]:
        say(sentence)
    here = [gpu.memory_bytes for gpu in inventory.gpus if gpu.index in visible and gpu.memory_bytes]
    gpu_bytes = min(here, default=None) if gpu_memory_gb is None else int(gpu_memory_gb * GIB)
    node_bytes = None if node_memory_gb is None else int(node_memory_gb * GIB)
    if node_bytes is None and here:
        node_bytes = machine_memory_bytes()
    return cells, described_models(cells), Capacity(gpu_bytes, node_bytes)


def report(directory: Annotated[Path, Parameter(help="Directory of a sweep, a breakdown or a micro.")], /) -> int:
    """Make the tables and figures of a measurement anew from its results, also of one that was killed."""
    from loadgen import rundir
    from training_probe.micro import run
    from training_probe.results import BREAKDOWN_FILE, RESULTS_FILE, ResultsError

    with rundir.alone(directory):
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
    html: Annotated[
        Path | None, Parameter(help="Page to write, one file: differences with intervals, and the gate's checks.")
    ] = None,
) -> int:
    """Print how B differs from A, cell by cell, or point by point of micro-benchmarks.

    With --fail-if it is a gate. The exit code is 5 where a cell of B is worse than a limit by more than the interval
    explains, or failed that did not in A; 4 where A or B is INVALID, by a finding or a cell, or a limit cannot be
    judged; and 0 otherwise.
    """
    from loadgen.config import check_file
    from loadgen.document import files
    from loadgen.document.terminal import render
    from loadgen.report import gate
    from training_probe.compare import compare as compared

    gate.check_options(fail_if, junit, summary)
    check_file("--html", html, new=True)
    comparison = compared(a, b)
    checks = comparison.judged(fail_if) if fail_if else []
    print(render(comparison.page(checks, []), width(sys.stdout)), flush=True)
    if html is not None:
        files.write(html, comparison.page(checks, sys.argv[1:]))
        say(f"wrote {html}")
    if not checks:
        return exit_codes.OK
    return gate.finish(checks, comparison.gate(checks), "training_probe", junit, summary)


def letters() -> int:
    """List the letters of a method and what each means."""
    from loadgen.document.terminal import aligned
    from training_probe.grid import LETTERS, NAIVE

    print("\n".join(aligned([(NAIVE, "none of these"), *LETTERS.items()])))
    return exit_codes.OK


def build_app() -> App:
    from loadgen.rundir import package_version

    app = App(
        name="training_probe",
        help="Measures how fast and in how much memory large language models are trained and fine-tuned here.",
        version=package_version,
        version_flags=["--version", "-V"],
        result_action="return_value",
    )
    for command in (sweep, breakdown, plan, memory, report, compare, letters):
        app.command(command)
    app.command(cli.build_app())
    return app


def invoke(tokens: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""

    def command() -> object:
        from loadgen.config import check_text

        check_text(tokens)
        return build_app()(list(tokens), exit_on_error=False, print_error=False)

    return terminal.invoke("training_probe", command)


def main() -> None:
    terminal.main("training_probe", invoke)
