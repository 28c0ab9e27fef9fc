"""Predicted memory: known counts, what must hold of any cell, and what is decided by it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import catalog
from backends.decoder import ModelSpec
from training_probe.flops import weights
from training_probe.grid import Cell, cell, settled
from training_probe.llama_shape import known
from training_probe.memory import Prediction, fits, largest_micro_batch, predict
from training_probe.memory.layers import layer_bytes, uncounted
from training_probe.memory.process import HOST_PROCESS_BYTES
from training_probe.memory.rank import LIBRARIES_BYTES, Moment
from training_probe.results import GIB

N = 6_738_415_616  # Llama-2-7B


def spec(name: str) -> ModelSpec:
    found = known(name)
    assert found is not None
    return found.decoder


def of(method: str, model: str = "7b", **more: Any) -> Prediction:
    tasked = {"task": "finetune", "adapter_dtype": "bf16", **more} if method.startswith(("L", "QL", "PT")) else more
    return predict(cell(method, model=model, **tasked), spec(model))


def peak_gb(method: str, model: str = "7b", **more: Any) -> float:
    return of(method, model, **more).peak_bytes / GIB


def phase(prediction: Prediction, name: str) -> Moment:
    return next(each for each in prediction.moments if each.name == name)


def term(prediction: Prediction, phase_name: str, name: str) -> int:
    return next(each.bytes for each in phase(prediction, phase_name).terms if each.name == name)


# --- Known counts ---


def test_parameters_of_the_papers_models() -> None:
    assert spec("7b").parameters == N
    assert spec("13b").parameters == 13_015_864_320
    assert spec("70b").parameters == 68_976_648_192
    counts = weights(spec("7b"), cell("L", model="7b"))
    assert counts.adapter == counts.trainable == 159_907_840  # what PEFT counts at rank 64 on all seven linear layers
    assert counts.total == N + 159_907_840


def test_everything_is_frozen_quantized_or_trained() -> None:
    for model in catalog.models():
        for method in ("Naive", "Q", "L", "QL", "PT"):
            counts = weights(model, cell(method, model=model.name))
            assert counts.total == model.parameters + counts.adapter
            assert min(counts.frozen, counts.four_bit, counts.trainable) >= 0


def test_sixteen_bytes_a_parameter_of_fp32_masters() -> None:
    """2 parameter + 2 gradient + 12 master and moments, held at the step; DeepSpeed's temporaries are 6 more."""
    terms = {each.name: each.bytes for each in phase(of("Z2"), "optimizer step").terms}
    assert terms["parameters"] + terms["gradients"] + terms["optimizer states"] == 16 * N
    assert terms["optimizer temporaries"] == 6 * N
    fsdp = of("Z3", engine="fsdp2")
    assert phase(fsdp, "optimizer step").bytes == 16 * N + LIBRARIES_BYTES


def test_bf16_states_are_eight_bytes_a_parameter() -> None:
    assert phase(of("Naive", engine="ddp"), "optimizer step").bytes == 8 * N + LIBRARIES_BYTES
    ddp = {each.name: each.bytes for each in phase(of("Naive", engine="ddp", gpus=2), "loss").terms}
    assert ddp["parameters"] + ddp["gradients"] + ddp["optimizer states"] == 8 * N


@pytest.mark.parametrize(("method", "ranks", "coefficient"), [("F", 1, 18.0), ("F", 8, 18.0), ("F+Z1", 8, 6 + 12 / 8)])
def test_megatron_holds_18_bytes_or_6_and_12_divided(method: str, ranks: int, coefficient: float) -> None:
    terms = {each.name: each.bytes for each in phase(of(method, engine="megatron", gpus=ranks), "loss").terms}
    assert terms["parameters"] + terms["gradients"] + terms["optimizer states"] == pytest.approx(coefficient * N)


