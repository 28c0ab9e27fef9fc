"""What a command tells whoever started it, on standard error."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

MIN_WIDTH, PLAIN_WIDTH = 80, 160


def say(text: str) -> None:
    """To whoever listens; with nobody left the work goes on all the same."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def say_error(error: object) -> None:
    from loadgen.text import printable

    say(f"training_probe: {printable(' '.join(str(error).split()))[:2000]}")


def width(stream: Any) -> int:
    """Columns of a terminal; of anything else enough for every table."""
    return max(MIN_WIDTH, shutil.get_terminal_size().columns) if stream.isatty() else PLAIN_WIDTH
