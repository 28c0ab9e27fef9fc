"""Loads for tests, by the options that would make them."""

from __future__ import annotations

from typing import Any

from loadgen.config import Config
from loadgen.load.load import Load


def load(**options: Any) -> Load:
    return Config(**options).load


def plain(seed: int, input_tokens: int) -> Load:
    """Prompts of one length that share nothing."""
    return load(seed=seed, input_tokens=input_tokens, output_tokens=1)
