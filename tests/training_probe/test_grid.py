"""Letters, cells and grids: what can be said is said in one way; what cannot be, or cannot be run, has a reason."""

from __future__ import annotations

import re
from itertools import chain, combinations, product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import catalog
from backends.decoder import ModelSpec
from training_probe import llama_shape
from training_probe.grid import ENGINES, LETTERS, LORA_TARGETS, NAIVE, Cell, GridError, Method, cell, grid, settled
from training_probe.refusals import impossible

RING = {"method": "F+Z3", "engine": "fsdp2", "cp": 2, "gpus": 2}
EXCHANGE = {"engine": "fsdp2", "ep": 2, "gpus": 2, "model": "mixtral-8x7b"}


def spec(name: str) -> ModelSpec:
    found = llama_shape.known(name)
    assert found is not None
    return found.decoder


def one_sentence(error: pytest.ExceptionInfo[GridError]) -> str:
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text and ". " not in text
    return text


@st.composite
def methods(draw: st.DrawFn) -> tuple[Method, str]:
    """A method by its fields, and its letters in any order, case and spacing."""
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    offload = draw(st.booleans()) if zero else False
    alone = draw(st.booleans()) if offload and zero == 3 else False
    weights = draw(st.sampled_from([None, "Q", "L", "QL", "PT"]))
    recompute = draw(st.sampled_from([None, "R", "RS"]))
    flash = draw(st.booleans())
    method = Method(
        zero=zero,
        offload=offload,
        optimizer_alone=alone,
        quantized=weights == "Q",
        recompute={None: "none", "R": "full", "RS": "selective"}[recompute],  # type: ignore[arg-type]
        flash=flash,
        adapter=None if weights == "Q" else weights,  # type: ignore[arg-type]
    )
    letters = [
        f"Z{zero}" if zero else None,
        "OO" if alone else "O" if offload else None,
        weights,
        recompute,
        "F" if flash else None,
    ]
    written = draw(st.permutations([letter for letter in letters if letter] or [NAIVE]))
    cases = [draw(st.sampled_from([str.upper, str.lower, str.title])) for _ in written]
    space = draw(st.sampled_from(["", " "]))
    return method, "+".join(f"{space}{case(letter)}{space}" for case, letter in zip(cases, written, strict=True))


@given(methods())
def test_letters_mean_the_same_however_they_are_written(case: tuple[Method, str]) -> None:
    method, written = case
    assert Method.parse(written) == method
    assert Method.parse(str(method)) == method
    assert cell(written, model="7b").method == str(method)
    assert cell(written, model="7b").letters == method


def test_exactly_what_does_not_contradict_itself_is_a_method() -> None:
    """All 4095 sets of letters are tried."""
    good = 0
    for letters in chain.from_iterable(combinations(LETTERS, size) for size in range(1, len(LETTERS) + 1)):
        said = set(letters)
        sound = (
            len(said & {"Z1", "Z2", "Z3"}) <= 1
            and len(said & {"R", "RS"}) <= 1
            and len(said & {"Q", "L", "QL", "PT"}) <= 1
            and len(said & {"O", "OO"}) <= 1
            and ("OO" not in said or "Z3" in said)
            and ("O" not in said or bool(said & {"Z1", "Z2", "Z3"}))
        )
        text = "+".join(letters)
        if sound:
            good += 1
            assert set(str(Method.parse(text)).split("+")) == said
        else:
            with pytest.raises(GridError) as error:
                Method.parse(text)
            one_sentence(error)
    assert good == 8 * 3 * 5 * 2 - 1  # ZeRO and offload, recompute, weights, flash; less none at all


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("Z4", "unknown letter 'Z4'"),
        ("lora", "say L."),
        ("zero-3+offload", "say Z3."),
        ("fsdp", "say Z3 with --engine fsdp2."),
        ("F+Z3+X", "unknown letter 'X' in method 'F+Z3+X'"),
        ("", "unknown letter ''"),
        ("Z3+", "unknown letter ''"),
        ("Z3,O", "unknown letter 'Z3,O'"),
        ("Naive+F", "unknown letter 'NAIVE'"),
        ("Z2+Z2", "names Z2 twice"),
        ("Z2+Z3", "Z2 and Z3 exclude each other"),
        ("L+QL", "L and QL exclude each other"),
        ("L+PT", "L and PT exclude each other"),
        ("Q+QL", "Q and QL exclude each other"),
        ("L+Q", "Q and L exclude each other"),
        ("R+RS", "R and RS exclude each other"),
        ("O", "add Z1, Z2 or Z3 to O"),
        ("F+O", "offloads without ZeRO"),
    ],
)
def test_contradictions(written: str, said: str) -> None:
    with pytest.raises(GridError) as error:
        cell(written, model="7b")
    assert said in one_sentence(error)