def test_four_bits_and_their_scales() -> None:
    linear = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert term(of("QL"), "loss", "4-bit weights") == pytest.approx(linear * (0.5 + 1 / 64 + 1 / 4096))
    assert term(of("QL", double_quant=False), "loss", "4-bit weights") == pytest.approx(linear * (0.5 + 4 / 64))


def test_adapters_are_as_many_as_litgpt_counts() -> None:
    """LitGPT's table has 4,194,304 trained parameters at rank 8 on q and v."""
    small = {"lora_rank": 8, "lora_targets": ("q_proj", "v_proj")}
    counts = weights(spec("7b"), cell("L", model="7b", **small))
    assert counts.adapter == counts.trainable == 4_194_304
    assert term(of("L", **small), "loss", "adapters") == 2 * 4_194_304


@pytest.mark.parametrize(
    ("targets", "whole", "wide"),
    [
        (("q_proj",), 8 + 2 + 6 + 2, 6),  # two norms, the input of q, q, k, v and output as FlashAttention has them
        (("q_proj", "k_proj", "v_proj"), 8 + 2 + 6 + 2, 6),
        (("o_proj",), 8 + 6 + 2, 6),  # the output is o's input: kept once
        (("up_proj",), 8 + 2 + 6 + 2, 6),
        (("down_proj",), 8 + 6 + 2, 8),
        (("q_proj", "o_proj", "gate_proj", "down_proj"), 8 + 4 + 6 + 2, 8),
    ],
)
def test_the_inputs_of_adapted_layers_alone_are_kept(targets: tuple[str, ...], whole: int, wide: int) -> None:
    asked = cell("L+F", model="7b", lora_rank=8, lora_targets=targets, adapter_dtype="bf16")
    (each,) = layer_bytes(asked, spec("7b"), 1)
    small = 4 * 2 + 4 * 32 + 2 * 8 * len(targets)  # deviations of norms, log-sum-exp, what goes from A to B
    assert each.kept == 350 * (whole * 4096 + wide * 11008 + small)


@pytest.mark.parametrize("engine", ["deepspeed", "ddp", "fsdp2"])
def test_adapters_in_fp32_take_16_bytes_a_parameter(engine: str) -> None:
    """Weights, gradients and AdamW's two moments of 4 bytes each. FSDP2 gathers them in bf16, and so keeps bf16
    inputs; the others' adapters keep an fp32 copy of their own of each input, and none of bf16."""
    method, trained = "L+F" if engine != "fsdp2" else "L+F+Z3", 39_976_960 * 4  # of all seven linear layers at rank 64
    own = of(method, engine=engine, adapter_dtype="fp32")
    last = own.moments[-1].name
    weights_name = "parameters" if engine == "fsdp2" else "adapters"
    states = [term(own, last, name) for name in (weights_name, "gradients", "optimizer states")]
    assert states == [4 * trained, 4 * trained, 8 * trained]
    halves = of(method, engine=engine, adapter_dtype="bf16")
    kept = [each.moments[0] for each in (own, halves)]
    wide, half = (next(t.bytes for t in moment.terms if t.name == "activations") for moment in kept)
    inputs = 4 * (3 * 4096 + 4096 + 2 * 4096 + 11008) - 2 * (2 * 4096 + 11008)
    more = 0 if engine == "fsdp2" else 32 * 350 * (inputs + 7 * 64 * 2)
    assert wide - half == more


def test_zero_has_bf16_adapters_with_fp32_masters_either_way() -> None:
    asked = [cell("L+Z2", model="7b", adapter_dtype=dtype) for dtype in (None, "bf16", "fp32")]
    assert asked[0] == asked[1] == settled(asked[2])[0] and "keeps fp32 masters" in settled(asked[2])[1][0]
    assert cell("L", model="7b").adapter_dtype == cell("L+Z3", model="7b", engine="fsdp2").adapter_dtype == "fp32"
    assert cell("Z2", model="7b").adapter_dtype == "bf16"
    assert "adapters" not in cell("L", model="7b", engine="a_script_of_my_own").name  # of which nothing is known


