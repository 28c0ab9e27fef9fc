"""Embeddings and ranks of llama.cpp's own server: a tiny Llama, whose vectors mean nothing, behind the real HTTP."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest

from backends import catalog
from backends.llamacpp.gguf_model import write_random
from tests.llamacpp.conftest import CONFIG, Loadgen, serving

pytestmark = pytest.mark.llamacpp


@pytest.mark.parametrize(("backend", "pooling"), [("embeddings", "mean"), ("rerank", "rank"), ("tei-rerank", "rank")])
def test_what_was_sent_is_what_it_counts(backend: str, pooling: str, loadgen: Loadgen, tmp_path: Path) -> None:
    write_random(catalog.from_config("tiny", CONFIG), "float32", tmp_path / "tiny.gguf")
    with serving(tmp_path / "tiny.gguf", "--embedding", "--pooling", pooling) as url:
        done = loadgen(
            "run", "--url", url, "--backend", backend, "--batch-size", "uniform:1:4", "--input-tokens", "60",
            "--requests", "12", "--concurrency", "2", "--warmup", "1", "--no-calibrate", "--out", tmp_path / "run",
        )  # fmt: skip
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
            metrics = reply.read().decode()
    report = done.result()
    assert report["requests"]["by_outcome"] == {"ok": 12} and not report["emulated"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()[1:-1]]
    batches = [line["items"] for line in lines if line["phase"] == "measured"]
    assert report["items"]["items"] == sum(batches) and len(set(batches)) > 1
    assert report["metrics"]["ttft_ms"]["n"] == 0 and report["metrics"]["e2el_ms"]["n"] == 12
    if backend != "tei-rerank":  # whose reply counts nothing here
        assert report["items"]["tokens_mean"] == pytest.approx(60, rel=0.2)  # it counts bytes, and words are whole
        counted = re.search(r"^llamacpp:prompt_tokens_total (\S+)$", metrics, re.MULTILINE)
        assert counted is not None and report["tokens"]["prompt"] < float(counted[1]) < 2 * report["tokens"]["prompt"]
