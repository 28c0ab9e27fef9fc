"""Collectives through torch.distributed over NCCL, or gloo on the CPU, counted as nccl-tests counts.

A sample is a train of collectives after a barrier, on GPUs also after one that is not timed; its time is the slowest
rank's. Buffers are the same in every launch, as in nccl-tests. Results are checked once at sizes that are small enough.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from training_probe.points import ELEMENT_BYTES, Collective, Measured, Task
from training_probe.worker.micro.timing import Launch, attempted, lacking, timed

CHECKED_BYTES = 64 << 20
RING = 7  # values are the element's number modulo this, plus the rank: whole, and exact in fp32


class Group:
    """The ranks of this run. What is agreed upon travels on the host: gloo beside NCCL."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
        self._host = dist.new_group(backend="gloo")

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        shared = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._host)
        return [float(value) for value in shared]

    def meet(self) -> None:
        dist.barrier(group=self._host)

    def all_of(self, yes: bool) -> bool:
        shared = torch.tensor(0.0 if yes else 1.0, dtype=torch.float64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._host)
        return float(shared) == 0.0


def measure(task: Task, device: torch.device) -> Iterator[Measured]:
    group = Group(device)
    for point in task.points:
        if isinstance(point, Collective):
            yield attempted(point, partial(_measured, point, task, device, group))


def _measured(point: Collective, task: Task, device: torch.device, group: Group) -> Measured:
    gives, takes, _ = _counts(point)
    why = lacking((gives + takes) * ELEMENT_BYTES * point.ranks) if device.type == "cpu" else ""
    if not group.all_of(not why):
        raise torch.OutOfMemoryError(why or "out of memory: another rank found too little of it")
    try:
        buffers = _Buffers(point, device)
        problem = None
    except Exception as error:  # the others must know of it before they wait for this rank
        problem = error
    if not group.all_of(problem is None):
        raise problem or torch.OutOfMemoryError("out of memory on another rank")
    correct = group.all_of(buffers.check()) if point.size_bytes <= CHECKED_BYTES else None
    buffers.data.zero_()  # sums of sums would soon be infinite
    return timed(point, buffers.launch, task, in_stream=device.type == "cuda", ranks=group, correct=correct)


def _counts(point: Collective) -> tuple[int, int, int]:
    """Elements that a rank gives, that it takes besides (0: in their place), and a rank's share of the size."""
    total = point.size_bytes // ELEMENT_BYTES
    share = total // point.ranks
    takes = {"allgather": total, "reducescatter": share, "alltoall": total, "sendrecv": total}.get(point.name, 0)
    return share if point.name == "allgather" else total, takes, share


class _Buffers:
    """One collective, ready to be launched. data: all that this rank gives; result: where its result comes."""

    def __init__(self, point: Collective, device: torch.device) -> None:
        self._rank, self._ranks = int(os.environ["RANK"]), point.ranks
        gives, takes, share = _counts(point)
        self.data = torch.zeros(gives, device=device)
        self._out = torch.zeros(takes, device=device) if takes else self.data
        self._name, self._share = point.name, share
        self.launch = _launch(point, self.data, self._out, self._rank)

    def check(self) -> bool:
        """Launches it once on values that every rank can foretell; whether this rank's result is as it must be."""
        self.data.copy_(self._given(self._rank, self.data.numel()))
        self.launch()
        expected = self._expected()
        return expected is None or bool(torch.equal(self._out, expected))

    def _given(self, rank: int, count: int) -> Tensor:
        """What a rank begins with."""
        return torch.arange(count, device=self.data.device).remainder_(RING).add_(rank).float()

    def _expected(self) -> Tensor | None:
        """What this rank ends with; None where that shows nothing."""
        count, mine = self.data.numel(), slice(self._rank * self._share, (self._rank + 1) * self._share)
        every = range(self._ranks)
        if self._name == "allgather":
            return torch.cat([self._given(rank, count) for rank in every])
        if self._name == "alltoall":
            return torch.cat([self._given(rank, count)[mine] for rank in every])
        if self._name == "sendrecv":
            return self._given((self._rank - 1) % self._ranks, count)
        if self._name == "broadcast":
            return self._given(0, count)
        if self._name == "reduce" and self._rank != 0:
            return None
        total = self._given(0, count) * self._ranks + sum(every)
        return total[mine] if self._name == "reducescatter" else total


def _launch(point: Collective, data: Tensor, out: Tensor, rank: int) -> Launch:
    if point.name == "allgather":  # the older name is deprecated where there is the newer one
        gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: gather(out, data)
    if point.name == "reducescatter":
        scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return lambda: scatter(out, data)
    if point.name == "sendrecv":
        return partial(_ring, data, out, rank, point.ranks)
    return {
        "allreduce": lambda: dist.all_reduce(data),
        "reduce": lambda: dist.reduce(data, 0),
        "broadcast": lambda: dist.broadcast(data, 0),
        "alltoall": lambda: dist.all_to_all_single(out, data),
    }[point.name]


def _ring(data: Tensor, out: Tensor, rank: int, ranks: int) -> None:
    """Each rank sends to the next and receives from the one before it."""
    steps = [
        dist.P2POp(dist.isend, data, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, out, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(steps):
        work.wait()
