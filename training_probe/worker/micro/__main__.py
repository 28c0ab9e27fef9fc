"""One process of a measurement: reads `task.json`, appends a line of `points.jsonl` as each point ends.

Of several ranks only the first writes; a rank that can go no further ends with exit code 1, its reason in the log.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from training_probe.conditions import Watch
from training_probe.points import ABOUT_FILE, POINTS_FILE, TASK_FILE, About, Collective, Copy, Measured, Task
from training_probe.protocol import CANNOT_GO_ON, write_atomically
from training_probe.worker.measure import nccl_version, nvml_handle, own_device
from training_probe.worker.micro import collectives, gemm, memcpy
from training_probe.worker.micro.timing import MeasurementStopped


def main(directory: Path) -> int:
    task = msgspec.json.decode((directory / TASK_FILE).read_bytes(), type=Task)
    device = own_device(task.device)
    writes = int(os.environ.get("RANK", "0")) == 0
    if writes:
        write_atomically(directory / ABOUT_FILE, _about(device))
    gc.disable()  # it would strike in the middle of a sample
    try:
        with (directory / POINTS_FILE).open("ab", buffering=0) as file:
            watch = Watch(nvml_handle(device))
            for result in _measure(task)(task, device):
                if writes:
                    result = msgspec.structs.replace(result, conditions=watch.stop())
                    file.write(msgspec.json.encode(result) + b"\n")
                gc.collect()
                watch.start()
    except MeasurementStopped as error:
        traceback.print_exc()
        print(f"{CANNOT_GO_ON}{error}", file=sys.stderr)
        return 1
    return 0


def _measure(task: Task) -> Callable[[Task, torch.device], Iterator[Measured]]:
    if isinstance(task.points[0], Collective):
        return collectives.measure
    return memcpy.measure if isinstance(task.points[0], Copy) else gemm.measure


def _about(device: torch.device) -> About:
    versions = {"torch": str(torch.__version__)}
    if device.type == "cpu":
        return About(device_name="CPU", versions=versions)
    versions |= {"CUDA": str(torch.version.cuda), **nccl_version(device)}
    properties = torch.cuda.get_device_properties(device)
    return About(device_name=properties.name, l2_bytes=int(properties.L2_cache_size), versions=versions)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # tearing NCCL down may hang after all has been written