@pytest.mark.parametrize("field", ["gpus", "seq_len", "grad_accum", "tp", "pp", "cp", "micro_batch"])
def test_sizes_begin_at_one(field: str) -> None:
    for value in (0, -1):
        with pytest.raises(GridError) as error:
            cell("Z3", model="7b", **{field: value})  # type: ignore[arg-type]
        assert f"--{field.replace('_', '-')} is {value}; it must be at least 1" in one_sentence(error)


def test_the_letter_f_is_flash_attention() -> None:
    assert cell("F", model="7b").attention == "flash"
    assert cell("Z3", model="7b").attention == "eager"
    assert cell("Z3", model="7b", attention="math").attention == "math"
    with pytest.raises(GridError) as error:
        cell("F", model="7b", attention="math")
    assert "name one" in one_sentence(error)


@pytest.mark.parametrize(
    ("method", "fields", "why"),
    [
        ("Naive", {"tp": 2, "gpus": 2}, "TP is built for megatron and fsdp2"),
        ("Naive", {"pp": 2, "gpus": 2}, "PP is Megatron's"),
        ("F+Z3", {"cp": 2, "gpus": 2, "seq_len": 512}, "built for fsdp2 only"),
        ("F", {"cp": 2, "gpus": 2, "seq_len": 512, "engine": "ddp"}, "built for fsdp2 only"),
        ("Z3", {"cp": 2, "gpus": 2, "seq_len": 512, "engine": "fsdp2"}, "add the letter F"),
        ("PT+F+Z3", {"cp": 2, "gpus": 2, "seq_len": 512, "engine": "fsdp2", "task": "finetune"}, "tokens of PT"),
        ("F+Z3", {"cp": 2, "gpus": 2, "seq_len": 512, "engine": "fsdp2", "checkpoint": "op"}, "step of CP's ring"),
        ("F+Z3", {"cp": 2, "gpus": 2, "seq_len": 512, "engine": "fsdp2", "compile": True}, "leave --compile out"),
        ("F+Z3", {"cp": 2, "gpus": 2, "engine": "fsdp2"}, "350 tokens cannot be divided into two parts"),
        ("F+Z3", {"cp": 2, "gpus": 3, "seq_len": 512, "engine": "fsdp2"}, "groups of TP x PP x CP = 2"),
        ("Z3", {**EXCHANGE, "engine": "deepspeed"}, "use --engine fsdp2 with Z2 or Z3"),
        ("Naive", {**EXCHANGE, "engine": "megatron"}, "use --engine fsdp2 with Z2 or Z3"),
        ("Z3", {**EXCHANGE, "gpus": 3}, "groups of EP = 2"),
        ("Z3", {**EXCHANGE, "gpus": 16, "ep": 16}, "the 8 experts of mixtral-8x7b cannot be divided by EP 16"),
        ("Z3", {**EXCHANGE, "model": "7b"}, "llama-2-7b is dense, and EP divides experts"),
        ("Z3", {**EXCHANGE, "gpus": 4, "tp": 2}, "without --tp, --cp and --dp-replicate"),
        ("F+Z3", {**EXCHANGE, "gpus": 4, "cp": 2, "seq_len": 512}, "without --tp, --cp and --dp-replicate"),
        ("Z3", {**EXCHANGE, "gpus": 4, "dp_replicate": 2}, "without --tp, --cp and --dp-replicate"),
        ("L+Z3", {**EXCHANGE, "task": "finetune"}, "leave --ep out, with which L goes on fsdp2"),
        ("QL+Z3", {**EXCHANGE, "task": "finetune"}, "trained whole"),
        ("Z3", {**EXCHANGE, "compile": True}, "not built for EP's exchange"),
        ("Z3", {**EXCHANGE, "checkpoint": "op"}, "does not know the exchange of EP; use R"),
        ("Z3", {**EXCHANGE, "optim": "adamw-8bit"}, "leave --optimizer adamw-8bit out"),
        ("Z3", {**EXCHANGE, "task": "dpo"}, "no experts divided by EP; leave --ep out"),
        ("L+Z3", {"tp": 2, "gpus": 2, "engine": "fsdp2", "task": "finetune"}, "without adapters and O"),
        ("Z3+O", {"tp": 2, "gpus": 2, "engine": "fsdp2"}, "without adapters and O"),
        ("Z3", {"tp": 2, "gpus": 2, "engine": "fsdp2", "loss": "liger"}, "--loss plain"),
        ("Z3", {"tp": 16, "gpus": 16, "engine": "fsdp2", "model": "70b"}, "KV heads of llama-2-70b cannot"),
        ("Z3", {"tp": 2, "gpus": 2, "engine": "fsdp2", "model": "mixtral-8x7b"}, "divided by TP"),
        ("Z3", {"tp": 2, "gpus": 2, "engine": "fsdp2", "compile": True}, "other gradients"),
        ("Z3", {"dp_replicate": 2, "gpus": 2}, "FSDP2's"),
        ("Naive", {"dp_replicate": 2, "gpus": 2, "engine": "ddp"}, "FSDP2's"),
        ("Z3", {"dp_replicate": 3, "gpus": 8, "engine": "fsdp2"}, "3 replicas"),
        ("Z3", {"dp_replicate": 4, "tp": 4, "gpus": 8, "engine": "fsdp2"}, "4 replicas with TP 4"),
        ("F", {"checkpoint": "op", "engine": "megatron"}, "in its own ways"),
        ("Z3", {"fp8": True}, "fsdp2 and ddp only"),
        ("L", {"fp8": True, "engine": "ddp", "task": "finetune"}, "whole weights"),
        ("Naive", {"fp8": True, "engine": "ddp"}, "multiples of 16 tokens, and a micro batch has 350"),
        ("Naive", {"fp8": True, "engine": "ddp", "seq_len": 512, "model": "mixtral-8x7b"}, "fp8"),
        ("Z3", {"compile": True}, "fsdp2 and ddp only"),
        ("Naive", {"engine": "megatron", "cp": 2, "gpus": 2}, "Transformer Engine, which this probe does not use"),
        ("Z2", {"engine": "megatron"}, "R, F and Z1"),
        ("Z1+O", {"engine": "megatron"}, "R, F and Z1"),
        ("Q", {"engine": "megatron"}, "R, F and Z1"),
        ("L", {"engine": "megatron", "task": "finetune"}, "R, F and Z1"),
        ("Z1", {"engine": "megatron", "device": "cpu"}, "a GPU only"),
        ("Naive", {"engine": "megatron", "tp": 2, "gpus": 3}, "groups of TP x PP x CP = 2"),
        ("Naive", {"engine": "megatron", "tp": 3, "gpus": 3}, "cannot be divided by TP 3"),
        ("Naive", {"engine": "megatron", "pp": 3, "gpus": 3}, "layers of llama-2-7b cannot be divided by PP 3"),
        ("Z1", {"engine": "ddp"}, "ddp shards nothing"),
        ("Naive", {"engine": "fsdp2"}, "always shards"),
        ("Z1", {"engine": "fsdp2"}, "always shards"),
        ("Q+Z3", {"engine": "fsdp2"}, "not built for fsdp2 here; use QL"),
        ("QL+Z3+O", {"engine": "fsdp2", "task": "finetune"}, "without O"),
        ("QL+Z3", {"engine": "fsdp2", "task": "finetune", "compile": True}, "without O, --compile"),
        ("L", {"task": "pretrain"}, "--task finetune"),
        ("PT+Z2", {"task": "pretrain"}, "--task finetune"),
        ("Naive", {"seq_len": 4097}, "llama-2-7b ends at 4096 positions"),
        ("Q", {"model": "mixtral-8x7b"}, "experts"),
        ("Naive", {"model": "mixtral-8x7b", "engine": "megatron"}, "experts"),
        ("Naive", {"engine": "megatron", "loss": "chunked"}, "a loss and an optimizer of its own"),
        ("Naive", {"engine": "megatron", "adamw_8bit": True}, "a loss and an optimizer of its own"),
        ("Z2+O", {"adamw_8bit": True}, "leave O or --optimizer adamw-8bit out"),
        ("Z3+O", {"engine": "fsdp2", "adamw_8bit": True}, "leave O or --optimizer adamw-8bit out"),
        ("Z2", {"gpus": 3, "adamw_8bit": True}, "updates 2.2 billion parameters in one tensor"),
        ("Z2", {"gpus": 3, "optim": "paged-adamw-8bit"}, "updates 2.2 billion parameters in one tensor"),
        ("Z3", {"engine": "fsdp2", "optim": "paged-adamw-8bit"}, "use ddp or deepspeed"),
        ("Naive", {"engine": "ddp", "optim": "paged-adamw-8bit", "device": "cpu"}, "use --optimizer adamw-8bit"),
        ("Z3", {"offload_activations": True}, "use Z2, or --engine fsdp2 with Z3"),
        ("Naive", {"offload_activations": True, "engine": "megatron"}, "built for ddp, fsdp2 and deepspeed"),
        ("Naive", {"offload_activations": True, "engine": "ddp", "checkpoint": "op"}, "use R or --checkpoint N"),
        ("L", {"offload_activations": True, "engine": "ddp", "dora": True, "task": "finetune"}, "unit matrices"),
        ("Z3+OO", {"engine": "fsdp2"}, "use O, or --engine deepspeed"),
        ("Z3+OO", {"adamw_8bit": True}, "leave O or --optimizer adamw-8bit out"),
        ("L+Z3", {"dora": True, "task": "finetune"}, "use Z2, or --engine fsdp2"),
        ("L", {"dora": True, "engine": "ddp", "task": "finetune", "checkpoint": "op"}, "use R or --checkpoint N"),
        ("Z3", {"states": "bf16-kahan"}, "built for fsdp2; ddp keeps all in plain bf16"),
        ("Z3+O", {"engine": "fsdp2", "states": "bf16-kahan"}, "leave O and --tp out"),
        ("Z3", {"engine": "fsdp2", "gpus": 4, "dp_replicate": 2, "states": "bf16-stochastic"}, "use --states bf"),
        ("Z3", {"engine": "fsdp2", "states": "bf16-kahan", "adamw_8bit": True}, "leave --optimizer adamw-8bit out"),
        ("Z3", {"engine": "fsdp2", "states": "bf16-stochastic", "optim": "muon"}, "leave --optimizer muon out"),
        ("Z3+O", {"optim": "muon"}, "leave O or --optimizer muon out"),
        ("Z3", {"optim": "muon", "model": "mixtral-8x7b"}, "use --optimizer adamw or adamw-8bit"),
        ("Naive", {"optim": "muon", "engine": "megatron"}, "a loss and an optimizer of its own"),
        ("Z3", {"optim": "muon", "engine": "fsdp2", "tp": 2, "gpus": 2}, "the optimizer is AdamW"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_has_a_reason(method: str, fields: dict[str, Any], why: str) -> None:
    asked = cell(method, **{"model": "7b", **fields})
    said = impossible(asked, spec(asked.model))
    assert said is not None and why in said
    assert not said.endswith(".") and "\n" not in said  # a clause, to stand in a table


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("F+R+Z3+O", {"gpus": 8}), ("Z1", {"engine": "megatron", "tp": 4, "pp": 2, "gpus": 8}),
        ("F+R", {"engine": "megatron", "device": "cpu"}), ("Z2", {"engine": "fsdp2", "compile": True}),
        ("QL", {"engine": "ddp", "task": "finetune"}), ("L+F+R+Z3+O", {"task": "finetune", "model": "70b", "gpus": 8}),
        ("L", {"task": "finetune", "engine": "fsdp2", "method": "L+Z3"}), ("Naive", {"seq_len": 4096}),
        ("Z3", {"model": "mixtral-8x7b", "gpus": 8}), ("F+Z3", {"engine": "fsdp2", "tp": 4, "gpus": 8, "fp8": True,
                                                                "seq_len": 512, "checkpoint": "op"}),
        ("Z2+O", {"engine": "fsdp2", "dp_replicate": 2, "gpus": 8}), ("Z3", {"checkpoint": "2"}),
        ("Z3", {"model": "mixtral-8x7b", "gpus": 8}), ("Z3", {"gpus": 8, "adamw_8bit": True, "loss": "liger"}),
        ("Z2", {"gpus": 4, "adamw_8bit": True}), ("Z3", {"adamw_8bit": True}),
        ("Naive", {"engine": "ddp", "optim": "muon"}), ("Z3", {"engine": "fsdp2", "optim": "muon", "gpus": 8}),
        ("Z3", {"engine": "fsdp2", "states": "bf16-stochastic", "optim": "adamw-8bit"}),
        ("Z3", {"engine": "fsdp2", "gpus": 4, "dp_replicate": 2, "states": "bf16-kahan"}),
        ("Z2", {"optim": "muon"}), ("Naive", {"engine": "ddp", "optim": "paged-adamw-8bit"}),
        ("L+Z2", {"task": "finetune", "adamw_8bit": True}),
        ("QL+Z3", {"task": "finetune", "lora_rank": 8, "lora_targets": ("q_proj",), "double_quant": False}),
        ("L", {"task": "finetune", "engine": "ddp", "device": "cpu", "loss": "liger"}),
        ("F+Z3", {"engine": "fsdp2", "gpus": 8, "cp": 2, "tp": 2, "seq_len": 4096}),
        ("F+R+Z3+O", {**EXCHANGE, "gpus": 8, "ep": 4}), ("Z2", {**EXCHANGE, "loss": "liger", "states": "bf16-kahan"}),
        ("QL+Z3", {"engine": "fsdp2", "task": "finetune", "gpus": 2, "dp_replicate": 2}),
        ("L+F+R+Z3+O", {"task": "finetune", "engine": "fsdp2", "gpus": 4, "cp": 4, "seq_len": 4096, "dp_replicate": 2}),
    ],
)  # fmt: skip
def test_what_can_be_run_has_none(method: str, fields: dict[str, Any]) -> None:
    asked = cell(fields.pop("method", method), **{"model": "7b", **fields})
    assert impossible(asked, spec(asked.model)) is None


@pytest.mark.parametrize(
    ("model", "seq_len", "fields", "why"),
    [
        ("gpt-oss-20b", 64, {"method": "F"}, "attention sinks"),
        ("gpt-oss-20b", 64, {"attention": "math"}, "attention sinks"),
        ("gemma-2-9b", 64, {"method": "F"}, "attn_logit_softcapping"),
        ("deepseek-v3", 64, {"method": "F"}, "v_head_dim"),
        ("gemma-3-27b", 1024, {"method": "F"}, "sliding_window"),
        ("gemma-3-27b", 1023, {"method": "F"}, None),
        ("gemma-3-27b", 1024, {"method": "F", "device": "cpu"}, None),
        ("gemma-3-27b", 1024, {"attention": "math"}, None),
        ("qwen3-8b", 4096, {"method": "F"}, None),
        (
            "gemma-3-27b",
            1024,
            {**RING, "device": "cpu"},
            "ring has no windows, and gemma-3-27b has those of 1024 tokens",
        ),
        ("gemma-3-27b", 1020, RING, None),
        ("qwen3-8b", 4096, RING, None),
    ],
)
def test_what_torchs_attention_does_not_compute_is_eager(
    model: str, seq_len: int, fields: dict[str, Any], why: str | None
) -> None:
    described = catalog.find(model)
    asked = cell(**{"method": "Naive", "model": model, "seq_len": seq_len, **fields})
    reason = impossible(asked, described)
    assert reason is None if why is None else reason is not None and why in reason
    assert impossible(cell("Naive", model=model, seq_len=seq_len), described) is None


@pytest.mark.parametrize(
    ("model", "targets", "why"),
    [
        ("mixtral-8x7b", ("q_proj", "down_proj"), "by the name down_proj; name q_proj k_proj v_proj o_proj"),
        ("qwen3-30b-a3b", ("q_proj", "up_proj"), "name both gate_proj and up_proj, or neither"),
        ("qwen3-30b-a3b", ("gate_proj", "up_proj"), None), ("qwen3-30b-a3b", LORA_TARGETS, None),
        ("mixtral-8x7b", ("q_proj", "k_proj", "v_proj", "o_proj"), None), ("mixtral-8x7b", LORA_TARGETS, None),
    ],
)  # fmt: skip
def test_what_peft_adapts_of_experts(model: str, targets: tuple[str, ...], why: str | None) -> None:
    reason = impossible(cell("L+Z3", model=model, task="finetune", lora_targets=targets), catalog.find(model))
    assert reason is None if why is None else reason is not None and why in reason
    adapted = cell("L", engine="ddp", model="qwen3-30b-a3b", task="finetune", dora=True)
    dora = impossible(adapted, catalog.find("qwen3-30b-a3b"))
    assert dora is not None and "no DoRA on the experts of qwen3-30b-a3b" in dora


def test_a_loss_in_chunks_cannot_cap_logits() -> None:
    capped = catalog.find("gemma-2-9b")
    assert capped is not None
    assert "caps its logits" in (impossible(cell("Naive", model="gemma-2-9b", loss="liger"), capped) or "")
    assert impossible(cell("Naive", model="gemma-2-9b"), capped) is None


def test_a_layer_that_no_model_has_is_not_recomputed() -> None:
    asked = cell("F+Z3", model="7b", checkpoint="33")
    plain, (clause,) = settled(asked, 32)
    assert plain == cell("F+Z3", model="7b") and "has 32 layers" in clause and "--checkpoint" in clause
    for fine in (cell("F+Z3", model="7b", checkpoint="32"), cell("F+Z3", model="7b", checkpoint="op")):
        assert settled(fine, 32) == (fine, [])
    assert settled(asked) == (asked, [])  # of a model whose layers are not known


def test_8_bit_adamw_goes_by_either_name_and_is_read_of_files_of_before() -> None:
    """Cells of manifests, whose names the rows of a sweep go by when it is resumed."""
    named, before = cell("Z2", model="7b", optim="adamw-8bit"), cell("Z2", model="7b", adamw_8bit=True)
    assert named == before and named.adamw_8bit and named.name == "7b_pretrain_deepspeed_Z2_1x_s350_b1_adamw8bit"
    line = b'{"model":"7b","method":"Z2","adamw_8bit":true}'
    assert msgspec.json.decode(line, type=Cell) == named
    assert msgspec.json.decode(msgspec.json.encode(named), type=Cell) == named
    assert not cell("Z2", model="7b", optim="muon").adamw_8bit


@pytest.mark.parametrize("method", ["PT", "Q"])
def test_muon_changes_nothing_where_no_matrix_of_a_layer_trains(method: str) -> None:
    plain, (clause,) = settled(cell(method, model="7b", engine="ddp", optim="muon"))
    assert plain == cell(method, model="7b", engine="ddp") and clause.startswith("--optimizer changes nothing")
    assert settled(cell("L", model="7b", engine="ddp", optim="muon"))[1] == []


def test_of_a_model_that_is_not_known_only_the_engine_is_asked() -> None:
    assert impossible(cell("Z3", model="own", seq_len=10**6), None) is None
    assert impossible(cell("Z3", model="own", engine="ddp"), None) is not None


def test_names_are_unique_and_fit_for_files() -> None:
    """Over every axis there is, and the switches beside them."""
    cells: list[Cell] = []
    common = product((1, 4), (1, 2), (1, 2), ("eager", "math"), (False, True), ("pretrain", "finetune"))
    for grad_accum, tp, pp, attention, compile, task in common:
        cells += grid(
            models=("7b", "70b", "org/7b-chat", "/models/own/"),
            engines=ENGINES,
            methods=("Naive", "Z3", "O+Z3", "RS", "QL"),
            gpus=(1, 2, 12),
            seq_lens=(128, 350),
            micro_batches=(1, 12, None),
            grad_accum=grad_accum,
            tp=tp,
            pp=pp,
            attention=attention,
            compile=compile,
            task=task,
        )
    names = {cell.name for cell in cells}
    assert len(names) == len(cells) == 4 * 4 * 5 * 3 * 2 * 3 * 64
    assert all(re.fullmatch(r"[A-Za-z0-9._+-]{1,120}", name) for name in names)


@given(st.text(min_size=1))
def test_a_directory_may_be_called_anything(model: str) -> None:
    """A cell's name is part of paths and goes to terminals."""
    name = cell("Z2", model=f"/models/{model}").name
    assert "/" not in name and name.isprintable() and " " not in name


def test_a_grid_is_every_combination_once_in_reading_order() -> None:
    got = grid(
        models=("7b", "13b"),
        engines=("deepspeed", "ddp"),
        methods=("Z3", "O+Z3", "Z3+O"),
        gpus=(1, 2),
        seq_lens=(350,),
        micro_batches=(1, None),
        task="finetune",
    )
    wanted = product(("7b", "13b"), ("deepspeed", "ddp"), ("Z3", "Z3+O"), (1, 2), (1, None))
    assert [(c.model, c.engine, c.method, c.gpus, c.micro_batch) for c in got] == list(wanted)
    assert all(c.task == "finetune" and c.seq_len == 350 for c in got)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 350),
        ({"gpus": 8, "micro_batch": 2}, 8 * 2 * 350),
        ({"gpus": 8, "micro_batch": 2, "grad_accum": 4, "seq_len": 100}, 8 * 2 * 4 * 100),
        ({"gpus": 8, "tp": 4, "engine": "megatron"}, 2 * 350),  # one sequence for the four that share its layers
        ({"gpus": 8, "tp": 2, "pp": 2, "grad_accum": 3, "engine": "megatron"}, 2 * 3 * 350),
        ({"gpus": 8, "cp": 4, "micro_batch": 2, "engine": "fsdp2"}, 2 * 2 * 350),  # four share a sequence
    ],
)
def test_tokens_of_a_step(fields: dict[str, Any], tokens: int) -> None:
    assert cell("Naive", model="7b", **fields).tokens_per_step == tokens


def test_a_batch_that_is_searched_has_no_tokens_yet() -> None:
    searched = cell("Naive", model="7b", micro_batch=None)
    assert searched.name.endswith("_bmax")
    with pytest.raises(ValueError, match="still to be searched"):
        _ = searched.tokens_per_step
