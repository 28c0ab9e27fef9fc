"""The client's own ceiling on this machine: the run's shape, cut to about a second, sent to the embedded server.

The embedded server stamps every event just before it sends it. What the client recorded later than that is the error of
its stamps, the server's write and the kernel included.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from loadgen.client.engine import run_here
from loadgen.client.limits import OPEN_FILES_BESIDES
from loadgen.load.arrivals import Streams
from loadgen.load.lengths import fixed
from loadgen.load.load import Load
from loadgen.load.request_body import BodyEdits
from loadgen.plan import Plan, PromptSource
from loadgen.rundir import Ceiling, records
from loadgen.server import embedded
from loadgen.target import Target

CALIBRATION_EVENTS = 40_000  # about a second
LEAST_EVENTS = 1000  # fewer give no cost per event


async def calibrate(plan: Plan) -> Ceiling | None:
    """Measures the client's cost in the plan's shape; None where no embedded server speaks the plan's protocol, or too
    few events arrived. Raises EmbeddedError or TransportError."""
    dialect = embedded.DIALECTS.get(plan.backend)
    if dialect is None:
        return None
    load = plan.job.load
    streams = min(max(load.at_once, 16), 512)
    prompt_tokens, reply_tokens = load.typical_tokens()
    tokens = min(reply_tokens, max(4, CALIBRATION_EVENTS // streams))
    itl_ms = max(1.0, streams * 1000 / CALIBRATION_EVENTS)
    requests = min(max(streams, CALIBRATION_EVENTS // tokens), 8 * streams)
    with tempfile.TemporaryDirectory(prefix="loadgen-calibrate-") as scratch:
        directory, stamps = Path(scratch) / "run", Path(scratch) / "stamps.npz"
        directory.mkdir()
        options = ("--dialect", dialect, "--stamps", str(stamps), "--ttft-ms", "30", "--itl-ms", f"{itl_ms:g}")
        length = prompt_tokens + tokens + OPEN_FILES_BESIDES
        async with embedded.serving(*options, "--max-model-len", str(length)) as serving:
            like = Load(
                arrival=load.arrival,
                input_tokens=fixed(prompt_tokens),
                output_tokens=fixed(tokens),
                requests=requests,
                streams=Streams(streams, streams),
                seed=load.seed,
            )
            job = msgspec.structs.replace(plan.job, model="llama-2-7b", load=like, warmup=0, body_edits=BodyEdits())
            short = msgspec.structs.replace(plan, job=job, target=Target(serving.url), prompts=PromptSource())
            await run_here(short, directory, lambda snapshots: None)
        return await asyncio.to_thread(ceiling, directory, stamps, requests, tokens)


def ceiling(directory: Path, stamps: Path, requests: int, output_tokens: int) -> Ceiling | None:
    """The client's cost and error from the records in `directory` and the server's own stamps. None when too few
    events arrived."""
    table, facts = records.read(directory)
    table = table.measured()
    if not facts or facts[0].events < LEAST_EVENTS or facts[0].cpu_s <= 0:
        return None
    t0_ns = records.read_header(directory).t0_monotonic_ns
    with np.load(stamps) as truth:
        rows = {str(name).rpartition("-")[2]: row for row, name in enumerate(truth["request_id"])}
        offsets, sent_ns = truth["offsets"], truth["sent_ns"]
    lags_ns = []
    for index in range(len(table)):
        row = rows.get(str(table.id[index]))
        if row is None or table.events[index] != offsets[row + 1] - offsets[row]:
            continue
        lags_ns.append(t0_ns + table.arrivals_ns(index) - sent_ns[offsets[row] : offsets[row + 1]])
    cpu_us = facts[0].cpu_s / facts[0].events * 1e6
    return Ceiling(
        events_per_s_per_core=1e6 / cpu_us,
        cpu_us_per_event=cpu_us,
        event_error_p50_ms=float(np.percentile(np.concatenate(lags_ns), 50)) / 1e6 if lags_ns else None,
        event_error_p99_ms=float(np.percentile(np.concatenate(lags_ns), 99)) / 1e6 if lags_ns else None,
        requests=requests,
        output_tokens=output_tokens,
    )
