"""Predicted memory and FLOPs of activation checkpointing, tensor parallelism, HSDP and fp8: known answers."""

from __future__ import annotations

from typing import Any

import pytest

from backends.decoder import ModelSpec
from training_probe.flops import Flops, flops_per_token, kept_products, utilization
from training_probe.grid import Cell, cell
from training_probe.llama_shape import known
from training_probe.memory import Prediction, fits, predict
from training_probe.memory.layers import layer_bytes, uncounted
from training_probe.memory.rank import LIBRARIES_BYTES, Moment

N, LAYERS, H, F, S = 6_738_415_616, 32, 4096, 11008, 1024  # Llama-2-7B


def spec(name: str = "7b") -> ModelSpec:
    found = known(name)
    assert found is not None
    return found.decoder


def asked(method: str, **more: Any) -> Cell:
    return cell(method, **{"model": "7b", "engine": "fsdp2", "seq_len": S, **more})


def moment(prediction: Prediction, name: str) -> Moment:
    return next(each for each in prediction.moments if each.name == name)


def term(prediction: Prediction, moment_name: str, name: str) -> int:
    return next(each.bytes for each in moment(prediction, moment_name).terms if each.name == name)


def flops(**more: Any) -> Flops:
    return flops_per_token(asked(more.pop("method", "F+Z3"), **more), spec())


def test_by_operator_every_second_product_and_flash_attention_are_kept() -> None:
    each = asked("F+Z3", checkpoint="op")
    assert list(kept_products(each, spec(), spec().kinds[0])) == ["q_proj", "v_proj", "gate_proj", "down_proj"]
    (layer,) = layer_bytes(each, spec(), 1)
    # input, q, v, down and attention's output of h; gate of f; log-sum-exp of 32 heads
    assert layer.kept == S * (5 * 2 * H + 2 * F + 4 * 32) and layer.count == LAYERS
    (eager,) = layer_bytes(asked("Z3", checkpoint="op"), spec(), 1)
    assert eager.kept == S * (4 * 2 * H + 2 * F)
    (compiled,) = layer_bytes(asked("F+Z3", checkpoint="op", compile=True), spec(), 1)
    assert layer.kept - compiled.kept == S * 2 * H  # no gradient needs what down gives


def test_by_operator_the_other_products_are_computed_again() -> None:
    again = flops(checkpoint="op").recomputed
    assert again == LAYERS * 2 * (2 * H * H + H * F)  # k, o and up
    assert flops(method="Z3", checkpoint="op").recomputed == again + LAYERS * 4 * S * H  # and eager attention
    assert flops(checkpoint="op").model == flops().model


@pytest.mark.parametrize(("every", "layers"), [(1, 32), (2, 16), (3, 10), (20, 1)])
def test_every_nth_layer_keeps_its_input_and_is_computed_again(every: int, layers: int) -> None:
    kinds = {each.kept: each.count for each in layer_bytes(asked("F+Z3", checkpoint=str(every)), spec(), 1)}
    assert kinds[S * 2 * H] == layers and sum(kinds.values()) == LAYERS
    assert flops(checkpoint=str(every)).recomputed == layers / LAYERS * flops(method="F+R+Z3").recomputed


def test_what_is_kept_of_experts_by_operator_was_not_counted() -> None:
    reason = uncounted(asked("F+Z3", checkpoint="op", model="mixtral-8x7b"), spec("mixtral-8x7b"))
    assert reason is not None and "mixture" in reason
    assert uncounted(asked("F+Z3", checkpoint="2", model="mixtral-8x7b"), spec("mixtral-8x7b")) is None


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({"gpus": 8}, 8), ({"gpus": 8, "dp_replicate": 2}, 4), ({"gpus": 8, "dp_replicate": 8}, 1),
        ({"gpus": 8, "tp": 2}, 8), ({"gpus": 8, "tp": 2, "dp_replicate": 2}, 4),
        ({"gpus": 8, "cp": 4}, 8), ({"gpus": 8, "cp": 2, "tp": 2}, 8), ({"gpus": 8, "cp": 2, "dp_replicate": 2}, 4),
    ],
)  # fmt: skip
def test_weights_are_divided_among_the_shards_of_a_replica_and_by_tp_and_cp(more: dict[str, int], parts: int) -> None:
    """16 bytes a parameter: fp32 weights, gradients and two moments."""
    held = moment(predict(asked("F+Z3", **more), spec()), "optimizer step").bytes - LIBRARIES_BYTES
    assert held == pytest.approx(16 * N / parts, rel=1e-6)


def test_a_tensor_parallel_rank_gathers_its_part_over_shards_alone() -> None:
    one, two = (term(predict(asked("F+Z3", gpus=8, tp=tp), spec()), "loss", "gathered parameters") for tp in (1, 2))
    assert two == pytest.approx(one / 2, rel=1e-3)
    (layer,) = layer_bytes(asked("F+Z3", gpus=8, tp=2), spec(), 1)
    whole, divided = 2 * 6 + 2 * 2, 4 * 2  # of b s h: norms and inputs of q, k, v and of gate, up; q, k, v and output
    assert layer.kept == pytest.approx(S * (whole * H + divided * H / 2 + 8 * F / 2), rel=0.002)
    logits = [term(predict(asked("F+Z3", gpus=8, tp=tp), spec()), "loss", "logits and loss") for tp in (1, 2)]
    assert logits[0] == 2 * logits[1]


