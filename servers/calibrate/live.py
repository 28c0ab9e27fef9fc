"""A fixed series of loads, sent to a server of one's own in two minutes at most: what a profile of its host is fitted
to. One request at rest at three lengths, one burst, one closed loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgen import rundir
from loadgen.config import Config
from loadgen.event_loop import Stop, run_loop
from loadgen.run import Run, Say

AT_REST = ((64, 32), (512, 32), (2048, 32))  # tokens of prompt and reply
LENGTHS_FILE = "at_rest.txt"
Load = Mapping[str, Any]
SERIES: Mapping[str, Load] = {
    "rest": {"concurrency": 1, "duration": 15.0},
    "burst": {"requests": 200, "input_tokens": "512", "output_tokens": "64"},
    "loop": {
        "concurrency": 32, "duration": 25.0, "input_tokens": "uniform:128:1024", "output_tokens": "uniform:64:160",
    },
}  # fmt: skip
BURST_S = 60.0  # in which a reply of the burst that has not ended is given up
UNCOUNTED = 8  # requests before each load


def series(
    url: str,
    backend: str,
    directory: Path,
    say: Say,
    loads: Mapping[str, Load] = SERIES,
) -> list[Path]:
    """The run directories of the series, in `directory`. Raises as `Run.measure` does."""
    made = rundir.create(directory)
    lengths = directory / LENGTHS_FILE
    lengths.write_text("".join(f"{prompt} {reply}\n" for prompt, reply in AT_REST))
    runs: list[Path] = []
    try:
        _play(url, backend, directory, say, loads, runs)
    finally:
        if not runs:
            lengths.unlink()
            rundir.remove_if_empty(directory, made)
    return runs


def _play(url: str, backend: str, directory: Path, say: Say, loads: Mapping[str, Load], runs: list[Path]) -> None:
    lengths = directory / LENGTHS_FILE
    with Stop() as stop:
        for number, (name, load) in enumerate(loads.items()):
            run = directory / name
            options = dict(load)
            if "input_tokens" not in load:
                options |= {"input_tokens": f"file:{lengths}", "output_tokens": f"file:{lengths}"}
            config = Config(
                backend=backend, url=url, seed=number, warmup=UNCOUNTED, drain_warmup=True, calibrate=False,
                total_timeout=BURST_S, out=run, **options,
            )  # fmt: skip
            one = Run(config, run, rundir.new_run_id(), say, stop)
            one.check()
            made = rundir.create(run)
            say(f"{name}: " + ", ".join(f"{key} {value}" for key, value in load.items()))
            try:
                run_loop(one.measure())
            finally:
                rundir.remove_if_empty(run, made)
            runs.append(run)


def before_and_after(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """How far off the series' own runs are end to end, by the profile before and by fits to the others."""
    listed = (f"{name} {before[name]:.1%} before, {after[name]:.1%} after" for name in before if name in after)
    return f"predictions of this series were off end to end (W1): {'; '.join(listed)}, each by a fit to the others."
