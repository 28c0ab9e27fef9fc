"""How steadily one thread of this machine's CPU works, and launches kernels on its GPU: in windows of 50 ms.

    python benchmarks/cpu_pace.py OUT.json    # on a machine with a GPU, where nothing else runs; 40 s

A server's steps with prefills are as long as one thread takes to launch their kernels. This says how far that thread's
pace depends on nothing but the machine: alone, beside other busy processes, and on one core. Needs torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

WINDOW_S = 0.05
LAG = 4  # windows


def windows(seconds: float, work: Callable[[], int]) -> list[float]:
    """Turns of `work` a second in each window. work: does some, and says how many turns that was."""
    paces, end_s = [], time.perf_counter() + seconds
    while (begin_s := time.perf_counter()) < end_s:
        turns = 0
        while time.perf_counter() < begin_s + WINDOW_S:
            turns += work()
        paces.append(turns / (time.perf_counter() - begin_s))
        torch.cuda.synchronize()
    return paces


def loops() -> int:
    turns = 0
    for _ in range(2000):
        turns += 1
    return turns


def launches() -> int:
    for _ in range(50):
        torch.add(ONES, ONES, out=SUMS)
    return 50


def burn(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        loops()


@contextmanager
def busy(others: int, seconds: float, core: int | None = None) -> Iterator[None]:
    """While so many processes have nothing to do but count."""
    processes = [multiprocessing.Process(target=burn, args=(seconds + 2,)) for _ in range(others)]
    for process in processes:
        process.start()
        if core is not None and process.pid is not None:
            os.sched_setaffinity(process.pid, {core})
    time.sleep(1)
    yield
    for process in processes:
        process.join()


def keep(what: str, values: list[float]) -> None:
    """In MEASURED, and in a line for people."""
    deciles, mean = statistics.quantiles(values, n=10), statistics.mean(values)
    spread = sum((value - mean) ** 2 for value in values)
    autocovariance = sum((a - mean) * (b - mean) for a, b in zip(values, values[LAG:], strict=False))
    print(f"{what}: {deciles[0]:.4g}, {deciles[4]:.4g}, {deciles[8]:.4g} (10th, 50th, 90th percentile); "
          f"autocorrelation at {1000 * LAG * WINDOW_S:.0f} ms {autocovariance / spread:.2f}", flush=True)  # fmt: skip
    MEASURED[what] = [float(f"{value:.4g}") for value in values]


def launch_us(seconds: float) -> list[float]:
    return [1e6 / pace for pace in windows(seconds, launches)]


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    MEASURED: dict[str, list[float]] = {}
    ONES = torch.ones(64, 64, device="cuda")
    SUMS = torch.empty_like(ONES)
    windows(1, launches)
    keep("loops a second, alone", windows(3, loops))
    keep("us a launch, alone", launch_us(5))
    cores = sorted(os.sched_getaffinity(0))
    for others in (2, 4, 8, len(cores) - 1):
        with busy(others, 3):
            keep(f"us a launch, beside {others} busy processes", launch_us(3))
    os.sched_setaffinity(0, {cores[2]})
    keep("us a launch, on one core", launch_us(2))
    with busy(1, 2, cores[3]):
        keep("us a launch, on one core, the next one busy", launch_us(2))
    Path(sys.argv[1]).write_text(json.dumps(MEASURED) + "\n")
