"""Memory, FLOPs and parameters of models whose layers are of several kinds; those of one kind stay as they were."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from backends import catalog
from backends.decoder import LatentAttention, ModelSpec
from training_probe.cli import invoke
from training_probe.flops import flops_per_token, weights
from training_probe.grid import Cell, cell
from training_probe.llama_shape import known
from training_probe.memory import predict
from training_probe.memory.layers import layer_bytes, uncounted
from training_probe.options import TINY
from training_probe.refusals import impossible

BEFORE = list(csv.DictReader((Path(__file__).parent / "before_kinds.csv").open()))


def spec(name: str) -> ModelSpec:
    found = catalog.find(name)
    assert found is not None
    return found


@pytest.mark.parametrize("model", sorted({row["model"] for row in BEFORE}))
def test_a_llama_is_as_it_was_to_the_byte(model: str) -> None:
    """Ten cells a model, of 5561 that were compared: written by the code that knew of layers alike only (eff78b0). What
    DeepSpeed's ZeRO 3 recomputes was counted anew since, what it gathers of a large head, and what frozen experts
    keep."""
    shape = TINY if model == "tiny" else known(model)
    assert shape is not None
    for row in (row for row in BEFORE if row["model"] == model):
        asked = _cell(row)
        prediction = predict(asked, shape.decoder)
        frozen = asked.letters.adapter is not None and "mixtral" in model
        assert frozen or " ".join(str(moment.bytes) for moment in prediction.moments) == row["moments_bytes"], (
            asked.name
        )
        then = [term.bytes for term in prediction.host if term.name not in ("processes", "rounding")]  # came later
        assert sum(then) == int(row["host_bytes"]), asked.name
        flops = flops_per_token(asked, shape.decoder)
        found = (flops.forward, flops.backward, flops.recomputed)
        assert found == tuple(float(row[f"{name}_flops"]) for name in ("forward", "backward", "recomputed")), asked.name
        counts = weights(shape.decoder, asked)
        assert counts.frozen + counts.four_bit + counts.trainable - counts.adapter == shape.parameters


def _cell(row: dict[str, str]) -> Cell:
    sizes = {name: int(row[name]) for name in ("gpus", "seq_len", "micro_batch", "grad_accum", "tp", "pp")}
    more = {"attention": row["attention"]} if row["attention"] else {}
    return cell(
        row["method"], model=row["model"], task="finetune", engine=row["engine"], compile=bool(int(row["compile"])),
        adapter_dtype="bf16", **sizes, **more,
    )  # type: ignore[arg-type]  # fmt: skip


DECODERS = [
    catalog.from_config(each["name"], each["config"])
    for each in json.loads((Path(__file__).parents[2] / "backends" / "decoders.json").read_bytes())
    if not each["name"].startswith("default ")
]


@pytest.mark.parametrize("model", [*catalog.models(), *DECODERS], ids=lambda model: model.name)
def test_every_model_that_is_known_is_predicted(model: ModelSpec) -> None:
    for method in ("F+R+Z3", "Naive", "L+Z2", "PT", "Z3+O"):
        task = "finetune" if method[0] in "LP" else "pretrain"
        asked = cell(method, model=model.name, gpus=8, task=task)
        if uncounted(asked, model) is not None:
            assert method == "L+Z2" and any(kind.mlp.experts > 1 for kind in model.kinds)
            continue
        counts = weights(model, asked)
        assert counts.total - counts.adapter == model.parameters
        prediction = predict(asked, model)
        states = prediction.terms_bytes.get("optimizer states", 0)
        if method in ("F+R+Z3", "Naive"):
            assert states == pytest.approx(model.parameters * (12 / 8 if "Z3" in method else 4), rel=1e-6)
        assert prediction.peak_bytes > states


@pytest.mark.parametrize("model", catalog.models(), ids=lambda model: model.name)
def test_the_command_answers_for_every_model_or_names_what_stops_it(
    model: ModelSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["memory", "--verbose", "--model", model.name, "--gpus", "8", "--task", "finetune", "--method"]
    assert invoke([*options, "R+Z3"]) == 0
    said = capsys.readouterr().out
    assert f"{model.parameters:,} parameters / 8 ranks" in said and "<- peak" in said
    assert invoke([*options, "F+R+Z3"]) == 0
    said = capsys.readouterr().out
    assert "<- peak" in said or f" {model.name}" in said.partition("unsupported: ")[2]
    assert invoke([*options, "L+Z3"]) == 0
    said = capsys.readouterr().out
    assert "<- peak" in said or f"(model_type {model.model_type})" in said


def test_layers_of_two_kinds_are_the_sum_of_both() -> None:
    """DeepSeek-V3's, beside models of which every layer is of one of its kinds."""
    model, asked = spec("deepseek-v3"), cell("Z3", model="deepseek-v3", gpus=8, seq_len=1024)
    dense, sparse = model.kinds
    alone = [layer_bytes(asked, replace(model, kinds=(kind,)), 1)[0] for kind in (dense, sparse)]
    both = layer_bytes(asked, model, 1)
    assert [each.kept for each in both] == [each.kept for each in alone]
    assert [each.count for each in both] == [dense.count, sparse.count]
    loss = predict(asked, model).moments[0]
    kept = sum(each.count * each.kept for each in both)
    activations = next(term.bytes for term in loss.terms if term.name == "activations")
    assert 0 < activations - kept < 0.01 * kept  # the last norm
    backward = predict(asked, model).moments[1]
    working = next(term.bytes for term in backward.terms if term.name == "working set")
    assert working == max(each.working for each in alone)


