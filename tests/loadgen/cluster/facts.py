"""Facts of a run of several machines, for tests."""

from __future__ import annotations

from typing import Any

from loadgen.rundir.cluster_facts import ClusterFacts, NodeFacts


def node(number: int, **changes: Any) -> NodeFacts:
    values: dict[str, Any] = {
        "name": f"10.0.0.{number}", "cpus": 8, "client_processes": 1, "first_process": number,
        "clock_offset_ns": 5_000, "clock_bound_ms": 0.04, "start_lag_ms": 0.2 * number,
    }  # fmt: skip
    return NodeFacts(**values | changes)


def cluster(*nodes: NodeFacts, **changes: Any) -> ClusterFacts:
    values: dict[str, Any] = {"address": "10.0.0.1:6379", "strategy": "STRICT_SPREAD", "t0_ns": 1}
    return ClusterFacts(**values | changes, nodes=list(nodes))
