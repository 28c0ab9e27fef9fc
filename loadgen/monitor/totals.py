"""The records of a run, added up line by line into metrics as `loadgen.report.metrics` defines them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import msgspec

from loadgen.rundir import Histogram, MetricFamily, MetricSample, pace
from loadgen.rundir.outcomes import OUTCOMES

# Each bound is 2**0.5 times the one before: a quantile read off the buckets is at most 41 % off, mostly far less.
BOUNDS_S = tuple(0.0001 * 2 ** (step / 2) for step in range(44))  # 0.1 ms to 297 s
_LATENCIES = {
    "llm_dissect_time_to_first_token_seconds": "From the request's first byte to the first event with output.",
    "llm_dissect_time_per_output_token_seconds": "Mean of an output token after the first read, one value a request.",
    "llm_dissect_inter_token_latency_seconds": "Gaps between neighbouring events of a reply.",
    "llm_dissect_end_to_end_latency_seconds": "From the request's first byte to the end of the reply.",
    "llm_dissect_send_lag_seconds": "How late a request was sent.",
}


class CountedRecord(msgspec.Struct):
    """What is needed of a line of records; the header and the footers are lines without an id."""

    id: int | None = None
    phase: str = ""
    outcome: str = ""
    scheduled_ns: int = 0
    sent_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    done_ns: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    first_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    events: int = 0
    itl_us: list[int] = []
    client: dict[str, object] | None = None  # a footer's
    t0_monotonic_ns: int | None = None  # a header's


class _Latency:
    """One histogram, in whatever unit its bounds are."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, tuple[str, float]] = {}

    def add(self, value: float, request: int) -> None:
        bucket = bisect_left(self._bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        self.exemplars[bucket] = (str(request), value)

    def add_all(self, values: Sequence[float]) -> None:
        counts, bounds = self.counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.sum += sum(values)


class Totals:
    """Everything that the records of a run say, added up as they come. Measured requests only."""

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self._replies_ns = 0
        self.prompt_tokens = self.output_tokens = self.events = 0
        self.clients: list[object] = []  # how each that is done ended
        self._first_sent_ns = self._last_done_ns = -1
        bounds_us = [bound * 1e6 for bound in BOUNDS_S]
        self._latencies = {name: _Latency(BOUNDS_S) for name in _LATENCIES}
        self._gaps_us = _Latency(bounds_us)

    def add(self, record: CountedRecord) -> None:
        if record.client is not None:
            self.clients.append(record.client.get("state"))
        if record.id is None or record.phase != "measured" or record.outcome not in self.outcomes:
            return
        self.outcomes[record.outcome] += 1
        if record.sent_ns is not None and (self._first_sent_ns < 0 or record.sent_ns < self._first_sent_ns):
            self._first_sent_ns = record.sent_ns
        self._last_done_ns = max(self._last_done_ns, -1 if record.done_ns is None else record.done_ns)
        if record.outcome != "ok":
            return
        self.prompt_tokens += record.prompt_tokens or 0
        self.output_tokens += record.output_tokens or 0
        self.events += record.events
        if record.sent_ns is not None and record.done_ns is not None:
            self._replies_ns += record.done_ns - record.sent_ns
        for name, value in _seconds(record):
            self._latencies[name].add(value, record.id)
        self._gaps_us.add_all(record.itl_us)

    @property
    def tokens_per_event(self) -> float:
        """Tokens an event over the requests that ended ok; 1 before any did."""
        return self.output_tokens / self.events if self.events and self.output_tokens else 1.0

    @property
    def events_per_reply(self) -> float | None:
        """In the mean, of the requests that ended ok."""
        return self.events / self.outcomes["ok"] if self.outcomes["ok"] else None

    @property
    def reply_s(self) -> float | None:
        """How long a request took, in the mean, of those that ended ok."""
        return self._replies_ns / 1e9 / self.outcomes["ok"] if self.outcomes["ok"] else None

    def families(self) -> Iterator[MetricFamily]:
        yield MetricFamily(
            "llm_dissect_requests", "counter", "Measured requests that are over, by outcome.",
            [MetricSample(count, {"outcome": outcome}) for outcome, count in self.outcomes.items()],
        )  # fmt: skip
        for name, help_text, tokens in (
            ("llm_dissect_prompt_tokens", "Tokens of the prompts, as the server counts.", self.prompt_tokens),
            ("llm_dissect_output_tokens", "Tokens of the replies, as the server counts.", self.output_tokens),
        ):
            yield MetricFamily(name, "counter", help_text, [MetricSample(tokens)])
        yield MetricFamily("llm_dissect_events", "counter", "Events that carried output.", [MetricSample(self.events)])
        if self._first_sent_ns >= 0 and self._last_done_ns > self._first_sent_ns:
            seconds = (self._last_done_ns - self._first_sent_ns) / 1e9
            yield MetricFamily(
                "llm_dissect_measured_seconds",
                "gauge",
                "From the first request to the last end.",
                [MetricSample(seconds)],
            )
        for name, help_text in _LATENCIES.items():
            latency, unit = self._latencies[name], 1.0
            if name == "llm_dissect_inter_token_latency_seconds":
                latency, unit = self._gaps_us, 1e-6
            bounds, counts, exemplars = list(BOUNDS_S), list(latency.counts), dict(latency.exemplars)
            histogram = Histogram(bounds, counts, latency.sum * unit, exemplars=exemplars)
            yield MetricFamily(name, "histogram", help_text, histograms=[histogram])


def _seconds(record: CountedRecord) -> Iterator[tuple[str, float]]:
    sent, first, last, done = record.sent_ns, record.first_token_ns, record.last_token_ns, record.done_ns
    if sent is None:
        return
    yield "llm_dissect_send_lag_seconds", (sent - record.scheduled_ns) / 1e9
    if first is not None:
        yield "llm_dissect_time_to_first_token_seconds", (first - sent) / 1e9
    if done is not None:
        yield "llm_dissect_end_to_end_latency_seconds", (done - sent) / 1e9
    tokens, at_first = record.output_tokens or 0, record.first_tokens
    if at_first is msgspec.UNSET:  # of an older version
        at_first = pace.first_tokens(record.output_tokens, record.itl_us)
    if first is not None and last is not None and at_first is not None and tokens > at_first:
        yield "llm_dissect_time_per_output_token_seconds", (last - first) / (tokens - at_first) / 1e9
