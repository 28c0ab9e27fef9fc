"""What the server's own metrics and its GPUs say against a run's numbers. Pure, as `findings`."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET

from loadgen.document.content import number
from loadgen.monitor.server_view import ServerStats
from loadgen.report.finding import THERMAL_RATIO, Finding, share, throttled
from loadgen.report.schema import Numbers

# A preempted request computes its prompt again: when more than a hundredth are, p99 of ttft and tpot is theirs.
PREEMPTIONS_WARNING_RATIO = 0.01
# A server under load may miss a sample now and then; beyond a tenth, its largest values may have been missed.
SAMPLES_FAILED_RATIO = 0.1
# A router that takes turns splits a hundred requests far better than this.
IMBALANCE_RATIO = 1.5
POWER_RATIO = 0.1  # of the time, from which on the power limit is worth a word


def find(numbers: Numbers) -> list[Finding]:
    return [*_server(numbers), *_gpus(numbers)]


def _server(numbers: Numbers) -> Iterator[Finding]:
    server, requests = numbers.server, numbers.requests
    if server is None:
        return
    preemptions = server.preemptions
    preempted = preemptions or server.paused_max
    if preempted:
        many = preempted > PREEMPTIONS_WARNING_RATIO * (requests.ok + requests.failed)
        counted = f"preempted {preemptions} times" if preemptions else f"had {preempted} requests preempted at once"
        yield Finding(
            code="PREEMPTIONS",
            severity="warning" if many else "info",
            message=f"The server {counted}: its KV cache was too small for the load, so ttft, tpot "
            "and itl include work that was done twice.",
            advice="Lower the load or the lengths, or give the server more memory for its KV cache.",
        )
    yield from _lost(server)
    yield from _imbalance(server)
    gaps = [server.problem] if server.problem else []
    lost = sum(each.silent for each in server.replicas or () if each.lost_s is not UNSET)
    if server.failed - lost > SAMPLES_FAILED_RATIO * server.samples:
        gaps.append(f"{server.failed} of {server.samples} samples failed ({server.failure})")
    if not server.covered and not server.problem:
        gaps.append("the samples do not reach from before the first request to after the last reply")
    if gaps:
        yield Finding(
            code="SERVER_METRICS",
            severity="info",
            message=f"The server's own view has gaps: {'; '.join(gaps)}.",
            advice="Latencies and throughput do not depend on it; see that GET /metrics works where the client runs.",
        )


def _gpus(numbers: Numbers) -> Iterator[Finding]:
    """What slowed the server's GPUs besides the load, by their driver and by NVIDIA's exporter."""
    each = [] if numbers.gpus is None else numbers.gpus.each
    slowed = [f"GPU {gpu.index} {', '.join(gpu.slowdowns)}" for gpu in each if gpu.slowdowns]
    if (heat := _held_back(numbers, "thermal", THERMAL_RATIO)) or slowed:
        yield throttled("", "; ".join(heat or slowed), counted=bool(heat))
    elif power := _held_back(numbers, "power", POWER_RATIO):
        yield Finding(
            code="THROTTLED",
            severity="info",
            message=f"The power limit held a GPU's clocks back: {'; '.join(power)}.",
            advice="It does so at large products. Name the limit beside the numbers, and compare runs under the same.",
        )
    shared = max(each, key=lambda gpu: (gpu.others, gpu.processes or 0), default=None)
    if shared is not None and (shared.others or (shared.processes or 0) > 1):
        several = "1 process" if shared.others == 1 else f"{shared.others or shared.processes} processes"
        came = f"{several} came to GPU {shared.index} or left it during the run, as a server's do not."
        yield Finding(
            code="GPU_SHARED",
            severity="warning",
            message=came if shared.others else f"{several} were on GPU {shared.index}; of most servers it is one.",
            advice="See with nvidia-smi whose they are, and measure when the server has its GPUs to itself.",
        )


def _held_back(numbers: Numbers, by: str, most_ratio: float) -> list[str]:
    """The GPUs whose clocks were held back for more than that share of the time, and for how long."""
    each = [] if numbers.gpus is None else numbers.gpus.each
    ratios = [(gpu.index, getattr(gpu, f"{by}_ratio") or 0.0) for gpu in each]
    held = [f"GPU {index} {share(ratio, 1)} of the time" for index, ratio in ratios if ratio > most_ratio]
    seconds = UNSET if numbers.server is None else getattr(numbers.server, f"gpu_{by}_s")
    if seconds is not UNSET and seconds > most_ratio * (numbers.duration_s or 0.0):
        held.append(f"{number(seconds)} s of the GPUs that --metrics-url shows")
    return held


def _lost(server: ServerStats) -> Iterator[Finding]:
    """Replicas that no longer answered at the end."""
    replicas = server.replicas or []
    lost = [each for each in replicas if each.lost_s is not UNSET]
    if lost and len(replicas) > 1:
        seen = (f"last {number(each.lost_s)} s into the run" if each.lost_s else "not once" for each in lost)
        outages = [f"{each.url} answered {when}" for each, when in zip(lost, seen, strict=True)]
        yield Finding(
            code="REPLICA_LOST",
            severity="warning",
            message=f"Of {len(replicas)} replicas, {', and '.join(outages)}: requests that were there failed, or the "
            "router sent them again, which is part of their latency.",
            advice="Look at its log; throughput is that of the others.",
        )


def _imbalance(server: ServerStats) -> Iterator[Finding]:
    """Replicas of which one did far more than its share, or nothing, among those that ran to the end."""
    tokens = [each.generation_tokens or 0 for each in server.replicas or () if each.lost_s is UNSET]
    mean = sum(tokens) / max(1, len(tokens))
    if len(tokens) > 1 and (max(tokens) > IMBALANCE_RATIO * mean or (mean and not min(tokens))):
        yield Finding(
            code="IMBALANCE",
            severity="warning",
            message=f"Of {len(tokens)} replicas, the busiest generated {max(tokens) / mean:.2f} times the mean of "
            f"their output tokens, and the idlest {min(tokens) / mean:.2f} times.",
            advice="Look at the router's policy, --session-header and --prefix: these numbers are of that split.",
        )
