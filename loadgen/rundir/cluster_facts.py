"""What a manifest and a report say of the machines that played a load together."""

from __future__ import annotations

import msgspec


class NodeFacts(msgspec.Struct, kw_only=True):
    """One machine. Clock: the machine's minus the driver's at t = 0; None where it was not seen.

    start_lag_ms: how long after it was due its first request left, on the driver's clock. alone, together: the client's
    ceiling, in events a second a core, measured on this machine while no other measured, and while all did.
    """

    name: str
    hostname: str = ""
    cpus: int = 0
    first_process: int = 0
    client_processes: int = 0
    directory: str = ""  # on that machine, while its records are there
    clock_offset_ns: int | None = None
    clock_bound_ms: float | None = None
    clock_drift_ppm: float = 0.0
    start_lag_ms: float | None = None
    alone_events_per_s: float | None = None
    together_events_per_s: float | None = None
    lost: str = ""  # why, a clause; empty: it lived to the end
    left_there: bool = False  # whether its records stayed on that machine


class ClusterFacts(msgspec.Struct, kw_only=True):
    """A run of several machines. strategy: of Ray's placement group. start_spread_ms: between the machines' first
    requests. records_bytes: what came home."""

    address: str
    strategy: str
    notes: tuple[str, ...] = ()
    nodes: list[NodeFacts]
    t0_ns: int | None = None  # the driver's monotonic clock
    start_spread_ms: float | None = None
    records_bytes: int = 0

    @property
    def lost(self) -> list[NodeFacts]:
        return [node for node in self.nodes if node.lost]
