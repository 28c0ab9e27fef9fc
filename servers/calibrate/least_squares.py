"""Least squares for a few positive numbers: Levenberg-Marquardt on their logarithms, derivatives by differences.

What is fitted here (efficiencies, microseconds) is positive and spans orders of magnitude, which is why logarithms. A
residual far above `scale` counts linearly rather than squared (soft L1), so one odd run does not decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
STEP = 0.1  # of a logarithm; residuals come from simulations and jump a little
LEAST = 1e-6


def fit(
    residuals: Callable[[Floats], Floats],
    start: Sequence[float],
    scale: float = 1.0,
    reach: float | Sequence[float] = 1e3,
    rounds: int = 30,
) -> tuple[Floats, Floats]:
    """The parameters that make `residuals` small, and the residuals there. None goes farther from its start than by the
    factor `reach`, of all or of each."""
    logs = np.log(np.maximum(np.asarray(start, float), LEAST))
    low, high = logs - np.log(reach), logs + np.log(reach)
    here = residuals(np.exp(logs))
    cost = _cost(here, scale)
    damping = 1e-2
    for _ in range(rounds):
        jacobian = np.empty((len(here), len(logs)))
        for column in range(len(logs)):
            moved = logs.copy()
            moved[column] += STEP
            jacobian[:, column] = (residuals(np.exp(moved)) - here) / STEP
        weights = 1 / np.sqrt(1 + (here / scale) ** 2)
        normal = jacobian.T @ (jacobian * weights[:, None])
        gradient = jacobian.T @ (here * weights)
        before = cost
        for _ in range(8):
            step = np.linalg.lstsq(normal + damping * (np.diag(np.diag(normal)) + 1e-12), -gradient, rcond=None)[0]
            tried = np.clip(logs + np.clip(step, -1.5, 1.5), low, high)
            there = residuals(np.exp(tried))
            if _cost(there, scale) < cost:
                logs, here, cost = tried, there, _cost(there, scale)
                damping = max(damping / 5, 1e-8)
                break
            damping *= 5
        if before - cost < 1e-5 * before:
            break
    return np.exp(logs), here


def _cost(residuals: Floats, scale: float) -> float:
    return float(np.sum(np.sqrt(1 + (residuals / scale) ** 2) - 1))
