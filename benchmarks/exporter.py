"""What a scrape costs: of 50 finished runs with 20,000 requests each, and of one that goes on, by the client's own CPU.

python benchmarks/exporter.py            # the first part: seconds a scrape, over HTTP
python benchmarks/exporter.py --client   # the second: a minute on a machine that does nothing else

`--json FILE` adds the result to a file as a line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import raw

from loadgen import rundir
from loadgen.monitor.exporter import Exporter, serve
from loadgen.monitor.totals import BOUNDS_S, Record, Totals
from loadgen.rundir import records

RUNS, REQUESTS, SCRAPES = 50, 20_000, 50
TURNS, STREAMS, EVENTS = 3, 1000, 250  # of the second part: 5 s of events a run, on a machine that keeps up
SERVER_PORT, METRICS_PORT = 18123, 19123
READY_S, RUN_S = 20.0, 120.0  # what a server may take to be ready, and a run to end
OPEN_METRICS = {"Accept": "application/openmetrics-text;version=1.0.0"}
LOADGEN = (sys.executable, "-c", "from loadgen.cli import main; main()")


def write_run(directory: Path, seed: int) -> None:
    directory.mkdir()
    rng, totals = np.random.default_rng(seed), Totals()
    for number in range(REQUESTS):
        first = int(rng.lognormal(19, 1))
        last = first + int(rng.lognormal(20, 1))
        totals.add(
            Record(
                id=number, phase="measured", outcome="ok", sent_ns=0, first_token_ns=first, last_token_ns=last,
                done_ns=last, prompt_tokens=512, output_tokens=64, events=64,
            )
        )  # fmt: skip
    snapshot = rundir.Snapshot(
        run_id=f"run-{seed}", program="loadgen", state="finished", labels={"backend": "vllm", "model": "m"},
        families=list(totals.families()),
    )  # fmt: skip
    rundir.write_snapshot(directory, snapshot)


def scraped(url: str) -> tuple[float, int]:
    begun = time.perf_counter()
    with urllib.request.urlopen(urllib.request.Request(url, headers=OPEN_METRICS)) as reply:
        size = len(reply.read())
    return (time.perf_counter() - begun) * 1000, size


def many_runs() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        for seed in range(RUNS):
            write_run(Path(place) / str(seed), seed)
        with serve(Exporter(Path(place)), "127.0.0.1", 0) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_port}/metrics"
            begun_s = time.process_time()
            scrapes = [scraped(url) for _ in range(SCRAPES)]
            cpu_ms = (time.process_time() - begun_s) * 1000 / SCRAPES
            server.shutdown()
    size = scrapes[0][1]
    print(f"{RUNS} runs of {REQUESTS:,} requests, {len(BOUNDS_S)} buckets each, a page of {size / 1e6:.1f} MB:")
    median_ms, worst_ms = statistics.median(ms for ms, _ in scrapes), max(ms for ms, _ in scrapes)
    print(f"  a scrape takes {median_ms:.0f} ms (median), at most {worst_ms:.0f} ms; {cpu_ms:.0f} ms of CPU")
    return {
        "runs": RUNS, "requests_a_run": REQUESTS, "page_bytes": size, "scrape_ms": [ms for ms, _ in scrapes],
        "cpu_ms_a_scrape": cpu_ms,
    }  # fmt: skip


def cpu_us_per_event(out: Path, scraping: bool) -> float:
    """The client's own, of a run whose events come 50,000 a second; with `scraping`, it is scraped each second."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(1.0):
            with contextlib.suppress(OSError):
                scraped(f"http://127.0.0.1:{METRICS_PORT}/metrics")

    load = ["--requests", f"{STREAMS}", "--output-tokens", f"{EVENTS}", "--no-calibrate"]
    argv = [*LOADGEN, "run", "--out", str(out), "--url", f"http://127.0.0.1:{SERVER_PORT}", *load]
    server = subprocess.Popen(
        [*LOADGEN, "serve", "--ttft-ms", "200", "--itl-ms", "20", "--port", f"{SERVER_PORT}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until_ready()
        if scraping:
            argv += ["--metrics-port", f"{METRICS_PORT}"]
            threading.Thread(target=scrape, daemon=True).start()
        subprocess.run(argv, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=RUN_S)
    finally:
        over.set()
        server.terminate()
        server.wait()
    _, (facts,) = records.read(out)
    return facts.cpu_s / facts.events * 1e6


def wait_until_ready() -> None:
    """Raises OSError where the server does not listen in time."""
    give_up = time.monotonic() + READY_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", SERVER_PORT), 1.0).close()
            return
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)


def the_client() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        turns = [
            [cpu_us_per_event(Path(place) / f"{turn}-{scraping}", scraping) for scraping in (False, True)]
            for turn in range(TURNS)
        ]
    plain, with_scrapes = map(statistics.median, zip(*turns, strict=True))
    print(f"client CPU an event, medians of {len(turns)} turns: {plain:.2f} us, scraped {with_scrapes:.2f} us,")
    print(f"  ratio {with_scrapes / plain:.3f}; each turn: {', '.join(f'{a:.2f} {b:.2f}' for a, b in turns)}")
    return {"cpu_us_per_event": [{"plain": a, "scraped": b} for a, b in turns]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--client", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    raw.append(options.json, the_client() if options.client else many_runs())