def test_a_rank_of_a_ring_has_its_part_of_each_sequence() -> None:
    """And gathers what any other does."""
    one, four = (predict(asked("F+Z3", gpus=4, cp=cp), spec()) for cp in (1, 4))
    assert term(four, "loss", "gathered parameters") == term(one, "loss", "gathered parameters")
    assert term(one, "loss", "logits and loss") == 4 * term(four, "loss", "logits and loss")
    (layer,) = layer_bytes(asked("F+Z3", gpus=4, cp=4), spec(), 1)
    assert layer.kept == S / 4 * (26 * H + 8 * F + 4 * 32 + 8)  # what the ring puts together is copied: 2 H more


def test_a_rank_of_an_exchange_gathers_its_own_experts_alone() -> None:
    """And keeps its part of all states; rows to and from other ranks are in the working set."""
    mixtral, tokens = spec("mixtral-8x7b"), S
    by_ep = {ep: predict(asked("F+Z3", gpus=8, ep=ep, model="mixtral-8x7b"), mixtral) for ep in (1, 2, 4, 8)}
    experts, table = 3 * 4096 * 14336, 2 * 32000 * 4096
    gathered = {ep: term(each, "loss", "gathered parameters") for ep, each in by_ep.items()}
    for ep, parameters in gathered.items():
        assert gathered[1] - parameters == 2 * 2 * (8 - 8 // ep) * experts
    others = 4096 * (2 * 4096 + 2 * 1024 + 2 + 8)  # attention, norms, router
    assert gathered[8] == 2 * (table + 2 * (others + experts))
    for name, most in (("layer's gradients", 2), ("buckets", 4)):
        each = {ep: term(found, "first reduction", name) for ep, found in by_ep.items()}
        assert each[1] - each[8] == most * 7 * experts
    working = {ep: term(each, "backward, first layer", "working set") for ep, each in by_ep.items()}
    assert working[2] - working[1] == tokens * 4 * 2 * 4096 and len({working[ep] for ep in (2, 4, 8)}) == 1
    assert len({term(each, "optimizer step", "optimizer states") for each in by_ep.values()}) == 1
    peaks = [each.peak_bytes for each in by_ep.values()]
    assert peaks == sorted(peaks, reverse=True)


def test_packed_weights_are_divided_and_their_scales_are_not() -> None:
    """QLoRA of 70B on two cards of 24 GB: packed weights fit, and what is gathered is a quarter of bf16's."""
    large, linears = spec("70b"), 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    more = {"model": "70b", "task": "finetune", "gpus": 2, "seq_len": 512, "lora_rank": 8}
    two = predict(asked("QL+F+R+Z3", **more), large)
    assert term(two, "loss", "4-bit weights") == linears / 2 / 2
    assert term(two, "loss", "scales of 4-bit weights") == linears / 64 + linears * 4 / (64 * 256)
    plain = predict(asked("L+F+R+Z3", **more), large)
    table = 32000 * 8192
    gathered = [term(each, "loss", "gathered parameters") - 4 * table for each in (plain, two)]
    assert gathered[0] - gathered[1] == 2 * 2 * linears / 80 * 3 / 4
    assert fits(two, 24 << 30).ok and not fits(plain, 64 << 30).ok
    assert not fits(predict(asked("QL+F+R+Z3", **more, engine="ddp"), large), 24 << 30).ok


def test_offload_of_hsdp_holds_each_replica() -> None:
    def host(replicas: int) -> dict[str, int]:
        prediction = predict(asked("F+Z3+O", gpus=8, dp_replicate=replicas), spec())
        return {each.name: each.bytes for each in prediction.host}

    assert host(2)["optimizer states"] == 2 * host(1)["optimizer states"] == 16 * N


def test_fp8_copies_one_layer_at_a_time() -> None:
    compiled, eager = (predict(asked("F+Z3", gpus=8, fp8=True, compile=compile), spec()) for compile in (True, False))
    weight, inputs_and_outputs = H * F, S * (H + F)
    assert term(compiled, "backward, last layer", "fp8 copies") == max(
        2 * weight + S * F, weight + 2 * inputs_and_outputs
    )
    cast = term(eager, "backward, last layer", "fp8 copies") - term(compiled, "backward, last layer", "fp8 copies")
    assert cast == 8 * weight  # larger than the layer's inputs or outputs
    bf16 = predict(asked("F+Z3", gpus=8, compile=True), spec())
    assert moment(compiled, "loss").bytes == moment(bf16, "loss").bytes  # autograd keeps bf16


def test_mfu_of_fp8_is_of_the_bf16_peak() -> None:
    plain, fp8 = (utilization(asked("F+Z3", fp8=fp8), spec(), 1e4, "NVIDIA H100 80GB HBM3") for fp8 in (False, True))
    assert plain == fp8 != (None, None)
