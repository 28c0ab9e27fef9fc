"""How often the findings of noise strike beside a load, and how often on a quiet machine.

    python benchmarks/noise_told.py                 # 20 tries of each, in turn: 30 minutes, on a quiet machine
    python benchmarks/noise_told.py --only loaded   # that half alone, wherever

A try is three quick measurements by `training_probe` on the CPU: a cell as the laptop preset has it, matrix products
and copies. Beside every second try a process spins on each core. Each measurement is a line of noise_told.jsonl as soon
as it is over: started again, the script goes on where it ended. Needs the extra `train`, and for the quiet half a
machine on which nothing else is at work. --summary prints what is kept and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import raw

from loadgen import exit_codes

KEPT = Path(__file__).with_suffix(".jsonl")
TRIES = 20
BESIDE = ("quiet", "loaded")
SPIN = "while True: pass"
COMMAND = "from training_probe.cli import main; main()"
LIMIT_S = 300.0  # of a measurement, which takes 4 to 15 s on a quiet machine
KINDS = {
    "cell": "sweep --preset laptop --engine ddp --gpus 1 --method F",
    "gemm": "micro gemm --device cpu --m 128 512 --dtype fp32",
    "memcpy": "micro memcpy --device cpu --sizes 64K 256K 4M 16M",
}
NUMBERS = (
    "step_ms", "step_ms_std", "step_ms_p10", "step_ms_p90", "steps", "runs", "tokens_per_s", "tokens_per_s_std",
    "median_s", "p10_s", "p90_s", "samples", "launches", "conditions",
)  # fmt: skip


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that never rest."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def measured(kind: str) -> dict[str, Any]:
    """What the report of a measurement has. Raises RuntimeError, where there is none."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out"
        argv = [sys.executable, "-c", COMMAND, *KINDS[kind].split(), "--out", str(out)]
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if ended.returncode not in (exit_codes.OK, exit_codes.INVALID):
            raise RuntimeError(f"{kind} ended with exit code {ended.returncode}: {ended.stderr[-2000:]}")
        report = json.loads((out / "report.json").read_text())
    results = [{name: each[name] for name in NUMBERS if name in each} for each in report["results"]]
    findings = [(each["code"], each["severity"]) for each in report["findings"]]
    return {"exit_code": ended.returncode, "verdict": report["verdict"], "findings": findings, "results": results}


def kept() -> list[dict[str, Any]]:
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def summary() -> None:
    """In how many tries something struck, by kind and of all kinds together. machine: a LOADED or the verdict INVALID,
    which are of the machine, where NOISY is of the numbers."""
    lines, codes = kept(), ("any", "machine", "INVALID", "NOISY", "LOADED", "NON_MONOTONE")
    print(f"{'':<16}{'tries':>6}" + "".join(f"{code:>14}" for code in codes))
    for beside in BESIDE:
        for kind in (*KINDS, "all"):
            tries: dict[int, set[str]] = {}
            for line in lines:
                if line["beside"] == beside and kind in (line["kind"], "all"):
                    tries.setdefault(line["number"], set()).update(_struck(line))
            counts = Counter(code for struck in tries.values() for code in struck)
            shares = [f"{counts[code]} ({100 * counts[code] / len(tries):.0f} %)" for code in codes] if tries else []
            print(f"{beside + ' ' + kind:<16}{len(tries):>6}" + "".join(f"{share:>14}" for share in shares))


def _struck(line: dict[str, Any]) -> set[str]:
    codes = {code for code, _ in line["findings"]} | ({"INVALID"} if line["verdict"] == "INVALID" else set())
    machine = {"machine"} if codes & {"LOADED", "INVALID"} else set()
    return codes | machine | ({"any"} if codes else set())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tries", type=int, default=TRIES, help="of each half")
    parser.add_argument("--only", choices=BESIDE)
    parser.add_argument("--summary", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the load ends with it
    done = {(line["beside"], line["number"], line["kind"]) for line in kept()}
    cores = len(os.sched_getaffinity(0))
    for number in range(0 if args.summary else args.tries):
        for beside in BESIDE:
            missing = [kind for kind in KINDS if (beside, number, kind) not in done]
            if not missing or args.only not in (None, beside):
                continue
            load_1min = os.getloadavg()[0]  # of what else is at work, where the script has just begun
            with load(cores if beside == "loaded" else 0):
                for kind in missing:
                    values = measured(kind)
                    findings = ", ".join(f"{code} {severity}" for code, severity in values["findings"])
                    print(f"{beside} {number + 1}, {kind}: {values['verdict']} {findings}", flush=True)
                    about = {"beside": beside, "number": number, "kind": kind, "load_1min": load_1min}
                    raw.append(KEPT, {**about, **values})
    summary()


if __name__ == "__main__":
    main()