def test_windows_alone_make_no_kinds_of_layers() -> None:
    """What a layer keeps is the same with a window: no kernel that is used here leaves out what it hides."""
    gemma = spec("gemma-3-12b")
    assert len(gemma.kinds) == 2
    (both,) = layer_bytes(cell("F", model=gemma.name), gemma, 1)
    assert both.count == gemma.layers


def test_latent_attention_counts_its_expanded_keys() -> None:
    """Of DeepSeek-V3, 128 heads: 192 values of a query and of a key, 128 of a value; 4 FLOPs a pair were they alike."""
    model, length = spec("deepseek-v3"), 4096
    asked = cell("Naive", model=model.name, seq_len=length)
    flops = flops_per_token(asked, model)
    attention = model.layers * 2 * 128 * (192 + 128) * length
    products = model.active_parameters - model.vocab_size * model.hidden
    assert flops.forward == pytest.approx(2 * products + attention, rel=0.001)
    assert all(isinstance(kind.attention, LatentAttention) for kind in model.kinds)


def test_lora_sits_on_linear_layers_also_on_fused_ones() -> None:
    """It leaves out a mixture's experts, but for the one that all tokens share; GLM-4's gate and up are one layer."""
    llama = spec("llama-4-scout")
    attention = 64 * (2 * (5120 + 5120) + 2 * (5120 + 1024))
    adapter = weights(llama, cell("L", model=llama.name, task="finetune")).adapter
    assert adapter == 48 * (attention + 3 * 64 * (5120 + 8192))
    glm = spec("glm-4-9b")
    attention = 64 * (2 * (4096 + 4096) + 2 * (4096 + 256))
    adapter = weights(glm, cell("L", model=glm.name, task="finetune")).adapter
    assert adapter == 40 * (attention + 64 * (13696 + 4096) + 64 * (4096 + 2 * 13696))
    phi = spec("phi-4")
    qkv, output = 64 * (5120 + 5120 + 2 * 1280), 64 * (5120 + 5120)
    mlp = 64 * (5120 + 2 * 17920) + 64 * (17920 + 5120)
    assert weights(phi, cell("L", model=phi.name, task="finetune")).adapter == 40 * (qkv + output + mlp)
    one = cell("L", model=phi.name, task="finetune", lora_targets=("qkv_proj",))
    assert weights(phi, one).adapter == 40 * qkv and impossible(one, phi) is None


def test_a_layer_of_another_name_is_refused_with_the_name() -> None:
    phi, llama = spec("phi-4"), spec("llama-2-7b")
    separate = cell("L", model=phi.name, task="finetune", lora_targets=("q_proj",))
    assert "has no q_proj that LoRA could adapt; it has qkv_proj" in (impossible(separate, phi) or "")
    fused = cell("L", model=llama.name, task="finetune", lora_targets=("gate_up_proj",))
    assert "it has gate_proj and up_proj" in (impossible(fused, llama) or "")


