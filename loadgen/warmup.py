"""A server warmed up with the run's own load (`--warmup-load`): its beginning is played unmeasured until steps settle.

Kernels that a server compiles for shapes it has not met yet, and graphs that it captures, do not come up in a few
warm-up requests. Every play draws other prompts than the run and than the plays before it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from loadgen.client.engine import Send
from loadgen.plan import ClientPlan
from loadgen.rundir import records

PLAY_S = 10.0  # of a load that lasts; a burst is played whole
MOST_PLAYS = 6
SETTLED_RATIO = 0.05  # of the mean time a token: two plays draw other lengths and arrivals, and differ by a few percent


async def play(plan: ClientPlan, send: Send, say: Callable[[str], None]) -> None:
    """Plays the first seconds of the plan's load until the mean time between tokens of two plays is about the same.
    Raises TransportError."""
    before_ms = None
    for number in range(1, MOST_PLAYS + 1):
        token_ms = await _played(_beginning(plan, number), send)
        if token_ms is None:
            say(f"note: no request of the load's warm-up succeeded, in play {number}; the run begins all the same.")
            return
        say(f"warming up with the load, play {number}: {token_ms:.2f} ms between tokens")
        if before_ms is not None and abs(token_ms / before_ms - 1) <= SETTLED_RATIO:
            return
        before_ms = token_ms
    say(f"note: step times did not settle within {SETTLED_RATIO:.0%} in {MOST_PLAYS} plays of the load's beginning.")


def _beginning(plan: ClientPlan, number: int) -> ClientPlan:
    """The plan of one play."""
    load = plan.job.load
    lasts = load.streams or load.trace or load.sessions or load.arrival.kind != "burst"
    duration_s = min(load.duration_s or PLAY_S, PLAY_S) if lasts else None
    part = msgspec.structs.replace(load, seed=load.seed + number, duration_s=duration_s)
    return msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, load=part, warmup=0))


async def _played(plan: ClientPlan, send: Send) -> float | None:
    """Mean milliseconds between tokens, or of a request where replies have one token or come whole; None where no
    request succeeded."""
    with tempfile.TemporaryDirectory(prefix="loadgen-warmup-") as scratch:
        directory = Path(scratch)
        await send(plan, directory, lambda snapshots: None)
        table = records.read(directory)[0].measured()
    served = table.select(table.ok)
    if not len(served):
        return None
    if len(served.itl_us):
        return float(served.itl_us.mean()) / 1e3
    return float(np.mean(served.done_ns - served.sent_ns)) / 1e6
