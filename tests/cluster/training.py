"""A driver on a node of the test cluster: a sweep of stand-in processes.

    python -m tests.cluster.training ADDRESS DIRECTORY NODES_PER_CELL TIMEOUT_S MODEL:PROCESSES ...

Without cells it goes on with the sweep in DIRECTORY.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.training_probe import stand_in
from training_probe.grid import Cell
from training_probe.launch import cluster
from training_probe.sweep.cell import Dependencies, Settings
from training_probe.sweep.run import resume, sweep


def say(text: str) -> None:
    print(text, flush=True)


def main(address: str, directory: Path, nodes: int, timeout_s: float, cells: list[str]) -> int:
    with cluster.joined(address, nodes, "--nodes-per-cell") as joined:
        joined.check(())
        around = Dependencies(command=stand_in.command, cluster=joined)
        if not cells:
            return resume(directory, say, around)
        settings = Settings(
            warmup_steps=2, steps=4, runs=1, timeout_s=timeout_s, on=f"ray:{address}", nodes_per_cell=nodes
        )
        named = [text.partition(":") for text in cells]
        asked = [
            Cell(model=model, gpus=int(count), seq_len=10, micro_batch=1, device="cpu") for model, _, count in named
        ]
        return sweep(asked, settings, directory, say, around)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5:]))
