"""How wide what a command prints may be."""

from __future__ import annotations

import shutil
from typing import Any

MIN_WIDTH, PLAIN_WIDTH = 80, 160


def width(stream: Any) -> int:
    """Columns of a terminal; of anything else enough for every table."""
    return max(MIN_WIDTH, shutil.get_terminal_size().columns) if stream.isatty() else PLAIN_WIDTH
