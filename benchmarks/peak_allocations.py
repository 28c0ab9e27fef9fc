"""What a training step holds where its memory peaks, and which line of which library allocated it: what the terms of
`training_probe/memory/engines.py` are read off.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/peak_allocations.py --model 7b --method L+Z3

Needs the extra `train` and a GPU. The allocator's own history is replayed up to its highest moment after the first
step; of each place that allocated what is alive then, GiB, how many tensors, and its innermost calls. With torch 2.11
the history breaks recomputation under ZeRO 3 with offload (SystemError in FunctionMeta).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.config import ConfigError
from training_probe import grid, memory
from training_probe.options import known_models
from training_probe.protocol import Trial
from training_probe.results import GIB

WARMUP_STEPS, STEPS = 1, 2  # the first allocates optimizer states, too
MOST_EVENTS = 4_000_000
CALLS = 4
WRAPPERS = ("torch/nn/modules/module.py", "torch/_ops.py", "torch/utils/_contextlib.py", "deepspeed/utils/nvtx.py")

Event = Mapping[str, Any]  # of torch.cuda.memory._snapshot: action, addr, size, frames


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", default="7b")
    parser.add_argument("--method", default="Z2")
    parser.add_argument("--engine", choices=["deepspeed", "fsdp2", "ddp"], default="deepspeed")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0, help="whose memory is told")
    parser.add_argument("--places", type=int, default=20)
    args = parser.parse_args()

    import torch
    import torch.distributed as dist

    from training_probe.worker import engines, measure, model

    if not torch.cuda.is_available():
        parser.error("torch sees no GPU.")
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun, a process a GPU.")
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        cell = grid.cell(
            args.method, model=args.model, engine=args.engine, micro_batch=args.micro_batch, gpus=ranks,
            device="cuda", task=grid.Method.parse(args.method).task,
        )  # fmt: skip
        chosen = known_models([cell])[args.model]
    except (grid.GridError, ConfigError) as error:
        parser.error(str(error))
    if chosen.spec is None:
        parser.error(f"the shape of '{args.model}' is not known here.")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    told = rank == args.rank
    if told:
        torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python")
    dist.init_process_group("nccl", device_id=device)
    trial = Trial(cell=cell, spec=chosen.spec, model_dir=chosen.directory, warmup_steps=WARMUP_STEPS, steps=STEPS)
    with model.attention_kernel(cell):
        stepper = engines.build(trial, device)
        tokens = measure.batch(trial, rank, device, chosen.spec.vocab_size)[0]
        first = 0
        for number in range(WARMUP_STEPS + STEPS):
            if told and number == WARMUP_STEPS:
                first = len(_history(rank))
            stepper.backward(stepper.forward(tokens, True), True)
            stepper.step()
        torch.cuda.synchronize()
    if told:
        tell(cell.name, _history(rank), first, args.places)
        for phase in memory.predict(cell, chosen.spec).moments:
            print(f"  predicted {phase.bytes / GIB:8.4f} GiB: {phase.name}")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _history(rank: int) -> list[Event]:
    import torch

    traces: list[list[Event]] = torch.cuda.memory._snapshot()["device_traces"]
    return traces[rank]


def tell(name: str, events: Sequence[Event], first: int, places: int) -> None:
    at, peak_bytes = peak(events, first)
    print(f"{name}: {peak_bytes / GIB:.4f} GiB, reached by {place(events[at]['frames'])}")
    sizes: dict[str, list[int]] = defaultdict(list)
    for index in alive(events, at):
        sizes[place(events[index]["frames"])].append(events[index]["size"])
    for where, each in sorted(sizes.items(), key=lambda pair: -sum(pair[1]))[:places]:
        print(f"  {sum(each) / GIB:8.4f} GiB in {len(each):4d}  {where}")


def peak(events: Sequence[Event], first: int) -> tuple[int, int]:
    """The event from the `first` on after which most is allocated, and how many bytes that are."""
    sizes: dict[int, int] = {}
    total = most = at = 0
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            total += event["size"]
            if index >= first and total > most:
                at, most = index, total
        elif event["action"] == "free_requested":  # as torch.cuda.memory_allocated counts
            total -= sizes.pop(event["addr"], 0)
    return at, most


def alive(events: Sequence[Event], at: int) -> list[int]:
    """The events that allocated what is there after the one at `at`."""
    made: dict[int, int] = {}
    for index, event in enumerate(events[: at + 1]):
        if event["action"] == "alloc":
            made[event["addr"]] = index
        elif event["action"] == "free_requested":
            made.pop(event["addr"], None)
    return list(made.values())


def place(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost calls, without those that every module makes; autograd's own threads have none."""
    calls = [
        f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
        for frame in frames
        if not frame["filename"].endswith(WRAPPERS)
    ]
    return " < ".join(calls[:CALLS]) or "autograd"


if __name__ == "__main__":
    sys.exit(main())
