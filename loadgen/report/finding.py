"""What a verdict on a run is made of: findings, each with what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Severity = Literal["info", "warning", "invalid"]

_ORDER: tuple[Severity, ...] = ("invalid", "warning", "info")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    severity: Severity
    message: str
    advice: str


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def share(part: float, whole: float) -> str:
    """A percentage that is never rounded to 0 %."""
    percent = 100 * part / whole
    return f"{percent:.1f} %" if percent >= 0.1 or part == 0 else "under 0.1 %"
