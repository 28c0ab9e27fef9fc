"""The PromQL that the dashboards share, and the panels that every dashboard of something live begins with.

`$run_id` is the dashboard's variable, `$__rate_interval` and `$__range` are Grafana's own.
"""

from __future__ import annotations

from panels import COUNT, SECONDS, Panel, Query, number

RUN = 'run_id=~"$run_id"'
OK = f'{RUN}, outcome="ok"'
FAILED = f'{RUN}, outcome!~"ok|cancelled"'
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

TTFT = "llm_dissect_time_to_first_token_seconds"
TPOT = "llm_dissect_time_per_output_token_seconds"
ITL = "llm_dissect_inter_token_latency_seconds"
E2EL = "llm_dissect_end_to_end_latency_seconds"
SEND_LAG = "llm_dissect_send_lag_seconds"
LATENCIES = {"Time to first token": TTFT, "Time per output token": TPOT, "End to end": E2EL}


def by_run(expr: str, what: str = "") -> Query:
    """Series named by what they are and their run."""
    return Query(expr, f"{what} {{{{run_id}}}}".strip())


def gauge(name: str, by: str = "run_id", labels: str = RUN) -> str:
    return f"max by ({by}) ({name}{{{labels}}})"


def rate(name: str, by: str = "run_id", labels: str = RUN) -> str:
    return f"sum by ({by}) (rate({name}{{{labels}}}[$__rate_interval]))"


def quantile(name: str, q: float) -> str:
    return f"histogram_quantile({q}, {rate(name + '_bucket', 'le, run_id')})"


def quantiles(name: str) -> list[Query]:
    """A line for each quantile and run."""
    return [Query(quantile(name, q), f"{label} {{{{run_id}}}}") for label, q in QUANTILES.items()]


def last(name: str, by: str = "run_id", labels: str = RUN, total: str = "sum") -> str:
    """The last value in the time range: also of runs that are no longer exported."""
    return f"{total} by ({by}) (last_over_time({name}{{{labels}}}[$__range]))"


def whole(name: str, q: float) -> str:
    """A quantile of everything that a run has measured."""
    return f"histogram_quantile({q}, {last(name + '_bucket', 'le, run_id')})"


def live(width: int = 4) -> list[Panel]:
    """State, alerts, and how old they are. width: of each panel."""
    firing = Query('ALERTS{alertstate="firing", run_id=~"$run_id|"}', "{{alertname}} {{run_id}}")
    age = Query(f"time() - {gauge('llm_dissect_run_updated_timestamp_seconds')}", "{{run_id}}")
    return [
        number(
            "State",
            COUNT,
            Query(f"llm_dissect_run_state{{{RUN}}} == 1", "{{state}} {{run_id}}"),
            "Stale: the snapshot is old and the run never said that it ended.",
            width,
            name=True,
        ),
        number(
            "Alerts",
            COUNT,
            firing,
            "Alerts that fire, of these runs and of the exporter.",
            width,
            name=True,
            none="none",
        ),
        number("Snapshot's age", SECONDS, age, "How old what you see is. Grows when the run is over.", width),
    ]
