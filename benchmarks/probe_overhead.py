"""What the probe adds to a training step: the same step of one engine in a bare loop and under `measure`, in turns.

    torchrun --nproc-per-node 1 benchmarks/probe_overhead.py --model 7b --method F --engine ddp

Needs the extra `train`. Each turn is synchronised at both ends; the ratio is that of the medians over the turns.
`--json FILE` adds the result to a file as a line of JSON.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import raw
import torch
import torch.distributed as dist

from training_probe import grid, llama_shape
from training_probe.options import TINY
from training_probe.protocol import Trial
from training_probe.worker import engines, measure, model

WARMUP_STEPS = 2  # of every turn: the probe empties the allocator's cache before it measures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--method", default="F")
    parser.add_argument("--engine", default="ddp")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20, help="of one turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    spec = TINY if args.model == "tiny" else llama_shape.known(args.model)
    assert spec is not None
    cell = grid.cell(
        args.method, model=args.model, engine=args.engine, micro_batch=args.micro_batch, device=device.type,
        task=grid.Method.parse(args.method).task,
    )  # fmt: skip
    trial = Trial(cell=cell, spec=spec, warmup_steps=WARMUP_STEPS, steps=args.steps)
    with model.attention_kernel(cell), tempfile.TemporaryDirectory() as directory:
        stepper = engines.build(trial, device)
        batches = measure.batch(trial, 0, device, spec.vocab_size)

        def synchronise() -> None:
            if on_gpu:
                torch.cuda.synchronize()

        def bare() -> float:
            begun = 0.0
            for number in range(WARMUP_STEPS + args.steps):
                if number == WARMUP_STEPS:
                    synchronise()
                    begun = time.perf_counter()
                stepper.backward(stepper.forward(batches[0], True), True)
                stepper.step()
            synchronise()
            return (time.perf_counter() - begun) / args.steps * 1000

        def probed() -> float:
            report = measure.measure(trial, stepper, batches, device, Path(directory), 0)
            assert report.seconds is not None
            return report.seconds / args.steps * 1000

        bare(), probed()  # warm-up
        turns = [(bare(), probed()) for _ in range(args.turns)]
    bare_ms, probed_ms = ([turn[place] for turn in turns] for place in (0, 1))
    ratio = statistics.median(probed_ms) / statistics.median(bare_ms)
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{cell.name} on {name}, {args.turns} turns of {args.steps} steps, ms a step (median, min to max):")
    for label, ms in (("bare", bare_ms), ("probed", probed_ms)):
        print(f"  {label:<7} {statistics.median(ms):9.3f}   {min(ms):9.3f} to {max(ms):9.3f}")
    print(f"  ratio   {ratio:9.4f}")
    values = {"cell": cell.name, "device": name, "torch": torch.__version__, "bare_ms": bare_ms, "probed_ms": probed_ms}
    raw.append(args.json, {**values, "ratio": ratio})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
