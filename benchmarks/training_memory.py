"""How far predicted reserved memory is off, and how the shares of training_probe/memory/process.py were fitted.

    python benchmarks/training_memory.py            # fits, and prints all errors: a second, needs no GPU
    python benchmarks/training_memory.py --measure OUT.jsonl  # measures the cells of CELLS on two H100: seven minutes

Its cells are those of results/training.jsonl.xz. The fit is to the 75 cells of h200/training until 2026-11-22, all of
Llama-2-7B, by least squares of relative errors. It is made again without each sweep in turn, and judged by that sweep.
The 45 cells there that ran since, nineteen of them of 13B and 70B, were predicted before they ran. training_memory has
13 cells of six models through FSDP2 and DDP, which were predicted before they ran (2026-11-24; torch 2.11.0+cu130,
transformers 5.17.0). Where a cell was predicted to take less than the card has, another process held the rest, so that
no more was free than "fits" then promised. Offload was ended after 90 s. The 16 cells of frozen/training_methods, of
methods beyond the paper's letters, were predicted before they ran, too, on one and two H200 that did nothing else.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from backends import catalog
from training_probe import memory
from training_probe.grid import Cell, cell
from training_probe.llama_shape import known
from training_probe.memory import Prediction, process
from training_probe.protocol import TRIAL_FILE, Trial, write_atomically
from training_probe.results import GIB, SHARED, CellResult
from training_probe.results import read as read_results

FIT_UNIX_S = datetime(2026, 11, 23, tzinfo=UTC).timestamp()  # cells that started before are in the fit
LIMIT_S = 90.0
# engine, method, model, GPUs, tokens, sequences, GiB that are free for it
CELLS = """ddp F llama-3.2-1b 1 4096 4 68.3
ddp F 7b 1 1024 4 80
ddp R 7b 1 2048 4 68.7
ddp RS qwen2.5-3b 2 1024 4 56.5
fsdp2 F+R+Z3+O 7b 2 2048 4 11.8
ddp L+F llama-3-8b 1 2048 4 80
fsdp2 F+Z3 7b 2 2048 2 80
ddp Naive llama-3.2-3b 1 1024 4 68.5
fsdp2 F+R+Z3 llama-3-8b 2 4096 1 80
fsdp2 F+Z2 llama-3.2-3b 2 2048 4 80
ddp F llama-3-8b 2 1024 1 76.6
fsdp2 L+F+Z3 13b 2 2048 2 56.2
fsdp2 Z3 llama-3.2-3b 2 1024 4 80"""


class Measured(NamedTuple):
    """outcome: ok or oom. Bytes: allocated and reserved of the rank that had most, None where it was ended; used of its
    GPU, by all that was started; host, of the machine; free, before it began."""

    sweep: str
    cell: Cell
    outcome: str
    allocated: float | None
    reserved: float | None
    used: float | None = None
    host: float | None = None
    free: int = 0
    started_unix_s: float = 0.0

    def prediction(self) -> Prediction:
        spec = catalog.find(self.cell.model)
        assert spec is not None
        return memory.predict(self.cell, spec)


def swept(h200: Path) -> list[Measured]:
    """The cells of h200/training that the fit is to, by sweep."""
    return [one for one in _all_swept(h200) if one.started_unix_s < FIT_UNIX_S]


def since(h200: Path) -> list[Measured]:
    """The cells there that ran after the fit."""
    return [one for one in _all_swept(h200) if one.started_unix_s >= FIT_UNIX_S]


def _all_swept(h200: Path) -> Iterator[Measured]:
    for directory in sorted(h200.iterdir()):
        if directory.is_dir():
            yield from methods(directory)


def methods(directory: Path) -> list[Measured]:
    """The cells of a sweep: of frozen/training_methods those beyond the letters, predicted before they ran."""
    return [
        Measured(
            directory.name, _cell_of(result), result.outcome, _bytes(result.peak_memory_gb),
            _bytes(result.peak_reserved_gb), started_unix_s=result.started_unix_s,
        )
        for result in read_results(directory)
    ]  # fmt: skip


def ran_out(h200: Path) -> list[Cell]:
    """What a search of h200/training tried, and ran out of memory."""
    return [
        cell(**{**_fields(result), "micro_batch": attempt.micro_batch})
        for directory in sorted(h200.iterdir()) if directory.is_dir()
        for result in read_results(directory)
        for attempt in result.search if attempt.outcome == "oom"
    ]  # fmt: skip


def predicted(measured: Path) -> list[Measured]:
    """The cells of training_memory.jsonl, which were predicted before they ran."""
    return [_predicted(json.loads(line)) for line in measured.read_text().splitlines()]


def _predicted(row: dict[str, Any]) -> Measured:
    asked = _named(*(row[name] for name in ("engine", "method", "model", "gpus", "seq_len", "micro_batch")))
    return Measured(
        sweep="H100", cell=asked, outcome=row["outcome"], allocated=row["allocated_bytes"],
        reserved=row["reserved_bytes"], used=row["used_bytes"], host=row["host_used_bytes"], free=row["free_bytes"],
    )  # fmt: skip


def fitted(measured: Sequence[Measured]) -> tuple[float, float]:
    """The two shares."""
    rows, values = [], []
    for one in measured:
        assert one.allocated is not None and one.reserved is not None
        apart, resized = process.apart_and_resized(one.cell, one.prediction().moments)
        rows.append([apart / one.allocated, resized / one.allocated])
        values.append((one.reserved - one.allocated) / one.allocated)
    shares, _ = nnls(np.array(rows), np.array(values))
    return float(shares[0]), float(shares[1])


def error(one: Measured, shares: tuple[float, float], *, of_allocated: float | None = None) -> float:
    """Of the reserved memory; the shares' own, or with what is predicted to be allocated."""
    assert one.reserved is not None
    prediction = one.prediction()
    apart, resized = process.apart_and_resized(one.cell, prediction.moments)
    allocated = prediction.peak_bytes if of_allocated is None else of_allocated
    return (allocated + shares[0] * apart + shares[1] * resized) / one.reserved - 1