@pytest.mark.parametrize(
    ("method", "more", "usual", "in_8_bits"),
    [("Naive", {"engine": "ddp"}, 4, 2), ("Z2", {}, 12, 6), ("Z3", {}, 12, 6), ("Z3", {"engine": "fsdp2"}, 8, 2)],
)
def test_moments_in_8_bits(method: str, more: dict[str, Any], usual: int, in_8_bits: int) -> None:
    """A byte each, 4 bytes for 256; fp32 masters stay, and fsdp2's are its parameters."""
    states = [term(of(method, adamw_8bit=short, **more), "optimizer step" if method != "Naive" else "loss",
                   "optimizer states") for short in (False, True)]  # fmt: skip
    assert states == [usual * N, round((in_8_bits + 2 * 4 / 256) * N)]


@pytest.mark.parametrize(
    ("method", "more", "usual", "momentum"),
    [("Naive", {"engine": "ddp"}, 4, 2), ("Naive", {}, 4, 2), ("Z2", {}, 12, 8), ("Z3", {}, 12, 6),
     ("Z3", {"engine": "fsdp2"}, 8, 4)],
)  # fmt: skip
def test_muon_has_one_moment_of_the_matrices_of_layers(
    method: str, more: dict[str, Any], usual: int, momentum: int
) -> None:
    """AdamW's two of tables and norms. DeepSpeed's is bf16, with ZeRO 1 and 2 twice, beside fp32 masters."""
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    held = of(method, optim="muon", **more)
    states = [term(held, "loss", name) for name in ("Muon's momentum", "optimizer states")]
    assert states == [momentum * matrices, usual * (N - matrices)]
    last = next(moment for moment in held.moments if any(each.name == "Muon's squares" for each in moment.terms))
    assert next(each.bytes for each in last.terms if each.name == "Muon's squares") == 4 * 4096**2


