"""What the server counts of itself, and its `/metrics` in the names of the server that it stands for.

Everything is counted when it happens, tokens when they are sent. A dialect names its series: a `Sample` reads one
number (or one for each value of a label) off the telemetry, `Buckets` are a histogram of one quantity with the
server's own bounds. Times are nanoseconds inside, seconds in the text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from servers.schedulers import Scheduler

Tokens = Literal["prompt_tokens", "cached_tokens", "output_tokens", "max_tokens"]
Seconds = Literal[
    "ttft", "itl", "tpot", "mean", "e2e", "decode", "queue"
]  # tpot leaves the first token out, mean does not
Quantity = Seconds | Tokens


class RequestProgress(Protocol):
    """A request as far as it has come. Times are monotonic nanoseconds; the last two are 0 before the first token."""

    received_ns: int
    first_ns: int
    last_ns: int
    count: int
    max_tokens: int
    n_prompt_tokens: int
    n_cached_tokens: int


@dataclass(frozen=True)
class Sample:
    """A counter or gauge. `read` gives label value -> number; the key "" stands for a sample without that label."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[Telemetry], Mapping[str, float]]
    label: str = ""


@dataclass(frozen=True)
class Buckets:
    """A histogram of one quantity over its upper bounds, in seconds or tokens."""

    name: str
    help: str
    quantity: Quantity
    bounds: Sequence[float]


Series = Sample | Buckets


class Histogram:
    """Counts by upper bound, the bound included, as Prometheus has it. `unit` is how much of what is observed is 1."""

    def __init__(self, bounds: Sequence[float], unit: int) -> None:
        self.unit = unit
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum: float = 0
        self._limits = [round(bound * unit) for bound in bounds]

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._limits, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> list[str]:
        cumulative, lines = 0, []
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            cumulative += count
            lines.append(f"{name}_bucket{{{_join(labels, 'le', _number(bound))}}} {_number(cumulative)}")
        lines.append(f"{_sample(name + '_count', labels)} {_number(cumulative)}")
        lines.append(f"{_sample(name + '_sum', labels)} {_number(self.sum / self.unit)}")
        return lines


class Telemetry:
    """`labels` stand on every sample, as the server writes them: `model_name="m",engine="0"`."""

    def __init__(self, series: Sequence[Series], labels: str = "") -> None:
        self._series = series
        self._labels = labels
        self._histograms: dict[str, Histogram] = {}
        self._by_quantity: dict[Quantity, list[Histogram]] = {}
        for each in series:
            if isinstance(each, Buckets):
                histogram = Histogram(each.bounds, 1 if each.quantity.endswith("_tokens") else 1_000_000_000)
                self._histograms[each.name] = histogram
                self._by_quantity.setdefault(each.quantity, []).append(histogram)
        # Observed once a streamed event: the one histogram is at hand, whether the dialect shows it or not.
        self.itl = self._by_quantity.get("itl", [Histogram((), 1_000_000_000)])[0]
        self.running: set[RequestProgress] = set()
        self.scheduler: Scheduler | None = None  # of modelled hardware: it knows who waits and what the cache holds
        self.finished: Counter[str] = Counter()  # by finish reason: what ended as it should
        self.failed: Counter[str] = Counter()  # by reason: refused, broken on purpose, or the client left
        self.prompt_tokens = 0  # of every request whose first token was sent
        self.cached_tokens = 0
        self._output_tokens = 0

    @property
    def output_tokens(self) -> int:
        """Output tokens sent so far, of running requests too."""
        return self._output_tokens + sum(reply.count for reply in self.running)

    @property
    def n_running(self) -> int:
        return len(self.running) if self.scheduler is None else self.scheduler.running

    @property
    def n_waiting(self) -> int:
        return 0 if self.scheduler is None else self.scheduler.waiting

    @property
    def kv_usage_ratio(self) -> float:
        return 0.0 if self.scheduler is None else self.scheduler.used_tokens / self.scheduler.kv_tokens

    @property
    def preemptions(self) -> int:
        return 0 if self.scheduler is None else self.scheduler.preemptions

    @property
    def requests(self) -> int:
        """Every generation request so far."""
        return self.finished.total() + self.failed.total() + len(self.running)

    def first_token(self, reply: RequestProgress) -> None:
        self.prompt_tokens += reply.n_prompt_tokens
        self.cached_tokens += reply.n_cached_tokens
        self._observe("ttft", reply.first_ns - reply.received_ns)

    def ended(self, reply: RequestProgress, finish: str | None, failure: str = "") -> None:
        """The reply is over: complete for the reason `finish`, or else broken off by `failure`."""
        self.running.discard(reply)
        self._output_tokens += reply.count
        if finish is None:
            self.failed[failure] += 1
            return
        self.finished[finish] += 1
        self._observe("queue", 0)
        self._observe("e2e", reply.last_ns - reply.received_ns)
        self._observe("mean", (reply.last_ns - reply.received_ns) / reply.count)
        self._observe("decode", reply.last_ns - reply.first_ns)
        if reply.count > 1:
            self._observe("tpot", (reply.last_ns - reply.first_ns) / (reply.count - 1))
        self._observe("prompt_tokens", reply.n_prompt_tokens)
        self._observe("cached_tokens", reply.n_cached_tokens)
        self._observe("output_tokens", reply.count)
        self._observe("max_tokens", reply.max_tokens)

    def render(self) -> bytes:
        """Everything in Prometheus' text format 0.0.4."""
        lines = []
        for each in self._series:
            kind = "histogram" if isinstance(each, Buckets) else each.kind
            lines += [f"# HELP {each.name} {each.help}", f"# TYPE {each.name} {kind}"]
            if isinstance(each, Buckets):
                lines += self._histograms[each.name].lines(each.name, self._labels)
            else:
                for value, number in each.read(self).items():
                    labels = _join(self._labels, each.label, value) if value else self._labels
                    lines.append(f"{_sample(each.name, labels)} {_number(number)}")
        return ("\n".join(lines) + "\n").encode()

    def _observe(self, quantity: Quantity, value: float) -> None:
        for histogram in self._by_quantity.get(quantity, ()):
            histogram.observe(value)


def labels_of(**labels: str) -> str:
    """Labels in Prometheus' text, values escaped."""
    text = ""
    for name, value in labels.items():
        text = _join(text, name, value)
    return text


def _join(labels: str, name: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{labels},{name}="{escaped}"' if labels else f'{name}="{escaped}"'


def _sample(name: str, labels: str) -> str:
    return f"{name}{{{labels}}}" if labels else name


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(float(value))
