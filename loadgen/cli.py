"""The command line: `loadgen run`, `sweep`, `report`, `compare`, what lists and shows runs (`list`, `show`), looks at a
machine or prepares it (`doctor`, `compose`, `backends`, `clean`), and what other packages add through entry points.

Exit codes: 0 ok, 2 bad configuration, 3 the backend failed, 4 the measurement is invalid, 5 a limit of `compare
--fail-if` is broken; 129, 130, 143 stopped by SIGHUP, Ctrl-C, SIGTERM; 141 standard output was not read to its end. A
user's mistake is one sentence on standard error, never a traceback. Only what a command needs is imported: a run never
waits for matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

import backends
from backends import exit_codes
from backends.foreign_files import read_named
from loadgen import guesses, rundir, terminal
from loadgen.config import Config, ConfigError, PlacementOptions, ServerOptions, check_file, check_text, ray_address
from loadgen.option_types import JunitOption, ShownOptions, SummaryOption, Whole, check_listen, names, offers
from loadgen.terminal import result_line, say, say_error

if TYPE_CHECKING:
    from cyclopts.config import Dict

    from loadgen.breakdown.tables import StepBreakdown
    from loadgen.rundir.records import Recorded

MOST_CONFIG_BYTES = 1 << 20
SEARCH = "loadgen.search.command"  # with the commands whose options are slow to import

ConventionName = Literal["loadgen", "vllm", "guidellm", "aiperf", "mlperf"]


def run(config: Annotated[Config | None, Parameter(name="*")] = None, *, shown: ShownOptions | None = None) -> int:
    """Send a load to a server and report latency CDFs, throughput, and whether the numbers can be trusted.

    Without --url, --backend or --model it starts the embedded server, and every output says `emulated`.
    `--config FILE.toml` gives any of these options as keys, with underscores.
    """
    from loadgen import child_env

    child_env.load_numpy()
    from loadgen.event_loop import StopSignals
    from loadgen.run import LoadRun, dry_run, run_to_end

    terminal.use(shown)
    config = config or Config()
    run_id = rundir.new_run_id()
    directory = config.out or Path("runs") / run_id
    if config.dry_run:
        print(dry_run(config, directory, run_id))
        return exit_codes.OK
    one_run = LoadRun(config, directory, run_id, terminal.note)
    one_run.check()
    repeated = config.repeat > 1
    if repeated:
        from loadgen.report import repeats
        from loadgen.search import repeat
    with rundir.measuring(directory, private=config.dataset is not None), StopSignals() as stop:
        one_run.stop = stop
        code = run_to_end(repeat.measure(one_run, _one_of_several) if repeated else one_run.measure())
        if repeated and repeats.is_repeated(directory):
            of_runs = report_repeats(directory, brief=terminal.is_watched())
            code = of_runs if code is None else code
        elif code is None:
            code = report_one(directory, "loadgen", brief=terminal.is_watched())
    return stop.exit_code or code


def report(
    directories: Annotated[list[Path], Parameter(name="run", help="Run directories.")],
    /,
    *,
    convention: Annotated[
        ConventionName, Parameter(help="Whose definitions of the metrics: our own, or another tool's.")
    ] = "loadgen",
    html: Annotated[
        bool,
        Parameter(
            help="Several runs on one page, a curve each, not in a figure. (One run has its page, report.html, in its "
            "directory.)",
            negative=(),
        ),
    ] = False,
    out: Annotated[
        Path | None,
        Parameter(
            help="Where several runs' CDFs are drawn over each other (.png or .svg; default cdf.png), or their page is "
            "written (.html; default runs.html)."
        ),
    ] = None,
    shown: ShownOptions | None = None,
) -> int:
    """Redo the report of a run from its records (also of a killed one), of a directory of `run --repeat`, of a
    breakdown from its trace, of a sweep from its runs, or of a search; or show several runs in one figure or page."""
    terminal.use(shown)
    if len(directories) == 1 and out is not None:
        raise ConfigError("--out is for several runs; leave it out: the report of one goes into its directory.")
    if len(directories) == 1:
        with rundir.alone(directories[0]):
            return _report(directories[0], convention)
    from loadgen.document.files import json_line
    from loadgen.report import build as reports
    from loadgen.report import text

    out = out or Path("runs.html" if html else "cdf.png")
    check_file("--out", out, new=True)
    if html and out.suffix != ".html":
        raise ConfigError(f"{out} must end in .html, as --html asks for a page; leave --html out for a figure.")
    for result in reports.overlay(directories, out, convention):
        terminal.result(text.render(result) + "\n")
        if terminal.OUTPUT.json:
            result_line(json_line(result))
    say(f"wrote {out}")
    return exit_codes.OK


def _report(directory: Path, convention: ConventionName) -> int:
    """Reads one directory, whatever was measured there."""
    from loadgen.breakdown.tables import FILE as BREAKDOWN
    from loadgen.report import repeats, sweeps
    from loadgen.search.results import FILE as SEARCHED

    kinds = {BREAKDOWN: "a breakdown", sweeps.FILE: "a sweep", SEARCHED: "a search"}
    file = next((name for name in kinds if (directory / name).exists()), None)
    if file is None and not repeats.is_repeated(directory):
        return report_one(directory, convention)
    if convention != "loadgen":
        kind = "several runs" if file is None else kinds[file]
        raise ConfigError(f"{kind} cannot be shown by another --convention than our own definitions; leave it out.")
    if file == BREAKDOWN:
        from loadgen.breakdown import measure

        return show_breakdown(directory, measure.again(directory))
    if file == SEARCHED:
        from loadgen.search import command, results

        command.show(directory, results.read(directory))
        return exit_codes.OK
    if file is None:
        return report_repeats(directory)
    from loadgen.search.command import report_sweep

    return report_sweep(directory)


def show_breakdown(directory: Path, breakdown: StepBreakdown) -> int:
    """Prints it and writes its files; the exit code."""
    from loadgen import summary
    from loadgen.breakdown import page, tables
    from loadgen.document import files

    document = page.of(directory, breakdown)

    def write() -> None:
        tables.write(directory, breakdown)
        files.write(directory / page.FILE, document, "report.md", figures=terminal.OUTPUT.figures)

    summary.publish(directory, summary.rendered(document), write, tables.to_json(breakdown))
    return exit_codes.OK


def report_one(
    directory: Path, convention: ConventionName, *, brief: bool = False, written: Recorded | None = None
) -> int:
    """Another tool's definitions are only shown: report.json keeps ours. brief: one screen, for who watches the run.
    written: what the directory holds, where it need not be read."""
    from loadgen import summary
    from loadgen.document import files
    from loadgen.report import build as reports
    from loadgen.report import text

    result, table = reports.from_directory(directory, convention=convention, written=written)

    def write() -> None:
        if convention == "loadgen":
            reports.write(directory, result, table, figures=terminal.OUTPUT.figures)

    shown = summary.of_run(result, terminal.columns(sys.stderr)) if brief else text.render(result)
    summary.publish(directory, shown, write, files.json_line(result))
    return exit_codes.OK if result.verdict.valid else exit_codes.INVALID


def _one_of_several(directory: Path) -> None:
    """Prints the report of a run that others follow, on a terminal as one line, and writes its files."""
    from loadgen import summary
    from loadgen.document.files import ReportError
    from loadgen.report import build as reports
    from loadgen.report import text

    result, table = reports.from_directory(directory)
    if terminal.is_watched():
        terminal.note(summary.line(directory.name, result))
    else:
        terminal.result(text.render(result))
    try:
        reports.write(directory, result, table, figures=terminal.OUTPUT.figures)
    except ReportError as error:  # it is printed all the same
        say_error("loadgen", error)


def report_repeats(directory: Path, *, brief: bool = False) -> int:
    """Prints what several runs of one server gave together, and writes repeat.json and its page; the exit code."""
    from loadgen import summary
    from loadgen.document import files
    from loadgen.report import repeats
    from loadgen.report.pages import repeat as page

    repeated = repeats.read(directory)
    document = page.of(directory, repeated)

    def write() -> None:
        repeats.write(directory, repeated)
        files.write(directory / page.FILE, document, figures=terminal.OUTPUT.figures)

    columns = terminal.columns(sys.stderr)
    shown = summary.of_repeats(repeated, columns) if brief else summary.rendered(document)
    summary.publish(directory, shown, write, files.json_line(repeated))
    return exit_codes.OK if all(run.valid for run in repeated.runs) else exit_codes.INVALID


def collect(
    directory: Annotated[Path, Parameter(name="run", help="Run directory of a `run --on ray`.")],
    /,
    *,
    on: Annotated[
        str, Parameter(help="Where its machines are: ray, the Ray cluster of this machine (default), or ray:HOST:PORT.")
    ] = "ray",
    shown: ShownOptions | None = None,
) -> int:
    """Fetch the records of a run of several machines that stayed on them, and redo its report: where the run's own
    process was killed, or a machine was cut off and is back."""
    from loadgen.cluster.collect import collect as fetch

    terminal.use(shown)
    with rundir.alone(directory):
        files = fetch(directory, ray_address(on), terminal.note)
        terminal.note(f"{files} file{'' if files == 1 else 's'} of records came home")
        return report_one(directory, "loadgen")


def compare(
    a: Annotated[Path, Parameter(help="Run directory, or directory of run --repeat.")],
    b: Annotated[Path, Parameter(help="Run directory, or directory of repeats, to compare with it.")],
    /,
    *,
    fail_if: Annotated[
        tuple[str, ...],
        Parameter(
            help="Limit on how much worse B may be, repeatable: 'ttft_p99>+5%', 'output_tokens_per_s<-3%', "
            "'tpot_mean>+2ms'; or on B alone: 'ttft_p99<500ms', 'requests_per_s>10'.",
            negative=(),
        ),
    ] = (),
    junit: JunitOption = None,
    summary: SummaryOption = None,
    html: Annotated[
        Path | None, Parameter(help="Page to write, one file: differences with intervals, CDFs, the gate's checks.")
    ] = None,
) -> int:
    """Print how run B differs from run A, with 95 % confidence intervals: between runs where there are repeats, else
    within the two runs, by blocks of each. Where all runs have a steady window, its numbers are compared.

    With --fail-if it is a gate. The exit code is 5 where B is worse than a limit by more than the interval explains, 4
    where a run is INVALID or a limit cannot be judged, and 0 otherwise.
    """
    from loadgen.document.terminal import render
    from loadgen.report import compare as comparison
    from loadgen.report import gate, limits
    from loadgen.report.pages import compare as page

    gate.check_options(fail_if, junit, summary)
    check_file("--html", html, new=True)
    allowed = limits.parse(fail_if, comparison.LIMITED)
    compared = comparison.compare(a, b)
    checks = comparison.judged(compared, allowed) if allowed else []
    print(render(page.of(compared, checks), terminal.width(sys.stdout)), flush=True)
    if html is not None:
        page.write(html, compared, checks, ["loadgen", *sys.argv[1:]])
        say(f"wrote {html}")
    if not allowed:
        return exit_codes.OK
    return gate.finish(checks, page.gate_section(compared, checks), "loadgen", junit, summary)


def import_results(
    file: Annotated[Path, Parameter(help="Results of another load generator.")],
    /,
    *,
    out: Annotated[Path | None, Parameter(help="Run directory to make (default: runs/ and a new name).")] = None,
) -> int:
    """Make a run directory of another load generator's results, which report, compare and sweep read: of vllm bench
    serve, SGLang's bench, guidellm, aiperf, inference-perf and genai-perf. What it did not keep is unknown.

    For example: loadgen import result.json --out runs/by-vllm
    """
    from loadgen.rundir import others

    loads = others.read(file)
    top = out or Path("runs") / rundir.new_run_id()
    several = [top / name for name in others.names(loads)] if len(loads) > 1 else [top]
    codes = []
    for load, directory in zip(loads, several, strict=True):
        others.write(load, directory, ["loadgen", *sys.argv[1:]], file)
        codes.append(report_one(directory, "loadgen"))
    return max(codes)


def list_runs(
    directory: Annotated[Path, Parameter(name="runs", help="Directory of run directories.")] = Path("runs"), /
) -> int:
    """List the runs in a directory, the newest first: verdict, output tokens a second, ttft and tpot in ms (p50)."""
    from time import localtime, strftime

    from loadgen import summary
    from loadgen.document.content import Table, number
    from loadgen.rundir import listing

    try:
        found = listing.runs(directory)
    except OSError as error:
        raise rundir.RunError(
            f"cannot list the directory {directory}/: {error.strerror or error}; name one with runs: loadgen list DIR."
        ) from None
    rows = []
    for run in found:
        verdict = {None: "-", True: "VALID", False: "INVALID"}[run.valid]
        what = f"emulated {run.what}" if run.emulated else run.what
        written = strftime("%Y-%m-%d %H:%M", localtime(run.written_unix_s))
        rows.append([run.directory.name, written, run.kind, verdict, *map(number, run.numbers), what])
    table = Table(["run", "written", "kind", "verdict", "tokens/s", "ttft", "tpot", "of"], rows)
    for line in summary.table(table, terminal.columns(sys.stdout) if sys.stdout.isatty() else terminal.UNBROKEN):
        print(line.plain)
    return exit_codes.OK


def show(
    run: Annotated[Path, Parameter(help="Directory, or its name in runs/.")],
    /,
    *,
    json: Annotated[bool, Parameter(help="As one line of JSON.", negative=())] = False,
) -> int:
    """Show a run, a sweep, repeats or a search again, as at its end: one screen. Nothing is written.

    `report` redoes its files from the records.
    """
    from loadgen import summary
    from loadgen.document.files import json_line
    from loadgen.report import build as reports
    from loadgen.report import repeats, sweeps
    from loadgen.search import page, results

    directory = run if run.is_dir() else Path("runs") / run
    if not directory.is_dir():
        raise rundir.RunError(f"there is no run {run}; `loadgen list` lists those in runs/.")
    columns = terminal.columns(sys.stdout)
    if (directory / results.FILE).exists():
        found = results.read(directory)
        text, lines = json_line(found), page.screen(found, columns)
    elif (directory / sweeps.FILE).exists():
        swept = sweeps.read(directory)
        text, lines = json_line(swept), summary.of_sweep(swept, columns)
    elif repeats.is_repeated(directory):
        repeated = repeats.read(directory)
        text, lines = json_line(repeated), summary.of_repeats(repeated, columns)
    else:
        one, _ = reports.from_directory(directory)
        text, lines = json_line(one), summary.of_run(one, columns)
    shown = terminal.styled(lines) if sys.stdout.isatty() else [line.plain for line in lines]
    print(text if json else "\n".join(shown))
    return exit_codes.OK


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell that is to complete commands.")], /
) -> int:
    """Print what makes a shell complete loadgen's commands and options.

    For example: loadgen completion bash > ~/.local/share/bash-completion/completions/loadgen
    """
    print(build_app(described=True).generate_completion(shell=shell))
    return exit_codes.OK


@offers(
    *names(ServerOptions), "requests", "input_tokens", "output_tokens", "concurrency", "sessions", "trace", "dataset",
    "repeat_dataset", *names(PlacementOptions), "dp", "dummy_weights", "image", "server_python",
)  # fmt: skip
class DoctorOptions(Config):
    """Of `run`, what decides on what the run needs of this machine."""


@offers(
    "backend", "model", "requests", "duration", "input_tokens", "output_tokens", "arrival", "concurrency", "warmup",
    "dataset", "repeat_dataset", "seed", *names(PlacementOptions), "dp", "api_servers", "dummy_weights", "image",
    "server_arg", "port",
)  # fmt: skip
class ComposeOptions(Config):
    """Of `run`, what goes into the command of a server in Docker."""


def doctor(config: Annotated[DoctorOptions | None, Parameter(name="*")] = None) -> int:
    """Check what a run with these options needs of this machine, and say what to do about the rest.

    Nothing is started; the server of --url gets a few short requests, to see what the wire adds. `ok`: as it must be;
    `!`: it will work, but perhaps not as well; `!!`: it will not work, and the exit code is 3. Without options it looks
    at the machine.
    """
    from loadgen.doctor.examine import examine, render, wire
    from loadgen.event_loop import run_loop
    from loadgen.run import LoadRun

    settings = config or Config()
    checks = examine(settings)
    if settings.url is not None:
        run = LoadRun(settings, Path(), "doctor", lambda line: None)
        checks.append(wire(lambda: run_loop(run.wire())))
    print(render(checks))
    return exit_codes.FAILED if any(check.state == "problem" for check in checks) else exit_codes.OK


def compose(config: Annotated[ComposeOptions | None, Parameter(name="*")] = None) -> int:
    """Print a Docker Compose file for the server that `run` would start with these options; needs no GPU.

    It publishes the server on 127.0.0.1:8000, or another --port; measure it there with `loadgen run --url`.
    """
    from loadgen.server.compose import compose as compose_file

    print(compose_file(config or Config()), end="")
    return exit_codes.OK


def export(
    *,
    runs_directory: Annotated[
        Path, Parameter(name="--runs", help="Directory of run directories, of loadgen and training_probe alike.")
    ] = Path("runs"),
    host: Annotated[str, Parameter(help="Address to listen on, of IPv4 or IPv6.")] = "127.0.0.1",
    port: Annotated[Whole, Parameter(help="Port to listen on.")] = 9464,
    keep_days: Annotated[float, Parameter(help="How long a run is shown after it was last written.")] = 7.0,
) -> int:
    """Serve the metrics of every run in a directory to Prometheus, until it is stopped.

    Ctrl-C, SIGTERM and SIGHUP, which are its only end, end it with exit code 0; SIGHUP does not under nohup.

    It may be started before, while or after something runs: runs write their snapshots once a second, and it reads them
    when it is asked. compose/ has a Prometheus and a Grafana that ask.
    """
    import threading

    from loadgen.event_loop import StopSignals
    from loadgen.monitor.exporter import Exporter, address, serve

    if not keep_days > 0:
        raise ConfigError(f"--keep-days is {keep_days:g}; it must be above 0.")
    if not runs_directory.is_dir():
        raise rundir.RunError(
            f"there is no directory {runs_directory}; name the one that runs are written to with --runs."
        )
    host = host.removeprefix("[").removesuffix("]")  # as a URL has it
    try:
        check_listen(host)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    with serve(Exporter(runs_directory, keep_days * 86400), host, port) as server, StopSignals() as stop:
        # `shutdown` waits for the end of `serve_forever`, which goes on in this thread when the handler has returned.
        stop.on_signal(threading.Thread(target=server.shutdown, daemon=True).start)
        say(f"metrics of the runs in {runs_directory}/: http://{address(host, server.server_port)}/metrics")
        server.serve_forever()
    return exit_codes.OK


def list_backends() -> int:
    """List the installed backends: how each is asked, whether loadgen can start such a server, and where it is from."""
    from loadgen.doctor.examine import backends_table

    print(backends_table())
    return exit_codes.OK


def clean() -> int:
    """Remove containers that runs left behind because they were killed; those of running ones stay."""
    from backends import docker

    removed = docker.clean(say)
    print(f"removed {removed} container{'' if removed == 1 else 's'}")
    return exit_codes.OK


def build_app(*, described: bool = False) -> App:
    """`described`: with the help of other packages' commands, which takes their imports."""
    app = App(
        name="loadgen",
        help="Measures how fast a large language model is served, and says whether the numbers can be trusted.",
        version=rundir.package_version,
        version_flags=["--version", "-V"],
        result_action="return_value",
    )
    app.command(run)
    for name in ("sweep", "search"):
        app.command(getattr(import_module(SEARCH), name) if described else f"{SEARCH}:{name}", name=name)
    for command in (report, collect, compare, doctor, compose, export):
        app.command(command)
    app.command(list_backends, name="backends")
    app.command(import_results, name="import")
    app.command(list_runs, name="list")
    app.command(show)
    app.command(completion)
    app.command(clean)
    for entry in backends.installed("llm_dissect.commands"):
        app.command(entry.load() if described else entry.value, name=entry.name)
    return app


