"""What updates the weights: in ddp and fsdp2, and in deepspeed where it gets an optimizer of somebody else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from training_probe.protocol import BETAS, MUON_MOMENTUM, MUON_TIMES, WEIGHT_DECAY, Trial, learning_rate
from training_probe.worker import sharding

NO_LAYERS = ("embed", "lm_head")  # what DeepSpeed's Muon leaves to AdamW as well, by parts of its name


class MuonAndAdamW:
    """Two optimizers as one: torch's Muon for the matrices of layers, AdamW for all else that trains."""

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], rate: float, adam: Any) -> None:
        muon = torch.optim.Muon(matrices, lr=MUON_TIMES * rate, momentum=MUON_MOMENTUM, weight_decay=WEIGHT_DECAY)
        self.both = [muon, *([adam(others)] if others else [])]

    @property
    def state(self) -> dict[Any, Any]:
        return {parameter: state for one in self.both for parameter, state in one.state.items()}

    def step(self) -> None:
        for one in self.both:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.both:
            one.zero_grad(set_to_none=set_to_none)


def build(model: nn.Module, trial: Trial, *, fused: bool | None = True) -> Any:
    """The cell's optimizer over what trains. With 8-bit moments torchao's for DTensors, which it knows, else that of
    bitsandbytes. fused: torch's AdamW in one kernel; None: as torch chooses."""
    cell, rate = trial.cell, learning_rate(trial.cell.letters)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    settings: dict[str, Any] = {"lr": rate, "betas": BETAS, "weight_decay": WEIGHT_DECAY}

    def adam(own: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": group} for group in sharding.by_mesh(own)]
        if not cell.eight_bit:
            return torch.optim.AdamW(groups, **settings, fused=fused)
        if cell.engine == "fsdp2":
            import torchao.optim

            chosen: torch.optim.Optimizer = torchao.optim.AdamW8bit(groups, **settings)
            return chosen
        import bitsandbytes.optim

        paged = cell.optim == "paged-adamw-8bit"
        kind = bitsandbytes.optim.PagedAdamW8bit if paged else bitsandbytes.optim.AdamW8bit
        other: torch.optim.Optimizer = kind(groups, **settings)
        return other

    if cell.optim != "muon":
        return adam(trained.values())
    matrices = {name for name, each in trained.items() if each.ndim == 2 and not any(no in name for no in NO_LAYERS)}
    others = [parameter for name, parameter in trained.items() if name not in matrices]
    return MuonAndAdamW([trained[name] for name in sorted(matrices)], others, rate, adam)


def named(optimizer: Any) -> str:
    """What it is called: its package and its class."""
    if isinstance(optimizer, MuonAndAdamW):
        return "torch " + " and ".join(type(one).__name__ for one in optimizer.both)
    return f"{type(optimizer).__module__.partition('.')[0]} {type(optimizer).__name__}"
