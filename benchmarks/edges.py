"""What a run takes at its edges: from its start to its first request, and from the last reply to its end.

python benchmarks/edges.py            # on a machine that does nothing else

The server is the embedded one at a --url, started before. A run's first request is the first of its warm-up. Runs with
the client's calibration and without it take turns. `--json FILE` adds the result to a file as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import raw

from loadgen.rundir import records

REQUESTS, OUTPUT_TOKENS, TURNS = 1000, 128, 5
LOADGEN = (sys.executable, "-c", "from loadgen.cli import main; main()")


def edges(url: str, directory: Path, *options: str) -> tuple[float, float]:
    """Seconds before the first request and after the last reply of one run, by the clock that its stamps are of."""
    command = [*LOADGEN, "run", "--url", url, "--requests", str(REQUESTS), "--output-tokens", str(OUTPUT_TOKENS)]
    began_ns = time.monotonic_ns()
    ended = subprocess.run([*command, "--out", str(directory), *options], capture_output=True, text=True, check=False)
    ended_ns = time.monotonic_ns()
    if ended.returncode not in (0, 4):
        raise SystemExit(ended.stderr)
    table, _ = records.read(directory)
    t0_ns = records.read_header(directory).t0_monotonic_ns
    first_ns = int(table.sent_ns[table.sent_ns != -1].min())
    return (t0_ns + first_ns - began_ns) / 1e9, (ended_ns - t0_ns - int(table.done_ns.max())) / 1e9


def measure(turns: int) -> dict[str, Any]:
    before: dict[str, list[float]] = {"without calibration": [], "with calibration": []}
    after: list[float] = []
    with (
        tempfile.TemporaryDirectory() as place,
        subprocess.Popen([*LOADGEN, "serve", "--port", "0"], stdout=subprocess.PIPE) as server,
    ):
        assert server.stdout is not None
        try:
            url = json.loads(server.stdout.readline())["url"]
            for turn in range(turns):
                for name, options in (("without calibration", ["--no-calibrate"]), ("with calibration", [])):
                    first_s, last_s = edges(url, Path(place) / f"{turn}-{len(options)}", *options)
                    before[name].append(first_s)
                    after.append(last_s)
        finally:
            server.terminate()
    return {"requests": REQUESTS, "start_to_first_request_s": before, "last_reply_to_end_s": after}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=TURNS)
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    result = measure(chosen.turns)
    starts = {f"start, {name}": values for name, values in result["start_to_first_request_s"].items()}
    for name, values in (starts | {"last reply to end": result["last_reply_to_end_s"]}).items():
        print(f"{name:28s} median {statistics.median(values):.2f} s, {min(values):.2f} to {max(values):.2f}")
    raw.append(chosen.json, result)


if __name__ == "__main__":
    main()
