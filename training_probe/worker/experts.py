"""Expert parallelism: each rank of a group has a part of the experts of each layer, and tokens go to where theirs are.

Every rank has sequences of its own, and routes them as the model does. Tokens are sorted by expert and sent to the
ranks of their experts (all-to-all), which compute them by transformers' own grouped products; what comes out goes back
the same way and is weighted there. Weights of experts are tensors of two meshes: divided by experts over the group,
then by FSDP over the ranks that have the same experts. All else is divided among all ranks, as without.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from training_probe.grid import Cell
from training_probe.protocol import Unsupported

NAME = "exchanged"  # of these experts, to transformers
_LIKE_TRANSFORMERS = ("has_gate", "has_bias", "is_transposed", "_apply_gate", "act_fn")


class TokenExchange:
    """The groups of the ranks that have all experts together. Makes the exchange known to transformers."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        mesh = init_device_mesh(device.type, (cell.shards // cell.ep, cell.ep), mesh_dim_names=("shard", "ep"))
        self._shards, self._ranks = mesh["shard"], mesh["ep"]
        ALL_EXPERTS_FUNCTIONS.register(NAME, partial(_forward, self._ranks.get_group(), cell.ep))

    def divide(self, layers: nn.ModuleList, **policy: Any) -> None:
        """Gives each rank its experts of a model on the meta device. policy: FSDP's, but for the mesh. Raises
        Unsupported."""
        found = [module for module in layers.modules() if hasattr(module, "is_transposed")]
        if not found:
            raise Unsupported("transformers computes the experts of this model in another way than by groups")
        for module in found:
            for name, parameter in list(module.named_parameters(recurse=False)):
                part = distribute_tensor(parameter.detach(), self._ranks, [Shard(0)], src_data_rank=None)
                setattr(module, name, nn.Parameter(part))
            fully_shard(module, **{**policy, "mesh": self._shards})


def _forward(group: Any, ranks: int, module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """What transformers' own does. chosen, shares: experts of each token, and what each counts."""
    active, own = chosen.shape[-1], module.num_experts // ranks
    experts, order = chosen.reshape(-1).sort(stable=True)
    sent = torch.bincount(experts, minlength=module.num_experts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    there, here = (counts.view(ranks, own).sum(1).tolist() for counts in (sent, received))
    rows = _Exchanged.apply(hidden[order // active], there, here, group, ranks)  # one name: what was sent is let go
    rows = _computed(module, own, rows, torch.arange(own, device=rows.device).repeat(ranks).repeat_interleave(received))
    rows = _Exchanged.apply(rows, here, there, group, 1 / ranks)
    rows = rows[order.argsort()] * shares.reshape(-1, 1)
    return rows.view(len(hidden), active, -1).sum(1).to(hidden.dtype)


def _computed(module: Any, own: int, rows: Tensor, which: Tensor) -> Tensor:
    """What this rank's experts make of its rows. which: the expert of each, of its own."""
    local = {name: each.to_local() for name, each in module.named_parameters(recurse=False)}
    part = SimpleNamespace(num_experts=own, **local, **{name: getattr(module, name) for name in _LIKE_TRANSFORMERS})
    out: Tensor = grouped_mm_experts_forward(part, rows, which[:, None], rows.new_ones(len(rows), 1))
    return out


class _Exchanged(torch.autograd.Function):  # type: ignore[misc]
    """Rows to other ranks and from them. What FSDP averages over is only the ranks that have the same experts, but the
    loss is a mean over all: gradients of what experts compute are divided by the ranks of a group on their way in
    (`times`), and multiplied again on their way out."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: list[int], here: list[int], group: Any, times: float) -> Tensor:
        ctx.there, ctx.here, ctx.group, ctx.times = there, here, group, times
        return _exchange(rows, there, here, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = _exchange(gradients[0], ctx.here, ctx.there, ctx.group).mul_(ctx.times)
        return back, None, None, None, None


def _exchange(rows: Tensor, there: list[int], here: list[int], group: Any) -> Tensor:
    received = rows.new_empty(sum(here), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), here, there, group=group)
    return received
