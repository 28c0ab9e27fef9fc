"""How far is the sweep, and how fast are its cells? Gauges of the present cell, and of those that are over."""

from __future__ import annotations

import panels as p
import queries as q
from panels import Query

CELL = "run_id, cell, engine, method, model"
BY_OUTCOME = q.gauge("llm_dissect_training_cells", "run_id, outcome")
DONE = f"sum by (run_id) ({BY_OUTCOME})"
PLANNED = q.gauge("llm_dissect_training_cells_planned")


def of_cells(name: str) -> Query:
    return q.by_run(q.gauge(f"llm_dissect_training_{name}", CELL), "{{cell}}")


def last(name: str) -> str:
    return q.last(f"llm_dissect_training_{name}", CELL, total="max")


PEAK, PREDICTED = last("peak_memory_bytes"), last("predicted_memory_bytes")

NOW = [
    *q.live(),
    p.number("Cells that are over", p.COUNT, q.by_run(DONE)),
    p.number("Of those planned", p.RATIO, q.by_run(f"{DONE} / {PLANNED}")),
    p.number(
        "Present cell", p.COUNT,
        Query(f"max by (run_id, cell) (changes(llm_dissect_training_step_seconds{{{q.RUN}}}[1m])) > 0", "{{cell}}"),
        "The cell whose step time changed in the last minute.", name=True,
    ),
    p.bars("Cells by outcome", p.COUNT, q.by_run(f"{BY_OUTCOME} > 0", "{{outcome}}")),
    p.lines("Progress", p.COUNT, q.by_run(DONE, "over"), q.by_run(PLANNED, "planned"), width=16),
]  # fmt: skip

STEPS = [
    p.lines(
        "Tokens", p.PER_SECOND, of_cells("tokens_per_second"), width=12,
        about="All GPUs together: of the last steps; the mean of the measured ones once a cell is over.",
    ),
    p.lines("Model FLOPs utilization", p.RATIO, of_cells("mfu_ratio"), width=12),
    p.lines("Step", p.SECONDS, of_cells("step_seconds"), width=12),
    p.lines(
        "Loss", "none", of_cells("loss"), width=12, about="On random tokens: it shows that a step learns, no more."
    ),
]  # fmt: skip

WORK = [
    p.lines(
        "Steps", p.PER_SECOND, Query(q.rate("llm_dissect_training_steps_total", CELL), "{{cell}}"),
        about="Warm-up and searches included.",
    ),
    p.lines("Tokens trained on", p.PER_SECOND, Query(q.rate("llm_dissect_training_tokens_total", CELL), "{{cell}}")),
    p.bars("Energy of a token", p.JOULES, Query(last("energy_joules_per_token"), "{{cell}}")),
    p.bars(
        "Throttled", p.RATIO,
        Query(q.last("llm_dissect_training_throttled_ratio", f"{CELL}, reason", total="max"), "{{cell}} {{reason}}"),
        about="Part of a cell in which heat, or the power limit, held a GPU's clocks back.",
    ),
]  # fmt: skip

MEMORY = [
    p.bars(
        "Peak beside predicted", p.BYTES,
        Query(PEAK, "{{cell}} peak {{run_id}}"), Query(PREDICTED, "{{cell}} predicted {{run_id}}"),
        about="Highest memory allocated on any rank.", width=12,
    ),
    p.bars("Predicted / peak", p.RATIO, Query(f"{PREDICTED} / {PEAK}", "{{cell}}"), width=12),
]  # fmt: skip

CELLS = [
    p.rows(
        "All cells in the time range",
        Query(last("tokens_per_second"), "tokens/s", p.COUNT),
        Query(last("mfu_ratio"), "MFU", p.RATIO),
        Query(last("step_seconds"), "step", p.SECONDS),
        Query(last("loss"), "loss", "none"),
        Query(PEAK, "peak", p.BYTES),
        Query(PREDICTED, "predicted", p.BYTES),
        height=12,
    )
]

GPUS = [
    p.lines(title, unit, Query(f"max by (gpu) (DCGM_FI_DEV_{field}", "GPU {{gpu}}"))
    for title, unit, field in (
        ("Power", p.WATTS, "POWER_USAGE)"),
        ("Memory", p.BYTES, "FB_USED) * 2^20"),
        ("Utilization", p.RATIO, "GPU_UTIL) / 100"),
    )
]

BOARD = p.dashboard(
    "llm-dissect-training",
    "Training sweep",
    "A sweep of training_probe while it goes on: loadgen export --runs runs",
    {
        "Now": NOW,
        "Steps": STEPS,
        "Work, energy and clocks": WORK,
        "Memory": MEMORY,
        "Cells": CELLS,
        "GPUs of this machine, by NVIDIA's DCGM exporter (docker compose --profile gpu up)": GPUS,
    },
    program="training_probe",
    every=False,
    span="1h",
)
