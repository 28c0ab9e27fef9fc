"""The commands `loadgen sweep` and `loadgen search`, from options to last lines. Only what one needs is imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from backends import exit_codes
from backends.untrusted import without_secrets
from loadgen import rundir, terminal
from loadgen.config import Config, ConfigError
from loadgen.option_types import ShownOptions, names, offers
from loadgen.search.points import SweepOptions
from loadgen.terminal import say

if TYPE_CHECKING:
    from loadgen.search import live
    from loadgen.search.results import SearchResult

ATTAIN, BUDGET_MINUTES = 0.99, 20.0  # where none is given
NOT_SEARCHED = (
    "requests", "duration", "arrival", "concurrency", "workload", "sessions", "turns", "think_time", "first_tokens",
    "subagents", "context_tokens", "trace", "trace_format", "trace_speed", "trace_limit", "trace_from",
    "trace_block_tokens", "goodput", "repeat",
    "dry_run", "calibrate", "stop_when_overloaded",
)  # fmt: skip
SEARCH = Group("The search", sort_key=0)


def sweep(
    options: Annotated[SweepOptions | None, Parameter(name="*")] = None, *, shown: ShownOptions | None = None
) -> int:
    """Send one load after another to one start of a server: a point for each value of --rates, --concurrencies, or one
    other option of the load that is given as a list.

    Each point is an ordinary run directory in --out, named after its value, such as rate-5; sweep.html, sweep.json,
    sweep.md and figures put them together. --resume DIR goes on after a kill or Ctrl-C: points that finished stay as
    they are.
    """
    from loadgen.event_loop import StopSignals
    from loadgen.run import run_to_end
    from loadgen.search import sweep as sweeping

    terminal.use(shown)
    planned = sweeping.prepare(options or SweepOptions(), terminal.note)
    code = None
    with StopSignals() as stop, sweeping.alone(planned):
        if planned.series.waiting:
            code = run_to_end(sweeping.measure(planned, stop), lambda: planned.began)
        if planned.began:
            of_runs = report_sweep(planned.directory, brief=terminal.is_watched())
            code = of_runs if code is None else code
    if planned.series.waiting and planned.directory.exists():
        say(planned.series.remainder("loadgen sweep", planned.directory))
    return stop.exit_code or code or exit_codes.OK


def report_sweep(directory: Path, *, brief: bool = False) -> int:
    """Prints what the runs of a sweep gave together; writes sweep.json, sweep.md, page and figures; the exit code."""
    from loadgen import summary
    from loadgen.document import files
    from loadgen.report import sweeps
    from loadgen.report.pages import sweep as page

    swept = sweeps.read(directory)
    document = page.of(directory, without_secrets(swept))

    def write() -> None:
        sweeps.write(directory, swept)
        files.write(directory / page.FILE, document, page.TEXT, figures=terminal.OUTPUT.figures)

    columns = terminal.columns(sys.stderr)
    shown = summary.of_sweep(swept, columns) if brief else summary.rendered(document)
    summary.publish(directory, shown, write, files.json_line(swept))
    begun = [run for run in swept.runs if run.state != "waiting"]
    return exit_codes.OK if all(run.valid and run.state == "finished" for run in begun) else exit_codes.INVALID


@offers(*(name for name in names(Config) if name not in NOT_SEARCHED))
class ProbeOptions(Config):
    """The options of `run`, without the load's rate and number of requests, which a search decides on."""


def search(
    config: Annotated[ProbeOptions | None, Parameter(name="*")] = None,
    *,
    slo: Annotated[
        str | None, Parameter(group=SEARCH, help="Limits: ttft_ms=500,tpot_ms=50 and e2el_ms, or 'ttft_p99<500ms'.")
    ] = None,
    attain: Annotated[
        float | None, Parameter(group=SEARCH, help="Share of the requests that keep every limit (default 0.99).")
    ] = None,
    budget_minutes: Annotated[
        float | None, Parameter(group=SEARCH, help="Minutes for all probes, at the most (default 20).")
    ] = None,
    axis: Annotated[
        Literal["rate", "concurrency"] | None,
        Parameter(
            group=SEARCH, help="What is raised: requests/s of a Poisson process (default), or requests in flight."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        Parameter(
            group=SEARCH,
            help="Go on with the search in this directory, which was stopped; --budget-minutes may give it more time.",
        ),
    ] = None,
    shown: ShownOptions | None = None,
) -> int:
    """Find the highest load at which a server keeps limits on its latencies, with how sure that is.

    Probes at several loads, each an ordinary run in 1, 2, ... of the directory, each as long as it takes. Takes the
    options of `run` for the server and the requests.
    """
    from loadgen.search import live, objective, results

    terminal.use(shown)
    given = live.plain_config(config or ProbeOptions())
    limits_ms = None if slo is None else objective.parse(slo)
    attain = attain if slo is None else objective.share(slo, "--attain", attain)
    if resume is not None:
        with rundir.measuring(resume, resumed=True):
            result, given = live.resumed(resume, given, {"slo": limits_ms, "attain": attain, "axis": axis})
            if budget_minutes is not None:
                result = result.lasting(live.budget_s(budget_minutes))
            return _measured(live.Search.checked(given, resume, result), resumed=True)
    if limits_ms is None:
        raise ConfigError("--slo is missing; say what the server is to keep, such as --slo ttft_ms=500,tpot_ms=50.")
    options = live.search_options(
        given, limits_ms, ATTAIN if attain is None else attain,
        BUDGET_MINUTES if budget_minutes is None else budget_minutes, axis or "rate",
    )  # fmt: skip
    result = results.SearchResult(version=rundir.package_version(), options=options)
    one = live.Search.checked(given, given.out or Path("runs") / rundir.new_run_id(), result)
    with rundir.measuring(one.whole.directory, private=given.dataset is not None, plan=results.FILE):
        return _measured(one, resumed=False)


def _measured(one: live.Search, *, resumed: bool) -> int:
    from loadgen.event_loop import StopSignals
    from loadgen.run import run_to_end

    with StopSignals() as stop:
        one.whole.stop = stop
        try:
            code = run_to_end(one.measure(), began=lambda: True)
        finally:
            one.stopped()
        if one.result.probes or resumed:
            show(one.whole.directory, one.result)
    return stop.exit_code or code or exit_codes.OK


def show(directory: Path, result: SearchResult) -> None:
    """Prints the answer and writes its text, figure and page, without secrets."""
    from loadgen import summary
    from loadgen.document import files
    from loadgen.search import page

    result = without_secrets(result)
    document = page.of(directory, result)

    def write() -> None:
        files.write(directory / page.FILE, document, "search.md", figures=terminal.OUTPUT.figures)

    columns = terminal.columns(sys.stderr)
    shown = page.screen(result, columns) if terminal.is_watched() else summary.rendered(document)
    summary.publish(directory, shown, write, files.json_line(result))
