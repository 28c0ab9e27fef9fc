"""Prometheus and its promtool, where they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

UNPACKED = Path(__file__).parents[2] / "build" / "prometheus" / "usr" / "bin"  # by prometheus.sh


def program(name: str) -> str:
    """The path of it; where it is not, the test is skipped."""
    path = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if path is None:
        pytest.skip(f"{name} is not installed; run `make test-prometheus`")
    return path
