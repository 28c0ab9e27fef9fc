"""How does the load test go that is on? Rates and quantiles of the last seconds, the server beside the client."""

from __future__ import annotations

import queries as q
from grafana_foundation_sdk.models.dashboard import Dashboard
from panels import (
    BYTES,
    COUNT,
    PER_SECOND,
    RATIO,
    SECONDS,
    WATTS,
    Query,
    Row,
    dashboard,
    heat,
    lines,
    number,
)


def board() -> Dashboard:
    return dashboard(
        "llm-dissect-serving",
        "Serving run",
        "A load test while it goes on: loadgen export --runs runs",
        [_overview(), _load(), _latency(), _server(), _errors(), _gpus()],
        'bench_run_info{program="loadgen"}',
        every=False,
        span="15m",
    )


def _overview() -> Row:
    return Row(
        "Now",
        [
            *q.live(),
            number("Requests that ended", COUNT, q.by_run(f"sum by (run_id) (bench_requests_total{{{q.RUN}}})")),
            number(
                "Of those planned",
                RATIO,
                q.by_run(f"sum by (run_id) (bench_requests_total{{{q.RUN}}}) / {q.gauge('bench_requests_planned')}"),
                "Runs that last a given time plan no number.",
            ),
            number(
                "Failed",
                RATIO,
                q.by_run(
                    f"sum by (run_id) (bench_requests_total{{{q.FAILED}}})"
                    f" / (sum by (run_id) (bench_requests_total{{{q.RUN}}}) > 0)"
                ),
                "Of the requests that ended; those that the client cancelled itself do not count as failed.",
            ),
        ],
    )


def _load() -> Row:
    return Row(
        "Load",
        [
            lines(
                "Requests by outcome",
                PER_SECOND,
                Query(q.rate("bench_requests_total", "outcome"), "{{outcome}}"),
                about="Requests that ended, all chosen runs together.",
                stacked=True,
            ),
            lines("In flight", COUNT, q.by_run(q.gauge("bench_requests_in_flight"))),
            lines(
                "Tokens",
                PER_SECOND,
                q.by_run(q.rate("bench_output_tokens_total"), "output"),
                q.by_run(q.rate("bench_prompt_tokens_total"), "prompt"),
                q.by_run(q.rate("bench_events_total"), "events"),
                q.by_run(q.rate("bench_events_received_total"), "events as they come"),
                about="A second. All but the events as they come are counted when their request ends.",
            ),
        ],
    )


def _latency() -> Row:
    heats = [
        heat(title, f"sum by (le) (increase({name}_bucket{{{q.RUN}}}[$__rate_interval]))", "All chosen runs together.")
        for title, name in q.LATENCIES.items()
    ]
    dots = {q.TTFT: "Dots are single requests, by id."}
    curves = [
        lines(title, SECONDS, *q.quantiles(name), exemplars=True, about=dots.get(name, ""))
        for title, name in q.LATENCIES.items()
    ]
    return Row(
        "Latency, as the client sees it",
        [
            *heats,
            *curves,
            lines("Gaps between events", SECONDS, *q.quantiles(q.ITL)),
            lines(
                "Send lag",
                SECONDS,
                *q.quantiles(q.SEND_LAG),
                about="How long after they were due requests left. High: the client, not the server, is slow.",
            ),
        ],
    )


def _server() -> Row:
    return Row(
        "The server's own view beside the client's",
        [
            lines(
                "Batch and queue",
                COUNT,
                q.by_run(q.gauge("bench_server_requests_running"), "running"),
                q.by_run(q.gauge("bench_server_requests_waiting"), "waiting"),
                q.by_run(q.gauge("bench_requests_in_flight"), "in flight at the client"),
                about="From the server's /metrics, where it has any.",
            ),
            lines(
                "Waiting, and time to first token",
                COUNT,
                q.by_run(q.gauge("bench_server_requests_waiting"), "waiting"),
                Query(q.quantile(q.TTFT, 0.99), "ttft p99 {{run_id}}", SECONDS, right=True),
            ),
            lines(
                "KV cache, and time per output token",
                RATIO,
                q.by_run(q.gauge("bench_server_kv_cache_usage_ratio"), "KV cache"),
                Query(q.quantile(q.TPOT, 0.99), "tpot p99 {{run_id}}", SECONDS, right=True),
            ),
            lines(
                "Preemptions",
                PER_SECOND,
                q.by_run(q.rate("bench_server_preemptions_total")),
                about="Requests that the server threw out of its batch for want of KV cache.",
            ),
        ],
    )


def _errors() -> Row:
    return Row(
        "Errors",
        [
            lines(
                "Failed, by outcome",
                PER_SECOND,
                q.by_run(q.rate("bench_requests_total", "run_id, outcome", q.FAILED), "{{outcome}}"),
                width=12,
            ),
            lines(
                "Failed, of the last 5 minutes",
                RATIO,
                q.by_run(f"run_id:bench_request_errors:ratio_rate5m{{{q.RUN}}}"),
                width=12,
                about="Above 1 % for a minute the alert RunErrorRatio fires.",
            ),
        ],
    )


def _gpus() -> Row:
    return Row(
        "GPUs, sampled by the client on this machine",
        [
            lines("Power", WATTS, q.by_run(q.gauge("bench_gpu_power_watts", "run_id, gpu"), "GPU {{gpu}}")),
            lines("Memory", BYTES, q.by_run(q.gauge("bench_gpu_memory_used_bytes", "run_id, gpu"), "GPU {{gpu}}")),
            lines("Utilization", RATIO, q.by_run(q.gauge("bench_gpu_utilization_ratio", "run_id, gpu"), "GPU {{gpu}}")),
        ],
    )
