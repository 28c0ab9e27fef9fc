"""What updates the weights: in ddp and fsdp2, and in deepspeed where it gets an optimizer of somebody else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from training_probe.protocol import BETAS, KAHAN_CHUNK, MUON_MOMENTUM, MUON_TIMES, WEIGHT_DECAY, Trial, learning_rate
from training_probe.worker import sharding

MOMENTS, EPSILON = ("exp_avg", "exp_avg_sq", "remainder"), 1e-8
NO_LAYERS = ("embed", "lm_head")  # what DeepSpeed's Muon leaves to AdamW as well, by parts of its name


class MuonAndAdamW:
    """Two optimizers as one: torch's Muon for the matrices of layers, AdamW for all else that trains."""

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], rate: float, adam: Any) -> None:
        muon = torch.optim.Muon(matrices, lr=MUON_TIMES * rate, momentum=MUON_MOMENTUM, weight_decay=WEIGHT_DECAY)
        self.both = [muon, *([adam(others)] if others else [])]

    @property
    def state(self) -> dict[Any, Any]:
        return {parameter: state for one in self.both for parameter, state in one.state.items()}

    def state_dict(self) -> dict[str, Any]:
        return {type(one).__name__: one.state_dict() for one in self.both}

    def step(self) -> None:
        for one in self.both:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.both:
            one.zero_grad(set_to_none=set_to_none)


class KahanAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """AdamW on bf16 weights with bf16 moments. What rounding takes from a weight is kept and added at the next step, as
    in Kahan's sum: both together have some 16 bits. Never compiled: torch's compiler keeps what is rounded to bf16 and
    read again in fp32, and nothing would remain."""

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, **{name: torch.zeros_like(parameter) for name in MOMENTS}}
                state["step"] += 1
                tensors = (parameter.detach(), parameter.grad, *(state[name] for name in MOMENTS))
                with torch.no_grad():
                    for part in zip(
                        *(sharding.local(each).view(-1).split(KAHAN_CHUNK) for each in tensors), strict=True
                    ):
                        _kahan_update(part, group, state["step"])


def _kahan_update(part: tuple[Tensor, ...], group: Any, step: int) -> None:
    weight, gradient, first, second, remainder = part
    rate, (beta_1, beta_2) = group["lr"], group["betas"]
    mean = first.float().lerp_(gradient.float(), 1 - beta_1)
    square = second.float().lerp_(gradient.float().square_(), 1 - beta_2)
    first.copy_(mean)
    second.copy_(square)
    update = mean.div_(1 - beta_1**step).div_(square.div_(1 - beta_2**step).sqrt_().add_(EPSILON))
    exact = weight.float().add_(remainder).mul_(1 - rate * group["weight_decay"]).sub_(update, alpha=rate)
    weight.copy_(exact)
    remainder.copy_(exact.sub_(weight))


def build(model: nn.Module, trial: Trial, *, fused: bool | None = True) -> Any:
    """The cell's optimizer over what trains. With 8-bit moments torchao's for DTensors, which it knows, else that of
    bitsandbytes. fused: torch's AdamW in one kernel; None: as torch chooses."""
    cell, rate = trial.cell, learning_rate(trial.cell.letters)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    settings: dict[str, Any] = {"lr": rate, "betas": BETAS, "weight_decay": WEIGHT_DECAY}

    def adam(own: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": group} for group in sharding.by_mesh(own)]
        stochastic = cell.states == "bf16-stochastic"
        if cell.states == "bf16-kahan":
            return KahanAdamW(groups, **settings)
        if not cell.eight_bit and not stochastic:
            return torch.optim.AdamW(groups, **settings, fused=fused)
        if cell.engine == "fsdp2":
            import torchao.optim

            ours: Any = torchao.optim.AdamW8bit if cell.eight_bit else torchao.optim._AdamW
            chosen: torch.optim.Optimizer = ours(groups, **settings, bf16_stochastic_round=stochastic)
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
