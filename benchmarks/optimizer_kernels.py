"""The kernels of a training step's optimizer pass, from the trace that `training_probe breakdown` keeps.

    python benchmarks/optimizer_kernels.py benchmarks/h200/breakdown/train-2gpu-f/trace.json.gz

ms and launches are a step's means. --keep FILE writes the part of the trace that the table is made of.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

LAUNCHES, KERNELS = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memset", "gpu_memcpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--keep", type=Path, metavar="FILE")
    options = parser.parse_args()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(options.trace.read_bytes()))["traceEvents"]
    passes = [event for event in events if event["name"] == "phase:optimizer" and event["cat"] == "user_annotation"]
    launches = [
        event for event in events
        if event.get("cat") in LAUNCHES and any(0 <= event["ts"] - each["ts"] <= each["dur"] for each in passes)
    ]  # fmt: skip
    known = {event["args"]["correlation"] for event in launches}
    kernels = [event for event in events if event.get("cat") in KERNELS and event["args"].get("correlation") in known]
    if options.keep:
        kept = json.dumps({"traceEvents": passes + launches + kernels}).encode()
        options.keep.write_bytes(gzip.compress(kept, mtime=0))
    of: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for kernel in kernels:
        of[kernel["name"]].append(kernel)
    print("| ms | launches | registers | occupancy % | kernel |\n|---:|---:|---:|---:|---|")
    for name, each in sorted(of.items(), key=lambda item: -sum(kernel["dur"] for kernel in item[1])):
        ms = sum(kernel["dur"] for kernel in each) / 1e3 / len(passes)
        of_one = max(each, key=lambda kernel: kernel["dur"])["args"]
        cells = of_one.get("registers per thread", ""), of_one.get("est. achieved occupancy %", "")
        if ms >= 0.1:
            print(f"| {ms:.1f} | {len(each) / len(passes):.0f} | {cells[0]} | {cells[1]} | {name[:150]} |")


if __name__ == "__main__":
    main()
