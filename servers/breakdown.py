"""`loadgen breakdown`: where the time of a decode step goes, on a server that is started or on modelled GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from backends import exit_codes
from backends.exit_codes import FailedError
from loadgen import cli, rundir, terminal
from loadgen.breakdown import measure, tables
from loadgen.config import LOAD, OUTPUT, Config, ConfigError, LaunchOptions, ModelledOptions, PlacementOptions
from loadgen.event_loop import StopSignals, run_loop
from loadgen.option_types import ShownOptions, Whole, names, offers, option
from loadgen.run import backend_failed
from loadgen.terminal import say_error
from loadgen.trace import TraceError
from servers.predict.breakdown import modelled


@offers(
    *("backend", "model", "launch", "input_tokens", "output_tokens", "concurrency", "seed", "tokenizer", "vocab_size"),
    *("api_key_env", "header", "connect_timeout", "first_byte_timeout", "idle_timeout", "total_timeout", "out"),
    "dry_run",
    *names(PlacementOptions), *names(LaunchOptions), *(name for name in names(ModelledOptions) if name != "speed"),
)  # fmt: skip
class BreakdownOptions(Config):
    """Of `run`, without what makes the load other than one batch in decode."""


def breakdown(
    config: Annotated[BreakdownOptions | None, Parameter(name="*")] = None,
    *,
    steps: Annotated[Whole, option(LOAD, "How many decode steps to profile.")] = 20,
    preset: Annotated[
        Literal["paper-table10"] | None,
        option(
            OUTPUT,
            "Tables X and XI of arXiv 2311.03687 beside; with no server named, its setting on modelled GPUs.",
        ),
    ] = None,
    shown: ShownOptions | None = None,
) -> int:
    """Say where the time of a decode step goes: by kind of work and by part of the model.

    With --launch process or docker it starts the server with its profiler, keeps --concurrency requests in decode
    (default 64), profiles some steps and reads the trace, which opens in Perfetto. With --gpu it prints the terms of
    the cost model that the embedded server runs on, marked as emulated.
    """
    terminal.use(shown)
    config = config or BreakdownOptions()
    if steps < 2:
        raise ConfigError(f"--steps is {steps}; it must be at least 2, since the first is left out.")
    run_id = rundir.new_run_id()
    directory = config.out or Path("runs") / run_id
    if config.dry_run:
        print(measure.dry_run(measure.load(config), directory, run_id))
        return exit_codes.OK
    try:
        with rundir.measuring(directory, private=config.dataset is not None):
            if config.where == "embedded":
                result = modelled(config, preset, directory, run_id)
            else:
                with StopSignals() as stop:
                    one = measure.measure(measure.load(config), steps, directory, run_id, terminal.note, stop)
                    result = run_loop(one)
    except FailedError as error:
        return backend_failed(error)
    except TraceError as error:
        say_error("loadgen", error)
        return exit_codes.INVALID
    return cli.show_breakdown(directory, result if preset is None else tables.beside_paper(result))
