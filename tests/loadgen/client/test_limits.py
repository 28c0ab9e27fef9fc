"""What a machine can hold."""

from __future__ import annotations

import resource

import pytest

from loadgen import rundir
from loadgen.client import limits
from loadgen.config import ConfigError


@pytest.mark.parametrize(
    ("cpus", "memory_bytes", "files", "most"),
    [(2, 64 << 30, 1 << 20, 8), (1, 64 << 30, 1 << 20, 4), (64, 1 << 30, 1 << 20, 10), (64, None, 128, 16)],
)
def test_workers_are_bounded_by_what_is_scarcest(
    cpus: int, memory_bytes: int | None, files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "usable_cpus", lambda: set(range(cpus)))
    monkeypatch.setattr(limits, "memory_bytes", lambda: memory_bytes)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    limits.check_workers(most)
    with pytest.raises(ConfigError, match=f"--workers is {most + 1} and this machine holds at most {most} "):
        limits.check_workers(most + 1)


def test_this_machine_tells_its_memory() -> None:
    memory_bytes = limits.memory_bytes()
    assert memory_bytes is None or memory_bytes > 1 << 20
