"""What the files of a run say that cannot be, since no run leaves such: they were changed, mixed up, or written by a
program that was wrong. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.rundir import Manifest
from loadgen.rundir.records import SLACK_NS, ClientFacts, Table


def of_records(table: Table, measured: Table, facts: Sequence[ClientFacts], manifest: Manifest) -> list[str]:
    """Clauses. measured: the part of `table` that counts."""
    warmed = len(table) - len(measured)
    return [
        *_numbers(measured, warmed, facts, manifest), *_clients(facts), *_outcomes(table),
        *_tokens(measured, manifest), *_orders(table),
    ]  # fmt: skip


def _numbers(measured: Table, warmed: int, facts: Sequence[ClientFacts], manifest: Manifest) -> Iterator[str]:
    planned, clients = manifest.requests_planned, manifest.client_processes
    if planned is not None and len(measured) > planned:
        yield f"{len(measured)} requests are recorded and {planned} were planned"
    if clients is not None and len(facts) > clients:
        yield f"{len(facts)} client processes wrote their last line and {clients} were started"
    warmup = manifest.config.get("warmup")
    if type(warmup) is int and warmed > warmup:
        yield f"{warmed} requests of the warm-up are recorded and {warmup} were asked for"


def _clients(facts: Sequence[ClientFacts]) -> Iterator[str]:
    for fact in facts:
        lags_ms = (fact.loop_lag_p50_ms, fact.loop_lag_p99_ms, fact.loop_lag_max_ms)
        if min(*lags_ms, fact.wall_s, fact.cpu_s, fact.events, fact.connections) < 0:
            yield "a client process says numbers below zero of itself"
            return


def _outcomes(table: Table) -> Iterator[str]:
    bad_status = table.ok & (table.status != -1) & (table.status != 200)
    if bad_status.any():
        yield f"{_of(table, bad_status)} ended ok with status {int(table.status[bad_status][0])}"
    unsent = table.ok & ((table.sent_ns == -1) | (table.done_ns == -1))
    if unsent.any():
        yield f"{_of(table, unsent)} ended ok and was never sent, or never ended"


def _tokens(measured: Table, manifest: Manifest) -> Iterator[str]:
    yield from (f"{_subject(*those)} {odd}" for odd, those in measured.odd.items())
    failed = np.isin(measured.id, list(measured.errors)) & measured.ok
    if failed.any():
        yield f"{_of(measured, failed)} ended ok and has an error"
    first, output = measured.first_tokens, measured.output_tokens
    beyond = (first != -1) & ((first < 1) | ((output != -1) & (first >= np.maximum(output, 2))))
    if beyond.any():
        yield f"{_of(measured, beyond)} had more tokens in its first read than in all"
    unseen = measured.ok & (measured.events == 0) & (output > 0) & (measured.asked_tokens > 0)
    if manifest.config.get("stream") is True and unseen.any():
        yield f"{_of(measured, unseen)} ended ok, was streamed, and has no event"


def _orders(table: Table) -> Iterator[str]:
    """A request's stamps come in their order, as far as there are any."""
    stamps = (
        ("due", table.scheduled_ns), ("sent", table.sent_ns), ("first token", table.first_token_ns),
        ("last token", table.last_token_ns), ("done", table.done_ns),
    )  # fmt: skip
    latest, named = table.scheduled_ns.copy(), np.zeros(len(table), np.int8)
    for place, (name, at_ns) in enumerate(stamps):
        there = (at_ns != -1) | (place == 0)
        early = there & (at_ns < latest - SLACK_NS)
        if early.any():
            before = stamps[int(named[np.flatnonzero(early)[0]])][0]
            yield f"{_of(table, early)} has its '{name}' before its '{before}'"
        later = there & ~early
        latest, named = np.where(later, at_ns, latest), np.where(later, place, named)


def _of(table: Table, chosen: NDArray[np.bool_]) -> str:
    """The requests, as a subject."""
    return _subject(int(table.id[chosen][0]), int(chosen.sum()))


def _subject(first: int, count: int) -> str:
    return f"request {first}" if count == 1 else f"each of {count} requests, such as {first},"
