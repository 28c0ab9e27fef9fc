"""Activation checkpointing, tensor and context parallelism, HSDP and fp8 on the real engines: each trains, and reaches
the losses of the same model without it."""

from __future__ import annotations

from itertools import product

import pytest

from tests.training_probe.engines import tiny
from tests.training_probe.engines.test_training import AGREE, SAME, Trained, needed
from training_probe.grid import Cell
from training_probe.refusals import impossible
from training_probe.results import loss_doubt

pytestmark = tiny.needs_engines

PLAIN = {"ddp": "Naive", "fsdp2": "Z3", "deepspeed": "Z2"}
FP8_AGREE = 0.01  # products rounded to 3 bits of mantissa; the loss falls by 0.56 meanwhile
CHECKPOINTS = [
    *(tiny.cell(engine, method, checkpoint=how) for (engine, method), how in product(PLAIN.items(), ("op", "1", "2"))),
    tiny.cell("deepspeed", "Z3", checkpoint="op"),
    tiny.cell("ddp", "F", checkpoint="op"), tiny.cell("fsdp2", "F+Z3", checkpoint="op"),
    tiny.cell("ddp", "L", checkpoint="op"), tiny.cell("ddp", "QL", checkpoint="2"),
    tiny.cell("ddp", "F", checkpoint="op", compile=True),
]  # fmt: skip
FP8 = [
    tiny.cell("ddp", "Naive", fp8=True), tiny.cell("fsdp2", "Z3", fp8=True),
    tiny.cell("fsdp2", "F+Z3", fp8=True, checkpoint="op"), tiny.cell("ddp", "R", fp8=True),
]  # fmt: skip
DIVIDED = [
    tiny.cell("fsdp2", "Z3", 2, tp=2), tiny.cell("fsdp2", "F+Z2", 2, tp=2), tiny.cell("fsdp2", "R+Z3", 2, tp=2),
    tiny.cell("fsdp2", "F+Z3", 2, tp=2, checkpoint="op"),
    tiny.cell("fsdp2", "Z3", 2, tp=2, fp8=True), tiny.cell("fsdp2", "Z3", 2, tp=2, grad_accum=3),
    tiny.cell("fsdp2", "Z3", 2, dp_replicate=2), tiny.cell("fsdp2", "Z2+O", 2, dp_replicate=2),
    tiny.cell("fsdp2", "L+Z3", 2, dp_replicate=2),
    tiny.cell("fsdp2", "Z3", 4, dp_replicate=2), tiny.cell("fsdp2", "Z3", 4, tp=2),
    tiny.cell("fsdp2", "Z3", 4, tp=2, dp_replicate=2),
    *(tiny.cell("fsdp2", method, 2, cp=2) for method in ("F+Z3", "F+Z2", "F+R+Z3", "F+RS+Z3", "F+Z3+O", "L+F+Z3")),
    tiny.cell("fsdp2", "QL+F+Z3", 2, cp=2),
    tiny.cell("fsdp2", "F+Z3", 2, cp=2, grad_accum=3), tiny.cell("fsdp2", "F+Z3", 2, cp=2, checkpoint="2"),
    tiny.cell("fsdp2", "F+Z3", 2, cp=2, loss="chunked"), tiny.cell("fsdp2", "F+Z3", 2, cp=2, fp8=True),
    tiny.cell("fsdp2", "F+Z3", 4, cp=4), tiny.cell("fsdp2", "F+Z3", 4, cp=2), tiny.cell("fsdp2", "F+Z3", 4, cp=2, tp=2),
    tiny.cell("fsdp2", "F+Z3", 4, cp=2, dp_replicate=2),
]  # fmt: skip


def reference(cell: Cell) -> Cell:
    """The same sequences in as many processes as it has replicas, without what is tried here."""
    more = {"grad_accum": cell.grad_accum}
    method = cell.method.replace("RS+", "").replace("R+", "").replace("F+", "")
    if cell.engine == "ddp" and method in ("R", "F"):
        method = "Naive"
    if cell.engine == "fsdp2":
        method = method.replace("+O", "").replace("Z2", "Z3")
    return tiny.cell(cell.engine, method, cell.data_parallel, **more)


TRIED = [*CHECKPOINTS, *FP8, *DIVIDED]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"), needed(request))


@pytest.mark.parametrize("cell", TRIED, ids=lambda cell: cell.name)
def test_it_trains_to_the_losses_of_the_reference(trained: Trained, cell: Cell) -> None:
    assert impossible(cell, tiny.SPEC.decoder) is None
    losses = trained.losses(cell)
    assert loss_doubt(losses) is None
    same = SAME if cell.checkpoint and not cell.compile else AGREE
    agree = FP8_AGREE if cell.fp8 else same
    expected = trained.losses(reference(cell))
    assert losses == pytest.approx(expected, abs=agree), max(map(abs, map(float.__sub__, losses, expected)))
    versions = trained.reports(cell)[0].versions
    assert ("fp8 emulated" in versions.get("torchao", "")) == cell.fp8


@pytest.mark.parametrize("cell", [cell for cell in DIVIDED if cell.tp * cell.cp > 1], ids=lambda cell: cell.name)
def test_ranks_of_a_group_take_the_same_sequences(trained: Trained, cell: Cell) -> None:
    losses = [list(report.losses) for report in trained.reports(cell)]
    together = cell.tp * cell.cp
    for first in range(0, cell.gpus, together):
        for other in range(first + 1, first + together):
            assert losses[first] == pytest.approx(losses[other], abs=1e-6)
    assert len({group[0] for group in losses}) == cell.data_parallel
