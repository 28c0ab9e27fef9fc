"""How do runs differ that are over?

A run that was over before Prometheus first saw it has counters that never rise, so nothing here is a rate but what says
so: it reads counters and buckets themselves, at their last value in the time range.
"""

from __future__ import annotations

import queries as q
from grafana_foundation_sdk.models.dashboard import Dashboard
from panels import (
    COUNT,
    PER_SECOND,
    RATIO,
    SECONDS,
    Panel,
    Query,
    Row,
    bars,
    dashboard,
    rows,
)

IDENTITY = "run_id, program, backend, model, arrival, emulated, version"
REQUESTS, OK = q.last("bench_requests_total"), q.last("bench_requests_total", labels=q.OK)
OUTPUT, DURATION = q.last("bench_output_tokens_total"), q.last("bench_measured_seconds", total="max")
SEEN = "run_id_state:bench_run_state:seen_timestamp_seconds"


def board() -> Dashboard:
    return dashboard(
        "llm-dissect-comparison",
        "Comparison of runs",
        "Runs that are over, side by side, at their last values in the time range.",
        [_info(), _throughput(), _bars(), _tables()],
        'bench_run_info{program="loadgen"}',
        every=True,
        span="24h",
    )


def _info() -> Row:
    last_seen = f"topk by (run_id) (1, last_over_time({SEEN}{{{q.RUN}}}[$__range])) * 1000"
    return Row(
        "Runs",
        [
            rows(
                "What was run",
                Query(q.last("bench_run_info", IDENTITY, total="max")),
                Query(last_seen, "last seen", "dateTimeAsIso"),
                about="Emulated: nothing of it says anything about hardware.",
            )
        ],
    )


def _throughput() -> Row:
    return Row(
        "Requests and tokens",
        [
            rows(
                "Whole runs",
                Query(REQUESTS, "requests", COUNT),
                Query(OK, "ok", COUNT),
                Query(f"{q.last('bench_requests_total', labels=q.FAILED)} / ({REQUESTS} > 0)", "failed", RATIO),
                Query(q.last("bench_prompt_tokens_total"), "prompt tokens", COUNT),
                Query(OUTPUT, "output tokens", COUNT),
                Query(f"{OUTPUT} / {OK}", "output tokens a request", COUNT),
                Query(DURATION, "duration", SECONDS),
                Query(f"{OK} / {DURATION}", "ok requests", PER_SECOND),
                Query(f"{OUTPUT} / {DURATION}", "output tokens/s", PER_SECOND),
                width=16,
            ),
            bars(
                "Best half minute",
                PER_SECOND,
                q.by_run(f"max by (run_id) (max_over_time(run_id:bench_output_tokens:rate30s{{{q.RUN}}}[$__range]))"),
                about="Output tokens a second, counted when their request ends: replies that end together show more"
                " than the server gave. Zero for a run that was over before Prometheus first saw it.",
            ),
        ],
    )


def _bars() -> Row:
    return Row(
        "Latency of whole runs",
        [
            bars(title, SECONDS, *(q.by_run(q.whole(name, part), label) for label, part in q.QUANTILES.items()))
            for title, name in q.LATENCIES.items()
        ],
    )


def _tables() -> Row:
    return Row(
        "The same as numbers, right within a bucket (a factor of 1.41); report.md has exact ones",
        [
            _table("Time to first token", q.TTFT),
            _table("Time per output token", q.TPOT),
            _table("Gaps between events", q.ITL),
            _table("End to end", q.E2EL),
            _table("Send lag", q.SEND_LAG),
        ],
    )


def _table(title: str, name: str) -> Panel:
    mean = f"{q.last(name + '_sum')} / {q.last(name + '_count')}"
    columns = [Query(q.whole(name, part), label, SECONDS) for label, part in q.QUANTILES.items()]
    return rows(title, *columns, Query(mean, "mean", SECONDS), Query(q.last(name + "_count"), "n", COUNT), width=12)
