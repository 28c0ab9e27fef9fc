"""Matrix products as linear layers have them, C = A B^T, on normal random data: constants would be faster, for less
power. Inputs and outputs are rotated through more memory than the cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from training_probe.points import Dtype, Gemm, Measured, Task
from training_probe.worker.micro.timing import (
    Launch,
    attempted,
    cache_bytes,
    clearing,
    in_turns,
    lacking,
    rotation,
    timed,
)

_FLOATS: dict[Dtype, torch.dtype] = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32,
}  # fmt: skip
INT8_SCALE = 32  # normal numbers times this fill int8
TF32_CAPABILITY = (8, 0)


def measure(task: Task, device: torch.device) -> Iterator[Measured]:
    torch.manual_seed(task.seed)
    clear = clearing(device)
    for point in task.points:
        if isinstance(point, Gemm):
            yield attempted(point, partial(_measured, point, task, device, clear))


def _measured(point: Gemm, task: Task, device: torch.device, clear: Launch | None) -> Measured:
    return timed(point, launch_of(point, device), task, in_stream=device.type == "cuda", clear=clear)


def launch_of(point: Gemm, device: torch.device) -> Launch:
    """What launches the product once, on another set of buffers each time. Raises RuntimeError where there is none."""
    if point.dtype == "tf32" and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) < TF32_CAPABILITY or torch.version.hip
    ):
        raise NotImplementedError("TF32 is of NVIDIA's GPUs from Ampere on")
    torch.set_float32_matmul_precision("high" if point.dtype == "tf32" else "highest")
    element = 1 if point.dtype in ("int8", "fp8") else _FLOATS[point.dtype].itemsize
    out = {"int8": torch.int32, "fp8": torch.bfloat16}.get(point.dtype) or _FLOATS[point.dtype]
    inputs = (point.m + point.n) * point.k * element
    one_set = inputs + point.m * point.n * out.itemsize
    sets = rotation(one_set, cache_bytes(device))
    if device.type == "cpu" and (why := lacking(sets * one_set)):
        raise torch.OutOfMemoryError(why)
    a = normal_matrices((sets, point.m, point.k), point.dtype, device)
    b = normal_matrices((sets, point.n, point.k), point.dtype, device)
    c = torch.empty((sets, point.m, point.n), dtype=out, device=device)
    product = product_of(point.dtype, device)
    return in_turns(partial(product, a[at], b[at].t(), c[at]) for at in range(sets))


def product_of(dtype: Dtype, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], object]:
    if dtype == "int8":
        return lambda a, b, c: torch._int_mm(a, b, out=c)
    if dtype == "fp8":  # e4m3, one scale a tensor, accumulated as training does in forward passes
        one = torch.ones((), device=device)
        return lambda a, b, c: torch._scaled_mm(
            a, b, scale_a=one, scale_b=one, out_dtype=c.dtype, use_fast_accum=True, out=c
        )
    return lambda a, b, c: torch.mm(a, b, out=c)


def normal_matrices(shape: tuple[int, ...], dtype: Dtype, device: torch.device) -> Tensor:
    """Normal random numbers, the same in every set."""
    kept = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(dtype) or _FLOATS[dtype]
    one = torch.randn(shape[1:], device=device)
    if dtype == "int8":
        one = (one * INT8_SCALE).clamp_(-127, 127).round_()
    return one.to(kept).expand(shape).contiguous()
