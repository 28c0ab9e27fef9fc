"""A model that trains in milliseconds, and trials of it. Needs nothing installed; says whether the engines are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from backends import exit_codes
from training_probe import grid
from training_probe.grid import Cell
from training_probe.options import TINY
from training_probe.protocol import Trial

ENGINES = ("torch", "transformers", "peft", "deepspeed", "bitsandbytes", "megatron")
needs_engines = pytest.mark.skipif(
    any(find_spec(name) is None for name in ENGINES), reason="needs the training engines (make test-train)"
)

SPEC = replace(
    TINY, hidden=128, layers=2, heads=4, kv_heads=2, intermediate=344, vocab_size=512, max_position=256
)  # fmt: skip
WARMUP_STEPS, STEPS = 2, 6
MEASURED = (exit_codes.OK, exit_codes.INVALID)  # of commands; a busy machine may leave no measurement


def cell(engine: str, method: str, gpus: int = 1, **more: Any) -> Cell:
    """On the CPU, of SPEC."""
    task = "finetune" if grid.Method.parse(method).adapter else "pretrain"
    given = {"seq_len": 32, "micro_batch": 2, "device": "cpu", "task": task, **more}
    return grid.cell(method, model=SPEC.name, engine=engine, gpus=gpus, **given)


def trial(of: Cell, **more: Any) -> Trial:
    rows = () if of.drawn is None else of.drawn.replicas
    return Trial(cell=of, **{"spec": SPEC, "rows": rows, "warmup_steps": WARMUP_STEPS, "steps": STEPS, **more})


def losses(
    of: Trial, steps: int, rank: int = 0, before_step: Callable[[Any], object] = lambda stepper: None
) -> list[float]:
    """The loss of each step of the trial's engine in this process, the mean over its micro batches. before_step: called
    with the engine once it has the gradients of a step."""
    import torch

    from training_probe.worker import batches, engines, model

    means, device = [], torch.device("cpu")
    with model.attention_kernel(of.cell):
        stepper = engines.build(of, device)
        step = batches.batch(of, rank, device, model.vocab_size(of))
        for _ in range(steps):
            each = []
            for number, inputs in enumerate(step, 1):
                loss = stepper.forward(inputs, number == len(step))
                stepper.backward(loss, number == len(step))
                each.append(float(loss.detach()))
            before_step(stepper)
            stepper.step()
            means.append(sum(each) / len(each))
    return means
