"""Context parallelism: each rank of a group has a part of every sequence, and its keys and values go around.

Of N ranks, rank r has pieces r and 2 N - 1 - r of 2 N equal ones, so that all have as much to attend to under a causal
mask (torch's head and tail). All but attention sees a rank's own tokens alone. Attention is torch's own ring: the
passes of `torch.distributed.tensor.experimental.context_parallel`, which gathers the keys and values of all ranks of
the group. They are called here and not found by that context manager's dispatcher, which knows the kernels of GPUs
alone: so the CPU has the same ring over its own FlashAttention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from training_probe.grid import Cell
from training_probe.protocol import Unsupported
from training_probe.worker.batches import Inputs
from training_probe.worker.loss import IGNORED
from training_probe.worker.sharding import local

NAME = "ring"  # of this attention, to transformers
_SEQUENCE = 2  # dimension of queries, keys and values
_aten = torch.ops.aten
_KERNELS = {
    "cuda": (_aten._scaled_dot_product_flash_attention.default,
             _aten._scaled_dot_product_flash_attention_backward.default),
    "cpu": (_aten._scaled_dot_product_flash_attention_for_cpu.default,
            _aten._scaled_dot_product_flash_attention_for_cpu_backward.default),
}  # fmt: skip
# What the kernel of GPUs gives beside output and log-sum-exp, by the names that its backward pass takes them by.
_BESIDE = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")


class Part:
    """The part of each sequence that this rank has. Makes the ring known to transformers. Raises Unsupported."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        sizes = (cell.data_parallel, cell.cp, cell.tp)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "cp", "tp"))["cp"]
        self._ranks, self._rank, self._group = cell.cp, mesh.get_local_rank(), mesh.get_group()
        ALL_ATTENTION_FUNCTIONS.register(NAME, partial(_attention, self._group, *_passes()))
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)  # causal by the ring itself

    def of(self, whole: Tensor) -> Tensor:
        """Its columns of a (..., sequence)."""
        pieces = whole.chunk(2 * self._ranks, dim=1)
        return torch.cat([pieces[self._rank], pieces[-1 - self._rank]], dim=1)

    def loss(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """The mean loss of whole sequences, on each rank of the group the same; its gradient is of this rank's tokens
        alone, and right once gradients are averaged over all ranks."""
        tokens = inputs["input_ids"]
        following = functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)
        labels, positions = self.of(following), torch.arange(tokens.shape[1], device=tokens.device)[None]
        mean = local(model(input_ids=self.of(tokens), position_ids=self.of(positions), labels=labels).loss)
        own = mean * ((labels != IGNORED).sum() * self._ranks / (following != IGNORED).sum())
        total = own.detach().clone()
        dist.all_reduce(total, group=self._group)
        return own + (total / self._ranks - own.detach())


def check(config: Any) -> None:
    """Raises Unsupported where rotations depend on how long a sequence is, which no rank of a group sees."""
    rope = getattr(config, "rope_parameters", None) or {}
    for own in (rope, *rope.values()):
        if isinstance(own, dict) and own.get("rope_type") in ("dynamic", "longrope"):
            raise Unsupported(
                f"its rotations depend on the length of a sequence (rope_type {own['rope_type']}), which CP divides"
            )


def _passes() -> tuple[Any, Any]:
    """torch's forward and backward pass of a ring. Raises Unsupported."""
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        return ring._templated_ring_attention, ring._templated_ring_attention_backward
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"torch {torch.__version__} has no ring attention as 2.13 has it: {error}") from error


def _attention(
    group: Any, forward: Any, backward: Any, module: nn.Module, *tensors: Tensor, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """As transformers calls it. tensors: queries, keys, values, and a mask that is none."""
    out: Tensor = _Ring.apply(
        *tensors[:3], partial(forward, group, _SEQUENCE), partial(backward, group, _SEQUENCE), scaling
    )
    return out.transpose(1, 2).contiguous(), None


class _Ring(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, forward: Any, backward: Any, scale: float | None
    ) -> Tensor:
        kernel, ctx.kernel = _KERNELS[query.device.type]
        ctx.settings = {"is_causal": True, "dropout_p": 0.0, "scale": scale}
        out, log_sums, *beside = forward(kernel, query, key, value, **ctx.settings)
        ctx.backward, ctx.beside = backward, dict(zip(_BESIDE, beside, strict=False))
        ctx.save_for_backward(query, key, value, out, log_sums)
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sums = ctx.saved_tensors
        found = ctx.backward(
            ctx.kernel, gradients[0], "grad_out", query, key, value, out, log_sums, **ctx.settings, **ctx.beside
        )
        return (*found[:3], None, None, None)
