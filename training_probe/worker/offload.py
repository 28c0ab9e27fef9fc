"""What the layers of a model keep for their backward pass, on the host instead of the device: `--offload-activations`.

As torch's `save_on_cpu` in pinned memory, but weights stay where they are, and a storage which several operators
keep, or views of it, travels once each way. The copies are in the stream of the step, so a step takes as much longer as
they take.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

LEAST_BYTES = 1024  # smaller tensors stay


class _Kept:
    """A storage on the host. uses: how many operators will ask for it; in between it is on the device once."""

    def __init__(self, whole: Tensor, pinned: bool) -> None:
        self.host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=pinned)
        self.host.copy_(whole, non_blocking=pinned)
        self.uses, self._device, self._there = 0, whole.device, None

    def back(self) -> Any:
        there = self._there
        if there is None:
            there = torch.empty(self.host.shape, dtype=self.host.dtype, device=self._device)
            there.copy_(self.host, non_blocking=True)
        self.uses -= 1
        self._there = there if self.uses else None
        return there.untyped_storage()


class Offload:
    """Hooks of one model. body: the part that has the layers. bytes_kept: on the host, of the newest forward pass."""

    def __init__(self, body: Any) -> None:
        self.bytes_kept = 0
        self._kept: dict[int, tuple[Any, _Kept]] = {}  # of the layer at work, by storages, which it holds meanwhile
        self._weights: list[tuple[Any, str]] = []
        inner = body.forward

        @functools.wraps(inner)
        def forward(*args: Any, **settings: Any) -> Any:
            self.bytes_kept = 0
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                out = inner(*args, **settings)
            self._kept.clear()
            return out

        body.forward = forward
        for layer in body.layers:
            own = [(part._parameters, name) for part in layer.modules() for name in part._parameters]
            layer.register_forward_pre_hook(functools.partial(self._enter, own))
            layer.register_forward_hook(self._leave)

    def _enter(self, own: list[tuple[Any, str]], *_: Any) -> None:
        self._weights = own

    def _leave(self, *_: Any) -> None:
        self._kept.clear()

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if type(tensor) not in (Tensor, nn.Parameter) or storage.nbytes() < LEAST_BYTES or self._is_weight(key):
            return tensor
        if key not in self._kept:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._kept[key] = (storage, _Kept(whole, tensor.is_cuda))
            self.bytes_kept += storage.nbytes()
        kept = self._kept[key][1]
        kept.uses += 1
        return kept, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    def _is_weight(self, key: int) -> bool:
        """FSDP2 puts others in the place of a layer's weights before it computes, so they are looked up when asked."""
        held = (parameters[name] for parameters, name in self._weights)
        return any(weight is not None and weight.untyped_storage()._cdata == key for weight in held)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        kept, dtype, offset, size, stride = packed
        storage = kept.back()
        view: Tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
        return view
