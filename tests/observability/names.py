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
    "llm_dissect_time_to_first_token_seconds",
    "llm_dissect_time_per_output_token_seconds",
    "llm_dissect_inter_token_latency_seconds",
    "llm_dissect_end_to_end_latency_seconds",
    "llm_dissect_send_lag_seconds",
}
COUNTERS = {
    "llm_dissect_requests_total",
    "llm_dissect_prompt_tokens_total",
    "llm_dissect_output_tokens_total",
    "llm_dissect_events_total",
    "llm_dissect_events_received_total",
    "llm_dissect_server_preemptions_total",
    "llm_dissect_gpu_energy_joules_total",
    "llm_dissect_gpu_throttled_seconds_total",
    "llm_dissect_training_steps_total",
    "llm_dissect_training_tokens_total",
}
GAUGES = {
    "llm_dissect_run_info",
    "llm_dissect_run_state",
    "llm_dissect_run_updated_timestamp_seconds",
    "llm_dissect_requests_planned",
    "llm_dissect_requests_in_flight",
    "llm_dissect_backlog_growth_requests_per_second",
    "llm_dissect_measured_seconds",
    "llm_dissect_server_requests_running",
    "llm_dissect_server_requests_waiting",
    "llm_dissect_server_kv_cache_usage_ratio",
    "llm_dissect_gpu_memory_used_bytes",
    "llm_dissect_gpu_power_watts",
    "llm_dissect_gpu_utilization_ratio",
    "llm_dissect_training_step_seconds",
    "llm_dissect_training_tokens_per_second",
    "llm_dissect_training_loss",
    "llm_dissect_training_mfu_ratio",
    "llm_dissect_training_peak_memory_bytes",
    "llm_dissect_training_predicted_memory_bytes",
    "llm_dissect_training_energy_joules_per_token",
    "llm_dissect_training_throttled_ratio",
    "llm_dissect_training_cells",
    "llm_dissect_training_cells_planned",
    "llm_dissect_exporter_runs",
    "llm_dissect_exporter_broken_snapshots",
    "llm_dissect_exporter_scrape_seconds",
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
