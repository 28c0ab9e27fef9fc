"""Where a search starts: the modelled rate of the model that is served, and of no other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadgen.config import Config
from loadgen.run import LoadRun
from loadgen.search import live

LIMITS_MS = {"ttft": 500.0, "tpot": 50.0}


def guess(tmp_path: Path, model: str | None) -> float | None:
    config = Config(url="http://127.0.0.1:1", model=model, backend="vllm", output_tokens=16)
    options = live.search_options(config, LIMITS_MS, 0.95, 1.0, "rate")
    return asyncio.run(live.modelled_rate(options, LoadRun(config, tmp_path, "r", print)))


@pytest.mark.processes
def test_a_server_at_a_url_is_modelled_where_its_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = SimpleNamespace(gpus=(SimpleNamespace(name="NVIDIA H200"),))
    monkeypatch.setattr(live.gpus, "read", lambda: cards)
    rates = [guess(tmp_path, model) for model in (None, "no such model", "13b", "7b")]
    assert rates[:2] == [None, None]
    assert rates[2] is not None and rates[3] is not None and rates[2] < rates[3]
