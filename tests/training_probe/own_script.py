"""A package with a training script of its own, as pip would have installed it: a module and its entry points."""

from __future__ import annotations

from pathlib import Path

# Three lines of a model, replicated by hand: gradients are averaged over the processes.
SCRIPT = """
import torch
import torch.distributed as dist

from training_probe.trials import Cell, Trial

VOCABULARY, WIDTH, RATE = 64, 16, 0.5


class Bigrams:
    optimizer, vocab_size = "plain SGD", VOCABULARY

    def __init__(self, cell: Cell) -> None:
        self._share = 1 / (cell.grad_accum * dist.get_world_size())
        self._model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY))
        for parameter in self._model.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(5))
        count = sum(parameter.numel() for parameter in self._model.parameters())
        self.parameters = (count, count)
        self._sgd = torch.optim.SGD(self._model.parameters(), lr=RATE)

    def forward(self, tokens: torch.Tensor, last: bool) -> torch.Tensor:
        logits = self._model(tokens[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        (loss * self._share).backward()
        if last:
            for parameter in self._model.parameters():
                dist.all_reduce(parameter.grad)

    def step(self) -> None:
        self._sgd.step()
        self._sgd.zero_grad()


def build(cell: Cell) -> Trial:
    return Bigrams(cell)


def half_built(cell):
    return object()


def imports(cell):
    import a_package_that_nobody_has
"""


def install(directory: Path) -> dict[str, str]:
    """The environment of commands that find it."""
    (directory / "bigrams.py").write_text(SCRIPT)
    metadata = directory / "bigrams-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bigrams\nVersion: 1.0\n")
    names = {name: f"bigrams:{name}" for name in ("half_built", "imports", "nothing")}
    lines = [f"{name} = {value}" for name, value in {"bigrams": "bigrams:build", **names}.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[llm_dissect.trials]", *lines, ""]))
    return {"PYTHONPATH": str(directory)}
