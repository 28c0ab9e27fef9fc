"""Runs on real servers whose predictions were committed before: what was predicted, and how far off it was.

    python benchmarks/frozen.py predict DIR     # before the runs; commit what it wrote (kept.py packs it)
    python benchmarks/frozen.py measure DIR     # beside a GPU and an installed vLLM or SGLang
    python benchmarks/frozen.py compare DIR     # the errors, as a table; `kept.py unpack frozen DIR` has those so far

Every load is one that nobody here had sent to a real server before. The models have the shape of those of their name
and random weights. A server plays all loads of its group, one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
_ALIKE = {
    "num_attention_heads": 32, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rope_theta": 1e6, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_QWEN3 = {
    "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128, "rms_norm_eps": 1e-6,
    "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
}  # fmt: skip
MODELS: dict[str, dict[str, object]] = {
    "mistral-7b-shape": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 32768,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "sliding_window": None, **_ALIKE,
    },
    "qwen3-8b-shape": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_key_value_heads": 8, **_QWEN3, **_ALIKE,
    },
    "qwen3-30b-a3b-shape": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48,
        "num_key_value_heads": 4, **_QWEN3, **_ALIKE,
    },
    "qwen3-32b-shape": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
        "num_hidden_layers": 64, "num_key_value_heads": 8, **_ALIKE, **_QWEN3, "num_attention_heads": 64,
    },
    "llama-2-7b-shape": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, **_ALIKE,
    },
    "mixtral-8x7b-shape": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096,
        "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "sliding_window": None, **_ALIKE,
    },
}  # fmt: skip
MAX_MODEL_LEN, MAX_RUNNING = 8192, 1024
MEMORY_RATIOS = {"vllm": 0.92, "sglang": 0.9}  # vLLM 0.25's own default; of SGLang as loadgen starts it
MIXED = "--input-tokens lognormal:400:0.8:16:4000 --output-tokens lognormal:150:0.7:8:800 --arrival poisson:12"
LENGTHS = "--input-tokens lognormal:350:0.9:16:3500 --output-tokens lognormal:140:0.7:8:700"
MIXTURE = {
    "poisson4": f"{LENGTHS} --arrival poisson:4 --requests 90",
    "closed16": "--input-tokens uniform:128:768 --output-tokens 100 --concurrency 16 --requests 128",
    "closed40": "--input-tokens uniform:128:1024 --output-tokens uniform:64:160 --concurrency 40 --requests 280",
    "burst": "--input-tokens 512 --output-tokens 128 --requests 300",
}
HOST = {  # few requests at once, a closed loop and a burst, to which a profile of a host is fitted
    "gamma9_cv3": "--input-tokens 700 --output-tokens 150 --arrival gamma:9:3 --requests 130",
    "closed48": "--input-tokens uniform:128:1280 --output-tokens uniform:48:160 --concurrency 48 --requests 380",
    "burst": "--input-tokens 512 --output-tokens 128 --requests 300",
}
QWEN3_32B = {
    "lognormal_poisson5": f"{LENGTHS} --arrival poisson:5 --requests 75",
    "closed32_mixed": "--input-tokens uniform:256:1024 --output-tokens uniform:64:192 --concurrency 32 --requests 160",
    "burst": "--input-tokens 512 --output-tokens 128 --requests 200",
}
BESIDE = {  # what two kinds of servers play on one host
    "burst1000": "--input-tokens 512 --output-tokens 256 --requests 1000",
    "lognormal_poisson12": f"{LENGTHS} --arrival poisson:12 --requests 160",
    "lognormal_poisson20": f"{LENGTHS} --arrival poisson:20 --requests 260",
    "gamma10_cv2": "--input-tokens 600 --output-tokens 140 --arrival gamma:10:2 --requests 130",
    "closed8_short": "--input-tokens uniform:64:512 --output-tokens 96 --concurrency 8 --requests 96",
    "closed24_mixed": "--input-tokens uniform:128:1024 --output-tokens uniform:64:192 --concurrency 24 --requests 200",
    "closed96_mixed": "--input-tokens uniform:128:1024 --output-tokens uniform:64:192 --concurrency 96 --requests 400",
    "prompts3000_poisson3": "--input-tokens 3000 --output-tokens 100 --arrival poisson:3 --requests 40",
}
BESIDE_CACHING = {
    "hot8": "--prefix 8:1408 --input-tokens 1664 --output-tokens 110 --arrival poisson:10 --requests 160",
    "groups200": "--prefix 200:960 --input-tokens 1248 --output-tokens 100 --arrival poisson:11 --requests 180",
    "sessions": "--sessions 50 --turns uniform:2:5 --think-time 0.5 --input-tokens 280 --output-tokens 90 "
    "--arrival poisson:4",
}
SETTLING = f"{MIXED} --requests 60 --seed 77"
# with steps as long as steps may be, and of many rows
SETTLED = (SETTLING, "--input-tokens 512 --output-tokens 16 --requests 300 --seed 78")


@dataclass(frozen=True)
class Group:
    """Loads that one server plays. options: of the server; loads: the options of `loadgen run`, each with its name;
    gpu: the one that it is predicted for, and measured on; tp: how many of them share the model. settling: loads that
    are played before, unmeasured: kernels compile at their first use. fitted: loads that are measured then, before the
    others, for a profile of this very server; nobody predicts them. server: its kind."""

    options: str
    loads: dict[str, str]
    model: str = "mistral-7b-shape"
    gpu: str = "h200"
    tp: int = 1
    settling: tuple[str, ...] = (SETTLING,)
    fitted: dict[str, str] = field(default_factory=dict)
    server: str = "vllm"

    @property
    def memory_ratio(self) -> float:
        return MEMORY_RATIOS[self.server]

    @property
    def caching(self) -> bool:
        return "--prefix-caching on" in self.options


def seeded_from(seed: int, loads: dict[str, str], name: str) -> dict[str, str]:
    """The loads, each with a seed of its own from `seed` on. name: what they are called, with {} for their keys."""
    numbered = enumerate(loads.items(), seed)
    return {name.format(load): f"{options} --seed {number}" for number, (load, options) in numbered}


GROUPS = {
    # The first round. Its runs have been looked at since, so they are not held out any more.
    "bf16": Group("", {
        "lognormal_poisson12": f"{MIXED} --requests 300",
        "gamma12_cv3": "--input-tokens 512 --output-tokens 128 --arrival gamma:12:3 --requests 250",
        "closed32_mixed": "--input-tokens uniform:256:1024 --output-tokens 128 --concurrency 32 --requests 256",
        "prompts4096_poisson3": "--input-tokens 4096 --output-tokens 64 --arrival poisson:3 --requests 60",
        "prompts1024_burst": "--input-tokens 1024 --output-tokens 64 --requests 300",
    }),
    "prefixes": Group("--prefix-caching on", {
        "prefix8": "--prefix 8:1024 --input-tokens 1280 --output-tokens 128 --arrival poisson:12 --requests 300",
        "prefix200": "--prefix 200:1024 --input-tokens 1280 --output-tokens 128 --arrival poisson:12 --requests 300",
        "sessions": "--sessions 60 --turns 4 --think-time 1 --input-tokens 256 --output-tokens 64 --arrival poisson:4",
    }),
    "fp8": Group("--quantization fp8", {
        "fp8_lognormal_poisson12": f"{MIXED} --requests 300",
        "fp8_burst": "--input-tokens 512 --output-tokens 128 --requests 500",
    }),
    # The second round, likewise.
    "bf16_2": Group("", {
        "lognormal_poisson20": "--input-tokens lognormal:300:1:16:3000 --output-tokens lognormal:200:0.8:8:1000 "
        "--arrival poisson:20 --requests 400 --seed 21",
        "gamma8_cv4": "--input-tokens 700 --output-tokens 200 --arrival gamma:8:4 --requests 200 --seed 22",
        "closed8_short": "--input-tokens uniform:64:512 --output-tokens 96 --concurrency 8 --requests 96 --seed 23",
        "closed96_mixed": "--input-tokens uniform:128:2048 --output-tokens uniform:64:256 --concurrency 96 "
        "--requests 480 --seed 24",
        "prompts6000_poisson1.5": "--input-tokens 6000 --output-tokens 100 --arrival poisson:1.5 --requests 40 "
        "--seed 25",
        "burst_out300": "--input-tokens 256 --output-tokens 300 --requests 400 --seed 26",
    }),
    "prefixes_2": Group("--prefix-caching on", {
        "hot8": "--prefix 8:2048 --input-tokens 2304 --output-tokens 100 --arrival poisson:8 --requests 200 --seed 31",
        "groups200": "--prefix 200:768 --input-tokens 1024 --output-tokens 100 --arrival poisson:16 --requests 320 "
        "--seed 32",
        "sessions_uniform": "--sessions 70 --turns uniform:2:6 --think-time 0.5 --input-tokens 300 --output-tokens 80 "
        "--arrival poisson:4 --seed 33",
    }),
    "fp8_2": Group("--quantization fp8", {
        "fp8_closed32": "--input-tokens uniform:256:1024 --output-tokens 128 --concurrency 32 --requests 256 --seed 41",
        "fp8_gamma16_cv2": "--input-tokens 600 --output-tokens 150 --arrival gamma:16:2 --requests 240 --seed 42",
    }),
    "qwen3_8b": Group("", {
        "qwen3_8b_lognormal_poisson10": f"{MIXED.replace('12', '10')} --requests 200 --seed 51",
        "qwen3_8b_closed16": "--input-tokens uniform:256:1024 --output-tokens 128 --concurrency 16 --requests 128 "
        "--seed 52",
        "qwen3_8b_burst": "--input-tokens 512 --output-tokens 128 --requests 300 --seed 53",
    }, "qwen3-8b-shape"),
    "qwen3_30b_a3b": Group("", {
        "qwen3_30b_a3b_poisson8": f"{MIXED.replace('12', '8')} --requests 160 --seed 61",
        "qwen3_30b_a3b_closed32": "--input-tokens uniform:256:1024 --output-tokens 128 --concurrency 32 --requests 192 "
        "--seed 62",
        "qwen3_30b_a3b_burst": "--input-tokens 512 --output-tokens 128 --requests 300 --seed 63",
    }, "qwen3-30b-a3b-shape"),
    # The third round.
    "bf16_3": Group("", {
        "lognormal_poisson6": f"{LENGTHS} --arrival poisson:6 --requests 120 --seed 101",
        "lognormal_poisson12_b": f"{LENGTHS} --arrival poisson:12 --requests 240 --seed 102",
        "lognormal_poisson18": f"{LENGTHS} --arrival poisson:18 --requests 320 --seed 103",
        "gamma10_cv3": "--input-tokens 900 --output-tokens 160 --arrival gamma:10:3 --requests 180 --seed 104",
        "closed16_mixed": "--input-tokens uniform:128:1024 --output-tokens 100 --concurrency 16 --requests 160 "
        "--seed 105",
        "closed64_mixed": "--input-tokens uniform:128:1536 --output-tokens uniform:48:192 --concurrency 64 "
        "--requests 320 --seed 106",
        "prompts1024_poisson8": "--input-tokens 1024 --output-tokens 120 --arrival poisson:8 --requests 120 --seed 107",
        "prompts4096_poisson2": "--input-tokens 4096 --output-tokens 90 --arrival poisson:2 --requests 32 --seed 108",
    }),
    "prefixes_3": Group("--prefix-caching on", {
        "hot8_b": "--prefix 8:1536 --input-tokens 1792 --output-tokens 110 --arrival poisson:10 --requests 180 "
        "--seed 111",
        "groups200_b": "--prefix 200:1024 --input-tokens 1344 --output-tokens 90 --arrival poisson:11 --requests 200 "
        "--seed 112",
    }),
    "fp8_3": Group("--quantization fp8", {
        "fp8_lognormal_poisson14": f"{LENGTHS} --arrival poisson:14 --requests 250 --seed 121",
        "fp8_closed16": "--input-tokens uniform:128:1024 --output-tokens 128 --concurrency 16 --requests 160 "
        "--seed 122",
    }),
    "qwen3_30b_a3b_2": Group("", {
        "qwen3_30b_a3b_poisson5": f"{LENGTHS} --arrival poisson:5 --requests 100 --seed 131",
        "qwen3_30b_a3b_closed16": "--input-tokens uniform:128:768 --output-tokens 100 --concurrency 16 --requests 96 "
        "--seed 132",
    }, "qwen3-30b-a3b-shape"),
    # The third round on another GPU.
    "h100": Group("", {
        "h100_lognormal_poisson10": f"{LENGTHS} --arrival poisson:10 --requests 180 --seed 141",
        "h100_closed32": "--input-tokens uniform:128:1024 --output-tokens 100 --concurrency 32 --requests 224 "
        "--seed 142",
        "h100_prompts2048_poisson4": "--input-tokens 2048 --output-tokens 100 --arrival poisson:4 --requests 60 "
        "--seed 143",
    }, gpu="h100"),
    # The fourth round.
    "bf16_4": Group("", {
        "lognormal_poisson9": f"{LENGTHS} --arrival poisson:9 --requests 160 --seed 201",
        "lognormal_poisson15": f"{LENGTHS} --arrival poisson:15 --requests 270 --seed 202",
        "gamma11_cv2.5": "--input-tokens 800 --output-tokens 150 --arrival gamma:11:2.5 --requests 190 --seed 203",
        "closed24_mixed": "--input-tokens uniform:128:1024 --output-tokens uniform:64:192 --concurrency 24 "
        "--requests 420 --seed 204",
        "closed48_mixed": "--input-tokens uniform:128:1280 --output-tokens uniform:48:160 --concurrency 48 "
        "--requests 560 --seed 205",
        "prompts2048_poisson4": "--input-tokens 2048 --output-tokens 100 --arrival poisson:4 --requests 64 --seed 206",
    }),
    "prefixes_4": Group("--prefix-caching on", {
        "hot8_c": "--prefix 8:1280 --input-tokens 1536 --output-tokens 120 --arrival poisson:9 --requests 160 "
        "--seed 211",
        "groups200_c": "--prefix 200:896 --input-tokens 1216 --output-tokens 100 --arrival poisson:12 --requests 210 "
        "--seed 212",
    }),
    "fp8_4": Group("--quantization fp8", {
        "fp8_lognormal_poisson13": f"{LENGTHS} --arrival poisson:13 --requests 230 --seed 221",
        "fp8_closed24": "--input-tokens uniform:128:1024 --output-tokens uniform:64:192 --concurrency 24 "
        "--requests 520 --seed 222",
    }),
    # The fifth round: a mixture on two GPUs.
    "mixtral_8x7b": Group("", seeded_from(231, MIXTURE, "mixtral_8x7b_{}"), "mixtral-8x7b-shape", tp=2),
    # The sixth: the fifth's loads drawn anew, after loads of the same kind and size have been played.
    "mixtral_8x7b_2": Group("", seeded_from(241, MIXTURE, "mixtral_8x7b_{}_b"), "mixtral-8x7b-shape", tp=2,
                            settling=tuple(f"{load} --seed 245" for load in MIXTURE.values())),
    # The eighth, on an H100: its first prefixes, and its first whole steps in fp8.
    "h100_2": Group("", {
        "h100_gamma9_cv3": "--input-tokens 700 --output-tokens 150 --arrival gamma:9:3 --requests 130 --seed 251",
        "h100_closed48_mixed": "--input-tokens uniform:128:1280 --output-tokens uniform:48:160 --concurrency 48 "
        "--requests 380 --seed 252",
        "h100_burst": "--input-tokens 512 --output-tokens 128 --requests 300 --seed 253",
        "h100_prompts5000_poisson1.5": "--input-tokens 5000 --output-tokens 90 --arrival poisson:1.5 --requests 24 "
        "--seed 254",
    }, gpu="h100"),
    "h100_prefixes": Group("--prefix-caching on", {
        "h100_hot8": "--prefix 8:1280 --input-tokens 1536 --output-tokens 120 --arrival poisson:9 --requests 130 "
        "--seed 261",
        "h100_groups200": "--prefix 200:896 --input-tokens 1216 --output-tokens 100 --arrival poisson:11 "
        "--requests 160 --seed 262",
    }, gpu="h100"),
    "h100_fp8": Group("--quantization fp8", {
        "h100_fp8_lognormal_poisson12": f"{LENGTHS} --arrival poisson:12 --requests 170 --seed 271",
        "h100_fp8_closed24": "--input-tokens uniform:128:1024 --output-tokens uniform:64:192 --concurrency 24 "
        "--requests 320 --seed 272",
        "h100_fp8_burst": "--input-tokens 512 --output-tokens 128 --requests 300 --seed 273",
    }, gpu="h100"),
    # The ninth: a profile is fitted to the loads of `h100_host`, with which the others of that host are predicted.
    "h100_host": Group("", seeded_from(301, HOST, "h100_host_{}"), gpu="h100"),
    "h100_3": Group("", {
        "h100_lognormal_poisson13": f"{LENGTHS} --arrival poisson:13 --requests 170 --seed 311",
        "h100_closed24_mixed": "--input-tokens uniform:128:1024 --output-tokens uniform:64:192 --concurrency 24 "
        "--requests 280 --seed 312",
        "h100_prompts3000_poisson3": "--input-tokens 3000 --output-tokens 80 --arrival poisson:3 --requests 40 "
        "--seed 313",
        "h100_burst_out300": "--input-tokens 256 --output-tokens 300 --requests 200 --seed 314",
    }, gpu="h100"),
    "h100_prefixes_2": Group("--prefix-caching on", {
        "h100_hot8_b": "--prefix 8:1536 --input-tokens 1792 --output-tokens 110 --arrival poisson:10 --requests 140 "
        "--seed 321",
        "h100_groups200_b": "--prefix 200:1024 --input-tokens 1344 --output-tokens 90 --arrival poisson:10 "
        "--requests 140 --seed 322",
    }, gpu="h100"),
    "h100_fp8_2": Group("--quantization fp8", {
        "h100_fp8_gamma12_cv2": "--input-tokens 600 --output-tokens 150 --arrival gamma:12:2 --requests 160 --seed 331",
        "h100_fp8_closed32": "--input-tokens uniform:256:1024 --output-tokens 128 --concurrency 32 --requests 320 "
        "--seed 332",
    }, gpu="h100"),
    # The tenth: attention as measured on 2026-11-28; the first KV cache in fp8, the first 64 heads over 8 of keys.
    "h100_fp8_cache": Group("--quantization fp8 --kv-cache-dtype fp8", {
        "h100_fp8_cache_lognormal_poisson14": f"{LENGTHS} --arrival poisson:14 --requests 180 --seed 401",
        "h100_fp8_cache_closed64": "--input-tokens uniform:128:1536 --output-tokens uniform:64:192 --concurrency 64 "
        "--requests 400 --seed 402",
        "h100_fp8_cache_prompts3000_poisson3": "--input-tokens 3000 --output-tokens 100 --arrival poisson:3 "
        "--requests 40 --seed 403",
    }, gpu="h100"),
    "h100_4": Group("", {
        "h100_closed32_mixed": "--input-tokens uniform:256:1024 --output-tokens uniform:64:192 --concurrency 32 "
        "--requests 280 --seed 411",
        "h100_gamma8_cv3": "--input-tokens 800 --output-tokens 140 --arrival gamma:8:3 --requests 110 --seed 412",
    }, gpu="h100"),
    "qwen3_32b_fp8": Group(
        "--quantization fp8", seeded_from(421, QWEN3_32B, "qwen3_32b_fp8_{}"), model="qwen3-32b-shape",
    ),
    "h100_qwen3_32b_fp8": Group(
        "--quantization fp8", seeded_from(461, QWEN3_32B, "h100_qwen3_32b_fp8_{}"), model="qwen3-32b-shape", gpu="h100",
        settling=SETTLED,
    ),
    "fp8_cache": Group("--quantization fp8 --kv-cache-dtype fp8", {
        "fp8_cache_gamma14_cv2": "--input-tokens 700 --output-tokens 150 --arrival gamma:14:2 --requests 190 "
        "--seed 431",
        "fp8_cache_closed96_mixed": "--input-tokens uniform:128:2048 --output-tokens uniform:64:256 --concurrency 96 "
        "--requests 480 --seed 432",
    }),
    # The eleventh: products in fp8 that wait for tiles, and servers that have run steps of every size. To `fitted` a
    # profile of the very server was fitted afterwards, with which the others were predicted too.
    "h100_5": Group("", {
        "h100_closed40_mixed": "--input-tokens uniform:256:1024 --output-tokens uniform:64:192 --concurrency 40 "
        "--requests 300 --seed 471",
        "h100_burst_b": "--input-tokens 600 --output-tokens 100 --requests 250 --seed 472",
        "h100_lognormal_poisson11": f"{LENGTHS} --arrival poisson:11 --requests 150 --seed 473",
        "h100_gamma10_cv2": "--input-tokens 600 --output-tokens 140 --arrival gamma:10:2 --requests 130 --seed 474",
        "h100_closed20_mixed": "--input-tokens uniform:128:1024 --output-tokens uniform:64:192 --concurrency 20 "
        "--requests 240 --seed 475",
        "h100_prompts4000_poisson2": "--input-tokens 4000 --output-tokens 90 --arrival poisson:2 --requests 30 "
        "--seed 476",
    }, gpu="h100", settling=SETTLED, fitted=seeded_from(501, HOST, "h100_5_fitted_{}")),
    "h100_fp8_3": Group("--quantization fp8", {
        "h100_fp8_prompts1100_poisson6": "--input-tokens 1100 --output-tokens 100 --arrival poisson:6 --requests 80 "
        "--seed 481",
        "h100_fp8_closed40_mixed": "--input-tokens uniform:256:1024 --output-tokens uniform:64:192 --concurrency 40 "
        "--requests 400 --seed 482",
        "h100_fp8_lognormal_poisson13": f"{LENGTHS} --arrival poisson:13 --requests 170 --seed 483",
    }, gpu="h100", settling=SETTLED, fitted=seeded_from(511, HOST, "h100_fp8_3_fitted_{}")),
    # The twelfth: launches as long as 29 servers took in the mean, and as unlike each other.
    "bf16_5": Group("", {
        "lognormal_poisson13": f"{LENGTHS} --arrival poisson:13 --requests 200 --seed 521",
        "gamma12_cv2": "--input-tokens 700 --output-tokens 150 --arrival gamma:12:2 --requests 170 --seed 522",
        "closed40_mixed": "--input-tokens uniform:256:1024 --output-tokens uniform:64:192 --concurrency 40 "
        "--requests 340 --seed 523",
        "closed20_mixed": "--input-tokens uniform:128:1024 --output-tokens uniform:64:192 --concurrency 20 "
        "--requests 280 --seed 524",
        "prompts3000_poisson3": "--input-tokens 3000 --output-tokens 90 --arrival poisson:3 --requests 42 --seed 525",
        "burst_in600": "--input-tokens 600 --output-tokens 100 --requests 300 --seed 526",
    }, settling=SETTLED, fitted=seeded_from(531, HOST, "bf16_5_fitted_{}")),
    "h100_6": Group("", {
        "h100_lognormal_poisson12": f"{LENGTHS} --arrival poisson:12 --requests 160 --seed 541",
        "h100_gamma9_cv2.5": "--input-tokens 750 --output-tokens 140 --arrival gamma:9:2.5 --requests 120 --seed 542",
        "h100_closed36_mixed": "--input-tokens uniform:256:1024 --output-tokens uniform:64:192 --concurrency 36 "
        "--requests 280 --seed 543",
        "h100_closed16_mixed": "--input-tokens uniform:128:1024 --output-tokens uniform:64:192 --concurrency 16 "
        "--requests 200 --seed 544",
        "h100_prompts2500_poisson4": "--input-tokens 2500 --output-tokens 90 --arrival poisson:4 --requests 48 "
        "--seed 545",
        "h100_burst_in400": "--input-tokens 400 --output-tokens 120 --requests 300 --seed 546",
    }, gpu="h100", settling=SETTLED, fitted=seeded_from(551, HOST, "h100_6_fitted_{}")),
    # The thirteenth: a front end as slow as servers' were in the mean, an H100 without boost, an H200 that saves less.
    "h100_7": Group("", {
        "h100_lognormal_poisson9": f"{LENGTHS} --arrival poisson:9 --requests 130 --seed 561",
        "h100_gamma11_cv2": "--input-tokens 600 --output-tokens 130 --arrival gamma:11:2 --requests 150 --seed 562",
        "h100_closed28_mixed": "--input-tokens uniform:256:1536 --output-tokens uniform:64:192 --concurrency 28 "
        "--requests 230 --seed 563",
        "h100_closed56_mixed": "--input-tokens uniform:128:768 --output-tokens uniform:64:256 --concurrency 56 "
        "--requests 340 --seed 564",
        "h100_prompts3500_poisson2.5": "--input-tokens 3500 --output-tokens 80 --arrival poisson:2.5 --requests 36 "
        "--seed 565",
        "h100_burst_in200": "--input-tokens 200 --output-tokens 150 --requests 350 --seed 566",
    }, gpu="h100", settling=SETTLED),
    "h100_fp8_4": Group("--quantization fp8", {
        "h100_fp8_lognormal_poisson11": f"{LENGTHS} --arrival poisson:11 --requests 150 --seed 571",
        "h100_fp8_closed28_mixed": "--input-tokens uniform:256:1024 --output-tokens uniform:64:192 --concurrency 28 "
        "--requests 320 --seed 572",
        "h100_fp8_gamma10_cv2": "--input-tokens 800 --output-tokens 120 --arrival gamma:10:2 --requests 130 --seed 573",
    }, gpu="h100", settling=SETTLED),
    "bf16_6": Group("", {
        "lognormal_poisson10": f"{LENGTHS} --arrival poisson:10 --requests 150 --seed 581",
        "gamma9_cv2.5": "--input-tokens 600 --output-tokens 150 --arrival gamma:9:2.5 --requests 130 --seed 582",
        "closed28_mixed": "--input-tokens uniform:256:1536 --output-tokens uniform:64:192 --concurrency 28 "
        "--requests 270 --seed 583",
        "closed56_mixed": "--input-tokens uniform:128:768 --output-tokens uniform:64:256 --concurrency 56 "
        "--requests 400 --seed 584",
        "prompts5000_poisson2": "--input-tokens 5000 --output-tokens 80 --arrival poisson:2 --requests 30 --seed 585",
        "burst_in300": "--input-tokens 300 --output-tokens 140 --requests 350 --seed 586",
    }, settling=SETTLED),
    "fp8_5": Group("--quantization fp8", {
        "fp8_lognormal_poisson11": f"{LENGTHS} --arrival poisson:11 --requests 150 --seed 591",
        "fp8_closed28_mixed": "--input-tokens uniform:256:1024 --output-tokens uniform:64:192 --concurrency 28 "
        "--requests 340 --seed 592",
        "fp8_gamma12_cv2": "--input-tokens 800 --output-tokens 120 --arrival gamma:12:2 --requests 150 --seed 593",
    }, settling=SETTLED),
    # The fourteenth: whether a KV cache in fp8 makes launches longer, as the tenth's two servers seemed to say; and a
    # mixture of Qwen3's whose kernels have all been compiled.
    "fp8_cache_2": Group("--quantization fp8 --kv-cache-dtype fp8", {
        "fp8_cache_lognormal_poisson12": f"{LENGTHS} --arrival poisson:12 --requests 160 --seed 601",
        "fp8_cache_closed40_mixed": "--input-tokens uniform:256:1024 --output-tokens uniform:64:192 --concurrency 40 "
        "--requests 360 --seed 602",
        "fp8_cache_gamma10_cv2": "--input-tokens 800 --output-tokens 120 --arrival gamma:10:2 --requests 130 "
        "--seed 603",
        "fp8_cache_prompts3000_poisson3": "--input-tokens 3000 --output-tokens 100 --arrival poisson:3 --requests 40 "
        "--seed 604",
    }, settling=SETTLED),
    "cache": Group("--kv-cache-dtype fp8", {
        "cache_lognormal_poisson11": f"{LENGTHS} --arrival poisson:11 --requests 150 --seed 611",
        "cache_closed32_mixed": "--input-tokens uniform:256:1024 --output-tokens uniform:64:192 --concurrency 32 "
        "--requests 280 --seed 612",
        "cache_gamma10_cv2": "--input-tokens 600 --output-tokens 140 --arrival gamma:10:2 --requests 130 --seed 613",
        "cache_prompts4000_poisson2": "--input-tokens 4000 --output-tokens 90 --arrival poisson:2 --requests 30 "
        "--seed 614",
    }, settling=SETTLED),
    "qwen3_30b_a3b_3": Group("", {
        "qwen3_30b_a3b_poisson6": f"{LENGTHS} --arrival poisson:6 --requests 100 --seed 621",
        "qwen3_30b_a3b_closed24": "--input-tokens uniform:128:768 --output-tokens uniform:64:160 --concurrency 24 "
        "--requests 160 --seed 622",
        "qwen3_30b_a3b_gamma5_cv2": "--input-tokens 600 --output-tokens 100 --arrival gamma:5:2 --requests 70 "
        "--seed 623",
    }, "qwen3-30b-a3b-shape", settling=SETTLED),
    # Prefixes again, as the fourth round and the ninth had them, on a server that has run steps of every size.
    "prefixes_5": Group("--prefix-caching on", {
        "hot8_d": "--prefix 8:1408 --input-tokens 1664 --output-tokens 110 --arrival poisson:10 --requests 160 "
        "--seed 631",
        "groups200_d": "--prefix 200:960 --input-tokens 1248 --output-tokens 100 --arrival poisson:11 --requests 180 "
        "--seed 632",
        "sessions_b": "--sessions 50 --turns uniform:2:5 --think-time 0.5 --input-tokens 280 --output-tokens 90 "
        "--arrival poisson:4 --seed 633",
    }, settling=SETTLED),
    # The fifteenth: SGLang, and vLLM on the same host with the same loads.
    "sglang": Group("", seeded_from(701, BESIDE, "sglang_{}"), settling=SETTLED, server="sglang"),
    "sglang_caching": Group("--prefix-caching on", seeded_from(721, BESIDE_CACHING, "sglang_{}"), settling=SETTLED,
                            server="sglang"),
    "beside_sglang": Group("", seeded_from(701, BESIDE, "beside_sglang_{}"), settling=SETTLED),
    "beside_sglang_caching": Group("--prefix-caching on", seeded_from(721, BESIDE_CACHING, "beside_sglang_{}"),
                                   settling=SETTLED),
    # What the profile of the H100's host is fitted to in the tenth.
    "h100_host_2": Group("", seeded_from(441, HOST, "h100_host_2_{}"), gpu="h100"),
}  # fmt: skip
FP8 = ("--quantization fp8", "--kv-cache-dtype fp8")  # options that the server has too
KEEP_ALIVE = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300", "SGLANG_TIMEOUT_KEEP_ALIVE": "300"}
METRICS = ("ttft_ms", "tpot_ms", "e2el_ms")


def loadgen(*words: str) -> None:
    command = [sys.executable, "-c", "from loadgen.cli import main; main()", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 4):
        sys.exit(f"loadgen {' '.join(words)} ended with {done.returncode}")


def model_in(directory: Path, name: str) -> Path:
    """The model's directory, with a tokenizer of its size."""
    from tokenizers import Tokenizer, models

    model = directory / name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODELS[name], indent=1))
    words = {f"w{index}": index for index in range(vocabulary(name))}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(model / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2"}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return model


def vocabulary(name: str) -> int:
    size = MODELS[name]["vocab_size"]
    assert isinstance(size, int)
    return size


def seeded(load: str) -> list[str]:
    """The load's options, with a seed and a warm-up."""
    words = [*load.split(), "--warmup", "8"]
    return words if "--seed" in words else [*words, "--seed", "1"]


def predict(out: Path, groups: list[str], scratch: Path, profile: Path | None) -> None:
    fitted = [] if profile is None else ["--profile", os.path.relpath(profile, ROOT)]
    for group in map(GROUPS.__getitem__, groups):
        model = model_in(scratch, group.model)
        for name, load in group.loads.items():
            loadgen(
                "predict", "--backend", group.server, "--model", str(model), "--gpu", group.gpu,
                "--gpus", str(group.tp), "--tp", str(group.tp), "--dtype", "bfloat16",
                "--max-model-len", str(MAX_MODEL_LEN), "--max-running", str(MAX_RUNNING),
                "--memory-ratio", str(group.memory_ratio), *group.options.split(), *seeded(load), *fitted,
                "--out", os.path.relpath(out / name, ROOT),
            )  # fmt: skip


@contextlib.contextmanager
def vllm(model: Path, group: Group, log: Path) -> Iterator[str]:
    """A server; its URL."""
    caching = "--enable-prefix-caching" if group.caching else "--no-enable-prefix-caching"
    arguments = [
        "--model", str(model), "--served-model-name", model.name, "--load-format", "dummy",
        "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_RUNNING), caching,
        "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
        "--tensor-parallel-size", str(group.tp), *(each for option in FP8 if option in group.options
                                                   for each in option.split()),
    ]  # fmt: skip
    with serving("vllm.entrypoints.openai.api_server", arguments, log, "VLLM_PATH") as url:
        yield url


@contextlib.contextmanager
def sglang(model: Path, group: Group, log: Path) -> Iterator[str]:
    """Without what a host that reaches no registry may lack: grammars, FlashInfer's sampling."""
    arguments = [
        "--model-path", str(model), "--served-model-name", model.name, "--load-format", "dummy",
        "--dtype", "bfloat16", "--context-length", str(MAX_MODEL_LEN), "--max-running-requests", str(MAX_RUNNING),
        "--mem-fraction-static", str(group.memory_ratio), "--tp-size", str(group.tp), "--enable-metrics",
        "--enable-cache-report", "--sampling-backend", "pytorch", "--grammar-backend", "none",
        "--sampling-defaults", "openai", "--random-seed", "1", *([] if group.caching else ["--disable-radix-cache"]),
    ]  # fmt: skip
    with serving("sglang.launch_server", arguments, log, "SGLANG_PATH", "/server_info") as url:
        yield url


@contextlib.contextmanager
def serving(module: str, arguments: list[str], log: Path, path: str, ready: str = "/health") -> Iterator[str]:
    """A server that is ready; its URL. path: the variable with the server's own PYTHONPATH, where the server is not on
    the path of every program. ready: its route that answers then."""
    paths = os.environ.get(path, "")
    url = "http://127.0.0.1:8766"
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}{ready}", timeout=2):
        raise RuntimeError(f"another server answers at {url}; end it first")
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments, "--host", "127.0.0.1", "--port", "8766"],
        env=os.environ | ({"PYTHONPATH": paths} if paths else {}) | KEEP_ALIVE,
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"{module} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}{ready}", timeout=2):
                break
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):  # what it has left behind would hold the GPU's memory
            os.killpg(process.pid, signal.SIGKILL)


