"""What `loadgen search` does, from its options to its last line."""

from __future__ import annotations

from pathlib import Path

from backends.launch import LaunchError
from loadgen import exit_codes, rundir
from loadgen.config import Config, ConfigError
from loadgen.event_loop import Stop, run_loop
from loadgen.probe import ServerError
from loadgen.progress import ProgressLine
from loadgen.run import Run, Stopped
from loadgen.search import found as founds
from loadgen.search import live, objective
from loadgen.search.found import AxisName, Found
from loadgen.server.embedded import EmbeddedError
from loadgen.server.managed import quoted
from loadgen.target import TransportError
from loadgen.terminal import say, say_error


def search(
    config: Config, slo: str | None, attain: float, budget_minutes: float, axis: AxisName, resume: Path | None
) -> int:  # fmt: skip
    """Gives the exit code. Raises ConfigError, RunError and what a run raises before it begins."""
    config = live.options_of(config)
    if resume is not None:
        found, config = live.resumed(resume, config)
        directory = resume
    else:
        if slo is None:
            raise ConfigError("--slo is missing; say what the server is to keep, such as --slo ttft_ms=500,tpot_ms=50.")
        wanted = live.asked(config, objective.parse(slo), attain, budget_minutes, axis)
        found = Found(version=rundir.package_version(), asked=wanted)
        directory = config.out or Path("runs") / rundir.new_run_id()
    whole = Run(config, directory, rundir.new_run_id(), say)
    whole.check()
    made = None if resume is not None else rundir.create(directory, private=config.dataset is not None)
    return _measured(live.Search(whole, found, ProgressLine()), made)


def _measured(one: live.Search, made: Path | None) -> int:
    directory, code = one.whole.directory, None
    with Stop() as stop:
        one.whole.stop = stop
        try:
            run_loop(one.measure())
        except (ServerError, TransportError, EmbeddedError, LaunchError) as error:
            if isinstance(error, LaunchError) and error.log:
                say(quoted(error.log))
            say_error("loadgen", error)
            code = exit_codes.FAILED
        except Stopped:
            code = exit_codes.STOPPED
        finally:
            one.progress.end()  # type: ignore[attr-defined]
            one.stopped()
            rundir.remove_if_empty(directory, made)
        show(directory, one.found)
    return stop.exit_code or code or exit_codes.OK


def show(directory: Path, found: Found) -> None:
    """Prints the answer and writes its text and figure."""
    say(founds.render(found))
    try:
        rundir.replace(directory / "search.md", founds.markdown(found).encode())
        if found.loads:
            founds.draw(found, directory / "search.png")
    except OSError as error:  # it is printed all the same
        say_error("loadgen", f"cannot write to {directory}: {error.strerror or error}.")
    print(founds.to_json(found), flush=True)
