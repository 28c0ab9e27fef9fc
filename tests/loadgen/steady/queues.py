"""Queues whose capacity is known, in virtual time, many runs at once: one request a second is what each can serve."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.steady.keeping_up import Flow
from loadgen.steady.window import Stamps

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


STEP_S, REPLY_S, PROMPT_S, PROMPTS = 0.004, 0.00016, 0.016, 8  # what a step takes, each reply in it and each prompt
Step = Callable[[Floats, Floats], Floats]  # (when steps begin, how long they would take) -> how long they take


MEAN_TOKENS = 256.5


def drawn_tokens(shape: tuple[int, int], rng: np.random.Generator) -> NDArray[np.int64]:
    return rng.integers(64, 450, shape)


class Batches(NamedTuple):
    """Runs of a server of batches: of each request (runs, n) its tokens, and when it was sent, had its first token and
    ended; infinite where it did not. steps_s: when each step of each run ended."""

    tokens: NDArray[np.int64]
    sent_s: Floats
    first_s: Floats
    done_s: Floats
    steps_s: Floats
    slots: int | None

    def stamps(self) -> list[Stamps]:
        """Each run as the window looks at it."""
        found = []
        for tokens, sent_s, first_s, done_s in zip(self.tokens, self.sent_s, self.first_s, self.done_s, strict=True):
            ok = np.flatnonzero(np.isfinite(done_s))
            done = done_s[ok]
            seen = Stamps(ok, sent_s[ok], first_s[ok], done, done, tokens[ok].astype(np.float64), self.slots)
            found.append(seen._replace(mean_tokens=MEAN_TOKENS))
        return found

    def cut(self, run: int, seen: Stamps, to_s: float) -> tuple[Floats, Floats]:
        """When each reply's tokens end and how many they are, those after `to_s` left out."""
        across, steps_s = (seen.first_s < to_s) & (seen.last_s > to_s), self.steps_s[run]
        until = np.searchsorted(steps_s, to_s, side="right") - np.searchsorted(steps_s, seen.first_s)
        return np.where(across, to_s, seen.last_s), np.where(across, until, seen.tokens).astype(np.float64)


def batches(
    tokens: NDArray[np.int64],
    places: int,
    arrived_s: Floats | None = None,
    step: Step | None = None,
    warms_up: int = 0,
) -> Batches:
    """A server that takes up to so many requests into its batch, in the order of their arrival, and gives each of them
    a token a step. Without arrivals a closed loop, whose every reply sends the next request; but not before each of the
    first `warms_up` has begun."""
    runs, n = tokens.shape
    sent_s = np.zeros((runs, n)) if arrived_s is None else arrived_s
    first_s, done_s, rows = np.full((runs, n), np.inf), np.full((runs, n), np.inf), np.arange(runs)
    left, request = np.zeros((runs, places), np.int32), np.zeros((runs, places), np.int32)
    now_s, begun, sent, clock = np.zeros(runs), np.zeros(runs, np.int64), np.zeros(runs, np.int64), []
    sent += min(places, n) if arrived_s is None else 0
    owed = np.zeros(runs, np.int64)
    while True:
        free = left == 0
        empty = free.sum(axis=1)
        if arrived_s is not None:
            idle = (empty == places) & (begun < n)
            now_s = np.where(idle, np.maximum(now_s, arrived_s[rows, np.minimum(begun, n - 1)]), now_s)
            while (more := (sent < n) & (arrived_s[rows, np.minimum(sent, n - 1)] <= now_s)).any():
                sent = sent + more
        start = np.minimum(np.minimum(sent - begun, empty), PROMPTS)
        in_batch = places - empty + start
        if not in_batch.any():
            return Batches(tokens, sent_s, first_s, done_s, np.array(clock).T, places if arrived_s is None else None)
        rank = np.cumsum(free, axis=1, dtype=np.int32)
        at, place = np.nonzero(free & (rank <= start[:, None]))
        number = begun[at] + rank[at, place] - 1
        request[at, place], left[at, place] = number, tokens[at, number]
        begun = begun + start
        takes_s = STEP_S + REPLY_S * in_batch + PROMPT_S * start
        now_s = now_s + np.where(in_batch > 0, takes_s if step is None else step(now_s, takes_s), 0.0)
        clock.append(now_s)
        first_s[at, number] = now_s[at]
        busy = left > 0
        left -= busy
        at, place = np.nonzero(busy & (left == 0))
        done_s[at, request[at, place]] = now_s[at]
        if arrived_s is None:
            owed = owed + np.bincount(at, minlength=runs)
            sends = np.where(begun >= warms_up, np.minimum(owed, n - sent), 0)
            at = np.repeat(rows, sends)
            sent_s[at, sent[at] + np.arange(len(at)) - (np.cumsum(sends) - sends)[at]] = now_s[at]
            sent, owed = sent + sends, owed - sends
