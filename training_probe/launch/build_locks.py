"""Locks that a killed process left where torch compiles extensions, as DeepSpeed's optimizers are at their first use.

Whoever comes later waits for such a lock for ever: one cell that was ended while it compiled would make every other
DeepSpeed cell a timeout. torch keeps the file open while it compiles, so a lock that no process has open is nobody's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

LOCK = "lock"  # torch.utils.cpp_extension: <root>/<extension>/lock, by default <root>/<Python, CUDA>/<extension>/lock


def roots(environ: Mapping[str, str]) -> list[Path]:
    """Where torch puts what it compiles."""
    if own := environ.get("TORCH_EXTENSIONS_DIR"):
        return [Path(own)]
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    return [path for path in cache.glob("*") if path.is_dir()]


def remove_forsaken(environ: Mapping[str, str] = os.environ, proc: Path = Path("/proc")) -> list[Path]:
    """Removes our own locks that no process of this machine has open, and says which those were."""
    locks = [path.resolve() for root in roots(environ) for path in root.glob(f"*/{LOCK}")]
    if not locks:
        return []
    held = set()
    for link in proc.glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it is over, or another user's
            held.add(str(link.readlink()))
    removed = []
    for path in locks:
        with contextlib.suppress(OSError):
            if str(path) not in held and path.stat().st_uid == os.getuid():
                path.unlink()
                removed.append(path)
    return removed
