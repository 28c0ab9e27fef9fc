"""Context parallelism beside one process that has whole sequences: attention, gradients of a model, memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from backends.decoder import Attention
from tests.support.waiting import free_ports
from tests.training_probe.engines import tiny
from training_probe import grid
from training_probe.memory.layers import layer_bytes

pytestmark = tiny.needs_engines

HEADS, KV_HEADS, WIDTH, LENGTH = 8, 2, 64, 512
CELL = tiny.cell("fsdp2", "F+Z3", 2, cp=2)


class Found(msgspec.Struct):
    """What one rank found. Errors are of the output and the gradients of queries, keys and values, and of the model's
    gradients by their norm. kept, peak: bytes a token of the ring in bf16."""

    errors: list[float] = []
    kept: float = 0.0
    peak: float = 0.0
    loss: float = 0.0
    gradients: float = 0.0


def ring_beside_whole(rank: int, ranks: int, port: int, directory: str) -> None:
    """What each process does."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = Found()
    _attention(torch, ranks, found)
    if ranks == CELL.cp:
        _model(torch, found)
    (Path(directory) / f"{rank}.json").write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()


def _attention(torch: Any, ranks: int, found: Found) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from tests.training_probe.engines.test_peaks import live
    from training_probe.worker import ring

    part = ring.Part(tiny.cell("fsdp2", "F+Z3", ranks, cp=ranks), torch.device("cpu"))
    attend = ALL_ATTENTION_FUNCTIONS[ring.NAME]
    torch.manual_seed(0)
    drawn = [torch.randn(2, LENGTH, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    own = [part.of(each).transpose(1, 2).detach().requires_grad_() for each in drawn[:3]]
    out, _ = attend(None, *own, None)
    out.backward(part.of(drawn[3]))
    whole = [each.transpose(1, 2).detach().requires_grad_() for each in drawn[:3]]
    expected = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True).transpose(1, 2)
    expected.backward(drawn[3])
    pairs = [
        (out, expected),
        *((a.grad.transpose(1, 2), b.grad.transpose(1, 2)) for a, b in zip(own, whole, strict=True)),
    ]
    found.errors = [float((a - part.of(b)).abs().max()) for a, b in pairs]

    tokens = 2 * LENGTH / ranks
    small = [each.detach().bfloat16().requires_grad_() for each in own]
    gradient = part.of(drawn[3]).bfloat16()
    with live([*small, gradient]) as mode:
        before = mode.now
        out, _ = attend(None, *small, None)
        found.kept = (mode.now - before) / tokens
        mode.peak = before = mode.now
        out.backward(gradient)
        found.peak = (mode.peak - before) / tokens


def _model(torch: Any, found: Found) -> None:
    from training_probe.worker import batches, engines, model

    device = torch.device("cpu")
    trial = tiny.trial(CELL)
    (inputs,) = batches.batch(trial, 0, device, tiny.SPEC.vocab_size)
    stepper: Any = engines.build(trial, device)
    loss = stepper.forward(inputs, True)
    stepper.backward(loss, True)
    whole = tiny.trial(tiny.cell("ddp", "F"))
    reference: Any = model.build(whole)
    model.materialise(reference, whole, device)
    expected = reference(**inputs).loss
    expected.backward()
    found.loss = float(loss - expected)
    wanted = dict(reference.named_parameters())
    for name, parameter in stepper.model.named_parameters():
        gradient, right = parameter.grad.full_tensor(), wanted[name].grad.float()
        found.gradients = max(found.gradients, float((gradient - right).norm() / right.norm()))


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    from torch.multiprocessing import spawn

    directory, ranks = tmp_path_factory.mktemp("ring"), request.param
    spawn(ring_beside_whole, args=(ranks, free_ports(1)[0], str(directory)), nprocs=ranks)
    return [msgspec.json.decode((directory / f"{rank}.json").read_bytes(), type=Found) for rank in range(ranks)]


def test_attention_is_that_of_whole_sequences(found: list[Found]) -> None:
    for rank in found:
        assert len(rank.errors) == 4 and max(rank.errors) < 1e-5


def test_loss_and_gradients_are_those_of_whole_sequences(found: list[Found]) -> None:
    if len(found) == CELL.cp:
        for rank in found:
            assert abs(rank.loss) < 1e-3 and 0 < rank.gradients < 0.03  # bf16


def test_the_ring_takes_what_is_predicted(found: list[Found]) -> None:
    """But for what the kernel of GPUs has beside: an fp32 sum of the gradients of queries, and gradients of keys and
    values for each head of the queries."""
    ranks = len(found)
    asked = grid.cell("F+Z3", model="", engine="fsdp2", gpus=ranks, cp=ranks, seq_len=LENGTH)
    spec = replace(tiny.SPEC, hidden=HEADS * WIDTH, heads=HEADS, kv_heads=KV_HEADS, intermediate=16).decoder
    (layer,) = layer_bytes(asked, spec, 1)
    attention = spec.kinds[0].attention
    assert isinstance(attention, Attention)
    query, both = attention.query_width, 2 * KV_HEADS * WIDTH
    assert max(rank.kept for rank in found) == 2 * 2 * query + 4 * HEADS  # output, and its copy
    predicted = (layer.working - layer.kept) / (LENGTH / ranks) + 8 * 16
    of_gpus = 4 * query + 2 * (2 * query - both)
    assert predicted - of_gpus == pytest.approx(max(rank.peak for rank in found), rel=0.01)


def test_rotations_that_depend_on_the_length_are_refused() -> None:
    from training_probe.protocol import Unsupported
    from training_probe.worker import ring

    with pytest.raises(Unsupported, match=r"depend on the length of a sequence \(rope_type longrope\)"):
        ring.check(SimpleNamespace(rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0}))
    ring.check(SimpleNamespace(rope_parameters={"full_attention": {"rope_type": "yarn"}}))
