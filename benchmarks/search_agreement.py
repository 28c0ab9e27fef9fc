"""Whether `loadgen search` on a server that listens agrees with `loadgen plan` of the same modelled hardware.

    python benchmarks/search_agreement.py benchmarks/search_agreement.json

Each load is planned once and searched for on the wire. Beyond the model a search meets the machine that it runs on:
leave it alone meanwhile. Numbers as further arguments choose among LOADS, from 0 on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = [sys.executable, "-c", "from loadgen.cli import main; main()"]
SEEDS = (1,)
LOADS = (  # model, prompt tokens, output tokens, limits, share, minutes
    ("13b", "512", "16", "ttft_ms=400,tpot_ms=60", 0.95, 5),
    ("7b", "512", "64", "ttft_ms=500,tpot_ms=20", 0.9, 5),
    ("7b", "2000", "30", "ttft_ms=400", 0.95, 20),  # few requests a second, whose misses come in clusters
    ("13b", "lognormal:300:0.6:20:2000", "uniform:10:40", "tpot_ms=40", 0.9, 5),
)


def answer(command: list[str]) -> dict[str, Any]:
    done = subprocess.run([*PROGRAM, *command], capture_output=True, text=True, check=True)
    last_line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last_line


def main() -> None:
    rows: list[dict[str, Any]] = []
    chosen = [LOADS[int(number)] for number in sys.argv[2:]] or LOADS
    for model, prompt, output, slo, share, minutes in chosen:
        load = ["--model", model, "--gpu", "h200", "--input-tokens", prompt, "--output-tokens", output, "--slo", slo]
        planned = answer(
            ["plan", *load, "--rate", "1", "--max-gpus", "1", "--percentile", f"{100 * share:g}", "--json"]
        )
        (row,) = planned["rows"]
        plan = {name: row[name] for name in ("rate_per_s", "rate_interval_per_s", "bound")}
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as directory:
                budget = ["--attain", f"{share}", "--budget-minutes", f"{minutes}", "--seed", f"{seed}"]
                result = answer(["search", *load, *budget, "--out", str(Path(directory) / "search")])
            names = ("rate_per_s", "attained_ratio", "limited_by", "ended_because")
            live = {name: result[name] for name in names} | {"probes": len(result["probes"])}
            off = result["rate_per_s"]["value"] / plan["rate_per_s"] - 1
            rows.append({"load": load, "attain": share, "minutes": minutes, "seed": seed, "plan": plan, "live": live,
                         "off_ratio": off})  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
