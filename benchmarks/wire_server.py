"""How far behind its model the embedded server is: the time at which it hands out each token minus when that was due.

    .venv/bin/python benchmarks/wire_server.py [--requests 1000] [--output-tokens 128] [--speed 3] [--json FILE]

Serves modelled GPUs (7B on 4 x H200) in this process and sends a burst with `loadgen run` from another. Needs two
cores, one for the server and one for the client. `--json` adds the result to a file as a line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import raw

from servers.dialects.openai import OpenAI
from servers.serve.modelled_timing import SimulatedTiming
from servers.serve.server import Server
from servers.serve.wire import Settings
from servers.simulator.build import emulate
from servers.simulator.options import Hardware


class Watched(SimulatedTiming):
    """Keeps the lag and the moment of every token."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lag_ns, self.at_ns = array("q"), array("q")

    def pop(self, now_ns: int) -> Any | None:
        reply = super().pop(now_ns)
        if reply is not None:
            self.lag_ns.append(now_ns - self.popped_due_ns)
            self.at_ns.append(now_ns)
        return reply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--speed", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    emulated = emulate(Hardware(gpu="h200", gpus=4, tp=4).setup("vllm", "llama-2-7b", 4096))
    timing = Watched(emulated, chosen.speed)
    server = Server(OpenAI("vllm", Settings("llama-2-7b", 4096)), timing)

    def load() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            flags = ["--requests", str(chosen.requests), "--output-tokens", str(chosen.output_tokens), "--warmup", "0"]
            flags += ["--no-calibrate", "--no-server-metrics", "--out", f"{scratch}/run"]
            subprocess.run(
                [sys.executable, "-c", "from loadgen.cli import main; main()", "run", "--url", server.url, *flags],
                check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        server.stop()

    threading.Thread(target=load, daemon=True).start()
    gc.collect()
    gc.freeze()
    gc.disable()
    before_s = time.process_time()
    server.run()
    cpu_s = time.process_time() - before_s
    lag_ms = np.frombuffer(timing.lag_ns, np.int64) / 1e6
    at_s = (np.frombuffer(timing.at_ns, np.int64) - timing.at_ns[0]) / 1e9
    result = {
        "events": len(lag_ms),
        "seconds": float(at_s[-1]),
        "busiest_second_events": int(np.bincount(at_s.astype(int)).max()),
        "lag_p50_ms": float(np.percentile(lag_ms, 50)),
        "lag_p99_ms": float(np.percentile(lag_ms, 99)),
        "lag_max_ms": float(lag_ms.max()),
        "cpu_us_per_event": cpu_s / len(lag_ms) * 1e6,
    }
    raw.append(chosen.json, result)
    print(
        "{events} events in {seconds:.1f} s, {rate:,.0f} a second, {busiest_second_events:,} in the busiest; "
        "lag p50 {lag_p50_ms:.2f} ms, p99 {lag_p99_ms:.2f} ms, max {lag_max_ms:.1f} ms; "
        "{cpu_us_per_event:.1f} us of CPU each".format(rate=result["events"] / result["seconds"], **result)
    )


if __name__ == "__main__":
    main()