SERVERS = {"vllm": vllm, "sglang": sglang}


def check_loadgen() -> None:
    """Raises where loadgen cannot be run here: before a server has started, which takes minutes."""
    import backends

    import_module("loadgen.cli")
    backends.get("sglang")


def measure(out: Path, groups: list[str], scratch: Path) -> None:
    check_loadgen()
    for group, of in ((name, GROUPS[name]) for name in groups):
        model = model_in(scratch, of.model)
        target = ["run", "--backend", of.server, "--no-calibrate", "--vocab-size", str(vocabulary(of.model)), "--url"]
        began = time.monotonic()
        try:
            with SERVERS[of.server](model, of, out / f"{group}.log") as url:
                print(f"{group}: ready after {time.monotonic() - began:.0f} s", flush=True)
                for number, load in enumerate(of.settling):  # prompts that no load has
                    unmeasured = str(scratch / f"settling-{group}-{number}")
                    loadgen(*target, url, *seeded(load), "--no-server-metrics", "--out", unmeasured)
                for name, load in (of.fitted | of.loads).items():
                    at = time.monotonic()
                    loadgen(*target, url, *seeded(load), "--out", str(out / name))
                    print(f"{name}: {time.monotonic() - at:.0f} s", flush=True)
        except (RuntimeError, SystemExit) as error:
            print(f"{group}: {error}", flush=True)


