"""What was modelled: the JSON of today's servers, and of older manifests that lack its newer fields."""

from __future__ import annotations

import msgspec
import pytest

from loadgen.rundir.emulation import Emulation, kind_of_load
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
        "prefix_caching", "quantization", "kv_cache_dtype", "architecture", "held_out_of",
    ]  # fmt: skip
    assert facts.formats == "float16"
    both = Hardware(gpu="h200", dtype="bfloat16", quantization="fp8", kv_cache_dtype="fp8")
    assert emulate(both.setup("vllm", "7b", 4096)).facts.formats == "bfloat16, weights in fp8, KV cache in fp8"
    assert facts.held_out and msgspec.json.decode(msgspec.json.encode(facts), type=Emulation) == facts


def test_errors_are_of_models_and_loads_alike() -> None:
    """On its GPU, in its format and of its class alone; the kinds of load are told apart in reports."""
    dense, latent = (
        emulate(Hardware(gpu="h200", gpus=8).setup("vllm", model, 4096)).facts for model in ("7b", "deepseek-v3")
    )
    assert {(run.gpu, run.architecture, run.quantization) for run in dense.held_out} == {("h200", "dense", None)}
    assert latent.architecture == "mixture with latent attention" and not latent.held_out
    assert dense.held_out_of == latent.held_out_of > len(dense.held_out)


@pytest.mark.parametrize(
    ("arrival", "prompt_tokens", "kind"),
    [
        ("burst", 512, "burst"), ("burst", 3000, "burst of long prompts"), ("concurrency:32", 700, "closed loop"),
        ("concurrency:1..64", 2000, "closed loop of long prompts"), ("poisson:8", 1999, "open load"),
        ("trace:mooncake", 8000, "open load of long prompts"),
    ],
)  # fmt: skip
def test_kinds_of_loads(arrival: str, prompt_tokens: float, kind: str) -> None:
    assert kind_of_load(arrival, prompt_tokens) == kind


def test_an_older_manifest_lacks_the_newer_fields() -> None:
    facts = msgspec.convert(FIRST, Emulation)
    assert (facts.speed, facts.notes, facts.held_out, facts.profile_assumed) == (1.0, (), (), False)