def left_out(measured: Sequence[Measured]) -> Iterator[tuple[Measured, float]]:
    """Each cell with the error of a fit that has not seen its sweep."""
    for sweep in dict.fromkeys(one.sweep for one in measured):
        shares = fitted([one for one in measured if one.sweep != sweep])
        for one in measured:
            if one.sweep == sweep:
                yield one, error(one, shares, of_allocated=one.allocated)


def _fields(result: CellResult) -> dict[str, Any]:
    fields = {name: getattr(result, name) for name in SHARED} | {"micro_batch": result.batch_size}
    attention = "eager" if fields["attention"] == "flash" else fields["attention"]
    return fields | {"attention": attention}


def _cell_of(result: CellResult) -> Cell:
    return cell(**_fields(result))


def _bytes(gib: float | None) -> float | None:
    return None if gib is None else gib * GIB


def _named(engine: str, method: str, model: str, gpus: int, seq_len: int, micro_batch: int) -> Cell:
    task = "finetune" if method.startswith("L") else "pretrain"
    return cell(
        method, model=model, engine=engine, task=task, gpus=gpus, seq_len=seq_len, micro_batch=micro_batch,
        adapter_dtype="bf16",
    )  # fmt: skip


def _line(name: str, errors: Sequence[float]) -> str:
    absolute = sorted(map(abs, errors))
    return (
        f"{name:<52} {len(errors):3} cells, median {statistics.median(absolute):6.1%}, "
        f"from {min(errors):+6.1%} to {max(errors):+6.1%}"
    )


def report(results: Path) -> None:
    h200 = results / "h200" / "training"
    measured = swept(h200)
    shares = fitted(measured)
    print(f"kept apart {shares[0]:.3f}, resized {shares[1]:.2f}")
    own = (process.KEPT_APART, process.RESIZED)
    print(
        _line("reserved, in-sample, of what was allocated", [error(m, own, of_allocated=m.allocated) for m in measured])
    )
    ok = [one for one in measured if one.outcome == "ok"]
    print(_line("reserved, in-sample, of what is predicted", [error(m, own) for m in ok]))
    print(_line("reserved, each sweep left out of the fit", [off for _, off in left_out(measured)]))
    before = predicted(results / "training_memory" / "training_memory.jsonl")
    held = [one for one in before if one.allocated is not None]
    newer = [one for one in methods(results / "frozen" / "training_methods") if one.outcome == "ok"]
    for what, cells in (
        ("predicted before", held),
        ("since the fit", since(h200)),
        ("methods, predicted before", newer),
    ):
        print(_line(f"allocated, {what}", [m.prediction().peak_bytes / (m.allocated or 1) - 1 for m in cells]))
        print(_line(f"reserved, {what}", [error(m, own) for m in cells]))
    print(_line("process, predicted before", [m.prediction().process_bytes / (m.used or 1) - 1 for m in held]))
    offloaded = [one for one in before if one.cell.letters.offload]
    print(_line("host", [m.prediction().host_bytes / (m.host or 1) - 1 for m in offloaded]))


def measure(out: Path) -> None:
    """One cell after another, in processes of its own, beside a process that holds the rest of the memory."""
    import psutil
    import torch

    with out.open("w") as file:
        for number, line in enumerate(CELLS.splitlines()):
            engine, method, model, *sizes, gib = line.split()
            asked = _named(engine, method, model, *map(int, sizes))
            free = torch.cuda.mem_get_info
            held = [
                torch.empty(max(0, int(free(gpu)[0] - float(gib) * GIB)), dtype=torch.uint8, device=gpu)
                for gpu in range(asked.gpus)
            ]
            before, host_before = free(0)[0], psutil.virtual_memory().available
            directory = Path(tempfile.mkdtemp())
            write_atomically(directory / TRIAL_FILE, Trial(cell=asked, spec=known(model), warmup_steps=2, steps=4))
            argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(asked.gpus)]
            argv += ["--master-port", str(29500 + number), "-m", "training_probe.worker", str(directory)]
            least, host_least, begun = before, host_before, time.monotonic()
            with subprocess.Popen(argv, env=os.environ) as running:
                while running.poll() is None and time.monotonic() - begun < LIMIT_S:
                    least = min(least, free(0)[0])
                    host_least = min(host_least, psutil.virtual_memory().available)
                    time.sleep(0.04)
                running.terminate()
            rank = directory / "rank0.json"
            own = json.loads(rank.read_text()) if rank.exists() else {}
            row = {
                "model": model, "engine": engine, "method": method, "gpus": asked.gpus, "seq_len": asked.seq_len,
                "micro_batch": asked.micro_batch, "outcome": own.get("outcome", "timeout"), "free_bytes": before,
                "allocated_bytes": own.get("peak_allocated_bytes"), "reserved_bytes": own.get("peak_reserved_bytes"),
                "used_bytes": before - least, "host_used_bytes": host_before - host_least,
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
            del held
            torch.cuda.empty_cache()


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(Path(sys.argv[-1]))
    else:
        import kept

        with tempfile.TemporaryDirectory() as place:
            for one in kept.read(kept.RESULTS / "training.jsonl.xz"):
                kept.unpack(one, Path(place, one["name"]))
            report(Path(place))
