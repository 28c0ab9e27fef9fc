"""`python -m servers.plan.knee`: where a search on a live server starts, from the model of its hardware.

The options of a run as JSON on standard input, with `limits_ms` and `attain`; {"rate_per_s": number or null} on
standard output. loadgen asks in a process of its own, since it imports nothing of `servers`.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from loadgen.config import Config
from loadgen.server import embedded
from servers.plan.sizing import STRETCH, Demand, LatencyLimits, NotMet, SizedServer
from servers.simulator.build import emulate
from servers.simulator.options import Hardware

REQUESTS = 400  # of a virtual run, at least


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """config: options of a run that differ from their defaults."""

    config: dict[str, Any]
    limits_ms: dict[str, float]
    attain: float


def knee(query: Query) -> float | None:
    """Requests a second; None where no rate keeps the limits."""
    config = msgspec.convert({**query.config, "requests": STRETCH * REQUESTS}, Config, strict=False)
    hardware = Hardware(**embedded.modelled(config))
    emulated = emulate(hardware.setup(config.kind, embedded.model_place(config), embedded.model_len(config)))
    demand = Demand(rate=1.0, load=config.load, requests=REQUESTS)
    limits = LatencyLimits(
        seconds={name: limit_ms / 1e3 * config.speed for name, limit_ms in query.limits_ms.items()},
        percentile=100 * query.attain,
    )
    try:
        return SizedServer(emulated, demand, limits).highest()[0] * config.speed
    except NotMet:
        return None


if __name__ == "__main__":
    query = msgspec.json.decode(sys.stdin.buffer.read(), type=Query)
    sys.stdout.write(msgspec.json.encode({"rate_per_s": knee(query)}).decode() + "\n")
