"""Builds the dashboards and writes them as Grafana reads them: `python compose/dashboards` (`make compose`).

The same code gives the same bytes. A test builds them anew and compares.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import comparison
import serving
import training
from grafana_foundation_sdk.cog.encoder import JSONEncoder

DIRECTORY = Path(__file__).parents[1] / "grafana" / "dashboards"
BOARDS = {"serving": serving.BOARD, "training": training.BOARD, "comparison": comparison.BOARD}


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the dashboards as JSON.")
    parser.add_argument("--out", type=Path, default=DIRECTORY, help="directory to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, board in BOARDS.items():
        text = json.dumps(board, cls=JSONEncoder, indent=1, sort_keys=True)
        (out / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
