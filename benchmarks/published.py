"""Predicts what others published, and writes table and figure into benchmarks/published and docs/accuracy.md.

    python benchmarks/published.py            # computes (two minutes on one core), then writes the document
    python benchmarks/published.py --written  # writes the document from benchmarks/published alone

The document's part between `<!-- published -->` and `<!-- /published -->` is replaced; nobody edits it by hand.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "published"
DOCUMENT = ROOT / "docs" / "accuracy.md"
BEGIN, END = "<!-- published -->", "<!-- /published -->"
METRICS = ("ttft", "tpot", "e2e", "throughput")


def compute() -> None:
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "published"
        words = ["predict", "--preset", "published", "--out", str(made)]
        command = [sys.executable, "-c", "from loadgen.cli import main; main()", *words]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        OUT.mkdir(exist_ok=True)
        for path in made.iterdir():
            shutil.copy(path, OUT / path.name)


def section() -> str:
    """Of `published.json` and, where they were run, of the other predictors in `others.json`."""
    sources = json.loads((OUT / "published.json").read_text())["sources"]
    lines = [BEGIN, "| source | rows | | median off | with its sign | worst | target for the median |"]
    lines.append("|---|---:|---|---:|---:|---|---|")
    for name, source in sources.items():
        for metric, found in source["errors"].items():
            verdict = "met" if found["median"] <= found["target"] else "**missed**"
            lines.append(
                f"| {name} | {found['rows']} | {metric} | {found['median']:.1%} | {found['bias']:+.1%} | "
                f"{found['worst']:+.1%} ({found['worst_run']}) | {found['target']:.0%}: {verdict} |"
            )
    lines += ["", "Median errors under other assumptions:", "", "| source | assumption | ttft | tpot | e2e |"]
    lines.append("|---|---|---:|---:|---:|")
    for name, source in sources.items():
        for why, found in source["alternatives"].items():
            cells = (f"{found[metric]:.1%}" if metric in found else "" for metric in METRICS[:3])
            lines.append(f"| {name} | {why} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, END])


def write() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(before + section() + after, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--written", action="store_true")
    if not parser.parse_args().written:
        compute()
    write()
