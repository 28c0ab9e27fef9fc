"""How many tokens vLLM counts in a KV cache, of models on standard input. Runs with vLLM's interpreter.

A line of JSON a case: {"layers": [[window or null, chunked], ...], "kv_heads": n, "head_dim": n, "bytes": n,
"max_model_len": n, "in_flight": n}; a line of JSON a reply: [blocks, tokens].
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

BLOCK_TOKENS = 16


def main() -> None:
    for line in sys.stdin:
        case = json.loads(line)
        heads = {
            "block_size": BLOCK_TOKENS, "num_kv_heads": case["kv_heads"], "head_size": case["head_dim"],
            "dtype": torch.bfloat16,
        }  # fmt: skip
        layers = {}
        for number, (window, chunked) in enumerate(case["layers"]):
            if window is None:
                spec = FullAttentionSpec(**heads)
            elif chunked:
                spec = ChunkedLocalAttentionSpec(**heads, attention_chunk_size=window)
            else:
                spec = SlidingWindowSpec(**heads, sliding_window=window, dcp_sharded=False)
            layers[f"layer.{number}"] = spec
        parts = SimpleNamespace(
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            model_config=SimpleNamespace(max_model_len=case["max_model_len"]),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1
            ),
            cache_config=SimpleNamespace(
                num_gpu_blocks_override=None, block_size=BLOCK_TOKENS,
                prefix_cache_retention_interval=None,
                get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
            speculative_config=None, kv_transfer_config=None, max_in_flight_tokens=case["in_flight"],
        )  # fmt: skip
        groups = kv_cache_utils.get_kv_cache_groups(parts, layers)
        config = kv_cache_utils.get_kv_cache_config_from_groups(parts, groups, case["bytes"])
        tokens, _ = kv_cache_utils.get_kv_cache_capacity(parts, config)
        print(json.dumps([config.num_blocks, tokens]), flush=True)


if __name__ == "__main__":
    main()