def config_files(tokens: list[str]) -> tuple[list[str], list[Dict]]:
    """Takes `--config FILE.toml` off a command line with the options of `run`, whose flags with underscores are its
    keys."""
    rest: list[str] = []
    files: list[Dict] = []
    check_text(tokens)
    if tokens[:1] not in (["run"], ["sweep"], ["search"], ["doctor"], ["compose"], ["predict"], ["breakdown"]):
        return tokens, files
    queue = iter(tokens)
    for token in queue:
        if token == "--config" or token.startswith("--config="):
            name = token.partition("=")[2] or next(queue, "")
            if not name:
                raise ConfigError("--config needs the name of a TOML file.")
            import tomllib

            from cyclopts.config import Dict

            try:
                keys = tomllib.loads(read_named(name, MOST_CONFIG_BYTES).decode())
            except OSError as error:
                raise ConfigError(f"--config: cannot read '{name}': {error.strerror}; name another file.") from None
            except (ValueError, RecursionError) as error:  # the latter: nested without end
                raise ConfigError(f"--config: {name} is not TOML: {error}.") from None
            for key, value in keys.items():
                if isinstance(value, dict):
                    raise ConfigError(
                        f"--config: {name} has a table [{key}], and options stand in none; take its heading away."
                    )
            files.append(Dict(keys, source=name, use_commands_as_keys=False))
        else:
            rest.append(token)
    return rest, files


def invoke(tokens: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""

    def command() -> object:
        rest, files = config_files(guesses.meant(tokens))
        app = build_app(described=rest[:1] in ([], ["--help"], ["-h"]))
        if files:
            app[rest[0]].config = files
        return app(rest, exit_on_error=False, print_error=False)

    return terminal.invoke("loadgen", command)


def main() -> None:
    terminal.main("loadgen", invoke)