@pytest.mark.parametrize("gpus", [1, 4])
def test_the_optimizer_alone_is_offloaded_beside_parameters_on_the_gpu(gpus: int) -> None:
    both, alone, none = (of(method, gpus=gpus) for method in ("Z3+O", "Z3+OO", "Z3"))
    assert both.peak_bytes < alone.peak_bytes < none.peak_bytes
    held = {each.name: each.bytes for each in alone.moments[0].terms}
    assert held["parameters"] == 2 * -(-N // gpus) and "optimizer states" not in held and "gradients" not in held
    assert ("gathered parameters" in held) == (gpus > 1)  # one rank has them all
    kept = {each.name for each in both.host} - {each.name for each in alone.host}
    assert kept == {"parameters"}


@pytest.mark.parametrize("method", ["F", "F+R"])
def test_activations_that_are_offloaded_are_the_hosts(method: str) -> None:
    here, away = (of(method, engine="ddp", seq_len=2048, offload_activations=there) for there in (False, True))
    (kind,) = layer_bytes(cell(method, model="7b", engine="ddp", seq_len=2048), spec("7b"), 1)
    assert term(here, "loss", "activations") - term(away, "loss", "activations") == 32 * kind.kept
    held = {each.name: each.bytes for each in away.host}
    assert held["activations"] == 32 * kind.kept and not here.host
    rounded = held["rounding of activations"] / held["activations"]
    assert rounded == 0 if "R" in method else 0 < rounded < 0.25  # 4096 is a power of two, and 11008 is none


def test_dora_has_a_magnitude_for_each_output() -> None:
    outputs = 32 * (4 * 4096 + 2 * 11008 + 4096)
    plain, dora = (weights(spec("7b"), cell("L", model="7b", dora=dora)) for dora in (False, True))
    assert dora.adapter - plain.adapter == outputs and dora.trainable == dora.adapter
    kept = [
        layer_bytes(cell("L", model="7b", dora=dora, engine="ddp"), spec("7b"), 1)[0].kept for dora in (False, True)
    ]
    assert kept[1] - kept[0] == 350 * (2 + 4) * outputs // 32


@pytest.mark.parametrize(
    ("states", "more", "bytes_"),
    [("fp32", {}, (4, 8, 4, 0)), ("bf16-stochastic", {}, (2, 4, 2, 0)), ("bf16-kahan", {}, (2, 4, 2, 2)),
     ("bf16-stochastic", {"adamw_8bit": True}, (2, 2 + 2 * 4 / 256, 2, 0))],
)  # fmt: skip
def test_bf16_states_of_fsdp2(states: Any, more: dict[str, Any], bytes_: tuple[float, ...]) -> None:
    """They are weights, moments, gradients, and what rounding took from the weights; on two ranks half of each."""
    last = of("Z3", engine="fsdp2", gpus=2, states=states, **more).moments[-1]
    held = {each.name: each.bytes for each in last.terms}
    names = ("parameters", "optimizer states", "gradients", "remainders")
    assert [held.get(name, 0) for name in names] == [round(each * N / 2) for each in bytes_]


def test_paged_moments_are_not_torchs_and_at_worst_the_hosts() -> None:
    for method, more, usual in (("Naive", {"engine": "ddp"}, 0), ("Z2", {}, 4), ("Z3", {"gpus": 2}, 4)):
        paged = of(method, optim="paged-adamw-8bit", **more)
        held = paged.moments[0]
        states = next(each.bytes for each in held.terms if each.name == "optimizer states")
        assert states == round((usual + 2 * 4 / 256) * -(-N // more.get("gpus", 1)))
        assert next(each.bytes for each in paged.host if each.name == "paged moments") == 2 * N
    assert not of("Naive", engine="ddp").host


def test_the_logits_of_a_chunk() -> None:
    """At 4 x 350 tokens: 12 bytes of an eighth of them; Liger's 2 bytes of 256, a chunk of whose logits is no larger
    than the hidden states. The head's gradient is summed over chunks where the head trains."""
    table, asked = 32000 * 4096, {"micro_batch": 4, "engine": "ddp"}
    assert term(of("Naive", **asked), "loss", "logits and loss") == 12 * 1400 * 32000
    chunked = of("Naive", loss="chunked", **asked)
    assert term(chunked, "loss", "logits and loss") == 2 * 175 * 32000  # two gradients of the head are more than 12 B
    assert term(chunked, "loss", "head's gradients in chunks") == 2 * 2 * table
    frozen = of("L", loss="chunked", **asked)
    assert term(frozen, "loss", "logits and loss") == 12 * 175 * 32000
    assert "head's gradients in chunks" not in {each.name for each in phase(frozen, "loss").terms}
    liger = of("Naive", loss="liger", **asked)
    assert term(liger, "loss", "logits and loss") == 2 * 256 * 32000
    assert term(liger, "loss", "head's gradients in chunks") == 2 * table


def test_a_layer_that_the_model_has_not_is_told() -> None:
    latent = catalog.find("deepseek-v3")
    assert latent is not None
    asked = cell("L", model="deepseek-v3", lora_targets=("k_proj",))
    assert "has no linear layer k_proj" in (uncounted(asked, latent) or "")
    assert uncounted(cell("L", model="deepseek-v3", lora_targets=("o_proj",)), latent) is None
    assert uncounted(cell("L", model="deepseek-v3"), latent) is None


def test_activations_of_a_layer() -> None:
    """b s h and b s f and b a s^2, counted by saved-tensor hooks on a real Hugging Face Llama."""
    h, f, a, s = 4096, 11008, 32, 350
    tokens = s * h
    for method, more, whole, wide, square in [
        ("Naive", {}, 24, 8, 6),
        ("F", {}, 24, 8, 0),
        ("Naive", {"attention": "math"}, 30, 8, 4),
        ("RS", {}, 24, 8, 0),
        ("R", {}, 2, 0, 0),
        ("L", {"adapter_dtype": "bf16"}, 20, 8, 6),
        ("Q", {}, 18, 6, 6),
        ("Q+F", {}, 20, 6, 0),
    ]:
        (each,) = layer_bytes(cell(method, model="7b", **more), spec("7b"), 1)
        assert each.kept == pytest.approx(whole * tokens + wide * s * f + square * a * s * s, rel=0.02), (method, more)


def test_flash_keeps_grouped_keys_and_values_as_they_are() -> None:
    model = spec("70b")
    flash, eager = (layer_bytes(cell(method, model="70b"), model, 1)[0].kept for method in ("F", "RS"))
    assert flash == pytest.approx((20 + 4 / 8) * 350 * 8192 + 8 * 350 * 28672, rel=0.01)
    assert eager == pytest.approx(24 * 350 * 8192 + 8 * 350 * 28672, rel=0.01)


def test_a_gpts_published_formula_is_another() -> None:
    """Korthikanti et al. keep 34 s b h + 5 a s^2 b of a GPT layer (MLP of 2 x 4h). Llama's gated MLP of the same size
    and its fp32 norms keep a third more per token, and it has no dropout masks, but fp32 softmax: 6 instead of 5."""
    ours = layer_bytes(cell("F", model="7b"), spec("7b"), 1)[0].kept / (350 * 4096)
    assert ours == pytest.approx(24 + 8 * 11008 / 4096, rel=0.01)
    assert ours > 1.3 * 34


# --- What must hold of any cell ---

cells = st.builds(
    lambda model, engine, method, gpus, seq_len, batch, accumulated: cell(
        method, model=model, engine=engine, gpus=gpus, seq_len=seq_len, micro_batch=batch, grad_accum=accumulated
    ),
    st.sampled_from(["7b", "13b", "70b", "llama-3-8b"]),
    st.sampled_from(["deepspeed", "fsdp2", "ddp"]),
    st.sampled_from(
        ["Naive", "Z1", "Z2", "Z3", "Z2+O", "Z3+O", "R+Z3", "F", "F+Z3", "RS", "L", "L+Z3", "QL+Z2", "Q", "PT"]
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([64, 350, 2048]),
    st.sampled_from([1, 2, 16]),
    st.sampled_from([1, 4]),
)


def bytes_of(base: Cell, **changed: object) -> int:
    return predict(msgspec.structs.replace(base, **changed), spec(base.model)).peak_bytes


@given(cells)
def test_terms_add_up_to_the_peak(each: Cell) -> None:
    prediction = predict(each, spec(each.model))
    assert sum(prediction.terms_bytes.values()) == prediction.peak_bytes
    assert prediction.peak_bytes == max(one.bytes for one in prediction.moments)
    for one in prediction.moments:
        names = [part.name for part in one.terms]
        assert len(names) == len(set(names)), one.name
        assert all(part.bytes >= 0 and part.formula for part in one.terms)


@given(cells)
def test_longer_and_more_sequences_never_need_less(each: Cell) -> None:
    assert bytes_of(each) <= bytes_of(each, seq_len=2 * each.seq_len, micro_batch=2 * (each.micro_batch or 1))
    assert bytes_of(each) <= bytes_of(each, seq_len=each.seq_len + 64)
    assert bytes_of(each) <= bytes_of(each, micro_batch=(each.micro_batch or 1) + 1)


@given(cells)
def test_accumulation_never_needs_less(each: Cell) -> None:
    assert bytes_of(each, grad_accum=1) <= bytes_of(each, grad_accum=4)


@given(cells)
def test_more_ranks_never_need_more(each: Cell) -> None:
    """From two: one rank of ZeRO 3 gathers nothing."""
    assert bytes_of(each, gpus=2) >= bytes_of(each, gpus=4) >= bytes_of(each, gpus=64)


@pytest.mark.parametrize("model", ["7b", "13b", "70b", "llama-3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_stages_need_ever_less(model: str, ranks: int, accumulated: int) -> None:
    more: dict[str, Any] = {"gpus": ranks, "grad_accum": accumulated}
    first, second, third = (peak_gb(method, model, **more) for method in ("Z1", "Z2", "Z3"))
    assert first >= second >= third
    assert peak_gb("Z2+O", model, **more) < second
    assert peak_gb("Z3+O", model, **more) < third


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_recomputation_and_flash_save_where_batches_are_large(engine: str) -> None:
    more: dict[str, Any] = {"gpus": 8, "micro_batch": 32, "engine": engine}
    plain, selective, full, flash = (peak_gb(method, **more) for method in ("Z3", "RS+Z3", "R+Z3", "F+Z3"))
    assert full < selective < plain
    assert full < flash < plain
    assert peak_gb("F+R+Z3", **more) <= full


def test_adapters_need_less_than_full_training_and_four_bits_less_yet() -> None:
    assert peak_gb("QL") < peak_gb("L") < peak_gb("Naive")
    assert peak_gb("PT") < peak_gb("L")


def test_tensor_and_pipeline_parallel_divide() -> None:
    alone = peak_gb("F", engine="megatron", gpus=1)
    assert peak_gb("F", engine="megatron", gpus=2, tp=2) == pytest.approx(alone / 2, rel=0.02)
    assert alone / 2 < peak_gb("F", engine="megatron", gpus=2, pp=2, grad_accum=4) < 0.55 * alone


def test_the_host_holds_what_is_offloaded() -> None:
    assert of("Z3").host_bytes == of("Z3", engine="fsdp2").host_bytes == 0
    for method in ("Z2+O", "Z3+O"):
        for ranks in (1, 4, 8):
            offloaded = of(method, gpus=ranks).host_bytes - ranks * HOST_PROCESS_BYTES
            assert 18 * N <= offloaded <= 25 * N  # pinned buffers are rounded up
    sharded = of("Z3+O", engine="fsdp2", gpus=4).host_bytes - 4 * HOST_PROCESS_BYTES
    # An MLP's weights are 172 MiB in fp32; a rank's quarter of 43 MiB is pinned in 64. All others are powers of two,
    # but the embeddings: 500 MiB, of which a quarter of 125 is pinned in 128.
    rounding = 2 * ((32 * 3 * 4 * (64 - 43) + 2 * 4 * (128 - 125)) << 20)
    assert sharded == 16 * N + rounding


# --- Decisions ---


def test_what_does_not_fit_says_why() -> None:
    too_much = fits(of("Naive", "70b"), 80 * GIB)
    assert too_much.verdict == "does not fit" and not too_much.ok
    assert "optimizer states" in too_much.reason and "the 79.2 GiB that CUDA has of 80.0" in too_much.reason
    assert fits(of("L"), 80 * GIB).verdict == "fits"


@given(st.sampled_from(["R+Z3", "F+Z3", "L", "Z3"]), st.sampled_from([40, 80, 141]), st.integers(1, 200))
def test_the_largest_micro_batch_is_on_the_edge(method: str, device_gb: int, at_most: int) -> None:
    asked = cell(method, model="7b", gpus=8, micro_batch=None)
    batch = largest_micro_batch(asked, spec("7b"), device_gb * GIB, at_most)
    assert math.log2(batch).is_integer() and 1 <= batch <= at_most
    twice = msgspec.structs.replace(asked, micro_batch=2 * batch)
    assert 2 * batch > at_most or not fits(predict(twice, spec("7b")), device_gb * GIB).ok


def test_a_batch_that_is_searched_cannot_be_predicted() -> None:
    with pytest.raises(ValueError, match="searched"):
        of("Z3", micro_batch=None)
