"""What a verdict on a run is made of: findings, each with what is wrong and what to do; and one that the runs of both
programs have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Severity = Literal["info", "warning", "invalid"]

THERMAL_RATIO = 0.01  # of the time: heat is not meant to slow a GPU

_ORDER: tuple[Severity, ...] = ("invalid", "warning", "info")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    severity: Severity
    message: str
    advice: str


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def throttled(where: str, affected: str, *, counted: bool) -> Finding:
    """GPUs whose clocks were held back. counted: by heat, by the driver's counters, for over THERMAL_RATIO of the time;
    else the driver gave reasons at a moment. affected: which, and by how much. The power limit holds clocks back at all
    large products, and is no reason to distrust a number."""
    took = "Heat held a GPU's clocks back for a while" if counted else "The driver reported slowed clocks of a GPU"
    return Finding(
        code="THROTTLED",
        severity="warning",
        message=f"{took}{where}: {affected}.",
        advice="Look at the machine's cooling and power supply, and measure when the GPU is cool.",
    )


def share(part: float, whole: float) -> str:
    """A percentage that is never rounded to 0 %."""
    percent = 100 * part / whole
    return f"{percent:.1f} %" if percent >= 0.1 or part == 0 else "under 0.1 %"
