"""A fixed series of loads, sent to a server of one's own in two minutes at most: what a profile of its host is fitted
to. One request at rest at three lengths, one burst, one closed loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from backends.exit_codes import Stopped
from loadgen import rundir
from loadgen.config import Config
from loadgen.event_loop import StopSignals, run_loop
from loadgen.run import LoadRun, NextRun, Say, Served, measure_each

AT_REST = ((64, 32), (512, 32), (2048, 32))  # tokens of prompt and reply
LENGTHS_FILE = "at_rest.txt"
Load = dict[str, Any]
SERIES: Mapping[str, Load] = {
    "rest": {"concurrency": 1, "duration": 15.0},
    "burst": {"requests": 200, "input_tokens": "512", "output_tokens": "64"},
    "loop": {
        "concurrency": 32, "duration": 25.0, "input_tokens": "uniform:128:1024", "output_tokens": "uniform:64:160",
    },
}  # fmt: skip
BURST_S = 60.0  # in which a reply of the burst that has not ended is given up
UNCOUNTED = 8  # requests before each load


def series(server: Load, directory: Path, say: Say, loads: Mapping[str, Load] = SERIES) -> list[Path]:
    """The run directories of the series, in `directory`. server: the options of a run that say where the loads go: to a
    URL, or to a server that is started once for all of them. Raises as `measure_each` does."""
    with rundir.measuring(directory, plan=LENGTHS_FILE), StopSignals() as stop:
        lengths = directory / LENGTHS_FILE
        lengths.write_text("".join(f"{prompt} {reply}\n" for prompt, reply in AT_REST))
        at_rest = Load(input_tokens=f"file:{lengths}", output_tokens=f"file:{lengths}")

        def run(where: Path, number: int, load: Load) -> LoadRun:
            config = Config(
                seed=number, warmup=UNCOUNTED, drain_warmup=True, calibrate=False, total_timeout=BURST_S, out=where,
                **server | at_rest | load,
            )  # fmt: skip
            return LoadRun(config, where, rundir.new_run_id(), say, stop)

        runs = [run(directory / name, number, load) for number, (name, load) in enumerate(loads.items())]
        for one in runs:
            one.check()

        async def each(_: Served) -> AsyncGenerator[NextRun, None]:
            for one, (name, load) in zip(runs, loads.items(), strict=True):
                say(f"{name}: " + ", ".join(f"{key} {value}" for key, value in load.items()))
                yield NextRun(one, lambda: None)

        longest = run(directory, 0, {"requests": len(AT_REST)})
        run_loop(measure_each(longest, each))
        if stop.number is not None:
            raise Stopped("stopped before the series was over; nothing was fitted.", stop.exit_code)
    return [one.directory for one in runs]


def before_and_after(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """How far off the series' own runs are end to end, by the profile before and by fits to the others."""
    listed = (f"{name} {before[name]:.1%} before, {after[name]:.1%} after" for name in before if name in after)
    return f"predictions of this series were off end to end (W1): {'; '.join(listed)}, each by a fit to the others."
