"""What packs files, as people do, by its name. zstd is among them where its package is installed."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable
from importlib.util import find_spec

PACKERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "xz": lzma.compress}
if find_spec("zstandard") is not None:
    import zstandard

    PACKERS["zstd"] = zstandard.compress
