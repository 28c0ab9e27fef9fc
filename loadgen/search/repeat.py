"""One run several times on one start of its server: `loadgen run --repeat N`.

Runs lie in DIR/1, DIR/2, ... and are ordinary run directories; run k has the seed of the options plus k - 1, so no two
send the same prompts. What the server itself leaves, such as its log, lies in DIR.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from loadgen import rundir
from loadgen.run import LoadRun, NextRun, Served, measure_each


async def measure(whole: LoadRun, finished: Callable[[Path], object]) -> None:
    """Does `whole.config.repeat` runs in `whole.directory`, which exists, and calls `finished` after each, in a thread.
    Raises as `measure_each` does."""

    async def runs(_: Served) -> AsyncGenerator[NextRun, None]:
        for number in range(1, whole.config.repeat + 1):
            directory, seed = whole.directory / str(number), whole.config.seed + number - 1
            config = replace(whole.config, seed=seed, out=directory)
            whole.say(f"run {number} of {whole.config.repeat}, seed {seed}")
            one = LoadRun(config, directory, rundir.new_run_id(), whole.say, whole.stop)
            yield NextRun(one, partial(finished, directory))

    await measure_each(whole, runs)
