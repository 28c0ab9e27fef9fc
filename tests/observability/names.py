"""The metrics that dashboards and rules may speak of, and where their queries are."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

COMPOSE = Path(__file__).parents[2] / "compose"
DASHBOARDS = COMPOSE / "grafana" / "dashboards"

HISTOGRAMS = {
    "bench_time_to_first_token_seconds",
    "bench_time_per_output_token_seconds",
    "bench_inter_token_latency_seconds",
    "bench_end_to_end_latency_seconds",
    "bench_send_lag_seconds",
}
COUNTERS = {
    "bench_requests_total",
    "bench_prompt_tokens_total",
    "bench_output_tokens_total",
    "bench_events_total",
    "bench_events_received_total",
    "bench_server_preemptions_total",
}
GAUGES = {
    "bench_run_info",
    "bench_run_state",
    "bench_run_updated_timestamp_seconds",
    "bench_requests_planned",
    "bench_requests_in_flight",
    "bench_backlog_growth_requests_per_second",
    "bench_measured_seconds",
    "bench_server_requests_running",
    "bench_server_requests_waiting",
    "bench_server_kv_cache_usage_ratio",
    "bench_gpu_memory_used_bytes",
    "bench_gpu_power_watts",
    "bench_gpu_utilization_ratio",
    "bench_training_step_seconds",
    "bench_training_tokens_per_second",
    "bench_training_loss",
    "bench_training_mfu_ratio",
    "bench_training_peak_memory_bytes",
    "bench_training_predicted_memory_bytes",
    "bench_training_cells",
    "bench_training_cells_planned",
    "bench_exporter_runs",
    "bench_exporter_broken_snapshots",
    "bench_exporter_scrape_seconds",
}
# Prometheus' own, and those of NVIDIA's DCGM exporter.
PROMETHEUS = {"up", "ALERTS"}
DCGM = {"DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_GPU_UTIL"}

EXPORTED = COUNTERS | GAUGES | {name + end for name in HISTOGRAMS for end in ("_bucket", "_sum", "_count")}

_STRINGS = re.compile(r"\"[^\"]*\"|'[^']*'")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_MATCHERS = re.compile(r"\{[^}]*\}")
_RANGES = re.compile(r"\[[^\]]*\]")
_WORDS = re.compile(r"(?<![\w:.$])[a-zA-Z_:][\w:]*(?!\w)(?!\s*\()")
_OPERATORS = {"and", "or", "unless", "bool", "offset"}


@dataclass(frozen=True)
class Query:
    """One query of a dashboard. `instant`: its value now, else over time."""

    board: str
    panel: str
    expr: str
    legend: str
    instant: bool

    def __str__(self) -> str:
        return f"{self.board}, {self.panel}: {self.expr}"


def selected(expr: str) -> list[str]:
    """The metrics that a PromQL expression reads, each as often as it does."""
    for part in (_STRINGS, _GROUPING, _MATCHERS, _RANGES):
        expr = part.sub(" ", expr)
    return [word for word in _WORDS.findall(expr) if word not in _OPERATORS]


def metrics(expr: str) -> set[str]:
    return set(selected(expr))


def boards() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def queries() -> list[Query]:
    """Every query of every panel."""
    return [
        Query(name, panel["title"], target["expr"], target.get("legendFormat", ""), bool(target.get("instant")))
        for name, board in boards().items()
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]


def rules() -> list[dict[str, Any]]:
    read = yaml.safe_load((COMPOSE / "prometheus" / "rules.yml").read_text())
    return [rule for group in read["groups"] for rule in group["rules"]]


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}
