"""How FSDP2's weights are divided: over replicas (HSDP), shards and tensor-parallel ranks; and what then holds for the
weights, their gradients' norm and the optimizer.

Tensor parallelism is Megatron's as torch has it: q, k, v, gate and up by columns, o and down by rows, embeddings and
head by the vocabulary. Each layer has two all-reduces in either pass. Norms are whole on every rank (no sequence
parallelism), and the loss is computed on parts of the vocabulary, so that no rank has all logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from training_probe.grid import Cell
from training_probe.protocol import Unsupported


def mesh_of(cell: Cell, device: torch.device) -> DeviceMesh:
    """The ranks: those of a tensor-parallel group are neighbours, then the shards of a replica, then replicas."""
    sizes = {"replicate": cell.dp_replicate, "shard": cell.shards, "tp": cell.tp}
    used = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of the ranks that have the same part of each layer."""
    names = mesh.mesh_dim_names or ()
    return mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]


def parallelize(model: nn.Module, body: nn.Module, tp: DeviceMesh) -> None:
    """Divides a model on the meta device among the ranks of `tp`. body: the part that has the layers. Raises
    Unsupported."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    whole: Any = Replicate()
    taken = {"input_kwarg_layouts": {"hidden_states": whole}, "desired_input_kwarg_layouts": {"hidden_states": whole}}
    for layer in body.layers:
        plan: dict[str, Any] = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), columns)
        plan |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), columns)
        plan |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), rows)
        parts = {path for path, _ in layer.named_modules()}
        if lacking := [path for path in plan if path not in parts]:
            raise Unsupported(f"TP divides layers like Llama's, and those of this model have no {lacking[0]}")
        # the gradient of their input is summed over ranks once, not once for each of their products
        plan["self_attn"] = PrepareModuleInput(**taken)
        plan["mlp"] = PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,))
        parallelize_module(layer, tp, plan)
    parallelize_module(body, tp, {"embed_tokens": RowwiseParallel(input_layouts=whole)})
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, tp, {"lm_head": head})


def loss_by_parts(cell: Cell) -> contextlib.AbstractContextManager[Any]:
    """Within it, both passes of the loss take logits whose vocabulary is divided."""
    return loss_parallel() if cell.tp > 1 else contextlib.nullcontext()


def local(tensor: Tensor) -> Tensor:
    """The value that every rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill(parameter: DTensor, whole: Tensor) -> None:
    """Each rank keeps its part of `whole`: first that of its tensor-parallel rank, of which FSDP shards."""
    part, mesh = whole.to(parameter.dtype), parameter.device_mesh
    for name, placement in reversed(list(zip(mesh.mesh_dim_names or (), parameter.placements, strict=True))):
        here = Replicate() if placement.is_replicate() else Shard(placement.dim)  # not torch's strided one
        part = distribute_tensor(part, mesh[name], [here], src_data_rank=None).to_local()
    parameter.to_local().copy_(part)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those that one operator can take at once: with tensor parallelism norms are divided over shards alone."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def clip(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Clips the norm of all gradients together, as on one GPU."""
    groups = by_mesh(parameters)
    if len(groups) == 1:
        return torch.nn.utils.clip_grad_norm_(groups[0], most)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    total = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, most, total)
    return total
