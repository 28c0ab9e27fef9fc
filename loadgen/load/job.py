"""What the clients of a run are told: plain values that any process can be sent, drawn and checked before the clock
starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from backends.protocol import Backend, Sampling
from loadgen.load import arrivals
from loadgen.load.prompts import Dataset, Text, TokenIds, Workload, tokenizer_count
from loadgen.target import Target


class Progressing(Protocol):
    """A request under way, as its timeouts see it: monotonic ns, -1 where that has not happened yet."""

    sent_ns: int
    last_read_ns: int


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds. `idle_s` is the longest silence within a reply."""

    connect_s: float
    first_byte_s: float
    idle_s: float
    total_s: float

    def exceeded(self, exchange: Progressing, now: int) -> str | None:
        """Which limit `exchange` is over at monotonic `now` (ns), as a sentence."""
        sent, last = exchange.sent_ns, exchange.last_read_ns
        if sent >= 0 and now - sent > self.total_s * 1e9:
            return f"no complete reply within {self.total_s:g} s"
        if sent >= 0 and last < 0 and now - sent > self.first_byte_s * 1e9:
            return f"no first byte within {self.first_byte_s:g} s"
        if last >= 0 and now - last > self.idle_s * 1e9:
            return f"silent for {self.idle_s:g} s within the reply"
        return None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one process sends: its share of the streams in a closed loop, else every `shards`-th request."""

    run_id: str
    version: str
    model: str
    sampling: Sampling
    requests: int | None
    duration_s: float | None
    concurrency: int | None  # of the whole run; None: open loop
    warmup: int
    seed: int
    timeouts: Timeouts
    shard: int = 0
    shards: int = 1

    @property
    def streams(self) -> int:
        """How many requests of a closed loop this process keeps in flight."""
        return len(range(self.shard, self.concurrency or 0, self.shards))

    def numbers(self) -> Iterator[int]:
        """The numbers of its requests, ascending, without end."""
        cycle = self.concurrency or self.shards
        return (number for number in itertools.count() if number % cycle % self.shards == self.shard)


class PromptSource(msgspec.Struct, frozen=True, kw_only=True):
    """How to build the workload; `offset`: tokens that the server adds to a text prompt."""

    input_tokens: int
    output_tokens: int
    vocab_size: int | None = None
    dataset: str | None = None
    tokenizer: str | None = None
    offset: int = 0

    def build(self, backend: Backend, job_seed: int, warmup: int) -> Workload:
        if self.dataset is not None:
            return Dataset(Path(self.dataset), self.output_tokens, backend.prompt_kind, warmup)
        if backend.prompt_kind == "token_ids":
            sizes = () if self.vocab_size is None else (self.vocab_size,)
            return TokenIds(job_seed, self.input_tokens, self.output_tokens, *sizes)
        count = None if self.tokenizer is None else tokenizer_count(self.tokenizer)
        text = Text(job_seed, self.input_tokens, self.output_tokens, count)
        text.offset = self.offset
        return text


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a client process needs to know; plain values, so that it can be sent to one."""

    job: Job
    backend: str
    target: Target
    transport: str
    fresh: bool
    kernel_timestamps: bool
    arrival: arrivals.Arrival
    prompts: PromptSource

    @property
    def streams_at_once(self) -> int:
        """Streams open together at the least: the burst, or the closed loop's concurrency."""
        job = self.job
        if job.concurrency is not None:
            return min(job.concurrency, job.requests or job.concurrency)
        return (job.requests or 0) if self.arrival.kind == "burst" else 1

    @property
    def requests_planned(self) -> int | None:
        """How many requests the run will send; None when that depends on the server."""
        job = self.job
        if job.concurrency is not None:
            return job.requests if job.duration_s is None else None
        return len(arrivals.draw(self.arrival, job.requests, job.duration_s, job.seed))

    def share(self, shard: int, shards: int) -> Plan:
        """The part of one of `shards` processes."""
        return msgspec.structs.replace(self, job=msgspec.structs.replace(self.job, shard=shard, shards=shards))
