"""How do runs differ that are over?

A run that was over before Prometheus first saw it has counters that never rise, so nothing here is a rate but what says
so: it reads counters and buckets themselves, at their last value in the time range.
"""

from __future__ import annotations

import panels as p
import queries as q
from panels import Query

IDENTITY = "run_id, program, backend, model, arrival, emulated, version"
REQUESTS, OK = q.last("llm_dissect_requests_total"), q.last("llm_dissect_requests_total", labels=q.OK)
FAILED = q.last("llm_dissect_requests_total", labels=q.FAILED)
OUTPUT, DURATION = q.last("llm_dissect_output_tokens_total"), q.last("llm_dissect_measured_seconds", total="max")
SEEN = "run_id_state:llm_dissect_run_state:seen_timestamp_seconds"

RUNS = [
    p.rows(
        "What was run",
        Query(q.last("llm_dissect_run_info", IDENTITY, total="max")),
        Query(
            f"topk by (run_id) (1, last_over_time({SEEN}{{{q.RUN}}}[$__range])) * 1000", "last seen", "dateTimeAsIso"
        ),
        about="Emulated: nothing of it says anything about hardware.",
    )
]

THROUGHPUT = [
    p.rows(
        "Whole runs",
        Query(REQUESTS, "requests", p.COUNT),
        Query(OK, "ok", p.COUNT),
        Query(f"{FAILED} / ({REQUESTS} > 0)", "failed", p.RATIO),
        Query(q.last("llm_dissect_prompt_tokens_total"), "prompt tokens", p.COUNT),
        Query(OUTPUT, "output tokens", p.COUNT),
        Query(f"{OUTPUT} / {OK}", "output tokens a request", p.COUNT),
        Query(DURATION, "duration", p.SECONDS),
        Query(f"{OK} / {DURATION}", "ok requests", p.PER_SECOND),
        Query(f"{OUTPUT} / {DURATION}", "output tokens/s", p.PER_SECOND),
        width=16,
    ),
    p.bars(
        "Best half minute",
        p.PER_SECOND,
        q.by_run(f"max by (run_id) (max_over_time(run_id:llm_dissect_output_tokens:rate30s{{{q.RUN}}}[$__range]))"),
        about="Output tokens a second, counted when their request ends: replies that end together show more than the "
        "server gave. Zero for a run that was over before Prometheus first saw it.",
    ),
]

LATENCY = [
    p.bars(title, p.SECONDS, *(q.by_run(q.whole(name, part), label) for label, part in q.QUANTILES.items()))
    for title, name in q.LATENCIES.items()
]

NUMBERS = [
    p.rows(
        title,
        *(Query(q.whole(name, part), label, p.SECONDS) for label, part in q.QUANTILES.items()),
        Query(f"{q.last(name + '_sum')} / {q.last(name + '_count')}", "mean", p.SECONDS),
        Query(q.last(name + "_count"), "n", p.COUNT),
        width=12,
    )
    for title, name in (
        ("Time to first token", q.TTFT),
        ("Time per output token", q.TPOT),
        ("Gaps between events", q.ITL),
        ("End to end", q.E2EL),
        ("Send lag", q.SEND_LAG),
    )
]

BOARD = p.dashboard(
    "llm-dissect-comparison",
    "Comparison of runs",
    "Runs that are over, side by side, at their last values in the time range.",
    {
        "Runs": RUNS,
        "Requests and tokens": THROUGHPUT,
        "Latency of whole runs": LATENCY,
        "The same as numbers, right within a bucket (a factor of 1.41); report.md has exact ones": NUMBERS,
    },
    program="loadgen",
    every=True,
    span="24h",
)
