"""What a run from three machines costs beside a run from one: seconds from the command to t = 0, bytes that came home,
how well clocks are known and how far apart the machines begin.

    python benchmarks/cluster.py --json benchmarks/cluster.jsonl

It makes the three machines of tests/cluster (network namespaces, Linux, root), one with a clock 100,000 s ahead, and
appends a line of raw numbers for each run. Nothing else should run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from loadgen import rundir
from loadgen.rundir import records
from tests.cluster.nodes import AHEAD, AHEAD_S, ENVIRONMENT, Nodes, three_nodes

LOADGEN = str(Path(sys.executable).with_name("loadgen"))
LOAD = ("--requests", "300", "--arrival", "constant:50", "--output-tokens", "32")


def measured(nodes: Nodes, url: str, name: str, options: tuple[str, ...]) -> dict[str, Any]:
    """One run on the first machine."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        began_ns = time.monotonic_ns()
        subprocess.run(
            nodes.command(0, LOADGEN, "run", "--url", url, "--out", str(out), *LOAD, *options),
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        t0_ns = records.read_header(out).t0_monotonic_ns
        found: dict[str, Any] = {"run": name, "to_t0_s": (t0_ns - began_ns) / 1e9}
        found["whole_s"] = (time.monotonic_ns() - began_ns) / 1e9
        facts = rundir.read_manifest(out).cluster
        if facts is not None:
            truth_ns = [AHEAD_S * 10**9 if index == AHEAD else 0 for index in range(3)]
            offsets_ns = [node.clock_offset_ns or 0 for node in facts.nodes]
            found["offset_error_ms"] = [(seen - truth) / 1e6 for seen, truth in zip(offsets_ns, truth_ns, strict=True)]
            found["clock_bound_ms"] = [node.clock_bound_ms for node in facts.nodes]
            found["start_spread_ms"], found["records_bytes"] = facts.start_spread_ms, facts.records_bytes
        return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, required=True, help="file that gets a line for each run")
    options.add_argument("--times", type=int, default=5)
    arguments = options.parse_args()
    os.environ.update(ENVIRONMENT)
    rows: list[dict[str, Any]] = []
    with three_nodes() as nodes:
        host = nodes.ips[0].rpartition(".")[0] + ".254"
        serve = [LOADGEN, "serve", "--host", host, "--port", "0"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            on = ("--on", f"ray:{nodes.address}")
            for _ in range(arguments.times):
                for name, more in (
                    ("one machine", ()), ("one machine, no ceiling", ("--no-calibrate",)),
                    ("three machines", on), ("three machines, no ceiling", (*on, "--no-calibrate")),
                ):  # fmt: skip
                    rows.append(measured(nodes, url, name, more))
                    with arguments.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
            server.kill()
    for name in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == name]
        print(f"{name}: {statistics.median(row['to_t0_s'] for row in own):.2f} s to t = 0")
    several = [row for row in rows if "start_spread_ms" in row]
    print(f"start spread {sorted(round(row['start_spread_ms'], 2) for row in several)} ms")
    print(f"clock off by at most {max(abs(each) for row in several for each in row['offset_error_ms']):.4f} ms")
    print(f"clock bounds to {max(each for row in several for each in row['clock_bound_ms']):.3f} ms")
    print(f"records home: {statistics.median(row['records_bytes'] for row in several):,.0f} bytes of 300 requests")


if __name__ == "__main__":
    main()
