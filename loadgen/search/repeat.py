"""One run several times on one start of its server: `loadgen run --repeat N`.

Runs lie in DIR/1, DIR/2, ... and are ordinary run directories; run k has the seed of the options plus k - 1, so no two
send the same prompts. What the server itself leaves, such as its log, lies in DIR.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from loadgen import rundir
from loadgen.run import Run, stoppable


async def measure(whole: Run, finished: Callable[[Path], object]) -> None:
    """Does `whole.config.repeat` runs in `whole.directory`, which exists, and calls `finished` after each, in a thread.
    A signal ends the run that it meets in good order, and no other begins. Raises as `Run.measure` does; the runs
    before are kept."""
    with stoppable(whole.stop):
        async with whole.served() as served:
            for number in range(1, whole.config.repeat + 1):
                one = _run(whole, number)
                whole.say(f"run {number} of {whole.config.repeat}, seed {one.config.seed}")
                await one.measure_one(served)
                await asyncio.to_thread(finished, one.directory)
                if whole.stop.number is not None:
                    return


def _run(whole: Run, number: int) -> Run:
    directory = whole.directory / str(number)
    config = replace(whole.config, seed=whole.config.seed + number - 1, out=directory)
    return Run(config, directory, rundir.new_run_id(), whole.say, whole.stop)
