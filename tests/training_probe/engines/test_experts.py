"""Expert parallelism beside the same ranks without it: losses, gradients, what each rank holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.catalog import from_config
from tests.support.waiting import free_ports
from tests.training_probe.engines import tiny
from tests.training_probe.engines.test_own_models import CONFIGS
from training_probe.grid import Cell
from training_probe.protocol import Trial
from training_probe.refusals import impossible
from training_probe.results import loss_doubt

pytestmark = tiny.needs_engines

STEPS, AGREE = 6, 2e-3
MIXTRAL = replace(tiny.SPEC, experts=4, active_experts=2)
QWEN = {**CONFIGS["qwen3-moe"], "mlp_only_layers": []}
MORE: dict[int, list[dict[str, Any]]] = {
    2: [
        {}, {"method": "F+R+Z2"}, {"method": "RS+Z3"}, {"method": "Z3+O"}, {"grad_accum": 2}, {"checkpoint": "2"},
        {"loss": "chunked"}, {"states": "bf16-kahan"}, {"offload_activations": True},
        {"lengths": "lognormal:10:0.7", "packing": True},
    ],
    4: [{}, {"ep": 4}],
}  # fmt: skip


class Found(msgspec.Struct):
    """What one rank found of one cell. gradients: the largest error of a parameter's, by its norm. experts: how many
    elements of experts this rank keeps, of how many."""

    losses: list[float]
    expected: list[float]
    gradients: float
    experts: list[int]


def trials(ranks: int) -> Iterator[Trial]:
    for more in MORE[ranks]:
        asked = {"method": "F+Z3", "ep": 2, **more}
        yield tiny.trial(cell(ranks, **asked), spec=MIXTRAL)
    yield replaced(tiny.trial(cell(ranks, method="F+Z3", ep=2)), spec=None, config=QWEN)


def cell(ranks: int, *, method: str, **more: Any) -> Cell:
    return tiny.cell("fsdp2", method, ranks, **more)


def replaced(trial: Trial, **fields: Any) -> Trial:
    return msgspec.structs.replace(trial, **fields)


def beside_without(rank: int, ranks: int, port: int, directory: str) -> None:
    """What each process does."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found, known = [], {}
    for trial in trials(ranks):
        losses, gradients, experts = _trained(trial, rank)
        plain = replaced(trial, cell=msgspec.structs.replace(
            trial.cell, ep=1, method="F+Z3", attention="flash", checkpoint="", loss="plain", states="fp32",
            offload_activations=False,
        ))  # fmt: skip
        key = msgspec.json.encode(plain)
        if key not in known:
            known[key] = _trained(plain, rank)
        expected, right, _ = known[key]
        errors = [float((gradients[name] - each).norm() / each.norm()) for name, each in right.items()]
        found.append(Found(losses=losses, expected=expected, gradients=max(errors), experts=experts))
    (Path(directory) / f"{rank}.json").write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()


def _trained(trial: Trial, rank: int) -> tuple[list[float], dict[str, Any], list[int]]:
    """Losses, gradients of the first step, and how many elements of experts the rank keeps, of how many."""
    gradients: dict[str, Any] = {}
    experts = [0, 0]

    def keep(stepper: Any) -> None:
        if gradients:
            return
        for name, each in stepper.model.named_parameters():
            gradients[name] = each.grad.full_tensor().float()
            if ".experts." in name:
                experts[0] += each.to_local().numel()
                experts[1] += each.numel()

    return tiny.losses(trial, STEPS, rank, keep), gradients, experts


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Trial, list[Found]]]:
    from torch.multiprocessing import spawn

    directory, ranks = tmp_path_factory.mktemp("experts"), request.param
    spawn(beside_without, args=(ranks, free_ports(1)[0], str(directory)), nprocs=ranks)
    files = [(directory / f"{rank}.json").read_bytes() for rank in range(ranks)]
    each = zip(*(msgspec.json.decode(file, type=list[Found]) for file in files), strict=True)
    return [(trial, list(own)) for trial, own in zip(trials(ranks), each, strict=True)]


def test_it_trains_to_the_losses_of_the_reference(found: list[tuple[Trial, list[Found]]]) -> None:
    for trial, ranks in found:
        for rank in ranks:
            assert loss_doubt(rank.losses) is None
            assert rank.losses == pytest.approx(rank.expected, abs=AGREE), trial.cell.name
        assert len({tuple(rank.losses) for rank in ranks}) == len(ranks)  # each has sequences of its own


def test_gradients_are_those_of_the_reference(found: list[tuple[Trial, list[Found]]]) -> None:
    for trial, ranks in found:
        for rank in ranks:
            assert rank.gradients < 0.03, trial.cell.name  # bf16


def test_each_rank_keeps_its_part_of_the_experts(found: list[tuple[Trial, list[Found]]]) -> None:
    for trial, ranks in found:
        for rank in ranks:
            own, whole = rank.experts
            assert own * len(ranks) == whole, trial.cell.name


@pytest.mark.parametrize("ranks", MORE)
def test_they_are_not_refused(ranks: int) -> None:
    for trial in trials(ranks):
        spec = MIXTRAL.decoder if trial.spec else from_config("qwen", QWEN)
        assert impossible(trial.cell, spec) is None