def test_norms_and_a_cap_that_gemma_has_cost_memory() -> None:
    asked = cell("Naive", model="gemma-2-9b", seq_len=2048)
    gemma = spec("gemma-2-9b")
    plain = replace(gemma, model_type="llama", kinds=tuple(replace(kind, norms=2) for kind in gemma.kinds))
    more = layer_bytes(asked, gemma, 1)[0].kept - layer_bytes(asked, plain, 1)[0].kept
    # four norms of 8 bytes for two of 6; the tanh of each score; 4 bytes of two more norms' deviations
    assert more == 2048 * ((4 * 8 - 2 * 6) * gemma.hidden + 2 * 16 * 2048 + 2 * 4)


def test_what_was_not_counted_names_its_field() -> None:
    config = {
        "model_type": "starcoder2", "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 2048, "vocab_size": 1000, "max_position_embeddings": 4096,
        "sliding_window": 1024,
    }  # fmt: skip
    reason = uncounted(cell("F", model="starcoder"), catalog.from_config("starcoder", config))
    assert reason is not None and "norm_epsilon" in reason
    assert [model.name for model in catalog.models() if uncounted(cell("F+R+Z3", model=model.name), model)] == []


def test_lora_on_experts_keeps_all_weights_of_a_layer() -> None:
    """Qwen3-30B-A3B has 128 experts of 2048 x 768, of which a token chooses 8; gate and up have twice the rank."""
    model, experts, width, hidden, rank = spec("qwen3-30b-a3b"), 128, 768, 2048, 16
    common = {"model": model.name, "task": "finetune", "engine": "ddp", "adapter_dtype": "bf16", "lora_rank": rank}
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    alone = cell("L+F", lora_targets=attention, **common)  # type: ignore[arg-type]
    both = cell("L+F", **common)  # type: ignore[arg-type]
    kept = [layer_bytes(each, model, 1)[0].kept for each in (alone, both)]
    merged, inputs = 2 * 3 * experts * width * hidden, 350 * 8 * (2 * hidden + 2 * width)
    assert kept[1] - kept[0] == merged + inputs
    (recomputed,) = layer_bytes(cell("L+F+R", **common), model, 1)  # type: ignore[arg-type]
    assert recomputed.kept == 350 * 2 * hidden and recomputed.working > merged * 4 / 3  # and a gradient
    each = 2 * rank * (hidden + 2 * width) + rank * (hidden + width)
    counted = [weights(model, asked).adapter for asked in (alone, both)]
    assert counted[1] - counted[0] == 48 * experts * each
    flops = [flops_per_token(asked, model).forward for asked in (alone, both)]
    assert flops[1] - flops[0] == 2 * 48 * 8 * each


@pytest.mark.parametrize(
    ("model", "methods"),
    [
        ("7b", ("Z3", "F+Z3", "L+F")),
        ("mixtral-8x7b", ("Z3", "F+Z3", "L+F")),
        ("gpt-oss-20b", ("Z3", "F+Z3", "L+F")),
        ("llama-4-scout", ("Z3", "F+Z3", "L+F")),
        ("qwen3-30b-a3b", ("Z3", "F+Z3")),
        ("deepseek-v3", ("Z3", "F+Z3")),
    ],
)
def test_the_formula_that_is_shown_gives_the_bytes(model: str, methods: tuple[str, ...]) -> None:
    """Within 1 %: what the formula leaves out are norms' deviations, the log-sum-exp and adapters' activations."""
    for method in methods:
        attention = "flash" if "F" in method else "eager"
        probed = Cell(model=model, method=method, gpus=8, seq_len=1024, micro_batch=2, attention=attention)
        for kind in layer_bytes(probed, spec(model), 2):
            sizes = {name: int(size) for name, size in (pair.split("=") for pair in kind.sizes.split())}
            formula = kind.formula.replace(" (shared)", "").replace("^", "**")
            shown = eval(formula, {"__builtins__": {}}, sizes | {"b": 2, "s": 1024, "h": spec(model).hidden})
            assert shown == pytest.approx(kind.kept, rel=0.01), (method, kind.formula)
