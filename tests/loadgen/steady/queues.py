"""Queues whose capacity is known, in virtual time, many runs at once: one request a second is what each can serve."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from loadgen.steady.keeping_up import Flow

LAWS = ("fixed", "uniform", "lognormal")  # of lengths, 1 in the mean

Floats = NDArray[np.float64]


def lengths(law: str, shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Coefficients of variation of 0, 0.51 and 0.8."""
    if law == "fixed":
        return np.ones(shape)
    if law == "uniform":
        return rng.uniform(0.125, 1.875, shape)
    sigma = math.sqrt(math.log(1 + 0.8**2))
    return rng.lognormal(-(sigma**2) / 2, sigma, shape)


def arrivals(rate: float, shape: tuple[int, int], rng: np.random.Generator, cv: float = 1.0) -> Floats:
    """Poisson, or of gaps of another coefficient of variation; from 0 on."""
    gaps = rng.gamma(1 / cv**2, cv**2 / rate, shape) if cv else np.full(shape, 1 / rate)
    arrived_s: Floats = np.cumsum(gaps, axis=1) - gaps[:, :1]
    return arrived_s


def slots(arrived_s: Floats, work: Floats, count: int) -> tuple[Floats, Floats]:
    """A server of so many slots, each of which serves one request at a time, in the order of their arrival: when each
    request (runs, n) begins and ends."""
    runs, n = arrived_s.shape
    free_s, rows = np.zeros((runs, count)), np.arange(runs)
    begin_s, end_s = np.empty((runs, n)), np.empty((runs, n))
    for at in range(n):
        slot = free_s.argmin(axis=1)
        begin_s[:, at] = np.maximum(arrived_s[:, at], free_s[rows, slot])
        end_s[:, at] = free_s[rows, slot] = begin_s[:, at] + work[:, at] * count
    return begin_s, end_s


def flows(rho: float, law: str, n: int, runs: int, seed: int = 0, count: int = 8) -> list[Flow]:
    """Runs of `n` Poisson arrivals of `rho` a second at a server of slots."""
    rng = np.random.default_rng((seed, round(1000 * rho), n, LAWS.index(law)))
    arrived_s, work = arrivals(rho, (runs, n), rng), lengths(law, (runs, n), rng)
    begin_s, end_s = slots(arrived_s, work, count)
    return [Flow(*each, rate_per_s=rho, mean_tokens=1.0) for each in zip(arrived_s, begin_s, end_s, work, strict=True)]