def compare(frozen: Path, measured: Path, groups: list[str]) -> None:
    print("| load | requests | makespan s, predicted | measured | off % |" + "".join(f" {m} off % |" for m in METRICS))
    print("|---|---:|---:|---:|---:|" + "---:|" * len(METRICS))
    for name in (name for group in groups for name in GROUPS[group].loads):
        pair = [distributions(each / name) for each in (frozen, measured)]
        if None in pair:
            continue
        predicted, real = pair
        assert predicted is not None and real is not None
        cells = [f"{off_percent(predicted[metric], real[metric]):.1f}" for metric in METRICS]
        spans = [float(each["makespan_s"][0]) for each in (predicted, real)]
        off = 100 * (spans[0] / spans[1] - 1)
        count = len(real["e2el_ms"])
        print(f"| {name} | {count} | {spans[0]:.2f} | {spans[1]:.2f} | {off:+.1f} | " + " | ".join(cells) + " |")


def off_percent(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    """Percent: the Wasserstein-1 distance between both distributions, over the mean of what was measured."""
    from scipy.stats import wasserstein_distance

    return float(100 * wasserstein_distance(predicted, measured) / measured.mean())


def distributions(directory: Path) -> dict[str, NDArray[np.float64]] | None:
    """Values of the requests that ended ok, and the time from the first sent to the last ended."""
    from loadgen.report import metrics
    from loadgen.report.metrics import CONVENTIONS
    from loadgen.rundir import records

    if not directory.is_dir():
        return None
    table = records.read(directory)[0].measured()
    table = table.select(table.ok)
    columns = {name: metrics.column(table, name, CONVENTIONS["loadgen"]) for name in METRICS}
    known = {name: values[~np.isnan(values)] for name, values in columns.items()}
    return known | {"makespan_s": np.array([(table.done_ns.max() - table.sent_ns.min()) / 1e9])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["predict", "measure", "compare"])
    parser.add_argument("directory", type=Path, help="of the predicted and the measured runs")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument(
        "--profile",
        type=Path,
        help="of `loadgen calibrate`, to predict with (default: built in); such predictions have a folder of its name",
    )
    options = parser.parse_args()
    folder = f"predicted_{options.profile.stem}" if options.profile else "predicted"
    predicted, measured = (options.directory.absolute() / name for name in (folder, "measured"))
    if options.step == "compare":
        compare(predicted, measured, options.groups)
        return
    with tempfile.TemporaryDirectory(prefix="frozen-") as scratch:
        if options.step == "predict":
            predict(predicted, options.groups, Path(scratch), options.profile)
        else:
            measured.mkdir(parents=True, exist_ok=True)
            measure(measured, options.groups, Path(scratch))


if __name__ == "__main__":
    main()
