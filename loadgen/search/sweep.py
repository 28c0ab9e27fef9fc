"""`loadgen sweep`: one start of a server, and one run after another at the points of a list.

The plan is in DIR/sweep.json before anything starts. Each run is an ordinary run directory directly under DIR, and runs
that finished are never done again. A run that was begun and did not finish is done again by --resume; what it held is
kept in DIR/unfinished. What a server that loadgen starts leaves, such as its log, lies in DIR/server-1, and in
DIR/server-2 and so on after a resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from backends.untrusted import hide, printable
from loadgen import rundir, summary, terminal
from loadgen.config import OWNERS_WORD, Config, ConfigError, check_owners_word, keys_of_url
from loadgen.document.files import ReportError
from loadgen.event_loop import StopSignals
from loadgen.load.lengths import WorkloadError
from loadgen.probe import identify
from loadgen.report import build, sweeps
from loadgen.report.schema import Report
from loadgen.report.sweeps import PlannedRun, State, SweepPlan, Swept
from loadgen.run import LoadRun, NextRun, Say, Served, measure_each
from loadgen.rundir.series import MeasurementSeries, put_aside
from loadgen.search.idle import idle, looking_at
from loadgen.search.points import UNITS, PointRun, SweepOptions, flag_of
from loadgen.server import embedded
from loadgen.server.launch import plan_launch


@dataclass
class Sweep:
    """A sweep in `directory`. runs: in their order. kept: what sweep.json holds but for its results. resumed: whether
    the directory and its sweep.json are there. states: of each run, by its name. whole: the server's options."""

    options: SweepOptions
    directory: Path
    runs: list[PointRun]
    kept: sweeps.SweepHead
    say: Say
    resumed: bool

    def __post_init__(self) -> None:
        states = {run.name: self._state(run) for run in self.runs}
        self.states: dict[str, tuple[State, Report | None]] = states
        done = [name for name, (state, _) in states.items() if state == "finished"]
        self.series = MeasurementSeries("run", [run.name for run in self.runs], done)
        self.whole: LoadRun | None = None

    def _state(self, run: PointRun) -> tuple[State, Report | None]:
        return sweeps.state_of(self.directory / run.name) if self.resumed else ("waiting", None)

    @property
    def began(self) -> bool:
        """Whether a run left something, if only a part."""
        return any((self.directory / run.name).exists() for run in self.runs)

    def results(self) -> Swept:
        return sweeps.of_runs(self.kept, self.states)


def prepare(options: SweepOptions, say: Say) -> Sweep:
    """The sweep of these options, new or gone on with; checked, and nothing started or written. Raises ConfigError and
    RunError, and as `LoadRun.check` does."""
    if options.resume is not None:
        return _resumed(options, options.resume, say)
    runs = options.order(options.runs())
    directory = options.out or Path("runs") / rundir.new_run_id()
    listed = [PlannedRun(run.name, run.point.value, run.seed) for run in runs]
    plan = SweepPlan(
        varies=options.varies,
        unit=UNITS.get(options.varies, ""),
        values=[point.value for point in options.points()],
        repeat=options.repeat,
        seed=options.seed,
        order=listed,
        options=options.as_dict(),
    )
    kept = sweeps.SweepHead(
        version=rundir.package_version(), started_unix_s=time.time(), argv=["loadgen", *sys.argv[1:]], plan=plan
    )
    sweep = Sweep(options, directory, runs, kept, say, resumed=False)
    _check(sweep)
    return sweep


def _resumed(typed: SweepOptions, directory: Path, say: Say) -> Sweep:
    """The sweep in a directory, by its own options."""
    if typed.out is not None:
        raise ConfigError("--resume names the directory of the sweep; leave --out out.")
    kept = sweeps.read_sweep(directory)
    options, runs = planned_runs(directory, kept)
    hide(keys_of_url(typed.url or ""))
    differing = typed.differing(options)
    if differing:
        raise ConfigError(
            f"{differing[0]} differs from that of the sweep in {directory}; leave it out to go on, or begin another "
            "sweep with --out."
        )
    check_owners_word(directory, options, typed.typed, flag_of)
    owners = {name: value for name, value in typed.as_dict().items() if name in typed.typed and name in OWNERS_WORD}
    options = SweepOptions.of_dict({**kept.plan.options, **owners})
    runs = options.order(options.runs())
    if kept.version != rundir.package_version():
        say(f"note: loadgen {kept.version} began the sweep; its other runs will be of {rundir.package_version()}.")
    sweep = Sweep(options, directory, runs, kept, say, resumed=True)
    if sweep.series.waiting:
        say(sweep.series.resumed)
        _check(sweep)
    return sweep


def planned_runs(directory: Path, kept: sweeps.SweepHead) -> tuple[SweepOptions, list[PointRun]]:
    """The options of a sweep that was begun, and its runs in their order. Raises RunError."""
    path = directory / sweeps.FILE
    try:
        options = SweepOptions.of_dict(kept.plan.options)
        runs = options.order(options.runs())
    except (msgspec.ValidationError, ConfigError, WorkloadError) as error:
        raise rundir.RunError(f"{path} holds no options of a sweep: {printable(str(error))}") from None
    if [PlannedRun(run.name, run.point.value, run.seed) for run in runs] != kept.plan.order:
        raise rundir.RunError(f"{path} was planned otherwise than its options say; begin another sweep.")
    return options, runs


