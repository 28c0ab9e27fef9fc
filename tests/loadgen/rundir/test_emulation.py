"""What was modelled: the JSON of today's servers, and of older manifests that lack its newer fields."""

from __future__ import annotations

import msgspec

from loadgen.rundir.emulation import Emulation
from servers.simulator.build import emulate
from servers.simulator.options import Hardware

FIRST = {
    "scheduler": "vllm@v1", "gpu": "NVIDIA H200", "gpus": 1, "topology": "none", "tensor_parallel": 1,
    "dtype": "float16", "kv_cache_tokens": 5, "max_running": 1024, "memory_ratio": 0.9, "profile": "built in (x)",
}  # fmt: skip


def test_what_a_server_writes_is_read_again() -> None:
    facts = emulate(Hardware(gpu="h200").setup("vllm", "7b", 4096)).facts
    assert list(msgspec.to_builtins(facts)) == [
        *FIRST, "gpu_source", "gpu_error", "profile_gpus", "profile_assumed", "held_out", "speed", "notes",
        "prefix_caching", "quantization", "kv_cache_dtype",
    ]  # fmt: skip
    assert facts.formats == "float16"
    both = Hardware(gpu="h200", dtype="bfloat16", quantization="fp8", kv_cache_dtype="fp8")
    assert emulate(both.setup("vllm", "7b", 4096)).facts.formats == "bfloat16, weights in fp8, KV cache in fp8"
    assert facts.held_out and msgspec.json.decode(msgspec.json.encode(facts), type=Emulation) == facts


def test_an_older_manifest_lacks_the_newer_fields() -> None:
    facts = msgspec.convert(FIRST, Emulation)
    assert (facts.speed, facts.notes, facts.held_out, facts.profile_assumed) == (1.0, (), (), False)
