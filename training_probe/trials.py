"""A training script of one's own, measured like the engines that are built in: the interface of what it provides, and
how it is found.

A package names it in the entry points of the group `llm_dissect.trials`, as `mine = "module:build"`, and
`training_probe sweep --engine mine` runs it:

    def build(cell: Cell) -> Trial: ...

`build` is called once in every process, after torch's default process group has been joined (nccl on GPUs, gloo on the
CPU) and the process's own GPU has been set; RANK, WORLD_SIZE and LOCAL_RANK stand in the environment, as torchrun sets
them, and `torch.manual_seed` has been called with the run's seed. What is built holds its model, its optimizer and
whatever shards them; `cell` says what was asked for (training_probe.grid.Cell).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from backends.untrusted import printable
from training_probe.grid import ENGINES, Cell, GridError

__all__ = ["Cell", "Trial"]

GROUP = "llm_dissect.trials"
Tensor = Any  # torch's, which only the processes that train import


class Trial(Protocol):
    """One process's part of a training run. Every attribute and every method is needed."""

    parameters: tuple[int, int]
    """How many the whole model has, and how many of them train."""
    optimizer: str
    """What it is called in reports."""
    vocab_size: int
    """Token ids are drawn from 0 to this, exclusive."""

    def forward(self, tokens: Tensor, last: bool) -> Tensor:
        """The mean loss of (micro batch, sequence) token ids on the process's device, which are their own labels. last:
        of the micro batches whose gradients are accumulated."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """The backward pass of that loss; `last` as before."""

    def step(self) -> None:
        """Updates the parameters, and lets go of the gradients."""


LACKING = ("parameters", "optimizer", "vocab_size", "forward", "backward", "step")


def available() -> dict[str, EntryPoint]:
    """Those that are installed, by name: one that files can be called after, and that is no engine's."""
    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    return {entry.name: entry for entry in found if re.fullmatch(r"[\w.-]+", entry.name) and entry.name not in ENGINES}


def check(engines: Iterable[str]) -> None:
    """That each is an engine or a trial that is installed. Raises GridError."""
    for name in engines:
        if name not in ENGINES and name not in available():
            own = ", ".join(available()) or f"no package here has an entry point of {GROUP}"
            known = f"known are {', '.join(ENGINES)}; of your own: {own}"
            raise GridError(f"unknown engine '{printable(name, 60)}'; {known}.")


def lacking(built: object) -> list[str]:
    """What an object lacks to be a Trial."""
    return [name for name in LACKING if not hasattr(built, name)]
