"""The KV cache that vLLM 0.25.1 printed at real starts (results:h200 and results:frozen), which the constants of
`reserve` were fitted to; and what its arithmetic says beyond them."""

from __future__ import annotations

import pytest

from backends import catalog
from backends.decoder import Precision
from servers.simulator.build import EmulationError, Setup, emulate
from servers.simulator.reserve import reserved_bytes

GIB = 1 << 30
MISTRAL = "mistral-7b"
STARTS = [  # model, GPU, how many, P2P, quantization, share of the memory, tokens
    ("7b", "h200", 1, True, None, 0.9, 229904),
    ("13b", "h200", 1, True, None, 0.9, 131520),
    ("70b", "h200", 2, True, None, 0.9, 393072),
    ("70b", "h200", 2, False, None, 0.9, 395984),
    ("7b", "h200", 2, True, None, 0.9, 485264),
    ("7b", "h200", 2, False, None, 0.9, 487088),
    ("7b", "h200", 4, True, None, 0.9, 996768),
    ("7b", "h200", 4, False, None, 0.9, 1000416),
    (MISTRAL, "h200", 1, True, None, 0.92, 933472),
    (MISTRAL, "h200", 1, True, "fp8", 0.92, 986816),
    (MISTRAL, "h100", 1, True, None, 0.92, 476672),
    ("qwen3-8b", "h200", 1, True, None, 0.92, 814368),
    ("qwen3-30b-a3b", "h200", 1, True, None, 0.92, 744672),
]


@pytest.mark.parametrize("model, gpu, tp, p2p, quantization, share, printed", STARTS)
def test_real_starts(
    model: str, gpu: str, tp: int, p2p: bool, quantization: str | None, share: float, printed: int
) -> None:
    spec = catalog.find(model)
    assert spec is not None
    setup = Setup(scheduler="vllm@v1", model=spec, gpu=gpu, gpus=tp, tp=tp, p2p=p2p, quantization=quantization,
                  dtype="bfloat16", memory_ratio=share)  # fmt: skip
    assert emulate(setup).kv_tokens == pytest.approx(printed, rel=0.003)
    bytes_off = (emulate(setup).kv_tokens - printed) * spec.kv_bytes_per_token(setup.precision()) / spec.kv_shares(tp)
    assert abs(bytes_off) < 0.15 * GIB


def reserved(model: str, tp: int = 1, tokens: int = 2048, rows: int = 256, nvlink: bool = True) -> float:
    spec = catalog.find(model)
    assert spec is not None
    return reserved_bytes(spec, Precision(), tp, tokens=tokens, rows=rows, nvlink=nvlink) / GIB


def test_what_moves_it() -> None:
    assert reserved("7b", tokens=8192) == reserved("7b", tokens=8192, rows=1024) > reserved("7b")  # a step needs most
    assert reserved("gemma-3-27b", rows=1024) > reserved("gemma-3-27b") + 1  # its vocabulary is eight times as large
    assert reserved("70b", tp=4, nvlink=False) < reserved("70b", tp=2, nvlink=False) < reserved("70b", tp=2)
    assert reserved("mixtral-8x7b") > reserved(MISTRAL) + 0.5
    assert reserved("7b", rows=4096) == reserved("7b", rows=2048)  # no more rows than tokens


def test_other_servers_keep_what_is_assumed_of_them() -> None:
    spec = catalog.find("7b")
    assert spec is not None
    kept = {
        share: emulate(Setup(scheduler="tgi@3", model=spec, gpu="h200", memory_ratio=share)).kv_tokens
        for share in (0.8, 0.9)
    }
    per_gib = (kept[0.9] - kept[0.8]) / (0.1 * 139.8)
    assert kept[0.9] / per_gib == pytest.approx(0.9 * 139.8 - spec.weight_bytes(Precision()) / GIB - 1, abs=0.1)


def test_buffers_of_an_all_reduce_are_there_where_it_goes_over_nvlink() -> None:
    spec = catalog.find("7b")
    assert spec is not None
    pcie, host, off = (
        emulate(Setup(scheduler="vllm@v1", model=spec, gpu="rtx4090", gpus=2, tp=2, **way)).kv_tokens  # type: ignore[arg-type]
        for way in ({"topology": "pcie"}, {"topology": "host"}, {"p2p": False})
    )
    assert pcie == host == off


def test_a_step_that_is_too_large_is_named() -> None:
    spec = catalog.find("7b")
    assert spec is not None
    setup = Setup(scheduler="vllm@v1", model=spec, gpu="rtx4090", kv_tokens=5000, max_batched_tokens=2_000_000)
    with pytest.raises(EmulationError, match="lower --max-batched-tokens or --max-running"):
        emulate(setup)


def test_a_smaller_format_is_asked_with_its_own_reserve() -> None:
    spec = catalog.find("llama-3.1-8b")
    assert spec is not None
    setup = Setup(scheduler="vllm@v1", model=spec, gpu="l40s", dtype="float32", max_batched_tokens=60000,
                  max_running=8000, memory_ratio=0.6)  # fmt: skip
    with pytest.raises(EmulationError, match="--dtype float16 would fit on 1"):
        emulate(setup)
