"""Several machines in a report: findings, and lines of text. Names of machines came from a cluster and are escaped by
whoever shows them."""

from __future__ import annotations

from collections.abc import Iterator

from backends.untrusted import escaped
from loadgen.report.finding import Finding
from loadgen.rundir.cluster_facts import ClusterFacts, NodeFacts

# A millisecond between machines moves what is laid over time; a twentieth of ttft would show in which came first.
CLOCK_MS, CLOCK_TTFT_RATIO = 1.0, 0.05
NAMED = 5


def find(cluster: ClusterFacts, ttft_ms: float | None) -> Iterator[Finding]:
    """What machines that were lost, and clocks that are not known well, do to a run's numbers."""
    lost = cluster.lost
    if lost:
        stayed = [node for node in lost if node.left_there]
        yield Finding(
            code="NODE_LOST",
            severity="invalid",
            message=f"{len(lost)} of {len(cluster.nodes)} machines did not live to the end of the run: "
            + _named([f"{node.name}: {node.lost}" for node in lost])
            + "; what they did not finish failed as node_lost.",
            advice=(
                "`loadgen collect` with this directory fetches what lies on "
                f"{_named([node.name for node in stayed])}, once that is back; then run again."
                if stayed
                else "Mend that machine, or leave it out with fewer --nodes, and run again."
            ),
        )
    limit_ms = CLOCK_MS if ttft_ms is None else min(CLOCK_MS, CLOCK_TTFT_RATIO * ttft_ms)
    unsure = [node for node in cluster.nodes if not node.lost and not (node.clock_bound_ms or 0.0) <= limit_ms]
    unseen = [node for node in cluster.nodes if not node.lost and node.clock_bound_ms is None and cluster.t0_ns]
    if unsure or unseen:
        worst = max((node.clock_bound_ms or 0.0 for node in unsure), default=0.0)
        known = f"are known within {worst:.2f} ms only" if unsure else "are not known"
        yield Finding(
            code="CLOCK",
            severity="warning",
            message=f"The clocks of {_named([node.name for node in unsure or unseen])} {known}: what is laid over time "
            f"(in flight, throughput, start) may be off by as much; more than {limit_ms:.2f} ms matters here. "
            "Latencies are differences on one clock and do not depend on it.",
            advice="Let UDP pass between the machines, and keep the network free of other traffic; the clock of a "
            "distant machine is known no better than half its round trip.",
        )


def _named(texts: list[str]) -> str:
    return ", ".join(texts[:NAMED]) + (f" and {len(texts) - NAMED} more" if len(texts) > NAMED else "")


def lines(cluster: ClusterFacts) -> Iterator[str]:
    """What each machine did, in a line; of many, the first."""
    bounds = [node.clock_bound_ms for node in cluster.nodes if node.clock_bound_ms is not None]
    spread = cluster.start_spread_ms
    yield (
        f"Machines: {len(cluster.nodes)} ({cluster.strategy} on Ray {escaped(cluster.address)})"
        + (f"; clocks known within {max(bounds):.3f} ms" if bounds else "")
        + (f"; first requests left within {spread:.2f} ms of each other" if spread is not None else "")
        + f"; {cluster.records_bytes / 1e6:.1f} MB of records came home."
    )
    for note in cluster.notes:
        yield f"Note: {escaped(note)}."
    for node in cluster.nodes[:NAMED]:
        yield _node_line(node)


def _node_line(node: NodeFacts) -> str:
    many = node.client_processes
    parts = [f"{many} client process{'' if many == 1 else 'es'} on {node.cpus} CPUs"]
    if node.clock_offset_ns is not None:
        parts.append(f"clock {node.clock_offset_ns / 1e9:+.6f} s, drift {node.clock_drift_ppm:.1f} ppm")
    if node.start_lag_ms is not None:
        parts.append(f"first request {node.start_lag_ms:.2f} ms after it was due")
    if node.together_events_per_s is not None:
        alone = "" if node.alone_events_per_s is None else f" ({node.alone_events_per_s:,.0f} alone)"
        parts.append(f"ceiling {node.together_events_per_s:,.0f} events/s a core while all measured{alone}")
    if node.lost:
        parts.append(f"LOST: {escaped(node.lost)}")
    return f"- {escaped(node.name)}: {'; '.join(parts)}."
