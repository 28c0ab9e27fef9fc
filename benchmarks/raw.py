"""Raw results of the benchmarks: JSON files with the machine and the command that gave them."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any


def machine() -> str:
    """The date in UTC, cores, processor, kernel and Python, in words."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())
    return (
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, {os.cpu_count()} cores ({model}), "
        f"{platform.system()} {platform.release()}, Python {sys.version.split()[0]}"
    )


def command() -> str:
    """The script and its arguments, as typed in the repository's root."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def append(path: Path | None, values: dict[str, Any]) -> None:
    """Adds one line of JSON to the file: machine, command and values. Nothing where no path is given."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps({"machine": machine(), "command": command(), **values}) + "\n")
