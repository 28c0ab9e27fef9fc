"""Results of cells with numbers that are easy to reckon with."""

from __future__ import annotations

from typing import Any

from training_probe.grid import cell
from training_probe.results import CellResult, Outcome, of_cell

HOSTILE = "a|b_c\\d $e$ %f& #g {h} ~i ^j <b>k</b> [l](m) \x1b[31mred\r\nrow\u202e `x`"


def result(
    method: str = "Z3",
    tokens_per_s: float | None = 1000.0,
    *,
    outcome: Outcome = "ok",
    platform: str = "NVIDIA H200",
    reason: str = "",
    runs: list[float] | None = None,
    said: dict[str, Any] | None = None,
    **of: Any,
) -> CellResult:
    """A result of a deepspeed cell of 7b on 8 GPUs. of: what else the cell is; said: other fields of its result."""
    asked = cell(method, **{"model": "7b", "gpus": 8, **of})
    more: dict[str, Any] = {}
    if outcome == "ok":
        more = {
            "valid": True, "tokens_per_s": tokens_per_s, "tokens_per_s_std": 12.5, "tokens_per_s_runs": runs or [],
            "runs": 3, "warmup_steps": 30, "steps": 100, "peak_memory_gb": 31.5, "peak_reserved_gb": 40.25,
        }  # fmt: skip
    return of_cell(asked, platform=platform, outcome=outcome, reason=reason, **(more | (said or {})))
