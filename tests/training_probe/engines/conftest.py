"""What tests that train within their own process share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def alone() -> Iterator[Any]:
    """torch, in a process group of this process alone: one for all tests, since DeepSpeed keeps the first."""
    import torch
    import torch.distributed as dist

    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DS_ACCELERATOR")}
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DS_ACCELERATOR="cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch
    dist.destroy_process_group()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="session", autouse=True)
def _compiled_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What torch compiles is this process' own: torch loads a library also while another process writes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.fixture(autouse=True)
def _linear_layers_are_torchs() -> Iterator[None]:
    """ZeRO 3 of DeepSpeed puts its own in their place, for the rest of the process."""
    if "torch" not in sys.modules:
        yield
        return
    import torch.nn.functional

    before = torch.nn.functional.linear
    yield
    torch.nn.functional.linear = before
