"""Whether transformers builds a decoder of each config.json, asked before anything is launched: `python -m
training_probe.worker.buildable`, configs by name on standard input, why one cannot be built by name on standard output.

A process of its own because torch belongs to the processes that measure. It takes no memory to speak of.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

REASON_CHARACTERS = 300


def main() -> int:
    configs = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, dict[str, Any]])
    reasons = {name: reason for name, config in configs.items() if (reason := _why_not(config))}
    sys.stdout.buffer.write(msgspec.json.encode(reasons))
    return 0


def _why_not(config: dict[str, Any]) -> str:
    """A clause; empty for one that is built."""
    from training_probe.grid import Cell
    from training_probe.protocol import Trial, Unsupported
    from training_probe.worker import model

    try:
        model.build(Trial(cell=Cell(model="", device="cpu"), config=config))
    except Unsupported as error:
        return str(error)
    except Exception as error:  # whatever a family makes of its fields
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:REASON_CHARACTERS]
        return next((f"{name}: {reason}" for name, value in config.items() if _names(reason, name, value)), reason)
    return ""


def _names(reason: str, name: str, value: Any) -> bool:
    """Whether the reason is about that field's value and does not have its name."""
    return isinstance(value, str) and name != "model_type" and repr(value) in reason and name not in reason


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # nothing is left to tear down
