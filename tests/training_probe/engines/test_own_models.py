"""A config.json of one's own, of any family that is described: every engine trains what transformers builds of it, from
the weights that go by their names, and reaches the loss of a plain loop over that model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backends.catalog import from_config
from tests.training_probe.engines import tiny
from training_probe import flops, grid
from training_probe.protocol import BETAS, CLIP_NORM, WEIGHT_DECAY, Trial, learning_rate

pytestmark = tiny.needs_engines

STEPS, SEQ_LEN, MICRO_BATCH = 3, 32, 2
WITHIN = 0.004  # of losses that fall by 0.04 to 0.2 a step
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1,
}  # fmt: skip
# Windows are shorter than the sequence, caps and scales such that a model without them has another loss.
GEMMA3 = {
    **SIZES, "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 32, "rope_theta": 10_000.0, "rope_local_base_freq": 100.0,
}  # fmt: skip
SEES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**SIZES, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3-moe": {**SIZES, "model_type": "qwen3_moe", "head_dim": 32, "mlp_only_layers": [0], **EXPERTS},
    "mistral": {**SIZES, "model_type": "mistral", "sliding_window": 8},
    "gemma": {**SIZES, "model_type": "gemma", "head_dim": 32},
    "gemma-2": {
        **SIZES, "model_type": "gemma2", "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 1,
        "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0,
    },
    "gemma-3": GEMMA3,
    "gemma-3 that sees": {
        "model_type": "gemma3", "text_config": GEMMA3,
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    },
    "qwen-2.5-vl": {
        **SIZES, "model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": SEES,
    },
    "qwen-3-vl": {
        "model_type": "qwen3_vl", "tie_word_embeddings": True,
        "text_config": {
            **SIZES, "model_type": "qwen3_vl_text", "head_dim": 32,
            "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        },
        "vision_config": SEES,
    },
    "phi-3": {**SIZES, "model_type": "phi3", "pad_token_id": 0},
    "glm-4": {**SIZES, "model_type": "glm4", "head_dim": 32, "pad_token_id": 0},
    "gpt-oss": {
        **SIZES, "model_type": "gpt_oss", "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 8, "quantization_config": {"quant_method": "mxfp4"},
    },
    "deepseek-v3": {**SIZES, **LATENT, **ROUTED, "model_type": "deepseek_v3"},
}  # fmt: skip

# Of text alone these are the families that their decoders come from.
OF_TEXT: dict[str, dict[str, Any]] = {
    "qwen-2.5-vl": {**SIZES, "model_type": "qwen2", "rope_theta": 1_000_000.0},
    "qwen-3-vl": {**SIZES, "model_type": "qwen3", "head_dim": 32, "rope_theta": 500_000.0, "tie_word_embeddings": True},
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    return json.loads(json.dumps(CONFIGS[name]))  # type: ignore[no-any-return]


def trial(name: str, engine: str, method: str, **more: Any) -> Trial:
    cell = tiny.cell(engine, method, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, **more)
    return Trial(cell=cell, config=config_of(name))


def losses(asked: Trial) -> list[float]:
    import torch

    from training_probe.worker import batches, engines, model

    device, linear = torch.device("cpu"), torch.nn.functional.linear
    found = []
    with model.attention_kernel(asked.cell):
        stepper = engines.build(asked, device)
        (batch,) = batches.batch(asked, 0, device, model.vocab_size(asked))
        for _ in range(STEPS):
            loss = stepper.forward(batch, True)
            stepper.backward(loss, True)
            stepper.step()
            found.append(float(loss))
    if asked.cell.engine == "deepspeed":
        torch.nn.functional.linear = linear  # which ZeRO 3 puts its own in the place of
    return found


def reference(torch: Any, name: str, *, masters: bool) -> list[float]:
    """A plain loop. masters: fp32 weights beside the bf16 ones, as ZeRO and FSDP2 keep them."""
    import transformers

    from training_probe.worker import batches, model

    config = transformers.AutoConfig.for_model(**OF_TEXT.get(name, config_of(name))).get_text_config()
    config.pad_token_id = None
    config.__dict__.pop("quantization_config", None)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    plain.train()
    own = list(plain.parameters())
    with torch.no_grad():
        for path, parameter in plain.named_parameters():
            parameter.copy_(model.draw(path, parameter.shape, 0, "cpu"))
    trained = [parameter.detach().float() for parameter in own] if masters else own
    adam = torch.optim.AdamW(
        trained, lr=learning_rate(grid.Method()), betas=BETAS, weight_decay=WEIGHT_DECAY
    )  # fmt: skip
    (batch,) = batches.batch(trial(name, "ddp", "Naive"), 0, torch.device("cpu"), config.vocab_size)
    found = []
    for _ in range(STEPS):
        loss = plain(**batch).loss
        loss.backward()
        if masters:
            for master, parameter in zip(trained, own, strict=True):
                master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        adam.step()
        with torch.no_grad():
            for master, parameter in zip(trained, own, strict=True):
                parameter.copy_(master)
                parameter.grad = None
        found.append(float(loss))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_every_engine_reaches_the_loss_of_a_plain_loop(alone: Any, name: str) -> None:
    plain = reference(alone, name, masters=False)
    with_masters = reference(alone, name, masters=True)
    assert plain[0] - plain[-1] > 0.04
    for engine, method in (("ddp", "Naive"), ("ddp", "RS")):
        assert losses(trial(name, engine, method)) == pytest.approx(plain, abs=WITHIN), (engine, method)
    for engine, method in (("deepspeed", "Z3"), ("fsdp2", "R+Z3")):
        assert losses(trial(name, engine, method)) == pytest.approx(with_masters, abs=WITHIN), (engine, method)


@pytest.mark.parametrize("targets", [("q_proj", "k_proj", "v_proj", "o_proj"), grid.LORA_TARGETS])
def test_adapters_of_a_mixture_learn_the_same_in_every_engine(alone: Any, targets: tuple[str, ...]) -> None:
    """On attention alone, and on experts as PEFT puts them there: as much as on one GPU that keeps all as it is."""
    expected = losses(trial("qwen3-moe", "ddp", "L", lora_targets=targets))
    assert expected[0] - expected[-1] > 0.01
    for engine, method in (("deepspeed", "L+Z2"), ("deepspeed", "L+Z3"), ("fsdp2", "L+Z3"), ("fsdp2", "L+R+Z3")):
        found = losses(trial("qwen3-moe", engine, method, lora_targets=targets))
        assert found == pytest.approx(expected, abs=WITHIN), (engine, method)


@pytest.mark.parametrize("method", ["L", "Q", "QL", "PT"])
@pytest.mark.parametrize("name", ["qwen3", "gemma-3", "phi-3", "glm-4", "qwen-2.5-vl"])
def test_what_trains_of_it_is_what_is_counted(alone: Any, name: str, method: str) -> None:
    from training_probe.worker import engines

    asked = trial(name, "ddp", method)
    counted = flops.weights(from_config(name, config_of(name)), asked.cell)
    assert engines.build(asked, alone.device("cpu")).parameters == (counted.total, counted.trainable)


def test_what_transformers_refuses_is_refused_before_any_launch_with_its_field(tmp_path: Path) -> None:
    wrong = {**CONFIGS["qwen3"], "hidden_act": "frobnicate"}
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    command = str(Path(sys.executable).with_name("training_probe"))
    where = ("--out", str(tmp_path / "out"), "--device", "cpu")
    ended = subprocess.run(
        (command, "sweep", "--model", str(tmp_path), "--method", "Z2", "--seq-len", "32", *where),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2, ended.stderr
    assert "hidden_act" in ended.stderr and "frobnicate" in ended.stderr and ended.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
