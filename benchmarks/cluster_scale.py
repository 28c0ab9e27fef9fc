"""What 1,000 nodes would take: what the driver of a load from many machines does for them, measured on one machine.

python benchmarks/cluster_scale.py         # 20 s; needs Ray, for the calls of its actors

Nodes are virtual and networks drawn; pings are real, over loopback. `--json FILE` adds the result as a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import raw
import ray

from loadgen.client.engine import Snapshot
from loadgen.clock import now_ns
from loadgen.cluster import messages, records_home
from loadgen.cluster.clocks import AGAIN_PINGS, PINGS, Echo, Pinger
from loadgen.cluster.fleet import LOOKS_AT_ONCE, Fleet
from loadgen.event_loop import run_loop
from loadgen.progress import line
from loadgen.rundir import records
from loadgen.rundir.records import Record, RecordsFile

NODES, PROCESSES = 1000, 4  # client processes of a node
STARTS, LOOKS = 20, 40
TRIP_S, STRAGGLERS, STRAGGLER_S = (0.001, 0.002), 0.01, 0.05  # of a control message: drawn evenly; one in a hundred
NETWORK_MS = (0.2, 1.0)  # round trips that pings are computed for
REQUESTS, TOKENS = 100, 128  # of a node's records
ONE = Snapshot(planned=9**6, done=5000, failed=1, in_flight=64, events=9**6, elapsed_s=60.0, ttft_ms=[98.765] * 256)
BEAT = messages.encode(messages.Beat([ONE] * PROCESSES))


def snapshots() -> dict[str, Any]:
    """One second's snapshots of all nodes: decoded, summed, and shown as the line of progress."""
    begun_s = time.process_time()
    beats = [messages.answer_of(BEAT) for _ in range(NODES)]
    line([each for beat in beats if isinstance(beat, messages.Beat) for each in beat.snapshots], 1.0)
    return {"snapshots_bytes": len(BEAT) * NODES, "snapshots_cpu_s": time.process_time() - begun_s}


class Echoing:
    async def receive(self, message: bytes) -> bytes:
        return message


async def calls() -> dict[str, Any]:
    """A call of a Ray actor for each node, all at once, with the node's snapshots as its answer."""
    actor = ray.remote(max_concurrency=NODES)(Echoing).remote()
    await actor.receive.remote(b"")
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(actor.receive.remote(BEAT) for _ in range(NODES)))
    return {"ray_calls_s": time.perf_counter() - begun_s, "ray_calls_driver_cpu_s": time.process_time() - begun_cpu_s}


class Virtual:
    """A node that hears of t = 0 at `heard_ns`, half a drawn round trip after it was told."""

    def __init__(self, name: str) -> None:
        self.name, self.host, self.heard_ns, self._rng = name, "", 0, random.Random(name)

    async def send(self, message: bytes) -> None:
        trip_s = STRAGGLER_S if self._rng.random() < STRAGGLERS else self._rng.uniform(*TRIP_S)
        await asyncio.sleep(trip_s / 2)
        self.heard_ns = now_ns()
        await asyncio.sleep(trip_s / 2)


async def barrier() -> dict[str, Any]:
    """How far ahead the fleet names t = 0, and when the last node has heard of it: both from the first word on."""
    ahead_s, heard_s = [], []
    for seed in range(STARTS):
        nodes: list[Any] = [Virtual(f"{seed} {number}") for number in range(NODES)]
        fleet, begun_ns = Fleet(nodes, "virtual", "STRICT_SPREAD", ()), now_ns()
        await fleet._start(Path(os.devnull))
        ahead_s.append(((fleet.facts().t0_ns or 0) - begun_ns) / 1e9)
        heard_s.append((max(node.heard_ns for node in nodes) - begun_ns) / 1e9)
    return {"t0_ahead_s": ahead_s, "last_heard_s": heard_s}


def _echo(pipe: Any) -> None:
    echo = Echo("127.0.0.1")
    pipe.send((echo.port, echo.key))
    signal.pause()


def pings() -> dict[str, Any]:
    """Looks at a clock over loopback, as many at once as the driver takes; computed for networks, all nodes."""
    here, there = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=_echo, args=(there,), daemon=True).start()
    port, key = here.recv()
    pingers = [Pinger("127.0.0.1", port, key) for _ in range(LOOKS)]
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(LOOKS_AT_ONCE) as pool:
        assert all(pool.map(lambda pinger: pinger.look(PINGS), pingers))
    ping_s = (time.perf_counter() - begun_s) / (LOOKS * PINGS)
    cpu_s = (time.process_time() - begun_cpu_s) / (LOOKS * PINGS)
    found = {"ping_loopback_s": ping_s, "ping_cpu_s": cpu_s}
    for trip_ms in NETWORK_MS:
        each_s = max(ping_s, (trip_ms / 1000 + cpu_s) / LOOKS_AT_ONCE)
        found |= {f"computed_look_before_{trip_ms}_ms_s": NODES * PINGS * each_s,
                  f"computed_look_again_{trip_ms}_ms_s": NODES * AGAIN_PINGS * each_s}  # fmt: skip
    return found


def write(path: Path) -> None:
    """A node's records."""
    file = RecordsFile(path, "run", "0", 0, at_once=False)
    for number in range(REQUESTS):
        due, gaps_us = number * 10**8, [20_000 + number] * (TOKENS - 1)
        first, last = due + 10**8, due + 10**8 + sum(gaps_us) * 1000
        stamps = {"sent_ns": due + 9999, "headers_ns": first, "first_token_ns": first, "last_token_ns": last}
        counts = {"asked_prompt_tokens": 512, "prompt_tokens": 512, "asked_tokens": TOKENS, "output_tokens": TOKENS}
        own = {"id": number, "scheduled_ns": due, "outcome": "ok", "status": 200, "events": TOKENS, "done_ns": last}
        file.write(Record(**own, **stamps, **counts, itl_us=gaps_us))
    file.abandon()


async def home() -> dict[str, Any]:
    """The records of all nodes: copied from a local directory to another and hashed, settled, merged."""
    with tempfile.TemporaryDirectory() as place:
        there, came, out = (Path(tempfile.mkdtemp(dir=place)) for _ in range(3))
        for part in range(NODES):
            write(there / f"requests.{part}.jsonl")
        read = partial(asyncio.to_thread, records_home.chunk, there)
        marks_s, files = [time.perf_counter()], records_home.written(there)
        for file in files:
            await records_home.bring(file, read, came / file.name)
        marks_s.append(time.perf_counter())
        for file in files:
            records_home.settle(came / file.name, out / file.name, 1, None)
        marks_s.append(time.perf_counter())
        records.merge(out)
        marks_s.append(time.perf_counter())
    size, took_s = sum(file.size_bytes for file in files), np.diff(marks_s).tolist()
    seconds = dict(zip(("bring_s", "settle_s", "merge_s"), took_s, strict=True))
    return {"bytes_a_request": size / NODES / REQUESTS, "records_bytes": size, **seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    found = {"nodes": NODES, "processes_a_node": PROCESSES, **snapshots(), **pings()}
    found |= run_loop(barrier()) | run_loop(home())
    with ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", object_store_memory=100_000_000):
        found |= run_loop(calls())
    for name, value in found.items():
        print(f"{name:36} {max(value) if isinstance(value, list) else value:,.6g}")
    raw.append(options.json, found)
