"""Every model of the catalog beside what transformers builds of the same config: parameters, and which layers have a
window. Needs torch and transformers, no memory to speak of: the models are built on the meta device.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.catalog import DATA, from_config
from training_probe.grid import cell
from training_probe.llama_shape import known
from training_probe.protocol import Trial

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

ENTRIES = {each["name"]: each["config"] for each in json.loads(DATA.read_bytes())}
# Beyond the catalog: what a family's config.json may say besides.
OTHERS: dict[str, dict[str, Any]] = {
    "biased": {**ENTRIES["llama-3.2-1b"], "attention_bias": True, "mlp_bias": True},
    "starcoder2": {
        "model_type": "starcoder2", "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 2048, "vocab_size": 1000, "max_position_embeddings": 4096,
        "sliding_window": 1024,
    },
    "qwen2-moe": {
        "model_type": "qwen2_moe", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 4096,
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 768,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 4096, "kv_lora_rank": 128,
        "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48, "n_routed_experts": 8,
        "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "first_k_dense_replace": 1,
        "topk_method": "greedy",
    },
    "qwen2-windows": {
        **ENTRIES["qwen2.5-0.5b"], "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20,
    },
    "gemma": {
        "model_type": "gemma", "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 1, "intermediate_size": 2048, "vocab_size": 1000, "max_position_embeddings": 4096,
    },
    "glm4-moe-normed": {**ENTRIES["glm-4.5-air"], "use_qk_norm": True},
}  # fmt: skip


@pytest.mark.parametrize("name", [*ENTRIES, *OTHERS])
def test_as_transformers_builds_it(name: str) -> None:
    config = (ENTRIES | OTHERS)[name]
    model_type = config["model_type"]
    fields = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    theirs = transformers.AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(theirs)
    ours = from_config(name, config)
    corrections = sum(kind.count * kind.mlp.experts for kind in ours.kinds if kind.mlp.router_bias)
    if model_type in ("gpt_oss",):
        corrections = 0  # a parameter there; of DeepSeek's and GLM's routers a buffer
    assert ours.parameters - corrections == sum(parameter.numel() for parameter in built.parameters())
    types = getattr(theirs, "layer_types", None)
    if types is not None:
        windowed = sum(kind.count for kind in ours.kinds if kind.attention.window is not None)
        assert windowed == len(types) - types.count("full_attention")


@pytest.mark.parametrize("name", [name for name in ENTRIES if known(name) is not None])
def test_what_the_engines_build_of_a_name_has_its_parameters(name: str) -> None:
    from training_probe.worker.model import construct

    shape = known(name)
    assert shape is not None
    trial = Trial(cell=cell("Naive", model=name), spec=shape)
    with torch.device("meta"):
        built = construct(trial)
    assert sum(parameter.numel() for parameter in built.parameters()) == shape.parameters
