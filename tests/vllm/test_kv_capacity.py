"""The KV cache of a model whose layers keep different windows, beside what vLLM's own functions make of it: groups of
layers, blocks, and the tokens that it prints. Every model of the catalog, and random ones. Run by `make test-vllm`.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import serve

from backends import catalog
from backends.decoder import Attention, Window
from servers.schedulers.groups import BLOCK_TOKENS, LayerGroups

pytestmark = pytest.mark.vllm

DRIVER = Path(__file__).parent / "drive_kv_capacity.py"
KV_BYTES = 2  # bfloat16


class Case(NamedTuple):
    """layers: how many keep what. free_bytes: of the cache."""

    layers: tuple[tuple[int, Window | None], ...]
    kv_heads: int
    head_dim: int
    free_bytes: int
    max_model_len: int
    in_flight_tokens: int

    def line(self) -> str:
        layers = [
            (None, False) if window is None else (window.tokens, window.chunked)
            for count, window in self.layers
            for _ in range(count)
        ]
        return json.dumps(
            {
                "layers": layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "bytes": self.free_bytes,
                "max_model_len": self.max_model_len, "in_flight": self.in_flight_tokens,
            }
        )  # fmt: skip


def of_the_catalog() -> Iterator[Case]:
    for model in catalog.models():
        attention = model.kinds[0].attention
        if isinstance(attention, Attention):
            layers = tuple((kind.count, kind.attention.window) for kind in model.kinds)
            for length in (4096, 32768, 131072):
                most = min(length, model.max_position)
                yield Case(layers, attention.kv_heads, attention.head_dim, 40 << 30, most, 16384)


def random_ones() -> Iterator[Case]:
    draw = random.Random(0)
    for _ in range(400):
        kinds = draw.sample([None, Window(tokens=draw.randint(1, 9000)), Window(tokens=8192, chunked=True)], 2)
        counts = [draw.randint(1, 60) for _ in kinds[: draw.choice((1, 2, 2))]]
        yield Case(
            tuple(zip(counts, kinds, strict=False)), draw.choice((1, 2, 8)), draw.choice((64, 128, 256)),
            draw.randint(1 << 28, 1 << 36), draw.randint(300, 200_000), draw.choice((2048, 16384, 32768)),
        )  # fmt: skip


def test_as_many_blocks_and_tokens_as_vllm_counts(request: pytest.FixtureRequest) -> None:
    if "vllm" not in request.config.option.markexpr:
        pytest.skip("needs a real vLLM; run `make test-vllm`")
    if not (serve.PYTHON.parent.parent / "installed").exists():
        raise serve.VllmError("vLLM is not installed; run tests/vllm/install.sh.")
    cases = [*of_the_catalog(), *random_ones()]
    lines = "\n".join(case.line() for case in cases)
    told = subprocess.run([str(serve.PYTHON), str(DRIVER)], input=lines, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr[-2000:]
    replies = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("[")]
    windowed = 0
    for case, (blocks, tokens) in zip(cases, replies, strict=True):
        groups = LayerGroups.of(case.layers, case.max_model_len, case.in_flight_tokens)
        own = case.free_bytes // (BLOCK_TOKENS * groups.layers * 2 * case.kv_heads * case.head_dim * KV_BYTES)
        assert (own, groups.tokens(own)) == (blocks, tokens), case
        assert groups.blocks(tokens) == pytest.approx(blocks, abs=1 + blocks / tokens if tokens else 1)
        windowed += groups.uneven
    print(f"\n{len(cases)} models, {windowed} of them with windows: as many blocks and tokens as vLLM counts")