def _check(sweep: Sweep) -> None:
    """Refuses what cannot be measured at one of the points, and decides on the server that takes them all."""
    points = list({run.point.name: run for run in sweep.runs}.values())
    places = (sweep.directory / f"server-{number}" for number in itertools.count(1))
    starting = next(place for place in places if not place.exists())
    configs = [run.config(sweep.directory) for run in points]
    if configs[0].where in ("docker", "process"):
        launches = [plan_launch(config, starting, "check").settings for config in configs]
        lengths = [settings.max_model_len for settings in launches]
        most = max(range(len(configs)), key=lambda at: launches[at].max_requests)
        config = replace(configs[most], max_model_len=max(lengths))
    else:
        for each in configs:
            LoadRun(each, sweep.directory, "check", sweep.say).check()
        longest = embedded.model_len if configs[0].where == "embedded" else lambda _: 0
        config = max(configs, key=longest)
    if config.prefix_caching is None and any(map(_caches, configs)) and not _caches(config):
        config = replace(config, prefix_caching="on")
    sweep.whole = LoadRun(replace(config, out=None), starting, rundir.new_run_id(), sweep.say)
    sweep.whole.check()


def _caches(config: Config) -> bool:
    """Whether a server that is started for this point has its prefix cache on."""
    return config.caches_prefixes and (config.where in ("docker", "process") or config.gpu is not None)


@contextlib.contextmanager
def alone(sweep: Sweep) -> Iterator[None]:
    """Makes the sweep's directory with its sweep.json, or takes the one that is there, and keeps other processes out of
    it. A new one in which nothing was measured is taken back at the end. Raises RunError."""
    private = bool(sweep.options.dataset)
    with rundir.measuring(sweep.directory, private=private, resumed=sweep.resumed, plan=sweeps.FILE):
        if sweep.resumed:
            _report_finished(sweep)
        else:
            sweeps.write(sweep.directory, sweep.results())
        yield


async def measure(sweep: Sweep, stop: StopSignals) -> None:
    """Does the runs that wait, and writes sweep.json after each. Raises as `measure_each` does."""
    whole = sweep.whole
    assert whole is not None
    whole.stop = stop
    if whole.config.where in ("docker", "process"):
        whole.directory.mkdir(exist_ok=True)
    try:
        await measure_each(whole, partial(_runs, sweep, whole))
    finally:
        with contextlib.suppress(OSError):
            whole.directory.rmdir()  # where the server left nothing


async def _runs(sweep: Sweep, whole: LoadRun, served: Served) -> AsyncGenerator[NextRun, None]:
    """The runs that wait, each once the server is idle."""
    sweep.kept.starts += 1
    await asyncio.to_thread(sweeps.write, sweep.directory, sweep.results())
    look = await looking_at(whole, served)
    waiting = set(sweep.series.waiting)
    for run in (run for run in sweep.runs if run.name in waiting):
        sweep.series.begin(run.name)
        directory = rundir.within(sweep.directory, run.name)
        put_aside(directory)
        await asyncio.to_thread(identify, whole.backend, served.target, named=whole.config.model is not None)
        wait = await idle(look)
        sweep.kept.waits = {**sweep.kept.waits, run.name: wait}
        if not wait.idle:
            sweep.say(
                f"note: the server was not seen idle before {run.name}: {wait.detail}; the run begins all the same."
            )
        config, series = run.config(sweep.directory), sweep.series
        sweep.say(f"{series.place(run.name)}: {run.name}, seed {run.seed}; {_lasts(config)}{series.left}")
        one = LoadRun(config, directory, rundir.new_run_id(), sweep.say, whole.stop)
        yield NextRun(one, partial(_reported, sweep, run))


def _reported(sweep: Sweep, run: PointRun) -> None:
    """Writes the run's report, and sweep.json with it; a line for the person who watches."""
    directory = sweep.directory / run.name
    try:
        report_run(directory)
    except ReportError as error:  # the records are there, and the report can be made again
        sweep.say(f"note: {error}")
    state, report = sweep.states[run.name] = sweeps.state_of(directory)
    sweep.series.end(run.name, again=state != "finished")
    sweeps.write(sweep.directory, sweep.results())
    if report is not None:
        sweep.say(summary.line(run.name, report, state))


def _report_finished(sweep: Sweep) -> None:
    """Makes the reports of runs that finished and were killed before they had one."""
    done = {run.name for run in sweep.runs} - set(sweep.series.waiting)
    for name in sorted(done - sweeps.reported(sweep.directory)):
        try:
            report_run(sweep.directory / name)
        except ReportError as error:
            sweep.say(f"note: {error}")


def report_run(directory: Path) -> None:
    """Writes the report of one run, from its records. Raises ReportError, RunError or RecordsError."""
    build.write(directory, *build.from_directory(directory), figures=terminal.OUTPUT.figures)


def _lasts(config: Config) -> str:
    """How long the run may take at most, as a clause."""
    load, last_s = config.load, None
    if load.streams is not None:
        last_s = load.duration_s
    elif not load.in_sessions and config.dataset is None and len(due_ns := load.due_ns()):
        last_s = int(due_ns[-1]) / 1e9
    sent = "it lasts until its last reply" if last_s is None else f"its last request is due after {last_s:.0f} s"
    return f"{sent}; a reply may take {config.total_timeout:g} s"
