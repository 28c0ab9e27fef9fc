"""Whether the memory of GPUs has come back after a run: what is still taken would make the next one run out of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from backends.gpus import Probe

WAIT_S = 60.0
POLL_S = 0.2
SLACK_BYTES = 300 << 20


class MemoryReturn:
    """Holds what the GPUs (NVML indices) used before the first run."""

    def __init__(self, probe: Callable[[Sequence[int]], Probe], gpu_ids: Sequence[int]) -> None:
        self._probe = probe(gpu_ids)
        self._before = self._used()

    def wait(self, cancelled: threading.Event) -> str | None:
        """Waits a while until no more is used than before; what is still taken then, a clause. A GPU that does not tell
        its memory is taken to be free."""
        give_up = time.monotonic() + WAIT_S
        while late := self._late():
            if time.monotonic() > give_up or cancelled.wait(POLL_S):
                return late
        return None

    def close(self) -> None:
        self._probe.close()

    def _late(self) -> str | None:
        for (index, before), (_, now) in zip(self._before, self._used(), strict=True):
            if before is not None and now is not None and now > before + SLACK_BYTES:
                return (
                    f"GPU {index} had {(now - before) / 2**20:.0f} MiB more in use before a run than before the sweep"
                )
        return None

    def _used(self) -> list[tuple[int, int | None]]:
        return [(sample.index, sample.memory_used_bytes) for sample in self._probe.sample()]
