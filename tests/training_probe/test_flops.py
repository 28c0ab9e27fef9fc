"""FLOPs: known answers, the published way of counting, and what each method adds or saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends import catalog
from backends.decoder import ModelSpec
from training_probe.flops import flops_per_token, peak_flops, utilization
from training_probe.grid import Cell, cell
from training_probe.llama_shape import LlamaShape


def spec(name: str) -> ModelSpec:
    found = catalog.find(name)
    assert found is not None
    return found


SEVEN = spec("7b")
IN_LAYERS = 32 * (4 * 4096**2 + 3 * 4096 * 11008)  # matmul parameters of Llama-2-7B's layers
HEAD = 32000 * 4096
ATTENTION = 4 * 32 * 350 * 4096
LORA = 32 * 64 * (4 * (4096 + 4096) + 3 * (4096 + 11008))


def seven(method: str, **more: Any) -> Cell:
    return cell(method, model="7b", **more)


def test_full_training_is_six_times_the_matmul_parameters_and_three_attentions() -> None:
    flops = flops_per_token(seven("Naive"), SEVEN)
    assert flops.forward == 2 * (IN_LAYERS + HEAD) + ATTENTION
    assert flops.backward == 2 * flops.forward
    assert flops.model == flops.hardware == 6 * (IN_LAYERS + HEAD) + 3 * ATTENTION


def test_llm_foundrys_count_differs_by_the_embedding_table_alone() -> None:
    """It takes 6 N s + 3 (4 L h s^2) per sequence with all N parameters; here a look-up and norms are no products."""
    theirs = 6 * SEVEN.parameters + 3 * ATTENTION
    ours = flops_per_token(seven("Naive"), SEVEN).model
    assert theirs - ours == 6 * (HEAD + (2 * 32 + 1) * 4096)
    assert ours == pytest.approx(theirs, rel=0.02)


def test_recomputation_is_in_hfu_only() -> None:
    plain = flops_per_token(seven("Naive"), SEVEN)
    full = flops_per_token(seven("R"), SEVEN)
    selective = flops_per_token(seven("RS"), SEVEN)
    assert plain.model == full.model == selective.model
    last = 32 * 4096 * 11008  # of the MLP: the backward pass needs what goes in, not what comes out
    assert full.recomputed == 2 * (IN_LAYERS - last) + ATTENTION  # the head is not computed again
    assert selective.recomputed == ATTENTION / 2  # of its two products the second
    assert flops_per_token(seven("F+RS"), SEVEN).recomputed == ATTENTION  # one kernel
    assert flops_per_token(seven("L+R", task="finetune"), SEVEN).recomputed == 2 * (IN_LAYERS + LORA) + ATTENTION


@pytest.mark.parametrize("letter", ["L", "QL"])
def test_adapters_pay_their_own_products_and_only_their_weight_gradients(letter: str) -> None:
    flops = flops_per_token(seven(letter, task="finetune"), SEVEN)
    assert flops.forward == 2 * (IN_LAYERS + HEAD + LORA) + ATTENTION
    assert flops.backward == 2 * (IN_LAYERS + HEAD + LORA) + 2 * LORA + 2 * ATTENTION


def test_fewer_adapters_are_fewer_products() -> None:
    flops = flops_per_token(seven("L+R", task="finetune", lora_rank=8, lora_targets=("q_proj", "v_proj")), SEVEN)
    lora = 32 * 8 * 2 * (4096 + 4096)
    assert flops.forward == 2 * (IN_LAYERS + HEAD + lora) + ATTENTION
    assert flops.backward == 2 * (IN_LAYERS + HEAD + lora) + 2 * lora + 2 * ATTENTION
    last = 32 * 4096 * 11008  # frozen, and not computed again: nothing behind it needs what comes out
    assert flops.recomputed == 2 * (IN_LAYERS + lora - last) + ATTENTION


def test_a_loss_in_chunks_computes_its_logits_twice_and_ligers_once() -> None:
    plain, chunked, liger = (
        flops_per_token(seven("Naive", loss=loss), SEVEN) for loss in ("plain", "chunked", "liger")
    )
    assert plain.model == chunked.model == liger.model
    assert chunked.recomputed == 2 * HEAD and plain.recomputed == liger.recomputed == 0


def test_quantized_pretraining_has_weight_gradients_of_the_head_alone() -> None:
    assert flops_per_token(seven("Q"), SEVEN).backward == 2 * (IN_LAYERS + HEAD) + 2 * HEAD + 2 * ATTENTION


def test_virtual_tokens_pass_through_the_model() -> None:
    flops = flops_per_token(seven("PT", task="finetune"), SEVEN)
    assert flops.forward * 350 == pytest.approx(358 * (2 * (IN_LAYERS + HEAD) + ATTENTION * 358 / 350))
    assert flops.backward == pytest.approx(
        flops.forward + 358 / 350 * ATTENTION * 358 / 350
    )  # no weight gradients, attention's twice


def test_of_a_mixture_the_active_experts_count() -> None:
    mixtral = spec("mixtral-8x7b")
    flops = flops_per_token(cell("Naive", model="mixtral-8x7b"), mixtral)
    embedding_and_norms = mixtral.vocab_size * mixtral.hidden + (2 * mixtral.layers + 1) * mixtral.hidden
    model = catalog.find("mixtral-8x7b")
    assert model is not None
    matmul = model.active_parameters - embedding_and_norms
    assert flops.model == 6 * matmul + 3 * 4 * mixtral.layers * 350 * mixtral.hidden


def test_utilization_is_of_all_gpus() -> None:
    one, eight = seven("R", gpus=1), seven("R", gpus=8)
    mfu, hfu = utilization(one, SEVEN, 5000.0, "NVIDIA H200")
    assert mfu == pytest.approx(5000 * flops_per_token(one, SEVEN).model / 989.4e12)
    assert utilization(eight, SEVEN, 40000.0, "NVIDIA H200") == pytest.approx((mfu, hfu))
    assert hfu is not None and mfu is not None and 1.2 < hfu / mfu < 4 / 3
    assert utilization(one, SEVEN, 5000.0, "Some GPU") == (None, None)
    assert utilization(seven("R", device="cpu"), SEVEN, 5.0, "NVIDIA H200") == (None, None)


def test_a_published_utilization_is_found_again() -> None:
    """llm-foundry's table: MPT-7B, 8 H100, sequences of 2048, 10,643 tokens/s a GPU, 46.4 %. MPT is a GPT of 32 layers,
    4096 wide, with an MLP of 2 x 4h and tied tables of 50,432: a gated MLP of 8/3 h has as many parameters."""
    mpt = LlamaShape(
        name="mpt", hf_id="mpt", hidden=4096, layers=32, heads=32, kv_heads=32, intermediate=10923, vocab_size=50432,
        max_position=2048, tied=True,
    ).decoder  # fmt: skip
    mfu, _ = utilization(cell("F", model="mpt", gpus=8, seq_len=2048), mpt, 8 * 10643.0, "NVIDIA H100 80GB HBM3")
    assert mfu == pytest.approx(0.464, rel=0.02)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A40", 149.7),
        ("NVIDIA B200", 2250),
        ("NVIDIA H20", 148),
    ],
)
def test_names_as_drivers_report_them(name: str, teraflops: float) -> None:
    assert peak_flops(name) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA A10G",
        "Intel Xeon",
        "AMD Instinct MI300X",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
    ],
)
def test_unknown_names_have_no_peak(name: str) -> None:
    assert peak_flops(name) is None


def test_peaks_agree_with_those_of_the_modelled_gpus() -> None:
    """`servers` has its own, in a form that users write too; training_probe may not import them."""
    both = 0
    data = Path(__file__).parents[2] / "servers" / "data" / "gpus.json"
    for gpu in json.loads(data.read_text()).values():
        peak = peak_flops("NVIDIA " + gpu["name"].removeprefix("NVIDIA ").removeprefix("GeForce "))
        both += peak is not None
        assert peak is None or peak == pytest.approx(gpu["flops"], rel=1e-3), gpu["name"]
    assert both >= 9


def test_every_model_of_the_catalog_counts_about_its_active_parameters() -> None:
    """Less the table that is only looked up; attention and its mask's square come on top."""
    for model in catalog.models():
        flops = flops_per_token(cell("Naive", model=model.name), model)
        multiplied = model.active_parameters - (0 if model.tied else model.vocab_size * model.hidden)
        assert 0.999 < flops.model / (6 * multiplied) < 1.1, model.name
