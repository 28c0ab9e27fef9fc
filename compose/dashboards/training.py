"""How far is the sweep, and how fast are its cells? Gauges of the present cell, and of those that are over."""

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
    bars,
    dashboard,
    lines,
    number,
    rows,
)

CELL = "run_id, cell, engine, method, model"
BY_OUTCOME = q.gauge("bench_training_cells", "run_id, outcome")
DONE = f"sum by (run_id) ({BY_OUTCOME})"


def board() -> Dashboard:
    return dashboard(
        "llm-dissect-training",
        "Training sweep",
        "A sweep of training_probe while it goes on: loadgen export --runs runs",
        [_overview(), _steps(), _memory(), _cells(), _gpus()],
        'bench_run_info{program="training_probe"}',
        every=False,
        span="1h",
    )


def _overview() -> Row:
    return Row(
        "Now",
        [
            *q.live(),
            number("Cells that are over", COUNT, q.by_run(DONE)),
            number("Of those planned", RATIO, q.by_run(f"{DONE} / {q.gauge('bench_training_cells_planned')}")),
            number(
                "Present cell",
                COUNT,
                Query(f"max by (run_id, cell) (changes(bench_training_step_seconds{{{q.RUN}}}[1m])) > 0", "{{cell}}"),
                "The cell whose step time changed in the last minute.",
                name=True,
            ),
            bars("Cells by outcome", COUNT, q.by_run(f"{BY_OUTCOME} > 0", "{{outcome}}")),
            lines(
                "Progress",
                COUNT,
                q.by_run(DONE, "over"),
                q.by_run(q.gauge("bench_training_cells_planned"), "planned"),
                width=16,
            ),
        ],
    )


def _steps() -> Row:
    return Row(
        "Steps",
        [
            lines(
                "Tokens",
                PER_SECOND,
                _of_cells("tokens_per_second"),
                width=12,
                about="All GPUs together: of the last steps; the mean of the measured ones once a cell is over.",
            ),
            lines("Model FLOPs utilization", RATIO, _of_cells("mfu_ratio"), width=12),
            lines("Step", SECONDS, _of_cells("step_seconds"), width=12),
            lines(
                "Loss",
                "none",
                _of_cells("loss"),
                width=12,
                about="On random tokens: it shows that a step learns, no more.",
            ),
        ],
    )


def _memory() -> Row:
    peak, predicted = _last("peak_memory_bytes"), _last("predicted_memory_bytes")
    return Row(
        "Memory",
        [
            bars(
                "Peak beside predicted",
                BYTES,
                Query(peak, "{{cell}} peak {{run_id}}"),
                Query(predicted, "{{cell}} predicted {{run_id}}"),
                about="Highest memory allocated on any rank.",
                width=12,
            ),
            bars(
                "Predicted / peak",
                RATIO,
                Query(f"{predicted} / {peak}", "{{cell}}"),
                width=12,
            ),
        ],
    )


def _cells() -> Row:
    return Row(
        "Cells",
        [
            rows(
                "All cells in the time range",
                Query(_last("tokens_per_second"), "tokens/s", COUNT),
                Query(_last("mfu_ratio"), "MFU", RATIO),
                Query(_last("step_seconds"), "step", SECONDS),
                Query(_last("loss"), "loss", "none"),
                Query(_last("peak_memory_bytes"), "peak", BYTES),
                Query(_last("predicted_memory_bytes"), "predicted", BYTES),
                height=12,
            )
        ],
    )


def _gpus() -> Row:
    return Row(
        "GPUs of this machine, by NVIDIA's DCGM exporter (docker compose --profile gpu up)",
        [
            lines("Power", WATTS, Query("max by (gpu) (DCGM_FI_DEV_POWER_USAGE)", "GPU {{gpu}}")),
            lines("Memory", BYTES, Query("max by (gpu) (DCGM_FI_DEV_FB_USED) * 2^20", "GPU {{gpu}}")),
            lines("Utilization", RATIO, Query("max by (gpu) (DCGM_FI_DEV_GPU_UTIL) / 100", "GPU {{gpu}}")),
        ],
    )


def _of_cells(name: str) -> Query:
    return q.by_run(q.gauge(f"bench_training_{name}", CELL), "{{cell}}")


def _last(name: str) -> str:
    return q.last(f"bench_training_{name}", CELL, total="max")
