"""How does the load test go that is on? Rates and quantiles of the last seconds, the server beside the client."""

from __future__ import annotations

import panels as p
import queries as q
from panels import Query

RUN = f"{{{q.RUN}}}"
REQUESTS = f"sum by (run_id) (llm_dissect_requests_total{RUN})"
FAILED = f"sum by (run_id) (llm_dissect_requests_total{{{q.FAILED}}})"

NARROW = 3  # of 24 columns: eight panels fit in the first row

NOW = [
    p.number(
        "Output tokens/s", p.PER_SECOND, q.by_run(q.rate("llm_dissect_events_received_total")),
        "As they come, an event taken for one.", NARROW,
    ),
    p.number("ttft p99", p.SECONDS, Query(q.quantile(q.TTFT, 0.99), "{{run_id}}"), "Of the last seconds.", NARROW),
    p.number("Requests that ended", p.COUNT, q.by_run(REQUESTS), width=NARROW),
    p.number(
        "Of those planned", p.RATIO, q.by_run(f"{REQUESTS} / {q.gauge('llm_dissect_requests_planned')}"),
        "Runs that last a given time plan no number.", NARROW,
    ),
    p.number(
        "Failed", p.RATIO, q.by_run(f"{FAILED} / ({REQUESTS} > 0)"),
        "Of the requests that ended; those that the client cancelled itself do not count as failed.", NARROW,
    ),
    *q.live(NARROW),
]  # fmt: skip

LOAD = [
    p.lines(
        "Requests by outcome", p.PER_SECOND, Query(q.rate("llm_dissect_requests_total", "outcome"), "{{outcome}}"),
        about="Requests that ended, all chosen runs together.", stacked=True,
    ),
    p.lines(
        "In flight",
        p.COUNT,
        q.by_run(q.gauge("llm_dissect_requests_in_flight")),
        Query(
            q.gauge("llm_dissect_backlog_growth_requests_per_second"),
            "backlog growth {{run_id}}",
            p.PER_SECOND,
            right=True,
        ),
        about="How many more arrive a second than leave stands on the right, while the server falls behind.",
    ),
    p.lines(
        "Tokens",
        p.PER_SECOND,
        q.by_run(q.rate("llm_dissect_output_tokens_total"), "output"),
        q.by_run(q.rate("llm_dissect_prompt_tokens_total"), "prompt"),
        q.by_run(q.rate("llm_dissect_events_total"), "events"),
        q.by_run(q.rate("llm_dissect_events_received_total"), "events as they come"),
        about="A second. All but the events as they come are counted when their request ends.",
    ),
]  # fmt: skip

LATENCY = [
    *(
        p.heat(title, f"sum by (le) (increase({name}_bucket{RUN}[$__rate_interval]))", "All chosen runs together.")
        for title, name in q.LATENCIES.items()
    ),
    *(
        p.lines(
            title, p.SECONDS, *q.quantiles(name), exemplars=True,
            about="Dots are single requests, by id." if name == q.TTFT else "",
        )
        for title, name in q.LATENCIES.items()
    ),
    p.lines("Gaps between events", p.SECONDS, *q.quantiles(q.ITL)),
    p.lines(
        "Send lag", p.SECONDS, *q.quantiles(q.SEND_LAG),
        about="How long after they were due requests left. High: the client, not the server, is slow.",
    ),
]  # fmt: skip

SERVER = [
    p.lines(
        "Batch and queue",
        p.COUNT,
        q.by_run(q.gauge("llm_dissect_server_requests_running"), "running"),
        q.by_run(q.gauge("llm_dissect_server_requests_waiting"), "waiting"),
        q.by_run(q.gauge("llm_dissect_requests_in_flight"), "in flight at the client"),
        about="From the server's /metrics, where it has any.",
    ),
    p.lines(
        "Waiting, and time to first token",
        p.COUNT,
        q.by_run(q.gauge("llm_dissect_server_requests_waiting"), "waiting"),
        Query(q.quantile(q.TTFT, 0.99), "ttft p99 {{run_id}}", p.SECONDS, right=True),
    ),
    p.lines(
        "KV cache, and time per output token",
        p.RATIO,
        q.by_run(q.gauge("llm_dissect_server_kv_cache_usage_ratio"), "KV cache"),
        Query(q.quantile(q.TPOT, 0.99), "tpot p99 {{run_id}}", p.SECONDS, right=True),
    ),
    p.lines(
        "Preemptions", p.PER_SECOND, q.by_run(q.rate("llm_dissect_server_preemptions_total")),
        about="Requests that the server threw out of its batch for want of KV cache.",
    ),
]  # fmt: skip

ERRORS = [
    p.lines(
        "Failed, by outcome", p.PER_SECOND,
        q.by_run(q.rate("llm_dissect_requests_total", "run_id, outcome", q.FAILED), "{{outcome}}"), width=12,
    ),
    p.lines(
        "Failed, of the last 5 minutes", p.RATIO,
        q.by_run(f"run_id:llm_dissect_request_errors:ratio_rate5m{RUN}"), width=12,
        about="Above 1 % for a minute the alert RunErrorRatio fires.",
    ),
]  # fmt: skip

GPUS = [
    p.lines(title, unit, q.by_run(q.gauge(f"llm_dissect_gpu_{name}", "run_id, gpu"), "GPU {{gpu}}"))
    for title, unit, name in (
        ("Power", p.WATTS, "power_watts"),
        ("Memory", p.BYTES, "memory_used_bytes"),
        ("Utilization", p.RATIO, "utilization_ratio"),
    )
] + [
    p.lines(
        "Energy", p.WATTS, q.by_run(q.rate("llm_dissect_gpu_energy_joules_total", "run_id, gpu"), "GPU {{gpu}}"),
        about="Joules a second by the GPU's own counter.",
    ),
    p.lines(
        "Throttled", p.RATIO,
        q.by_run(q.rate("llm_dissect_gpu_throttled_seconds_total", "run_id, gpu, reason"), "GPU {{gpu}} {{reason}}"),
        about="Part of the time in which heat, or the power limit, held its clocks back.",
    ),
]  # fmt: skip

BOARD = p.dashboard(
    "llm-dissect-serving",
    "Serving run",
    "A load test while it goes on: loadgen export --runs runs",
    {
        "Now": NOW,
        "Load": LOAD,
        "Latency, as the client sees it": LATENCY,
        "The server's own view beside the client's": SERVER,
        "Errors": ERRORS,
        "GPUs, sampled by the client on this machine": GPUS,
    },
    program="loadgen",
    every=False,
    span="15m",
)
